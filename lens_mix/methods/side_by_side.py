"""Run a prompt once, and after it, in the same row, replaced tokens that only the row's own token reads.

The mask of such a pass replaces the model's own, so every block is compared with the clean pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix._care.precision import relative_error
from lens_mix._care.users_hooks import has_user_hooks
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._inputs.batches import Batch, Prompt
from lens_mix._passes.copies import count_copies
from lens_mix._passes.replay import BlockCall, captured_calls
from lens_mix.hooks import mask_attention, must_fire
from lens_mix.hooks.mixing import pass_tolerance
from lens_mix.methods.bound_target import BoundRows, evaluate

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block
    from lens_mix.removal import Copies

_MOST_COPIES = 256  # More in one pass would cost more in attention than they save.


@torch.no_grad()
def measure_direct(bound: BoundRows, row: int, copies: Copies) -> Float[Tensor, " copy"]:
    """Return the number of a row in copies whose replaced token is read by the row's own token alone."""
    block, prompt, clean, half = bound.block, int(bound.prompt_index[row]), bound.clean[row], len(copies) // 2
    lens, places = block.clean.lens, block.real[prompt].nonzero()[:, 0]
    read = places[places <= bound.queries[row]]
    # If the angles depend on the largest position, the pass needs the same one as the clean pass.
    places = places if lens.angles_differ(len(read), len(places)) else read
    length, is_too_long = len(places) + 2 * len(copies) + 1, len(copies) > _MOST_COPIES
    try:
        count_copies(lens, block.max_memory, length, logits=length)
    except ValueError:
        if half == 0:
            raise
        is_too_long = True
    if is_too_long:
        parts = copies.at(slice(half)), copies.at(slice(half, None))
        return torch.cat([measure_direct(bound, row, part) for part in parts])
    rerun, own = copies.removed[:, places], block.tokens[prompt, places].expand(len(copies), -1)
    others = torch.where(rerun, copies.others[copies.sample, prompt][:, places], own)
    rerun[:, len(read) - 1] = True
    logits, errors = _run(block, prompt, places, others, rerun)
    if has_user_hooks(lens.modules):
        # A hook on certain positions misses the copies, which the prompt's own tokens detect.
        same = evaluate(bound.functions[row], _run(block, prompt, places, own, rerun)[0])
        errors.append(float((same - clean).abs().max() / clean.abs().clamp_min(1)))
    if not all(error <= pass_tolerance(block.inputs.dtype) for error in errors):
        raise UnsupportedModelError(
            "expected attention to read only tokens and their positions, and hooks to act alike at all "
            "positions, so that a prompt can run beside its replacements; got other numbers for the same "
            "tokens. Likely causes: a sliding window shorter than the prompt and its replacements, positions "
            "that are counted instead of read, as with ALiBi, or a hook on certain positions"
        )
    return evaluate(bound.functions[row], logits)


def _run(
    block: Block, prompt: int, places: Tensor, others: Tensor, rerun: Bool[Tensor, "copy pos"]
) -> tuple[Float[Tensor, "copy 1 d_vocab"], list[float]]:
    """Return the logits of the last token that each copy runs, and each block's error in the prompt's tokens.

    A copy runs its tokens `rerun` and sees the prompt's others. One more copy, the prompt's last token alone,
    ends the row and has an error too: no other token sees more tokens, or tokens further away in the row.
    """
    lens, name, own = block.clean.lens, block.stack.attention_template, block.tokens[prompt, places]
    index = torch.arange(len(own), device=own.device)
    rerun, others = torch.cat([rerun, index[None] == index[-1]]), torch.cat([others, own[None]])
    copy, again = rerun.nonzero().unbind(1)
    tokens, positions = torch.cat([own, others[rerun]])[None], torch.cat([index, again])
    of_prompt = torch.cat([index <= index[:, None], ~rerun[copy] & (index <= again[:, None])])
    of_copy = (copy == copy[:, None]) & (again <= again[:, None])
    allowed = torch.cat([of_prompt, torch.nn.functional.pad(of_copy, (0, 0, len(own), 0))], 1)
    pairs, inputs = [], {"position_ids": positions[None]}
    if lens.takes_padding_mask:
        # transformers adds such a mask to the scores of every layer, instead of making one.
        inputs["attention_mask"] = (~allowed).to(lens.dtype)[None, None] * torch.finfo(lens.dtype).min
    else:
        pairs = [mask_attention(layer, allowed, attention=name) for layer in range(len(block.stack))]
    batch = Batch((Prompt(tokens[0]),), tokens, torch.ones_like(tokens, dtype=torch.bool), None, None, inputs)
    calls: dict[int, BlockCall] = {}
    changes = captured_calls(dict(enumerate(block.stack.blocks)), calls)
    last, compared = len(own) + rerun[:-1].sum(1).cumsum(0) - 1, [*range(len(own)), -1]
    try:
        with must_fire(*pairs) as hooks:
            logits = block.continuation(hooks, batch=batch, changes=changes).logits(last[None])
    except RuntimeError as problem:
        raise UnsupportedModelError(str(problem)) from problem
    clean = [call.resid_post[prompt, places][compared] for call in block.clean.calls.values()]
    found = [call.resid_post[0, compared] for call in calls.values()]
    return logits.transpose(0, 1), [relative_error(*pair) for pair in zip(found, clean, strict=True)]
