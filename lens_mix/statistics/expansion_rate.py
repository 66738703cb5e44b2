"""Expansion rate of the value-output path: how much a head lengthens what goes through it."""

from __future__ import annotations

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.lens.anatomy import ValuePath
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.lens.precision import in_full_precision
from lens_mix.lens.verification.support import check
from lens_mix.lens.verification_record import VALUE


@in_full_precision
def expansion_rates(model: TransformerLensModel, part: str | None = None) -> pd.DataFrame:
    """Expansion rate of each head's value and output matrices, and of all heads of a block together.

    ‖[[W_V, 0], [b_V, 1]] [[W_O, 0], [b_O, 1]]‖_F / √(d_model + 1): the root mean square factor by which the
    affine map lengthens a random vector with a one appended (Kobayashi et al., EMNLP 2021, appendix). A
    head's rate is without b_O, which belongs to no head.

    Args:
        model: any TransformerLens model; its anatomy is verified first.
        part: "encoder", "decoder" or "cross" of an encoder-decoder.

    Returns:
        Columns layer, head (a number, or "all"), rate. Raises ValueError: a block without such matrices;
        UnsupportedModelError: values or outputs are not what these give (under an adapter, or a hook).
    """
    verification = check(model, part=part).verification
    rows: list[tuple[int, int | str, float]] = []
    for layer, anatomy in verification.anatomy.items():
        if anatomy.value_path is None:
            raise ValueError(f"block {layer}: expected value and output matrices, found none")
        # Values of cross-attention are made of the encoder's outputs, and are not rebuilt.
        parts = ("projection",) if part == "cross" else (VALUE, "projection")
        reason = verification.hooks_failure or verification.failure(parts)
        if reason is not None:
            raise UnsupportedModelError(f"expansion_rates can't run on this model: {reason}")
        heads, together = _path_rates(anatomy.value_path)
        rows += [(layer, head, rate) for head, rate in enumerate(heads.tolist())]
        rows.append((layer, "all", together))
    return pd.DataFrame(rows, columns=["layer", "head", "rate"])


@in_full_precision
def _path_rates(path: ValuePath) -> tuple[Float[Tensor, " head"], float]:
    """Expansion rate per head, and of the sum of all heads with b_O, in float64."""
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
