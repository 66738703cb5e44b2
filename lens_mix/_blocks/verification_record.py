"""The record of a verification: how well each component of each block was rebuilt."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from jaxtyping import Float
from torch import Tensor

from lens_mix._blocks.components import FEED_FORWARD, ComponentError, names_needed_for
from lens_mix._model.anatomy import WITH_KINK, BlockAnatomy

_HOOK_COMPONENTS = names_needed_for("hooks")
ALGEBRA_COMPONENTS = names_needed_for("algebra")
UNEMBEDDING_UNVERIFIED = "unembedding: expected a verification of it, found none"


@dataclasses.dataclass(frozen=True)
class Verification:
    """The verification of one stack.

    Attributes:
        components: One entry per block and component.
        anatomy: Layer -> the anatomy that was found for the block. Blocks of a hybrid that have no attention
            are left out.
        causal: Whether no query attended to a later key in any block.
        next_norm_failures: Layer -> why it is unknown which norm reads the block's output. A layer whose norm
            is known is left out.
        masks_padding: Side of the padding -> whether attention ignores it, for the sides that were tried.
        unembedding_failure: Why the logits can't be computed from the last residual stream; None if they can.
        fused_failures: "rows", "windows" or "gradients" -> why fused attention can't be used for these, or
            None if it gives what eager attention does, for those that were tried.
        z_factors: Layer -> z of each head divided by pattern @ values, if that is not 1 (an ablated head).
        source: The verification of the encoder, for the joint part; None otherwise.
        sees_later_patches: Whether the model is causal on text, but not on the prompt of this run, whose
            pictures attend to themselves in both directions.
    """

    components: tuple[ComponentError, ...]
    anatomy: Mapping[int, BlockAnatomy]
    causal: bool
    next_norm_failures: Mapping[int, str] = dataclasses.field(default_factory=dict)
    masks_padding: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    unembedding_failure: str | None = UNEMBEDDING_UNVERIFIED
    fused_failures: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    z_factors: Mapping[int, Float[Tensor, " head"]] = dataclasses.field(default_factory=dict)
    source: Verification | None = None
    sees_later_patches: bool = False

    @property
    def predicts_next(self) -> bool:
        """Whether the logits at a position predict the next token."""
        return self.causal or self.sees_later_patches

    def failure(self, names: Collection[str]) -> str | None:
        """Return why the named components are not all verified; None if they are."""
        for entry in self.components:
            if entry.component in names and not entry.ok:
                size = "no rebuilding" if entry.error is None else f"relative error {entry.error:.1e}"
                note = f" ({entry.note})" if entry.note else ""
                return (
                    f"block {entry.layer}: {entry.component} is not verified: "
                    f"expected relative error <= {entry.tolerance:.0e}, got {size}{note}"
                )
        return None

    @property
    def largest_error(self) -> float | None:
        """The largest relative error of the verified components; None if no component is verified."""
        return max(
            (entry.error for entry in self.components if entry.ok and entry.error is not None), default=None
        )

    @property
    def is_smooth(self) -> bool:
        """Whether all feed-forwards are verified, and none has a kink (ReLU) or selects experts."""
        feed_forwards = [block.feed_forward for block in self.anatomy.values() if block.feed_forward]
        # A feed-forward that is not verified may have any activation.
        verified = self.failure((FEED_FORWARD.name,)) is None
        return verified and all(each.activation not in WITH_KINK for each in feed_forwards)

    @property
    def hooks_failure(self) -> str | None:
        """Why hooks on values and patterns can't be used on this model; None if they can."""
        # A run on the joint part also intervenes in the encoder.
        failure = self.failure(_HOOK_COMPONENTS)
        return failure if self.source is None or failure is not None else self.source.hooks_failure

    @property
    def algebra_failure(self) -> str | None:
        """Why the blocks can't be computed from their components; None if they can."""
        # The algebra starts from the recorded pattern and values, which the components for hooks verify.
        return self.hooks_failure or self.failure(ALGEBRA_COMPONENTS)
