"""Test that later changes of a file do not change the map that was loaded from it."""

import json
import os

import numpy as np
import pytest
import torch

import lens_mix as lm

TOKENS = ["a", "b", "c"]


def map_of(value, layers=2):
    return lm.MixingMap(torch.full((layers, 2, 3, 3), float(value)), tokens=TOKENS, residual_shares=None)


class MappedFile:
    """Replace `safe_open` by that of safetensors before 0.8, whose tensors share the file's memory."""

    def __init__(self, path, framework, device):
        self.bytes = np.memmap(path, dtype=np.uint8, mode="r+")
        self.start = 8 + int.from_bytes(self.bytes[:8].tobytes(), "little")
        self.header = json.loads(self.bytes[8 : self.start].tobytes())

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        pass

    def metadata(self):
        return self.header["__metadata__"]

    def keys(self):
        return self.header.keys() - {"__metadata__"}

    def get_tensor(self, name):
        first, last = (self.start + offset for offset in self.header[name]["data_offsets"])
        numbers = np.asarray(self.bytes[first:last]).view(np.float32)
        return torch.from_numpy(numbers).reshape(self.header[name]["shape"])


@pytest.fixture
def mapped(monkeypatch):
    monkeypatch.setattr("safetensors.safe_open", MappedFile)


def test_a_loaded_map_has_its_own_memory(tmp_path, mapped):
    path = tmp_path / "map.safetensors"
    map_of(1).save(path)
    loaded = lm.MixingMap.load(path)
    # The bytes are written into the same file, as another program would; `save` would replace the file.
    with open(path, "r+b") as file:
        file.seek(-4 * loaded.scores.numel(), os.SEEK_END)
        file.write(bytes(4 * loaded.scores.numel()))
    assert torch.equal(loaded.scores, map_of(1).scores)
    assert torch.equal(lm.MixingMap.load(path).scores, map_of(0).scores)


def test_a_loaded_map_outlives_its_file(tmp_path, mapped):
    path = tmp_path / "map.safetensors"
    map_of(1, layers=200).save(path)
    loaded = lm.MixingMap.load(path)
    os.truncate(path, 1)
    assert loaded.scores.sum() == 200 * 2 * 9
    path.unlink()
    assert loaded.scores.sum() == 200 * 2 * 9


def test_saving_over_the_file_of_a_loaded_map(tmp_path, mapped):
    path = tmp_path / "map.safetensors"
    map_of(1).save(path)
    loaded = lm.MixingMap.load(path)
    map_of(2).save(path)
    assert torch.equal(loaded.scores, map_of(1).scores)
    loaded = lm.MixingMap.load(path)
    loaded.merge_heads().save(path)
    assert torch.equal(loaded.scores, map_of(2).scores)
    assert torch.equal(lm.MixingMap.load(path).scores, map_of(2).merge_heads().scores)
    assert os.listdir(tmp_path) == ["map.safetensors"]


def test_a_map_whose_memory_is_the_files_is_saved_over_it(tmp_path):
    """Save a map, made by hand from a mapped file, over that file: its old content must last until then."""
    path = tmp_path / "map.safetensors"
    map_of(1).save(path)
    scores = MappedFile(path, "pt", "cpu").get_tensor("scores")
    lm.MixingMap(scores, tokens=TOKENS).replace(method="a longer name than before").save(path)
    assert torch.equal(lm.MixingMap.load(path).scores, map_of(1).scores)
    assert torch.equal(scores, map_of(1).scores)


def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "map.safetensors"
    map_of(1).save(path)

    def full_disk(tensors, file, metadata):
        with open(file, "wb") as begun:
            begun.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        map_of(2).save(path)
    assert torch.equal(lm.MixingMap.load(path).scores, map_of(1).scores)
    assert os.listdir(tmp_path) == ["map.safetensors"]


@pytest.mark.parametrize("ending", ["json", "graphml"])
def test_a_graph_that_cannot_be_written_leaves_the_old_file(tmp_path, ending, monkeypatch):
    graph = map_of(1).merge_heads().to_networkx()
    path = tmp_path / f"graph.{ending}"
    lm.graphs.save_graph(graph, path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        lm.graphs.save_graph(graph, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]
