"""A block's clean rows, and how a change of the attention's output goes through its norms.

A change is carried from part to part; outputs are never subtracted (`NormChange`, `FeedForwardChange`).
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.feed_forward_change import FeedForwardChange
from lens_mix.algebra.norm_change import NormChange, norm_change
from lens_mix.lens.anatomy import BlockAnatomy, Norm


@dataclasses.dataclass(frozen=True)
class FirstChange:
    """What a change of the attention's output does up to the first matrices.

    Attributes:
        mid: the change of the residual stream in the middle of the block.
        read: the change of what the first matrices read; unfinished where they are folded.
        scale: what the values' share of the pre-activations is multiplied by.
        factors: of the norms' numerators in `read`; none where the first matrices are not folded.
    """

    mid: Float[Tensor, "key row d_model"]
    read: Float[Tensor, "key row d_model"]
    scale: Float[Tensor, "key row 1"] | float
    factors: list[Float[Tensor, "key row 1"]]


class CleanBlock:
    """A block's clean rows, and how a change goes through its norms and W_out.

    Args:
        anatomy: the block.
        resid_pre: what enters it.
        attention_out: the attention's output before any norm, in the wider dtype.
        resid_post: what leaves it.
        final: the model's final norm, where the change after it is wanted.
        columns: neurons that are done at once, at most.
        folds: whether W_O and W_in are one matrix per head.
        pairs: how many changes there will be.
    """

    def __init__(
        self,
        anatomy: BlockAnatomy,
        resid_pre: Float[Tensor, "row d_model"],
        attention_out: Float[Tensor, "row d_model"],
        resid_post: Float[Tensor, "row d_model"],
        final: Norm | None,
        columns: int,
        folds: bool,
        pairs: int,
    ) -> None:
        self.multiplier, dtype = anatomy.residual_multiplier, resid_pre.dtype
        branch, residual = anatomy.attention_branch, anatomy.attention_residual
        self.branch = norm_change(branch, attention_out)
        branch_out = attention_out if branch is None else branch(attention_out)
        total = resid_pre + (branch_out * self.multiplier).to(dtype)
        self.residual = norm_change(residual, total)
        mid = total if residual is None else residual(total)
        read = anatomy.feed_forward_in(resid_pre, mid)
        self.input: NormChange | None = None
        self.hidden: FeedForwardChange | None = None
        feed_forward = anatomy.feed_forward
        if feed_forward is not None and not anatomy.parallel:
            self.input = norm_change(anatomy.feed_forward_input, mid)
            norms = [norm for norm in (self.branch, self.residual, self.input) if norm is not None]
            self.hidden = FeedForwardChange(
                feed_forward,
                norms,
                read.to(attention_out.dtype),
                self.input or self.residual,
                dtype,
                columns,
                folds,
                pairs,
            )
        self.feed_forward_branch: NormChange | None = None
        self.feed_forward_residual: NormChange | None = None
        branch, residual = anatomy.feed_forward_branch, anatomy.feed_forward_residual
        if feed_forward is not None and (branch or residual):
            added = feed_forward(read) if self.hidden is None else self.hidden.output()
            if self.hidden is not None:
                self.feed_forward_branch = norm_change(branch, added)
            added = added if branch is None else branch(added)
            self.feed_forward_residual = norm_change(residual, mid + added * self.multiplier)
        self.final = norm_change(final, resid_post)
        compared = resid_post if final is None else final(resid_post)
        self.size = torch.linalg.vector_norm(compared, dim=-1)
        self.direction = compared / self.size.clamp_min(torch.finfo(dtype).tiny)[:, None]

    def to_first(self, rows: slice, change: Float[Tensor, "key row d_model"], folds: bool) -> FirstChange:
        """From the attention's output to the first matrices.

        Args:
            rows: which rows.
            change: of the attention's output; times the residual multiplier where no norm sits on the branch.
            folds: whether the norms' linear parts are folded with the first matrices.
        """
        scale: Tensor | float = 1.0
        factors: list[Tensor] = []
        mid = change
        for norm in (self.branch, self.residual, self.input):
            if norm is None:
                continue
            changed = norm.change(rows, change)
            scale, factors = changed.inverse * scale, [factor * changed.inverse for factor in factors]
            factors.append(changed.inverse_change)
            if norm is self.input and folds:
                break
            change = changed.output()
            if norm is self.branch:
                change, scale = change * self.multiplier, scale * self.multiplier
                factors = [factor * self.multiplier for factor in factors]
            if norm is not self.input:
                mid = change = change.to(self.direction.dtype)
        return FirstChange(mid, change, scale, factors if folds else [])

    def to_end(
        self,
        rows: slice,
        mid: Float[Tensor, "key row d_model"],
        added: Float[Tensor, "key row d_model"] | None,
    ) -> Float[Tensor, "key row d_model"]:
        """From the feed-forward's output to what is compared.

        Args:
            rows: which rows.
            mid: the change in the middle of the block, the feed-forward's in it where `added` is None.
            added: the change of the feed-forward's output where a norm follows it.
        """
        if added is not None and self.feed_forward_branch is not None:
            mid = mid + self.feed_forward_branch.change(rows, added).output() * self.multiplier
        for norm in (self.feed_forward_residual, self.final):
            if norm is not None:
                mid = norm.change(rows, mid).output()
        return mid

    def distance(
        self, rows: slice, change: Float[Tensor, "key row d_model"], metric: str
    ) -> Float[Tensor, "key row"]:
        """How far a change moves the clean vectors."""
        if metric == "euclidean":
            return torch.linalg.vector_norm(change, dim=-1)
        direction, size = self.direction[rows], self.size[rows]
        along = (change * direction).sum(-1, keepdim=True)
        # Not the difference of two squares: where a vector is stretched, nothing would be left of the rest.
        across = torch.addcmul(change, direction, along, value=-1).square_().sum(-1)
        near = along[..., 0] + size
        far = torch.addcmul(across, near, near).sqrt_()
        # 1 - cos = sin² / (1 + cos), which keeps its digits; past a right angle 1 - cos has them itself.
        angle = torch.where(near >= 0, across / (far * (far + near)), 1 - near / far)
        # A zero vector has cosine 0 with any other.
        return torch.where(far == 0, (size != 0).to(angle.dtype), angle)
