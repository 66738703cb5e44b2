"""Test the benchmark of number agreement, on an encoder of two layers that was trained on three batches."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from benchmarks.number_agreement import __main__ as benchmark
from benchmarks.number_agreement import encoder, rows, table
from benchmarks.number_agreement.sentences import (
    CLS,
    NOUNS,
    SPECIAL,
    UNK,
    VERBS,
    sentences,
    token_ids,
    vocabulary,
)
from tests.tiny_models import available, bridge

TINY = encoder.Recipe(layers=2, heads=2, d_model=16, steps=3, tuning_steps=2, batch=8)
BERT = dataclasses.replace(TINY, blocks="bert")
with_bridge = pytest.mark.skipif(
    not available(bridge, "bert"), reason="no TransformerBridge in this TransformerLens"
)


def has_native() -> bool:
    """Return whether this TransformerLens can make a native bridge."""
    try:
        encoder.untrained(TINY)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.fixture(params=["gpt2", "bert"])
def found(request, tmp_path, monkeypatch) -> encoder.Classifier:
    if request.param == "gpt2" and not has_native():
        pytest.skip("no native TransformerBridge in this TransformerLens")
    if request.param == "bert" and not available(bridge, "bert"):
        pytest.skip("no TransformerBridge in this TransformerLens")
    monkeypatch.setenv("LENS_MIX_CACHE", str(tmp_path))
    return encoder.classifier("verb", dataclasses.replace(TINY, blocks=request.param))


# ------------------------------------------------------------------ sentences


def some(count: int, seed: int = 0) -> list:
    stream = sentences(seed)
    return [next(stream) for _ in range(count)]


def test_the_verb_agrees_with_the_subject_and_something_stands_between():
    for sentence in some(300):
        assert sentence.words[sentence.subject].endswith("s") == sentence.plural
        assert sentence.subject in sentence.nouns
        assert 1 <= sentence.attractors <= 4
        between = [place for place in sentence.nouns if place > sentence.subject]
        assert 1 <= len(between) <= 4
        for place, plural in zip(sentence.nouns, sentence.noun_plural, strict=True):
            word = sentence.words[place]
            assert (word.removesuffix("s") in NOUNS, word.endswith("s")) == (True, plural)


def test_verbs_in_clauses_agree_too():
    """After "that", a verb agrees with the noun before it, or a noun phrase with the verb after it."""
    forms = dict.fromkeys(VERBS, True) | {verb + "s": False for verb in VERBS}
    seen = 0
    for sentence in some(300):
        plural_at = dict(zip(sentence.nouns, sentence.noun_plural, strict=True))
        for place, word in enumerate(sentence.words):
            if word in forms:
                owner = max(noun for noun in sentence.nouns if noun < place)
                assert forms[word] == plural_at[owner]
                seen += 1
    assert seen > 100


def test_answers_can_not_be_guessed():
    drawn = some(2000)
    plural = np.mean([sentence.plural for sentence in drawn])
    fronted = np.mean([sentence.fronted for sentence in drawn])
    last = np.mean([sentence.last_noun_plural == sentence.plural for sentence in drawn])
    assert abs(plural - 0.5) < 0.05
    assert abs(fronted - 0.4) < 0.05
    assert last < 0.45


def test_a_seed_gives_the_same_sentences_and_every_word_has_a_number():
    assert some(50, seed=3) == some(50, seed=3)
    assert some(50, seed=3) != some(50, seed=4)
    words = list(vocabulary())
    assert sorted(vocabulary().values()) == list(range(len(words)))
    for sentence in some(50):
        ids = token_ids(sentence)
        assert [words[token] for token in ids] == [CLS, *sentence.words]
        assert len(ids) <= encoder.CONTEXT
        assert not set(sentence.words) & set(SPECIAL)


# ------------------------------------------------------------------ the encoder


def test_training_is_kept_and_the_same_again(found, tmp_path, monkeypatch):
    ids = [token_ids(sentence) for sentence in some(5)]
    logits = found.logits(ids)
    assert logits.shape == (5, 2)
    assert (encoder.untrained(found.recipe).logits(ids) - logits).abs().max() > 1e-6
    assert torch.equal(encoder.classifier("verb", found.recipe).logits(ids), logits)
    monkeypatch.setenv("LENS_MIX_CACHE", str(tmp_path / "again"))
    assert torch.equal(encoder.classifier("verb", found.recipe).logits(ids), logits)
    # Padding changes no logits.
    alone = torch.cat([found.logits([row]) for row in ids])
    assert (alone - logits).abs().max() < 1e-5


def test_accuracy_counts_right_answers(found):
    drawn = some(20)
    logits = found.logits([token_ids(sentence) for sentence in drawn])
    right = sum(bool(row[1] > row[0]) == sentence.plural for row, sentence in zip(logits, drawn, strict=True))
    assert found.accuracy(drawn) == right / 20


# ------------------------------------------------------------------ importance and rows


def test_blank_out_one_word_at_a_time(found):
    (sentence,) = some(1)
    ids = token_ids(sentence)
    importance = rows.blank_out(found, ids, 1)
    assert importance.shape == (len(sentence.words),)

    def probability(row):
        return found.of_output(found.model(torch.tensor([row]))).softmax(-1)[0, 1].item()

    for place in range(len(sentence.words)):
        changed = ids.copy()
        changed[place + 1] = vocabulary()[UNK]
        expected = abs(probability(changed) - probability(ids))
        assert importance[place].item() == pytest.approx(expected, abs=1e-6)


def test_input_gradients_are_the_slope_of_the_margin(found):
    (sentence,) = some(1, seed=5)
    ids = token_ids(sentence)
    norms = rows.input_gradients(found, ids, 1)
    words = next(
        module
        for module in found.model.modules()
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == len(vocabulary())
    )
    place, step = 2, 1e-2
    gradient = torch.zeros(TINY.d_model)
    for coordinate in range(TINY.d_model):
        values = []
        for sign in (1, -1):

            def nudge(module, args, out, sign=sign, coordinate=coordinate):
                out = out.clone()
                out[0, place + 1, coordinate] += sign * step
                return out

            handle = words.register_forward_hook(nudge)
            logits = found.of_output(found.model(torch.tensor([ids])))[0]
            handle.remove()
            values.append((logits[1] - logits[0]).item())
        gradient[coordinate] = (values[0] - values[1]) / (2 * step)
    assert norms[place].item() == pytest.approx(gradient.norm().item(), rel=0.02)


def test_every_method_has_its_rows(found):
    (sentence,) = some(1)
    ids, answer = rows.ids_and_answer(found, sentence)
    names = rows.supported(found)
    made = list(rows.rows(found, ids, answer, names))
    assert {row.method for row in made} == set(names)
    assert {row.layer for row in made} == {1, 2}
    assert all(row.scores.shape == (len(sentence.words),) for row in made)
    by_name = {(row.method, row.aggregation, row.layer): row.scores for row in made}
    mean = (by_name["attention", "row", 1] + by_name["attention", "row", 2]) / 2
    assert np.abs(by_name["attention", "mean of rows", 2] - mean).max() < 1e-6
    # With one layer, a roll-out with half an identity halves the row, and the flow is the same.
    first = by_name["attention", "row", 1] / 2
    assert np.abs(by_name["attention", "rollout", 1] - first).max() < 1e-6
    assert np.abs(by_name["attention", "flow", 1] - first).max() < 1e-6


# ------------------------------------------------------------------ the table


def test_correlations_are_scipys():
    draw = np.random.default_rng(0)
    importance = draw.integers(0, 5, 12).astype(float)
    given = [rows.Row("m", "row", 1, draw.random(12)), rows.Row("m", "row", 2, np.ones(12))]
    frame = table._correlate(given, importance)
    assert frame.spearman[0] == pytest.approx(scipy.stats.spearmanr(given[0].scores, importance).statistic)
    assert math.isnan(frame.spearman[1])
    # The partial correlation is that of the residuals of a line through the ranks of the position.
    position = np.arange(12.0)

    def left(values):
        ranks = scipy.stats.rankdata(values)
        return ranks - np.polyval(np.polyfit(position, ranks, 1), position)

    expected = np.corrcoef(left(given[0].scores), left(importance))[0, 1]
    assert frame.partial[0] == pytest.approx(expected)


@pytest.mark.slow
def test_what_is_the_importance_itself_correlates_fully(found):
    summary = table.summary(table.measure(found, some(3)))
    same = summary[(summary.method == summary.importance) & (summary.aggregation == "importance")]
    assert same.spearman.tolist() == pytest.approx([1.0, 1.0])
    assert set(summary.weights) == {"trained", "untrained"}
    assert {"random", "position (later is more)", "the subject alone"} <= set(summary.method)


@pytest.mark.slow
@with_bridge
@pytest.mark.skipif(not has_native(), reason="no native TransformerBridge in this TransformerLens")
def test_the_whole_page(tmp_path, monkeypatch):
    monkeypatch.setenv("LENS_MIX_CACHE", str(tmp_path))
    sizes = benchmark.Sizes(TINY, seeds=1, sentences=8, others=4)
    page = "\n".join(benchmark.make(name, sizes) for name in benchmark.PARTS)
    for heading in ("The encoders", "The paper's own table", "Every map", "Pruning", "Trees", "Probing"):
        assert f"# {heading}\n" in page
    for line in re.findall(r"^\|.*$", page, re.MULTILINE):
        assert line.endswith("|")
    assert not re.search(r"\bnan\b", page)


def test_the_pages_in_the_repository_are_this_scripts():
    folder = Path(benchmark.__file__).parent / "results"
    assert {path.stem for path in folder.iterdir()} == set(benchmark.PARTS)
    for path in folder.iterdir():
        assert path.read_text(encoding="utf-8").startswith(f"# Number agreement: {path.stem}\n\nWritten by")
