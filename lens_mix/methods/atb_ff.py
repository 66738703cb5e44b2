"""Attention and feed-forward blocks: what a key's vector has become after the feed-forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from einops import einsum
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.feed_forward import Variant, feed_forward_maps, unsupported_feed_forward
from lens_mix.arguments import one_of
from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.lens.effort import Passes, pair_passes
from lens_mix.lens.verification_record import ALGEBRA_COMPONENTS
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

# The cost of one row in forward passes: an estimate, for the warning before a long run.
_ROW = 0.1


@dataclasses.dataclass(frozen=True)
class AtbFf(VectorMethod):
    """The feed-forward's output by key, ATBFF (Kobayashi et al., ICLR 2024, section 4).

    score[l, i, j] = ‖F^FF_ij‖, F^FF_ij = ((F_ij W_in) ⊙ m_i) W_out, where F_ij is what the feed-forward
    reads of key j and m_i the integrated gradients through the activation, in closed form (gated
    feed-forwards: one integral per neuron, by quadrature; see `lens_mix.algebra.activations`). Shape
    [layer, query, key], from 0 up, in the units of the feed-forward's output.

    In parallel blocks, where the feed-forward reads the block's input, only the diagonal is not zero.

    Args:
        biases: where the path of the integrated gradients starts. "on_path" (variant A, the default): at
            zero, so the biases grow along with the vectors and get shares, which are dropped. "fixed"
            (variant B): at the biases, so the vectors' shares add up to all of the change.

    Raises:
        ValueError: an unknown variant.
    """

    name: ClassVar[str] = "atb_ff"
    residual: ClassVar[float] = 0.5
    needs: ClassVar[frozenset[str]] = frozenset(ALGEBRA_COMPONENTS)
    citation: ClassVar[str] = "kobayashi-etal-2024-analyzing"

    biases: Variant = "on_path"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("biases", self.biases, ("on_path", "fixed"))

    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        return unsupported_feed_forward(anatomy)

    def passes(self, blocks: Sequence[Block]) -> Passes | None:
        return pair_passes(blocks, _ROW)

    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        return feed_forward_maps(block, self.biases).output


@dataclasses.dataclass(frozen=True)
class AtbFfRes(AtbFf):
    """Feed-forward and its residual connection, ATBFFRES (Kobayashi et al., ICLR 2024, section 4).

    score[l, i, j] = ‖F_ij + F^FF_ij‖, with F_ij what the block held of key j before the feed-forward and
    F^FF_ij as in `atb_ff`, through the norm and the multiplier of the branch where there are any. Shape
    [layer, query, key], from 0 up. `biases` as in `atb_ff`.
    """

    name: ClassVar[str] = "atb_ff_res"
    residual: ClassVar[float] = 0.0
    holds_residual: ClassVar[bool] = True

    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        return feed_forward_maps(block, self.biases).residual


@dataclasses.dataclass(frozen=True)
class AtbFfResLn(AtbFf):
    """The whole block, ATBFFRESLN (Kobayashi et al., ICLR 2024, section 4).

    The vectors of `atb_ff_res` through the norm on the residual stream at the block's end, held linear at
    its true scale, β in no vector. Shape [layer, query, key], from 0 up. Only post-norm blocks have that
    norm; on all others the map equals `atb_ff_res`, unless `next_norm`. `biases` as in `atb_ff`.

    Args:
        next_norm: where the block has no such norm, apply the one that reads its output next: the next
            block's first norm, after the last block the model's final norm.
    """

    name: ClassVar[str] = "atb_ff_res_ln"
    residual: ClassVar[float] = 0.0
    holds_residual: ClassVar[bool] = True

    next_norm: bool = False

    def needs_for(self, anatomy: BlockAnatomy) -> frozenset[str]:
        reads_next = self.next_norm and anatomy.feed_forward_residual is None
        return self.needs | {"next_norm"} if reads_next else self.needs

    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        reading = block.next_norm() if "next_norm" in self.needs_for(block.anatomy) else None
        return feed_forward_maps(block, self.biases, reading).normed


def atb_ff(
    vectors: Float[Tensor, "batch query key d_model"],
    W_in: Float[Tensor, "d_model d_mlp"],
    m: Float[Tensor, "batch query d_mlp"],
    W_out: Float[Tensor, "d_mlp d_model"],
) -> Float[Tensor, "batch query key d_model"]:
    """The definition: F^FF_ij = ((F_ij W_in) ⊙ m_i) W_out, on a path from zero m_i = ∫₀¹ act'(α p_i) dα.

    p_i is what the activation reads, biases in. A gated feed-forward adds the same of W_gate: with p the gate
    and u_i what it multiplies, m_gate_i = ∫₀¹ act'(α p_i) α u_i dα, and m_i = ∫₀¹ act(α p_i) dα.
    """
    hidden = einsum(vectors, W_in, "batch query key d_model, d_model d_mlp -> batch query key d_mlp")
    shares = einsum(hidden, m, "batch query key d_mlp, batch query d_mlp -> batch query key d_mlp")
    return einsum(shares, W_out, "batch query key d_mlp, d_mlp d_model -> batch query key d_model")
