"""The change of the feed-forward's hidden layer that a change of its input causes.

W_in (and W_gate) are linear, so a change of the input is a change of the pre-activations:

    plain            act(p + c) - act(p)
    gated            act(g + c) (u + d) - act(g) u
    gated by SiLU    (SiLU(g + c) - SiLU(g)) (u + d) + SiLU(g) d, where with t = tanh(c / 2)
                     SiLU(g + c) - SiLU(g) = σ(g + c) (c - t (2 SiLU(g) - g)) + t SiLU(g)

The last formula does not subtract two hidden layers, so it is accurate for small changes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._model.anatomy import ACTIVATIONS, FeedForward

RowSlices = tuple[slice, slice]  # Some rows of some prompts.


def _gelu_tanh_gate(x: Tensor) -> Tensor:
    # gelu_tanh(x) = x σ(2 √(2/π) (x + 0.044715 x³)) is faster than torch's own function on a CPU.
    slope = 2 * math.sqrt(2 / math.pi)
    return torch.addcmul(x.new_full((1,), slope), x, x, value=0.044715 * slope).mul_(x).sigmoid_()


class Neurons(NamedTuple):
    """Some neurons of the clean rows; all tensors are contiguous, because wide strides cause cache misses."""

    activation: str
    # These are the clean pre-activations per matrix, to which changes are added. They are zeros if SiLU gates
    # the layer, whose change has its own formula (see the module's docstring).
    start: list[Float[Tensor, "prompt row neuron"]]
    # This is minus the hidden layer (without b_hidden), or g, u, SiLU(g), 2 SiLU(g) - g for a SiLU gate.
    clean: list[Float[Tensor, "prompt row neuron"]]
    # The inputs of the change, multiplied by each matrix: per input and matrix.
    bases: list[list[Float[Tensor, "prompt row neuron"]]]

    def change(
        self,
        rows: RowSlices,
        factors: Sequence[Float[Tensor, "#key #prompt #row 1"]],
        weights: Float[Tensor, "zeroed row rank"],
        vectors: Sequence[Float[Tensor, "zeroed rank neuron"]],
        out: Float[Tensor, "key prompt row neuron"],
    ) -> None:
        """Write the change of these neurons in the hidden layer into `out`.

        The pre-activations change by Σ factor · base, over the norms' outputs, and by Σ weights · vectors;
        `vectors` has one tensor per matrix.
        """
        now = []
        for number, start in enumerate(self.start):
            # The first pre-activations are written into `out`, which saves one tensor in the caches.
            in_place = number == 0 and start.dtype == out.dtype
            pre = out if in_place else torch.empty_like(out, dtype=start.dtype)
            changed = start[rows]
            # Without a last norm, `bases` has one entry more than `factors`: the clean input, which no change
            # multiplies.
            for bases, factor in zip(self.bases, factors, strict=False):
                changed = torch.addcmul(changed, bases[number][rows], factor, out=pre)
            if changed is not pre:
                pre.copy_(changed)
            pre.view(-1, *pre.shape[2:]).baddbmm_(weights, vectors[number])
            now.append(pre.to(out.dtype))
        if len(self.clean) == 4:
            _silu_change([x[rows] for x in self.clean], now, out)
        else:
            _hidden(self.activation, now, self.clean[0][rows], out)


def neurons_of(
    feed_forward: FeedForward,
    inputs: Sequence[Float[Tensor, "prompt row d_model"]],
    shift: Float[Tensor, " d_model"] | None,
    dtype: torch.dtype,
    widths: Sequence[int],
) -> list[Neurons]:
    """Return the hidden layer of the clean rows, in chunks of neurons.

    Args:
        feed_forward: The feed-forward.
        inputs: Vectors whose multiples, times W_in (and W_gate), are terms of the change of pre-activations.
            There is one per norm before the feed-forward: the norm's output without weight and bias, after
            the linear parts of this norm and of those after it. The last one is the feed-forward's input
            minus `shift`.
        shift: The bias of the last norm; None without one.
        dtype: The dtype of the hidden layer.
        widths: The number of neurons of each chunk.
    """
    wide, gated, name = inputs[0].dtype, feed_forward.W_gate is not None, feed_forward.activation
    matrices = [matrix.to(wide) for matrix in feed_forward.input_matrices]
    biases = (feed_forward.b_gate, feed_forward.b_in) if gated else (feed_forward.b_in,)
    constants = [0.0 if bias is None else bias.to(wide) for bias in biases]
    if shift is not None:
        constants = [x + shift.to(wide) @ W for x, W in zip(constants, matrices, strict=True)]
    neurons = []
    for width, stop in zip(widths, itertools.accumulate(widths), strict=True):
        place = slice(stop - width, stop)
        bases = [[x @ matrix[:, place] for matrix in matrices] for x in inputs]
        added = [x if isinstance(x, float) else x[place] for x in constants]
        pre = [x + y for x, y in zip(bases[-1], added, strict=True)]
        neurons.append(Neurons(name, *_clean(name, pre, dtype), bases))
    return neurons


def _clean(name: str, pre: list[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return `Neurons.start` and `Neurons.clean` of some neurons."""
    narrow = [x.to(dtype) for x in pre]
    if len(pre) == 2 and name == "silu":
        gate, up = narrow
        activated = gate * gate.sigmoid()
        return [torch.zeros_like(x) for x in pre], [gate, up, activated, 2 * activated - gate]
    # The operations are those of the changed layer: different rounding would triple the error.
    hidden = _hidden(name, narrow, torch.zeros_like(narrow[0]), torch.empty_like(narrow[0]))
    return pre, [hidden.neg_()]


def _hidden(name: str, pre: Sequence[Tensor], plus: Tensor, out: Tensor) -> Tensor:
    """Write the hidden layer plus a tensor into `out`, and return it."""
    if len(pre) == 2:
        return torch.addcmul(plus, ACTIVATIONS[name](pre[0]), pre[1], out=out)
    if name == "gelu_tanh":
        return torch.addcmul(plus, pre[0], _gelu_tanh_gate(pre[0]), out=out)
    return torch.add(plus, ACTIVATIONS[name](pre[0]), out=out)


def _silu_change(clean: Sequence[Tensor], changes: Sequence[Tensor], out: Tensor) -> None:
    """Write the change of a layer gated by SiLU into `out`; the gate's change may be in `out`."""
    (clean_gate, clean_up, activated, twice_less_gate), (gate, up) = clean, changes
    tanh, sigma = torch.div(gate, 2).tanh_(), torch.add(clean_gate, gate).sigmoid_()
    # This is the change of SiLU.
    change = torch.addcmul(gate, tanh, twice_less_gate, value=-1, out=out).mul_(sigma)
    change.addcmul_(tanh, activated)
    changed_up = torch.add(up, clean_up, out=sigma)
    torch.addcmul(up.mul_(activated), change, changed_up, out=out)
