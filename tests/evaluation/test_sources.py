"""Test the scores of sources against plain passes over prompts from which the sources' tokens are deleted."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import lens_mix as lm
from lens_mix.evaluation import (
    Case,
    ReplaceTokens,
    SourceAblations,
    Sources,
    lds,
    source_ablations,
    spearman,
    top_k_drop,
)
from tests import tiny_models
from tests.matrix import build_or_skip, causal_cases
from tests.tiny_models import bridge, llama_like, wrapped_model

PROMPT_LENGTH = 10
# The written tokens are at 7, 8 and 9, so position 6 has to stay; position 0 is in no source.
SOURCES = {"a": [1, 2], "b": [3], "c": [4, 5]}
START, STOP = 7, 10


TARGET = lm.targets.span(START, STOP)


def log_probability(model, prompt, removed) -> float:
    """Compute the log probability of the written tokens by a pass over the remaining tokens."""
    left = [position for position in range(len(prompt)) if position not in removed]
    start = left.index(START)
    with torch.no_grad():
        out = model(prompt[left][None])
    logits = (out if torch.is_tensor(out) else out.logits)[0].log_softmax(-1)
    return sum(float(logits[start - 1 + i, prompt[START + i]]) for i in range(STOP - START))


def positions_of(kept, sources=None) -> list[int]:
    groups = SOURCES.values() if sources is None else sources
    return [each for group, is_kept in zip(groups, kept, strict=True) if not is_kept for each in group]


@pytest.mark.parametrize("case", causal_cases(), ids=lambda case: case.label)
def test_ablations_are_passes_of_shorter_prompts(case):
    model = case.build()
    prompt = tiny_models.tokens(model, 1, 10)[0]
    found = source_ablations(model, prompt, SOURCES, target=TARGET, ablations=12)
    assert found.sources == ("a", "b", "c")
    assert found.clean == pytest.approx(log_probability(model, prompt, ()), abs=1e-5)
    for kept, value in zip(found.kept.tolist(), found.values.tolist(), strict=True):
        assert value == pytest.approx(log_probability(model, prompt, positions_of(kept)), abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_scores_are_those_of_the_hugging_face_model(name):
    model = build_or_skip(bridge, name, torch.float64)
    reference = wrapped_model(name, torch.float64)
    prompt, row = tiny_models.tokens(model, 1, 10)[0], torch.tensor([0.5, -1.0, 2.0])
    ablations = {"target": TARGET, "ablations": 20, "seed": 3}
    kept = torch.rand(20, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64) < 0.5
    values = [log_probability(reference, prompt, positions_of(each)) for each in kept.tolist()]
    expected = spearman(kept.double() @ row.double(), torch.tensor(values, dtype=torch.float64))
    assert lds(model, prompt, row, SOURCES, **ablations) == pytest.approx(expected, abs=1e-9)
    clean = log_probability(reference, prompt, ())
    drop = top_k_drop(model, prompt, row, SOURCES, target=TARGET, k=[1, 2, 3, 4])
    assert drop.ranked == ("c", "a", "b")
    for k, removed in enumerate(([4, 5], [4, 5, 1, 2], [4, 5, 1, 2, 3]), 1):
        expected = clean - log_probability(reference, prompt, removed)
        assert drop.drops[k] == pytest.approx(expected, abs=1e-6)
    assert math.isnan(drop.drops[4])
    assert math.isnan(drop.random[4])


def test_the_random_control_is_the_mean_of_random_orders(model, prompt):
    found = top_k_drop(model, prompt, torch.tensor([3.0, 2.0, 1.0]), SOURCES, target=TARGET, k=1, draws=60)
    singles = [found.clean - log_probability(model, prompt, group) for group in SOURCES.values()]
    orders = [torch.randperm(3, generator=torch.Generator().manual_seed(seed + 1)) for seed in range(60)]
    firsts = [singles[int(order[0])] for order in orders]
    assert len(set(firsts)) == 3
    assert found.random[1] == pytest.approx(sum(firsts) / 60, abs=1e-9)
    table = found.to_dataframe()
    assert list(table.columns) == ["row", "k", "drop", "random"]
    assert table["drop"].tolist() == pytest.approx([singles[0]])


# ------------------------------------------------------------------ planted cases


def planted(effects, ablations=64, seed=0) -> SourceAblations:
    """Return ablations in which the effects of the sources add up."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(ablations, len(effects), generator=generator) < 0.5
    values = kept.double() @ effects
    return SourceAblations(tuple(map(str, range(len(effects)))), kept, values, float(effects.sum()))


def test_true_effects_have_the_score_1_and_shuffled_ones_about_0():
    effects = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64).exp()
    effects -= effects.mean()
    ablations = planted(effects)
    assert ablations.lds(effects) == pytest.approx(1)
    assert ablations.lds(effects * 7) == pytest.approx(1)
    assert ablations.lds(-effects) == pytest.approx(-1)
    shuffled = []
    for seed in range(200):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        shuffled.append(planted(effects, seed=seed).lds(effects[order]))
    assert abs(sum(shuffled) / 200) < 0.05
    assert max(shuffled) < 1


def test_the_score_is_that_of_log_p_and_of_its_logit():
    effects = torch.tensor([-0.5, -2.0, -0.25, -1.0], dtype=torch.float64)
    ablations, row = planted(effects), torch.tensor([1.0, -1.0, 0.5, 3.0])
    log_p = ablations.values - 1
    logits = log_p - torch.log(-torch.expm1(log_p))
    assert dataclasses.replace(ablations, values=logits).lds(row) == ablations.lds(row)


def test_equal_scores_predict_the_number_of_sources():
    ablations = planted(torch.ones(6, dtype=torch.float64))
    assert ablations.lds(torch.full((6,), 0.1)) == pytest.approx(1)
    assert math.isnan(ablations.lds(torch.zeros(6)))


def test_effects_that_are_fitted_to_other_ablations_predict_these():
    """A linear model of the effects (ContextCite's), on a model that is not linear; shuffled, it does not."""
    model, true, shuffled = llama_like(torch.float64), [], []
    for seed in range(8):
        prompt = tiny_models.tokens(model, 1, 8, seed=seed)[0]
        groups = [[position] for position in range(1, 7)]
        fitted, held_out = (source_ablations(model, prompt, groups, seed=draw) for draw in (1, 2))
        kept = torch.cat([fitted.kept.double(), torch.ones(64, 1, dtype=torch.float64)], 1)
        effects = torch.linalg.lstsq(kept, fitted.values[:, None]).solution[:-1, 0]
        true.append(held_out.lds(effects))
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
        shuffled.append(held_out.lds(effects[order]))
    assert sum(true) / 8 > 0.6
    assert abs(sum(shuffled) / 8) < 0.3


# ------------------------------------------------------------------ what is read


def test_scores_of_positions_are_summed_and_maps_are_read(model, prompt):
    of_positions = torch.tensor([9.0, 1, 2, -1, 4, 5, 9, 9, 9, 9])
    of_sources = torch.tensor([3.0, -1, 9])
    scores = torch.stack([torch.zeros(10), of_positions])[None]
    by_token = lm.MixingMap(
        scores=scores, tokens=["t"] * 10, kind="input", queries=[0, 9], causal=False, method="by hand"
    )
    by_source = lm.MixingMap(
        scores=of_sources[None, None],
        tokens=["t"] * 10,
        key_tokens=["a", "b", "c"],
        kind="input",
        queries=[9],
    )
    rows = {"sources": of_sources, "list": [3.0, -1.0, 9.0], "positions": of_positions}
    rows |= {"map": by_token, "map of sources": by_source, "other": -of_sources}
    found = lds(model, prompt, rows, SOURCES, target=TARGET, ablations=16)
    assert list(found) == list(rows)
    assert len({found[name] for name in list(rows)[:-1]}) == 1
    assert found["other"] == pytest.approx(-found["sources"])
    alone = lds(model, prompt, by_token, SOURCES, target=TARGET, ablations=16)
    assert alone == pytest.approx(found["map"])
    drops = top_k_drop(model, prompt, rows, SOURCES, target=TARGET)
    assert {drop.ranked for name, drop in drops.items() if name != "other"} == {("c", "a", "b")}
    assert drops["other"].ranked == ("b", "a", "c")


def test_other_removals_and_targets(model, prompt):
    """The default target is the prediction at the last position, so sources may reach up to it."""
    found = source_ablations(model, prompt, [[1, 2], [9]], removal=ReplaceTokens(9), ablations=8)
    with torch.no_grad():
        token = int(model(prompt[None])[0, -1].argmax())
        for kept, value in zip(found.kept.tolist(), found.values.tolist(), strict=True):
            edited = prompt.clone()
            edited[positions_of(kept, [[1, 2], [9]])] = 9
            expected = model(edited[None])[0, -1].log_softmax(-1)[token]
            assert value == pytest.approx(float(expected), abs=1e-9)


def test_seeds_and_memory(model, prompt):
    usual = {"target": TARGET, "ablations": 16}
    first = source_ablations(model, prompt, SOURCES, **usual)
    again = source_ablations(model, prompt, SOURCES, max_memory=400_000, **usual)
    assert torch.equal(first.kept, again.kept)
    torch.testing.assert_close(first.values, again.values, atol=1e-9, rtol=0)
    other = source_ablations(model, prompt, SOURCES, seed=1, **usual)
    assert not torch.equal(first.kept, other.kept)
    row = torch.tensor([1.0, 3.0, 2.0])
    assert lds(model, prompt, row, SOURCES, **usual) == first.lds(row)


# ------------------------------------------------------------------ the leaderboard


def test_the_task_scores_rows_as_the_functions_do(model, prompt):
    case = Case(prompt[:7], sources=SOURCES)
    board = lm.evaluate(model, Sources([case], ablations=16), ["attention", "input_gradients"], ["mean"])
    assert {record["method"] for record in board.records} == {
        "random",
        "position",
        "attention",
        "input_gradients",
    }
    row = lm.layer_mean(lm.run(model, prompt[:7], "attention")).scores[-1, -1]
    record = next(record for record in board.records if record["method"] == "attention")
    assert record["lds"] == pytest.approx(lds(model, prompt[:7], row, SOURCES, ablations=16))
    drop = top_k_drop(model, prompt[:7], row, SOURCES)
    assert record["top_1_drop"] == pytest.approx(drop.drops[1])
    assert record["top_3_drop"] == pytest.approx(drop.drops[3])
    assert record["top_5_drop"] is None
    assert board.task == {"task": "sources", "removal": "drop", "ablations": 16, "seed": 0}
    assert "top_5_drop" in board.to_markdown("position")


def test_the_task_explains_several_tokens(model, prompt):
    """The rows before the written tokens are summed; a method with a target explains the whole span."""
    case = Case(prompt, query=(6, 7, 8), target=TARGET, sources=SOURCES)
    methods = ["attention", "input_gradients", "gradient_attention", lm.methods.TokenPatching()]
    board = lm.evaluate(model, Sources([case], ablations=16), methods, ["mean"])
    assert "token_patching" in board.refused
    explained = lm.run(model, prompt, lm.methods.InputGradients(target=TARGET), queries=[-1])
    by_head = lm.layer_mean(lm.run(model, prompt, lm.methods.GradientAttention(target=TARGET)))
    rows = {
        "attention": lm.layer_mean(lm.run(model, prompt, "attention")).scores[-1, [6, 7, 8]].sum(0),
        "input_gradients": explained.scores[-1, 0],
        "gradient_attention": by_head.scores[-1, [6, 7, 8]].sum(0),
    }
    expected = lds(model, prompt, rows, SOURCES, target=TARGET, ablations=16)
    found = {record["method"]: record["lds"] for record in board.records}
    assert found == pytest.approx({**found, **expected})
    assert set(found) == {"random", "position", *rows}


# ------------------------------------------------------------------ errors


def test_errors(model, prompt):
    row, target = torch.ones(3), TARGET
    for function in (lds, top_k_drop):
        with pytest.raises(ValueError, match=r"rows\['row'\]: expected one score per source, \[3\], or per"):
            function(model, prompt, torch.ones(4), SOURCES, target=target)
        with pytest.raises(ValueError, match=r"rows\['a'\]: expected finite scores"):
            function(model, prompt, {"a": torch.full((3,), math.nan)}, SOURCES, target=target)
        with pytest.raises(ValueError, match="at least one row"):
            function(model, prompt, {}, SOURCES, target=target)
        with pytest.raises(ValueError, match="removal: expected one of"):
            function(model, prompt, row, SOURCES, target=target, removal="cut")
        with pytest.raises(ValueError, match="expected an input map, got a layer map of 'attention'"):
            function(model, prompt, lm.run(model, prompt, "attention"), SOURCES, target=target)
        with pytest.raises(
            ValueError, match="sources: expected positions up to 5, because the target is first read"
        ):
            function(model, prompt, row, [[1], [2], [5, 6]], target=target)
        with pytest.raises(
            ValueError, match="sources: expected positions up to 8, because the target is first read"
        ):
            function(model, prompt, row[:1], [[9]], removal="zero_values", target=lm.targets.span(-1))
    with pytest.raises(ValueError, match="sources: expected each position in one group at most"):
        source_ablations(model, prompt, [[1, 2], [2]], target=target)
    with pytest.raises(ValueError, match="ablations: expected a whole number, 2 or more"):
        source_ablations(model, prompt, SOURCES, target=target, ablations=1)
    with pytest.raises(ValueError, match="k: expected a whole number, 1 or more"):
        top_k_drop(model, prompt, row, SOURCES, target=target, k=0)
    with pytest.raises(ValueError, match="draws: expected a whole number, 1 or more"):
        top_k_drop(model, prompt, row, SOURCES, target=target, draws=0)
    with pytest.raises(ValueError, match=r"scores: expected one finite score per source, \[3\]"):
        source_ablations(model, prompt, SOURCES, target=target, ablations=2).lds(torch.ones(2))
    with pytest.raises(ValueError, match="given: expected cases that name their sources"):
        Sources([Case(prompt)])
