"""Test targets of transformers classifiers against the classifiers' own outputs."""

from __future__ import annotations

import pytest
import torch
import transformers

import lens_mix as lm
from lens_mix.evaluation import ReplaceTokens, removal_curves
from lens_mix.targets import Context
from tests import tiny_models
from tests.reference_models import to_hooked
from tests.tiny_models import Unavailable, available, bridge, wrapped_model

EOS = 2
TOKENS = torch.tensor([5, 9, 12, 7, 30, 21])
# These prompts may end in padding, which is the end-of-sequence token, as for reward models.
PROMPTS = [TOKENS, torch.tensor([5, 9, 12, 7, 30, EOS]), torch.tensor([5, EOS, 12, 7, EOS, EOS])]
PLACES = [5, 4, 3]

ENCODERS = {"bert": "Bert", "roberta": "Roberta"}
DECODERS = {
    "gpt2": "GPT2",
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "opt": "OPT",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3Text",
    "gpt_neox": "GPTNeoX",
    "gptj": "GPTJ",
    "bloom": "Bloom",
    "falcon_mqa": "Falcon",
    "phi3": "Phi3",
}
OF_TOKENS = ["bert", "roberta", "gpt2", "llama", "mistral", "gpt_neox"]
NO_BERT = pytest.mark.skipif(not available(bridge, "bert"), reason="no BERT in a Bridge here")
NO_GPT2 = pytest.mark.skipif(not available(bridge, "gpt2"), reason="no GPT-2 in a Bridge here")


def classifier_of(name, kind, labels=5, dtype=torch.float64, settings=None, **config):
    """Return a classifier with the base model of `bridge(name, dtype, **config)` and random other weights."""
    wrapped = wrapped_model(name, **config)
    given = {**wrapped.config.to_dict(), "id2label": None, "label2id": None, **(settings or {})}
    given = {key: value for key, value in given.items() if value is not None or key == "pad_token_id"}
    made = getattr(transformers, kind)(type(wrapped.config)(**{**given, "num_labels": labels}))
    tiny_models.randomise(made, seed=3)
    made.base_model.load_state_dict(wrapped.base_model.state_dict(), strict=False)
    if dtype == torch.float64 and hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")
    # In transformers 4, other kernels leave out Gemma 2's soft cap.
    made.set_attn_implementation("eager")
    return made.to(dtype).eval()


def kind_of(name, kind):
    return f"{({**ENCODERS, **DECODERS})[name]}For{kind}"


def padding_of(name):
    return {} if name in ENCODERS else {"pad_token_id": EOS}


def pair(name, kind="SequenceClassification", dtype=torch.float64, **options):
    """Return a classifier, and the Bridge of its base model."""
    padding = padding_of(name)
    return classifier_of(name, kind_of(name, kind), dtype=dtype, **options, **padding), bridge(
        name, dtype, **padding
    )


def value_of(model, target, tokens, **options):
    """Return the value of the target in the clean pass, and the default row of the map."""
    found = lm.run(model, tokens, lm.methods.GradientAttention(target=target), **options)
    return found.provenance["details"]["target_value"][0], found.default_query


def own_output(classifier, tokens, **inputs):
    with torch.no_grad():
        return classifier(tokens[None], **inputs)


def explained_without_a_bridge(classifier, target, tokens):
    """Return the number that the classifier computes from its own last hidden states."""
    with torch.no_grad():
        hidden = classifier.base_model(tokens[None], attention_mask=torch.ones_like(tokens[None]))[0]
        return float(target.of_prompt(Context(tokens, hidden))(hidden))


def known(kind, names):
    return [name for name in names if kind_of(name, kind) in tiny_models.in_transformers()]


# ---------------------------------------------------------------------- the number


@pytest.mark.parametrize("name", known("SequenceClassification", [*ENCODERS, *DECODERS]))
def test_a_class_of_a_prompt(name):
    kind = kind_of(name, "SequenceClassification")
    classifier = classifier_of(name, kind, **padding_of(name))
    model = bridge(name, torch.float64, **padding_of(name)) if available(bridge, name) else None
    for tokens, place in zip(PROMPTS, PLACES, strict=True):
        logits = own_output(classifier, tokens).logits[0]
        best = int(logits.argmax())
        for target, expected in [
            (lm.targets.hf_classifier(classifier, 3, of="logit"), logits[3]),
            (lm.targets.hf_classifier(classifier, "LABEL_3"), logits.softmax(-1)[3]),
            (lm.targets.hf_classifier(classifier, of="log_probability"), logits.log_softmax(-1)[best]),
            (lm.targets.class_difference(3, "LABEL_1", classifier), logits[3] - logits[1]),
        ]:
            expected = pytest.approx(expected.item(), abs=2e-6)
            assert explained_without_a_bridge(classifier, target, tokens) == expected
        if model is not None:
            # This target is the last one, the difference of two logits.
            value, row = value_of(model, target, tokens)
            assert value == expected
            assert row == (0 if name in ENCODERS else place)


@pytest.mark.parametrize("name", known("TokenClassification", OF_TOKENS))
def test_a_class_of_a_token(name):
    classifier = classifier_of(name, kind_of(name, "TokenClassification"), **padding_of(name))
    tokens = PROMPTS[1]
    logits = own_output(classifier, tokens).logits[0]
    for position in (0, 4, -1):
        target = lm.targets.hf_classifier(classifier, "LABEL_2", position=position)
        predicted = lm.targets.hf_classifier(classifier, of="logit", position=position)
        difference = lm.targets.class_difference(2, 0, classifier, position=position)
        expected = logits[position].softmax(-1)[2].item()
        assert explained_without_a_bridge(classifier, target, tokens) == pytest.approx(expected, abs=2e-6)
        value = explained_without_a_bridge(classifier, predicted, tokens)
        assert value == pytest.approx(logits[position].max().item(), abs=2e-6)
        value = explained_without_a_bridge(classifier, difference, tokens)
        assert value == pytest.approx((logits[position, 2] - logits[position, 0]).item(), abs=2e-6)
        if available(bridge, name):
            value, row = value_of(bridge(name, torch.float64, **padding_of(name)), target, tokens)
            assert (value, row) == (pytest.approx(expected, abs=2e-6), position % 6)


@pytest.mark.parametrize("name", known("QuestionAnswering", OF_TOKENS))
def test_where_an_answer_starts_and_ends(name):
    classifier = classifier_of(name, kind_of(name, "QuestionAnswering"), labels=2, **padding_of(name))
    output = own_output(classifier, TOKENS)
    model = bridge(name, torch.float64, **padding_of(name)) if available(bridge, name) else None
    for class_, own in (("start", output.start_logits[0]), ("end", output.end_logits[0])):
        best = int(own.argmax())
        for options, expected, place in [
            ({"of": "logit", "position": 3}, own[3], 3),
            ({"position": 3}, own.softmax(-1)[3], 3),
            ({"of": "log_probability"}, own.log_softmax(-1)[best], best),
            ({"of": "logit"}, own[best], best),
        ]:
            target = lm.targets.hf_classifier(classifier, class_, **options)
            expected = pytest.approx(expected.item(), abs=2e-6)
            assert explained_without_a_bridge(classifier, target, TOKENS) == expected
            if model is not None:
                assert value_of(model, target, TOKENS) == (expected, place)
    with pytest.raises(ValueError, match=r"class_: expected one of \['start', 'end'\], got None"):
        lm.targets.hf_classifier(classifier)
    with pytest.raises(ValueError, match="start and the end of an answer"):
        lm.targets.class_difference("start", "end", classifier)


@pytest.mark.parametrize("name", ENCODERS)
def test_one_of_several_choices(name):
    classifier = classifier_of(name, kind_of(name, "MultipleChoice"))
    choices = torch.stack([TOKENS, TOKENS.flip(0)])
    with torch.no_grad():
        logits = classifier(choices[None]).logits[0]
    target = lm.targets.hf_classifier(classifier)
    for tokens, expected in zip(choices, logits.tolist(), strict=True):
        assert explained_without_a_bridge(classifier, target, tokens) == pytest.approx(expected, abs=2e-6)
        if available(bridge, name):
            value, row = value_of(bridge(name, torch.float64), target, tokens)
            assert (value, row) == (pytest.approx(expected, abs=2e-6), 0)
    with pytest.raises(ValueError, match="class_: expected a whole number from 0 to 0, got 1"):
        lm.targets.hf_classifier(classifier, 1)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({}, 1),
        ({"problem_type": "regression"}, 1),
        ({"problem_type": "regression"}, 3),
        ({"problem_type": "multi_label_classification"}, 3),
        ({"problem_type": "multi_label_classification"}, 1),
        ({"problem_type": "single_label_classification"}, 3),
    ],
)
def test_measures_of_every_problem_type(name, settings, labels):
    kind = kind_of(name, "SequenceClassification")
    classifier = classifier_of(name, kind, labels, settings=settings, **padding_of(name))
    logit = own_output(classifier, PROMPTS[1]).logits[0]
    problem = settings.get("problem_type")
    probability = logit.sigmoid() if problem == "multi_label_classification" else logit.softmax(-1)
    if problem == "regression" or (problem is None and labels == 1):
        measures = {"probability": logit, "log_probability": logit, "logit": logit}
    else:
        measures = {"probability": probability, "log_probability": probability.log(), "logit": logit}
    for of, expected in measures.items():
        target = lm.targets.hf_classifier(classifier, labels - 1, of=of)
        value = explained_without_a_bridge(classifier, target, PROMPTS[1])
        assert value == pytest.approx(expected[-1].item(), abs=2e-6)
    with pytest.raises(ValueError, match="of: expected 'probability', 'log_probability' or 'logit'"):
        lm.targets.hf_classifier(classifier, 0, of="odds")
    # The parameters contain the class that was explained.
    said = lm.methods.GradientAttention(target=lm.targets.hf_classifier(classifier, 0)).parameters()["target"]
    assert said["of"] == ("logit" if measures["probability"] is logit else "probability")
    assert said["multi_label"] == (problem == "multi_label_classification")


@NO_BERT
def test_a_reranker_is_not_constant():
    classifier, model = pair("bert", labels=1)
    for method in (lm.methods.Occlusion, lm.methods.InputGradients):
        found = lm.run(model, TOKENS, method(target=lm.targets.hf_classifier(classifier)), queries=[0])
        assert found.scores.abs().min() > 1e-4


@NO_BERT
def test_a_classifier_reads_token_types():
    classifier, model = pair("bert")
    types = torch.tensor([0, 0, 0, 1, 1, 1])
    logits = own_output(classifier, TOKENS, token_type_ids=types[None]).logits[0]
    target = lm.targets.hf_classifier(classifier, 2, of="logit")
    value, row = value_of(model, target, TOKENS, token_type_ids=types)
    assert (value, row) == (pytest.approx(logits[2].item(), abs=2e-6), 0)


@pytest.mark.parametrize(
    ("classifier_dtype", "model_dtype", "accepted"),
    [
        (torch.float32, torch.float32, 1e-4),
        (torch.float32, torch.float64, 1e-4),
        (torch.bfloat16, torch.bfloat16, 0.1),
        (torch.bfloat16, torch.float32, 0.1),
    ],
)
@pytest.mark.parametrize("name", [name for name in ("bert", "llama") if available(bridge, name)])
def test_dtypes(name, classifier_dtype, model_dtype, accepted):
    kind = kind_of(name, "SequenceClassification")
    classifier = classifier_of(name, kind, dtype=classifier_dtype, **padding_of(name))
    logits = own_output(classifier, PROMPTS[1]).logits[0]
    target = lm.targets.hf_classifier(classifier, 2, of="logit")
    value, _ = value_of(bridge(name, model_dtype, **padding_of(name)), target, PROMPTS[1])
    assert value == pytest.approx(logits[2].item(), abs=accepted)


@pytest.mark.parametrize(
    ("name", "model_class", "convert", "options"),
    [
        ("gpt2", "HookedTransformer", "convert_gpt2_weights", {"act_fn": "gelu_new", "eps": 1e-5}),
        ("bert", "HookedEncoder", "convert_bert_weights", {"act_fn": "gelu", "eps": 1e-12}),
    ],
)
def test_hooked_models(name, model_class, convert, options):
    wrapped = wrapped_model(name, torch.float64, **padding_of(name))
    # The conversion of BERT also reads the other weights of BertForPreTraining.
    if name == "bert":
        whole = tiny_models.randomise(transformers.BertForPreTraining(wrapped.config)).double().eval()
        whole.bert.load_state_dict(wrapped.bert.state_dict(), strict=False)
        wrapped = whole
    try:
        model = to_hooked(wrapped, model_class, convert, n_ctx=32, **options)
    except Unavailable:
        pytest.skip(f"no {model_class} here")
    classifier = classifier_of(name, kind_of(name, "SequenceClassification"), **padding_of(name))
    logits = own_output(classifier, PROMPTS[1]).logits[0]
    value, row = value_of(model, lm.targets.hf_classifier(classifier, 3, of="logit"), PROMPTS[1])
    assert (value, row) == (pytest.approx(logits[3].item(), abs=1e-5), 0 if name == "bert" else 4)


# ---------------------------------------------------------------------- every path that uses the target


@NO_GPT2
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches(side):
    classifier, model = pair("gpt2")
    prompts = [TOKENS, TOKENS[:3], PROMPTS[2], torch.tensor([7, EOS])]
    target = lm.targets.hf_classifier(classifier, 1, of="logit")
    expected = [own_output(classifier, tokens).logits[0, 1].item() for tokens in prompts]
    maps = list(lm.run_many(model, prompts, lm.methods.GradientAttention(target=target), padding_side=side))
    values = [found.provenance["details"]["target_value"][0] for found in maps]
    assert values == pytest.approx(expected, abs=2e-6)
    assert [found.default_query for found in maps] == [5, 2, 3, 0]
    method = lm.methods.Occlusion(target=target, replacements=[11])
    together = lm.run_many(model, prompts, method, queries=[-1], padding_side=side)
    for tokens, found in zip(prompts, together, strict=True):
        assert found.scores[0, 0].tolist() == pytest.approx(replaced(classifier, tokens, 11, 1), abs=2e-6)


def replaced(classifier, tokens, other, label):
    """Return the decrease of the classifier's own logit if each token is replaced by another."""
    clean, lost = own_output(classifier, tokens).logits[0, label], []
    for place in range(len(tokens)):
        changed = tokens.clone()
        changed[place] = other
        lost.append((clean - own_output(classifier, changed).logits[0, label]).item())
    return lost


@pytest.mark.parametrize("name", [name for name in ("bert", "gpt2", "llama") if available(bridge, name)])
@pytest.mark.parametrize("other", [11, EOS, 0])
def test_occlusion_is_that_of_the_classifier_itself(name, other):
    """Let the classifier search for its token in changed prompts, in which the end is replaced by a word."""
    classifier, model = pair(name)
    tokens = torch.tensor([5, 9, 12, 7, 30, EOS if other != EOS else 21])
    target = lm.targets.hf_classifier(classifier, 3, of="logit")
    found = lm.run(model, tokens, lm.methods.Occlusion(target=target, replacements=[other]), queries=[-1])
    assert found.scores[0, 0].tolist() == pytest.approx(replaced(classifier, tokens, other, 3), abs=2e-6)


@NO_GPT2
def test_hidden_tokens_leave_the_position_where_it_is():
    classifier, model = pair("gpt2")
    target = lm.targets.hf_classifier(classifier, 3, of="logit")
    for by in ("mask", "values"):
        found = lm.run(model, PROMPTS[1], lm.methods.Occlusion(target=target, by=by), queries=[-1])
        # The target reads position 4, which sees no later position.
        assert found.scores[0, 0, -1].abs() < 1e-12
        assert found.scores[0, 0, :4].abs().min() > 1e-6


@pytest.mark.parametrize("name", [name for name in ("bert", "gpt2", "llama") if available(bridge, name)])
def test_gradients_are_those_of_the_classifier_itself(name):
    classifier, model = pair(name)
    blocks = {"bert": "bert.encoder.layer", "gpt2": "transformer.h", "llama": "model.layers"}[name]
    kept = []

    def leaf(module, args, kwargs):
        x = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_(True)
        kept.append(x)
        return (x, *args[1:]), {**kwargs, **({} if args else {"hidden_states": x})}

    handle = classifier.get_submodule(f"{blocks}.0").register_forward_pre_hook(leaf, with_kwargs=True)
    logit = classifier(PROMPTS[1][None]).logits[0, 3]
    handle.remove()
    (gradient,) = torch.autograd.grad(logit, kept)
    target = lm.targets.hf_classifier(classifier, 3, of="logit")
    found = lm.run(model, PROMPTS[1], lm.methods.InputGradients(target=target), queries=[-1])
    assert found.scores[0, 0].tolist() == pytest.approx(gradient[0].norm(dim=-1).tolist(), abs=1e-5)
    method = lm.methods.InputGradients(target=target, score="integrated", baseline="mean")
    found = lm.run(model, PROMPTS[1], method, queries=[-1])
    assert abs(found.provenance["details"]["convergence_delta"][0][0]) < 0.05


@pytest.mark.parametrize("name", [name for name in ("bert", "gpt2") if available(bridge, name)])
def test_input_maps_and_removal_curves(name):
    classifier, model = pair(name)
    target = lm.targets.hf_classifier(classifier, 3, of="logit")
    found = lm.input_map(model, PROMPTS[1], target=target)
    assert found.scores.abs().sum() > 0
    rows = torch.arange(6.0)
    curve = removal_curves(model, PROMPTS[1], rows, target=target, removal=ReplaceTokens(11), exact=0, beam=0)
    for count, value in enumerate(curve.deletion):
        changed = PROMPTS[1].clone()
        changed[list(curve.positions[:count])] = 11
        assert value == pytest.approx(own_output(classifier, changed).logits[0, 3].item(), abs=2e-6)


@NO_GPT2
def test_every_method_with_a_target():
    classifier, model = pair("gpt2")
    target = lm.targets.hf_classifier(classifier, 3, of="logit")
    for method in (lm.methods.AttentionAttribution, lm.methods.Gim, lm.methods.GradientAttention):
        kept = {"queries": [-1]} if method is lm.methods.Gim else {}
        assert lm.run(model, PROMPTS[1], method(target=target), **kept).scores.abs().sum() > 0
    found = lm.run(model, TOKENS, lm.methods.ContextLength(target=target), queries=[-1])
    cuts = torch.stack([own_output(classifier, TOKENS[start:]).logits[0, 3] for start in range(6)])
    assert found.scores[0, 0, :5].tolist() == pytest.approx((cuts[:-1] - cuts[1:]).tolist(), abs=2e-6)
    with pytest.raises(ValueError, match="because the positions before the cut do not exist"):
        # The shortest context is all padding, and does not contain the token that is read.
        lm.run(model, PROMPTS[1], lm.methods.ContextLength(target=target), queries=[-1])
    # A row that does not see the whole prompt cannot show the effect of all its tokens.
    for queries in ([3], [4]):
        with pytest.raises(ValueError, match=r"expected the last row \(queries=\[-1\]\), got a row"):
            lm.run(model, PROMPTS[1], lm.methods.InputGradients(target=target), queries=queries)
    with pytest.raises(ValueError, match=r"one number of the prompt.*queries=\[-1\]"):
        lm.run(model, PROMPTS[1], lm.methods.InputGradients(target=target))


@pytest.mark.skipif(not available(bridge, "llama"), reason="no Llama in a Bridge here")
def test_cut_contexts_of_an_answer():
    """Explain a logit, which reads one position; a probability would also read removed positions."""
    classifier, model = pair("llama", "QuestionAnswering", labels=2)
    target = lm.targets.hf_classifier(classifier, "end", of="logit", position=-1)
    found = lm.run(model, TOKENS, lm.methods.ContextLength(target=target), queries=[-1])
    cuts = torch.stack([own_output(classifier, TOKENS[start:]).end_logits[0, -1] for start in range(6)])
    assert found.scores[0, 0, :5].tolist() == pytest.approx((cuts[:-1] - cuts[1:]).tolist(), abs=2e-6)
    probability = lm.targets.hf_classifier(classifier, "end", position=-1)
    with pytest.raises(ValueError, match="target that reads only the row's position, because the positions"):
        lm.run(model, TOKENS, lm.methods.ContextLength(target=probability), queries=[-1])


@NO_BERT
def test_rows_of_a_classifier_of_tokens():
    classifier, model = pair("bert", "TokenClassification")
    logits = own_output(classifier, TOKENS).logits[0]
    # Without a position, the target is read at each row's own.
    for position, queries in ((None, list(range(6))), (2, [2])):
        target = lm.targets.hf_classifier(classifier, 1, of="logit", position=position)
        method = lm.methods.Occlusion(target=target, replacements=[11])
        found = lm.run(model, TOKENS, method, queries=queries)
        for place in range(6):
            changed = TOKENS.clone()
            changed[place] = 11
            lost = (logits[:, 1] - own_output(classifier, changed).logits[0, :, 1])[queries]
            assert found.scores[0, :, place].tolist() == pytest.approx(lost.tolist(), abs=2e-6)
        assert found.default_query_position == (0 if position is None else position)
    with pytest.raises(ValueError, match="position: expected the position of a token, which Bert"):
        value_of(model, lm.targets.hf_classifier(classifier, 1), TOKENS)
    with pytest.raises(ValueError, match=r"position: expected .* from -6 to 5, got 6"):
        value_of(model, lm.targets.hf_classifier(classifier, 1, position=6), TOKENS)


@NO_GPT2
def test_without_a_padding_token():
    """Run a classifier without a padding token, which accepts one prompt at a time."""
    classifier = classifier_of("gpt2", "GPT2ForSequenceClassification", settings={"pad_token_id": None})
    assert classifier.config.pad_token_id is None
    target = lm.targets.hf_classifier(classifier, 3, of="logit")
    method = lm.methods.Occlusion(target=target, replacements=[11])
    found = lm.run(bridge("gpt2", torch.float64), TOKENS, method, queries=[-1])
    assert found.scores[0, 0].tolist() == pytest.approx(replaced(classifier, TOKENS, 11, 3), abs=2e-6)


@NO_BERT
def test_the_classifier_stays_as_it_was():
    classifier, model = pair("bert")
    classifier.set_attn_implementation("sdpa")
    classifier.bert.pooler.dense.weight.requires_grad_(False)
    frozen = [parameter.requires_grad for parameter in classifier.parameters()]
    target = lm.targets.hf_classifier(classifier, 3)
    lm.run(
        model,
        TOKENS,
        [lm.methods.Occlusion(target=target), lm.methods.InputGradients(target=target)],
        queries=[0],
    )
    assert [parameter.requires_grad for parameter in classifier.parameters()] == frozen
    assert all(parameter.grad is None for parameter in classifier.parameters())
    assert classifier.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(module) or module._forward_hooks for module in classifier.modules())


# ---------------------------------------------------------------------- encoder-decoders


PAIRS = [name for name in ("t5", "bart") if available(bridge, name)]


def encoder_decoder(name, kind):
    """Return a classifier, a source with two end-of-sequence tokens, and the target that it reads."""
    prefix = {"t5": "T5", "bart": "Bart"}[name]
    classifier = classifier_of(name, f"{prefix}For{kind}", labels=2 if "Question" in kind else 5)
    source = torch.tensor([5, 9, classifier.config.eos_token_id, 30, classifier.config.eos_token_id, 7])
    start = torch.tensor([classifier.config.decoder_start_token_id])
    return classifier, source, torch.cat([start, source[:-1]])


def mapped(name):
    try:
        model = bridge(name, torch.float64)
        lm.run(model, (TOKENS, TOKENS), "attention")
    except lm.UnsupportedModelError as problem:
        pytest.skip(str(problem))
    return model


@pytest.mark.parametrize("name", PAIRS)
def test_classifiers_that_read_the_decoder(name):
    model = mapped(name)
    classifier, source, shifted = encoder_decoder(name, "SequenceClassification")
    logits = own_output(classifier, source).logits[0]
    target = lm.targets.hf_classifier(classifier, 3, of="logit")
    for part in ("decoder", "cross"):
        value, row = value_of(model, target, (source, shifted), part=part)
        assert (value, row) == (pytest.approx(logits[3].item(), abs=2e-6), 4)
    found = lm.run(
        model,
        (source, shifted),
        lm.methods.Occlusion(target=target, replacements=[11]),
        part="joint",
        queries=[-1],
    )
    # These are tokens of the source, which the decoder still reads.
    for place in (0, 3):
        changed = source.clone()
        changed[place] = 11
        with torch.no_grad():
            other = classifier(changed[None], decoder_input_ids=shifted[None]).logits[0, 3]
        assert found.scores[0, 0, place].item() == pytest.approx((logits[3] - other).item(), abs=2e-6)
    method = lm.methods.GradientAttention(target=target)
    with pytest.raises(ValueError, match=r"expected a map of part='decoder', .* reads the decoder, got"):
        lm.run(model, (source, shifted), method, part="encoder")
    with pytest.raises(
        ValueError, match=r"the target that the classifier's own decoder reads.*, \[\d+, 5, 9"
    ):
        lm.run(model, (source, shifted[:3]), method, part="decoder")
    without = torch.tensor([5, 9, 12])
    with pytest.raises(ValueError, match=r"expected a source with the end-of-sequence token [12], because"):
        lm.run(model, (without, shifted[:3]), method, part="decoder")


@pytest.mark.parametrize("name", PAIRS)
def test_other_classifiers_of_encoder_decoders(name):
    model = mapped(name)
    # T5 also has a classifier of the encoder alone.
    if name == "t5":
        classifier, source, shifted = encoder_decoder(name, "TokenClassification")
        own = own_output(classifier, source).logits[0, 2, 1].item()
        target = lm.targets.hf_classifier(classifier, 1, of="logit", position=2)
        value, _ = value_of(model, target, (source, shifted))
        with pytest.raises(ValueError, match=r"expected a map of part='encoder', because .* has no decoder"):
            value_of(model, target, (source, shifted), part="decoder")
        with pytest.raises(TypeError, match=r"T5ForQuestionAnswering, which has no base model.*targets.head"):
            lm.targets.hf_classifier(transformers.T5ForQuestionAnswering(classifier.config).eval(), "start")
    else:
        classifier, source, shifted = encoder_decoder(name, "QuestionAnswering")
        own = own_output(classifier, source).end_logits[0, 2].item()
        target = lm.targets.hf_classifier(classifier, "end", of="logit", position=2)
        value, row = value_of(model, target, (source, shifted), part="decoder")
        assert row == 2
    assert value == pytest.approx(own, abs=2e-6)


# ---------------------------------------------------------------------- classifiers that do not fit


def test_names_of_labels():
    names = {0: "negative", 1: "neutral", 2: "positive"}
    settings = {"id2label": names, "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}}
    classifier = classifier_of("bert", "BertForSequenceClassification", 3, settings=settings)
    for label in (2, "positive", "LABEL_2"):
        target = lm.targets.hf_classifier(classifier, label, of="logit")
        expected = own_output(classifier, TOKENS).logits[0, 2].item()
        assert explained_without_a_bridge(classifier, target, TOKENS) == pytest.approx(expected, abs=2e-6)
    for wrong, message in [
        ("Positive", r"class_: expected one of \['negative', .*got 'Positive'; did you mean 'positive'\?"),
        ("spam", r"class_: expected one of \['negative', .*got 'spam'$"),
        (3, "class_: expected a whole number from 0 to 2, got 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            lm.targets.hf_classifier(classifier, wrong)
    with pytest.raises(TypeError, match="class_: expected a whole number"):
        lm.targets.hf_classifier(classifier, 1.0)
    with pytest.raises(ValueError, match="good, bad: expected two different classes, got 'positive' and 2"):
        lm.targets.class_difference("positive", 2, classifier)
    with pytest.raises(TypeError, match="bad: expected a class's name or number, 0 or more, got None"):
        lm.targets.class_difference("positive", None, classifier)
    with pytest.raises(ValueError, match="bad: expected one of"):
        lm.targets.class_difference("positive", "spam", classifier)


@pytest.mark.parametrize(
    ("settings", "both"),
    [
        ({"id2label": {0: "negative", 1: "positive", 2: "negative"}}, "0 and 2"),
        (
            {"id2label": {0: "negative", 1: "x", 2: "y"}, "label2id": {"x": 0, "negative": 1, "y": 2}},
            "0 and 1",
        ),
    ],
)
def test_a_name_of_two_classes_is_an_error_with_both_numbers(settings, both):
    classifier = classifier_of("bert", "BertForSequenceClassification", 3, settings=settings)
    message = (
        f"expected the name of one class, got 'negative', the name of the classes {both}; give the number"
    )
    for argument, ask in (
        ("class_", lambda: lm.targets.hf_classifier(classifier, "negative")),
        ("good", lambda: lm.targets.class_difference("negative", 2, classifier)),
        ("bad", lambda: lm.targets.class_difference(2, "negative", classifier)),
    ):
        with pytest.raises(ValueError, match=f"{argument}: {message}"):
            ask()
    target = lm.targets.hf_classifier(classifier, 0, of="logit")
    context = Context(TOKENS, classifier.base_model(TOKENS[None])[0].detach())
    assert target.in_words(context) == "logit of 'negative' (class 0)"


def test_models_that_are_no_classifiers():
    with pytest.raises(TypeError, match=r"BertForMaskedLM, a language model; .* lm.targets.token"):
        lm.targets.hf_classifier(wrapped_model("bert"), 2)
    with pytest.raises(TypeError, match="AutoModelForSequenceClassification"):
        lm.targets.hf_classifier(torch.nn.Linear(2, 2), 2)
    with pytest.raises(TypeError, match="BertModel, which has no base model"):
        lm.targets.hf_classifier(wrapped_model("bert").bert, 2)
    adapted = torch.nn.Linear(2, 2)
    adapted.merge_and_unload = None
    with pytest.raises(TypeError, match=r"use the model of hf_model.merge_and_unload\(\)"):
        lm.targets.hf_classifier(adapted, 2)
    classifier = classifier_of("bert", "BertForSequenceClassification")
    with pytest.raises(ValueError, match=r"training mode; call hf_model.eval\(\) first"):
        lm.targets.hf_classifier(classifier.train(), 2)
    target = lm.targets.hf_classifier(classifier.eval(), 2)
    classifier.train()
    with pytest.raises(ValueError, match=r"training mode; call hf_model.eval\(\) first"):
        explained_without_a_bridge(classifier, target, TOKENS)
    target = lm.targets.hf_classifier(classifier.eval(), 2, position=3)
    with pytest.raises(ValueError, match="position: expected None for BertForSequenceClassification"):
        explained_without_a_bridge(classifier, target, TOKENS)


@NO_BERT
def test_a_classifier_of_other_weights_is_refused():
    classifier = classifier_of("bert", "BertForSequenceClassification")
    logits = own_output(classifier, TOKENS).logits[0]
    other = bridge("bert", torch.float64, seed=1)
    target = lm.targets.hf_classifier(classifier, 2)
    with pytest.raises(ValueError, match=r"weights of the mapped model.*load both from the same") as raised:
        value_of(other, target, TOKENS)
    numbers = [f"while the classifier gives {logit:.6g}" for logit in logits.tolist()]
    assert any(number in str(raised.value) for number in numbers)
    wide = bridge("bert", torch.float64, hidden_size=36, num_attention_heads=6)
    with pytest.raises(ValueError, match=r"shape \[1, 6, 36\], got one with the shape \[1, 6, 24\]"):
        value_of(wide, target, TOKENS)


class _OfTwoLayers(transformers.BertForSequenceClassification):
    """A classifier that reads more than the last hidden states."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **{**kwargs, "output_hidden_states": True})
        if output.hidden_states is not None:
            output.logits = output.logits + output.hidden_states[1][:, 0, :5]
        return output


@NO_BERT
def test_a_classifier_that_reads_more_is_refused():
    classifier, model = pair("bert")
    classifier.__class__ = _OfTwoLayers
    target = lm.targets.hf_classifier(classifier, 2)
    with pytest.raises(ValueError, match=r"of the base model, BertModel, got .*lm.targets.head"):
        value_of(model, target, TOKENS)


class _WithoutTypes(transformers.BertForSequenceClassification):
    """A classifier without token types, like that of DistilBERT."""

    def forward(self, input_ids=None, attention_mask=None, return_dict=None):
        return super().forward(input_ids, attention_mask, return_dict=return_dict)


def test_inputs_that_the_classifier_does_not_take():
    """Map a HookedEncoder, whose token types of zero correspond to a classifier without token types."""
    classifier = classifier_of("bert", "BertForSequenceClassification")
    classifier.__class__ = _WithoutTypes
    target = lm.targets.hf_classifier(classifier, 1, of="logit")
    with torch.no_grad():
        hidden = classifier.base_model(TOKENS[None])[0]
    types = torch.zeros_like(TOKENS)
    value = target.of_prompt(Context(TOKENS, hidden, None, {"token_type_ids": types}))(hidden).item()
    assert value == pytest.approx(own_output(classifier, TOKENS).logits[0, 1].item(), abs=2e-6)
    with pytest.raises(ValueError, match=r"to run on the prompt's inputs .*'token_type_ids'.*TypeError"):
        target.of_prompt(Context(TOKENS, hidden, None, {"token_type_ids": types + 1}))
