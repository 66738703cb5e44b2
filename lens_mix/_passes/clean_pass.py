"""The clean pass: one forward pass without interventions, and its records."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lens_mix._care.changes import Change, Changes, forward_hook
from lens_mix._care.tracebacks import find_user_code, is_out_of_memory
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._inputs.batches import Batch
from lens_mix._inputs.rows import Rows, rows_at
from lens_mix._model.model import Lens
from lens_mix._model.unembedding import row_at, unembedding_at
from lens_mix._passes.predictions import describe_missing, name_token, read_predictions
from lens_mix._passes.replay import BlockCall, BlockReplay, captured_calls
from lens_mix.hooks.base import HookPair
from lens_mix.hooks.recording import record_attention, watch_pattern
from lens_mix.maps.explained import Explained

if TYPE_CHECKING:
    from lens_mix._passes.autograd_graph import AutogradGraph
    from lens_mix._passes.block_outputs import BlockOutputs
    from lens_mix._passes.cached_pass import CachedPass
    from lens_mix._passes.fused_attention import FusedAttention

# What fused attention can record of a block.
FUSED_ROLES = frozenset({"pattern", "value", "z"})
# Pieces of torch's errors about different dtypes, or about a number that a dtype can't represent.
_DTYPE_TEXTS = ("scalar type", "dtype", "without overflow")

# The note of maps that were computed from a cache.
_CACHED = (
    "computed from an ActivationCache: the map includes what hooks changed in its pass, and does not have "
    "predictions"
)


class StopForward(Exception):
    """End a forward pass after the last requested block has run.

    Two classes of TransformerLens have no `stop_at_layer`, and some Bridges ignore it or return logits.
    """


def stop_forward(module: nn.Module, args: Any, output: Any) -> None:
    """End the pass; this forward hook of torch has to be registered last."""
    raise StopForward


@dataclasses.dataclass(frozen=True)
class CleanPass:
    """The records of one forward pass without interventions.

    Attributes:
        lens: The lens of the model.
        batch: The prompts.
        calls: Layer -> the block's arguments and output, at all positions.
        recorded: Hook name -> tensor, for the requested hooks.
        attended: Watched layer -> the mask of the keys that got weight from any head. Equal masks of
            neighboring layers are one tensor.
        rows: The rows of the recorded patterns and z, and of `attended`; None for all positions.
        replays: Layer -> the block's replay.
        cache: Layer -> results that the methods of one run share, until the block has been mapped.
        z_factors: Layer -> the factors by which user hooks multiply z of each head.
        entering: Layer -> the residual stream before a mapped cross-attention, when the block has run.
        source_calls: For the joint part, the arguments and output of the encoder's first block.
        graph: The autograd graph of the pass; None if it was not requested.
        predictions: For each prompt, the model's predictions at the requested positions; None if they were
            not requested, or if the model has none.
        no_predictions: Why requested predictions are missing, as a note.
        predicted_at: The positions of the predictions, if it is one of each prompt; else None.
        logits: The logits there.
        seeing_later: The watched layers in which a query attended to a later key. Only batches with pictures
            are searched for them: a model that is causal on text may not be causal on pictures.
        seconds: Layer -> the time that its block took, without what visited it.
        fused: The fused attention of the pass; None if it was eager. A block of such a pass is not replayed.
    """

    lens: Lens
    batch: Batch
    calls: dict[int, BlockCall]
    recorded: dict[str, Tensor]
    attended: dict[int, Bool[Tensor, "batch query key"]]
    rows: Rows | None = None
    replays: dict[int, BlockReplay] = dataclasses.field(default_factory=dict)
    cache: dict[int, dict[Any, Any]] = dataclasses.field(default_factory=dict)
    z_factors: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    entering: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    source_calls: dict[int, BlockCall] = dataclasses.field(default_factory=dict)
    graph: AutogradGraph | None = None
    predictions: list[list[Explained]] | None = None
    no_predictions: str | None = None
    predicted_at: Int[Tensor, "batch read"] | None = None
    logits: Float[Tensor, "batch read d_vocab"] | None = None
    seeing_later: set[int] = dataclasses.field(default_factory=set)
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    fused: FusedAttention | None = None

    def logits_at(self, positions: Int[Tensor, "batch read"]) -> Float[Tensor, "batch read d_vocab"] | None:
        """Return the logits at these positions, or None if the pass did not keep them."""
        is_kept = self.predicted_at is not None and torch.equal(positions, self.predicted_at)
        return self.logits if is_kept else None

    def resid_pre(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that the mapped attention's branch is added to."""
        return self.entering[layer] if layer in self.entering else self.calls[layer].resid_pre

    def tensor(self, role: str, layer: int) -> Tensor:
        """Return the recorded "query", "value", "pattern" or "z" of one layer."""
        return self.recorded[self.lens.stack.hook_name(role, layer)]

    def effective_pattern(self, layer: int) -> Float[Tensor, "batch head query key"]:
        """Return the recorded pattern times the factors by which user hooks multiply z of each head."""
        pattern, factors = self.tensor("pattern", layer), self.z_factors
        return pattern if layer not in factors else pattern * factors[layer].to(pattern.dtype)[:, None, None]

    @property
    def real(self) -> Bool[Tensor, "batch pos"]:
        """The mask of the stack's positions (its queries) that are the prompts' own."""
        return self.batch.real_positions(self.lens.stack.name)

    @property
    def real_rows(self) -> Bool[Tensor, "batch query"]:
        """The mask of the recorded rows that are the prompts' own."""
        return self.real if self.rows is None else rows_at(self.real, self.rows.positions)

    @property
    def real_keys(self) -> Bool[Tensor, "batch key"]:
        """The mask of the keys that are the prompts' own; the keys of cross-attention are the source's."""
        return self.batch.real_keys(self.lens.stack.name)

    @property
    def inputs(self) -> Float[Tensor, "batch input d_model"]:
        """The input of the first block; for the joint part, the encoder's and then the decoder's."""
        source, resid_pre = self.lens.stack.source, self.calls[0].resid_pre
        return resid_pre if source is None else torch.cat([self.source_calls[0].resid_pre, resid_pre], 1)

    @property
    def real_inputs(self) -> Bool[Tensor, "batch input"]:
        """The mask of the positions of `inputs` that are the prompts' own."""
        return self.real if self.lens.stack.source is None else torch.cat([self.batch.real, self.real], 1)

    def find_entering_patches(self) -> int | None:
        """Return the first block that reads more than the block below it returned; None if there is none.

        Only batches with pictures are searched.
        """
        layers = sorted(self.calls) if self.batch.has_pictures else []
        for below, layer in itertools.pairwise(layers):
            # Nothing is computed between two blocks, so any difference is something that the model has added.
            if not torch.equal(self.calls[below].resid_post, self.calls[layer].resid_pre):
                return layer
        return None

    def estimate_seconds(self) -> float:
        """Return about how long a forward pass takes: as long as its usual block, times their number."""
        stack = self.lens.stack
        # The first block's time includes what the model does before it.
        usual = statistics.median(self.seconds.values())
        return usual * (len(stack) + (0 if stack.source is None else len(stack.source)))

    def replay(self, layer: int) -> BlockReplay:
        """Return the replay of a block."""
        if self.fused is not None:
            # The arguments of its call are those of fused attention.
            raise ValueError(
                f"block {layer}: expected a method that reads the records of its block, got one that runs a "
                "block; write engines = ('hooks',), or reads = 'above' with the maps in of_blocks"
            )
        if layer not in self.replays:
            self.replays[layer] = BlockReplay(self.lens, layer, self.calls[layer], self.real)
        return self.replays[layer]

    def with_whole_pattern(self, layer: int) -> CleanPass:
        """Run a block again and return this pass with that block's pattern alone, recorded at all rows."""
        # Only this block's pattern has all rows, so the tensors with fewer rows are left out.
        whole = dataclasses.replace(self, recorded={}, attended={}, rows=None, cache={})
        template = self.lens.stack.attention_template
        pairs = record_attention(layer, whole.recorded, ["pattern"], attention=template)
        pairs.append(watch_pattern(layer, _watch_keys(layer, whole, None), attention=template))
        self.replay(layer).run(pairs)
        return whole


def clean_pass(
    lens: Lens,
    batch: Batch,
    fwd_hooks: Sequence[HookPair] = (),
    recorded: dict[str, Tensor] | None = None,
    *,
    required: Mapping[int, Collection[str]] = MappingProxyType({}),
    watched: Sequence[int] | None = None,
    stop_after: int = -1,
    rows: Rows | None = None,
    as_given: bool = False,
    graph: AutogradGraph | None = None,
    predict_at: Int[Tensor, "batch query"] | None = None,
    z_factors: Mapping[int, Tensor] = MappingProxyType({}),
    start: Callable[[CleanPass], Callable[[int], None]] | None = None,
    outputs: BlockOutputs | None = None,
    cached: CachedPass | None = None,
    fused: FusedAttention | None = None,
) -> CleanPass:
    """Make one forward pass, and record the blocks' calls and the tensors of the hooks.

    Args:
        lens: The lens of the model.
        batch: The prompts.
        fwd_hooks: TransformerLens hooks that record, into `recorded`.
        recorded: The dictionary that the hooks fill.
        required: Layer -> the hook names that have to be in `recorded` when its block has run.
        watched: The layers to fill `CleanPass.attended` for; None for all that run and have attention.
        stop_after: The last block to record. The pass ends there, unless it makes predictions.
        rows: The rows that the hooks record; None for all positions.
        as_given: As in `Lens.forward`.
        graph: The autograd graph that the pass builds; the pass has to reach the last block.
        predict_at: The positions of the logits at which to read the model's predictions; None for none.
        z_factors: As in `CleanPass`.
        start: A function that gets the pass before it starts, and returns the function to call with the
            number of each layer whose block has run, as long as all required hooks have fired. That one must
            not run a block, and its errors end the pass.
        outputs: The outputs within blocks to record; None for none.
        cached: A pass of the user's whose activations are read, instead of running the model: of the blocks
            in `required`, without predictions.
        fused: Fused attention, which records the tensors of attention itself, at `rows`; None for eager
            attention, whose tensors `fwd_hooks` record.

    Raises:
        ValueError: A hook point is missing, an input is out of range, or a block's output is not finite.
        UnsupportedModelError: A hook never fired, or the model's own forward pass fails (`_explain`).
    """
    last = lens.layer_index(stop_after)
    recorded = {} if recorded is None else recorded
    present = [layer for layer in lens.stack.attention_layers if layer <= last]
    layers = present if watched is None else list(watched)
    clean = CleanPass(lens, batch, {}, recorded, {}, rows, z_factors=z_factors, graph=graph, fused=fused)
    template = lens.stack.attention_template
    watching = [watch_pattern(layer, _watch_keys(layer, clean, rows), attention=template) for layer in layers]
    ends = _BlockEnds(clean, required, None if start is None else start(clean))
    # Calls are captured first, because the end of a block reads its output from them.
    changes = [*_capture_calls(clean, last), *([] if outputs is None else outputs.changes), *ends.hooks(last)]
    if predict_at is None:
        # It is registered last, because it raises: torch would not call any hook after it.
        changes.append(forward_hook(lens.stack.blocks[last], stop_forward))
    hooks = [*fwd_hooks, *([] if outputs is None else outputs.fwd_hooks)]
    if fused is None:
        hooks += watching
    else:
        changes += fused.changes(recorded, clean.attended)
    if cached is not None:
        cached.feed(clean, hooks, sorted(required), ends.end)
        ends.raise_failure()
        return dataclasses.replace(clean, no_predictions=_CACHED)
    clean = _run_forward(clean, hooks, changes, last, predict_at, as_given=as_given)
    ends.raise_failure()
    recorded.update({name: tensor.detach() for name, tensor in recorded.items()})
    _require_complete(clean, ends.silent, layers, last)
    if graph is not None:
        graph.read(clean.calls)
    return clean


def _capture_calls(clean: CleanPass, last: int) -> list[Change]:
    """Return the hooks that record the calls of the blocks into a pass."""
    stack = clean.lens.stack
    hooks = captured_calls(dict(enumerate(stack.blocks[: last + 1])), clean.calls)
    if stack.source is not None:
        hooks += captured_calls({0: stack.source.blocks[0]}, clean.source_calls)
    return hooks


class _BlockEnds:
    """What happens when a block of a clean pass has run: its output is checked, and then it is visited.

    An error is not raised in the model, whose code may catch it, and is not taken for one of the model. It
    ends the pass, and `raise_failure` raises it afterwards.

    Args:
        clean: The pass.
        required: As in `clean_pass`.
        visit: The function to call with the number of a block; None for none.

    Attributes:
        silent: The names of the required hooks that have not fired.
    """

    def __init__(
        self,
        clean: CleanPass,
        required: Mapping[int, Collection[str]],
        visit: Callable[[int], None] | None,
    ) -> None:
        self._clean, self._required, self._visit = clean, required, visit
        self._visited: list[int] = []
        self._failures: list[Exception] = []
        self._since = time.perf_counter()
        self.silent: list[str] = []

    def hooks(self, last: int) -> list[Change]:
        """Return the forward hooks of the blocks up to the last recorded one."""
        blocks = self._clean.lens.stack.blocks[: last + 1]
        return [forward_hook(block, functools.partial(self.end, layer)) for layer, block in enumerate(blocks)]

    def raise_failure(self) -> None:
        """Raise the error that has ended the pass, if there is one."""
        if self._failures:
            raise self._failures.pop(0)

    def end(self, layer: int, *_: Any) -> None:
        """Check and visit a block that has run; an error ends the pass (`StopForward`)."""
        try:
            self._read(layer)
        except Exception as problem:
            self._failures.append(problem)
            raise StopForward from None
        self._since = time.perf_counter()

    def _read(self, layer: int) -> None:
        if self._visited:
            raise ValueError(
                f"block {self._visited[0]}: expected a method that reads the records of the block, got one "
                "that runs a block while the clean pass runs; write engines = ('hooks',), or reads = 'above' "
                "with the maps in of_blocks"
            )
        # A cache may lack the output of a block that no method reads.
        if layer in self._clean.calls:
            # This reads the output, so an accelerator has finished the block afterwards.
            _require_finite(self._clean, layer)
        self._clean.seconds[layer] = time.perf_counter() - self._since
        recorded = self._clean.recorded
        self.silent += [name for name in self._required.get(layer, ()) if name not in recorded]
        # If a hook has not fired, the pass runs to its end, so that its error names all such hooks.
        if self._visit is not None and not self.silent:
            # Recorded tensors are detached even if the pass builds an autograd graph.
            recorded.update({name: tensor.detach() for name, tensor in recorded.items()})
            self._visited.append(layer)
            with torch.no_grad():
                self._visit(layer)
            self._visited.pop()


def _run_forward(
    clean: CleanPass,
    fwd_hooks: Sequence[HookPair],
    changes: Sequence[Change],
    last: int,
    predict_at: Int[Tensor, "batch query"] | None,
    *,
    as_given: bool,
) -> CleanPass:
    """Run the model, and return the pass with its predictions; the arguments are those of `clean_pass`.

    Args:
        clean: The pass, which the hooks fill.
        fwd_hooks: The TransformerLens hooks.
        changes: The hooks of torch, in order.
        last: The last block that is recorded.
        predict_at: The positions of the predictions.
        as_given: As in `Lens.forward`.
    """
    lens, batch, graph = clean.lens, clean.batch, clean.graph
    mode, hooks = lens.evaluation_mode(gradients=graph is not None), lens.hooked(fwd_hooks)
    building = graph.built() if graph is not None else contextlib.nullcontext()
    narrowing = unembedding_at(lens.model, predict_at)
    with mode, building, hooks, Changes(changes), contextlib.suppress(StopForward):
        try:
            with narrowing as narrowed:
                output = lens.forward(batch, as_given=as_given)
            return _with_predictions(clean, output, predict_at, is_narrow=bool(narrowed))
        except StopForward:
            raise
        except Exception as problem:
            if predict_at is not None and last in clean.calls:
                # All records are complete, so an error of the model's last modules must not prevent a map.
                return dataclasses.replace(clean, no_predictions=describe_missing(problem))
            # An error in a user's hook, or for lack of memory, is best shown as it is, with its own
            # traceback.
            if not is_out_of_memory(problem) and find_user_code(problem) is None:
                _explain(lens, batch, problem)
            raise
    return clean


def _with_predictions(
    clean: CleanPass, output: Any, positions: Int[Tensor, "batch query"] | None, *, is_narrow: bool
) -> CleanPass:
    """Return the pass with the predictions that its output contains.

    Args:
        clean: The pass.
        output: What the model returned.
        positions: The positions of the predictions.
        is_narrow: Whether the output has these positions only.
    """
    logits = output if torch.is_tensor(output) else getattr(output, "logits", None)
    if positions is None or logits is None or logits.ndim != 3:
        return clean
    rows = logits if is_narrow else row_at(logits, positions)
    name = functools.partial(name_token, clean.lens.tokenizer)
    found = [read_predictions(each, name) for each in rows.detach()]
    # Logits of several positions are large, and only those of a single one are read again by a method.
    if positions.shape[1] > 1:
        return dataclasses.replace(clean, predictions=found)
    if clean.graph is not None and clean.graph.is_kept and rows.requires_grad:
        clean.graph.logits = rows
    return dataclasses.replace(clean, predictions=found, predicted_at=positions, logits=rows.detach())


def _explain(lens: Lens, batch: Batch, problem: Exception) -> None:
    """Raise an error that explains why the model's own forward pass fails, if it does.

    Raises:
        ValueError: An input is out of the model's range.
        UnsupportedModelError: The model mixes dtypes, or a pass with the user's own inputs fails too.
    """
    # An embedding raises an IndexError that names neither the input nor its range.
    if isinstance(problem, IndexError) and batch.inputs:
        got = {name: f"{value.min()}..{value.max()}" for name, value in batch.inputs.items()}
        raise ValueError(
            f"model inputs: expected numbers that the model has rows for, got {got}"
        ) from problem
    # A module that creates tensors of a fixed dtype fails in any other one, and its error does not say so.
    if lens.dtype != torch.float32 and any(text in str(problem) for text in _DTYPE_TEXTS):
        raise UnsupportedModelError(
            f"the model's own forward pass fails in {lens.dtype} ({problem}): something in it is made for "
            "another dtype; cast the model (model.to(torch.float32))"
        ) from problem
    try:
        lens.forward(batch, as_given=True)
    except StopForward:
        return
    except Exception as own:
        raise UnsupportedModelError(
            f"the model's own forward pass fails: {type(own).__name__}: {own}; expected a model that runs on "
            f"{batch.tokens.shape[1]} tokens"
        ) from problem


def _watch_keys(layer: int, clean: CleanPass, rows: Rows | None) -> Callable[[Tensor], None]:
    """Return a function that notes which keys get weight in some rows of a pattern; None: in all of it."""
    positions = None if rows is None else rows.positions
    has_pictures = clean.batch.has_pictures

    def watch(pattern: Tensor) -> None:
        if has_pictures and bool((pattern.triu(diagonal=1) != 0).any()):
            clean.seeing_later.add(layer)
        pattern = rows_at(pattern, positions, axis=2)
        # This takes a quarter of the time of `(pattern != 0).any(dim=1)`.
        attended = (pattern.amax(dim=1) != 0) | (pattern.amin(dim=1) != 0)
        # Most layers see the same keys, and then have one mask in common.
        below = clean.attended.get(layer - 1)
        clean.attended[layer] = attended if below is None or not below.equal(attended) else below

    return watch


def _require_complete(clean: CleanPass, silent: Sequence[str], watched: Sequence[int], last: int) -> None:
    lens = clean.lens
    missing = [layer for layer in range(last + 1) if layer not in clean.calls]
    if missing:
        raise UnsupportedModelError(f"blocks {missing} of {lens.stack.name!r} never ran in a forward pass")
    unseen = [lens.stack.hook_name("pattern", layer) for layer in watched if layer not in clean.attended]
    silent = [*silent, *(name for name in unseen if name not in silent)]
    if silent:
        raise UnsupportedModelError(
            f"hooks that never fired: {silent}; expected each to fire once in a forward pass "
            "(an attention kernel that keeps no pattern, or a module the model does not call)"
        )


def _require_finite(clean: CleanPass, layer: int) -> None:
    """Raise a ValueError if a block's output is not finite at the prompts' own positions.

    Padding is not checked: in some models, rows that attend to nothing but padding are NaN.
    """
    lens, real, output = clean.lens, clean.real, clean.calls[layer].resid_post
    if not bool(torch.isfinite(output if bool(real.all()) else output[real]).all()):
        raise ValueError(
            f"{lens.where(layer)}: expected finite outputs, got NaN or infinity{_bad_weight(lens)}"
        )


def _bad_weight(lens: Lens) -> str:
    for name, parameter in lens.model.named_parameters():
        if not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
            return f"; the weight {name!r} has NaN or infinity"
    return "; all weights are finite, so the activations overflow (dtype?)"
