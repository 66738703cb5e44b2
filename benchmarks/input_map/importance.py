"""Measure what replacing each token does to the model's own answer, and store it.

    python -m benchmarks.input_map.importance smollm2 choose [limit] [longest]       (or gemma3, held_out)

`limit` is the number of prompts that are drawn. Of these, those of more than `longest` tokens are left out.
Each prompt has a file with the tokens, the answer, and two numbers for every scored position: the means over
four replacement words of abs(Δ log p(answer)) and of KL(p ‖ p replaced). Three more removals of the token are
measured: its embedding is replaced by the mean embedding, its values are zeroed in all layers, and the
attention to it is masked. The first token is left out. In prompts of more than 48 tokens, 32 positions are
drawn, and the last one is added.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from benchmarks.input_map.decoder import Decoder
from benchmarks.input_map.prompts import Prompt, make

WORDS = (" table", " seven", " quickly", " Norway")
LONG, DRAWN = 48, 32
TOKENS = 600


def folder(model_name: str) -> Path:
    """Return the folder of one model's files."""
    path = Path("outputs") / "input_map" / model_name
    path.mkdir(parents=True, exist_ok=True)
    return path


def file_of(model_name: str, prompt: Prompt) -> Path:
    """Return the path of a prompt's file."""
    return folder(model_name) / f"{hashlib.sha256(prompt.text.encode()).hexdigest()[:16]}.pt"


def tokens_of(tokenizer: Any, prompt: Prompt) -> Int[Tensor, " pos"]:
    """Return the tokens of a prompt, after the model's first token if it has one."""
    text = (tokenizer.bos_token or "") + prompt.text
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]


def load(model_name: str):
    """Return the plain model of transformers and its tokenizer."""
    import models
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = {"smollm2": models.smollm2_folder, "gemma3": models.gemma3_folder}[model_name]()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model, AutoTokenizer.from_pretrained(path)


@torch.no_grad()
def measure(decoder: Decoder, tokenizer: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return the importance of the scored positions of one prompt.

    As attention is causal, the tokens before a replaced one are computed only once.
    """
    count = len(tokens)
    positions = list(range(1, count))
    if count > LONG:
        positions = sorted({*random.Random(count).sample(range(1, count - 1), DRAWN), count - 1})
    words = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS]
    whole = decoder.embed(tokens)
    layers, logits = decoder.forward(whole)
    clean = logits.log_softmax(-1)
    answer = int(clean.argmax())
    mean = decoder.embed(torch.arange(0, decoder.embed.num_embeddings, 7)).mean(0)
    others = torch.cat([decoder.embed(torch.tensor(words)), mean[None]])
    ways = len(others) + 2
    changes, divergences = [], []
    while len(changes) < len(positions):
        start = positions[len(changes)]
        # Small products are slow, so one pass serves several positions, from the first of them on.
        together = positions[len(changes) :][: max(1, TOKENS // (ways * (count - start)))]
        copies = whole[start:].repeat(len(together), ways, 1, 1)
        zeroed, dropped = torch.zeros(2, len(together), ways, count - start, dtype=torch.bool)
        for place, position in enumerate(together):
            copies[place, : len(others), position - start] = others
            zeroed[place, -2, position - start] = dropped[place, -1, position - start] = True
        flat = (part.flatten(0, 1) for part in (copies, zeroed, dropped))
        copied, no_values, not_seen = flat
        changed = decoder.suffixes(copied, layers, no_values, not_seen).log_softmax(-1)
        changes += (clean[answer] - changed[:, answer]).unflatten(0, (-1, ways))
        divergences += (clean.exp() * (clean - changed)).sum(-1).unflatten(0, (-1, ways))
    change, divergence = torch.stack(changes), torch.stack(divergences)
    return {
        "tokens": tokens,
        "answer": torch.tensor(answer),
        "probability": clean[answer].exp(),
        "positions": torch.tensor(positions),
        "importance": change[:, :4].abs().mean(-1),
        "divergence": divergence[:, :4].mean(-1),
        "mean_embedding": change[:, 4].abs(),
        "values_zeroed": change[:, 5].abs(),
        # At the last position nothing is masked, so this entry must not be scored.
        "dropped": change[:, 6].abs(),
        "halves": torch.stack([change[:, :2].abs().mean(-1), change[:, 2:4].abs().mean(-1)]),
    }


def main(model_name: str, half: str, limit: str = "1000", longest: str = "1000") -> None:
    """Store the importance of the prompts of one half."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_name)
    decoder = Decoder(model)
    start = time.time()
    prompts = [prompt for prompt in make() if prompt.half == half]
    # A random order, so that a run that stops early has prompts of all kinds.
    random.Random(0).shuffle(prompts)
    prompts = prompts[: int(limit)]
    for number, prompt in enumerate(prompts):
        path = file_of(model_name, prompt)
        if path.exists() and "dropped" in torch.load(path):
            continue
        tokens = tokens_of(tokenizer, prompt)
        if len(tokens) > int(longest):
            continue
        torch.save(measure(decoder, tokenizer, tokens), path)
        if number % 10 == 0:
            print(
                f"{number + 1}/{len(prompts)} {len(tokens)} tokens, {time.time() - start:.0f} s", flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
