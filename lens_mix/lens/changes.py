"""Changes to the user's model, and how they are taken back.

Whatever lens_mix changes about a model it changes by `Changes`. Ctrl-C waits while this file is at work, or
what it calls, so that it finds a model as it was or one that will be put right.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from torch import nn
from transformer_lens.hook_points import HookPoint

# What takes a change back, and what makes one.
Undo = Callable[[], object]
Change = Callable[[], Undo]


# Ctrl-C also waits inside these modules: an interrupt would leave a context manager half exited, and Python
# swallows exceptions raised in callbacks of a WeakSet.
_UNINTERRUPTED = frozenset({"contextlib", "tqdm.std", "_weakrefset"})


class Changes:
    """Changes that are taken back at the end of a `with` block, the last one first, whatever happened in it.

    A context manager that is a class: nothing can come between the change and its undoing, as it can where a
    generator's `finally` has yet to be reached.

    Args:
        changes: called on the way in, one after another.
    """

    def __init__(self, changes: Iterable[Change]) -> None:
        self._changes, self._undoing = changes, contextlib.ExitStack()

    def __enter__(self) -> None:
        try:
            self._undoing.callback(_hold_interrupts())
            for change in self._changes:
                self._undoing.callback(change())
            let_interrupt_through()
        except BaseException:
            self._undoing.close()
            raise

    def __exit__(self, *problem: object) -> None:
        self._undoing.close()
        let_interrupt_through()


# ------------------------------------------------------------------ Ctrl-C


class _Interrupts:
    """The handler of Ctrl-C while a model is open: what comes at a bad moment waits."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self._before, self._waiting = before, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._waiting = _is_bad_moment(frame)
        if not self._waiting:
            self._before(number, frame)

    def let_through(self) -> None:
        """Hand on what waits."""
        if self._waiting:
            self._waiting = False
            self._before(signal.SIGINT, None)

    def leave(self) -> None:
        """Put the handler back that was there before, unless somebody has put another one there meanwhile."""
        if threading.current_thread() is threading.main_thread():
            is_here = signal.getsignal(signal.SIGINT) is self
            if is_here:
                signal.signal(signal.SIGINT, self._before)
            self.let_through()


def _is_bad_moment(frame: FrameType | None) -> bool:
    """Whether this file is at work, or a module in which Ctrl-C waits."""
    if frame is not None and frame.f_globals.get("__name__") in _UNINTERRUPTED:
        return True
    while frame is not None and frame.f_globals is not globals():
        frame = frame.f_back
    return frame is not None


def _hold_interrupts() -> Undo:
    before = signal.getsignal(signal.SIGINT)
    # Signals are handled in the main thread alone.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or isinstance(before, _Interrupts) or not callable(before):
        return lambda: None
    interrupts = _Interrupts(before)
    signal.signal(signal.SIGINT, interrupts)
    return interrupts.leave


def let_interrupt_through() -> None:
    """Hand on a Ctrl-C that waits, in the main thread."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Interrupts) and threading.current_thread() is threading.main_thread():
        handler.let_through()


# ------------------------------------------------------------------ attributes and hooks


def replaced_attributes(values: Sequence[tuple[Any, Any]], name: str) -> Change:
    """Another value of one attribute for each of several things."""

    def replace() -> Undo:
        before = [(thing, getattr(thing, name)) for thing, _ in values]
        _assign(values, name)
        return lambda: _assign(before, name)

    return replace


def _assign(values: Sequence[tuple[Any, Any]], name: str) -> None:
    for thing, value in values:
        setattr(thing, name, value)


def hooked(point: HookPoint, function: Any) -> Change:
    """A hook of TransformerLens on a hook point; taken off by identity, whatever others came meanwhile."""

    def put_on() -> Undo:
        point.add_hook(function)
        handle = point.fwd_hooks[-1]  # `add_hook` returns nothing

        def take_off() -> None:
            handle.hook.remove()
            point.fwd_hooks[:] = [other for other in point.fwd_hooks if other is not handle]

        return take_off

    return put_on


def forward_hook(module: nn.Module, function: Any, *, with_kwargs: bool = False) -> Change:
    """A forward hook of torch."""
    return lambda: module.register_forward_hook(function, with_kwargs=with_kwargs).remove


def forward_pre_hook(module: nn.Module, function: Any, *, with_kwargs: bool = False) -> Change:
    """A forward pre-hook of torch."""
    return lambda: module.register_forward_pre_hook(function, with_kwargs=with_kwargs).remove


def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Change:
    """Another `forward` on one module, over the one that somebody else may have put there."""

    def replace() -> Undo:
        attributes = vars(module)
        before = {"forward": attributes["forward"]} if "forward" in attributes else {}
        attributes["forward"] = forward

        def put_back() -> None:
            attributes.pop("forward", None)
            attributes.update(before)

        return put_back

    return replace
