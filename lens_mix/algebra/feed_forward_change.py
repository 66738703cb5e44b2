"""How the feed-forward's hidden layer changes with what it reads.

W_in (and W_gate) are linear, so a change of the input is a change of the pre-activations:

    plain            act(p + c) - act(p)
    gated            act(g + c) (u + d) - act(g) u
    gated by SiLU    (SiLU(g + c) - SiLU(g)) (u + d) + SiLU(g) d, where with t = tanh(c / 2)
                     SiLU(g + c) - SiLU(g) = σ(g + c) (c - t (2 SiLU(g) - g)) + t SiLU(g)

The last one is no difference of two layers (tanh x - tanh y = tanh(x - y) (1 - tanh x tanh y)): a small change
keeps its digits, where a difference would have those of SiLU(g) u.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.large_product import as_right_factor
from lens_mix.algebra.norm_change import NormChange
from lens_mix.lens.anatomy import ACTIVATIONS, FeedForward

# Adds what some pairs change in pre-activations: (0 for W_gate or a plain W_in, 1 for a gated one's W_in;
# which neurons; where to).
AddChange = Callable[[int, slice, Tensor], object]


def _gelu_tanh_gate(x: Tensor) -> Tensor:
    # gelu_tanh(x) = x σ(2 √(2/π) (x + 0.044715 x³)). torch's own makes a map of GPT-2 8 % slower on a CPU.
    slope = 2 * math.sqrt(2 / math.pi)
    return torch.addcmul(x.new_full((1,), slope), x, x, value=0.044715 * slope).mul_(x).sigmoid_()


# act(x) = x gate(x): x -> gate(x).
_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": _gelu_tanh_gate,
    "quick_gelu": lambda x: (1.702 * x).sigmoid_(),
    "silu": torch.sigmoid,
}


@dataclasses.dataclass(frozen=True)
class Neurons:
    """Some neurons of the clean rows, each tensor in memory of its own: wide strides cost cache misses.

    Attributes:
        columns: which neurons.
        pre: pre-activations, per matrix (W_gate before W_in).
        bases: what the matrices make of the norms' numerators, per norm and matrix.
        minus_hidden: -1 times what W_out reads, without the bias that some models add to it.
        carried: SiLU(g) and 2 SiLU(g) - g of a layer gated by SiLU.
        W_out: of these neurons.
    """

    columns: slice
    pre: list[Float[Tensor, "row column"]]
    bases: list[list[Float[Tensor, "row column"]]]
    minus_hidden: Float[Tensor, "row column"]
    carried: tuple[Float[Tensor, "row column"], Float[Tensor, "row column"]] | None
    W_out: Float[Tensor, "column d_model"]


class FeedForwardChange:
    """The hidden layer of the clean rows, and how it changes.

    Args:
        feed_forward: the parts.
        norms: between the attention's output and the feed-forward, in order.
        read: what the feed-forward reads in the clean pass; the pre-activations have its dtype.
        read_by: the last of the norms, where `read` is its output.
        dtype: of the hidden layer.
        columns: neurons that are done at once, at most.
        with_bases: whether changes will come with factors of the norms' numerators.
        pairs: how many changes there will be.
    """

    def __init__(
        self,
        feed_forward: FeedForward,
        norms: Sequence[NormChange],
        read: Float[Tensor, "row d_model"],
        read_by: NormChange | None,
        dtype: torch.dtype,
        columns: int,
        with_bases: bool,
        pairs: int,
    ) -> None:
        gate = feed_forward.W_gate
        matrices = [feed_forward.W_in] if gate is None else [gate, feed_forward.W_in]
        self._biases = [feed_forward.b_in] if gate is None else [feed_forward.b_gate, feed_forward.b_in]
        self.matrices = [matrix.to(read.dtype) for matrix in matrices]
        self._feed_forward, self._activation, self._dtype = feed_forward, feed_forward.activation, dtype
        self._W_out, self._pairs = feed_forward.W_out.to(dtype), pairs
        inputs = []
        for number, norm in enumerate(norms if with_bases else (), 1):
            vectors = norm.numerator
            for later in norms[number:]:
                vectors = later.linear(vectors)
            inputs.append(vectors.to(read.dtype))
        if read_by is None or not with_bases:
            read_by, inputs = None, [*inputs, read]
        d_mlp = feed_forward.W_in.shape[1]
        parts = [slice(start, min(start + columns, d_mlp)) for start in range(0, d_mlp, columns)]
        self.parts = [self._part(part, inputs, read_by) for part in parts]

    def _part(
        self, columns: slice, inputs: Sequence[Float[Tensor, "row d_model"]], read_by: NormChange | None
    ) -> Neurons:
        matrices = [matrix[:, columns] for matrix in self.matrices]
        bases = [[x @ matrix for matrix in matrices] for x in inputs]
        if read_by is None:
            pre = bases.pop()
        else:
            # The norm's numerator over its size spares a product of all rows.
            pre = [base / read_by.size for base in bases[-1]]
            if read_by.norm.bias is not None:
                norm_bias = read_by.norm.bias.to(pre[0].dtype)
                pre = [x.add_(norm_bias @ matrix) for x, matrix in zip(pre, matrices, strict=True)]
        for x, bias in zip(pre, self._biases, strict=True):
            if bias is not None:
                x += bias[columns].to(x.dtype)
        narrow = [x.to(self._dtype) for x in pre]
        hidden = activated = ACTIVATIONS[self._activation](narrow[0])
        carried = None
        if len(pre) == 2:
            hidden = activated * narrow[1]
            carried = (activated, 2 * activated - narrow[0]) if self._activation == "silu" else None
        W_out = as_right_factor(self._W_out[columns], self._pairs)
        return Neurons(columns, pre, bases, -hidden, carried, W_out)

    def output(self) -> Float[Tensor, "row d_model"]:
        """The feed-forward's clean output."""
        b_hidden, b_out = self._feed_forward.b_hidden, self._feed_forward.b_out
        out = self._W_out.new_zeros(len(self.parts[0].minus_hidden), self._W_out.shape[1])
        for neurons in self.parts:
            out -= neurons.minus_hidden @ neurons.W_out
        if b_hidden is not None:
            out += b_hidden.to(out.dtype) @ self._W_out
        return out if b_out is None else out + b_out.to(out.dtype)

    def change(
        self,
        neurons: Neurons,
        rows: slice,
        factors: Sequence[Float[Tensor, "key row 1"]],
        add: AddChange,
        out: Float[Tensor, "key row column"],
    ) -> None:
        """The change of some neurons' part of the hidden layer, into `out`.

        Args:
            neurons: which neurons.
            rows: which rows of the clean pass the pairs belong to.
            factors: of the norms' numerators in the change of what is read.
            add: adds the rest of the pre-activations' change.
            out: where it goes.
        """
        changes = []
        for number, clean in enumerate(neurons.pre):
            # The first ones are made where they go: one tensor less in the caches.
            in_place = number == 0 and clean.dtype == out.dtype
            change = out if in_place else torch.empty(out.shape, dtype=clean.dtype, device=clean.device)
            terms = [(base[number][rows], factor) for base, factor in zip(neurons.bases, factors, strict=True)]
            _sum_into(change, None if neurons.carried else clean[rows], terms)
            add(number, neurons.columns, change)
            changes.append(change.to(out.dtype))
        if neurons.carried is not None:
            _carry_silu(neurons, rows, changes, out)
            return
        gate, activation = _GATES.get(self._activation), ACTIVATIONS[self._activation]
        if len(changes) == 2:
            torch.addcmul(neurons.minus_hidden[rows], activation(changes[0]), changes[1], out=out)
        elif gate is not None:
            torch.addcmul(neurons.minus_hidden[rows], changes[0], gate(changes[0]), out=out)
        else:
            torch.add(neurons.minus_hidden[rows], activation(changes[0]), out=out)


def _sum_into(
    out: Float[Tensor, "key row column"],
    start: Float[Tensor, "row column"] | None,
    terms: Sequence[tuple[Float[Tensor, "row column"], Float[Tensor, "key row 1"]]],
) -> None:
    """start (None: 0) + Σ base · factor, as few times through `out` as possible."""
    if not terms:
        out.zero_() if start is None else out.copy_(start)
        return
    (base, factor), *others = terms
    torch.mul(base, factor, out=out) if start is None else torch.addcmul(start, base, factor, out=out)
    for base, factor in others:
        out.addcmul_(base, factor)


def _carry_silu(
    neurons: Neurons,
    rows: slice,
    changes: Sequence[Float[Tensor, "key row column"]],
    out: Float[Tensor, "key row column"],
) -> None:
    """The change of a layer gated by SiLU, into `out`, which may be the gate's change; overwrites both."""
    if neurons.carried is None:
        raise ValueError("neurons: expected a layer gated by SiLU")
    gate, up = changes
    activated, turned = (x[rows] for x in neurons.carried)
    sigma = torch.add(gate, neurons.pre[0][rows].to(out.dtype)).sigmoid_()
    tanh = (gate / 2).tanh_()
    change = torch.addcmul(gate, tanh, turned, value=-1, out=out).mul_(sigma).addcmul_(tanh, activated)
    changed_up = torch.add(up, neurons.pre[1][rows].to(out.dtype), out=sigma)
    torch.addcmul(up.mul_(activated), change, changed_up, out=out)
