"""Compute the map of each prompt and method from one clean pass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from lens_mix._blocks import provenance
from lens_mix._blocks.block import Block, LayerRecord
from lens_mix._blocks.cost import count_passes, describe_seconds, suggest_less
from lens_mix._care.users_hooks import find_spliced
from lens_mix._inputs.batches import PaddingSide, Prompt
from lens_mix._passes.clean_pass import CleanPass
from lens_mix._passes.masks import AllowedKeys, PromptMask
from lens_mix._passes.predictions import join_explained
from lens_mix.hooks.mixing import pass_tolerance
from lens_mix.maps import MixingMap
from lens_mix.maps.explained import Explained
from lens_mix.method import RESIDUAL_KEY, Method
from lens_mix.pass_plan import takes_rows
from lens_mix.session import CheckedPass, Session

# A session has the method that measures the residual under this label, which is not the name of any method.
_MEASURED = "measured residual"
# This is the note of a layer map of a model whose pictures do not only enter at the first block.
_ENTERING = (
    "the model also adds features of patches to their positions before {where}, so a rollout counts them as "
    "content of these positions that was there from the start"
)

# This is the note of a map of a model with SAEs of SAELens.
_SPLICED = "SAEs replace {names}, so the map is of the pass with what they reconstruct"


def find_measuring_method(methods: Mapping[str, Method]) -> dict[str, Method]:
    """Return the method that measures residual shares, by its label, if some map of `methods` needs them."""
    # A map whose diagonal contains the residual needs no share of it, and an input map has no layers to mix
    # it into.
    is_needed = any(not method.is_input_map and not method.includes_residual for method in methods.values())
    if not is_needed:
        return {}
    from lens_mix.residual_shares import ResidualShares

    return {_MEASURED: ResidualShares()}


def map_prompts(
    session: Session,
    prompts: list[Prompt],
    side: PaddingSide = "right",
    *,
    prepend_bos: bool | None = None,
    progress: bool = False,
) -> list[dict[str, MixingMap]]:
    """Return the maps of each prompt of a batch, without padding, by the labels of the methods.

    Args:
        session: The model and the methods.
        prompts: The prompts, which run as one batch.
        side: The side on which to pad.
        prepend_bos: The option of the run, for the record.
        progress: Whether to show a bar.

    Raises:
        UnsupportedModelError: If the model or a method on it failed verification; the message has the reason.
    """
    # Key groups are shaped before the clean pass, so that a wrong span raises its error without that cost.
    for prompt in prompts:
        for method in session.methods.values():
            session.key_groups(method, prompt)
    options: dict[str, Any] = {"prepend_bos": prepend_bos, "progress": progress}
    record = _map_batch(session, prompts, side, **options)
    return [
        _add_shares(session.methods, {label: record.make_map(label, index) for label in session.methods})
        for index in range(len(prompts))
    ]


def _map_batch(
    session: Session,
    prompts: list[Prompt],
    side: PaddingSide,
    *,
    prepend_bos: bool | None,
    progress: bool,
) -> _BatchRecord:
    """Return the record of one batch, whose blocks are mapped while the clean pass runs or after it."""
    total = sum(len(session.layers_of(method)) for method in session.methods.values())
    # Python ignores an exception of a signal handler while it frees a bar, so none is made that is not shown.
    bar = tqdm(total=total, leave=False) if progress else None
    with contextlib.nullcontext() if bar is None else bar:
        maps = _BlockMaps(session, bar)
        with session.checked_pass(prompts, side, maps.start) as checked:
            maps.end(checked)
            return _BatchRecord(checked, maps, prepend_bos)


def _add_shares(methods: Mapping[str, Method], maps: dict[str, MixingMap]) -> dict[str, MixingMap]:
    """Return the maps of one prompt, with measured residual shares for maps that lack the residual."""
    if _MEASURED not in maps:
        return maps
    # Nobody asked for the map of the shares itself.
    shares = maps.pop(_MEASURED).scores[..., 0]
    for label, mixing_map in maps.items():
        if mixing_map.kind == "layer" and not methods[label].includes_residual:
            maps[label] = mixing_map.replace(residual_shares=shares)
    return maps


class _BlockMaps:
    """The maps of one batch. Each method maps the blocks separately, unless it needs all of them at once.

    Attributes:
        blocks: The blocks of each method.
        scores: The maps of each method, in the order of the session's layers, with all rows of the blocks.
    """

    def __init__(self, session: Session, bar: tqdm | None) -> None:
        self._session, self._bar = session, bar
        self.blocks: dict[str, dict[int, Block]] = {}
        self.scores: dict[str, Float[Tensor, "layer batch *head query key"]] = {}

    def start(self, checked: CheckedPass) -> _BlockMaps:
        """Open the blocks of the methods that visit them in a pass, which has just started."""
        # A pass that was planned again has new blocks.
        self.blocks, self.scores = {}, {}
        after = checked.plan.after_pass
        self._open_blocks(checked, [label for label in self._session.methods if label not in after])
        return self

    def visit(self, clean: CleanPass, layer: int) -> None:
        """Compute the maps of a block that has run, by the methods that read no other one."""
        self._map_block(clean, list(self.blocks), layer)

    def end(self, checked: CheckedPass) -> None:
        """Compute the maps of the methods that run after the pass."""
        methods, labels = self._session.methods, checked.plan.after_pass
        self._open_blocks(checked, labels)
        separate = [label for label in labels if methods[label].reads == "block"]
        for layer in checked.clean.calls:
            self._map_block(checked.clean, separate, layer)
        for label in labels:
            if label not in separate:
                self._map_stack(checked.clean, label)

    def _open_blocks(self, checked: CheckedPass, labels: Sequence[str]) -> None:
        for label in labels:
            self.blocks[label] = {block.layer: block for block in checked.blocks(label)}

    def _map_block(self, clean: CleanPass, labels: Sequence[str], layer: int) -> None:
        for label in labels:
            if layer in self.blocks[label]:
                method, block = self._session.methods[label], self.blocks[label][layer]
                self._say(label)
                is_first, start = label not in self.scores, time.perf_counter()
                scores = _check_shape(method(block), method, block)
                self._put(label, layer, scores)
                if is_first and self._session.effort.progress is False:
                    # Reading a number waits until an accelerator has computed it.
                    scores[..., -1:].sum().item()
                    self._announce_blocks(label, time.perf_counter() - start)
                self._say(label, 1)
        # The cache of a block is of no use to later blocks.
        clean.cache.pop(layer, None)

    def _map_stack(self, clean: CleanPass, label: str) -> None:
        method, stack = self._session.methods[label], list(self.blocks[label].values())
        self._say(label)
        self._announce_passes(clean, label)
        stacked = method.of_blocks(stack)
        # The one map of a whole model has the label of its last block, as `Session.mapped_layers` says.
        mapped = stack[-1:] if method.reads == "model" else stack
        for block, scores in zip(mapped, stacked, strict=True):
            self._put(label, block.layer, _check_shape(scores, method, stack[-1]))
        clean.cache.clear()
        self._say(label, len(stacked))

    def _announce_blocks(self, label: str, seconds: float) -> None:
        """Say that a method takes long, if its map of each block takes as long as that of the first one."""
        method, blocks = self._session.methods[label], list(self.blocks[label].values())
        if len(blocks) > 1:
            whole = seconds * len(blocks)
            cheaper = suggest_less(blocks, by_rows=takes_rows(method, blocks[0].engine), by_layers=True)
            basis = f"{len(blocks)} layers, measured on the first one"
            sentence = f"{label} takes about {describe_seconds(whole)} ({basis}); {cheaper}"
            self._session.effort.announce(label, whole, sentence)

    def _announce_passes(self, clean: CleanPass, label: str) -> None:
        """Say that a method takes long, as many forward passes as it takes of the measured time of one."""
        method, blocks = self._session.methods[label], list(self.blocks[label].values())
        cost = method.default_cost()
        # Nothing can be said of the time of a method whose cost is neither recorded nor declared.
        if cost is not None:
            cost, each = method.scale_cost(cost, blocks), clean.estimate_seconds()
            passes = count_passes(cost, blocks)
            by_rows, by_layers = bool(cost.per_row), bool(cost.per_layer)
            cheaper = suggest_less(blocks, by_rows=by_rows, by_layers=by_layers, pass_seconds=each)
            basis = f"as long as {passes:,.0f} forward passes of {describe_seconds(each)}"
            sentence = f"{label} takes about {describe_seconds(passes * each)}, {basis}; {cheaper}"
            self._session.effort.announce(label, passes * each, sentence)

    def _say(self, label: str, done: int = 0) -> None:
        """Show in the bar, if there is one, which method runs and that it has mapped further blocks."""
        if self._bar is not None:
            self._bar.set_description(label)
            self._bar.update(done)

    def _put(self, label: str, layer: int, scores: Float[Tensor, "batch *head query key"]) -> None:
        """Copy the map of one block to its place among the layers, so that no stack is copied later."""
        layers = self._session.mapped_layers(self._session.methods[label])
        if label not in self.scores:
            self.scores[label] = scores.new_empty((len(layers), *scores.shape))
        # An input map reads all blocks below the selected layers, whose own maps nobody asked for.
        if layer in layers:
            self.scores[label][layers.index(layer)] = scores.detach()


def _check_shape(scores: Tensor, method: Method, block: Block) -> Tensor:
    """Return the map that a method computed, if it has the rows of the block.

    Raises:
        TypeError: If it is not a tensor of real numbers.
        ValueError: If it has another shape.
    """
    batch, rows = block.queries.shape
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        got = f"a tensor of {scores.dtype}" if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(
            f"{method.name}: expected a tensor of real numbers [batch, (head,) query, key], got {got}"
        )
    # The number of keys is checked later (`_select_scores`), because keys may be groups, or have one more for
    # the residual.
    if scores.ndim not in (3, 4) or (scores.shape[0], scores.shape[-2]) != (batch, rows):
        raise ValueError(
            f"{method.name}: expected a map [batch, (head,) query, key] with batch {batch} and {rows} "
            f"queries for block {block.layer}, got {list(scores.shape)}; return block.rows_of(map) if the "
            "map has all rows"
        )
    return scores


def _explains_logits(method: Method) -> bool:
    """Return whether a method explains a target that is a function of the logits."""
    if method.target is None:
        return False
    from lens_mix.targets import as_target

    return as_target(method.target).reads == "logits"


def _select(tensor: Tensor, axis: int, indices: Int[Tensor, " place"]) -> Tensor:
    """Return the tensor at some indices of an axis. All of them in order need no copy."""
    every = torch.arange(tensor.shape[axis], device=indices.device)
    return tensor if every.equal(indices) else tensor.index_select(axis, indices)


class _BatchRecord:
    """Make the maps of one batch. An instance must be created while the clean pass is open."""

    def __init__(self, checked: CheckedPass, maps: _BlockMaps, prepend_bos: bool | None) -> None:
        self._checked_pass, self._blocks, self._scores = checked, maps.blocks, maps.scores
        self._allowed = checked.allowed_keys()
        self._provenance = provenance.of_run(checked.clean.lens, prepend_bos)
        self._provenance["verification_error"] = checked.verification.largest_error
        self._dropped_classifier = provenance.dropped_classifier(checked.clean.lens)
        layer = checked.clean.find_entering_patches()
        self._entering = () if layer is None else (_ENTERING.format(where=checked.clean.lens.where(layer)),)
        spliced = find_spliced(checked.clean.lens.model)
        self._spliced = (_SPLICED.format(names=", ".join(spliced)),) if spliced else ()
        methods = checked.session.methods.values()
        if self._dropped_classifier and any(_explains_logits(method) for method in methods):
            warnings.warn(f"the target reads logits, but {self._dropped_classifier}", stacklevel=2)

    @functools.cached_property
    def _reaching(self) -> AllowedKeys:
        return self._allowed.reaching()

    def make_map(self, label: str, index: int) -> MixingMap:
        """Return the map of one prompt and one method."""
        session, clean, rows = self._checked_pass.session, self._checked_pass.clean, self._checked_pass.rows
        method, prompt = session.methods[label], clean.batch.prompts[index]
        layers, tokens = session.mapped_layers(method), self._checked_pass.tokens(index)
        queries = None if rows is None else list(rows.by_prompt[index])
        key_tokens, groups = self._name_keys(method, index)
        prompt_mask = self._make_mask(label, index, layers)
        # A group may have positions before and after a query, so no triangle says which groups it sees.
        causal, mask = prompt_mask.causal_and_mask() if groups is None else (False, None)
        # Such a method makes passes through all blocks, whose rounding errors add up at hidden keys.
        accepted = pass_tolerance(clean.lens.dtype) if method.reads == "model" else 0.0
        scores = self._select_scores(label, index, groups)
        scores = prompt_mask.without_rounding(scores, groups, accepted)
        blocks = [self._blocks[label][layer] for layer in layers]
        # The keys of a decoder's self-attention are tokens, which have no place in a picture or in sound.
        is_source_apart = clean.lens.stack.name == "decoder"
        source = dataclasses.replace(prompt, grid=None) if is_source_apart else prompt
        has_sink = method.has_unit_rows and provenance.has_sink(scores, clean.lens.dtype)
        return MixingMap(
            scores=scores,
            tokens=tokens,
            method=method.name,
            causal=causal,
            mask=mask,
            key_tokens=key_tokens,
            queries=queries,
            layers=layers,
            parameters=method.parameters(),
            residual=method.residual,
            kind="input" if method.is_input_map else "layer",
            provenance={
                **self._provenance,
                **self._record_run(label, index, has_sink),
                **provenance.details(blocks, index),
            },
            default_query=self._find_default_query(label, index, len(tokens)),
            explained=self._explain(label, index),
            features=source.pixels if source.features is None else source.features,
            grid=source.grid if groups is None else None,
            notes=(
                *filter(None, (clean.lens.stack.gaps, self._note_classifier(method), clean.no_predictions)),
                *self._entering,
                *self._spliced,
                *prompt.notes,
                *provenance.notes(scores, layers, queries),
                *((provenance.SINK,) if has_sink else ()),
                *(text for block in blocks for text in self._note_block(block, index)),
            ),
        )

    def _name_keys(self, method: Method, index: int) -> tuple[Any, list[list[int]] | None]:
        """Return the tokens of a map's keys, None if they are the queries' own, and the groups that are keys.

        Args:
            method: The method.
            index: The index of the prompt.

        Returns:
            The tokens, or the names of the groups; and the positions of each group, or None if each position
            is a key.
        """
        session = self._checked_pass.session
        keys: Any = self._checked_pass.key_tokens(index)
        named = session.key_groups(method, self._checked_pass.clean.batch.prompts[index])
        if named is not None:
            keys = [group.name for group in named]
        if keys is not None and self._has_residual_key(method):
            keys = [*keys, RESIDUAL_KEY]
        return keys, None if named is None else [group.positions for group in named]

    def _has_residual_key(self, method: Method) -> bool:
        """Return whether a method's map has a last key for the residual."""
        return self._checked_pass.clean.lens.stack.is_cross and method.includes_residual

    def _record_run(self, label: str, index: int, has_sink: bool) -> dict[str, Any]:
        """Return what the provenance of one prompt's map says of its run."""
        checked, stack = self._checked_pass, self._checked_pass.clean.lens.stack
        method, prompt = checked.session.methods[label], checked.clean.batch.prompts[index]
        record = provenance.of_prompt(prompt) | {"engine": checked.engines[label]}
        facts = {
            "sink": has_sink,
            "whole_model": method.reads == "model",
            "layers_add_up": method.layers_add_up,
            "has_tree": method.has_tree,
        }
        # Only what is true is recorded, because a map made by hand has none of these entries.
        record |= {name: True for name, is_true in facts.items() if is_true}
        record["predicts_next"] = checked.verification.predicts_next or stack.reads_target
        if stack.source is not None:
            target = len(checked.token_ids(index))
            record["joint"] = {"source": len(prompt.tokens), "target": target}
        return record

    def _find_default_query(self, label: str, index: int, count: int) -> int | None:
        """Return the position that the method's target reads, else 0 in a bidirectional model, else None."""
        is_encoder = (
            not self._checked_pass.verification.predicts_next
            and not self._checked_pass.clean.lens.stack.reads_target
        )
        explained = (block.record.default_rows[index] for block in self._blocks[label].values())
        positions = (position for position in explained if position is not None and position < count)
        return next(positions, 0 if is_encoder else None)

    def _note_classifier(self, method: Method) -> str | None:
        """Return the note about a missing classifier, unless the method's target has the classifier."""
        return self._dropped_classifier if method.target is None or _explains_logits(method) else None

    def _note_block(self, block: Block, index: int) -> list[str]:
        """Return the notes about one prompt in a block: what user hooks change, and those of the method."""
        hooks = self._checked_pass.hook_notes.get(block.layer, ())
        return [*(f"layer {block.layer}: {note}" for note in hooks), *block.record.warnings[index]]

    def _explain(self, label: str, index: int) -> tuple[Explained, ...]:
        """Return what each row of one prompt's map explains: the prediction and the method's target."""
        blocks, clean = self._blocks[label], self._checked_pass.clean
        known = {
            key: entry for block in blocks.values() for key, entry in block.record.explained[index].items()
        }
        indices = self._find_rows(index, has_some_rows=not blocks[max(blocks)].every_query).tolist()
        targets = [known.get(row, Explained()) for row in indices]
        if None in known:
            targets = self._explain_all(index, known[None], [block.record for block in blocks.values()])
        if clean.predictions is None:
            return tuple(targets)
        rows = self._find_rows(index, has_some_rows=self._checked_pass.rows is not None).tolist()
        return join_explained([clean.predictions[index][row] for row in rows], targets)

    def _explain_all(self, index: int, entry: Explained, records: list[LayerRecord]) -> list[Explained]:
        """Return what the rows of one prompt explain if their target is one number for all of them.

        The prediction at the position that the target reads belongs to the row of that position alone.
        """
        rows = self._checked_pass.rows
        positions = rows.by_prompt[index] if rows else range(len(self._checked_pass.token_ids(index)))
        # A method of several layers writes its record into one of its blocks.
        read = next((record.default_rows[index] for record in records if record.explained[index]), None)
        bare = entry.without_prediction()
        return [entry if read in (None, position) else bare for position in positions]

    def _select_scores(
        self, label: str, index: int, groups: list[list[int]] | None
    ) -> Float[Tensor, "layer *head query key"]:
        """Return the scores of one prompt in the chosen rows, without padding.

        Args:
            label: The label of the method.
            index: The index of the prompt.
            groups: The groups of positions that are the keys of the map; None: each position is a key.
        """
        clean, blocks = self._checked_pass.clean, self._blocks[label]
        is_joint = clean.lens.stack.source is not None
        keys = (clean.real_inputs if is_joint else clean.real_keys)[index].nonzero()[:, 0]
        # Every layer of an input map has the rows of the last block.
        rows = self._find_rows(index, has_some_rows=not blocks[max(blocks)].every_query)
        stacked = _select(self._scores[label][:, index], -2, rows)
        if self._has_residual_key(self._checked_pass.session.methods[label]):
            keys = torch.cat([keys, keys.new_tensor([stacked.shape[-1] - 1])])
        elif groups is None and stacked.shape[-1] <= int(keys[-1]):
            raise ValueError(
                f"{label}: expected a key per position, {int(keys[-1]) + 1} or more, got "
                f"{stacked.shape[-1]}; if the keys are groups of positions, return these in key_groups"
            )
        scores = stacked if groups is not None else _select(stacked, -1, keys)
        # A view would keep the maps of all prompts in memory.
        return scores if scores.untyped_storage().nbytes() == scores.nbytes else scores.clone()

    def _find_rows(self, index: int, has_some_rows: bool) -> Int[Tensor, " query"]:
        """Return the indices of one prompt's rows in a tensor of the padded batch.

        Args:
            index: The index of the prompt.
            has_some_rows: Whether the tensor has only the rows that were asked for.
        """
        rows = self._checked_pass.rows
        if rows is None:
            return self._checked_pass.clean.real[index].nonzero()[:, 0]
        # Rows are padded to the same number in all prompts of a batch, by repeating the last one (`Rows.of`).
        positions = rows.positions[index, : len(rows.by_prompt[index])]
        return torch.arange(len(positions), device=positions.device) if has_some_rows else positions

    def _make_mask(self, label: str, index: int, layers: Sequence[int]) -> PromptMask:
        """Return the mask of one prompt: which keys its rows may see, or the rows that its target reads."""
        clean, blocks = self._checked_pass.clean, self._blocks[label]
        method, keys = self._checked_pass.session.methods[label], clean.real_keys[index].nonzero()[:, 0]
        allowed = self._reaching if method.is_input_map else self._allowed
        rows = self._find_rows(index, has_some_rows=clean.rows is not None)
        mask = allowed.of_prompt(index, rows, keys, layers)
        read = blocks[max(blocks)].record.rows_read[index]
        if read is not None:
            every = clean.real[index].nonzero()[:, 0]
            mask = mask.with_rows(allowed.of_prompt(index, every[read.start : read.stop], keys, layers))
        mask = mask.with_own_key() if self._has_residual_key(method) else mask
        is_joint = clean.lens.stack.source is not None
        return mask.with_source(len(clean.batch.prompts[index].tokens)) if is_joint else mask
