"""A block's clean rows, and how changes go through its norms, up to the distance that they make."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.feed_forward_change import FeedForwardChange
from lens_mix.algebra.head_vectors import through
from lens_mix.algebra.norm_change import norm_change, products
from lens_mix.lens.anatomy import BlockAnatomy, Norm


class CleanBlock:
    """A block's clean rows, for so many `pairs` of changes, done so many `columns` of neurons at a time.

    `attention_out` is taken before any norm, and the pre-activations have its dtype; `final` is the model's
    final norm, where the change after it is wanted; `folds` tells whether W_O, the norms' linear parts and
    the first matrices are one matrix per head.
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
        self._branch, self._input = norm_change(branch, attention_out), None
        norms = [self._branch, norm_change(residual, total)]
        self.hidden: FeedForwardChange | None = None
        # In a parallel block the feed-forward reads what enters the block: nothing changes there.
        if feed_forward is not None and not anatomy.parallel:
            self._input = norm_change(anatomy.feed_forward_input, mid)
            norms.append(self._input)
            folded = [norm for norm in norms if norm is not None] if folds else []
            chains = (tuple(later.norm for later in folded[place:]) for place in range(len(folded)))
            inputs = [through(chain, norm.clean) for chain, norm in zip(chains, folded, strict=True)]
            read_by = norms[-1] or norms[-2] if folds else None
            inputs = [x.to(attention_out.dtype) for x in (inputs if read_by else [*inputs, read])]
            self.hidden = FeedForwardChange(feed_forward, inputs, read_by, resid_pre.dtype, columns, pairs)
        self._norms = [norm for norm in norms if norm is not None]
        self.added = self._total = None
        branch, residual = anatomy.feed_forward_branch, anatomy.feed_forward_residual
        if feed_forward is not None and (branch or residual):
            added = feed_forward(read)
            self.added = None if self.hidden is None else norm_change(branch, added)
            added = added if branch is None else branch(added)
            self._total = norm_change(residual, mid + added * self.multiplier)
        self._final = norm_change(final, resid_post)
        compared = resid_post if final is None else final(resid_post)
        self._size = torch.linalg.vector_norm(compared, dim=-1)
        self.direction = compared / self._size.clamp_min(torch.finfo(compared.dtype).tiny)[:, None]

    def to_first(
        self, rows: slice, change: Float[Tensor, "key row d_model"]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """From a change of the attention's output to that of mid, and of what the feed-forward reads there.

        The given change has the residual multiplier in it where no norm sits on the branch. Where norms are
        folded, the second change is unfinished, and the third value is what they multiply the given change
        and, one by one, their numerators by, [key row 1].
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
        added: Float[Tensor, "key row d_model"],
        metric: str,
    ) -> Float[Tensor, "key row"]:
        """How far the outputs move; `mid` has the feed-forward's change in it where no norm takes `added`."""
        if self.added is not None:
            added = self.added.output(rows, self.added.sizes(rows, added))
            mid = torch.add(mid, added, alpha=self.multiplier)
        for norm in (self._total, self._final):
            if norm is not None:
                mid = norm.output(rows, norm.sizes(rows, mid))
        if metric == "euclidean":
            return torch.linalg.vector_norm(mid, dim=-1)
        direction, size = self.direction[rows], self._size[rows]
        along = products(mid, direction)
        # No difference of two squares: where a vector is stretched, nothing would be left of the rest.
        rest = torch.addcmul(mid, direction, along[..., None], value=-1)
        across, near = torch.linalg.vector_norm(rest, dim=-1).square_(), along + size
        far = torch.addcmul(across, near, near).sqrt_()
        # 1 - cos = sin² / (1 + cos) keeps its digits; past a right angle 1 - cos has them itself.
        angle = torch.where(near >= 0, across / (far * (far + near)), 1 - near / far)
        # A zero vector has cosine 0 with any other.
        return torch.where(far == 0, (size != 0).to(angle.dtype), angle)
