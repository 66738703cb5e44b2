"""Provide three small transformers written by hand, by the formulas in the files of the papers.

GIM is that of the authors' package after release 0.1.4: gate_scale = up_scale = 0.5. Models without a gated
feed-forward have the same numbers with earlier releases.

They are slow and plain: GPT-2 (LayerNorm, biases, learned positions), Llama (RMSNorm, rotary positions,
shared values, a gated feed-forward) and T5 (an encoder and a decoder). Their weights are those of models of
transformers, in float64.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

import lens_mix as lm
from lens_mix.methods.frozen_gradients import frozen_attention, frozen_norm
from lens_mix.methods.gim import modified_attention

# The methods, with some of their options.
METHODS = [
    lm.methods.Gim(),
    lm.methods.Gim(activations="ratio"),
    lm.methods.Gim(gate_up=1),
    lm.methods.Gim(activations="ratio", gate_up=0.75),
    lm.methods.Gim(temperature=1, queries_keys=0.5, values=1),
    lm.methods.Gim(temperature=3.0, queries_keys=1.0, values=0.0),
    lm.methods.FrozenGradients(),
    lm.methods.FrozenGradients(activations="ratio"),
]
Method = lm.methods.Gim | lm.methods.FrozenGradients


class Ratio(torch.autograd.Function):
    """act(z), whose backward pass multiplies by act(z) / z."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, act: Any) -> Tensor:
        ctx.save_for_backward(act(z) / z)
        return act(z)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


class Scaled(torch.autograd.Function):
    """z, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return z.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def attend(query: Tensor, key: Tensor, value: Tensor, method: Method) -> Tensor:
    """Return causal attention of [head pos d_head]."""
    return mixed(masked(query @ key.mT / math.sqrt(query.shape[-1])), value, method)


def masked(scores: Tensor) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -math.inf)


def mixed(scores: Tensor, value: Tensor, method: Method) -> Tensor:
    """Mix the values by the softmax of the scores, differentiated as in the files of the papers."""
    if isinstance(method, lm.methods.Gim):
        factors = method.temperature, method.queries_keys, method.values
        return modified_attention(scores, value, *factors)
    return frozen_attention(scores, value)


def activated(z: Tensor, act: Any, method: Method) -> Tensor:
    return Ratio.apply(z, act) if method.activations == "ratio" else act(z)


def gated(gate: Tensor, up: Tensor, act: Any, method: Method) -> Tensor:
    """Return act(gate) ⊙ up. GIM and the ratio rule multiply the gradients of gate and up by a factor."""
    factor = (
        method.gate_up if isinstance(method, lm.methods.Gim) else 0.5 if method.activations == "ratio" else 1
    )
    return activated(Scaled.apply(gate, factor), act, method) * Scaled.apply(up, factor)


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

    def streams(self, x: Tensor, method: Method) -> list[Tensor]:
        """Return the residual stream [pos d_model] before each block, and after the last one."""
        states = [x]
        for layer in range(self.layers):
            x = x + self._attention(self._norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn", method)
            hidden = self._affine(self._norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
            hidden = activated(hidden, lambda z: functional.gelu(z, approximate="tanh"), method)
            x = x + self._affine(hidden, f"h.{layer}.mlp.c_proj")
            states.append(x)
        return states

    def logits(self, x: Tensor) -> Tensor:
        return self._norm(x, "ln_f") @ self.weights["transformer.wte.weight"].T

    def _attention(self, x: Tensor, name: str, method: Method) -> Tensor:
        query, key, value = self._affine(x, f"{name}.c_attn").chunk(3, -1)
        split = (rearrange(t, "pos (head d) -> head pos d", head=self.heads) for t in (query, key, value))
        return self._affine(rearrange(attend(*split, method), "head pos d -> pos (head d)"), f"{name}.c_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self.weights[f"transformer.{name}.{part}"] for part in ("weight", "bias"))
        return frozen_norm(x, 1e-5) * weight + bias

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

    def streams(self, x: Tensor, method: Method) -> list[Tensor]:
        """Return the residual stream [pos d_model] before each block, and after the last one."""
        states = [x]
        for layer in range(self.layers):
            name = f"layers.{layer}"
            x = x + self._attention(self._norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", method)
            read = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self._linear(read, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self._linear(gated(gate, up, functional.silu, method), f"{name}.mlp.down_proj")
            states.append(x)
        return states

    def logits(self, x: Tensor) -> Tensor:
        return self._norm(x, "norm") @ self.weights["lm_head.weight"].T

    def _attention(self, x: Tensor, name: str, method: Method) -> Tensor:
        counts = {"q": self.heads, "k": self.value_heads, "v": self.value_heads}
        query, key, value = (
            rearrange(self._linear(x, f"{name}.{role}_proj"), "pos (head d) -> head pos d", head=count)
            for role, count in counts.items()
        )
        repeats = self.heads // self.value_heads
        query, key = rotated(query), rotated(key).repeat_interleave(repeats, 0)
        mixed = attend(query, key, value.repeat_interleave(repeats, 0), method)
        return self._linear(rearrange(mixed, "head pos d -> pos (head d)"), f"{name}.o_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return frozen_norm(x, 1e-6, False) * self.weights[f"model.{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"model.{name}.weight"].T


@dataclasses.dataclass(frozen=True)
class T5:
    """T5 after its embeddings, plain or gated."""

    model: Any

    @staticmethod
    def of(model: Any) -> T5:
        return T5(model.requires_grad_(False))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.shared.weight[tokens]

    def logits(self, source: Tensor, target: Tensor, method: Method) -> Tensor:
        encoder, decoder, config = self.model.encoder, self.model.decoder, self.model.config
        for block in encoder.block:
            own, feed_forward = block.layer
            source = source + self._attend(own, "SelfAttention", source, None, encoder, method, False)
            source = source + self._feed_forward(feed_forward, source, method)
        read = self._norm(source, encoder.final_layer_norm)
        for block in decoder.block:
            own, cross, feed_forward = block.layer
            target = target + self._attend(own, "SelfAttention", target, None, decoder, method, True)
            target = target + self._attend(cross, "EncDecAttention", target, read, None, method, False)
            target = target + self._feed_forward(feed_forward, target, method)
        last = self._norm(target, decoder.final_layer_norm)
        last = last * config.d_model**-0.5 if config.scale_decoder_outputs else last
        return last @ self.model.lm_head.weight.T

    def _attend(
        self, layer: Any, name: str, x: Tensor, read: Tensor | None, stack: Any, method: Method, causal: bool
    ) -> Tensor:
        attention, normed = getattr(layer, name), self._norm(x, layer.layer_norm)
        read = normed if read is None else read
        split = (
            rearrange(y @ matrix.weight.T, "pos (head d) -> head pos d", head=attention.n_heads)
            for y, matrix in ((normed, attention.q), (read, attention.k), (read, attention.v))
        )
        query, key, value = split
        scores = query @ key.mT
        if stack is not None:
            biased = stack.block[0].layer[0].SelfAttention
            scores = scores + biased.compute_bias(len(x), len(x), device=x.device)[0]
        mixture = mixed(masked(scores) if causal else scores, value, method)
        return rearrange(mixture, "head pos d -> pos (head d)") @ attention.o.weight.T

    def _feed_forward(self, layer: Any, x: Tensor, method: Method) -> Tensor:
        read, dense = self._norm(x, layer.layer_norm), layer.DenseReluDense
        if not hasattr(dense, "wi_0"):
            return activated(read @ dense.wi.weight.T, torch.relu, method) @ dense.wo.weight.T
        gate, up = read @ dense.wi_0.weight.T, read @ dense.wi_1.weight.T
        return gated(gate, up, dense.act, method) @ dense.wo.weight.T

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return frozen_norm(x, norm.variance_epsilon, False) * norm.weight


def joint_products(model: T5, source: Tensor, target: Tensor, row: int, method: Method) -> Tensor:
    """Return gradient ⊙ embedding [source + target, d_model] of the largest logit at `row`."""
    x = [model.embed(tokens).detach().requires_grad_(True) for tokens in (source, target)]
    gradients = torch.autograd.grad(model.logits(*x, method)[row].max(), x)
    return torch.cat([g * each.detach() for g, each in zip(gradients, x, strict=True)])


def rotated(x: Tensor) -> Tensor:
    """Return x with rotary positions, where the two halves are rotated against each other."""
    half = x.shape[-1] // 2
    # transformers computes these angles in float32.
    frequencies = 1 / 10000 ** (torch.arange(half).float() / half)
    angles = torch.outer(torch.arange(x.shape[-2]).float(), frequencies).repeat(1, 2)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


def products(model: Gpt2 | Llama, tokens: Tensor, row: int, method: Method) -> list[Tensor]:
    """Return gradient ⊙ state [pos d_model] of the largest logit at `row`, before and after each block."""
    x = model.embed(tokens).requires_grad_(True)
    states = model.streams(x, method)
    target = model.logits(states[-1])[row].max()
    return [g * s.detach() for g, s in zip(torch.autograd.grad(target, states), states, strict=True)]
