"""The verification of a model, stored until its weights or hooks change."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Collection
from typing import Any

from torch import nn

from lens_mix._blocks.verification_record import UNEMBEDDING_UNVERIFIED, Verification
from lens_mix._care.users_hooks import has_user_hooks, read_user_module_settings
from lens_mix._inputs.batches import PaddingSide, Prompt
from lens_mix._model.model import Lens

_verifications: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Verification]]] = (
    weakref.WeakKeyDictionary()
)


def verification_of(
    lens: Lens,
    prompt: Prompt,
    *,
    with_unembedding: bool = False,
    fused: Collection[str] = (),
    padding: PaddingSide | None = None,
    again: bool = False,
) -> Verification:
    """Return the verification of the lens's stack, made again only if weights or hooks have changed.

    Args:
        lens: The lens of the model.
        prompt: The prompt to verify the model on.
        with_unembedding: Whether the unembedding has to be verified too (`needs_unembedding`).
        fused: For what fused attention has to be verified: some names of `find_fused_failure`.
        padding: The side on which the masking of padding has to be verified; None for neither.
        again: Whether to ignore a stored verification.

    Raises:
        RuntimeError: A hook calls this during a pass of lens_mix through this model.
    """
    _require_no_open_pass(lens)
    # The state is read inside the context, because no other thread's run has hooks on the model then.
    with lens.evaluation_mode():
        current = None if again else _find_current(lens)
        complete = _complete(lens, prompt, current, with_unembedding, fused, padding, again)
        if complete is not current:
            # The state is read afterwards, because a Bridge adds hooks to norms in its first forward pass.
            _verifications.setdefault(lens.model, {})[lens.stack.name] = (_state(lens), complete)
        return complete


def _find_current(lens: Lens) -> Verification | None:
    """Return the stored verification of the lens's stack; None if there is none, or if it may be outdated."""
    stored = _verifications.get(lens.model, {}).get(lens.stack.name)
    if stored is None or stored[0] != _state(lens) or _may_be_outdated(lens, stored[1]):
        return None
    return stored[1]


def _complete(
    lens: Lens,
    prompt: Prompt,
    current: Verification | None,
    with_unembedding: bool,
    fused: Collection[str],
    padding: PaddingSide | None,
    again: bool,
) -> Verification:
    """Return a verification with all that `verification_of` was asked for; `current` is what is known."""
    if current is not None:
        with_unembedding = with_unembedding and current.unembedding_failure == UNEMBEDDING_UNVERIFIED
        fused = [name for name in fused if name not in current.fused_failures]
        if padding is None and not with_unembedding and not fused:
            return current
    # Most runs find all of it, and do not need the passes of a verification.
    from lens_mix._verification.verify import find_unembedding_failure, masks_padding, verify

    complete = verify(lens, prompt) if current is None else current
    if lens.stack.source is not None and (current is None or padding is not None):
        below = Lens(lens.model, lens.stack.source.name)
        source = verification_of(below, prompt, padding=padding, again=again)
        complete = dataclasses.replace(complete, source=source)
    if with_unembedding:
        failure = find_unembedding_failure(lens, prompt, complete)
        complete = dataclasses.replace(complete, unembedding_failure=failure)
    if fused:
        from lens_mix._verification.fused import find_fused_failure

        failures = {name: find_fused_failure(lens, prompt, complete, name) for name in fused}
        complete = dataclasses.replace(complete, fused_failures={**complete.fused_failures, **failures})
    if padding is not None and padding not in complete.masks_padding:
        masked = masks_padding(lens, prompt, padding)
        masked = masked and (complete.source is None or complete.source.masks_padding[padding])
        sides = {**complete.masks_padding, padding: masked}
        complete = dataclasses.replace(complete, masks_padding=sides)
    return complete


def _require_no_open_pass(lens: Lens) -> None:
    """Raise an error if a pass of lens_mix is running, because its hooks would act on further passes."""
    frame = sys._getframe()
    while frame.f_back is not None:
        called_from = str(frame.f_back.f_globals.get("__name__"))
        if frame.f_globals.get("__name__") == nn.Module.__module__ and called_from.startswith("lens_mix."):
            called = frame.f_locals.get("self")
            if any(module is called for module in lens.modules):
                raise RuntimeError(
                    "model: a run is already open on it in this thread, in the middle of a forward pass: a "
                    "hook in that pass asked for another, nested run; run before or after the pass, or on a "
                    "copy.deepcopy(model) made before the hook was put on"
                )
        frame = frame.f_back


def _may_be_outdated(lens: Lens, verification: Verification) -> bool:
    """Return whether a component failed while user hooks were on the model, which may be inactive now.

    Any variable of the user's code may switch a hook or a module. Verified components can't be outdated,
    because each run compares them with its own prompts (`Verifier`).
    """
    failed = any(entry.error is not None and not entry.ok for entry in verification.components)
    return failed and has_user_hooks(lens.modules)


def read_state(lens: Lens) -> tuple[Any, ...]:
    """Return a value that changes when weights or hooks of the model do, as `_state`, for other modules."""
    with lens.evaluation_mode():
        return _state(lens)


def _state(lens: Lens) -> tuple[Any, ...]:
    """Return a value that changes when weights or hooks of the model do.

    A change of weights is an in-place edit, a replacement, a move or a cast. The value also changes with the
    settings of the user's modules, such as peft's `disable_adapter`.
    """
    parameters = {id(p): p for module in lens.modules for p in module._parameters.values() if p is not None}
    weights = tuple(
        # Tensors created in inference mode have no version counter.
        (p.data_ptr(), None if p.is_inference() else p._version, p.dtype)
        for p in parameters.values()
    )
    # torch uses each key only once, so a hook that replaces another has a new key.
    hooks = tuple(
        (*m._forward_hooks, *m._forward_pre_hooks)
        for m in lens.modules
        if m._forward_hooks or m._forward_pre_hooks
    )
    return weights, hooks, read_user_module_settings(lens.modules)
