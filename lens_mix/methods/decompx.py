"""DecompX: the vectors that every input token sends, carried whole through all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.activations import gated_multipliers, plain_multiplier
from lens_mix.algebra.bias_split import SPLITS, Split, split_bias, through_linear
from lens_mix.algebra.decomposition import Decomposition, carried
from lens_mix.algebra.definitions import through_norm, value_vectors
from lens_mix.algebra.feed_forward import unsupported_feed_forward
from lens_mix.algebra.linear_block import SLOPES, DecomposedBlock, Slope, decomposed
from lens_mix.arguments import one_of
from lens_mix.lens.anatomy import BlockAnatomy, Norm
from lens_mix.lens.effort import Passes, pair_passes
from lens_mix.lens.verification_record import ALGEBRA_COMPONENTS, VALUE
from lens_mix.method import Method, Scope
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

# The cost of one row in forward passes, and of one row of each block alone: estimates, for the warning before
# a long run.
_ROW, _LOCAL_ROW = 0.35, 0.3


@dataclasses.dataclass(frozen=True)
class DecompX(VectorMethod):
    """DecompX (Modarressi et al., ACL 2023): an input map, with nothing left to roll out.

    score[l, i, s] = ‖X_is‖ after block l, where X_is is input token s's share of the residual stream at
    position i, carried through every block (`decompx` has the formula). With every bias handed out to the
    tokens the shares add up to the true residual stream. Shape [layer, query, key], from 0 up. `vectors`
    gives the shares themselves; `lens_mix.methods.decompx_logits` what they make of the logits.

    Keeps query × key × d_model numbers, and makes a product with every weight matrix for each pair that has
    a share. A `max_memory` that can't hold about twice these numbers and one query's chunk is refused.

    Args:
        biases: how a bias is handed out: "absdot" (the paper's), "abssim", "norm", "equal", "first"
            (the code's `cls`), "dot"; "drop" leaves all biases out, then the shares don't add up.
        slope: the line that stands for the activation: "zero_origin" through zero and the true value (the
            code's GeLU_ZO; the closed form of integrated gradients), "tangent" (GeLU_LA; what it misses is
            handed out as a bias), "relu" (passes what is positive; shares don't add up). Gated feed-forwards,
            which DecompX doesn't speak of, have integrated gradients: "zero_origin" only.

    Raises:
        ValueError: an unknown option.
    """

    name: ClassVar[str] = "decompx"
    residual: ClassVar[float] = 0.0
    holds_residual: ClassVar[bool] = True
    scope: ClassVar[Scope] = "stack"
    needs: ClassVar[frozenset[str]] = frozenset({*ALGEBRA_COMPONENTS, VALUE})
    citation: ClassVar[str] = "modarressi-etal-2023-decompx"

    biases: Split = "absdot"
    slope: Slope = "zero_origin"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("biases", self.biases, SPLITS)
        one_of("slope", self.slope, SLOPES)

    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        reason = unsupported_feed_forward(anatomy)
        if reason is not None and (anatomy.cross or anatomy.feed_forward_kind != "none"):
            return reason
        if anatomy.feed_forward_kind == "gated" and self.slope != "zero_origin":
            return f"slope: a gated feed-forward has 'zero_origin' only, got {self.slope!r}"
        return None

    def passes(self, blocks: Sequence[Block]) -> Passes | None:
        return pair_passes(blocks, _ROW, "gim with queries=[-1] takes about four", every_row=True)

    def of_stack(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        *below, last = (lengths for lengths, _ in carried(blocks, self.biases, self.slope))
        # The last block may hold some rows only, all of those below are read.
        return [*(blocks[-1].rows_of(lengths) for lengths in below), last]

    def vectors(self, blocks: Sequence[Block]) -> Iterator[DecomposedBlock]:
        """The shares after each block, and at the stages inside of it, from the first block up.

        All pairs at once, and `max_memory` not asked: the slow way.
        """
        shares = state = None
        for block in blocks:
            stages = decomposed(block, self.biases, self.slope, shares, state)
            yield stages
            if self.scope == "stack":
                shares, state = stages.output, block.resid_post.to(stages.output.dtype)


@dataclasses.dataclass(frozen=True)
class DecompXLocal(DecompX):
    """DecompX of each block alone: every block's input counts as one vector per position. Arguments as there.

    score[l, i, j] = ‖X_ij‖, the share of position j's input to block l in position i's output. Shape
    [layer, query, key], from 0 up; holds the residual stream. With `biases="drop"` it is `atb_ff_res_ln`.
    """

    name: ClassVar[str] = "decompx_local"
    scope: ClassVar[Scope] = "layer"
    of_stack = Method.of_stack

    def passes(self, blocks: Sequence[Block]) -> Passes | None:
        return pair_passes(blocks, _LOCAL_ROW)

    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        return Decomposition(block, None, self.biases, self.slope, keeps=False).lengths()


def decompx(
    vectors: Float[Tensor, "batch pos source d_model"],
    pattern: Float[Tensor, "batch head query key"],
    anatomy: BlockAnatomy,
    rule: Split,
    alone: bool,
) -> Float[Tensor, "batch pos source d_model"]:
    """The definition: from the shares X of what enters a block to those of its output; LN is a norm or none.

        attention_is = Σ_h Σ_j a_hij LN(X_js) W_V^h W_O^h
        mid_is       = LN(X_is + attention_is)
        output_is    = LN(mid_is + ((LN(mid_is) W_in) ⊙ m_i) W_out)      m = act(p) / p, p the sum over s

    A gated feed-forward has the same of W_gate besides, each with the m of its integrated gradients.
    After each term its bias is handed out, so that the shares add up to the true state: a norm is held linear
    at the scale of their sum.

    Args:
        vectors: X.
        pattern: a.
        anatomy: of a block with a plain or gated feed-forward, no norm or multiplier on a branch.
        rule: how a bias is handed out; not "drop".
        alone: whether each position is its own only source, as in the first block; b_V is then the key's.

    Raises:
        ValueError: another feed-forward.
    """
    path, feed_forward = anatomy.value_path, anatomy.feed_forward
    if path is None or feed_forward is None:
        raise ValueError(f"feed-forward: expected a plain or gated one, got {anatomy.feed_forward_kind!r}")

    def normed(norm: Norm | None, shares: Tensor) -> Tensor:
        return split_bias(through_norm(norm, shares, shares.sum(2)), norm.bias if norm else None, rule)

    read = normed(anatomy.attention_input, vectors)
    axes = "batch key source d_model, head d_model d_head -> source batch key head d_head"
    value = einsum(read, path.W_V, axes)
    by_source = [value_vectors(pattern, of_source, path.W_O).sum(2) for of_source in value]
    attention = rearrange(by_source, "source batch query d_model -> batch query source d_model")
    b_V = torch.zeros_like(value[0]) if path.b_V is None else path.b_V.expand_as(value[0])
    b_O = torch.zeros_like(path.W_O[0, 0]) if path.b_O is None else path.b_O
    of_keys = value_vectors(pattern, b_V, path.W_O)
    attention, bias = (attention + of_keys, b_O) if alone else (attention, of_keys.sum(2) + b_O)
    mid = normed(anatomy.attention_residual, split_bias(vectors + attention, bias, rule))
    read = normed(anatomy.feed_forward_input, vectors if anatomy.parallel else mid)
    hidden = through_linear(feed_forward.W_in, feed_forward.b_in, read, rule)
    if feed_forward.W_gate is None:
        hidden = hidden * plain_multiplier(feed_forward.activation, hidden.sum(2), None)[:, :, None]
    else:
        gate = through_linear(feed_forward.W_gate, feed_forward.b_gate, read, rule)
        m_gate, m_up = gated_multipliers(feed_forward.activation, gate.sum(2), None, hidden.sum(2), None)
        hidden = gate * m_gate[:, :, None] + hidden * m_up[:, :, None]
    hidden = split_bias(hidden, feed_forward.b_hidden, rule)
    added = through_linear(feed_forward.W_out, feed_forward.b_out, hidden, rule)
    return normed(anatomy.feed_forward_residual, mid + added)
