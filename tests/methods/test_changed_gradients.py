"""Test GIM, and gradient × input with frozen norms and patterns, against transformers written by hand."""

from __future__ import annotations

import dataclasses
import functools
import re
import textwrap

import pytest
import torch

import lens_mix as lm
from lens_mix.hooks import DEFAULT_ATTENTION, freeze_scale, must_fire, record, scale_gradient
from lens_mix.methods import METHODS
from tests import reference_models
from tests.matrix import build_or_skip, cases, prompt_of, slow
from tests.methods import changed_rules_reference as by_hand
from tests.reference_models import reference
from tests.tiny_models import bridge, gpt2_like, hooked_transformer, tokens, wrapped_model

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = {case.label: case for case in cases(refused=False)}
WRITTEN = {"gpt2": by_hand.Gpt2, "llama": by_hand.Llama}


@functools.cache
def pair(name):
    """Return a TransformerBridge, and the same model written by hand."""
    return build_or_skip(bridge, name, torch.float64), WRITTEN[name].of(wrapped_model(name, torch.float64))


@pytest.mark.usefixtures("softmax_in_the_dtype_of_the_model")
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_by_hand_is_the_model(name):
    model, written = pair(name)
    ids = tokens(model, 1, 9)
    logits = written.logits(written.streams(written.embed(ids[0]), lm.methods.Gim())[-1])
    torch.testing.assert_close(model(ids)[0], logits, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("softmax_in_the_dtype_of_the_model")
@pytest.mark.parametrize("method", by_hand.METHODS)
@pytest.mark.parametrize("name", WRITTEN)
def test_equals_the_papers_formulas(name, method):
    model, written = pair(name)
    ids = tokens(model, 1, 9)
    m = lm.run(model, ids, method, queries=[-1, 4])
    absolute = lm.run(model, ids, dataclasses.replace(method, readout="absolute"), queries=[-1, 4])
    assert m.scores.shape == (1, 2, 9)
    for place, row in enumerate((8, 4)):
        product = by_hand.products(written, ids[0], row, method)[0]
        torch.testing.assert_close(m.scores[0, place], product.sum(-1), atol=1e-10, rtol=0)
        torch.testing.assert_close(absolute.scores[0, place], product.abs().sum(-1), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "method", [lm.methods.Gim(), lm.methods.Gim(temperature=1.5, values=2), lm.methods.FrozenGradients()]
)
@pytest.mark.parametrize(
    "name", ["hooked LN", "hooked grouped", "hooked gated", "bridge gpt2", "bridge llama"]
)
def test_edits_on_a_run_of_ones_own(name, method):
    """The example of `Gim.interventions` runs unchanged."""
    factory, model_name = {"hooked": hooked_transformer, "bridge": bridge}[name.split()[0]], name.split()[1]
    model = build_or_skip(factory, model_name, torch.float64)
    (example,) = re.findall(r"row:\n\n(.*?)\n\n", lm.methods.Gim.interventions.__doc__, re.DOTALL)
    names = {"model": model, "tokens": tokens(model, 1), "method": method, "position": 4, "torch": torch}
    names |= {"record": record, "freeze_scale": freeze_scale, "scale_gradient": scale_gradient}
    exec(textwrap.dedent(example), names)
    m = lm.run(model, names["tokens"], method, queries=[4])
    torch.testing.assert_close(names["row"][0], m.scores[0, 0], atol=1e-10, rtol=0)
    with must_fire(*names["hooks"]) as hooks:
        torch.autograd.grad(model.run_with_hooks(names["tokens"], fwd_hooks=hooks).sum(), model.W_E)


def test_the_replay_is_made_of_the_methods_own_edits():
    @dataclasses.dataclass(frozen=True)
    class Halved(lm.methods.FrozenGradients):
        def interventions(self, layer, *, attention=DEFAULT_ATTENTION):
            values = scale_gradient(f"{attention.format(layer=layer)}.hook_v", 0.5)
            return [*super().interventions(layer, attention=attention), values]

    model = gpt2_like(torch.float64)
    ids = tokens(model, 1)
    as_gim = lm.methods.Gim(queries_keys=0, values=0.5)
    found, expected = (lm.run(model, ids, method).scores for method in (Halved(), as_gim))
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)
    assert float((found - lm.run(model, ids, lm.methods.FrozenGradients()).scores).abs().max()) > 1e-4


@pytest.mark.usefixtures("softmax_in_the_dtype_of_the_model")
@pytest.mark.parametrize("readout", ["signed_sum", "absolute"])
def test_reads_several_streams(readout):
    model, written = pair("llama")
    ids = tokens(model, 1, 9)
    products = by_hand.products(written, ids[0], 8, lm.methods.Gim())
    rows = [(p if readout == "signed_sum" else p.abs()).sum(-1) for p in products]
    scaled = [row / row.abs().sum() for row in rows]

    def scores(after_blocks):
        method = lm.methods.Gim(readout=readout, after_blocks=after_blocks)
        return lm.run(model, ids, method, queries=[-1]).scores[0, 0]

    torch.testing.assert_close(scores(0), rows[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(scores([1]), rows[1], atol=1e-10, rtol=0)
    torch.testing.assert_close(scores(1), (scaled[0] + scaled[1]) / 2, atol=1e-10, rtol=0)
    torch.testing.assert_close(scores((0, 1)), scores(1))


@pytest.mark.parametrize("model_class", ["TransformerBridge", "HookedTransformer"])
def test_the_authors_package(model_class):
    model = build_or_skip(reference_models.inseq_gpt2, model_class)
    expected = reference("gradients_gpt2_tiny")
    ids = reference("inseq_vz_gpt2_tiny")["n12_input_ids"].long()
    m = lm.run(model, ids, "gim", queries=[11, 5])
    for place, row in enumerate((11, 5)):
        torch.testing.assert_close(m.scores[0, place], expected[f"row{row}_gim"], atol=1e-12, rtol=0)


@pytest.mark.parametrize("label", CASES)
def test_conserves_on_every_model_or_says_why_not(label):
    """The sum and the share of the constants give the logit, so no nonlinearity, bias or hook was missed."""
    case = CASES[label]
    model = case.build(torch.float64)
    method = lm.methods.FrozenGradients(activations="ratio")
    try:
        m = lm.run(model, prompt_of(model), method, part=case.part)
    except lm.UnsupportedModelError as refusal:
        assert "'mixture'" in str(refusal) or case.part == "encoder"
        return
    ((gaps,), (constants,)) = (m.provenance["details"][k] for k in ("conservation_gap", "constant_share"))
    # A soft cap, and a dense layer with an activation in the classifier, are not frozen.
    if any(name in label for name in ("gemma2", "bert", "HookedEncoder")) and "Decoder" not in label:
        assert max(map(abs, gaps)) > 1e-3
        assert "conservation fails" in m.notes[-1]
        return
    assert max(map(abs, gaps)) < 1e-10
    assert not m.notes
    if "gpt2" in label:
        assert max(map(abs, constants)) > 0.1
    predicted = m.scores[0].sum(-1) + torch.tensor(constants, dtype=torch.float64)
    if case.part is None:
        whole = model(prompt_of(model))[0].max(-1).values
        torch.testing.assert_close(predicted, whole, atol=1e-5, rtol=0)  # Its kernel may use float32.


def test_a_probability_does_not_conserve_and_a_note_says_so():
    model = gpt2_like(torch.float64)
    target = lm.targets.predicted(of="probability")
    m = lm.run(
        model, tokens(model, 1), lm.methods.FrozenGradients(target=target, activations="ratio"), queries=[-1]
    )
    assert "conservation fails in 1 of 1 rows" in m.notes[-1]


def test_inference_mode_is_refused():
    model = gpt2_like()
    for method in (lm.methods.Gim(activations="ratio"), lm.methods.FrozenGradients(after_blocks=1)):
        with pytest.raises(RuntimeError, match="inference_mode"), torch.inference_mode():
            lm.run(model, tokens(model, 1), method)


@pytest.mark.parametrize("method", [lm.methods.Gim(), slow(lm.methods.FrozenGradients())])
def test_float16_is_near_the_double(method):
    ids = tokens(gpt2_like(), 1)
    low = lm.run(gpt2_like(torch.float16), ids, method, queries=[-1]).scores
    double = lm.run(gpt2_like(torch.float64), ids, method, queries=[-1]).scores
    assert low.dtype == torch.float32
    assert float((low - double).norm() / double.norm()) < 0.02


def test_chunks_of_rows_and_memory_change_nothing():
    model = gpt2_like(torch.float64)
    ids = tokens(model, 1)
    whole = lm.run(model, ids, lm.methods.Gim()).scores
    torch.testing.assert_close(lm.run(model, ids, lm.methods.Gim(internal_batch_size=2)).scores, whole)
    assert float(whole.triu(1).abs().max()) == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gim", {"temperature": 0}, "temperature: expected a finite number, above 0, got 0"),
        ("gim", {"values": -1}, "values: expected a finite number, 0 or more, got -1"),
        ("gim", {"gate_up": -0.5}, "gate_up: expected a finite number, 0 or more, got -0.5"),
        ("gim", {"readout": "sum"}, "readout: expected 'signed_sum' or 'absolute', got 'sum'"),
        (
            "frozen_gradients",
            {"activations": "lrp"},
            "activations: expected 'gradient' or 'ratio', got 'lrp'",
        ),
        ("frozen_gradients", {"after_blocks": []}, "after_blocks: expected at least one"),
        ("frozen_gradients", {"after_blocks": -1}, r"after_blocks: expected .*0 or more"),
        ("frozen_gradients", {"internal_batch_size": 0}, r"internal_batch_size: expected .*1 or more"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        METHODS[name](**options)


def test_more_blocks_than_there_are():
    model = gpt2_like()
    with pytest.raises(ValueError, match=r"after_blocks: expected .*from 0 to 1, got 2"):
        lm.run(model, tokens(model, 1), lm.methods.Gim(after_blocks=2))
