"""Forms of the recipe that take fewer passes, and their table (docs/input_map.md, "In five forwards").

python -m benchmarks.input_map.cheaper smollm2 choose       (or gemma3, held_out)
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from benchmarks.input_map.decoder import Decoder, Layer, Rules
from benchmarks.input_map.effects import attention_effects, gradients
from benchmarks.input_map.importance import file_of, folder, load
from benchmarks.input_map.prompts import make
from benchmarks.input_map.recipe import RULES, WORDS
from benchmarks.input_map.table import agreement, interval

# What one stand-in can be, after the two words of the recipe.
AVERAGES = ("vocabulary's mean", "two words' mean", "eight words' mean", "four tokens' mean")


def stand_ins(decoder: Decoder, words: Tensor) -> Float[Tensor, "set d_model"]:
    """The embeddings of the recipe's two words, then of `AVERAGES`."""
    eight, vocabulary = decoder.embed(words), decoder.embed.weight[::7]
    drawn = torch.randperm(len(vocabulary), generator=torch.Generator().manual_seed(0))[:4]
    averages = [each.mean(0) for each in (vocabulary, eight[:2], eight, vocabulary[drawn])]
    return torch.stack([*eight[:2], *averages])


def last_copies_of_all(
    decoder: Decoder, layers: list[Layer], replaced: list[tuple[Tensor, Tensor]]
) -> Float[Tensor, "pos d_vocab"]:
    """As `Decoder.last_copies`, but copy j sees every stand-in for j, each at an equal part of its weight."""
    (sets, _, count, _), diagonal = replaced[0][0].shape, torch.arange(len(layers[0].entering))
    x = layers[0].entering[-1].expand(1, count, -1)
    angles = decoder.angles(torch.tensor([count - 1]))
    for block, angle, clean, (keys, values) in zip(decoder.blocks, angles, layers, replaced, strict=True):
        query, key, value = decoder.projected(block, x, angle, Rules())
        groups, scaling = block.self_attn.num_key_value_groups, block.self_attn.scaling
        scores = query @ clean.key.repeat_interleave(groups, 0).mT * scaling
        scores[..., diagonal, diagonal] = -torch.inf
        scores[..., -1] = (query * key.repeat_interleave(groups, 1)).sum(-1) * scaling
        others = (query * keys.repeat_interleave(groups, 1)).sum(-1) * scaling - np.log(sets)
        # The last token sees itself; its own replacement is read elsewhere.
        others[..., -1] = -torch.inf
        both = torch.cat([scores[0], others.permute(1, 2, 0)], -1).softmax(-1)
        pattern, read = both.split([count, sets], -1)
        clean_value = clean.value.repeat_interleave(groups, 0)
        mixed = pattern @ clean_value
        mixed = mixed + pattern[..., -1:] * (value.repeat_interleave(groups, 1)[0] - clean_value[:, -1:])
        stood_in = values.repeat_interleave(groups, 1)
        mixed = mixed + einsum(read, stood_in, "head pos set, set head pos d_head -> head pos d_head")
        x = decoder.finish(block, x, mixed[None], Rules())
    return decoder.logits(x)[0]


@torch.no_grad()
def rows_of(decoder: Decoder, tokens: Tensor, others: Tensor) -> dict[str, Float[Tensor, " pos"]]:
    """The rows of the last position."""
    layers, log_p, at_mixed, _ = gradients(decoder, decoder.embed(tokens), RULES)
    answer = log_p.argmax()
    copies, streams = decoder.copies(others[:, None].expand(-1, len(tokens), -1), layers)

    def change(logits: Tensor) -> Tensor:
        return (logits.log_softmax(-1)[..., answer] - log_p[answer]).abs()

    direct, own = change(decoder.last_copies(layers, copies)), change(decoder.logits(streams[-1][:, -1]))
    direct[:, -1] = own
    at_once = change(last_copies_of_all(decoder, layers, [(key[:2], value[:2]) for key, value in copies]))
    at_once[-1] = own[:2].mean()
    effects = torch.zeros(len(others), len(tokens), len(tokens))
    for layer, gradient, (key, value), block in zip(layers, at_mixed, copies, decoder.blocks, strict=True):
        effect = attention_effects(layer, gradient, key, value, block.self_attn.scaling).sum(1)
        effects += effect - torch.diag_embed(effect.diagonal(dim1=-2, dim2=-1))
    between, over_all = (x.pow(2).sum(1).sqrt() for x in (effects[:, :-1], effects))
    alone = over_all[:2].mean(0)
    alone[-1] = own[:2].mean()
    rows = {
        "the recipe": between[:2].mean(0) + direct[:2].mean(0),
        "both stand-ins in one copy": between[:2].mean(0) + at_once,
        "no copies of the last token": alone,
    }
    names = ("first word", "second word", *AVERAGES)
    return rows | {name: between[each] + direct[each] for each, name in enumerate(names)}


def main(model_name: str, half: str) -> None:
    torch.set_num_threads(1)
    model, tokenizer = load(model_name)
    decoder = Decoder(model.requires_grad_(False))
    numbers = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS]
    others, kept = stand_ins(decoder, torch.tensor(numbers)).detach(), folder(f"{model_name} cheaper")
    found: dict[str, list[tuple[float, float, float]]] = {}
    for prompt in make():
        measured = file_of(model_name, prompt)
        if prompt.half != half or not measured.exists():
            continue
        record, path = torch.load(measured), kept / measured.name
        if not path.exists():
            torch.save(rows_of(decoder, record["tokens"], others), path)
        places = record["positions"]
        if len(places) < 4:
            continue
        yardstick = record["importance"].double().numpy(), places.double().numpy()
        for name, row in torch.load(path).items():
            found.setdefault(name, []).append(agreement(row[places].double().numpy(), *yardstick))
    for name, values in found.items():
        scores = np.array(values)
        low, high = interval(scores[:, 0])
        partial, plain, _ = scores.mean(0)
        print(f"{name:28s} {len(scores)} prompts: {partial:.2f} ({low:.2f} to {high:.2f}) / {plain:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
