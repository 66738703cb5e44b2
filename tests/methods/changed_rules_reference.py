"""Two small transformers written by hand, with the rules of the backward pass as functions of autograd.

Slow and plain: GPT-2 (LayerNorm, biases, learned positions) and Llama (RMSNorm, rotary positions, shared
values, a gated feed-forward), with the weights of models of transformers, in float64.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is changed; the defaults change nothing but norms."""

    temperature: float = 1.0
    scores: float = 1.0
    values: float = 1.0
    ratio: bool = False


GIM = Rules(temperature=2.0, scores=0.25, values=0.5)
FROZEN = Rules(scores=0.0)


class HeldNorm(torch.autograd.Function):
    """(x - mean) / scale * weight; the scale is a constant going back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if centred else x
        scale = (x.square().mean(-1, keepdim=True) + eps).sqrt()
        ctx.save_for_backward(weight, scale)
        ctx.centred = centred
        return x / scale * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, scale = ctx.saved_tensors
        back = gradient * weight / scale
        return (back - back.mean(-1, keepdim=True) if ctx.centred else back), None, None, None


class TemperedSoftmax(torch.autograd.Function):
    """softmax(scores); going back, P_T (g - sum P_T g) with P_T = softmax(scores / T), times a factor."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, temperature: float, factor: float) -> Tensor:
        ctx.save_for_backward((scores / temperature).softmax(-1))
        ctx.factor = factor
        return scores.softmax(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        inner = (weights * gradient).sum(-1, keepdim=True)
        return ctx.factor * weights * (gradient - inner), None, None


class Scaled(torch.autograd.Function):
    """x; going back, times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.factor * gradient, None


class Ratio(torch.autograd.Function):
    """act(z); going back, times act(z) / z."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, act: Any) -> Tensor:
        ctx.save_for_backward(act(z) / z)
        return act(z)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


class SharedProduct(torch.autograd.Function):
    """a b; going back, half to each."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradient * b / 2, gradient * a / 2


def attend(query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
    """Causal attention of [head pos d_head]."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    pattern = TemperedSoftmax.apply(scores.masked_fill(hidden, -math.inf), rules.temperature, rules.scores)
    return pattern @ Scaled.apply(value, rules.values)


def activated(z: Tensor, act: Any, rules: Rules) -> Tensor:
    return Ratio.apply(z, act) if rules.ratio else act(z)


@dataclasses.dataclass(frozen=True)
class Gpt2:
    """GPT-2 after its embeddings."""

    weights: dict[str, Tensor]
    layers: int
    heads: int

    @staticmethod
    def of(model: Any) -> Gpt2:
        weights = {name: value.detach() for name, value in model.named_parameters()}
        return Gpt2(weights, model.config.n_layer, model.config.n_head)

    def embed(self, tokens: Tensor) -> Tensor:
        return (
            self.weights["transformer.wte.weight"][tokens]
            + self.weights["transformer.wpe.weight"][: len(tokens)]
        )

    def streams(self, x: Tensor, rules: Rules) -> list[Tensor]:
        """The residual stream [pos d_model] entering each block, and leaving the last."""
        states = [x]
        for layer in range(self.layers):
            x = x + self._attention(self._norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn", rules)
            hidden = self._affine(self._norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
            hidden = activated(hidden, lambda z: functional.gelu(z, approximate="tanh"), rules)
            x = x + self._affine(hidden, f"h.{layer}.mlp.c_proj")
            states.append(x)
        return states

    def logits(self, x: Tensor) -> Tensor:
        return self._norm(x, "ln_f") @ self.weights["transformer.wte.weight"].T

    def _attention(self, x: Tensor, name: str, rules: Rules) -> Tensor:
        query, key, value = self._affine(x, f"{name}.c_attn").chunk(3, -1)
        split = (rearrange(t, "pos (head d) -> head pos d", head=self.heads) for t in (query, key, value))
        return self._affine(rearrange(attend(*split, rules), "head pos d -> pos (head d)"), f"{name}.c_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self.weights[f"transformer.{name}.{part}"] for part in ("weight", "bias"))
        return HeldNorm.apply(x, weight, 1e-5, True) + bias

    def _affine(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"transformer.{name}.weight"] + self.weights[f"transformer.{name}.bias"]


@dataclasses.dataclass(frozen=True)
class Llama:
    """Llama after its embeddings."""

    weights: dict[str, Tensor]
    layers: int
    heads: int
    value_heads: int

    @staticmethod
    def of(model: Any) -> Llama:
        weights = {name: value.detach() for name, value in model.named_parameters()}
        config = model.config
        return Llama(
            weights, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
        )

    def embed(self, tokens: Tensor) -> Tensor:
        return self.weights["model.embed_tokens.weight"][tokens]

    def streams(self, x: Tensor, rules: Rules) -> list[Tensor]:
        """The residual stream [pos d_model] entering each block, and leaving the last."""
        states = [x]
        for layer in range(self.layers):
            name = f"layers.{layer}"
            x = x + self._attention(self._norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", rules)
            read = self._norm(x, f"{name}.post_attention_layernorm")
            gate = activated(self._linear(read, f"{name}.mlp.gate_proj"), functional.silu, rules)
            up = self._linear(read, f"{name}.mlp.up_proj")
            hidden = SharedProduct.apply(gate, up) if rules.ratio else gate * up
            x = x + self._linear(hidden, f"{name}.mlp.down_proj")
            states.append(x)
        return states

    def logits(self, x: Tensor) -> Tensor:
        return self._norm(x, "norm") @ self.weights["lm_head.weight"].T

    def _attention(self, x: Tensor, name: str, rules: Rules) -> Tensor:
        counts = {"q": self.heads, "k": self.value_heads, "v": self.value_heads}
        query, key, value = (
            rearrange(self._linear(x, f"{name}.{role}_proj"), "pos (head d) -> head pos d", head=count)
            for role, count in counts.items()
        )
        repeats = self.heads // self.value_heads
        query, key = rotated(query), rotated(key).repeat_interleave(repeats, 0)
        mixed = attend(query, key, value.repeat_interleave(repeats, 0), rules)
        return self._linear(rearrange(mixed, "head pos d -> pos (head d)"), f"{name}.o_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return HeldNorm.apply(x, self.weights[f"model.{name}.weight"], 1e-6, False)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"model.{name}.weight"].T


def rotated(x: Tensor) -> Tensor:
    """Rotary positions, halves rotated against each other."""
    half = x.shape[-1] // 2
    # transformers computes these angles in float32
    frequencies = 1 / 10000 ** (torch.arange(half).float() / half)
    angles = torch.outer(torch.arange(x.shape[-2]).float(), frequencies).repeat(1, 2)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


def products(model: Gpt2 | Llama, tokens: Tensor, row: int, rules: Rules) -> list[Tensor]:
    """gradient ⊙ state [pos d_model] of the largest logit at `row`: at the embeddings, after each block."""
    x = model.embed(tokens).requires_grad_(True)
    states = model.streams(x, rules)
    target = model.logits(states[-1])[row].max()
    return [g * s.detach() for g, s in zip(torch.autograd.grad(target, states), states, strict=True)]
