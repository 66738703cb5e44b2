"""Check that a new method has the properties of all methods of the library."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix._model.from_weights import NormKind, Weights, model_from_weights
from lens_mix._model.model import Lens
from lens_mix._verification.engines import find_reason_against
from lens_mix._verification.support import check as verify
from lens_mix._verification.support import support_table
from lens_mix.again import run_again
from lens_mix.maps import MixingMap
from lens_mix.method import Method
from lens_mix.registry import all_methods, check_class
from lens_mix.runner import run, run_many

__all__ = ["check_method", "method_checks"]


def __dir__() -> list[str]:
    return __all__


_VOCABULARY = 20
_PROMPTS = tuple(
    torch.tensor(prompt, dtype=torch.long, device="cpu")
    for prompt in ([3, 7, 1, 12, 5, 9], [8, 2, 11, 4], [6, 6, 10, 2, 13, 1])
)
# A passing distance in each dtype, as a share of the largest score of the map in float64.
_DTYPES = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def check_method(method: Method | type[Method], model: TransformerLensModel | None = None) -> None:
    """Check a new method for the properties that all methods of the library have.

        >>> lm.testing.check_method(lm.methods.ValueNorms(per_head=True), model)

    The class attributes are checked first. The method then runs on a few tiny random models, or on yours:

    - Its map is finite, is not zero, has no weight on hidden keys, and is the same in a second run.
    - Its engines agree.
    - The rows and layers of `queries=` and `layers=` equal those of the whole map.
    - The maps of a padded batch, and of a batch of equal length, equal those of its prompts alone.
    - Its map is that of the whole in little memory (`max_memory=`), and similar in other dtypes.
    - The model is as it was after a run, and after an error in a run.
    - Its map can be saved, loaded and computed again.

    The method may raise an UnsupportedModelError for a model, if the text says what was expected. But it must
    run on at least one.

    Args:
        method: The class of the method, which runs with its defaults, or a method with parameters.
        model: The model, which is not converted to other dtypes. None: the tiny models, which are.

    Raises:
        AssertionError: If a property is violated; the message names the property and the model.
        TypeError: If it is not a method, as in `lm.register`.
        ValueError: If a class attribute is missing or wrong, as in `lm.register`.
    """
    for check in method_checks(method, model):
        check()


def method_checks(
    method: Method | type[Method], model: TransformerLensModel | None = None
) -> list[Callable[[], None]]:
    """Return the checks of `check_method` one by one, so that each can be a test of its own.

    The models are made when the first check runs:

        >>> @pytest.mark.parametrize("check", lm.testing.method_checks(MyMethod), ids=str)
        ... def test_my_method(check):
        ...     check()

    Args:
        method: The class of the method, or a method with parameters, as in `check_method`.
        model: The model. None: the tiny models.

    Returns:
        Functions without arguments. Each raises an AssertionError if its property is violated. `str` gives
        the names of the property and the model.

    Raises:
        TypeError: If it is not a method, as in `lm.register`.
        ValueError: If a class attribute is missing or wrong, as in `lm.register`.
    """
    check_class(method if isinstance(method, type) else type(method))
    instance = method() if isinstance(method, type) else method
    is_low = model is not None and next(model.parameters()).dtype.itemsize < 4
    exactness = _DTYPES[torch.bfloat16] if is_low else 1e-4
    dtypes = tuple(_DTYPES) if model is None else ()
    subjects = [
        Subject(instance, name, build, _PROMPTS, dtypes=dtypes, exactness=exactness)
        for name, build in ([("your model", lambda dtype: model)] if model is not None else _make_models())
    ]
    checks = [MethodCheck(name, subject) for subject in subjects for name in CHECKS]
    return [*checks, _RunCheck(subjects)]


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A method on a model, as the checks run it.

    Attributes:
        method: The method.
        model_name: What messages call the model.
        build: Returns the model in a dtype. It returns the same object if it is called again.
        prompts: Three prompts: the second is shorter than the first, and the third is as long as the first.
        part: The part of an encoder-decoder.
        dtype: The dtype of the model that most checks use.
        dtypes: Other dtypes, in which the map has to be similar.
        exactness: A passing distance between two maps that should be equal, as a share of the largest score.
    """

    method: Method
    model_name: str
    build: Callable[[torch.dtype], Any]
    prompts: Sequence[Any]
    part: str | None = None
    dtype: torch.dtype = torch.float32
    dtypes: tuple[torch.dtype, ...] = ()
    exactness: float = 1e-4

    @property
    def model(self) -> Any:
        """The model that most checks use."""
        return self.build(self.dtype)

    @functools.cached_property
    def values_before(self) -> dict[str, list[Tensor | None]]:
        """Copies of the model's weights and gradients, from before the method's first run."""
        return _values_of(self.model)

    @functools.cached_property
    def whole(self) -> MixingMap:
        """The whole map of the first prompt."""
        self.values_before  # noqa: B018  They are copied now.
        try:
            return self.run()
        except UnsupportedModelError as problem:
            # Weight on a hidden key is the method's fault, not the model's.
            assert "mask hides" not in str(problem), problem
            raise
        except (TypeError, ValueError, RuntimeError) as problem:
            raise AssertionError(f"expected a map of a prompt, got an error: {problem}") from problem

    @functools.cached_property
    def alone(self) -> list[MixingMap]:
        """The whole map of each prompt alone."""
        return [self.whole, *(self.run(prompt) for prompt in self.prompts[1:])]

    def run(self, prompt: Any = None, **options: Any) -> MixingMap:
        """Return the map of one prompt, the first by default."""
        prompt = self.prompts[0] if prompt is None else prompt
        model = options.pop("model", self.model)
        return run(model, prompt, self.method, part=self.part, progress=None, **options)

    def require_equal(self, expected: MixingMap, found: MixingMap, text: str) -> None:
        """Raise an AssertionError with this text if rows, layers or scores differ."""
        named = [(one.tokens, one.queries, one.layers, one.scores.shape) for one in (expected, found)]
        assert named[0] == named[1], f"{text}, got {_describe(found)} instead of {_describe(expected)}"
        assert torch.equal(expected.visible(), found.visible()), f"{text}, got other visible keys"
        distance = _distance(expected, found)
        assert distance <= self.exactness, f"{text}, got scores that differ by {distance:.1e} of the largest"


@dataclasses.dataclass(frozen=True)
class MethodCheck:
    """One property of a method on a model: a call raises an AssertionError if it is violated."""

    name: str
    subject: Subject

    def __str__(self) -> str:
        return f"{self.name} on {self.subject.model_name}"

    def __call__(self) -> None:
        """Check the property on a model that the method supports, or the reason why it does not."""
        check = CHECKS[self.name]
        try:
            self.subject.whole  # noqa: B018
        except UnsupportedModelError:
            check = check_refusal
        except AssertionError:
            check = _check_scores
        subject = self.subject
        try:
            check(subject)
        except AssertionError as problem:
            raise AssertionError(f"{subject.method.name} on {subject.model_name}: {problem}") from problem


@dataclasses.dataclass(frozen=True)
class _RunCheck:
    """The last check: the method runs on one of the models at least."""

    subjects: Sequence[Subject]

    def __str__(self) -> str:
        return "a model that it runs on"

    def __call__(self) -> None:
        reasons = []
        for subject in self.subjects:
            try:
                subject.whole  # noqa: B018
            except UnsupportedModelError as problem:
                reasons.append(f"{subject.model_name}: {problem}")
        assert len(reasons) < len(self.subjects), (
            f"{self.subjects[0].method.name}: expected a model that it runs on, got {'; '.join(reasons)}"
        )


# ------------------------------------------------------------------------------------------------ the checks


def _check_scores(subject: Subject) -> None:
    """Check that the scores are finite, that no layer is zero, and that hidden keys have no weight."""
    for mixing_map in subject.alone[:2]:
        assert bool(torch.isfinite(mixing_map.scores).all()), "expected finite scores"
        # A head may send nothing.
        largest = mixing_map.scores.abs().flatten(1).amax(1)
        assert float(largest.min()) > 0, "expected scores in every layer, got a layer of zeros"
        if mixing_map.keys_are_tokens:
            visible = mixing_map.visible()
            heads = mixing_map.scores.ndim - visible.ndim
            hidden = ~visible.reshape(len(visible), *[1] * heads, *visible.shape[1:])
            weight = mixing_map.scores.abs().where(hidden, 0)
            assert float(weight.max()) == 0, "expected no weight on keys that the mask hides"


def _check_support(subject: Subject) -> None:
    """Check that `lm.support` names the engine that runs."""
    ((_, engine, _),) = support_table(subject.model, [subject.method], subject.part)
    ran = subject.whole.provenance["engine"]
    assert engine == ran, f"expected the engine of lm.support, {engine!r}, got {ran!r}"


def _check_repeatability(subject: Subject) -> None:
    text = "expected the same map in two runs (draw from a generator with a seed)"
    subject.require_equal(subject.whole, subject.run(), text)


def _check_engines(subject: Subject) -> None:
    """Check each engine against the one that runs: the definition by hooks against the closed form."""
    ran = subject.whole.provenance["engine"]
    for engine in [each for each in subject.method.engines if each != "recorded"]:
        try:
            found = subject.run(engine=engine)
        except UnsupportedModelError as problem:
            # The verification of the model refuses an engine, and not the method itself.
            verification = verify(subject.model, part=subject.part).verification
            refused = find_reason_against(verification, engine, subject.method)
            assert engine != ran, problem
            assert refused is not None, problem
            continue
        subject.require_equal(subject.whole, found, f"expected engine={engine!r} to give the map of {ran!r}")


def _check_rows(subject: Subject) -> None:
    """Check the last row, and two rows that are not in order."""
    for queries in ([-1], [2, 0]):
        text = (
            f"expected queries={queries} to give these rows of the whole map (see block.queries and "
            "block.rows_of)"
        )
        subject.require_equal(subject.whole.select_queries(queries), subject.run(queries=queries), text)


def _check_layers(subject: Subject) -> None:
    """Check the last layer alone, the layers in reverse order, and these for two rows."""
    labels = subject.whole.layer_labels
    for layers in ([labels[-1]], labels[::-1]):
        text = f"expected layers={layers} to give these layers of the whole map"
        subject.require_equal(subject.whole.select_layers(layers), subject.run(layers=layers), text)
    cut = subject.whole.select_layers(labels[::-1]).select_queries([2, 0])
    found = subject.run(layers=labels[::-1], queries=[2, 0])
    subject.require_equal(cut, found, "expected layers= and queries= to give these parts of the whole map")


def _check_padding(subject: Subject) -> None:
    """Check a batch of prompts of several lengths, padded on each side that the model reads."""
    for side in ("right", "left"):
        try:
            padded = _run_batch(subject, subject.prompts, padding_side=side)
        except UnsupportedModelError as problem:
            assert side == "left", problem
            assert "padding_side: expected 'right'" in str(problem), problem
            return
        for alone, found in zip(subject.alone, padded, strict=True):
            text = (
                f"expected the maps of a batch padded on the {side} to equal those of its prompts alone "
                "(see block.real)"
            )
            subject.require_equal(alone, found, text)


def _check_batches(subject: Subject) -> None:
    """Check a batch of equal lengths, the order of the maps, and rows of a batch."""
    first, shorter, third = subject.prompts
    text = "expected the maps of a batch to equal those of its prompts alone, in their order"
    maps = [subject.alone[index] for index in (2, 0, 1)]
    found = _run_batch(subject, [third, first, shorter], batch_size=2, queries=[-1])
    for alone, one in zip(maps, found, strict=True):
        subject.require_equal(alone.select_queries([-1]), one, text)


def _run_batch(subject: Subject, prompts: Sequence[Any], **options: Any) -> list[MixingMap]:
    return list(run_many(subject.model, prompts, subject.method, part=subject.part, progress=None, **options))


def _check_memory(subject: Subject) -> None:
    """Check the map in the least memory that the method takes."""
    memory = 1
    while True:
        try:
            found = subject.run(max_memory=memory)
        except ValueError as problem:
            least = re.search(r"max_memory: expected at least (\d+)", str(problem))
            # A pass of more rows may say that it needs more, after those of fewer rows.
            needed = 0 if least is None else int(least[1])
            assert needed > memory, f"expected an error that says how much memory is needed, got {problem}"
            memory = needed
        else:
            break
    subject.require_equal(subject.whole, found, f"expected max_memory={memory} to change no score")


def _check_dtypes(subject: Subject) -> None:
    """Check the map in other dtypes against that in float64, in the rows that explain the same."""
    if not subject.dtypes:
        return
    is_precise = subject.dtype == torch.float64
    precise = subject.whole if is_precise else subject.run(model=subject.build(torch.float64))
    for dtype in subject.dtypes:
        found, bound = subject.run(model=subject.build(dtype)), _DTYPES[dtype]
        # In another dtype, the model may predict another token, which a target by default then explains.
        targets = zip(_targets(precise), _targets(found), strict=True)
        rows = [row for row, (one, other) in enumerate(targets) if one == other]
        distance = _distance(precise, found, rows)
        assert distance <= bound, (
            f"expected the map in {dtype} to differ from that in float64 by {bound} of the largest score, "
            f"got {distance:.1e}"
        )


def _check_model(subject: Subject) -> None:
    """Check that a run, and an error in its last pass, leave the model as it was.

    Half of the modules are in training mode and half of the parameters are frozen, so that a run which sets
    all alike is found.
    """
    model = subject.model
    subject.whole  # noqa: B018  A TransformerBridge adds its own hooks in its first pass.
    training = [module.training for module in _modules_of(model)]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    counter = _PassCounter()
    handle = Lens(model, subject.part).stack.blocks[-1].register_forward_hook(counter)
    try:
        _set_modes(model, [index % 2 == 0 for index in range(len(training))])
        _set_flags(model, [index % 2 == 0 for index in range(len(flags))])
        # A change that a second run repeats is found beside the values from before the first one.
        before = {**_state_of(model), **subject.values_before}
        found = subject.run()
        _require_state(before, _state_of(model), "after a run")
        assert not found.scores.requires_grad, "expected scores without gradients"
        subject.require_equal(subject.whole, found, "expected the map of the model in evaluation mode")
        counter.passes = 0
        subject.run()
        counter.passes, counter.last = 0, counter.passes
        try:
            subject.run()
        except _PassFailure:
            _require_state(before, _state_of(model), "after an error in a run")
        else:
            raise AssertionError("expected an error in the model to end the run, got a map")
    finally:
        handle.remove()
        _set_modes(model, training)
        _set_flags(model, flags)
    subject.require_equal(subject.whole, subject.run(), "expected the same map after an error in a run")


class _PassFailure(Exception):
    """What a check raises inside a pass."""


class _PassCounter:
    """A hook of a block that counts its passes, and raises an error in the last one."""

    passes = 0
    last = 0

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.passes += 1
        if self.passes == self.last:
            raise _PassFailure


def _set_modes(model: Any, modes: Sequence[bool]) -> None:
    for module, training in zip(_modules_of(model), modes, strict=True):
        module.training = training


def _set_flags(model: Any, flags: Sequence[bool]) -> None:
    for parameter, requires_grad in zip(model.parameters(), flags, strict=True):
        parameter.requires_grad_(requires_grad)


def _modules_of(model: Any) -> list[nn.Module]:
    """Return the modules of a model and, for a TransformerBridge, of the model that it wraps."""
    original = getattr(model, "original_model", None)
    return [module for tree in (model, original) if tree is not None for module in tree.modules()]


def _values_of(model: Any) -> dict[str, list[Tensor | None]]:
    """Return copies of a model's weights and gradients."""
    parameters = list(model.parameters())
    return {
        "weights": [parameter.detach().clone() for parameter in parameters],
        "gradients": [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters],
    }


def _state_of(model: Any) -> dict[str, Any]:
    """Return everything of a model that a run must not change."""
    original = getattr(model, "original_model", None)
    return {
        **_values_of(model),
        "flags": [parameter.requires_grad for parameter in model.parameters()],
        "modules": [
            (
                module.training,
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
                len(module._backward_hooks),
                "forward" in vars(module),
            )
            for module in _modules_of(model)
        ],
        "attention": getattr(getattr(original, "config", None), "_attn_implementation", None),
        "torch": torch.is_grad_enabled(),
        "random": [torch.get_rng_state()],
    }


def _require_state(before: dict[str, Any], after: dict[str, Any], when: str) -> None:
    for name, value in before.items():
        if name in ("weights", "gradients", "random"):
            pairs = list(zip(value, after[name], strict=True))
            is_same = all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
        else:
            is_same = value == after[name]
        assert is_same, f"expected the model as it was {when}, got other {name}"


def _check_record(subject: Subject) -> None:
    """Check that the map can be saved and loaded, and computed again from what was loaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "map.safetensors"
        subject.whole.save(path)
        loaded = MixingMap.load(path)
    subject.require_equal(subject.whole, loaded, "expected a map that can be saved and loaded")
    for name, expected, found in (
        ("parameters", subject.whole.parameters, loaded.parameters),
        ("details", subject.whole.provenance.get("details"), loaded.provenance.get("details")),
    ):
        assert expected == found, f"expected the same {name} after loading, got {found} instead of {expected}"
    kind = type(subject.method)
    has_defaults = all_methods().get(kind.name) is kind and subject.method == kind()
    found = run_again(subject.model, loaded, None if has_defaults else subject.method)
    subject.require_equal(subject.whole, found, "expected the same map from its record")


def check_refusal(subject: Subject) -> None:
    """Check that the error says what was expected, and that a batch and `lm.support` say the same."""
    reasons = []
    for attempt in (subject.run, lambda: _run_batch(subject, subject.prompts)):
        try:
            attempt()
        except UnsupportedModelError as problem:
            # The hooks that are on the model are also named.
            reasons.append(str(problem).partition("; these hooks are on the model")[0])
        else:
            raise AssertionError("expected an UnsupportedModelError, got maps")
    assert "expected" in reasons[0], f"expected an error that says what was expected, got {reasons[0]!r}"
    ((_, engine, reason),) = support_table(subject.model, [subject.method], subject.part)
    # What a method finds out in a run, `lm.support` cannot know.
    reasons += [reason] if engine is None else []
    assert len(set(reasons)) == 1, (
        f"expected one reason for a run, a batch and lm.support, got {'; '.join(map(repr, reasons))}"
    )


# The table: each method has each property on each model that it supports.
CHECKS: dict[str, Callable[[Subject], None]] = {
    "scores": _check_scores,
    "support": _check_support,
    "repeatability": _check_repeatability,
    "engines": _check_engines,
    "rows": _check_rows,
    "layers": _check_layers,
    "padding": _check_padding,
    "batches": _check_batches,
    "max_memory": _check_memory,
    "dtypes": _check_dtypes,
    "unchanged model": _check_model,
    "record": _check_record,
}


# ------------------------------------------------------------------------------------------ distances, models


def _distance(expected: MixingMap, found: MixingMap, rows: Sequence[int] | None = None) -> float:
    """Return the largest difference of two scores, of some rows or all, as a share of the largest score."""
    one, other = expected.scores.double(), found.scores.double()
    difference = (one - other if rows is None else (one - other)[..., rows, :]).abs()
    return float(difference.max() / one.abs().max().clamp_min(1e-30)) if difference.numel() else 0.0


def _targets(mixing_map: MixingMap) -> list[str | None]:
    """Return what each row explains."""
    explained = mixing_map.explained
    return [None] * mixing_map.scores.shape[-2] if explained is None else [row.target for row in explained]


def _describe(mixing_map: MixingMap) -> str:
    shape = list(mixing_map.scores.shape)
    return f"scores {shape} of layers {mixing_map.layer_labels} and queries {mixing_map.queries}"


def _make_models() -> Iterator[tuple[str, Callable[[torch.dtype], TransformerLensModel]]]:
    """Yield the names of the tiny models, each with a function that makes it in a dtype, once."""
    yield "a causal model with LayerNorm", functools.cache(functools.partial(_build, "LN", True, 16))
    yield "a causal model with RMSNorm", functools.cache(functools.partial(_build, "RMS", True, 0))
    yield "a bidirectional model", functools.cache(functools.partial(_build, "LN", False, 16))


def _build(norm: NormKind, causal: bool, d_mlp: int, dtype: torch.dtype) -> TransformerLensModel:
    model: Any = model_from_weights(_draw_weights(norm, causal, d_mlp))
    # TransformerLens prints the dtype.
    with contextlib.redirect_stdout(io.StringIO()):
        converted: TransformerLensModel = model.to(dtype)
    return converted


def _draw_weights(norm: NormKind, causal: bool, d_mlp: int) -> Weights:
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
