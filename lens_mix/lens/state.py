"""Leave the user's model as it was: hooks, training mode, attention implementation, gradients.

Whatever lens_mix changes about a model it changes by `Changes`. Ctrl-C waits while this file is at work, so
that it finds a model as it was or one that will be put right; and one thread at a time has a model open.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

# What takes a change back, and what makes one.
Undo = Callable[[], object]
Change = Callable[[], Undo]

# How often a thread that waits for a model looks whether Ctrl-C came.
_WAIT_SECONDS = 0.1


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
            _let_interrupt_through()
        except BaseException:
            self._undoing.close()
            raise

    def __exit__(self, *problem: object) -> None:
        self._undoing.close()
        _let_interrupt_through()


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
    """Whether this file is at work, or `contextlib` on the way into a `with` block or out of it."""
    if frame is not None and frame.f_globals is vars(contextlib):
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


def _let_interrupt_through() -> None:
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Interrupts) and threading.current_thread() is threading.main_thread():
        handler.let_through()


# ------------------------------------------------------------------ changes


def hooked(point: HookPoint, function: Any) -> Change:
    """A hook of TransformerLens on a hook point; taken off by identity, whatever others came meanwhile."""

    def put_on() -> Undo:
        point.add_hook(function)
        handle = point.fwd_hooks[-1]

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


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Every module once; a Bridge keeps the model it wraps outside its own tree.

    On a model of 30 blocks this walk takes as long as two blocks: callers keep the list for one run.
    """
    wrapped = getattr(model, "original_model", None)
    modules = list(model.modules()) + (list(wrapped.modules()) if isinstance(wrapped, nn.Module) else [])
    return list({id(module): module for module in modules}.values())


def evaluation_mode(model: nn.Module, modules: Sequence[nn.Module], gradients: bool = False) -> Changes:
    """Evaluation mode, eager attention and no gradients inside; everything as before on the way out.

    Other threads wait until the model is closed again. Eager attention is needed where TransformerBridge
    delegates attention to Hugging Face: with the default (sdpa) kernel `hook_pattern` never fires there.

    Args:
        model: any TransformerLens model.
        modules: all its modules (`all_modules`).
        gradients: leave gradients on, for leaves that a hook puts in; parameters build no graph.
    """
    return Changes(_evaluation_mode(model, modules, gradients))


# Models that are in evaluation mode already, so that nesting costs nothing.
_evaluated_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

# One lock per model, or per model that Bridges wrap.
_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def _evaluation_mode(model: nn.Module, modules: Sequence[nn.Module], gradients: bool) -> Iterator[Change]:
    yield functools.partial(_lock, model)
    if model not in _evaluated_models:
        yield functools.partial(_mark_evaluated, model)
        yield functools.partial(_set, [(module, False) for module in modules if module.training], "training")
        configs = [c for c in _huggingface_configs(modules) if c._attn_implementation != "eager"]
        yield functools.partial(_set, [(config, "eager") for config in configs], "_attn_implementation")
    if gradients:
        # So that the graph starts where a leaf is put in.
        parameters = {id(p): p for module in modules for p in module.parameters(recurse=False)}
        trainable = [(parameter, False) for parameter in parameters.values() if parameter.requires_grad]
        yield functools.partial(_set, trainable, "requires_grad")
    yield functools.partial(_set_gradients, gradients)


def _lock(model: nn.Module) -> Undo:
    wrapped = getattr(model, "original_model", None)
    # One step, so that two threads get the same lock.
    lock = _locks.setdefault(wrapped if isinstance(wrapped, nn.Module) else model, threading.RLock())
    while not lock.acquire(timeout=_WAIT_SECONDS):
        _let_interrupt_through()
    return lock.release


def _mark_evaluated(model: nn.Module) -> Undo:
    _evaluated_models.add(model)
    return functools.partial(_evaluated_models.discard, model)


def _set(values: list[tuple[Any, Any]], name: str) -> Undo:
    before = [(thing, getattr(thing, name)) for thing, _ in values]

    def put_back() -> None:
        for thing, value in before:
            setattr(thing, name, value)

    for thing, value in values:
        setattr(thing, name, value)
    return put_back


def _set_gradients(enabled: bool) -> Undo:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(enabled)
    return functools.partial(torch.set_grad_enabled, before)


def _huggingface_configs(modules: Sequence[nn.Module]) -> list[Any]:
    """Every distinct configuration object that a wrapped Hugging Face module reads its kernel from."""
    # In `__dict__` alone: the Bridge's `__getattr__` would search each of its components.
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]
