"""The yardstick: what replacing each token does to the model's own answer, kept on disk.

    python -m benchmarks.input_map.importance smollm2 choose [limit]       (or gemma3, held_out)

Per prompt a file with the tokens, the answer, and for every scored position the mean over four replacement
words of abs(Δ log p(answer)) and of KL(p ‖ p replaced), besides three more ways to take the token out: its
embedding replaced by the mean embedding, its values zeroed in all layers, and the attention to it masked. The
first token is left out; of prompts with more than 48 tokens 32 positions are drawn, and the last one.
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
    """Where one model's files are kept."""
    path = Path("outputs") / "input_map" / model_name
    path.mkdir(parents=True, exist_ok=True)
    return path


def file_of(model_name: str, prompt: Prompt) -> Path:
    """A prompt's file."""
    return folder(model_name) / f"{hashlib.sha256(prompt.text.encode()).hexdigest()[:16]}.pt"


def tokens_of(tokenizer: Any, prompt: Prompt) -> Int[Tensor, " pos"]:
    """With the model's first token, where it has one."""
    text = (tokenizer.bos_token or "") + prompt.text
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]


def load(model_name: str):
    """The plain model of transformers and its tokenizer."""
    import models
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = {"smollm2": models.smollm2_folder, "gemma3": models.gemma3_folder}[model_name]()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model, AutoTokenizer.from_pretrained(path)


@torch.no_grad()
def measure(decoder: Decoder, tokenizer: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Importance of the scored positions of one prompt.

    As attention is causal, what stands before a replaced token is computed once.
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
        # small products are slow, so several positions go together, from the first of them on
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
        # of the last position nothing is masked: not to be scored
        "dropped": change[:, 6].abs(),
        "halves": torch.stack([change[:, :2].abs().mean(-1), change[:, 2:4].abs().mean(-1)]),
    }


def main(model_name: str, half: str, limit: str = "1000") -> None:
    torch.set_num_threads(1)
    model, tokenizer = load(model_name)
    decoder = Decoder(model)
    start = time.time()
    prompts = [prompt for prompt in make() if prompt.half == half]
    # In an order that makes whatever is done fair to all kinds.
    random.Random(0).shuffle(prompts)
    prompts = prompts[: int(limit)]
    for number, prompt in enumerate(prompts):
        path = file_of(model_name, prompt)
        if path.exists() and "dropped" in torch.load(path):
            continue
        tokens = tokens_of(tokenizer, prompt)
        torch.save(measure(decoder, tokenizer, tokens), path)
        if number % 10 == 0:
            print(
                f"{number + 1}/{len(prompts)} {len(tokens)} tokens, {time.time() - start:.0f} s", flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
