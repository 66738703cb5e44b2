"""What turns the last residual stream into logits: the final norm and the unembedding, proven."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.lens.anatomy import Norm
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.replay import relative_error


@dataclasses.dataclass(frozen=True)
class Head:
    """logits = norm(resid) W_U + b_U; a constant that some models multiply the logits by is in both."""

    norm: Norm | None
    W_U: Float[Tensor, "d_model d_vocab"]
    b_U: Float[Tensor, " d_vocab"] | None

    def __call__(self, resid: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_vocab"]:
        out = (resid if self.norm is None else self.norm(resid)) @ self.W_U.to(resid.dtype)
        return out if self.b_U is None else out + self.b_U.to(resid.dtype)


def proven_head(
    model: Any,
    norm: Norm | None,
    resid: Float[Tensor, "pos d_model"],
    logits: Float[Tensor, "pos d_vocab"],
    tolerance: float,
) -> Head:
    """The model's head, if it gives the model's logits.

    Args:
        model: the model.
        norm: its final norm.
        resid: the last residual stream.
        logits: the model's own logits there.
        tolerance: largest accepted relative error.

    Raises:
        UnsupportedModelError: it doesn't: a soft cap or a dense layer lies between.
    """
    # Small logits pass a soft cap almost unchanged, so what is named is not left to the numbers.
    cap = _soft_cap(model)
    if cap is not None:
        raise UnsupportedModelError(
            "head: expected logits = final norm, then unembedding; "
            f"this model's go through a soft cap at {cap:g}, which can't be split by token"
        )
    W_U, b_U = _weight(model, "W_U"), _weight(model, "b_U")
    if W_U is None or W_U.shape != (resid.shape[-1], logits.shape[-1]):
        found = None if W_U is None else list(W_U.shape)
        raise UnsupportedModelError(
            f"head: expected an unembedding [{resid.shape[-1]}, {logits.shape[-1]}], found {found}"
        )
    head = Head(norm, W_U, b_U)
    rebuilt = head(resid)
    scale = float((rebuilt * logits).sum() / rebuilt.square().sum())
    if abs(scale - 1) > tolerance:
        # Cohere and Granite multiply the logits by a constant.
        head = Head(norm, W_U * scale, None if b_U is None else b_U * scale)
    error = relative_error(head(resid), logits)
    if not error <= tolerance:
        raise UnsupportedModelError(
            "head: expected logits = final norm, then unembedding; rebuilt logits are off by a relative "
            f"{error:.1e} (a dense layer or a cap between the two can't be split by token)"
        )
    return head


def _soft_cap(model: Any) -> float | None:
    config = getattr(getattr(model, "original_model", None), "config", None)
    owners = ((model.cfg, "output_logits_soft_cap"), (config, "final_logit_softcapping"))
    caps = [float(getattr(owner, name, None) or 0) for owner, name in owners]
    return next((cap for cap in caps if cap > 0), None)


def _weight(model: Any, name: str) -> Tensor | None:
    for owner in (model, getattr(model, "unembed", None)):
        try:
            weight = getattr(owner, name)
        except (AttributeError, TypeError, NotImplementedError):
            continue
        if torch.is_tensor(weight):
            return weight.detach()
    return None
