"""The final norm and the unembedding, which turn the last residual stream into logits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lens_mix._care.changes import Changes, forward_pre_hook
from lens_mix._care.users_hooks import has_user_hooks
from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError, wrapped_config
from lens_mix._classes.offloading import is_offloaded
from lens_mix._model.anatomy import Norm, read_weight


@dataclasses.dataclass(frozen=True)
class Unembedding:
    """The map logits = norm(resid) W_U + b_U; W_U and b_U include any constant factor of the logits."""

    norm: Norm | None
    W_U: Float[Tensor, "d_model d_vocab"]
    b_U: Float[Tensor, " d_vocab"] | None

    def __call__(self, resid: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_vocab"]:
        """Return the logits of last residual streams."""
        out = (resid if self.norm is None else self.norm(resid)) @ self.W_U.to(resid.dtype)
        return out if self.b_U is None else out + self.b_U.to(resid.dtype)

    def scaled(self, scale: float) -> Unembedding:
        """Return the unembedding whose logits are multiplied by a constant."""
        return Unembedding(self.norm, self.W_U * scale, None if self.b_U is None else self.b_U * scale)


def read_unembedding(
    model: TransformerLensModel, norm: Norm | None, d_model: int, d_vocab: int
) -> Unembedding:
    """Return the model's unembedding after its final `norm`, as read from its weights.

    Raises:
        UnsupportedModelError: The model has no readable unembedding, or applies a soft cap to the logits.
    """
    # A soft cap hardly changes small logits, so comparing numbers might not detect it: read the
    # configuration.
    cap = _soft_cap(model)
    if cap is not None:
        raise UnsupportedModelError(
            "unembedding: expected logits = final norm, then unembedding; "
            f"this model's go through a soft cap at {cap:g}, which can't be split by token"
        )
    W_U, b_U = _weight(model, "W_U"), _weight(model, "b_U")
    if W_U is None or W_U.shape != (d_model, d_vocab):
        shape = None if W_U is None else list(W_U.shape)
        raise UnsupportedModelError(
            f"unembedding: expected an unembedding [{d_model}, {d_vocab}], found {shape}"
            + "; offloaded weights are not read: load the model on one device"
            * (isinstance(model, nn.Module) and is_offloaded(model))
        )
    return Unembedding(norm, W_U, b_U)


def _soft_cap(model: TransformerLensModel) -> float | None:
    caps = (
        getattr(model.cfg, "output_logits_soft_cap", None),
        wrapped_config(model, "final_logit_softcapping"),
    )
    return next((float(cap) for cap in caps if cap and cap > 0), None)


def read_b_U(model: TransformerLensModel) -> Float[Tensor, " d_vocab"] | None:
    """Return the bias of the unembedding; None if the model has no unembedding, or one without a bias."""
    has_unembedding = isinstance(getattr(model, "unembed", None), nn.Module)
    return _weight(model, "b_U") if has_unembedding else None


def _weight(model: TransformerLensModel, name: str) -> Tensor | None:
    # Some classes have the weight on the model, others only on its unembedding.
    weight = read_weight(model, name)
    return read_weight(getattr(model, "unembed", None), name) if weight is None else weight


def row_at(tensor: Tensor, positions: Tensor) -> Tensor:
    """Return given positions of each example: [example pos ...] at [example read] as [example read ...]."""
    places = positions.to(tensor.device).reshape(len(tensor), -1)
    return tensor[torch.arange(len(tensor), device=tensor.device)[:, None], places]


def _is_watched(model: TransformerLensModel, unembed: nn.Module) -> bool:
    """Return whether user hooks read the unembedding's input or output, and may rely on its positions."""
    wholes = [model, getattr(model, "original_model", None)]
    return has_user_hooks([*unembed.modules(), *(m for m in wholes if isinstance(m, nn.Module))])


@contextlib.contextmanager
def unembedding_at(model: TransformerLensModel, positions: Tensor | None) -> Iterator[list[bool]]:
    """Enter a context whose passes compute the logits of some positions only, if the model allows it.

    Args:
        model: The model.
        positions: The positions of each example, [example] or [example read]; None for all.

    Yields:
        A list that is not empty after a pass which computed these logits only.
    """
    narrowed: list[bool] = []
    unembed = getattr(model, "unembed", None)
    if positions is None or not isinstance(unembed, nn.Module) or _is_watched(model, unembed):
        yield narrowed
        return

    def narrow(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        narrowed.append(True)
        return (row_at(args[0], positions), *args[1:])

    with Changes([forward_pre_hook(unembed, narrow)]):
        yield narrowed
