"""What every method is: a small frozen dataclass (its parameters) with its hooks and one call."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.arguments import flags
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, record_attention
from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.lens.changed_backward import Rules
from lens_mix.lens.effort import Passes
from lens_mix.lens.verification_record import ALGEBRA_COMPONENTS

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

# The key that a decoder position's own residual stream is on cross-attention: it has no place in the source.
RESIDUAL_KEY = "[RESIDUAL]"
CrossKeys = Literal["source", "source and residual"]


@dataclasses.dataclass(frozen=True)
class Method:
    """Base of all methods: the fields are the parameters, the call turns one block into a layer map.

    Class attributes:
        name: the method's name in strings (`lm.run(model, prompt, name)`).
        residual: the residual weight that the method's own paper mixes in when maps are rolled out: 0.5 where
            the map holds the attention branch only, 0 where it already holds the residual.
        engines: the ways it can be computed, fastest first. "recorded" reads the clean pass,
            "hooks" intervenes and runs blocks again, "algebra" needs a verified anatomy.
        holds_residual: whether the map's diagonal holds the residual stream.
        has_unit_rows: whether rows sum to 1, unless some of their weight went to an attention sink.
        kind: "layer" for maps of one block, "input" for maps from the stack down to the tokens.
        whole_model: whether there is one map of all blocks together, which counts as the last layer's.
        is_additive: whether layer l of an input map is what block l adds, so that the sum over layers is the
            whole; otherwise it is what reached the output of block l.
        causal_only: whether it speaks of causal models only.
        cross: which keys its map has on cross-attention (`Block.is_cross`): the source's positions, or these
            and `RESIDUAL_KEY` after them; None: it is not defined there.
        joint: whether it maps the source and the target of an encoder-decoder at once (`Block.is_joint`).
        needs_gradients: whether it differentiates with respect to something inside the model.
        places_tokens: whether it runs tokens at positions of its own, which the model has to take.
        records: what the method reads of a layer of the clean pass ("pattern", "value", "z", "resid_pre").
        parts: the parts of a block that must be verified for the algebra engine (`lens_mix.lens.verification`).
        reads_last_residual: whether the clean pass has to run to the last block, whatever layers are asked.
        citation: the key of the paper in `references.bib`.
    """

    name: ClassVar[str]
    residual: ClassVar[float]
    engines: ClassVar[tuple[str, ...]]
    holds_residual: ClassVar[bool] = False
    has_unit_rows: ClassVar[bool] = False
    kind: ClassVar[Literal["layer", "input"]] = "layer"
    whole_model: ClassVar[bool] = False
    is_additive: ClassVar[bool] = False
    causal_only: ClassVar[bool] = False
    cross: ClassVar[CrossKeys | None] = None
    joint: ClassVar[bool] = False
    needs_gradients: ClassVar[bool] = False
    places_tokens: ClassVar[bool] = False
    records: ClassVar[frozenset[str]] = frozenset()
    parts: ClassVar[tuple[str, ...]] = ALGEBRA_COMPONENTS
    reads_last_residual: ClassVar[bool] = False
    citation: ClassVar[str]

    def __post_init__(self) -> None:
        switches = [field.name for field in dataclasses.fields(self) if isinstance(field.default, bool)]
        flags(**{name: getattr(self, name) for name in switches})

    def hooks(
        self,
        layer: int,
        store: MutableMapping[str, Tensor],
        *,
        queries: Int[Tensor, "batch query"] | None = None,
        attention: str = DEFAULT_ATTENTION,
    ) -> list[HookPair]:
        """What the method puts on one layer of a clean pass: the runner's pairs, and good in a run of yours.

        But for "resid_pre", which the runner has without a hook.

        Args:
            layer: which block.
            store: the dict that the hooks fill, by TransformerLens's names.
            queries: positions of the rows to record of each prompt; None: all.
            attention: name of the attention module, with `{layer}`.
        """
        return record_attention(layer, store, sorted(self.records), queries=queries, attention=attention)

    def interventions(self, layer: int, *args: Any, **kwargs: Any) -> list[HookPair]:
        """What the method puts on one layer of a replay: its interventions, good in a run of yours too.

        Methods that intervene override it with arguments of their own (a position, a pattern), and put the
        same pairs on their passes. Empty for those that read the clean pass alone, or change what enters the
        model.
        """
        return []

    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        """The layer map of one block, for every prompt of the batch; padding is cut later.

        Methods that are computed from recorded tensors alone, or by algebra, give the rows that the block
        holds (`block.queries`).
        """
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")

    def of_stack(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch *head query key"]]:
        """The maps of several blocks, from below, with the rows that the last of them holds.

        Methods that carry something from block to block define this instead of the call. Those of kind
        "input" get all blocks below the last one asked for, with all rows; those of the whole model give one
        map for all blocks.
        """
        return [self(block) for block in blocks]

    def passes(self, blocks: Sequence[Block]) -> Passes | None:
        """Return about how many forward passes the maps of these blocks take, for a warning beforehand.

        None for methods that take only a few, whatever the prompt is.
        """
        return None

    @property
    def carries(self) -> bool:
        """Whether something is carried from block to block, so that all blocks are needed at once."""
        return type(self).of_stack is not Method.of_stack

    def engine_for(self, asked: str) -> str:
        """The engine to take where the user asks for one; what is made beside the methods has its own."""
        return asked

    def takes_rows(self, engine: str) -> bool:
        """Whether an engine of it makes the asked rows only; otherwise the runner cuts them."""
        return engine != "hooks" or self.whole_model

    def parameters(self) -> dict[str, object]:
        """The parameters by name, as the record keeps them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def clean_rules(self, anatomies: Sequence[BlockAnatomy]) -> Rules | None:
        """The changed rules of a backward pass through the clean pass, where a method needs one; else None.

        With rules the clean pass runs with gradients on and keeps its graph, for `Block.graph` to return. It
        can't in a batch, under `max_memory` or in an encoder-decoder: `Block.graph` runs a pass of its own.
        """
        return None

    def key_groups(self, positions: int) -> list[list[int]] | None:
        """Groups of positions that the key axis stands for; None where it stands for the positions."""
        return None

    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        """Why the algebra engine has no formula for such a block; None where it has."""
        return None

    def relies_on_feed_forward(self, anatomy: BlockAnatomy) -> bool:
        """Whether the algebra engine computes such a block's feed-forward."""
        return "feed_forward" in self.parts

    def reads_next_norm(self, anatomy: BlockAnatomy) -> bool:
        """Whether the map of such a block needs the norm that reads its output (`Block.next_norm`)."""
        return False

    def check(self, n_heads: int, n_layers: int) -> None:
        """Refuse parameters that this model can't have (a head out of range, say).

        Raises:
            ValueError: with what was expected and what was got.
        """

    def named_layers(self) -> Sequence[int]:
        """The layers that its parameters name, each of which has to have attention."""
        return ()
