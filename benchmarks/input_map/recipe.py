"""Store the rows of the recipe that the search found, and of its cheaper and more expensive variants.

python -m benchmarks.input_map.recipe smollm2 choose [limit]       (or gemma3, held_out)
"""

from __future__ import annotations

import random
import sys
import time

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.input_map.decoder import Decoder, Rules, rotate
from benchmarks.input_map.effects import attention_effects, gradients
from benchmarks.input_map.importance import file_of, folder, load, tokens_of
from benchmarks.input_map.prompts import make

# The measured replacement uses none of these words. The first two are also read in the prompt's own context.
WORDS = (" thing", " green", " went", " people", " small", " of", " and", " house")
IN_CONTEXT = 2
RULES = Rules(temperature=2, norms=True, ratio=True, product=0.5)


@torch.no_grad()
def word_states(decoder: Decoder, words: Tensor, first: int) -> list[tuple[Tensor, Tensor]]:
    """Return, for each layer, keys before rotation and values of each word alone after the first token.

    Each is [word group 1 d_head]. They depend only on the model.
    """
    angles = decoder.angles(torch.tensor([1]))
    found = []
    for word in words:
        layers, _ = decoder.forward(decoder.embed(torch.tensor([first, int(word)])))
        found.append(
            [
                (rotate(layer.key[:, 1:], cosine, -sine), layer.value[:, 1:])
                for layer, (cosine, sine) in zip(layers, angles, strict=True)
            ]
        )
    return [
        (torch.stack([keys for keys, _ in layer]), torch.stack([values for _, values in layer]))
        for layer in zip(*found, strict=True)
    ]


@torch.no_grad()
def recipe_rows(
    decoder: Decoder, tokens: Tensor, words: Tensor, states: list[tuple[Tensor, Tensor]]
) -> dict[str, Float[Tensor, " pos"]]:
    """Return the rows of the last position."""
    count, x = len(tokens), decoder.embed(tokens)
    layers, log_p, at_mixed, _ = gradients(decoder, x, RULES)
    answer = log_p.argmax()
    angles = decoder.angles(torch.arange(count))
    alone = [
        (rotate(key.expand(-1, -1, count, -1), *angle), value.expand(-1, -1, count, -1))
        for (key, value), angle in zip(states, angles, strict=True)
    ]
    chosen = decoder.embed(words[:IN_CONTEXT])
    copies, streams = decoder.copies(chosen[:, None].expand(-1, count, -1), layers)
    none = torch.zeros(len(words), 1, dtype=torch.bool)
    own = decoder.suffixes(decoder.embed(words)[:, None], layers, none, none).log_softmax(-1)
    own = (own[:, answer] - log_p[answer]).abs().mean()
    direct = decoder.last_copies(layers, copies).log_softmax(-1)[..., answer] - log_p[answer]
    direct[:, -1] = decoder.logits(streams[-1][:, -1]).log_softmax(-1)[:, answer] - log_p[answer]
    direct = direct.abs().mean(0)
    rows = {"direct": direct}
    for name, read in (("words", alone), ("copies", copies)):
        by_query = 0
        for layer, gradient, (key, value), block in zip(layers, at_mixed, read, decoder.blocks, strict=True):
            effect = attention_effects(layer, gradient, key, value, block.self_attn.scaling).sum(1)
            # What a token takes from itself is not an edge between tokens.
            effect.diagonal(dim1=-2, dim2=-1).zero_()
            by_query = by_query + effect
        between = by_query[:, :-1]
        rows[f"{name}, root of squares + direct"] = between.pow(2).sum(1).sqrt().mean(0) + direct
        rows[f"{name}, sum of abs + direct"] = between.abs().sum(1).mean(0) + direct
        for label, row in (
            ("root of squares", by_query.pow(2).sum(1).sqrt().mean(0)),
            ("abs of sum", by_query.sum(1).abs().mean(0)),
        ):
            row[-1] = own
            rows[f"{name}, {label}"] = row
    return rows


def main(model_name: str, half: str, limit: str = "1000") -> None:
    """Store the rows of all prompts of one half."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_name)
    decoder = Decoder(model.requires_grad_(False))
    words = torch.tensor([tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS])
    kept, states = folder(f"{model_name} recipe"), None
    prompts = [prompt for prompt in make() if prompt.half == half]
    # A random order, so that a run that stops early has prompts of all kinds.
    random.Random(0).shuffle(prompts)
    start = time.time()
    for number, prompt in enumerate(prompts[: int(limit)]):
        measured = file_of(model_name, prompt)
        path = kept / measured.name
        if path.exists() or not measured.exists():
            continue
        tokens = tokens_of(tokenizer, prompt)
        states = states or word_states(decoder, words, int(tokens[0]))
        torch.save(recipe_rows(decoder, tokens, words, states), path)
        if number % 10 == 0:
            print(
                f"{number + 1}/{len(prompts)} {len(tokens)} tokens, {time.time() - start:.0f} s", flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
