"""A block's clean rows, and the effect of changes on its norms and its output.

Let C be the centring (the identity for RMSNorm), s the scale at x and s' that at x + c. A norm maps
a change c of its input to

    N(x + c) - N(x) = γ ⊙ (C c / s' + n (s / s' - 1)),   n = C x / s.

Small changes are accurate, because s / s' - 1 is computed from s'² - s² = (2 s n · C c + ‖C c‖²) / d_model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._algebra.feed_forward_change import Neurons, RowSlices, neurons_of
from lens_mix._blocks.states import BlockStates
from lens_mix._model.anatomy import Norm, through

# A change of a norm's input: C c, 1/s' and s/s' - 1.
_NormChanged = tuple[
    Float[Tensor, "key prompt row d_model"],
    Float[Tensor, "key prompt row 1"],
    Float[Tensor, "key prompt row 1"],
]


class _NormChange:
    """The effect of changes on a norm.

    Args:
        norm: The norm.
        clean: Its input x in the clean pass.

    Attributes:
        norm: The norm.
        clean: n, the centered input divided by its scale.
    """

    def __init__(self, norm: Norm, clean: Float[Tensor, "prompt row d_model"]) -> None:
        self.norm = norm
        self._weight = None if norm.weight is None else norm.weight.to(clean.dtype)
        centered = self._centre(clean)
        self._square = centered.square().mean(-1, keepdim=True) + norm.eps
        self._size = self._square.sqrt()
        self.clean: Float[Tensor, "prompt row d_model"] = centered / self._size

    def sizes(self, rows: RowSlices, change: Float[Tensor, "key prompt row d_model"]) -> _NormChanged:
        """Return C c, 1/s' and s/s' - 1 for changes of some rows' inputs."""
        centered, size = self._centre(change), self._size[rows]
        square_change = torch.linalg.vecdot(centered, self.clean[rows])[..., None].mul_(2 * size)
        square_change += torch.linalg.vector_norm(centered, dim=-1, keepdim=True) ** 2
        square_change /= centered.shape[-1]
        # If a change removes the whole input, eps is left. Without eps, rounding could make this negative.
        smallest = max(self.norm.eps, torch.finfo(square_change.dtype).tiny)
        changed = (self._square[rows] + square_change).clamp_min_(smallest).sqrt_()
        # The formula s/s' - 1 = -(s'² - s²) / (s' (s + s')) subtracts no almost equal numbers.
        factor = square_change.neg_().div_((size + changed).mul_(changed))
        return centered, changed.reciprocal_(), factor

    def output(self, rows: RowSlices, changed: _NormChanged) -> Float[Tensor, "key prompt row d_model"]:
        """Return the change of some rows' outputs."""
        centered, inverse, factor = changed
        out = torch.addcmul(centered * inverse, self.clean[rows], factor)
        return out if self._weight is None else out.mul_(self._weight)

    def _centre(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return x if self.norm.kind == "rms" else x - x.mean(-1, keepdim=True)


class CleanBlock:
    """The states of a block's clean rows that changes need.

    Args:
        states: The states; the pre-activations have the dtype of `attention_out`.
        resid_post: The block's output.
        final: The model's final norm, if the change after it is requested; None otherwise.
        widths: The numbers of neurons that are computed at once.

    Attributes:
        multiplier: The residual multiplier.
        neurons: The clean hidden layer; empty if no change reaches the feed-forward.
        added: The norm on the feed-forward's branch; None without it.
        direction: The clean output, scaled to length 1.
    """

    def __init__(
        self,
        states: BlockStates,
        resid_post: Float[Tensor, "prompt row d_model"],
        final: Norm | None,
        widths: Sequence[int],
    ) -> None:
        anatomy, attention_out = states.anatomy, states.attention_out
        self.multiplier = anatomy.residual_multiplier
        branch, residual = anatomy.attention_branch, anatomy.attention_residual
        feed_forward = anatomy.feed_forward
        # The feed-forward of a parallel block reads the block's input, which does not change.
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
            # This is the norm whose output W_in reads; None if W_in reads the residual stream itself.
            last = self._input or on_residual
            inputs = [x.to(attention_out.dtype) for x in (inputs if last else [*inputs, states.read])]
            shift, dtype = last.norm.bias if last else None, resid_post.dtype
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
        self.direction = compared / self._size.clamp_min(torch.finfo(compared.dtype).tiny)[..., None]

    def to_pre_activations(
        self, rows: RowSlices, change: Float[Tensor, "key prompt row d_model"]
    ) -> tuple[Float[Tensor, "key prompt row d_model"], list[Float[Tensor, "#key #prompt #row 1"]]]:
        """Return the change of mid, and the factors of each term in the change of the pre-activations.

        The terms are the given change and the clean output of each norm. The given change includes the
        residual multiplier if there is no norm on the branch.
        """
        factors = [change.new_ones((1, 1, 1, 1))]
        for norm in self._norms:
            changed = norm.sizes(rows, change)
            factors = [*(factor * changed[1] for factor in factors), changed[2]]
            if norm is self._input:
                break
            change = norm.output(rows, changed)
            if norm is self._branch:
                change, factors = change * self.multiplier, [factor * self.multiplier for factor in factors]
            # The dtype is wide up to here, because a norm on the branch needs it (`value_zeroing._dtypes`).
            change = change.to(self.direction.dtype)
        return change, factors

    def distance(
        self,
        rows: RowSlices,
        mid: Float[Tensor, "key prompt row d_model"],
        added: Float[Tensor, "key prompt row d_model"],
        metric: str,
    ) -> Float[Tensor, "key prompt row"]:
        """Return the distance of changed outputs from the clean ones.

        Args:
            rows: The clean rows.
            mid: The change of mid; without a norm on the feed-forward's branch, plus that of its output.
            added: The change of the feed-forward's output, if there is a norm on its branch.
            metric: "cosine" or "euclidean".
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
        along = torch.linalg.vecdot(mid, direction)
        # A difference of two squares would lose all digits if the change is along the vector.
        rest = torch.addcmul(mid, direction, along[..., None], value=-1)
        across, near = torch.linalg.vector_norm(rest, dim=-1).square_(), along + size
        far = torch.addcmul(across, near, near).sqrt_()
        # 1 - cos = sin² / (1 + cos) is accurate for small angles, and 1 - cos for obtuse ones.
        angle = torch.where(near >= 0, across / (far * (far + near)), 1 - near / far)
        # The cosine of a zero vector with any other is defined as 0.
        return torch.where(far == 0, (size != 0).to(angle.dtype), angle)
