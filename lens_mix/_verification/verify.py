"""The verification of a model: every component of every block is rebuilt and compared.

It makes one clean pass over the first tokens of the user's prompt, and records the outputs within the blocks
too. When a block has run, all components of the table in `lens_mix._blocks.components` are rebuilt at all
positions; those that need a replay, after the pass. Blocks of a hybrid that have no attention run, but are
not rebuilt. Each later pass samples (`lens_mix._verification.prompt_check`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lens_mix._blocks.block import Block
from lens_mix._blocks.components import COMPONENTS, FEED_FORWARD, MIXING, ComponentError, measure
from lens_mix._blocks.recorded import RecordedBlock
from lens_mix._blocks.verification_record import Verification
from lens_mix._care.changes import Change, Changes, forward_pre_hook
from lens_mix._care.precision import relative_error
from lens_mix._care.tracebacks import find_user_code
from lens_mix._care.users_hooks import describe_spliced, has_user_hooks
from lens_mix._classes.model_classes import UnsupportedModelError, wrapped_config
from lens_mix._inputs.batches import Batch, PaddingSide, Prompt, pad
from lens_mix._inputs.prompts import pad_token
from lens_mix._model.anatomy import ACTIVATIONS, BlockAnatomy, candidates
from lens_mix._model.model import Lens
from lens_mix._passes.block_outputs import BlockOutputs
from lens_mix._passes.clean_pass import CleanPass, StopForward, clean_pass
from lens_mix._passes.masks import padding_leaks
from lens_mix._verification.next_norms import next_norm_failures
from lens_mix._verification.reasons import with_likely_cause
from lens_mix.hooks.mixing import pass_tolerance
from lens_mix.hooks.recording import record_all

# The smallest and the usual number of tokens on which a model is verified.
SHORTEST, LONGEST = 8, 16


def _short_prompt(lens: Lens, prompt: Prompt) -> Prompt:
    """Return the prompt of a verification: the first tokens of a prompt, or more if user hooks need them.

    A hook on position 18, for example, fails in a pass over 16 tokens. The blocks are verified on the text
    alone, unless user hooks need the pictures too: each run is compared with its own prompt anyway.
    """
    if prompt.features is not None:
        from lens_mix._inputs.features import shorten

        return prompt if has_user_hooks(lens.modules) else shorten(lens.model, prompt, LONGEST)
    whole, prompt = prompt, prompt.without_pictures()
    count, target_count = LONGEST, SHORTEST
    lengths = len(prompt.tokens), 0 if prompt.target is None else len(prompt.target)
    n_ctx = max(getattr(lens.model.cfg, "n_ctx", None) or LONGEST, *lengths)
    while True:
        short = _verification_prompt(prompt, n_ctx, count, target_count)
        is_whole = count >= lengths[0] and target_count >= lengths[1]
        if not has_user_hooks(lens.modules) or _runs(lens, short):
            return short
        if is_whole:
            return whole if whole.pictures else short
        count, target_count = 2 * count, 2 * target_count


def _runs(lens: Lens, short: Prompt) -> bool:
    """Return whether user hooks run without an error; the verification itself explains other failures."""
    try:
        clean_pass(lens, pad([short], pad_token(lens.model), "right"), watched=())
    except Exception as problem:
        return find_user_code(problem) is None
    return True


def _verification_prompt(
    prompt: Prompt, n_ctx: int, count: int = LONGEST, target_count: int = SHORTEST
) -> Prompt:
    """Return the first tokens of a prompt, repeated if there are too few to distinguish anatomies."""
    count = min(max(len(prompt.tokens), SHORTEST), count, n_ctx)
    positions = torch.arange(count, device="cpu") % len(prompt.tokens)
    target = prompt.target
    if target is not None:
        # A start token alone would make every pattern 1, so the source's tokens are appended to it.
        target = torch.cat([target, prompt.tokens[positions].to(target)])[: min(target_count, n_ctx)]
    return Prompt(
        prompt.tokens[positions], target, {name: value[positions] for name, value in prompt.inputs.items()}
    )


def verify(lens: Lens, prompt: Prompt) -> Verification:
    """Verify every block of the lens's stack on the first tokens of a prompt.

    Args:
        lens: The lens of the model.
        prompt: The prompt.

    Raises:
        UnsupportedModelError: A block has no hooks on its values, patterns or mixed values.
    """
    layers, roles = lens.stack.attention_layers, ("value", "pattern", "z")
    required = {layer: [lens.stack.hook_name(role, layer) for role in roles] for layer in layers}
    names = [name for of_layer in required.values() for name in of_layer]
    absent = [name for name in names if name not in lens.hook_points]
    if absent:
        kind = type(getattr(lens.stack.attention_module(layers[0]), "original_component", None)).__name__
        raise UnsupportedModelError(
            "expected hooks on values, patterns and the mixed values of every block, found none at "
            f"{absent[0]!r} ({kind} is wrapped without them): no method can run"
            + describe_spliced(lens.model)
        )
    outputs = BlockOutputs(lens, layers)
    store: dict[str, Tensor] = {}
    feed_forwards = _feed_forward_modules(lens)
    reads: dict[int, list[Tensor]] = {layer: [] for layer in feed_forwards}
    reading = [_on_input(module, reads[layer].append) for layer, module in feed_forwards.items()]
    blocks: dict[int, RecordedBlock] = {}
    errors: dict[int, list[ComponentError]] = {}

    def start(clean: CleanPass) -> Callable[[int], None]:
        def visit(layer: int) -> None:
            if layer in required:
                below = next(reversed(blocks.values())).anatomy if blocks else None
                blocks[layer], errors[layer] = _read_block(clean, layer, outputs.take(layer), below)

        return visit

    with Changes(reading):
        pairs, batch = record_all(store, names), _short_batch(lens, prompt)
        clean = clean_pass(lens, batch, pairs, store, required=required, start=start, outputs=outputs)
    entries: list[ComponentError] = []
    ending = [_on_input(module, _end_if_changed(reads[layer])) for layer, module in feed_forwards.items()]
    with Changes(ending):
        for layer, block in blocks.items():
            entries += [*errors[layer], *(measure(each, block) for each in COMPONENTS if each.needs_replay)]
    anatomies = {layer: block.anatomy for layer, block in blocks.items()}
    factors = {layer: each.z_factors for layer, each in blocks.items() if each.z_factors is not None}
    norms = next_norm_failures(clean, anatomies)
    sees_later = any(bool(attended.triu(diagonal=1).any()) for attended in clean.attended.values())
    causal = not lens.stack.is_cross and not sees_later
    return Verification(tuple(entries), anatomies, causal, norms, z_factors=factors)


def _short_batch(lens: Lens, prompt: Prompt) -> Batch:
    """Return the prompt of a verification as a batch of one."""
    return pad([_short_prompt(lens, prompt)], pad_token(lens.model), "right")


def _feed_forward_modules(lens: Lens) -> dict[int, nn.Module]:
    """Return, by layer, the feed-forwards whose input shows that an intervention on values has an effect.

    The block's output is rebuilt from what the feed-forward reads and returns. But a user hook may undo a
    change of it, so there are none if user hooks are on the model.
    """
    blocks = [] if has_user_hooks(lens.modules) else enumerate(lens.stack.blocks)
    modules = ((layer, getattr(block, "mlp", None)) for layer, block in blocks)
    return {layer: module for layer, module in modules if isinstance(module, nn.Module)}


def _on_input(module: nn.Module, receive: Callable[[Tensor], object]) -> Change:
    """Return a hook that calls a function with a copy of each tensor that a module is called with."""

    def on_input(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                receive(value.clone())

    return forward_pre_hook(module, on_input, with_kwargs=True)


def _end_if_changed(clean: Sequence[Tensor]) -> Callable[[Tensor], None]:
    """Return a function that ends a pass if a tensor differs from the only one of the clean pass."""

    def end(read: Tensor) -> None:
        # If a module is called with several tensors, it is not known which of them this is.
        if len(clean) == 1 and not torch.equal(read, clean[0]):
            raise StopForward

    return end


def _read_block(
    clean: CleanPass, layer: int, outputs: Mapping[str, Tensor], below: BlockAnatomy | None
) -> tuple[RecordedBlock, list[ComponentError]]:
    """Return the block with the anatomy that fits its recorded tensors best, and the errors."""
    lens = clean.lens
    block, attention = lens.stack.blocks[layer], lens.stack.attention_module(layer)
    multiplier = float(wrapped_config(lens.model, "residual_multiplier") or 1.0)
    anatomies = list(candidates(block, attention, lens.model.cfg, multiplier))
    if lens.stack.is_cross:
        anatomies = [anatomy.by_cross_attention() for anatomy in anatomies]
    first, mixing = _with_z_factors(RecordedBlock(clean, layer, anatomies[0], outputs))
    readings: list[tuple[tuple[int, float], RecordedBlock, list[ComponentError]]] = []
    for anatomy in anatomies:
        recorded, feed_forward = _with_activation(first.read_as(anatomy), below)
        errors = _component_errors(recorded, [mixing, feed_forward])
        worst = max((entry.error for entry in errors if entry.error is not None), default=0.0)
        # If one component fails with every anatomy (values with an adapter), the others still decide.
        misfit = sum(not entry.ok for entry in errors), worst
        readings.append((misfit, recorded, errors))
        # The likeliest anatomies come first. In half precision a wrong one can be within the tolerance too,
        # if the branches of a block with new weights are small beside the residual stream.
        if worst <= lens.tolerance and lens.dtype.itemsize > 2:
            break
    _, recorded, errors = min(readings, key=lambda reading: reading[0])
    errors = [with_likely_cause(entry, block, attention, recorded.pattern) for entry in errors]
    if any(
        entry.component == FEED_FORWARD.name and entry.error is not None and not entry.ok for entry in errors
    ):
        # The formula is wrong, so methods that need no feed-forward must not be compared with it.
        opaque = dataclasses.replace(recorded.anatomy, feed_forward=None, feed_forward_kind="opaque")
        recorded = recorded.read_as(opaque)
    return recorded, errors


def _with_activation(
    block: RecordedBlock, below: BlockAnatomy | None
) -> tuple[RecordedBlock, ComponentError]:
    """Return the block with the activation that gives the recorded output, and how well that fits.

    The configuration's own act_fn is wrong on several models.
    """
    feed_forward = block.anatomy.feed_forward
    if feed_forward is None:
        return block, measure(FEED_FORWARD, block)
    likely = below.feed_forward.activation if below is not None and below.feed_forward is not None else "gelu"
    errors: dict[str, float] = {}
    readings: dict[str, tuple[RecordedBlock, ComponentError]] = {}
    reading = block
    for name in sorted(ACTIVATIONS, key=lambda name: name != likely):
        reading = reading.with_activation(name)
        entry = measure(FEED_FORWARD, reading)
        if entry.error is None:
            return block, entry
        errors[name], readings[name] = entry.error, (reading, entry)
        # The first block tries all activations. The blocks above most likely have the same one.
        if below is not None and entry.ok:
            break
    # If two activations fit alike, the first is used: float32 can't distinguish BLOOM's rounded tanh.
    accepted = max(1.5 * min(errors.values()), 4 * torch.finfo(block.wide_dtype).eps)
    return readings[next(name for name, error in errors.items() if error <= accepted)]


def _component_errors(recorded: RecordedBlock, known: Sequence[ComponentError]) -> list[ComponentError]:
    """Return how well each component is rebuilt without a replay; those in `known` were measured before."""
    rows, measured = (
        [row for row in COMPONENTS if not row.needs_replay],
        {each.component: each for each in known},
    )
    entries = [measured.get(row.name) or measure(row, recorded) for row in rows]
    if recorded.anatomy.is_written_down:
        return entries
    note = f"{recorded.anatomy.feed_forward_kind} feed-forward: run as a whole, not rebuilt"
    noted = {row.name for row in rows if row.needed_for != "hooks"}
    return [
        dataclasses.replace(entry, note=note) if entry.error is None and entry.component in noted else entry
        for entry in entries
    ]


def _with_z_factors(block: RecordedBlock) -> tuple[RecordedBlock, ComponentError]:
    """Return the block, with a factor of its pattern per head if z then agrees, and the error of z."""
    entry = measure(MIXING, block)
    if entry.error is None or entry.ok:
        return block, entry
    mixed, z = MIXING.rebuild(block), MIXING.compare_with(block)
    if mixed is None or z is None:
        return block, entry
    squares = mixed.square().sum(dim=(0, 1, 3))
    # The factors are least-squares solutions. The factor of a head whose mixed values are 0 is undefined.
    factors = torch.where(squares == 0, 1, (mixed * z).sum(dim=(0, 1, 3)) / squares)
    scaled = block.scaled(factors)
    entry_of_scaled = measure(MIXING, scaled)
    return (scaled, entry_of_scaled) if entry_of_scaled.ok else (block, entry)


def find_unembedding_failure(lens: Lens, prompt: Prompt, verification: Verification) -> str | None:
    """Return why the unembedding cannot be rebuilt on the first tokens of a prompt; None if it can be."""
    clean = clean_pass(lens, _short_batch(lens, prompt), watched=())
    try:
        Block(clean, max(verification.anatomy), verification, "algebra", None).unembedding()
    except UnsupportedModelError as problem:
        return str(problem)
    return None


def masks_padding(lens: Lens, prompt: Prompt, side: PaddingSide = "right") -> bool:
    """Return whether a padded prompt has the output that it has alone, and no weight on its padding.

    The result is False if outputs are NaN: in float64, transformers gives NaN in a row that attends to
    nothing but padding (padding on the left, or a sliding window). The effect of
    padding on blocks without attention is not checked, nor are other effects of a mask.

    Args:
        lens: The lens of the model.
        prompt: The prompt whose first tokens are used.
        side: The side of the padding.
    """
    if lens.stack.gaps is not None or not lens.takes_padding_mask or prompt.features is not None:
        return False
    short = _short_prompt(lens, prompt)
    half = max(1, len(short.tokens) // 2)
    shorter = Prompt(short.tokens[:half], short.target, {name: v[:half] for name, v in short.inputs.items()})
    batch = pad([short, shorter], pad_token(lens.model), side)
    try:
        # A HookedTransformer with attention_dir="bidirectional" ignores its mask.
        together = clean_pass(lens, batch)
        if padding_leaks(together):
            return False
        alone = clean_pass(lens, pad([shorter], pad_token(lens.model), side), watched=())
        last = lens.n_layers - 1
        padded, plain = (each.calls[last].resid_post[-1][each.real[-1]] for each in (together, alone))
        return relative_error(padded, plain) <= pass_tolerance(lens.dtype)
    except ValueError:  # The outputs are not finite.
        return False
