"""Test gradients with respect to embeddings against transformers with autograd, and against captum."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import lens_mix as lm
from lens_mix._algebra.quadrature import quadrature
from lens_mix.methods.bound_target import BoundRows
from lens_mix.methods.input_gradients import gradient_norm, gradient_times_input, integrated_gradients
from tests import reference_models
from tests.hugging_face_oracle import Reference
from tests.matrix import build_or_skip, cases, prompt_of
from tests.reference_models import reference
from tests.tiny_models import Unavailable, bridge, gpt2_like, llama_like, tokens, wrapped_model

pytestmark = pytest.mark.filterwarnings("ignore")
WRAPPED = [
    case for case in cases(refused=False) if case.label.startswith("bridge") and case.part != "encoder"
]
ROWS = (-1, 2)


def hugging_face_gradients(name, prompt, stack, rows):
    """Return (x, gradients per row) for the first layer's input, by transformers and autograd alone."""
    model = wrapped_model(name, torch.float64)
    model.set_attn_implementation("eager")
    asked = Reference(model, prompt, stack)
    entering = []

    def enter(module, args, kwargs):
        x = args[0] if args else kwargs["hidden_states"]
        entering.append(x.detach().requires_grad_(True))
        return (
            ((entering[0], *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": entering[0]})
        )

    with asked.layers[0].register_forward_pre_hook(enter, with_kwargs=True):
        logits = model(**asked.inputs, use_cache=False).logits[0]
    x = entering[0]
    gradients = [torch.autograd.grad(logits[row].max(), x, retain_graph=True)[0][0] for row in rows]
    return x[0].detach(), gradients


@pytest.mark.parametrize("case", WRAPPED, ids=lambda case: case.label)
def test_against_transformers_alone(case):
    model = case.build(torch.float64)
    prompt = prompt_of(model)
    x, gradients = hugging_face_gradients(case.label.split()[1], prompt, case.part, ROWS)
    methods = [lm.methods.InputGradients(), lm.methods.InputGradients(score="times_input")]
    norm, times_input = lm.run(model, prompt, methods, part=case.part, queries=list(ROWS)).values()
    # Kernels of transformers that compute in float32 agree to this tolerance.
    for place, gradient in enumerate(gradients):
        torch.testing.assert_close(norm.scores[0, place], gradient.norm(dim=-1), atol=1e-5, rtol=1e-5)
        expected = (gradient * x).sum(-1)
        torch.testing.assert_close(times_input.scores[0, place], expected, atol=1e-5, rtol=1e-5)


def test_embeddings_themselves_where_nothing_lies_between():
    """The positions are rotary, so x is the token's embedding and inputs_embeds can be used."""
    model = build_or_skip(bridge, "llama", torch.float64)
    ids = tokens(model, 1)
    wrapped = wrapped_model("llama", torch.float64)
    x = wrapped.get_input_embeddings()(ids).detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(wrapped(inputs_embeds=x, use_cache=False).logits[0, -1].max(), x)
    m = lm.run(model, ids, "input_gradients", queries=[-1])
    torch.testing.assert_close(m.scores[0, 0], gradient[0].norm(dim=-1), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("model_class", ["TransformerBridge", "HookedTransformer"])
def test_captum(model_class):
    model = build_or_skip(reference_models.inseq_gpt2, model_class)
    expected = reference("gradients_gpt2_tiny")
    ids = reference("inseq_vz_gpt2_tiny")["n12_input_ids"].long()
    for row in (11, 5):

        def scores(score, row=row, **options):
            return lm.run(model, ids, lm.methods.InputGradients(score=score, **options), queries=[row])

        torch.testing.assert_close(
            scores("norm").scores[0, 0], expected[f"row{row}_norm"], atol=1e-12, rtol=0
        )
        products = scores("times_input").scores[0, 0]
        torch.testing.assert_close(products, expected[f"row{row}_times_input"], atol=1e-12, rtol=0)
        for baseline in ("zero", "mean"):
            m = scores("integrated", baseline=baseline)
            # captum's nodes are those of float32.
            name = f"row{row}_integrated_{baseline}"
            torch.testing.assert_close(m.scores[0, 0], expected[name], atol=2e-7, rtol=0)
            ((delta,),) = m.provenance["details"]["convergence_delta"]
            assert delta == pytest.approx(float(expected[f"row{row}_delta_{baseline}"]), abs=2e-7)
            assert any("convergence delta" in note for note in m.notes) == (baseline == "zero")


@pytest.mark.parametrize("model_class", ["TransformerBridge", "HookedEncoder"])
def test_behind_the_norm_of_berts_embeddings(model_class):
    """The class contains BERT of transformers, and is compared with the model of transformers."""
    plain = reference_models.to_bridge
    ids = reference("official_vz_tiny_f64")["n6_input_ids"].long()
    try:
        reference_models.to_bridge = lambda model: model
        wrapped = reference_models.official_bert("TransformerBridge")
    finally:
        reference_models.to_bridge = plain
    x = wrapped.bert.embeddings(ids).detach().requires_grad_(True)
    out = wrapped.bert.encoder(x)
    last = out.last_hidden_state if hasattr(out, "last_hidden_state") else out[0]
    (gradient,) = torch.autograd.grad(last[0, 3].square().sum(), x)
    model = build_or_skip(reference_models.official_bert, model_class)
    target = lm.targets.head(lambda resid: resid[:, 3].square().sum(-1))
    m = lm.run(model, ids, lm.methods.InputGradients(target=target), queries=[3])
    torch.testing.assert_close(m.scores[0, 0], gradient[0].norm(dim=-1), atol=1e-10, rtol=0)


def test_is_complete_where_the_model_is_smooth():
    """From the mean, many points close the gap. Near 0 a norm makes F jump, and a note says so."""
    model = gpt2_like(torch.float64)
    ids = tokens(model, 1)
    m = lm.run(model, ids, lm.methods.InputGradients(score="integrated", baseline="mean", n_steps=48))
    (deltas,) = m.provenance["details"]["convergence_delta"]
    assert len(deltas) == 7
    assert max(map(abs, deltas)) < 1e-5
    assert not any("convergence" in note for note in m.notes)
    few = lm.run(model, ids, lm.methods.InputGradients(score="integrated", n_steps=1), queries=[-1])
    assert "convergence delta" in few.notes[-1]
    assert "with 1 points" in few.notes[-1]


def test_deltas_are_sums_less_differences():
    model = gpt2_like(torch.float64)
    ids = tokens(model, 1)
    x = lm.run(model, ids, lm.methods.InputGradients(score="times_input"), queries=[-1])
    given = torch.full((24,), 0.1)
    method = lm.methods.InputGradients(score="integrated", baseline=given, n_steps=8)
    m = lm.run(model, ids, method, queries=[-1])
    name = next(name for name in ("blocks.0.hook_resid_pre", "blocks.0.hook_in") if name in model.hook_dict)
    with torch.no_grad():
        clean = model(ids)[0, -1]
        start = model.run_with_hooks(ids, fwd_hooks=[(name, lambda x, hook: torch.full_like(x, 0.1))])[0, -1]
    token = int(clean.argmax())
    difference = float(clean[token] - start[token])
    ((delta,),) = m.provenance["details"]["convergence_delta"]
    assert float(m.scores.sum()) - difference == pytest.approx(delta, abs=1e-10)
    assert m.parameters["baseline"] == "a tensor of shape [24]"
    assert x.scores.shape == m.scores.shape


def test_baselines_agree_where_they_are_the_same():
    model = gpt2_like(torch.float64)
    ids = tokens(model, 1)

    def scores(baseline, prompt=ids):
        method = lm.methods.InputGradients(score="integrated", baseline=baseline, n_steps=4)
        return lm.run(model, prompt, method, queries=[-1]).scores

    torch.testing.assert_close(scores("zero"), scores(torch.zeros(24)))
    torch.testing.assert_close(scores(torch.ones(24)), scores(torch.ones(7, 24)))
    with pytest.raises(
        ValueError, match=r"baseline: expected \[24\], or \[pos, 24\].*\(7\), got shape \[5, 24\]"
    ):
        scores(torch.ones(5, 24))
    with pytest.raises(ValueError, match=r"baseline: expected \[24\].*got shape \[23\]"):
        scores(torch.ones(23))


def test_padding_changes_no_integral():
    model = llama_like(torch.float64)
    prompts = [tokens(model, 1, seq, seq)[0] for seq in (7, 4)]
    method = lm.methods.InputGradients(score="integrated", baseline=torch.full((24,), 0.2), n_steps=4)
    for side in ("left", "right"):
        batched = list(lm.run_many(model, prompts, method, padding_side=side))
        for m, prompt in zip(batched, prompts, strict=True):
            alone = lm.run(model, prompt, method)
            torch.testing.assert_close(m.scores, alone.scores, atol=1e-10, rtol=1e-8)
            details = m.provenance["details"]["convergence_delta"][0]
            assert details == pytest.approx(alone.provenance["details"]["convergence_delta"][0], abs=1e-9)


def test_the_plain_formula_on_a_polynomial():
    """For F = the sum of cubes along a straight path, 3 points of Gauss-Legendre are exact."""
    x = torch.tensor([[[1.0, -2.0], [0.5, 3.0]]], dtype=torch.float64)
    start = torch.full_like(x, 0.25)
    points, weights = quadrature("gauss_legendre", 3)
    found = integrated_gradients(lambda at: 3 * at.square(), x, start, points, weights)
    torch.testing.assert_close(found, (x.pow(3) - start.pow(3)).sum(-1), atol=1e-12, rtol=0)


def _record_sizes(monkeypatch):
    """Return a list to which each pass with gradients adds its number of copies."""
    sizes, of_copies = [], BoundRows.gradients

    def gradients(bound, index, resid_pre):
        sizes.append(len(resid_pre))
        return of_copies(bound, index, resid_pre)

    monkeypatch.setattr(BoundRows, "gradients", gradients)
    return sizes


@pytest.mark.parametrize("size", [1, 3, 7, None])
def test_points_may_share_a_pass(size, monkeypatch):
    model, sizes = gpt2_like(torch.float64), _record_sizes(monkeypatch)
    ids = tokens(model, 1)

    def scores(size, queries):
        sizes.clear()
        method = lm.methods.InputGradients(
            score="integrated", baseline="mean", n_steps=5, internal_batch_size=size
        )
        return lm.run(model, ids, method, queries=queries).scores

    expected = scores(1, [-1, 2])
    torch.testing.assert_close(scores(size, [-1, 2]), expected, atol=1e-10, rtol=0)
    assert sizes == {1: [1] * 10, 3: [2] * 5, 7: [6, 4], None: [10]}[size]


def test_many_points_take_several_passes(monkeypatch):
    model, sizes = gpt2_like(torch.float64), _record_sizes(monkeypatch)
    ids = tokens(model, 1, 12)
    method = lm.methods.InputGradients(score="integrated", baseline="mean", n_steps=100)
    scores = lm.run(model, ids, method, queries=[-1]).scores
    # The autograd graphs of at most 512 positions are in memory at once.
    assert sizes == [42, 42, 16]
    one_by_one = dataclasses.replace(method, internal_batch_size=1)
    expected = lm.run(model, ids, one_by_one, queries=[-1]).scores
    torch.testing.assert_close(scores, expected, atol=1e-10, rtol=0)


def test_the_formulas_on_a_run_of_your_own():
    model = gpt2_like(torch.float64)
    ids = tokens(model, 1)
    name = next(name for name in ("blocks.0.hook_resid_pre", "blocks.0.hook_in") if name in model.hook_dict)
    logits, cache = model.run_with_cache(ids)
    x, token = cache[name].detach(), int(logits[0, -1].argmax())

    def gradient(at):
        leaf = at.detach().requires_grad_(True)
        logits = model.run_with_hooks(ids, fwd_hooks=[(name, lambda x, hook: leaf)])
        return torch.autograd.grad(logits[0, -1, token], leaf)[0]

    path = x.mean(1, keepdim=True).expand_as(x), *quadrature("gauss_legendre", 6)
    expected = {
        "norm": gradient_norm(gradient, x),
        "times_input": gradient_times_input(gradient, x),
        "integrated": integrated_gradients(gradient, x, *path),
    }
    for score, scores in expected.items():
        method = lm.methods.InputGradients(score=score, baseline="mean", n_steps=6)
        found = lm.run(model, ids, method, queries=[-1]).scores[0]
        torch.testing.assert_close(found, scores, atol=1e-10, rtol=0)


def test_the_map_is_of_the_whole_model():
    model = gpt2_like(torch.float64)
    ids = tokens(model, 1)
    whole = lm.run(model, ids, "input_gradients")
    assert whole.kind == "input"
    assert whole.layers == [1]
    assert float(whole.scores.triu(1).abs().max()) == 0
    with pytest.raises(ValueError, match="describes the whole model"):
        lm.run(model, ids, "input_gradients", layers=[0])


def test_targets_with_and_without_a_position():
    model = gpt2_like(torch.float64)
    ids = tokens(model, 1)
    token = int(model(ids)[0, 3].argmax())
    at_row = lm.run(model, ids, "input_gradients", queries=[3]).scores
    given = lm.methods.InputGradients(target=lm.targets.logit(token))
    torch.testing.assert_close(lm.run(model, ids, given, queries=[3]).scores, at_row)
    function = lm.methods.InputGradients(target=lambda logits: logits[:, 3, token])
    torch.testing.assert_close(lm.run(model, ids, function, queries=[3]).scores, at_row)
    with pytest.raises(ValueError, match="explains one number of the prompt"):
        lm.run(model, ids, function)
    with pytest.raises(ValueError, match="expected a differentiable function"):
        lm.run(
            model,
            ids,
            lm.methods.InputGradients(target=lambda logits: logits[:, 3, token].detach()),
            queries=[3],
        )


def test_inference_mode_is_refused():
    model = gpt2_like()
    with pytest.raises(RuntimeError, match="inference_mode"), torch.inference_mode():
        lm.run(model, tokens(model, 1), "input_gradients")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "saliency"}, "score: expected 'norm', 'times_input' or 'integrated'"),
        ({"baseline": "pad"}, "baseline: expected 'zero' or 'mean', got 'pad'"),
        ({"baseline": torch.zeros(1, 2, 3)}, r"baseline: expected a tensor \[d_model\] or \[pos, d_model\]"),
        ({"n_steps": 0}, "n_steps: expected"),
        ({"method": "simpson"}, "method: expected"),
        ({"internal_batch_size": 0}, "internal_batch_size: expected"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        lm.methods.InputGradients(**options)


def test_an_encoder_below_a_decoder_is_refused():
    for factory in (functools.partial(bridge, "t5"), functools.partial(bridge, "bart")):
        try:
            model = factory()
        except Unavailable:
            continue
        if lm.support(model, part="decoder")["input_gradients"].startswith("ok"):
            reason = lm.support(model, part="encoder")["input_gradients"]
            assert "expected part='decoder' (the target's own tokens) or part='joint'" in reason
