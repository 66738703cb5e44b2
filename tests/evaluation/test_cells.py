"""Test the faithfulness of layer maps' cells against patterns that are replaced one by one."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

import lens_mix as lm
from lens_mix.evaluation import CellFaithfulness, bootstrap, keep_cells, pool_cells
from lens_mix.hooks import must_fire, record_all, replace_pattern
from tests import tiny_models
from tests.hugging_face_oracle import Reference, edited_weights
from tests.matrix import build_or_skip, cases, prompt_of
from tests.random_maps import map_of
from tests.tiny_models import bridge, gpt2_like, llama_like, toy_tokenizer, wrapped_model

HALF = (0.0, 0.5, 1.0)
PROMPT_LENGTH = 6


def uniform_map(length: int, layers: int = 2, heads: int | None = None, seed: int = 0) -> lm.MixingMap:
    """Draw all cells alike. Those of attention are larger in short rows."""
    shape = (layers, length, length) if heads is None else (layers, heads, length, length)
    generator = torch.Generator().manual_seed(seed)
    return map_of(torch.rand(shape, generator=generator, dtype=torch.float64).tril())


def kept_by_hand(scores: torch.Tensor, count: int, keep_diagonal: bool = True) -> torch.Tensor:
    """Return the kept cells [layer (head) query key]: the `count` best of all layers below the diagonal."""
    length = scores.shape[-1]
    diagonal = torch.eye(length, dtype=torch.bool).expand_as(scores)
    ranked = torch.ones(length, length, dtype=torch.bool).tril().expand_as(scores)
    ranked = ranked & ~diagonal if keep_diagonal else ranked
    best = scores.masked_fill(~ranked, -math.inf).flatten().argsort(descending=True)[:count]
    kept = (diagonal & keep_diagonal).flatten()
    kept[best] = True
    return kept.view_as(scores)


def edited(clean: torch.Tensor, kept: torch.Tensor, operator: str) -> torch.Tensor:
    """Return a layer's pattern [head query key] with some cells kept, row by row."""
    if operator == "zero":
        return clean * kept
    pattern = torch.zeros_like(clean)
    for head, query in ((h, q) for h in range(clean.shape[0]) for q in range(clean.shape[1])):
        for key in range(query + 1):
            if kept.expand_as(clean)[head, query, key]:
                pattern[head, query, key] += clean[head, query, key]
            else:  # The operator "mean" distributes the removed weight over the visible keys.
                pattern[head, query, : query + 1] += clean[head, query, key] / (query + 1)
    return pattern


def log_probability(logits: torch.Tensor, token: int) -> float:
    return float(logits[0, -1].log_softmax(-1)[token].detach())


@pytest.mark.parametrize("operator", ["zero", "mean"])
@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("keep_diagonal", [True, False])
def test_cells_are_removed_as_by_hand(model, prompt, operator, heads, keep_diagonal):
    """Replace the clean patterns by `replace_pattern`, once per layer and share."""
    mixing, store = uniform_map(6, heads=heads), {}
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(2)]
    with torch.no_grad(), model.hooks(fwd_hooks=record_all(store, names)):
        clean = model(prompt[None])
    token = int(clean[0, -1].argmax())
    found = keep_cells(
        model, prompt, mixing, operator=operator, fractions=[0.3, 0.8], keep_diagonal=keep_diagonal
    )
    total = 2 * (heads or 1) * (15 if keep_diagonal else 21)
    assert found.cells == total
    for share, value in zip(found.shares, found.values, strict=True):
        kept = kept_by_hand(mixing.scores, round(share * total), keep_diagonal)
        patterns = [edited(store[names[i]][0], kept[i], operator) for i in range(2)]
        with torch.no_grad(), must_fire(*[replace_pattern(i, p) for i, p in enumerate(patterns)]) as hooks:
            logits = model.run_with_hooks(prompt[None], fwd_hooks=hooks)
        assert value == pytest.approx(log_probability(logits, token), abs=1e-9)
    assert found.shares == pytest.approx([0, round(0.3 * total) / total, round(0.8 * total) / total, 1])


@pytest.mark.parametrize("operator", ["zero", "mean"])
def test_cells_are_removed_as_in_the_hugging_face_model(operator):
    """The reference changes the weights of transformers' own attention, without a hook of TransformerLens."""
    model = build_or_skip(bridge, "llama", torch.float64)
    reference_model = wrapped_model("llama", torch.float64)
    reference_model.set_attn_implementation("eager")
    prompt = tiny_models.tokens(model, 1, 6)
    reference = Reference(reference_model, prompt)
    with torch.no_grad():
        weights = reference.attention()
        token = int(reference_model(prompt).logits[0, -1].argmax())
    mixing = uniform_map(6)
    found = keep_cells(model, prompt, mixing, operator=operator, fractions=[0.2, 0.6])
    for share, value in zip(found.shares, found.values, strict=True):
        kept = kept_by_hand(mixing.scores, round(share * 30))
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for layer in range(2):
                pattern = edited(weights[layer], kept[layer], operator)

                def mix(_, values, pattern=pattern):
                    return torch.einsum("hqk,bhkd->bqhd", pattern, values)

                stack.enter_context(edited_weights(reference._attention(layer), mix))
            logits = reference_model(prompt, use_cache=False).logits
        assert value == pytest.approx(log_probability(logits, token), abs=1e-6)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.label)
def test_every_model_gives_its_own_target_with_all_cells(case):
    """All cells kept give the clean target. None kept, without the diagonal, equals pruning all heads."""
    model = case.build()
    if case.refusal is not None:
        with pytest.raises(lm.UnsupportedModelError, match=case.refusal):
            keep_cells(model, torch.tensor([3, 4, 5]), uniform_map(3), part=case.part)
        return
    prompt = prompt_of(model)
    if case.wrong_logits:
        with pytest.raises(lm.UnsupportedModelError, match="logits that a target reads are wrong"):
            keep_cells(model, prompt, uniform_map(prompt[0].shape[1]), part=case.part)
        return
    lens = lm.Lens(model, case.part)
    length = (prompt if not isinstance(prompt, tuple) else prompt[case.part == "decoder"]).shape[1]
    mixing = uniform_map(length, heads=lens.n_heads)
    options = {"fractions": [0.5], "part": case.part, "target": lm.targets.logit(7)}
    found = keep_cells(model, prompt, mixing, keep_diagonal=False, **options)
    everything = [(layer, head) for layer in range(lens.n_layers) for head in range(lens.n_heads)]
    with lens.evaluation_mode():
        arguments = (prompt,) if not isinstance(prompt, tuple) else prompt
        keywords = {}
        if isinstance(prompt, tuple) and type(model).__name__ == "TransformerBridge":
            arguments, keywords = prompt[:1], {"decoder_input": prompt[1]}
        clean = model(*arguments, **keywords)[0, -1, 7]
        with lm.experiments.pruned(model, everything, part=case.part):
            pruned = model(*arguments, **keywords)[0, -1, 7]
    assert found.values[-1] == pytest.approx(float(clean), abs=1e-4)
    assert found.values[0] == pytest.approx(float(pruned), abs=1e-4)
    assert found.values[1] not in (found.values[0], found.values[-1])


def test_areas_by_hand():
    curve = CellFaithfulness("map", "zero", (0.0, 0.5, 1.0), (-4.0, -1.0, -2.0), 10)
    assert curve.faithfulness == (0, 1.5, 1)
    assert curve.cpr == pytest.approx(0.5 * 0.75 + 0.5 * 1.25)
    assert curve.cmd == pytest.approx(0.5 * (1 + 0.5) / 2 + 0.5 * (0.5 + 0) / 2)
    assert curve.area == pytest.approx(0.5 * -2.5 + 0.5 * -1.5)
    assert curve.distance == pytest.approx(0.5 * 1.5 + 0.5 * 0.5)
    assert list(curve.to_dataframe()["faithfulness"]) == [0, 1.5, 1]
    flat = CellFaithfulness("map", "zero", HALF, (-2.0, -1.0, -2.0), 10)
    assert all(map(math.isnan, (*flat.faithfulness, flat.cpr, flat.cmd)))


def test_pooling_averages_the_target_first():
    first = CellFaithfulness("map", "zero", HALF, (0.0, 1.0, 4.0), 10)
    second = CellFaithfulness("map", "zero", (0.0, 0.4, 1.0), (0.0, 0.0, 0.1), 5)
    pooled = pool_cells([first, second])
    assert pooled.values == pytest.approx((0, 0.5, 2.05))
    assert pooled.shares == pytest.approx((0, 0.45, 1))
    assert pooled.faithfulness[1] == pytest.approx(0.5 / 2.05)
    assert pooled.cells == 15
    with pytest.raises(ValueError, match="one map with one operator"):
        pool_cells([first, CellFaithfulness("map", "mean", HALF, (0.0, 1.0, 4.0), 10)])


def test_maps_share_ties_and_passes(model, prompt):
    maps = {"a": uniform_map(6), "b": uniform_map(6, heads=4, seed=1)}
    together = keep_cells(model, prompt, maps)
    assert list(together) == ["a", "b"]
    for name, mixing in maps.items():
        alone = keep_cells(model, prompt, mixing)
        # A processor may round products differently if cells of other maps are in the same batch.
        assert together[name].values == pytest.approx(alone.values, abs=1e-12)
    # Scores that differ only in scale have one order, in which ties are broken alike.
    constant = uniform_map(6).replace(scores=torch.ones(2, 6, 6).tril())
    again = pytest.approx(keep_cells(model, prompt, constant).values, abs=1e-12)
    assert keep_cells(model, prompt, constant).values == again
    other = keep_cells(model, prompt, constant, seed=1)
    assert other.values[3:6] != pytest.approx(keep_cells(model, prompt, constant).values[3:6], abs=1e-6)


def test_what_a_map_says_of_hidden_keys_is_nothing(model, prompt):
    """A map by hand may have scores above the diagonal, but the cells are those of the model."""
    scores = uniform_map(6).scores
    loud = lm.MixingMap(scores=scores + 9 * torch.ones(6, 6).triu(1), tokens=list("abcdef"))
    expected = pytest.approx(keep_cells(model, prompt, uniform_map(6)).values, abs=1e-12)
    assert keep_cells(model, prompt, loud).values == expected


def test_layers_that_a_map_does_not_hold_stay(model, prompt):
    upper = uniform_map(6).select_layers([1])
    found = keep_cells(model, prompt, upper, fractions=[])
    both = keep_cells(model, prompt, uniform_map(6), fractions=[])
    assert found.cells == 15
    assert found.values[1] == pytest.approx(both.values[1], abs=1e-12)
    assert found.values[0] != pytest.approx(both.values[0], abs=1e-4)


def test_little_memory_gives_the_same(model, prompt):
    expected = keep_cells(model, prompt, uniform_map(6))
    with torch.no_grad():
        found = keep_cells(model, prompt, uniform_map(6), max_memory=400_000)
    assert found.values == pytest.approx(expected.values, abs=1e-9)
    with pytest.raises(ValueError, match="max_memory: expected at least"):
        keep_cells(model, prompt, uniform_map(6), max_memory=10)


def test_one_token_has_no_cells(model):
    found = keep_cells(model, [5], lm.run(model, [5], "attention"))
    assert found.cells == 0
    assert found.values[0] == pytest.approx(found.values[-1])
    assert math.isnan(found.cpr)
    assert math.isnan(found.cmd)
    ranked = keep_cells(model, [5], lm.run(model, [5], "attention"), keep_diagonal=False)
    assert ranked.cells == 2
    assert math.isfinite(ranked.cpr)


def test_head_of_ones_own(model, prompt):
    """A target on the last residual stream needs no unembedding."""
    target = lm.targets.head(lambda resid: resid[:, -1].sum(-1))
    found = keep_cells(model, prompt, uniform_map(6), target=target, fractions=[])
    with torch.no_grad():
        _, cache = model.run_with_cache(prompt[None])
    expected = cache["blocks.1.hook_resid_post"][0, -1].sum()
    assert found.values[-1] == pytest.approx(float(expected), abs=1e-9)


def shuffled(mixing: lm.MixingMap, generator: torch.Generator) -> lm.MixingMap:
    """Permute the scores below the diagonal."""
    scores = mixing.scores.clone()
    below = torch.ones(scores.shape[-1], scores.shape[-1]).tril(-1).bool().expand_as(scores)
    values = scores[below]
    scores[below] = values[torch.randperm(len(values), generator=generator)]
    return mixing.replace(scores=scores)


def test_a_permuted_map_scores_as_random():
    """The paired interval of permuted against random scores contains 0, over prompts of unequal length."""
    model, generator = llama_like(torch.float64), torch.Generator().manual_seed(0)
    permuted, random = [], []
    for number in range(12):
        prompt = tiny_models.tokens(model, 1, 4 + number % 4, seed=number)[0]
        mixing = lm.run(model, prompt, "value_zeroing")
        maps = {
            "permuted": shuffled(mixing, generator),
            "random": uniform_map(len(prompt), seed=number),
        }
        found = keep_cells(model, prompt, maps)
        permuted.append(found["permuted"].distance)
        random.append(found["random"].distance)
    interval = bootstrap(permuted, random)
    assert interval.low <= 0 <= interval.high


@pytest.mark.parametrize("operator", ["zero", "mean"])
def test_a_map_of_the_cells_effects_beats_random(operator):
    """The scale distinguishes a map that knows the effect of each cell from one that does not."""
    model = llama_like(torch.float64)
    knowing, random = [], []
    for number in range(6):
        prompt = tiny_models.tokens(model, 1, 5, seed=number)[0]
        maps = {"knowing": cells_by_effect(model, prompt, operator), "random": uniform_map(5, seed=number)}
        found = keep_cells(model, prompt, maps, operator=operator)
        knowing.append(found["knowing"].distance)
        random.append(found["random"].distance)
    assert bootstrap(knowing, random).high < 0


def cells_by_effect(model, prompt, operator: str) -> lm.MixingMap:
    """Return how much the target changes if one cell alone is removed, which a layer map should rank."""
    mixing, length = uniform_map(len(prompt)), len(prompt)
    places = torch.ones(2, length, length).tril(-1).nonzero().tolist()
    maps = {}
    for place in places:
        others = torch.ones(2, length, length).tril()
        others[tuple(place)] = 0
        maps[str(place)] = mixing.replace(scores=others)
    found = keep_cells(model, prompt, maps, operator=operator, fractions=[1 - 1 / len(places)])
    scores = torch.zeros(2, length, length)
    for place in places:
        *_, without, whole = found[str(place)].values
        scores[tuple(place)] = abs(whole - without)
    return mixing.replace(scores=scores)


def test_the_model_stays_as_it_was(model, prompt):
    before = model(prompt[None])
    keep_cells(model, prompt, uniform_map(6))
    assert model(prompt[None]).equal(before)


def test_strings_are_read_as_lm_run_reads_them():
    model = gpt2_like(torch.float64, tokenizer=toy_tokenizer())
    mixing = lm.run(model, "w3 w4 w5", "attention")
    target = lm.targets.token("w7", of="log_probability")
    found = keep_cells(model, "w3 w4 w5", mixing, target=target)
    logits = model(model.to_tokens("w3 w4 w5"))
    assert found.values[-1] == pytest.approx(log_probability(logits, 7), abs=1e-9)


def test_refusals(model, prompt):
    good = uniform_map(6)
    with pytest.raises(ValueError, match=r"maps\['map'\]: expected 6 positions and layers of 2"):
        keep_cells(model, prompt, uniform_map(5))
    with pytest.raises(ValueError, match=r"maps\['map'\]: expected a map of single layers"):
        keep_cells(model, prompt, lm.rollout(good, residual=0.5))
    with pytest.raises(ValueError, match=r"maps\['map'\]: expected the rows of all 6 positions"):
        keep_cells(model, prompt, good.select_queries([-1]))
    with pytest.raises(ValueError, match="operator: expected 'zero' or 'mean'"):
        keep_cells(model, prompt, good, operator="resample")
    with pytest.raises(ValueError, match="fractions: expected a number from 0 to 1"):
        keep_cells(model, prompt, good, fractions=[50])
    with pytest.raises(TypeError, match="maps: expected a MixingMap, or several by name"):
        keep_cells(model, prompt, good.scores)
    with pytest.raises(ValueError, match="at least one map"):
        keep_cells(model, prompt, {})


def test_a_pruned_head_is_refused(model, prompt):
    """A user hook scales z after the pattern, so a replaced pattern would lose its effect."""
    with (
        lm.experiments.pruned(model, [(0, 1)]),
        pytest.raises(lm.UnsupportedModelError, match="a hook scales z"),
    ):
        keep_cells(model, prompt, uniform_map(6))
