"""DecompX: the vectors that every input token sends, carried whole through all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.activations import derivative, gated_multipliers, plain_multiplier
from lens_mix.algebra.bias_split import SPLITS, Split, split_bias, through_linear, through_norm
from lens_mix.algebra.budget import (
    budget_beside,
    decomposition_bytes,
    feed_forward_bytes,
    least_attention_bytes,
    state_bytes,
)
from lens_mix.algebra.vectors import AttentionVectors, attention_vectors, head_vectors, value_path
from lens_mix.lens.anatomy import ACTIVATIONS, BlockAnatomy, FeedForward
from lens_mix.methods.atb_ff import refuses_feed_forward
from lens_mix.methods.base import Method
from lens_mix.methods.value_norms import ATTENTION_NEEDS

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

Slope = Literal["zero_origin", "tangent", "relu"]
SLOPES: tuple[str, ...] = ("zero_origin", "tangent", "relu")

# Numbers in the hidden layer of one step.
HIDDEN_ELEMENTS = 4 << 20


@dataclasses.dataclass(frozen=True)
class DecompX(Method):
    """DecompX (Modarressi et al., ACL 2023): an input map.

    score[l, i, s] = ‖X_is‖ after block l, where X_is is input token s's share of the residual stream at
    position i. The shares go through every block, feed-forwards included, and with every bias handed out
    to the tokens they add up to the true residual stream. Shape [layer, query, key], from 0 up. Nothing is
    left to roll out. `vectors` gives the shares themselves, `logit_shares` what they make of the logits.

    Costs query × key × d_model numbers, and a product with every weight matrix for each of the pairs. A
    `max_memory` that can't hold about nine times these numbers is refused.

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
    citation: ClassVar[str] = """@inproceedings{modarressi-etal-2023-decompx,
  title = {{D}ecomp{X}: Explaining Transformers Decisions by Propagating Token Decomposition},
  author = {Modarressi, Ali and Fayyaz, Mohsen and Aghazadeh, Ehsan and Yaghoobzadeh, Yadollah and
            Pilehvar, Mohammad Taher},
  booktitle = {Proceedings of the 61st Annual Meeting of the Association for Computational Linguistics},
  year = {2023},
  pages = {2649--2664},
  url = {https://aclanthology.org/2023.acl-long.149},
}"""

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

    def of_stack(self, blocks: Sequence[Block]) -> Float[Tensor, "batch layer query key"]:
        maps = [torch.linalg.vector_norm(stages.output, dim=-1) for stages in self.vectors(blocks)]
        return torch.stack(maps, dim=1)

    def vectors(self, blocks: Sequence[Block]) -> Iterator[DecomposedBlock]:
        """The shares after each block, from the first block up."""
        shares: Tensor | None = None
        for block in blocks:
            stages = decompose(block, shares, self.biases, self.slope)
            shares = stages.output
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

    def vectors(self, blocks: Sequence[Block]) -> Iterator[DecomposedBlock]:
        for block in blocks:
            yield decompose(block, None, self.biases, self.slope)


@dataclasses.dataclass(frozen=True)
class DecomposedBlock:
    """Shares at the stages of one block, [batch, query, source, d_model].

    Attributes:
        attention: of the attention's output, without biases.
        mid: of the residual stream after attention (and after the norm on it, in post-norm blocks).
        feed_forward: of the feed-forward's output; None where there is none.
        output: of the block's output.
    """

    attention: Float[Tensor, "batch query source d_model"]
    mid: Float[Tensor, "batch query source d_model"]
    feed_forward: Float[Tensor, "batch query source d_model"] | None
    output: Float[Tensor, "batch query source d_model"]


def decompose(
    block: Block,
    shares: Float[Tensor, "batch query source d_model"] | None,
    biases: Split,
    slope: Slope,
) -> DecomposedBlock:
    """One block's step.

    Args:
        block: the block.
        shares: of the residual stream entering it; None: every position's whole vector is its own.
        biases, slope: as in `DecompX`.
    """
    anatomy = block.anatomy
    heads = head_vectors(block)
    fixed, row = decomposition_bytes(block)
    fixed += state_bytes(block, heads) + feed_forward_bytes(block, heads, folds=False)
    least = max(row, least_attention_bytes(block, heads))
    heads.budget = budget_beside(block, fixed, least, "DecompX, all shares kept")
    step = None if heads.budget is None or row == 0 else heads.budget // row
    states = attention_vectors(block, heads)
    real = block.real[:, :, None, None]
    entering = _own(states.resid_pre) if shares is None else shares
    attention = _attention(block, states, shares, biases)
    attention = torch.where(real, attention, torch.zeros_like(attention))
    bias = _attention_bias(block, states, alone=shares is None)
    if anatomy.attention_branch is None:
        s = anatomy.residual_multiplier
        mid = split_bias(attention * s + entering, bias * s, biases)
    else:
        branch = split_bias(attention, bias, biases)
        branch = through_norm(anatomy.attention_branch, branch, states.attention_out, biases)
        mid = branch * anatomy.residual_multiplier + entering
    mid = through_norm(anatomy.attention_residual, mid, states.summed, biases)
    mid = torch.where(real, mid, torch.zeros_like(mid))
    if anatomy.feed_forward is None:
        return DecomposedBlock(attention, mid, None, mid)
    reading, state = (entering, states.resid_pre) if anatomy.parallel else (mid, states.mid)
    output, whole = _feed_forward(anatomy, anatomy.feed_forward, reading, state, biases, slope, step)
    branch = through_norm(anatomy.feed_forward_branch, output, whole, biases) * anatomy.residual_multiplier
    joined = whole if anatomy.feed_forward_branch is None else anatomy.feed_forward_branch(whole)
    summed = states.mid + joined * anatomy.residual_multiplier
    out = through_norm(anatomy.feed_forward_residual, mid + branch, summed, biases)
    return DecomposedBlock(attention, mid, output, torch.where(real, out, torch.zeros_like(out)))


def _own(x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos pos_ d_model"]:
    return torch.diag_embed(x.transpose(1, 2)).permute(0, 2, 3, 1)


def _attention(
    block: Block, states: AttentionVectors, shares: Tensor | None, biases: Split
) -> Float[Tensor, "batch query source d_model"]:
    """Shares of the attention's output without b_O: what query i got of token s by way of all keys."""
    if shares is None:
        return states.attention.dense()
    path, norm = value_path(block), block.anatomy.attention_input
    read = through_norm(norm, shares, states.resid_pre, biases)
    pattern = block.recorded("pattern").to(read.dtype)
    total = torch.zeros_like(read)
    group = pattern.shape[1] // path.W_V.shape[0]
    for head in range(pattern.shape[1]):
        value = read @ path.W_V[head // group].to(read.dtype)
        mixed = pattern[:, head] @ value.flatten(2)
        total += mixed.unflatten(2, value.shape[2:]) @ path.W_O[head].to(read.dtype)
    return total


def _attention_bias(
    block: Block, states: AttentionVectors, alone: bool
) -> Float[Tensor, "batch query d_model"]:
    """The biases in the attention's output: b_O, and b_V where the shares went through W_V without it."""
    path = value_path(block)
    bias = torch.zeros_like(states.attention_out)
    if path.b_O is not None:
        bias += path.b_O.to(bias.dtype)
    if alone or path.b_V is None:
        return bias
    # A pattern's rows don't sum to 1 where there are attention sinks.
    mass = block.recorded("pattern").to(bias.dtype).sum(-1)
    b_V = path.b_V.to(bias.dtype).repeat_interleave(mass.shape[1] // len(path.b_V), dim=0)
    by_head = torch.einsum("he,hed->hd", b_V, path.W_O.to(bias.dtype))
    return bias + torch.einsum("bhq,hd->bqd", mass, by_head)


def _feed_forward(
    anatomy: BlockAnatomy,
    feed_forward: FeedForward,
    shares: Float[Tensor, "batch query source d_model"],
    state: Float[Tensor, "batch query d_model"],
    biases: Split,
    slope: Slope,
    step: int | None,
) -> tuple[Float[Tensor, "batch query source d_model"], Float[Tensor, "batch query d_model"]]:
    """Shares of the feed-forward's output, and the whole."""
    norm = anatomy.feed_forward_input
    read = state if norm is None else norm(state)
    out = torch.empty_like(shares)
    width = shares.shape[0] * shares.shape[2] * feed_forward.W_in.shape[1]
    step = max(1, HIDDEN_ELEMENTS // width) if step is None else step
    for start in range(0, shares.shape[1], step):
        rows = slice(start, start + step)
        part = through_norm(norm, shares[:, rows], state[:, rows], biases)
        hidden = _hidden(feed_forward, part, read[:, rows], biases, slope)
        if feed_forward.b_hidden is not None:
            b_hidden = feed_forward.b_hidden.to(hidden.dtype)
            hidden = split_bias(hidden, b_hidden.expand(*hidden.shape[:2], -1), biases)
        out[:, rows] = through_linear(feed_forward.W_out, feed_forward.b_out, hidden, biases)
    return out, feed_forward(read)


def _hidden(
    feed_forward: FeedForward, shares: Tensor, read: Tensor, biases: Split, slope: Slope
) -> Float[Tensor, "batch query source d_mlp"]:
    """Shares of the hidden layer after the activation."""
    name, dtype = feed_forward.activation, read.dtype
    up = through_linear(feed_forward.W_in, feed_forward.b_in, shares, biases)
    up_state = _whole(feed_forward.W_in, feed_forward.b_in, read)
    if feed_forward.W_gate is not None:
        gate = through_linear(feed_forward.W_gate, feed_forward.b_gate, shares, biases)
        gate_state = _whole(feed_forward.W_gate, feed_forward.b_gate, read)
        m_gate, m_up = gated_multipliers(name, gate_state.double(), None, up_state.double(), None)
        return gate * m_gate.to(dtype)[..., None, :] + up * m_up.to(dtype)[..., None, :]
    if slope == "relu":
        return up * (up_state > 0)[..., None, :]
    if slope == "zero_origin":
        return up * plain_multiplier(name, up_state.double(), None).to(dtype)[..., None, :]
    activation = ACTIVATIONS[name]
    tangent = derivative(activation, up_state)
    return split_bias(up * tangent[..., None, :], activation(up_state) - tangent * up_state, biases)


def _whole(weight: Tensor, bias: Tensor | None, read: Tensor) -> Tensor:
    out = read @ weight.to(read.dtype)
    return out if bias is None else out + bias.to(read.dtype)


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
    if not block.is_last:
        raise ValueError(f"head: expected the last block, got block {block.layer}")
    head = block.head()
    state = block.resid_post.to(shares.dtype)
    read = through_norm(head.norm, shares, state, biases)
    W_U, b_U = head.W_U, head.b_U
    if tokens is not None:
        W_U, b_U = W_U[:, tokens], None if b_U is None else b_U[tokens]
    return through_linear(W_U, b_U, read, biases)
