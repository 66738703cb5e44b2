"""The base class of all methods: a frozen dataclass of parameters, with hooks and one call."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from jaxtyping import Float, Int
from torch import Tensor

from lens_mix._blocks.cost import COSTS, Growth
from lens_mix._blocks.cost import Cost as Cost
from lens_mix._blocks.verification_record import ALGEBRA_COMPONENTS
from lens_mix._model.anatomy import BlockAnatomy
from lens_mix._passes.backward_rules import BackwardRules
from lens_mix.arguments import check_flags
from lens_mix.hooks.base import DEFAULT_ATTENTION, HookPair
from lens_mix.hooks.recording import record_attention

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block as Block
    from lens_mix.maps.spans import Group

# In cross-attention this is the key of a decoder position's own residual stream, because that is not a token
# of the source.
RESIDUAL_KEY = "[RESIDUAL]"
# What a method reads for a map, see `Method.reads`.
Reads = Literal["block", "above", "below", "model"]
# The group in which lists have a method; lists have the groups in this order.
MethodGroup = Literal[
    "Attention weights",
    "What each layer takes from each token",
    "What reaches a position from the input tokens",
    "What the answer depends on, layer by layer",
    "Which input tokens the answer depends on",
    "Other methods",
]


@dataclasses.dataclass(frozen=True)
class Method:
    """The base class of all methods. The fields are the parameters; the call returns one block's layer map.

        >>> class LargestWeight(lm.Method):
        ...     name, residual = "largest_weight", 0.5
        ...     engines, records = ("recorded",), frozenset({"pattern"})
        ...
        ...     def __call__(self, block):
        ...         return block.recorded("pattern").amax(dim=1)
        >>> lm.run(model, "The Eiffel Tower is in the city of", LargestWeight()).top(3)

    Attributes:
        name: The method's name in strings (`lm.run(model, prompt, name)`).
        group: The group in which lists of methods have it.
        description: What a score says, in plain words: part of a sentence, without a period. If it is "", the
            first line of the docstring is shown.
        place_in_list: Its place within its group: the lowest comes first.
        residual: The weight of the residual stream that the method's paper adds in a rollout: 0.5 if the map
            is of attention only, 0 if it already includes the residual stream.
        engines: The engines that can compute it, the fastest first. "recorded" reads the clean pass, "hooks"
            replays blocks with interventions, and "algebra" uses the verified components of a block.
        includes_residual: Whether the map's diagonal includes the residual stream. In cross-attention such a
            map has one more key after the source's tokens, `RESIDUAL_KEY`.
        has_unit_rows: Whether rows sum to 1, unless an attention sink has some of their weight.
        reads: What it reads for a map. "block": a layer map, from the records of its own block alone, by the
            call. "above": layer maps, from further passes of the block or from the block up to a target.
            "below": input maps, from a block down to the tokens. "model": one input map of all blocks, which
            is labeled as the last layer. All except "block" are computed by `of_blocks`.
        parts: The parts of an encoder-decoder for which it is defined: "encoder", "decoder", "cross" and
            "joint". A method for "encoder" or "decoder" is also defined for models with one stack.
        layers_add_up: Whether the layers of an input map are shares of one number, so that their sum is the
            map of the whole model. Otherwise this is the last layer.
        needs_one_position: Whether its target has to read a single position, so that the scores of a span are
            the sums of the rows of its tokens.
        has_gradient_weights: Whether its layer maps are attention weighted by a gradient, as
            `lens_mix.gradient_rollout` expects.
        has_tree: Whether its paper draws an attribution tree of its layer maps, which a page then shows
            (`lens_mix.attribution_tree`).
        needs: What the method needs: components of a block for the algebra engine,
            which the verification rebuilds; "unembedding", which means verified logits; "gradients" with
            respect to tensors inside the model; "causal", which means a causal model; "position_ids", which
            means a model that takes them.
        records: What the method reads from a layer of the clean pass ("pattern", "value", "z", "resid_pre").
        reads_graph_alone: Whether a method with `clean_rules` reads nothing but its records and the autograd
            graph of the clean pass, and its `attention_rule` is that of its hooks, so that attention may be
            fused. A subclass, which may change both, has to say so again.
        cost_grows_with: What the cost in forward passes grows with: "nothing", the "rows" that are computed,
            the "tokens" of the prompt, whichever rows are computed, or the "layers". It decides how the
            recorded times of a built-in method become its cost.
        citation: The key of the paper in the bibliography of the library, or its BibTeX.
        target: The target that it explains. None if it explains none. A method with a target has it as a
            field.
        per_head: Whether each head has a map of its own. None if its maps never have heads. A method whose
            maps may have heads has it as a field.
    """

    name: ClassVar[str]
    group: ClassVar[MethodGroup] = "Other methods"
    description: ClassVar[str] = ""
    place_in_list: ClassVar[int] = 100
    residual: ClassVar[float]
    engines: ClassVar[tuple[str, ...]]
    includes_residual: ClassVar[bool] = False
    has_unit_rows: ClassVar[bool] = False
    reads: ClassVar[Reads] = "block"
    layers_add_up: ClassVar[bool] = False
    needs_one_position: ClassVar[bool] = False
    has_gradient_weights: ClassVar[bool] = False
    has_tree: ClassVar[bool] = False
    parts: ClassVar[frozenset[str]] = frozenset({"encoder", "decoder"})
    needs: ClassVar[frozenset[str]] = frozenset(ALGEBRA_COMPONENTS)
    records: ClassVar[frozenset[str]] = frozenset()
    reads_graph_alone: ClassVar[bool] = False
    cost_grows_with: ClassVar[Growth] = "nothing"
    citation: ClassVar[str]
    # Without an annotation these are not fields, but a subclass may have fields of these names.
    target = cast("Any", None)
    per_head = cast("Any", None)

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
        """Return the hooks with which the method records one layer of the clean pass.

        They are also usable in your own `run_with_hooks`. There is no hook for "resid_pre", because the clean
        pass always has it.

        Args:
            layer: The layer.
            store: The dict in which the hooks store tensors, by TransformerLens's names.
            queries: The positions of the rows to record, for each prompt. None: all.
            attention: The name of the attention module, with `{layer}`.
        """
        return record_attention(layer, store, sorted(self.records), queries=queries, attention=attention)

    def interventions(self, layer: int, *args: Any, **kwargs: Any) -> list[HookPair]:
        """Return the hooks with which the method intervenes in one layer of a replay.

        They are also usable in your own `run_with_hooks`. Methods that intervene override this with their own
        arguments (a position or a pattern, for example), and use the same hooks in their passes. The list is
        empty for methods that only read the clean pass or change the input of the model.
        """
        return []

    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        """Return the layer map of one block for every prompt of the batch, including padding.

        It is defined by methods whose `reads` is "block". With the engines "recorded" and "algebra", the map
        has only the rows of `block.queries`. It is then computed while the clean pass runs, and the records
        of the block are freed afterwards, so that the memory of a long prompt is that of one block. So these
        engines must not read another block, nor run one (`Block.replay`, `Block.continuation`): a method that
        does declares the engine "hooks", for which whole maps are computed after the pass, or reads "above".
        """
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")

    def of_blocks(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch *head query key"]]:
        """Return the maps of several blocks, the lowest first, with the rows of the last block.

        It is defined by methods whose `reads` is not "block". For "below", the blocks are all blocks up to
        the last selected one. That one has the requested rows, and the others have all rows, of which
        `blocks[-1].rows_of(map)` selects the requested ones. For "model", the result is one map for all
        blocks.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no of_blocks")

    @classmethod
    def default_cost(cls) -> Cost | None:
        """Return the cost with the default parameters, which is recorded for built-in methods.

        It is None if the cost is unknown.
        """
        return COSTS.get(cls.name)

    def scale_cost(self, cost: Cost, blocks: Sequence[Block]) -> Cost:
        """Return the cost with these parameters on these blocks, for a warning beforehand.

        Args:
            cost: The cost with the default parameters.
            blocks: The blocks that are read.
        """
        return cost

    @property
    def is_input_map(self) -> bool:
        """Whether the map reaches down to the input tokens; else it is a layer map."""
        return self.reads in ("below", "model")

    def explain_next_tokens(self) -> Self:
        """Return the method with the prompt's own next tokens in place of predictions; itself if not needed.

        A trace uses it to explain what was written.
        """
        return self

    def parameters(self) -> dict[str, object]:
        """Return the parameters by name, for the map's record."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def clean_rules(self, anatomies: Sequence[BlockAnatomy]) -> BackwardRules | None:
        """Return the changed rules of a backward pass through the clean pass; None if the method needs none.

        With rules, the clean pass runs with gradients and keeps its autograd graph (`block.clean.graph`).
        In a batch, under `max_memory` or in an encoder-decoder this is not possible: the graph is None,
        and the method runs another pass.
        """
        return None

    def key_groups(self, tokens: Sequence[str]) -> list[Group] | None:
        """Return the name and the positions of each key; None if each key is one position.

        Args:
            tokens: The tokens that are keys without groups, as strings.
        """
        return None

    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        """Return why the algebra engine has no formula for such a block; None if it has one."""
        return None

    def needs_for(self, anatomy: BlockAnatomy) -> frozenset[str]:
        """Return what the map of such a block needs: `needs`, and maybe "feed_forward" or "next_norm".

        "feed_forward" means that the algebra engine computes the feed-forward or the norm before it, so that
        both, as far as they have a formula, are checked for each selected row. "next_norm" means that the map
        uses the norm that reads the block's output (`Block.next_norm`).
        """
        return self.needs

    def check(self, n_heads: int, n_layers: int, layers: Sequence[int]) -> None:
        """Raise an error if the parameters do not fit the model (a head out of range, for example).

        Args:
            n_heads: The number of query heads.
            n_layers: The number of blocks.
            layers: The layers that have attention.

        Raises:
            ValueError: If a parameter does not fit.
        """
