"""Compute DecompX: the vectors of every input token, decomposed through all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._algebra.activations import gated_multipliers, plain_multiplier
from lens_mix._algebra.bias_split import SPLITS, Split, split_bias, through_linear
from lens_mix._algebra.decomposition import Decomposition, carried
from lens_mix._algebra.definitions import through_norm, value_vectors
from lens_mix._algebra.feed_forward import unsupported_feed_forward
from lens_mix._algebra.linear_block import SLOPES, DecomposedBlock, Slope, decomposed
from lens_mix._blocks.components import VALUE
from lens_mix._blocks.cost import Growth
from lens_mix._blocks.verification_record import ALGEBRA_COMPONENTS
from lens_mix._model.anatomy import BlockAnatomy, Norm
from lens_mix.arguments import check_choice
from lens_mix.method import Method, MethodGroup, Reads
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


@dataclasses.dataclass(frozen=True)
class DecompX(VectorMethod):
    """Compute DecompX, an input map that needs no rollout (Modarressi et al., ACL 2023).

        score[l, i, s] = ‖X_is‖ after block l
        attention_is = Σ_h Σ_j a_hij LN(X_js) W_V^h W_O^h
        mid_is       = LN(X_is + attention_is)
        output_is    = LN(mid_is + ((LN(mid_is) W_in) ⊙ m_i) W_out)

    X_is is the share of input token s in the residual stream at position i. The output shares of a block are
    the X of the next. LN is the norm at that place, if the block has one, as a linear map. m_i is the slope
    of the line that replaces the activation. If every bias is distributed over the tokens, the shares sum to
    the true residual stream.

    Shape [layer, query, key], at least 0. `vectors` returns the shares themselves, and
    `lens_mix.methods.decompx_logits` their shares of the logits.

    The computation stores query × key × d_model numbers. It multiplies the vector of every pair with a share
    by every weight matrix. `max_memory` has to allow about twice these numbers, plus one query's chunk.

        >>> lm.run(model, "The Eiffel Tower is in the city of", lm.methods.DecompX(biases="norm")).top(3)

    Args:
        biases: The rule that distributes a bias over the tokens: "absdot" (as in the paper), "abssim",
            "norm", "equal", "first" (`cls` in the authors' code; not with padding on the left) or "dot".
            With "drop" all biases are left out, and the shares do not sum to the residual stream.
        slope: The line that replaces an activation:

            - "zero_origin": the line through zero and the true value (GeLU_ZO in the authors' code, and the
              closed form of integrated gradients). It is the only one for gated feed-forwards, which
              DecompX does not define.
            - "tangent": the tangent (GeLU_LA in the authors' code). The rest, act(p) − slope · p,
              is distributed as a bias.
            - "relu": 1 for positive inputs and 0 for others. The shares do not sum to the residual stream.

    Raises:
        ValueError: An option is unknown.
    """

    name: ClassVar[str] = "decompx"
    group: ClassVar[MethodGroup] = "What reaches a position from the input tokens"
    description: ClassVar[str] = (
        "the size of each input token's contribution to the residual stream after a layer"
    )
    place_in_list: ClassVar[int] = 1
    residual: ClassVar[float] = 0.0
    includes_residual: ClassVar[bool] = True
    reads: ClassVar[Reads] = "below"
    needs: ClassVar[frozenset[str]] = frozenset({*ALGEBRA_COMPONENTS, VALUE})
    cost_grows_with: ClassVar[Growth] = "tokens"
    citation: ClassVar[str] = "modarressi-etal-2023-decompx"

    biases: Split = "absdot"
    slope: Slope = "zero_origin"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("biases", self.biases, SPLITS)
        check_choice("slope", self.slope, SLOPES)

    @override
    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        reason = unsupported_feed_forward(anatomy)
        if reason is not None and (anatomy.cross or anatomy.feed_forward_kind != "none"):
            return reason
        if anatomy.feed_forward_kind == "gated" and self.slope != "zero_origin":
            return f"slope: a gated feed-forward has 'zero_origin' only, got {self.slope!r}"
        return None

    @override
    def of_blocks(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        *below, last = (lengths for lengths, _ in carried(blocks, self.biases, self.slope))
        # The last block may have only some rows, but those of the blocks below are all read.
        return [*(blocks[-1].rows_of(lengths) for lengths in below), last]

    def vectors(self, blocks: Sequence[Block]) -> Iterator[DecomposedBlock]:
        """Yield the shares after each block and at the stages inside it, from the first block up.

        This is slow: it computes all pairs together and does not respect `max_memory`.

        Args:
            blocks: All blocks of the mapped part.
        """
        shares = None
        for block in blocks:
            stages = decomposed(block, self.biases, self.slope, shares, alone=shares is None)
            yield stages
            # `DecompXLocal` maps each block from its own input, and not from the shares of the block below.
            if self.reads == "below":
                shares = stages.output


@dataclasses.dataclass(frozen=True)
class DecompXLocal(DecompX):
    """Compute DecompX of each block alone, where every position of the block's input is one vector.

        score[l, i, j] = ‖X_ij‖

    X_ij is the share of the input at position j of block l in its output at position i (the formula of
    `DecompX` for one block).

    Shape [layer, query, key], at least 0. The map contains the residual stream. With `biases="drop"` it
    equals `atb_ff_res_ln`.

        >>> method = lm.methods.DecompXLocal(biases="norm")
        >>> lm.run(model, "The Eiffel Tower is in the city of", method).top(3)

    Args:
        biases: As in `DecompX`.
        slope: As in `DecompX`.
    """

    name: ClassVar[str] = "decompx_local"
    group: ClassVar[MethodGroup] = "What each layer takes from each token"
    description: ClassVar[str] = (
        "the size of each token's contribution to the block's output, biases included"
    )
    place_in_list: ClassVar[int] = 11
    cost_grows_with: ClassVar[Growth] = "rows"
    reads: ClassVar[Reads] = "block"
    # A method that defines `of_blocks` is taken for one that reads several blocks (`registry`).
    of_blocks = Method.of_blocks

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        return Decomposition(block, None, self.biases, self.slope, keeps=False).lengths()


def decompx(
    vectors: Float[Tensor, "batch pos source d_model"],
    pattern: Float[Tensor, "batch head query key"],
    anatomy: BlockAnatomy,
    rule: Split,
    alone: bool,
) -> Float[Tensor, "batch pos source d_model"]:
    """Return the shares of a block's output from the shares X of its input, as the paper defines them.

        attention_is = Σ_h Σ_j a_hij LN(X_js) W_V^h W_O^h
        mid_is       = LN(X_is + attention_is)
        output_is    = LN(mid_is + ((LN(mid_is) W_in) ⊙ m_i) W_out)      m = act(p) / p, p the sum over s

    LN is the norm at that place, if the block has one. A gated feed-forward has a second term with W_gate,
    and each term has the m of its integrated gradients. After each term its bias is distributed, so that the
    shares sum to the true state. A norm is applied as a linear map, at the scale of that sum.

    Args:
        vectors: X.
        pattern: The attention weights a.
        anatomy: A block with a plain or gated feed-forward, and no norm or multiplier on a branch.
        rule: The rule that distributes a bias, except "drop".
        alone: Whether each position is its own only source, as in the first block. Then b_V belongs to the
            key.

    Raises:
        ValueError: The block has another feed-forward.
    """
    path, feed_forward = anatomy.value_path, anatomy.feed_forward
    if path is None or feed_forward is None:
        raise ValueError(f"feed-forward: expected a plain or gated one, got {anatomy.feed_forward_kind!r}")

    def apply_norm(norm: Norm | None, shares: Tensor) -> Tensor:
        return split_bias(through_norm(norm, shares, shares.sum(2)), norm.bias if norm else None, rule)

    read = apply_norm(anatomy.attention_input, vectors)
    axes = "batch key source d_model, head d_model d_head -> source batch key head d_head"
    value = einsum(read, path.W_V, axes)
    by_source = [value_vectors(pattern, source_value, path.W_O).sum(2) for source_value in value]
    attention = rearrange(by_source, "source batch query d_model -> batch query source d_model")
    b_V = torch.zeros_like(value[0]) if path.b_V is None else path.b_V.expand_as(value[0])
    b_O = torch.zeros_like(path.W_O[0, 0]) if path.b_O is None else path.b_O
    of_keys = value_vectors(pattern, b_V, path.W_O)
    attention, bias = (attention + of_keys, b_O) if alone else (attention, of_keys.sum(2) + b_O)
    mid = apply_norm(anatomy.attention_residual, split_bias(vectors + attention, bias, rule))
    read = apply_norm(anatomy.feed_forward_input, vectors if anatomy.parallel else mid)
    hidden = through_linear(feed_forward.W_in, feed_forward.b_in, read, rule)
    if feed_forward.W_gate is None:
        hidden = hidden * plain_multiplier(feed_forward.activation, hidden.sum(2), None)[:, :, None]
    else:
        gate = through_linear(feed_forward.W_gate, feed_forward.b_gate, read, rule)
        m_gate, m_up = gated_multipliers(feed_forward.activation, gate.sum(2), None, hidden.sum(2), None)
        hidden = gate * m_gate[:, :, None] + hidden * m_up[:, :, None]
    hidden = split_bias(hidden, feed_forward.b_hidden, rule)
    added = through_linear(feed_forward.W_out, feed_forward.b_out, hidden, rule)
    return apply_norm(anatomy.feed_forward_residual, mid + added)
