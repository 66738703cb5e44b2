"""The clean block's hidden layer: pre-activations, and what its norms' vectors make of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.lens.model import TOLERANCES
from lens_mix.methods.room import Workspace, even
from lens_mix.methods.zeroing.first_matrix import FirstMatrix
from lens_mix.methods.zeroing.norms import NormChange

# One tensor per first matrix.
_PerMatrix = Sequence[Float[Tensor, "row d_mlp"]]


@dataclasses.dataclass(frozen=True)
class Neurons:
    """The clean block's numbers of some neurons, each tensor in memory of its own: strides cost cache misses.

    Attributes:
        columns: which neurons.
        pre: pre-activations, per first matrix.
        bases: what the first matrices make of the norms' bases, per norm and matrix.
        minus_hidden: -1 times what the second matrix is applied to.
    """

    columns: slice
    pre: list[Float[Tensor, "row column"]]
    bases: list[list[Float[Tensor, "row column"]]]
    minus_hidden: Float[Tensor, "row column"]


@dataclasses.dataclass(frozen=True)
class CleanInput:
    """What the first matrices read in the clean pass.

    Attributes:
        first: the matrices.
        norms: between the attention's output and them, in order.
        whole: whether the last norm, or the residual stream where there is none, is all that is read.
        vectors: what is read.
        recorded: the model's own pre-activations, per first matrix; none, and they are computed.
        places: rows to check the recorded ones by.
    """

    first: FirstMatrix
    norms: Sequence[NormChange]
    whole: bool
    vectors: Float[Tensor, "row d_model"]
    recorded: _PerMatrix
    places: Int[Tensor, " checked"]


def through_norms(
    norms: Sequence[NormChange], x: Float[Tensor, "*batch d_model"]
) -> Float[Tensor, "*batch d_model"]:
    """The linear parts of norms, one after the other."""
    for norm in norms:
        x = norm.linear(x)
    return x


def clean_neurons(read: CleanInput, columns: int, dtype: torch.dtype, room: Workspace) -> list[Neurons]:
    """The hidden layer, in even parts.

    Args:
        read: what the first matrices read.
        columns: neurons of one part, at most.
        dtype: of what the second matrix is applied to.
        room: what the parts lie in as long as no other block uses it.
    """
    found = _recorded_bases(read, room) if read.recorded and read.whole and len(read.norms) <= 1 else None
    pre, bases = _computed(read) if found is None else (read.recorded, found)
    parts = enumerate(even(0, read.first.d_mlp, columns))
    return [_part(number, part, pre, bases, read.first, dtype, room) for number, part in parts]


def _recorded_bases(read: CleanInput, room: Workspace) -> list[_PerMatrix] | None:
    """The norm's base from recorded pre-activations p = base / size + bias, without a product of all rows.

    None where they are not what the parts give at the places: an edit on their way, say.
    """
    first, norm = read.first, next(iter(read.norms), None)
    rows = read.vectors[read.places]
    if not first.misses(rows, [pre[read.places] for pre in read.recorded]) <= TOLERANCES[rows.dtype]:
        return None
    if norm is None:
        return []
    bias = norm.norm.bias
    shape = (len(first.matrices), 1, first.d_mlp)
    linear = rows.new_zeros(shape) if bias is None else first.linear(bias[None].to(rows.dtype))
    bases = []
    for number, (pre, own) in enumerate(zip(read.recorded, first.add_biases_(linear), strict=True)):
        base = room.like(f"base {number}", pre, pre.shape, pre.dtype)
        bases.append(torch.sub(pre, own, out=base).mul_(norm.size[:, None]))
    return [bases]


def _computed(read: CleanInput) -> tuple[_PerMatrix, list[_PerMatrix]]:
    """Pre-activations, and what the first matrices make of the norms' bases."""
    first, norms, dtype = read.first, read.norms, read.vectors.dtype
    inputs = [through_norms(norms[n:], norm.base).to(dtype) for n, norm in enumerate(norms, 1)]
    if not (norms and read.whole):
        pre = first.add_biases_(first.linear(read.vectors))
        return pre.unbind(), [first.linear(base).unbind() for base in inputs]
    # The last base over its size spares a product; the bias goes along: one row reads the whole matrix too.
    size, bias = norms[-1].size[:, None], norms[-1].norm.bias
    if bias is not None:
        inputs[-1] = torch.cat([inputs[-1], bias[None].to(dtype)])
    bases = [first.linear(base) for base in inputs]
    rows = len(size)
    pre = bases[-1][:, :rows] / size
    if bias is not None:
        pre += bases[-1][:, rows:]
    return first.add_biases_(pre).unbind(), [base[:, :rows].unbind() for base in bases]


def _part(
    number: int,
    columns: slice,
    pre: _PerMatrix,
    bases: Sequence[_PerMatrix],
    first: FirstMatrix,
    dtype: torch.dtype,
    room: Workspace,
) -> Neurons:
    """Some neurons, the part `number` of them."""

    def own(name: str, x: Float[Tensor, "row d_mlp"], kind: torch.dtype) -> Float[Tensor, "row column"]:
        part = x[:, columns]
        return room.like(f"{name} of part {number}", x, part.shape, kind).copy_(part)

    scratch = [
        room.like(f"scratch {matrix}", some, some[:, columns].shape, dtype).copy_(some[:, columns])
        for matrix, some in enumerate(pre)
    ]
    minus_hidden = room.like(f"minus hidden of part {number}", scratch[0], scratch[0].shape, dtype)
    first.hidden(scratch, None, minus_hidden, room).neg_()
    return Neurons(
        columns,
        [own(f"clean pre {matrix}", some, some.dtype) for matrix, some in enumerate(pre)],
        [
            [own(f"clean base {n} {matrix}", some, some.dtype) for matrix, some in enumerate(base)]
            for n, base in enumerate(bases)
        ],
        minus_hidden,
    )
