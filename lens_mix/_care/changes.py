"""Changes to the user's model that are undone afterwards.

lens_mix changes a model only by `Changes`. While a function of this file, or a function that it calls, runs,
signal handlers wait. They then find a model that is unchanged or that will be restored. A forked process does
not have the other threads of its parent, so it undoes the changes that these threads have made.
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

from lens_mix._care import signals

# A change is a function. It changes something and returns the function that undoes the change.
Undo = Callable[[], object]
Change = Callable[[], Undo]

# A thread acquires this lock to make or undo a change, and to fork the process. In the child process, each
# change is therefore complete or not made at all.
changing = threading.RLock()

# These are the changes that are active at this moment, the oldest first.
_open_changes: list[Changes] = []


class Changes:
    """Changes that are always undone at the end of a `with` block, the last one first.

    This context manager is a class and not a generator: in a generator, an exception may occur between the
    change and the `try` that undoes it.

    Args:
        changes: The changes, made one after another at the start of the block.
        lock: A function that acquires a lock before the changes are made, and that may wait for it. It
            returns the function that releases the lock.

    Attributes:
        thread: The identifier of the thread that made the changes.
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
            self._leaving.callback(self.undo)
            for change in self._changes:
                with changing:
                    self._undoing.callback(change())
            signals.deliver()
        except BaseException as problem:
            self._leave(problem)
            raise

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        try:
            # Handlers that were installed inside the block have to wait too.
            self._signals.hold()
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

    def undo(self) -> None:
        """Undo the changes, without releasing the lock."""
        with changing:
            _open_changes.remove(self)
            self._undoing.close()

    def release_signals(self) -> None:
        """Install the user's signal handlers again."""
        self._signals.release()


# ------------------------------------------------------------------ forked processes


def _repair_child() -> None:
    """Undo the changes of threads that only the parent process has, and release their locks."""
    changing.release()
    signals.forget()
    lost = [changes for changes in reversed(_open_changes) if changes.thread != threading.get_ident()]
    if lost:
        # Undoing sets the gradient mode and autocast, which are separate in each thread. A new thread keeps
        # those of this thread as they are.
        repair = threading.Thread(target=_undo_all, args=[lost])
        repair.start()
        repair.join()
        for changes in lost:
            changes.release_signals()
    _free_locks()


def _undo_all(lost: Sequence[Changes]) -> None:
    with contextlib.ExitStack() as stack:
        for changes in reversed(lost):
            stack.callback(changes.undo)


def _free_locks() -> None:
    """Replace the locks of tqdm and of cached properties, which a lost thread may have acquired."""
    TqdmDefaultWriteLock.th_lock = threading.RLock()
    for bar in tqdm.__mro__:
        if isinstance(vars(bar).get("_lock"), TqdmDefaultWriteLock):
            bar._lock = TqdmDefaultWriteLock()
    # Cached properties have locks only before Python 3.12.
    if sys.version_info < (3, 12):
        modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "lens_mix"]
        values = [value for module in modules for value in vars(module).values()]
        for class_ in {value for value in values if isinstance(value, type)}:
            for attribute in vars(class_).values():
                if isinstance(attribute, functools.cached_property):
                    attribute.lock = threading.RLock()  # type: ignore[attr-defined]


os.register_at_fork(before=changing.acquire, after_in_parent=changing.release, after_in_child=_repair_child)


# ------------------------------------------------------------------ attributes and hooks


def replace_attributes(values: Sequence[tuple[Any, Any]], name: str) -> Change:
    """Return a change that sets one attribute of several objects.

    Args:
        values: Pairs of an object and its new value.
        name: The name of the attribute.
    """

    def replace() -> Undo:
        before = [(owner, getattr(owner, name)) for owner, _ in values]
        _assign(values, name)
        return lambda: _assign(before, name)

    return replace


def _assign(values: Sequence[tuple[Any, Any]], name: str) -> None:
    for owner, value in values:
        setattr(owner, name, value)


def hooked(point: HookPoint, function: Any) -> Change:
    """Return a change that adds a hook to a hook point, and removes exactly this hook at its end."""

    def add() -> Undo:
        point.add_hook(function)
        # `add_hook` does not return the handle.
        handle = point.fwd_hooks[-1]

        def remove() -> None:
            handle.hook.remove()
            point.fwd_hooks[:] = [other for other in point.fwd_hooks if other is not handle]

        return remove

    return add


def forward_hook(module: nn.Module, function: Any, *, with_kwargs: bool = False) -> Change:
    """Return a change that adds one of torch's forward hooks to a module."""
    return lambda: module.register_forward_hook(function, with_kwargs=with_kwargs).remove


def forward_pre_hook(module: nn.Module, function: Any, *, with_kwargs: bool = False) -> Change:
    """Return a change that adds one of torch's forward pre-hooks to a module."""
    return lambda: module.register_forward_pre_hook(function, with_kwargs=with_kwargs).remove


def replace_method(module: nn.Module, name: str, method: Callable[..., Any]) -> Change:
    """Return a change that replaces a method of one module, even if the module already has its own."""

    def replace() -> Undo:
        attributes = vars(module)
        before = {name: attributes[name]} if name in attributes else {}
        attributes[name] = method

        def restore() -> None:
            attributes.pop(name, None)
            attributes.update(before)

        return restore

    return replace
