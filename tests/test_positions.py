"""Test that a text of the prompt selects positions wherever numbers do, on every class of model."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix.hooks import mask_keys, zero_values
from tests import shared_models
from tests.matrix import build_or_skip, cases, model_of, prompt_of
from tests.tiny_models import bridge

PROMPT = "w3 w4 w5 w6 w4 w7"


@pytest.fixture(scope="module")
def decoder():
    return shared_models.decoder()


@pytest.mark.parametrize("case", cases(cross=True, refused=False), ids=str)
def test_rows_of_every_model_by_text(case):
    model = model_of(case)
    prompt = prompt_of(model)
    whole = lm.run(model, prompt, "attention", part=case.part)
    position = next(each for each, token in enumerate(whole.tokens) if whole.tokens.count(token) == 1)
    text = whole.tokens[position]
    by_text = lm.run(model, prompt, "attention", part=case.part, queries=text)
    assert by_text.queries == [position]
    assert by_text.scores.equal(lm.run(model, prompt, "attention", part=case.part, queries=position).scores)
    assert whole.positions(text, axis="query") == [position]
    part = "decoder" if case.part == "cross" else case.part
    assert lm.models.find_positions(model, prompt, text, part=part) == [position]
    with pytest.raises(ValueError, match="queries: expected a text that the prompt"):
        lm.run(model, prompt, "attention", part=case.part, queries=["no such"])


def test_a_picture_has_no_text():
    model = build_or_skip(bridge, "vit")
    picture = torch.rand(3, model.original_model.config.image_size, model.original_model.config.image_size)
    with pytest.raises(ValueError, match="queries: expected a text that the prompt contains, got ' Italy'"):
        lm.run(model, picture, "attention", queries=" Italy")


def test_texts_of_several_tokens_and_lists(decoder):
    m = lm.run(decoder, PROMPT, "attention", queries=["w5w6", 0, "w7"])
    assert m.queries == [3, 4, 0, 6]
    assert lm.run(decoder, PROMPT, "attention", queries=("w3", slice(5, 7))).queries == [1, 5, 6]
    with pytest.raises(ValueError, match=r"queries: expected a text that occurs once, got 'w4', .* \[2, 5\]"):
        lm.run(decoder, PROMPT, "attention", queries="w4")
    assert lm.input_map(decoder, PROMPT, queries="w6w4").queries == [4, 5]


def test_each_prompt_has_its_own_rows(decoder):
    prompts = ["w9 w3 w8", "w3 w9", "w8 w7 w6 w9"]
    for m, position in zip(lm.run_many(decoder, prompts, "attention", queries="w9"), (1, 2, 4), strict=True):
        assert m.queries == [position]
        assert m.query_labels == ["w9"]
    with pytest.raises(ValueError, match="prompt 1: queries: expected a text that the prompt contains"):
        list(lm.run_many(decoder, ["w9 w3", "w3 w4"], "attention", queries="w9"))


def test_a_corpus_keeps_a_text_for_its_rows(decoder, tmp_path):
    prompts = ["w9 w3 w8", "w3 w9", "w3 w4"]
    done = lm.corpus.run(lambda: decoder, prompts, "attention", None, tmp_path, queries="w9")
    assert (done.prompts, done.failed) == (3, 1)


def test_the_position_of_a_target_by_text(decoder):
    at_text, at_number = (
        lm.input_map(decoder, PROMPT, target=lm.targets.logit("w8", position=position))
        for position in ("w5w6", 4)
    )
    assert at_text.queries == at_number.queries == [4]
    assert at_text.scores.equal(at_number.scores)
    assert at_text.explained[0].target == "logit of 'w8' at position 4"
    record = at_text.parameters["target"]
    assert record["position"] == "w5w6"
    assert lm.run_again(decoder, at_text).scores.equal(at_text.scores)
    with pytest.raises(ValueError, match="position: expected a text that the prompt contains, got 'w30'"):
        lm.input_map(decoder, PROMPT, target=lm.targets.logit("w8", position="w30"))
    with pytest.raises(
        TypeError, match=r"position: expected a text of the prompt or a whole number, got 1\.5"
    ):
        lm.targets.token("w8", position=1.5)


@pytest.mark.parametrize("hook", [zero_values, mask_keys])
def test_positions_of_a_text_in_a_hook(decoder, hook):
    m = lm.run(decoder, PROMPT, "attention")
    positions = m.positions("w5w6")
    assert positions == lm.models.find_positions(decoder, PROMPT, "w5w6") == [3, 4]
    by_text, by_slice = (
        decoder.run_with_hooks(PROMPT, fwd_hooks=[hook(0, chosen)]) for chosen in (positions, slice(3, 5))
    )
    assert by_text.equal(by_slice)
    assert not by_text.equal(decoder(PROMPT))


def test_aggregations_graphs_and_tables_by_text(decoder):
    m = lm.run(decoder, PROMPT, "attention")
    assert lm.flow(m, queries="w5w6").scores.equal(lm.flow(m, queries=[3, 4]).scores)
    assert lm.attribution_tree(m, root="w5w6").graph["root"] == (2, 4)
    assert lm.table(m, keys="w5w6", query="w7").equals(lm.table(m, keys=[[3, 4]], query=6))
    other = lm.rollout(m)
    assert lm.compare([m, m], queries="w5w6").equals(lm.compare([m, m], queries=[3, 4]))
    assert other.top(2, query="w5w6") == other.top(2, query=4)


def test_rows_and_columns_of_figures_by_text(decoder):
    pytest.importorskip("matplotlib")
    m = lm.run(decoder, PROMPT, "attention")
    for options in ({"queries": "w5w6"}, {"keys": "w5w6"}):
        figure = m.show("layers", layer=0, **options)
        assert 2 in figure.axes[0].images[0].get_array().shape


def test_removal_curves_of_a_text(decoder):
    row = torch.arange(7.0)
    by_text, by_number = (
        lm.evaluation.removal_curves(decoder, PROMPT, row, positions=positions)
        for positions in ("w5w6", [3, 4])
    )
    assert by_text == by_number
