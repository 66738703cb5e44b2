"""The feed-forward up to its second matrix."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from lens_mix.algebra.workspace import Workspace
from lens_mix.lens.anatomy import ACTIVATIONS, FeedForward
from lens_mix.lens.proof.sketch import sketch, sketched_error

# gelu_tanh(x) = x sigmoid(x (GELU_LINEAR + GELU_CUBIC x²)): torch's own costs twice as much on a CPU.
GELU_LINEAR = 2 * (2 / math.pi) ** 0.5
GELU_CUBIC = GELU_LINEAR * 0.044715


@functools.cache
def _gelu_linear(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1,), GELU_LINEAR, dtype=dtype, device=device)


def _gelu_tanh_gate(x: Tensor, room: Tensor) -> Tensor:
    linear = _gelu_linear(x.dtype, x.device)
    return torch.addcmul(linear, x, x, value=GELU_CUBIC, out=room).mul_(x).sigmoid_()


# act(x) = x gate(x): (x, room of its shape) -> gate(x), in the room; x stays.
_GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu_tanh": _gelu_tanh_gate,
    "quick_gelu": lambda x, room: torch.mul(x, 1.702, out=room).sigmoid_(),
    "silu": lambda x, room: torch.sigmoid(x, out=room),
}
# x -> act(x), in x.
_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_,
    "silu": lambda x: functional.silu(x, inplace=True),
    "relu": torch.relu_,
    "relu_squared": lambda x: x.relu_().square_(),
}


class FirstMatrix:
    """The feed-forward up to its second matrix; a gated one has two first matrices (the gate's first).

    Args:
        feed_forward: the parts.
        dtype: of the products.
    """

    def __init__(self, feed_forward: FeedForward, dtype: torch.dtype) -> None:
        self.activation = feed_forward.activation
        gate = feed_forward.W_gate
        self.gated = gate is not None
        # Whether changes of the pre-activations are carried on, not added to the clean ones.
        self.carries = self.gated and self.activation == "silu"
        matrices = [feed_forward.W_in] if gate is None else [gate, feed_forward.W_in]
        self.biases = [feed_forward.b_in] if gate is None else [feed_forward.b_gate, feed_forward.b_in]
        self.matrices = [matrix.to(dtype) for matrix in matrices]
        self.d_mlp = self.matrices[0].shape[1]

    @functools.cached_property
    def sketches(self) -> list[Float[Tensor, "d_model vector"]]:
        """The matrices, sketched."""
        return [sketch(matrix) for matrix in self.matrices]

    def misses(
        self,
        x: Float[Tensor, "row d_model"],
        pre: Sequence[Float[Tensor, "row d_mlp"]],
    ) -> float:
        """How far given pre-activations are from those of x at most, relative to their size, sketched."""
        errors = []
        for own, sketched, bias in zip(pre, self.sketches, self.biases, strict=True):
            expected = x @ sketched if bias is None else x @ sketched + sketch(bias.to(x.dtype))
            errors.append(sketched_error(expected, own))
        # Python's own max may lose a NaN.
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    def linear(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "matrix *batch d_mlp"]:
        """x W, no bias."""
        if not self.gated:
            return (x @ self.matrices[0])[None]
        return torch.stack([x @ matrix for matrix in self.matrices])

    def add_biases_(self, linear: Float[Tensor, "matrix row d_mlp"]) -> Float[Tensor, "matrix row d_mlp"]:
        """The pre-activations of x W."""
        for pre, bias in zip(linear, self.biases, strict=True):
            if bias is not None:
                pre += bias
        return linear

    def hidden(
        self,
        pre: Sequence[Float[Tensor, "*batch d_mlp"]],
        minus_clean: Float[Tensor, "*batch d_mlp"] | None,
        out: Float[Tensor, "*batch d_mlp"],
        room: Workspace,
    ) -> Float[Tensor, "*batch d_mlp"]:
        """What the second matrix is applied to, plus -1 times the clean one, into `out`; overwrites `pre`.

        A bias between the two matrices is left out: no change sees it.
        """
        first, gate = pre[0], _GATES.get(self.activation)
        if gate is not None and not self.gated:
            other = gate(first, room.like("gate", first, first.shape, first.dtype))
        else:
            first = _IN_PLACE.get(self.activation, ACTIVATIONS[self.activation])(first)
            if not self.gated:
                return out.copy_(first) if minus_clean is None else torch.add(first, minus_clean, out=out)
            other = pre[1]
        if minus_clean is None:
            return torch.mul(first, other, out=out)
        # Rounded once, so what did not change may come out as a rounding error of the clean product.
        return torch.addcmul(minus_clean, first, other, out=out)
