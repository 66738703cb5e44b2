"""The clean block's hidden layer: pre-activations, and what its norms' vectors make of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.value_zeroing_old.first_matrix import FirstMatrix
from lens_mix.algebra.value_zeroing_old.norms import NormChange
from lens_mix.algebra.value_zeroing_old.silu import CleanSilu
from lens_mix.algebra.workspace import Workspace, even
from lens_mix.hooks.mixing import TOLERANCES

# One tensor per first matrix.
_PerMatrix = Sequence[Float[Tensor, "row d_mlp"]]
# What a first matrix makes of a norm's base: (matrix, which neurons, their pre-activations, where it goes).
_Base = Callable[[int, slice, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Neurons:
    """The clean block's numbers of some neurons, each tensor in memory of its own: strides cost cache misses.

    Attributes:
        columns: which neurons.
        pre: pre-activations, per first matrix.
        bases: what the first matrices make of the norms' bases, per norm and matrix.
        minus_hidden: -1 times what the second matrix is applied to.
        silu: a gated SiLU layer's own numbers.
    """

    columns: slice
    pre: list[Float[Tensor, "row column"]]
    bases: list[list[Float[Tensor, "row column"]]]
    minus_hidden: Float[Tensor, "row column"]
    silu: CleanSilu | None


@dataclasses.dataclass(frozen=True)
class CleanInput:
    """What the first matrices read in the clean pass.

    Attributes:
        first: the matrices.
        norms: between the attention's output and them, in order.
        whole: whether the last norm, or the residual stream where there is none, is all that is read.
        vectors: what is read.
        recorded: the model's own pre-activations, per first matrix; none, and they are computed.
    """

    first: FirstMatrix
    norms: Sequence[NormChange]
    whole: bool
    vectors: Float[Tensor, "row d_model"]
    recorded: _PerMatrix


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
    usable = read.recorded and read.whole and len(read.norms) <= 1 and _is_of_the_parts(read)
    pre, bases = (read.recorded, _bases_of_recorded(read)) if usable else _computed(read)
    parts = enumerate(even(0, read.first.d_mlp, columns))
    return [_part(number, part, pre, bases, read.first, dtype, room) for number, part in parts]


def _is_of_the_parts(read: CleanInput) -> bool:
    """Whether the recorded pre-activations are what the parts give; an edit would show."""
    return read.first.misses(read.vectors, read.recorded) <= TOLERANCES[read.vectors.dtype]


def _bases_of_recorded(read: CleanInput) -> list[_Base]:
    """The norm's base from recorded pre-activations p = base / size + bias, without a product of all rows."""
    if not read.norms:
        return []
    norm, first = read.norms[0], read.first
    bias, vectors = norm.norm.bias, read.vectors
    shape = (len(first.matrices), 1, first.d_mlp)
    linear = vectors.new_zeros(shape) if bias is None else first.linear(bias[None].to(vectors.dtype))
    biases, size = first.add_biases_(linear), norm.size[:, None]

    def base(matrix: int, columns: slice, pre: Tensor, out: Tensor) -> Tensor:
        return torch.sub(pre, biases[matrix][:, columns], out=out).mul_(size)

    return [base]


def _given(bases: Float[Tensor, "matrix row d_mlp"]) -> _Base:
    return lambda matrix, columns, _, out: out.copy_(bases[matrix][:, columns])


def _computed(read: CleanInput) -> tuple[_PerMatrix, list[_Base]]:
    """Pre-activations, and what the first matrices make of the norms' bases."""
    first, norms, dtype = read.first, read.norms, read.vectors.dtype
    inputs = [through_norms(norms[n:], norm.base).to(dtype) for n, norm in enumerate(norms, 1)]
    if not (norms and read.whole):
        pre = first.add_biases_(first.linear(read.vectors))
        return pre.unbind(), [_given(first.linear(base)) for base in inputs]
    # The last base over its size spares a product; the bias goes along: one row reads the whole matrix too.
    size, bias = norms[-1].size[:, None], norms[-1].norm.bias
    if bias is not None:
        inputs[-1] = torch.cat([inputs[-1], bias[None].to(dtype)])
    bases = [first.linear(base) for base in inputs]
    rows = len(size)
    pre = bases[-1][:, :rows] / size
    if bias is not None:
        pre += bases[-1][:, rows:]
    return first.add_biases_(pre).unbind(), [_given(base[:, :rows]) for base in bases]


def _part(
    number: int,
    columns: slice,
    pre: _PerMatrix,
    bases: Sequence[_Base],
    first: FirstMatrix,
    dtype: torch.dtype,
    room: Workspace,
) -> Neurons:
    """Some neurons, the part `number` of them."""
    shape = (len(pre[0]), columns.stop - columns.start)

    def own(name: str, kind: torch.dtype) -> Float[Tensor, "row column"]:
        return room.like(f"{name} of part {number}", pre[0], shape, kind)

    own_pre = [own(f"clean pre {n}", some.dtype).copy_(some[:, columns]) for n, some in enumerate(pre)]
    own_bases = [
        [
            base(matrix, columns, some, own(f"clean base {n} {matrix}", some.dtype))
            for matrix, some in enumerate(own_pre)
        ]
        for n, base in enumerate(bases)
    ]
    scratch = [room.like(f"scratch {n}", some, shape, dtype).copy_(some) for n, some in enumerate(own_pre)]
    minus_hidden = first.hidden(scratch, None, own("minus hidden", dtype), room).neg_()
    silu = CleanSilu.of(own_pre, dtype) if first.carries else None
    return Neurons(columns, own_pre, own_bases, minus_hidden, silu)
