"""How the feed-forward's hidden layer changes with what it reads.

W_in (and W_gate) are linear, so a change of the input is a change of the pre-activations:

    plain            act(p + c) - act(p)
    gated            act(g + c) (u + d) - act(g) u
    gated by SiLU    (SiLU(g + c) - SiLU(g)) (u + d) + SiLU(g) d, where with t = tanh(c / 2)
                     SiLU(g + c) - SiLU(g) = σ(g + c) (c - t (2 SiLU(g) - g)) + t SiLU(g)

The last one is no difference of two layers, so a small change keeps its digits.
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


def _gelu_tanh_gate(x: Tensor) -> Tensor:
    # gelu_tanh(x) = x σ(2 √(2/π) (x + 0.044715 x³)). torch's own makes a map of GPT-2 8 % slower on a CPU.
    slope = 2 * math.sqrt(2 / math.pi)
    return torch.addcmul(x.new_full((1,), slope), x, x, value=0.044715 * slope).mul_(x).sigmoid_()


class Neurons(NamedTuple):
    """Some neurons of the clean rows, each tensor in memory of its own: wide strides cost cache misses."""

    columns: slice
    pre: list[Float[Tensor, "row column"]]  # pre-activations, per matrix (W_gate before W_in)
    bases: list[list[Float[Tensor, "row column"]]]  # of the norms' numerators, per norm and matrix
    minus_hidden: Float[Tensor, "row column"]  # -1 times what W_out reads, b_hidden not in it
    W_out: Float[Tensor, "column d_model"]


class FeedForwardChange:
    """The hidden layer of the clean rows, and how it changes.

    The first matrices are applied to `inputs`: where changes come with factors of the norms' numerators,
    these (each through the linear parts of the norms behind it), then what the feed-forward reads. Instead
    of the latter, `read_by` is the norm whose numerator stands last. `dtype` is the hidden layer's.
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
        gated, wide = feed_forward.W_gate is not None, inputs[0].dtype
        self._dtype, self._pairs = dtype, pairs
        self._name, self._carries = feed_forward.activation, gated and feed_forward.activation == "silu"
        matrices = (feed_forward.W_gate, feed_forward.W_in)
        self.matrices = [matrix.to(wide) for matrix in matrices if matrix is not None]
        biases = (feed_forward.b_gate, feed_forward.b_in) if gated else (feed_forward.b_in,)
        self._biases = [0.0 if bias is None else bias.to(wide) for bias in biases]
        if read_by is not None and read_by.norm.bias is not None:
            bias = read_by.norm.bias.to(wide)
            self._biases = [bias @ matrix + b for matrix, b in zip(self.matrices, self._biases, strict=True)]
        self._W_out, d_mlp = feed_forward.W_out.to(dtype), feed_forward.W_in.shape[1]
        parts = [slice(start, min(start + columns, d_mlp)) for start in range(0, d_mlp, columns)]
        self.parts = [self._part(part, inputs, read_by) for part in parts]

    def _part(
        self, columns: slice, inputs: Sequence[Float[Tensor, "row d_model"]], read_by: NormChange | None
    ) -> Neurons:
        bases = [[x @ matrix[:, columns] for matrix in self.matrices] for x in inputs]
        pre = bases.pop() if read_by is None else [base / read_by.size for base in bases[-1]]
        for x, bias in zip(pre, self._biases, strict=True):
            x += bias if isinstance(bias, float) else bias[columns]
        narrow = [x.to(self._dtype) for x in pre]
        # By the steps of the changed layer: a difference of two ways to round costs three times the error.
        minus_hidden = self._hidden(narrow, torch.zeros_like(narrow[0]), torch.empty_like(narrow[0])).neg_()
        return Neurons(columns, pre, bases, minus_hidden, as_right_factor(self._W_out[columns], self._pairs))

    def change(
        self,
        neurons: Neurons,
        rows: slice,
        factors: Sequence[Float[Tensor, "key row 1"]],
        add: Callable[[int, slice, Tensor], None],
        out: Float[Tensor, "key row column"],
    ) -> None:
        """The change of some neurons' part of the hidden layer, into `out`.

        `factors` are those of the norms' numerators in the change of what is read; `add` adds the rest of
        the pre-activations' change: (which matrix, which neurons, where to).
        """
        now = []
        for number, clean in enumerate(neurons.pre):
            # The first ones are made where they go: one tensor less in the caches.
            in_place = number == 0 and clean.dtype == out.dtype
            pre = out if in_place else torch.empty_like(out, dtype=clean.dtype)
            # Of a layer that is carried the change alone.
            start = None if self._carries else clean[rows]
            for bases, factor in zip(neurons.bases, factors, strict=True):
                base = bases[number][rows]
                # A zero as the start would keep PyTorch from its vector unit, at five times the cost.
                if start is None:
                    start = torch.mul(base, factor, out=pre)
                else:
                    start = torch.addcmul(start, base, factor, out=pre)
            if start is not pre:
                pre.copy_(pre.new_zeros(()) if start is None else start)
            add(number, neurons.columns, pre)
            now.append(pre.to(out.dtype))
        if self._carries:
            self._carry_silu(neurons, rows, now, out)
        else:
            self._hidden(now, neurons.minus_hidden[rows], out)

    def _hidden(self, pre: Sequence[Tensor], plus: Tensor, out: Tensor) -> Tensor:
        """The hidden layer plus a tensor, into `out`."""
        name, first = self._name, pre[0]
        if len(pre) == 2:
            return torch.addcmul(plus, ACTIVATIONS[name](first), pre[1], out=out)
        if name == "gelu_tanh":
            return torch.addcmul(plus, first, _gelu_tanh_gate(first), out=out)
        return torch.add(plus, ACTIVATIONS[name](first), out=out)

    @staticmethod
    def _carry_silu(neurons: Neurons, rows: slice, changes: Sequence[Tensor], out: Tensor) -> None:
        """The change of a layer gated by SiLU, into `out` (which may be the gate's change)."""
        gate, up = changes
        clean_gate, clean_up = (x[rows].to(out.dtype) for x in neurons.pre)
        activated = clean_gate * clean_gate.sigmoid()
        turned = 2 * activated - clean_gate
        sigma, tanh = torch.add(gate, clean_gate).sigmoid_(), torch.mul(gate, 0.5).tanh_()
        change = torch.addcmul(gate, tanh, turned, value=-1, out=out).mul_(sigma).addcmul_(tanh, activated)
        changed_up = torch.add(up, clean_up, out=sigma)
        torch.addcmul(up.mul_(activated), change, changed_up, out=out)
