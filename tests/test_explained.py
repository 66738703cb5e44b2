"""Test that maps keep the predictions of the model's own forward pass, and the values of their targets."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix._passes.continuation import prompt_logits
from tests.matrix import build_or_skip, cases, model_of, prompt_of
from tests.test_classifiers import NO_BERT, TOKENS, classifier_of
from tests.tiny_models import bridge, bridge_or_hooked


def is_without_logits(case):
    return case.wrong_logits or case.is_a("no logits")


@pytest.mark.parametrize("case", cases(cross=True, refused=False), ids=lambda case: case.label)
def test_predictions_are_those_of_the_models_own_pass(case):
    model = model_of(case, torch.float64)
    prompt = prompt_of(model)
    options = {} if case.part is None else {"part": case.part}
    whole = lm.run(model, prompt, "attention", **options)
    is_causal = whole.causal or case.part in ("decoder", "cross")
    if is_without_logits(case) or not is_causal:
        assert whole.explained is None
        return
    probabilities = prompt_logits(model, prompt).softmax(-1)
    for position, entry in enumerate(whole.explained):
        best = probabilities[position].topk(4)
        # The logits of some models are computed in float32.
        assert entry.probability == pytest.approx(best.values[0].item(), rel=1e-5)
        numbers = [entry.prediction, *(token for token, _ in entry.others)]
        if model.tokenizer is None:
            assert numbers == [str(token) for token in best.indices.tolist()]
        assert [number for _, number in entry.others] == pytest.approx(best.values[1:].tolist(), rel=1e-5)
        assert entry.target is entry.value is None
    some = lm.run(model, prompt, "attention", queries=[-1, 0], layers=whole.layers[:1], **options)
    assert [entry.prediction for entry in some.explained] == [
        whole.explained[-1].prediction,
        whole.explained[0].prediction,
    ]
    assert [entry.probability for entry in some.explained] == pytest.approx(
        [whole.explained[-1].probability, whole.explained[0].probability], rel=1e-6
    )


def causal_model():
    return bridge_or_hooked("gpt2", "LN", torch.float64)


def test_targets_of_rows():
    model, prompt = causal_model(), torch.arange(3, 10)
    logits = prompt_logits(model, prompt)
    best = logits.argmax(-1).tolist()
    mixing_map = lm.run(model, prompt, lm.methods.InputGradients(lm.targets.logit()), queries=[2, -1])
    for entry, position in zip(mixing_map.explained, (2, 6), strict=True):
        assert entry.target == f"logit of {best[position]}"
        assert entry.value == pytest.approx(logits[position, best[position]].item())
        assert entry.prediction == str(best[position])
    prediction = f"'{best[6]}' {mixing_map.explained[1].probability:.2f}"
    assert f"{prediction}; logit of {best[6]} = " in mixing_map.explanation()
    difference = lm.run(model, prompt, lm.methods.Gim(lm.targets.logit_difference(4, 5)), queries=[-1])
    assert difference.explained[0].target == "logit of 4 minus that of 5"
    assert difference.explained[0].value == pytest.approx((logits[-1, 4] - logits[-1, 5]).item())


def test_a_target_of_the_whole_prompt_is_in_every_row():
    model, prompt = causal_model(), torch.arange(3, 10)
    mixing_map = lm.run(model, prompt, lm.methods.GradientAttention(target=lm.targets.loss()))
    log_probabilities = prompt_logits(model, prompt).log_softmax(-1)
    loss = -log_probabilities[:-1].gather(-1, prompt[1:, None]).mean().item()
    assert {entry.target for entry in mixing_map.explained} == {"loss of the next tokens"}
    # The prediction is that of each row's own position.
    one = lm.run(model, prompt, lm.methods.GradientAttention(target=lm.targets.token(5)))
    own = lm.run(model, prompt, "attention").explained
    assert [entry.prediction for entry in one.explained] == [entry.prediction for entry in own]
    assert {entry.target for entry in one.explained} == {"probability of 5 at position 6"}
    assert [entry.value for entry in mixing_map.explained] == pytest.approx([loss] * 7)


@pytest.mark.parametrize("queries", [None, [6, 0, 3]])
def test_a_target_of_one_position_leaves_the_other_rows_their_own_predictions(queries):
    model, prompt = causal_model(), torch.arange(3, 10)
    logits = prompt_logits(model, prompt)
    best, target = logits.argmax(-1).tolist(), lm.targets.token(5, position=3)
    mixing_map = lm.run(model, prompt, lm.methods.GradientAttention(target=target), queries=queries)
    assert len(set(best)) > 1
    for entry, position in zip(mixing_map.explained, mixing_map.query_positions, strict=True):
        assert entry.prediction == str(best[position])
        assert entry.target == "probability of 5 at position 3"
        assert entry.value == pytest.approx(logits[3].softmax(-1)[5].item())


@NO_BERT
def test_a_row_of_an_encoder_that_the_target_does_not_read_predicts_nothing():
    model = build_or_skip(bridge, "bert", torch.float64)
    target = lm.targets.logit(4, position=3)
    mixing_map = lm.run(model, TOKENS, lm.methods.GradientAttention(target=target))
    predicts = [entry.prediction is not None for entry in mixing_map.explained]
    assert predicts == [position == 3 for position in range(len(TOKENS))]
    assert {entry.target for entry in mixing_map.explained} == {"logit of 4 at position 3"}


def test_a_target_of_the_decoder_predicts_nothing_at_the_encoders_rows():
    model = build_or_skip(bridge, "bart", torch.float64)
    mixing_map = lm.run(model, prompt_of(model), "gradient_attention", part="encoder")
    assert {entry.prediction for entry in mixing_map.explained} == {None}
    assert all(entry.target for entry in mixing_map.explained)


def test_many_prompts_of_different_lengths():
    model = causal_model()
    prompts = [torch.arange(3, 10), torch.arange(5, 9), torch.arange(2, 8)]
    for side in ("right", "left"):
        together = lm.run_many(
            model, prompts, ["attention", "input_gradients", "gradient_attention"], padding_side=side
        )
        for prompt, maps in zip(prompts, together, strict=True):
            for name, mixing_map in maps.items():
                alone = lm.run(model, prompt, name)
                for entry, expected in zip(mixing_map.explained, alone.explained, strict=True):
                    assert entry.prediction == expected.prediction
                    assert entry.probability == pytest.approx(expected.probability, rel=1e-6)
                    assert entry.target == expected.target


def test_a_map_of_spans_predicts_the_next_token():
    spans = lm.run(
        causal_model(), torch.arange(3, 10), lm.methods.Occlusion(spans=[(0, 1), (2,)]), queries=[-1]
    )
    assert spans.explanation().startswith("after ")


def test_an_encoder_of_a_pair_predicts_nothing():
    model = build_or_skip(bridge, "bart", torch.float64)
    assert not lm.run(model, prompt_of(model), "attention", part="encoder").provenance["predicts_next"]


@NO_BERT
def test_an_encoder_has_the_prediction_of_its_target_only():
    model = build_or_skip(bridge, "bert", torch.float64)
    assert lm.run(model, TOKENS, "attention").explained is None
    masked = lm.run(model, TOKENS, lm.methods.InputGradients(lm.targets.logit(position=3)), queries=[3])
    logits = prompt_logits(model, TOKENS)[3]
    assert masked.explained[0].prediction == str(int(logits.argmax()))
    assert masked.explanation().startswith("at ")


@NO_BERT
def test_a_classifier_names_its_class():
    names = {"id2label": {0: "joy", 1: "fear", 2: "anger"}, "label2id": {"joy": 0, "fear": 1, "anger": 2}}
    classifier = classifier_of("bert", "BertForSequenceClassification", labels=3, settings=names)
    model = build_or_skip(bridge, "bert", torch.float64)
    logits = classifier(TOKENS[None]).logits[0]
    best = ["joy", "fear", "anger"][int(logits.argmax())]
    target = lm.targets.hf_classifier(classifier, "fear")
    mixing_map = lm.run(model, TOKENS, lm.methods.InputGradients(target), queries=[0])
    entry = mixing_map.explained[0]
    assert entry.prediction == best
    assert entry.probability == pytest.approx(logits.softmax(-1).max().item(), rel=1e-6)
    assert entry.target == "probability of 'fear' (class 1)"
    assert entry.value == pytest.approx(logits.softmax(-1)[1].item(), rel=1e-6)


def require_same(one, other):
    for entry, expected in zip(one.explained, other.explained, strict=True):
        assert entry.prediction == expected.prediction
        assert entry.probability == pytest.approx(expected.probability, rel=1e-9)
        assert [token for token, _ in entry.others] == [token for token, _ in expected.others]


def test_logits_of_many_positions_are_computed_a_few_at_a_time(monkeypatch):
    model = causal_model()
    prompts = [torch.arange(3, 10), torch.arange(5, 9)]
    expected = list(lm.run_many(model, prompts, "attention"))
    some = lm.run(model, prompts[0], "attention", layers=[0])
    monkeypatch.setattr("lens_mix.session._MOST_LOGITS", 2 * 2 * 4 * model.cfg.d_vocab)
    for one, other in zip(lm.run_many(model, prompts, "attention"), expected, strict=True):
        require_same(one, other)
    require_same(lm.run(model, prompts[0], "attention", layers=[0]), some)


def test_an_error_behind_the_last_block_prevents_no_map():
    model, prompt = causal_model(), torch.arange(3, 10)
    expected = lm.run(model, prompt, "attention").scores

    def broken(module, args):
        raise RuntimeError("no unembedding here")

    handle = model.unembed.register_forward_pre_hook(broken)
    try:
        mixing_map = lm.run(model, prompt, "attention")
    finally:
        handle.remove()
    assert torch.equal(mixing_map.scores, expected)
    assert mixing_map.explained is None
    assert any(
        "the predictions are unknown: RuntimeError: no unembedding here" in note for note in mixing_map.notes
    )
