"""Compute the expansion rate of the value-output path: how much a head lengthens a vector."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix import UnsupportedModelError, check
from lens_mix.experiments.passes import require_matrices
from lens_mix.models import TransformerLensModel


def expansion_rates(model: TransformerLensModel, part: str | None = None) -> pd.DataFrame:
    """Return the expansion rate of each head's value and output matrices, and of all heads together.

    The rate is ‖[[W_V, 0], [b_V, 1]] [[W_O, 0], [b_O, 1]]‖_F / √(d_model + 1). It is the root mean square
    factor by which the affine map lengthens a random vector with a one appended (Kobayashi et al., EMNLP
    2021, appendix). A head's rate does not include b_O, which belongs to no head.

    Args:
        model: Any TransformerLens model; its components are verified first.
        part: "encoder", "decoder" or "cross" of an encoder-decoder.

    Returns:
        A table with the columns layer, head (a number, or "all") and rate.

    Raises:
        ValueError: A block has no such matrices.
        UnsupportedModelError: The values or outputs of the model are not those of its matrices (under an
            adapter, or a hook).
    """
    verification = check(model, part=part).verification
    rows: list[tuple[int, int | str, float]] = []
    for layer, anatomy in verification.anatomy.items():
        path = require_matrices(layer, anatomy.value_path)
        # The values of cross-attention are computed from the encoder's outputs, and are not verified.
        components = ("projection",) if part == "cross" else ("value", "projection")
        reason = verification.hooks_failure or verification.failure(components)
        if reason is not None:
            raise UnsupportedModelError(f"expansion_rates can't run on this model: {reason}")
        head_rates, rate_of_all = _compute_rates(path)
        rows += [(layer, head, rate) for head, rate in enumerate(head_rates.tolist())]
        rows.append((layer, "all", rate_of_all))
    return pd.DataFrame(rows, columns=["layer", "head", "rate"])


def _compute_rates(path: Any) -> tuple[Float[Tensor, " head"], float]:
    """Return the expansion rate of each head, and of the sum of all heads with b_O, from a value path.

    Float64 has its full precision whatever the user has switched on: autocast and TF32 are for float32.
    """
    W_O = path.W_O.double()
    group = len(W_O) // len(path.W_V)
    W_V = path.W_V.double().repeat_interleave(group, dim=0)
    d_model = W_V.shape[1]
    b_V = torch.zeros_like(W_V[:, 0]) if path.b_V is None else path.b_V.double().repeat_interleave(group, 0)
    b_O = torch.zeros_like(W_O[0, 0]) if path.b_O is None else path.b_O.double()
    # ‖[[W, 0], [b, 1]]‖² = ‖W‖² + ‖b‖² + 1, with W = W_V W_O and b = b_V W_O.
    shift = torch.einsum("he,hed->hd", b_V, W_O)
    squares = torch.einsum("hdx,hdy,hxm,hym->h", W_V, W_V, W_O, W_O)
    heads = (squares + shift.square().sum(-1) + 1).div(d_model + 1).sqrt()
    whole = torch.einsum("hde,hem->dm", W_V, W_O)
    total = whole.square().sum() + (shift.sum(0) + b_O).square().sum() + 1
    return heads, float((total / (d_model + 1)).sqrt())
