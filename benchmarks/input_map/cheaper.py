"""Score cheaper variants of the recipe, with fewer passes (results/forms.md).

python -m benchmarks.input_map.cheaper smollm2 choose       (or gemma3, held_out)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from benchmarks.input_map.decoder import Decoder, Layer, Rules, rotate
from benchmarks.input_map.effects import attention_effects, gradients
from benchmarks.input_map.importance import file_of, folder, load
from benchmarks.input_map.prompts import make
from benchmarks.input_map.recipe import RULES, WORDS, word_states
from benchmarks.input_map.table import agreement, interval

# The single replacements that are tried, besides the two words of the recipe.
AVERAGES = ("vocabulary's mean", "two words' mean", "eight words' mean", "four tokens' mean")


def stand_ins(decoder: Decoder, words: Tensor) -> Float[Tensor, "set d_model"]:
    """Return the embeddings of the recipe's two words, then of `AVERAGES`."""
    eight, vocabulary = decoder.embed(words), decoder.embed.weight[::7]
    drawn = torch.randperm(len(vocabulary), generator=torch.Generator().manual_seed(0))[:4]
    averages = [each.mean(0) for each in (vocabulary, eight[:2], eight, vocabulary[drawn])]
    return torch.stack([*eight[:2], *averages])


def last_copies_of_all(
    decoder: Decoder, layers: list[Layer], replaced: list[tuple[Tensor, Tensor]]
) -> Float[Tensor, "pos d_vocab"]:
    """Return logits as `Decoder.last_copies`, but copy j sees all replacements of j, with equal weights."""
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
        # The last token sees itself, because its own replacement is measured by another pass.
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


def hidden_effects(layer: Layer, gradient: Tensor) -> Float[Tensor, "query key"]:
    """Return the first-order change of the answer if query q no longer sees key j, in one layer.

    The other keys are summed, because 1 - p loses all digits if one key has nearly all of the weight.
    """
    count, groups = len(layer.entering), layer.query.shape[0] // layer.key.shape[0]
    others = 1 - torch.eye(count, dtype=gradient.dtype)
    sent = layer.pattern * (gradient @ layer.value.repeat_interleave(groups, 0).mT)
    left = (layer.pattern @ others).clamp_min(torch.finfo(gradient.dtype).tiny)
    return ((sent @ others) / left - sent.sum(-1, keepdim=True)).sum(0).tril(-1)


@torch.no_grad()
def hidden_rows(
    decoder: Decoder, tokens: Tensor, words: Tensor, counts: Sequence[int]
) -> dict[str, Float[Tensor, " pos"]]:
    """Return rows in which the direct term is exact for `count` tokens and the last one, for each count."""
    layers, log_p, at_mixed, _ = gradients(decoder, decoder.embed(tokens), RULES)
    answer = log_p.argmax()
    effects = sum(hidden_effects(layer, gradient) for layer, gradient in zip(layers, at_mixed, strict=True))
    copies, streams = decoder.copies(decoder.embed(words)[:, None].expand(-1, len(tokens), -1), layers)
    direct = decoder.last_copies(layers, copies).log_softmax(-1)[..., answer]
    direct[:, -1] = decoder.logits(streams[-1][:, -1]).log_softmax(-1)[:, answer]
    direct = (direct - log_p[answer]).abs().mean(0)
    between, estimated = effects[:-1].pow(2).sum(0).sqrt(), effects[-1].abs()
    rows = {}
    for count in counts:
        exact = torch.zeros(len(tokens), dtype=torch.bool)
        exact[estimated[:-1].topk(min(count, len(tokens) - 1)).indices] = exact[-1] = True
        rows[f"keys hidden, {count} exact"] = between + torch.where(exact, direct, estimated)
    return rows


@torch.no_grad()
def rows_of_words(
    decoder: Decoder, tokens: Tensor, words: Tensor, states: list[tuple[Tensor, Tensor]]
) -> dict[str, Float[Tensor, " pos"]]:
    """Return the last position's rows if the replacements are words alone after the first token."""
    count = len(tokens)
    layers, log_p, at_mixed, _ = gradients(decoder, decoder.embed(tokens), RULES)
    answer = log_p.argmax()
    alone = [
        (rotate(key.expand(-1, -1, count, -1), *angle), value.expand(-1, -1, count, -1))
        for (key, value), angle in zip(states, decoder.angles(torch.arange(count)), strict=True)
    ]
    none = torch.zeros(len(words), 1, dtype=torch.bool)
    own = decoder.suffixes(decoder.embed(words)[:, None], layers, none, none).log_softmax(-1)[:, answer]
    own = (own - log_p[answer]).abs()
    effects = torch.zeros(len(words), count, count)
    for layer, gradient, (key, value), block in zip(layers, at_mixed, alone, decoder.blocks, strict=True):
        effect = attention_effects(layer, gradient, key, value, block.self_attn.scaling).sum(1)
        effects += effect - torch.diag_embed(effect.diagonal(dim1=-2, dim2=-1))
    between, over_all = effects[:, :-1].pow(2).sum(1).sqrt(), effects.pow(2).sum(1).sqrt()
    rows = {}
    for n in (2, 8):
        some = [(key[:n], value[:n]) for key, value in alone]
        direct = last_copies_of_all(decoder, layers, some).log_softmax(-1)[:, answer]
        direct = (direct - log_p[answer]).abs()
        direct[-1] = own[:n].mean()
        rows[f"{n} kept words"] = between[:n].mean(0) + direct
    without = over_all.mean(0)
    without[-1] = own.mean()
    return rows | {"8 kept words, no copies": without}


@torch.no_grad()
def rows_of(decoder: Decoder, tokens: Tensor, others: Tensor) -> dict[str, Float[Tensor, " pos"]]:
    """Return the rows of the last position."""
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
    """Make all rows that are missing, and print their agreement with measured replacement."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_name)
    decoder = Decoder(model.requires_grad_(False))
    numbers = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS]
    others, kept = stand_ins(decoder, torch.tensor(numbers)).detach(), folder(f"{model_name} cheaper")
    found: dict[str, list[tuple[float, float, float]]] = {}
    alone = None
    for prompt in make():
        measured = file_of(model_name, prompt)
        if prompt.half != half or not measured.exists():
            continue
        record, path = torch.load(measured), kept / measured.name
        tokens = record["tokens"]
        if not path.exists():
            torch.save(rows_of(decoder, tokens, others), path)
        beside = path.with_suffix(".words.pt")
        if not beside.exists():
            alone = alone or word_states(decoder, torch.tensor(numbers), int(tokens[0]))
            rows = rows_of_words(decoder, tokens, torch.tensor(numbers), alone)
            rows |= hidden_rows(decoder, tokens, torch.tensor(numbers[:2]), (0, 8, 16, 24, 32, 1000))
            torch.save(rows, beside)
        places = record["positions"]
        if len(places) < 4:
            continue
        yardstick = record["importance"].double().numpy(), places.double().numpy()
        for name, row in (torch.load(path) | torch.load(beside)).items():
            found.setdefault(name, []).append(agreement(row[places].double().numpy(), *yardstick))
    for name, values in found.items():
        scores = np.array(values)
        low, high = interval(scores[:, 0])
        partial, plain, _ = scores.mean(0)
        print(f"{name:28s} {len(scores)} prompts: {partial:.2f} ({low:.2f} to {high:.2f}) / {plain:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
