"""The check of a run's own prompts: whether they have the components that the verification found.

The verification was made on a short prompt, maybe some time ago. A hook that acts from position 20 on, or a
weight that was edited behind torch's back, shows only here. The rows of the same table that the asked methods
need are evaluated (`lens_mix.lens.components`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxtyping import Int
from torch import Tensor

from lens_mix.lens.batches import pad
from lens_mix.lens.clean_pass import CleanPass, clean_pass
from lens_mix.lens.components import COMPONENTS, VALUES, Component, ComponentError, measure
from lens_mix.lens.recorded import RecordedBlock
from lens_mix.lens.replay import relative_error
from lens_mix.lens.rows import spread
from lens_mix.lens.users_hooks import has_user_hooks
from lens_mix.lens.verification_record import Verification

# Rows rebuilt per batch, and per prompt at least one: without hooks a model treats all positions alike.
_SAMPLED_ROWS = 4


def find_mismatch(
    clean: CleanPass,
    verification: Verification,
    layers: Sequence[int],
    uses: Collection[str],
    whole: Collection[int] = (),
) -> str | None:
    """Why these prompts do not have the verified components; None when they have.

    Rows of every prompt are rebuilt: a few, or all asked ones where the feed-forward is relied on or the
    user's hooks are on the model, since a change may act on any one position. A component that can't be
    written down, such as a mixture of experts, is left out.

    Args:
        clean: the clean pass; it recorded "pattern" and "value" in these layers, and "z" for "recorded".
        verification: the verification that is to be relied on.
        layers: the blocks that will be relied on.
        uses: engines, and names that methods list in their `parts` (`Component.checked_for`).
        whole: the layers whose rows are all rebuilt, because a method computes their feed-forward.
    """
    sampled, every = _rows(clean, _SAMPLED_ROWS), _rows(clean, None)
    if has_user_hooks(clean.lens.modules):
        sampled = every
    for layer in layers:
        block = RecordedBlock(clean, layer, verification.anatomy[layer])
        for component in COMPONENTS:
            if component.checked_for not in uses:
                continue
            entry = measure(component, block, every if layer in whole else sampled, by_sketch=True)
            if _is_mismatch(entry):
                return _mismatch(component, entry)
    return None


def _is_mismatch(entry: ComponentError) -> bool:
    """Return whether a component differs; it does not if its anatomy has no formula for it."""
    return not entry.ok and (entry.error is not None or bool(entry.note))


def _mismatch(component: Component[RecordedBlock], entry: ComponentError) -> str:
    if entry.error is None:
        return f"block {entry.layer}: {entry.note}"
    return (
        f"block {entry.layer}: expected {component.claim} within {entry.tolerance:.0e}, got a relative error "
        f"of {entry.error:.1e}"
    )


def describe_user_hooks(
    clean: CleanPass, verification: Verification, layers: Sequence[int]
) -> dict[int, list[str]]:
    """What the user's hooks edit in attention on these prompts, by layer, in words for the record.

    The clean pass recorded "pattern" and "value" in these layers.
    """
    edits: dict[int, list[str]] = {layer: [] for layer in layers}
    for layer in layers:
        if layer in clean.z_factors:
            factors = [round(factor, 4) for factor in clean.z_factors[layer].tolist()]
            edits[layer].append(f"a hook scales z of its heads by {factors}; the pattern has these factors")
        block = RecordedBlock(clean, layer, verification.anatomy[layer])
        if _is_mismatch(measure(VALUES, block, by_sketch=True)):
            edits[layer].append("a hook or an adapter edits its values; they are taken as they are")
    return edits


def find_input_mismatch(clean: CleanPass) -> str | None:
    """Why this is not the pass that the model makes of the user's inputs; None when it is, or there are none.

    Besides tokens: positions, above all. The lens adds a mask and switches caches off, by which models of
    transformers tell what positions that restart mean.
    """
    names = sorted(set(clean.batch.inputs) - {"token_type_ids"})
    last = max(clean.calls)
    for index, prompt in enumerate(clean.batch.prompts if names else ()):
        batch = pad([prompt], 0, "right")
        given = clean_pass(clean.lens, batch, watched=(), stop_after=last, as_given=True)
        got = clean.calls[last].resid_post[index][clean.real[index]]
        error = relative_error(got[None], given.calls[last].resid_post)
        if not error <= clean.lens.tolerance:
            return (
                f"model inputs: expected the model's own pass with {names}, got another one, {error:.1e} off "
                f"after {clean.lens.where(last)}, once padding is masked and no cache is kept"
            )
    return None


def _rows(clean: CleanPass, count: int | None) -> Int[Tensor, "batch place"]:
    """Places among the rows that the clean pass recorded: so many in all, or every one."""
    places = [row.nonzero()[:, 0] for row in clean.real_rows]
    return spread(places, max(map(len, places)) if count is None else max(1, count // len(places)))
