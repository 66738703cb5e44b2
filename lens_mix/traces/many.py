"""Trace what a model wrote after many prompts: `lens_mix.trace_many`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from tqdm.auto import tqdm

from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix.arguments import check_flags, describe_value
from lens_mix.inputs import read_several
from lens_mix.traces.documents import Documents
from lens_mix.traces.trace import Trace, trace

_MISSING = object()


def trace_many(
    model: TransformerLensModel,
    prompts: Iterable[Any],
    *,
    answers: Iterable[Any] | None = None,
    progress: bool = False,
    **options: Any,
) -> Iterator[Trace]:
    """Yield the traces of many prompts in order; each is what `lens_mix.trace` returns for its prompt alone.

        >>> prompts = ["Anna lives in Rome. Where does Anna live?", "Ben lives in Oslo. Where does Ben live?"]
        >>> for t in lm.trace_many(model, prompts, answers=[" In Rome.", " In Oslo."]):
        ...     print(t.top(1))

    The prompts run one by one, because a prompt of documents is long enough to use the whole processor.

    Args:
        model: As in `lens_mix.trace`.
        prompts: Several prompts of the kinds that `lens_mix.trace` takes.
        answers: What was written after each prompt. None: the model writes, with the option `generate`.
        progress: Whether to show a bar over the prompts.
        options: Further arguments of `lens_mix.trace`, the same for all prompts. With sampling, each prompt
            starts from the same seed.

    Yields:
        The trace of each prompt.

    Raises:
        TypeError: As in `lens_mix.trace`, with the number of the prompt. The traces before it are yielded.
        ValueError: In the same way, or if there are more or fewer answers than prompts.
        UnsupportedModelError: As in `lens_mix.trace`.
    """
    if isinstance(prompts, Documents):
        raise TypeError("prompts: expected several prompts, got Documents; use lm.trace for one prompt")
    prompts = read_several(prompts, "lm.trace")
    if isinstance(answers, (str, bytes, Mapping)) or not isinstance(answers, Iterable | None):
        raise TypeError(f"answers: expected one answer per prompt, got {describe_value(answers)}")
    check_flags(progress=progress)
    total = len(prompts) if isinstance(prompts, Sized) else None
    # The bar over the prompts is shown instead of the warnings of single prompts.
    bars = None if progress else False
    pairs = ((prompt, None) for prompt in prompts)
    if answers is not None:
        pairs = itertools.zip_longest(prompts, answers, fillvalue=_MISSING)  # type: ignore[assignment]

    # This generator is separate, so that errors about the arguments are raised by the call.
    def stream() -> Iterator[Trace]:
        for index, (prompt, answer) in enumerate(
            tqdm(pairs, total=total, disable=not progress, desc="prompts")
        ):
            if prompt is _MISSING or answer is _MISSING:
                raise ValueError(
                    f"answers: expected one answer per prompt, got another number of them; prompt {index} or "
                    "its answer is missing"
                )
            try:
                yield trace(model, prompt, answer=answer, progress=bars, **options)
            except (TypeError, ValueError) as problem:
                raise type(problem)(f"prompt {index}: {problem}") from problem

    return stream()
