"""Passes with interventions: the model run from a block on, or from its tokens.

From a block on, a pass starts with the residual stream that a clean pass left there. The blocks below are
not run: each returns its output of the clean pass. This works on every class, while TransformerLens's own
`start_at_layer` is missing or wrong on several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lens_mix.hooks import HookPair
from lens_mix.lens import known_faults
from lens_mix.lens.anatomy import Norm
from lens_mix.lens.batches import Batch, pad
from lens_mix.lens.changes import Change, Changes, forward_hook, forward_pre_hook, replace_method
from lens_mix.lens.clean_pass import CleanPass, StopForward, stop_forward
from lens_mix.lens.components import LOGITS, measure_end
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import UnsupportedModelError, transformer_lens_version
from lens_mix.lens.prompts import pad_token, read_prompt
from lens_mix.lens.recorded import RecordedEnd
from lens_mix.lens.replay import BlockCall, captured_calls, enter_with, with_first
from lens_mix.lens.tracebacks import find_user_code
from lens_mix.lens.unembedding import Unembedding, read_unembedding, row_at, unembedding_at


def logits_from(
    clean: CleanPass,
    layer: int,
    fwd_hooks: Sequence[HookPair] = (),
    *,
    positions: Int[Tensor, " row"] | Int[Tensor, "row read"] | None = None,
    **options: Any,
) -> Float[Tensor, "row *pos d_vocab"]:
    """The model's logits, with hooks, from a block on.

    Args:
        clean, layer, fwd_hooks, options: as in `run_from`.
        positions: unembed one position per row only, [row 1 d_vocab], or several, [row read d_vocab].

    Raises:
        UnsupportedModelError: the block does not give its own output when run again, or the model no logits.
    """
    with clean.lens.evaluation_mode(), unembedding_at(clean.lens.model, positions) as narrowed:
        out = run_from(clean, layer, fwd_hooks, **options)
    logits = out if torch.is_tensor(out) else getattr(out, "logits", None)
    if logits is None:
        raise UnsupportedModelError(f"logits: expected the model to return them, got a {type(out).__name__}")
    return logits if positions is None or narrowed else row_at(logits, positions)


def last_residual_from(
    clean: CleanPass, layer: int, fwd_hooks: Sequence[HookPair] = (), **options: Any
) -> Float[Tensor, "row pos d_model"]:
    """What the stack's last block gives, before any final norm and head; `options` as in `run_from`."""
    last = clean.lens.stack.blocks[-1]
    calls: dict[int, BlockCall] = {}
    ending = [*captured_calls({0: last}, calls), forward_hook(last, stop_forward)]
    with contextlib.suppress(StopForward):
        run_from(clean, layer, fwd_hooks, changes=ending, **options)
    return calls[0].resid_post


def unembedding_from(clean: CleanPass, norm: Norm | None) -> Unembedding:
    """The model's head, verified on a pass that reached the last block.

    Raises:
        UnsupportedModelError: the logits are not this final norm, then unembedding.
    """
    lens, last = clean.lens, clean.lens.n_layers - 1
    if lens.stack.name == "encoder":
        raise UnsupportedModelError("unembedding: the encoder of an encoder-decoder has no logits")
    logits = logits_from(clean, last)
    if logits.ndim != 3:
        raise UnsupportedModelError(
            f"unembedding: expected logits of every position, got {list(logits.shape)}"
        )
    resid, logits = (
        tensor[clean.real][None].to(lens.wide_dtype) for tensor in (clean.calls[last].resid_post, logits)
    )
    head = read_unembedding(lens.model, norm, resid.shape[-1], logits.shape[-1])
    rebuilt = head(resid)
    scale = float((rebuilt * logits).sum() / rebuilt.square().sum())  # by least squares
    if abs(scale - 1) > lens.tolerance:
        # Cohere and Granite multiply the logits by a constant.
        head = head.scaled(scale)
    error = measure_end(LOGITS, RecordedEnd(resid, unembedding=head, logits=logits))
    if not error <= lens.tolerance:  # so that NaN is refused too
        raise UnsupportedModelError(
            "unembedding: expected logits = final norm, then unembedding; rebuilt logits are off by a relative "
            f"{error:.1e} (a dense layer or a cap between the two can't be split by token)"
        )
    return head


def run_from(
    clean: CleanPass,
    layer: int,
    fwd_hooks: Sequence[HookPair] = (),
    *,
    resid_pre: Float[Tensor, "row pos d_model"] | None = None,
    resid_post: Float[Tensor, "row pos d_model"] | None = None,
    rows: Int[Tensor, " row"] | None = None,
    gradients: bool = False,
    batch: Batch | None = None,
    changes: Sequence[Change] = (),
) -> Any:
    """The model's output.

    Args:
        clean: the clean pass to start from.
        layer: first block to run.
        fwd_hooks: TransformerLens hooks for this pass, which see `[row, ...]` tensors.
        resid_pre: what enters that block; the clean residual stream by default. Of the joint part, whose
            first block it is, what enters the encoder and the decoder (`CleanPass.inputs`).
        resid_post: what the last block gives: none is run.
        rows: which prompt of the clean batch each row is (repeats allowed); all, once, by default.
        gradients: build the graph.
        batch: other prompts to run instead, from their tokens on: `layer` and `rows` count for nothing.
        changes: further changes to the model.
    """
    lens = clean.lens
    enters: list[Change] = []
    if resid_post is not None:
        batch = clean.batch if rows is None else clean.batch.select(rows)
        ends = (with_first(clean.calls[number].output, resid_post) for number in range(lens.n_layers))
        enters = [_skipped(block, end) for block, end in zip(lens.stack.blocks, ends, strict=True)]
    elif batch is None:
        enters = _entered_at(clean, lens.layer_index(layer), resid_pre, rows)
        batch = clean.batch if rows is None else clean.batch.select(rows)
    try:
        return _run_batch(lens, batch, fwd_hooks, gradients=gradients, changes=[*enters, *changes])
    except StopForward:
        raise
    except Exception as problem:
        users, lengths = find_user_code(problem), (batch.tokens.shape[1], clean.batch.tokens.shape[1])
        if users is None or lengths[0] == lengths[1]:
            raise
        raise UnsupportedModelError(
            f"expected hooks that run at any number of positions, because this method makes a pass over "
            f"{lengths[0]} tokens and the prompt has {lengths[1]}; got {type(problem).__name__} in {users}: "
            f"{problem}. Remove the hook, or let it act only if there are enough positions"
        ) from problem


def _run_batch(
    lens: Lens,
    batch: Batch,
    fwd_hooks: Sequence[HookPair] = (),
    *,
    gradients: bool = False,
    changes: Sequence[Change] = (),
) -> Any:
    """Return the model's output for a batch; the arguments are those of `run_from`."""
    with lens.evaluation_mode(gradients), lens.hooked(fwd_hooks), Changes(changes):
        return lens.forward(batch, return_type="logits")


def prompt_logits(lens: Lens, prompt: Any) -> Float[Tensor, "pos d_vocab"]:
    """Return the logits of one prompt, as the user gave it.

    Raises:
        UnsupportedModelError: this release of TransformerLens computes wrong logits for such models.
    """
    wrong = known_faults.wrong_logits(lens.model_class, transformer_lens_version())
    if wrong is not None:
        raise UnsupportedModelError(wrong)
    read = read_prompt(lens.model, lens.model_class, prompt)
    logits: Tensor = _run_batch(lens, pad([read], pad_token(lens.model), "right"))[0]
    return logits


def _entered_at(clean: CleanPass, start: int, resid_pre: Tensor | None, rows: Tensor | None) -> list[Change]:
    """What makes a pass enter the model at a block."""
    lens, blocks = clean.lens, clean.lens.stack.blocks
    replay = clean.replay(start)
    replay.prepare()
    entries = [(blocks[start], slice(None))]
    if resid_pre is None:
        entry = clean.calls[start].resid_pre
        resid_pre = entry if rows is None else entry.index_select(0, rows)
    elif lens.stack.source is not None:
        # Of the joint part the first positions enter the encoder.
        below = clean.batch.tokens.shape[1]
        entries = [(lens.stack.source.blocks[0], slice(below)), (blocks[start], slice(below, None))]
    outputs = [clean.calls[lower].output for lower in range(start)]
    skipped = outputs if rows is None else [replay.expand(output, rows) for output in outputs]
    changes = [_skipped(block, output) for block, output in zip(blocks[:start], skipped, strict=True)]
    return changes + [
        forward_pre_hook(block, enter_with(resid_pre, span), with_kwargs=True) for block, span in entries
    ]


def _skipped(block: nn.Module, output: Any) -> Change:
    """The block gives back a recorded output instead of running (a hook would let it run first)."""
    return replace_method(block, "forward", lambda *args, **kwargs: output)
