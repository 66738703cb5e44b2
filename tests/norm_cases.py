"""Blocks of the tiny models, for tests of vectors instead of maps."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

import lens_mix as lm
from lens_mix.algebra.definitions import residual_vectors, through_norm, value_vectors
from lens_mix.hooks.mixing import mix
from lens_mix.lens.model_classes import UnsupportedModelError, transformer_lens_version
from lens_mix.method import Method
from lens_mix.statistics.passes import run_prompt
from tests.matrix import Case, cases, prompt_of, slow, wide_cases

# The wide sweep is for the newest release. Hugging Face's XGLM does not run in float64.
WIDE = [case for case in wide_cases() if transformer_lens_version()[0] > 3 and "xglm" not in case.label]
ALL = [*cases(), *map(slow, WIDE)]
CASES = pytest.mark.parametrize("case", ALL, ids=lambda case: case.label)


def blocks_of(case: Case, method: Method) -> Any:
    """Return the blocks in float64; skip models that raise an error, which `tests/test_matrix.py` tests."""
    if case.refusal is not None:
        pytest.skip("refused altogether")
    try:
        blocks = _checked_pass(case)
    except UnsupportedModelError as reason:
        pytest.skip(f"refused: {reason}")
    if method.scope == "stack" and [block.layer for block in blocks] != list(range(len(blocks))):
        pytest.skip("refused: a stack with gaps")
    for block in blocks:
        reason = method.unsupported_block(block.anatomy)
        if reason is None and "feed_forward" in method.needs and block.anatomy.feed_forward is None:
            reason = block.anatomy.feed_forward_kind if block.anatomy.feed_forward_kind != "none" else None
        if reason is not None:
            pytest.skip(f"refused: {reason}")
    return blocks


def read_by_a_norm(blocks: Any) -> Any:
    """Return the blocks whose next norm is known. Before a block without attention there is an error."""
    layers, n_layers = {block.layer for block in blocks}, blocks[0].clean.lens.n_layers
    known = [block for block in blocks if block.layer + 1 in {*layers, n_layers}]
    for block in blocks:
        if block not in known:
            with pytest.raises(UnsupportedModelError, match="next norm: block"):
                block.next_norm()
    return known or pytest.skip("refused: no block with attention follows another")


@functools.cache
def _checked_pass(case: Case) -> Any:
    # All methods of the family record the same tensors, so one clean pass is enough for every test.
    model = case.build(torch.float64)
    return run_prompt(model, prompt_of(model), lm.AttnRes(), part=case.part).blocks


@dataclasses.dataclass(frozen=True)
class WrittenOut:
    """`lens_mix.algebra.definitions` of one block, [batch, query, key, d_model], and the true states."""

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
