"""Maps of a model in bfloat16 are compared with those in float32, and its faults are not silent."""

from __future__ import annotations

import math

import pytest
import torch

import lens_mix as lm
from benchmarks import bfloat16
from lens_mix._classes.model_classes import UnsupportedModelError
from tests.tiny_models import available, bridge, llama_like, tokens, toy_tokenizer


def test_the_agreement_of_two_maps() -> None:
    row = torch.tensor([[[1.0, 2.0, 3.0]], [[3.0, 1.0, 2.0]]])
    assert bfloat16.compare_rows(row, row) == (1, 1)
    ranks, tops = bfloat16.compare_rows(row, torch.tensor([[[1.0, 2.0, 3.0]], [[1.0, 3.0, 2.0]]]))
    assert tops == 0.5
    assert ranks == pytest.approx((1 - 1) / 2)
    assert math.isnan(bfloat16.compare_rows(torch.ones(1, 1, 3), torch.ones(1, 1, 3))[0])


@pytest.mark.slow
def test_every_method_is_compared_and_timed() -> None:
    if not available(bridge, "llama"):
        pytest.skip("no TransformerBridge in this TransformerLens")
    tokenizer = toy_tokenizer()
    wide, half = (llama_like(dtype, tokenizer=tokenizer) for dtype in (torch.float32, torch.bfloat16))
    prompt = tokenizer.decode(tokens(wide, 1, 7)[0])
    found = bfloat16.agreement(wide, half, [prompt, prompt])
    assert set(found) == {*bfloat16.METHODS, bfloat16.INPUT_MAP, bfloat16.FORWARD}
    assert all(len(values) == 2 for values in found.values())
    assert min(rank for rank, _ in found["attention"]) > 0.9
    assert all(ratio > 0 for ratio in bfloat16.times(wide, half, tokens=5, turns=1).values())


def test_there_are_prompts_of_all_kinds() -> None:
    assert len(bfloat16.choose_prompts()) >= 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fault_beyond_the_tolerance_is_an_error_in_bfloat16_too(dtype: torch.dtype) -> None:
    model = llama_like(dtype)

    def change_one(z: torch.Tensor, hook: object) -> torch.Tensor:
        return torch.cat([z[:, :2], 1.5 * z[:, 2:3], z[:, 3:]], 1)

    model.add_hook(next(name for name in model.hook_dict if name.endswith("attn.hook_z")), change_one)
    with pytest.raises(UnsupportedModelError):
        lm.run(model, tokens(model, 1, 7), "value_zeroing")
