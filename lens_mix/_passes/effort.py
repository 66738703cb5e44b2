"""The warnings and bars of a run that takes long."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from tqdm.auto import tqdm

# A run says beforehand of a method that it takes longer than this, in seconds.
_LONG = 10.0

_LIBRARY = str(Path(__file__).resolve().parent.parent)

T = TypeVar("T")


@dataclasses.dataclass
class Effort:
    """The warnings and bars of one call, about the time that its methods take.

    Attributes:
        progress: True: show bars. False: warn before a long computation. None: neither.
        announced: The methods that have warned, so that each method warns only once in a call.
    """

    progress: bool | None = None
    announced: set[str] = dataclasses.field(default_factory=set)

    def announce(self, method: str, seconds: float, sentence: str) -> None:
        """Warn at the user's line of code that a method takes long, once in a call.

        Args:
            method: The label of the method.
            seconds: The estimated time.
            sentence: What to say of it, without a period.
        """
        if self.progress is False and seconds > _LONG and method not in self.announced:
            self.announced.add(method)
            warnings.warn(
                f"{sentence}. progress=True shows a bar instead of this warning", stacklevel=_level()
            )

    def at_once(self, fitting: int, count: int) -> int:
        """Return how many copies to run at once: fewer than possible if a bar shows the progress.

        Args:
            fitting: The number of copies that fit in memory.
            count: The number of all copies.
        """
        # A bar needs about twenty steps to show progress, and fewer than eight copies would make the passes
        # slow.
        return min(fitting, max(8, math.ceil(count / 20))) if self.progress else fitting

    def bar(self, chunks: Iterable[T], total: int, unit: str) -> Iterator[T]:
        """Yield the chunks of a method's work, and show in a bar how many of `total` are done."""
        # A bar that is not shown is not made: Python drops what a signal's handler raises in its `__del__`.
        yield from tqdm(chunks, total=total, unit=unit, leave=False) if self.progress else chunks


def _level() -> int:
    """Return the `stacklevel` with which our caller's warning names the line that called the library.

    Between the library's own frames there may be those of torch, or of a decorator.
    """
    frame, level, outermost = sys._getframe(1), 1, 0
    while frame.f_back is not None:
        if frame.f_code.co_filename.startswith(_LIBRARY):
            outermost = level
        frame, level = frame.f_back, level + 1
    return outermost + 1
