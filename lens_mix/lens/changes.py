"""Changes to the user's model, and how they are taken back.

lens_mix changes a model only by `Changes`. Handlers of signals wait while a function of this file, or one
that it calls, is running, so that they find a model that is unchanged or that will be restored. A process
that is forked while another thread has changed a model takes these changes back, because it does not have
that thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from tqdm.auto import tqdm
from tqdm.std import TqdmDefaultWriteLock
from transformer_lens.hook_points import HookPoint

from lens_mix.lens import signals

# What takes a change back, and what makes one.
Undo = Callable[[], object]
Change = Callable[[], Undo]

# Held while a change is made or taken back, and while a process is forked: in the child, each change is made
# or not made, never half made.
changing = threading.RLock()

# The changes that are on a model at this moment, in the order in which they were begun.
_open_changes: list[Changes] = []


class Changes:
    """Changes that are taken back at the end of a `with` block, the last one first, whatever happened in it.

    A context manager that is a class: nothing can come between the change and its undoing, as it can where a
    generator's `finally` has yet to be reached.

    Args:
        changes: called on the way in, one after another.
        lock: called before them; it may wait, and returns the function that releases the lock.
    """

    def __init__(self, changes: Iterable[Change], lock: Change | None = None) -> None:
        self._changes, self._lock = changes, lock
        self._signals, self._leaving = signals.HeldSignals(), contextlib.ExitStack()
        self.thread, self._undoing = threading.get_ident(), contextlib.ExitStack()

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        try:
            self._leaving.callback(self._signals.release)
            self._signals.hold()
            if self._lock is not None:
                self._leaving.callback(self._lock())
            _open_changes.append(self)
            self._leaving.callback(self.take_back)
            for change in self._changes:
                with changing:
                    self._undoing.callback(change())
            signals.deliver()
        except BaseException as problem:
            self._leave(problem)
            raise

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        try:
            self._signals.hold()  # handlers that were installed inside
        except BaseException as another:
            self._leave(another)
            raise
        self._leave(problem)

    def _leave(self, problem: BaseException | None) -> None:
        try:
            self._leaving.close()
        except signals.Interrupted as another:
            problem = another
        signals.pass_on(problem)

    def take_back(self) -> None:
        """Take the changes back; the lock stays taken."""
        with changing:
            _open_changes.remove(self)
            self._undoing.close()

    def release_signals(self) -> None:
        """Put the handlers of signals back."""
        self._signals.release()


# ------------------------------------------------------------------ forked processes


def _repair_child() -> None:
    """Take back, in a child process, the changes of threads that only its parent has; free their locks."""
    changing.release()
    signals.forget()
    lost = [changes for changes in reversed(_open_changes) if changes.thread != threading.get_ident()]
    if lost:
        # In a thread of its own: this thread's gradient mode and autocast stay as they are.
        repair = threading.Thread(target=_take_back_all, args=[lost])
        repair.start()
        repair.join()
        for changes in lost:
            changes.release_signals()
    _free_locks()


def _take_back_all(lost: Sequence[Changes]) -> None:
    with contextlib.ExitStack() as stack:
        for changes in reversed(lost):
            stack.callback(changes.take_back)


def _free_locks() -> None:
    """Free the locks of tqdm and of cached properties, which a lost thread may have held."""
    TqdmDefaultWriteLock.th_lock = threading.RLock()
    for bar in tqdm.__mro__:
        if isinstance(vars(bar).get("_lock"), TqdmDefaultWriteLock):
            bar._lock = TqdmDefaultWriteLock()
    # Cached properties have locks before Python 3.12.
    if sys.version_info < (3, 12):
        modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "lens_mix"]
        things = [thing for module in modules for thing in vars(module).values()]
        for kind in {thing for thing in things if isinstance(thing, type)}:
            for attribute in vars(kind).values():
                if isinstance(attribute, functools.cached_property):
                    attribute.lock = threading.RLock()  # type: ignore[attr-defined]


os.register_at_fork(before=changing.acquire, after_in_parent=changing.release, after_in_child=_repair_child)


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


def replaced_method(module: nn.Module, name: str, method: Callable[..., Any]) -> Change:
    """Return a change that replaces a method of one module, also one that somebody else has put there."""

    def replace() -> Undo:
        attributes = vars(module)
        before = {name: attributes[name]} if name in attributes else {}
        attributes[name] = method

        def put_back() -> None:
            attributes.pop(name, None)
            attributes.update(before)

        return put_back

    return replace
