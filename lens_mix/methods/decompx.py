"""DecompX: the vectors that every input token sends, carried whole through all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.bias_split import SPLITS, Split, through_linear, through_norm
from lens_mix.algebra.decomposition import (
    SLOPES,
    DecomposedBlock,
    Decomposition,
    Shares,
    Slope,
    attention_bias,
    carried,
    decomposed_block,
    linear_block,
    resid_pre,
)
from lens_mix.algebra.vectors import value_path
from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.methods.atb_ff import refuses_feed_forward
from lens_mix.methods.base import Method
from lens_mix.methods.value_norms import ATTENTION_NEEDS

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class DecompX(Method):
    """DecompX (Modarressi et al., ACL 2023): an input map.

    score[l, i, s] = ‖X_is‖ after block l, where X_is is input token s's share of the residual stream at
    position i. The shares go through every block, feed-forwards included, and with every bias handed out
    to the tokens they add up to the true residual stream. Shape [layer, query, key], from 0 up. Nothing is
    left to roll out. `vectors` gives the shares themselves, `logit_shares` what they make of the logits;
    where only these are wanted, see `lens_mix.methods.decompx_logits`.

    Keeps query × key × d_model numbers, and makes a product with every weight matrix for each pair that has
    a share. A `max_memory` that can't hold about twice these numbers and one query's chunk is refused.

    Args:
        biases: how a bias is handed out: "absdot" (the paper's), "abssim", "norm", "equal", "first"
            (the code's `cls`), "dot"; "drop" leaves all biases out, then the shares don't add up.
        slope: the line that stands for the activation: "zero_origin" through zero and the true value (the
            code's GeLU_ZO; the closed form of integrated gradients), "tangent" (GeLU_LA; what it misses is
            handed out as a bias), "relu" (ReLU: passes what is positive; shares don't add up). Gated
            feed-forwards, which DecompX doesn't speak of, have integrated gradients: "zero_origin" only.

    Raises:
        ValueError: an unknown option.
    """

    name: ClassVar[str] = "decompx"
    residual: ClassVar[float] = 0.0
    kind: ClassVar[Literal["layer", "input"]] = "input"
    engines: ClassVar[tuple[str, ...]] = ("algebra",)
    records: ClassVar[frozenset[str]] = ATTENTION_NEEDS
    citation: ClassVar[str] = "modarressi-etal-2023-decompx"

    biases: Split = "absdot"
    slope: Slope = "zero_origin"

    def __post_init__(self) -> None:
        if self.biases not in SPLITS:
            raise ValueError(f"biases: expected one of {SPLITS}, got {self.biases!r}")
        if self.slope not in SLOPES:
            raise ValueError(f"slope: expected one of {SLOPES}, got {self.slope!r}")

    def refuses(self, anatomy: BlockAnatomy) -> str | None:
        if anatomy.cross or anatomy.feed_forward_kind != "none":
            reason = refuses_feed_forward(anatomy)
            if reason is not None:
                return reason
        if anatomy.feed_forward_kind == "gated" and self.slope != "zero_origin":
            return f"slope: a gated feed-forward has 'zero_origin' only, got {self.slope!r}"
        return None

    def of_stack(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        *below, last = (lengths for lengths, _ in carried(blocks, self.biases, self.slope))
        # The last block may hold some rows only, all of those below are read.
        return [*(blocks[-1].rows_of(lengths) for lengths in below), last]

    def vectors(self, blocks: Sequence[Block]) -> Iterator[DecomposedBlock]:
        """The shares after each block, and at the stages inside of it, from the first block up."""
        shares: Shares | None = None
        for block in blocks:
            stages, stops = decomposed_block(block, shares, self.biases, self.slope)
            shares = Shares(stages.output, block.resid_post.to(stages.output.dtype), stops)
            yield stages


@dataclasses.dataclass(frozen=True)
class DecompXLocal(DecompX):
    """DecompX of each block alone: every block's input counts as one vector per position.

    score[l, i, j] = ‖X_ij‖, the share of position j's input to block l in position i's output. Shape
    [layer, query, key], from 0 up; holds the residual stream. With `biases="drop"` it is `atb_ff_res_ln`.

    Args:
        biases, slope: as in `decompx`.
    """

    name: ClassVar[str] = "decompx_local"
    kind: ClassVar[Literal["layer", "input"]] = "layer"

    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        return Decomposition(block, None, self.biases, self.slope, whole=0).lengths()

    def of_stack(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        return Method.of_stack(self, blocks)

    @property
    def carries(self) -> bool:
        return False

    def vectors(self, blocks: Sequence[Block]) -> Iterator[DecomposedBlock]:
        for block in blocks:
            yield decomposed_block(block, None, self.biases, self.slope)[0]


def decompose(
    block: Block,
    shares: Float[Tensor, "batch key source d_model"] | None,
    state: Float[Tensor, "batch key d_model"] | None,
    biases: Split,
    slope: Slope,
) -> DecomposedBlock:
    """One block's step as it is defined, for all pairs at once: slow, the oracle of the fast way.

    Args:
        block: the block.
        shares: of the residual stream entering it, at all positions; None: every position's whole vector is
            its own, and so is its whole value, b_V included.
        state: the residual stream entering the block, at all positions; None where `shares` is.
        biases, slope: as in `DecompX`.
    """
    path, x = value_path(block), resid_pre(block)
    if shares is None or state is None:
        own = torch.eye(block.real.shape[1], dtype=x.dtype, device=x.device)
        axes = "batch query source, batch query d_model -> batch query source d_model"
        entering = einsum(own[block.queries], x, axes)
        axes = "key source, batch key head d_head -> batch key source head d_head"
        value = einsum(own, block.recorded("value").to(x.dtype), axes)
    else:
        entering = block.rows_of(shares)
        read = through_norm(block.anatomy.attention_input, shares, state, biases)
        axes = "batch key source d_model, head d_model d_head -> batch key source head d_head"
        value = einsum(read, path.W_V.to(x.dtype), axes)
    pattern, W_O = block.recorded("pattern").to(x.dtype), path.W_O.to(x.dtype)
    value = value.repeat_interleave(len(W_O) // value.shape[3], dim=3)
    axes = "batch head query key, batch key source head d_head -> batch query source head d_head"
    mixed = einsum(pattern, value, axes)
    axes = "batch query source head d_head, head d_head d_model -> batch query source d_model"
    bias = attention_bias(block, alone=shares is None)
    return linear_block(block, slope).carry(entering, einsum(mixed, W_O, axes), bias, biases)


def logit_shares(
    block: Block,
    shares: Float[Tensor, "batch query source d_model"],
    tokens: Int[Tensor, " token"] | None = None,
    biases: Split = "absdot",
) -> Float[Tensor, "batch query source token"]:
    """Every input token's share of the logits; with the biases handed out they add up to the logits.

    Args:
        block: the last block.
        shares: of its output, `DecomposedBlock.output`.
        tokens: vocabulary numbers; None for the whole vocabulary (query × source × vocabulary numbers).
        biases: how the final norm's β and the unembedding's bias are handed out.

    Raises:
        ValueError: another block than the last.
        UnsupportedModelError: the logits are not final norm, then unembedding.
    """
    head = block.head()
    read = through_norm(head.norm, shares, block.resid_post.to(shares.dtype), biases)
    W_U, b_U = head.W_U, head.b_U
    if tokens is not None:
        W_U, b_U = W_U[:, tokens], None if b_U is None else b_U[tokens]
    return through_linear(W_U, b_U, read, biases)
