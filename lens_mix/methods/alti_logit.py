"""ALTI-Logit: which input tokens put how much into a token's logit, layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.logit_shares import logit_shares, token_directions
from lens_mix.arguments import one_of, whole_number
from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.lens.verification_record import UNEMBEDDING
from lens_mix.method import Scope
from lens_mix.methods.alti import Alti, Distance
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class AltiLogit(VectorMethod):
    """ALTI-Logit (Ferrando et al., ACL 2023, eq. 6 and 9): an input map of logits.

    score[l, i, s] = Σ_k Δ_ik M_ks, where Δ_ik is what the attention of block l, by way of key k, adds to
    the logit of position i's token, through the final norm held linear at its true scale, and M is the
    product of the ALTI maps of the blocks below l. Shape [layer, query, key], in logits, of either sign.
    The sum over layers is the tokens' share of the logit; the feed-forwards, the biases and the residual
    stream that enters the first block are not in it, as in the paper.

    Only where the blocks' residual stream is never normed itself (no post-norm), and the logits are final
    norm and unembedding: soft caps are refused. `max_memory` bounds each block's step; the logits that the
    tokens are taken from are not counted.

    Args:
        token: whose logit: "predicted" (the likeliest after each position; a note names the positions where
            only rounding decides), "next" (the prompt's next token; after the last position the likeliest),
            or one vocabulary number for all positions.
        against: a vocabulary number whose logit is subtracted (a contrast); None for none.
        distance: as in `alti`.

    Raises:
        ValueError: an unknown option.
    """

    name: ClassVar[str] = "alti_logit"
    residual: ClassVar[float] = 0.0
    scope: ClassVar[Scope] = "stack"
    needs: ClassVar[frozenset[str]] = VectorMethod.needs | {UNEMBEDDING}
    citation: ClassVar[str] = "ferrando-etal-2023-explaining"

    token: int | Literal["predicted", "next"] = "predicted"
    against: int | None = None
    distance: Distance = "l1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.token, str):
            one_of("token", self.token, ("predicted", "next"))
        else:
            whole_number("token", self.token, 0, what="'predicted', 'next' or a whole number")
        if self.against is not None:
            whole_number("against", self.against, 0)
        Alti(self.distance)

    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        if anatomy.attention_residual is not None:
            return "a norm on the residual stream (post-norm) stands between the block and the logits"
        if anatomy.cross:
            return "expected a block without cross-attention: the other stack's tokens have no place here"
        return None

    def of_stack(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        last = blocks[-1]
        directions = token_directions(last, self.token, self.against)
        below: Tensor | None = None
        maps = []
        for block in blocks:
            # Before the logit's shares, which need less memory: ALTI refuses where `max_memory` is too small
            # for it, and says how much it needs.
            alti = None if block is last else Alti(self.distance)(block).to(directions.dtype)
            added = logit_shares(block, directions, last)
            maps.append(added if below is None else added @ below)
            if alti is not None:
                # Padded rows may hold anything; they feed nothing but themselves.
                alti = alti.masked_fill_(~block.real[:, :, None], 0)
                below = alti if below is None else alti @ below
        return maps


def alti_logit(
    vectors: Sequence[Float[Tensor, "batch query key d_model"]],
    directions: Float[Tensor, "batch query d_model"],
    maps: Sequence[Float[Tensor, "batch query key"]],
) -> list[Float[Tensor, "batch query token"]]:
    """The definition: score[l, i, s] = Σ_k Δ_ik M_ks, Δ_ik = (Σ_h a_ikh v_kh W_O^h) · d_i.

    Args:
        vectors: per block, what its attention branch brings from key k to query i (`value_vectors`).
        directions: d, from `through_head`.
        maps: the blocks' ALTI maps; M is the product of those below block l, the identity below the first.
    """
    identity = torch.eye(maps[0].shape[-1], dtype=directions.dtype, device=directions.device)
    scores, below = [], identity.expand_as(maps[0])
    for branch, alti in zip(vectors, maps, strict=True):
        added = einsum(branch, directions, "batch query key d_model, batch query d_model -> batch query key")
        scores.append(einsum(added, below, "batch query key, batch key token -> batch query token"))
        below = einsum(alti, below, "batch query key, batch key token -> batch query token")
    return scores
