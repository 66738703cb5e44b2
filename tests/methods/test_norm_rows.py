"""Norm-based maps of asked rows: the cut of the whole map, in memory that one row needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lens_mix as lm
from benchmarks.common import peak_bytes
from lens_mix.lens.block import Block
from lens_mix.lens.model import CleanPass, Lens
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.prompts import pad, pad_token, read_prompt
from lens_mix.lens.proof.record import Proof
from lens_mix.lens.proof.support import proof_of
from lens_mix.methods import Method
from tests.matrix import Case
from tests.norm_cases import largest

# GQA and gates, sandwich norms, parallel branches, post-norm, branch norms, and a residual multiplier.
LABELS = ["gpt2", "llama", "gemma2", "neox", "phi", "bert", "olmo2", "granite"]
METHODS = [
    lm.ValueNorms(),
    lm.ValueNorms(per_head=True),
    lm.AttnRes(),
    lm.AttnResLn(next_norm=True),
    lm.AttnResWeights(),
    lm.AtbFf(),
    lm.AtbFfRes("fixed"),
    lm.AtbFfResLn(next_norm=True),
    lm.GlobEnc(),
    lm.Alti(),
    lm.Alti("l2", normalize=False),
]


def passed(
    model: Any, side: str = "right", lengths: tuple[int, ...] = (9, 6)
) -> tuple[Lens, CleanPass, Proof]:
    """A clean pass over prompts of several lengths, padded on one side."""
    lens = Lens(model)
    prompts = [
        read_prompt(
            model,
            lens.model_class,
            torch.arange(length) % 30 + 3 + number,
            prepend_bos=None,
            attention_mask=None,
            inputs={},
        )
        for number, length in enumerate(lengths)
    ]
    proof = proof_of(lens, prompts[0], head=True)
    roles = ("pattern", "value", "z")
    names = [lens.stack.hook_name(role, layer) for role in roles for layer in range(lens.n_layers)]
    return lens, lens.clean_pass(pad(prompts, pad_token(model), side), names), proof


def block_of(
    way: tuple[Lens, CleanPass, Proof], layer: int, queries: Any = None, memory: Any = None
) -> Block:
    """A block with some of its rows."""
    lens, clean, proof = way
    above = proof.anatomy[layer + 1] if layer + 1 < lens.n_layers else None
    anatomy = proof.anatomy[layer]
    return Block(lens, clean, layer, anatomy, "algebra", memory, queries=queries, next_anatomy=above)


def cut(scores: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """The rows of a whole map [batch (head) query key]."""
    return torch.stack([rows.index_select(-2, index) for rows, index in zip(scores, queries, strict=True)])


def real_rows(scores: torch.Tensor, way: tuple[Lens, CleanPass, Proof]) -> torch.Tensor:
    """Scores of real keys; padding may hold anything."""
    real = way[1].batch.real_positions(way[0].stack.name)
    return scores * real[:, None, :] if scores.ndim == 3 else scores * real[:, None, None, :]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("label", LABELS)
def test_rows_are_the_cut_of_the_whole_map(label: str, side: str) -> None:
    case = Case(f"bridge {label}")
    model = case.build(torch.float64)
    if side == "left" and label == "bert":
        pytest.skip("encoders count padding")
    try:
        way = passed(model, side)
    except UnsupportedModelError as reason:
        pytest.skip(str(reason))
    first = {"right": 0, "left": 3}[side]
    sets = [
        torch.tensor([[8 if side == "left" else 5], [first + 5]]),
        torch.tensor([[5, 3, 8, 8], [first, first + 5, first + 2, first + 5]]),
    ]
    for method in METHODS:
        for layer in (0, way[0].n_layers - 1):
            if method.refuses(way[2].anatomy[layer]) is not None:
                continue
            with torch.no_grad():
                whole = method(block_of(way, layer))
                for queries in sets:
                    rows = method(block_of(way, layer, queries))
                    assert rows.shape[-2:] == (queries.shape[1], whole.shape[-1])
                    assert largest(real_rows(rows, way), real_rows(cut(whole, queries), way)) < 1e-10, method


@pytest.mark.parametrize("token", ["predicted", "next", 7])
@pytest.mark.parametrize("label", ["gpt2", "llama", "gemma2"])
def test_input_maps_of_rows_are_the_cut_of_the_whole_map(label: str, token: Any) -> None:
    way = passed(Case(f"bridge {label}").build(torch.float64))
    method, queries = lm.AltiLogit(token), torch.tensor([[8, 2], [5, 4]])
    for top in range(1, way[0].n_layers + 1):
        below = [block_of(way, layer) for layer in range(top - 1)]
        try:
            whole = method.of_stack([*below, block_of(way, top - 1)])
        except UnsupportedModelError as reason:
            pytest.skip(str(reason))
        rows = method.of_stack([*below, block_of(way, top - 1, queries)])
        assert rows.shape[1] == top
        for layer in range(top):
            expected = cut(whole[:, layer], queries)
            assert largest(real_rows(rows[:, layer], way), real_rows(expected, way)) < 1e-10


@pytest.mark.parametrize("label", ["gpt2", "llama"])
def test_rows_respect_a_memory_bound(label: str) -> None:
    way = passed(Case(f"bridge {label}").build(torch.float64))
    queries = torch.tensor([[8, 2, 4], [5, 4, 0]])
    for method in METHODS:
        free = method(block_of(way, 1, queries))
        with pytest.raises(ValueError, match="max_memory: expected at least") as refused:
            method(block_of(way, 1, queries, memory=10))
        least = int(str(refused.value).split("at least ")[1].split()[0])
        assert largest(method(block_of(way, 1, queries, memory=least)), free) < 1e-10


@pytest.mark.parametrize("method", [lm.ValueNorms(), lm.AttnResLn(), lm.GlobEnc(), lm.Alti(), lm.AtbFfRes()])
def test_one_row_takes_memory_for_keys_not_for_pairs_or_heads(method: Method) -> None:
    model = Case("bridge llama").build()
    lengths = (40, 80)
    peaks = []
    for length in lengths:
        way = passed(model, lengths=(length,))
        block = block_of(way, 1, torch.tensor([[length - 1]]))
        d_model = block.resid_pre.shape[-1]
        peaks.append(peak_bytes(lambda block=block: method(block)))
    more_keys = lengths[1] - lengths[0]
    width = d_model if block.anatomy.feed_forward is None else block.anatomy.feed_forward.W_in.shape[1]
    assert peaks[1] - peaks[0] < more_keys * 10 * max(width, 2 * d_model) * 4
