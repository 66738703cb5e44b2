"""The state of the user's model during a run, which is restored afterwards.

The state is the training mode, the attention implementation, gradients and the precision. Only one thread at
a time may have a model open; other threads wait.
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

from lens_mix._care import signals
from lens_mix._care.angles import restore_angles
from lens_mix._care.changes import Change, Changes, Undo, replace_attributes, replace_method
from lens_mix._care.precision import full_precision
from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError

# All attention modules of TransformerBridge pass their keys and values to this method.
_CACHING = "_update_kv_cache"
# A thread that waits for a model calls signal handlers in these intervals.
_WAIT_SECONDS = 0.1


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Return every module of a model once, including those of the model that a Bridge wraps.

    They are in the order of `modules()`, which takes longer.
    """
    wrapped = getattr(model, "original_model", None)
    found: dict[int, nn.Module] = {}
    pending = [wrapped, model] if isinstance(wrapped, nn.Module) else [model]
    while pending:
        module = pending.pop()
        if id(module) not in found:
            found[id(module)] = module
            pending += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found.values())


def evaluation_mode(
    model: nn.Module, modules: Sequence[nn.Module], gradients: bool = False, *, precise: bool = True
) -> Changes:
    """Return a context with evaluation mode, eager attention, no gradients and full precision.

    At the end of the context everything is restored, including the frequencies of rotary modules. Other
    threads wait until then. If TransformerBridge uses Hugging Face's attention, it calls `hook_pattern` only
    for eager attention, and not for the default kernel (sdpa).

    Args:
        model: Any TransformerLens model.
        modules: All its modules (`all_modules`).
        gradients: Whether gradients are on, for tensors that a hook inserts. Parameters get no gradients.
        precise: Whether autocast and reduced float32 products are off (`full_precision`).
    """
    return Changes(_evaluation_mode(model, modules, gradients, precise), functools.partial(_lock, model))


def find_gradient_obstacle(modules: Sequence[nn.Module]) -> str | None:
    """Return why no gradient can be taken in a model of these modules; None if one can."""
    tensors = (tensor for m in modules for tensor in (*m._parameters.values(), *m._buffers.values()))
    if not any(tensor is not None and tensor.is_inference() for tensor in tensors):
        return None
    return (
        "it needs gradients, and the model's weights were made inside torch.inference_mode, so that torch "
        "records none; build the model outside, or take copy.deepcopy(model) outside"
    )


def reading(model: TransformerLensModel) -> Changes:
    """Return a context for reading strings, because TransformerLens changes defaults of the model meanwhile.

    At its end, the defaults of the model and of its tokenizer are restored.
    """
    owners = ((model.cfg, "default_prepend_bos"), (getattr(model, "tokenizer", None), "padding_side"))
    defaults = [functools.partial(_save, owner, name) for owner, name in owners if hasattr(owner, name)]
    return Changes(defaults, functools.partial(_lock, model))


# These models are in evaluation mode already, so a nested context need not set it again.
_evaluated_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

# Each model has one lock. Bridges that wrap the same model share it.
_locks: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()


def _evaluation_mode(
    model: nn.Module, modules: Sequence[nn.Module], gradients: bool, precise: bool
) -> Iterator[Change]:
    if precise:
        yield from full_precision()
    if model not in _evaluated_models:
        yield functools.partial(_mark_evaluated, model)
        yield replace_attributes([(module, False) for module in modules if module.training], "training")
        yield restore_angles(modules)
        configs = [c for c in _huggingface_configs(modules) if c._attn_implementation != "eager"]
        # The setter of `_attn_implementation` would also change the configurations inside of these.
        yield replace_attributes([(config, "eager") for config in configs], "_attn_implementation_internal")
        # Most passes keep no cache, and without it keys and values may have different dtypes.
        cached = [module for module in modules if hasattr(type(module), _CACHING)]
        for module in cached:
            casting = functools.partial(_cache_in_one_dtype, getattr(module, _CACHING))
            yield replace_method(module, _CACHING, casting)
    if gradients:
        reason = find_gradient_obstacle(modules)
        if reason is not None:
            raise UnsupportedModelError(f"model: {reason}")
        # The autograd graph must begin at the tensor that a hook inserts, and not at the parameters.
        parameters = {id(p): p for module in modules for p in module.parameters(recurse=False)}
        trainable = [(parameter, False) for parameter in parameters.values() if parameter.requires_grad]
        yield replace_attributes(trainable, "requires_grad")
    yield functools.partial(_set_gradients, gradients)


def _lock(model: object) -> Undo:
    # `setdefault` is one step, so two threads get the same lock.
    lock: threading.RLock = _locks.setdefault(_locked_module(model), threading.RLock())
    # Without a timeout, nothing could interrupt the main thread here, because `Changes` makes signals wait.
    while not lock.acquire(timeout=_WAIT_SECONDS):
        signals.deliver()
    return lock.release


def _locked_module(model: object) -> object:
    wrapped = getattr(model, "original_model", None)
    return wrapped if isinstance(wrapped, nn.Module) else model


def _drop_lost_locks() -> None:
    """Delete the locks of threads that only the parent of this forked process has."""
    for model, lock in list(_locks.items()):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            del _locks[model]


os.register_at_fork(after_in_child=_drop_lost_locks)


def _cache_in_one_dtype(
    caching: Callable[..., tuple[Tensor, Tensor]], k: Tensor, v: Tensor, cache: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return keys and values as `caching` does, in one dtype even if there is no cache.

    In half precision TransformerBridge rotates OLMo's queries and keys in float32, so the pattern is float32.
    A cache returns values in float32 too. Without a cache their product fails, because the dtypes differ.

    From transformers 5.24 on, a model passes its cache as `cache`. TransformerLens 4.3 and older read
    `past_key_values` only, so a token that is written with the cache would not see the tokens before it.
    """
    k, v = caching(k, v, **(kwargs if cache is None else {**kwargs, "past_key_values": cache}))
    return k, v.to(torch.promote_types(k.dtype, v.dtype))


def _mark_evaluated(model: nn.Module) -> Undo:
    _evaluated_models.add(model)
    return functools.partial(_evaluated_models.discard, model)


def _save(owner: Any, name: str) -> Undo:
    return functools.partial(setattr, owner, name, getattr(owner, name))


def _set_gradients(enabled: bool) -> Undo:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(enabled)
    return functools.partial(torch.set_grad_enabled, before)


def _huggingface_configs(modules: Sequence[nn.Module]) -> list[Any]:
    """Return every configuration from which a Hugging Face module reads its attention implementation."""
    # This reads `__dict__` only, because the Bridge's `__getattr__` searches each of its submodules.
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]
