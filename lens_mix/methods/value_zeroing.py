"""Compute Value Zeroing: how much a representation changes when the value vector of a token is zeroed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._algebra.distances import distance
from lens_mix._algebra.value_zeroing import value_zeroing_maps
from lens_mix._algebra.value_zeroing_pairs import find_zeroed_groups
from lens_mix._blocks.cost import Growth
from lens_mix._model.anatomy import BlockAnatomy
from lens_mix.arguments import check_choice, check_heads, check_layer, check_number
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, must_fire, zero_values
from lens_mix.maps.spans import Group, Groups, check_groups, read_groups
from lens_mix.method import Method, MethodGroup

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block

Metric = Literal["cosine", "euclidean"]
LastLayer = Literal["before_final_norm", "after_final_norm"]


@dataclasses.dataclass(frozen=True)
class ValueZeroing(Method):
    """Compute Value Zeroing (Mohebbi et al., EACL 2023, eq. 3-5).

        score[l, i, j] = 1 - cos(y_i, y_i(v_j = 0))     metric="cosine"
        score[l, i, j] = ‖y_i - y_i(v_j = 0)‖           metric="euclidean"

    y_i is the output of block l at position i. y_i(v_j = 0) is the same output when the value vector of
    position j is zeroed in block l alone. The block's input, queries, keys and pattern stay as in the clean
    pass.

    Shape [layer, query, key], or [layer, head, query, key] with `per_head`. Cosine distances are in 0..2,
    euclidean ones at least 0. The map contains the effect of the residual stream, because a large residual
    stream makes every distance small. So rollouts add no identity.

        >>> method = lm.methods.ValueZeroing(metric="euclidean")
        >>> lm.run(model, "The Eiffel Tower is in the city of", method).top(3)

    Args:
        metric: "cosine" (1 - cos, as in the paper) or "euclidean".
        per_head: Whether one query head is zeroed at a time, so that each has a map of its own.
        heads: The query heads that are zeroed together, in every layer, or {layer: heads}. Layers that are
            not named zero all heads. With `per_head`, only these heads get a map.
        spans: Groups of positions that are zeroed as one. The key axis then has one entry for each group.
            Each is a text of the prompt (" Eiffel Tower"), a slice, or a list of positions:
            [" Eiffel Tower", (6, 7)]. A dict names them: {"the subject": " Eiffel Tower"}. Positions in no
            group are never zeroed.
        last_layer: What is compared in the last block: its output ("before_final_norm", as in the official
            code and the paper) or the output after the final norm ("after_final_norm", as in inseq and
            others).
        threshold: Scores below it are set to 0 (inseq: 1e-5). None keeps all scores, as the official code
            does.

    Raises:
        ValueError: An option is unknown, or the model or the prompt lacks a head or a position.
    """

    name: ClassVar[str] = "value_zeroing"
    group: ClassVar[MethodGroup] = "What each layer takes from each token"
    description: ClassVar[str] = "how much the block's output changes without a token's value vector"
    place_in_list: ClassVar[int] = 1
    residual: ClassVar[float] = 0.0
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    engines: ClassVar[tuple[str, ...]] = ("algebra", "hooks")
    records: ClassVar[frozenset[str]] = frozenset({"pattern", "value"})
    cost_grows_with: ClassVar[Growth] = "rows"
    citation: ClassVar[str] = "mohebbi-etal-2023-quantifying"

    metric: Metric = "cosine"
    per_head: bool = False
    heads: Sequence[int] | Mapping[int, Sequence[int]] | None = None
    spans: Groups | None = None
    last_layer: LastLayer = "before_final_norm"
    threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("metric", self.metric, get_args(Metric))
        check_choice("last_layer", self.last_layer, get_args(LastLayer))
        if self.threshold is not None:
            check_number("threshold", self.threshold, 0)
        if self.per_head and isinstance(self.heads, Mapping):
            raise ValueError(
                "heads: with per_head expected the same heads in every layer, got a mapping by layer"
            )
        object.__setattr__(self, "heads", check_heads(self.heads))
        if self.spans is not None:
            object.__setattr__(self, "spans", check_groups("spans", self.spans))

    @override
    def check(self, n_heads: int, n_layers: int, layers: Sequence[int]) -> None:
        named = sorted(self.heads) if isinstance(self.heads, Mapping) else []
        for layer in named:
            check_layer("heads", layer, range(n_layers))
        # Heads of a layer without attention would be ignored silently.
        if not set(named) <= set(layers):
            raise ValueError(f"heads: expected some of the layers with attention {list(layers)}, got {named}")
        for layer in range(n_layers):
            outside = [head for head in self._select_heads(layer) or () if head >= n_heads]
            if outside:
                raise ValueError(f"heads: expected query heads 0..{n_heads - 1}, got {outside}")

    @override
    def key_groups(self, tokens: Sequence[str]) -> list[Group] | None:
        return None if self.spans is None else read_groups(tokens, self.spans, "spans")

    @override
    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        if anatomy.cross:
            return (
                "cross-attention reads the middle of the block, which zeroing changes, so its pattern "
                "changes too; only a replay of the block shows how"
            )
        return None

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        heads = self._select_heads(block.layer)
        chosen = list(range(block.n_heads)) if heads is None else list(heads)
        groups = [[head] for head in chosen] if self.per_head else [chosen]
        if block.engine == "algebra":
            norm = block.next_norm() if self._reads_final_norm(block) else None
            scores = value_zeroing_maps(block, groups, self.metric, norm)
            scores = scores if self.per_head else scores[:, 0]
        elif self.per_head:
            scores = torch.stack([self._compute_map(block, group) for group in groups], dim=1)
        else:
            scores = self._compute_map(block, heads)
        return scores if self.threshold is None else scores.masked_fill(scores < self.threshold, 0)

    def interventions(
        self,
        layer: int,
        position: int | slice | Tensor,
        *,
        heads: Sequence[int] | None = None,
        attention: str = DEFAULT_ATTENTION,
    ) -> list[HookPair]:
        """Return the hooks that zero values in one layer's attention.

        In your own run, for the column of key j:

            logits, cache = model.run_with_cache(tokens)
            with model.hooks(fwd_hooks=method.interventions(layer, j)):
                logits, zeroed = model.run_with_cache(tokens)
            name = f"blocks.{layer}.hook_resid_post"
            column = 1 - torch.cosine_similarity(cache[name], zeroed[name], dim=-1)

        Args:
            layer: The number of the block.
            position: The position or positions whose values are zeroed, as in `lens_mix.hooks.zero_values`.
            heads: The query heads that are zeroed. None: those of the method.
            attention: The name of the attention module, with `{layer}`.
        """
        heads = self._select_heads(layer) if heads is None else heads
        return [zero_values(layer, position, heads=heads, attention=attention)]

    def _select_heads(self, layer: int) -> Sequence[int] | None:
        return self.heads.get(layer) if isinstance(self.heads, Mapping) else self.heads

    def _compute_map(self, block: Block, heads: Sequence[int] | None) -> Float[Tensor, "batch query key"]:
        real = block.real_keys
        # Every key or span gets a copy of the prompt, because which queries read it is not known beforehand.
        copies = find_zeroed_groups(real[:, None], real, block.key_positions)
        zeroed = torch.zeros((len(copies), real.shape[1]), dtype=torch.bool, device=real.device)
        for is_zeroed, copy in zip(zeroed, copies, strict=True):
            is_zeroed[copy.positions] = True
        places = [(copy.prompt, copy.key) for copy in copies]
        rows, keys = torch.tensor(places, device=real.device, dtype=torch.long).unbind(1)
        scores = block.zeros(*block.real.shape, real.shape[1] if self.spans is None else len(self.spans))
        compared = block.after_final_norm if self._reads_final_norm(block) else lambda resid: resid
        clean = compared(block.resid_post)
        for chunk in block.chunks(len(copies)):
            pairs = self.interventions(
                block.layer, zeroed[chunk], heads=heads, attention=block.stack.attention_template
            )
            # A replay whose hooks do not fire has the clean output, and every score would be 0.
            with must_fire(*pairs) as hooks:
                zeroed_output = compared(block.replay(rows[chunk], hooks))
            scores[rows[chunk], :, keys[chunk]] = distance(clean[rows[chunk]], zeroed_output, self.metric)
        return scores

    def _reads_final_norm(self, block: Block) -> bool:
        return block.is_last and self.last_layer == "after_final_norm"


def value_zeroing(
    output: Callable[[Float[Tensor, "batch key value_head d_head"]], Float[Tensor, "batch query d_model"]],
    value: Float[Tensor, "batch key value_head d_head"],
    metric: Metric,
) -> Float[Tensor, "batch query key"]:
    """Return the distance of the output from the output without one key's values, for every query and key.

    Args:
        output: The block's output as a function of the value vectors, with the input and the pattern of the
            clean pass.
        value: The value vectors of the clean pass.
        metric: "cosine" or "euclidean".
    """
    others = 1 - torch.eye(value.shape[1], dtype=value.dtype, device=value.device)
    axes = "batch position value_head d_head, key position -> key batch position value_head d_head"
    columns = [distance(output(value), output(zeroed), metric) for zeroed in einsum(value, others, axes)]
    return rearrange(columns, "key batch query -> batch query key")
