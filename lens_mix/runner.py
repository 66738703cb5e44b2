"""The runner: what was asked of a model, mapped prompt by prompt or batch by batch."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal, overload

from torch import Tensor
from tqdm.auto import tqdm

from lens_mix.arguments import flags, one_of, shown, whole_number
from lens_mix.lens.batches import PaddingSide, Prompt
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.lens.parts import parts_of
from lens_mix.lens.prompts import is_causal_model, of_encoding
from lens_mix.lens.rows import Selection
from lens_mix.lens.verification.support import Support, any_tokens, support_table
from lens_mix.map_prompts import map_prompts, measuring
from lens_mix.maps import MixingMap
from lens_mix.method import Method
from lens_mix.registry import all_methods, check_attributes
from lens_mix.session import Session

MethodLike = str | Method


@overload
def run(
    model: TransformerLensModel, prompt: Any, methods: Any, *, part: Literal["all"], **options: Any
) -> dict[str, Any]: ...
@overload
def run(model: TransformerLensModel, prompt: Any, methods: MethodLike, **options: Any) -> MixingMap: ...
@overload
def run(
    model: TransformerLensModel, prompt: Any, methods: Sequence[MethodLike], **options: Any
) -> dict[str, MixingMap]: ...
def run(
    model: TransformerLensModel,
    prompt: Any,
    methods: MethodLike | Sequence[MethodLike],
    *,
    queries: Selection | None = None,
    layers: Selection | None = None,
    part: str | None = None,
    engine: str = "auto",
    max_memory: int | None = None,
    residual_shares: bool = False,
    progress: bool | None = False,
    prepend_bos: bool | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> Any:
    """Map one prompt with one method or several, from one clean pass.

    Args:
        model: HookedTransformer, HookedEncoder, HookedEncoderDecoder or TransformerBridge; unchanged.
        prompt: a string, tokens [pos] or [1, pos]; (source, target) for an encoder-decoder; a pair of strings
            for a BERT; chat messages; what a tokenizer returns. `lens_mix.lens.prompts.read_prompt` says
            which tokens a string becomes.
        methods: a name ("attention", "value_zeroing"), a method (`lm.ValueZeroing(metric="euclidean")`),
            or several of these.
        queries: positions of the rows to make and keep, as a number, numbers or a slice; negative numbers
            count from the prompt's end. None: all.
        layers: the layers to make and keep, likewise. None: all that have attention; `m.layers` names them.
        part: of an encoder-decoder "encoder" (default), "decoder", "cross" (the decoder's cross-attention:
            queries are the target's tokens, keys the source's), "all" three, or, for input maps by gradients
            and occlusion, "joint" (queries are the target's tokens, keys the source's and then the target's).
        engine: "auto", or "hooks" / "algebra" for methods that have both.
        max_memory: bytes for the temporary tensors of one step.
        residual_shares: measure how much of each row is its own residual stream, for `lm.rollout(m,
            residual="measured")`; maps that hold the residual need none, and cross-attention has none.
        progress: True: show bars over the blocks and over a method's passes; False: warn before a method that
            takes more than about 20 forward passes; None: neither.
        prepend_bos: as in TransformerLens; strings of causal decoders only.
        attention_mask: [pos] or [1, pos], 0 for padding, which is cut away.
        inputs: further model inputs by name (`token_type_ids=`, `decoder_input_ids=`).

    Returns:
        A `MixingMap` for one method, a dict of them by name for several. Two methods of the same name get
        their parameters in the key. With part="all" a dict {"encoder", "decoder", "cross"} of what each
        part alone gives, from a pass per part.

    Raises:
        TypeError, ValueError: bad input, naming what was expected and what was got.
        UnsupportedModelError: the model or the method on it can't be trusted, with the reason.
    """
    _check_flags(residual_shares, progress)
    asked: dict[str, Any] = {"queries": queries, "layers": layers, "engine": engine, "max_memory": max_memory}
    if part == "all":
        options = asked | {"progress": progress, "prepend_bos": prepend_bos, "attention_mask": attention_mask}
        options |= {"residual_shares": residual_shares, **inputs}
        return {each: run(model, prompt, methods, part=each, **options) for each in parts_of(model)}
    session, single = _session(model, methods, part, residual_shares, asked | {"progress": progress})
    read = session.read(prompt, prepend_bos=prepend_bos, attention_mask=attention_mask, inputs=inputs)
    maps = map_prompts(session, [read], prepend_bos=prepend_bos, progress=bool(progress))[0]
    return next(iter(maps.values())) if single else maps


@overload
def run_many(
    model: TransformerLensModel, prompts: Iterable[Any], methods: Any, *, part: Literal["all"], **options: Any
) -> Iterator[dict[str, Any]]: ...
@overload
def run_many(
    model: TransformerLensModel, prompts: Iterable[Any], methods: MethodLike, **options: Any
) -> Iterator[MixingMap]: ...
@overload
def run_many(
    model: TransformerLensModel, prompts: Iterable[Any], methods: Sequence[MethodLike], **options: Any
) -> Iterator[dict[str, MixingMap]]: ...
def run_many(
    model: TransformerLensModel,
    prompts: Iterable[Any],
    methods: MethodLike | Sequence[MethodLike],
    *,
    batch_size: int = 16,
    queries: Selection | None = None,
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
) -> Iterator[Any]:
    """Map many prompts, batch by batch; yields what `run` returns, in the order of the prompts.

    Padding never reaches a map: each prompt gets what it gets alone. A model that does not mask padding
    gets its prompts one by one, as does one whose rotary angles depend on the longest prompt.

    Args:
        model, methods, queries, layers, part, engine, max_memory, residual_shares, prepend_bos: as in
            `run`.
        prompts: what `run` takes, several of it; one padded tensor [batch, pos] with `attention_mask`; what a
            tokenizer returns for several prompts with `padding=True`.
        batch_size: prompts per clean pass.
        progress: as in `run`, with a bar over the prompts.
        attention_mask: [batch, pos] for a padded tensor of prompts.
        padding_side: where the runner pads; "right" is right for every model.
        inputs: further model inputs by name, one row per prompt.

    Raises:
        TypeError, ValueError: bad input; the message names the prompt. The maps of the prompts before it
            come first.
        UnsupportedModelError: as in `run`.
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        prompts, attention_mask, inputs = of_encoding(prompts, attention_mask, inputs)
    alone = isinstance(prompts, (str, bytes, Mapping)) or getattr(prompts, "ndim", 1) == 0
    if alone or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: expected several prompts, got {shown(prompts)}; use run for one prompt")
    batch_size = whole_number("batch_size", batch_size, 1)
    one_of("padding_side", padding_side, ("left", "right"))
    _check_flags(residual_shares, progress)
    asked: dict[str, Any] = {"queries": queries, "layers": layers, "engine": engine, "max_memory": max_memory}
    if part == "all":
        options = asked | {"progress": progress, "prepend_bos": prepend_bos, "attention_mask": attention_mask}
        options |= {"residual_shares": residual_shares, "padding_side": padding_side, **inputs}
        return _all_parts(model, prompts, methods, {**options, "batch_size": batch_size})
    session, single = _session(model, methods, part, residual_shares, asked | {"progress": progress})
    if padding_side == "left":
        _require_right_padding(session.lens)

    def read(number: int, prompt: Any) -> Prompt:
        try:
            mask = None if attention_mask is None else _row(attention_mask, number, "attention_mask")
            given = {name: _row(value, number, name) for name, value in inputs.items()}
            return session.read(prompt, prepend_bos=prepend_bos, attention_mask=mask, inputs=given)
        except (TypeError, ValueError) as problem:
            raise type(problem)(f"prompt {number}: {problem}") from problem

    rows = {"attention_mask": attention_mask, **inputs}
    if isinstance(prompts, Sized):
        _require_no_spare_rows(rows, len(prompts))

    # `run_many` itself is no generator: what is wrong with its arguments is said at the call.
    def stream() -> Iterator[Any]:
        count = 0
        numbered = enumerate(prompts)
        problem: Exception | None = None
        total = len(prompts) if isinstance(prompts, Sized) else None
        with tqdm(total=total, disable=not progress, desc="prompts") as bar:
            while problem is None:
                chunk, problem = _until_problem(numbered, batch_size, read)
                if not chunk:
                    break
                count += len(chunk)
                for batch in session.batches(chunk, padding_side):
                    for maps in map_prompts(session, batch, padding_side, prepend_bos=prepend_bos):
                        bar.update()
                        yield next(iter(maps.values())) if single else maps
        if problem is not None:
            raise problem
        _require_no_spare_rows(rows, count)

    return stream()


def _check_flags(residual_shares: Any, progress: Any) -> None:
    flags(residual_shares=residual_shares)
    if progress is not None:
        flags(progress=progress)


def _session(
    model: TransformerLensModel, methods: Any, part: str | None, residual_shares: bool, asked: dict[str, Any]
) -> tuple[Session, bool]:
    """What is asked of the model, and whether of a single method."""
    labelled, single = read_methods(methods)
    # The measured residual is computed in its own way, whatever engine the methods are asked for.
    asked["engine"] = dict.fromkeys(labelled, asked["engine"])
    labelled |= measuring(labelled) if residual_shares and part != "cross" else {}
    return Session(model, labelled, part=part, **asked), single


def _all_parts(
    model: TransformerLensModel, prompts: Iterable[Any], methods: Any, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """`run_many` of every part, side by side; a stream of prompts is read once."""
    parts = parts_of(model)
    sized = isinstance(prompts, Sized)
    copies: Sequence[Iterable[Any]] = [prompts] * len(parts) if sized else itertools.tee(prompts, len(parts))
    streams = [
        run_many(model, copy, methods, part=part, **options) for part, copy in zip(parts, copies, strict=True)
    ]
    return (dict(zip(parts, maps, strict=True)) for maps in zip(*streams, strict=True))


def _until_problem(
    numbered: Iterator[tuple[int, Any]], count: int, read: Callable[[int, Any], Prompt]
) -> tuple[list[Prompt], Exception | None]:
    """The next prompts, up to `count` or to the first that can't be read, and why it can't."""
    prompts: list[Prompt] = []
    try:
        for number, prompt in itertools.islice(numbered, count):
            prompts.append(read(number, prompt))
    except Exception as problem:
        # Whatever it is, the maps of the prompts before it are finished first.
        return prompts, problem
    return prompts, None


def _row(values: Any, number: int, name: str) -> Any:
    indexed = hasattr(values, "__getitem__") and hasattr(values, "__len__")
    if not indexed or getattr(values, "ndim", 1) == 0:
        raise TypeError(
            f"{name}: expected one row per prompt, got {type(values).__name__}; "
            "run_many has no option of that name"
        )
    if number >= len(values):
        raise ValueError(f"{name}: expected a row for every prompt, got {len(values)} rows")
    return values[number]


def _require_no_spare_rows(rows: Mapping[str, Any], count: int) -> None:
    for name, value in rows.items():
        if isinstance(value, Sized) and getattr(value, "ndim", 1) != 0 and len(value) > count:
            raise ValueError(f"{name}: expected one row per prompt ({count}), got {len(value)} rows")


def support(model: TransformerLensModel, *, part: str | None = None) -> Support:
    """Table method x model: ok with the engine that "auto" would take, or the reason why not.

    Args:
        model: any TransformerLens model.
        part: "encoder" (default), "decoder", "cross" or "joint" of an encoder-decoder.
    """
    methods = all_methods()
    table = support_table(model, [method() for method in methods.values()], part)
    rows = []
    for name, engine, reason in table:
        if engine is not None and "position_ids" in methods[name].needs:
            # Only a run tells whether it can run.
            try:
                run(model, any_tokens(model), name, part=part, queries=[-1], progress=None)
            except UnsupportedModelError as problem:
                engine, reason = None, str(problem)
        rows.append((name, engine, reason))
    return dataclasses.replace(table, rows=tuple(rows))


def read_methods(methods: MethodLike | Sequence[MethodLike]) -> tuple[dict[str, Method], bool]:
    """The methods by their labels, and whether a single one was asked for.

    Raises:
        TypeError, ValueError: neither names nor methods; none; one twice.
    """
    single = isinstance(methods, (str, Method))
    if not single and (isinstance(methods, (type, bytes, Mapping)) or not isinstance(methods, Iterable)):
        name = getattr(methods, "__name__", "")
        got = f"the class {name}; write {name}()" if isinstance(methods, type) else type(methods).__name__
        raise TypeError(f"methods: expected a name, a method (with its parameters), or several; got {got}")
    asked: list[Any] = [methods] if isinstance(methods, (str, Method)) else list(methods)
    if not asked:
        raise ValueError("methods: expected at least one method, got none")
    read = [_read_method(method) for method in asked]
    names = [method.name for method in read]
    labels = [_label(method) if names.count(method.name) > 1 else method.name for method in read]
    if len(set(labels)) != len(labels):
        raise ValueError(f"methods: expected different methods, got one twice: {labels}")
    return dict(zip(labels, read, strict=True)), single


def _read_method(method: object) -> Method:
    if isinstance(method, str):
        known = all_methods()
        if method not in known:
            near = difflib.get_close_matches(method, known, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"methods: expected one of {sorted(known)}, got {method!r}{meant}")
        return known[method]()
    if not isinstance(method, Method):
        meant = f"the class {method.__name__}; write {method.__name__}()" if isinstance(method, type) else ""
        raise TypeError(f"methods: expected a name or a method, got {meant or type(method).__name__}")
    check_attributes(type(method))
    return method


def _label(method: Method) -> str:
    default = type(method)().parameters()
    changed = {name: value for name, value in method.parameters().items() if value != default[name]}
    inside = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    return f"{method.name}({inside})" if inside else method.name


def _require_right_padding(lens: Lens) -> None:
    embedding = getattr(lens.model.cfg, "positional_embedding_type", None)
    if not is_causal_model(lens.model, lens.model_class):
        raise UnsupportedModelError(
            "padding_side='left': an encoder counts positions from the first token, padding included "
            f"(position embedding {embedding!r}); expected padding_side='right'"
        )
