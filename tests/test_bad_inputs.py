"""Test that every public function raises a clear error for bad input.

A case is *silent* if a result is returned, and *raw* if the error is that of torch, Python or another
library: raised outside lens_mix, or without the argument's name, what was expected and what was got.
"""

from __future__ import annotations

import functools
import math
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import lens_mix as lm
from lens_mix import evaluation, experiments, graphs, hooks, targets, view
from lens_mix.experiments import (
    cancel_effect,
    contextualisation,
    expansion_rate,
    head_figures,
    mixing_ratio,
    norm_figures,
)
from lens_mix.view.tree_figure import tree_figure
from tests.source_tree import LIBRARY
from tests.tiny_models import gpt2_like, toy_tokenizer

NAN, INF = math.nan, math.inf
PROMPT = torch.tensor([3, 4, 5, 6])

# Kinds of bad values. None is added where it has no meaning of its own.
NO_WHOLE = ("2", 1.5, True, NAN, {}, b"2")
NO_FLAG = ("no", "false", 2, [True])
NO_NUMBER = ("0.5", True, NAN, INF, 1j, [0.5])
NO_CHOICE = ("nothing", 3, None, ["auto"])
NO_MAP = (None, "map", 3, torch.ones(2, 3, 3))
NO_GRAPH = (None, "graph", {})
NO_MODEL = (None, "gpt2", 3)
NO_TOKEN = (1.5, True, [3], b"w3")


class Case(NamedTuple):
    """A call with bad input, and the word that its error must contain, usually the argument's name."""

    label: str
    call: Callable[[], object]
    word: str


def each(
    function: Callable[..., object], argument: str, values: Sequence[Any], /, **given: Any
) -> Iterator[Case]:
    """Yield a case for each bad value of one argument; `given` are the other arguments."""
    name = getattr(function, "__qualname__", None) or repr(function)
    if isinstance(function, functools.partial):
        name = function.func.__qualname__
    for place, value in enumerate(values):
        shown = (
            repr(value)
            if isinstance(value, (str, int, float, type(None)))
            else f"{type(value).__name__}, {place}"
        )
        call = functools.partial(_called, function, {**given, argument: value})
        # Errors about one of several prompts name it `prompt`.
        yield Case(f"{name}({argument}={shown})", call, "prompt" if argument == "prompts" else argument)


def _called(function: Callable[..., object], arguments: dict[str, Any]) -> object:
    # A generator can be read only once, so it is made when the case runs.
    return function(
        **{name: value() if isinstance(value, Made) else value for name, value in arguments.items()}
    )


class Made:
    """A value that is made anew for each call."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self) -> Any:
        return self.make()


@functools.cache
def model() -> Any:
    return gpt2_like(tokenizer=toy_tokenizer())


@functools.cache
def meta_model() -> Any:
    return gpt2_like(seed=1).to("meta")


def map_of(heads: int | None = None, **fields: Any) -> lm.MixingMap:
    scores = torch.ones(2, 3, 3) if heads is None else torch.ones(2, heads, 3, 3)
    values: dict[str, Any] = {"scores": scores.tril(), "tokens": [" a", " b", " c"], "causal": True}
    return lm.MixingMap(**{**values, "method": "attention", **fields})


def importance() -> experiments.HeadImportance:
    return experiments.HeadImportance(torch.arange(8.0).reshape(2, 4), "test", 1)


def loss_of(model: Any) -> float:
    return float(model(PROMPT[None]).sum())


def with_model(function: Callable[..., object], **given: Any) -> Callable[..., object]:
    """Return a call of the function on the tiny model, with a good prompt if it has such an argument."""

    @functools.wraps(function)
    def call(**arguments: Any) -> object:
        return function(**{"model": model(), **given, **arguments})

    return call


def consumed(**arguments: Any) -> list[Any]:
    return list(lm.run_many(**{"model": model(), "prompts": [PROMPT], "methods": "attention", **arguments}))


consumed.__qualname__ = "run_many"


def float8(value: Tensor) -> Tensor:
    return value.to(torch.float8_e4m3fn)


# ------------------------------------------------------------------ running


def runs() -> Iterator[Case]:
    run = with_model(lm.run, prompt=PROMPT, methods="attention")
    prompts = (
        None,
        3,
        3.5,
        {},
        {"text": "w3"},
        [],
        b"\xff",
        [3, 10**30],
        [3.5, 4],
        [True, False],
        torch.ones(4),
    )
    yield from each(run, "prompt", (*prompts, PROMPT.to_sparse(), PROMPT.to("meta"), np.array([1.5, 2])))
    yield from each(
        run, "prompt", (torch.tensor([[3], [4]]), torch.tensor(3), torch.tensor([-1]), [10**6], ["w3"])
    )
    yield from each(run, "methods", (None, 3, "rolout", [], [None], int, {}, {"attention": 1}))
    yield from each(run, "queries", (*NO_WHOLE[:4], [1.5], ["1"], {0: 1}, 99, [0, 0], [], [NAN], 10**30))
    yield from each(
        run, "queries", (torch.tensor([True, False]), torch.tensor([1.5]), slice(9, 12), slice("a", None))
    )
    yield from each(run, "layers", (*NO_WHOLE[:4], [1.5], ["1"], {0: 1}, 99, -3, [0, 0], [], 10**30))
    yield from each(run, "part", ("decoder", 3, [], {}))
    yield from each(run, "engine", NO_CHOICE)
    yield from each(run, "max_memory", ("1GB", 1.5, NAN, INF, True, 0, -1, [1]))
    yield from each(run, "progress", NO_FLAG)
    yield from each(run, "prepend_bos", NO_FLAG, prompt="w3 w4")
    masks = (
        [1, 1, 1, 1],
        "1111",
        torch.ones(5),
        torch.ones(2, 4),
        torch.full((4,), NAN),
        torch.full((4,), 2),
    )
    yield from each(run, "attention_mask", (*masks, torch.ones(4).to_sparse(), torch.ones(4, device="meta")))
    yield from each(run, "attention_mask", (torch.tensor([1, 0, 1, 1]), 3, float8(torch.ones(4))))
    yield from each(run, "token_type_ids", ("a", 3, torch.zeros(9), True))
    yield from each(run, "model", NO_MODEL)
    yield from each(run, "model", (Made(meta_model),))
    yield from each(with_model(lm.check), "prompt", ({}, 3.5, torch.ones(4)))
    yield from each(with_model(lm.check), "part", ("decoder", 3))
    yield from each(with_model(lm.check), "prepend_bos", NO_FLAG, prompt="w3 w4")
    yield from each(lm.check, "model", (*NO_MODEL, Made(meta_model)))
    yield from each(lm.support, "model", NO_MODEL)
    yield from each(with_model(lm.support), "part", ("decoder", 3, []))
    yield from each(lm.Lens, "model", NO_MODEL)
    yield from each(lm.Lens(model()).layer_index, "layer", (*NO_WHOLE, None, 2, -3))
    yield from each(lm.citation, "name", ("rolout", None, 3, ["rollout"]))


def runs_of_many() -> Iterator[Case]:
    yield from each(consumed, "prompts", ("w3 w4", {"a": "w3"}, None, 3, b"w3 w4", 1.5, torch.tensor(3)))
    yield from each(consumed, "prompts", (Made(lambda: iter([PROMPT, None])), [PROMPT, {}], [3, 4], b"w3"))
    yield from each(consumed, "batch_size", (*NO_WHOLE, None, 0, -1))
    yield from each(consumed, "padding_side", NO_CHOICE)
    yield from each(consumed, "progress", NO_FLAG)
    yield from each(consumed, "prepend_bos", NO_FLAG, prompts=["w3 w4"])
    yield from each(consumed, "max_memory", ("1GB", NAN, 0, True))
    yield from each(consumed, "engine", NO_CHOICE)
    yield from each(consumed, "queries", ("1", 1.5, [9], {}))
    yield from each(consumed, "layers", ("1", 1.5, [9], {}))
    yield from each(consumed, "methods", (None, [], "rolout"))
    masks = (torch.ones(2, 4), torch.ones(0, 4), [[1, 1, 1, 1]], torch.ones(1, 5), 3, "1111")
    yield from each(consumed, "attention_mask", (*masks, torch.ones(3, 4), torch.tensor(1)))
    yield from each(consumed, "token_type_ids", (3, torch.zeros(3, 4), Made(lambda: iter([PROMPT]))))
    one = Made(lambda: iter([PROMPT]))
    yield from each(consumed, "attention_mask", (torch.ones(3, 4),), prompts=one)


# ------------------------------------------------------------------ methods and targets


def methods() -> Iterator[Case]:
    for method in (
        lm.methods.AttentionWeights,
        lm.methods.ValueNorms,
        lm.methods.ValueZeroing,
        lm.methods.AttentionAttribution,
        lm.methods.GradientAttention,
    ):
        yield from each(method, "per_head", (*NO_FLAG, None))
    yield from each(lm.methods.AttnResLn, "next_norm", (*NO_FLAG, None))
    yield from each(lm.methods.AtbFfResLn, "next_norm", (*NO_FLAG, None))
    yield from each(lm.methods.GradientAttention, "rectify", (*NO_FLAG, None))
    yield from each(lm.methods.Alti, "normalize", (*NO_FLAG, None))
    yield from each(lm.methods.Alti, "distance", NO_CHOICE)
    yield from each(lm.methods.AltiLogit, "distance", NO_CHOICE)
    yield from each(lm.methods.AltiLogit, "token", ("nothing", 1.5, None, True, -1, [3]))
    yield from each(lm.methods.AltiLogit, "against", ("3", 1.5, True, -1, [3]))
    yield from each(lm.methods.AtbFf, "biases", NO_CHOICE)
    yield from each(lm.methods.DecompX, "biases", NO_CHOICE)
    yield from each(lm.methods.DecompXLocal, "slope", NO_CHOICE)
    yield from each(lm.methods.ValueZeroing, "metric", NO_CHOICE)
    yield from each(lm.methods.ValueZeroing, "last_layer", NO_CHOICE)
    yield from each(lm.methods.ValueZeroing, "threshold", (*NO_NUMBER, -1))
    yield from each(
        lm.methods.ValueZeroing,
        "heads",
        ("01", 1.5, [1.5], [True], ["0"], {1.5: [0]}, {0: "1"}, {-1: [0]}, [-1]),
    )
    yield from each(lm.methods.ValueZeroing, "heads", ([], [0, 0], {"0": [1]}, 10**30))
    for method in (lm.methods.ValueZeroing, lm.methods.Occlusion):
        no_spans = ("ab", 3, [], [[]], [[1.5]], [3], [[0], [0]], [[-1]], {0: [1]}, True)
        yield from each(method, "spans", no_spans)
    for method in (lm.methods.Occlusion, lm.methods.TokenPatching):
        yield from each(method, "replacements", (" the", 3, [], [1.5], [-1], [None], {0: 1}, True))
        yield from each(method, "n_samples", (*NO_WHOLE, 0, None))
        yield from each(method, "seed", (*NO_WHOLE, -1, None))
    yield from each(lm.methods.AttentionAttribution, "target", (3, None, [1]))
    yield from each(lm.methods.GradientAttention, "target", (3, None))
    yield from each(lm.methods.AttentionAttribution, "n_steps", ("20", 1.5, True, 0, -1, 10**9, NAN, [20]))
    yield from each(lm.methods.AttentionAttribution, "n_steps", (10**9, 10**30), method="riemann_left")
    yield from each(lm.methods.AttentionAttribution, "method", NO_CHOICE, n_steps=3)
    yield from each(lm.methods.AttentionAttribution, "baseline", (None, "one", 3, [1]))
    yield from each(lm.methods.AttentionAttribution, "internal_batch_size", (*NO_WHOLE, 0, -1, INF))
    yield from each(lm.methods.AttentionAttribution, "tolerance", (*NO_NUMBER, 0, -1))
    yield from each(lm.methods.AttentionAttribution, "max_steps", (*NO_WHOLE, None, 2, -1, INF))


def explained() -> Iterator[Case]:
    for function in (
        targets.predicted,
        targets.probability,
        targets.logit,
        targets.masked_token,
        targets.loss,
        targets.next_token,
    ):
        given = {"label": 3} if function is targets.loss else {}
        # A text is one of the prompt, which only a run knows.
        yield from each(function, "position", NO_WHOLE[1:], **given)
    yield from each(targets.span, "start", (*NO_WHOLE, None))
    yield from each(targets.span, "stop", NO_WHOLE, start=1)
    for function in (targets.predicted, targets.class_, targets.masked_token):
        yield from each(function, "of", NO_CHOICE)
    yield from each(targets.token, "of", NO_CHOICE, token=3)
    yield from each(targets.token, "token", (*NO_TOKEN, None, -1))
    for function in (targets.probability, targets.logit, targets.masked_token):
        yield from each(function, "token", (*NO_TOKEN, -1))
    yield from each(targets.logit_difference, "good", (*NO_TOKEN, None, -1), bad=3)
    yield from each(targets.logit_difference, "bad", (*NO_TOKEN, None, -1), good=3)
    yield from each(targets.class_, "k", (*NO_WHOLE, -1))
    yield from each(targets.class_difference, "good", (*NO_WHOLE, None, -1), bad=3)
    yield from each(targets.class_difference, "bad", (*NO_WHOLE, None, -1), good=3)
    yield from each(targets.loss, "label", (*NO_TOKEN, -1))
    yield from each(targets.head, "function", (None, 3, "head"))
    yield from each(targets.head, "after_final_norm", (*NO_FLAG, None), function=print)
    attribute = with_model(lm.run, prompt=PROMPT)
    for wrong in (
        targets.token(99),
        targets.token("w3 w4"),
        targets.token(3, position=9),
        targets.token(3, position="w49"),
        targets.masked_token(3),
    ):
        is_mask = isinstance(wrong, type(targets.masked_token(3)))
        word = "position" if is_mask or wrong.position is not None else "token"
        yield Case(
            f"run({wrong})",
            functools.partial(attribute, methods=lm.methods.GradientAttention(target=wrong)),
            word,
        )


# ------------------------------------------------------------------ traces


def traces() -> Iterator[Case]:
    trace = with_model(lm.trace, prompt=PROMPT, answer=[3], sources="token", method="attention")
    prompts = (
        None,
        3,
        3.5,
        {},
        {"text": "w3"},
        [],
        b"\xff",
        [3, 10**30],
        [3.5, 4],
        [True, False],
        ["w3"],
        [[]],
    )
    yield from each(trace, "prompt", (*prompts, torch.ones(4), torch.tensor([[3], [4]]), [10**6]))
    yield from each(trace, "prompt", ([{"role": "user", "content": "w3"}], [{}], PROMPT.to("meta")))
    answers = (
        None,
        "w3",
        "",
        b"w3",
        3,
        3.5,
        {},
        [],
        [3.5],
        [True],
        [None],
        ["w3"],
        [10**6],
        [-1],
        [[3], [4]],
    )
    yield from each(
        trace, "answer", (*answers, PROMPT.to_sparse(), PROMPT.to("meta"), torch.ones(2), [10**30])
    )
    yield from each(trace, "answer", (None, "", 3.5, {}, b"w3"), prompt="w3 w4")
    yield from each(trace, "generate", (*NO_WHOLE, 0, -1), answer=None)
    yield from each(trace, "answer", ([3],), generate=3)
    yield from each(trace, "seed", (*NO_WHOLE, -1, None))
    yield from each(
        trace, "sources", ("paragraph", "given", 3, None, [], [[]], [[9]], [[0], [0]], {0: [1]}, ["w9"])
    )
    yield from each(trace, "sources", (b"token", True, 1.5, "sentence", [[-1]], {"a": []}, [[1.5]]))
    yield from each(
        trace,
        "sources",
        (lambda text: 3, lambda text: [(0, 99)], lambda text: [0]),
        prompt="w3",
        answer=" w4",
    )
    yield from each(trace, "method", (3, "rolout", [], [None], int, {}, ["attention", "alti"]))
    yield from each(trace, "method", (lm.methods.Gim("w3"), lm.methods.Occlusion(spans=[[0], [1]])))
    yield from each(trace, "aggregation", ("rolout", 3, [], ["mean"], b"mean", {}))
    yield from each(trace, "aggregation", ("mean",), method=None)
    yield from each(trace, "language", (*NO_CHOICE[1:], "english", ""))
    yield from each(trace, "prepend_bos", NO_FLAG, prompt="w3 w4", answer=" w5")
    yield from each(trace, "prepend_bos", (True,))
    yield from each(trace, "max_memory", ("1GB", 1.5, NAN, INF, True, 0, -1, [1]))
    yield from each(trace, "model", (*NO_MODEL, Made(meta_model)))
    yield from each(trace, "temperature", (0.5,))
    for name in ("temprature", "max_new_tokens", "return_type"):
        yield from each(trace, name, (3,), answer=None, generate=2)
    many = with_model(lm.trace_many, prompts=[PROMPT], answers=[[3]])
    yield from each(many, "prompts", (None, 3, "w3", b"w3", {}, lm.Documents({"a": "w3"})))
    yield from each(many, "answers", ("w3", b"w3", 3, {}, 1.5))
    yield from each(many, "progress", (*NO_FLAG, None))
    yield from each(lm.Documents, "documents", (None, {}, [], "w3", {"a": ""}, {"a": 3}, {3: "a"}, {"": "a"}))
    for name in ("question", "instruction"):
        yield from each(lm.Documents, name, (None, 3, ["w3"], b"w3"), documents={"a": "w3"})


def read_traces() -> Iterator[Case]:
    t = lm.trace(model(), PROMPT, answer=[7, 8], sources="token", method="attention")
    for owner in (t, t[:]):
        for function in (owner.top, owner.verify):
            yield from each(function, "k", (*NO_WHOLE, 0, -1, None))
        yield from each(owner.top, "everything", (*NO_FLAG, None))
    yield from each(t.by, "unit", ("nothing", 3, ["token"]))
    yield from each(t.sources, "unit", ("nothing", 3, ["token"]))
    yield from each(t.by, "unit", ("given",))
    yield Case("by(sentence)", lambda: t.by("sentence"), "sources")
    yield from each(t.through, "hops", (*NO_WHOLE, -1))
    for place, part in enumerate(
        (*NO_WHOLE[1:], None, 2, -3, "w7", slice(1, 1), slice(None, None, 2), slice("a", None))
    ):
        yield Case(f"trace[{part!r}, {place}]", functools.partial(t.__getitem__, part), "span")
    yield from each(t.save, "path", (None, 3, "", "no/such/folder/t.trace"))
    yield from each(lm.Trace.load, "path", (None, 3, "", "no/such/file.trace"))


# ------------------------------------------------------------------ maps


def made_maps() -> Iterator[Case]:
    scores = (
        None,
        "scores",
        3,
        [],
        [[1.0]],
        [[[1.0], [1.0, 2.0]]],
        torch.ones(2, 3, 3).to_sparse(),
        {},
        [[["a"]]],
    )
    yield from each(map_of, "scores", scores)
    others = (torch.ones(2, 3, 3, device="meta"), float8(torch.ones(2, 3, 3)), torch.full((2, 3, 3), NAN))
    yield from each(
        map_of, "scores", (*others, torch.full((2, 3, 3), INF), torch.ones(2, 3, 3) * 1j, torch.ones(2, 3))
    )
    yield from each(
        map_of, "scores", ([torch.ones(3, 3), torch.ones(2, 2)], torch.ones(2, 3, 3), torch.ones(0, 3, 3))
    )
    yield from each(map_of, "tokens", (None, "abc", 3, [1, 2, 3], [" a"], {"a": 1, "b": 2, "c": 3}, b"abc"))
    yield from each(map_of, "method", (None, 3, ["a"]))
    yield from each(map_of, "causal", (*NO_FLAG, None, 1.0))
    masks = (
        "mask",
        torch.ones(3, 3, 3),
        torch.ones(5),
        torch.full((3, 3), 2),
        torch.full((3, 3), NAN),
        [[1], [1, 0]],
    )
    yield from each(
        map_of, "mask", (*masks, torch.ones(3, 3), torch.ones(3, 3).to_sparse(), float8(torch.ones(3, 3)))
    )
    yield from each(
        map_of, "mask", (torch.ones(3, 3, device="meta"), {}, object(), torch.ones(4, 3)), causal=False
    )
    yield from each(map_of, "key_tokens", ("abc", 3, ["x"], [1, 2, 3]), causal=False)
    yield from each(map_of, "residual", (*NO_NUMBER, -0.5, 1.5))
    yield from each(map_of, "kind", NO_CHOICE)
    yield from each(
        map_of, "layers", ("01", 3, [0], [0, 0], [-1, 0], [0.5, 1], [True, False], ["0", "1"], {0: 1})
    )
    yield from each(
        map_of, "queries", ("012", 3, [0], [0, 0, 1], [0, 1, 9], [0.5, 1, 2], [True, 1, 2], {0: 1})
    )
    for name in ("parameters", "provenance"):
        yield from each(map_of, name, (None, "text", 3, ["a"], [("a", 1)]))
    yield from each(map_of, "notes", (None, 3, [3], {"a": 1}, [None]))


def held_maps() -> Iterator[Case]:
    m, with_heads = map_of(), map_of(heads=4)
    yield from each(m.row_index, "query", (*NO_WHOLE[1:], 9, -9, " z", 10**30))
    yield from each(m.layer_index, "layer", (*NO_WHOLE, None, 9, -9))
    yield from each(m.layer, "layer", (*NO_WHOLE, None, 9))
    yield from each(m.select_layers, "layers", (None, 3, "01", [1.5], ["0"], [9], [], [0, 0], {0: 1}))
    yield from each(m.select_queries, "queries", ("0", None, 1.5, [1.5], [True], [0, 0], [9], [], {0: 1}))
    yield from each(with_heads.head, "head", (*NO_WHOLE, None, 4, -5))
    yield from each(m.head, "head", (0,))
    yield from each(m.normalized, "negative", NO_CHOICE)
    yield from each(with_heads.merge_heads, "how", NO_CHOICE)
    weights = (
        "1111",
        3,
        [1.0],
        [1, 1, 1, NAN],
        [1, 1, 1, INF],
        [1, 1, 1, -1],
        [0, 0, 0, 0],
        ["a"] * 4,
        {},
        [1j] * 4,
    )
    yield from each(
        with_heads.merge_heads, "weights", (*weights, torch.ones(4).to_sparse(), torch.ones(3, 4))
    )
    yield from each(m.merge_heads, "weights", ([1.0, 1.0], [NAN], "no"))
    yield from each(m.drop, "tokens", (None, 1.5, [1.5], [True], 9, " z", [0, 1, 2], {}, ""))
    yield from each(m.drop, "axis", NO_CHOICE, tokens=0)
    yield from each(
        m.merge_words, "groups", ("abc", 3, [[0]], [["a"]], [[0.5, 1, 2]], ["x"], [], [[0, 1, 9]], {0: 1})
    )
    yield from each(m.merge_words, "keys", NO_CHOICE)
    yield from each(m.merge_words, "queries", NO_CHOICE)
    yield from each(m.merge_words, "key_groups", ([[0, 1, 2]],))
    yield from each(m.top, "k", (*NO_WHOLE, None, 0, -1))
    yield from each(m.top, "query", (1.5, 9, " z", [1]))
    yield from each(m.top, "layer", (1.5, None, 9, "0"))
    yield from each(with_heads.top, "head", (1.5, 9, "0", True))
    yield from each(m.to_networkx, "layer", (1.5, 9, "0", True))
    yield from each(m.to_networkx, "threshold", (*NO_NUMBER, None, -1))
    yield from each(m.show, "layers", ([9], 3, [1.5], "0", []))
    yield from each(m.show, "columns", (*NO_WHOLE, 0))


def files() -> Iterator[Case]:
    folder = str(LIBRARY)
    save, missing = map_of().save, f"{folder}/no such folder/map.safetensors"
    yield from each(save, "path", (folder, missing, None, 3, [], "", "a\0b"))
    nested: dict[str, Any] = {}
    for _ in range(2000):
        nested = {"inside": nested}
    for name in ("parameters", "provenance"):
        yield from each(_saved, name, ({"a": object()}, {"b": {1, 2}}, {"c": "long" * 25_000_000}))
        yield from each(map_of, name, (nested,))
    devices = ("nowhere", 3.5, [], *(() if torch.cuda.is_available() else ("cuda",)))
    yield from each(functools.partial(lm.MixingMap.load, f"{folder}/__init__.py"), "device", devices)
    yield from each(
        lm.MixingMap.load, "path", (folder, missing, None, 3, [], f"{folder}/__init__.py", "a\0b")
    )
    save_graph, load_graph = functools.partial(graphs.save_graph, nx.DiGraph()), graphs.load_graph
    paths = (
        f"{folder}/no such folder/g.json",
        f"{folder}/no such folder/g.graphml",
        "graph.txt",
        None,
        3,
        [],
    )
    yield from each(save_graph, "path", paths)
    yield from each(load_graph, "path", paths)
    yield from each(graphs.save_graph, "graph", NO_GRAPH, path="graph.json")
    write = functools.partial(graphs.to_neuronpedia, map_of().to_networkx(), model="tiny")
    yield from each(write, "path", (folder, f"{folder}/no such folder/g.json", 3, []))
    yield from each(graphs.to_neuronpedia, "graph", NO_GRAPH, model="tiny")
    yield from each(graphs.to_neuronpedia, "model", (None, 3), graph=map_of().to_networkx())


def _saved(**fields: Any) -> object:
    return map_of(**fields).save(Path(tempfile.gettempdir()) / "lens_mix_map_that_cannot_be_saved")


# ------------------------------------------------------------------ aggregations and graphs


def aggregated() -> Iterator[Case]:
    m = map_of()
    every: tuple[Callable[..., object], ...] = (lm.rollout, lm.flow, lm.gradient_rollout, lm.attribution_tree)
    for function in (*every, graphs.layered_graph, graphs.information_flow_graph):
        yield from each(function, "mixing_map", (*NO_MAP, map_of(kind="input")))
    for function in (lm.rollout, lm.flow, graphs.layered_graph):
        yield from each(function, "residual", (*NO_NUMBER, -0.5, 1.5), mixing_map=m)
        yield from each(function, "drop_bos", (*NO_FLAG, None), mixing_map=m)
    for function in (lm.rollout, lm.flow):
        yield from each(function, "receptive_field", (*NO_FLAG, None), mixing_map=m)
    for function in (lm.flow, lm.gradient_rollout):
        yield from each(function, "normalize", (*NO_FLAG, None), mixing_map=m)
    yield from each(lm.rollout, "per_head", (*NO_FLAG, None), mixing_map=map_of(heads=4))
    for name in ("from_layer", "to_layer"):
        yield from each(lm.rollout, name, (*NO_WHOLE, 9, -9), mixing_map=m)
    yield from each(lm.flow, "layer", (*NO_WHOLE, 9), mixing_map=m)
    yield from each(lm.flow, "queries", ("0", 1.5, [9], [True], [], [0, 0], {0: 1}), mixing_map=m)
    yield from each(lm.flow, "solver", NO_CHOICE, mixing_map=m)
    yield from each(lm.flow, "processes", (*NO_WHOLE, None, 0), mixing_map=m)
    yield from each(lm.flow, "progress", (*NO_FLAG, None), mixing_map=m)
    tree = lm.attribution_tree
    yield from each(tree, "threshold", (*NO_NUMBER, None, -1, 2), mixing_map=m)
    yield from each(tree, "cost", (*NO_NUMBER, None, -1), mixing_map=m)
    yield from each(tree, "root", (1.5, True, 9, " z", [0]), mixing_map=m)
    yield from each(tree, "special", (None, 1.5, 9, [True], {0: 1}), mixing_map=m)
    yield from each(tree, "top_layer", (*NO_WHOLE, 9), mixing_map=m)
    yield from each(tree, "order", NO_CHOICE, mixing_map=m)
    yield from each(tree, "within_layer", (*NO_FLAG, None), mixing_map=m)
    yield from each(lm.aggregation.tree_text, "tree", (*NO_GRAPH, nx.DiGraph()))
    yield from each(graphs.layered_graph, "layer", ("0", 1.5, 9), mixing_map=m)
    yield from each(graphs.layered_graph, "threshold", (*NO_NUMBER, None, -1), mixing_map=m)
    flow_graph = functools.partial(graphs.information_flow_graph, m)
    yield from each(flow_graph, "query", (1.5, 9, " z", True))
    yield from each(flow_graph, "by", NO_CHOICE)
    yield from each(flow_graph, "key", (0, 1.5), by="rollout")
    yield from each(flow_graph, "key", (None, 1.5, 9, " z"), by="flow")
    yield from each(flow_graph, "threshold", (*NO_NUMBER, -1, 5))
    prune, layered = graphs.prune_graph, graphs.layered_graph(m)
    yield from each(prune, "graph", NO_GRAPH)
    yield from each(prune, "target", (None, (9, 9), "a", [0]), graph=layered)
    yield from each(prune, "threshold", (*NO_NUMBER, None, -1, 5), graph=layered, target=(2, 2))
    yield from each(prune, "by", ("nothing", 3, None), graph=layered, target=(2, 2))
    for name in ("renormalize", "from_inputs"):
        yield from each(prune, name, (*NO_FLAG, None), graph=layered, target=(2, 2))


# ------------------------------------------------------------------ evaluation and statistics


def scaled() -> Iterator[Case]:
    row, relevant = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True])
    no_row = (
        None,
        "row",
        3,
        torch.ones(2, 2),
        [1.0, NAN],
        [INF, 1.0],
        torch.ones(3, device="meta"),
        {},
        ["a"],
    )
    for function in (evaluation.spearman, evaluation.partial_spearman):
        yield from each(function, "row", no_row, other=row)
        yield from each(function, "other", (*no_row, [1.0, 2.0]), row=row)
    yield from each(evaluation.partial_spearman, "given", ("a", 3, [1.0], [NAN] * 3), row=row, other=row)
    yield from each(evaluation.top_k_overlap, "k", (*NO_WHOLE, None, 0, -1), row=row, other=row)
    for function in (evaluation.average_precision, evaluation.reciprocal_rank, evaluation.mass_accuracy):
        yield from each(function, "row", no_row, relevant=relevant)
        wrong = (None, "a", [0, 2], torch.ones(3), torch.tensor([True]), relevant[None], 3)
        yield from each(function, "relevant", wrong, row=row)
    yield from each(evaluation.bootstrap, "values", (None, "a", 3, [[1.0]], [INF], ["a"], {}))
    yield from each(evaluation.bootstrap, "against", ("a", 3, [1.0], [INF, 1.0]), values=[1.0, 2.0])
    yield from each(evaluation.bootstrap, "draws", (*NO_WHOLE, None, 0), values=[1.0])
    yield from each(evaluation.bootstrap, "confidence", (*NO_NUMBER, None, 2, -1), values=[1.0])
    yield from each(evaluation.bootstrap, "seed", (*NO_WHOLE, None, -1), values=[1.0])
    prompt = torch.tensor([3, 4, 5])
    for function in (evaluation.removal_curves, evaluation.soft_faithfulness):
        ask = with_model(function, prompt=prompt, rows=row)
        yield from each(ask, "rows", (None, "row", 3, {}, {3: row}, {"a": None}, [1.0], [1.0, NAN, 2.0]))
        yield from each(ask, "prompt", (None, 3, {}, []))
        yield from each(ask, "positions", ("a", 1.5, 9, [0, 0], [], [True]))
        yield from each(ask, "seed", (*NO_WHOLE, None, -1))
        yield from each(ask, "target", (3, [1]))
        yield from each(function, "model", NO_MODEL, prompt=prompt, rows=row)
    remove = with_model(evaluation.removal_curves, prompt=prompt, rows=row)
    yield from each(remove, "removal", (None, 3, "delete", evaluation.Drop, {}))
    yield from each(remove, "exact", (*NO_WHOLE, None, -1, 21))
    yield from each(remove, "beam", (*NO_WHOLE, None, -1))
    no_sources = (None, 3, "zz", [], [[]], [[9]], [[0], [0]], [1.5], {0: [0]}, [[2]])
    for function in (evaluation.lds, evaluation.top_k_drop):
        ask = with_model(function, prompt=prompt, rows=row[:2], sources=[[0], [1]])
        yield from each(ask, "rows", (None, "row", 3, {}, {"a": None}, [1.0], [1.0, NAN], map_of()))
        yield from each(ask, "sources", no_sources)
        yield from each(ask, "removal", (None, 3, "delete", {}))
        yield from each(ask, "seed", (*NO_WHOLE, None, -1))
        yield from each(ask, "target", (3, [1]))
        yield from each(function, "model", NO_MODEL, prompt=prompt, rows=row[:2], sources=[[0], [1]])
    ask = with_model(evaluation.lds, prompt=prompt, rows=row[:2], sources=[[0], [1]])
    yield from each(ask, "ablations", (*NO_WHOLE, None, 1))
    ask = with_model(evaluation.source_ablations, prompt=prompt, sources=[[0], [1]])
    yield from each(ask, "ablations", (*NO_WHOLE, None, 1))
    yield from each(ask, "sources", no_sources)
    ask = with_model(evaluation.top_k_drop, prompt=prompt, rows=row[:2], sources=[[0], [1]])
    yield from each(ask, "k", (*NO_WHOLE, None, 0, [], [0]))
    yield from each(ask, "draws", (*NO_WHOLE, None, 0))
    soft = with_model(evaluation.soft_faithfulness, prompt=prompt, rows=row)
    yield from each(soft, "retained", (*NO_NUMBER, None, 0, 1, -1))
    yield from each(soft, "samples", (*NO_WHOLE, None, 0))
    yield from each(evaluation.ReplaceTokens, "tokens", (1.5, True, None, [], [1.5], {}, -1))
    yield from each(evaluation.SampleTokens, "among", (3, "a", [], [1.5], [-1], {}))
    yield from each(evaluation.SampleTokens, "samples", (*NO_WHOLE, None, 0))
    yield from each(evaluation.SampleTokens, "seed", (*NO_WHOLE, None, -1))
    yield from each(evaluation.SampleTokens, "draw", NO_CHOICE)
    yield from each(evaluation.ReplaceTokens, "own", NO_CHOICE, tokens=3)
    score = functools.partial(evaluation.Importance, [PROMPT])
    yield from each(score, "occlusion", (lm.methods.Occlusion(spans=[[0, 1]]),))
    keep = with_model(evaluation.keep_cells, prompt=prompt, maps=map_of())
    others = (map_of(heads=3), map_of().select_queries([0]), map_of(kind="input"), map_of(layers=[0, 7]))
    yield from each(keep, "maps", (*NO_MAP, {}, {"a": None}, *others))
    yield from each(keep, "operator", NO_CHOICE)
    yield from each(keep, "fractions", (None, "0.5", 0.5, [2], [-1], [NAN], ["a"], [True]))
    yield from each(keep, "keep_diagonal", (*NO_FLAG, None))
    yield from each(keep, "seed", (*NO_WHOLE, None, -1))
    yield from each(evaluation.keep_cells, "model", NO_MODEL, prompt=prompt, maps=map_of())
    yield from each(evaluation.pool_cells, "curves", (None, 3, [], [map_of()], {}))


def evaluated() -> Iterator[Case]:
    measure = with_model(experiments.head_importance, prompts=[PROMPT], by="attention")
    yield from each(measure, "prompts", ("w3 w4", {"a": "w3"}, None, 3, [], b"w3", [3, 4], [None]))
    yield from each(measure, "by", NO_CHOICE)
    yield from each(measure, "statistic", NO_CHOICE)
    yield from each(measure, "targets", ([targets.predicted()] * 2, [], 3), by="taylor")
    yield from each(measure, "method", (3, "attention", lm.methods.Alti()), by="attribution")
    yield from each(measure, "progress", (*NO_FLAG, None))
    yield from each(measure, "part", ("decoder", 3))
    yield from each(experiments.head_importance, "model", NO_MODEL, prompts=[PROMPT])
    ablate = with_model(experiments.ablation_importance, metric=loss_of)
    values = (None, 3, lambda model: "good", lambda model: loss_of(model) * NAN, lambda model: None)
    yield from each(ablate, "metric", values)
    yield from each(ablate, "examples", (*NO_WHOLE, None, -1))
    yield from each(ablate, "progress", (*NO_FLAG, None))
    heads = (3, None, [(9, 0)], [(0, 9)], [(0.5, 0)], ["00"], [(0,)], [(-1, 0)], [3], "01", [(True, 0)])
    yield from each(_pruned, "heads", heads)
    made = functools.partial(experiments.HeadImportance, name="test", examples=1)
    scores = (
        None,
        "scores",
        [1.0],
        torch.full((2, 2), NAN),
        torch.ones(2, 2).to_sparse(),
        [["a"]],
        [[1.0], [1.0, 2]],
    )
    yield from each(
        made, "scores", (*scores, torch.ones(2, 2, device="meta"), torch.ones(2, 2) * 1j, torch.ones(0, 2))
    )
    yield from each(
        functools.partial(experiments.HeadImportance, torch.ones(2, 2), "test"), "examples", (1.5, -1, "1")
    )
    yield from each(importance().top, "k", (*NO_WHOLE, None, 0, -1))
    yield from each(importance().correlation, "other", (None, 3, torch.ones(2, 4)))
    yield from each(importance().correlation, "how", NO_CHOICE, other=importance())
    correlate = experiments.importance_correlations
    yield from each(
        correlate, "importances", (None, [], {}, {"a": importance()}, {"a": 1, "b": 2}, [importance()] * 2)
    )
    curves = with_model(
        experiments.pruning_curves, metric=loss_of, rankings={"a": importance()}, fractions=[0.5]
    )
    yield from each(curves, "metric", values)
    yield from each(
        curves, "rankings", (None, 3, [importance()], {"a": None}, {"a": torch.ones(3, 3)}, {"random": 1})
    )
    yield from each(curves, "rankings", (importance(), {"a": [[NAN] * 4] * 2}, "a"))
    fractions = (
        None,
        0.5,
        "0.5",
        [],
        [0.5, 0.2],
        [-1],
        [2],
        [NAN],
        ["a"],
        [0.0, NAN],
        Made(lambda: iter(["a"])),
    )
    yield from each(curves, "fractions", fractions)
    yield from each(curves, "remove", NO_CHOICE)
    yield from each(curves, "random", (*NO_WHOLE, None, -1))
    yield from each(curves, "seed", (*NO_WHOLE, None, 10**30))


def _pruned(heads: Any) -> object:
    with experiments.pruned(model(), heads):
        return loss_of(model())


def triggered() -> Iterator[Case]:
    example = experiments.Example((3, 4, 5), 0)
    find = with_model(experiments.extract_triggers, examples=[example])
    yield from each(find, "examples", (None, "w3", [], [3], {"a": 1}, example))
    yield from each(find, "special", (None, 3, "a", [1.5], [True]))
    yield from each(find, "least", (*NO_NUMBER, None))
    yield from each(find, "second", (*NO_NUMBER, None))
    yield from each(find, "targets", ([], 3))
    yield from each(find, "method", (3, "attention"))
    yield from each(find, "progress", (*NO_FLAG, None))
    tokens = (None, "ab", 3, [1.5], ["a"], [-1], [True], [])
    yield from each(functools.partial(experiments.Example, label=0), "tokens", tokens)
    spans = (3, "ab", [3], [(0, 9)], [(2, 1)], [(0.5, 1)], [(-1, 2)])
    yield from each(functools.partial(experiments.Example, (3, 4, 5), 0), "segments", spans)
    yield from each(functools.partial(experiments.Example.read, model()), "prompt", (None, 3.5, {}), label=0)
    pieces = (experiments.triggers.Piece(3, "w3", 4, 0.5),)
    trigger = experiments.Trigger(pieces, (1.0, 1.0), ((0, 0), (0, 1)), 0, 0, example)
    insert = functools.partial(experiments.insert_trigger, trigger)
    yield from each(insert, "example", (example, None, "w3", 3))
    yield from each(
        functools.partial(experiments.insert_trigger, example=example), "trigger", (None, "w3", 3)
    )
    report = functools.partial(experiments.trigger_report, predict=lambda examples: [0] * len(examples))
    yield from each(report, "examples", (None, [], [3], "w3", example), triggers=[])
    yield from each(report, "triggers", (None, [3], "w3"), examples=[example])
    ask = functools.partial(experiments.trigger_report, [example], [])
    yield from each(ask, "predict", (None, 3, lambda examples: [], lambda examples: None))
    yield from each(ask, "metric", (3, "accuracy"), predict=lambda examples: [0] * len(examples))
    choose = with_model(experiments.predict_by_token, choices={"a": 3, "b": 4})
    choices = (None, "ab", 3, [3, 4], {"a": 3}, {"a": "x", "b": 3}, {"a": 1.5, "b": 3}, {"a": -1, "b": 3})
    yield from each(choose, "choices", (*choices, {"a": [], "b": 3}, {"a": 99, "b": 3}, {"a": True, "b": 3}))
    yield from each(choose, "position", (*NO_WHOLE, None))


def counted() -> Iterator[Case]:
    m = map_of(heads=4)
    look = functools.partial(experiments.attention_statistics, m)
    yield from each(experiments.attention_statistics, "maps", (*NO_MAP, [], [3], {"a": m}))
    yield from each(look, "offsets", (3, "1", [1.5], [True]))
    yield from each(look, "groups", (3, "a", {"a": 1.5}, {"a": [None]}, {"a": None}, {"a": True}, ["a"]))
    yield from each(look, "query", ("middle", 1.5, 9, True, [0]))
    found = experiments.attention_statistics(m)
    yield from each(found.fixed_offset_heads, "threshold", (*NO_NUMBER, None))
    yield from each(found.broad_heads, "threshold", (*NO_NUMBER, None))
    yield from each(found.group_heads, "group", ("nothing", None, [1]))
    yield from each(functools.partial(found.group_heads, "first"), "threshold", NO_NUMBER)
    probe = functools.partial(experiments.probe_heads, m)
    yield from each(functools.partial(experiments.probe_heads, relations=[(1, 0)]), "maps", NO_MAP)
    relations = (None, 3, "ab", [], [3], [(1,)], [(0.5, 1)], [(9, 0)], [(-1, 0)], {1: 0})
    yield from each(probe, "relations", relations)
    yield from each(probe, "direction", NO_CHOICE, relations=[(1, 0)])
    yield from each(probe, "ignore", (1.5, [None], True), relations=[(1, 0)])
    yield from each(probe, "offsets", (None, 3, [], [1.5], "1", [True]), relations=[(1, 0)])
    for function in (mixing_ratio.mixing_ratios, cancel_effect.weights_and_norms):
        measure = with_model(function, prompts=[PROMPT])
        yield from each(measure, "prompts", (None, {}, 3, [], {"a": "w3"}, b"\xff"))
        yield from each(measure, "layers", ("0", 1.5, [9]))
    stages = (3, "attn_w", [], ["nothing"], [3])
    yield from each(with_model(mixing_ratio.mixing_ratios, prompts=[PROMPT]), "stages", stages)
    yield from each(with_model(expansion_rate.expansion_rates), "part", ("decoder", 3))
    for function in (
        mixing_ratio.by_layer,
        mixing_ratio.by_kind,
        mixing_ratio.by_rank,
        mixing_ratio.counted_ranks,
    ):
        yield from each(function, "table", (None, 3, pd.DataFrame()))
    for function in (cancel_effect.no_op_table, cancel_effect.correlations, cancel_effect.cancelled_tokens):
        yield from each(function, "table", (None, 3, pd.DataFrame()))
    table = pd.DataFrame(
        {"layer": [0], "token": ["a"], "weight": [1.0], "norm": [1.0], "weighted_norm": [1.0]}
    )
    yield from each(cancel_effect.cancelled_tokens, "count", (*NO_WHOLE, None, -1, 0), table=table)
    yield from each(cancel_effect.correlations, "by", (None, ["nothing"], 3, []), table=table)
    change, plain = contextualisation.change, map_of()
    yield from each(change, "before", (*NO_MAP, map_of(heads=4)), after=plain)
    yield from each(change, "after", NO_MAP, before=plain)
    yield from each(
        contextualisation.changes, "maps", (None, 3, {}, [plain], dict.fromkeys(contextualisation.METHODS))
    )
    yield from each(contextualisation.amplification, "before", NO_MAP, after=plain)
    yield from each(contextualisation.top_pairs, "amplified", NO_MAP)
    yield from each(contextualisation.top_pairs, "count", (*NO_WHOLE, None, 0), amplified=plain)
    yield from each(contextualisation.top_pairs, "diagonal", (*NO_FLAG, None), amplified=plain)


# ------------------------------------------------------------------ hooks and figures


def hooked() -> Iterator[Case]:
    pattern = torch.ones(4, 4, 4)
    single = functools.partial
    made: dict[str, Callable[..., object]] = {
        "zero_values": single(hooks.zero_values, position=0),
        "zero_queries": hooks.zero_queries,
        "scale_pattern": single(hooks.scale_pattern, factor=1.0),
        "prune_heads": single(hooks.prune_heads, heads=0),
        "replace_pattern": single(hooks.replace_pattern, pattern=pattern),
        "freeze_pattern": single(hooks.freeze_pattern, source=pattern),
        "add_to_pattern": single(hooks.add_to_pattern, addition=pattern),
        "mask_attention": single(hooks.mask_attention, allowed=pattern > 0),
        "mask_keys": single(hooks.mask_keys, position=0),
        "record_mixing": single(hooks.record_mixing, store={}),
        "watch_pattern": single(hooks.watch_pattern, watch=print),
    }
    for name, function in made.items():
        for argument, values in (("layer", (*NO_WHOLE, None, -1)), ("attention", (None, 3, "{other}", "{"))):
            given = {} if argument == "layer" else {"layer": 0}
            for case in each(function, argument, values, **given):
                yield case._replace(label=f"{name}{case.label[case.label.index('(') :]}")
    zero, scale = single(hooks.zero_values, 0), single(hooks.scale_pattern, 0)
    numbers = (None, "0", 1.5, True, {}, {0: 1}, torch.tensor(0.5), torch.ones(2, 2), NAN)
    yield from each(zero, "position", (*numbers, [1.5], [], [True], ["0"]))
    yield from each(single(zero, 0), "heads", ("01", 1.5, [1.5], [], [-1], [True], {0: 1}))
    yield from each(
        scale, "factor", (*NO_NUMBER, None, torch.ones(2, 2), torch.tensor(True), torch.tensor([NAN]))
    )
    yield from each(single(hooks.prune_heads, 0), "heads", ("01", None, 1.5, [], [-1], [True], {0: 1}))
    patterns = (
        None,
        3,
        "a",
        torch.ones(4),
        torch.ones(4, 4, 4, dtype=torch.long),
        [[[1.0]]],
        pattern.to_sparse(),
    )
    yield from each(
        single(hooks.replace_pattern, 0), "pattern", (*patterns, pattern * NAN, pattern.to("meta"))
    )
    yield from each(single(hooks.add_to_pattern, 0), "addition", (*patterns, pattern * NAN))
    yield from each(single(hooks.freeze_pattern, 0), "source", (None, 3, {}, torch.ones(4), {"a": pattern}))
    yield from each(single(hooks.freeze_pattern, 0, pattern), "edit", (3, "scale", pattern))
    yield from each(
        single(hooks.mask_attention, 0),
        "allowed",
        (None, 3, True, [[True]], pattern, torch.tensor(True), pattern[0, 0] > 0, (pattern > 0).to("meta")),
    )
    yield from each(single(hooks.record_mixing, 0), "store", (None, [], "a"))
    yield from each(single(hooks.watch_pattern, 0), "watch", (None, 3, "print"))
    yield from each(single(hooks.record, {}), "name", (None, 3, ["a"]))
    yield from each(single(hooks.record, name="a"), "store", (None, [], "a"))
    yield from each(single(hooks.record, {}, "a"), "detach", (*NO_FLAG, None))
    yield from each(single(hooks.record, {}, "a"), "select", (3, "last"))
    yield from each(single(hooks.record_all, {}), "names", ("a", None, 3))
    yield from each(single(hooks.record_attention, 0, {}), "roles", ("pattern", None, 3, ["nothing"], [3]))
    yield from each(
        single(hooks.record_attention, 0, {}, ["pattern"]), "queries", (3, "a", torch.ones(2, 2), [0])
    )
    yield from each(lambda pairs: hooks.must_fire(*pairs).__enter__(), "pairs", ([3], ["ab"], [("a", print)]))


def drawn() -> Iterator[Case]:
    m = map_of()
    # With equal weights the tree has edges; a random one may have none, whose attribute is then not read.
    tree = lm.attribution_tree(map_of(scores=torch.ones(2, 3, 3).tril()))
    assert tree.number_of_edges() > 0
    yield from each(view.layer_maps, "mixing_map", NO_MAP)
    draw = functools.partial(view.layer_maps, m)
    yield from each(draw, "head", ("0", 1.5, 9))
    yield from each(draw, "normalize", NO_FLAG)
    yield from each(draw, "title", (3, ["a"]))
    for name, wrong in (("ax", (3, "ax")), ("figsize", (3, (1,), (0, 3), ("a", 2))), ("cmap", (3, "none"))):
        yield from each(functools.partial(draw, layer=0), name, wrong)
    for drawing in (draw, functools.partial(view.show_position, m)):
        yield from each(drawing, "vmax", (*NO_NUMBER, 0, -1))
        yield from each(drawing, "style", (3, "print"))
    yield from each(view.show_position, "maps", (None, 3, {}, [], {"a": 3}, [3]))
    rows = functools.partial(view.show_position, {"a": m})
    yield from each(rows, "query", (1.5, True, 9, "no such token"))
    yield from each(rows, "columns", (*NO_WHOLE, 0))
    for name in ("normalize", "common_scale", "as_numbers", "words"):
        yield from each(rows, name, NO_FLAG)
    for name, wrong in (("ax", (3, "ax")), ("figsize", (3, (1,), (0, 3), ("a", 2))), ("cmap", (3, "none"))):
        yield from each(rows, name, wrong)
    bars = functools.partial(view.token_bars, tokens=m.tokens)
    yield from each(
        bars, "rows", (None, 3, {}, [m], {"a": 3}, {"a": [INF] * 3}, {"a": "xyz"}, {"a": [1j] * 3}, m)
    )
    yield from each(
        functools.partial(view.token_bars, {"a": [1.0, 2.0, 3.0]}), "tokens", (None, 3, "abc", [1, 2, 3])
    )
    yield from each(functools.partial(bars, {"a": m}), "query", (*NO_WHOLE, 9))
    yield from each(functools.partial(bars, {"a": m}), "layer", (*NO_WHOLE, None, 9))
    yield from each(view.information_flow, "graph", (*NO_GRAPH, nx.DiGraph(), nx.DiGraph([("a", "b")])))
    yield from each(functools.partial(view.information_flow, tree), "by", ("nothing", 3))
    for name, wrong in (("ax", (3, "ax")), ("figsize", (3, (1,), (0, 3), ("a", 2))), ("title", (3, ["a"]))):
        yield from each(functools.partial(view.information_flow, tree), name, wrong)
    yield from each(tree_figure, "tree", (*NO_GRAPH, nx.DiGraph()))
    yield from each(head_figures.head_map, "importance", (None, 3, torch.ones(2, 4)))
    yield from each(functools.partial(head_figures.head_map, importance()), "vmax", (*NO_NUMBER, 0, -1))
    yield from each(head_figures.pruning_figure, "curves", (None, 3, {}))
    figures = (norm_figures.mixing_by_layer, norm_figures.mixing_by_kind, norm_figures.weights_against_norms)
    for figure in (*figures, norm_figures.expansion_rates, norm_figures.contextualisation):
        yield from each(figure, "table", (None, 3, pd.DataFrame()))


PARTS = (
    runs,
    runs_of_many,
    methods,
    explained,
    traces,
    read_traces,
    made_maps,
    held_maps,
    files,
    aggregated,
    scaled,
    evaluated,
    triggered,
)
CASES = [case for part in (*PARTS, counted, hooked, drawn) for case in part()]


def verdict(case: Case) -> str:
    """Return "clear" if the case raises a clear error, else a description of the result or error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = case.call()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        own = Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(LIBRARY)
        kind = isinstance(error, (TypeError, ValueError, IndexError, KeyError, OSError))
        says = case.word in text and "expected" in text and ("got" in text or "found" in text)
        return "clear" if own and kind and says else f"raw: {text[:200]}"
    return f"silent: {type(result).__name__}"


def _one_of_each_argument() -> Iterator[Any]:
    """Yield every case; those with a further value of the same argument are slow."""
    seen: set[str] = set()
    for case in CASES:
        argument = case.label.partition("=")[0]
        yield pytest.param(case, id=case.label, marks=[pytest.mark.slow] * (argument in seen))
        seen.add(argument)


@pytest.mark.parametrize("case", list(_one_of_each_argument()))
def test_bad_input_is_refused_in_plain_words(case):
    assert verdict(case) == "clear"


def test_there_are_enough_cases():
    assert len(CASES) >= 500


def _fine() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls with integers and numbers of other libraries, and with iterables other than lists."""
    m, with_heads, single = map_of(), map_of(heads=4), functools.partial
    signed = map_of(scores=torch.arange(18.0).reshape(2, 3, 3).tril())
    run = with_model(lm.run, prompt=PROMPT, methods="attention")
    for integer in (np.int64(1), np.uint8(1), torch.tensor(1)):
        kind = f"{type(integer).__name__} {integer.dtype}"
        calls: dict[str, Callable[[], object]] = {
            "run": single(run, queries=integer, layers=[integer], max_memory=np.int64(2**30)),
            "prompt": single(run, prompt=[integer, integer, integer]),
            "pair of tokens": single(run, prompt=[integer, integer]),
            "run_many": single(consumed, batch_size=integer),
            "layer": single(m.layer, integer),
            "head": single(with_heads.head, integer),
            "top": single(m.top, integer, query=integer, layer=integer),
            "rollout": single(lm.rollout, m, from_layer=integer),
            "flow": single(lm.flow, m, layer=integer, queries=[integer], processes=integer),
            "tree": single(lm.attribution_tree, signed, root=integer, special=integer, top_layer=integer),
            "target": single(
                run, methods=lm.methods.GradientAttention(target=targets.token(integer, position=integer))
            ),
            "steps": single(
                run, methods=lm.methods.AttentionAttribution(n_steps=integer, internal_batch_size=integer)
            ),
            "zeroing": single(run, methods=lm.methods.ValueZeroing(heads=[integer], spans=[[integer]])),
            "alti_logit": single(run, methods=lm.methods.AltiLogit(token=integer, against=integer)),
            "hooks": single(hooks.zero_values, integer, integer, heads=integer),
            "pruned": single(_pruned, [(integer, integer)]),
            "importance": single(importance().top, integer),
            "statistics": single(experiments.attention_statistics, m, offsets=[integer], query=integer),
            "figure": single(view.layer_maps, m, layers=[integer], columns=integer),
        }
        yield from ((f"{name}, {kind}", call) for name, call in calls.items())
    for number in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5)):
        yield f"residual {type(number).__name__}", single(lm.rollout, m, residual=number)
        yield f"threshold {type(number).__name__}", single(m.to_networkx, threshold=number)
    yield "np.bool_", single(lm.rollout, m, receptive_field=np.bool_(True))
    measure = with_model(experiments.head_importance, by="attention")
    yield "a generator of prompts", lambda: measure(prompts=(prompt for prompt in [PROMPT]))
    yield (
        "a generator of many prompts",
        lambda: consumed(prompts=iter([PROMPT]), attention_mask=torch.ones(1, 4)),
    )


FINE = dict(_fine())


@pytest.mark.parametrize("label", FINE)
def test_other_libraries_numbers_are_fine(label):
    FINE[label]()
