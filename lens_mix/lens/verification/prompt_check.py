"""The check of a run's own prompts: whether they agree with the verified components.

The verification was made on a short prompt, maybe some time ago. Only this check detects a hook that acts
from position 20 on, or a change of a weight that torch does not count. It rebuilds the components that the
requested methods need (`lens_mix.lens.components`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

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

# Rows rebuilt per batch, at least one per prompt. Few are enough, because a model without hooks treats all
# positions alike.
_SAMPLED_ROWS = 4
_NONE: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({})


def find_mismatch(
    clean: CleanPass,
    verification: Verification,
    layers: Sequence[int],
    uses: Collection[str],
    whole: Collection[int] = (),
    outputs: Mapping[int, Mapping[str, Tensor]] = _NONE,
) -> str | None:
    """Return how these prompts differ from the verified components; None if they agree.

    Some rows of every prompt are rebuilt. All requested rows are rebuilt if a method computes the
    feed-forward, or if user hooks are on the model. A hook may act on any one position. A feed-forward
    without a formula, such as a mixture of experts, is not computed: its recorded output is used.

    Args:
        clean: The clean pass, which recorded "pattern" and "value" in these layers, and "z" for "recorded".
        verification: The verification of the model.
        layers: The layers that the methods use.
        uses: Engines, and names that methods list in their `needs` (`Component.checked_for`).
        whole: The layers whose rows are all rebuilt, because a method computes their feed-forward.
        outputs: Layer -> as in `PromptCheck.find_mismatch`.
    """
    check = PromptCheck(clean, verification, uses, whole, samples=not has_user_hooks(clean.lens.modules))
    found = (check.find_mismatch(layer, outputs.get(layer, {})) for layer in layers)
    return next(filter(None, found), None)


class PromptCheck:
    """The check of some prompts, one block at a time; see `find_mismatch` of this module.

    Args:
        clean: The clean pass, which may not have reached the blocks that are checked later.
        verification: The verification of the model.
        uses: Engines, and names that methods list in their `needs` (`Component.checked_for`).
        whole: The layers whose rows are all rebuilt.
        samples: Whether a few rows are rebuilt in all other layers. False: all rows.
    """

    def __init__(
        self,
        clean: CleanPass,
        verification: Verification,
        uses: Collection[str],
        whole: Collection[int],
        *,
        samples: bool,
    ) -> None:
        self._clean, self._verification, self._whole = clean, verification, whole
        self._components = [each for each in COMPONENTS if each.checked_for in uses]
        self._sampled, self._every = _rows(clean, _SAMPLED_ROWS if samples else None), _rows(clean, None)

    def find_mismatch(self, layer: int, outputs: Mapping[str, Tensor]) -> str | None:
        """Return how these prompts differ from the components of one block; None if they agree.

        Args:
            layer: The block.
            outputs: Role -> the output of a module in the block (`BlockOutputs`). If the feed-forward's is
                given, it is not computed.
        """
        block = RecordedBlock(self._clean, layer, self._verification.anatomy[layer], outputs)
        rows = self._every if layer in self._whole else self._sampled
        for component in self._components:
            entry = measure(component, block, rows, by_sketch=True)
            if _is_mismatch(entry):
                return _mismatch(component, entry)
        return None


def _is_mismatch(entry: ComponentError) -> bool:
    """Return whether a component differs; one without a formula in its anatomy does not."""
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
    """Return, by layer, notes on how user hooks change attention on these prompts.

    The clean pass has to have recorded "pattern" and "value" in these layers.
    """
    notes: dict[int, list[str]] = {layer: [] for layer in layers}
    for layer in layers:
        if layer in clean.z_factors:
            factors = [round(factor, 4) for factor in clean.z_factors[layer].tolist()]
            notes[layer].append(f"a hook scales z of its heads by {factors}; the pattern has these factors")
        block = RecordedBlock(clean, layer, verification.anatomy[layer])
        if _is_mismatch(measure(VALUES, block, by_sketch=True)):
            notes[layer].append("a hook or an adapter changes its values; the map is of the changed ones")
    return notes


def find_input_mismatch(clean: CleanPass) -> str | None:
    """Return how this pass differs from the model's own pass with the same inputs; None if it does not.

    The lens adds a mask and switches caches off. Models of transformers use both to interpret position ids
    that restart, so their outputs may change.
    """
    names = sorted(set(clean.batch.inputs) - {"token_type_ids"})
    names += ["pictures"] * clean.batch.has_pictures
    last = max(clean.calls)
    for index, prompt in enumerate(clean.batch.prompts if names else ()):
        batch = pad([prompt], 0, "right")
        given = clean_pass(clean.lens, batch, watched=(), stop_after=last, as_given=True)
        got = clean.calls[last].resid_post[index][clean.real[index]]
        error = relative_error(got[None], given.calls[last].resid_post)
        if not error <= clean.lens.tolerance:
            return (
                f"model inputs: expected the output of the model's own pass with {names}, got a relative "
                f"error of {error:.1e} after {clean.lens.where(last)}, because lens_mix masks padding and "
                "keeps no cache"
            )
    return None


def _rows(clean: CleanPass, count: int | None) -> Int[Tensor, "batch place"]:
    """Return places among the recorded rows: `count` in all, spread out; every one if it is None."""
    places = [row.nonzero()[:, 0] for row in clean.real_rows]
    return spread(places, max(map(len, places)) if count is None else max(1, count // len(places)))
