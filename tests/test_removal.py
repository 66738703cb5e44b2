from __future__ import annotations

import contextlib

import pytest
import torch

import lens_mix as lm
from lens_mix.evaluation import Drop, MaskKeys, ReplaceTokens, SampleTokens, ZeroValues, removal_curves
from lens_mix.evaluation.intervention_passes import intervention_passes
from lens_mix.hooks import mask_keys, zero_values
from lens_mix.removal import each_group
from lens_mix.session import Session
from tests import tiny_models
from tests.hugging_face_oracle import Reference, edited_values
from tests.matrix import build_or_skip, cases, causal_cases, prompt_of
from tests.tiny_models import bridge, hooked_transformer, wrapped_model

LOGIT = lm.targets.logit(7)


@pytest.fixture(scope="module")
def prompt(model):
    return tiny_models.tokens(model, 1, 6)[0]


def sets(length: int, *removed: list[int]) -> torch.Tensor:
    marks = torch.zeros(len(removed), length, dtype=torch.bool)
    for row, positions in enumerate(removed):
        marks[row, positions] = True
    return marks


def values(model, prompt, removal, *removed: list[int], target=LOGIT, **options) -> list[float]:
    with intervention_passes(model, prompt, target, **options) as passes:
        return passes.values_without(removal, sets(passes.length, *removed)).tolist()


def logit(model, tokens) -> float:
    with torch.no_grad():
        out = model(tokens[None])
    return float((out if torch.is_tensor(out) else out.logits)[0, -1, 7])


REMOVED = ([], [0], [1, 4], [0, 1, 2, 3, 4, 5])


def test_given_tokens_are_put_in(model, prompt):
    found = values(model, prompt, ReplaceTokens([8, "w9"]), *REMOVED)
    for positions, value in zip(REMOVED, found, strict=True):
        both = []
        for token in (8, 9):
            edited = prompt.clone()
            edited[positions] = token
            both.append(logit(model, edited))
        assert value == pytest.approx(sum(both) / 2, abs=1e-9)


def test_sampled_tokens_are_the_same_in_every_set(model, prompt):
    removal = SampleTokens(among=[11], samples=3)
    expected = values(model, prompt, ReplaceTokens(11), *REMOVED)
    assert values(model, prompt, removal, *REMOVED) == pytest.approx(expected, abs=1e-9)
    drawn = SampleTokens(samples=2, seed=4)
    alone = values(model, prompt, drawn, [1, 4])
    assert values(model, prompt, drawn, *REMOVED)[2] == pytest.approx(alone[0], abs=1e-9)
    assert values(model, prompt, SampleTokens(samples=2, seed=5), [1, 4]) != pytest.approx(alone, abs=1e-6)


def test_what_is_drawn(model, prompt):
    """Neither special tokens nor the position's own; from the tokens given, where some are."""
    with intervention_passes(model, prompt, LOGIT) as passes:
        fills = SampleTokens(samples=2000).others(passes.first_block, prompt)
        assert not torch.isin(fills, torch.tensor([0, 1, 2])).any()
        assert not (fills == prompt).any()
        for position in range(6):
            assert set(fills[:, position].tolist()) == set(range(3, 50)) - {int(prompt[position])}
        own = [int(prompt[0]), 40, 41]
        fills = SampleTokens(among=own, samples=50).others(passes.first_block, prompt)
        assert set(fills[:, 0].tolist()) == {40, 41}


def test_what_is_drawn_per_sample(model, prompt):
    """A sample is one token for all positions, no two alike; in the place of that token comes the next."""
    with intervention_passes(model, prompt, LOGIT) as passes:
        removal = SampleTokens(samples=60, seed=3, draw="per_sample")
        others = removal.others(passes.first_block, prompt)
    # Special tokens are 0, 1 and 2; there are no more samples than other tokens.
    drawn = 3 + torch.randperm(47, generator=torch.Generator().manual_seed(3))[:, None]
    following = torch.where(drawn == 49, 3, drawn + 1)
    assert torch.equal(others, torch.where(drawn == prompt, following, drawn))


def test_what_is_drawn_per_position(model, prompt):
    with intervention_passes(model, prompt, LOGIT) as passes:
        others = SampleTokens(samples=2, seed=3).others(passes.first_block, prompt)
    drawn = 3 + torch.randint(47, (2, 6), generator=torch.Generator().manual_seed(3))
    following = torch.where(drawn == 49, 3, drawn + 1)
    assert torch.equal(others, torch.where(drawn == prompt, following, drawn))


def test_a_given_token_that_stands_there_is_kept_or_the_next(model, prompt):
    with intervention_passes(model, prompt, LOGIT) as passes:
        block, own = passes.first_block, int(prompt[2])
        assert ReplaceTokens([own, 49]).others(block, prompt).tolist() == [[own] * 6, [49] * 6]
        expected = torch.where(prompt == own, own + 1, own)
        assert torch.equal(ReplaceTokens(own, own="next").others(block, prompt)[0], expected)
        # After the last number of the vocabulary comes the first.
        assert ReplaceTokens(49, own="next").others(block, torch.tensor([49, 5])).tolist() == [[0, 49]]


def test_samples_of_a_batch_are_those_of_each_prompt_alone(model, prompt):
    """Whatever padding stands beside it."""
    for removal in (SampleTokens(samples=2, seed=4), ReplaceTokens([8, 9])):
        session = Session(model, {"occlusion": lm.methods.Occlusion()})
        with session.checked_pass([session.read(prompt), session.read(prompt[:4])]) as checked:
            block = checked.blocks("occlusion")[0]
            prompt_index, removed, keys = each_group(block.real_inputs, [[(0, 1), (3,)]] * 2)
            assert prompt_index.tolist() == [0, 0, 1, 1]
            assert keys.tolist() == [0, 1, 0, 1]
            copies = removal.make_copies(block, prompt_index, removed)
            with removal.changes(block, copies) as (batch, hooks):
                assert not hooks
                alone = removal.others(block, prompt[:4])
                assert batch.tokens[4].tolist()[:4] == [*alone[0, :2].tolist(), *prompt[2:4].tolist()]
                assert batch.tokens[7].tolist()[:4] == [*prompt[:3].tolist(), int(alone[1, 3])]


def test_groups_without_spans_are_the_prompts_own_positions():
    real = torch.tensor([[True, True, False], [False, True, True]])
    prompt_index, removed, keys = each_group(real, None)
    assert prompt_index.tolist() == [0, 0, 1, 1]
    assert keys.tolist() == [0, 1, 1, 2]
    assert removed.nonzero()[:, 1].tolist() == [0, 1, 1, 2]
    _, removed, keys = each_group(real, [[(1,), (0, 1)]] * 2)
    assert removed.tolist() == [
        [False, True, False],
        [True, True, False],
        [False, False, True],
        [False, True, True],
    ]
    assert keys.tolist() == [0, 1, 0, 1]


def test_values_are_zeroed_in_every_layer(model, prompt):
    found = values(model, prompt, ZeroValues(), *REMOVED)
    for positions, value in zip(REMOVED, found, strict=True):
        hooks = [zero_values(layer, positions) for layer in range(2)] if positions else []
        with torch.no_grad():
            expected = model.run_with_hooks(prompt[None], fwd_hooks=hooks)[0, -1, 7]
        assert value == pytest.approx(float(expected), abs=1e-9)


def test_keys_are_masked_in_every_layer(model, prompt):
    some = ([], [0], [1, 4], [0, 1, 2, 3, 4])
    found = values(model, prompt, MaskKeys(), *some)
    for positions, value in zip(some, found, strict=True):
        hooks = [mask_keys(layer, positions) for layer in range(2)] if positions else []
        with torch.no_grad():
            expected = model.run_with_hooks(prompt[None], fwd_hooks=hooks)[0, -1, 7]
        assert value == pytest.approx(float(expected), abs=1e-9)
    curve = removal_curves(model, prompt, torch.arange(6.0), removal="mask", target=LOGIT, positions=[1, 4])
    assert curve.deletion[-1] == pytest.approx(found[2], abs=1e-9)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_removals_are_those_of_the_hugging_face_model(name):
    """transformers' own pass: other tokens, its attention mask, its values zeroed."""
    model = build_or_skip(bridge, name, torch.float64)
    reference_model = wrapped_model(name, torch.float64)
    reference_model.set_attn_implementation("eager")
    prompt = tiny_models.tokens(model, 1, 6)[0]
    some = ([1], [1, 4], [2, 3])
    replaced = values(model, prompt, ReplaceTokens(8), *some)
    dropped = values(model, prompt, Drop(), *some)
    zeroed = values(model, prompt, ZeroValues(), *some)
    reference = Reference(reference_model, prompt[None])
    for index, positions in enumerate(some):
        edited, mask = prompt.clone(), torch.ones(1, 6, dtype=torch.long)
        edited[positions], mask[:, positions] = 8, 0
        assert replaced[index] == pytest.approx(logit(reference_model, edited), abs=1e-6)
        with torch.no_grad():
            # TransformerBridge counts positions along the mask; transformers alone would leave holes.
            places = {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
            masked = reference_model(prompt[None], attention_mask=mask, **places).logits[0, -1, 7]
        assert dropped[index] == pytest.approx(float(masked), abs=1e-6)

        def zero(value, positions=positions):
            value = value.clone()
            value[:, :, positions] = 0
            return value

        with contextlib.ExitStack() as stack:
            for layer in range(2):
                stack.enter_context(edited_values(reference._attention(layer), zero))
            expected = logit(reference_model, prompt)
        assert zeroed[index] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("case", causal_cases(), ids=lambda case: case.label)
def test_dropping_is_the_pass_of_the_shorter_prompt(case):
    """Also where attention is local or biased by distance. The prompt is longer than the windows."""
    model = case.build()
    prompt = tiny_models.tokens(model, 1, 12)[0]
    some = ([], [0], [2, 3, 4], [1, 5, 6, 9], list(range(11)))
    found = values(model, prompt, Drop(), *some)
    for positions, value in zip(some, found, strict=True):
        left = [position for position in range(12) if position not in positions]
        assert value == pytest.approx(logit(model, prompt[left]), abs=1e-5)


def test_a_target_of_several_positions_reads_the_tokens_that_remain(model, prompt):
    """The logits stay at the positions of the whole prompt; a deleted one has those of the token before."""
    target = lm.targets.head(lambda resid: (resid * torch.arange(1.0, 7)[:, None]).sum((1, 2)))

    def reads_all(logits):
        return (logits[..., 7] * torch.arange(1.0, 7)).sum(-1)

    with torch.no_grad():
        _, cache = model.run_with_cache(prompt[[0, 2, 3, 5]][None])
        short = model(prompt[[0, 2, 3, 5]][None])[0, :, 7]
    places = [0, 0, 1, 2, 2, 3]
    weighted = (short[places] * torch.arange(1.0, 7)).sum()
    found = values(model, prompt, Drop(), [], [1, 4], target=reads_all)
    assert found[1] == pytest.approx(float(weighted), abs=1e-9)
    resid = cache["blocks.1.hook_resid_post"][0].sum(-1)
    weighted = (resid[places] * torch.arange(1.0, 7)).sum()
    found = values(model, prompt, Drop(), [], [1, 4], target=target)
    assert found[1] == pytest.approx(float(weighted), abs=1e-9)


def test_dropping_is_refused_where_nothing_is_masked():
    model = build_or_skip(hooked_transformer, "bidirectional")
    prompt = tiny_models.tokens(model, 1, 6)[0]
    with pytest.raises(lm.UnsupportedModelError, match="Drop: expected the attention mask to hide"):
        values(model, prompt, Drop(), [1])


def test_the_position_of_the_target_can_not_be_dropped(model, prompt):
    found = removal_curves(model, prompt, torch.arange(6.0), removal="drop")
    assert found.positions == (4, 3, 2, 1, 0)
    with pytest.raises(ValueError, match="positions: with 'drop' at least one position has to stay"):
        removal_curves(model, prompt, torch.arange(6.0), removal="drop", positions=[1, 5])


WITH_RIGHT_LOGITS = [case for case in cases(refused=False) if not case.wrong_logits]


@pytest.mark.parametrize("removal", [ReplaceTokens(8), SampleTokens(), ZeroValues(), MaskKeys()], ids=str)
@pytest.mark.parametrize("case", WITH_RIGHT_LOGITS, ids=lambda case: case.label)
def test_every_model_takes_every_removal(case, removal):
    """Nothing removed: the clean target. Removed one by one or in one batch: the same."""
    model = case.build()
    prompt = prompt_of(model)
    some = ([], [0], [1, 2])
    found = values(model, prompt, removal, *some, part=case.part)
    with intervention_passes(model, prompt, LOGIT, part=case.part) as passes:
        assert found[0] == pytest.approx(passes.clean, abs=1e-4)
    for positions, value in zip(some[1:], found[1:], strict=True):
        alone = values(model, prompt, removal, positions, part=case.part)
        assert value == pytest.approx(alone[0], abs=1e-4)
        assert value != found[0]


def test_the_decoders_side():
    """Other tokens take the decoder's own places; a mask has none there."""
    model = build_or_skip(bridge, "bart", torch.float64)
    source, target = prompt_of(model)
    edited = target.clone()
    edited[0, 1] = 8
    with torch.no_grad():
        expected = model(source, decoder_input=edited)[0, -1, 7]
    found = values(model, (source, target), ReplaceTokens(8), [1], part="decoder")
    assert found[0] == pytest.approx(float(expected), abs=1e-9)
    with pytest.raises(lm.UnsupportedModelError, match="takes no mask"):
        values(model, (source, target), Drop(), [1], part="decoder")


def test_the_encoders_side_of_one_token():
    """Its batch is padded to two tokens; the padding is neither read nor removed."""
    model = build_or_skip(bridge, "bart", torch.float64)
    target = tiny_models.tokens(model, 1, 4)
    some = [
        values(model, ([5], target), ReplaceTokens(8), [0]),
        values(model, ([8], target), ZeroValues(), []),
    ]
    assert some[0] == pytest.approx(some[1], abs=1e-9)


def test_head_of_ones_own(model, prompt):
    """A classifier on the last residual, in passes that start from other tokens."""
    target = lm.targets.head(lambda resid: resid[:, -1].sum(-1), after_final_norm=True)
    found = values(model, prompt, ReplaceTokens(8), [1, 2], target=target)
    edited = prompt.clone()
    edited[[1, 2]] = 8
    with torch.no_grad():
        _, cache = model.run_with_cache(edited[None])
    name = "ln_final.hook_out" if "ln_final.hook_out" in cache else "ln_final.hook_normalized"
    assert found[0] == pytest.approx(float(cache[name][0, -1].sum()), abs=1e-9)


def test_little_memory_gives_the_same(model, prompt):
    every = [list(range(count)) for count in range(6)]
    for removal in (ReplaceTokens(8), ZeroValues(), MaskKeys(), Drop()):
        expected = values(model, prompt, removal, *every[:5])
        found = values(model, prompt, removal, *every[:5], max_memory=400_000)
        assert found == pytest.approx(expected, abs=1e-9)


def test_refusals(model, prompt):
    with pytest.raises(ValueError, match="tokens: expected the text of one token"):
        values(model, prompt, ReplaceTokens("w3 w4"), [0])
    with pytest.raises(ValueError, match="tokens: expected a whole number from 0 to 49"):
        values(model, prompt, ReplaceTokens(50), [0])
    with pytest.raises(ValueError, match="among: expected a whole number from 0 to 49"):
        values(model, prompt, SampleTokens(among=[70]), [0])
    with pytest.raises(ValueError, match="samples: expected a whole number, 1 or more"):
        SampleTokens(samples=0)
    with pytest.raises(ValueError, match="draw: expected 'per_position' or 'per_sample'"):
        SampleTokens(draw="alike")
    with pytest.raises(ValueError, match="own: expected 'kept' or 'next'"):
        ReplaceTokens(3, own="drop")
    with pytest.raises(TypeError, match="tokens: expected"):
        ReplaceTokens(1.5)
