"""Train Abnar & Zuidema's encoder (6 layers, 8 heads, d_model 128) to classify the number of the verb.

Their encoder has the blocks of GPT-2 without the causal mask, and reads the class at [CLS]. Here it is a
native TransformerBridge whose answers are two words of its vocabulary. `blocks="bert"` has BERT's blocks
(norms after the sums) and a classifier on a pooler instead. The weights depend only on the recipe, and are
stored in the cache folder.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.number_agreement.sentences import (
    CLASSES,
    PAD,
    UNK,
    Sentence,
    sentences,
    token_ids,
    vocabulary,
)
from demos.models import cache_folder, made_once

# For each task, the function that returns the right answer for a sentence.
TASKS: dict[str, Callable[[Sentence], bool]] = {
    "verb": lambda sentence: sentence.plural,
    "last noun": lambda sentence: sentence.last_noun_plural,
    "fronted": lambda sentence: sentence.fronted,
}
CONTEXT = 40
# This seed is far from those of the sentences that are trained on.
HELD_OUT_SEED = 1_000_000


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings that determine the weights. All other tasks are tuned from the verb's encoder."""

    blocks: Literal["gpt2", "bert"] = "gpt2"
    layers: int = 6
    heads: int = 8
    d_model: int = 128
    steps: int = 1000
    tuning_steps: int = 200
    batch: int = 64
    learning_rate: float = 5e-4
    unknown: float = 0.03
    seed: int = 0

    @property
    def name(self) -> str:
        """Return the name of the recipe's folder."""
        return "-".join(map(str, dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A TransformerBridge that answers yes or no at [CLS]."""

    model: Any
    recipe: Recipe

    def of_output(self, output: Tensor) -> Tensor:
        """Return the class logits [row, class] of the model's output."""
        if output.ndim == 2:
            return output
        return output[:, 0, [vocabulary()[name] for name in CLASSES]]

    def probability(self, answer: int) -> Callable[[Tensor], Tensor]:
        """Return a target of lens_mix: the probability of an answer."""
        return lambda output: self.of_output(output).softmax(-1)[:, answer]

    def margin(self, answer: int) -> Callable[[Tensor], Tensor]:
        """Return a target of lens_mix: the logit of an answer minus that of the other one."""
        return lambda output: self.of_output(output) @ torch.tensor([1.0, -1.0]).roll(answer)

    def loss(self, answer: int) -> Callable[[Tensor], Tensor]:
        """Return a target of lens_mix: the cross-entropy if an answer is right."""
        return lambda output: -self.of_output(output).log_softmax(-1)[:, answer]

    @torch.no_grad()
    def logits(self, rows: Sequence[Sequence[int]], batch: int = 256) -> Tensor:
        """Return the class logits [row, class] of rows of token numbers."""
        parts = []
        for start in range(0, len(rows), batch):
            tokens, mask = padded(rows[start : start + batch])
            parts.append(self.of_output(self.model(tokens, attention_mask=mask)))
        return torch.cat(parts)

    def accuracy(self, examples: Sequence[Sentence], task: str = "verb") -> float:
        """Return the share of right answers."""
        answers = torch.tensor([int(TASKS[task](example)) for example in examples])
        logits = self.logits([token_ids(example) for example in examples])
        return (logits.argmax(-1) == answers).double().mean().item()


def classifier(task: str, recipe: Recipe) -> Classifier:
    """Return the trained classifier. The first call trains it (minutes), and later calls load it."""
    home = cache_folder() / "number-agreement" / recipe.name
    folder = made_once(home / task.replace(" ", "-"), lambda empty: _train_into(empty, task, recipe))
    found = untrained(recipe)
    found.model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    return found


def held_out(count: int, seed: int = HELD_OUT_SEED, least_attractors: int = 1) -> list[Sentence]:
    """Return sentences on which nothing was trained."""
    return list(itertools.islice(sentences(seed, least_attractors), count))


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return tokens and attention mask, [row, position]."""
    tokens = torch.full((len(rows), max(map(len, rows))), vocabulary()[PAD])
    mask = torch.zeros_like(tokens)
    for place, row in enumerate(rows):
        tokens[place, : len(row)], mask[place, : len(row)] = torch.tensor(row), 1
    return tokens, mask


def untrained(recipe: Recipe) -> Classifier:
    """Return the classifier with random weights."""
    make = {"gpt2": _build_gpt2, "bert": _build_bert}[recipe.blocks]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Classifier(make(recipe).eval(), recipe)


def _build_gpt2(recipe: Recipe) -> Any:
    """Return an encoder with norms before the blocks, as in GPT-2, in which positions see all others."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    config = TransformerBridgeConfig(
        n_layers=recipe.layers,
        n_heads=recipe.heads,
        d_model=recipe.d_model,
        d_head=recipe.d_model // recipe.heads,
        d_mlp=4 * recipe.d_model,
        d_vocab=len(vocabulary()),
        n_ctx=CONTEXT,
        act_fn="gelu",
        normalization_type="LN",
        attention_dir="bidirectional",
        seed=recipe.seed,
    )
    return TransformerBridge.boot_native(config)


def _build_bert(recipe: Recipe) -> Any:
    """Return an encoder with norms after the sums, as in BERT.

    TransformerBridge supports only one of BERT's classifiers, that for the next sentence.
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import BertConfig, BertForNextSentencePrediction

    config = BertConfig(
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        hidden_size=recipe.d_model,
        intermediate_size=4 * recipe.d_model,
        vocab_size=len(vocabulary()),
        max_position_embeddings=CONTEXT,
        pad_token_id=vocabulary()[PAD],
        # Every sentence is new, so the model cannot learn any by heart, and needs no dropout.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForNextSentencePrediction._from_config(config, attn_implementation="eager")
    # The adapter is that of the masked language model, and the classifier runs unchanged.
    return build_bridge_from_module(model, architecture="BertForMaskedLM", hf_config=model.config)


def _train_into(folder: Path, task: str, recipe: Recipe) -> None:
    """Train the verb from scratch, and any other task from there (the paper tunes one BERT for all tasks)."""
    found = untrained(recipe) if task == "verb" else classifier("verb", recipe)
    _train(found, task, recipe.steps if task == "verb" else recipe.tuning_steps)
    torch.save(found.model.state_dict(), folder / "weights.pt")


def _train(found: Classifier, task: str, steps: int) -> None:
    recipe, model = found.recipe, found.model
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    warm_up = min(100, steps // 5 + 1)
    # Each task has a seed of its own, so that it is not tuned on the sentences of the verb's training.
    batches = _make_batches(recipe, 1 + list(TASKS).index(task))
    for step, examples in zip(range(steps), batches, strict=False):
        share = (step + 1) / warm_up if step < warm_up else 0.5 + 0.5 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * share
        tokens, mask = padded([row for row, _ in examples])
        answers = torch.tensor([int(TASKS[task](sentence)) for _, sentence in examples])
        logits = found.of_output(model(tokens, attention_mask=mask))
        loss = torch.nn.functional.cross_entropy(logits, answers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            right = (logits.argmax(-1) == answers).double().mean().item()
            print(
                f"  {task}, step {step + 1} of {steps}: loss {loss.item():.3f}, {right:.2f} right", flush=True
            )
    model.eval()


def _make_batches(recipe: Recipe, seed: int) -> Iterator[list[tuple[list[int], Sentence]]]:
    """Yield token numbers and sentences, with some unknown words and some sentences without an attractor."""
    seed += 1000 * recipe.seed
    stream, draw = sentences(seed, least_attractors=0), random.Random(seed)
    unknown = vocabulary()[UNK]
    while True:
        batch = []
        for sentence in itertools.islice(stream, recipe.batch):
            ids = token_ids(sentence)
            ids[1:] = [unknown if draw.random() < recipe.unknown else token for token in ids[1:]]
            batch.append((ids, sentence))
        yield batch
