"""Leave the user's model as it was: training mode, attention implementation, gradients, precision.

One thread at a time has a model open; the others wait.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lens_mix.lens import signals
from lens_mix.lens.angles import kept_angles
from lens_mix.lens.changes import Change, Changes, Undo, replaced_attributes, replaced_method
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.lens.precision import full_precision

# TransformerBridge's method that all its attention modules hand keys and values to.
_CACHING = "_update_kv_cache"
_WAIT_SECONDS = 0.1  # how often a thread that waits for a model looks whether a signal came


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Every module once; a Bridge keeps the model it wraps outside its own tree.

    On a model of 30 blocks this walk takes as long as two blocks: callers keep the list for one run.
    """
    wrapped = getattr(model, "original_model", None)
    modules = list(model.modules()) + (list(wrapped.modules()) if isinstance(wrapped, nn.Module) else [])
    return list({id(module): module for module in modules}.values())


def evaluation_mode(
    model: nn.Module, modules: Sequence[nn.Module], gradients: bool = False, *, precise: bool = True
) -> Changes:
    """Return a context with evaluation mode, eager attention, no gradients and full precision.

    On the way out all is as before, also what rotary modules remember of passes. Other threads wait until the
    model is closed again. Eager attention is needed where TransformerBridge delegates attention to Hugging
    Face: with the default (sdpa) kernel `hook_pattern` never fires there.

    Args:
        model: any TransformerLens model.
        modules: all its modules (`all_modules`).
        gradients: leave gradients on, for leaves that a hook puts in; parameters build no graph.
        precise: autocast and reduced float32 products off (`full_precision`).
    """
    return Changes(_evaluation_mode(model, modules, gradients, precise), functools.partial(_lock, model))


def without_gradients(modules: Sequence[nn.Module]) -> str | None:
    """Return why no gradient can be taken in a model of these modules; None if one can."""
    tensors = (tensor for m in modules for tensor in (*m._parameters.values(), *m._buffers.values()))
    if not any(tensor is not None and tensor.is_inference() for tensor in tensors):
        return None
    return (
        "it needs gradients, and the model's weights were made inside torch.inference_mode, so that torch "
        "records none; build the model outside, or take copy.deepcopy(model) outside"
    )


def reading(model: TransformerLensModel) -> Changes:
    """Strings are read inside: TransformerLens gives the model and its tokenizer other defaults meanwhile."""
    owners = ((model.cfg, "default_prepend_bos"), (getattr(model, "tokenizer", None), "padding_side"))
    defaults = [functools.partial(_keep, owner, name) for owner, name in owners if hasattr(owner, name)]
    return Changes(defaults, functools.partial(_lock, model))


# Models that are in evaluation mode already, so that nesting costs nothing.
_evaluated_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

# One lock per model, or per model that Bridges wrap.
_locks: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()


def _evaluation_mode(
    model: nn.Module, modules: Sequence[nn.Module], gradients: bool, precise: bool
) -> Iterator[Change]:
    if precise:
        yield from full_precision()
    if model not in _evaluated_models:
        yield functools.partial(_mark_evaluated, model)
        yield replaced_attributes([(module, False) for module in modules if module.training], "training")
        yield kept_angles(modules)
        configs = [c for c in _huggingface_configs(modules) if c._attn_implementation != "eager"]
        yield replaced_attributes([(config, "eager") for config in configs], "_attn_implementation")
        # Passes keep no cache, but it is the cache that gives keys and values one dtype.
        cached = [module for module in modules if hasattr(type(module), _CACHING)]
        for module in cached:
            casting = functools.partial(_in_one_dtype, getattr(module, _CACHING))
            yield replaced_method(module, _CACHING, casting)
    if gradients:
        reason = without_gradients(modules)
        if reason is not None:
            raise UnsupportedModelError(f"model: {reason}")
        # So that the graph starts where a leaf is put in.
        parameters = {id(p): p for module in modules for p in module.parameters(recurse=False)}
        trainable = [(parameter, False) for parameter in parameters.values() if parameter.requires_grad]
        yield replaced_attributes(trainable, "requires_grad")
    yield functools.partial(_set_gradients, gradients)


def _lock(model: object) -> Undo:
    # One step, so that two threads get the same lock.
    lock = _locks.setdefault(_locked_module(model), threading.RLock())
    # Waiting without an end, the main thread could not be interrupted: `Changes` holds signals back.
    while not lock.acquire(timeout=_WAIT_SECONDS):
        signals.deliver()
    return lock.release


def _locked_module(model: object) -> object:
    wrapped = getattr(model, "original_model", None)
    return wrapped if isinstance(wrapped, nn.Module) else model


def _drop_lost_locks() -> None:
    """Forget, in a forked process, the locks of threads that only its parent has."""
    for model, lock in list(_locks.items()):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            del _locks[model]


os.register_at_fork(after_in_child=_drop_lost_locks)


def _in_one_dtype(
    caching: Callable[..., tuple[Tensor, Tensor]], k: Tensor, v: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return keys and values as `caching` does, in one dtype even if there is no cache.

    In half precision TransformerBridge rotates OLMo's queries and keys in float32, so that the pattern is
    float32. A cache returns float32 values too; without one the product of the two fails.
    """
    k, v = caching(k, v, **kwargs)
    return k, v.to(torch.promote_types(k.dtype, v.dtype))


def _mark_evaluated(model: nn.Module) -> Undo:
    _evaluated_models.add(model)
    return functools.partial(_evaluated_models.discard, model)


def _keep(owner: Any, name: str) -> Undo:
    return functools.partial(setattr, owner, name, getattr(owner, name))


def _set_gradients(enabled: bool) -> Undo:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(enabled)
    return functools.partial(torch.set_grad_enabled, before)


def _huggingface_configs(modules: Sequence[nn.Module]) -> list[Any]:
    """Every distinct configuration object that a wrapped Hugging Face module reads its kernel from."""
    # In `__dict__` alone: the Bridge's `__getattr__` would search each of its components.
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]
