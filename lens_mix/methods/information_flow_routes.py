"""Compute information flow routes: how much closer each component brings the residual stream to its value."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._algebra.budget import attention_budget, head_proximity_bytes, route_bytes
from lens_mix._algebra.distances import head_proximities
from lens_mix._algebra.vectors import attention_vectors, head_vectors
from lens_mix._model.anatomy import BlockAnatomy
from lens_mix.arguments import check_choice
from lens_mix.method import Method
from lens_mix.methods.component_shares import lacks_block_output, proximity, record_shares
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


@dataclasses.dataclass(frozen=True)
class InformationFlowRoutes(VectorMethod):
    """Compute the importance of edges in the information-flow graph (Ferrando & Voita, 2024, section 2).

    A component p of a state s is important if it brings the sum of components closer to s. Here s is the
    residual stream after the attention branch. Its components are a_ijh u_jh, what each head adds from each
    key (with b_V), and the residual stream x_i.

        proximity(p)   = max(0, ‖s‖₁ - ‖s - p‖₁)
        importance(p)  = proximity(p) / Σ_q proximity(q)    over all components q of s
        score[l, i, j] = Σ_h importance(a_ijh u_jh) + δ_ij importance(x_i)

    Shape [layer, query, key], or [layer, head, query, key] with `per_head`, values in 0..1. Rows, summed over
    heads, sum to 1. A row is zero if no component brings s closer. The map contains the residual stream, so
    rollouts add no identity.

    The residual stream after the block has two components: the output of the feed-forward, and what it was
    added to. `lens_mix.methods.component_shares.part_shares(m)` returns their importance, and that of x_i
    alone. In other blocks:

    - A norm or a multiplier on a branch is applied to each component. A norm is linear at the model's scale.
    - Post-norm: s is the state after the norm, which is applied to each component in the same way.
    - Parallel: the components are those of a block whose feed-forward comes after attention.
    - A decoder with cross-attention, part="decoder": the first state alone. part="cross": s is the state
      after cross-attention, made of each source position's vectors and what was there before (key
      `[RESIDUAL]`).

    A large importance says what a state is made of, and not that the answer depends on it. The 1-norm depends
    on the basis of the residual stream. Two heads that cancel each other count here, but not in `alti`. The
    authors' code adds b_V to values that already contain it, and gives every component at least 1e-5.

        >>> method = lm.methods.InformationFlowRoutes(per_head=True)
        >>> lm.run(model, "The Eiffel Tower is in the city of", method).top(3)

    Args:
        per_head: Whether each head has a map of its own. x_i belongs to no head, so each head gets an equal
            share of its importance. The sum over heads is the map without `per_head`, and rollouts are the
            same.
        biases: "whole": b_O and the β of norms are in s alone, as in the authors' code. "part": they are a
            component whose importance is in no entry, so that rows sum to less than 1.

    Raises:
        ValueError: `biases` is unknown.
    """

    name: ClassVar[str] = "information_flow_routes"
    description: ClassVar[str] = (
        "how much closer each token brings the sum of contributions to the residual stream"
    )
    place_in_list: ClassVar[int] = 6
    residual: ClassVar[float] = 0.0
    includes_residual: ClassVar[bool] = True
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    citation: ClassVar[str] = "ferrando-voita-2024-information"

    per_head: bool = False
    biases: Literal["whole", "part"] = "whole"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("biases", self.biases, ("whole", "part"))

    @override
    def needs_for(self, anatomy: BlockAnatomy) -> frozenset[str]:
        # After a norm, the shares of the block's output are computed from what the feed-forward adds before
        # it.
        ends_in_known_norm = anatomy.feed_forward_residual is not None and not lacks_block_output(anatomy)
        return self.needs | {"feed_forward"} if ends_in_known_norm else self.needs

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        heads = head_vectors(block)
        batch, queries, d_model = block.resid_pre.shape
        step = max(head_proximity_bytes(heads, queries), queries * d_model * heads.dtype.itemsize)
        beside = route_bytes(block, heads)
        # Half of the budget is for vectors and half for differences, and each half needs its smallest chunk.
        heads.budget = attention_budget(block, heads, beside, 2 * batch * step, self.name)
        attention = attention_vectors(block, heads)
        states, mid = attention.states, attention.states.mid
        scores = head_proximities(attention.normed, mid, self.per_head)
        near = {"resid_pre": proximity(states.attention_residual(states.resid_pre), mid)}
        if self.biases == "part":
            # The vectors and the residual stream sum to everything in the state except the biases.
            near["biases_mid"] = proximity(mid - attention.normed.total, mid)
        from_keys = scores.sum(-1).sum(1) if self.per_head else scores.sum(-1)
        total = from_keys + sum(near.values())
        total = torch.where(total > 0, total, 1)
        scores.div_(total[:, None, :, None] if self.per_head else total[..., None])
        shares = {name: value / total for name, value in near.items()}
        record_shares(block, states, shares)
        return _add_residual(block, scores, shares["resid_pre"])


def importance(
    parts: Float[Tensor, "batch query part d_model"], whole: Float[Tensor, "batch query d_model"]
) -> Float[Tensor, "batch query part"]:
    """Return the proximity of each component, divided by the sum over components.

    Args:
        parts: The components. `head_parts` returns those of the heads.
        whole: s, their sum.
    """
    near = (whole.abs().sum(-1)[..., None] - (whole[:, :, None] - parts).abs().sum(-1)).clamp_min(0)
    total = near.sum(-1, keepdim=True)
    return near / torch.where(total > 0, total, 1)


def _add_residual(
    block: Block, scores: Float[Tensor, "batch *head query key"], shares: Float[Tensor, "batch query"]
) -> Float[Tensor, "batch *head query keys"]:
    """Add the importance of x_i, on the diagonal or as a last key, in equal shares over heads if any."""
    index, share = block.queries[..., None], shares[..., None].to(scores.dtype)
    if scores.ndim == 4:
        index, share = (
            each[:, None].expand(-1, scores.shape[1], -1, -1) for each in (index, share / scores.shape[1])
        )
    return (
        torch.cat([scores, share], dim=-1) if block.stack.is_cross else scores.scatter_add_(-1, index, share)
    )
