"""Passes with interventions: the model is run from a block on, or from its tokens.

From a block on, a pass starts with the residual stream that a clean pass recorded there. The blocks below are
not run: each returns its output of the clean pass. This works on every class of TransformerLens, whose own
`start_at_layer` is missing or wrong on several.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lens_mix._care.changes import Change, Changes, forward_hook, forward_pre_hook, replace_method
from lens_mix._care.tracebacks import find_user_code
from lens_mix._classes import known_faults
from lens_mix._classes.model_classes import (
    TransformerLensModel,
    UnsupportedModelError,
    transformer_lens_version,
)
from lens_mix._inputs.batches import Batch, pad
from lens_mix._inputs.prompts import pad_token, read_prompt
from lens_mix._model.model import Lens
from lens_mix._model.unembedding import row_at, unembedding_at
from lens_mix._passes.clean_pass import CleanPass, StopForward, stop_forward
from lens_mix._passes.predictions import describe_missing, name_token, read_predictions
from lens_mix._passes.replay import BlockCall, captured_calls, enter_with, with_first
from lens_mix.hooks.base import HookPair
from lens_mix.maps.explained import Explained


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A pass from a block on, with interventions.

    Attributes:
        clean: The clean pass to start from.
        layer: The first block to run.
        fwd_hooks: TransformerLens hooks for this pass, which get `[copy, ...]` tensors.
        resid_pre: The input of that block; None for the clean residual stream. For the joint part, the inputs
            of the encoder and the decoder (`CleanPass.inputs`).
        resid_post: The output of the last block; no block is run then.
        prompt_index: The prompt of the clean batch that each copy is made from; None for each prompt once.
        gradients: Whether to build the autograd graph.
        batch: Other prompts to run instead, from their tokens on; `layer` and `prompt_index` have no effect
            then.
        changes: Further changes to the model.
    """

    clean: CleanPass
    layer: int
    fwd_hooks: Sequence[HookPair] = ()
    _: dataclasses.KW_ONLY
    resid_pre: Float[Tensor, "copy pos d_model"] | None = None
    resid_post: Float[Tensor, "copy pos d_model"] | None = None
    prompt_index: Int[Tensor, " copy"] | None = None
    gradients: bool = False
    batch: Batch | None = None
    changes: Sequence[Change] = ()

    def logits(
        self, positions: Int[Tensor, " copy"] | Int[Tensor, "copy read"] | None = None
    ) -> Float[Tensor, "copy *pos d_vocab"]:
        """Return the model's logits, at all positions or at one or several per copy.

        Raises:
            UnsupportedModelError: The block does not reproduce its output, or the model returns no logits.
        """
        lens = self.clean.lens
        with lens.evaluation_mode(), unembedding_at(lens.model, positions) as narrowed:
            out = self.run()
        logits = out if torch.is_tensor(out) else getattr(out, "logits", None)
        if logits is None:
            found = type(out).__name__
            raise UnsupportedModelError(f"logits: expected the model to return them, got a {found}")
        return logits if positions is None or narrowed else row_at(logits, positions)

    def last_residual(self) -> Float[Tensor, "copy pos d_model"]:
        """Return the output of the stack's last block."""
        last = self.clean.lens.stack.blocks[-1]
        calls: dict[int, BlockCall] = {}
        # The output is captured before the pass is ended, because torch calls no hook after one that raises.
        ending = [*captured_calls({0: last}, calls), forward_hook(last, stop_forward)]
        with contextlib.suppress(StopForward):
            dataclasses.replace(self, changes=[*self.changes, *ending]).run()
        return calls[0].resid_post

    def run(self) -> Any:
        """Run the model and return what it returns.

        Raises:
            UnsupportedModelError: The block does not reproduce its output, or a hook of the user fails at
                another number of positions than the prompt's.
        """
        lens, batch = self.clean.lens, self._batch()
        changes = [*self._entering(), *self.changes]
        try:
            return _run_batch(lens, batch, self.fwd_hooks, gradients=self.gradients, changes=changes)
        except StopForward:
            raise
        except Exception as problem:
            # A user's hook may act on a position that a pass over other tokens does not have, of which its
            # own error says nothing.
            users, clean = find_user_code(problem), self.clean.batch
            length, expected = batch.tokens.shape[1], clean.tokens.shape[1]
            if users is None or length == expected:
                raise
            raise UnsupportedModelError(
                f"expected hooks that run at any number of positions, because this method makes a pass over "
                f"{length} tokens and the prompt has {expected}; got {type(problem).__name__} in {users}: "
                f"{problem}. Remove the hook, or let it act only if there are enough positions"
            ) from problem

    def _batch(self) -> Batch:
        if self.batch is not None:
            return self.batch
        return self.clean.batch if self.prompt_index is None else self.clean.batch.select(self.prompt_index)

    def _entering(self) -> list[Change]:
        """Return the changes that make the pass start where it should."""
        lens, calls = self.clean.lens, self.clean.calls
        if self.resid_post is not None:
            outputs = [with_first(calls[number].output, self.resid_post) for number in range(lens.n_layers)]
            return [_skipped(block, out) for block, out in zip(lens.stack.blocks, outputs, strict=True)]
        return [] if self.batch is not None else self._entering_block(lens.layer_index(self.layer))

    def _entering_block(self, start: int) -> list[Change]:
        clean, index, resid_pre = self.clean, self.prompt_index, self.resid_pre
        lens, blocks = clean.lens, clean.lens.stack.blocks
        replay = clean.replay(start)
        replay.prepare()
        entries = [(blocks[start], slice(None))]
        if resid_pre is None:
            entry = clean.calls[start].resid_pre
            resid_pre = entry if index is None else entry.index_select(0, index)
        elif lens.stack.source is not None:
            # For the joint part, the first positions enter the encoder.
            below = clean.batch.tokens.shape[1]
            entries = [(lens.stack.source.blocks[0], slice(below)), (blocks[start], slice(below, None))]
        # The outputs below are replaced whole, because a block may return more than the residual stream.
        outputs = [clean.calls[lower].output for lower in range(start)]
        skipped = outputs if index is None else [replay.expand(output, index) for output in outputs]
        changes = [_skipped(block, output) for block, output in zip(blocks[:start], skipped, strict=True)]
        return changes + [
            forward_pre_hook(block, enter_with(resid_pre, span), with_kwargs=True) for block, span in entries
        ]


def _skipped(block: nn.Module, output: Any) -> Change:
    """Return a change that makes a block return a recorded output without running, as a hook could not."""
    return replace_method(block, "forward", lambda *args, **kwargs: output)


def predict_in_chunks(clean: CleanPass, positions: Int[Tensor, "batch query"], size: int) -> CleanPass:
    """Return a clean pass with the model's predictions, for which the pass had too many positions at once.

    Args:
        clean: The clean pass.
        positions: The positions of the predictions.
        size: The number of positions of each prompt at a time.
    """
    last = max(clean.calls)
    resid_post = clean.calls[last].resid_post if last == clean.lens.n_layers - 1 else None
    found: list[list[Explained]] = [[] for _ in positions]
    try:
        for chunk in positions.split(size, dim=1):
            logits = Continuation(clean, last, resid_post=resid_post).logits(chunk)
            # A classifier has logits for a whole prompt, which no position of a map predicts.
            if logits.ndim != 3:
                return clean
            for entries, rows in zip(found, logits, strict=True):
                entries += read_predictions(rows, functools.partial(name_token, clean.lens.tokenizer))
    # A map is right without the predictions, as in `clean_pass`.
    except Exception as problem:
        return dataclasses.replace(clean, no_predictions=describe_missing(problem))
    return dataclasses.replace(clean, predictions=found)


def _run_batch(
    lens: Lens,
    batch: Batch,
    fwd_hooks: Sequence[HookPair] = (),
    *,
    gradients: bool = False,
    changes: Sequence[Change] = (),
) -> Any:
    """Return the model's output for a batch; the arguments are those of `Continuation`."""
    with lens.evaluation_mode(gradients), lens.hooked(fwd_hooks), Changes(changes):
        return lens.forward(batch, return_type="logits")


def prompt_logits(model: TransformerLensModel, prompt: Any) -> Float[Tensor, "pos d_vocab"]:
    """Return the logits of one prompt, in evaluation mode and full precision, without gradients.

        >>> lm.models.prompt_logits(model, "The Eiffel Tower is in the city of")[-1].argmax()

    Args:
        model: Any TransformerLens model.
        prompt: The prompt, as in `lens_mix.run`.

    Raises:
        UnsupportedModelError: This release of TransformerLens computes wrong logits for such models.
    """
    lens = Lens(model)
    wrong = known_faults.wrong_logits(lens.model, lens.model_class, transformer_lens_version())
    if wrong is not None:
        raise UnsupportedModelError(wrong)
    read = read_prompt(lens.model, lens.model_class, prompt)
    logits: Tensor = _run_batch(lens, pad([read], pad_token(lens.model), "right"))[0]
    return logits
