"""One forward pass without interventions, and what it leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lens_mix.hooks import HookPair, record_attention, watch_pattern
from lens_mix.lens.autograd_graph import AutogradGraph
from lens_mix.lens.batches import Batch
from lens_mix.lens.changes import Changes, forward_hook
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.replay import BlockCall, BlockReplay, captured_calls, is_out_of_memory
from lens_mix.lens.rows import Rows, rows_at
from lens_mix.lens.tracebacks import find_user_code

# How torch complains of two dtypes, or of a number that one of them can't hold.
_DTYPE_TEXTS = ("scalar type", "dtype", "without overflow")


class StopForward(Exception):
    """Ends a forward pass once the last wanted block has run.

    TransformerLens's `stop_at_layer` is unknown to two classes and ignored, or gives logits, on some Bridges.
    """


def stop_forward(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook of torch that ends the pass; it is put on last."""
    raise StopForward


@dataclasses.dataclass(frozen=True)
class CleanPass:
    """What one forward pass without interventions left behind.

    Attributes:
        lens: the face of the model.
        batch: the prompts.
        calls: per block, its arguments and output, at all positions.
        recorded: hook name -> tensor, for the hooks that were asked.
        attended: per watched layer, which keys got any weight from any head.
        rows: the rows that `recorded` patterns, z and `attended` hold; None: all positions.
        replays: per block, the way it is run again, once that has been verified.
        cache: per block, what the methods of one run share about it, for as long as it is being mapped.
        z_factors: by layer, what hooks multiply z of each head by (`Verification.z_factors`).
        entering: per block that is read by its cross-attention, the residual stream before that.
        source_calls: of the joint part, the arguments and output of the encoder's first block.
        graph: of the pass, where it was asked for.
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
    entering: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    source_calls: dict[int, BlockCall] = dataclasses.field(default_factory=dict)
    graph: AutogradGraph | None = None

    def resid_pre(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that the mapped attention's branch is added to."""
        return self.entering[layer] if layer in self.entering else self.calls[layer].resid_pre

    def tensor(self, role: str, layer: int) -> Tensor:
        """What was recorded as "query", "value", "pattern" or "z" in one layer."""
        return self.recorded[self.lens.stack.hook_name(role, layer)]

    def effective_pattern(self, layer: int) -> Float[Tensor, "batch head query key"]:
        """The recorded pattern times what hooks multiply z of each head by: what mixed the values."""
        pattern, factors = self.tensor("pattern", layer), self.z_factors
        return pattern if layer not in factors else pattern * factors[layer].to(pattern.dtype)[:, None, None]

    @property
    def real(self) -> Bool[Tensor, "batch pos"]:
        """Which positions of the lens's stack (its queries) are the prompts' own."""
        return self.batch.real_positions(self.lens.stack.name)

    @property
    def real_rows(self) -> Bool[Tensor, "batch query"]:
        """Which of the rows that `recorded` and `attended` hold are the prompts' own."""
        return self.real if self.rows is None else rows_at(self.real, self.rows.positions)

    @property
    def real_keys(self) -> Bool[Tensor, "batch key"]:
        """Which of the keys are the prompts' own: in cross-attention the source's positions."""
        return self.batch.real_keys(self.lens.stack.name)

    @property
    def inputs(self) -> Float[Tensor, "batch input d_model"]:
        """What enters the first block; of the joint part the encoder's, then the decoder's."""
        source, resid_pre = self.lens.stack.source, self.calls[0].resid_pre
        return resid_pre if source is None else torch.cat([self.source_calls[0].resid_pre, resid_pre], 1)

    @property
    def real_inputs(self) -> Bool[Tensor, "batch input"]:
        """Which positions of `inputs` are the prompts' own."""
        return self.real if self.lens.stack.source is None else torch.cat([self.batch.real, self.real], 1)

    def replay(self, layer: int) -> BlockReplay:
        """Block `layer`, ready to run again in any number of copies."""
        if layer not in self.replays:
            self.replays[layer] = BlockReplay(self.lens, layer, self.calls[layer], self.real)
        return self.replays[layer]

    def with_whole_pattern(self, layer: int) -> CleanPass:
        """This pass with one layer's pattern alone recorded, at all rows: the block runs again for it."""
        whole = dataclasses.replace(self, recorded={}, attended={}, rows=None, cache={})
        template = self.lens.stack.attention_template
        pairs = record_attention(layer, whole.recorded, ["pattern"], attention=template)
        pairs.append(watch_pattern(layer, _watch_keys(layer, whole), attention=template))
        self.replay(layer).run(pairs)
        return whole


def clean_pass(
    lens: Lens,
    batch: Batch,
    fwd_hooks: Sequence[HookPair] = (),
    recorded: dict[str, Tensor] | None = None,
    *,
    required: Sequence[str] = (),
    watched: Sequence[int] | None = None,
    stop_after: int = -1,
    rows: Rows | None = None,
    as_given: bool = False,
    graph: AutogradGraph | None = None,
) -> CleanPass:
    """One forward pass that captures the blocks' calls and what the hooks record.

    Args:
        lens: the face of the model.
        batch: the prompts.
        fwd_hooks: TransformerLens hooks that record, into `recorded`.
        recorded: what they fill.
        required: names that have to be in it afterwards.
        watched: layers of which it is kept which keys got weight; None: all that run and have attention.
        stop_after: last block to run; the pass ends there.
        rows: the rows that the hooks record, and that are watched; None: all positions.
        as_given: as in `Lens.forward`.
        graph: is built by the pass, which has to reach the last block.

    Raises:
        ValueError: no such hook point, an input out of range, or a block output that is not finite.
        UnsupportedModelError: a hook that the model has but that never fired; as `_explain`.
    """
    last = lens.layer_index(stop_after)
    recorded = {} if recorded is None else recorded
    present = [layer for layer in lens.stack.attention_layers if layer <= last]
    layers = present if watched is None else list(watched)
    clean = CleanPass(lens, batch, {}, recorded, {}, rows, graph=graph)
    template = lens.stack.attention_template
    watching = [watch_pattern(layer, _watch_keys(layer, clean), attention=template) for layer in layers]
    capturing = captured_calls(dict(enumerate(lens.stack.blocks[: last + 1])), clean.calls)
    if lens.stack.source is not None:
        capturing += captured_calls({0: lens.stack.source.blocks[0]}, clean.source_calls)
    # The last to be put on: torch calls hooks in that order, and no later one would see the block's output.
    capturing.append(forward_hook(lens.stack.blocks[last], stop_forward))
    hooks = lens.hooked([*fwd_hooks, *watching])
    mode, stopping = lens.evaluation_mode(gradients=graph is not None), contextlib.suppress(StopForward)
    with mode, graph.built() if graph else contextlib.nullcontext(), hooks, Changes(capturing), stopping:
        try:
            lens.forward(batch, as_given=as_given)
        except StopForward:
            raise
        except Exception as problem:
            if not is_out_of_memory(problem) and find_user_code(problem) is None:
                _explain(lens, batch, problem)
            raise
    # Recorded tensors are detached, even when the pass keeps its graph.
    recorded.update({name: tensor.detach() for name, tensor in recorded.items()})
    _require_complete(clean, required, layers, last)
    return clean


def _explain(lens: Lens, batch: Batch, problem: Exception) -> None:
    """Say why the model's own forward pass fails, if it does.

    Raises:
        ValueError: an input that the model has no row for.
        UnsupportedModelError: something in the model is of one dtype whatever the rest is cast to; or the
            pass that the user would make fails too.
    """
    if isinstance(problem, IndexError) and batch.inputs:
        got = {name: f"{value.min()}..{value.max()}" for name, value in batch.inputs.items()}
        raise ValueError(
            f"model inputs: expected numbers that the model has rows for, got {got}"
        ) from problem
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


def _watch_keys(layer: int, clean: CleanPass) -> Callable[[Tensor], None]:
    positions = None if clean.rows is None else clean.rows.positions

    def see(pattern: Tensor) -> None:
        pattern = rows_at(pattern, positions, axis=2)
        # A quarter of the time that `(pattern != 0).any(dim=1)` takes.
        clean.attended[layer] = (pattern.amax(dim=1) != 0) | (pattern.amin(dim=1) != 0)

    return see


def _require_complete(clean: CleanPass, required: Sequence[str], watched: Sequence[int], last: int) -> None:
    lens = clean.lens
    missing = [layer for layer in range(last + 1) if layer not in clean.calls]
    if missing:
        raise UnsupportedModelError(f"blocks {missing} of {lens.stack.name!r} never ran in a forward pass")
    silent = [name for name in required if name not in clean.recorded]
    silent += [lens.stack.hook_name("pattern", layer) for layer in watched if layer not in clean.attended]
    if silent:
        raise UnsupportedModelError(
            f"hooks that never fired: {silent}; expected each to fire once in a forward pass "
            "(an attention kernel that keeps no pattern, or a module the model does not call)"
        )
    real = clean.real  # padding may hold anything: rows that see nothing but padding are NaN in some models
    whole = bool(real.all())
    for layer, call in clean.calls.items():
        if not bool(torch.isfinite(call.resid_post if whole else call.resid_post[real]).all()):
            raise ValueError(
                f"{lens.where(layer)}: expected finite outputs, got NaN or infinity{_bad_weight(lens)}"
            )


def _bad_weight(lens: Lens) -> str:
    for name, parameter in lens.model.named_parameters():
        if not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
            return f"; the weight {name!r} holds NaN or infinity"
    return "; all weights are finite, so the activations overflow (dtype?)"
