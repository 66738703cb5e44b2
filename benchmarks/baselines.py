"""Provide what Value Zeroing is compared with: plain loops over a transformers model, without a library.

The naive block loop is the first thing that one would write: for each layer and position, it runs the block
again with that position's value vector zeroed. The batched replay runs several copies of the block together,
as many as the caches hold. Both run only one block again, from the clean residual stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class PlainModel:
    """A transformers model with the modules that the loops need.

    Args:
        model: GPT-2, Llama or BERT of transformers, not wrapped, with eager attention.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model.eval()
        kind = type(model).__name__
        if kind.startswith("GPT2"):
            self.blocks = list(self.model.transformer.h)
            width = self.model.config.n_embd
            self.value_part: slice = slice(2 * width, 3 * width)
            self.value_modules = [block.attn.c_attn for block in self.blocks]
        elif kind.startswith("Llama"):
            self.blocks = list(self.model.model.layers)
            self.value_part = slice(None)
            self.value_modules = [block.self_attn.v_proj for block in self.blocks]
        elif kind.startswith("Bert"):
            self.blocks = list(self.model.bert.encoder.layer)
            self.value_part = slice(None)
            self.value_modules = [block.attention.self.value for block in self.blocks]
        else:
            raise ValueError(f"model: expected GPT-2, Llama or BERT of transformers, got {kind}")

    @torch.no_grad()
    def calls(self, tokens: Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any], Tensor]]:
        """Return, for each block, the arguments and the output of a clean pass."""
        found: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = []

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found.append((args, dict(kwargs), _first_tensor(output)))

        with contextlib.ExitStack() as stack:
            for block in self.blocks:
                stack.callback(block.register_forward_hook(keep, with_kwargs=True).remove)
            options = {} if "Bert" in type(self.model).__name__ else {"use_cache": False}
            self.model(tokens[None], **options)
        return found

    @contextlib.contextmanager
    def zeroed(self, layer: int, keys: Tensor) -> Iterator[None]:
        """Zero the value of position keys[c] in copy c of the block, inside a `with` block."""

        def zero(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            output = output.clone()
            output[torch.arange(len(keys)), keys, self.value_part] = 0
            return output

        handle = self.value_modules[layer].register_forward_hook(zero)
        try:
            yield
        finally:
            handle.remove()


def _first_tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def value_zeroing_by_blocks(plain: PlainModel, tokens: Tensor, copies: int = 1) -> Tensor:
    """Return Value Zeroing [layer, query, key], `copies` positions at a time (1: the naive block loop)."""
    positions = len(tokens)
    layers = []
    for layer, (args, kwargs, clean) in enumerate(plain.calls(tokens)):
        scores = torch.zeros(positions, positions, dtype=clean.dtype)
        for start in range(0, positions, copies):
            keys = torch.arange(start, min(start + copies, positions))
            many = tuple(_expand(value, len(keys)) for value in args)
            named = {name: _expand(value, len(keys)) for name, value in kwargs.items()}
            with plain.zeroed(layer, keys):
                out = _first_tensor(plain.blocks[layer](*many, **named))
            scores[:, keys] = 1 - nn.functional.cosine_similarity(clean, out, dim=-1).T
        layers.append(scores)
    return torch.stack(layers)


def _expand(value: Any, copies: int) -> Any:
    if torch.is_tensor(value) and value.ndim >= 2 and value.shape[0] == 1:
        return value.expand(copies, *value.shape[1:])
    if isinstance(value, tuple):
        return tuple(_expand(item, copies) for item in value)
    return value
