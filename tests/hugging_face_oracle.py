"""Oracles that use only the Hugging Face model: no TransformerLens, none of its hooks, no anatomy.

Attention in transformers is one function per model file, `eager_attention_forward(module, query, key, value,
...)`, or a method of the attention module. The oracles intervene in this call: in its values `[batch head key
d_head]`, or in its result. The first attention module of a layer is its self-attention.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Older attention modules have these methods. The values are an argument or a result, at an index.
_METHODS = {
    "_attn": ("given", 2),
    "_split_heads": ("returned", 2),
    "_reshape": ("returned", 2),
}
_TEXT_MODELS = ("language_model", "model.text_model")
_VALUE_MATRICES = ("v", "v_proj", "value")

EditValues = Callable[[Tensor], Tensor]


class Reference:
    """One stack of a Hugging Face model on one prompt.

    Args:
        model: A model with eager attention.
        prompt: Tokens, or a pair of them; or the model's inputs by name, for a model without parts.
        stack: "encoder", "decoder" or None.
    """

    def __init__(self, model: Any, prompt: Any, stack: str | None = None) -> None:
        self.model, self.layers = model, _layers(model, stack)
        if isinstance(prompt, dict):
            self.inputs, prompt = prompt, prompt["input_ids"]
        elif isinstance(prompt, tuple):
            self.inputs = {model.main_input_name: prompt[0], "decoder_input_ids": prompt[1]}
        elif prompt.is_floating_point():
            self.inputs = {model.main_input_name: prompt}
        else:
            self.inputs = {"input_ids": prompt}
        self.stack = stack
        reads_tokens = "input_ids" in self.inputs or stack == "decoder"
        # An encoder of pictures or sound takes no such argument.
        self.options = {"use_cache": False} if len(self.inputs) > 1 or reads_tokens else {}
        if reads_tokens:
            self.positions = (prompt if stack is None else prompt[stack == "decoder"]).shape[1]
        else:
            self.positions = len(self.input_of(0))

    @property
    def has_one_function(self) -> bool:
        """Return whether its attention uses the function of its file."""
        return hasattr(sys.modules[type(self._attention(0)).__module__], "eager_attention_forward")

    def attention(self) -> Tensor:
        """Return the model's own attention weights [layer, head, query, key]."""
        out = self.model(**self.inputs, output_attentions=True, **self.options)
        name = {None: "attentions", "encoder": "encoder_attentions", "decoder": "decoder_attentions"}[
            self.stack
        ]
        found = [weights for weights in getattr(out, name) if weights is not None]
        assert len(found) == len(self.layers)
        return torch.stack([weights[0] for weights in found])

    def value_zeroing(self) -> Tensor:
        """Return 1 − cos of each layer's output with and without each value vector, [layer, query, key]."""
        rows = []
        for layer in range(len(self.layers)):
            clean = self.output_of(layer, None)
            columns = []
            for key in range(self.positions):
                changed = self.output_of(layer, functools.partial(_zeroed, key=key))
                columns.append(1 - torch.cosine_similarity(clean, changed, dim=-1))
            rows.append(torch.stack(columns, dim=-1))
        return torch.stack(rows)

    def value_shares(self) -> Tensor:
        """Return what each key's value adds to the attention's output, [layer, query, key, d_model].

        This is the output with one value vector only, minus the output with none, so it contains no bias.
        """
        layers = []
        for layer in range(len(self.layers)):
            none = self.attention_output(layer, torch.zeros_like)
            alone = [
                self.attention_output(layer, functools.partial(_only, key=key)) - none
                for key in range(self.positions)
            ]
            layers.append(torch.stack(alone, dim=1))
        return torch.stack(layers)

    def input_of(self, layer: int) -> Tensor:
        """Return the residual stream that enters a layer, [query, d_model]."""
        kept: list[Tensor] = []

        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            kept.append(args[0] if args else kwargs["hidden_states"])

        with self.layers[layer].register_forward_pre_hook(keep, with_kwargs=True):
            self.model(**self.inputs, **self.options)
        return kept[0][0].detach()

    def output_of(self, layer: int, edit: EditValues | None) -> Tensor:
        """Return a layer's output with changed values, [query, d_model]."""
        return self._output(self.layers[layer], layer, edit)

    def attention_output(self, layer: int, edit: EditValues | None) -> Tensor:
        """Return the output of the self-attention's last matrix with changed values, [query, d_model]."""
        attention = self._attention(layer)
        outer = next(module for module in self.layers[layer].modules() if attention in module.children())
        # In BERT and similar models, the output matrix is not inside the module that mixes.
        holder = outer.output if hasattr(outer, "self") else attention
        return self._output(_output_matrix(holder), layer, edit)

    def _output(self, module: nn.Module, layer: int, edit: EditValues | None) -> Tensor:
        kept: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            kept.append((output if torch.is_tensor(output) else output[0]).detach())

        with torch.no_grad(), module.register_forward_hook(keep), edited_values(self._attention(layer), edit):
            self.model(**self.inputs, **self.options)
        return kept[0].reshape(self.positions, -1)

    def _attention(self, layer: int) -> nn.Module:
        return _self_attention(self.layers[layer])


def _zeroed(values: Tensor, key: int) -> Tensor:
    values = values.clone()
    values[:, :, key] = 0
    return values


def _only(values: Tensor, key: int) -> Tensor:
    return values - _zeroed(values, key)


def _layers(model: Any, stack: str | None) -> list[nn.Module]:
    """Return the layers with attention, from the first list of modules that has any."""
    if stack is None:
        # A model that reads pictures too has another stack for them.
        text = [each for name, each in model.named_modules() if name.endswith(_TEXT_MODELS)]
        root = text[0] if text else model
    else:
        root = getattr(model.base_model, stack)
    for module in root.modules():
        if isinstance(module, nn.ModuleList) and len(module) >= 2:
            holding = [layer for layer in module if _attentions(layer)]
            if holding:
                return holding
    raise AssertionError("no list of layers found")


def _attentions(layer: nn.Module) -> list[nn.Module]:
    kinds = ("Attention", "SdpaAttention")
    return [
        module
        for module in layer.modules()
        if type(module).__name__.endswith(kinds) and not hasattr(module, "SelfAttention") and _is_core(module)
    ]


def _is_core(module: nn.Module) -> bool:
    """Return whether the module contains the matrices directly; BERT's and T5's outer modules do not."""
    return not any(
        type(child).__name__.endswith("Attention") for child in module.modules() if child is not module
    )


def _self_attention(layer: nn.Module) -> nn.Module:
    return _attentions(layer)[0]


def _output_matrix(attention: nn.Module) -> nn.Module:
    for name in ("o_proj", "out_proj", "out_lin", "c_proj", "dense", "o", "wo", "Wo"):
        if hasattr(attention, name):
            return getattr(attention, name)
    raise LookupError(f"no output matrix in {type(attention).__name__}")


@contextlib.contextmanager
def edited_values(attention: nn.Module, edit: EditValues | None) -> Iterator[None]:
    """Apply `edit` to the values [batch, head, key, d_head] of one attention module, inside the context."""
    if edit is None:
        yield
        return
    calls: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_edited_function(attention, edit, calls))
        yield
    assert len(calls) == 1, f"{type(attention).__name__}: values edited {len(calls)} times"


@contextlib.contextmanager
def _edited_function(attention: nn.Module, edit: EditValues, calls: list[int]) -> Iterator[None]:
    file = sys.modules[type(attention).__module__]
    method = next((name for name in _METHODS if hasattr(attention, name)), None)
    if hasattr(file, "eager_attention_forward"):
        original = file.eager_attention_forward

        def replaced(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if module is attention:
                calls.append(1)
                value = edit(value)
            return original(module, query, key, value, *args, **kwargs)

        file.eager_attention_forward = replaced
        try:
            yield
        finally:
            file.eager_attention_forward = original
    elif method is not None:
        where, place = _METHODS[method]
        attention.__dict__[method] = _with_values(getattr(attention, method), edit, where, place, calls)
        try:
            yield
        finally:
            del attention.__dict__[method]
    else:
        matrix = next(
            getattr(attention, name) for name in (*_VALUE_MATRICES, "Wqkv") if hasattr(attention, name)
        )
        fused = hasattr(attention, "Wqkv")
        names = ("n_heads", "num_heads", "num_attention_heads")
        heads = next(getattr(attention, name) for name in names if hasattr(attention, name))

        def edit_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            calls.append(1)
            before, value = (
                output.split(output.shape[-1] * 2 // 3, -1) if fused else (output[..., :0], output)
            )
            split = value.unflatten(-1, (heads, -1)).transpose(1, 2)
            return torch.cat([before, edit(split).transpose(1, 2).flatten(2)], dim=-1)

        with matrix.register_forward_hook(edit_output):
            yield


def _with_values(function: Any, edit: EditValues, where: str, place: int, calls: list[int]) -> Any:
    falcon = function.__name__ == "_split_heads"

    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if where == "given":
            given = list(args)
            given[place] = edit(given[place])
            return function(*given, **kwargs)
        returned = list(function(*args, **kwargs))
        # In Falcon's method, the axis of positions is before the axis of heads.
        value = returned[place].transpose(1, 2) if falcon else returned[place]
        returned[place] = edit(value).transpose(1, 2) if falcon else edit(value)
        return tuple(returned)

    return replaced


@contextlib.contextmanager
def edited_weights(attention: nn.Module, edit: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Replace the mixed values [batch, query, head, d_head] of one attention module, inside the context.

    They become `edit(weights, values)`, in which values are repeated if heads share them. The model must have
    `eager_attention_forward`.
    """
    file = sys.modules[type(attention).__module__]
    original = file.eager_attention_forward

    def replaced(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        mixed, weights = original(module, query, key, value, *args, **kwargs)
        if module is attention:
            mixed = edit(weights, value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1))
        return mixed, weights

    file.eager_attention_forward = replaced
    try:
        yield
    finally:
        file.eager_attention_forward = original


def gradient_attention(reference: Reference, layer: int) -> Tensor:
    """Return mean_h (A ⊙ ∂F/∂A)⁺ [query, key], where F is the largest logit at the last position."""
    gradient, weights = _gradient(reference, layer, 1.0, torch.nn.Identity())
    return (gradient * weights).clamp_min(0).mean(dim=0)


def attention_attribution(reference: Reference, layer: int, steps: int) -> Tensor:
    """Return Σ_h A ⊙ ∫ ∂F(αA)/∂A dα [query, key] by Gauss-Legendre; F is the prediction's probability."""
    points, shares = np.polynomial.legendre.leggauss(steps)
    total, weights = torch.zeros(()), torch.zeros(())
    for point, share in zip((points + 1) / 2, shares / 2, strict=True):
        gradient, weights = _gradient(reference, layer, float(point), torch.nn.Softmax(dim=-1))
        total = total + float(share) * gradient
    return (total * weights).sum(dim=0)


def _gradient(
    reference: Reference, layer: int, scale: float, of: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        last = _logits(reference).argmax()
    leaves: list[Tensor] = []
    clean: list[Tensor] = []

    def edit(weights: Tensor, values: Tensor) -> Tensor:
        clean.append(weights.detach())
        leaves.append((scale * weights.detach()).requires_grad_(True))
        return torch.einsum("bhqk,bhkd->bqhd", leaves[0], values)

    with torch.enable_grad(), edited_weights(reference._attention(layer), edit):
        logits = _logits(reference)
    (gradient,) = torch.autograd.grad(of(logits)[last], leaves)
    return gradient[0], clean[0][0]


def _logits(reference: Reference) -> Tensor:
    """Return the logits at the last position, or those of the prompt's classes."""
    logits = reference.model(**reference.inputs, **reference.options).logits
    return logits[0, -1] if logits.ndim == 3 else logits[0]
