"""Test the statistics of heads on maps with known answers."""

import functools
import math

import pytest
import torch

import lens_mix as lm
from lens_mix.experiments.attention import attention_statistics
from tests.random_maps import random_map

random_heads = functools.partial(random_map, heads=3, causal=False)


def shifted(size, offset):
    """Return a head that attends to query + offset, or to the query itself if that is outside the prompt."""
    head = torch.zeros(size, size, dtype=torch.float64)
    for query in range(size):
        key = query + offset
        head[query, key if 0 <= key < size else query] = 1
    return head


def designed(size=6, tokens=None):
    """Return a map of five heads with known patterns.

    Head 0 attends to the previous token, 1 to the next, 2 to the query itself, 3 to all tokens evenly, and 4
    to token 0 with 60 % and to the query itself with the rest.
    """
    even = torch.full((size, size), 1 / size, dtype=torch.float64)
    first = 0.4 * torch.eye(size, dtype=torch.float64)
    first[:, 0] += 0.6
    heads = torch.stack([shifted(size, -1), shifted(size, 1), torch.eye(size).double(), even, first])
    return lm.MixingMap(heads[None], tokens or [f"t{i}" for i in range(size)], "attention")


# ---------------------------------------------------------------------- relative positions


def test_offsets_of_designed_heads():
    found = attention_statistics(designed())
    assert found.offsets[-1][0].tolist() == pytest.approx([1, 0, 0, 1 / 6, 0.6 / 5])
    assert found.offsets[1][0].tolist() == pytest.approx([0, 1, 0, 1 / 6, 0])
    assert found.offsets[0][0].tolist() == pytest.approx([1 / 6, 1 / 6, 1, 1 / 6, 0.5])
    listed = {(head.head, head.offset): head.share for head in found.fixed_offset_heads()}
    assert listed == pytest.approx({(0, -1): 1, (1, 1): 1, (2, 0): 1})
    assert {(h.head, h.offset) for h in found.fixed_offset_heads(0.45)} == {(0, -1), (1, 1), (2, 0), (4, 0)}


@pytest.mark.parametrize("causal", [False, True])
def test_offsets_against_a_loop(causal):
    mixing_map = random_heads(causal=causal)
    found = attention_statistics(mixing_map, offsets=[-5, -1, 0, 2])
    for offset in (-5, -1, 0, 2):
        for layer in range(2):
            for head in range(3):
                weights = [
                    mixing_map.scores[layer, head, query, query + offset].item()
                    for query in range(6)
                    if 0 <= query + offset < 6 and (not causal or offset <= 0)
                ]
                expected = sum(weights) / len(weights) if weights else 0
                assert found.offsets[offset][layer, head].item() == pytest.approx(expected)


def test_layers_keep_their_labels():
    found = attention_statistics(designed().replace(layers=[7]))
    assert found.fixed_offset_heads()[0].layer == 7
    assert found.group_heads("first")[0].layer == 7


# ---------------------------------------------------------------------- groups of tokens


def test_shares_of_tokens():
    tokens = ["[CLS]", "the", "cat", ".", "[SEP]", ","]
    found = attention_statistics(designed(tokens=tokens))
    assert found.groups["first"][0, 3].item() == pytest.approx(1 / 6)
    assert found.groups["first"][0, 4].item() == pytest.approx(0.6 + 0.4 / 6)
    assert found.groups["separators"][0].tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 6, 0.4 / 6])
    assert found.groups["punctuation"][0, 3].item() == pytest.approx(2 / 6)
    assert [head.head for head in found.group_heads("first")] == [4]
    with pytest.raises(ValueError, match=r"group: expected .* or .*, got 'verbs'"):
        found.group_heads("verbs")


def test_own_groups():
    groups = {
        "ends": [0, -1],
        "cat": "cat",
        "short": lambda token: len(token) < 3,
        "gone": "dog",
        "two": iter([1]),
    }
    tokens = ["a", "cat", "on", "cat", "mats", "it"]
    found = attention_statistics([designed(tokens=tokens)] * 2, groups=groups).groups
    values = {name: shares[0, 3].item() for name, shares in found.items()}
    assert values == pytest.approx({"ends": 2 / 6, "cat": 2 / 6, "short": 3 / 6, "gone": 0, "two": 1 / 6})


# ---------------------------------------------------------------------- entropy


def test_entropy_and_evenness():
    found = attention_statistics(designed())
    assert found.entropy[0].tolist()[:4] == pytest.approx([0, 0, 0, math.log(6)])
    assert found.evenness[0].tolist()[:4] == pytest.approx([0, 0, 0, 1])
    assert found.broad_heads() == [(0, 3, pytest.approx(1))]


def test_evenness_is_measured_against_the_keys_that_could_be_seen():
    even = torch.ones(5, 5, dtype=torch.float64).tril()
    even = even / even.sum(-1, keepdim=True)
    found = attention_statistics(lm.MixingMap(even[None, None], list("abcde"), "attention", causal=True))
    assert found.evenness.item() == pytest.approx(1)
    assert found.entropy.item() == pytest.approx(sum(math.log(seen) for seen in range(1, 6)) / 5)


# ---------------------------------------------------------------------- one query


@pytest.mark.parametrize(
    ("query", "causal", "place"),
    [(None, False, 0), (None, True, 5), ("first", True, 0), ("last", False, 5), (-2, True, 4)],
)
def test_attention_from_one_query(query, causal, place):
    mixing_map = random_heads(causal=causal)
    found = attention_statistics(mixing_map, query=query).from_query
    row = mixing_map.scores[:, :, place]
    assert torch.allclose(found.entropy, torch.special.entr(row).sum(-1))
    assert torch.allclose(found.groups["first"], row[..., 0])
    assert torch.allclose(found.offsets[0], row[..., place])
    assert found.queries == 1
    assert found.from_query is None


# ---------------------------------------------------------------------- many prompts


def test_every_query_of_every_prompt_counts_once():
    short, long = random_heads(size=4, seed=1), random_heads(size=9, seed=2)
    both = attention_statistics(iter([short, long]))
    alone = attention_statistics(short), attention_statistics(long)
    assert (both.prompts, both.queries) == (2, 13)
    assert torch.allclose(both.entropy, (4 * alone[0].entropy + 9 * alone[1].entropy) / 13)
    assert torch.allclose(both.offsets[-1], (3 * alone[0].offsets[-1] + 8 * alone[1].offsets[-1]) / 11)
    query = [part.from_query.entropy for part in alone]
    assert torch.allclose(both.from_query.entropy, (query[0] + query[1]) / 2)


def test_a_map_without_heads_is_one_head():
    mixing_map = random_heads()
    merged = attention_statistics(mixing_map.merge_heads())
    assert merged.entropy.shape == (2, 1)


def test_a_table_of_all_heads():
    table = attention_statistics(random_heads(layers=2, heads=3)).to_dataframe()
    assert len(table) == 6
    assert list(table.columns[:2]) == ["layer", "head"]
    assert {"offset_-1", "first", "separators", "entropy", "evenness", "query_entropy"} <= set(table.columns)
    assert table["head"].tolist() == [0, 1, 2, 0, 1, 2]


def test_half_precision():
    mixing_map = random_heads()
    half = mixing_map.replace(scores=mixing_map.scores.to(torch.bfloat16))
    assert torch.allclose(
        attention_statistics(half).entropy, attention_statistics(mixing_map).entropy, atol=0.02
    )


# ---------------------------------------------------------------------- errors


def test_wrong_questions_are_refused():
    with pytest.raises(ValueError, match="maps: expected at least one map"):
        attention_statistics([])
    with pytest.raises(TypeError, match="maps: expected a MixingMap or several, got int"):
        attention_statistics(3)
    with pytest.raises(TypeError, match="maps: expected MixingMaps, got Tensor"):
        attention_statistics([torch.ones(2, 2)])
    with pytest.raises(ValueError, match="same layers and heads in all"):
        attention_statistics([random_heads(heads=2), random_heads(heads=3)])
    with pytest.raises(ValueError, match="same layers and heads in all"):
        attention_statistics([random_heads(), random_heads(layers=2).replace(layers=[1, 2])])
    with pytest.raises(TypeError, match="offsets: expected a whole number"):
        attention_statistics(designed(), offsets=[0.5])
    with pytest.raises(TypeError, match=r"groups: expected tokens, a function or positions, got 1\.5"):
        attention_statistics(designed(), groups={"x": [1.5]})
    for query in (6, "middle", True):
        with pytest.raises((TypeError, ValueError), match="query: expected 'first', 'last' or a position"):
            attention_statistics(designed(), query=query)
    with pytest.raises(ValueError, match="none below 0"):
        attention_statistics(lm.MixingMap(-torch.rand(1, 1, 3, 3), list("abc")))


# ---------------------------------------------------------------------- cross-attention


def cross_map(**fields):
    """Return two heads with three queries and four keys: one attends to the last key, one evenly."""
    heads = torch.zeros(1, 2, 3, 4, dtype=torch.float64)
    heads[0, 0, :, 3], heads[0, 1] = 1, 0.25
    given = {"scores": heads, "key_tokens": [" a", " b", ".", "</s>"], **fields}
    return lm.MixingMap(tokens=[f" t{i}" for i in range(3)], method="attention", **given)


def test_cross_attention_has_groups_of_keys_and_no_offsets():
    found = attention_statistics([cross_map(), cross_map()])
    assert found.offsets == {}
    assert found.groups["separators"].tolist() == [[1, 0.25]]
    assert found.groups["punctuation"].tolist() == [[0, 0.25]]
    assert found.entropy[0].tolist() == pytest.approx([0, math.log(4)])
    assert found.evenness[0].tolist() == pytest.approx([0, 1])
    assert found.from_query.queries == 2
    assert list(found.to_dataframe()["separators"]) == [1, 0.25]


def test_offsets_between_two_sequences_are_refused():
    with pytest.raises(ValueError, match="another sequence than their queries"):
        attention_statistics(cross_map(), offsets=[0])
    with pytest.raises(ValueError, match="in all of them, or in none"):
        attention_statistics([cross_map(), cross_map(key_tokens=None, scores=torch.ones(1, 2, 3, 3))])
