"""Adversarial triggers from attribution (Hao et al., AAAI 2021, section 6)."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from lens_mix.arguments import flags, instance, number, pairs, several, whole_number
from lens_mix.evaluation.head_importance import method_for, one_target_each
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import TransformerLensModel, model_class_of
from lens_mix.lens.prompts import device_of, read_prompt
from lens_mix.lens.token_strings import token_strings
from lens_mix.maps import MixingMap
from lens_mix.methods.attention_attribution import AttentionAttribution
from lens_mix.runner import run
from lens_mix.targets import TargetLike

if TYPE_CHECKING:
    import pandas

Span = tuple[int, int]
Predict = Callable[[Sequence["Example"]], Sequence[Hashable]]


@dataclasses.dataclass(frozen=True)
class Example:
    """One labelled prompt.

    Attributes:
        tokens: token numbers, special tokens included.
        label: its right class.
        segments: (start, stop) spans that triggers come from and go into, one after the other; None: runs
            between special tokens.
    """

    tokens: tuple[int, ...]
    label: Hashable
    segments: tuple[Span, ...] | None = None

    def __post_init__(self) -> None:
        tokens = several("tokens", self.tokens, "token numbers", least=1)
        object.__setattr__(self, "tokens", tuple(whole_number("tokens", token, 0) for token in tokens))
        spans = () if self.segments is None else self.segments
        for start, stop in pairs("segments", spans, "(start, stop) spans"):
            whole_number("segments", stop, whole_number("segments", start, 0, len(tokens)), len(tokens))
        if any(before[1] > after[0] for before, after in itertools.pairwise(spans)):
            raise ValueError(f"segments: expected spans one after the other, got {list(spans)}")

    @classmethod
    def read(cls, model: TransformerLensModel, prompt: Any, label: Hashable, **options: Any) -> Example:
        """From a prompt as `lm.run` takes it."""
        read = read_prompt(model, model_class_of(model), prompt, **options)
        return cls(tuple(read.tokens.tolist()), label)


@dataclasses.dataclass(frozen=True)
class Piece:
    """One token of a trigger: its number, its segment, and where in it, as a share of its length, 0 to 1."""

    token: int
    text: str
    segment: int
    place: float


@dataclasses.dataclass(frozen=True)
class Trigger:
    """The tokens of the strongest pairs of one example.

    Attributes:
        pieces: the tokens, in order.
        strength, pairs: scores and places (query, key) of the two pairs in `source`, the example.
        layer, head: where they are.
    """

    pieces: tuple[Piece, ...]
    strength: tuple[float, float]
    pairs: tuple[tuple[int, int], tuple[int, int]]
    layer: int
    head: int
    source: Example

    def __str__(self) -> str:
        tokens = " … ".join(repr(piece.text) for piece in self.pieces)
        return f"{tokens} (layer {self.layer}, head {self.head}, {self.strength[0]:.3g})"


def extract_triggers(
    model: TransformerLensModel,
    examples: Sequence[Example],
    *,
    targets: TargetLike | Sequence[TargetLike] | None = None,
    method: AttentionAttribution | None = None,
    special: Collection[int] = (),
    least: float = 0.02,
    second: float = 0.2,
    part: str | None = None,
    progress: bool = False,
    **options: Any,
) -> list[Trigger]:
    """Over-confident pairs over a data set, strongest first.

    Per example: the head whose attribution has the largest entry of all layers, and the two largest entries
    in it. Their tokens are the trigger, special tokens left out. As in the released code, a pattern
    is dropped if the two entries sum to less than `least`, and only the first pair is used if the second is
    less than `second` of it.

    Args:
        targets: one for all examples, or one each; None: the method's own.
        method: the attribution to use; None: the default one (probability of what the model predicts).
        special: token numbers that are never part of a trigger and end a segment ([CLS], [SEP], BOS).
        least, second: thresholds, as above; the entries are in the target's unit.
        part, options: as in `lm.run`.

    Raises:
        ValueError: no examples; another number of targets than of examples.
    """
    flags(progress=progress)
    least, second = number("least", least), number("second", second)
    examples, special = _examples(examples), _special(special)
    by_example = one_target_each("examples", examples, targets)
    part = Lens(model, part).stack.name  # one of them: "all" is refused
    triggers = []
    bar = tqdm(examples, disable=not progress, desc="triggers")
    for example, target in zip(bar, by_example, strict=True):
        tokens = torch.tensor(example.tokens, device=device_of(model), dtype=torch.long)
        attribution = method_for("attribution", target, method)
        mixing = run(model, tokens, attribution, part=part, progress=None, **options)
        trigger = _trigger(model, mixing, example, special, second)
        if trigger.pieces and sum(trigger.strength) >= least:
            triggers.append(trigger)
    return sorted(triggers, key=lambda trigger: -sum(trigger.strength))


def insert_trigger(trigger: Trigger, example: Example, special: Collection[int] = ()) -> Example:
    """The example with the trigger's tokens in it, at the same relative positions of the same segments.

    Raises:
        ValueError: the example has no such segment.
    """
    instance("trigger", trigger, Trigger, "a Trigger")
    segments = _segments(instance("example", example, Example, "an Example"), _special(special))
    last_segment = max((piece.segment for piece in trigger.pieces), default=-1)
    if last_segment >= len(segments):
        raise ValueError(f"example: expected at least {last_segment + 1} segments, got {len(segments)}")
    tokens = list(example.tokens)
    moved: list[Span] = []
    shift = 0
    for index, (start, stop) in enumerate(segments):
        pieces = [piece for piece in trigger.pieces if piece.segment == index]
        inside = list(example.tokens[start:stop])
        length, previous = len(inside) + len(pieces), -1
        for piece in pieces:
            at = round(length * piece.place)
            previous = at + 1 if at == previous else at
            inside.insert(previous, piece.token)
        tokens[start + shift : stop + shift] = inside
        moved.append((start + shift, start + shift + len(inside)))
        shift += len(pieces)
    return Example(tuple(tokens), example.label, tuple(moved))


@dataclasses.dataclass(frozen=True)
class TriggerReport:
    """What the triggers did: rows (trigger, class, examples, metric before, metric after)."""

    rows: tuple[tuple[Trigger, Hashable, int, float, float], ...]

    def to_dataframe(self) -> pandas.DataFrame:
        """Columns trigger, label, examples, before, after."""
        from lens_mix.tables import Table

        return Table(
            [(str(trigger), *rest) for trigger, *rest in self.rows],
            columns=["trigger", "label", "examples", "before", "after"],
        )


def trigger_report(
    examples: Sequence[Example],
    triggers: Sequence[Trigger],
    predict: Predict,
    *,
    metric: Callable[[Sequence[Hashable], Sequence[Hashable]], float] | None = None,
    special: Collection[int] = (),
    progress: bool = False,
) -> TriggerReport:
    """A metric before and after each trigger is inserted, per class, without the example it comes from.

    Args:
        examples: those that the triggers go into.
        predict: examples -> their predicted classes (`predict_by_token` makes one).
        metric: (right classes, predicted classes) -> number; None: accuracy.
        special: as in `extract_triggers`.

    Raises:
        ValueError: no examples; as many predictions as examples were expected.
    """
    flags(progress=progress)
    examples = _examples(examples)
    triggers = several("triggers", triggers, "Triggers", kind=Trigger)
    metric = _accuracy if metric is None else metric
    instance("metric", metric, Callable, "a function of the right and the predicted classes")
    before = _predictions(predict, examples)
    labels = list(dict.fromkeys(example.label for example in examples))
    rows = []
    for trigger in tqdm(triggers, disable=not progress, desc="triggers"):
        others = [place for place, example in enumerate(examples) if example != trigger.source]
        changed = [insert_trigger(trigger, examples[place], special) for place in others]
        after = dict(zip(others, _predictions(predict, changed), strict=True))
        for label in labels:
            places = [place for place in others if examples[place].label == label]
            if places:
                right = [label] * len(places)
                value_before = metric(right, [before[place] for place in places])
                value_after = metric(right, [after[place] for place in places])
                rows.append((trigger, label, len(places), value_before, value_after))
    return TriggerReport(tuple(rows))


def predict_by_token(
    model: TransformerLensModel, choices: Mapping[Hashable, int | Sequence[int]], position: int = -1
) -> Predict:
    """Classify by the model's next token: the class whose tokens (the best of each) have the largest logit.

    `choices` is class -> token number, or several; `position` is where the logits are read.

    Raises:
        ValueError: fewer than two classes; when the function is called, an example without such a position.
    """
    lens, expected = Lens(model), "two classes or more, each with its token numbers"
    several("choices", instance("choices", choices, Mapping, expected).values(), expected, least=2)
    position, last = whole_number("position", position), int(lens.model.cfg.d_vocab) - 1
    tokens = {
        label: [
            whole_number("choices", token, 0, last, "token numbers")
            for token in several("choices", choice, expected, least=1, alone=True)
        ]
        for label, choice in choices.items()
    }

    def predict(examples: Sequence[Example]) -> list[Hashable]:
        classes: list[Hashable] = []
        lens = Lens(model)  # of this call: modules may have come and gone since
        for example in examples:
            by_position = lens.logits(list(example.tokens))
            count = len(by_position)
            place = whole_number("position", position, -count, count - 1, "a position of every example")
            logits = by_position[place]
            classes.append(max(tokens, key=lambda label: float(logits[tokens[label]].max())))
        return classes

    return predict


# ------------------------------------------------------------------ details


def _trigger(
    model: TransformerLensModel, mixing: MixingMap, example: Example, special: Collection[int], second: float
) -> Trigger:
    scores = mixing.scores
    _, heads, count, _ = scores.shape
    layer, head = divmod(int(scores.flatten(2).amax(-1).argmax()), heads)
    best = torch.sort(scores[layer, head].flatten(), descending=True, stable=True)
    # A map of one token has one entry.
    strength = (best.values[0].item(), best.values[1].item() if count > 1 else 0.0)
    pairs = [divmod(index, count) for index in best.indices[:2].tolist()]
    both = strength[0] <= 0 or strength[1] / strength[0] >= second
    texts = token_strings(model, torch.tensor(example.tokens, dtype=torch.long, device="cpu"))
    pieces = [
        Piece(example.tokens[position], texts[position], index, (position - start + 1) / (stop - start))
        for position in sorted({position for pair in (pairs if both else pairs[:1]) for position in pair})
        for index, (start, stop) in enumerate(_segments(example, special))
        if start <= position < stop and example.tokens[position] not in special
    ]
    label = mixing.layer_labels[layer]
    return Trigger(tuple(pieces), strength, (pairs[0], pairs[-1]), label, head, example)


def _segments(example: Example, special: Collection[int]) -> list[Span]:
    """The spans given, or the runs between special tokens."""
    if example.segments is not None:
        return list(example.segments)
    ends = [position for position, token in enumerate(example.tokens) if token in special]
    runs = itertools.pairwise([-1, *ends, len(example.tokens)])
    return [(before + 1, after) for before, after in runs if after > before + 1]


def _examples(examples: Any) -> list[Example]:
    return several("examples", examples, "Examples", least=1, kind=Example)


def _special(special: Any) -> list[int]:
    return [whole_number("special", one, 0) for one in several("special", special, "token numbers")]


def _predictions(predict: Predict, examples: Sequence[Example]) -> list[Hashable]:
    instance("predict", predict, Callable, "a function of examples")
    classes = several("predict", predict(examples), "classes, one per example")
    if len(classes) != len(examples):
        raise ValueError(f"predict: expected {len(examples)} classes, one per example, got {len(classes)}")
    return classes


def _accuracy(right: Sequence[Hashable], predicted: Sequence[Hashable]) -> float:
    return sum(map(operator.eq, right, predicted)) / len(right)
