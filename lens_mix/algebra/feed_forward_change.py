"""How the feed-forward's hidden layer changes with what it reads.

W_in (and W_gate) are linear, so a change of the input is a change of the pre-activations:

    plain            act(p + c) - act(p)
    gated            act(g + c) (u + d) - act(g) u
    gated by SiLU    (SiLU(g + c) - SiLU(g)) (u + d) + SiLU(g) d, where with t = tanh(c / 2)
                     SiLU(g + c) - SiLU(g) = σ(g + c) (c - t (2 SiLU(g) - g)) + t SiLU(g)

The last one is no difference of two layers (tanh x - tanh y = tanh(x - y) (1 - tanh x tanh y)): a small
change keeps its digits, where a difference would have those of SiLU(g) u.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.large_product import as_right_factor
from lens_mix.algebra.norm_change import NormChange
from lens_mix.lens.anatomy import ACTIVATIONS, FeedForward


def _gelu_tanh_gate(x: Tensor, out: Tensor) -> Tensor:
    # gelu_tanh(x) = x σ(2 √(2/π) (x + 0.044715 x³)). torch's own makes a map of GPT-2 8 % slower on a CPU.
    slope = 2 * math.sqrt(2 / math.pi)
    torch.addcmul(x.new_full((1,), slope), x, x, value=0.044715 * slope, out=out)
    return out.mul_(x).sigmoid_()


# act(x) = x gate(x): (x, workspace) -> gate(x) in the workspace.
_GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu_tanh": _gelu_tanh_gate,
    "quick_gelu": lambda x, out: torch.mul(x, 1.702, out=out).sigmoid_(),
    "silu": lambda x, out: torch.sigmoid(x, out=out),
}


class Neurons(NamedTuple):
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
        inputs: what the matrices are applied to: the norms' numerators, each through the linear parts of the
            norms behind it, where changes come with factors of them; then what the feed-forward reads.
        read_by: the norm whose output is read, where its numerator stands at the end of `inputs` instead.
        dtype: of the hidden layer; the pre-activations have that of `inputs`.
        columns: neurons that are done at once, at most.
        pairs: how many changes there will be.
    """

    def __init__(
        self,
        feed_forward: FeedForward,
        inputs: Sequence[Float[Tensor, "row d_model"]],
        read_by: NormChange | None,
        dtype: torch.dtype,
        columns: int,
        pairs: int,
    ) -> None:
        gate = feed_forward.W_gate
        matrices = [feed_forward.W_in] if gate is None else [gate, feed_forward.W_in]
        self._biases = [feed_forward.b_in] if gate is None else [feed_forward.b_gate, feed_forward.b_in]
        self.matrices = [matrix.to(inputs[0].dtype) for matrix in matrices]
        self._feed_forward, self._dtype, self._pairs = feed_forward, dtype, pairs
        self._buffers: list[Tensor] = []
        self._carries = gate is not None and feed_forward.activation == "silu"
        self._W_out, d_mlp = feed_forward.W_out.to(dtype), feed_forward.W_in.shape[1]
        parts = [slice(start, min(start + columns, d_mlp)) for start in range(0, d_mlp, columns)]
        self.parts = [self._part(part, inputs, read_by) for part in parts]

    def _part(
        self, columns: slice, inputs: Sequence[Float[Tensor, "row d_model"]], read_by: NormChange | None
    ) -> Neurons:
        matrices = [matrix[:, columns] for matrix in self.matrices]
        bases = [[x @ matrix for matrix in matrices] for x in inputs]
        pre = bases.pop() if read_by is None else [base / read_by.size for base in bases[-1]]
        norm_bias = None if read_by is None else read_by.norm.bias
        for x, matrix, bias in zip(pre, matrices, self._biases, strict=True):
            if norm_bias is not None:
                x += norm_bias.to(x.dtype) @ matrix
            if bias is not None:
                x += bias[columns].to(x.dtype)
        narrow = [x.to(self._dtype) for x in pre]
        minus_hidden = torch.zeros_like(narrow[0])
        self._hidden(narrow, minus_hidden, torch.empty_like(minus_hidden), minus_hidden).neg_()
        carried = None
        if self._carries:
            activated = narrow[0] * narrow[0].sigmoid()
            carried = activated, 2 * activated - narrow[0]
        W_out = as_right_factor(self._W_out[columns], self._pairs)
        return Neurons(columns, pre, bases, minus_hidden, carried, W_out)

    def output(self) -> Float[Tensor, "row d_model"]:
        """The feed-forward's clean output."""
        out = self._W_out.new_zeros(())
        for neurons in self.parts:
            out = out - neurons.minus_hidden @ neurons.W_out
        b_hidden, b_out = self._feed_forward.b_hidden, self._feed_forward.b_out
        out = out if b_hidden is None else out + b_hidden.to(out.dtype) @ self._W_out
        return out if b_out is None else out + b_out.to(out.dtype)

    def change(
        self,
        neurons: Neurons,
        rows: slice,
        factors: Sequence[Float[Tensor, "key row 1"]],
        add: Callable[[int, slice, Tensor], None],
        out: Float[Tensor, "key row column"],
    ) -> None:
        """The change of some neurons' part of the hidden layer, into `out`.

        Args:
            neurons: which neurons.
            rows: which rows of the clean pass the pairs belong to.
            factors: of the norms' numerators in the change of what is read.
            add: adds the rest of the pre-activations' change: (which matrix, which neurons, where to).
            out: where it goes.
        """
        now = []
        scratch = [self._scratch(number, out.shape, out) for number in range(3)]
        for number, clean in enumerate(neurons.pre):
            # The first ones are made where they go: one tensor less in the caches.
            room = (out, scratch[0])[number]
            pre = room if clean.dtype == out.dtype else torch.empty_like(out, dtype=clean.dtype)
            # Of a layer that is carried the changes alone.
            start = clean[rows] if neurons.carried is None else None
            for bases, factor in zip(neurons.bases, factors, strict=True):
                base = bases[number][rows]
                # A number as the start would cost four times as much: it keeps PyTorch from its vector unit.
                start = torch.mul(base, factor, out=pre) if start is None else torch.addcmul(start, base, factor, out=pre)
            if start is None:
                pre.zero_()
            elif start is not pre:
                pre.copy_(start)
            add(number, neurons.columns, pre)
            now.append(room.copy_(pre) if pre is not room else pre)
        if neurons.carried is None:
            self._hidden(now, neurons.minus_hidden[rows], scratch[1], out)
        else:
            _carry_silu(neurons, rows, now, scratch[1:], out)

    def _scratch(self, number: int, shape: torch.Size, like: Tensor) -> Tensor:
        if number >= len(self._buffers) or self._buffers[number].numel() < shape.numel():
            self._buffers[number:] = [like.new_empty(shape.numel())]
        return self._buffers[number][: shape.numel()].view(shape)

    def _hidden(self, pre: Sequence[Tensor], plus: Tensor, workspace: Tensor, out: Tensor) -> Tensor:
        """The hidden layer plus a tensor, into `out`."""
        name = self._feed_forward.activation
        # The clean layer goes the same way as the changed one, so that their roundings are alike.
        if len(pre) == 2:
            return torch.addcmul(plus, ACTIVATIONS[name](pre[0]), pre[1], out=out)
        if name in _GATES:
            return torch.addcmul(plus, pre[0], _GATES[name](pre[0], workspace), out=out)
        return torch.add(plus, ACTIVATIONS[name](pre[0]), out=out)


def _carry_silu(
    neurons: Neurons,
    rows: slice,
    changes: Sequence[Float[Tensor, "key row column"]],
    workspace: Sequence[Float[Tensor, "key row column"]],
    out: Float[Tensor, "key row column"],
) -> None:
    """The change of a layer gated by SiLU, into `out`, which may be the gate's change; overwrites both."""
    if neurons.carried is None:
        raise ValueError("neurons: expected a layer gated by SiLU")
    gate, up = changes
    activated, turned = (x[rows] for x in neurons.carried)
    sigma = torch.add(gate, neurons.pre[0][rows].to(out.dtype), out=workspace[0]).sigmoid_()
    tanh = torch.mul(gate, 0.5, out=workspace[1]).tanh_()
    change = torch.addcmul(gate, tanh, turned, value=-1, out=out).mul_(sigma).addcmul_(tanh, activated)
    changed_up = torch.add(up, neurons.pre[1][rows].to(out.dtype), out=sigma)
    torch.addcmul(up.mul_(activated), change, changed_up, out=out)
