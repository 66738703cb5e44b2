"""Test self-attention attribution against peers and the definition, and its steps, baselines and errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lens_mix as lm
from lens_mix._algebra.quadrature import nested_rules, quadrature
from lens_mix.hooks import record
from lens_mix.methods.attention_attribution import integrated_gradients
from tests import tiny_models
from tests.matrix import build_or_skip, slow
from tests.methods import attribution_reference as hao
from tests.tiny_models import available, bridge, gpt2_like, hooked_transformer

needs_bridge = pytest.mark.skipif(not available(bridge, "gpt2"), reason="no TransformerBridge here")


def naive(model, tokens: Tensor, layer: int, function, points: Tensor, weights: Tensor) -> Tensor:
    """Compute the definition by one forward pass per point, which writes hook_pattern: [head, query, key]."""
    name = f"blocks.{layer}.attn.hook_pattern"
    store = {}
    model.run_with_hooks(tokens[None], fwd_hooks=[record(store, name)])
    pattern = store[name]

    def value(given: Tensor) -> Tensor:
        return function(model.run_with_hooks(tokens[None], fwd_hooks=[(name, lambda t, hook: given)]))

    return integrated_gradients(value, pattern, torch.zeros_like(pattern), points, weights)[0]


# ------------------------------------------------------------------ peers


@pytest.mark.parametrize("model_class", hao.MODEL_CLASSES)
def test_the_released_code(model_class):
    expected = hao.attattr()
    tokens, inputs = hao.prompt(expected)
    logits = hao.classifier()
    target = lm.targets.head(lambda resid: logits(resid).softmax(-1)[:, expected["pred"]])
    method = lm.methods.AttentionAttribution(target=target, method="riemann_left", n_steps=20, per_head=True)
    found = lm.run(hao.body(model_class), tokens, method, **inputs)
    assert found.scores.shape == expected["attr"].shape
    assert (found.scores - expected["attr"]).abs().max() <= 1e-8
    assert (found.scores - expected["attr"]).abs().max() <= 1e-8 * expected["attr"].abs().max()
    clean = found.provenance["details"]["target_value"][0]
    assert clean == pytest.approx(expected["logits"][0].softmax(-1)[expected["pred"]].item(), abs=1e-12)


@pytest.mark.parametrize("rule", ["gauss_legendre", "riemann_left", "riemann_right", "riemann_middle"])
def test_captum(rule):
    captum = pytest.importorskip("captum.attr")
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    method = lm.methods.AttentionAttribution(n_steps=6, method=rule, per_head=True)
    found = lm.run(model, tokens, [method, "attention"])
    clean = lm.run(model, tokens, lm.methods.AttentionWeights(per_head=True)).scores
    with torch.no_grad():
        token = int(model(tokens[None])[0, -1].argmax())
    for layer in range(2):
        name = f"blocks.{layer}.attn.hook_pattern"

        def forward(pattern, name=name):
            hook = (name, lambda t, hook: pattern)
            out = model.run_with_hooks(tokens.expand(len(pattern), -1), fwd_hooks=[hook])
            return out[:, -1].softmax(-1)[:, token]

        expected, gap = captum.IntegratedGradients(forward).attribute(
            clean[layer][None],
            n_steps=6,
            method={"gauss_legendre": "gausslegendre"}.get(rule, rule),
            return_convergence_delta=True,
        )
        scores = found["attention_attribution"].scores[layer]
        # captum stores its points in float32.
        assert (scores - expected[0]).abs().max() <= 1e-7
        assert found["attention_attribution"].provenance["details"]["completeness_gap"][layer] == (
            pytest.approx(gap.item(), abs=1e-6)
        )


# ------------------------------------------------------------------ the definition


@needs_bridge
@pytest.mark.parametrize("name", ["llama", "bloom", *map(slow, ("gemma2", "gpt_neox", "mixtral", "gpt_oss"))])
def test_whole_forward_passes(name):
    model = bridge(name, torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    points, weights = quadrature("gauss_legendre", 4)

    def function(logits):
        return logits[:, 3, 7] - logits[:, 3, 9]

    method = lm.methods.AttentionAttribution(target=function, n_steps=4, per_head=True)
    found = lm.run(model, tokens, method)
    for layer in range(2):
        expected = naive(model, tokens, layer, function, points, weights)
        assert expected.abs().max() > 1e-3 or layer == 1
        assert (found.scores[layer] - expected).abs().max() <= 1e-10 * max(1, expected.abs().max())


@pytest.mark.parametrize("layer", [0, 1])
def test_the_hooks_on_a_run_of_your_own(layer):
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    method = lm.methods.AttentionAttribution(target=lm.targets.logit(7), n_steps=3, per_head=True)
    found = lm.run(model, tokens, method)
    details = found.provenance["details"]
    pattern = lm.run(model, tokens, lm.methods.AttentionWeights(per_head=True)).scores[layer][None]

    def value(given: Tensor) -> Tensor:
        return model.run_with_hooks(tokens[None], fwd_hooks=method.interventions(layer, given))[:, -1, 7]

    assert value(pattern).item() == pytest.approx(details["target_value"][layer], abs=1e-12)
    assert value(0 * pattern).item() == pytest.approx(details["baseline_value"][layer], abs=1e-12)
    points, weights = quadrature("gauss_legendre", 3)
    expected = integrated_gradients(value, pattern, torch.zeros_like(pattern), points, weights)
    assert expected.abs().max() > 1e-3
    assert (found.scores[layer] - expected[0]).abs().max() <= 1e-12


@needs_bridge
@pytest.mark.parametrize("name", ["bert", "t5", *map(slow, ("opt", "gptj", "bart"))])
def test_completeness_on_delegated_attention(name):
    if not available(bridge, name):
        pytest.skip(f"no bridge for {name}")
    model = bridge(name, torch.float64)
    prompt = tiny_models.tokens(model, 1)[0]
    if tiny_models.is_encoder_decoder(model):
        prompt = (prompt, tiny_models.tokens(model, 1, 5, 2)[0])
    try:
        found = lm.run(model, prompt, lm.methods.AttentionAttribution(n_steps=64))
    except lm.UnsupportedModelError as reason:
        pytest.skip(str(reason))
    details = found.provenance["details"]
    for layer in range(2):
        difference = details["target_value"][layer] - details["baseline_value"][layer]
        total = found.scores[layer].sum().item()
        assert abs(difference) > 1e-6
        # ReLU (opt, t5) makes kinks in the path.
        assert total == pytest.approx(difference, abs=2e-2 if name in ("opt", "t5") else 1e-6)


@pytest.mark.parametrize("of", ["probability", "logit"])
def test_completeness_on_a_smooth_model(of):
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    method = lm.methods.AttentionAttribution(target=lm.targets.predicted(of=of), n_steps=48)
    details = lm.run(model, tokens, method).provenance["details"]
    assert all(abs(gap) <= 1e-6 for gap in details["completeness_gap"])
    assert all(
        abs(a - b) > 1e-3 for a, b in zip(details["target_value"], details["baseline_value"], strict=True)
    )


def test_sum_over_heads_and_rows():
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    summed = lm.run(model, tokens, lm.methods.AttentionAttribution())
    apart = lm.run(model, tokens, lm.methods.AttentionAttribution(per_head=True))
    assert summed.scores.shape == (2, 7, 7)
    assert (apart.scores.sum(1) - summed.scores).abs().max() <= 1e-12
    assert not summed.scores[:, *torch.triu_indices(7, 7, 1)].any()
    # The other rows of the last layer cannot reach the last position.
    assert not summed.scores[1, :-1].any()
    assert summed.scores[1, -1].abs().min() > 0


# ------------------------------------------------------------------ baselines


def test_baselines():
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    uniform = torch.ones(7, 7, dtype=torch.float64).tril() / torch.arange(1, 8, dtype=torch.float64)[:, None]
    given = uniform.expand(2, 4, 7, 7)
    by_name = lm.run(model, tokens, lm.methods.AttentionAttribution(baseline="uniform", n_steps=32))
    by_tensor = lm.run(model, tokens, lm.methods.AttentionAttribution(baseline=given, n_steps=32))
    by_function = lm.run(
        model,
        tokens,
        lm.methods.AttentionAttribution(baseline=lambda pattern, layer: given[layer][None], n_steps=32),
    )
    zero = lm.run(model, tokens, lm.methods.AttentionAttribution(n_steps=32))
    assert torch.equal(by_tensor.scores, by_function.scores)
    assert (by_tensor.scores - by_name.scores).abs().max() <= 1e-12
    assert (by_name.scores - zero.scores).abs().max() > 1e-3
    assert max(map(abs, by_name.provenance["details"]["completeness_gap"])) <= 1e-6
    by_tensor.to_dataframe()
    assert by_tensor.parameters["baseline"] == "a tensor of shape [2, 4, 7, 7]"


def test_a_baseline_may_not_break_the_mask():
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    for baseline, message in [
        (torch.full((2, 4, 7, 7), 1 / 7), "which would break the attention mask"),
        (torch.zeros(2, 4, 6, 6), r"expected shape \[1, 4, 7, 7\]"),
        (torch.zeros(4, 7, 7), r"\[layer, head, query, key\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            lm.run(model, tokens, lm.methods.AttentionAttribution(baseline=baseline))
    two = [tokens, tokens.flip(0)]
    with pytest.raises(ValueError, match="a tensor is for one prompt"):
        list(lm.run_many(model, two, lm.methods.AttentionAttribution(baseline=torch.zeros(2, 4, 7, 7))))


# ------------------------------------------------------------------ steps and memory


def test_each_layer_takes_the_points_it_needs():
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    exact = lm.run(model, tokens, lm.methods.AttentionAttribution(n_steps=100, per_head=True)).scores
    steps = []
    for tolerance in (1e-2, 1e-4, 1e-7):
        found = lm.run(
            model, tokens, lm.methods.AttentionAttribution(tolerance=tolerance, max_steps=63, per_head=True)
        )
        details = found.provenance["details"]
        assert max(map(abs, details["completeness_gap"])) <= tolerance
        assert max(details["estimated_error"]) <= tolerance
        # The estimate is for all entries together, and was right within a factor of 10.
        assert (found.scores - exact).abs().sum((1, 2, 3)).max() <= 10 * tolerance
        assert not [note for note in found.notes if "tolerance" in note]
        steps.append(details["steps"])
    assert len(set(steps[0])) > 1
    assert steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize("count", [3, 7, 15])
def test_points_of_a_nested_rule_are_those_of_the_definition(count):
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    method = lm.methods.AttentionAttribution(
        target=lm.targets.logit(7), tolerance=1e-12, max_steps=count, per_head=True
    )
    found = lm.run(model, tokens, method)
    rules = nested_rules(count)
    for layer in range(2):
        points = found.provenance["details"]["steps"][layer]
        weights = rules.weights[rules.counts.index(points)]
        expected = naive(model, tokens, layer, lambda logits: logits[:, -1, 7], rules.points, weights)
        assert (found.scores[layer] - expected).abs().max() <= 1e-10
    assert any("tolerance 1e-12 was not met" in note for note in found.notes)


def test_by_default_what_a_target_is_measured_in_does_not_matter():
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    maps = [
        lm.run(
            model,
            tokens,
            lm.methods.AttentionAttribution(target=lambda logits, unit=unit: unit * logits[:, -1, 7]),
        )
        for unit in (1.0, 1e-6, 1e6)
    ]
    first, *others = [found.provenance["details"]["steps"] for found in maps]
    assert max(first) > 3
    assert all(steps == first for steps in others)


def test_a_tolerance_that_is_not_met_is_noted():
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    found = lm.run(model, tokens, lm.methods.AttentionAttribution(max_steps=7, tolerance=1e-14))
    assert [note for note in found.notes if "tolerance 1e-14 was not met" in note and "max_steps=7" in note]
    exactly = lm.run(model, tokens, lm.methods.AttentionAttribution(n_steps=2, tolerance=1e-14))
    assert exactly.provenance["details"]["steps"] == [2, 2]
    assert [note for note in exactly.notes if "tolerance 1e-14 was not met" in note]


def test_only_the_prompts_that_need_more_points_get_them():
    model = gpt2_like(torch.float64)
    prompts = [tiny_models.tokens(model, 1, seed=seed)[0] for seed in range(4)]
    single = [lm.run(model, p, lm.methods.AttentionAttribution(tolerance=1e-4)) for p in prompts]
    batch = list(lm.run_many(model, prompts, lm.methods.AttentionAttribution(tolerance=1e-4)))
    steps = [m.provenance["details"]["steps"] for m in batch]
    assert steps == [m.provenance["details"]["steps"] for m in single]
    assert len({tuple(s) for s in steps}) > 1
    for alone, together in zip(single, batch, strict=True):
        assert (alone.scores - together.scores).abs().max() <= 1e-12


@pytest.mark.parametrize("size", [3, *map(slow, (1, 5, 100))])
def test_internal_batch_size_changes_nothing(size):
    model = gpt2_like(torch.float64)
    prompts = [tiny_models.tokens(model, 1, length)[0] for length in (7, 4)]
    whole = list(lm.run_many(model, prompts, lm.methods.AttentionAttribution()))
    rows = []
    handle = model.blocks[1].register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len((*args, *kwargs.values())[0])), with_kwargs=True
    )
    try:
        chunked = list(lm.run_many(model, prompts, lm.methods.AttentionAttribution(internal_batch_size=size)))
    finally:
        handle.remove()
    assert max(rows) <= max(size, 3)  # The verification of a replay runs three copies.
    for a, b in zip(whole, chunked, strict=True):
        assert (a.scores - b.scores).abs().max() <= 1e-12


def test_blocks_below_are_not_run_again():
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    method = lm.methods.AttentionAttribution(n_steps=5)
    rows: list[list[int]] = [[], []]
    for layer, block in enumerate(model.blocks):
        block.attn.register_forward_hook(
            lambda m, args, out, layer=layer: rows[layer].append(
                len(out[0] if isinstance(out, tuple) else out)
            )
        )
    lm.run(model, tokens, method)
    # Each layer has five points and the baseline. Those of layer 0 need both blocks, and those of layer 1
    # only the upper one.
    assert rows[0].count(6) == 1
    assert rows[1].count(6) == 2


# ------------------------------------------------------------------ degenerate norms


@needs_bridge
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2"])
def test_invisible_scale_is_told(name):
    model = bridge(name)
    found = lm.run(model, tiny_models.tokens(model, 1)[0], lm.methods.AttentionAttribution())
    told = [note for note in found.notes if "completeness is degenerate" in note]
    assert len(told) == 2
    details = found.provenance["details"]
    for layer in range(2):
        assert details["visible_share"][layer] < 2e-3
        difference = details["target_value"][layer] - details["baseline_value"][layer]
        assert abs(details["completeness_gap"][layer]) > 0.5 * abs(difference)
    # More points would change nothing.
    assert details["steps"] == [3, 3]


@needs_bridge
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "bert"])
def test_visible_scale_is_not_called_degenerate(name):
    model = bridge(name)
    found = lm.run(model, tiny_models.tokens(model, 1)[0], lm.methods.AttentionAttribution())
    assert not [note for note in found.notes if "degenerate" in note]


# ------------------------------------------------------------------ padding, state, errors


def state(model):
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    flags = [p.requires_grad for p in model.parameters()]
    training = [m.training for m in model.modules()]
    grads = [p.grad is None for p in model.parameters()]
    forwards = ["forward" in m.__dict__ for m in model.modules()]
    return hooks, flags, training, grads, forwards, torch.is_grad_enabled()


@pytest.mark.parametrize("problem", [slow(RuntimeError), KeyboardInterrupt])
def test_the_model_comes_back_after_an_error_in_a_gradient(problem):
    model = gpt2_like(torch.float64).train()
    first = next(iter(model.parameters()))
    first.requires_grad_(False)
    model(tiny_models.tokens(model, 1))  # TransformerLens itself leaves hooks on in its first pass.
    before = state(model)
    calls = []

    def function(logits):
        calls.append(len(logits))
        if torch.is_grad_enabled():
            raise problem("mid-gradient")
        return logits[:, -1, 4]

    tokens = tiny_models.tokens(model, 1)[0]
    for method in (
        lm.methods.AttentionAttribution(target=function),
        lm.methods.GradientAttention(target=function),
    ):
        with pytest.raises(problem):
            lm.run(model, tokens, method)
        assert state(model) == before
    assert calls


def test_no_graph_reaches_the_parameters():
    model = gpt2_like(torch.float64)
    asked = []

    def keep(module, args, out):
        if torch.is_grad_enabled():
            asked.append(any(p.requires_grad for p in model.parameters()))

    model.blocks[1].register_forward_hook(keep)
    lm.run(model, tiny_models.tokens(model, 1)[0], ["attention_attribution", "gradient_attention"])
    assert asked
    assert not any(asked)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_targets_without_a_gradient_are_refused():
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    learned = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    for function in (lambda logits: logits[:, -1, 4].detach(), lambda logits: learned.expand(len(logits))):
        for method in (
            lm.methods.AttentionAttribution(target=function),
            lm.methods.GradientAttention(target=function),
        ):
            with pytest.raises(ValueError, match="target: expected a differentiable function"):
                lm.run(model, tokens, method)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_steps": 0}, ValueError, "n_steps: expected a whole number from 1 to 2000"),
        ({"n_steps": 1, "method": "trapezoid"}, ValueError, "from 2 to 2000"),
        ({"n_steps": 2.5}, TypeError, "n_steps"),
        ({"method": "simpson"}, ValueError, "method: expected one of"),
        ({"baseline": "mean"}, ValueError, "baseline: expected 'zero'"),
        ({"baseline": 0.0}, TypeError, "baseline: expected"),
        ({"internal_batch_size": 0}, ValueError, "internal_batch_size"),
        ({"tolerance": -1.0}, ValueError, "tolerance"),
        ({"max_steps": 2}, ValueError, "max_steps: expected a whole number, 3 or more"),
        ({"method": "riemann_left"}, ValueError, "'riemann_left' needs n_steps"),
        ({"target": 3}, TypeError, "target: expected the text of a token, one of lens_mix.targets.*got 3"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        lm.methods.AttentionAttribution(**options)


def test_inference_mode_is_refused():
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    lm.run(model, tokens, "attention")
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        lm.run(model, tokens, "attention_attribution")
    with torch.no_grad():
        lm.run(model, tokens, "attention_attribution")


# ------------------------------------------------------------------ ReLU

WITH_KINKS = {
    "opt": lambda seed: build_or_skip(bridge, "opt", torch.float64, seed),
    "t5": lambda seed: build_or_skip(bridge, "t5", torch.float64, seed),
    "relu": lambda seed: build_or_skip(hooked_transformer, "LN", torch.float64, seed, act_fn="relu"),
}


@pytest.mark.parametrize("name", WITH_KINKS)
def test_what_is_accepted_of_models_with_relu_is_right(name):
    """No layer's error exceeds its estimate by more than a half, against an integral of 400 points."""
    said = []
    for seed in range(6):
        model = WITH_KINKS[name](seed)
        prompt, options = tiny_models.tokens(model, 1, 7, seed)[0], {}
        if name == "t5":
            prompt, options = (prompt, prompt[:6]), {"part": "decoder"}
        target = lm.targets.predicted(of="logit")
        try:
            found = lm.run(model, prompt, lm.methods.AttentionAttribution(target, per_head=True), **options)
        except lm.UnsupportedModelError as reason:
            pytest.skip(str(reason))
        fine = lm.methods.AttentionAttribution(target, per_head=True, method="riemann_middle", n_steps=400)
        errors = (found.scores - lm.run(model, prompt, fine, **options).scores).abs().flatten(1).sum(1)
        sizes = found.scores.abs().flatten(1).sum(1)
        estimated = found.provenance["details"]["estimated_error"]
        for error, size, estimate in zip(errors.tolist(), sizes.tolist(), estimated, strict=True):
            assert error <= 1.6 * estimate + 0.003 * size
            said.append(estimate <= 0.01 * size)
        assert sum("tolerance" in note for note in found.notes) == said[-len(estimated) :].count(False)
    assert not all(said)


@pytest.mark.parametrize(
    ("name", "smooth"), [("gpt2", True), ("llama", True), ("opt", False), ("mixtral", False)]
)
def test_which_models_are_smooth(name, smooth):
    model = build_or_skip(bridge, name, torch.float64)
    prompt = tiny_models.tokens(model, 1, 7, 0)[0]
    seen = []

    class Asks(lm.methods.AttentionWeights):
        def __call__(self, block):
            seen.append(block.verification.is_smooth)
            return super().__call__(block)

    lm.run(model, prompt, Asks())
    assert seen == [smooth, smooth]
