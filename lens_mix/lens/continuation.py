"""The rest of the model, run from a block on, from the residual stream that a clean pass left there.

The blocks below are not run: each gives back what it gave in the clean pass. This holds on every class alike,
where TransformerLens's own `start_at_layer` is missing or wrong on several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lens_mix.hooks import HookPair
from lens_mix.lens.changes import Change, Changes, forward_hook, forward_pre_hook, replaced_forward
from lens_mix.lens.clean_pass import CleanPass, StopForward
from lens_mix.lens.head import row_at, unembedding_at
from lens_mix.lens.prompts import Batch
from lens_mix.lens.replay import enter_with, first_tensor


def logits_from(
    clean: CleanPass,
    layer: int,
    fwd_hooks: Sequence[HookPair] = (),
    *,
    resid_pre: Float[Tensor, "row pos d_model"] | None = None,
    rows: Int[Tensor, " row"] | None = None,
    gradients: bool = False,
    positions: Int[Tensor, " row"] | None = None,
    batch: Batch | None = None,
) -> Float[Tensor, "row *pos d_vocab"]:
    """The model's logits, with hooks, from a block on.

    Args:
        clean: the clean pass to start from.
        layer: first block to run.
        fwd_hooks: TransformerLens hooks for this pass, which see `[row, ...]` tensors.
        resid_pre: what enters that block; the clean residual stream by default.
        rows: which prompt of the clean batch each row is (repeats allowed); all, once, by default.
        gradients: build the graph.
        positions: unembed one position per row only, [row 1 d_vocab].
        batch: other prompts to run instead, from their tokens on: `layer` and `rows` count for nothing.

    Raises:
        UnsupportedModelError: the block does not give its own output when run again.
    """
    with clean.lens.evaluation_mode(), unembedding_at(clean.lens.model, positions) as narrowed:
        out = _run_from(clean, layer, fwd_hooks, resid_pre, rows, gradients, batch)
    logits = out if torch.is_tensor(out) else out.logits
    return logits if positions is None or narrowed else row_at(logits, positions)


def last_residual_from(
    clean: CleanPass,
    layer: int,
    fwd_hooks: Sequence[HookPair] = (),
    *,
    resid_pre: Float[Tensor, "row pos d_model"] | None = None,
    rows: Int[Tensor, " row"] | None = None,
    gradients: bool = False,
    batch: Batch | None = None,
) -> Float[Tensor, "row pos d_model"]:
    """What the stack's last block gives, before any final norm; else as `logits_from`. No head is run."""
    outputs: list[Tensor] = []
    with contextlib.suppress(StopForward):
        _run_from(clean, layer, fwd_hooks, resid_pre, rows, gradients, batch, outputs)
    return outputs[0]


def _run_from(
    clean: CleanPass,
    layer: int,
    fwd_hooks: Sequence[HookPair],
    resid_pre: Tensor | None,
    rows: Tensor | None,
    gradients: bool,
    batch: Batch | None,
    last_outputs: list[Tensor] | None = None,
) -> Any:
    """The model's output; with `last_outputs` to fill, the pass ends after the last block."""
    lens = clean.lens
    changes = _entered_at(clean, lens.layer_index(layer), resid_pre, rows) if batch is None else []
    if batch is None:
        batch = clean.batch if rows is None else clean.batch.select(rows)
    if last_outputs is not None:
        changes += [forward_hook(lens.stack.blocks[-1], _keep_and_stop(last_outputs))]
    with lens.evaluation_mode(gradients), lens.hooked(fwd_hooks), Changes(changes):
        return lens.forward(batch, return_type="logits")


def _entered_at(clean: CleanPass, start: int, resid_pre: Tensor | None, rows: Tensor | None) -> list[Change]:
    """What makes a pass enter the model at a block."""
    lens, blocks = clean.lens, clean.lens.stack.blocks
    replay = clean.replay(start)
    with lens.evaluation_mode():
        replay.prepare()
    if resid_pre is None:
        entry = clean.calls[start].resid_pre
        resid_pre = entry if rows is None else entry.index_select(0, rows)
    outputs = [clean.calls[below].output for below in range(start)]
    skipped = outputs if rows is None else [replay.expand(output, rows) for output in outputs]
    changes = [_skipped(block, output) for block, output in zip(blocks[:start], skipped, strict=True)]
    return [*changes, forward_pre_hook(blocks[start], enter_with(resid_pre), with_kwargs=True)]


def _keep_and_stop(outputs: list[Tensor]) -> Callable[..., None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(first_tensor(output))
        raise StopForward

    return keep


def _skipped(block: nn.Module, output: Any) -> Change:
    """The block gives back a recorded output instead of running."""
    return replaced_forward(block, lambda *args, **kwargs: output)
