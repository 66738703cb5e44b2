"""The plan of a clean pass: what is recorded of each block, who visits it, and where the pass ends.

Everything that depends on methods, engines, options and prompts is decided here, before the pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxtyping import Int
from torch import Tensor

from lens_mix._blocks.verification_record import Verification
from lens_mix._inputs.batches import Batch
from lens_mix._inputs.rows import Rows
from lens_mix._model.model import Lens
from lens_mix._passes.backward_rules import BackwardRules
from lens_mix._passes.block_outputs import BlockOutputs
from lens_mix._passes.clean_pass import CleanPass
from lens_mix._passes.cross import find_name_of_cross, names_before_cross
from lens_mix._passes.replay import BlockCall
from lens_mix.hooks.base import HookPair
from lens_mix.hooks.recording import ATTENTION_ROLES, RESID_PRE, record_all, record_attention
from lens_mix.method import Method

if TYPE_CHECKING:
    from lens_mix._passes.cached_pass import CachedPass
    from lens_mix._passes.fused_attention import FusedAttention

# The verification as a visitor.
VERIFICATION = "verification"


def takes_rows(method: Method, engine: str) -> bool:
    """Return whether an engine of a method computes only the selected rows; else they are selected later."""
    # A replay runs a whole block, so the definition by hooks has all rows. Methods that read "above" or
    # "model" make passes of the whole model instead, for a target at the asked rows alone.
    return engine != "hooks" or method.reads in ("above", "model")


def visits_blocks(method: Method, engine: str) -> bool:
    """Return whether an engine of a method maps each block while the pass runs; else it runs after it."""
    # The hooks of a pass would also fire in a replay, so no block may be run while the pass runs.
    return engine != "hooks" and method.reads == "block"


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What happens at one block.

    Attributes:
        records: The roles that are recorded ("pattern", "value", "z", "query").
        outputs: The outputs within the block that are recorded, because the verification does not compute
            them.
        visitors: Who gets the block when it has run, in this order.
        kept: The roles that are kept after the visits, because a method reads them after the pass.
        is_whole: Whether the verification rebuilds all rows, because a method computes the feed-forward.
    """

    records: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    visitors: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    is_whole: bool = False


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """What one clean pass does, and what runs after it.

    Attributes:
        lens: The lens of the model.
        batch: The prompts.
        methods: The methods by their labels.
        method_layers: The layers whose blocks each method reads.
        verification: The verification that the plan relies on.
        engines: The engine of each method.
        layers: What happens at each layer that a method reads.
        rows: The rows that were asked for; None for all.
        recorded_rows: The rows that are recorded; None for all, if some method reads all of them.
        watched: The layers whose attended keys are read.
        last: The last block that is recorded. The pass ends there, unless it makes predictions.
        rules: The rules of the autograd graph that the pass keeps; None if it keeps none.
        predict_at: The positions at which predictions are read; None for none.
        predicted_at_once: The most positions whose logits are computed at once.
        compared: What the verification compares: engines, and names that methods list in their `needs`.
        has_hooks: Whether user hooks are on the model.
        cached: The user's pass that is read instead of running the model; None for none.
        is_fused: Whether attention runs by a fused kernel, and the recorded rows of the patterns beside it.
    """

    lens: Lens
    batch: Batch
    methods: Mapping[str, Method]
    method_layers: Mapping[str, Sequence[int]]
    verification: Verification
    engines: Mapping[str, str]
    layers: Mapping[int, LayerPlan]
    rows: Rows | None
    recorded_rows: Rows | None
    watched: tuple[int, ...]
    last: int
    rules: BackwardRules | None
    predict_at: Int[Tensor, "batch query"] | None
    predicted_at_once: int
    compared: frozenset[str]
    has_hooks: bool
    cached: CachedPass | None = None
    is_fused: bool = False

    @property
    def predicts_at_end(self) -> bool:
        """Whether the pass itself reads the predictions; else they are computed in chunks after it."""
        return self.predict_at is not None and self.predict_at.shape[1] <= self.predicted_at_once

    @property
    def after_pass(self) -> list[str]:
        """The labels of the methods that run after the pass."""
        visiting = {label for layer in self.layers.values() for label in layer.visitors}
        return [label for label in self.methods if label not in visiting]

    def least_bytes(self, *, with_maps: bool = True) -> int:
        """Return how many bytes the maps need at least, together with the recorded pattern of one block.

        Args:
            with_maps: Whether maps of all layers are made of the blocks.
        """
        stack, size = self.lens.stack.name, self.lens.dtype.itemsize
        every, keys = self.batch.real_positions(stack).shape[1], self.batch.real_keys(stack).shape[1]
        # Eager attention computes the whole pattern of one block after the other, fused attention what is
        # recorded of it.
        at_once = every if self.recorded_rows is None else self.recorded_rows.positions.shape[1]
        if self.is_fused and not any(planned.records for planned in self.layers.values()):
            at_once = 0
        pattern = self.lens.n_heads * (at_once if self.is_fused else every) * keys * size
        rows = every if self.rows is None else self.rows.positions.shape[1]
        maps = 0
        # One whose keys are groups has fewer keys.
        for label, method in self.methods.items() if with_maps else ():
            if type(method).key_groups is Method.key_groups:
                # An input map may have one layer.
                layers = 1 if method.is_input_map else len(self.method_layers[label])
                heads = self.lens.n_heads if method.per_head else 1
                # Most maps are computed in float32 or more; those of a method of the user may not be.
                maps += layers * heads * rows * keys * min(4, size)
        return len(self.batch) * (pattern + maps)

    def hooks(self, store: dict[str, Tensor]) -> list[HookPair]:
        """Return the hooks that record what the plan says into a dict."""
        template, rows = self.lens.stack.attention_template, self.recorded_rows
        positions = None if rows is None else rows.positions
        pairs = record_all(store, names_before_cross(self.lens, list(self.layers)))
        if self.is_fused:
            # Fused attention records its tensors itself.
            return pairs
        for layer, planned in self.layers.items():
            roles = set(planned.records)
            for method in self._methods_at(layer):
                found = method.hooks(layer, store, queries=positions, attention=template)
                # The input of a block is recorded from its call, which works for all model classes.
                pairs += [pair for pair in found if pair[0] != f"{self.lens.where(layer)}.hook_resid_pre"]
                # What is left after the methods is what the verification alone reads.
                roles -= method.records
            pairs += record_attention(layer, store, sorted(roles), queries=positions, attention=template)
        # A pass that was cached has no arguments to replay a block with, so cross-attention is read from it.
        crossed = self._crossed_layers if self.cached is not None else []
        names = (find_name_of_cross(self.lens, layer) for layer in crossed)
        return pairs + record_all(store, filter(None, names))

    def fused_attention(self) -> FusedAttention | None:
        """Return the fused attention of the pass; None if its attention is eager."""
        if not self.is_fused:
            return None
        from lens_mix._passes.fused_attention import FusedAttention

        roles = {layer: planned.records for layer, planned in self.layers.items()}
        positions = None if self.recorded_rows is None else self.recorded_rows.positions
        return FusedAttention(
            self.lens, roles, positions, None if self.rules is None else self.rules.attention_rule
        )

    @property
    def _crossed_layers(self) -> list[int]:
        """The layers with a cross-attention after the mapped attention, if a method computes such blocks."""
        is_computed = "algebra" in self.engines.values()
        return [layer for layer in self.layers if is_computed and self.verification.anatomy[layer].cross]

    def require_from(self, cached: CachedPass) -> None:
        """Raise a ValueError if a cached pass lacks what the plan records."""
        lens, anatomy = self.lens, self.verification.anatomy
        names = names_before_cross(lens, list(self.layers))
        names += [
            lens.stack.hook_name(role, layer)
            for layer, planned in self.layers.items()
            for role in planned.records
        ]
        # Without the feed-forward's output or a formula for it, a block would not be compared at all.
        opaque = [layer for layer in self.layers if self.compared and not anatomy[layer].is_written_down]
        needed = [("feed_forward_out", layer) for layer in opaque]
        needed += [("cross_out", layer) for layer in self._crossed_layers]
        outputs = self.block_outputs()
        for role, layer in needed if outputs is not None else ():
            options = outputs.names(layer, role) if outputs is not None else ()
            names += options[:1] if all(cached.find(name) is None for name in options) else []
        reads_blocks = "algebra" in self.engines.values() or self.has_hooks or lens.stack.is_cross
        cached.require(names, self.layers if reads_blocks else ())

    def required(self) -> dict[int, list[str]]:
        """Return by layer the hook names that have to be recorded when the block has run."""
        return {
            layer: [
                *names_before_cross(self.lens, [layer]),
                *(
                    self.lens.stack.hook_name(role, layer)
                    for method in self._methods_at(layer)
                    for role in sorted(method.records - {RESID_PRE})
                ),
            ]
            for layer in self.layers
        }

    def block_outputs(self) -> BlockOutputs | None:
        """Return what records the outputs within blocks; None if the plan has none."""
        # All layers that have outputs have the same ones (`Session._plan_layer`), so the first one's are
        # read.
        layers = [layer for layer, planned in self.layers.items() if planned.outputs]
        if not layers:
            return None
        by_name = self.cached is not None
        return BlockOutputs(self.lens, layers, self.layers[layers[0]].outputs, by_name=by_name)

    def free(self, clean: CleanPass, layer: int) -> None:
        """Remove the tensors of a visited block that nothing reads later."""
        if layer in self.layers:
            for role in set(ATTENTION_ROLES) - set(self.layers[layer].kept):
                clean.recorded.pop(self.lens.stack.hook_name(role, layer), None)
        # A pass with fused attention is only visited, so the streams of a long prompt are not kept, except
        # those at its start and its end.
        is_read_later = bool(self.after_pass) or not (self.predict_at is None or self.predicts_at_end)
        if self.is_fused and not is_read_later and layer not in (0, self.last):
            clean.calls[layer] = BlockCall((), {}, None)

    def _methods_at(self, layer: int) -> list[Method]:
        return [method for label, method in self.methods.items() if layer in self.method_layers[label]]

    def __str__(self) -> str:
        positions, asked = self.batch.tokens.shape[1], self.rows
        rows = "all rows" if self.recorded_rows is None else _name_rows(self.recorded_rows)
        lines = [
            f"clean pass of {_count(len(self.batch), 'prompt')}, {_count(positions, 'token')}; asked: "
            f"{'all rows' if asked is None else _name_rows(asked)}"
        ]
        lines.append(f"  attention {'fused, the weights beside it' if self.is_fused else 'eager'}")
        # Neighboring layers with equal plans are one entry, because most layers of a model have the same
        # plan.
        ranges: list[tuple[int, int, LayerPlan]] = []
        for layer, planned in sorted(self.layers.items()):
            if ranges and ranges[-1][2] == planned and ranges[-1][1] == layer - 1:
                ranges[-1] = (ranges[-1][0], layer, planned)
            else:
                ranges.append((layer, layer, planned))
        for first, last, planned in ranges:
            lines.append(f"  layers {first} to {last}" if last > first else f"  layer {first}")
            # Values belong to keys, and all other tensors to rows.
            at_rows = [role for role in planned.records if role != "value"]
            records = [f"{', '.join(at_rows)} at {rows}"] if at_rows else []
            records += ["value at every key"] if "value" in planned.records else []
            lines.append(f"    records   {'; '.join(records) or 'nothing'}")
            if planned.outputs:
                lines.append(f"    outputs   {', '.join(planned.outputs)}")
            for label in planned.visitors:
                lines.append(f"    visited   {self._name_visitor(label, planned)}")
            lines.append(f"    kept      {', '.join(planned.kept) or 'nothing'}")
        graph = "none" if self.rules is None else f"by {type(self.rules).__name__}"
        lines.append(f"  ends      {self._name_end()}; autograd graph: {graph}")
        after = [f"{label} ({self.engines[label]})" for label in self.after_pass]
        lines.append(f"  after     {', '.join(after) or 'nothing'}")
        return "\n".join(lines)

    def _name_visitor(self, label: str, planned: LayerPlan) -> str:
        if label != VERIFICATION:
            return f"by {label} ({self.engines[label]})"
        return f"by the verification, {'all rows' if planned.is_whole else 'a sample of rows'}"

    def _name_end(self) -> str:
        if self.predict_at is None:
            return f"after block {self.last}, without predictions"
        how = "" if self.predicts_at_end else f", {self.predicted_at_once} positions at a time"
        return f"with the logits: predictions at {_count(self.predict_at.shape[1], 'position')}{how}"


def _name_rows(rows: Rows) -> str:
    return f"rows {', '.join(str(list(each)) for each in dict.fromkeys(rows.by_prompt))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
