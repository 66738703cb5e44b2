"""Find and insert adversarial triggers by attribution (Hao et al., AAAI 2021, section 6)."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from lens_mix import Lens
from lens_mix.arguments import (
    check_flags,
    check_instance,
    check_items,
    check_number,
    check_pairs,
    check_whole_number,
)
from lens_mix.experiments.head_importance import choose_method, list_targets
from lens_mix.experiments.passes import read_tokens
from lens_mix.maps import MixingMap
from lens_mix.methods.attention_attribution import AttentionAttribution
from lens_mix.models import TransformerLensModel, prompt_logits
from lens_mix.runner import run
from lens_mix.targets import TargetLike

if TYPE_CHECKING:
    import pandas

TriggerSpan = tuple[int, int]
Predict = Callable[[Sequence["Example"]], Sequence[Hashable]]


@dataclasses.dataclass(frozen=True)
class Example:
    """One labeled prompt.

        >>> example = lm.experiments.Example.read(model, "A fine film.", label="positive")
        >>> example.tokens

    Attributes:
        tokens: The token numbers, special tokens included.
        label: The right class.
        segments: (start, stop) spans in ascending order. Triggers come from them and are inserted into them.
            None: the runs between special tokens.
    """

    tokens: tuple[int, ...]
    label: Hashable
    segments: tuple[TriggerSpan, ...] | None = None

    def __post_init__(self) -> None:
        tokens = check_items("tokens", self.tokens, "token numbers", least=1)
        object.__setattr__(self, "tokens", tuple(check_whole_number("tokens", token, 0) for token in tokens))
        spans = () if self.segments is None else self.segments
        for start, stop in check_pairs("segments", spans, "(start, stop) spans"):
            check_whole_number(
                "segments", stop, check_whole_number("segments", start, 0, len(tokens)), len(tokens)
            )
        if any(before[1] > after[0] for before, after in itertools.pairwise(spans)):
            raise ValueError(f"segments: expected spans one after the other, got {list(spans)}")

    @classmethod
    def read(cls, model: TransformerLensModel, prompt: Any, label: Hashable, **options: Any) -> Example:
        """Return the example of a prompt.

        Args:
            model: The model whose tokenizer reads the prompt.
            prompt: As in `lm.run`.
            label: The right class.
            **options: As in `lm.run`.
        """
        return cls(tuple(read_tokens(model, prompt, **options).tolist()), label)


@dataclasses.dataclass(frozen=True)
class Piece:
    """One token of a trigger.

    Attributes:
        token: The token number.
        text: Its text.
        segment: The number of its segment.
        place: Its position in the segment, as a share of the segment's length, 0 to 1.
    """

    token: int
    text: str
    segment: int
    place: float


@dataclasses.dataclass(frozen=True)
class Trigger:
    """The tokens of the two strongest pairs of one example.

    Attributes:
        pieces: The tokens, in order.
        strength: The scores of the two pairs.
        pairs: The positions (query, key) of the two pairs in `source`.
        layer: The layer of the pairs.
        head: The head of the pairs.
        source: The example.
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
    """Return the triggers of a data set, the strongest first.

        >>> examples = [lm.experiments.Example.read(model, "A fine film.", label="positive")]
        >>> lm.experiments.extract_triggers(model, examples, least=0.0)

    For each example, the head with the largest attribution of all layers is chosen, and in it the two largest
    entries. Their tokens are the trigger, without special tokens. As in the released code, a trigger is
    dropped if its two entries sum to less than `least`, and it has only the first pair if the second entry is
    less than `second` times the first.

    Args:
        model: As in `lm.run`.
        examples: The examples, at least one.
        targets: One target for all examples, or one for each. None: that of the method.
        method: The attribution. None: the default one, of the probability of the prediction.
        special: The token numbers that are never part of a trigger and that end a segment ([CLS], [SEP],
            BOS).
        least: The smallest sum of the two entries, in the target's unit.
        second: The smallest ratio of the second entry to the first.
        part: As in `lm.run`.
        progress: Whether a bar over the examples is shown.
        **options: As in `lm.run`.

    Raises:
        ValueError: There are no examples, or the number of targets does not fit.
    """
    check_flags(progress=progress)
    least, second = check_number("least", least), check_number("second", second)
    examples, special = _read_examples(examples), _read_special(special)
    by_example = list_targets("examples", examples, targets)
    lens = Lens(model, part)  # A map has a single part, so "all" raises an error.
    triggers = []
    bar = tqdm(examples, disable=not progress, desc="triggers")
    for example, target in zip(bar, by_example, strict=True):
        tokens = torch.tensor(example.tokens, device=lens.device, dtype=torch.long)
        attribution = choose_method("attribution", target, method)
        mixing = run(model, tokens, attribution, part=lens.stack.name, progress=None, **options)
        trigger = _make_trigger(mixing, example, special, second)
        if trigger.pieces and sum(trigger.strength) >= least:
            triggers.append(trigger)
    return sorted(triggers, key=lambda trigger: -sum(trigger.strength))


def insert_trigger(trigger: Trigger, example: Example, special: Collection[int] = ()) -> Example:
    """Return the example with the trigger's tokens, at the same relative positions of the same segments.

        >>> good = lm.experiments.Example.read(model, "A fine film.", label="positive")
        >>> bad = lm.experiments.Example.read(model, "A bad film.", label="negative")
        >>> (trigger,) = lm.experiments.extract_triggers(model, [good], least=0.0)
        >>> lm.experiments.insert_trigger(trigger, bad).tokens

    Args:
        trigger: The trigger.
        example: The example.
        special: As in `extract_triggers`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The example lacks a segment of the trigger.
    """
    check_instance("trigger", trigger, Trigger, "a Trigger")
    segments = _find_segments(
        check_instance("example", example, Example, "an Example"), _read_special(special)
    )
    last_segment = max((piece.segment for piece in trigger.pieces), default=-1)
    if last_segment >= len(segments):
        raise ValueError(f"example: expected at least {last_segment + 1} segments, got {len(segments)}")
    tokens = list(example.tokens)
    moved: list[TriggerSpan] = []
    shift = 0
    for index, (start, stop) in enumerate(segments):
        pieces = [piece for piece in trigger.pieces if piece.segment == index]
        inside = list(example.tokens[start:stop])
        length, previous = len(inside) + len(pieces), -1
        for piece in pieces:
            index_in_segment = round(length * piece.place)
            previous = index_in_segment + 1 if index_in_segment == previous else index_in_segment
            inside.insert(previous, piece.token)
        tokens[start + shift : stop + shift] = inside
        moved.append((start + shift, start + shift + len(inside)))
        shift += len(pieces)
    return Example(tuple(tokens), example.label, tuple(moved))


@dataclasses.dataclass(frozen=True)
class TriggerReport:
    """The effect of triggers, as rows (trigger, class, examples, metric before, metric after).

    Attributes:
        rows: One row per trigger and class.
    """

    rows: tuple[tuple[Trigger, Hashable, int, float, float], ...]

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with the columns trigger, label, examples, before and after."""
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
    """Measure a metric before and after each trigger is inserted, per class.

        >>> texts = {"A fine film.": "positive", "A bad film.": "negative"}
        >>> examples = [lm.experiments.Example.read(model, text, label) for text, label in texts.items()]
        >>> triggers = lm.experiments.extract_triggers(model, examples, least=0.0)
        >>> predict = lm.experiments.predict_by_token(model, {"positive": 5, "negative": 6})
        >>> lm.experiments.trigger_report(examples, triggers, predict)

    The example that a trigger comes from is left out.

    Args:
        examples: The examples into which triggers are inserted.
        triggers: The triggers.
        predict: A function of examples that returns their predicted classes. `predict_by_token` makes one.
        metric: A function of the right and the predicted classes that returns a number. None: accuracy.
        special: As in `extract_triggers`.
        progress: Whether a bar over the triggers is shown.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There are no examples, or the number of predictions differs from that of the examples.
    """
    check_flags(progress=progress)
    examples = _read_examples(examples)
    triggers = check_items("triggers", triggers, "Triggers", kind=Trigger)
    metric = _compute_accuracy if metric is None else metric
    check_instance("metric", metric, Callable, "a function of the right and the predicted classes")
    before = _predict(predict, examples)
    labels = list(dict.fromkeys(example.label for example in examples))
    rows = []
    for trigger in tqdm(triggers, disable=not progress, desc="triggers"):
        others = [place for place, example in enumerate(examples) if example != trigger.source]
        changed = [insert_trigger(trigger, examples[place], special) for place in others]
        after = dict(zip(others, _predict(predict, changed), strict=True))
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
    """Return a function that predicts the class whose tokens have the largest logit.

        >>> predict = lm.experiments.predict_by_token(model, {"positive": 5, "negative": 6})
        >>> predict([lm.experiments.Example.read(model, "A fine film.", label="positive")])

    If a class has several tokens, its largest logit counts.

    Args:
        model: The model.
        choices: For each class, one or several token numbers.
        position: The position at which the logits are read. Negative ones count from the end.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There are fewer than two classes, or a token is not in the vocabulary. The returned
            function raises it for an example that lacks the position.
    """
    lens, expected = Lens(model), "two classes or more, each with its token numbers"
    check_items("choices", check_instance("choices", choices, Mapping, expected).values(), expected, least=2)
    position, last = check_whole_number("position", position), int(lens.model.cfg.d_vocab) - 1
    tokens = {
        label: [
            check_whole_number("choices", token, 0, last, "token numbers")
            for token in check_items("choices", choice, expected, least=1, alone=True)
        ]
        for label, choice in choices.items()
    }

    def predict(examples: Sequence[Example]) -> list[Hashable]:
        classes: list[Hashable] = []
        for example in examples:
            by_position = prompt_logits(model, list(example.tokens))
            count = len(by_position)
            place = check_whole_number("position", position, -count, count - 1, "a position of every example")
            logits = by_position[place]
            classes.append(max(tokens, key=lambda label: float(logits[tokens[label]].max())))
        return classes

    return predict


# ------------------------------------------------------------------ details


def _make_trigger(mixing: MixingMap, example: Example, special: Collection[int], second: float) -> Trigger:
    scores = mixing.scores
    _, heads, count, _ = scores.shape
    layer, head = divmod(int(scores.flatten(2).amax(-1).argmax()), heads)
    best = torch.sort(scores[layer, head].flatten(), descending=True, stable=True)
    # A map of one token has only one entry, so there is no second one.
    strength = (best.values[0].item(), best.values[1].item() if count > 1 else 0.0)
    pairs = [divmod(index, count) for index in best.indices[:2].tolist()]
    both = strength[0] <= 0 or strength[1] / strength[0] >= second
    pieces = [
        Piece(
            example.tokens[position], mixing.tokens[position], index, (position - start + 1) / (stop - start)
        )
        for position in sorted({position for pair in (pairs if both else pairs[:1]) for position in pair})
        for index, (start, stop) in enumerate(_find_segments(example, special))
        if start <= position < stop and example.tokens[position] not in special
    ]
    label = mixing.layer_labels[layer]
    return Trigger(tuple(pieces), strength, (pairs[0], pairs[-1]), label, head, example)


def _find_segments(example: Example, special: Collection[int]) -> list[TriggerSpan]:
    """Return the spans of the example, or the runs between special tokens."""
    if example.segments is not None:
        return list(example.segments)
    ends = [position for position, token in enumerate(example.tokens) if token in special]
    runs = itertools.pairwise([-1, *ends, len(example.tokens)])
    return [(before + 1, after) for before, after in runs if after > before + 1]


def _read_examples(examples: Any) -> list[Example]:
    return check_items("examples", examples, "Examples", least=1, kind=Example)


def _read_special(special: Any) -> list[int]:
    return [check_whole_number("special", one, 0) for one in check_items("special", special, "token numbers")]


def _predict(predict: Predict, examples: Sequence[Example]) -> list[Hashable]:
    check_instance("predict", predict, Callable, "a function of examples")
    classes = check_items("predict", predict(examples), "classes, one per example")
    if len(classes) != len(examples):
        raise ValueError(f"predict: expected {len(examples)} classes, one per example, got {len(classes)}")
    return classes


def _compute_accuracy(right: Sequence[Hashable], predicted: Sequence[Hashable]) -> float:
    n_right: int = sum(map(operator.eq, right, predicted))
    return n_right / len(right)
