"""Leave the user's model as it was: training mode, attention implementation, gradients."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Every module once; a Bridge keeps the model it wraps outside its own tree.

    On a model of 30 blocks this walk takes as long as two blocks: callers keep the list for one run.
    """
    wrapped = getattr(model, "original_model", None)
    modules = list(model.modules()) + (list(wrapped.modules()) if isinstance(wrapped, nn.Module) else [])
    return list({id(module): module for module in modules}.values())


@contextlib.contextmanager
def evaluation_mode(
    model: nn.Module, modules: Sequence[nn.Module], gradients: bool = False
) -> Iterator[None]:
    """Evaluation mode, eager attention and no gradients inside; everything as before on the way out.

    Eager attention is needed where TransformerBridge delegates attention to Hugging Face: with the
    default (sdpa) kernel `hook_pattern` never fires there.

    Args:
        model: any TransformerLens model.
        modules: all its modules (`all_modules`).
        gradients: leave gradients on, for leaves that a hook puts in; parameters build no graph.
    """
    with contextlib.ExitStack() as stack:
        if model not in _evaluated_models:
            stack.enter_context(_evaluation_mode(model, modules))
        if gradients:
            stack.enter_context(_frozen_parameters(modules))
        stack.enter_context(torch.set_grad_enabled(gradients))
        yield


# Models that are in evaluation mode already, so that nesting costs nothing.
_evaluated_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    training = [module for module in modules if module.training]
    with contextlib.ExitStack() as stack:
        # What restores is registered before anything is changed: Ctrl-C may come between any two lines.
        stack.callback(_restore_training, training)
        stack.callback(_evaluated_models.discard, model)
        for module in training:
            module.training = False
        stack.enter_context(_eager_attention(modules))
        _evaluated_models.add(model)
        yield


def _restore_training(training: list[nn.Module]) -> None:
    try:
        for module in training:
            module.training = True
    except BaseException:
        # Interrupted on the way back: once more, since nothing else will put it right.
        for module in training:
            module.training = True
        raise


@contextlib.contextmanager
def _frozen_parameters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """No parameter asks for a gradient inside, so that the graph starts where a leaf is put in."""
    parameters = {id(p): p for module in modules for p in module.parameters(recurse=False)}
    trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def _eager_attention(modules: Sequence[nn.Module]) -> Iterator[None]:
    before = [
        (config, config._attn_implementation)
        for config in _huggingface_configs(modules)
        if config._attn_implementation != "eager"
    ]
    try:
        for config, _ in before:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def _huggingface_configs(modules: Sequence[nn.Module]) -> list[Any]:
    """Every distinct configuration object that a wrapped Hugging Face module reads its kernel from."""
    # In `__dict__` alone: the Bridge's `__getattr__` would search each of its components.
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]
