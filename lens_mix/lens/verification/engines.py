"""Which engine a method runs with on a verified model, and why not with another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar, Protocol, runtime_checkable

from lens_mix.arguments import check_choice
from lens_mix.lens import known_faults
from lens_mix.lens.components import UNEMBEDDING
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import UnsupportedModelError, transformer_lens_version
from lens_mix.lens.state import find_gradient_obstacle
from lens_mix.lens.verification_record import ALGEBRA_COMPONENTS, Verification


@runtime_checkable
class HasEngines(Protocol):
    """What support needs to know of a method."""

    name: ClassVar[str]
    engines: ClassVar[tuple[str, ...]]


def _needs(method: object) -> Collection[str]:
    return getattr(method, "needs", ALGEBRA_COMPONENTS)


def _scope(method: object) -> str:
    return getattr(method, "scope", "layer")


def needs_unembedding(methods: Iterable[object]) -> bool:
    """Whether one of the methods takes logits apart, so that the head has to be verified."""
    return any(UNEMBEDDING in _needs(method) for method in methods)


def _find_reason_against(
    verification: Verification, engine: str, method: HasEngines | None = None
) -> str | None:
    """Why an engine can't run on a verified model; None when it can.

    Args:
        verification: the model's verification.
        engine: which engine.
        method: whose algebra: it may need fewer parts than all (`parts`), and may know blocks that its
            formulas don't speak of (`unsupported_block`).
    """
    if verification.hooks_failure is not None:
        return verification.hooks_failure
    if "causal" in _needs(method) and not verification.causal:
        return "expected a causal model, got one whose positions read later ones"
    if engine == "algebra":
        needs = _needs(method)
        reason = verification.failure(needs) or _unsupported_block(verification, method)
        return verification.unembedding_failure if reason is None and UNEMBEDDING in needs else reason
    if _scope(method) == "model":
        # Its backward pass may follow changed rules, which the method may not have for every kind of block.
        return _unsupported_block(verification, method)
    if hasattr(method, "target") and verification.z_factors:
        # The hooks that put a pattern in compute z anew, so that the factor would be lost.
        scaled = ", ".join(map(str, verification.z_factors))
        return f"z of its heads is scaled by a hook in layers {scaled}; take it off"
    return None


def _unsupported_block(verification: Verification, method: HasEngines | None) -> str | None:
    """Why a method has nothing to say of one of the blocks; None where it has of all."""
    unsupported_block = getattr(method, "unsupported_block", lambda anatomy: None)
    refusals = ((layer, unsupported_block(anatomy)) for layer, anatomy in verification.anatomy.items())
    refusal = next((f"block {layer}: {why}" for layer, why in refusals if why is not None), None)
    below = (
        None
        if refusal is not None or verification.source is None
        else _unsupported_block(verification.source, method)
    )
    return refusal if below is None else f"encoder: {below}"


def find_obstacle(lens: Lens, method: HasEngines) -> str | None:
    """Why a method can't run on a model, whatever its verification says; None when it may.

    A method with a target needs right logits, one that goes down to the input a stack without gaps, and a map
    of the whole model logits that stand over the tokens of the mapped stack.
    """
    reason = next(filter(None, _reasons_against(lens, method)), None)
    return None if reason is None else f"{method.name} can't run on this model: {reason}"


def _reasons_against(lens: Lens, method: HasEngines) -> Iterator[str | None]:
    parts = getattr(method, "parts", ())
    if lens.stack.is_cross and "cross" not in parts:
        yield (
            "it speaks of self-attention, and is not defined on part='cross' (queries of the target, keys of "
            "the source); expected part='encoder' or 'decoder'"
        )
    joint = "joint" in parts
    if lens.stack.source is not None and not joint:
        yield "it does not speak of part='joint'; lm.joint(lm.run(..., part='all')) joins maps of layers"
    if hasattr(method, "target"):
        yield known_faults.wrong_logits(lens.model_class, transformer_lens_version())
    if _scope(method) != "layer" and lens.stack.gaps is not None:
        yield f"{lens.stack.gaps}, so that nothing can be followed through the whole stack"
    if _scope(method) == "model" and lens.stack.name == "encoder":
        yield (
            "the logits stand over the decoder's tokens, and so would its rows; expected part='decoder' "
            "(the target's own tokens)" + " or part='joint' (the source's too)" * joint
        )
    if "gradients" in _needs(method):
        yield find_gradient_obstacle(lens.modules)
    places = lens.takes_input("position_ids") and not lens.stack.reads_target
    if "position_ids" in _needs(method) and not places:
        yield (
            "it runs tokens at repeated positions; expected a decoder-only TransformerBridge whose model "
            "takes position_ids"
        )


def choose_engine(
    method: HasEngines, verification: Verification, engine: str, no_algebra: str | None = None
) -> str:
    """The engine a method will run with.

    Args:
        method: the method.
        verification: the model's verification.
        engine: "auto" for the first of the method's engines that the verification allows, or one by name.
        no_algebra: why algebra can't run on this prompt, though the verification allows it.

    Raises:
        ValueError: an unknown engine, or one that the method does not have.
        UnsupportedModelError: the verification forbids it.
    """
    check_choice("engine", engine, ("auto", "hooks", "algebra"))
    if engine == "auto" or method.engines == ("recorded",):
        options: tuple[str, ...] = method.engines
    elif engine in method.engines:
        options = (engine,)
    else:
        raise ValueError(f"engine: {method.name} has the engines {list(method.engines)}, got {engine!r}")
    reasons = []
    for option in options:
        reason = _find_reason_against(verification, option, method) or (
            no_algebra if option == "algebra" else None
        )
        if reason is None:
            return option
        reasons.append(f"{option}: {reason}")
    raise UnsupportedModelError(f"{method.name} can't run on this model: {'; '.join(reasons)}")
