"""Test the benchmark of word alignment, on a translator of one layer that was trained on two batches."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.alignment import hansards, known, language, translator
from benchmarks.alignment.cells import Cell, Table, compared, counts_of, every_second
from lens_mix import MixingMap
from lens_mix.experiments import GoldAlignment, align, alignment_errors
from tests.tiny_models import available, bridge

TINY = translator.Recipe(layers=1, heads=2, d_model=16, steps=2, batch=4)
with_bridge = pytest.mark.skipif(
    not available(bridge, "marian"), reason="no TransformerBridge that runs Marian in this TransformerLens"
)


def some(count: int) -> list[language.Pair]:
    return list(itertools.islice(language.pairs(3), count))


# ------------------------------------------------------------------ the language


def test_every_word_of_the_translation_has_one_source_word() -> None:
    for pair in some(200):
        assert sorted(target for _, target in pair.links) == list(range(len(pair.target_words)))
        for ids, words in ((pair.source, pair.source_words), (pair.target, pair.target_words)):
            assert [place for word in words for place in word] == list(range(len(ids) - 1))
            assert ids[-1] == language.END


def test_a_clause_is_put_in_the_order_of_the_other_language() -> None:
    """The clause is determiner, two adjectives, noun, verb, adverb, determiner and noun."""
    words = [("determiner", 1), ("adjective", 0), ("adjective", 1), ("noun", 0), ("verb", 0)]
    words += [("adverb", 0), language.PLAIN, ("noun", 1)]
    order = [(5, 0), (5, 1), (0, 0), (3, 0), (2, 0), (1, 0), (7, 0), (4, 0)]
    source, target = language._draw_lexicon(1), language._draw_lexicon(2)
    sentences = (language._draw_sentence(random.Random(seed)) for seed in itertools.count())
    kinds = [word[0] for word in words]
    found = next(
        found_order
        for found_words, found_order in sentences
        if [word[0] for word in found_words] == kinds
        and [word == language.PLAIN for word in found_words] == [word == language.PLAIN for word in words]
    )
    assert found == order
    pair = language._write(words, order, source, target)
    assert pair.links == {(5, 0), (5, 1), (0, 2), (3, 3), (2, 4), (1, 5), (7, 6), (4, 7)}
    assert tuple(pair.target[place] for place in pair.target_words[3]) == target[("noun", 0), 0]
    assert tuple(pair.target[place] for place in pair.target_words[1]) == target[("adverb", 0), 1]


def test_another_word_of_its_kind_changes_its_own_translation_alone() -> None:
    source, target = language._draw_lexicon(1), language._draw_lexicon(2)
    words = {pieces: word for (word, half), pieces in source.items() if half == 0}
    for pair in some(50):
        for number, other in enumerate(pair.others):
            spelt = tuple(pair.source[place] for place in pair.source_words[number])
            word = words[spelt]
            assert (other == ()) == (word in (("comma", 0), language.PLAIN))
            if other:
                assert words[other][0] == word[0]
                assert words[other] not in (word, language.PLAIN)
                assert target[words[other], 0] != target[word, 0]


# ------------------------------------------------------------------ the translator


def test_the_translator_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENS_MIX_CACHE", str(tmp_path))
    model = translator.translator(TINY)
    monkeypatch.setattr(translator, "_train", None)
    again = translator.translator(TINY)
    first, trained = translator.untrained(TINY).state_dict(), model.state_dict()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in trained.items())
    assert any(not torch.equal(tensor, trained[name]) for name, tensor in first.items())
    assert 0 <= translator.accuracy(model, some(5)) <= 1


class Copier(torch.nn.Module):
    """A model that knows the source word of each word of a translation, and nothing else."""

    def __init__(self, pair: language.Pair) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, input_ids: Any, attention_mask: Any, decoder_input_ids: Any) -> Any:
        pair = self.pair
        logits = torch.zeros(*decoder_input_ids.shape, language.VOCABULARY)
        logits[:, range(len(pair.target)), list(pair.target)] = 9.0
        for row in range(1, len(input_ids)):
            number = [n for n, other in enumerate(pair.others) if other][row - 1]
            for source, word in pair.links:
                if source == number:
                    places = list(pair.target_words[word])
                    logits[row, places, [pair.target[place] for place in places]] = 0.0
        return dataclasses.make_dataclass("Output", ["logits"])(logits)


def test_swapping_finds_what_a_model_goes_by() -> None:
    for pair in some(10):
        found, gold = known.by_swapping(Copier(pair), pair)
        assert found == gold.sure
        assert gold.sure <= pair.links
    wrong = dataclasses.replace(pair, links=frozenset((s, (t + 1) % len(pair.links)) for s, t in pair.links))
    found, gold = known.by_swapping(Copier(pair), wrong)
    assert alignment_errors([found], [gold]).error_rate > 0.5


# ------------------------------------------------------------------ tables


@with_bridge
def test_every_map_of_the_translator_is_measured() -> None:
    model, examples = translator.bridged(translator.untrained(TINY)), some(2)
    table = known.measure(model, examples)
    assert {cell.map for cell in table.errors} >= {
        "weights",
        "norms",
        "alti",
        "attention_attribution",
        "random",
    }
    assert {cell.head for cell in table.errors if cell.map == "norms"} == {None, 0, 1}
    weights = [known.maps_of(model, pair)["weights"] for pair in examples]
    words = [(pair.source_words, known.target_words(pair)) for pair in examples]
    links = [align(cross, *each, rows="AWI", head=1) for cross, each in zip(weights, words, strict=True)]
    expected = alignment_errors(links, [known.gold_of(pair) for pair in examples])
    assert table.errors[Cell("weights", "AWI", False, 0, 1)] == expected
    assert len(compared(table)) == 12


def test_the_reference_is_the_log_probability_of_the_translation() -> None:
    (pair,) = some(1)
    logits = torch.randn(2, len(pair.target), language.VOCABULARY)
    expected = [
        sum(row[place].log_softmax(0)[token] for place, token in enumerate(pair.target)) for row in logits
    ]
    torch.testing.assert_close(known.reference(pair)(logits), torch.stack(expected))


def test_the_best_is_chosen_on_one_half_and_measured_on_the_other() -> None:
    right, wrong = (1, 1, 1, 1), (1, 1, 0, 0)
    one, two = Cell("weights", "AWO", True, 0), Cell("weights", "AWO", True, 1)
    table = Table([{one: right, two: wrong}, {one: wrong, two: right}] * 2)
    assert table.best("weights", "AWO", True)[1].error_rate == 0.5
    assert table.best_elsewhere("weights", "AWO", True) == 1.0
    assert every_second(table.errors[one], 0).error_rate == 0.0
    assert table.layer_mean("weights", "AWO", True).mean() == pytest.approx(0.5)


# ------------------------------------------------------------------ the Hansards


class Words:
    """A tokenizer that makes a token of every letter."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [*map(ord, text), *([1] if add_special_tokens else [])]}


def test_a_forced_pair_has_the_prompt_the_start_and_the_end() -> None:
    pair = hansards.forced(Words(), ["ab", "c"], ["x", "yz"], 0, 1)
    prompt = len("translateEnglishtoFrench:")
    assert pair.prompt == prompt
    assert pair.source[prompt:] == [ord("a"), ord("b"), ord("c"), 1]
    assert pair.source_words == [[prompt, prompt + 1], [prompt + 2]]
    assert pair.target == [0, ord("x"), ord("y"), ord("z")]
    assert pair.target_words == [[1], [2, 3]]
    scores = torch.zeros(1, 4, prompt + 4)
    scores[0, 0, prompt + 2] = scores[0, 1:, prompt] = 1.0
    cross = MixingMap(scores=scores, tokens=list("sxyz"), key_tokens=["k"] * (prompt + 4))
    assert align(cross, pair.source_words, pair.target_words) == {(1, 0), (0, 1)}


def test_measuring_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has two whole lines, one of them twice, and half of a third."""
    file, asked = tmp_path / "pairs.jsonl", []
    lines = [json.dumps({"pair": number, "tokens": 7}) + "\n" for number in (2, 0, 0)]
    file.write_text("".join(lines) + '{"pair": 1, "tok')
    monkeypatch.setattr(hansards, "flan_t5", object)

    def measure(_model: Any, number: int, gold: GoldAlignment) -> dict[str, Any]:
        asked.append((number, counts_of([], gold)[1]))
        return {"pair": number, "tokens": 5}

    monkeypatch.setattr(hansards, "measure", measure)
    for _ in range(2):
        found = hansards.measured(4, file)
        assert [(one["pair"], one["tokens"]) for one in found] == [(0, 7), (1, 5), (2, 7), (3, 5)]
    assert [number for number, _ in asked] == [1, 3]
    assert asked[0][1] == 2  # These are the sure links of the second pair.
