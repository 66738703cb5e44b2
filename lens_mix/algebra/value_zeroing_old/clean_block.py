"""What zeroed values change in a block, exactly: changes are carried through its parts, never differences.

The zeroed copy of a block differs from the clean one by change_ij = -Σ_h a_ijh u_jh in the attention's output
(u_jh = v_jh W_O^h). Subtracting two outputs would leave float32 with few digits where the change is small, so
each part here takes a change of its input to the change of its output:

    norm            N(x + c) - N(x) = γ ⊙ (C c / s' + C x (1/s' - 1/s)), C centring, s' the size of C (x + c)
    first matrix    linear, so W_in is applied once per key and head, and once per query to C x; a pair
                    costs a sum over heads: p_ij = p_i + Σ_k α_ij^k B_i^k + β_ij Σ_h a_ijh Q_jh
    activation      act(p_ij) - act(p_i)
    second matrix   applied to each pair's change: the one large product that is left
    cosine          from the change's shares along and across the clean vector

Rows are positions of all prompts in one line; the pairs of a slab are some keys by a window of rows, or each
has its own row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.algebra.value_zeroing_old.first_matrix import FirstMatrix
from lens_mix.algebra.value_zeroing_old.neurons import CleanInput, Neurons, clean_neurons, through_norms
from lens_mix.algebra.value_zeroing_old.norms import ChangedNorm, NormChange
from lens_mix.algebra.workspace import Rows, Workspace, of_rows
from lens_mix.lens.anatomy import BlockAnatomy, FeedForward, Norm
from lens_mix.lens.proof.sketch import sketch, sketched_error
from lens_mix.lens.replay import relative_error

# Below this share of a change, what lies across the clean vector has lost digits as a difference of squares.
_ACROSS = 0.25


@dataclasses.dataclass(frozen=True)
class MidChange:
    """What makes a slab's change of the pre-activations of its change in the middle of the block.

    Attributes:
        beta: factor of Σ_h a_ijh Q_jh; None for 1.
        alphas: factors of the clean block's `bases`, in order.
    """

    beta: Float[Tensor, "*pair"] | None
    alphas: list[Float[Tensor, "*pair"]]


class CleanBlock:
    """A block's clean vectors, and how changes go through it.

    Args:
        anatomy: the block, proven.
        resid_pre: what enters the block.
        attention_out: the attention's output before any norm, float64 where a norm sits on the branch: that
            norm divides by next to nothing where a query loses its only key.
        resid_post: what left the block.
        final: the model's final norm, where the change after it is wanted.
        recorded: the model's own pre-activations, per first matrix; none, and they are computed.
        columns: neurons that are done at once, at most.
        room: what the block's own numbers lie in as long as no other block uses it.
    """

    def __init__(
        self,
        anatomy: BlockAnatomy,
        resid_pre: Float[Tensor, "row d_model"],
        attention_out: Float[Tensor, "row d_model"],
        resid_post: Float[Tensor, "row d_model"],
        final: Norm | None,
        recorded: Sequence[Float[Tensor, "row d_mlp"]],
        columns: int,
        room: Workspace,
    ) -> None:
        self.anatomy, self.dtype = anatomy, resid_pre.dtype
        multiplier = anatomy.residual_multiplier
        self.branch = _norm_change(anatomy.attention_branch, attention_out)
        branch = (
            attention_out if anatomy.attention_branch is None else anatomy.attention_branch(attention_out)
        )
        total = resid_pre + (branch * multiplier).to(self.dtype)
        self.residual = _norm_change(anatomy.attention_residual, total)
        self.mid = total if anatomy.attention_residual is None else anatomy.attention_residual(total)
        # Whether what the parts give is only sketched.
        self._sketched = False
        out = self.mid
        self.first: FirstMatrix | None = None
        self.neurons: list[Neurons] = []
        self.input: NormChange | None = None
        self.feed_forward_branch: NormChange | None = None
        self.feed_forward_residual: NormChange | None = None
        if anatomy.feed_forward is not None:
            out = self._feed_forward(
                anatomy.feed_forward, resid_pre, attention_out.dtype, recorded, columns, room
            )
        self._rebuilt = out
        clean = resid_post.to(self.dtype)
        self.final = _norm_change(final, clean)
        compared = clean if final is None else final(clean)
        self.size = torch.linalg.vector_norm(compared, dim=-1)
        self.direction = compared / self.size.clamp_min(torch.finfo(self.dtype).tiny)[:, None]

    def _feed_forward(
        self,
        feed_forward: FeedForward,
        resid_pre: Float[Tensor, "row d_model"],
        mixed: torch.dtype,
        recorded: Sequence[Float[Tensor, "row d_mlp"]],
        columns: int,
        room: Workspace,
    ) -> Tensor:
        anatomy = self.anatomy
        read = anatomy.feed_forward_in(resid_pre, self.mid)
        if anatomy.parallel:
            # It reads the block's input, which nothing has changed.
            added = feed_forward(read)
        else:
            first = FirstMatrix(feed_forward, mixed)
            self.first = first
            self.input = _norm_change(anatomy.feed_forward_input, self.mid)
            whole = self.branch is None or (self.residual or self.input) is not None
            given = CleanInput(first, self.norms, whole, read.to(mixed), recorded)
            self.neurons = clean_neurons(given, columns, self.dtype, room)
            self.second = feed_forward.W_out.to(self.dtype)
            # No change sees what the second matrix makes of the clean block, unless a norm follows.
            self._sketched = anatomy.feed_forward_branch is None and anatomy.feed_forward_residual is None
            if self._sketched:
                added = self._second_of_clean(self.second_sketch, sketch)
                return sketch(self.mid) + added * anatomy.residual_multiplier
            added = self._second_of_clean(self.second, lambda bias: bias)
            self.feed_forward_branch = _norm_change(anatomy.feed_forward_branch, added)
        out = added if anatomy.feed_forward_branch is None else anatomy.feed_forward_branch(added)
        total = self.mid + out * anatomy.residual_multiplier
        self.feed_forward_residual = _norm_change(anatomy.feed_forward_residual, total)
        return total if anatomy.feed_forward_residual is None else anatomy.feed_forward_residual(total)

    def _second_of_clean(self, matrix: Tensor, own: Callable[[Tensor], Tensor]) -> Tensor:
        """The clean hidden layer through a matrix, the biases through `own` and it."""
        feed_forward, rows = self.anatomy.feed_forward, len(self.mid)
        found = matrix.new_zeros((rows, *matrix.shape[1:]))
        for part in self.neurons:
            found -= part.minus_hidden @ matrix[part.columns]
        if feed_forward is not None and feed_forward.b_hidden is not None:
            found += feed_forward.b_hidden.to(self.dtype) @ matrix
        if feed_forward is not None and feed_forward.b_out is not None:
            found += own(feed_forward.b_out.to(self.dtype))
        return found

    @functools.cached_property
    def second_sketch(self) -> Float[Tensor, "d_mlp vector"]:
        """The second matrix, sketched."""
        return sketch(self.second)

    def misses(self, expected: Float[Tensor, "row d_model"], real: Bool[Tensor, " row"]) -> float:
        """How far what the parts give is from the block's output at most, relative to a row's size.

        Args:
            expected: the output.
            real: rows that count.
        """
        return (sketched_error if self._sketched else relative_error)(self._rebuilt, expected, real)

    @property
    def norms(self) -> list[NormChange]:
        """The norms between the attention's output and the first matrix, in order."""
        found = (self.branch, self.residual, self.input)
        return [norm for norm in found if norm is not None]

    @property
    def free_axes(self) -> bool:
        """Whether nothing after the attention's output sees single axes: no norm, its first matrix apart."""
        norms = (self.branch, self.residual, self.feed_forward_branch, self.feed_forward_residual, self.final)
        return self.first is not None and all(norm is None for norm in norms)

    def through_norms(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The linear parts of the norms on the way to the first matrix."""
        return through_norms(self.norms, x)

    @property
    def lead(self) -> NormChange | None:
        """The first norm, where it reads the residual stream: what enters it is a sum over heads."""
        return None if self.branch is not None else self.residual or self.input

    # ------------------------------------------------------------- changes, slab by slab

    def mid_change(
        self,
        rows: Rows,
        change: Float[Tensor, "*pair d_model"],
        out: Float[Tensor, "*pair d_model"],
        drift: Float[Tensor, "*pair"] | None,
        room: Workspace,
    ) -> MidChange:
        """From the attention's output to the middle of the block, and how the first matrix will see it.

        Args:
            rows: which queries.
            change: of the attention's output, through the linear part of the `lead` norm and over its new
                size where that norm lies before the middle and `drift` is given; may be `out`.
            out: where the change in the middle of the block goes.
            drift: 1/s' - 1/s of the `lead` norm; None where it is still to be found.
            room: for what lies between.
        """
        beta: Tensor | None = None
        alphas: list[Tensor] = [] if drift is None else [drift]
        if self.branch is not None:
            changed = self.branch.change(rows, change, room)
            multiplier = self.anatomy.residual_multiplier
            beta, alphas = changed.inverse * multiplier, [changed.drift * multiplier]
            change = changed.vector(change).mul_(multiplier)
        if change is not out:
            out.copy_(change)
        if self.residual is not None:
            if drift is not None:
                out.addcmul_(of_rows(self.residual.base, rows), drift[..., None])
            else:
                changed = self.residual.change(rows, out, room)
                beta, alphas = _rescaled(beta, alphas, changed)
                changed.vector(out)
        if self.input is not None and (drift is None or self.residual is not None):
            beta, alphas = _rescaled(beta, alphas, self.input.change(rows, out, room))
        return MidChange(beta, alphas)

    def hidden_change(
        self,
        rows: Rows,
        neurons: Neurons,
        alphas: Sequence[Float[Tensor, "*tile key row 1"]],
        factors: Float[Tensor, "*tile key row rank"],
        values: Sequence[Float[Tensor, "*tile key rank column"]],
        into: Float[Tensor, "*tile key row column"],
        room: Workspace,
    ) -> None:
        """act(p_ij) - act(p_i) for some neurons.

        Args:
            rows: which queries.
            neurons: which neurons.
            alphas: factors of the bases.
            factors, values: Σ over rank of their products is what the zeroed values take from the
                pre-activations, per matrix.
            into: where it goes.
            room: for what lies between.
        """
        if self.first is None:
            raise RuntimeError("hidden_change was asked of a block without a feed-forward that changes")
        found = []
        for matrix, (clean, value) in enumerate(zip(neurons.pre, values, strict=True)):
            # The first pre-activations are made where their activations go: one buffer less in the caches.
            in_place = matrix == 0 and clean.dtype == into.dtype
            pre = into if in_place else room.like(f"pre {matrix}", clean, into.shape, clean.dtype)
            bases = [of_rows(base[matrix], rows) for base in neurons.bases]
            # Of a SiLU layer the changes alone.
            start = of_rows(clean, rows) if neurons.silu is None else None
            _add_bases(start, bases, alphas, pre)
            product(factors, value, pre, add=True)
            if pre.dtype != into.dtype:
                pre = room.like(f"narrow {matrix}", pre, pre.shape, into.dtype).copy_(pre)
            found.append(pre)
        if neurons.silu is not None:
            neurons.silu.change(rows, found[0], found[1], into, room)
            return
        self.first.hidden(found, of_rows(neurons.minus_hidden, rows), into, room)

    def post_change(
        self,
        rows: Rows,
        mid: Float[Tensor, "*pair d_model"],
        added: Float[Tensor, "*pair d_model"] | None,
        room: Workspace,
    ) -> None:
        """From the middle of the block to what is compared, in `mid`.

        Args:
            rows: which queries.
            mid: the change in the middle of the block, the feed-forward's share in it where `added` is None.
            added: the change of the feed-forward's output, where a norm follows it; overwritten.
            room: for what lies between.
        """
        if added is not None and self.feed_forward_branch is not None:
            added = self.feed_forward_branch.change(rows, added, room).vector(added)
            mid.add_(added, alpha=self.anatomy.residual_multiplier)
        for norm in (self.feed_forward_residual, self.final):
            if norm is not None:
                norm.change(rows, mid, room).vector(mid)

    def along_and_across(
        self,
        rows: Sequence[Rows],
        mid: Float[Tensor, "all d_model"],
        changes: Sequence[Float[Tensor, "*pair d_model"]],
        room: Workspace,
    ) -> tuple[Float[Tensor, " all"], Float[Tensor, " all"]]:
        """Changes' shares along the clean vectors, and the squares of the rest; in one line.

        Args:
            rows: which queries, per part.
            mid: the changes, in one line.
            changes: the same in parts.
            room: for what lies between.
        """
        directions = [room.rows(f"direction {n}", self.direction, some) for n, some in enumerate(rows)]
        parts = list(zip(changes, directions, strict=True))
        if _numbers_at_hand(self.direction):
            along = torch.cat([_along(*part).flatten() for part in parts])
            square = torch.linalg.vector_norm(mid, dim=-1).square_()
            across = torch.addcmul(square, along, along, value=-1)
            if not bool((across < _ACROSS * square).any()):
                return along, across
        found = [_apart(*part, room) for part in parts]
        return torch.cat([some for some, _ in found]), torch.cat([rest for _, rest in found])

    def cosine_distance(
        self, along: Float[Tensor, "*pair"], across: Float[Tensor, "*pair"], size: Float[Tensor, "*pair"]
    ) -> Float[Tensor, "*pair"]:
        """1 - cos of clean vectors of a size and the changed ones; overwrites `along`."""
        near = along.add_(size)
        far = torch.addcmul(across, near, near).sqrt_()
        # 1 - cos = sin² / (1 + cos), which keeps its digits; past a right angle 1 - cos has them itself.
        angle = torch.where(near >= 0, across / (far * (far + near)), 1 - near / far)
        return torch.where(far == 0, (size != 0).to(angle.dtype), angle)


def _add_bases(
    start: Float[Tensor, "*row column"] | None,
    bases: Sequence[Float[Tensor, "*row column"]],
    alphas: Sequence[Float[Tensor, "*tile key row 1"]],
    out: Float[Tensor, "*tile key row column"],
) -> None:
    """A start (None: 0) and Σ bases · alphas, as few times through `out` as there are bases."""
    if not bases:
        out.zero_() if start is None else out.copy_(start)
        return
    if start is None:
        torch.mul(bases[0], alphas[0], out=out)
    else:
        torch.addcmul(start, bases[0], alphas[0], out=out)
    for base, alpha in zip(bases[1:], alphas[1:], strict=True):
        out.addcmul_(base, alpha)


def product(
    factors: Float[Tensor, "*tile key row rank"],
    vectors: Float[Tensor, "*tile key rank width"],
    out: Float[Tensor, "*tile key row width"],
    add: bool,
) -> None:
    """Σ over rank of factors · vectors, into `out` or added to it."""
    if out.ndim == 4 and vectors.stride(0) == vectors.shape[1] * vectors.stride(1):
        # No source lies between two tiles.
        factors, vectors, out = factors.flatten(0, 1), vectors.flatten(0, 1), out.flatten(0, 1)
    if out.ndim == 3:
        torch.baddbmm(out, factors, vectors, beta=float(add), out=out)
        return
    # Copies of the vectors would cost more than calls.
    for parts in zip(factors, vectors, out, strict=True):
        product(*parts, add)


def _numbers_at_hand(x: Tensor) -> bool:
    """Whether looking at numbers costs nothing: a GPU would have to be waited for."""
    return x.device.type == "cpu"


def _along(change: Float[Tensor, "*pair d_model"], direction: Float[Tensor, "row d_model"]) -> Tensor:
    """Scalar products, on a CPU: one batched product reads what is changed once."""
    if change.ndim != 3:
        return torch.linalg.vecdot(change, direction)
    return torch.bmm(direction[:, None], change.permute(1, 2, 0))[:, 0].T


def _apart(
    change: Float[Tensor, "*pair d_model"], direction: Float[Tensor, "row d_model"], room: Workspace
) -> tuple[Float[Tensor, " all"], Float[Tensor, " all"]]:
    """Shares along, and the squares of what is left without them: no difference of squares."""
    product = room.like("product", change, change.shape, change.dtype)
    along = torch.mul(change, direction, out=product).sum(-1)
    torch.addcmul(change, direction, along[..., None], value=-1, out=product)
    return along.flatten(), product.square_().sum(-1).flatten()


def _norm_change(norm: Norm | None, clean: Float[Tensor, "row d_model"]) -> NormChange | None:
    return None if norm is None else NormChange(norm, clean)


def _rescaled(beta: Tensor | None, alphas: list[Tensor], changed: ChangedNorm) -> tuple[Tensor, list[Tensor]]:
    """The factors of what goes through one more norm."""
    inverse = changed.inverse
    beta = inverse if beta is None else beta * inverse
    return beta, [*(alpha * inverse for alpha in alphas), changed.drift]
