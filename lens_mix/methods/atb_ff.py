"""Compute the maps of attention and feed-forward together, from each key's vector after both."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from einops import einsum
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._algebra.feed_forward import Variant, feed_forward_maps, unsupported_feed_forward
from lens_mix._blocks.cost import Growth
from lens_mix._blocks.verification_record import ALGEBRA_COMPONENTS
from lens_mix._model.anatomy import BlockAnatomy
from lens_mix.arguments import check_choice
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


@dataclasses.dataclass(frozen=True)
class AtbFf(VectorMethod):
    """Compute the output of the feed-forward by key, ATBFF (Kobayashi et al., ICLR 2024, section 4).

        score[l, i, j] = ‖F^FF_ij‖
        F^FF_ij = ((F_ij W_in) ⊙ m_i) W_out

    F_ij is the vector of key j in what the feed-forward reads at query i. m_i are the integrated gradients
    through the activation, in closed form. For gated feed-forwards, each neuron has one integral, which is
    computed by quadrature.

    Shape [layer, query, key], at least 0, in the units of the feed-forward's output. In parallel blocks, the
    feed-forward reads the block's input, so that only the diagonal differs from zero.

        >>> lm.run(model, "The Eiffel Tower is in the city of", lm.methods.AtbFf(biases="fixed")).top(3)

    Args:
        biases: The start of the path of the integrated gradients.

            - "on_path" (the paper's variant A): zero. The biases grow along with the vectors and get shares,
              which are dropped.
            - "fixed" (the paper's variant B): the biases. The vectors' shares sum to the whole change.

    Raises:
        ValueError: The variant is unknown.
    """

    name: ClassVar[str] = "atb_ff"
    description: ClassVar[str] = "the size of what the feed-forward makes of each token"
    place_in_list: ClassVar[int] = 8
    # The output of the feed-forward alone does not contain the residual stream, which rollouts therefore add.
    residual: ClassVar[float] = 0.5
    needs: ClassVar[frozenset[str]] = frozenset(ALGEBRA_COMPONENTS)
    cost_grows_with: ClassVar[Growth] = "rows"
    citation: ClassVar[str] = "kobayashi-etal-2024-analyzing"

    biases: Variant = "on_path"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("biases", self.biases, ("on_path", "fixed"))

    @override
    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        return unsupported_feed_forward(anatomy)

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        return feed_forward_maps(block, self.biases).output


@dataclasses.dataclass(frozen=True)
class AtbFfRes(AtbFf):
    """Compute the feed-forward with its residual connection, ATBFFRES (Kobayashi et al., 2024, section 4).

        score[l, i, j] = ‖F_ij + F^FF_ij‖

    F_ij is the vector of key j in the residual stream before the feed-forward. F^FF_ij is as in `atb_ff`,
    after the norm and the multiplier of the feed-forward's branch if there are any.

    Shape [layer, query, key], at least 0.

        >>> lm.run(model, "The Eiffel Tower is in the city of", lm.methods.AtbFfRes(biases="fixed")).top(3)

    Args:
        biases: As in `atb_ff`.
    """

    name: ClassVar[str] = "atb_ff_res"
    description: ClassVar[str] = (
        "the size of each token's contribution to the block's output, before a last norm"
    )
    place_in_list: ClassVar[int] = 9
    residual: ClassVar[float] = 0.0
    includes_residual: ClassVar[bool] = True

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        return feed_forward_maps(block, self.biases).residual


@dataclasses.dataclass(frozen=True)
class AtbFfResLn(AtbFf):
    """Compute the map of the whole block, ATBFFRESLN (Kobayashi et al., ICLR 2024, section 4).

        score[l, i, j] = ‖γ ⊙ (G_ij - mean G_ij) / s_i‖
        G_ij = F_ij + F^FF_ij

    G_ij are the vectors of `atb_ff_res`. The norm on the residual stream at the end of the block is applied
    to them as a linear map. s_i is its scale in the clean pass, γ its weight, and its β is in no vector.
    RMSNorm has no mean.

    Shape [layer, query, key], at least 0. Only post-norm blocks have that norm. In all other blocks the map
    equals `atb_ff_res`, unless `next_norm` is set.

        >>> method = lm.methods.AtbFfResLn(next_norm=True)
        >>> lm.run(model, "The Eiffel Tower is in the city of", method).top(3)

    Args:
        biases: As in `atb_ff`.
        next_norm: Whether blocks without such a norm use the one that reads their output next: the first norm
            of the next block, and for the last block the final norm of the model.
    """

    name: ClassVar[str] = "atb_ff_res_ln"
    description: ClassVar[str] = "the size of each token's contribution to the output of the whole block"
    place_in_list: ClassVar[int] = 10
    residual: ClassVar[float] = 0.0
    includes_residual: ClassVar[bool] = True

    next_norm: bool = False

    @override
    def needs_for(self, anatomy: BlockAnatomy) -> frozenset[str]:
        # A post-norm block ends in a norm of its own, which is verified with the block.
        reads_next = self.next_norm and anatomy.feed_forward_residual is None
        return self.needs | {"next_norm"} if reads_next else self.needs

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        reading = block.next_norm() if "next_norm" in self.needs_for(block.anatomy) else None
        return feed_forward_maps(block, self.biases, reading).normed


def atb_ff(
    vectors: Float[Tensor, "batch query key d_model"],
    W_in: Float[Tensor, "d_model d_mlp"],
    m: Float[Tensor, "batch query d_mlp"],
    W_out: Float[Tensor, "d_mlp d_model"],
) -> Float[Tensor, "batch query key d_model"]:
    """Return F^FF_ij = ((F_ij W_in) ⊙ m_i) W_out, as the paper defines it.

    m_i = ∫₀¹ act'(α p_i) dα on a path from zero, where p_i is what the activation reads, biases included.

    In a gated feed-forward, p_i is the gate and u_i is what it multiplies. Then m_i = ∫₀¹ act(α p_i) dα, and
    W_gate adds a term of the same form with m_gate_i = ∫₀¹ act'(α p_i) α u_i dα.

    Args:
        vectors: F, the vectors that the feed-forward reads.
        W_in: The weights of the first layer.
        m: The multipliers m_i of the neurons.
        W_out: The weights of the second layer.
    """
    hidden = einsum(vectors, W_in, "batch query key d_model, d_model d_mlp -> batch query key d_mlp")
    shares = einsum(hidden, m, "batch query key d_mlp, batch query d_mlp -> batch query key d_mlp")
    return einsum(shares, W_out, "batch query key d_mlp, d_mlp d_model -> batch query key d_model")
