"""The check of a run's own prompts: whether they agree with the verified components.

The verification was made on a short prompt, maybe some time ago. Only this check detects a hook that acts
from position 20 on, or a change of a weight that torch does not count. It rebuilds the components that the
requested methods need (`lens_mix._blocks.components`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jaxtyping import Int
from torch import Tensor

from lens_mix._blocks.components import BLOCK, COMPONENTS, MIXING, VALUES, Component, ComponentError, measure
from lens_mix._blocks.recorded import RecordedBlock
from lens_mix._blocks.verification_record import ALGEBRA_COMPONENTS, Verification
from lens_mix._care.precision import relative_error
from lens_mix._inputs.batches import pad
from lens_mix._inputs.rows import spread
from lens_mix._passes.block_outputs import BlockOutputs
from lens_mix._passes.clean_pass import CleanPass, clean_pass

# Rows rebuilt per batch, at least one per prompt. Few are enough, because a model without hooks treats all
# positions alike.
_SAMPLED_ROWS = 4


class UnexpectedBlock(Exception):
    """A block of a running pass is not as the plan of the pass expects.

    Attributes:
        reason: How the prompts differ from the verification; None if patches attend to later patches.
        found_for: What the differing component is checked for: an engine, or what a method needs.
    """

    def __init__(self, reason: str | None, found_for: str = "") -> None:
        super().__init__(reason)
        self.reason, self.found_for = reason, found_for


class Verifier:
    """The first visitor of a pass: it compares each block with its verified components.

    Some rows of every prompt are rebuilt. All requested rows are rebuilt if a method computes the
    feed-forward, or if user hooks are on the model. A hook may act on any one position. A feed-forward
    without a formula, such as a mixture of experts, is not computed: its recorded output is used.

    Args:
        verification: The verification of the model.
        compared: Engines, and names that methods list in their `needs` (`Component.checked_for`).
        is_whole: The layers to compare, and whether all rows of each are rebuilt.
        outputs: The outputs within blocks that the pass records; None if it records none.
        has_hooks: Whether user hooks are on the model. Then each layer gets notes.
        is_cached: Whether the pass was cached by the user, who may have had other hooks on the model. If
            nothing is compared, because methods only read weights, a layer that hooks changed gets a note.

    Attributes:
        notes: Layer -> the sentences about what user hooks change.
    """

    def __init__(
        self,
        verification: Verification,
        compared: Collection[str],
        is_whole: Mapping[int, bool],
        outputs: BlockOutputs | None,
        *,
        has_hooks: bool,
        is_cached: bool = False,
    ) -> None:
        self._verification, self._is_whole, self._outputs = verification, is_whole, outputs
        self._components = [each for each in COMPONENTS if each.checked_for in compared]
        self._has_hooks, self._is_cached = has_hooks, is_cached
        self.notes: dict[int, list[str]] = {}

    def visit(self, clean: CleanPass, layer: int) -> None:
        """Compare one block.

        Raises:
            UnexpectedBlock: These prompts differ from the components of the block.
        """
        if clean.seeing_later and self._verification.causal:
            raise UnexpectedBlock(None)
        # Blocks that no method reads are not compared, because no map depends on their components.
        if layer not in self._is_whole:
            return
        outputs = self._outputs.take(layer) if self._outputs else {}
        block = RecordedBlock(clean, layer, self._verification.anatomy[layer], outputs)
        rows = _rows(clean, None if self._is_whole[layer] else _SAMPLED_ROWS)
        for component in self._components:
            entry = measure(component, block, rows)
            if _is_mismatch(entry):
                raise UnexpectedBlock(_mismatch(component, entry), component.checked_for)
        if self._has_hooks:
            self.notes[layer] = _describe_user_hooks(block)
        if self._is_cached and not self._components and self._is_changed(block):
            self.notes.setdefault(layer, []).append(
                "in the cache, the block is not what the model computes from its input: a hook changed it, "
                "or the weights were others; the map has the cached pattern"
            )

    def _is_changed(self, block: RecordedBlock) -> bool:
        """Return whether a cached block is not what the model computes, as far as the cache shows it."""
        clean, layer, anatomy = block.clean, block.layer, block.anatomy
        stack = clean.lens.stack
        if any(stack.hook_name(role, layer) not in clean.recorded for role in ("value", "z")):
            return False
        # A formula for the whole block is needed, which the model was verified to follow.
        is_known = self._verification.failure(ALGEBRA_COMPONENTS) is None and anatomy.is_written_down
        has_block = is_known and layer in clean.calls and not anatomy.cross and not stack.is_cross
        every, some = _rows(clean, None), _rows(clean, _SAMPLED_ROWS)
        is_mixed = not _is_mismatch(measure(MIXING, block, every))
        return not is_mixed or (has_block and _is_mismatch(measure(BLOCK, block, some)))


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


def _describe_user_hooks(block: RecordedBlock) -> list[str]:
    """Return notes on how user hooks change the attention of one block on these prompts."""
    notes = []
    if block.z_factors is not None:
        factors = [round(factor, 4) for factor in block.z_factors.tolist()]
        notes.append(f"a hook scales z of its heads by {factors}; the pattern has these factors")
    if _is_mismatch(measure(VALUES, block)):
        notes.append("a hook or an adapter changes its values; the map is of the changed ones")
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
