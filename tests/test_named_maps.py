from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix import named_maps
from lens_mix.named_maps import _has_all_rows, compute_maps, find_methods, read_names
from tests.matrix import build_or_skip
from tests.tiny_models import available, bridge, hooked_encoder, tokens, toy_tokenizer


@pytest.fixture(scope="module")
def encoder():
    return bridge("bert") if available(bridge, "bert") else build_or_skip(hooked_encoder)


TEXT = "w3 w14 w5 w9"


def test_maps_are_those_of_run_and_input_map_in_the_order_of_the_names(model):
    names = ["value_zeroing", "input_map", "attention", "gim"]
    maps = compute_maps(model, TEXT, names, progress=None)
    assert list(maps) == names
    for name in ("value_zeroing", "attention"):
        assert maps[name].scores.equal(lm.run(model, TEXT, name).scores)
    assert maps["gim"].scores.equal(lm.run(model, TEXT, "gim", queries=[-1]).scores)
    assert maps["input_map"].scores.equal(lm.input_map(model, TEXT).scores)


def test_rows_and_layers(model):
    count = len(lm.run(model, TEXT, "attention").tokens)
    cases: list[tuple[dict, list[int]]] = [
        ({}, [1, count]),
        ({"all_rows": True}, [count, count]),
        ({"queries": [0, 2]}, [2, 2]),
    ]
    for options, rows in cases:
        maps = compute_maps(model, TEXT, ["gim", "attention"], **options)
        assert [len(m.query_positions) for m in maps.values()] == rows
    maps = compute_maps(model, TEXT, ["gim", "attention", "input_map"], layers=[0])
    assert maps["attention"].layer_labels == [0]
    assert maps["gim"].layer_labels == lm.run(model, TEXT, "gim").layer_labels


def test_a_target_is_explained_by_input_map_and_the_methods_that_have_one(model):
    maps = compute_maps(model, TEXT, ["input_map", "gim", "attention"], target="w7", progress=None)
    assert list(maps) == ["input_map", "gim", "attention"]
    expected = lm.run(model, TEXT, lm.methods.Gim(target="w7"), queries=[-1])
    assert maps["gim"].scores.equal(expected.scores)
    assert maps["input_map"].scores.equal(lm.input_map(model, TEXT, target="w7").scores)
    assert maps["attention"].scores.equal(lm.run(model, TEXT, "attention").scores)


def test_methods_that_cost_passes_for_each_row_have_the_last_row_only():
    few = {name for name in ("input_map", *lm.METHODS) if not _has_all_rows(name)}
    assert {"input_map", "gim", "token_patching", "input_gradients"} <= few
    assert not few & {"attention", "value_zeroing", "alti", "decompx", "occlusion"}
    assert _has_all_rows("somebody's own")


def test_a_prompt_with_a_mask_has_the_row_of_the_mask():
    tokenizer = toy_tokenizer()
    tokenizer.mask_token = "w30"
    model = build_or_skip(bridge, "bert", tokenizer=tokenizer)
    prompt = torch.tensor([5, 9, tokenizer.mask_token_id, 7, 31])
    maps = compute_maps(model, prompt, ["input_map", "gim"], progress=None)
    assert [m.query_positions for m in maps.values()] == [[2], [2]]


def test_maps_per_head(model):
    heads = compute_maps(model, TEXT, ["attention", "value_zeroing"], per_head=True)
    assert all(m.has_heads for m in heads.values())
    with pytest.raises(ValueError, match=r"whose maps have heads \(attention, .*got alti"):
        read_names(["attention", "alti"], per_head=True)
    with pytest.raises(ValueError, match="got input_map"):
        read_names(["input_map"], per_head=True)


def test_names_that_are_wrong():
    for names, words in {
        (): "at least one method",
        ("altii",): "did you mean 'alti'",
        ("input_map", "input_map"): "got input_map twice",
        ("alti", "alti"): "one twice",
    }.items():
        with pytest.raises(ValueError, match=words):
            read_names(names)


def test_a_method_by_its_other_name():
    named = read_names(["ValueZeroing", "input_map"])
    assert named == {"value_zeroing": lm.methods.ValueZeroing(), "input_map": None}


def test_the_method_of_input_map(model):
    found = find_methods(model, ["input_map", "alti"])
    assert list(found) == ["input_map", "alti"]
    m = lm.input_map(model, TEXT)
    assert found["input_map"].name == m.method
    assert lm.run(model, TEXT, found["input_map"], queries=[-1]).scores.equal(m.scores)


def test_the_defaults_are_methods():
    assert set(named_maps.DEFAULT_METHODS) <= {"input_map", *lm.METHODS}
    assert named_maps.DEFAULT_METHODS[0] == "input_map"


def test_an_encoder_has_its_first_row_by_default(encoder):
    prompt = tokens(encoder, 1, 6, 1)[0]
    maps = compute_maps(encoder, prompt, ["input_map", "input_gradients", "attention"], progress=None)
    assert [m.query_positions for m in maps.values()] == [[0], [0], list(range(6))]
    assert maps["input_map"].method == "decompx"


def test_the_method_of_input_map_is_not_there_twice(encoder):
    assert list(find_methods(encoder, ["decompx", "alti", "input_map"])) == ["input_map", "alti"]
