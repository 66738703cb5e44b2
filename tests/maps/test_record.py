"""Test `MixingMap`: which fields it accepts, which errors it raises, and what its methods return."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lens_mix.aggregation.rollout import rollout
from lens_mix.maps import MixingMap, Source, words
from lens_mix.maps.explained import Explained
from tests.random_maps import random_attention

TOKENS = ["<|endoftext|>", "The", " Eif", "fel", " Tower"]


def attention(layers=2, heads=None, size=5, causal=True, seed=0, dtype=torch.float64):
    return random_attention(layers, heads, size, causal=causal, seed=seed).to(dtype)


def make(**changes):
    fields = {"scores": attention(), "tokens": TOKENS, "method": "attention", "causal": True}
    return MixingMap(**{**fields, **changes})


# ---------------------------------------------------------------------- construction


def test_from_tensor_array_and_list_alike():
    scores = attention()
    for given_scores in (scores, scores.numpy(), scores.tolist(), list(scores)):
        mixing_map = make(scores=given_scores)
        assert mixing_map.scores.dtype == torch.float64
        assert torch.equal(mixing_map.scores, scores)


def test_defaults():
    mixing_map = MixingMap(scores=[[[1, 0], [1, 1]]], tokens=("a", "b"))
    assert mixing_map.scores.dtype == torch.float32
    assert mixing_map.tokens == ["a", "b"]
    assert (mixing_map.method, mixing_map.causal, mixing_map.mask) == ("custom", False, None)
    assert (mixing_map.kind, mixing_map.layers, mixing_map.residual) == ("layer", [0], None)
    assert mixing_map.parameters == {} == mixing_map.provenance
    assert mixing_map.notes == ()


def test_scores_are_detached_and_keep_their_dtype():
    scores = attention().bfloat16().requires_grad_()
    mixing_map = make(scores=scores)
    assert not mixing_map.scores.requires_grad
    assert mixing_map.scores.dtype == torch.bfloat16


def test_an_array_is_copied():
    array = attention().numpy().copy()
    mixing_map = make(scores=array)
    array[:] = 0
    assert mixing_map.scores.sum() > 0


def test_frozen_and_compared_by_identity():
    mixing_map = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        mixing_map.method = "other"
    assert mixing_map != make()
    assert len({mixing_map, make()}) == 2


def test_visible():
    triangle = torch.ones(5, 5, dtype=torch.bool).tril()
    assert torch.equal(make().visible(), triangle.expand(2, 5, 5))
    assert make(causal=False).visible().all()
    window = triangle & ~triangle.tril(-2)
    masks = torch.stack([triangle, window])
    scores = attention() * masks
    assert torch.equal(make(scores=scores, mask=masks).visible(), masks)
    assert torch.equal(make(scores=scores, mask=masks.int().numpy()).visible(), masks)


def test_cross_attention_shape():
    mixing_map = MixingMap(scores=torch.rand(3, 2, 4), tokens=["a", "b"], key_tokens=list("wxyz"))
    assert mixing_map.key_labels == list("wxyz")


BAD_FIELDS = {
    "a matrix": ({"scores": torch.rand(5, 5)}, ValueError, r"3 axes .* got 2 with shape \(5, 5\)"),
    "five axes": ({"scores": torch.rand(1, 1, 1, 5, 5)}, ValueError, "got 5"),
    "ragged": ({"scores": [[[1.0], [1.0, 2.0]]]}, ValueError, "evenly nested"),
    "words": ({"scores": "attention"}, TypeError, "expected numbers"),
    "nothing": ({"scores": None}, TypeError, "expected numbers"),
    "complex": ({"scores": torch.zeros(1, 5, 5, dtype=torch.complex64)}, TypeError, "real numbers"),
    "no layers": ({"scores": torch.zeros(0, 5, 5)}, ValueError, "no empty axis"),
    "not square": ({"scores": torch.zeros(1, 5, 6)}, ValueError, "key_tokens="),
    "NaN": ({"scores": torch.full((1, 5, 5), torch.nan)}, ValueError, "layer 0, query 0, key 0"),
    "infinity": ({"scores": np.full((1, 2, 5, 5), np.inf)}, ValueError, "head 0"),
    "too few tokens": ({"tokens": ["a"]}, ValueError, "tokens: expected 5, .* got 1"),
    "tokens as text": ({"tokens": "abcde"}, TypeError, "got 'abcde'"),
    "token ids": ({"tokens": [1, 2, 3, 4, 5]}, TypeError, "got int at position 0"),
    "too few key tokens": ({"causal": False, "key_tokens": ["a"]}, ValueError, "key_tokens: expected 5"),
    "above the diagonal": ({"scores": torch.ones(2, 5, 5)}, ValueError, "layer 0, query 0, key 1, .* above"),
    "causal spans": ({"key_tokens": TOKENS}, ValueError, "causal: expected False"),
    "mask shape": ({"mask": torch.ones(4, 4, dtype=torch.bool)}, ValueError, r"got \(4, 4\)"),
    "mask of weights": ({"mask": torch.rand(5, 5)}, TypeError, "mask: expected booleans"),
    "mask not causal": (
        {"mask": torch.ones(5, 5, dtype=torch.bool)},
        ValueError,
        "query 0, key 1",
    ),
    "hidden weight": ({"mask": torch.eye(5, dtype=torch.bool)}, ValueError, "query 1, key 0, .* mask hides"),
    "residual": ({"residual": 1.5}, ValueError, "residual: expected a number from 0 to 1, got 1.5"),
    "residual NaN": ({"residual": float("nan")}, ValueError, "got nan"),
    "residual text": ({"residual": "half"}, TypeError, "got 'half'"),
    "kind": ({"kind": "head"}, ValueError, "'layer' or 'input'"),
    "method": ({"method": 3}, TypeError, "method: expected a name"),
    "layer labels": ({"layers": [1]}, ValueError, "expected 2 labels"),
    "repeated labels": ({"layers": [1, 1]}, ValueError, "different labels"),
    "labels as text": ({"layers": ["a", "b"]}, TypeError, "whole number, got 'a'"),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_bad_fields(case):
    changes, error, message = BAD_FIELDS[case]
    with pytest.raises(error, match=message):
        make(**changes)


def test_hidden_weight_is_named_by_its_layer_label():
    scores = attention()
    scores[1, 2, 3] = 1e-30
    with pytest.raises(ValueError, match="layer 7, query 2, key 3"):
        make(scores=scores, layers=[6, 7])


# ---------------------------------------------------------------------- normalized rows


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(-150, 150), st.integers(0, 10**6))
def test_normalized_rows_sum_to_one_at_any_scale(layers, size, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    raw = (0.01 + torch.rand(layers, size, size, generator=generator, dtype=torch.float64)) * 10.0**exponent
    shares = MixingMap(scores=raw, tokens=["t"] * size).normalized().scores
    assert torch.allclose(shares.sum(-1), torch.ones(layers, size, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(shares * raw.sum(-1, keepdim=True), raw, rtol=1e-14)


def test_normalized_large_float32_rows_do_not_overflow():
    shares = MixingMap(scores=torch.full((1, 4, 4), 3e38), tokens=["t"] * 4).normalized().scores
    assert torch.equal(shares, torch.full((1, 4, 4), 0.25))


def test_normalized_all_zero_row_stays_zero_and_is_noted():
    scores = attention(heads=2)
    scores[1, 0, 3] = 0
    shares = make(scores=scores, layers=[4, 5]).normalized()
    assert torch.equal(shares.scores[1, 0, 3], torch.zeros(5, dtype=torch.float64))
    assert shares.notes == ("all-zero rows stay zero: layer 5 head 0 query 3",)
    assert shares.normalized().notes == shares.notes
    assert make().normalized().notes == ()


def test_normalized_is_float32_or_better():
    assert make(scores=attention(dtype=torch.float16)).normalized().scores.dtype == torch.float32
    assert make(scores=attention(dtype=torch.float32)).normalized().scores.dtype == torch.float32


def test_normalized_negative():
    scores = torch.tensor([[[1.0, 0.0], [3.0, -1.0]]])
    mixing_map = MixingMap(scores=scores, tokens=["a", "b"])
    with pytest.raises(ValueError, match=r"got -1;.*negative='clip'"):
        mixing_map.normalized()
    assert mixing_map.normalized("clip").scores[0, 1].tolist() == [1, 0]
    assert mixing_map.normalized("absolute").scores[0, 1].tolist() == [0.75, 0.25]
    with pytest.raises(ValueError, match="'refuse', 'clip' or 'absolute'"):
        mixing_map.normalized("square")
    assert mixing_map.scores[0, 1, 1] == -1


# ---------------------------------------------------------------------- heads


def test_merge_heads():
    mixing_map = make(scores=attention(heads=3))
    scores = mixing_map.scores
    assert torch.allclose(mixing_map.merge_heads().scores, scores.sum(1) / 3)
    assert torch.equal(mixing_map.merge_heads("max").scores, scores.max(1).values)
    expected = 0.25 * scores[:, 0] + 0.75 * scores[:, 2]
    assert torch.allclose(mixing_map.merge_heads(weights=[1, 0, 3]).scores, expected)
    expected = torch.stack([scores[0, 1], scores[1, 2]])
    by_layer = torch.tensor([[0, 2, 0], [0, 0, 5]])
    assert torch.allclose(mixing_map.merge_heads(weights=by_layer).scores, expected)
    assert make().merge_heads().scores.shape == (2, 5, 5)


@pytest.mark.parametrize("weights", [[1, 2], [-1, 1, 1], [0, 0, 0], [float("nan"), 1, 1]])
def test_merge_heads_with_bad_weights(weights):
    with pytest.raises(ValueError, match="weights: expected"):
        make(scores=attention(heads=3)).merge_heads(weights=weights)
    with pytest.raises(ValueError, match="how: expected"):
        make(scores=attention(heads=3)).merge_heads("median")


# ---------------------------------------------------------------------- selecting and dropping


def test_layers_are_named_by_label():
    mixing_map = make(layers=[3, 7])
    assert torch.equal(mixing_map.layer(7).scores, mixing_map.scores[1:])
    assert mixing_map.layer(7).layers == [7]
    assert torch.equal(mixing_map.layer(-2).scores, mixing_map.scores[:1])
    for missing in (0, 1, -3):
        with pytest.raises(
            ValueError, match=r"layers?: layer -?\d does not exist; expected 3, 7, or -2 to -1"
        ):
            mixing_map.layer(missing)


def test_select_layers_takes_their_masks_along():
    masks = torch.stack([torch.eye(5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool).tril()])
    mixing_map = make(scores=attention() * masks, mask=masks)
    assert torch.equal(mixing_map.layer(1).visible(), masks[1:])
    assert torch.equal(mixing_map.select_layers([1, 0]).visible(), masks.flip(0))


def test_head():
    mixing_map = make(scores=attention(heads=3))
    assert torch.equal(mixing_map.head(-1).scores, mixing_map.scores[:, 2])
    with pytest.raises(ValueError, match="head: expected a whole number from -3 to 2"):
        mixing_map.head(3)
    with pytest.raises(ValueError, match="with heads"):
        make().head(0)


def test_drop_by_position_token_and_function():
    mixing_map = make(mask=torch.ones(5, 5, dtype=torch.bool).tril())
    kept = [0, 1, 3, 4]
    expected = mixing_map.scores[:, kept][:, :, kept]
    for dropped in (2, -3, [2], " Eif", [" Eif"], lambda token: token == " Eif", np.int64(2)):
        smaller = mixing_map.drop(dropped)
        assert torch.equal(smaller.scores, expected)
        assert smaller.tokens == ["<|endoftext|>", "The", "fel", " Tower"]
        assert smaller.causal
        assert smaller.mask.shape == (4, 4)
    assert mixing_map.drop_bos().tokens == TOKENS[1:]
    assert len(mixing_map.tokens) == 5


def test_drop_every_occurrence():
    mixing_map = MixingMap(scores=torch.ones(1, 3, 3), tokens=["a", "b", "a"])
    assert mixing_map.drop("a").tokens == ["b"]


def test_drop_one_axis():
    smaller = make().drop(0, axis="key")
    assert smaller.scores.shape == (2, 5, 4)
    assert smaller.key_tokens == TOKENS[1:]
    assert not smaller.causal
    assert torch.equal(smaller.visible()[0], torch.ones(5, 5, dtype=torch.bool).tril()[:, 1:])
    assert make().drop(0, axis="query").tokens == TOKENS[1:]
    with pytest.raises(ValueError, match="axis: expected 'query' or 'key'"):
        smaller.drop(0)


@pytest.mark.parametrize("dropped", [5, "Paris", ["The", "Paris"], range(5)])
def test_drop_with_bad_tokens(dropped):
    with pytest.raises(ValueError, match="tokens: expected"):
        make().drop(dropped)
    with pytest.raises(TypeError, match="tokens: expected"):
        make().drop(1.5)


# ---------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (TOKENS, ["<|endoftext|>", "The", " Eiffel", " Tower"]),
        (["<s>", "▁un", "believ", "able", "▁", "日本", "</s>"], ["<s>", "▁unbelievable", "▁日本", "</s>"]),
        (["Hel", "lo", "Ġwor", "ld", "."], ["Hello", "Ġworld."]),
        (["a", "\n", "b", "c", " d"], ["a", "\n", "bc", " d"]),
        (["a", "ĊĊ", "b", "Ġd"], ["a", "ĊĊ", "b", "Ġd"]),
        (["[CLS]", "un", "##be", "##lie", "cat", "[SEP]"], ["[CLS]", "unbelie", "cat", "[SEP]"]),
        (["[CLS]", "the", "cat", "[SEP]"], ["[CLS]", "the", "cat", "[SEP]"]),
        (["##", "head", "ing", " text"], ["##heading", " text"]),
        (["<bos>", "<0xE2>", "<0x82>", " x"], ["<bos>", "<0xE2><0x82>", " x"]),
    ],
)
def test_words_found_from_the_marks(tokens, words):
    size = len(tokens)
    merged = MixingMap(scores=torch.rand(1, size, size), tokens=tokens).merge_words()
    assert merged.tokens == words


def test_words_without_marks():
    with pytest.raises(ValueError, match="no token has a word mark"):
        words.find_words(["<s>", "The", "cat", "sat"])
    assert words.find_words(["<s>", "The", "</s>"]) == [[0], [1], [2]]


def test_words_of_scripts_without_spaces():
    assert words.find_words(["<s>", "我", "喜欢", "猫", "。"]) == [[0], [1], [2], [3, 4]]
    assert words.find_words(["你[1/2]", "你[2/2]", "好"]) == [[0, 1], [2]]
    assert words.find_words(["👩", "\u200d", "🚀", "🇫", "🇷"]) == [[0, 1, 2], [3, 4]]
    # If there is white space, it separates words in these scripts too.
    assert words.find_words(["我", "爱", " 你", "们"]) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="no token has a word mark"):
        words.find_words(["我", "like", "猫"])


def test_words_by_text_in_another_form():
    """Match é as one character or as two, wide letters, and letters whose accents the tokenizer dropped."""
    for tokens, word in (
        (["cafe\u0301"], "café"),
        (["caf", "é"], "cafe\u0301"),
        (["ＡＢ"], "AB"),
        (["cafe"], "café"),
    ):
        assert words.align_words(tokens, [word]) == ([list(range(len(tokens)))], [word])
    with pytest.raises(ValueError, match="word 0 'cafe'"):
        words.align_words(["café"], ["cafe"])


def test_tokens_of_a_character_make_one_word():
    tokens = ["the", " caf", "é[1/2]", "é[2/2]", " é[1/2]", " é[2/2]", "s"]
    merged = MixingMap(torch.ones(1, 7, 7), tokens).merge_words()
    assert merged.tokens == ["the", " café", " és"]
    assert MixingMap(torch.ones(1, 7, 7), tokens).merge_words(["the", "café", "és"]).tokens[1:] == [
        "café",
        "és",
    ]
    # If a token of the character is missing, the others are words as they are written.
    for odd in (["x[1/2]", "y[2/2]"], ["x[2/2]", " a"], ["x[1/1000000]", " a"], ["x[0/0]", " a"]):
        assert MixingMap(torch.ones(1, 2, 2), odd).merge_words([[0], [1]]).tokens == odd


def test_merge_words_sums_keys_and_averages_queries():
    mixing_map = make(scores=attention(heads=2))
    merged = mixing_map.merge_words()
    scores = mixing_map.scores
    assert merged.scores.shape == (2, 2, 4, 4)
    pieces = scores[:, :, 2:4]
    assert torch.allclose(merged.scores[:, :, 2, 1], pieces[..., 1].mean(2))
    assert torch.allclose(merged.scores[:, :, 2, 2], pieces[..., 2:4].sum(-1).mean(2))
    assert torch.allclose(merged.scores.sum(-1), torch.ones(2, 2, 4, dtype=torch.float64))
    assert merged.causal
    assert merged.provenance["merged_words"] == {"keys": "sum", "queries": "mean"}


@pytest.mark.parametrize("keys", ["sum", "mean", "max", "min", "first", "last"])
@pytest.mark.parametrize("queries", ["sum", "mean", "max", "min", "first", "last"])
def test_merge_words_reductions(keys, queries):
    by_hand = {
        "sum": sum, "mean": lambda x: sum(x) / len(x), "max": max, "min": min,
        "first": lambda x: x[0], "last": lambda x: x[-1],
    }  # fmt: skip
    mixing_map = make(causal=False, scores=attention(causal=False))
    groups = [[0, 1], [2, 3, 4]]
    merged = mixing_map.merge_words(groups, keys=keys, queries=queries)
    values = mixing_map.scores[0].tolist()
    for row, query_group in enumerate(groups):
        for column, key_group in enumerate(groups):
            rows = [by_hand[keys]([values[query][key] for key in key_group]) for query in query_group]
            assert merged.scores[0, row, column].item() == pytest.approx(by_hand[queries](rows), abs=1e-15)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(0, 10**6))
def test_merge_words_keeps_row_sums_and_causality(starts, seed):
    tokens = [(" " if start or not position else "") + "x" for position, start in enumerate(starts)]
    size = len(tokens)
    merged = MixingMap(attention(1, 2, size, seed=seed), tokens, causal=True).merge_words()
    assert torch.allclose(merged.scores.sum(-1), torch.ones(merged.scores.shape[:-1], dtype=torch.float64))
    assert len(merged.tokens) == 1 + sum(starts[1:])
    assert torch.equal(merged.scores, merged.scores.tril())


def test_merge_words_merges_the_mask():
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[:, 0] = False
    mask[3:, 1:3] = False
    scores = attention() * mask
    merged = make(scores=scores, mask=mask).merge_words([[0, 1], [2], [3, 4]])
    assert merged.mask.tolist() == [[True, False, False], [True, True, False], [False, False, True]]


def test_merge_words_out_of_order_is_no_longer_causal():
    merged = make().merge_words([[0, 4], [1], [2, 3]])
    assert not merged.causal
    assert merged.visible()[0].tolist() == [[True] * 3, [True, True, False], [True] * 3]
    assert merged.tokens == ["<|endoftext|> Tower", "The", " Eiffel"]


def test_merge_words_by_text():
    merged = make().merge_words(["The", "Eiffel", "Tower"])
    assert merged.tokens == ["<|endoftext|>", "The", "Eiffel", "Tower"]
    groups, names = words.align_words(
        ["[CLS]", "the", "ei", "##ffel", "tower", ".", "[SEP]"], ["The", "Eiffel", "tower."]
    )
    assert groups == [[0], [1], [2, 3], [4, 5], [6]]
    assert names == ["[CLS]", "The", "Eiffel", "tower.", "[SEP]"]


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        (["The", "Eiffel"], ValueError, r"none from position 4 \(' Tower'\)"),
        (["The", "Big", "Tower"], ValueError, r"word 1 'Big' .* \[' Eif', 'fel', ' Tower'\]"),
        (["The", "Eiffel", "Tower", "now"], ValueError, "word 3 'now'"),
        (["The", "", "Tower"], ValueError, "word 1 ''"),
        ([[0, 1], [2, 3]], ValueError, "each position from 0 to 4"),
        ([[0, 1], [1, 2, 3, 4]], ValueError, "exactly one list"),
        ([[0, 1, 2, 3, 4], []], ValueError, "exactly one list"),
        (["The", [1, 2], [3, 4]], TypeError, "all of one kind"),
        ([["The"], [1, 2, 3, 4]], TypeError, "expected a whole number, got 'The'"),
        ([[0, None], [1, 2, 3, 4]], TypeError, "expected a whole number, got None"),
        ([[0, 1.0], [2, 3, 4]], TypeError, "expected a whole number, got 1.0"),
        ([{"a": 1}], TypeError, "list of words"),
        ("The Eiffel Tower", TypeError, "list of words"),
        ([], TypeError, "list of words"),
        ([0, 1, 2, 3, 4], TypeError, "list of words"),
    ],
)
def test_merge_words_with_bad_groups(groups, error, message):
    with pytest.raises(error, match=message):
        make().merge_words(groups)


def test_merge_words_with_unknown_reductions():
    with pytest.raises(ValueError, match=r"keys: expected one of .*sum"):
        make().merge_words(keys="median")
    with pytest.raises(ValueError, match=r"queries: expected one of .*sum"):
        make().merge_words(queries="median")
    with pytest.raises(ValueError, match="key_groups: expected None"):
        make().merge_words(key_groups=[[0, 1, 2, 3, 4]])


def test_merge_named_groups():
    mixing_map = make()
    merged = mixing_map.merge_words({"the subject": "Eiffel Tower"})
    assert merged.tokens == [TOKENS[0], "The", "the subject"]
    expected = mixing_map.merge_words([[0], [1], [2, 3, 4]])
    assert torch.equal(merged.scores, expected.scores)
    assert merged.causal
    apart = mixing_map.merge_words({"ends": [0, 4], "article": "The"})
    assert apart.tokens == ["ends", "article", " Eif", "fel"]
    assert not apart.causal
    with pytest.raises(ValueError, match="groups: expected a text that the prompt contains, got 'Louvre'"):
        mixing_map.merge_words({"the subject": "Louvre"})


def test_merge_words_on_other_keys():
    scores = torch.rand(1, 2, 3)
    mixing_map = MixingMap(scores=scores, tokens=[" a", "b"], key_tokens=["la", "##st", "one"])
    merged = mixing_map.merge_words()
    assert (merged.tokens, merged.key_tokens) == ([" ab"], ["la", "##st", "one"])
    both = mixing_map.merge_words(key_groups=[[0, 1], [2]])
    assert (both.tokens, both.key_tokens) == ([" ab"], ["last", "one"])
    assert torch.allclose(both.scores[0, 0, 0], scores[0, :, :2].sum(-1).mean())


# ---------------------------------------------------------------------- keys


def cross(**changes):
    fields = {"scores": torch.rand(1, 3, 3), "tokens": ["a", "b", "c"], "key_tokens": ["a", "b", "c"]}
    return MixingMap(**{**fields, **changes})


def test_key_tokens_are_always_there():
    mixing_map = make()
    assert mixing_map.key_tokens == TOKENS
    assert mixing_map.keys_are_tokens
    assert make(key_tokens=None).keys_are_tokens
    assert isinstance(mixing_map.key_tokens, list)


def test_keys_with_the_text_of_the_tokens_are_other_keys():
    mixing_map = cross()
    assert (mixing_map.key_tokens, mixing_map.keys_are_tokens) == (["a", "b", "c"], False)
    with pytest.raises(ValueError, match="axis: expected 'query' or 'key' on a map with other keys"):
        mixing_map.drop(0)
    with pytest.raises(ValueError, match="expected the tokens as keys"):
        rollout(mixing_map)


@pytest.mark.parametrize("causal", [True, False])
def test_keys_follow_the_tokens(causal):
    mixing_map, new = make(causal=causal), list("vwxyz")
    renamed = mixing_map.replace(tokens=new)
    assert (renamed.key_tokens, renamed.keys_are_tokens) == (new, True)
    assert dataclasses.replace(mixing_map, method="other").keys_are_tokens
    assert copy.deepcopy(mixing_map).keys_are_tokens
    assert pickle.loads(pickle.dumps(mixing_map)).keys_are_tokens
    changes = (mixing_map.drop(0), mixing_map.merge_words(), mixing_map.select_queries([1]))
    for changed in (*changes, mixing_map.layer(0)):
        assert changed.keys_are_tokens
        assert changed.key_tokens == changed.tokens
    with pytest.raises(ValueError, match=r"key_tokens: .* write m.replace\(tokens=...\)"):
        dataclasses.replace(mixing_map, tokens=new)


def test_other_keys_stay_other_keys():
    mixing_map = cross()
    renamed = mixing_map.replace(tokens=list("xyz"))
    for changed in (renamed, mixing_map.select_queries([1]), mixing_map.drop(0, "key")):
        assert not changed.keys_are_tokens
    assert renamed.key_tokens == ["a", "b", "c"]
    assert mixing_map.replace(key_tokens=None).keys_are_tokens
    assert not make(causal=False).replace(key_tokens=list(TOKENS)).keys_are_tokens


def test_the_keys_of_another_map_can_be_given():
    longer = make()
    mixing_map = MixingMap(torch.rand(1, 2, 5), tokens=["a", "b"], key_tokens=longer.key_tokens)
    assert (mixing_map.key_tokens, mixing_map.keys_are_tokens) == (TOKENS, False)


def test_saved_keys(tmp_path):
    for number, mixing_map in enumerate((make(), cross())):
        mixing_map.save(tmp_path / str(number))
        loaded = MixingMap.load(tmp_path / str(number))
        for after in (loaded, MixingMap.from_dataframe(mixing_map.to_dataframe())):
            assert after.key_tokens == mixing_map.key_tokens
            assert after.keys_are_tokens == mixing_map.keys_are_tokens
    with safe_open(tmp_path / "0", framework="pt") as file:
        assert json.loads(file.metadata()["record"])["key_tokens"] is None


# ---------------------------------------------------------------------- reading and exporting


def test_top():
    scores = torch.tensor([[[1.0, 0, 0], [0.4, 0.6, 0], [0.5, 0.2, 0.3]]])
    mixing_map = MixingMap(scores=scores, tokens=["a", "b", "c"], causal=True)
    assert mixing_map.top(2) == [Source("a", 0, 0.5), Source("c", 2, pytest.approx(0.3))]
    assert [source.token for source in mixing_map.top(query=1)] == ["b", "a"]
    assert mixing_map.top(query="b") == mixing_map.top(query=-2)
    for wrong in ({"query": 3}, {"query": "d"}, {"layer": 1}, {"k": 0}, {"head": 0}):
        with pytest.raises(ValueError, match="expected"):
            mixing_map.top(**wrong)


def test_a_query_by_its_token():
    mixing_map = MixingMap(scores=torch.ones(1, 5, 5), tokens=["of", " a", " of", " b", " b"])
    assert [mixing_map.row_index(token) for token in ("of", " of", "a", " a ")] == [0, 2, 1, 1]
    for token, expected in (("b", "occurs once"), ("c", "the prompt contains"), ("", "the prompt contains")):
        with pytest.raises(ValueError, match=f"query: expected a text that {expected}"):
            mixing_map.row_index(token)
    line_end = MixingMap(scores=torch.ones(1, 2, 2), tokens=["a", "\n"])
    assert line_end.row_index("\n") == 1
    for token in ("", " "):
        with pytest.raises(ValueError, match="query: expected a text that the prompt contains"):
            line_end.row_index(token)


def test_a_text_of_several_tokens_selects_all_of_them_or_the_last():
    tokens = ["The", " E", "iff", "el", " Tower", " is"]
    mixing_map = MixingMap(scores=attention(size=6), tokens=tokens, causal=True)
    assert mixing_map.positions("Eiffel Tower") == [1, 2, 3, 4]
    assert mixing_map.positions([" is", 0, slice(2, 4)]) == [5, 0, 2, 3]
    assert mixing_map.row_index("Eiffel Tower") == 4
    assert mixing_map.top(query="Eiffel Tower") == mixing_map.top(query=4)
    assert mixing_map.explanation("Eiffel Tower") == ""
    assert mixing_map.select_queries("Eiffel Tower").queries == [1, 2, 3, 4]
    assert mixing_map.select_queries([" is", "The"]).queries == [5, 0]
    some = mixing_map.select_queries([-1])
    assert some.row_index(" is") == 0
    with pytest.raises(ValueError, match=r"expected one of the rows that this map has, \[5\], got ' Tower'"):
        some.row_index(" Tower")
    with pytest.raises(ValueError, match="text: expected a text that the prompt contains, got 'Paris'"):
        mixing_map.positions("Paris")


def test_positions_of_keys_that_are_not_the_tokens():
    cross = MixingMap(scores=torch.ones(1, 2, 3), tokens=["a", "b"], key_tokens=["b", "c", "a"])
    assert (cross.positions("a"), cross.positions("a", axis="query")) == ([2], [0])
    with pytest.raises(ValueError, match="axis: expected"):
        cross.positions("a", axis="both")


def test_top_of_heads():
    mixing_map = make(scores=attention(heads=2))
    expected = mixing_map.scores[0, :, 3].mean(0)
    best = mixing_map.top(1, query=3, layer=0)[0]
    assert best == Source(TOKENS[int(expected.argmax())], int(expected.argmax()), expected.max().item())
    assert mixing_map.top(1, query=3, layer=0, head=1)[0].score == mixing_map.scores[0, 1, 3].max().item()


def test_top_heads():
    mixing_map = make(scores=attention(heads=2), layers=[4, 9])
    found = mixing_map.top_heads(query=3, key=1, k=100)
    scores = mixing_map.scores[:, :, 3, 1]
    expected = {
        (layer, head): scores[index, head].item() for index, layer in enumerate([4, 9]) for head in (0, 1)
    }
    assert {(each.layer, each.head): each.score for each in found} == expected
    assert [each.score for each in found] == sorted(expected.values(), reverse=True)
    assert [each.share for each in found] == pytest.approx([each.score for each in found])
    assert mixing_map.top_heads("fel", TOKENS[1], 1) == found[:1]
    pair = mixing_map.top_heads(None, [0, 1], 1)[0]
    assert pair.score == pytest.approx(mixing_map.scores[:, :, 4, :2].sum(-1).max().item())


def test_top_heads_prints_one_line_per_head():
    scores = torch.tensor([[[[0.3, 0.7]], [[-4.0, 36.0]]]])
    explained = [Explained(prediction=" Italian", probability=0.66, others=())]
    mixing_map = MixingMap(
        scores, tokens=["a", "b"], queries=[1], layers=[7], causal=True, explained=explained
    )
    found = mixing_map.top_heads(None, "a")
    assert repr(found).splitlines() == [
        "after 'b': ' Italian' 0.66",
        "       -4  layer 7, head 1 (-10% of its row)",
        "      0.3  layer 7, head 0 (30% of its row)",
    ]
    assert repr(make(scores=attention(heads=2)).top_heads(3, 1, 1)).count("\n") == 0


def test_top_heads_by_share_and_sign():
    scores = torch.tensor([[[[0.3, 0.7]], [[-4.0, 36.0]], [[1.0, 0.0]]]])
    mixing_map = MixingMap(scores, tokens=["a", "b"], queries=[1])
    by_score = [(each.head, each.score) for each in mixing_map.top_heads(None, "a")]
    assert by_score == [(1, -4.0), (2, 1.0), (0, pytest.approx(0.3))]
    by_share = [(each.head, each.share) for each in mixing_map.top_heads(None, "a", unit="share")]
    assert by_share == [(2, 1.0), (0, pytest.approx(0.3)), (1, pytest.approx(-0.1))]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"query": 9, "key": 0}, "query: expected a position"),
        ({"query": None, "key": 9}, "key: expected a position"),
        ({"query": None, "key": "nowhere"}, "key: expected a text that the prompt contains"),
        ({"query": 2, "key": 3}, r"key: expected keys that query 2 can see, got \[3\]"),
        ({"query": None, "key": 0, "k": 0}, "k: expected"),
        ({"query": None, "key": 0, "unit": "logit"}, "unit: expected"),
    ],
)
def test_top_heads_with_wrong_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        make(scores=attention(heads=2)).top_heads(**wrong)


def test_top_heads_needs_a_key_and_takes_the_default_row():
    m = make(scores=attention(heads=2))
    assert m.top_heads(key=0) == m.top_heads(None, 0)
    with pytest.raises(TypeError, match="key: expected a position or a text"):
        m.top_heads()


def test_a_map_without_heads_says_how_to_get_them():
    with pytest.raises(ValueError, match=r"top_heads: expected a map with heads.*Weights\(per_head=True"):
        make().top_heads(None, 0)


@pytest.mark.parametrize("heads", [None, 2])
def test_to_dataframe(heads):
    mixing_map = make(scores=attention(heads=heads), layers=[4, 9])
    table = mixing_map.to_dataframe()
    head = [] if heads is None else ["head"]
    assert list(table.columns) == ["layer", *head, "query", "key", "query_token", "key_token", "score"]
    assert len(table) == mixing_map.scores.numel()
    for row in table.sample(20, random_state=0).itertuples():
        place = (row.layer == 9, *([] if heads is None else [row.head]), row.query, row.key)
        score = mixing_map.scores[tuple(map(int, place))].item()
        assert row.score == score if row.key <= row.query else np.isnan(row.score)
        assert (row.query_token, row.key_token) == (TOKENS[row.query], TOKENS[row.key])
    assert isinstance(table, pd.DataFrame)


def test_to_dataframe_of_half_precision():
    scores = attention(dtype=torch.bfloat16)
    expected = scores.float().masked_fill(~make().visible(), torch.nan).flatten().numpy()
    assert np.array_equal(make(scores=scores).to_dataframe().score, expected, equal_nan=True)


def test_to_xarray():
    mixing_map = make(scores=attention(heads=2), layers=[4, 9], parameters={"per_head": True})
    array = mixing_map.to_xarray()
    assert array.dims == ("layer", "head", "query", "key")
    expected = mixing_map.scores[1, 1].masked_fill(~mixing_map.visible()[1], torch.nan).numpy()
    assert np.array_equal(array.sel(layer=9, head=1).values, expected, equal_nan=True)
    assert array.query_token.values.tolist() == TOKENS
    assert array.attrs["method"] == "attention"
    assert make().to_xarray().dims == ("layer", "query", "key")


def test_to_networkx_one_layer():
    mixing_map = make()
    graph = mixing_map.to_networkx(layer=1)
    assert graph.number_of_nodes() == 5
    assert graph.number_of_edges() == 15
    assert graph.nodes[3] == {"token": "fel", "position": 3}
    assert graph.edges[0, 3]["weight"] == mixing_map.scores[1, 3, 0].item()
    assert not graph.has_edge(3, 0)
    strong = mixing_map.to_networkx(layer=1, threshold=0.3)
    assert strong.number_of_edges() == int((mixing_map.scores[1] > 0.3).sum())


def test_to_networkx_all_layers():
    mixing_map = make(scores=attention(heads=2), layers=[4, 5])
    graph = mixing_map.to_networkx()
    assert graph.number_of_nodes() == 15
    edge = graph.edges[(1, 0), (2, 3)]
    assert edge == {"weight": mixing_map.scores[1, :, 3, 0].mean().item(), "layer": 5}
    # The weights of all paths from an input to an output add up to the product of the layers.
    product = mixing_map.merge_heads().scores[1] @ mixing_map.merge_heads().scores[0]
    paths = sum(
        graph.edges[(0, 1), (1, k)]["weight"] * graph.edges[(1, k), (2, 4)]["weight"] for k in range(1, 5)
    )
    assert paths == pytest.approx(product[4, 1].item())
    with pytest.raises(ValueError, match="layers do not chain"):
        mixing_map.replace(kind="input").to_networkx()


def test_to_networkx_of_other_keys():
    mixing_map = MixingMap(scores=torch.ones(1, 1, 2), tokens=["q"], key_tokens=["x", "y"])
    graph = mixing_map.to_networkx(layer=0)
    assert set(graph.edges) == {(("key", 0), ("query", 0)), (("key", 1), ("query", 0))}


def test_repr():
    text = repr(make(scores=attention(heads=2)))
    assert text.startswith("MixingMap(attention: layer map, layer=2 head=2 query=5 key=5, float64, causal")
    assert "<|endoftext|>" in text
    page = make()._repr_html_()
    assert "&lt;|endoftext|&gt;" in page
    assert "<|endoftext|>" not in page


def test_show_delegates_to_the_figures(monkeypatch):
    import sys
    import types

    import lens_mix.view

    figures = types.ModuleType("lens_mix.view.figures")
    figures.layer_maps = lambda mixing_map, **options: (mixing_map, options)
    window = types.ModuleType("lens_mix.view.window")
    window.show_figure = lambda figure: None
    for name, module in (("figures", figures), ("window", window)):
        monkeypatch.setitem(sys.modules, f"lens_mix.view.{name}", module)
        monkeypatch.setattr(lens_mix.view, name, module, raising=False)
    mixing_map = make()
    assert mixing_map.show(layers=[0]) == (mixing_map, {"layers": [0]})


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_save_and_load_to_the_bit(tmp_path, dtype):
    window = torch.ones(5, 5, dtype=torch.bool).tril()
    before = make(
        scores=attention(heads=2, dtype=dtype).transpose(2, 3).contiguous().transpose(2, 3),
        mask=torch.stack([window, window]),
        parameters={"metric": "cosine", "threshold": None, "heads": (0, 1)},
        residual=0.1,
        layers=[3, 4],
        provenance={"model": "gpt2", "fold_ln": False, "nested": {"loss": 0.1 + 0.2}},
        notes=("ein Hinweis – ☃",),
    )
    path = tmp_path / "map.safetensors"
    before.save(path)
    after = MixingMap.load(path)
    for field in dataclasses.fields(MixingMap):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(old, torch.Tensor):
            assert old.dtype == new.dtype
            assert torch.equal(old, new)
        else:
            assert old == new, field.name
            assert type(old) is type(new)


def test_save_and_load_without_the_optional_fields(tmp_path):
    MixingMap(scores=torch.rand(1, 1, 2), tokens=["\ud83d"], key_tokens=["", "\n"]).save(str(tmp_path / "m"))
    after = MixingMap.load(str(tmp_path / "m"))
    assert (after.tokens, after.key_tokens, after.mask, after.residual) == (
        ["\ud83d"],
        ["", "\n"],
        None,
        None,
    )


def test_save_names_what_json_cannot_represent(tmp_path):
    with pytest.raises(TypeError, match=r"parameters\['target'\].* got function"):
        make(parameters={"target": lambda logits: logits}).save(tmp_path / "map")
    with pytest.raises(TypeError, match=r"provenance\['a'\]: expected names as strings"):
        make(provenance={"a": {(1, 2): 2}}).save(tmp_path / "map")


def test_load_of_other_files(tmp_path):
    from safetensors.torch import save_file

    expected = r"path: expected a map that MixingMap\.save wrote .*, got "
    save_file({"scores": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(ValueError, match=expected + r"format None in .*weights"):
        MixingMap.load(tmp_path / "weights")
    for number, content in enumerate((b"", b"layer,query,key,score", b"\x10" + bytes(7) + b"{}")):
        (tmp_path / f"text{number}").write_bytes(content)
        with pytest.raises(
            ValueError, match=expected + rf".*text{number}, which is not a safetensors file: \w+"
        ):
            MixingMap.load(tmp_path / f"text{number}")
    with pytest.raises(ValueError, match="path: expected the path of a file, got the folder"):
        MixingMap.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        MixingMap.load(tmp_path / "missing")


@pytest.mark.parametrize(
    ("tensors", "record", "lacks"),
    [
        (("scores",), None, r"\['tokens', .*'notes'\]"),
        (("scores",), "{", r"\['tokens', .*'notes'\]"),
        (("scores",), "[1]", r"\['tokens', .*'notes'\]"),
        (("mask",), "whole", r"\['scores'\]"),
    ],
)
def test_load_says_what_a_damaged_map_lacks(tmp_path, tensors, record, lacks):
    make().save(tmp_path / "map")
    with safe_open(tmp_path / "map", framework="pt") as file:
        metadata = dict(file.metadata())
    if record is None:
        del metadata["record"]
    elif record != "whole":
        metadata["record"] = record
    save_file({name: torch.ones(1) for name in tensors}, tmp_path / "damaged", metadata=metadata)
    with pytest.raises(ValueError, match=r"got .*damaged, which lacks " + lacks):
        MixingMap.load(tmp_path / "damaged")


DAMAGED = {
    "nested": "[" * 100_000,
    "digits": "9" * 5_000,
    "kind": {"kind": "lJyer"},
    "tokens": {"tokens": 5},
    "queries": {"queries": "x"},
    "layers": {"layers": [1]},
    "notes": {"notes": 5},
}


@pytest.mark.parametrize("name", [*DAMAGED, "another tensor"])
def test_load_of_a_damaged_map_is_one_kind_of_error(tmp_path, name):
    make().save(tmp_path / "map")
    with safe_open(tmp_path / "map", framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(tmp_path / "map")
    damage = DAMAGED.get(name, {})
    record = damage if isinstance(damage, str) else json.dumps(json.loads(metadata["record"]) | damage)
    if name not in DAMAGED:
        tensors["further"] = torch.ones(1)
    save_file(tensors, tmp_path / "damaged", metadata=metadata | {"record": record})
    with pytest.raises(
        ValueError, match=r"^path: expected a map that MixingMap\.save wrote .*damaged, which"
    ):
        MixingMap.load(tmp_path / "damaged")


def test_residual_shares_that_are_a_view_of_the_scores_are_saved(tmp_path):
    scores = torch.rand(2, 3, 3)
    shares = scores.diagonal(dim1=1, dim2=2)
    MixingMap(scores, tokens=["a", "b", "c"], residual_shares=shares).save(tmp_path / "map")
    assert torch.equal(MixingMap.load(tmp_path / "map").residual_shares, shares)
    # A contiguous view shares the memory of the scores as well.
    one = torch.eye(3)[None]
    MixingMap(one, tokens=["a", "b", "c"], residual_shares=one[:, 0]).save(tmp_path / "map")
    assert torch.equal(MixingMap.load(tmp_path / "map").residual_shares, one[:, 0])


# ---------------------------------------------------------------------- the default row, and units


def signed(**changes):
    scores = torch.tensor([[[1.0, 0, 0], [0.5, -2, 0], [3, -4, 1]]])
    return MixingMap(scores=scores, tokens=["a", "b", "c"], causal=True, **changes)


def test_default_query():
    assert make().default_query_position == 4
    assert make(default_query=2).default_query_position == 2
    assert make(default_query=-4).default_query == 1
    assert make(default_query=2).top(1) == make().top(1, query=2)
    assert make(default_query=2).select_queries([3, 1]).default_query_position == 3
    assert make(default_query=2).select_queries([3, 2]).default_query_position == 2
    assert "What position 2, " in make(default_query=2)._repr_html_()
    with pytest.raises(ValueError, match="default_query: expected a position from -5 to 4, got 5"):
        make(default_query=5)


def test_default_query_moves_with_its_token():
    mixing_map = make(default_query=3)
    assert mixing_map.drop_bos().default_query == 2
    assert mixing_map.drop(3).default_query is None
    assert mixing_map.merge_words().tokens[mixing_map.merge_words().default_query] == " Eiffel"


def test_top_of_signed_scores_is_by_magnitude():
    assert signed().top() == [Source("b", 1, -4.0), Source("a", 0, 3.0), Source("c", 2, 1.0)]
    assert signed().top(1, unit="share") == [Source("b", 1, -0.5)]
    shares = make().top(5, unit="share")
    expected = make().normalized().top(5)
    assert [source.position for source in shares] == [source.position for source in expected]
    assert [source.score for source in shares] == pytest.approx([source.score for source in expected])
    with pytest.raises(ValueError, match="unit: expected 'raw' or 'share', got 'percent'"):
        make().top(unit="percent")


# ---------------------------------------------------------------------- layers as items


def test_layers_as_items():
    mixing_map = make(layers=[3, 7])
    assert len(mixing_map) == 2
    assert torch.equal(mixing_map[7].scores, mixing_map.scores[1:])
    assert mixing_map[[7, 3]].layers == [7, 3]
    assert mixing_map[np.int64(3)].layers == [3]
    assert [each.layers for each in mixing_map] == [[3], [7]]
    with pytest.raises(ValueError, match="layer 0 does not exist; expected 3, 7, or -2 to -1"):
        mixing_map[0]
    with pytest.raises(TypeError, match=r"expected a layer's label or a list of them.*select_queries"):
        mixing_map[1:, 0]


def test_as_an_array():
    assert np.array_equal(np.asarray(make()), make().scores.numpy())
    assert np.asarray(make(), dtype=np.float32).dtype == np.float32
    assert np.array(make(scores=attention(dtype=torch.bfloat16))).dtype == np.float32


def test_difference():
    one, other = make(), make(scores=attention(seed=1), method="value_norm", notes="flat")
    found = one - other
    assert torch.equal(found.scores, one.scores - other.scores)
    assert (found.method, found.notes, found.causal) == (
        "attention - value_norm",
        ("value_norm: flat",),
        True,
    )
    assert (one - one).scores.abs().max() == 0
    window = torch.ones(5, 5, dtype=torch.bool).tril()
    window[4, 0] = False
    masked = one.replace(mask=window, scores=one.scores * window)
    assert torch.equal((masked - one).visible(), one.visible())
    with pytest.raises(ValueError, match=r"same tokens, key_labels, got .*select_queries"):
        one - other.replace(tokens=list("abcde"))
    with pytest.raises(ValueError, match=r"same heads"):
        one - make(scores=attention(heads=2))
    with pytest.raises(TypeError, match="unsupported operand"):
        one - 1


# ---------------------------------------------------------------------- from tables and arrays


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scores": attention(heads=3), "layers": [4, 9], "notes": ("one",), "residual": 0.5},
        {"scores": attention(causal=False), "causal": False},
        {"causal": False, "default_query": 2, "parameters": {"k": [1]}},
        {"scores": attention()[:, [4, 2]], "queries": [4, 2], "kind": "input"},
        {"scores": attention()[:, :, :3] * 0 + 1, "causal": False, "key_tokens": ["x", "y", "z"]},
    ],
)
def test_from_a_table_and_an_array(changes):
    original = make(**changes)
    table = original.to_dataframe()
    for found in (
        MixingMap.from_dataframe(table.sample(frac=1, random_state=1)),
        MixingMap.from_xarray(original.to_xarray()),
    ):
        # A table's rows have any order, so the map's rows are sorted by position.
        expected = original.select_queries(found.query_positions)
        assert torch.equal(found.scores, expected.scores)
        assert torch.equal(found.visible(), expected.visible())
        for field in dataclasses.fields(MixingMap):
            if field.name not in ("scores", "mask", "queries"):
                assert getattr(found, field.name) == getattr(original, field.name), field.name


def test_from_a_csv_file(tmp_path):
    make().to_dataframe().to_csv(tmp_path / "map.csv", index=False)
    found = MixingMap.from_dataframe(pd.read_csv(tmp_path / "map.csv"), method="attention")
    assert (found.tokens, found.method, found.causal) == (TOKENS, "attention", True)
    assert torch.allclose(found.scores, make().scores, rtol=1e-12)


def test_tables_without_a_map():
    table = make().to_dataframe()
    with pytest.raises(ValueError, match=r"table with the columns .* missing \['key_token'\]"):
        MixingMap.from_dataframe(table.drop(columns="key_token"))
    with pytest.raises(ValueError, match=r"every layer x query x key once, 50 rows, got 49"):
        MixingMap.from_dataframe(table.drop(index=3))
    with pytest.raises(ValueError, match="some of them twice"):
        MixingMap.from_dataframe(pd.concat([table, table]))
    with pytest.raises(ValueError, match=r"array: expected one of MixingMap.to_xarray"):
        MixingMap.from_xarray(make().to_xarray().isel(layer=0))
