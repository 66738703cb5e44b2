"""Blocks of the tiny models, for tests of vectors instead of maps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import lens_mix as lm
from lens_mix._algebra.definitions import residual_vectors, through_norm, value_vectors
from lens_mix._classes.model_classes import UnsupportedModelError, transformer_lens_version
from lens_mix.experiments.passes import run_prompt
from lens_mix.hooks.mixing import mix
from tests.matrix import OF_EACH_KIND, Case, cases, prompt_of, wide_cases

# The kinds of block (`tests.matrix.KINDS`) that a method has no formula for, or whose stack it cannot follow.
NO_FORMULA = {
    "value_zeroing": ("whole feed-forward", "cross"),
    "globenc": ("cross",),
    "atb_ff": ("whole feed-forward", "no feed-forward", "cross"),
    "atb_ff_res_ln": ("whole feed-forward", "no feed-forward", "cross"),
    "decompx": ("whole feed-forward", "cross", "hybrid"),
    "decompx_local": ("whole feed-forward", "cross"),
    "alti_logit": ("post-norm", "cross", "hybrid"),
}


def verified_cases() -> list[Case]:
    """The models whose blocks are verified on the installed release, so that vectors can be compared."""
    # The wide sweep is of the newest release; XGLM of Hugging Face does not run in float64.
    wide = wide_cases() if transformer_lens_version()[0] > 3 else []
    found = [*cases(refused=False), *(case for case in wide if "xglm" not in case.label)]
    return [case for case in found if case.refusal is None and not case.is_a("unverified")]


def cases_for(method: str, *without: str) -> list[Case]:
    """The models on which a method has a formula, except those with one of these kinds of block."""
    kinds = (*NO_FORMULA.get(method, ()), *without)
    return [case for case in verified_cases() if not case.is_a(*kinds)]


def each_model(method: str, *without: str) -> pytest.MarkDecorator:
    """Run a test with the argument `case` on every model on which the method has a formula."""
    return pytest.mark.parametrize("case", cases_for(method, *without), ids=lambda case: case.label)


def each_model_with(argument: str, values: Sequence[str], method: str, *without: str) -> pytest.MarkDecorator:
    """Run a test with `case` and one more argument: its first value on every model, others on each kind."""
    pairs = [
        (case, value)
        for case in cases_for(method, *without)
        for value in (values if case.label in OF_EACH_KIND else values[:1])
    ]
    names = [f"{case.label}-{value}" for case, value in pairs]
    return pytest.mark.parametrize(("case", argument), pairs, ids=names)


@functools.cache
def blocks_of(case: Case) -> Any:
    """The blocks in float64."""
    # All methods of the family need the same tensors recorded, so one clean pass serves every test.
    model = case.build(torch.float64)
    return run_prompt(model, prompt_of(model), lm.methods.AttnRes(), part=case.part).blocks


def read_by_a_norm(blocks: Any) -> Any:
    """The blocks whose next norm is known; checks the error of those before a block without attention."""
    layers, n_layers = {block.layer for block in blocks}, blocks[0].clean.lens.n_layers
    known = [block for block in blocks if block.layer + 1 in {*layers, n_layers}]
    for block in blocks:
        if block not in known:
            with pytest.raises(UnsupportedModelError, match="next norm: block"):
                block.next_norm()
    return known


@dataclasses.dataclass(frozen=True)
class WrittenOut:
    """`lens_mix._algebra.definitions` of one block, [batch, query, key, d_model], and the true states."""

    attention: torch.Tensor
    branch: torch.Tensor
    residual: torch.Tensor
    normed: torch.Tensor
    summed: torch.Tensor
    mid: torch.Tensor


def heads_of(block: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the pattern, the value vectors and W_O."""
    return block.recorded("pattern"), block.recorded("value"), block.anatomy.value_path.W_O


def written_out(block: Any) -> WrittenOut:
    """Return all stages before the feed-forward, and the true states by `mix` and the anatomy."""
    anatomy, x = block.anatomy, block.resid_pre
    attention_out = anatomy.value_path.project(mix(*heads_of(block)[:2]))
    without_norm = dataclasses.replace(anatomy, attention_residual=None)
    summed, mid = (one.after_attention(x, attention_out) for one in (without_norm, anatomy))

    def branch(vectors: torch.Tensor) -> torch.Tensor:
        normed = through_norm(anatomy.attention_branch, vectors, attention_out)
        return normed * anatomy.residual_multiplier

    attention = value_vectors(*heads_of(block))
    residual = residual_vectors(*heads_of(block), x, branch)
    normed = through_norm(anatomy.attention_residual, residual, summed)
    return WrittenOut(attention, branch(attention), residual, normed, summed, mid)


def largest(x: Any, y: Any) -> float:
    """Return the largest difference."""
    return float((_tensor(x) - _tensor(y)).abs().max())


def _tensor(value: Any) -> torch.Tensor:
    # The arrays of pandas are read-only, so they are copied.
    return torch.as_tensor(np.array(value) if isinstance(value, np.ndarray) else value).double()
