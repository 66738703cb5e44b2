"""Compute ALTI-Logit: how much each input token adds to a token's logit, layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._algebra.logit_shares import logit_shares, token_directions
from lens_mix._blocks.components import UNEMBEDDING
from lens_mix._model.anatomy import BlockAnatomy
from lens_mix.arguments import check_choice, check_whole_number
from lens_mix.method import MethodGroup, Reads
from lens_mix.methods.alti import Alti, Distance
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


@dataclasses.dataclass(frozen=True)
class AltiLogit(VectorMethod):
    """Compute ALTI-Logit, an input map of logits (Ferrando et al., ACL 2023, eq. 6 and 9).

        score[l, i, s] = Σ_k Δ_ik M_ks

    Δ_ik is what the attention of block l, from key k, adds to the logit that is explained at position i. The
    final norm is applied as a linear map, at the scale of the clean pass. M is the product of the ALTI maps
    of the blocks below block l.

    Shape [layer, query, key], in units of the logit, of either sign. The sum over layers is the share of each
    input token in the logit. As in the paper, it leaves out the feed-forwards, the biases and the residual
    stream that enters the first block.

    The method is defined if no norm is applied to the residual stream itself (no post-norm), and if the
    logits are the final norm followed by the unembedding (no soft cap). `max_memory` bounds the memory of
    each block's computation. It does not count the logits from which the tokens are chosen.

        >>> lm.run(model, "The Eiffel Tower is in the city of", lm.methods.AltiLogit(token="next")).top(3)

    Args:
        token: The token whose logit is explained.

            - "predicted": the most likely token after each position. A note names the positions where only
              rounding decides which token that is.
            - "next": the next token of the prompt. After the last position it is the most likely one.
            - a vocabulary number: the same token for all positions.
        against: The vocabulary number of a token whose logit is subtracted (a contrast). None: no contrast.
        distance: As in `alti`.

    Raises:
        ValueError: An argument is unknown or out of range.
    """

    name: ClassVar[str] = "alti_logit"
    group: ClassVar[MethodGroup] = "What the answer depends on, layer by layer"
    description: ClassVar[str] = "what each input token adds to the answer's logit through attention"
    place_in_list: ClassVar[int] = 2
    residual: ClassVar[float] = 0.0
    reads: ClassVar[Reads] = "below"
    layers_add_up: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = VectorMethod.needs | {UNEMBEDDING}
    citation: ClassVar[str] = "ferrando-etal-2023-explaining"

    token: int | Literal["predicted", "next"] = "predicted"
    against: int | None = None
    distance: Distance = "l1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.token, str):
            check_choice("token", self.token, ("predicted", "next"))
        else:
            check_whole_number("token", self.token, 0, what="'predicted', 'next' or a whole number")
        if self.against is not None:
            check_whole_number("against", self.against, 0)
        Alti(self.distance)

    @override
    def explain_next_tokens(self) -> Self:
        return dataclasses.replace(self, token="next") if self.token == "predicted" else self

    @override
    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        if anatomy.attention_residual is not None:
            return (
                "expected no norm between the block and the logits except the final one, got a norm on the "
                "residual stream (post-norm)"
            )
        if anatomy.cross:
            return "expected a block without cross-attention: the map has no keys for the other part's tokens"
        return None

    @override
    def of_blocks(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        last = blocks[-1]
        directions = token_directions(last, self.token, self.against)
        below: Tensor | None = None
        maps = []
        for block in blocks:
            # ALTI runs before the shares of the logit, because it needs more memory: if `max_memory` is too
            # small, its error says how much is needed.
            alti = None if block is last else Alti(self.distance)(block).to(directions.dtype)
            added = logit_shares(block, directions, last)
            maps.append(added if below is None else added @ below)
            if alti is not None:
                # Rows of padding may have any value, and nothing but padding reads them.
                alti = alti.masked_fill_(~block.real[:, :, None], 0)
                below = alti if below is None else alti @ below
        return maps


def alti_logit(
    vectors: Sequence[Float[Tensor, "batch query key d_model"]],
    directions: Float[Tensor, "batch query d_model"],
    maps: Sequence[Float[Tensor, "batch query key"]],
) -> list[Float[Tensor, "batch query token"]]:
    """Return score[l, i, s] = Σ_k Δ_ik M_ks with Δ_ik = (Σ_h a_ikh v_kh W_O^h) · d_i.

    Args:
        vectors: For each block, the vector that attention adds to query i from key k (`value_vectors`).
        directions: d, from `through_unembedding`.
        maps: The ALTI maps of the blocks. M is the product of those below block l, and the identity for the
            first block.
    """
    identity = torch.eye(maps[0].shape[-1], dtype=directions.dtype, device=directions.device)
    scores, below = [], identity.expand_as(maps[0])
    for branch, alti in zip(vectors, maps, strict=True):
        added = einsum(branch, directions, "batch query key d_model, batch query d_model -> batch query key")
        scores.append(einsum(added, below, "batch query key, batch key token -> batch query token"))
        below = einsum(alti, below, "batch query key, batch key token -> batch query token")
    return scores
