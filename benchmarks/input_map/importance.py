"""The yardstick: what replacing each token does to the model's own answer, kept on disk.

    python -m benchmarks.input_map.importance smollm2 choose        (or gemma3, held_out)

Per prompt a file with the tokens, the answer, and for every scored position the mean over four replacement
words of abs(Δ log p(answer)) and of KL(p ‖ p replaced), besides the same with the token's embedding
replaced by the mean embedding (one more way to take it out: the practical ceiling of agreement). The first
token is left out; of prompts with more than 48 tokens 32 positions are drawn, and the last one.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.input_map.prompts import Prompt, make

WORDS = (" table", " seven", " quickly", " Norway")
LONG, DRAWN = 48, 32


def folder(model_name: str) -> Path:
    """Where one model's files are kept."""
    path = Path("outputs") / "input_map" / model_name
    path.mkdir(parents=True, exist_ok=True)
    return path


def file_of(model_name: str, prompt: Prompt) -> Path:
    """A prompt's file."""
    return folder(model_name) / f"{hashlib.sha256(prompt.text.encode()).hexdigest()[:16]}.pt"


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
def log_probabilities(model, embeddings: Tensor, chunk: int) -> Tensor:
    """Of the next token after the last position, [copy d_vocab]."""
    parts = [
        model(inputs_embeds=part, logits_to_keep=1, use_cache=False).logits[:, -1].log_softmax(-1)
        for part in embeddings.split(chunk)
    ]
    return torch.cat(parts)


@torch.no_grad()
def measure(model, tokenizer, tokens: Tensor) -> dict[str, Tensor]:
    """Importance of the scored positions of one prompt."""
    embed = model.get_input_embeddings()
    count = len(tokens)
    positions = list(range(1, count))
    if count > LONG:
        positions = sorted({*random.Random(count).sample(range(1, count - 1), DRAWN), count - 1})
    words = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS]
    whole = embed(tokens)
    clean = log_probabilities(model, whole[None], 1)[0]
    answer = int(clean.argmax())
    mean = embed(torch.arange(0, embed.num_embeddings, 7)).mean(0)
    copies = []
    for position in positions:
        for vector in (*embed(torch.tensor(words)), mean):
            copy = whole.clone()
            copy[position] = vector
            copies.append(copy)
    chunk = max(1, 640 // count)
    changes, divergences = [], []
    # logits of a large vocabulary are not kept
    for part in torch.stack(copies).split(chunk * 4):
        changed = log_probabilities(model, part, chunk)
        changes.append(clean[answer] - changed[:, answer])
        divergences.append((clean.exp() * (clean - changed)).sum(-1))
    change = torch.cat(changes).reshape(len(positions), len(words) + 1)
    divergence = torch.cat(divergences).reshape(len(positions), len(words) + 1)
    return {
        "tokens": tokens,
        "answer": torch.tensor(answer),
        "probability": clean[answer].exp(),
        "positions": torch.tensor(positions),
        "importance": change[:, :-1].abs().mean(-1),
        "divergence": divergence[:, :-1].mean(-1),
        "mean_embedding": change[:, -1].abs(),
        "halves": torch.stack([change[:, :2].abs().mean(-1), change[:, 2:4].abs().mean(-1)]),
    }


def main(model_name: str, half: str) -> None:
    model, tokenizer = load(model_name)
    start = time.time()
    prompts = [prompt for prompt in make() if prompt.half == half]
    prompts.sort(key=lambda prompt: len(prompt.text))
    for number, prompt in enumerate(prompts):
        path = file_of(model_name, prompt)
        if path.exists():
            continue
        text = (tokenizer.bos_token or "") + prompt.text
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        torch.save(measure(model, tokenizer, tokens), path)
        if number % 10 == 0:
            print(
                f"{number + 1}/{len(prompts)} {len(tokens)} tokens, {time.time() - start:.0f} s", flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:3])
