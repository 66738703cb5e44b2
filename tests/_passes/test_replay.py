"""Test the replay of blocks in copies, from any block on, for every class of model."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix._inputs.batches import pad
from lens_mix._inputs.prompts import read_prompt
from lens_mix._passes.clean_pass import clean_pass
from lens_mix._passes.continuation import Continuation
from tests.matrix import build_or_skip, case_of, cases, prompt_of
from tests.tiny_models import bridge

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = {case.label: case for case in cases(cross=True, refused=False)}


def lens_and_clean(label, lengths=(7, 5)):
    case = case_of(label)
    model = case.build(torch.float64)
    lens = lm.Lens(model, case.part)
    prompts = [read_prompt(model, lens.model_class, prompt_of(model, seq, seq)) for seq in lengths]
    try:
        return lens, clean_pass(lens, pad(prompts, 0, "right"))
    except ValueError:  # A float64 sliding window over padding is NaN in the Bridge.
        return lens, clean_pass(lens, pad([prompts[0], prompts[0]], 0, "right"))


@pytest.mark.parametrize("label", CASES)
def test_replay_gives_each_copy_its_own_prompt(label):
    lens, clean = lens_and_clean(label)
    rows = torch.tensor([1, 0, 0, 1, 1])
    for layer in range(lens.n_layers):
        replay = clean.replay(layer)
        out = replay.run(rows=rows)
        real = replay.real[rows]
        torch.testing.assert_close(
            out[real], clean.calls[layer].resid_post[rows][real], atol=1e-10, rtol=1e-10
        )


@pytest.mark.parametrize("label", CASES)
def test_starting_at_a_block_gives_the_logits_of_the_whole_model(label):
    lens, clean = lens_and_clean(label)
    with lens.evaluation_mode():
        whole = lens.forward(clean.batch, return_type="logits")
    side = "decoder" if clean.batch.target is not None else lens.stack.name
    real = clean.batch.real_positions(side)
    for layer in range(lens.n_layers):
        ran = []
        handles = [
            block.attn.register_forward_hook(lambda *_, index=index, ran=ran: ran.append(index))
            for index, block in enumerate(lens.stack.blocks)
            if hasattr(block, "attn")
        ]
        logits = Continuation(clean, layer).logits()
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(logits[real], whole[real], atol=1e-9, rtol=1e-9)
        if handles:
            assert sorted(set(ran)) == list(range(layer, lens.n_layers)), "blocks below must not run again"
    rows = torch.tensor([1, 0, 1])
    logits = Continuation(clean, lens.n_layers - 1, prompt_index=rows).logits()
    torch.testing.assert_close(logits[real[rows]], whole[rows][real[rows]], atol=1e-9, rtol=1e-9)


def test_starting_at_a_block_with_another_residual_stream_and_hooks():
    lens, clean = lens_and_clean("bridge llama")
    resid = clean.calls[1].resid_pre
    other = Continuation(clean, 1, resid_pre=resid * 1.5).logits()
    same = Continuation(clean, 1, resid_pre=resid.clone()).logits()
    assert (other - same).abs().max() > 1e-3
    zero = (lens.stack.hook_name("value", 1), lambda t, hook: t * 0)
    assert (Continuation(clean, 1, fwd_hooks=[zero]).logits() - same).abs().max() > 1e-3


def test_stop_after_a_block():
    lens, clean = lens_and_clean("bridge llama")
    ran = []
    handles = [
        b.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, b in enumerate(lens.stack.blocks)
    ]
    short = clean_pass(lens, clean.batch, stop_after=0)
    for handle in handles:
        handle.remove()
    assert ran == [0]
    assert set(short.calls) == {0}
    torch.testing.assert_close(short.calls[0].resid_post, clean.calls[0].resid_post, atol=0, rtol=0)


def test_batch_equal_to_heads_is_no_trap():
    """Use as many prompts as heads, so that MPT's position bias [head, 1, ctx] looks like a batch."""
    lens, clean = lens_and_clean("bridge mpt", lengths=(7, 6, 5, 4))
    assert len(clean.batch) == lens.n_heads
    replay = clean.replay(1)
    rows = torch.tensor([3, 3, 1, 0, 2])
    out = replay.run(rows=rows)
    real = replay.real[rows]
    torch.testing.assert_close(out[real], clean.calls[1].resid_post[rows][real], atol=1e-10, rtol=1e-10)


def test_a_block_that_changes_from_run_to_run_is_refused():
    model = build_or_skip(bridge, "gpt2")
    count = [0]

    def drift(module, arguments, output):
        count[0] += 1
        return output + 0.1 * count[0]

    model.blocks[0].register_forward_hook(drift)
    with pytest.raises(lm.UnsupportedModelError, match=r"blocks\.0: run again .* should give its own output"):
        lm.run(model, prompt_of(model), "value_zeroing", engine="hooks")


def test_a_forward_that_somebody_put_on_a_block_stays():
    lens, clean = lens_and_clean("bridge llama")
    block = lens.stack.blocks[0]
    own = block.forward

    def mine(*arguments, **keywords):
        return own(*arguments, **keywords)

    block.__dict__["forward"] = mine
    Continuation(clean, 1).logits()
    assert block.__dict__["forward"] is mine
    del block.__dict__["forward"]
