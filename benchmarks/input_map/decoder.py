"""Run the plain Llama and Gemma 3 of transformers layer by layer, with changed rules of the backward pass.

There is one prompt at a time, and attention sees all earlier positions (prompts are shorter than Gemma's
window). The forward pass is the model's own. `Rules` change only derivatives.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of the backward pass that replace the true derivatives.

    Attributes:
        temperature: That of the softmax's derivative. None: patterns are constants.
        pattern: The factor of the gradients through the pattern.
        values: The factor of the gradients through the values.
        norms: Whether the scales of norms are constants.
        ratio: Whether an activation's derivative is act(z)/z.
        product: The factor of the gradients at gate times up.
    """

    temperature: float | None = 1.0
    pattern: float = 1.0
    values: float = 1.0
    norms: bool = False
    ratio: bool = False
    product: float = 1.0


@dataclasses.dataclass(frozen=True)
class Layer:
    """The tensors of one block's attention. Keys and values are not repeated over their groups.

    `mixed` is pattern @ value, the input of the output projection. `entering` is the residual stream before
    the block.
    """

    entering: Float[Tensor, " pos d_model"]
    query: Float[Tensor, " head pos d_head"]
    key: Float[Tensor, " group pos d_head"]
    value: Float[Tensor, " group pos d_head"]
    pattern: Float[Tensor, " head pos pos"]
    mixed: Float[Tensor, " head pos d_head"]


class Decoder:
    """One model, with the module names that Llama and Gemma 3 share."""

    def __init__(self, model: Any) -> None:
        self.model, self.blocks = model.model, list(model.model.layers)
        self.head, self.embed = model.lm_head, model.get_input_embeddings()
        self.sandwich = model.config.model_type == "gemma3_text"
        self.types = getattr(model.config, "layer_types", None)

    def angles(self, positions: Int[Tensor, " pos"]) -> list[tuple[Tensor, Tensor]]:
        """Return cosine and sine for each block, [pos d_head]."""
        rotary, some = self.model.rotary_emb, self.embed.weight[:1]
        if not self.sandwich:
            cosine, sine = rotary(some, positions[None])
            return [(cosine[0], sine[0])] * len(self.blocks)
        kinds = {kind: rotary(some, positions[None], kind) for kind in set(self.types)}
        return [(kinds[kind][0][0], kinds[kind][1][0]) for kind in self.types]

    def projected(
        self, block: Any, x: Tensor, angle: tuple[Tensor, Tensor], rules: Rules
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys and values, each [... head pos d_head]."""
        attention = block.self_attn
        h = norm(block.input_layernorm, x, rules)

        def split(projection: Any) -> Tensor:
            return projection(h).unflatten(-1, (-1, attention.head_dim)).transpose(-3, -2)

        query, key, value = map(split, (attention.q_proj, attention.k_proj, attention.v_proj))
        if self.sandwich:
            query, key = norm(attention.q_norm, query, rules), norm(attention.k_norm, key, rules)
        return rotate(query, *angle), rotate(key, *angle), value

    def finish(self, block: Any, x: Tensor, mixed: Tensor, rules: Rules) -> Tensor:
        """Return the block's output from its input and the mixed values [... head pos d_head]."""
        out = block.self_attn.o_proj(mixed.transpose(-3, -2).flatten(-2))
        if self.sandwich:
            x = x + norm(block.post_attention_layernorm, out, rules)
            out = feed_forward(block.mlp, norm(block.pre_feedforward_layernorm, x, rules), rules)
            return x + norm(block.post_feedforward_layernorm, out, rules)
        x = x + out
        return x + feed_forward(block.mlp, norm(block.post_attention_layernorm, x, rules), rules)

    def logits(self, x: Tensor, rules: Rules = Rules()) -> Tensor:
        """Return the logits of a last residual stream."""
        return self.head(norm(self.model.norm, x, rules))

    def forward(self, x: Float[Tensor, " pos d_model"], rules: Rules = Rules()) -> tuple[list[Layer], Tensor]:
        """Return the layers, and the logits at the last position."""
        count, layers = len(x), []
        hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
        for block, angle in zip(self.blocks, self.angles(torch.arange(count)), strict=True):
            query, key, value = self.projected(block, x, angle, rules)
            groups = block.self_attn.num_key_value_groups
            scores = query @ key.repeat_interleave(groups, 0).mT * block.self_attn.scaling
            pattern = softmax(scores.masked_fill(hidden, -torch.inf), rules)
            mixed = pattern @ scaled(value, rules.values).repeat_interleave(groups, 0)
            layers.append(Layer(x, query, key, value, pattern, mixed))
            x = self.finish(block, x, mixed, rules)
        return layers, self.logits(x[-1], rules)

    def copies(
        self, x: Float[Tensor, " set pos d_model"], layers: list[Layer]
    ) -> tuple[list[tuple[Tensor, Tensor]], Float[Tensor, " block set pos d_model"]]:
        """Return what each token becomes in all layers if it alone is replaced.

        Copy j has another embedding and sees the clean tokens before it. As attention is causal, one pass
        over as many tokens as the prompt has is enough. The result has keys and values per layer [set group
        pos d_head], and the residual streams before every block and after the last one.
        """
        plain, found, streams = Rules(), [], [x]
        count = x.shape[1]
        hidden = torch.ones(count, count, dtype=torch.bool).triu(0)
        for block, angle, clean in zip(self.blocks, self.angles(torch.arange(count)), layers, strict=True):
            query, key, value = self.projected(block, x, angle, plain)
            groups, scaling = block.self_attn.num_key_value_groups, block.self_attn.scaling
            others = (query @ clean.key.repeat_interleave(groups, 0).mT * scaling).masked_fill(
                hidden, -torch.inf
            )
            own = (query * key.repeat_interleave(groups, 1)).sum(-1, keepdim=True) * scaling
            pattern = torch.cat([others, own], -1).softmax(-1)
            mixed = pattern[..., :-1] @ clean.value.repeat_interleave(groups, 0)
            mixed = mixed + pattern[..., -1:] * value.repeat_interleave(groups, 1)
            x = self.finish(block, x, mixed, plain)
            found.append((key, value))
            streams.append(x)
        return found, torch.stack(streams)

    def last_copies(
        self, layers: list[Layer], replaced: list[tuple[Tensor, Tensor]]
    ) -> Float[Tensor, " set pos d_vocab"]:
        """Return the logits of the last token if it sees copy j instead of token j, for every j.

        The tokens between stay clean, so the effect of j through them is left out. The entry of the last
        position is a pass of the clean token.
        """
        plain = Rules()
        sets, _, count, _ = replaced[0][0].shape
        x = layers[0].entering[-1].expand(sets, count, -1)
        angles = self.angles(torch.tensor([count - 1]))
        for block, angle, clean, (key_j, value_j) in zip(self.blocks, angles, layers, replaced, strict=True):
            query, key, value = self.projected(block, x, angle, plain)
            groups, scaling = block.self_attn.num_key_value_groups, block.self_attn.scaling
            scores = query @ clean.key.repeat_interleave(groups, 0).mT * scaling
            swapped = (query * key_j.repeat_interleave(groups, 1)).sum(-1) * scaling
            own = (query * key.repeat_interleave(groups, 1)).sum(-1) * scaling
            diagonal = torch.arange(count)
            scores[..., diagonal, diagonal] = swapped
            scores[..., -1] = own
            pattern = scores.softmax(-1)
            # A copy reads other values than the clean ones at position j and at its own, so these are added.
            at_own = pattern[..., diagonal, diagonal].unsqueeze(-1)
            at_last = pattern[..., -1:]
            mixed = pattern @ clean.value.repeat_interleave(groups, 0)
            clean_value = clean.value.repeat_interleave(groups, 0)
            read = at_own * (value_j.repeat_interleave(groups, 1) - clean_value)
            read[..., -1, :] = 0
            mixed = mixed + read
            mixed = mixed + at_last * (value.repeat_interleave(groups, 1) - clean_value[:, -1:])
            x = self.finish(block, x, mixed, plain)
        return self.logits(x)

    def suffixes(
        self,
        x: Float[Tensor, " copy rest d_model"],
        layers: list[Layer],
        zeroed: Bool[Tensor, " copy rest"],
        dropped: Bool[Tensor, " copy rest"],
    ) -> Float[Tensor, " copy d_vocab"]:
        """Return the last logits of copies of the prompt that are clean before the first position of `x`.

        In all layers, values are zero where `zeroed`, and no later position may attend to `dropped`
        positions.
        """
        plain, (copies, rest, _) = Rules(), x.shape
        count = len(layers[0].entering)
        start = count - rest
        later = torch.ones(rest, rest, dtype=torch.bool).tril(-1)
        hidden = torch.ones(rest, count, dtype=torch.bool).triu(start + 1).repeat(copies, 1, 1)
        hidden[..., start:] |= dropped[:, None] & later
        angles = self.angles(torch.arange(start, count))
        for block, angle, clean in zip(self.blocks, angles, layers, strict=True):
            query, key, value = self.projected(block, x, angle, plain)
            value = value.masked_fill(zeroed[:, None, :, None], 0)
            groups, scaling = block.self_attn.num_key_value_groups, block.self_attn.scaling
            key = torch.cat([clean.key[:, :start].expand(copies, -1, -1, -1), key], -2)
            value = torch.cat([clean.value[:, :start].expand(copies, -1, -1, -1), value], -2)
            scores = query @ key.repeat_interleave(groups, 1).mT * scaling
            pattern = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
            x = self.finish(block, x, pattern @ value.repeat_interleave(groups, 1), plain)
        return self.logits(x[:, -1])


def straight(value: Tensor, other: Tensor) -> Tensor:
    """Return the numbers of the first tensor with the gradient of the second."""
    return other + (value - other).detach()


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return the same numbers, with a factor on the gradient."""
    return tensor if factor == 1 else straight(tensor, tensor * factor)


def softmax(scores: Tensor, rules: Rules) -> Tensor:
    """Return the softmax over keys, differentiated by the rules."""
    pattern = scores.softmax(-1)
    if rules.temperature is None:
        return pattern.detach()
    if rules.temperature != 1:
        pattern = straight(pattern, (scores / rules.temperature).softmax(-1))
    return scaled(pattern, rules.pattern)


def norm(module: Any, x: Tensor, rules: Rules) -> Tensor:
    """Return the RMSNorm of x, in Llama's form or Gemma's (which stores its weight minus 1)."""
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    weight = module.weight if hasattr(module, "variance_epsilon") else 1 + module.weight
    scale = (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return x * (scale.detach() if rules.norms else scale) * weight


def feed_forward(mlp: Any, x: Tensor, rules: Rules) -> Tensor:
    """Return the output of the gated feed-forward, differentiated by the rules."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    act = mlp.act_fn(gate)
    if rules.ratio:
        # At 0 both activations have the derivative 1/2, which is the limit of the ratio.
        act = gate * torch.where(gate == 0, 0.5, act / gate).detach()
    return mlp.down_proj(scaled(act * up, rules.product))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return x with rotary positions."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine
