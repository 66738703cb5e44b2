"""How the feed-forward's hidden layer changes with what it reads.

W_in (and W_gate) are linear, so a change of the input is a change of the pre-activations:

    plain            act(p + c) - act(p)
    gated            act(g + c) (u + d) - act(g) u
    gated by SiLU    (SiLU(g + c) - SiLU(g)) (u + d) + SiLU(g) d, where with t = tanh(c / 2)
                     SiLU(g + c) - SiLU(g) = σ(g + c) (c - t (2 SiLU(g) - g)) + t SiLU(g)

The last one is no difference of two layers, so a small change keeps its digits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.lens.anatomy import ACTIVATIONS, FeedForward


def _gelu_tanh_gate(x: Tensor) -> Tensor:
    # gelu_tanh(x) = x σ(2 √(2/π) (x + 0.044715 x³)). torch's own makes a map of GPT-2 8 % slower on a CPU.
    slope = 2 * math.sqrt(2 / math.pi)
    return torch.addcmul(x.new_full((1,), slope), x, x, value=0.044715 * slope).mul_(x).sigmoid_()


class Neurons(NamedTuple):
    """Some neurons of the clean rows, each tensor in memory of its own: wide strides cost cache misses."""

    activation: str
    # Per matrix the clean pre-activations, which changes are added to; zeros where SiLU gates the layer: its
    # change has a formula of its own (see the module's docstring).
    start: list[Float[Tensor, "row neuron"]]
    # Minus the hidden layer (no b_hidden), to subtract it; where SiLU gates: g, u, SiLU(g), SiLU(g) - g / 2.
    clean: list[Float[Tensor, "row neuron"]]
    bases: list[list[Float[Tensor, "row neuron"]]]  # per input and matrix

    def change(
        self,
        rows: slice,
        factors: Sequence[Float[Tensor, "#key #row 1"]],
        weights: Float[Tensor, "key row rank"],
        vectors: Sequence[Float[Tensor, "key rank neuron"]],
        out: Float[Tensor, "key row neuron"],
    ) -> None:
        """The change of these neurons in the hidden layer, into `out`.

        The pre-activations change by Σ factor · base, over the norms' outputs, and by Σ weights · vectors;
        `vectors` has one tensor per matrix.
        """
        now, gated_by_silu = [], len(self.clean) == 4
        for number, start in enumerate(self.start):
            # The first ones are made where they go: one tensor less in the caches.
            in_place = number == 0 and start.dtype == out.dtype
            pre = out if in_place else torch.empty_like(out, dtype=start.dtype)
            # Of the gate half the change is enough, as t = tanh(c / 2).
            changed, part = start[rows], 0.5 if gated_by_silu and number == 0 else 1.0
            # `bases` may have one entry more than `factors`: without a last norm, the clean input itself, and
            # no change multiplies that.
            for bases, factor in zip(self.bases, factors, strict=False):
                changed = torch.addcmul(changed, bases[number][rows], factor, value=part, out=pre)
            pre = torch.baddbmm(changed, weights, vectors[number], alpha=part, out=pre)
            now.append(pre.to(out.dtype))
        if gated_by_silu:
            _silu_change([x[rows] for x in self.clean], now, out)
        else:
            _hidden(self.activation, now, self.clean[0][rows], out)


def neurons_of(
    feed_forward: FeedForward,
    inputs: Sequence[Float[Tensor, "row d_model"]],
    shift: Float[Tensor, " d_model"] | None,
    dtype: torch.dtype,
    widths: Sequence[int],
) -> list[Neurons]:
    """The hidden layer of the clean rows, so many neurons (`widths`) at a time; `dtype` is its own.

    Changes of the pre-activations hold multiples of `inputs` through W_in (and W_gate): the output of each
    norm on the way, without weight and bias, through the linear parts of the norms from it on. The last input
    is what the feed-forward reads, less `shift` (a norm's bias).
    """
    wide, gated, name = inputs[0].dtype, feed_forward.W_gate is not None, feed_forward.activation
    matrices = [matrix.to(wide) for matrix in feed_forward.input_matrices]
    biases = (feed_forward.b_gate, feed_forward.b_in) if gated else (feed_forward.b_in,)
    constants = [0.0 if bias is None else bias.to(wide) for bias in biases]
    if shift is not None:
        constants = [x + shift.to(wide) @ W for x, W in zip(constants, matrices, strict=True)]
    parts = []
    for width, stop in zip(widths, itertools.accumulate(widths), strict=True):
        place = slice(stop - width, stop)
        bases = [[x @ matrix[:, place] for matrix in matrices] for x in inputs]
        added = [x if isinstance(x, float) else x[place] for x in constants]
        pre = [x + y for x, y in zip(bases[-1], added, strict=True)]
        parts.append(Neurons(name, *_clean(name, pre, dtype), bases))
    return parts


def _clean(name: str, pre: list[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The start and the clean tensors of some neurons."""
    narrow = [x.to(dtype) for x in pre]
    if len(pre) == 2 and name == "silu":
        gate, up = narrow
        activated = gate * gate.sigmoid()
        return [torch.zeros_like(x) for x in pre], [gate, up, activated, activated - gate / 2]
    # By the steps of the changed layer: a difference of two ways to round costs three times the error.
    hidden = _hidden(name, narrow, torch.zeros_like(narrow[0]), torch.empty_like(narrow[0]))
    return pre, [hidden.neg_()]


def _hidden(name: str, pre: Sequence[Tensor], plus: Tensor, out: Tensor) -> Tensor:
    """The hidden layer plus a tensor, into `out`."""
    if len(pre) == 2:
        return torch.addcmul(plus, ACTIVATIONS[name](pre[0]), pre[1], out=out)
    if name == "gelu_tanh":
        return torch.addcmul(plus, pre[0], _gelu_tanh_gate(pre[0]), out=out)
    return torch.add(plus, ACTIVATIONS[name](pre[0]), out=out)


def _silu_change(clean: Sequence[Tensor], changes: Sequence[Tensor], out: Tensor) -> None:
    """The change of a layer gated by SiLU, into `out`, from half the gate's change (which may be `out`)."""
    (clean_gate, clean_up, activated, turned), (half, up) = clean, changes
    sigma, tanh = torch.add(clean_gate, half, alpha=2).sigmoid_(), half.tanh()
    # Half the change of SiLU; powers of two cost no digits.
    change = torch.addcmul(half, tanh, turned, value=-1, out=out).mul_(sigma)
    change.addcmul_(tanh, activated, value=0.5)
    changed_up = torch.add(up, clean_up, out=sigma)
    torch.addcmul(up.mul_(activated), change, changed_up, value=2, out=out)
