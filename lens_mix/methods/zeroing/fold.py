"""W_O and the feed-forward's first matrix as one matrix per head, kept between runs.

A zeroed value reaches the pre-activations through W_O, the linear parts of the norms and the first matrix.
Their product, d_head × d_mlp per head, depends on the weights alone. Made anew it costs as much as d_model
positions; kept, a run with n keys pays for n.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lens_mix.lens.anatomy import ValuePath
from lens_mix.methods.zeroing.clean_block import CleanBlock

# Bytes of folded matrices that are kept in all; they go with the models that they belong to.
KEPT_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class _Kept:
    matrices: Float[Tensor, "matrix head d_head d_mlp"]
    probed: Float[Tensor, "matrix one d_mlp"]


# By the block's W_in as the proof has read it: a new proof reads anew.
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def folded(
    clean: CleanBlock,
    path: ValuePath,
    heads: list[int],
    vectors: int,
    dtype: torch.dtype,
    keep: bool,
) -> Float[Tensor, "matrix head d_head d_mlp"] | None:
    """The folded matrices of some heads; None where applying both to each vector costs less.

    Args:
        clean: the block.
        path: its value path.
        heads: which query heads.
        vectors: how many value vectors will go through.
        dtype: of the products.
        keep: whether they may stay for the next run.
    """
    if clean.first is None or clean.anatomy.feed_forward is None:
        return None
    name = clean.anatomy.feed_forward.W_in
    # Through the matrices that are folded: every number of them takes part.
    probed = _fold(clean, probe(path.W_O.flatten(0, 1).to(dtype))[None])
    kept = _kept.get(name)
    # An edit through `.data` leaves no trace that could be asked.
    if kept is not None and torch.equal(kept.probed, probed):
        return _of_heads(kept.matrices, heads)
    all_heads, d_head = path.W_O.shape[:2]
    size = all_heads * d_head * clean.first.d_mlp * len(clean.first.matrices) * dtype.itemsize
    if keep and size + sum(other.matrices.nbytes for other in _kept.values()) <= KEPT_BYTES:
        _kept[name] = _Kept(_fold(clean, path.W_O.to(dtype)), probed)
        return _of_heads(_kept[name].matrices, heads)
    if vectors * len(heads) <= len(heads) * d_head + vectors:
        return None
    return _fold(clean, path.W_O[heads].to(dtype))


def forget() -> None:
    """Drop what is kept; the next run makes it anew."""
    _kept.clear()


def _fold(
    clean: CleanBlock, W_O: Float[Tensor, "*head d_head d_model"]
) -> Float[Tensor, "matrix *head d_head d_mlp"]:
    if clean.first is None:
        raise RuntimeError("a block without a feed-forward that changes has nothing to fold")
    return clean.first.linear(clean.through_norms(W_O))


def _of_heads(kept: Float[Tensor, "matrix head d_head d_mlp"], heads: list[int]) -> Tensor:
    return kept if heads == list(range(kept.shape[1])) else kept[:, heads]


def probe(matrix: Float[Tensor, "row column"]) -> Float[Tensor, " column"]:
    """A product that every row takes part in, with a factor of its own: what tells an edit."""
    return torch.arange(1, 1 + len(matrix), dtype=matrix.dtype, device=matrix.device).cos_() @ matrix
