"""The wide sweep: test every method on every architecture that a small configuration can build.

A map agrees with an oracle that uses only the Hugging Face model, or the method raises an error with the
words of a table. The tests in `tests/methods` also compare the norm-based methods with their definitions on
these models (`tests/norm_cases.py`).
"""

from __future__ import annotations

import functools
import re

import pytest
import torch

import lens_mix as lm
from lens_mix._classes.model_classes import transformer_lens_version
from lens_mix.experiments.passes import run_prompt
from lens_mix.methods import METHODS
from tests.hugging_face_oracle import Reference, attention_attribution, gradient_attention
from tests.matrix import cases, prompt_of, wide_cases
from tests.norm_oracle import norms, oracle
from tests.tiny_models import wrapped_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]
if transformer_lens_version()[0] < 4:
    pytest.skip("the wide sweep is of the newest release", allow_module_level=True)

CASES = {case.label: case for case in (*cases(), *wide_cases())}
# transformers cannot run this model in float64.
FLOAT32 = ("xglm",)

# Models of pictures and sound, and those of them whose output is one number per class.
CLASSES = ("vit", "deit", "ast")
FEATURES = (*CLASSES, "hubert", "hubert_stable", "wav2vec2", "whisper")

# If only some methods raise an error on a model, the message contains one of these.
REASONS = (
    r"mixture feed-forward: run as a whole",
    r"opaque feed-forward: run as a whole",
    r"the activation .* is unknown",
    r"cross-attention",
    r"expected a causal model",
    r"decoder-only TransformerBridge whose model takes position_ids",
    r"expected attention to read only tokens and their positions",
    r"this model leaves attention to transformers",
    r"unembedding: .* the encoder of an encoder-decoder, which has none",
    r"unembedding: .* soft cap at",
    r"unembedding: expected logits of every position",
    r"unembedding: .*a dense layer or a cap between the two",
    r"a norm on the residual stream \(post-norm\)",
    r"besides attention and feed-forward, the block has",
    r"multiplier",
    r"a hybrid: of 4 blocks of 'blocks' only \[1, 3\] have attention",
    r"next norm: block 2 has no attention",
)


@functools.cache
def model_of(label):
    return CASES[label].build(dtype_of(label))


def architecture(label):
    return label.split(" ")[1] if label else ""


def dtype_of(label):
    return torch.float32 if architecture(label) in FLOAT32 else torch.float64


def tolerance(label):
    # In some models the softmax is float32, whatever the dtype is.
    return 2e-4 if architecture(label) in FLOAT32 else 1e-5


@functools.cache
def reference(label):
    """Return a Hugging Face model with the same weights that TransformerLens has not changed."""
    untouched = wrapped_model(architecture(label), dtype_of(label), attn_implementation="eager")
    return Reference(untouched, prompt_of(model_of(label)), CASES[label].part)


def default_method(name, label):
    if name == "occlusion" and architecture(label) in FEATURES and CASES[label].part != "decoder":
        return lm.methods.Occlusion(by="mean")
    if name == "attention_attribution":
        return lm.methods.AttentionAttribution(n_steps=5)
    return METHODS[name]()


@functools.cache
def cell(label, name):
    """Return (map, "") or (None, the message of an `UnsupportedModelError`); other errors are failures."""
    case, model = CASES[label], model_of(label)
    # The class of a picture is one number of the prompt, so it has a single row.
    one_row = (
        architecture(label) in CLASSES
        and METHODS[name].reads == "model"
        and METHODS[name]().target is not None
    )
    options = {"queries": [0]} if one_row else {}
    try:
        return lm.run(model, prompt_of(model), default_method(name, label), part=case.part, **options), ""
    except lm.UnsupportedModelError as refusal:
        return None, str(refusal)


@functools.cache
def engines_of(label):
    return {name: engine for name, engine, _ in lm.support(model_of(label), part=CASES[label].part)}


def refusal_of(label, name="attention"):
    """Return the words of a model's error for every method; None if maps are expected."""
    if METHODS[name].reads == "model" and CASES[label].part == "encoder":
        return r"the logits are at the decoder's tokens"
    if "position_ids" in METHODS[name].needs and CASES[label].part == "decoder":
        return r"whose model takes position_ids"
    return CASES[label].refusal


RUNNING = [label for label in CASES if refusal_of(label) is None]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("label", CASES)
def test_every_cell_gives_a_sound_map_or_a_reason_in_words(label, name):
    mixing_map, reason = cell(label, name)
    words = refusal_of(label, name)
    if default_method(name, label) == default_method(name, ""):
        assert (mixing_map is None) == (engines_of(label)[name] is None), "support says otherwise"
    if words is not None:
        assert re.search(words, reason), reason
    elif mixing_map is None:
        assert name not in ("attention", "attn_res_w", "value_zeroing"), reason
        assert any(re.search(words, reason) for words in REASONS), reason
    else:
        assert bool(torch.isfinite(mixing_map.scores).all())
        assert float(mixing_map.scores.abs().amax(dim=(-2, -1)).min()) > 1e-9


def scores_of(label, name):
    mixing_map, reason = cell(label, name)
    if mixing_map is None:
        pytest.skip(f"refused: {reason}")
    return mixing_map.scores


def assert_agree(label, found, expected):
    assert float(expected.abs().max()) > 1e-8
    scale = max(1.0, float(expected.abs().max()))
    assert float((found - expected).abs().max()) <= tolerance(label) * scale


@pytest.mark.parametrize("label", RUNNING)
def test_weights_agree_with_hugging_face(label):
    weights = reference(label).attention().mean(dim=1)
    assert_agree(label, scores_of(label, "attention"), weights)
    assert_agree(label, scores_of(label, "attn_res_w"), 0.5 * weights + 0.5 * torch.eye(weights.shape[-1]))


@pytest.mark.parametrize("label", RUNNING)
def test_value_zeroing_agrees_with_hugging_face(label):
    assert_agree(label, scores_of(label, "value_zeroing"), reference(label).value_zeroing())


@pytest.mark.parametrize("label", RUNNING)
def test_value_norms_agree_with_hugging_face(label):
    assert_agree(label, scores_of(label, "value_norm"), reference(label).value_shares().norm(dim=-1))


@pytest.mark.parametrize("label", RUNNING)
def test_norm_based_maps_agree_with_vectors_that_hugging_face_confirms(label):
    """Compute all vectors, and compare their shares of attention and their sums with Hugging Face's."""
    found = {name: scores_of(label, name) for name in ("attn_res", "attn_res_ln")}
    names = {"atb_ff": "feed_forward", "atb_ff_res": "feed_forward_residual", "atb_ff_res_ln": "output"}
    further = {name: stage for name, stage in names.items() if cell(label, name)[0] is not None}
    shares = reference(label).value_shares()
    for layer, block in enumerate(blocks_of(label)):
        written = oracle(block, feed_forward=bool(further))
        assert_agree(label, written.attention[:, :-1], shares[layer])
        assert_agree(label, found["attn_res"][layer], norms(written.residual))
        assert_agree(label, found["attn_res_ln"][layer], norms(written.normed))
        for name, stage in further.items():
            assert_agree(label, scores_of(label, name)[layer], norms(getattr(written, stage)))
        if further:
            assert_agree(label, written.output.sum(dim=1), reference(label).output_of(layer, None))


def blocks_of(label):
    model = model_of(label)
    return run_prompt(model, prompt_of(model), lm.methods.AttnRes(), part=CASES[label].part).blocks


@pytest.mark.parametrize("label", [label for label in RUNNING if not label.endswith("coder")])
def test_gradients_agree_with_hugging_face(label):
    """Use models with this oracle: no encoder-decoders, and no models with their own attention function."""
    if not reference(label).has_one_function:
        pytest.skip("its attention does not go through eager_attention_forward")
    for layer in range(len(reference(label).layers)):
        expected = gradient_attention(reference(label), layer)
        assert_agree(label, scores_of(label, "gradient_attention")[layer], expected)
        expected = attention_attribution(reference(label), layer, steps=5)
        assert_agree(label, scores_of(label, "attention_attribution")[layer], expected)


@pytest.mark.parametrize("label", RUNNING)
def test_padded_prompts_give_what_each_gives_alone(label):
    model, stack = model_of(label), CASES[label].part
    prompts = [prompt_of(model, seq, seed) for seq, seed in ((7, 1), (4, 2))]
    methods = ["attention", "value_zeroing"]
    alone = [lm.run(model, prompt, methods, part=stack) for prompt in prompts]
    for maps, expected in zip(lm.run_many(model, prompts, methods, part=stack), alone, strict=True):
        for name in methods:
            torch.testing.assert_close(
                maps[name].scores, expected[name].scores, atol=tolerance(label), rtol=0
            )


def test_the_sweep_is_as_wide_as_promised():
    built = {architecture(label) for label in CASES}
    assert len(built) >= 90
    assert len({architecture(label) for label in RUNNING}) >= 60
