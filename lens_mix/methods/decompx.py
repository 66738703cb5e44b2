"""DecompX: the vectors that every input token sends, carried whole through all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.bias_split import SPLITS, HeldNorm, Split
from lens_mix.algebra.decomposition import Decomposition, carried
from lens_mix.algebra.linear_block import SLOPES, DecomposedBlock, LinearBlock, Slope
from lens_mix.algebra.vectors import value_path
from lens_mix.arguments import one_of
from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.lens.proof.record import ALGEBRA_PARTS, VALUE
from lens_mix.method import Method
from lens_mix.methods.atb_ff import refuses_feed_forward
from lens_mix.methods.value_norms import ATTENTION_RECORDS

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class DecompX(Method):
    """DecompX (Modarressi et al., ACL 2023): an input map, with nothing left to roll out.

    score[l, i, s] = ‖X_is‖ after block l, where X_is is input token s's share of the residual stream at
    position i, carried through every block (`decompose` has the formula). With every bias handed out to the
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
    kind: ClassVar[Literal["layer", "input"]] = "input"
    engines: ClassVar[tuple[str, ...]] = ("algebra",)
    parts: ClassVar[tuple[str, ...]] = (*ALGEBRA_PARTS, VALUE)
    records: ClassVar[frozenset[str]] = ATTENTION_RECORDS
    citation: ClassVar[str] = "modarressi-etal-2023-decompx"

    biases: Split = "absdot"
    slope: Slope = "zero_origin"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("biases", self.biases, SPLITS)
        one_of("slope", self.slope, SLOPES)

    def refuses(self, anatomy: BlockAnatomy) -> str | None:
        reason = refuses_feed_forward(anatomy)
        if reason is not None and (anatomy.cross or anatomy.feed_forward_kind != "none"):
            return reason
        if anatomy.feed_forward_kind == "gated" and self.slope != "zero_origin":
            return f"slope: a gated feed-forward has 'zero_origin' only, got {self.slope!r}"
        return None

    def of_stack(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        *below, last = (lengths for lengths, _ in carried(blocks, self.biases, self.slope))
        # The last block may hold some rows only, all of those below are read.
        return [*(blocks[-1].rows_of(lengths) for lengths in below), last]

    def vectors(self, blocks: Sequence[Block]) -> Iterator[DecomposedBlock]:
        """The shares after each block, and at the stages inside of it, from the first block up.

        By the formula as it stands, all pairs at once and `max_memory` not asked: the slow way.
        """
        shares = state = None
        for block in blocks:
            stages = self.decompose(block, shares, state)
            yield stages
            if self.kind == "input":
                shares, state = stages.output, block.resid_post.to(stages.output.dtype)

    def decompose(
        self,
        block: Block,
        shares: Float[Tensor, "batch key source *d_model"] | None,
        state: Float[Tensor, "batch key d_model"] | None,
    ) -> DecomposedBlock:
        """One block's step as it is defined, for all pairs at once: slow, the oracle of the fast way.

            attention_is = Σ_h Σ_j a_hij LN(X_js) W_V^h W_O^h
            mid_is       = X_is + attention_is
            output_is    = mid_is + (m_i ⊙ LN(mid_is) W_in) W_out       m = act(p) / p, p the true state

        LN is the norm's linear part over the scale of the true state; biases are handed out after each term.

        Args:
            block: the block.
            shares, state: X and the residual stream, entering at all positions. Without a state, each
                position's whole vector and value (b_V included) enter, and `shares` says how much of them is
                each source's; None: all is its own.
        """
        path, linear = value_path(block), LinearBlock(block, self.slope, alone=state is None)
        x = linear.resid_pre
        # Copies, for `decompx_logits`: autograd keeps nothing that was recorded in inference mode.
        pattern, value = (block.recorded(role).to(x.dtype, copy=True) for role in ("pattern", "value"))
        if shares is None:
            shares = torch.eye(block.real.shape[1], dtype=x.dtype, device=x.device).expand(len(x), -1, -1)
        if state is None:
            entering = block.rows_of(shares)[..., None] * x[:, :, None].clone()
            value = shares[..., None, None] * value[:, :, None]
        else:
            entering = block.rows_of(shares)
            read = HeldNorm(block.anatomy.attention_input, state).shares(shares, self.biases)
            # One product for all heads: `decompx_logits` goes back through it for many logits at once.
            W_V = rearrange(path.W_V.to(x.dtype), "head d_model d_head -> d_model (head d_head)")
            value = (read @ W_V).unflatten(-1, (len(path.W_V), -1))
        value = value.repeat_interleave(len(path.W_O) // len(path.W_V), dim=3)
        axes = "batch head query key, batch key source head d_head -> batch query source head d_head"
        attention = einsum(pattern, value, axes).flatten(3) @ path.W_O.to(x.dtype).flatten(0, 1)
        return linear.shares(entering, attention, self.biases)


@dataclasses.dataclass(frozen=True)
class DecompXLocal(DecompX):
    """DecompX of each block alone: every block's input counts as one vector per position. Arguments as there.

    score[l, i, j] = ‖X_ij‖, the share of position j's input to block l in position i's output. Shape
    [layer, query, key], from 0 up; holds the residual stream. With `biases="drop"` it is `atb_ff_res_ln`.
    """

    name: ClassVar[str] = "decompx_local"
    kind: ClassVar[Literal["layer", "input"]] = "layer"
    of_stack = Method.of_stack

    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        return Decomposition(block, None, self.biases, self.slope, keeps=False).lengths()
