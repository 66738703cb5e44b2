"""The states of a block in the clean pass: each is computed once, for all methods of a run.

The names follow the equations of `lens_mix._model.anatomy`. Methods read states from here only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._model.anatomy import BlockAnatomy, FeedForward, LinearNorm, Norm, ValuePath, constant
from lens_mix._passes.cross import find_name_of_cross
from lens_mix.hooks.mixing import mix
from lens_mix.hooks.recording import record

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block

T = TypeVar("T")


class BlockStates:
    """The states of one block between its input and its output, and its norms linearised at them.

    Args:
        anatomy: The block's components and their order.
        resid_pre: The block's input; the states have its dtype.
        attention_out: The attention's output, before any norm; its dtype may be wider.

    Attributes:
        anatomy, resid_pre: As given.
        cross_out: The output of a decoder's cross-attention, before any norm; None without cross-attention.
    """

    cross_out: Float[Tensor, "*batch d_model"] | None = None

    def __init__(
        self,
        anatomy: BlockAnatomy,
        resid_pre: Float[Tensor, "*batch d_model"],
        attention_out: Float[Tensor, "*batch d_model"],
    ) -> None:
        self.anatomy, self.resid_pre, self._attention_out = anatomy, resid_pre, attention_out

    @property
    def attention_out(self) -> Float[Tensor, "*batch d_model"]:
        """The attention's output, with b_O, before any norm."""
        return self._attention_out

    @constant
    def attention_sum(self) -> Float[Tensor, "*batch d_model"]:
        """Return the sum of the residual stream and the attention branch, before any norm on it."""
        return self.anatomy.attention_sum(self.resid_pre, self.attention_out)

    @constant
    def mid(self) -> Float[Tensor, "*batch d_model"]:
        """Return the residual stream after the attention branch, before any cross-attention."""
        norm = self.anatomy.attention_residual
        return self.attention_sum if norm is None else norm(self.attention_sum)

    @constant
    def cross_sum(self) -> Float[Tensor, "*batch d_model"]:
        """Return `mid` plus the cross-attention, before any norm on it; `mid` without cross-attention."""
        return self.mid if self.cross_out is None else self.mid + self.cross_out

    @constant
    def cross_mid(self) -> Float[Tensor, "*batch d_model"]:
        """Return the residual stream that the feed-forward's branch is added to."""
        norm = self.anatomy.cross_residual
        return self.cross_sum if norm is None else norm(self.cross_sum)

    @constant
    def read(self) -> Float[Tensor, "*batch d_model"]:
        """Return the feed-forward's input, after its norm."""
        return self.anatomy.feed_forward_in(self.resid_pre, self.cross_mid)

    @constant
    def pre_activations(self) -> list[Float[Tensor, "*batch d_mlp"]]:
        """Return `read` times each input matrix of the feed-forward (the gate's first), with biases."""
        return self._feed_forward.pre_activations(self.read)

    @constant
    def feed_forward_out(self) -> Float[Tensor, "*batch d_model"]:
        """Return the feed-forward's output, before any norm."""
        return self._feed_forward.output(self.pre_activations)

    @constant
    def feed_forward_added(self) -> Float[Tensor, "*batch d_model"]:
        """Return the vector that the feed-forward's branch adds to the residual stream."""
        return self.anatomy.feed_forward_added(self.feed_forward_out)

    @constant
    def feed_forward_sum(self) -> Float[Tensor, "*batch d_model"]:
        """Return the sum of the residual stream and the feed-forward's branch, before any norm on it."""
        is_absent = self.anatomy.feed_forward_kind == "none"
        return self.cross_mid if is_absent else self.cross_mid + self.feed_forward_added

    # ------------------------------------------------------------------ norms, each linearised at its input

    @functools.cached_property
    def attention_branch(self) -> LinearNorm:
        """The norm on the attention branch; like those below, the identity if the block has no such norm."""
        return self._linear(self.anatomy.attention_branch, lambda: self.attention_out)

    @functools.cached_property
    def attention_residual(self) -> LinearNorm:
        """The norm on the residual stream after the attention."""
        return self._linear(self.anatomy.attention_residual, lambda: self.attention_sum)

    @functools.cached_property
    def cross_residual(self) -> LinearNorm:
        """The norm on the residual stream after the cross-attention."""
        return self._linear(self.anatomy.cross_residual, lambda: self.cross_sum)

    @functools.cached_property
    def feed_forward_input(self) -> LinearNorm:
        """The norm before the feed-forward."""
        parallel = self.anatomy.parallel
        return self._linear(
            self.anatomy.feed_forward_input, lambda: self.resid_pre if parallel else self.cross_mid
        )

    @functools.cached_property
    def feed_forward_branch(self) -> LinearNorm:
        """The norm on the feed-forward's branch."""
        return self._linear(self.anatomy.feed_forward_branch, lambda: self.feed_forward_out)

    @functools.cached_property
    def feed_forward_residual(self) -> LinearNorm:
        """The norm on the residual stream after the feed-forward."""
        return self._linear(self.anatomy.feed_forward_residual, lambda: self.feed_forward_sum)

    def _linear(self, norm: Norm | None, state: Callable[[], Tensor]) -> LinearNorm:
        # A state that no norm reads is not computed: it may be expensive or unknown.
        return LinearNorm(None, self.resid_pre) if norm is None else norm.linear_at(state())

    @property
    def _feed_forward(self) -> FeedForward:
        if self.anatomy.feed_forward is None:
            kind = self.anatomy.feed_forward_kind
            raise ValueError(f"feed-forward: expected a plain or gated one, got {kind!r}")
        return self.anatomy.feed_forward


class CleanStates(BlockStates):
    """The states of a block at its requested rows, from its recorded pattern and values; see `states_of`.

    Attributes:
        pattern, value: As recorded, and detached.
    """

    def __init__(
        self,
        block: Block,
        prompts: slice,
        dtypes: tuple[torch.dtype, torch.dtype],
        cross_out: Float[Tensor, "batch query d_model"] | None,
    ) -> None:
        # The block's cache refers to its states: a reference back would delay freeing their memory.
        dtype, self._attention_dtype = dtypes
        self.anatomy, self.layer = block.anatomy, block.layer
        self.pattern, self.value = (block.recorded(role)[prompts].detach() for role in ("pattern", "value"))
        self.resid_pre = block.resid_pre[prompts].detach().to(dtype)
        self.cross_out = None if cross_out is None else cross_out[prompts].to(dtype)
        self._whole_resid_pre = block.whole_resid_pre[prompts].detach()

    @constant
    def attention_total(self) -> Float[Tensor, "batch query d_model"]:
        """Return the attention's output without b_O: the sum of all heads and keys for each row."""
        mixed = mix(self.pattern, self.value.to(self._attention_dtype)).flatten(2)
        return mixed @ value_path(self).W_O.to(mixed.dtype).flatten(0, 1)

    @constant
    def attention_out(self) -> Float[Tensor, "batch query d_model"]:
        """Return the attention's output, with b_O, before any norm."""
        total, b_O = self.attention_total, value_path(self).b_O
        return total if b_O is None else total + b_O.to(total.dtype)

    @functools.cached_property
    def attention_input(self) -> LinearNorm:
        """The norm before the attention, at all positions, because rows read keys that are not requested."""
        return LinearNorm(self.anatomy.attention_input, self._whole_resid_pre.to(self.resid_pre.dtype))


def states_of(
    block: Block,
    *,
    prompts: slice = slice(None),
    dtype: torch.dtype | None = None,
    attention_dtype: torch.dtype | None = None,
    cross_out: Float[Tensor, "batch query d_model"] | None = None,
) -> CleanStates:
    """Return the states of a block, which the methods of one run share.

        >>> class AttentionShare(lm.Method):
        ...     name, residual, engines = "attention_share", 0.5, ("algebra",)
        ...     records = frozenset({"pattern", "value"})
        ...
        ...     def __call__(self, block):
        ...         states = lm.models.states_of(block)
        ...         share = states.attention_out.norm(dim=-1) / states.mid.norm(dim=-1)
        ...         return block.recorded("pattern").mean(dim=1) * share[..., None]
        >>> lm.run(model, "The Eiffel Tower is in the city of", AttentionShare()).top(3)

    Args:
        block: A block whose clean pass recorded "pattern" and "value", and whose attention is verified.
        prompts: The requested prompts of the batch.
        dtype: The dtype of the states; None for the model's, but float32 at least.
        attention_dtype: The dtype of `attention_out`, if it has to be wider; None for `dtype`.
        cross_out: `cross_output`, for states after a decoder's cross-attention.
    """
    start, stop, _ = prompts.indices(len(block.batch))
    dtype = dtype or torch.promote_types(block.resid_pre.dtype, torch.float32)
    dtypes = (dtype, attention_dtype or dtype)
    name = ("states", start, stop, dtypes, cross_out is None)
    return shared(block, name, lambda: CleanStates(block, prompts, dtypes, cross_out))


def shared(block: Block, name: object, make: Callable[[], T]) -> T:
    """Return the result of `make`, computed once for all methods that map these rows of the block.

    Under a memory bound no result is stored, so that each method's memory can be counted.
    """
    if block.max_memory is not None:
        return make()
    # One run may request rows of one method and whole maps of another (`Method.reads`).
    stored = block.cache.get((name, block.every_query))
    if stored is None or not (block.every_query or torch.equal(stored[0], block.queries)):
        stored = block.cache[name, block.every_query] = (block.queries, make())
    return stored[1]


def cross_output(block: Block) -> Float[Tensor, "batch query d_model"] | None:
    """Return the output of a decoder's cross-attention before any norm, at the asked rows.

    The block is replayed for it, unless the pass has it because it was cached.

    Args:
        block: A block, whose self-attention is mapped.

    Returns:
        The output. None: the block has no cross-attention.

    Raises:
        UnsupportedModelError: No hook point shows it, or the replay does not give the block's own output.
    """
    if not block.anatomy.cross:
        return None
    outputs, lens = block.clean.recorded, block.clean.lens
    name = find_name_of_cross(lens, block.layer)
    if name is None:
        where = lens.where(block.layer)
        raise UnsupportedModelError(f"{where}: no hook point shows what its cross-attention gives")
    if name in outputs:
        return block.rows_of(outputs[name])
    outputs = {}
    prompts = torch.arange(len(block.batch), device=block.real.device)
    block.replay(prompts, [record(outputs, name)])
    return block.rows_of(outputs[name])


def value_path(block: Block | CleanStates) -> ValuePath:
    """Return the value path of a block, or of its states.

    Raises:
        ValueError: The block has none; the engine "algebra" is not used for such blocks.
    """
    if block.anatomy.value_path is None:
        raise ValueError(f"block {block.layer}: expected value and output matrices, found none")
    return block.anatomy.value_path
