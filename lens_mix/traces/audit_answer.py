"""Audit an answer of a model: `lens_mix.audit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix.traces.audit import Audit
from lens_mix.traces.trace import trace


def audit(
    model: TransformerLensModel,
    prompt: Any,
    *,
    answer: Any = None,
    generate: int | None = None,
    spans: Sequence[Any] | None = None,
    keep: Sequence[str] | None = None,
    passes: int | None = None,
    **options: Any,
) -> Audit:
    """Audit an answer: for each claim, what it rests on, by measured removals.

    It is `lm.trace(model, prompt, answer=…).audit(…)`; see `Trace.audit`.

        >>> documents = lm.Documents({"report": "They used eight GPUs. It took a week."}, "How many GPUs?")
        >>> lm.audit(model, documents, answer=" They used eight GPUs.")[0].necessary

    Args:
        model: As in `lens_mix.trace`.
        prompt: As in `lens_mix.trace`.
        answer: As in `lens_mix.trace`.
        generate: As in `lens_mix.trace`.
        spans: As in `Trace.audit`.
        keep: As in `Trace.audit`.
        passes: As in `Trace.audit`.
        options: Further arguments of `lens_mix.trace`.

    Raises:
        TypeError: As in `lens_mix.trace`.
        ValueError: As in `lens_mix.trace` and `Trace.audit`.
        UnsupportedModelError: As in `lens_mix.trace` and `Trace.audit`.
    """
    traced = trace(model, prompt, answer=answer, generate=generate, **options)
    return traced.audit(spans, keep=keep, passes=passes)
