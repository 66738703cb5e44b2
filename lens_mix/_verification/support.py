"""Tables to print: the methods that a model supports, and the errors of its verification."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lens_mix._blocks.components import ComponentError
from lens_mix._blocks.verification_record import Verification
from lens_mix._care.raw_errors import LibraryErrors
from lens_mix._classes.model_classes import (
    ModelClass,
    TransformerLensModel,
    UnsupportedModelError,
    model_class_of,
    reads_features,
)
from lens_mix._classes.model_names import model_name, strip_path
from lens_mix._inputs.batches import Prompt
from lens_mix._inputs.features import any_features
from lens_mix._inputs.prompts import device_of, is_encoder_decoder, most_tokens, read_prompt
from lens_mix._model.model import Lens
from lens_mix._verification.engines import HasEngines, choose_engine, find_obstacle, needs_unembedding
from lens_mix._verification.kept import verification_of

if TYPE_CHECKING:
    from lens_mix.tables import Table


@dataclasses.dataclass(frozen=True)
class Support:
    """A table of methods on one model: `ok` with the engine, or the reason why a method cannot run.

    Attributes:
        model: The model's name.
        rows: One (method, engine, reason) per method; engine is None if it can't run, reason "" if it can.
        long_prompts: Whether some rows of long prompts are computed with fused attention, and if not, why.
    """

    model: str
    rows: tuple[tuple[str, str | None, str], ...]
    long_prompts: str = ""

    def __iter__(self) -> Iterator[tuple[str, str | None, str]]:
        return iter(self.rows)

    def __getitem__(self, method: str) -> str:
        """Return "ok (engine)" or the reason why a method can't run."""
        for name, engine, reason in self.rows:
            if name == method:
                return reason if engine is None else f"ok ({engine})"
        raise KeyError(f"expected one of {[name for name, _, _ in self.rows]}, got {method!r}")

    def to_dataframe(self) -> Table:
        """Return a pandas DataFrame with columns method, engine, reason."""
        from lens_mix.tables import Table

        return Table(self.rows, columns=["method", "engine", "reason"])

    def __str__(self) -> str:
        width = max(len(name) for name, _, _ in self.rows)
        lines = [f"{name:<{width}}  {self[name]}" for name, _, _ in self.rows]
        lines += [f"{'long prompts':<{width}}  {self.long_prompts}"] * bool(self.long_prompts)
        return "\n".join([f"support for {strip_path(self.model)}", *lines])

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of the verification of a model, which can be printed.

    Attributes:
        model: The model's name.
        verification: The errors per block and component, and the anatomy of each block.
    """

    model: str
    verification: Verification

    @property
    def ok(self) -> bool:
        """Whether every component of every block is verified."""
        return self.verification.algebra_failure is None

    def to_dataframe(self) -> Table:
        """Return a pandas DataFrame with columns layer, component, error, tolerance, ok, note."""
        from lens_mix.tables import Table

        rows = [
            (entry.layer, entry.component, entry.error, entry.tolerance, entry.ok, entry.note)
            for entry in self.verification.components
        ]
        return Table(rows, columns=["layer", "component", "error", "tolerance", "ok", "note"])

    def __str__(self) -> str:
        # Every block has the same components, which are the columns in the order of their table.
        components = list(dict.fromkeys(entry.component for entry in self.verification.components))
        errors = {(entry.layer, entry.component): entry for entry in self.verification.components}
        lines = [
            f"verification for {strip_path(self.model)}: largest relative error per block and component "
            f"(accepted: {self.verification.components[0].tolerance:.0e})",
            "block  " + "  ".join(f"{name:>12}" for name in components) + "  anatomy",
        ]
        for layer, anatomy in self.verification.anatomy.items():
            cells = [_cell(errors[layer, name]) for name in components]
            wiring = f"{anatomy.placement}-norm" if anatomy.placement != "none" else "no norm"
            if anatomy.parallel:
                wiring += ", parallel"
            lines.append(
                f"{layer:>5}  " + "  ".join(cells) + f"  {wiring}, feed-forward {anatomy.feed_forward_kind}"
            )
        lines.append(
            "unembedding: verified"
            if self.verification.unembedding_failure is None
            else self.verification.unembedding_failure
        )
        lines.append(
            "padding is "
            + ("masked" if self.verification.masks_padding["right"] else "NOT masked: prompts run one by one")
        )
        for name, reason in (
            ("hooks", self.verification.hooks_failure),
            ("algebra", self.verification.algebra_failure),
        ):
            lines.append(f"{name}: " + ("verified" if reason is None else f"failed: {reason}"))
        return "\n".join(lines)

    __repr__ = __str__


def _cell(entry: ComponentError) -> str:
    return f"{'-':>12}" if entry.error is None else f"{entry.error:>11.1e}{' ' if entry.ok else '!'}"


def hooks_failure(model: TransformerLensModel, part: str | None = None) -> str | None:
    """Return why hooks on values and patterns have no reliable effect on a model; None if they have one.

        >>> lm.models.hooks_failure(model) or "hooks work"

    The model runs only if it has not been verified before, or if its weights or hooks have changed since.

    Args:
        model: A TransformerLens model.
        part: As in `lens_mix.run`.

    Raises:
        UnsupportedModelError: The model has no hooks that lens_mix can use.
    """
    with LibraryErrors(model):
        lens = Lens(model, part)
        return verification_of(lens, read_prompt(model, lens.model_class, any_prompt(model))).hooks_failure


def check(
    model: TransformerLensModel,
    prompt: Any = None,
    *,
    part: str | None = None,
    prepend_bos: bool | None = None,
    **inputs: Any,
) -> Check:
    """Verify a model: rebuild every block from its components on the first tokens of a prompt.

        >>> print(lm.check(model, "The Eiffel Tower is in the city of"))

    Args:
        model: A TransformerLens model.
        prompt: A prompt, as in `lens_mix.run`; None for eight tokens of the vocabulary, or for random pixels
            or sound.
        part: "encoder" (default), "decoder" or "cross" of an encoder-decoder.
        prepend_bos: As in TransformerLens.
        **inputs: Further model inputs by name.

    Raises:
        UnsupportedModelError: The model has no hooks that lens_mix can use.
    """
    with LibraryErrors(model):
        lens = Lens(model, part)
        prompt = any_prompt(model) if prompt is None else prompt
        read = read_prompt(model, lens.model_class, prompt, prepend_bos=prepend_bos, inputs=inputs)
        # A user asks for the state of the model now, so a stored verification is not enough.
        verification = verification_of(lens, read, with_unembedding=True, padding="right", again=True)
        return Check(model_name(model), verification)


def support_table(
    model: TransformerLensModel, methods: Iterable[HasEngines], part: str | None = None
) -> Support:
    """Return which of the methods can run on the model (see `lens_mix.support`)."""
    rows: list[tuple[str, str | None, str]] = []
    methods = list(methods)
    try:
        with LibraryErrors(model):
            lens = Lens(model, part)
            read = read_prompt(model, lens.model_class, any_prompt(model))
            verification = verification_of(lens, read, with_unembedding=needs_unembedding(methods))
    except UnsupportedModelError as problem:
        # Every method needs the verification, so the reason is the same for all of them.
        return Support(model_name(model), tuple((method.name, None, str(problem)) for method in methods))
    for method in methods:
        # The table is about maps of all layers. A run on some layers may work although the norm behind
        # another one is unknown.
        engine, reason = None, find_obstacle(lens, method) or _next_norm_failure(method, verification) or ""
        if not reason:
            try:
                engine = choose_engine(method, verification, "auto")
            except UnsupportedModelError as problem:
                reason = str(problem)
        rows.append((method.name, engine, reason))
    return Support(model_name(model), tuple(rows), _describe_long_prompts(lens, read))


def _describe_long_prompts(lens: Lens, prompt: Prompt) -> str:
    """Return which attention computes some rows of a long prompt, and why it is eager if it is."""
    if (
        lens.model_class is not ModelClass.BRIDGE
        or lens.stack.name != "blocks"
        or prompt.features is not None
    ):
        return "eager attention (fused attention is for a TransformerBridge of one stack that reads tokens)"
    with LibraryErrors(lens.model):
        failures = verification_of(lens, prompt, fused=("rows", "gradients")).fused_failures
    if failures["rows"] is not None:
        return f"eager attention ({failures['rows']})"
    of_gradients = failures["gradients"]
    return "fused attention" + (f", eager for gradients ({of_gradients})" if of_gradients else "")


def _next_norm_failure(method: HasEngines, verification: Verification) -> str | None:
    """Return why a layer has no map: the method needs the norm that reads it, which is unknown."""
    reasons = verification.next_norm_failures.items()
    return next(
        (
            why
            for layer, why in reasons
            if layer in verification.anatomy and "next_norm" in method.needs_for(verification.anatomy[layer])
        ),
        None,
    )


def any_prompt(model: TransformerLensModel) -> Any:
    """Return some tokens of the model's vocabulary, a pair of them, or a random picture or sound."""
    alone = any_features(model, device_of(model)) if reads_features(model) else any_tokens(model)
    if not is_encoder_decoder(model, model_class_of(model)):
        return alone
    return (alone, any_tokens(model) if reads_features(model) else alone)


def any_tokens(model: TransformerLensModel) -> torch.Tensor:
    """Return eight different tokens from the middle of the vocabulary, or as many as the model can read."""
    # Vocabularies often begin with special tokens, which models treat in ways of their own.
    d_vocab, count = int(model.cfg.d_vocab), min(8, most_tokens(model) or 8)
    return (torch.arange(count, device=device_of(model)) * 7 + d_vocab // 2) % d_vocab
