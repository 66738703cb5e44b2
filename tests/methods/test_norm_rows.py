"""Test norm-based maps of asked rows: they equal rows of the whole map, in memory for these rows only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lens_mix as lm
from benchmarks.common import peak_bytes
from lens_mix.method import Method
from lens_mix.session import Session
from tests.matrix import Case, slow

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


NOTHING: dict[str, Any] = {"prepend_bos": None, "attention_mask": None, "inputs": {}}


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
