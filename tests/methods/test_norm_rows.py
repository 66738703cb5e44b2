"""Test norm-based maps of asked rows: they equal rows of the whole map, in memory for these rows only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lens_mix as lm
from benchmarks.common import peak_bytes
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix.method import Method
from lens_mix.session import Session
from tests.matrix import Case, slow
from tests.norm_cases import largest

# These have plain and gated feed-forwards, grouped values, sandwich norms, parallel branches, post-norm,
# branch norms and a residual multiplier.
LABELS = ["gpt2", "llama", *map(slow, ("gemma2", "gpt_neox", "bert", "olmo2"))]
METHODS = [
    lm.methods.ValueNorms(),
    lm.methods.ValueNorms(per_head=True),
    lm.methods.AttnRes(),
    lm.methods.AttnResLn(next_norm=True),
    lm.methods.AttnResWeights(),
    lm.methods.AtbFf(),
    lm.methods.AtbFfRes("fixed"),
    lm.methods.AtbFfResLn(next_norm=True),
    lm.methods.GlobEnc(),
    lm.methods.Alti(),
    lm.methods.Alti("l2", normalize=False),
    lm.methods.InformationFlowRoutes(),
    lm.methods.InformationFlowRoutes(per_head=True, biases="part"),
]
LENGTHS = (9, 6, 7)


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    return [torch.arange(length) * 7 % 30 + 3 + length % 9 for length in lengths]


def supported(model: Any) -> list[Method]:
    """Return the methods above that are defined for the model's blocks."""
    session = Session(model, {"attn_res": lm.methods.AttnRes()})
    with session.checked_pass([session.read(prompts_of()[0], **NOTHING)]) as checked:
        anatomies = checked.verification.anatomy.values()
    return [method for method in METHODS if all(method.unsupported_block(one) is None for one in anatomies)]


NOTHING: dict[str, Any] = {"prepend_bos": None, "attention_mask": None, "inputs": {}}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("label", LABELS)
def test_rows_of_padded_prompts_are_the_cut_of_the_whole_maps(label: str, side: Any) -> None:
    """One row is computed from pairs, and several from factors, in any order."""
    # With padding on the left, some models give NaN in float64.
    dtype, tolerance = (torch.float64, 1e-10) if side == "right" else (torch.float32, 1e-4)
    model = Case(f"bridge {label}").build(dtype)
    if side == "left" and label not in ("llama", "gemma2"):
        pytest.skip("counts padding, or gives NaN for it")
    try:
        methods = supported(model)
    except UnsupportedModelError as reason:
        pytest.skip(str(reason))
    options = {"padding_side": side, "batch_size": len(LENGTHS)}
    whole = list(lm.run_many(model, prompts_of(), methods, **options))
    for queries in ([-1], [5, 0, -3]):
        parts = lm.run_many(model, prompts_of(), methods, queries=queries, **options)
        for part, maps in zip(parts, whole, strict=True):
            for name, scores in part.items():
                assert largest(scores.scores, maps[name].select_queries(queries).scores) < tolerance, name


@pytest.mark.slow
@pytest.mark.parametrize("queries", [[-1], [2, 5, 4]])
@pytest.mark.parametrize("label", ["gpt2", "llama"])
def test_rows_take_no_more_than_their_bound(label: str, queries: list[int]) -> None:
    model = Case(f"bridge {label}").build(torch.float64)
    for method in METHODS:
        with pytest.raises(ValueError, match="max_memory: expected at least") as refused:
            lm.run(model, prompts_of()[0], method, queries=queries, max_memory=10)
        least = int(str(refused.value).split("at least ")[1].split()[0])
        session = Session(model, {"asked": method}, queries=queries, max_memory=least)
        with session.checked_pass([session.read(prompts_of()[0], **NOTHING)]) as checked:
            # The smallest chunks take long, so only one block is measured, and only once.
            block, scores = checked.blocks("asked")[-1], []
            taken = peak_bytes(lambda block=block, method=method, scores=scores: scores.append(method(block)))
            assert taken - scores[0].nbytes <= least


@pytest.mark.parametrize(
    "method",
    [
        lm.methods.AttnResLn(),
        lm.methods.Alti(),
        *map(slow, (lm.methods.ValueNorms(), lm.methods.GlobEnc(), lm.methods.AtbFfRes())),
    ],
)
def test_one_row_takes_memory_for_keys_not_for_pairs_or_heads(method: Method) -> None:
    model = Case("bridge llama").build()
    lengths, peaks, width = (14, 28), [], 0
    for length in lengths:
        session = Session(model, {"asked": method}, queries=-1)
        with session.checked_pass([session.read(prompts_of((length,))[0], **NOTHING)]) as checked:
            block = checked.blocks("asked")[1]
            peaks.append(peak_bytes(lambda block=block: method(block)))
            feed_forward = block.anatomy.feed_forward
            width = (
                feed_forward.W_in.shape[1]
                if isinstance(method, lm.methods.AtbFfRes)
                else block.resid_pre.shape[-1]
            )
    assert peaks[1] - peaks[0] < (lengths[1] - lengths[0]) * 8 * width * 4
