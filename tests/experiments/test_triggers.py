"""Test triggers: their extraction, insertion and effect."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix.experiments import (
    Example,
    Trigger,
    extract_triggers,
    insert_trigger,
    predict_by_token,
    trigger_report,
)
from lens_mix.experiments.triggers import Piece
from tests import tiny_models
from tests.matrix import build_or_skip
from tests.tiny_models import bridge

CLS, SEP = 1, 2


def trigger_of(*pieces) -> Trigger:
    made = tuple(Piece(token, f"w{token}", segment, place) for token, segment, place in pieces)
    return Trigger(made, (1.0, 0.5), ((0, 1), (1, 2)), 0, 0, Example((9, 9), "x"))


def pair(a, b) -> Example:
    return Example((CLS, *a, SEP, *b, SEP), "x")


def released_insertion(tokens, length, places, added):
    """Insert by the released code's rule: round((length + added) * place), one further if that is taken."""
    tokens, previous = list(tokens), -1
    for place, token in zip(places, added, strict=True):
        at = round((length + len(added)) * place)
        if at == previous:
            at += 1
        previous = at
        tokens.insert(at, token)
    return tokens


@pytest.mark.parametrize("length", [1, 2, 5, 9, 20])
def test_insertion_follows_the_released_rule(length):
    first, second = list(range(10, 10 + length)), list(range(30, 30 + length // 2 + 1))
    trigger = trigger_of((41, 0, 0.25), (42, 0, 0.3), (43, 0, 1.0), (44, 1, 0.5))
    found = insert_trigger(trigger, pair(first, second), special={CLS, SEP})
    a = released_insertion(first, len(first), [0.25, 0.3, 1.0], [41, 42, 43])
    b = released_insertion(second, len(second), [0.5], [44])
    assert list(found.tokens) == [CLS, *a, SEP, *b, SEP]
    assert found.segments == ((1, 1 + len(a)), (2 + len(a), 2 + len(a) + len(b)))
    assert found.label == "x"


def test_insertion_needs_the_segment():
    with pytest.raises(ValueError, match="expected at least 2 segments, got 1"):
        insert_trigger(trigger_of((41, 1, 0.5)), Example((5, 6, 7), "x"))


@pytest.mark.parametrize("segments", [((2, 3), (0, 1)), ((0, 2), (1, 3))])
def test_segments_stand_one_after_the_other(segments):
    with pytest.raises(ValueError, match="segments: expected spans one after the other, got"):
        Example((5, 6, 7), "x", segments)


def examples(model):
    rows = [tiny_models.tokens(model, 1, 7, seed=seed)[0].tolist() for seed in range(4)]
    return [Example((CLS, *row, SEP), "odd" if seed % 2 else "even") for seed, row in enumerate(rows)]


def test_extraction_by_hand(model):
    some = examples(model)
    found = extract_triggers(model, some, special={CLS, SEP}, least=0.0)
    assert [sum(t.strength) for t in found] == sorted((sum(t.strength) for t in found), reverse=True)
    for trigger in found:
        tokens = torch.tensor(trigger.source.tokens)
        scores = lm.run(model, tokens, lm.methods.AttentionAttribution(per_head=True)).scores
        assert scores.max().item() == pytest.approx(trigger.strength[0])
        (query, key), (query2, key2) = trigger.pairs
        head = scores[trigger.layer, trigger.head]
        assert head[query, key].item() == pytest.approx(trigger.strength[0])
        assert head[query2, key2].item() == pytest.approx(trigger.strength[1])
        assert head.flatten().sort().values[-2].item() == pytest.approx(trigger.strength[1])
        both = trigger.strength[1] / trigger.strength[0] >= 0.2
        positions = sorted({query, key, query2, key2} if both else {query, key})
        wanted = [p for p in positions if trigger.source.tokens[p] not in (CLS, SEP)]
        assert [piece.token for piece in trigger.pieces] == [trigger.source.tokens[p] for p in wanted]
        assert [piece.place for piece in trigger.pieces] == pytest.approx([p / 7 for p in wanted])
        assert [piece.text for piece in trigger.pieces] == [f"w{piece.token}" for piece in trigger.pieces]


def test_weak_patterns_are_dropped_and_weak_second_pairs_left_out(model):
    some = examples(model)
    every = extract_triggers(model, some, special={CLS, SEP}, least=0.0)
    cut = sum(every[1].strength)
    assert extract_triggers(model, some, special={CLS, SEP}, least=cut) == every[:2]
    only_first = extract_triggers(model, some, least=0.0, second=1.01)
    assert {len(trigger.pieces) <= 2 for trigger in only_first} == {True}


def test_report(model):
    some = examples(model)
    triggers = extract_triggers(model, some, special={CLS, SEP}, least=0.0)[:2]
    predict = predict_by_token(model, {"even": [4, 6], "odd": 7})
    report = trigger_report(some, triggers, predict, special={CLS, SEP})
    rows = {(str(trigger), label): rest for trigger, label, *rest in report.rows}
    for trigger in triggers:
        for label in ("even", "odd"):
            own = [example for example in some if example.label == label and example != trigger.source]
            changed = [insert_trigger(trigger, example, {CLS, SEP}) for example in own]
            before = sum(found == label for found in predict(own)) / len(own)
            after = sum(found == label for found in predict(changed)) / len(own)
            assert rows[str(trigger), label] == [len(own), before, after]
    table = report.to_dataframe()
    assert list(table.columns) == ["trigger", "label", "examples", "before", "after"]
    assert len(table) == 4


def test_own_metric_and_predictor():
    some = [Example((3, 4, 5), "a"), Example((5, 6, 7), "b"), Example((7, 8, 9), "a")]
    trigger = trigger_of((41, 0, 0.5))

    def predict(batch):
        return ["b" if 41 in example.tokens else example.label for example in batch]

    report = trigger_report(some, [trigger], predict)
    assert [row[1:] for row in report.rows] == [("a", 2, 1.0, 0.0), ("b", 1, 1.0, 1.0)]
    errors = trigger_report(some, [trigger], predict, metric=lambda r, p: sum(map(str.__ne__, r, p)))
    assert [row[1:] for row in errors.rows] == [("a", 2, 0, 2), ("b", 1, 0, 0)]


def test_predict_by_token(model):
    example = Example(tuple(tiny_models.tokens(model, 1)[0].tolist()), "x")
    with torch.no_grad():
        logits = model(torch.tensor([example.tokens]))[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert predict_by_token(model, {"yes": best, "no": worst})([example]) == ["yes"]
    assert predict_by_token(model, {"no": worst, "yes": [worst, best]})([example]) == ["yes"]


@pytest.mark.parametrize("position", [99, -4])
def test_predict_by_token_at_a_position_that_is_not_there(model, position):
    predict = predict_by_token(model, {"yes": 5, "no": 6}, position)
    with pytest.raises(ValueError, match=rf"position: expected a position .* from -3 to 2, got {position}"):
        predict([Example((3, 4, 5), "yes")])


def test_predictions_of_an_encoder_decoder_are_what_a_target_reads():
    """The decoder reads its start token alone, as in the extraction of triggers, and not the source."""
    model = build_or_skip(bridge, "bart", torch.float64)
    source = tiny_models.tokens(model, 1)[0]
    choices = {token: token for token in range(3, 50)}
    with torch.no_grad():
        logits = model(source[None], decoder_input=torch.tensor([[2]]))[0, -1]
    assert predict_by_token(model, choices)([Example(tuple(source.tolist()), "x")]) == [
        max(choices, key=lambda token: float(logits[token]))
    ]


def test_example_from_text(model):
    example = Example.read(model, "w5 w6", "x", prepend_bos=True)
    assert example.tokens == (1, 5, 6)


def test_bad_input(model):
    some = examples(model)
    with pytest.raises(ValueError, match="examples: expected at least one"):
        extract_triggers(model, [])
    with pytest.raises(ValueError, match="one for each of 4 examples, got 1"):
        extract_triggers(model, some, targets=[lm.targets.predicted()])
    with pytest.raises(ValueError, match="examples: expected at least one"):
        trigger_report([], [], lambda batch: [])
    with pytest.raises(ValueError, match="predict: expected 4 classes"):
        trigger_report(some, [], lambda batch: ["even"])
    with pytest.raises(ValueError, match="two classes or more"):
        predict_by_token(model, {"yes": 3})
