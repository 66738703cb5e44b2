"""Test the other ways to name sources on planted scores and removals, and one case on a small model."""

from __future__ import annotations

import numpy as np
import pytest

import lens_mix as lm
from tests.tiny_models import available, bridge

# The scripts need TransformerLens 3 or later.
if not available(bridge, "llama"):
    pytest.skip("no TransformerBridge in this TransformerLens", allow_module_level=True)

from benchmarks.audit import rivals
from benchmarks.audit.cases import Case
from lens_mix.traces.claims import VERDICTS
from tests.traces.readers import reader

N_SOURCES, N_HEADS = 7, 5


def make_entry(seed: int, head: int = 2, count: int = 64) -> rivals.Entry:
    """Return a case in which two sources matter, and one head attends to them."""
    draw = np.random.default_rng(seed)
    gold = sorted(draw.choice(N_SOURCES, 2, replace=False).tolist())
    effects = np.where(np.isin(np.arange(N_SOURCES), gold), 6.0, 0.0)
    attention = draw.random((N_HEADS, N_SOURCES))
    attention[head] = 0.01 + effects
    masks = rivals.draw_masks(str(seed), N_SOURCES, count)
    whole = -0.5

    def log_probability(mask: str) -> float:
        return whole - float(effects[[kept == "0" for kept in mask]].sum())

    alone = ["1" * number + "0" + "1" * (N_SOURCES - number - 1) for number in range(N_SOURCES)]
    return {
        "n": N_SOURCES,
        "gold": gold,
        "planted": "supported",
        "form": "short",
        "written_tokens": 4,
        "attention": attention.tolist(),
        "gim": attention[head].tolist(),
        "audit": gold[:1],
        "audit_passes": 9,
        "whole": whole,
        "alone": list(map(log_probability, alone)),
        "masks": masks,
        "random": list(map(log_probability, masks)),
        **{name: [1.0] * N_SOURCES for name in rivals.WITHOUT_MODEL},
    }


def test_the_logit_is_that_of_the_probability() -> None:
    assert rivals.find_logit(np.log(0.25)) == pytest.approx(np.log(0.25 / 0.75))
    assert np.isfinite(rivals.find_logit(0.0))


def test_masks_keep_half_and_are_those_of_their_seed() -> None:
    masks = rivals.draw_masks("a", 10, 200)
    assert masks == rivals.draw_masks("a", 10, 200) != rivals.draw_masks("b", 10, 200)
    assert np.mean([mask.count("1") for mask in masks]) == pytest.approx(5, abs=0.5)


def test_ties_are_broken_against_the_way() -> None:
    assert rivals.rank([1.0, 1.0, 0.0], [0]) == [1, 0, 2]
    assert not rivals.is_first([0.0] * 3, [0, 2])
    assert rivals.is_first([0.0, 1.0], [1])


def test_words_find_the_source_with_the_same_words() -> None:
    pytest.importorskip("bm25s")
    texts = ["A cat sits near the park.", "The code of the cellar is 48213.", "The roof needs new tiles."]
    scores = rivals.score_words(texts, "The code of the cellar is 48213.")
    assert scores[1] > 0
    assert scores[0] == scores[2] == 0


@pytest.mark.parametrize("count", [32, 64])
def test_the_sparse_regression_finds_planted_sources(count: int) -> None:
    pytest.importorskip("sklearn")
    for seed in range(5):
        entry = make_entry(seed)
        scores = rivals.score_by_lasso(entry, count)
        assert sorted(rivals.rank(scores, [])[:2]) == entry["gold"]


def test_a_source_that_is_always_kept_has_no_weight() -> None:
    pytest.importorskip("sklearn")
    entry = make_entry(0)
    entry["masks"] = ["1" + mask[1:] for mask in entry["masks"]]
    assert rivals.score_by_lasso(entry, 64)[0] == 0


def test_the_head_and_the_weights_are_those_that_find_gold() -> None:
    chosen = [make_entry(seed) for seed in range(8)]
    assert rivals.choose_head(chosen) == 2
    weights = rivals.learn_weights(chosen)
    entry = make_entry(99)
    assert sorted(rivals.rank((weights @ np.array(entry["attention"])).tolist(), [])[:2]) == entry["gold"]


def test_each_way_has_its_passes_and_the_audit_may_name_fewer() -> None:
    pytest.importorskip("sklearn")
    chosen, entries = [make_entry(seed) for seed in range(6)], [make_entry(seed) for seed in range(10, 14)]
    named = rivals.name_sources(chosen, entries)
    passes = {name: found[0][1] for name, found in named.items()}
    assert passes == {
        **dict.fromkeys(rivals.WITHOUT_MODEL, 0),
        "attention, mean": 1,
        "attention, chosen head": 1,
        "learned weights of heads": 1,
        "gim": 3,
        "ContextCite, 32": 33,
        "ContextCite, 64": 65,
        "leave-one-out": N_SOURCES + 1,
        "audit": 12,
    }
    rows = {row["way"]: row for row in rivals.make_rows(entries, named)}
    assert rows["gim"]["first source, 95 %"] == rows["audit"]["first source, 95 %"] == "1.00 [0.51, 1.00]"
    assert rows["gim"]["recall, 95 %"].startswith("1.00")
    # It named one of two.
    assert rows["audit"]["recall, 95 %"].startswith("0.50")
    assert rows["random order"]["recall, 95 %"] == "0.29"
    # All its scores are equal.
    assert rows["BM25, answer"]["first source, 95 %"].startswith("0.00")


@pytest.mark.filterwarnings("ignore")
def test_a_case_is_measured_on_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bm25s")
    # The encoder is a real one, and its download has tests of its own.
    monkeypatch.setattr(rivals, "score_embeddings", lambda texts, query: [float(len(each)) for each in texts])
    text = "The plan has a model. Critics liked the new product. Trains run every hour."
    prompt = f"{text}\n\nQuestion: What has a model?\nAnswer:"
    gold = "The plan has a model."
    case = Case("report", "supported", "short", prompt, " The plan has.", "plan", (gold,))
    assert rivals.read_question(case) == "What has a model?"
    entry = rivals.measure(reader(), case, "plan", "seed")
    assert (entry["n"], entry["gold"]) == (3, [0])
    assert np.shape(entry["attention"])[1] == len(entry["gim"]) == len(entry["alone"]) == 3
    assert entry["BM25, answer"][0] > 0
    assert entry["audit_verdict"] in VERDICTS
    assert set(entry["audit"]) <= {0, 1, 2}
    assert 0 < entry["audit_passes"] <= rivals.BUDGET
    assert len(entry["masks"]) == len(entry["random"]) == 64
    # A random removal of one source is the removal of this source alone.
    values = dict(zip(entry["masks"], entry["random"], strict=True))
    expected = {"111": entry["whole"], **dict(zip(("011", "101", "110"), entry["alone"], strict=True))}
    assert {mask: values[mask] for mask in expected} == expected


def test_the_question_of_documents_is_read() -> None:
    case = Case("choose", "supported", "documents", lm.Documents({"a": "b c."}, "Why?"), "x", "x", ())
    assert rivals.read_question(case) == "Why?"
