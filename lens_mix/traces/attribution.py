"""Compute what written tokens came from with any method: the rows of spans, and the rows of single tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm
from typing_extensions import override

from lens_mix import targets
from lens_mix._care.raw_errors import LibraryErrors
from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix._inputs.batches import Prompt, pad
from lens_mix._inputs.prompts import pad_token
from lens_mix._model.model import Lens
from lens_mix._model.unembedding import row_at, unembedding_at
from lens_mix._passes.predictions import name_token, read_predictions
from lens_mix.aggregation.candidates import Aggregation, aggregations_by_name, join_layers
from lens_mix.arguments import check_instance, describe_value
from lens_mix.maps import MixingMap
from lens_mix.maps.explained import Explained
from lens_mix.method import Method
from lens_mix.runner import run
from lens_mix.traces.reading import Reading

# As many tokens as this run at once if each row has a pass of its own.
_TOKENS_AT_ONCE = 1024
# These aggregations need no rows besides those of the written tokens.
_OF_ROWS = ("mean", "max", "upper half", "last")
# As many rows are read from one clean pass if the method reads its autograd graph. With more, the bar would
# hardly move; with fewer, more time would go into clean passes.
_ROWS_OF_A_GRAPH = 8
# Log probabilities of one model in two passes of different shapes differ by less, in nats.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
_ROUNDING_OF_HALF = 0.25


def _largest_over_layers(mixing_map: MixingMap) -> MixingMap:
    """Return the input map with the largest score of all layers and heads for each query and key."""
    scores = mixing_map.scores.flatten(0, -3).amax(0, keepdim=True)
    made = mixing_map.merge_heads().layer(-1) if mixing_map.has_heads else mixing_map.layer(-1)
    mask = mixing_map.visible().any(0) if mixing_map.mask is not None else None
    provenance = {**made.provenance, "aggregation": {"name": "max"}}
    return made.replace(scores=scores, mask=mask, kind="input", provenance=provenance)


def _aggregate(aggregation: Aggregation, mixing_map: MixingMap) -> MixingMap:
    """Return the input map that a function of the user's makes of layer maps.

    Raises:
        TypeError: If it makes something else.
    """
    made: Any = aggregation(mixing_map)
    if not isinstance(made, MixingMap) or made.kind != "input":
        raise TypeError(
            "aggregation: expected a function that returns an input map, such as lm.rollout, got "
            f"{describe_value(made)} from {aggregation!r}; a map of your own becomes an input map by "
            "m.replace(scores=..., kind='input')"
        )
    return made


def find_aggregation(aggregation: str | Aggregation | None) -> tuple[str, Aggregation]:
    """Return the name of an aggregation and the function.

    Args:
        aggregation: A name of `lens_mix.evaluate`, "max" (the largest score of all layers and heads), or a
            function from layer maps to an input map. None: "mean".

    Returns:
        The name and the function. A function of the user's has a name that no other aggregation has.

    Raises:
        TypeError: If it is neither a name nor a function.
        ValueError: If the name is unknown.
    """
    if aggregation is None:
        aggregation = "mean"
    if callable(aggregation):
        name = getattr(aggregation, "__name__", type(aggregation).__name__)
        return f"function {name}", functools.partial(_aggregate, aggregation)
    check_instance("aggregation", aggregation, str, "a name or a function")
    if aggregation == "max":
        return "max", _largest_over_layers
    try:
        return aggregation, aggregations_by_name([aggregation])[aggregation]
    except ValueError as problem:
        raise ValueError(
            f"aggregation: expected 'max' or a name of lm.evaluate, got {aggregation!r}; {problem}"
        ) from problem


@dataclasses.dataclass(frozen=True)
class _SpanRead(targets._Span):
    """A span that keeps the logits from which its clean value is computed.

    What the pass gives to each token of the span then needs no pass of its own.
    """

    logits: list[Tensor] = dataclasses.field(default_factory=list, repr=False, compare=False)

    @override
    def of_prompt(self, context: targets.Context) -> targets.TargetFunction:
        rows, output = self.rows_read(context.tokens), context.output[0]
        self.logits[:] = [output if len(output) == len(rows) else output[rows.start : rows.stop]]
        return super().of_prompt(context)


@dataclasses.dataclass(frozen=True)
class Explainer:
    """A method, with the aggregation of its layer maps, that explains what was written after a prompt.

    Attributes:
        model: The model.
        reading: The prompt and the written tokens.
        method: The method, which explains the written tokens (`Method.explain_next_tokens`).
        aggregation: The name of the aggregation and the function; None for methods that make input maps.
        options: Options of `lens_mix.run`.
        notes: The notes of the maps that were computed.
    """

    model: TransformerLensModel
    reading: Reading
    method: Method
    aggregation: tuple[str, Aggregation] | None
    options: dict[str, Any]
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the method, without its target, which is what was written."""
        return {name: value for name, value in self.method.parameters().items() if name != "target"}

    @property
    def name(self) -> str:
        """Return the name of the method, and that of the aggregation if there is one."""
        return self.method.name if self.aggregation is None else f"{self.method.name}, {self.aggregation[0]}"

    def explain_all(self) -> tuple[Float[Tensor, " key"], Float[Tensor, "written d_vocab"] | None]:
        """Return the scores of everything that was written, and the logits of its tokens if they are read."""
        logits: list[Tensor] = []
        scores = self.explain_span(0, self.reading.n_written, logits)
        return scores, logits[0] if logits else None

    def explain_span(
        self, start: int, stop: int, logits: list[Tensor] | None = None
    ) -> Float[Tensor, " key"]:
        """Return the scores of a written span, from token `start` to before `stop`, for all tokens before it.

        A method with a target explains the log probability of the whole span. For other methods the rows that
        predict the span's tokens are summed.

        Args:
            start: The index of its first token among the written tokens.
            stop: The index after its last token.
            logits: A list that gets the logits of the span's tokens, if a target reads them.
        """
        first = self.reading.n_prompt - self.reading.n_source
        rows = [self.reading.row(each) for each in range(start, stop)]
        if self.method.target is None or self.method.needs_one_position:
            return self._sum_rows(self._run(self.method, rows), rows)
        target = _SpanRead(first + start, first + stop, [] if logits is None else logits)
        method = self._with_target(target)
        if self.method.reads == "model":
            # A removed token of the span or after it changes the span by rounding only.
            return self._pad(self._run(method, [-1]).scores[-1, 0, : self.reading.n_prompt + stop - 1])
        return self._sum_rows(self._run(method, rows), rows)

    def explain_each(self) -> Float[Tensor, "written key"]:
        """Return the scores of each written token, one row per token, with a bar if it takes long."""
        rows = [self.reading.row(each) for each in range(self.reading.n_written)]
        if self.method.target is None:
            return self._select(self._run(self.method, rows), rows)
        reads_graph = self.method.clean_rules(()) is not None and not self.reading.n_source
        size = _ROWS_OF_A_GRAPH if reads_graph else max(1, _TOKENS_AT_ONCE // len(self.reading.tokens))
        size = size if self.method.reads == "model" else 1
        # The bar over the tokens is shown instead of a warning or a bar of each run.
        quiet = dataclasses.replace(self, options={**self.options, "progress": None})
        found = []
        with tqdm(total=len(rows), desc=f"{self.name}, written tokens", delay=2, leave=False) as bar:
            for start in range(0, len(rows), size):
                found.append(quiet._explain_rows(start, rows[start : start + size]))
                bar.update(len(found[-1]))
        return torch.cat(found)

    def _explain_rows(self, start: int, rows: list[int]) -> Float[Tensor, "row key"]:
        """Return the scores of neighboring written tokens, the first of which is token `start`."""
        if self.method.reads != "model":
            return torch.stack(
                [self.explain_span(start + each, start + each + 1) for each in range(len(rows))]
            )
        return self._select(self._run(self.method, rows), rows)

    @property
    def _part(self) -> str | None:
        """Return the part of the model that is mapped.

        Layer maps of an encoder-decoder are those of its cross-attention, which does not read written text.
        """
        part = self.reading.part
        return "cross" if part == "joint" and "joint" not in self.method.parts else part

    def _with_target(self, target: targets.Target) -> Method:
        return dataclasses.replace(self.method, target=target)  # type: ignore[call-arg]

    def _run(self, method: Method, rows: list[int]) -> MixingMap:
        """Return the input map of a method at given rows."""
        needs_all = self.aggregation is not None and self.aggregation[0] not in _OF_ROWS
        part = self._part
        options = {"part": part, "progress": None, **self.options}
        if self.aggregation is not None and "residual measured" in self.aggregation[0]:
            options["residual_shares"] = True
        options["queries"] = None if needs_all else rows
        mapped: MixingMap = run_reading(self.model, self.reading, method, **options)
        # Keys of cross-attention are the source's positions, and for some methods the residual stream.
        source = self.reading.n_source
        counts = {source, source + 1} if part == "cross" else {len(self.reading.tokens)}
        if len(mapped.key_tokens or mapped.tokens) not in counts:
            raise ValueError(
                f"method: expected one whose keys are the {len(self.reading.tokens)} tokens, got "
                f"{self.method!r}, whose keys are groups of them; group them by sources="
            )
        if self.aggregation is not None and mapped.kind != "input":
            mapped = self.aggregation[1](mapped)
        self.notes.extend(note for note in mapped.notes if note not in self.notes)
        return mapped

    def _select(self, mapped: MixingMap, rows: list[int]) -> Float[Tensor, "row key"]:
        """Return rows of an input map, with a key for every token of the reading."""
        scores = join_layers(mapped.merge_heads() if mapped.has_heads else mapped)
        found = torch.stack([self._pad(scores[mapped.row_index(row)]) for row in rows])
        source = self.reading.n_source
        if self._part == "cross" and scores.shape[-1] > source:
            # The residual stream is that of the row's own position.
            residual, found[:, source] = found[:, source].clone(), 0
            for number, row in enumerate(rows):
                found[number, source + row] = residual[number]
        return found

    def _sum_rows(self, mapped: MixingMap, rows: list[int]) -> Float[Tensor, " key"]:
        return self._select(mapped, rows).sum(0)

    def _pad(self, row: Float[Tensor, " read"]) -> Float[Tensor, " key"]:
        """Return a row with scores of 0 for tokens that are not keys of the map, on the CPU."""
        row = row.detach().cpu().to(torch.promote_types(row.dtype, torch.float32))
        return torch.nn.functional.pad(row, (0, len(self.reading.tokens) - len(row)))


def has_own_target(method: Method) -> bool:
    """Return whether a method has another target than the one that it has by default."""
    usual = {field.name: field.default_factory for field in dataclasses.fields(method)}.get("target")
    return callable(usual) and method.target != usual()


def explain_written(method: Method, reading: Reading, start: int, stop: int) -> Method:
    """Return a method that explains a written span, unless it has a target of its own."""
    if has_own_target(method):
        return method
    method = method.explain_next_tokens()
    if method.target is None or method.needs_one_position or method.reads == "model":
        return method
    first = reading.n_prompt - reading.n_source
    target = targets.span(first + start, first + stop)
    return dataclasses.replace(method, target=target)  # type: ignore[call-arg]


def run_reading(model: TransformerLensModel, reading: Reading, methods: Any, **options: Any) -> Any:
    """Return what `lens_mix.run` does for the prompt and what was written after it.

    Args:
        model: The model.
        reading: The prompt and the written tokens.
        methods: As in `lens_mix.run`.
        options: As in `lens_mix.run`.
    """
    prompt: Any = reading.prompt
    if prompt.target is not None:
        source = prompt.tokens if prompt.features is None else prompt.features
        return run(model, (source, prompt.target), methods, **options)
    return run(model, prompt.tokens, methods, **options, **prompt.inputs, **prompt.picture_inputs)


@dataclasses.dataclass(frozen=True)
class Written:
    """What a forward pass gives to written tokens.

    Attributes:
        log_probabilities: The log probability of each token, given all tokens before it, in nats.
        explained: What the model predicts in place of each token, and the token's log probability.
    """

    log_probabilities: Float[Tensor, " written"]
    explained: tuple[Explained, ...]


def rounding_of(lens: Lens) -> float:
    """Return the difference of two log probabilities that rounding explains, in nats."""
    return _ROUNDING.get(lens.dtype, _ROUNDING_OF_HALF)


def read_written(model: TransformerLensModel, reading: Reading, prompt: Prompt | None = None) -> Written:
    """Return the log probabilities and the predictions of the written tokens, from one forward pass.

    Args:
        model: The model.
        reading: The prompt and the written tokens.
        prompt: Another prompt with the same written tokens. None: that of the reading.
    """
    prompt = reading.prompt if prompt is None else prompt
    logits = read_logits(model, prompt, reading.n_written, reading.part)
    return describe_written(model, reading.ids[reading.n_prompt :], logits)


def read_logits(
    model: TransformerLensModel, prompt: Prompt, count: int, part: str | None
) -> Float[Tensor, "written d_vocab"]:
    """Return the logits that predict each of the last `count` tokens, from one forward pass.

    Args:
        model: The model.
        prompt: The prompt and, as its last tokens, what was written.
        count: The number of written tokens.
        part: "joint" for an encoder-decoder.
    """
    own = prompt.tokens if prompt.target is None else prompt.target
    first = len(own) - count - 1
    rows = torch.arange(first, first + count, device="cpu")[None]
    with LibraryErrors(model):
        lens = Lens(model, part)
        batch = pad([prompt], pad_token(lens.model), "right")
        # Gradients are off in this mode. After torch's own `no_grad`, a signal could leave them off.
        with lens.evaluation_mode():
            with unembedding_at(lens.model, rows) as narrowed:
                output = lens.forward(batch)
            logits = output if torch.is_tensor(output) else output.logits
            found: Tensor = logits[0] if narrowed else row_at(logits, rows)[0]
            return found


def describe_written(
    model: TransformerLensModel, written: Int[Tensor, " written"], logits: Float[Tensor, "written d_vocab"]
) -> Written:
    """Return the log probabilities and the predictions of written tokens.

    Args:
        model: The model, for its tokenizer.
        written: The tokens.
        logits: The logits that predict each of them, without an autograd graph.
    """
    name = functools.partial(name_token, getattr(model, "tokenizer", None))
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    numbers = wide.gather(-1, written.to(wide.device)[:, None])[:, 0] - wide.logsumexp(-1)
    explained = [
        entry._replace(target=f"log probability of {name(int(token))!r}", value=float(number))
        for entry, token, number in zip(
            read_predictions(logits, name), written, numbers.tolist(), strict=True
        )
    ]
    return Written(numbers.cpu(), tuple(explained))
