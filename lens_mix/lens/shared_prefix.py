"""The clean pass of prompts that begin alike, in one row that has their common prefix once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix.hooks.mixing import pass_tolerance
from lens_mix.hooks.record import ATTENTION_ROLES
from lens_mix.lens.batches import Batch
from lens_mix.lens.block_outputs import BlockOutputs
from lens_mix.lens.clean_pass import CleanPass, clean_pass
from lens_mix.lens.layout import Layout, batch_of_rows
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.replay import BlockCall, relative_error
from lens_mix.lens.rows import rows_at


def lay_out(lens: Lens, batch: Batch) -> Layout | None:
    """Return the row of a batch: its longest prompt, and then what follows the prefix in every prompt.

    It is None if the model takes no such rows, if the padding is on the left, or if the row is not worth it.
    With the longest prompt alone it must save a fifth of the batch's tokens, and it must not have more pairs
    of tokens. So the prefix has to be more than half of the longest prompt.
    """
    real, length = batch.real, batch.tokens.shape[1]
    takes_rows = lens.takes_padding_mask and lens.takes_input("position_ids") and not lens.stack.gaps
    is_common = (batch.tokens == batch.tokens[:1]).all(0) & real.all(0)
    prefix = int(is_common.long().cumprod(0).sum())
    follows = real & (torch.arange(length, device=real.device) >= prefix)
    width = length + int(follows.sum())
    is_worth = 5 * (width + length) <= 4 * real.numel() and width**2 <= real.numel() * length
    if not (takes_rows and is_worth) or batch.inputs:
        return None
    # The longest prompt is the last one of the row: what depends on the place in it acts there the most.
    order = real.sum(1).argsort(stable=True).cpu()
    layout, back = Layout.of(follows.cpu()[order]), order.argsort()
    return dataclasses.replace(layout, rerun=layout.rerun[back], index=layout.index[back])


def clean_pass_in_row(
    layout: Layout,
    clean: CleanPass,
    predict_at: Int[Tensor, "batch query"] | None,
    after_block: Callable[[CleanPass], Callable[[int], None]],
    outputs: BlockOutputs | None = None,
    **options: Any,
) -> CleanPass:
    """Make the clean pass of a batch in one row; its records are spread over the batch block by block.

    Args:
        layout: The row, from `lay_out`.
        clean: The pass without records, which are put into it. In the end it has those of the last block.
        predict_at: As in `clean_pass`.
        after_block: As in `clean_pass`. It reads the records of its own block alone, which are then freed.
        outputs: As in `clean_pass`.
        options: Further arguments of `clean_pass`. All rows are recorded, and all attention layers watched.

    Raises:
        UnsupportedModelError: The longest prompt leaves a block as another vector than it does alone, or a
            query does not attend to all tokens up to its own, in the row or alone (a window).
    """
    lens, batch, rows = clean.lens, clean.batch, clean.rows
    longest = batch.real.sum(1).argsort(stable=True)[-1:]
    # The mask of the row replaces the window of a model, which only a pass without it has.
    alone = clean_pass(lens, batch.select(longest), stop_after=options["stop_after"])
    _require_triangle(alone, alone.attended.values())
    # Padding has the places of the longest prompt, whose keys behind the prefix no other prompt sees.
    call, index = after_block(clean), layout.index.to(batch.tokens.device)
    if outputs is not None:
        outputs.index = index
    queries = index if rows is None else rows_at(index, rows.positions)
    read, places = rows_at(index, predict_at).unique(return_inverse=True)

    def spread_pairs(tensor: Tensor) -> Tensor:
        return tensor[0][..., queries[:, :, None], index[:, None]].movedim(-3, 0)

    def spread_records(row: CleanPass, layer: int) -> None:
        made, attended = row.calls[layer], row.attended
        clean.calls.clear()
        clean.calls[layer] = BlockCall((made.resid_pre[0][index],), {}, made.resid_post[0][index])
        is_same = attended[layer] is attended.get(layer - 1)
        clean.attended[layer] = clean.attended[layer - 1] if is_same else spread_pairs(attended[layer])
        _require_triangle(clean, [] if is_same else [clean.attended[layer]])
        error = relative_error(clean.calls[layer].resid_post[longest], alone.calls[layer].resid_post)
        if not error <= pass_tolerance(lens.dtype):
            raise UnsupportedModelError(f"expected the longest prompt as alone, got an error of {error:.1e}")
        for name, tensor in row.recorded.items():
            is_value, is_pattern = (name.endswith(ATTENTION_ROLES[role]) for role in ("value", "pattern"))
            spread = tensor[0][index if is_value else queries] if not is_pattern else spread_pairs(tensor)
            clean.recorded[name] = spread
        row.recorded.clear()
        call(layer)

    tokens = layout.fill(batch.tokens[longest[0]], batch.tokens)
    one = batch_of_rows(tokens, layout.positions, layout.allowed, lens.dtype)
    options["after_block"] = lambda row: functools.partial(spread_records, row)
    options["predict_at"] = None if predict_at is None else read[None]
    row = clean_pass(lens, one, outputs=outputs, **options)
    found = row.predictions and [[row.predictions[0][place] for place in each] for each in places.tolist()]
    return dataclasses.replace(clean, predictions=found, no_predictions=row.no_predictions)


def _require_triangle(clean: CleanPass, masks: Iterable[Bool[Tensor, "batch query key"]]) -> None:
    """Raise an UnsupportedModelError if a query does not attend to all tokens up to its own."""
    places = torch.arange(clean.real.shape[1], device=clean.real.device)
    positions = places.expand_as(clean.real) if clean.rows is None else clean.rows.positions
    real = clean.real_rows[:, :, None] & clean.real_keys[:, None, :]
    triangle = real & (places <= positions[:, :, None])
    if not all((mask & real).equal(triangle) for mask in masks):
        raise UnsupportedModelError("expected each query to attend to all tokens up to its own")
