"""Estimate what replacing each token would do from a few passes, and store the terms for the search.

python -m benchmarks.input_map.effects smollm2 choose [limit]       (or gemma3, held_out)
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.input_map.decoder import Decoder, Layer, Rules
from benchmarks.input_map.importance import file_of, folder, load
from benchmarks.input_map.prompts import make

# The measured replacement uses none of these words.
WORDS = (" thing", " green", " went", " people")
RULES = {
    "true": Rules(),
    "norms": Rules(norms=True),
    "gim": Rules(temperature=2, pattern=0.25, values=0.5, norms=True),
    "gim ratio half": Rules(temperature=2, pattern=0.25, values=0.5, norms=True, ratio=True, product=0.5),
    "t2 ratio half": Rules(temperature=2, pattern=0.5, values=1, norms=True, ratio=True, product=0.5),
    "frozen": Rules(temperature=None, norms=True, ratio=True, product=0.5),
}


def gradients(decoder: Decoder, x: Tensor, rules: Rules) -> tuple[list[Layer], Tensor, list[Tensor], Tensor]:
    """Return layers, log probabilities, and the answer's gradients at every z and every residual stream."""
    with torch.enable_grad():
        layers, logits = decoder.forward(x.detach().requires_grad_(True), rules)
        log_p = logits.log_softmax(-1)
        wanted = [layer.mixed for layer in layers] + [layer.entering for layer in layers]
        found = torch.autograd.grad(log_p[log_p.argmax()], wanted)
    count = len(layers)
    return layers, log_p.detach(), list(found[:count]), torch.stack(found[count:])


def attention_effects(
    layer: Layer, gradient: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Float[Tensor, "set head query key"]:
    """Return the first-order change of the answer if query q sees copy j instead of token j, in one layer.

    The softmax is recomputed exactly. If one score changes by d, the pattern becomes p_j e^d for that key and
    p_i for the others, divided by 1 - p_j + p_j e^d.
    """
    groups = layer.query.shape[0] // layer.key.shape[0]
    values = layer.value.repeat_interleave(groups, 0)
    keys = layer.key.repeat_interleave(groups, 0)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    change = layer.query @ (key - keys).mT * scaling
    share = layer.pattern
    new = share * change.clamp(-60, 60).exp()
    whole = (1 - share + new).clamp_min(1e-6)
    had = (gradient * layer.mixed).sum(-1, keepdim=True)
    return (had - share * (gradient @ values.mT) + new * (gradient @ value.mT)) / whole - had


@torch.no_grad()
def effects(decoder: Decoder, tokens: Tensor, others: Tensor) -> dict[str, Any]:
    """Return all terms that the search reads, for one prompt."""
    x = decoder.embed(tokens)
    count, out = len(tokens), {}
    layers, logits = decoder.forward(x)
    log_p = logits.log_softmax(-1)
    answer = log_p.argmax()
    replaced, streams = decoder.copies(others[:, None].expand(-1, count, -1), layers)
    own = decoder.logits(streams[-1][:, -1]).log_softmax(-1)
    direct = decoder.last_copies(layers, replaced).log_softmax(-1)
    direct[:, -1] = own
    out["direct"] = direct[..., answer] - log_p[answer]
    out["direct kl"] = (log_p.exp() * (log_p - direct)).sum(-1)
    own_change = streams[:-1] - torch.stack([layer.entering for layer in layers])[:, None]
    for name, rules in RULES.items():
        layers, _, at_mixed, at_streams = gradients(decoder, x, rules)
        sums = {key: [] for key in ("others", "last", "abs query", "abs head")}
        by_query = 0
        for layer, gradient, (key, value), block in zip(
            layers, at_mixed, replaced, decoder.blocks, strict=True
        ):
            effect = attention_effects(layer, gradient, key, value, block.self_attn.scaling)
            # The entry of a token on itself is its own residual stream, and not an edge between tokens.
            effect.diagonal(dim1=-2, dim2=-1).zero_()
            merged = effect.sum(1)
            by_query = by_query + merged
            sums["others"].append(merged[:, :-1].sum(-2))
            sums["last"].append(merged[:, -1])
            sums["abs query"].append(merged.abs().sum(-2))
            sums["abs head"].append(effect.abs().sum((1, 2)))
        out[name] = {key: torch.stack(value, 1) for key, value in sums.items()}
        out[name]["by query"] = by_query
        moved = at_streams[:, None] * own_change
        out[name] |= {
            "moved": moved.sum(-1),
            "moved abs": moved.abs().sum(-1),
            "input": (at_streams * torch.stack([layer.entering for layer in layers])).sum(-1),
            "input abs": (at_streams * torch.stack([layer.entering for layer in layers])).abs().sum(-1),
        }
    return out


def replacements(decoder: Decoder, tokenizer: Any) -> Tensor:
    """Return the mean embedding, then the embeddings of words."""
    mean = decoder.embed(torch.arange(0, decoder.embed.num_embeddings, 7)).mean(0)
    words = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS]
    return torch.cat([mean[None], decoder.embed(torch.tensor(words))])


def main(model_name: str, half: str, limit: str = "1000") -> None:
    """Store the terms of all prompts of one half."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_name)
    decoder = Decoder(model.requires_grad_(False))
    others = replacements(decoder, tokenizer)
    kept = folder(f"{model_name} effects")
    prompts = [prompt for prompt in make() if prompt.half == half]
    # A random order, so that a run that stops early has prompts of all kinds.
    random.Random(0).shuffle(prompts)
    prompts = prompts[: int(limit)]
    start = time.time()
    for number, prompt in enumerate(prompts):
        source = file_of(model_name, prompt)
        if not source.exists() or (kept / source.name).exists():
            continue
        tokens = torch.load(source)["tokens"]
        torch.save(effects(decoder, tokens, others), kept / source.name)
        if number % 10 == 0:
            print(
                f"{number + 1}/{len(prompts)} {len(tokens)} tokens, {time.time() - start:.0f} s", flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
