"""Checks for methods of one's own: what holds of every method of the library."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lens_mix.again import run_again
from lens_mix.lens.from_weights import Norm, Weights, model_from_weights
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.maps import MixingMap
from lens_mix.method import Method
from lens_mix.registry import all_methods, check_class
from lens_mix.runner import run, run_many

__all__ = ["check_method"]

_VOCABULARY = 20
_PROMPT = torch.tensor([3, 7, 1, 12, 5, 9], dtype=torch.long, device="cpu")


def check_method(method: Method | type[Method], model: TransformerLensModel | None = None) -> None:
    """Check that a method keeps what the library promises of all; an AssertionError says what it breaks.

    Its class attributes; then on a few tiny random models (or yours): a finite map without weight on hidden
    keys, the same one twice; rows and layers that are asked for equal those of the whole map; a padded batch
    gives what its prompts give alone; its engines agree; its record can be saved, and the map made again. A
    model that it refuses (UnsupportedModelError) is left out, as long as one is left.

    Args:
        method: a class (then with its defaults), or one with parameters.
        model: in place of the tiny ones.

    Raises:
        AssertionError: what it breaks, with the model. TypeError, ValueError: no method, as `lm.register`.
    """
    check_class(method if isinstance(method, type) else type(method))
    made = method() if isinstance(method, type) else method
    refusals = []
    models = _models() if model is None else iter([("your model", model)])
    for name, each in models:
        try:
            whole = run(each, _PROMPT, made, progress=None)
        except UnsupportedModelError as problem:
            # Weight on a hidden key is the method's fault, not the model's.
            assert "mask hides" not in str(problem), f"{made.name} on {name}: {problem}"
            refusals.append(f"{name}: {problem}")
            continue
        except (TypeError, ValueError, RuntimeError) as problem:
            raise AssertionError(f"{made.name} on {name}: no map of a prompt: {problem}") from problem
        for promise, holds in _promises(each, made, whole):
            assert holds, f"{made.name} on {name}: {promise}"
        refusals.append("")
    assert not all(refusals), f"{made.name}: expected a model that it runs on, got {'; '.join(refusals)}"


def _promises(model: TransformerLensModel, method: Method, whole: MixingMap) -> Iterator[tuple[str, bool]]:
    """What is promised in words, and whether it was kept."""
    again = run(model, _PROMPT, method, progress=None)
    yield "expected the same map twice (draw from a generator with a seed)", _alike(whole, again)
    rows = run(model, _PROMPT, method, queries=[-1, 2], progress=None)
    yield (
        "expected queries=[-1, 2] to give these rows of the whole map (see block.queries and takes_rows)",
        _alike(whole.select_queries([-1, 2]), rows),
    )
    if len(whole) > 1:
        first = run(model, _PROMPT, method, layers=whole.layer_labels[:1], progress=None)
        yield "expected layers=[0] to give this layer of the whole map", _alike(whole[[0]], first)
    shorter = run(model, _PROMPT[:4], method, progress=None)
    for padded, alone in zip(
        run_many(model, [_PROMPT, _PROMPT[:4]], method, progress=None), (whole, shorter), strict=True
    ):
        yield (
            "expected a padded batch to give what its prompts give alone (see block.real)",
            _alike(alone, padded),
        )
    for engine in set(method.engines) - {"recorded", whole.provenance["engine"]}:
        other = run(model, _PROMPT, method, engine=engine, progress=None)
        yield (
            f"expected engine={engine!r} to give the map of {whole.provenance['engine']!r}",
            _alike(whole, other),
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "map.safetensors"
        whole.save(path)
        loaded = MixingMap.load(path)
    yield "expected a map that can be saved and loaded", _alike(whole, loaded)
    named = all_methods().get(method.name) is type(method)
    same = run_again(model, loaded, None if named and method == type(method)() else method)
    yield "expected the same map from its record", _alike(whole, same)


def _alike(one: MixingMap, other: MixingMap) -> bool:
    """The same rows and layers, and the same scores but for the rounding of float32."""
    if (one.scores.shape, one.queries, one.layers) != (other.scores.shape, other.queries, other.layers):
        return False
    largest = float(one.scores.abs().max())
    return bool(torch.allclose(one.scores, other.scores, rtol=1e-3, atol=1e-4 * max(largest, 1e-30)))


def _models() -> Iterator[tuple[str, TransformerLensModel]]:
    yield "a causal model with LayerNorm", model_from_weights(_weights("LN", True))
    yield "a causal model with RMSNorm", model_from_weights(_weights("RMS", True, d_mlp=0))
    yield "a model that sees both ways", model_from_weights(_weights("LN", False))


def _weights(norm: Norm, causal: bool, d_mlp: int = 16) -> Weights:
    """Two layers, three heads, drawn at random, large enough for patterns that are not uniform."""
    generator = torch.Generator().manual_seed(0)
    d_model, heads = 12, 3

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") / 2

    return Weights(
        embedding=drawn(_VOCABULARY, d_model),
        positions=drawn(16, d_model),
        query=drawn(2, heads, d_model, 4),
        key=drawn(2, heads, d_model, 4),
        value=drawn(2, heads, d_model, 4),
        output=drawn(2, heads, 4, d_model),
        unembedding=drawn(d_model, _VOCABULARY),
        mlp_in=drawn(2, d_model, d_mlp) if d_mlp else None,
        mlp_out=drawn(2, d_mlp, d_model) if d_mlp else None,
        causal=causal,
        norm=norm,
    )
