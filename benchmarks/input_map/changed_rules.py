"""Gradients of the answer under changed rules, on the plain Llama and Gemma 3 of transformers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the backward pass is told instead of the truth.

    temperature: of the softmax's derivative; None: patterns are constants. pattern, values: factors of the
    gradients through the pattern and through the values. norms: scales of norms are constants. ratio: an
    activation's derivative is act(z)/z. product: factor of the gradients at gate times up.
    """

    temperature: float | None = 1.0
    pattern: float = 1.0
    values: float = 1.0
    norms: bool = False
    ratio: bool = False
    product: float = 1.0


def straight(value: Tensor, other: Tensor) -> Tensor:
    """The first one's numbers, the second one's gradient."""
    return other + (value - other).detach()


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """The same numbers, a factor on the gradient."""
    return straight(tensor, tensor * factor)


def _attention(rules: Rules):
    def forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, **kwargs):
        groups = module.num_key_value_groups
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(2, 3) * scaling
        if attention_mask is not None:
            scores = scores + attention_mask
        pattern = scores.softmax(-1)
        if rules.temperature is None:
            pattern = pattern.detach()
        else:
            pattern = scaled(straight(pattern, (scores / rules.temperature).softmax(-1)), rules.pattern)
        return (pattern @ scaled(value, rules.values)).transpose(1, 2).contiguous(), pattern

    return forward


def _norm(rules: Rules, original):
    def forward(x):
        if not rules.norms:
            return original(x)
        with torch.no_grad():
            factor = torch.nan_to_num(original(x) / x)
        # at x = 0 the factor can't be read off; its gradient there is lost, which real vectors never see
        return x * factor

    return forward


def _feed_forward(rules: Rules, mlp):
    def forward(x):
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        act = mlp.act_fn(gate)
        if rules.ratio:
            act = straight(act, gate * (act / gate).detach())
        return mlp.down_proj(scaled(act * up, rules.product))

    return forward


@contextlib.contextmanager
def changed(model, rules: Rules) -> Iterator[None]:
    """The model under the rules, inside a `with` block."""
    from transformers import AttentionInterface

    AttentionInterface.register("changed_rules", _attention(rules))
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionMaskInterface.register("changed_rules", eager_mask)
    before = model.config._attn_implementation
    edited = []
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            edited.append((module, module.forward))
            module.forward = _norm(rules, module.forward)
        elif name.endswith("MLP"):
            edited.append((module, module.forward))
            module.forward = _feed_forward(rules, module)
    model.set_attn_implementation("changed_rules")
    try:
        yield
    finally:
        for module, _ in edited:
            del module.forward
        model.set_attn_implementation(before)


def gradients(model, tokens: Tensor, rules: Rules, target: str = "logit", vectors: Tensor | None = None):
    """What enters every block [block pos d_model] (the embeddings first) and the answer's gradient there."""
    with changed(model, rules), torch.enable_grad():
        given = model.get_input_embeddings()(tokens) if vectors is None else vectors
        leaf = given.detach()[None].requires_grad_(True)
        streams = []
        hooks = [
            layer.register_forward_pre_hook(
                lambda module, args, kwargs: _keep(streams, args, kwargs), with_kwargs=True
            )
            for layer in model.model.layers
        ]
        logits = model(inputs_embeds=leaf, use_cache=False, logits_to_keep=1).logits[0, -1]
        for hook in hooks:
            hook.remove()
        answer = logits.argmax()
        value = {
            "logit": logits[answer],
            "centred": logits[answer] - logits.mean(),
            "log": logits.log_softmax(-1)[answer],
        }[target]
        found = torch.autograd.grad(value, streams)
    return torch.cat([stream.detach() for stream in streams]), torch.cat(found)


def _keep(streams, args, kwargs) -> None:
    streams.append(args[0] if args else kwargs["hidden_states"])
