"""Run methods on a model, for one prompt or for many prompts in batches."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal, cast, overload

from torch import Tensor
from tqdm.auto import tqdm

from lens_mix._blocks.cost import describe_seconds
from lens_mix._care.raw_errors import LibraryErrors
from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError, reads_features
from lens_mix._inputs.batches import PaddingSide, Prompt, group_by_length
from lens_mix._inputs.prompts import further_inputs, is_causal_model, read_encoding
from lens_mix._inputs.rows import Positions, Selection
from lens_mix._model.model import Lens
from lens_mix._model.parts import parts_of
from lens_mix._model.stacks import choose_stack
from lens_mix.arguments import check_choice, check_flags, check_whole_number, describe_value, write_count
from lens_mix.map_prompts import find_measuring_method, map_prompts
from lens_mix.maps import Maps, MixingMap
from lens_mix.method import Method
from lens_mix.methods import METHODS
from lens_mix.pass_plan import PassPlan
from lens_mix.registry import check_attributes, check_class, find_method
from lens_mix.session import Session

# Prompts of a list are grouped by length, so many batches at a time.
_BATCHES_GROUPED = 8
# The most pairs of tokens of these prompts, whose maps wait in memory for those of earlier prompts.
_MOST_WAITING = 1 << 20

# A class is the method with its defaults, as its name is.
MethodLike = str | Method | type[Method]


# What a run returns for one prompt. The overloads say when.
Result = MixingMap | Maps | dict[str, Maps]


@overload
def run(
    model: TransformerLensModel, prompt: Any, methods: MethodLike, *, part: Literal["all"], **options: Any
) -> Maps: ...
@overload
def run(
    model: TransformerLensModel,
    prompt: Any,
    methods: Sequence[MethodLike],
    *,
    part: Literal["all"],
    **options: Any,
) -> dict[str, Maps]: ...
@overload
def run(model: TransformerLensModel, prompt: Any, methods: MethodLike, **options: Any) -> MixingMap: ...
@overload
def run(model: TransformerLensModel, prompt: Any, methods: Sequence[MethodLike], **options: Any) -> Maps: ...
@overload
def run(
    model: TransformerLensModel, *, cache: Any, tokens: Any, methods: MethodLike, **options: Any
) -> MixingMap: ...
@overload
def run(
    model: TransformerLensModel, *, cache: Any, tokens: Any, methods: Sequence[MethodLike], **options: Any
) -> Maps: ...
def run(
    model: TransformerLensModel,
    prompt: Any = None,
    methods: MethodLike | Sequence[MethodLike] | None = None,
    *,
    cache: Any = None,
    tokens: Any = None,
    queries: Positions | None = None,
    layers: Selection | None = None,
    part: str | None = None,
    engine: str = "auto",
    max_memory: int | None = None,
    residual_shares: bool = False,
    progress: bool | None = False,
    prepend_bos: bool | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> Result:
    """Compute the maps of one prompt with one method or several, from one clean pass.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "value_zeroing")
        >>> m.top(3)
        >>> maps = lm.run(model, "The Eiffel Tower is in the city of", ["attention", "value_zeroing"])
        >>> maps.compare()

    Args:
        model: A HookedTransformer, HookedEncoder, HookedEncoderDecoder or TransformerBridge. It is not
            changed.
        prompt: A string, or tokens `[pos]` or `[1, pos]`; (source, target) for an encoder-decoder; a pair of
            strings for a BERT; chat messages; or the output of a tokenizer. A string is read as
            TransformerLens reads it, with the tokenizer's special tokens.
        methods: A name ("attention", "value_zeroing"), a method with its parameters
            (`lm.methods.ValueZeroing(metric="euclidean")`), or several of these. `lm.METHODS` lists the names
            and classes; a class, or the name of one, is the method with its defaults.
        cache: The `ActivationCache` of this prompt alone, as `model.run_with_cache(tokens)` returns it:
            `lm.run(model, tokens, "attention", cache=cache)`. The maps are computed from it instead of a
            clean pass, without predictions; what hooks changed in its pass is part of maps of weights.
            Methods that run the model themselves (for a target, a gradient or a replay) raise an error.
        tokens: Another name for `prompt`, beside `cache`.
        queries: The positions of the rows to compute: a number, a text of the prompt (" Italy", all of its
            tokens; `MixingMap.positions` explains how it is found), a slice, or several of these. Negative
            numbers count from the end of the prompt. None: all.
        layers: The layers to compute: a number, several numbers or a slice. None: all layers with attention;
            `m.layers` lists them.
        part: The part of an encoder-decoder: "encoder" (default), "decoder", or "cross" (the decoder's
            cross-attention, with the target's tokens as queries and the source's as keys). "all": these
            three. "joint", for input maps by gradients and occlusion: the target's tokens are the queries,
            and the source's and then the target's tokens are the keys.
        engine: "auto": the fastest engine that the verification allows. For methods that have both, "hooks"
            (by intervention) or "algebra" (in closed form).
        max_memory: The number of bytes for the temporary tensors of one chunk. None: no bound.
        residual_shares: Whether to measure the share of each row that is its own residual stream, for
            `lm.rollout(m, residual="measured")`. It is not measured for maps that contain the residual, nor
            for cross-attention.
        progress: True: show bars over blocks and over the passes of a method. False: warn before a method
            that takes longer than about 10 seconds. None: neither.
        prepend_bos: As in TransformerLens, for strings of causal decoders only.
        attention_mask: A mask `[pos]` or `[1, pos]`, 0 for padding, which is removed.
        inputs: Further inputs of the model by name (`token_type_ids=`, `decoder_input_ids=`).

    Returns:
        A `MixingMap` for one method, or `Maps`, a mapping of them by name, for several. Its scores are
        `[layer, query, key]`, or `[layer, head, query, key]` with heads, raw, in the unit of the method. If
        two methods have the same name, their names contain their parameters. With part="all", `Maps` with
        the names "encoder", "decoder" and "cross" for one method, each from a pass of its own; for several
        methods a dict of `Maps` with these keys.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has a wrong value.
        UnsupportedModelError: If the model, or the method on this model, failed the verification. The
            message has the reason.
    """
    _check_flags(residual_shares, progress)
    prompt = _choose_prompt(prompt, tokens, cache)
    selection: dict[str, Any] = {
        "queries": queries,
        "layers": layers,
        "engine": engine,
        "max_memory": max_memory,
        "progress": progress,
        "cache": cache,
    }
    if part == "all":
        options = selection | {"prepend_bos": prepend_bos, "attention_mask": attention_mask}
        options |= {"residual_shares": residual_shares, **inputs}
        named, parts = cast(Any, methods), parts_of(model)
        return _join_parts({each: run(model, prompt, named, part=each, **options) for each in parts})
    session, is_single = _make_session(model, methods, part, residual_shares, selection)
    _check_inputs(inputs, session, run)
    read = session.read(prompt, prepend_bos=prepend_bos, attention_mask=attention_mask, inputs=inputs)
    maps = map_prompts(session, [read], prepend_bos=prepend_bos, progress=bool(progress))[0]
    return next(iter(maps.values())) if is_single else Maps(maps)


def plan(
    model: TransformerLensModel,
    prompt: Any,
    methods: MethodLike | Sequence[MethodLike],
    *,
    queries: Positions | None = None,
    layers: Selection | None = None,
    part: str | None = None,
    engine: str = "auto",
    max_memory: int | None = None,
    residual_shares: bool = False,
    prepend_bos: bool | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> PassPlan:
    """Return what the clean pass of `run` would do, without the maps; `print` shows it.

    A new model is verified first. The arguments and errors are those of `run`, except that there is a plan
    for each part of an encoder-decoder, and so none for part="all".
    """
    selection: dict[str, Any] = {"queries": queries, "layers": layers, "engine": engine}
    selection["max_memory"] = max_memory
    session, _ = _make_session(model, methods, part, residual_shares, selection)
    _check_inputs(inputs, session, run)
    read = session.read(prompt, prepend_bos=prepend_bos, attention_mask=attention_mask, inputs=inputs)
    return session.plan_prompts([read])


@overload
def run_many(
    model: TransformerLensModel,
    prompts: Iterable[Any],
    methods: MethodLike,
    *,
    part: Literal["all"],
    **options: Any,
) -> Iterator[Maps]: ...
@overload
def run_many(
    model: TransformerLensModel,
    prompts: Iterable[Any],
    methods: Sequence[MethodLike],
    *,
    part: Literal["all"],
    **options: Any,
) -> Iterator[dict[str, Maps]]: ...
@overload
def run_many(
    model: TransformerLensModel, prompts: Iterable[Any], methods: MethodLike, **options: Any
) -> Iterator[MixingMap]: ...
@overload
def run_many(
    model: TransformerLensModel, prompts: Iterable[Any], methods: Sequence[MethodLike], **options: Any
) -> Iterator[Maps]: ...
def run_many(
    model: TransformerLensModel,
    prompts: Iterable[Any],
    methods: MethodLike | Sequence[MethodLike],
    *,
    batch_size: int = 16,
    queries: Positions | None = None,
    layers: Selection | None = None,
    part: str | None = None,
    engine: str = "auto",
    max_memory: int | None = None,
    residual_shares: bool = False,
    progress: bool | None = False,
    prepend_bos: bool | None = None,
    attention_mask: Tensor | None = None,
    padding_side: PaddingSide = "right",
    **inputs: Any,
) -> Iterator[Result]:
    """Yield the maps of many prompts, in the order of the prompts, computed in batches.

        >>> prompts = ["The Eiffel Tower is in the city of", "Anna lives in Rome. Anna lives in"]
        >>> for m in lm.run_many(model, prompts, "value_zeroing", queries=[-1]):
        ...     print(m.top(1))

    Padding never affects a map: the maps of a prompt are the same as from `run`. A model runs its prompts one
    by one if it does not mask padding, or if its rotary angles depend on the longest prompt.

    Args:
        model: The model, as in `run`.
        prompts: Several prompts of the kinds that `run` accepts, or an open file with a prompt on each line;
            a padded tensor `[batch, pos]` with `attention_mask`; or the output of a tokenizer for several
            prompts with `padding=True`.
        methods: The methods, as in `run`.
        batch_size: The most prompts per clean pass. If `prompts` has a length, as a list has, prompts of
            similar length are run together.
        queries: The positions of the rows to compute, as in `run`.
        layers: The layers to compute, as in `run`.
        part: The part of an encoder-decoder, as in `run`.
        engine: The engine, as in `run`.
        max_memory: The number of bytes for the temporary tensors of one chunk, as in `run`.
        residual_shares: Whether to measure residual shares, as in `run`.
        progress: As in `run`, with a bar over the prompts.
        prepend_bos: As in `run`.
        attention_mask: A mask `[batch, pos]` for a padded tensor of prompts.
        padding_side: The side on which to pad. "right" works for every model.
        inputs: Further inputs of the model by name, with one entry per prompt.

    Yields:
        For each prompt, the result of `run`.

    Raises:
        TypeError: If an argument or a prompt has a wrong type. The message names the prompt, and the maps of
            the prompts before it are yielded first.
        ValueError: If an argument or a prompt has a wrong value, in the same way.
        UnsupportedModelError: As in `run`.
    """
    from lens_mix.inputs import read_several

    if isinstance(prompts, Mapping) and reads_features(model):
        from lens_mix._inputs.features import find_feature_name

        attention_mask = prompts.get("attention_mask") if attention_mask is None else attention_mask
        # A processor returns one tensor for several pictures, whose first axis is the prompts.
        prompts = prompts[find_feature_name(model)]
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        prompts, attention_mask, inputs = read_encoding(prompts, attention_mask, inputs)
    prompts = read_several(prompts, "run")
    batch_size = check_whole_number("batch_size", batch_size, 1)
    check_choice("padding_side", padding_side, ("left", "right"))
    _check_flags(residual_shares, progress)
    selection: dict[str, Any] = {
        "queries": queries,
        "layers": layers,
        "engine": engine,
        "max_memory": max_memory,
        "progress": progress,
    }
    if part == "all":
        options = selection | {"prepend_bos": prepend_bos, "attention_mask": attention_mask}
        options |= {"residual_shares": residual_shares, "padding_side": padding_side, **inputs}
        return _run_all_parts(model, prompts, methods, {**options, "batch_size": batch_size})
    session, is_single = _make_session(model, methods, part, residual_shares, selection)
    _check_inputs(inputs, session, run_many)
    if padding_side == "left":
        _check_left_padding(session.lens)

    def read(index: int, prompt: Any) -> Prompt:
        try:
            mask = None if attention_mask is None else _select_entry(attention_mask, index, "attention_mask")
            own_inputs = {name: _select_entry(value, index, name) for name, value in inputs.items()}
            return session.read(prompt, prepend_bos=prepend_bos, attention_mask=mask, inputs=own_inputs)
        except (TypeError, ValueError) as problem:
            raise type(problem)(f"prompt {index}: {problem}") from problem

    all_inputs = {"attention_mask": attention_mask, **inputs}
    # For a stream the number of prompts is known at its end only, so this check is made there again.
    if isinstance(prompts, Sized):
        _check_entry_counts(all_inputs, len(prompts))

    # This generator is separate, so that `run_many` raises errors about its arguments when it is called.
    def stream() -> Iterator[Result]:
        count = 0
        numbered = enumerate(prompts)
        problem: Exception | None = None
        total = len(prompts) if isinstance(prompts, Sized) else None
        left = _PromptsLeft(session, total)
        # A stream of prompts is read one batch at a time, because its next prompt may depend on a map.
        n_read = batch_size if total is None else _BATCHES_GROUPED * batch_size
        with tqdm(total=total, disable=not progress, desc="prompts") as bar:
            while problem is None:
                next_prompts, problem = _read_until_problem(numbered, n_read, read)
                if not next_prompts:
                    break
                count += len(next_prompts)
                for some in _split_by_memory(next_prompts, batch_size):
                    groups = [list(range(len(some)))] if total is None else group_by_length(some, batch_size)
                    # Groups of similar length end in another order than that of the prompts, in which maps
                    # are yielded.
                    finished: dict[int, Any] = {}
                    next_index = 0
                    for group in groups:
                        indices = iter(group)
                        for batch in session.batches([some[index] for index in group], padding_side):
                            started = time.perf_counter()
                            found = map_prompts(session, batch, padding_side, prepend_bos=prepend_bos)
                            left.take(len(found), time.perf_counter() - started)
                            bar.update(len(found))
                            finished |= {next(indices): maps for maps in found}
                            while next_index in finished:
                                maps = finished.pop(next_index)
                                next_index += 1
                                yield next(iter(maps.values())) if is_single else Maps(maps)
        if problem is not None:
            raise problem
        _check_entry_counts(all_inputs, count)

    return stream()


class _PromptsLeft:
    """The prompts of a call that are not mapped yet; says once that they take long.

    Args:
        session: The session.
        count: The number of all prompts. None: it is not known, and nothing is said.
    """

    def __init__(self, session: Session, count: int | None) -> None:
        self._session, self._count, self._n_batches = session, count, 0

    def take(self, count: int, seconds: float) -> None:
        """Take the prompts of a batch off, which took so long."""
        if self._count is None:
            return
        self._count, self._n_batches = self._count - count, self._n_batches + 1
        # The first batch may also verify the model.
        if self._n_batches == 2 and self._count > 0:
            expected = seconds / count * self._count
            time_left = f"about {describe_seconds(expected)}, measured on the second batch"
            sentence = f"the other {write_count(self._count, 'prompt')} take {time_left}"
            self._session.effort.announce("prompts", expected, sentence)


def _split_by_memory(prompts: list[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """Yield consecutive prompts that may be grouped by length: fewer long ones, whose maps wait in memory."""
    longest = max(
        max(len(prompt.tokens), 0 if prompt.target is None else len(prompt.target)) for prompt in prompts
    )
    # A map has a number for each pair of tokens.
    size = batch_size * max(1, _MOST_WAITING // (batch_size * longest**2))
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def _check_flags(residual_shares: Any, progress: Any) -> None:
    check_flags(residual_shares=residual_shares)
    if progress is not None:
        check_flags(progress=progress)


def _choose_prompt(prompt: Any, tokens: Any, cache: Any) -> Any:
    """Return the prompt, which `run` also takes as `tokens` beside a cache."""
    if tokens is None:
        if prompt is None and cache is not None:
            raise TypeError("prompt: expected that of the cache beside it, got None; write tokens=tokens")
        return prompt
    if prompt is not None:
        raise TypeError("tokens: expected the prompt once, got prompt and tokens; leave one of them out")
    if cache is None:
        raise TypeError(
            "tokens: expected beside cache= only; the prompt comes second: lm.run(model, tokens, methods)"
        )
    return tokens


def _make_session(
    model: TransformerLensModel,
    methods: Any,
    part: str | None,
    residual_shares: bool,
    selection: dict[str, Any],
) -> tuple[Session, bool]:
    """Return the session of a run, and whether a single method was given."""
    if part is not None:
        with LibraryErrors(model):
            # A `Lens` raises this error too, but does not name "all", which only `run` and `run_many` take.
            choose_stack(cast(Any, model), part, others=("all",))
    labeled, is_single = read_methods(methods)
    # The measured residual has an engine of its own, whatever engine is asked for.
    selection["engine"] = dict.fromkeys(labeled, selection["engine"])
    # In cross-attention no key is the query's own position, so that a row has no share of its own residual.
    labeled |= find_measuring_method(labeled) if residual_shares and part != "cross" else {}
    return Session(model, labeled, part=part, **selection), is_single


def _run_all_parts(
    model: TransformerLensModel, prompts: Iterable[Any], methods: Any, options: Mapping[str, Any]
) -> Iterator[Result]:
    """Yield the maps of all parts for each prompt. A stream of prompts is read once."""
    parts = parts_of(model)
    is_sized = isinstance(prompts, Sized)
    copies: Sequence[Iterable[Any]] = (
        [prompts] * len(parts) if is_sized else itertools.tee(prompts, len(parts))
    )
    # Each part has a session of its own, because a verification and its engines are those of one stack.
    streams = [
        run_many(model, copy, methods, part=part, **options) for part, copy in zip(parts, copies, strict=True)
    ]
    return (_join_parts(dict(zip(parts, maps, strict=True))) for maps in zip(*streams, strict=True))


def _join_parts(parts: Mapping[str, Any]) -> Maps | dict[str, Maps]:
    """Return the results of all parts: `Maps` if each is a single map."""
    is_single = all(isinstance(each, MixingMap) for each in parts.values())
    return Maps(parts) if is_single else dict(parts)


def _read_until_problem(
    numbered: Iterator[tuple[int, Any]], count: int, read: Callable[[int, Any], Prompt]
) -> tuple[list[Prompt], Exception | None]:
    """Return up to `count` next prompts, and the error of the first prompt that cannot be read."""
    prompts: list[Prompt] = []
    try:
        for index, prompt in itertools.islice(numbered, count):
            prompts.append(read(index, prompt))
    except Exception as problem:
        # The error is returned, so that the maps of the prompts before it are computed first.
        return prompts, problem
    return prompts, None


def _select_entry(values: Any, index: int, name: str) -> Any:
    """Return the entry of an input for one prompt."""
    is_indexed = hasattr(values, "__getitem__") and hasattr(values, "__len__")
    if not is_indexed or getattr(values, "ndim", 1) == 0:
        raise TypeError(
            f"{name}: expected one entry per prompt, because run_many has no option of this name and passes "
            f"it to the model, got {type(values).__name__}"
        )
    if index >= len(values):
        raise ValueError(f"{name}: expected one entry per prompt, got {len(values)} entries")
    return values[index]


def _check_entry_counts(inputs: Mapping[str, Any], count: int) -> None:
    """Raise a ValueError if an input has more entries than there are prompts."""
    for name, value in inputs.items():
        if isinstance(value, Sized) and getattr(value, "ndim", 1) != 0 and len(value) > count:
            raise ValueError(f"{name}: expected one entry per prompt ({count}), got {len(value)} entries")


def read_methods(methods: MethodLike | Sequence[MethodLike]) -> tuple[dict[str, Method], bool]:
    """Return the methods by their labels, and whether a single method was given, not a list.

    Raises:
        TypeError: If an item is neither a name nor a method.
        ValueError: If there is no method of a name, no method at all, or one method twice.
    """
    is_single = isinstance(methods, (str, Method, type))
    # The keys of a mapping would be read as names, and its values would be ignored silently.
    if not is_single and (isinstance(methods, (bytes, Mapping)) or not isinstance(methods, Iterable)):
        raise TypeError(
            "methods: expected a name, a method (with its parameters), or several, got "
            f"{describe_value(methods)}"
        )
    items: list[Any] = [methods] if isinstance(methods, (str, Method, type)) else list(methods)
    if not items:
        raise ValueError("methods: expected at least one method, got none")
    read = [_read_method(item) for item in items]
    names = [method.name for method in read]
    # The result has the plain names as keys, unless one method was given with several sets of parameters.
    labels = [_make_label(method) if names.count(method.name) > 1 else method.name for method in read]
    if len(set(labels)) != len(labels):
        raise ValueError(f"methods: expected different methods, got one twice: {labels}")
    return dict(zip(labels, read, strict=True)), is_single


def _read_method(method: object) -> Method:
    """Return a method that is given as itself, or by its name or class, which mean its defaults."""
    if isinstance(method, str):
        return find_method(method)()
    if isinstance(method, type):
        check_class(method, "methods")
        return cast(type[Method], method)()
    if not isinstance(method, Method):
        raise TypeError(f"methods: expected a name or a method, got {describe_value(method)}")
    check_attributes(type(method))
    return method


def _check_inputs(inputs: Mapping[str, Any], session: Session, function: Callable[..., Any]) -> None:
    """Raise an error for a keyword that is an input of the model only because nothing else has its name.

    Args:
        inputs: The keywords that are not arguments of the function.
        session: The model and the methods of the run.
        function: The function that the user called.

    Raises:
        TypeError: If a keyword is a parameter of a method, or nearly an argument of the function. The error
            says what to write.
    """
    taken = further_inputs(session.lens.model, session.lens.model_class)
    other = run_many if function is run else run
    named = [
        each.name
        for each in inspect.signature(other).parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    for name, value in inputs.items():
        no_argument = f"{name}: {function.__name__} has no argument of this name"
        # Models of transformers may have an input of such a name too, as `cache`.
        if name in named:
            raise TypeError(f"{no_argument}; {other.__name__} has it")
        if name in taken:
            continue
        having = [method for method in session.methods.values() if name in _field_names(type(method))]
        if having:
            raise TypeError(
                f"{no_argument}; it is a parameter of {type(having[0]).__name__}: write "
                f"{_write_call(function, having[0], name, value)}"
            )
        # A tensor is meant as an input of the model, whose forward pass raises an error with the inputs that
        # it takes.
        if hasattr(value, "shape"):
            continue
        others = [method for method in METHODS.values() if name in _field_names(method)]
        close = difflib.get_close_matches(name, inspect.signature(function).parameters, 1)
        # A parameter of another method is spelled correctly, even if it is similar to an argument.
        if close and not others:
            raise TypeError(f"{no_argument}; did you mean {close[0]}=?")
        if others:
            classes = ", ".join(type(method).__name__ for method in session.methods.values())
            raise TypeError(
                f"{no_argument}, nor has {classes}. Methods that have it: "
                f"{', '.join(method.__name__ for method in others)}; write, for example, "
                f"{_write_call(function, others[0](), name, value)}"
            )


def _field_names(method: type[Method]) -> list[str]:
    return [field.name for field in dataclasses.fields(method)]


def _write_call(function: Callable[..., Any], method: Method, name: str, value: Any) -> str:
    """Return the call that gives a method one more parameter, as the user would write it."""
    kind = type(method)
    # A class of the user's own is in a module of theirs, whose name is unknown here.
    prefix = "lm.methods." if METHODS.get(kind.name) is kind else ""
    others = "..., " if _make_label(method) != method.name else ""
    prompts = "prompts" if "prompts" in inspect.signature(function).parameters else "prompt"
    changed = f"{prefix}{kind.__name__}({others}{name}={describe_value(value)})"
    return f"lm.{function.__name__}(model, {prompts}, {changed})"


def _make_label(method: Method) -> str:
    """Return the method's name, with the parameters that are not at their defaults."""
    defaults = type(method)().parameters()
    changed = {name: value for name, value in method.parameters().items() if value != defaults[name]}
    text = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    return f"{method.name}({text})" if text else method.name


def _check_left_padding(lens: Lens) -> None:
    embedding = getattr(lens.model.cfg, "positional_embedding_type", None)
    if not is_causal_model(lens.model, lens.model_class):
        raise UnsupportedModelError(
            "padding_side: expected 'right', because an encoder counts positions from the first token, "
            f"padding included (position embedding {embedding!r}), got 'left'"
        )
