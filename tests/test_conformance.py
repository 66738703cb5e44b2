"""The conformance table: each method has each property on each model, or raises an error that says why not.

The properties are those of `lens_mix.testing.CHECKS`, which `lm.testing.check_method` checks for any method.
`make test` has every cell of the models below. The other models have a test for each property.
"""

from __future__ import annotations

import functools

import pytest
import torch

from lens_mix.methods import METHODS
from lens_mix.testing import CHECKS, MethodCheck, Subject, check_refusal
from tests.matrix import case_of, cases, model_of, prompt_of, slow

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    # In float32, a softmax rounds a row otherwise if other rows or prompts run beside it.
    pytest.mark.usefixtures("softmax_in_the_dtype_of_the_model"),
]
HERE = {case.label: case for case in cases(cross=True, refused=False)}
# The models of `make test`: the first of these that the installed TransformerLens has.
MODELS = {
    "decoder": ("HookedTransformer LN", "bridge gpt2"),
    "rotary, grouped heads": ("bridge llama",),
    "sliding window": ("bridge gemma3",),
    "encoder": ("HookedEncoder", "bridge bert"),
    "decoder of a pair": ("HookedEncoderDecoder decoder", "bridge t5 decoder"),
    "cross-attention": ("HookedEncoderDecoder cross", "bridge t5 cross"),
}
LABELS = {
    title: found[0]
    for title, labels in MODELS.items()
    if (found := [label for label in labels if label in HERE])
}
_NO_LOGITS_OR_CAUSALITY = "alti_logit attribution_patching context_length"
_CROSS_BETWEEN = (
    "alti_logit atb_ff atb_ff_res atb_ff_res_ln attribution_patching decompx decompx_local globenc"
)
_SELF_ATTENTION = f"{_CROSS_BETWEEN} attn_res_w context_length frozen_gradients gim input_gradients occlusion"
# The methods that say why they do not run. All others have maps.
REFUSED = {
    "HookedTransformer LN": "attribution_patching",
    "bridge gemma3": "attribution_patching",
    "HookedEncoder": _NO_LOGITS_OR_CAUSALITY,
    "bridge bert": _NO_LOGITS_OR_CAUSALITY,
    "HookedEncoderDecoder decoder": _CROSS_BETWEEN,
    "bridge t5 decoder": _CROSS_BETWEEN,
    "HookedEncoderDecoder cross": _SELF_ATTENTION,
    "bridge t5 cross": _SELF_ATTENTION,
}
# transformers computes the patterns, or what they are computed from, in float32 in these models.
FLOAT32 = ("bridge gpt_neo", "bridge gptj", "bridge mpt")


# These are properties of a method rather than of a model: other models have them in `make test-all`.
OF_THE_METHOD = ("repeatability", "max_memory", "dtypes", "unchanged model", "record")
FOR_THESE = ("decoder", "encoder")


def is_refused(title, name):
    return name in REFUSED.get(LABELS[title], "").split()


def table():
    for title in LABELS:
        for name in METHODS:
            for check in CHECKS:
                if not is_refused(title, name):
                    is_slow = check in OF_THE_METHOD and title not in FOR_THESE
                    yield (slow if is_slow else pytest.param)(title, name, check)


@functools.cache
def subject_of(label, name):
    case = case_of(label)
    return Subject(
        method=METHODS[name](),
        model_name=label,
        build=functools.partial(model_of, case),
        prompts=[prompt_of(model_of(case), seq, seed) for seq, seed in ((7, 1), (4, 2), (7, 3))],
        part=case.part,
        dtype=torch.float64,
        dtypes=(torch.float32, torch.bfloat16),
        exactness=1e-5 if label in FLOAT32 else 1e-9,
    )


@pytest.mark.parametrize(("title", "name", "check"), table())
def test_properties(title, name, check):
    CHECKS[check](subject_of(LABELS[title], name))


@pytest.mark.parametrize(
    ("title", "name"), [(title, name) for title in LABELS for name in METHODS if is_refused(title, name)]
)
def test_refusals(title, name):
    check_refusal(subject_of(LABELS[title], name))


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("label", [label for label in HERE if label not in LABELS.values()])
def test_unusual_models(label, check):
    """Check all methods of one model, so that a property has one test on each."""
    failures = []
    for name in METHODS:
        try:
            MethodCheck(check, subject_of(label, name))()
        except AssertionError as problem:
            failures.append(str(problem))
    assert not failures, "\n".join(failures)
