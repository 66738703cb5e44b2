from __future__ import annotations

import re

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional

import lens_mix as lm
from tests import tiny_models
from tests.matrix import build_or_skip, case_of, cases, model_of, prompt_of
from tests.tiny_models import (
    available,
    bridge,
    gpt2_like,
    hooked_encoder,
    toy_tokenizer,
    wrapped_model,
)

TOKENS = torch.tensor([5, 9, 12, 7, 30, 21])


def clean_value(model, target, tokens=TOKENS):
    """Return the value of the target in the clean pass, from the map's provenance."""
    found = lm.run(model, tokens, lm.methods.GradientAttention(target=target))
    return found.provenance["details"]["target_value"][0]


@pytest.fixture(scope="module")
def logits(model):
    with torch.no_grad():
        return model(TOKENS[None])[0]


def test_tokens_and_measures(model, logits):
    best = int(logits[-1].argmax())
    targets = lm.targets
    probability = logits.softmax(-1)
    for target, expected in [
        (targets.predicted(), probability[-1, best]),
        (targets.predicted(of="logit"), logits[-1, best]),
        (targets.predicted(2, of="log_probability"), logits[2].log_softmax(-1).max()),
        (targets.token(17), probability[-1, 17]),
        (targets.token("w17"), probability[-1, 17]),
        (targets.token("w17", position=1, of="logit"), logits[1, 17]),
        (targets.probability("w9", -2), probability[-2, 9]),
        (targets.probability(), probability[-1, best]),
        (targets.logit("w9", 3), logits[3, 9]),
        (targets.logit(position=0), logits[0].max()),
        (targets.logit_difference("w9", 12), logits[-1, 9] - logits[-1, 12]),
        (targets.logit_difference(9, 12, position=0), logits[0, 9] - logits[0, 12]),
        (lambda out: out[:, -1, 3] * 2, 2 * logits[-1, 3]),
    ]:
        assert clean_value(model, target) == pytest.approx(expected.item(), abs=1e-12)


def test_a_string_is_the_target_for_that_token(model, logits):
    expected = logits[-1].log_softmax(-1)[17]
    assert clean_value(model, "w17") == pytest.approx(expected.item(), abs=1e-12)
    method = lm.methods.Occlusion(target="w17")
    m = lm.run(model, TOKENS, method, queries=[-1])
    exact = lm.methods.Occlusion(target=lm.targets.token("w17", of="log_probability"))
    assert m.scores.equal(lm.run(model, TOKENS, exact, queries=[-1]).scores)
    assert m.parameters["target"] == {
        "target": "Text",
        "token": "w17",
        "position": None,
        "of": "log_probability",
    }
    assert torch.equal(lm.run_again(model, m).scores, m.scores)


@pytest.mark.parametrize(
    "explain",
    [
        lambda model, target: lm.input_map(model, TOKENS, target=target).scores,
        lambda model, target: (
            lm.experiments.head_importance(model, [TOKENS], by="taylor", targets=target).scores
        ),
    ],
)
def test_a_string_is_a_target_outside_methods_too(model, explain):
    exact = lm.targets.token("w17", of="log_probability")
    assert torch.equal(explain(model, "w17"), explain(model, exact))


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("w3 w4", r"which is 2 tokens: \['w3', 'w4'\]; lm.targets.token\(3\) is the first of them alone"),
        ("Paris", r"token of the model's vocabulary, got 'Paris', .* its unknown token '<eos>'"),
        ("", r"which is 0 tokens: \[\]$"),
    ],
)
def test_a_text_that_is_not_one_token_says_what_to_write(model, text, advice):
    with pytest.raises(ValueError, match=advice):
        lm.input_map(model, TOKENS, target=text)


def test_a_text_without_its_space_says_so():
    class Tokenizer:
        def __call__(self, text, add_special_tokens=False):
            return {"input_ids": [7] if text == " Paris" else [1, 2]}

        def convert_ids_to_tokens(self, ids):
            return list(map(str, ids))

    context = lm.targets.Context(TOKENS, torch.zeros(1, 6, 50), Tokenizer())
    with pytest.raises(ValueError, match=r"got 'Paris', which is 2 tokens.*; write ' Paris'"):
        context.token_id("Paris")
    assert context.token_id(" Paris") == 7


def test_losses(model, logits):
    following = functional.cross_entropy(logits[:-1], TOKENS[1:])
    assert clean_value(model, lm.targets.loss()) == pytest.approx(following.item(), abs=1e-12)
    given = functional.cross_entropy(logits[2:3], torch.tensor([8]))
    assert clean_value(model, lm.targets.loss("w8", 2)) == pytest.approx(given.item(), abs=1e-12)


def test_predicted_stays_what_the_clean_pass_predicted(model, logits):
    best = int(logits[-1].argmax())
    by_name = lm.run(model, TOKENS, lm.methods.AttentionAttribution(target=lm.targets.predicted()))
    by_number = lm.run(model, TOKENS, lm.methods.AttentionAttribution(target=lm.targets.token(best)))
    assert torch.equal(by_name.scores, by_number.scores)


def test_positions_do_not_count_padding(model):
    prompts = [TOKENS, TOKENS[:3]]
    for target in (lm.targets.token(7, -1), lm.targets.token(7, 1), lm.targets.loss()):
        alone = [clean_value(model, target, prompt) for prompt in prompts]
        for side in ("left", "right"):
            maps = lm.run_many(model, prompts, lm.methods.GradientAttention(target=target), padding_side=side)
            values = [m.provenance["details"]["target_value"][0] for m in maps]
            assert values == pytest.approx(alone, abs=1e-12)


def test_a_callable_sees_one_prompt_without_padding(model):
    shapes = set()

    def function(logits):
        shapes.add(tuple(logits.shape[1:]))
        return logits[:, -1, 4]

    list(lm.run_many(model, [TOKENS, TOKENS[:3]], lm.methods.AttentionAttribution(target=function)))
    assert shapes == {(6, 50), (3, 50)}


def test_masked_token():
    tokenizer = toy_tokenizer()
    tokenizer.mask_token = "w30"
    if available(bridge, "bert"):
        encoder = bridge("bert", torch.float64, tokenizer=tokenizer)
    else:
        encoder = hooked_encoder(torch.float64, tokenizer=tokenizer)
    with torch.no_grad():
        out = encoder(TOKENS[None])[0].softmax(-1)
    by_mask = clean_value(encoder, lm.targets.masked_token("w8"))
    assert by_mask == pytest.approx(out[4, 8].item(), abs=1e-12)
    assert clean_value(encoder, lm.targets.masked_token(position=2)) == (
        pytest.approx(out[2].max().item(), abs=1e-12)
    )
    with pytest.raises(ValueError, match="one mask token, got 0"):
        clean_value(encoder, lm.targets.masked_token("w8"), TOKENS[:3])
    with pytest.raises(ValueError, match="expected the masked position"):
        clean_value(gpt2_like(torch.float64), lm.targets.masked_token(4))


@pytest.mark.skipif(not available(bridge, "bert"), reason="no TransformerBridge here")
def test_a_classifier_in_the_place_of_next_sentence_prediction():
    """Map a model with a classifier instead of next-sentence prediction, whose output is [batch, class]."""
    import transformers
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    torch.manual_seed(0)
    source = transformers.BertForNextSentencePrediction(wrapped_model("bert").config)
    source.cls.seq_relationship = torch.nn.Linear(24, 5)
    tiny_models.randomise(source)
    source = source.double().eval()
    model = build_bridge_from_module(source, architecture="BertForMaskedLM", hf_config=source.config)
    with torch.no_grad():
        out = model(TOKENS[None], return_type="logits")
    classes = (out if torch.is_tensor(out) else out.logits)[0]
    assert classes.shape == (5,)
    for target, expected in [
        (lm.targets.class_(3), classes.softmax(-1)[3]),
        (lm.targets.class_(of="logit"), classes.max()),
        (lm.targets.predicted(), classes.softmax(-1).max()),
        (lm.targets.loss(2), -classes.log_softmax(-1)[2]),
        (lm.targets.class_difference(2, 4), classes[2] - classes[4]),
    ]:
        assert clean_value(model, target) == pytest.approx(expected.item(), abs=1e-12)
    found = lm.run(model, TOKENS, lm.methods.AttentionAttribution(target=lm.targets.class_(3), n_steps=32))
    assert max(map(abs, found.provenance["details"]["completeness_gap"])) < 1e-4
    assert found.scores.abs().max() > 1e-4
    # In the last layer, a classifier with a pooler reads the first position only.
    assert not found.scores[1, 1:].any()
    assert found.scores[1, 0].abs().min() > 0
    with pytest.raises(ValueError, match=r"k: expected a whole number from 0 to 4"):
        clean_value(model, lm.targets.class_(7))
    with pytest.raises(ValueError, match=r"bad: expected a whole number from 0 to 4, got 5"):
        clean_value(model, lm.targets.class_difference(1, 5))
    with pytest.raises(ValueError, match="label: expected the class"):
        clean_value(model, lm.targets.loss())


def test_head_reads_the_last_residual(model, logits):
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS[None])
    resid = cache["resid_post", -1][0]
    seen = []

    def function(residual):
        seen.append(tuple(residual.shape))
        return residual[:, -1].sum(-1)

    assert clean_value(model, lm.targets.head(function)) == pytest.approx(resid[-1].sum().item(), abs=1e-10)
    assert seen[0] == (1, 6, 24)
    normed = model.ln_final(resid[None])[0]
    after = lm.targets.head(function, after_final_norm=True)
    assert clean_value(model, after) == pytest.approx(normed[-1].sum().item(), abs=1e-10)
    # The unembedding of the final norm gives the logits, so both targets have the same map.
    unembed = model.W_U.detach()
    bias = getattr(model.unembed, "b_U", None)
    shift = 0.0 if bias is None else bias[8].detach()
    by_head = lm.targets.head(lambda r: r[:, -1] @ unembed[:, 8] + shift, after_final_norm=True)
    one = lm.run(model, TOKENS, lm.methods.AttentionAttribution(target=by_head))
    two = lm.run(model, TOKENS, lm.methods.AttentionAttribution(target=lm.targets.logit(8)))
    assert (one.scores - two.scores).abs().max() <= 1e-10


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda t: t.token("w3 w4"), ValueError, "expected the text of one token.*2 tokens"),
        (lambda t: t.token(50), ValueError, "expected a whole number from 0 to 49, got 50"),
        (
            lambda t: t.token(3, position=6),
            ValueError,
            "position: expected .* from -6 to 5, got 6",
        ),
        (lambda t: t.token(3, position=1.0), TypeError, "position: expected a text of the prompt"),
        (lambda t: t.logit_difference("w3", 3), ValueError, "two different tokens"),
        (lambda t: t.class_(0), ValueError, r"output is \[batch, class\]"),
        (lambda t: t.class_difference(0, 1), ValueError, r"class_difference: .*targets.hf_classifier"),
        (lambda t: lambda logits: logits[:, -1], ValueError, "one number per copy"),
        (lambda t: lambda logits: logits[:, -1].argmax(-1), TypeError, "real numbers"),
        (lambda t: lambda logits: 3.0, TypeError, "got float"),
        (lambda t: lambda logits: logits[:, -1, 0] * float("nan"), ValueError, "finite"),
    ],
)
def test_targets_that_do_not_fit(model, make, error, message):
    with pytest.raises(error, match=message):
        lm.run(model, TOKENS, lm.methods.AttentionAttribution(target=make(lm.targets)))


def test_targets_refuse_at_once():
    with pytest.raises(ValueError, match="of: expected 'probability', 'log_probability' or 'logit'"):
        lm.targets.predicted(of="odds")
    with pytest.raises(TypeError, match="token: expected a token's text or number"):
        lm.targets.token(1.5)
    with pytest.raises(TypeError, match="function: expected a callable"):
        lm.targets.head("classifier")
    with pytest.raises(TypeError, match="target: expected the text of a token, one of"):
        lm.methods.GradientAttention(target=3)
    with pytest.raises(ValueError, match="good, bad: expected two different classes, got 1 and 1"):
        lm.targets.class_difference(1, 1)
    with pytest.raises(ValueError, match="position: expected None without hf_model, got 3"):
        lm.targets.class_difference(1, 2, position=3)


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        clean_value(gpt2_like(torch.float64), lm.targets.token("w17"))


def test_a_loss_needs_two_tokens(model):
    with pytest.raises(ValueError, match="at least two tokens"):
        clean_value(model, lm.targets.loss(), TOKENS[:1])


# ---------------------------------------------------------------------- a classifier that the Bridge dropped


@pytest.mark.skipif(not available(bridge, "bert"), reason="no BERT in a Bridge here")
def test_a_dropped_head_is_told():
    model = bridge("bert")
    assert lm.run(model, TOKENS, "attention").notes == ()
    model.original_model.config.architectures = ["BertForSequenceClassification"]
    (note,) = lm.run(model, TOKENS, "attention").notes
    assert "dropped the classifier of BertForSequenceClassification" in note
    assert "lm.targets.hf_classifier" in note
    with pytest.warns(UserWarning, match="the target reads logits, but the Bridge wraps a BertForMaskedLM"):
        lm.run(model, TOKENS, lm.methods.GradientAttention(target=lm.targets.masked_token(3, position=1)))
    model.original_model.config.architectures = ["BertModel"]
    assert lm.run(model, TOKENS, "attention").notes == ()


# ---------------------------------------------------------------------- the default row


def test_the_targets_row_is_the_one_that_is_meant(model):
    targets = lm.targets
    for target, expected in [
        (targets.predicted(), 5),
        (targets.token("w9", position=2), 2),
        (targets.logit_difference(9, 12, position=-3), 3),
        (targets.loss(), None),
        (lambda logits: logits[:, 1, 3], None),
    ]:
        found = lm.run(model, TOKENS, lm.methods.GradientAttention(target=target))
        assert found.default_query == expected
        assert found.default_query_position == (5 if expected is None else expected)
    rows = lm.run(model, TOKENS, lm.methods.InputGradients(target=targets.token("w9")))
    assert (rows.default_query, rows.select_queries([4]).default_query_position) == (5, 4)
    assert lm.run(model, TOKENS, "attention").default_query is None
    assert lm.rollout(lm.run(model, TOKENS, "attention"), drop_bos=True).default_query_position == 4


@pytest.mark.skipif(not available(bridge, "bert"), reason="no BERT in a Bridge here")
def test_the_first_row_of_an_encoder():
    found = lm.run(bridge("bert"), TOKENS, "attention")
    assert found.default_query == 0
    assert found.top(2) == found.top(2, query=0)
    assert lm.rollout(found).default_query_position == 0
    target = lm.targets.masked_token(9, position=3)
    assert lm.run(bridge("bert"), TOKENS, lm.methods.GradientAttention(target=target)).default_query == 3


# ---------------------------------------------------------------------- the prompt's own tokens


def test_own_tokens(model, logits):
    own = logits.log_softmax(-1)
    following = own[:-1].gather(-1, TOKENS[1:, None])[:, 0]
    for position in (0, 2, 4, -2, -6):
        expected = following[position % 6].item()
        assert clean_value(model, lm.targets.next_token(position)) == pytest.approx(expected, abs=1e-12)
    assert clean_value(model, lm.targets.next_token()) == pytest.approx(following[-1].item(), abs=1e-12)
    for start, stop in ((1, 6), (2, 4), (5, 6), (3, None), (-2, None), (-3, -1), (1, -1)):
        rows = slice(start % 6 - 1, (stop if stop and stop > 0 else 6 + (stop or 0)) - 1)
        target = lm.targets.span(start, stop)
        assert clean_value(model, target) == pytest.approx(following[rows].sum().item(), abs=1e-12)


def test_a_row_explains_the_token_after_it(model, logits):
    """Check that an input map reads the next token at each row, whatever the target's position is."""
    following = logits.log_softmax(-1)[:-1].gather(-1, TOKENS[1:, None])[:, 0]
    rows = lm.run(model, TOKENS, lm.methods.InputGradients(lm.targets.next_token()), queries=[1, 3, 4])
    for entry, position in zip(rows.explained, (1, 3, 4), strict=True):
        assert entry.value == pytest.approx(following[position].item(), abs=1e-6)
        assert entry.target == f"log probability of 'w{TOKENS[position + 1]}'"
        assert entry.prediction == f"w{int(logits[position].argmax())}"
    assert rows.default_query == 4
    method = lm.methods.InputGradients(score="times_input")
    alone = [
        lm.run(
            model,
            TOKENS,
            lm.methods.InputGradients(lm.targets.next_token(position), score="times_input"),
            queries=[position],
        ).scores[-1, 0]
        for position in (1, 3, 4)
    ]
    together = lm.run(
        model,
        TOKENS,
        lm.methods.InputGradients(lm.targets.next_token(), score="times_input"),
        queries=[1, 3, 4],
    )
    torch.testing.assert_close(together.scores[-1], torch.stack(alone), atol=1e-12, rtol=0)
    assert method.target != lm.targets.next_token()


def test_a_span_is_the_sum_of_its_tokens(model):
    def gradient(target, query):
        method = lm.methods.InputGradients(target, score="times_input")
        return lm.run(model, TOKENS, method, queries=[query]).scores[-1, 0]

    whole = gradient(lm.targets.span(2, 5), -1)
    each = sum(gradient(lm.targets.next_token(position), position) for position in (1, 2, 3))
    torch.testing.assert_close(whole, each, atol=1e-12, rtol=0)
    assert not whole[4:].any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_own_tokens_do_not_count_padding(model, side):
    prompts = [TOKENS, TOKENS[:3]]
    for target in (
        lm.targets.next_token(),
        lm.targets.next_token(1),
        lm.targets.span(1),
        lm.targets.span(-2),
    ):
        alone = [clean_value(model, target, prompt) for prompt in prompts]
        maps = lm.run_many(model, prompts, lm.methods.GradientAttention(target=target), padding_side=side)
        values = [m.provenance["details"]["target_value"][0] for m in maps]
        assert values == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
def test_own_tokens_of_a_decoder(name):
    model = build_or_skip(bridge, name, torch.float64)
    source, target = torch.tensor([5, 9, 12]), torch.tensor([2, 7, 30, 21])
    if case_of(f"bridge {name} decoder").refusal is not None:
        pytest.skip("this release cannot run the model")
    with torch.no_grad():
        output = model(source[None], decoder_input=target[None])
    own = (output if torch.is_tensor(output) else output.logits)[0].log_softmax(-1)
    following = own[:-1].gather(-1, target[1:, None])[:, 0]
    for given, expected in (
        (lm.targets.span(1, 3), following[:2].sum()),
        (lm.targets.span(-1), following[-1]),
        (lm.targets.next_token(), following[2]),
        (lm.targets.next_token(2), following[2]),
    ):
        found = lm.run(model, (source, target), lm.methods.InputGradients(given), part="joint", queries=[2])
        assert found.explained[0].value == pytest.approx(expected.item(), abs=1e-6)
    layers = lm.run(
        model, (source, target), lm.methods.GradientAttention(target=lm.targets.span(1)), part="decoder"
    )
    assert layers.provenance["details"]["target_value"][0] == pytest.approx(following.sum().item(), abs=1e-9)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            lm.targets.next_token(-1),
            r"next_token: .*that a token of the prompt follows, got (-1|5), the last of 6",
        ),
        (lm.targets.next_token(5), r"next_token: .*that a token of the prompt follows, got 5, the last of 6"),
        (lm.targets.next_token(6), "position: expected .* from -6 to 5, got 6"),
        (
            lm.targets.span(0, 3),
            r"span: expected 1 <= start < stop <= 6, .*nothing predicts the first token; got 0",
        ),
        (lm.targets.span(-6), r"span: expected 1 <= start < stop <= 6"),
        (lm.targets.span(-99, 3), r"span: expected 1 <= start < stop <= 6"),
        (lm.targets.span(3, 3), r"span: expected 1 <= start < stop <= 6, .*got 3 and 3"),
        (lm.targets.span(4, 2), r"span: expected 1 <= start < stop <= 6"),
        (lm.targets.span(2, 7), r"span: expected 1 <= start < stop <= 6, .*got 2 and 7"),
        (lm.targets.span(2, -7), r"span: expected 1 <= start < stop <= 6"),
        (lm.targets.span(6), r"span: expected 1 <= start < stop <= 6"),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", [lm.methods.InputGradients, lm.methods.GradientAttention, lm.methods.Gim])
def test_own_tokens_that_are_not_there(model, method, target, message):
    if method is not lm.methods.GradientAttention and target == lm.targets.next_token(6):
        # An input map reads its row's position instead.
        return
    with pytest.raises(ValueError, match=message):
        lm.run(model, TOKENS, method(target=target), queries=[-1])


def model_with_spaces(likely, bias):
    """Return a decoder that predicts tokens by their bias, with a tokenizer that keeps spaces."""
    vocabulary = {"<bos>": 0, "<unk>": 1, "Paris": 2, "ĠParis": 3, "Rome": 4, "ĠRome": 5, "ĠOslo": 6}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    # With name_or_path and add_bos_token, TransformerLens does not look for the tokenizer on the hub.
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        unk_token="<unk>",
        name_or_path="spaces",
        add_bos_token=True,
    )
    model = gpt2_like(torch.float64, tokenizer=wrapped)
    with torch.no_grad():
        model.unembed.b_U[likely] += bias
    return model


SPACED = torch.tensor([0, 3, 5, 4])


def find_space_notes(model, target, queries, method=lm.methods.InputGradients):
    found = lm.run(model, SPACED, method(target=target), queries=queries)
    return [note for note in found.notes if " a space, has " in note], found


@pytest.mark.parametrize(
    "method", [lm.methods.InputGradients, lm.methods.GradientAttention, lm.methods.Occlusion]
)
def test_a_text_without_its_space_gets_a_note(method):
    model, targets = model_with_spaces(3, 12), lm.targets
    for target in (targets.token("Paris"), targets.logit("Paris"), targets.logit_difference("Rome", "Paris")):
        (note,), found = find_space_notes(model, target, [-1], method)
        assert re.fullmatch(
            r"target: 'Paris' has probability [\de.-]+; ' Paris', with a space, has (0\.\d+|1)", note
        )
        # The note changes nothing about the number that is explained.
        assert "'Paris'" in found.explained[0].target
    assert find_space_notes(model, targets.loss("Paris"), [-1], method)[0]
    for target in (" Paris", targets.token(2), targets.predicted(), "Rome", " Oslo"):
        assert find_space_notes(model, target, [-1], method)[0] == []


def test_a_text_with_a_space_that_the_model_leaves_out_gets_a_note():
    (note,), _ = find_space_notes(model_with_spaces(4, 12), lm.targets.token(" Rome"), [1, 2, -1])
    assert note.startswith("target: ' Rome' has probability ")
    assert "; 'Rome', without a space, has " in note


EVERY_KIND = [
    lm.methods.InputGradients,
    lm.methods.Gim,
    lm.methods.GradientAttention,
    lm.methods.AttentionAttribution,
    lm.methods.Occlusion,
    lm.methods.ContextLength,
]


@pytest.mark.parametrize("method", EVERY_KIND)
def test_a_text_is_the_token_that_is_meant(method):
    model, targets = model_with_spaces(3, 12), lm.targets
    options = {"queries": [-1]}
    meant = targets.token(" Paris", of="log_probability")
    expected = lm.run(model, SPACED, method(target=meant), **options)
    (note,), found = find_space_notes(model, "Paris", [-1], method)
    assert found.scores.equal(expected.scores)
    assert found.explained[0].target.startswith("log probability of ' Paris'")
    assert re.fullmatch(
        r"target: 'Paris' has probability [\de.-]+; ' Paris', with a space, has (0\.\d+|1), and is "
        r"explained; lm\.targets\.token\('Paris'\) is exactly the text as it is written",
        note,
    )
    # A text that is the prediction is explained as it is written.
    notes, found = find_space_notes(model, " Paris", [-1], method)
    assert notes == []
    assert found.scores.equal(expected.scores)
    assert lm.run_again(model, found).scores.equal(found.scores)


def test_a_text_with_a_space_is_the_token_without_it():
    (note,), found = find_space_notes(model_with_spaces(4, 12), " Rome", [1, 2, -1])
    assert note.startswith("target: ' Rome' has probability ")
    assert "; 'Rome', without a space, has " in note
    # One token is explained in all rows, and not another one in each.
    assert {entry.target for entry in found.explained} == {"log probability of 'Rome'"}


def spaced_context(asked, other):
    """Return a context in which "Paris" and " Paris" have these probabilities at the last position."""
    probabilities = torch.full((7,), (1 - asked - other) / 5, dtype=torch.float64)
    probabilities[2], probabilities[3] = asked, other
    output = torch.stack([torch.ones(7, dtype=torch.float64) / 7, probabilities]).log()[None]
    tokenizer = model_with_spaces(3, 0).tokenizer
    return lm.targets.Context(torch.tensor([0, 5]), output, tokenizer)


@pytest.mark.parametrize(
    ("asked", "other", "token"),
    [
        (0.0002, 0.43, " Paris"),
        (0.0011, 0.0109, "Paris"),  # It is not ten times as probable.
        (0.0010, 0.0101, " Paris"),
        (0.0005, 0.0099, " Paris"),
        (1e-9, 1e-6, " Paris"),  # A text that is improbable is meant with its space too.
        (0.0101, 0.43, "Paris"),  # Both have.
        (0.0099, 0.43, " Paris"),
        (0.43, 0.0002, "Paris"),
    ],
)
def test_the_rule_for_the_token_of_a_text(asked, other, token):
    context = spaced_context(asked, other)
    settled, notes = lm.targets.as_target("Paris").settle(context, [1])
    assert settled == lm.targets.token(token, of="log_probability")
    assert bool(notes) == (asked < 0.01 and other >= 10 * asked)
    # A note names the other token if it is much likelier and is not explained.
    likelier = settled.find_likelier_texts(context)
    assert bool(likelier) == (token == "Paris" and asked >= 0.01 and other >= 10 * asked)
    exact = lm.targets.token("Paris")
    assert exact.settle(context, [1]) == (exact, [])


def test_a_text_that_is_one_token_only_with_a_space():
    model = model_with_spaces(6, 12)
    _, found = find_space_notes(model, "Oslo", [-1])
    assert found.explained[0].target == "log probability of ' Oslo'"
    with pytest.raises(ValueError, match="unknown token '<unk>'"):
        find_space_notes(model, lm.targets.token("Oslo"), [-1])
    # The text as it is written is not a token, so the other one is explained even if it is improbable.
    _, found = find_space_notes(model_with_spaces(3, 12), "Oslo", [-1])
    assert found.explained[0].target == "log probability of ' Oslo'"


def test_prompts_of_a_batch_have_their_own_tokens_for_a_text():
    model = model_with_spaces(3, 12)
    with torch.no_grad():
        # After " Rome" the model writes "Paris" without its space.
        model.unembed.b_U.zero_()
        after_rome, after_oslo = (
            model.ln_final(model.run_with_cache(torch.tensor([[0, token]]))[1]["resid_post", -1])[0, -1]
            for token in (5, 6)
        )
        difference = after_rome - after_oslo
        direction = 24 * difference / difference.square().sum()
        for token, sign in ((2, 1), (3, -1)):
            model.unembed.W_U[:, token] = sign * direction
            model.unembed.b_U[token] = -sign * direction @ (after_rome + after_oslo) / 2
    prompts = [torch.tensor([0, 5]), torch.tensor([0, 6]), torch.tensor([0, 4, 6])]
    found = list(lm.run_many(model, prompts, lm.methods.InputGradients(target="Paris"), queries=[-1]))
    alone = [lm.run(model, each, lm.methods.InputGradients(target="Paris"), queries=[-1]) for each in prompts]
    assert [m.explained[0].target for m in found] == [m.explained[0].target for m in alone]
    assert found[0].explained[0].target == "log probability of 'Paris'"
    assert found[1].explained[0].target == "log probability of ' Paris'"
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one.scores, other.scores, rtol=1e-10, atol=1e-12)


def test_a_text_needs_no_other_pass():
    model, passes = model_with_spaces(3, 12), []
    handle = model.blocks[0].register_forward_hook(lambda *_: passes.append(1))
    counts = []
    for target in (lm.targets.token(" Paris", of="log_probability"), "Paris"):
        passes.clear()
        lm.run(model, SPACED, lm.methods.InputGradients(target=target), queries=[-1])
        counts.append(len(passes))
    handle.remove()
    # The first run also verifies the model.
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("method", EVERY_KIND)
def test_a_contrast_is_a_difference_of_log_probabilities(method):
    model, targets = model_with_spaces(3, 12), lm.targets
    expected = lm.run(model, SPACED, method(target=targets.logit_difference(3, 5)), queries=[-1])
    for contrast in (
        method(target="Paris", against="Rome"),
        method(target=" Paris", against=5),
        method(target=targets.token(3), against=targets.token(" Rome")),
        method(against="Rome"),
    ):
        found = lm.run(model, SPACED, contrast, queries=[-1])
        assert found.scores.equal(expected.scores)
        assert found.explained[0].target.startswith("logit of ' Paris' minus that of ' Rome'")
        assert lm.run_again(model, found).scores.equal(found.scores)
        assert "against" not in found.parameters
    logits = model(SPACED[None])[0, -1].log_softmax(-1)
    assert found.explained[0].value == pytest.approx((logits[3] - logits[5]).item(), abs=1e-10)
    exact = lm.run(model, SPACED, method(target=targets.token("Paris"), against="Rome"), queries=[-1])
    assert exact.explained[0].target.startswith("logit of 'Paris' minus that of 'Rome'")


@pytest.mark.parametrize(
    "case",
    [case for case in cases(refused=False) if not (case.is_a("no logits") or case.wrong_logits)],
    ids=str,
)
def test_a_contrast_on_every_model(case):
    model = model_of(case)
    found, expected = (
        lm.run(model, prompt_of(model), lm.methods.GradientAttention(**aim), part=case.part, queries=[-1])
        for aim in (
            {"target": lm.targets.token(2), "against": 1},
            {"target": lm.targets.logit_difference(2, 1)},
        )
    )
    assert found.scores.equal(expected.scores)
    assert found.explained[0].target == expected.explained[0].target


def test_a_contrast_of_an_input_map():
    model = model_with_spaces(3, 12)
    found = lm.input_map(model, SPACED, target="Paris", against="Rome")
    expected = lm.input_map(model, SPACED, target=lm.targets.logit_difference(3, 5))
    assert found.scores.equal(expected.scores)
    assert "logit of ' Paris' minus that of ' Rome' = " in found.explanation()
    assert lm.input_map(model, SPACED, against="Rome").scores.equal(expected.scores)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": lm.targets.loss(), "against": "Rome"}, TypeError, "target: expected beside against= the"),
        ({"target": lambda logits: logits[:, -1, 0], "against": 3}, TypeError, "got Custom"),
        ({"target": "Paris", "against": lm.targets.predicted()}, TypeError, "against: expected a token by"),
        ({"target": "Paris", "against": 1.5}, TypeError, "against: expected a token's text or number"),
        (
            {"target": "Paris", "against": " Paris"},
            ValueError,
            "target, against: expected two different tokens",
        ),
    ],
)
def test_contrasts_that_are_wrong(options, error, message):
    with pytest.raises(error, match=message):
        lm.run(model_with_spaces(3, 12), SPACED, lm.methods.InputGradients(**options), queries=[-1])


def test_a_method_without_a_target_has_no_contrast(model):
    with pytest.raises(TypeError, match="against"):
        lm.methods.AttentionWeights(against="w4")
    with pytest.raises(TypeError, match=r"against: run has no argument .* nor has AttentionWeights\. "):
        lm.run(model, TOKENS, "attention", against="w4")
    with pytest.raises(TypeError, match=r"write lm.run\(model, prompt, lm.methods.Gim\(against='w4'\)\)"):
        lm.run(model, TOKENS, "gim", against="w4")


def test_a_unit_that_is_not_the_log_probability_is_in_the_label(model):
    prediction = lm.run(model, TOKENS, "attention").explanation()
    for method, words in (
        (lm.methods.Occlusion(), ""),
        (lm.methods.InputGradients(), "; logit of "),
        (lm.methods.AttentionAttribution(), "; probability of "),
    ):
        label = lm.run(model, TOKENS, method, queries=[-1]).explanation()
        assert label == prediction if not words else label.startswith(prediction + words)


def test_the_last_token_has_no_next_one(model):
    with pytest.raises(ValueError, match=r"next_token: .*targets\.predicted explains"):
        lm.run(model, TOKENS, lm.methods.InputGradients(lm.targets.next_token()), queries=[2, 5])


def test_own_tokens_are_recorded(model):
    for target, record in (
        (lm.targets.next_token(), {"target": "NextToken", "position": None}),
        (lm.targets.next_token(3), {"target": "NextToken", "position": 3}),
        (lm.targets.span(2), {"target": "Span", "start": 2, "stop": None}),
        (lm.targets.span(-3, -1), {"target": "Span", "start": -3, "stop": -1}),
    ):
        assert lm.targets.describe(target) == record
        assert lm.targets.from_record(record) == target
        queries = [4] if getattr(target, "position", None) is None else [3]
        made = lm.run(model, TOKENS, lm.methods.InputGradients(target), queries=queries)
        assert made.parameters["target"] == record
        assert torch.equal(lm.run_again(model, made).scores, made.scores)


def test_a_record_of_an_older_release_has_a_number_where_no_position_was_given():
    for record, target in (
        ({"target": "Token", "token": 3, "position": -1, "of": "logit"}, lm.targets.logit(3)),
        ({"target": "NextToken", "position": -2}, lm.targets.next_token()),
        (
            {"target": "LogitDifference", "good": 3, "bad": 4, "position": 2},
            lm.targets.logit_difference(3, 4, 2),
        ),
    ):
        assert lm.targets.from_record(record) == target


def test_own_tokens_in_words(model):
    found = lm.run(model, TOKENS, lm.methods.GradientAttention(target=lm.targets.span(2, 5)))
    assert {entry.target for entry in found.explained} == {"log probability of 'w12w7w30'"}
    without = gpt2_like(torch.float64)
    found = lm.run(without, TOKENS, lm.methods.GradientAttention(target=lm.targets.span(2, 5)))
    assert {entry.target for entry in found.explained} == {"log probability of the tokens [12, 7, 30]"}
    found = lm.run(without, TOKENS, lm.methods.GradientAttention(target=lm.targets.next_token(1)))
    assert found.explained[0].target == "log probability of 12 at position 1"


def test_a_contrast_compares_tokens_with_the_same_space():
    # Only ' Paris' is probable, and neither token of "Rome" is.
    model = model_with_spaces(3, 12)
    found = lm.run(model, SPACED, lm.methods.InputGradients(target="Paris", against="Rome"), queries=[-1])
    assert found.explained[0].target.startswith("logit of ' Paris' minus that of ' Rome'")
    exact = lm.targets.token("Rome")
    found = lm.run(model, SPACED, lm.methods.InputGradients(target="Paris", against=exact), queries=[-1])
    assert found.explained[0].target.startswith("logit of ' Paris' minus that of 'Rome'")


def test_a_text_is_the_same_token_whichever_other_rows_are_asked_for():
    model = model_with_spaces(3, 12)
    with torch.no_grad():
        # After ' Paris' (position 1) "Paris" is probable, and after "Rome" (position 3) ' Paris' is.
        streams = model.ln_final(model.run_with_cache(SPACED)[1]["resid_post", -1])[0]
        difference = streams[1] - streams[3]
        model.unembed.W_U[:, 2] = 40 * difference / difference.square().sum()
        model.unembed.b_U[2] = 12 - (model.unembed.W_U[:, 2] * (streams[1] + streams[3]) / 2).sum()
    method = lm.methods.InputGradients(target="Paris")
    alone, every = (lm.run(model, SPACED, method, queries=queries) for queries in ([-1], None))
    assert alone.explained[0].target == every.explained[-1].target == "log probability of ' Paris'"
    torch.testing.assert_close(alone.scores[0, -1], every.scores[0, -1])
