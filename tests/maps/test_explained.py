"""Test that a map keeps what its rows explain, through every change and every file."""

import pytest
import torch

import lens_mix as lm
from lens_mix.maps import MixingMap, Source
from lens_mix.maps.explained import Explained
from lens_mix.tables import read_csv
from tests.random_maps import random_attention

TOKENS = ["The", " city", ",", " in"]
ENTRIES = (
    Explained(" city", 0.5, ((" town", 0.25),)),
    Explained(),
    Explained(" which", 0.75, (), "logit of ' which'", 2.5),
    Explained(" Italy", 0.66, (), "logit of ' France' minus that of ' Italy'", -1.5),
)


def explained_map(**changes):
    fields = {"scores": random_attention(2, None, 4), "tokens": TOKENS, "causal": True, "explained": ENTRIES}
    return MixingMap(**{**fields, **changes})


def test_a_row_in_words():
    mixing_map = explained_map()
    # The unit is named unless it is the log probability of the prediction.
    assert mixing_map.explanation(2) == "after ',': ' which' 0.75; logit of ' which' = 2.5"
    usual = [entry._replace(target="log probability of ' which'", value=-0.3) for entry in ENTRIES[2:3] * 4]
    assert explained_map(explained=usual).explanation(2) == "after ',': ' which' 0.75"
    assert mixing_map.explanation() == (
        "after ' in': ' Italy' 0.66; logit of ' France' minus that of ' Italy' = -1.5"
    )
    assert mixing_map.explanation(1) == ""
    assert repr(mixing_map).endswith(
        "; after ' in': ' Italy' 0.66; logit of ' France' minus that of ' Italy' = -1.5)"
    )
    assert explained_map(causal=False).explanation(0) == "at 'The': ' city' 0.50"
    assert explained_map(explained=None).explanation() == ""


def test_rows_of_a_causal_map_are_labeled_with_the_next_token():
    assert explained_map().row_labels == ["The → city", " city", ", → which", "in → Italy"]
    assert explained_map(causal=False).row_labels == TOKENS
    assert explained_map(explained=None).row_labels == TOKENS
    assert explained_map(causal=False, provenance={"predicts_next": True}).row_labels[2] == ", → which"


def test_top_says_what_it_explains():
    top = explained_map().top(2, query=2)
    assert top == [Source(TOKENS[each.position], each.position, each.score) for each in top]
    assert [each.score for each in top] == explained_map().scores[-1, 2].topk(2).values.tolist()
    assert str(top).splitlines()[0] == (
        "layer 1 of 0 to 1; after ',': ' which' 0.75; logit of ' which' = 2.5"
    )
    assert str(top).splitlines()[1].split()[0] == f"{top[0].score:.4g}"
    assert len(str(top).splitlines()) == 3
    assert str(explained_map(explained=None).top(2)).splitlines()[0] == "layer 1 of 0 to 1"


@pytest.mark.parametrize(
    ("changes", "options", "read"),
    [
        ({}, {"layer": 0}, "layer 0 of 0 to 1"),
        ({"layers": [3, 7]}, {"layer": 3}, "layer 3 of 3, 7"),
        ({"scores": random_attention(1, None, 4), "layers": [5]}, {}, "layer 5"),
        ({"scores": random_attention(2, 3, 4)}, {}, "layer 1 of 0 to 1, mean of 3 heads"),
        ({"scores": random_attention(2, 3, 4)}, {"head": 2}, "layer 1 of 0 to 1, head 2"),
        ({"scores": random_attention(2, 1, 4)}, {}, "layer 1 of 0 to 1, mean of 1 head"),
        ({"kind": "input"}, {}, "input map, layer 1 of 0 to 1"),
        ({"scores": random_attention(1, None, 4), "kind": "input"}, {}, "input map"),
        (
            {"provenance": {"part": "cross", "target_token_ids": [1, 2]}},
            {},
            "cross, layer 1 of 0 to 1",
        ),
        ({"provenance": {"part": "decoder"}}, {}, "layer 1 of 0 to 1"),
    ],
)
def test_top_names_the_layer_the_heads_and_the_part_that_it_reads(changes, options, read):
    top = explained_map(explained=None, **changes).top(2, **options)
    assert top.read == read
    assert str(top).splitlines()[0] == read
    explained = explained_map(**changes).top(2, **options)
    assert str(explained).splitlines()[0] == f"{read}; {explained.explanation}"


def test_one_note_is_singular():
    assert ", 1 note, " in repr(explained_map(notes=("one",)))
    assert ", 2 notes, " in repr(explained_map(notes=("one", "two")))


def test_rows_keep_their_entries():
    mixing_map = explained_map()
    assert mixing_map.select_queries([3, 0]).explained == (ENTRIES[3], ENTRIES[0])
    assert mixing_map.drop([0, 1]).explained == ENTRIES[2:]
    assert mixing_map.normalized().layer(1).explained == ENTRIES
    assert lm.rollout(mixing_map, residual=0.5).explained == ENTRIES
    assert lm.flow(mixing_map, residual=0.5).explained == ENTRIES
    words = mixing_map.merge_words([[0, 1], [2, 3]])
    # The token after a word is predicted at the word's last token.
    assert words.explained == (ENTRIES[1], ENTRIES[3])
    # The first row of a longer word does not explain the token after the word.
    first = mixing_map.merge_words([[0, 1], [2], [3]], queries="first")
    assert first.explained == (Explained(), *ENTRIES[2:])
    assert (mixing_map - mixing_map).explained == ENTRIES
    assert (mixing_map - explained_map(explained=None)).explained is None


def test_a_difference_of_a_decoders_cross_attention_still_predicts_the_next_token():
    mixing_map = explained_map(causal=False, provenance={"predicts_next": True}, key_tokens=list("wxyz"))
    assert (mixing_map - mixing_map).row_labels == mixing_map.row_labels
    assert mixing_map.row_labels[2] == ", → which"


def test_files_and_tables_keep_the_entries(tmp_path):
    mixing_map = explained_map().select_queries([3, 0, 1])
    mixing_map.save(tmp_path / "map.safetensors")
    assert MixingMap.load(tmp_path / "map.safetensors").explained == mixing_map.explained
    table = mixing_map.to_dataframe()
    # A table is read back with its rows in order.
    assert MixingMap.from_dataframe(table).explained == (ENTRIES[0], ENTRIES[1], ENTRIES[3])
    assert MixingMap.from_xarray(mixing_map.to_xarray()).explained == mixing_map.explained
    table.to_csv(tmp_path / "map.csv", index=False)
    read = MixingMap.from_dataframe(read_csv(tmp_path / "map.csv"))
    assert [entry.prediction for entry in read.explained] == [" city", None, " Italy"]
    assert read.explained[2].probability == pytest.approx(0.66)
    assert set(table.loc[table["query"] == 3, "prediction"]) == {" Italy"}


@pytest.mark.parametrize(
    ("explained", "error", "words"),
    [
        (ENTRIES[:2], ValueError, "expected 4 entries, one per row"),
        (["Italian"] * 4, TypeError, "expected one lens_mix.maps.explained.Explained"),
        ([Explained("a", 1.5)] * 4, ValueError, "from 0 to 1"),
        ([Explained("a")] * 4, ValueError, "a prediction with its probability"),
    ],
)
def test_wrong_entries(explained, error, words):
    with pytest.raises(error, match=words):
        explained_map(explained=explained)


def test_entries_of_nothing_are_unknown():
    assert explained_map(explained=[None] * 4).explained is None
    assert torch.equal(explained_map(explained=None).scores, explained_map().scores)
