"""Information flow routes: how much nearer heads, residual and feed-forward bring the residual stream."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.budget import attention_budget, head_proximity_bytes, route_bytes
from lens_mix.algebra.distances import head_proximities
from lens_mix.algebra.vectors import attention_vectors, head_vectors
from lens_mix.arguments import one_of
from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.method import Method
from lens_mix.methods.part_shares import ends_unknown, proximity, record_shares
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class InformationFlowRoutes(VectorMethod):
    """Importance of the edges of the information-flow graph (Ferrando & Voita, EMNLP 2024, section 2).

    A part p of a state s has the proximity max(0, ‖s‖₁ - ‖s - p‖₁), and of all parts' proximities the share
    that is its importance. s is the residual stream after the attention branch; its parts are what each head
    sent from each key, a_ijh u_jh (b_V in), and the residual x_i. score[l, i, j] = Σ_h importance(a_ijh
    u_jh), on the diagonal with that of x_i. Shape [layer, query, key] or [layer, head, query, key], 0 to 1.
    Rows, summed over heads, sum to 1; where no part brings s nearer they stay zero. Roll-outs add no
    identity.

    The residual stream after the block has two parts, the feed-forward's output and what it was added to:
    `part_shares(m)` has their importance, and that of x_i alone. docs/information_flow_routes.md says what
    the parts are on every kind of block.

    Args:
        per_head: keep the heads apart. x_i is no head's: each has an equal part of its importance where the
            map holds that, so that the heads' sum is the map, and roll-outs are the same.
        biases: "whole" has b_O, and β of norms, in s alone, as the authors' code does; with "part" they are a
            part of their own, whose importance is in no entry, so that rows sum to less.
    """

    name: ClassVar[str] = "information_flow_routes"
    residual: ClassVar[float] = 0.0
    holds_residual: ClassVar[bool] = True
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    citation: ClassVar[str] = "ferrando-voita-2024-information"

    per_head: bool = False
    biases: Literal["whole", "part"] = "whole"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("biases", self.biases, ("whole", "part"))

    def needs_for(self, anatomy: BlockAnatomy) -> frozenset[str]:
        ends_in_known_norm = anatomy.feed_forward_residual is not None and not ends_unknown(anatomy)
        return self.needs | {"feed_forward"} if ends_in_known_norm else self.needs

    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        heads = head_vectors(block)
        batch, queries, d_model = block.resid_pre.shape
        step = max(head_proximity_bytes(heads, queries), queries * d_model * heads.dtype.itemsize)
        beside = route_bytes(block, heads)
        heads.budget = attention_budget(block, heads, beside, 2 * batch * step, self.name)
        attention = attention_vectors(block, heads)
        scores = head_proximities(attention.normed, attention.mid, self.per_head)
        near = {"resid_pre": proximity(attention.residual_share, attention.mid)}
        if self.biases == "part":
            near["biases_mid"] = proximity(attention.mid - attention.normed.total, attention.mid)
        from_keys = scores.sum(-1).sum(1) if self.per_head else scores.sum(-1)
        total = from_keys + sum(near.values())
        total = torch.where(total > 0, total, 1)
        scores.div_(total[:, None, :, None] if self.per_head else total[..., None])
        shares = {name: value / total for name, value in near.items()}
        record_shares(block, attention, shares)
        return _with_own(block, scores, shares["resid_pre"])


def importance(
    parts: Float[Tensor, "batch query part d_model"], whole: Float[Tensor, "batch query d_model"]
) -> Float[Tensor, "batch query part"]:
    """The definition: each part's proximity, divided by the sum over parts; of heads' parts `head_parts`."""
    near = (whole.abs().sum(-1)[..., None] - (whole[:, :, None] - parts).abs().sum(-1)).clamp_min(0)
    total = near.sum(-1, keepdim=True)
    return near / torch.where(total > 0, total, 1)


def _with_own(
    block: Block, scores: Float[Tensor, "batch *head query key"], shares: Float[Tensor, "batch query"]
) -> Float[Tensor, "batch *head query keys"]:
    """With the residual's share on the diagonal, or as a last key; evenly over heads where there are any."""
    index, share = block.queries[..., None], shares[..., None].to(scores.dtype)
    if scores.ndim == 4:
        index, share = (
            each[:, None].expand(-1, scores.shape[1], -1, -1) for each in (index, share / scores.shape[1])
        )
    return torch.cat([scores, share], dim=-1) if block.is_cross else scores.scatter_add_(-1, index, share)
