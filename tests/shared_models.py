"""Models that many tests share: each is built once per process, and no test may change it.

After each test file, `tests/conftest.py` checks which models have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from tests import tiny_models

if TYPE_CHECKING:
    from lens_mix.experiments import ConstructedModel


class _Shared:
    """A model and its state when it was built."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tensors = [
            (holder, key, tensor, tensor.detach().clone())
            for module in model.modules()
            for holder in (module._parameters, module._buffers)
            for key, tensor in holder.items()
            if tensor is not None
        ]
        self.settings = list(_settings(model))

    def changes(self) -> list[str]:
        """Return the names of the tensors and settings that have changed."""
        found = [
            key
            for holder, key, tensor, value in self.tensors
            if holder.get(key) is not tensor or tensor.grad is not None or not torch.equal(tensor, value)
        ]
        pairs = zip(self.settings, _settings(self.model), strict=True)
        return found + [f"{before} -> {now}" for before, now in pairs if before != now]


def _settings(model: Any) -> Iterator[Any]:
    for module in model.modules():
        # Only hooks of TransformerLens count, because a Bridge adds torch's hooks to its norms in a pass.
        yield module.training, len(getattr(module, "fwd_hooks", ())), len(getattr(module, "bwd_hooks", ()))
        yield "forward" in vars(module)
    yield [parameter.requires_grad for parameter in model.parameters()]
    config = getattr(getattr(model, "original_model", None), "config", None)
    yield getattr(config, "_attn_implementation", None)
    tokenizer = getattr(model, "tokenizer", None)
    yield tokenizer, getattr(tokenizer, "padding_side", None), getattr(tokenizer, "chat_template", None)


_models: dict[str, _Shared] = {}


def _built_once(name: str, build: Callable[[], Any]) -> Any:
    if name not in _models:
        _models[name] = _Shared(build())
    return _models[name].model


def decoder() -> Any:
    """Return `gpt2_like` in float64 that reads the words of `toy_tokenizer`."""
    return _built_once(
        "decoder", lambda: tiny_models.gpt2_like(torch.float64, tokenizer=tiny_models.toy_tokenizer())
    )


def constructed(built: ConstructedModel) -> Any:
    """Return the model of one of `lens_mix.experiments.constructed_models()`."""
    return _built_once(built.name, built.model)


def changed() -> list[str]:
    """Return the changes of shared models, and forget these models, so that no other test uses them."""
    changes = {name: shared.changes() for name, shared in _models.items()}
    for name in [name for name, found in changes.items() if found]:
        del _models[name]
    return [f"{name}: {', '.join(found)}" for name, found in changes.items() if found]
