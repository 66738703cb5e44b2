"""Check that a new method has the properties of all methods of the library."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix._model.from_weights import NormKind, Weights, model_from_weights
from lens_mix.again import run_again
from lens_mix.maps import MixingMap
from lens_mix.method import Method
from lens_mix.registry import all_methods, check_class
from lens_mix.runner import run, run_many

__all__ = ["check_method"]


def __dir__() -> list[str]:
    return __all__


_VOCABULARY = 20
_PROMPT = torch.tensor([3, 7, 1, 12, 5, 9], dtype=torch.long, device="cpu")


def check_method(method: Method | type[Method], model: TransformerLensModel | None = None) -> None:
    """Check a new method for the properties that all methods of the library have.

    The class attributes are checked first. The method then runs on a few tiny random models, or on yours:

    - Its map is finite, has no weight on hidden keys, and is the same in a second run.
    - The rows and layers of `queries=` and `layers=` equal those of the whole map.
    - The maps of a padded batch equal those of its prompts alone.
    - Its engines agree.
    - Its map can be saved, loaded and computed again.

    A model for which it raises an UnsupportedModelError is skipped, but it must run on at least one model.

    Args:
        method: The class of the method, which runs with its defaults, or a method with parameters.
        model: The model. None: the tiny models.

    Raises:
        AssertionError: If a property is violated; the message names the property and the model.
        TypeError: If it is not a method, as in `lm.register`.
        ValueError: If a class attribute is missing or wrong, as in `lm.register`.
    """
    check_class(method if isinstance(method, type) else type(method))
    instance = method() if isinstance(method, type) else method
    problems = []
    models = _make_models() if model is None else iter([("your model", model)])
    for name, each in models:
        try:
            whole = run(each, _PROMPT, instance, progress=None)
        except UnsupportedModelError as problem:
            # Weight on a hidden key is the method's fault, not the model's.
            assert "mask hides" not in str(problem), f"{instance.name} on {name}: {problem}"
            problems.append(f"{name}: {problem}")
            continue
        except (TypeError, ValueError, RuntimeError) as problem:
            raise AssertionError(
                f"{instance.name} on {name}: expected a map of a prompt, got an error: {problem}"
            ) from problem
        for expected, is_true in _check_properties(each, instance, whole):
            assert is_true, f"{instance.name} on {name}: {expected}"
        problems.append("")
    assert not all(problems), f"{instance.name}: expected a model that it runs on, got {'; '.join(problems)}"


def _check_properties(
    model: TransformerLensModel, method: Method, whole: MixingMap
) -> Iterator[tuple[str, bool]]:
    """Yield what is expected of the method, and whether it is true."""
    again = run(model, _PROMPT, method, progress=None)
    yield "expected the same map in two runs (draw from a generator with a seed)", _are_close(whole, again)
    rows = run(model, _PROMPT, method, queries=[-1, 2], progress=None)
    yield (
        "expected queries=[-1, 2] to give these rows of the whole map (see block.queries and block.rows_of)",
        _are_close(whole.select_queries([-1, 2]), rows),
    )
    if len(whole) > 1:
        first = run(model, _PROMPT, method, layers=whole.layer_labels[:1], progress=None)
        yield "expected layers=[0] to give this layer of the whole map", _are_close(whole[[0]], first)
    shorter = run(model, _PROMPT[:4], method, progress=None)
    for padded, alone in zip(
        run_many(model, [_PROMPT, _PROMPT[:4]], method, progress=None), (whole, shorter), strict=True
    ):
        yield (
            "expected the maps of a padded batch to equal those of its prompts alone (see block.real)",
            _are_close(alone, padded),
        )
    for engine in set(method.engines) - {"recorded", whole.provenance["engine"]}:
        other = run(model, _PROMPT, method, engine=engine, progress=None)
        yield (
            f"expected engine={engine!r} to give the map of {whole.provenance['engine']!r}",
            _are_close(whole, other),
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "map.safetensors"
        whole.save(path)
        loaded = MixingMap.load(path)
    yield "expected a map that can be saved and loaded", _are_close(whole, loaded)
    is_registered = all_methods().get(method.name) is type(method)
    same = run_again(model, loaded, None if is_registered and method == type(method)() else method)
    yield "expected the same map from its record", _are_close(whole, same)


def _are_close(one: MixingMap, other: MixingMap) -> bool:
    """Return whether rows and layers are the same, and scores equal except for rounding in float32."""
    if (one.scores.shape, one.queries, one.layers) != (other.scores.shape, other.queries, other.layers):
        return False
    largest = float(one.scores.abs().max())
    return bool(torch.allclose(one.scores, other.scores, rtol=1e-3, atol=1e-4 * max(largest, 1e-30)))


def _make_models() -> Iterator[tuple[str, TransformerLensModel]]:
    yield "a causal model with LayerNorm", model_from_weights(_draw_weights("LN", True))
    yield "a causal model with RMSNorm", model_from_weights(_draw_weights("RMS", True, d_mlp=0))
    yield "a bidirectional model", model_from_weights(_draw_weights("LN", False))


def _draw_weights(norm: NormKind, causal: bool, d_mlp: int = 16) -> Weights:
    """Return random weights of two layers with three heads, large enough for varied patterns."""
    generator = torch.Generator().manual_seed(0)
    d_model, heads = 12, 3

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") / 2

    return Weights(
        embedding=draw(_VOCABULARY, d_model),
        positions=draw(16, d_model),
        query=draw(2, heads, d_model, 4),
        key=draw(2, heads, d_model, 4),
        value=draw(2, heads, d_model, 4),
        output=draw(2, heads, 4, d_model),
        unembedding=draw(d_model, _VOCABULARY),
        mlp_in=draw(2, d_model, d_mlp) if d_mlp else None,
        mlp_out=draw(2, d_mlp, d_model) if d_mlp else None,
        causal=causal,
        norm=norm,
    )
