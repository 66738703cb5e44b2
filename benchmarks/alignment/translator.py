"""Train a small Marian model to translate the artificial language, and store it in the cache."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.alignment.language import END, PAD, VOCABULARY, Pair, pairs
from demos.models import cache_folder, made_once

# No pair that a model is trained on has this seed.
HELD_OUT_SEED = 1_000_000


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of the model and of its training. Each recipe has a model of its own in the cache."""

    seed: int = 0
    layers: int = 2
    heads: int = 4
    d_model: int = 64
    steps: int = 2000
    batch: int = 32
    rate: float = 3e-3


def held_out(count: int) -> list[Pair]:
    """Return pairs that no model was trained on, except for accidental repetitions."""
    return list(itertools.islice(pairs(HELD_OUT_SEED), count))


def translator(recipe: Recipe) -> Any:
    """Return the trained MarianMTModel of `transformers`, in eval mode. Later calls read the cache."""
    from transformers import MarianMTModel

    name = "-".join(f"{name}{value}" for name, value in dataclasses.asdict(recipe).items())
    folder = made_once(cache_folder() / "known-alignment" / name, lambda place: _train(recipe, place))
    return MarianMTModel.from_pretrained(folder, attn_implementation="eager").eval()


def bridged(model: Any) -> Any:
    """Return the model in a TransformerBridge."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    return build_bridge_from_module(model, architecture="MarianMTModel", hf_config=model.config).eval()


def untrained(recipe: Recipe) -> Any:
    """Return the model before its first training step."""
    from transformers import MarianConfig, MarianMTModel

    sides = {f"{side}_layers": recipe.layers for side in ("encoder", "decoder")}
    sides |= {f"{side}_attention_heads": recipe.heads for side in ("encoder", "decoder")}
    sides |= {f"{side}_ffn_dim": 2 * recipe.d_model for side in ("encoder", "decoder")}
    config = MarianConfig(
        vocab_size=VOCABULARY,
        d_model=recipe.d_model,
        max_position_embeddings=128,
        pad_token_id=PAD,
        eos_token_id=END,
        forced_eos_token_id=None,
        decoder_start_token_id=PAD,
        dropout=0.0,
        scale_embedding=True,
        activation_function="swish",
        architectures=["MarianMTModel"],
        attn_implementation="eager",
        **sides,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return MarianMTModel(config).eval()


def _train(recipe: Recipe, folder: Path) -> None:
    model = untrained(recipe).train()
    optimizer = torch.optim.AdamW(model.parameters(), recipe.rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, recipe.steps, pct_start=0.1)
    stream, losses = pairs(recipe.seed), []
    for _ in range(recipe.steps):
        loss = _compute_loss(model, list(itertools.islice(stream, recipe.batch)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.save_pretrained(folder)
    (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


def _compute_loss(model: Any, batch: Sequence[Pair]) -> torch.Tensor:
    """Return the cross-entropy per token of the translation."""
    logits, labels = _compute_logits(model, batch)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def accuracy(model: Any, examples: Sequence[Pair]) -> float:
    """Return the share of translations without a wrong token, each predicted from the right ones before."""
    right = 0
    with torch.no_grad():
        for start in range(0, len(examples), 100):
            logits, labels = _compute_logits(model, examples[start : start + 100])
            right += int(((logits.argmax(-1) == labels) | (labels == -100)).all(1).sum())
    return right / len(examples)


def decoder_input(pair: Pair) -> tuple[int, ...]:
    """Return what the decoder reads: the start token, and the translation without its end."""
    return PAD, *pair.target[:-1]


def _compute_logits(model: Any, batch: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    source, real = padded([pair.source for pair in batch], PAD)
    given, _ = padded([decoder_input(pair) for pair in batch], PAD)
    labels, _ = padded([pair.target for pair in batch], -100)
    return model(input_ids=source, attention_mask=real, decoder_input_ids=given).logits, labels


def padded(rows: Sequence[tuple[int, ...]], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows filled up to one length, and 1 where they are not filled up."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])
    real = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, real
