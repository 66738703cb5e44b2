"""Test that later changes of a file do not change the map that was loaded from it."""

import json
import os

import networkx as nx
import numpy as np
import pytest
import torch

import lens_mix as lm
from tests.damage import damage_bytes, damage_json, damage_tensors

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
    with pytest.raises(ValueError, match="which was changed after it was written"):
        lm.MixingMap.load(path)


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


def test_a_damaged_map_is_an_error_when_it_is_opened(tmp_path):
    scores = torch.rand(2, 2, 3, 3, dtype=torch.float64).tril()
    explained = [
        {"prediction": "b", "probability": 0.5},
        {},
        {"target": "log probability of 'c'", "value": 2.0},
    ]
    whole = lm.MixingMap(
        scores,
        tokens=TOKENS,
        causal=True,
        residual_shares=torch.full((2, 3), 0.5),
        parameters={"name": [1, 2.5, None]},
        provenance={"model": "m", "prompt": "abc"},
        notes=("a note",),
        explained=explained,
    )
    path, bad = tmp_path / "map.safetensors", tmp_path / "bad.safetensors"
    whole.save(path)
    refused = []

    def check(name, may_differ=False):
        try:
            read = lm.MixingMap.load(bad)
        except ValueError as problem:
            assert str(problem).startswith("path: expected a map that MixingMap.save wrote"), name
            refused.append(name)
        else:
            repr(read), read.top(2), read.to_dataframe(), lm.rollout(read.merge_heads(), residual=0.5)
            for field in () if may_differ else ("tokens", "parameters", "provenance", "notes", "explained"):
                assert getattr(read, field) == getattr(whole, field), name
            if not may_differ:
                assert torch.equal(read.scores, whole.scores), name
                assert torch.equal(read.residual_shares, whole.residual_shares), name

    tried = 0
    for name, content in damage_bytes(path.read_bytes(), count=200):
        bad.write_bytes(content)
        check(name)
        tried += 1
    for name in damage_tensors(path, bad):
        # Another program may have written a file without a digest: it is checked as a map made by hand.
        check(name, may_differ=name.endswith("no digest"))
        tried += 1
    assert len(refused) > 0.8 * tried > 200


@pytest.mark.parametrize("ending", ["json", "graphml"])
def test_a_damaged_graph_is_an_error_when_it_is_opened(tmp_path, ending):
    graph = map_of(1).merge_heads().to_networkx()
    graph.graph["tokens"] = ["a", '"lens_mix.digest": "0"', "<!--lens_mix.digest:"]
    path, bad = tmp_path / f"graph.{ending}", tmp_path / f"bad.{ending}"
    lm.graphs.save_graph(graph, path)
    assert nx.utils.graphs_equal(lm.graphs.load_graph(path), graph)
    damaged = list(damage_bytes(path.read_bytes(), count=300))
    if ending == "json":
        damaged += [(name, json.dumps(it).encode()) for name, it in damage_json(json.loads(path.read_text()))]
    refused = 0
    for name, content in damaged:
        bad.write_bytes(content)
        try:
            read = lm.graphs.load_graph(bad)
        except ValueError as problem:
            assert str(problem).startswith("path: expected a graph written by save_graph"), name
            refused += 1
        else:
            assert nx.utils.graphs_equal(read, graph), name
    assert refused > 0.9 * len(damaged) > 200
