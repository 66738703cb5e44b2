"""Run a prompt, and in the same row tokens of copies that see the prompt's own tokens beside a replaced one.

These copies are not prompts: the tokens between the replaced one and the last are those of the clean pass.
The mask of the row replaces the model's own, so every pass is compared with the clean pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lens_mix.hooks import mask_attention, must_fire
from lens_mix.hooks.mixing import pass_tolerance
from lens_mix.lens.changes import forward_hook
from lens_mix.lens.copies import count_copies
from lens_mix.lens.layout import Layout
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.replay import first_tensor, relative_error
from lens_mix.lens.users_hooks import has_user_hooks
from lens_mix.methods.bound_target import BoundRows, evaluate

if TYPE_CHECKING:
    from lens_mix.lens.block import Block
    from lens_mix.removal import Copies

# The most tokens that run after the prompt in one pass. More would cost more in attention than they save.
_MOST_TOKENS = {"cpu": 256}
_MOST_TOKENS_ELSEWHERE = 2048


def values_beside(
    bound: BoundRows, row: int, copies: Copies, rerun: Bool[Tensor, "copy input"]
) -> Float[Tensor, " copy"]:
    """Return the number of a row in copies of its prompt that run some positions again.

    Args:
        bound: The target of all rows.
        row: The index of the row.
        copies: The copies.
        rerun: Which positions of each copy are run again, the row's among them.

    Raises:
        UnsupportedModelError: The prompt's own tokens are not those of the clean pass, or user hooks act on
            some positions only.
        ValueError: A pass with one copy needs more memory than `max_memory`.
    """
    first, prompt, query = bound.block, int(bound.prompt_index[row]), int(bound.queries[row])
    places = first.real[prompt].nonzero()[:, 0]
    length, read = len(places), places[places <= query]
    # If the angles depend on the largest position, the pass needs the same one as the clean pass.
    places = places if first.clean.lens.angles_differ(len(read), length) else read
    rerun, own = rerun[:, places], first.tokens[prompt, places]
    others = copies.others[copies.sample, prompt][:, places]
    others = torch.where(copies.removed[:, places], others, own)

    def read_values(tokens: Int[Tensor, "copy pos"], of_copies: Bool[Tensor, "copy pos"]) -> Tensor:
        logits = _run(first, prompt, places, tokens, of_copies)
        return evaluate(bound.functions[row], logits[:, None].expand(-1, length, -1))

    values = []
    chunks = list(_split(first, len(places), rerun.sum(1).tolist()))
    for chunk in first.with_bar(chunks, len(chunks), "chunks"):
        if has_user_hooks(first.clean.lens.modules):
            # A hook on certain positions misses the copies, which the prompt's own tokens detect.
            same = read_values(own.expand_as(others[chunk]), rerun[chunk])
            _check_same(same, bound.clean[row], pass_tolerance(first.inputs.dtype))
        values.append(read_values(others[chunk], rerun[chunk]))
    return torch.cat(values)


def _split(first: Block, count: int, sizes: list[int]) -> Iterator[slice]:
    """Yield slices over copies of these numbers of tokens, each of which runs beside the prompt's `count`."""
    lens, needed = first.clean.lens, max(sizes)
    most = max(needed, _MOST_TOKENS.get(lens.device.type, _MOST_TOKENS_ELSEWHERE))
    while True:
        length = count + most + 1
        try:
            count_copies(lens, first.max_memory, length, logits=length)
            break
        except ValueError:
            if most == needed:
                raise
            most = max(needed, most // 2)
    start, total = 0, 0
    for copy, size in enumerate(sizes):
        if total + size > most:
            yield slice(start, copy)
            start, total = copy, 0
        total += size
    yield slice(start, len(sizes))


@torch.no_grad()
def _run(
    first: Block,
    prompt: int,
    places: Int[Tensor, " pos"],
    others: Int[Tensor, "copy pos"],
    rerun: Bool[Tensor, "copy pos"],
) -> Float[Tensor, "copy d_vocab"]:
    """Return the logits of copies at the last position that they run, after a check of the prompt's tokens.

    All positions of the prompt are compared with the clean pass, and so is the last one once more: it ends
    the row, and sees the whole prompt, as the copies do. No index sees more tokens, or tokens further away.

    Raises:
        UnsupportedModelError: The model gives these tokens other residual streams, or cannot run so.
    """
    own, lens, stack = first.tokens[prompt, places], first.clean.lens, first.stack
    control = torch.arange(len(own), device=rerun.device) == len(own) - 1
    layout = Layout.of(torch.cat([rerun, control[None]]))
    tokens = layout.fill(own, torch.cat([others, own[None]]))
    masks, pairs = lens.takes_padding_mask, []
    if not masks:
        template = stack.attention_template
        pairs = [mask_attention(layer, layout.allowed, attention=template) for layer in range(len(stack))]
    index = torch.cat([torch.arange(len(own), device="cpu"), layout.index[-1, -1:]]).to(tokens.device)
    found: dict[int, Tensor] = {}
    keeping = [
        forward_hook(block, functools.partial(_keep, found, layer, index))
        for layer, block in enumerate(stack.blocks)
    ]
    last = torch.where(layout.rerun[:-1], layout.index[:-1], -1).amax(1).to(tokens.device)
    batch = layout.batch(tokens, layout.allowed if masks else None, lens.dtype)
    try:
        with must_fire(*pairs) as hooks:
            logits = first.logits(hooks, batch=batch, positions=last[None], changes=keeping)
    except RuntimeError as problem:
        raise UnsupportedModelError(str(problem)) from problem
    for layer, call in enumerate(first.clean.calls.values()):
        clean = call.resid_post[prompt, places]
        _check_control(found[layer], torch.cat([clean, clean[-1:]]))
    return logits[0]


def _keep(
    found: dict[int, Tensor], layer: int, index: Tensor, module: nn.Module, args: Any, output: Any
) -> None:
    """Keep some indices of a block's output. This is a forward hook."""
    found[layer] = first_tensor(output)[0, index]


def _check_same(values: Float[Tensor, " copy"], clean: Tensor, bound: float) -> None:
    """Check that copies with the prompt's own tokens have the target of the clean pass."""
    error = float((values - clean).abs().max())
    if not error <= bound * max(1.0, float(clean.abs())):
        raise UnsupportedModelError(
            "expected the model's hooks to act alike at all positions, because "
            "replacements run at others; tokens that replace themselves change the target by "
            f"{error:.1e}"
        )


def _check_control(found: Float[Tensor, "index d_model"], clean: Float[Tensor, "index d_model"]) -> None:
    """Check that the prompt's tokens and the control leave a block as in the clean pass."""
    error = relative_error(found, clean)
    if not error <= pass_tolerance(found.dtype):
        raise UnsupportedModelError(
            "expected attention to read only tokens and their positions, so that a "
            "prompt can be run beside its replacements; got other residual streams for the same tokens. "
            "Likely causes: a sliding window shorter than the prompt and its replacements, or positions that "
            "are counted instead of read, as with ALiBi"
        )
