"""Test wrapped encoders against the models of transformers themselves, without hooks of TransformerLens."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
import types

import pytest
import torch
import transformers
from torch import nn

import lens_mix as lm
from lens_mix._care.users_hooks import name_user_hooks
from lens_mix._classes.model_classes import transformer_lens_version
from lens_mix._model.encoder_copy import _ARCHITECTURES as KNOWN
from tests.family_tokenizers import family_tokenizer
from tests.matrix import slow
from tests.tiny_models import available, bridge
from tests.wrapped_models import FAMILIES, encoder, kinds_of

pytestmark = pytest.mark.filterwarnings("ignore")
NEEDS_BRIDGE = pytest.mark.skipif(not available(bridge, "bert"), reason="no BERT in a Bridge here")
TOKENS = torch.tensor([[5, 9, 12, 7, 30, 21, 9]])
# `make test` has one family of each kind: own names, a projection, other positions, shared layers.
USUAL = ("DistilBert", "Electra", "XLMRoberta", "Albert", "DebertaV2")
EACH = [family if family in USUAL else slow(family) for family in FAMILIES]


class Plain:
    """The passes of a model of transformers alone, with interventions in its attention.

    Attention in these models is one function of their file, `eager_attention_forward`. In RemBERT and DeBERTa
    it is the module itself, whose matrix and `dropout` have the values and the weights. The n-th call in a
    pass is that of layer n, even if layers share their modules.
    """

    def __init__(self, model, inputs):
        model.set_attn_implementation("eager")
        self.model, self.inputs = model, inputs
        self.layers = [m for m in model.modules() if re.search("[a-z2]Layer$|Block$", type(m).__name__)]

    def run(self, weights=lambda layer, weights: weights, values=lambda layer, values: values):
        """Return the model's output, and store the weights, the values and the outputs of the layers.

        The arguments return other weights and values of a layer.
        """
        self.weights, self.values, self.outputs, self.order = [], [], [], []
        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                stack.callback(layer.register_forward_hook(self._keep).remove)
                for part in layer.modules():
                    if type(part).__name__ in ("RemBertSelfAttention", "DisentangledSelfAttention"):
                        edits = self._edit_modules(part.num_attention_heads, weights, values)
                        matrix = part.value if hasattr(part, "value") else part.value_proj
                        stack.callback(matrix.register_forward_hook(edits[0]).remove)
                        stack.callback(part.dropout.register_forward_hook(edits[1]).remove)
            for file in {sys.modules[type(m).__module__] for m in self.model.modules()}:
                if hasattr(file, "eager_attention_forward"):
                    original = file.eager_attention_forward
                    stack.callback(setattr, file, "eager_attention_forward", original)
                    file.eager_attention_forward = self._edit_function(original, weights, values)
            output = self.model(**self.inputs)
        assert len(self.weights) == len(self.values) == len(self.outputs)
        return output

    def _keep(self, module, args, output):
        self.order.append(module)
        self.outputs.append(output[0] if isinstance(output, tuple) else output)

    def _edit_function(self, original, weights, values):
        def attend(module, query, key, value, *args, **kwargs):
            layer = len(self.weights)
            self.values.append(value)
            value = values(layer, value)
            mixed, clean = original(module, query, key, value, *args, **kwargs)
            self.weights.append(clean)
            edited = weights(layer, clean)
            return mixed if edited is clean else torch.einsum("bhqk,bhkd->bqhd", edited, value), clean

        return attend

    def _edit_modules(self, heads, weights, values):
        def edit_values(module, args, output):
            self.values.append(output.unflatten(-1, (heads, -1)).transpose(1, 2))
            return values(len(self.values) - 1, self.values[-1]).transpose(1, 2).flatten(2)

        def edit_weights(module, args, output):
            self.weights.append(output)
            return weights(len(self.weights) - 1, output)

        return edit_values, edit_weights

    def value_zeroing(self):
        with torch.no_grad():
            self.run()
            clean = [output[0] for output in self.outputs]
            maps = torch.zeros(len(clean), *[len(clean[0])] * 2, dtype=torch.float64)
            for layer in range(len(clean)):
                for key in range(len(clean[0])):
                    self.run(values=lambda n, v, at=(layer, key): without(v, at[1]) if n == at[0] else v)
                    maps[layer, :, key] = 1 - torch.cosine_similarity(
                        clean[layer], self.outputs[layer][0], -1
                    )
            return maps


@NEEDS_BRIDGE
def test_a_deberta_whose_head_multiplies_by_the_embeddings():
    own = encoder("DebertaV2", "ForMaskedLM", legacy=False)
    with torch.no_grad():
        own.lm_predictions.lm_head.bias.normal_()
        expected = own(TOKENS).logits
        torch.testing.assert_close(lm.wrap(own)(TOKENS), expected, rtol=0, atol=1e-10)
    model = lm.wrap(own)
    target = lm.targets.masked_token(9, position=3, of="logit")
    (entry,) = lm.run(model, TOKENS, lm.methods.InputGradients(target=target), queries=[3]).explained
    assert entry.value == pytest.approx(float(expected[0, 3, 9]), abs=1e-9)


@NEEDS_BRIDGE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_new_classifier_in_half_precision_has_blocks_that_end_in_a_norm(dtype):
    torch.manual_seed(0)
    own = transformers.BertForSequenceClassification(transformers.BertConfig(**FAMILIES["Bert"])).eval()
    values = []
    # Its branches are so small that blocks that begin with a norm are within the tolerance too.
    for each in (own.float(), copy.deepcopy(own).to(dtype)):
        model = lm.wrap(each)
        method = lm.methods.InputGradients(target=lm.targets.hf_classifier(model, 1, of="logit"))
        m = lm.run(model, TOKENS, method, queries=[0])
        assert m.scores.isfinite().all()
        values.append(m.explained[0].value)
    assert values[1] == pytest.approx(values[0], abs=0.01)


@NEEDS_BRIDGE
def test_a_head_under_other_names_is_not_said_to_be_missing():
    own = encoder("Bert", "ForMaskedLM")
    own.cls.predictions.transform.other = own.cls.predictions.transform.dense
    del own.cls.predictions.transform.dense
    with pytest.raises(lm.UnsupportedModelError, match="BertForMaskedLM has a head that"):
        lm.run(lm.wrap(own), TOKENS, lm.methods.InputGradients(), queries=[0])


def without(values, key):
    values = values.clone()
    values[:, :, key] = 0
    return values


def output_matrix_and_norm(layer):
    """Return the output matrix of a layer's attention, and the norm after the residual sum."""
    attention = layer.attention
    if hasattr(attention, "out_lin"):
        return attention.out_lin, layer.sa_layer_norm
    return (
        (attention.dense, attention.LayerNorm)
        if hasattr(attention, "ffn") or hasattr(attention, "LayerNorm")
        else (attention.output.dense, attention.output.LayerNorm)
    )


def key_vectors(plain, inputs):
    """Return Σ_h a v W_O [layer, query, key, d_model], and the same with the residual and the norm."""
    vectors, normed = [], []
    for layer, weights, value, resid in zip(plain.order, plain.weights, plain.values, inputs, strict=True):
        dense, norm = output_matrix_and_norm(layer)
        W_O = dense.weight.T.unflatten(0, (value.shape[1], -1))
        found = torch.einsum("hqk,hkd,hdm->qkm", weights[0], value[0], W_O)
        total = found.sum(1) + dense.bias + resid[0]
        # The standard deviation is that of the whole sum, and the bias of the norm is in no vector.
        deviation = (total.var(-1, unbiased=False) + norm.eps).sqrt()
        summed = found + torch.eye(len(total), dtype=total.dtype)[..., None] * resid[0][:, None]
        vectors.append(found)
        normed.append(norm.weight * (summed - summed.mean(-1, keepdim=True)) / deviation[:, None, None])
    return torch.stack(vectors), torch.stack(normed)


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def wrapped(model, tokenizer=None):
    return lm.wrap(model, tokenizer)


# ---------------------------------------------------------------------- numbers


@NEEDS_BRIDGE
@pytest.mark.parametrize("family", EACH)
def test_maps_are_those_of_the_model_itself(family):
    model = encoder(family)
    found = lm.run(
        wrapped(model),
        TOKENS,
        [
            "attention",
            "value_zeroing",
            "value_norm",
            "attn_res_ln",
            lm.methods.ValueZeroing(metric="euclidean"),
        ],
    )
    plain = Plain(model, {"input_ids": TOKENS})
    with torch.no_grad():
        kept = []
        hook = lambda m, args, kwargs: kept.append(args[0] if args else kwargs["hidden_states"])  # noqa: E731
        handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in plain.layers]
        plain.run()
        for handle in handles:
            handle.remove()
        weights, (vectors, normed) = torch.stack(plain.weights)[:, 0], key_vectors(plain, kept)
    assert len(found["attention"].layers) == len(plain.weights) == (6 if family == "Albert" else 3)
    assert found["attention"].default_query == 0
    close(found["attention"].scores, weights.mean(1))
    close(found["value_norm"].scores, vectors.norm(dim=-1))
    close(found["attn_res_ln"].scores, normed.norm(dim=-1))
    close(found["value_zeroing"].scores, plain.value_zeroing())
    rolled = torch.eye(7, dtype=torch.float64)
    for layer in weights.mean(1):
        rolled = (layer + torch.eye(7)) / 2 @ rolled
    close(lm.rollout(found["attention"]).scores[-1], rolled)


@NEEDS_BRIDGE
@pytest.mark.parametrize("family", [family for family in EACH if family != "Albert"])
def test_a_layer_that_is_there_twice_is_two_blocks(family):
    model = encoder(family)
    layers = (model.transformer if family == "DistilBert" else model.encoder).layer
    layers[2] = layers[0]
    bridge = wrapped(model)
    found = lm.run(bridge, TOKENS, ["attention", "value_zeroing"])
    plain = Plain(model, {"input_ids": TOKENS})
    close(found["value_zeroing"].scores, plain.value_zeroing())
    plain.run()
    close(found["attention"].scores, torch.stack(plain.weights)[:, 0].mean(1))
    first, _, third = (block.mlp.out.weight for block in bridge.blocks)
    assert first is third


@NEEDS_BRIDGE
@pytest.mark.parametrize("family", EACH)
def test_the_users_random_numbers_stay(family):
    for kind in kinds_of(family):
        model = encoder(family, kind)
        state = torch.get_rng_state()
        wrapped(model)
        assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(TypeError, match="tokenizer: expected"):
        lm.wrap(model, "bert")
    assert torch.equal(torch.get_rng_state(), state)


@NEEDS_BRIDGE
@pytest.mark.parametrize("family", EACH[:10])
def test_gradients_of_a_class_are_those_of_the_classifier_itself(family):
    model = encoder(family, "ForSequenceClassification", num_labels=4)
    target = lm.targets.hf_classifier(wrapped(model), 2, of="logit")
    found = lm.run(wrapped(model), TOKENS, [lm.methods.GradientAttention(target=target)])[
        "gradient_attention"
    ]
    inputs = lm.run(wrapped(model), TOKENS, lm.methods.InputGradients(target=target), queries=[0])
    leaves = []

    def leave(weights):
        leaves.append(weights.detach().requires_grad_(True))
        return leaves[-1]

    plain = Plain(model, {"input_ids": TOKENS})
    for layer in range(len(found.layers)):
        leaves.clear()
        logit = plain.run(lambda n, A, at=layer: leave(A) if n == at else A).logits[0, 2]
        (gradient,) = torch.autograd.grad(logit, leaves)
        close(found.scores[layer], (gradient * leaves[0]).clamp_min(0)[0].mean(0).detach())
    assert found.provenance["details"]["target_value"][0] == pytest.approx(logit.item(), abs=1e-9)
    kept = []

    def replace_input(module, args, kwargs):
        if kept:
            return None
        kept.append((args[0] if args else kwargs["hidden_states"]).detach().requires_grad_(True))
        return (kept[0], *args[1:]), kwargs if args else {**kwargs, "hidden_states": kept[0]}

    with plain.layers[0].register_forward_pre_hook(replace_input, with_kwargs=True):
        logit = plain.run().logits[0, 2]
    (gradient,) = torch.autograd.grad(logit, kept)
    close(inputs.scores[0, 0], gradient[0].norm(dim=-1))


@NEEDS_BRIDGE
@pytest.mark.parametrize("dtype", [torch.float64, slow(torch.float32)], ids=["float64", "float32"])
@pytest.mark.parametrize("family", EACH)
def test_every_class_is_wrapped_and_no_model_changes(family, dtype):
    for kind in kinds_of(family):
        model = encoder(family, kind, dtype)
        before = copy.deepcopy(model.state_dict())
        modules = [(name, type(module)) for name, module in model.named_modules()]
        implementation = model.config._attn_implementation
        found = wrapped(model)
        own = model(TOKENS[None] if kind == "ForMultipleChoice" else TOKENS)
        assert [(name, type(module)) for name, module in model.named_modules()] == modules
        assert model.config._attn_implementation == implementation
        assert not model.training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        # The weights are copies, so what happens to one model does not happen to the other.
        own_weights = {parameter.data_ptr() for parameter in model.parameters()}
        assert not own_weights & {parameter.data_ptr() for parameter in found.parameters()}
        logits = found(TOKENS)
        if kind in ("ForMaskedLM", "ForPreTraining") and family != "Electra":
            expected = getattr(own, "logits", None)
            expected = own.prediction_logits if expected is None else expected
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        elif kind != "ForMaskedLM":
            assert logits.isnan().all()
        assert not name_user_hooks(found)
        assert found.cfg.dtype == dtype
    assert lm.check(found, TOKENS).ok
    assert lm.run(found, TOKENS, "attention").provenance["model"] == type(model).__name__


@NEEDS_BRIDGE
@pytest.mark.parametrize("family", EACH)
def test_padded_prompts_give_what_each_gives_alone(family):
    model = wrapped(encoder(family))
    prompts = [TOKENS[0], TOKENS[0, :4], TOKENS[0, :6]]
    for found, one in zip(lm.run_many(model, prompts, "value_zeroing"), prompts, strict=True):
        close(found.scores, lm.run(model, one, "value_zeroing").scores)


@NEEDS_BRIDGE
def test_half_precision_is_checked_in_a_higher_one():
    model = wrapped(encoder("DistilBert", dtype=torch.bfloat16))
    assert model.cfg.dtype == torch.bfloat16
    assert lm.run(model, TOKENS, "attention").scores.sum(-1).allclose(torch.ones(3, 7), atol=0.02)


# ---------------------------------------------------------------------- text


@NEEDS_BRIDGE
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("DistilBert", "bert"),
        ("Electra", "electra"),
        ("XLMRoberta", "xlm_roberta"),
        ("Camembert", "camembert"),
        ("Roberta", "roberta"),
        ("Albert", "albert"),
        ("DebertaV2", "deberta_v2"),
        ("Bert", "bert"),
    ],
)
def test_from_a_string_to_a_class(family, name, tmp_path):
    tokenizer = family_tokenizer(name, tmp_path / name)
    if tokenizer is None:
        pytest.skip("this transformers can't build the tokenizer from a list")
    config = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    texts = ["a b c d", "e f", ("a b", "c d e")]
    for kind in ("ForSequenceClassification", "ForTokenClassification"):
        model = encoder(family, kind, num_labels=3, **config)
        found = wrapped(model, tokenizer)
        position = {"position": 2} if kind == "ForTokenClassification" else {}
        target = lm.targets.hf_classifier(found, "LABEL_1", of="logit", **position)
        method = lm.methods.GradientAttention(target=target)
        expected = []
        for text in texts:
            encoding = tokenizer(*([text] if isinstance(text, str) else text), return_tensors="pt")
            if family == "DistilBert":
                # Token types mean nothing to this model. Its own tokenizer does not return any.
                encoding.pop("token_type_ids", None)
                text = encoding
            logits = model(**encoding).logits[0]
            expected.append((logits[2] if position else logits)[1].item())
            one = lm.run(found, text, method)
            assert one.provenance["details"]["target_value"][0] == pytest.approx(expected[-1], abs=1e-9)
            assert one.provenance["token_ids"] == encoding["input_ids"][0].tolist()
            assert one.default_query == (2 if position else 0)
        batched = lm.run_many(found, texts[:2], method, batch_size=2)
        values = [one.provenance["details"]["target_value"][0] for one in batched]
        assert values == pytest.approx(expected[:2], abs=1e-9)
        # The classifier itself is another way to name the same target.
        other = lm.targets.hf_classifier(model, "LABEL_1", of="logit", **position)
        assert lm.run(found, texts[0], lm.methods.GradientAttention(target=other)).provenance["details"][
            "target_value"
        ] == pytest.approx([expected[0]] * 3 if family != "Albert" else [expected[0]] * 6, abs=1e-9)
        difference = lm.targets.class_difference("LABEL_1", 0, found, **position)
        assert lm.run(found, texts[0], lm.methods.GradientAttention(target=difference)).scores.any()


@NEEDS_BRIDGE
@pytest.mark.parametrize("family", ["XLMRoberta", "Data2VecText", "Camembert"])
def test_positions_are_counted_without_padding(family):
    """Check a prompt with the padding token inside, which has no position of its own."""
    model = encoder(family)
    tokens = torch.tensor([[5, 9, 1, 7, 1, 21]])
    expected = model(tokens, output_hidden_states=True).hidden_states
    found = wrapped(model)
    kept = []
    found.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_in", lambda t, hook: kept.append(t))])
    close(kept[0], expected[0])
    # No token has the first rows of the table, which are those of padding.
    assert found.cfg.n_ctx == 40 - 2
    with pytest.raises(ValueError, match="expected at most n_ctx=38 tokens, got 39"):
        lm.run(found, torch.full((39,), 5), "attention")


# ---------------------------------------------------------------------- what has no logits


@NEEDS_BRIDGE
def test_a_model_without_logits_says_so_and_explains_classes():
    model = wrapped(encoder("DistilBert", "ForSequenceClassification"))
    table = lm.support(model)
    reason = "DistilBertForSequenceClassification has no masked-language head"
    for name in ("input_gradients", "gradient_attention", "occlusion"):
        assert reason in table[name]
        with pytest.raises(lm.UnsupportedModelError, match=rf"{reason}.*hf_classifier\(model, class_\)"):
            lm.run(model, TOKENS, name)
    for name in ("attention", "value_zeroing", "attn_res_ln", "globenc"):
        assert lm.run(model, TOKENS, name).scores.isfinite().all()
    target = lm.targets.hf_classifier(model)
    for method in (lm.methods.Occlusion, lm.methods.InputGradients):
        scores = lm.run(model, TOKENS, method(target=target), queries=[0]).scores
        assert scores.isfinite().all()
        assert scores.any()
    rows = torch.arange(7.0)
    with pytest.raises(lm.UnsupportedModelError, match=reason):
        lm.evaluation.removal_curves(model, TOKENS, rows, target=lm.targets.predicted(), exact=0, beam=0)
    body = wrapped(encoder("DistilBert"))
    with pytest.raises(TypeError, match="expected a classifier of transformers"):
        lm.targets.hf_classifier(body, 1)


@NEEDS_BRIDGE
def test_the_logits_of_a_masked_language_model_are_explained():
    model = encoder("DistilBert", "ForMaskedLM")
    target = lm.targets.logit(9, position=3)
    found = lm.run(wrapped(model), TOKENS, lm.methods.GradientAttention(target=target))
    expected = model(TOKENS).logits[0, 3, 9].item()
    assert found.provenance["details"]["target_value"][0] == pytest.approx(expected, abs=1e-9)


# ---------------------------------------------------------------------- errors


@pytest.mark.skipif(transformer_lens_version()[0] > 2, reason="this TransformerLens has a Bridge")
def test_the_needed_release_is_named():
    with pytest.raises(lm.UnsupportedModelError, match=r"expected TransformerLens 3 or later.*got 2\.\d+"):
        lm.wrap(encoder("DistilBert"))


@NEEDS_BRIDGE
def test_models_that_are_no_bert_are_errors():
    with pytest.raises(TypeError, match="hf_model: expected a model of transformers, got Linear"):
        lm.wrap(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="hf_model: expected a model of transformers, got TransformerBridge"):
        lm.wrap(bridge("bert"))
    with pytest.raises(
        TypeError, match="tokenizer: expected a tokenizer of transformers or None, got 'bert'"
    ):
        lm.wrap(encoder("Bert"), "bert")
    config = transformers.MPNetConfig(**{**FAMILIES["Bert"], "num_hidden_layers": 1})
    with pytest.raises(lm.UnsupportedModelError, match=r"got a mpnet: it adds a bias for the distance"):
        lm.wrap(transformers.MPNetModel(config))
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9)
    with pytest.raises(lm.UnsupportedModelError, match=f"families {', '.join(KNOWN)}, got a gpt2"):
        lm.wrap(transformers.GPT2Model(config))
    with pytest.raises(
        lm.UnsupportedModelError, match="expected an encoder, got a bert with is_decoder=True"
    ):
        lm.wrap(encoder("Bert", is_decoder=True))


@NEEDS_BRIDGE
def test_a_block_that_computes_something_else_is_named():
    model = encoder("Electra")
    layer = model.encoder.layer[1]
    handle = layer.attention.self.value.register_forward_hook(lambda module, args, output: output * 1.001)
    with pytest.raises(
        lm.UnsupportedModelError, match=r"got the output of block 1 other than ElectraModel's"
    ):
        lm.wrap(model)
    handle.remove()
    handle = model.embeddings.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(lm.UnsupportedModelError, match="got the input of block 0 other than"):
        lm.wrap(model)
    handle.remove()
    layer.adapter = nn.Linear(2, 2)
    with pytest.raises(
        lm.UnsupportedModelError, match=r"further weights in ElectraModel: .*1\.adapter\.weight"
    ):
        lm.wrap(model)
    del layer.adapter
    layer.output.dense = nn.Bilinear(2, 2, 2)
    with pytest.raises(
        lm.UnsupportedModelError, match=r"expected plain weights .* in encoder\.layer\.1\.output\.dense"
    ):
        lm.wrap(model)
    del layer.output.dense
    with pytest.raises(
        lm.UnsupportedModelError, match=r"expected a module encoder\.layer\.1\.output\.dense in"
    ):
        lm.wrap(model)


@NEEDS_BRIDGE
def test_a_layer_that_runs_more_often_than_it_is_listed_is_an_error():
    model = encoder("Electra")

    def run_twice(self, *args, **kwargs):
        type(self).forward(self, *args, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    model.encoder.forward = types.MethodType(run_twice, model.encoder)
    with pytest.raises(lm.UnsupportedModelError, match="got 6 runs of ElectraModel's 3 layers"):
        lm.wrap(model)


@NEEDS_BRIDGE
def test_the_logits_are_checked_too():
    model = encoder("DistilBert", "ForMaskedLM")
    model.vocab_projector.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(lm.UnsupportedModelError, match="got the logits other than DistilBertForMaskedLM's"):
        lm.wrap(model)


@NEEDS_BRIDGE
def test_a_model_in_training_mode_stays_in_it():
    model = encoder("DistilBert", "ForSequenceClassification", dropout=0.5).train()
    found = wrapped(model)
    assert model.training
    assert not found.training
    with pytest.raises(ValueError, match=r"call hf_model\.eval\(\) first"):
        lm.targets.hf_classifier(found, 1)


@NEEDS_BRIDGE
def test_a_copy_of_a_wrapped_model_is_one():
    # A copy of a Bridge refers to the Bridge, as without `lm.wrap`.
    first = wrapped(encoder("DistilBert", "ForSequenceClassification"))
    found = copy.deepcopy(first)
    target = lm.targets.hf_classifier(found, 1)
    assert lm.run(found, TOKENS, lm.methods.GradientAttention(target=target)).scores.any()
