"""zero_queries: what is left of a pattern depends on no token."""

from __future__ import annotations

import pytest
import torch

from lens_mix.hooks import must_fire, record, zero_queries
from tests.hooks.cases import CASES, LAYER, Case, clean, observe
from tests.tiny_models import hooked_encoder_decoder, inputs

# the position's bias, or an attention sink, is left of the scores
BIASED = ("bloom", "mpt", "falcon_alibi", "alibi", "t5", "t5_gated", "gpt_oss")
UNBIASED = [case for case in CASES if case.name not in BIASED and case.build is not hooked_encoder_decoder]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_pattern_depends_on_no_token(case: Case) -> None:
    model, name = case.model(), f"{case.prefix}.hook_pattern"
    patterns = []
    for seed in (0, 21):
        store: dict[str, torch.Tensor] = {}
        args, kwargs = inputs(model, seed=seed)
        with must_fire(zero_queries(LAYER, attention=case.attention)) as hooks, torch.no_grad():
            model.run_with_hooks(*args, **kwargs, fwd_hooks=[*hooks, record(store, name)])
        patterns.append(store[name])
    assert torch.equal(patterns[0], patterns[1])
    assert case.hooks_left() == 0


@pytest.mark.parametrize("case", UNBIASED, ids=str)
def test_every_key_that_was_seen_gets_the_same_weight(case: Case) -> None:
    pattern = observe(case, [zero_queries(LAYER, attention=case.attention)]).pattern
    seen = (clean(case).pattern != 0).to(pattern.dtype)
    torch.testing.assert_close(pattern, seen / seen.sum(dim=-1, keepdim=True), rtol=0.0, atol=1e-7)
