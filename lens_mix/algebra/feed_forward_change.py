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
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.large_product import as_right_factor
from lens_mix.lens.anatomy import ACTIVATIONS, FeedForward


def _gelu_tanh_gate(x: Tensor) -> Tensor:
    # gelu_tanh(x) = x σ(2 √(2/π) (x + 0.044715 x³)). torch's own makes a map of GPT-2 8 % slower on a CPU.
    slope = 2 * math.sqrt(2 / math.pi)
    return torch.addcmul(x.new_full((1,), slope), x, x, value=0.044715 * slope).mul_(x).sigmoid_()


class Neurons(NamedTuple):
    """Some neurons of the clean rows, each tensor in memory of its own: wide strides cost cache misses."""

    # What changes are added to, per matrix: pre-activations, or zeros for those that are carried.
    start: list[Float[Tensor, "row column"]]
    # Minus what W_out reads (no b_hidden); of those that are carried g, u, SiLU(g) and SiLU(g) - g / 2.
    clean: list[Float[Tensor, "row column"]]
    bases: list[list[Float[Tensor, "row column"]]]  # per input and matrix
    W_out: Float[Tensor, "column d_model"]


class FeedForwardChange:
    """The hidden layer of the clean rows, and how it changes.

    The first matrices are applied to `inputs`. The last of these is what the feed-forward reads, less `shift`
    (a norm's bias). Changes come with factors of the first ones, which are what norms put out before weight
    and bias, each through the linear parts of the norms from it on. `dtype` is the hidden layer's.
    """

    def __init__(
        self,
        feed_forward: FeedForward,
        inputs: Sequence[Float[Tensor, "row d_model"]],
        shift: Float[Tensor, " d_model"] | None,
        dtype: torch.dtype,
        columns: int,
        pairs: int,
    ) -> None:
        gated, wide, self._dtype = feed_forward.W_gate is not None, inputs[0].dtype, dtype
        self._name, self._carries = feed_forward.activation, gated and feed_forward.activation == "silu"
        given = (feed_forward.W_gate, feed_forward.W_in)
        # W_gate before W_in, as everywhere.
        matrices = [matrix.to(wide) for matrix in given if matrix is not None]
        biases = (feed_forward.b_gate, feed_forward.b_in) if gated else (feed_forward.b_in,)
        constants = [0.0 if bias is None else bias.to(wide) for bias in biases]
        if shift is not None:
            constants = [x + shift.to(wide) @ W for x, W in zip(constants, matrices, strict=True)]
        W_out, self.parts = feed_forward.W_out.to(dtype), []
        for start in range(0, len(W_out), columns):
            neurons = slice(start, start + columns)
            bases = [[x @ matrix[:, neurons] for matrix in matrices] for x in inputs]
            added = [x if isinstance(x, float) else x[neurons] for x in constants]
            pre = [x + y for x, y in zip(bases[-1], added, strict=True)]
            self.parts.append(Neurons(*self._clean(pre), bases, as_right_factor(W_out[neurons], pairs)))

    def change(
        self,
        neurons: Neurons,
        rows: slice,
        factors: Sequence[Float[Tensor, "#key #row 1"]],
        weights: Float[Tensor, "key row rank"],
        vectors: Sequence[Float[Tensor, "key rank column"]],
        out: Float[Tensor, "key row column"],
    ) -> None:
        """The change of some neurons' part of the hidden layer, into `out`.

        That of the pre-activations is the first inputs', by their `factors`, and Σ weights · vectors, which
        are one tensor per matrix.
        """
        now = []
        for number, start in enumerate(neurons.start):
            # The first ones are made where they go: one tensor less in the caches.
            in_place = number == 0 and start.dtype == out.dtype
            pre = out if in_place else torch.empty_like(out, dtype=start.dtype)
            changed, part = start[rows], 0.5 if self._carries and number == 0 else 1.0
            for bases, factor in zip(neurons.bases, factors, strict=False):
                changed = torch.addcmul(changed, bases[number][rows], factor, value=part, out=pre)
            pre = torch.baddbmm(changed, weights, vectors[number], alpha=part, out=pre)
            now.append(pre.to(out.dtype))
        if self._carries:
            _carry_silu(neurons, rows, now, out)
        else:
            self._hidden(now, neurons.clean[0][rows], out)

    def _clean(self, pre: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The start and the clean tensors of some neurons."""
        narrow = [x.to(self._dtype) for x in pre]
        if self._carries:
            gate, up = narrow
            activated = gate * gate.sigmoid()
            return [torch.zeros_like(x) for x in pre], [gate, up, activated, activated - gate / 2]
        # By the steps of the changed layer: a difference of two ways to round costs three times the error.
        hidden = self._hidden(narrow, torch.zeros_like(narrow[0]), torch.empty_like(narrow[0]))
        return pre, [hidden.neg_()]

    def _hidden(self, pre: Sequence[Tensor], plus: Tensor, out: Tensor) -> Tensor:
        """The hidden layer plus a tensor, into `out`."""
        name, first = self._name, pre[0]
        if len(pre) == 2:
            return torch.addcmul(plus, ACTIVATIONS[name](first), pre[1], out=out)
        if name == "gelu_tanh":
            return torch.addcmul(plus, first, _gelu_tanh_gate(first), out=out)
        return torch.add(plus, ACTIVATIONS[name](first), out=out)


def _carry_silu(neurons: Neurons, rows: slice, changes: Sequence[Tensor], out: Tensor) -> None:
    """The change of a layer gated by SiLU, into `out`, from half the gate's change (which may be `out`)."""
    half, up = changes
    clean_gate, clean_up, activated, turned = (x[rows] for x in neurons.clean)
    sigma, tanh = torch.add(clean_gate, half, alpha=2).sigmoid_(), half.tanh()
    # Half the change of SiLU; powers of two cost no digits.
    change = torch.addcmul(half, tanh, turned, value=-1, out=out).mul_(sigma)
    change.addcmul_(tanh, activated, value=0.5)
    changed_up = torch.add(up, clean_up, out=sigma)
    torch.addcmul(up.mul_(activated), change, changed_up, value=2, out=out)
