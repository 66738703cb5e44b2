"""A block's clean rows, and how changes go through its norms, up to the distance that they make.

With C the centring (of LayerNorm; RMSNorm has none), s the size of C x and s' that of C (x + c), a norm takes
a change c of its input to

    N(x + c) - N(x) = γ ⊙ (C c / s' + n (s / s' - 1)),   n = C x / s.

A small change keeps its digits: s / s' - 1 comes from s'² - s² = (2 s n · C c + ‖C c‖²) / d_model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.feed_forward_change import Neurons, neurons_of
from lens_mix.algebra.head_vectors import through
from lens_mix.lens.anatomy import BlockAnatomy, Norm
from lens_mix.lens.states import BlockStates

# C c, 1/s' and s/s' - 1.
_Changed = tuple[Float[Tensor, "key row d_model"], Float[Tensor, "key row 1"], Float[Tensor, "key row 1"]]


class _NormChange:
    """A norm at the clean vectors x that it reads; `clean` is n."""

    def __init__(self, norm: Norm, clean: Float[Tensor, "row d_model"]) -> None:
        self.norm = norm
        self._weight = None if norm.weight is None else norm.weight.to(clean.dtype)
        centred = self._centre(clean)
        self._square = centred.square().mean(-1, keepdim=True) + norm.eps
        self._size = self._square.sqrt()
        self.clean: Float[Tensor, "row d_model"] = centred / self._size

    def sizes(self, rows: slice, change: Float[Tensor, "key row d_model"]) -> _Changed:
        """What changes of some rows' inputs do to the sizes."""
        centred, size = self._centre(change), self._size[rows]
        square_change = _scalar_products(centred, self.clean[rows])[..., None].mul_(2 * size)
        square_change += torch.linalg.vector_norm(centred, dim=-1, keepdim=True) ** 2
        square_change /= centred.shape[-1]
        # Where all that was read is taken away, eps is left; without eps, rounding could leave less than 0.
        smallest = max(self.norm.eps, torch.finfo(square_change.dtype).tiny)
        changed = (self._square[rows] + square_change).clamp_min_(smallest).sqrt_()
        # s/s' - 1 = -(s'² - s²) / (s' (s + s'))
        factor = square_change.neg_().div_((size + changed).mul_(changed))
        return centred, changed.reciprocal_(), factor

    def output(self, rows: slice, changed: _Changed) -> Float[Tensor, "key row d_model"]:
        """The change of some rows' outputs."""
        centred, inverse, factor = changed
        out = torch.addcmul(centred * inverse, self.clean[rows], factor)
        return out if self._weight is None else out.mul_(self._weight)

    def _centre(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return x if self.norm.kind == "rms" else x - x.mean(-1, keepdim=True)


def _scalar_products(
    change: Float[Tensor, "key row d_model"], clean: Float[Tensor, "row d_model"]
) -> Float[Tensor, "key row"]:
    """Scalar products with the clean rows, by one batched product: it reads what is changed once."""
    return torch.bmm(clean[:, None], change.permute(1, 2, 0))[:, 0].T


class CleanBlock:
    """What a block computed for its clean rows, as far as changes need it; neurons in parts of `widths`.

    `attention_out` is taken before any norm, and the pre-activations have its dtype; `final` is the model's
    final norm, where the change after it is wanted.
    """

    def __init__(
        self,
        anatomy: BlockAnatomy,
        resid_pre: Float[Tensor, "row d_model"],
        attention_out: Float[Tensor, "row d_model"],
        resid_post: Float[Tensor, "row d_model"],
        final: Norm | None,
        widths: Sequence[int],
    ) -> None:
        self.multiplier = anatomy.residual_multiplier
        branch, residual = anatomy.attention_branch, anatomy.attention_residual
        feed_forward, states = anatomy.feed_forward, BlockStates(anatomy, resid_pre, attention_out)
        # That of a parallel block reads what enters the block, where nothing changes.
        reached = None if anatomy.parallel else feed_forward
        reads = None if reached is None else anatomy.feed_forward_input
        self._branch = _NormChange(branch, attention_out) if branch else None
        on_residual = _NormChange(residual, states.attention_sum) if residual else None
        self._input = _NormChange(reads, states.mid) if reads else None
        self._norms = [norm for norm in (self._branch, on_residual, self._input) if norm is not None]
        self.neurons: Sequence[Neurons] = ()
        if reached is not None:
            chains = (tuple(later.norm for later in self._norms[place:]) for place in range(len(self._norms)))
            inputs = [through(chain, norm.clean) for chain, norm in zip(chains, self._norms, strict=True)]
            # The norm whose output W_in reads, never the branch's; None where W_in reads the residual stream.
            last = self._input or on_residual
            inputs = [x.to(attention_out.dtype) for x in (inputs if last else [*inputs, states.read])]
            shift, dtype = last.norm.bias if last else None, resid_pre.dtype
            self.neurons = neurons_of(reached, inputs, shift, dtype, widths)
        self.added = self._total = None
        branch, residual = anatomy.feed_forward_branch, anatomy.feed_forward_residual
        if feed_forward is not None and branch and self.neurons:
            self.added = _NormChange(branch, states.feed_forward_out)
        if feed_forward is not None and residual:
            self._total = _NormChange(residual, states.feed_forward_sum)
        self._final = _NormChange(final, resid_post) if final else None
        compared = resid_post if final is None else final(resid_post)
        self._size = torch.linalg.vector_norm(compared, dim=-1)
        self.direction = compared / self._size.clamp_min(torch.finfo(compared.dtype).tiny)[:, None]

    def to_pre_activations(
        self, rows: slice, change: Float[Tensor, "key row d_model"]
    ) -> tuple[Float[Tensor, "key row d_model"], list[Float[Tensor, "#key #row 1"]]]:
        """The change of mid, and by which factors the given one and each norm's output reach pre-activations.

        The given change has the residual multiplier in it where no norm sits on the branch.
        """
        factors = [change.new_ones((1, 1, 1))]
        for norm in self._norms:
            changed = norm.sizes(rows, change)
            factors = [*(factor * changed[1] for factor in factors), changed[2]]
            if norm is self._input:
                break
            change = norm.output(rows, changed)
            if norm is self._branch:
                change, factors = change * self.multiplier, [factor * self.multiplier for factor in factors]
            # Wide up to here (`value_zeroing._dtypes`): a norm on the branch is the one that needs it.
            change = change.to(self.direction.dtype)
        return change, factors

    def distance(
        self,
        rows: slice,
        mid: Float[Tensor, "key row d_model"],
        added: Float[Tensor, "key row d_model"],
        metric: str,
    ) -> Float[Tensor, "key row"]:
        """How far outputs move by the changes of mid and of what the feed-forward adds.

        Where no norm stands on the feed-forward's branch, `mid` holds the sum of both.
        """
        if self.added is not None:
            added = self.added.output(rows, self.added.sizes(rows, added))
            mid = torch.add(mid, added, alpha=self.multiplier)
        for norm in (self._total, self._final):
            if norm is not None:
                mid = norm.output(rows, norm.sizes(rows, mid))
        if metric == "euclidean":
            length: Tensor = torch.linalg.vector_norm(mid, dim=-1)
            return length
        direction, size = self.direction[rows], self._size[rows]
        along = _scalar_products(mid, direction)
        # No difference of two squares: where a vector is stretched, nothing would be left of the rest.
        rest = torch.addcmul(mid, direction, along[..., None], value=-1)
        across, near = torch.linalg.vector_norm(rest, dim=-1).square_(), along + size
        far = torch.addcmul(across, near, near).sqrt_()
        # 1 - cos = sin² / (1 + cos) keeps its digits; past a right angle 1 - cos has them itself.
        angle = torch.where(near >= 0, across / (far * (far + near)), 1 - near / far)
        # A zero vector has cosine 0 with any other.
        return torch.where(far == 0, (size != 0).to(angle.dtype), angle)
