"""What every method is: a small frozen dataclass (its parameters) with its hooks and one call."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.arguments import check_flags
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, record_attention
from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.lens.changed_backward import Rules
from lens_mix.lens.effort import Passes
from lens_mix.lens.verification_record import ALGEBRA_COMPONENTS

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

# The key that a decoder position's own residual stream is on cross-attention: it has no place in the source.
RESIDUAL_KEY = "[RESIDUAL]"
# What a map is of: one block; the stack from a block down to the tokens; or the whole model, in one map.
Scope = Literal["layer", "stack", "model"]


@dataclasses.dataclass(frozen=True)
class Method:
    """Base of all methods: the fields are the parameters, the call turns one block into a layer map.

    Class attributes:
        name: the method's name in strings (`lm.run(model, prompt, name)`).
        residual: the residual weight that the method's own paper mixes in when maps are rolled out: 0.5 where
            the map holds the attention branch only, 0 where it already holds the residual.
        engines: the ways to compute it, fastest first. "recorded" reads the clean pass, "hooks" intervenes
            and runs blocks again, "algebra" uses the verified components of a block.
        includes_residual: whether the map's diagonal includes the residual stream. On cross-attention such a map
            has one more key after the source's positions, `RESIDUAL_KEY`.
        has_unit_rows: whether rows sum to 1, unless an attention sink took some of their weight.
        scope: "layer": a map of one block. "stack": an input map, from a block down to the tokens. "model":
            one input map of all blocks together, which counts as the last layer's.
        parts: the parts of an encoder-decoder on which it is defined, of "encoder", "decoder", "cross" and
            "joint". A model of one stack counts as "decoder" and "encoder".
        needs: what the method needs. Components of a block, for the algebra engine
            (`lens_mix.lens.verification`); "unembedding", verified logits; "gradients", with respect to
            something inside the model; "causal", a causal model; "position_ids", a model that takes them.
        records: what the method reads of a layer of the clean pass ("pattern", "value", "z", "resid_pre").
        citation: the key of the paper in `references.bib`.
    """

    name: ClassVar[str]
    residual: ClassVar[float]
    engines: ClassVar[tuple[str, ...]]
    includes_residual: ClassVar[bool] = False
    has_unit_rows: ClassVar[bool] = False
    scope: ClassVar[Scope] = "layer"
    parts: ClassVar[frozenset[str]] = frozenset({"encoder", "decoder"})
    needs: ClassVar[frozenset[str]] = frozenset(ALGEBRA_COMPONENTS)
    records: ClassVar[frozenset[str]] = frozenset()
    citation: ClassVar[str]

    def __post_init__(self) -> None:
        switches = [field.name for field in dataclasses.fields(self) if isinstance(field.default, bool)]
        check_flags(**{name: getattr(self, name) for name in switches})

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

    def takes_rows(self, engine: str) -> bool:
        """Whether an engine of it makes the asked rows only; otherwise the runner cuts them."""
        return engine != "hooks" or self.scope == "model"

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

    def needs_for(self, anatomy: BlockAnatomy) -> frozenset[str]:
        """Return what the map of such a block needs: `needs`, and maybe "feed_forward" or "next_norm".

        "feed_forward": the algebra engine computes the feed-forward, so every asked row of it is checked.
        "next_norm": the map uses the norm that reads the block's output (`Block.next_norm`).
        """
        return self.needs

    def check(self, n_heads: int, n_layers: int, layers: Sequence[int]) -> None:
        """Raise an error for parameters that this model can't have (a head out of range, say).

        Args:
            n_heads: number of query heads.
            n_layers: number of blocks.
            layers: the blocks that have attention.

        Raises:
            ValueError: with what was expected and what was got.
        """
