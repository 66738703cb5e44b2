"""Compute the rows of [CLS] in all maps over the words of a sentence, and the importance of each word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import lens_mix as lm
from benchmarks.number_agreement.encoder import Classifier
from benchmarks.number_agreement.sentences import CLASSES, UNK, Sentence, token_ids, vocabulary


class Row(NamedTuple):
    """The row of [CLS] in one map, over the words without [CLS] itself."""

    method: str
    aggregation: str
    layer: int
    scores: np.ndarray


# ------------------------------------------------------------------ importance without lens_mix


def blank_out(found: Classifier, ids: list[int], answer: int) -> Tensor:
    """Return the absolute change of the answer's probability as each word becomes [UNK], [word]."""
    blanked = [[*ids[:place], vocabulary()[UNK], *ids[place + 1 :]] for place in range(1, len(ids))]
    probabilities = found.logits([ids, *blanked]).double().softmax(-1)[:, answer]
    return (probabilities[1:] - probabilities[0]).abs()


def input_gradients(found: Classifier, ids: list[int], answer: int) -> Tensor:
    """Return the norm of the margin's gradient with respect to each word's embedding, [word]."""
    words = next(
        module
        for module in found.model.modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == len(vocabulary())
    )
    looked_up: list[Tensor] = []
    handle = words.register_forward_hook(lambda module, args, out: looked_up.append(out))
    try:
        with torch.enable_grad():
            margin = found.margin(answer)(found.model(torch.tensor([ids])))[0]
            (gradient,) = torch.autograd.grad(margin, looked_up)
    finally:
        handle.remove()
    return gradient[0, 1:].norm(dim=-1)


def importance(found: Classifier, ids: list[int], answer: int) -> dict[str, np.ndarray]:
    """Return both, by name."""
    return {
        "blank-out": blank_out(found, ids, answer).numpy(),
        "gradients": input_gradients(found, ids, answer).double().numpy(),
    }


# ------------------------------------------------------------------ maps


def supported(found: Classifier) -> list[str]:
    """Return the names of the methods of lens_mix that run on the encoder."""
    return [name for name, engine, _ in lm.support(found.model) if engine is not None]


def _choose_methods(found: Classifier, answer: int, names: Sequence[str]) -> list[Any]:
    """Return the methods. Those with a target explain the answer."""
    chosen: list[Any] = []
    for name in names:
        kind: Any = lm.METHODS[name]
        if name == "alti_logit":
            token, against = (vocabulary()[CLASSES[place]] for place in (answer, 1 - answer))
            chosen.append(kind(token=token, against=against))
        elif name == "gradient_attention" or kind.reads == "model":
            chosen.append(kind(target=found.margin(answer)))
        elif name == "attention_attribution":
            # This many points are enough for an order. As many as its error requires take most of the time.
            chosen.append(kind(target=found.margin(answer), n_steps=8))
        else:
            chosen.append(kind())
    return chosen


def rows(found: Classifier, ids: list[int], answer: int, names: Sequence[str]) -> Iterator[Row]:
    """Yield the row of every method, aggregation and depth (1 is the first layer)."""
    asked = _choose_methods(found, answer, names)
    maps: dict[str, lm.MixingMap] = {}
    for method in asked:
        # A map of the whole model has one row, whose target is the answer.
        row = {"queries": [0]} if method.reads == "model" else {}
        maps[method.name] = lm.run(found.model, torch.tensor(ids), method, **row)
    for name, mixing in maps.items():
        if mixing.kind == "input":
            # alti_logit has what each layer adds, so the map up to a layer is a sum.
            summed = mixing.scores.cumsum(0) if name == "alti_logit" else mixing.scores
            # A map of the whole model has one layer, which counts as the last.
            first = found.recipe.layers - len(summed) + 1
            yield from _yield_layers(name, "input map", summed.abs(), first)
            continue
        # Attributions are signed and importance is not, so absolute values are compared.
        size = mixing.replace(scores=mixing.scores.abs())
        yield from _yield_layers(name, "row", size.scores)
        counts = torch.arange(1, len(size.scores) + 1)[:, None, None]
        yield from _yield_layers(name, "mean of rows", size.scores.double().cumsum(0) / counts)
        if name == "gradient_attention":
            yield from _yield_layers(name, "rollout", lm.gradient_rollout(mixing).scores)
            continue
        yield from _yield_layers(name, "rollout", lm.rollout(size).scores)
        if name == "attention":
            yield from _yield_layers(name, "flow", lm.flow(size, queries=[0]).scores)


def controls(sentence: Sentence, draw: np.random.Generator) -> Iterator[Row]:
    """Yield controls that do not depend on the model: chance, the position, and the subject's position."""
    count = len(sentence.words)
    yield Row("random", "control", 0, draw.random(count))
    yield Row("position (later is more)", "control", 0, np.arange(count, dtype=float))
    yield Row("the subject alone", "control", 0, np.eye(count)[sentence.subject])


def _yield_layers(method: str, aggregation: str, scores: Tensor, first: int = 1) -> Iterator[Row]:
    for layer, row in enumerate(scores[:, 0, 1:].double().numpy(), start=first):
        yield Row(method, aggregation, layer, row)


def ids_and_answer(found: Classifier, sentence: Sentence) -> tuple[list[int], int]:
    """Return the token numbers, and the model's answer."""
    ids = token_ids(sentence)
    return ids, int(found.logits([ids])[0].argmax())
