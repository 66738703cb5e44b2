"""A block's clean rows, and how changes go through its norms, up to the distance that they make."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.feed_forward_change import FeedForwardChange
from lens_mix.algebra.norm_change import NormChange, norm_change, products
from lens_mix.lens.anatomy import BlockAnatomy, Norm


class CleanBlock:
    """A block's clean rows.

    Args:
        anatomy: the block.
        resid_pre: what enters it.
        attention_out: the attention's output before any norm; the pre-activations have its dtype.
        resid_post: what leaves the block.
        final: the model's final norm, where the change after it is wanted.
        columns: neurons that are done at once, at most.
        folds: whether W_O, the norms' linear parts and the first matrices are one matrix per head.
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
        self.multiplier, self._folds = anatomy.residual_multiplier, folds
        branch, residual, feed_forward = (
            anatomy.attention_branch,
            anatomy.attention_residual,
            anatomy.feed_forward,
        )
        out = attention_out if branch is None else branch(attention_out)
        total = resid_pre + (out * self.multiplier).to(resid_pre.dtype)
        mid = total if residual is None else residual(total)
        read = anatomy.feed_forward_in(resid_pre, mid)
        self._branch, self._residual = norm_change(branch, attention_out), norm_change(residual, total)
        self._input: NormChange | None = None
        self.hidden: FeedForwardChange | None = None
        # In a parallel block the feed-forward reads what enters the block: nothing changes there.
        if feed_forward is not None and not anatomy.parallel:
            self._input = norm_change(anatomy.feed_forward_input, mid)
            read_by, inputs = (self._input or self._residual) if folds else None, []
            for number, norm in enumerate(self._norms if folds else (), 1):
                numerator = norm.linear(norm.clean)
                for later in self._norms[number:]:
                    numerator = later.linear(numerator)
                inputs.append(numerator.to(attention_out.dtype))
            if read_by is None:
                inputs.append(read.to(attention_out.dtype))
            self.hidden = FeedForwardChange(feed_forward, inputs, read_by, resid_pre.dtype, columns, pairs)
        self.added: NormChange | None = None
        self._total: NormChange | None = None
        branch, residual = anatomy.feed_forward_branch, anatomy.feed_forward_residual
        if feed_forward is not None and (branch or residual):
            added = feed_forward(read) if self.hidden is None else self.hidden.output()
            self.added = None if self.hidden is None else norm_change(branch, added)
            added = added if branch is None else branch(added)
            self._total = norm_change(residual, mid + added * self.multiplier)
        self._final = norm_change(final, resid_post)
        compared = resid_post if final is None else final(resid_post)
        self.size = torch.linalg.vector_norm(compared, dim=-1)
        self.direction = compared / self.size.clamp_min(torch.finfo(compared.dtype).tiny)[:, None]

    @property
    def _norms(self) -> list[NormChange]:
        return [norm for norm in (self._branch, self._residual, self._input) if norm is not None]

    def to_first(
        self, rows: slice, change: Float[Tensor, "key row d_model"]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """From a change of the attention's output to that of the residual stream and of what is read there.

        Args:
            rows: which rows.
            change: times the residual multiplier where no norm sits on the branch.

        Returns:
            The change in the middle of the block; that of what the feed-forward reads (unfinished where the
            norms are folded); and where they are, what they multiply the given change and, one by one, their
            numerators by, [key row 1].
        """
        factors, mid = [change.new_ones(1)], change
        for norm in self._norms:
            changed = norm.sizes(rows, change)
            factors = [*(factor * changed[1] for factor in factors), changed[2]]
            if norm is self._input:
                change = change if self._folds else norm.output(rows, changed)
                break
            change = norm.output(rows, changed)
            if norm is self._branch:
                change, factors = change * self.multiplier, [factor * self.multiplier for factor in factors]
            mid = change = change.to(self.direction.dtype)
        return mid, change, factors if self._folds else factors[:1]

    def distance(
        self,
        rows: slice,
        mid: Float[Tensor, "key row d_model"],
        added: Float[Tensor, "key row d_model"] | None,
        metric: str,
    ) -> Float[Tensor, "key row"]:
        """How far the block's outputs move.

        Args:
            rows: which rows.
            mid: the change in the middle of the block, the feed-forward's in it where `added` is None.
            added: the change of the feed-forward's output where a norm follows it.
            metric: "cosine" or "euclidean".
        """
        if added is not None and self.added is not None:
            added = self.added.output(rows, self.added.sizes(rows, added))
            mid = torch.add(mid, added, alpha=self.multiplier)
        for norm in (self._total, self._final):
            if norm is not None:
                mid = norm.output(rows, norm.sizes(rows, mid))
        if metric == "euclidean":
            return torch.linalg.vector_norm(mid, dim=-1)
        direction, size = self.direction[rows], self.size[rows]
        along = products(mid, direction)
        # No difference of two squares: where a vector is stretched, nothing would be left of the rest.
        rest = torch.addcmul(mid, direction, along[..., None], value=-1)
        across, near = torch.linalg.vector_norm(rest, dim=-1).square_(), along + size
        far = torch.addcmul(across, near, near).sqrt_()
        # 1 - cos = sin² / (1 + cos) keeps its digits; past a right angle 1 - cos has them itself.
        angle = torch.where(near >= 0, across / (far * (far + near)), 1 - near / far)
        # A zero vector has cosine 0 with any other.
        return torch.where(far == 0, (size != 0).to(angle.dtype), angle)
