"""Test the session: all code that reads blocks uses the same verification and the same check of prompts."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix._model import model as lens_model
from lens_mix.experiments import cancel_effect, mixing_ratio
from lens_mix.session import Session
from tests.tiny_models import gpt2_like, tokens

pytestmark = pytest.mark.filterwarnings("ignore")
NOT_ITS_COMPONENTS = "expected its components to give its output on this prompt"


def triple_from(start):
    """Return a hook that triples z from a position on, beyond the short prompt of the verification."""

    def hook(z, hook):
        z = z.clone()
        z[:, start:] *= 3
        return z

    return hook


@pytest.mark.parametrize(
    "read",
    [
        lambda model, prompt: lm.run(model, prompt, "attn_res"),
        lambda model, prompt: lm.run(model, prompt, "attn_res", queries=[-1]),
        lambda model, prompt: list(lm.run_many(model, [prompt, prompt], "alti")),
        mixing_ratio.mixing_ratios,
        cancel_effect.weights_and_norms,
    ],
    ids=["run", "last row", "run_many", "mixing ratios", "weights and norms"],
)
def test_a_hook_beyond_the_proofs_prompt_is_refused_whoever_reads(read):
    model = gpt2_like()
    prompt = tokens(model, 1, 28)[0]
    read(model, prompt)
    with (
        model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", triple_from(20))]),
        pytest.raises(lm.UnsupportedModelError, match=NOT_ITS_COMPONENTS),
    ):
        read(model, prompt)


def test_a_row_that_a_hook_leaves_alone_is_mapped():
    """Map a row before the positions that a hook changes, which do not affect it."""
    model = gpt2_like()
    prompt = tokens(model, 1, 28)[0]
    clean = lm.run(model, prompt, "attn_res", queries=[5])
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", triple_from(20))]):
        torch.testing.assert_close(lm.run(model, prompt, "attn_res", queries=[5]).scores, clean.scores)


def test_values_that_an_edit_changed_are_noted_in_every_key():
    """Map the last row while a hook changes the value of a far position: the norms are of the new value."""
    model = gpt2_like()
    prompt = tokens(model, 1, 28)[0]

    def edit(value, hook):
        value = value.clone()
        value[:, 21:22] *= 1.5
        return value

    clean = lm.run(model, prompt, "value_norm", queries=[-1])
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_v", edit)]):
        found = lm.run(model, prompt, "value_norm", queries=[-1])
    assert "layer 1: a hook or an adapter changes its values" in found.notes[0]
    expected = clean.scores.clone()
    expected[1, ..., 21] *= 1.5
    torch.testing.assert_close(found.scores, expected)


def test_the_model_is_gone_through_once_per_batch(monkeypatch):
    model = gpt2_like()
    prompt = tokens(model, 1, 6)
    lm.run(model, prompt, "attn_res")
    walks = []
    original = lens_model.all_modules
    monkeypatch.setattr(lens_model, "all_modules", lambda model: walks.append(1) or original(model))
    lm.run(model, prompt, ["attention", "attn_res", "value_zeroing"])
    assert len(walks) == 1


def test_what_blocks_share_goes_with_them():
    model = gpt2_like()
    session = Session(model, {"attn_res": lm.methods.AttnRes()})
    with session.checked_pass([session.read(tokens(model, 1, 6))]) as checked:
        first, second = checked.blocks("attn_res")
        first.cache["norms"] = 1
        assert checked.blocks("attn_res")[0].cache == {"norms": 1}
        assert second.cache == {}


def test_prompts_of_one_length_need_no_proof_about_padding():
    model = gpt2_like()
    session = Session(model, {"attention": lm.methods.AttentionWeights()})
    alike = [session.read(tokens(model, 1, 6, seed=seed)) for seed in (1, 2)]
    assert session.batches(alike) == [alike]
    mixed = [*alike, session.read(tokens(model, 1, 4))]
    assert session.batches(mixed) == [mixed]
