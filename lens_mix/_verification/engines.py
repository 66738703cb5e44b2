"""The choice of a method's engine on a verified model, and the reasons against the other engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Protocol, runtime_checkable

from lens_mix._blocks.components import UNEMBEDDING
from lens_mix._blocks.verification_record import Verification
from lens_mix._care.state import find_gradient_obstacle
from lens_mix._classes import known_faults
from lens_mix._classes.model_classes import (
    UnsupportedModelError,
    has_classifier,
    reads_features,
    transformer_lens_version,
)
from lens_mix._model.anatomy import BlockAnatomy
from lens_mix._model.model import Lens
from lens_mix.arguments import check_choice


@runtime_checkable
class HasEngines(Protocol):
    """What a method declares about itself (`lens_mix.method.Method`)."""

    name: ClassVar[str]
    engines: ClassVar[tuple[str, ...]]
    needs: ClassVar[frozenset[str]]
    parts: ClassVar[frozenset[str]]

    @property
    def reads(self) -> str:
        """What it reads for a map."""

    @property
    def is_input_map(self) -> bool:
        """Whether its map reaches down to the input tokens."""

    @property
    def target(self) -> Any:
        """The target that it explains, or None."""

    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        """Return why it is not defined for such a block; None if it is."""

    def needs_for(self, anatomy: BlockAnatomy) -> frozenset[str]:
        """Return what the map of such a block needs."""


def needs_unembedding(methods: Iterable[HasEngines]) -> bool:
    """Return whether one of the methods splits logits, so that the unembedding has to be verified."""
    return any(UNEMBEDDING in method.needs for method in methods)


def find_reason_against(verification: Verification, engine: str, method: HasEngines) -> str | None:
    """Return why an engine can't run on a verified model; None if it can.

    Args:
        verification: The model's verification.
        engine: The engine's name.
        method: The method. It may need only some components (`needs`), and may have no formula for some
            blocks (`unsupported_block`).
    """
    # Weights that are not what mixes the values would make a wrong map, so this is a reason against every
    # engine.
    if verification.hooks_failure is not None:
        return verification.hooks_failure
    if "causal" in method.needs and not verification.causal:
        return "expected a causal model, got one whose positions read later ones"
    if engine == "algebra":
        reason = verification.failure(method.needs) or _unsupported_block(verification, method)
        return verification.unembedding_failure if reason is None and UNEMBEDDING in method.needs else reason
    if method.reads == "model":
        # Such a method may change the backward pass, and may have no rule for some kinds of blocks.
        return _unsupported_block(verification, method)
    if method.target is not None and verification.z_factors:
        # The hooks that replace a pattern recompute z, so the factor would be lost.
        scaled = ", ".join(map(str, verification.z_factors))
        return f"a hook scales z of the heads in layers {scaled}; remove it"
    return None


def _unsupported_block(verification: Verification, method: HasEngines) -> str | None:
    """Return why a method is not defined for one of the blocks; None if it is for all."""
    failures = ((layer, method.unsupported_block(anatomy)) for layer, anatomy in verification.anatomy.items())
    failure = next((f"block {layer}: {why}" for layer, why in failures if why is not None), None)
    below = (
        None
        if failure is not None or verification.source is None
        else _unsupported_block(verification.source, method)
    )
    return failure if below is None else f"encoder: {below}"


def find_obstacle(lens: Lens, method: HasEngines) -> str | None:
    """Return why a method can't run on a model, apart from its verification; None if there is no reason.

    A method with a target needs correct logits. A method of the whole stack needs attention in every block.
    A method of the whole model needs logits at the tokens of the mapped part.
    """
    reason = next(filter(None, _reasons_against(lens, method)), None)
    return None if reason is None else f"{method.name} can't run on this model: {reason}"


def _reasons_against(lens: Lens, method: HasEngines) -> Iterator[str | None]:
    if lens.stack.is_cross and "cross" not in method.parts:
        yield (
            "it is defined for self-attention only, not for part='cross' (queries of the target, keys of "
            "the source); expected part='encoder' or 'decoder'"
        )
    takes_joint = "joint" in method.parts
    if lens.stack.source is not None and not takes_joint:
        yield (
            "it is not defined for part='joint'; lm.aggregation.joint(lm.run(..., part='all')) joins maps of "
            "layers"
        )
    if method.target is not None:
        if reads_features(lens.model) and not has_classifier(lens.model):
            yield _no_classifier(method.target)
        # Text and functions have no attribute `reads`, and are targets on the logits.
        if getattr(method.target, "reads", "logits") == "logits":
            yield known_faults.wrong_logits(lens.model, lens.model_class, transformer_lens_version())
    if reads_features(lens.model) and lens.stack.name != "decoder":
        yield getattr(method, "needs_tokens", None)
    if method.is_input_map and lens.stack.gaps is not None:
        yield f"{lens.stack.gaps}, so no map of the whole stack can be computed"
    if method.reads == "model" and lens.stack.name == "encoder":
        yield (
            "the logits are at the decoder's tokens, and so would be its rows; expected part='decoder' "
            "(the target's own tokens)" + " or part='joint' (the source's too)" * takes_joint
        )
    if "gradients" in method.needs:
        yield find_gradient_obstacle(lens.modules)
    takes_positions = lens.takes_input("position_ids") and not lens.stack.reads_target
    if "position_ids" in method.needs and not takes_positions:
        yield (
            "it runs tokens at repeated positions; expected a decoder-only TransformerBridge whose model "
            "takes position_ids"
        )


def _no_classifier(target: object) -> str | None:
    """Return why a target can't be read from a model without a classifier; None if it reads no logits."""
    if getattr(target, "reads", "logits") != "logits":
        return None
    return (
        "it has no classifier, so its output is its last hidden state; expected a target that reads it: "
        "target=lm.targets.head(lambda resid: ...)"
    )


def choose_engine(
    method: HasEngines, verification: Verification, engine: str, no_algebra: str | None = None
) -> str:
    """Return the engine that a method will run with.

    Args:
        method: The method.
        verification: The model's verification.
        engine: An engine's name, or "auto" for the first of the method's engines that the verification
            allows.
        no_algebra: Why algebra can't run on this prompt although the verification allows it; None if it can.

    Raises:
        ValueError: The engine is unknown, or the method does not have it.
        UnsupportedModelError: The verification allows none of the engines.
    """
    check_choice("engine", engine, ("auto", "hooks", "algebra"))
    # What is read off the clean pass does not depend on the engine that the user asks for.
    if engine == "auto" or method.engines == ("recorded",):
        options: tuple[str, ...] = method.engines
    elif engine in method.engines:
        options = (engine,)
    else:
        raise ValueError(f"engine: {method.name} has the engines {list(method.engines)}, got {engine!r}")
    reasons = []
    for option in options:
        reason = find_reason_against(verification, option, method) or (
            no_algebra if option == "algebra" else None
        )
        if reason is None:
            return option
        reasons.append(f"{option}: {reason}")
    raise UnsupportedModelError(f"{method.name} can't run on this model: {'; '.join(reasons)}")
