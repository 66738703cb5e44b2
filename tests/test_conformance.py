"""The conformance table: each method has each property on each model, or raises an error that says why not.

The properties are those of `lens_mix.testing.CHECKS`, which `lm.testing.check_method` checks for any method.
`make test` has every cell of the models below. The other models have a test for each property.
"""

from __future__ import annotations

import functools

import pytest
import torch

import lens_mix as lm
from lens_mix.methods import METHODS
from lens_mix.testing import CHECKS, MethodCheck, Subject, check_refusal
from tests.matrix import USUAL, case_of, cases, model_of, prompt_of, slow

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
_NO_LOGITS_OR_CAUSALITY = "alti_logit token_patching context_length"
_CROSS_BETWEEN = "alti_logit atb_ff atb_ff_res atb_ff_res_ln token_patching decompx decompx_local globenc"
_SELF_ATTENTION = f"{_CROSS_BETWEEN} attn_res_w context_length frozen_gradients gim input_gradients occlusion"
# The methods that say why they do not run. All others have maps.
REFUSED = {
    "HookedTransformer LN": "token_patching",
    "bridge gemma3": "token_patching",
    "HookedEncoder": _NO_LOGITS_OR_CAUSALITY,
    "bridge bert": _NO_LOGITS_OR_CAUSALITY,
    "HookedEncoderDecoder decoder": _CROSS_BETWEEN,
    "bridge t5 decoder": _CROSS_BETWEEN,
    "HookedEncoderDecoder cross": _SELF_ATTENTION,
    "bridge t5 cross": _SELF_ATTENTION,
}
# transformers computes the patterns, or what they are computed from, in float32 in these models.
FLOAT32 = ("bridge gpt_neo", "bridge gptj", "bridge mpt")


# Parameters that take another way through the code. These run on one model each.
VARIANTS = {
    "attention per_head": lm.methods.AttentionWeights(per_head=True),
    "value_norm per_head": lm.methods.ValueNorms(per_head=True),
    "attn_res_ln next_norm": lm.methods.AttnResLn(next_norm=True),
    "atb_ff_res fixed": lm.methods.AtbFfRes("fixed"),
    "alti l2": lm.methods.Alti("l2", normalize=False),
    "decompx first": lm.methods.DecompX("first"),
    "decompx drop": lm.methods.DecompX("drop"),
    "decompx_local equal": lm.methods.DecompXLocal("equal"),
    "information_flow_routes per_head": lm.methods.InformationFlowRoutes(per_head=True, biases="part"),
    "value_zeroing per_head": lm.methods.ValueZeroing(metric="euclidean", per_head=True),
    "value_zeroing spans": lm.methods.ValueZeroing(spans=[(0, 1), (3,)]),
    "attention_attribution per_head": lm.methods.AttentionAttribution(per_head=True, internal_batch_size=3),
    "token_patching estimated": lm.methods.TokenPatching(n_measured=0),
    "input_gradients integrated": lm.methods.InputGradients(score="integrated", baseline="mean", n_steps=4),
    "occlusion mask": lm.methods.Occlusion(by="mask"),
    "occlusion values": lm.methods.Occlusion(by="values"),
    "occlusion spans": lm.methods.Occlusion(spans=[(0, 1), (3,)]),
    "gim ratio": lm.methods.Gim(activations="ratio"),
}
VARIED = next(title for title in ("rotary, grouped heads", "decoder") if title in LABELS)
# `make test` has all properties on this model, and on the others those that a model may break.
OF_EVERY_PROPERTY = ("decoder",)
OF_EVERY_MODEL = ("scores", "rows", "padding")
# `make test-all` has these on all other models.
OF_UNUSUAL_MODELS = ("scores", "engines", "rows", "layers", "padding")


def is_refused(title, name):
    return name in REFUSED.get(LABELS[title], "").split()


def table():
    """Yield each cell: the model, the method and the property."""
    for check in CHECKS:
        for title in LABELS:
            is_usual = title in OF_EVERY_PROPERTY or check in OF_EVERY_MODEL
            for name in METHODS:
                if not is_refused(title, name):
                    yield (pytest.param if is_usual else slow)(title, name, check)
        for name, method in VARIANTS.items():
            if is_refused(VARIED, method.name):
                continue
            yield (pytest.param if check in (*OF_EVERY_MODEL, "max_memory") else slow)(VARIED, name, check)


@functools.cache
def subject_of(label, name):
    case = case_of(label)
    return Subject(
        method=VARIANTS[name] if name in VARIANTS else METHODS[name](),
        model_name=label,
        build=functools.partial(model_of, case),
        prompts=[prompt_of(model_of(case), seq, seed) for seq, seed in ((7, 1), (4, 2), (7, 3))],
        part=case.part,
        dtype=torch.float64,
        dtypes=(torch.float32, torch.bfloat16),
        exactness=1e-5 if label in FLOAT32 else 1e-9,
    )


@pytest.mark.parametrize(("title", "name", "check"), list(table()))
def test_properties(title, name, check):
    CHECKS[check](subject_of(LABELS[title], name))


@pytest.mark.parametrize(
    ("title", "name"), [(title, name) for title in LABELS for name in METHODS if is_refused(title, name)]
)
def test_refusals(title, name):
    check_refusal(subject_of(LABELS[title], name))


@pytest.mark.parametrize("title", LABELS)
def test_support_is_the_table_of_refusals(title):
    case = case_of(LABELS[title])
    found = list(lm.support(model_of(case, torch.float64), part=case.part))
    assert [name for name, _, _ in found] == list(METHODS)
    assert {name for name, engine, _ in found if engine is None} == {
        name for name in METHODS if is_refused(title, name)
    }


@pytest.mark.parametrize("title", LABELS)
def test_methods_of_one_run_have_the_maps_of_each_alone(title):
    """Check rows and layers of a run of all methods, whose pass records what each one needs."""
    subjects = [subject_of(LABELS[title], name) for name in METHODS if not is_refused(title, name)]
    first, methods = subjects[0], [subject.method for subject in subjects]
    for queries in ([-1], [2, 0]):
        maps = lm.run(first.model, first.prompts[0], methods, part=first.part, queries=queries, progress=None)
        for subject, found in zip(subjects, maps.values(), strict=True):
            alone = subject.whole.select_queries(queries)
            subject.require_equal(alone, found, f"{subject.method.name}: expected the rows of the whole map")


def of_other_models():
    """Yield the models that are not in the table, each with a property; the usual ones run in `make test`."""
    for label in HERE:
        for check in OF_UNUSUAL_MODELS if label not in LABELS.values() else ():
            yield (pytest.param if label in USUAL and check in OF_EVERY_MODEL else slow)(label, check)


@pytest.mark.parametrize(("label", "check"), list(of_other_models()))
def test_other_models(label, check):
    """Check one property of all methods, so that a model has a test for each property."""
    failures = []
    for name in METHODS:
        try:
            MethodCheck(check, subject_of(label, name))()
        except AssertionError as problem:
            failures.append(str(problem))
    assert not failures, "\n".join(failures)
