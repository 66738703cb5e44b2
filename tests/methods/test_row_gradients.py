"""Test the gradients of many rows against a pass of its own for each row, which `max_memory` makes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import lens_mix as lm
from lens_mix import session
from lens_mix._model.model import Lens
from lens_mix.methods import row_gradients
from tests.matrix import build_or_skip, case_of, cases, prompt_of
from tests.tiny_models import bridge

pytestmark = pytest.mark.filterwarnings("ignore")
METHODS = (
    lm.methods.InputGradients(),
    lm.methods.InputGradients(score="times_input", target=lm.targets.predicted(of="log_probability")),
    lm.methods.Gim(after_blocks=1),
    lm.methods.FrozenGradients(readout="absolute"),
    lm.methods.GradientAttention(per_head=True, rectify=False),
)
MUCH = 1 << 40
FLOAT32 = ("bridge mpt",)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Let two rows of a short prompt share a graph, as 16 do otherwise."""
    monkeypatch.setattr(row_gradients, "_ROWS", 2)


@pytest.fixture
def without_hooks(monkeypatch):
    """Let hooks of tests that make norms exact in float64 count as a part of the model."""
    for module in (row_gradients, session):
        monkeypatch.setattr(module, "has_user_hooks", lambda modules: False)


@pytest.fixture
def lengths(monkeypatch):
    """Return the list of the number of tokens of each pass that has gradients."""
    found, forward = [], Lens.forward

    def counted(lens, batch, **options):
        if torch.is_grad_enabled():
            found.append(batch.tokens.shape[1])
        return forward(lens, batch, **options)

    monkeypatch.setattr(Lens, "forward", counted)
    return found


def require_alike(model, prompt, methods, atol=1e-10, **options):
    """Compare maps of one run with those of passes that have a copy of the prompt for each row."""
    found = lm.run(model, prompt, list(methods), **options)
    expected = lm.run(model, prompt, list(methods), max_memory=MUCH, **options)
    for name, mixing_map in found.items():
        scores = expected[name].scores
        torch.testing.assert_close(mixing_map.scores, scores, atol=atol * float(scores.abs().max()), rtol=0)


@pytest.mark.usefixtures("softmax_in_the_dtype_of_the_model")
@pytest.mark.parametrize("case", cases(refused=False), ids=lambda case: case.label)
def test_rows_are_those_of_a_pass_each(case, without_hooks):
    model = case.build(torch.float64)
    prompt = prompt_of(model)
    methods = [method for method in METHODS if lm.support(model, part=case.part)[method.name][:2] == "ok"]
    if not methods:
        pytest.skip("an encoder below a decoder has no logits")
    # MPT itself casts to float32 before the softmax, whose last digits depend on the number of tokens.
    require_alike(model, prompt, methods, atol=1e-6 if case.label in FLOAT32 else 1e-10, part=case.part)


@pytest.mark.parametrize("label", ["bridge gpt2", "bridge llama"])
def test_rows_of_a_causal_model_need_the_tokens_before_them(label, lengths, without_hooks):
    model = case_of(label).build(torch.float64)
    prompt = prompt_of(model)
    lm.run(model, prompt, "input_gradients", queries=[-1])
    lengths.clear()
    lm.run(model, prompt, "input_gradients")
    # After the clean pass, two rows at a time unembed, the last ones from its own graph.
    assert lengths == [7, 2, 7, 4, 7, 7, 7]
    lengths.clear()
    # A single row, or a target that reads other positions, has the graph of the whole prompt. A single row
    # also has the logits of the clean pass.
    lm.run(model, prompt, "input_gradients", queries=[2])
    lm.run(model, prompt, lm.methods.InputGradients(target=lm.targets.span(1, 3)), queries=[-1])
    assert lengths == [7, 7, 7]


def test_methods_with_the_same_rules_share_the_clean_pass(lengths):
    model = build_or_skip(bridge, "gpt2", torch.float64)
    prompt = prompt_of(model)
    plain = [
        lm.methods.InputGradients(),
        lm.methods.InputGradients(score="times_input"),
        lm.methods.GradientAttention(),
    ]
    gim = [lm.methods.Gim(), lm.methods.Gim(target=lm.targets.token(5), after_blocks=1, readout="absolute")]
    # A method with other rules has a pass of its own, and computes the logits from it.
    for methods, passes in ((plain, 1), (gim, 1), ([gim[0], *plain], 1 + 2), ([*gim, plain[0]], 1 + 2)):
        lm.run(model, prompt, methods, queries=[-1])
        lengths.clear()
        maps = lm.run(model, prompt, methods, queries=[-1])
        assert lengths == [7] * passes
        for found, method in zip(maps.values(), methods, strict=True):
            assert not found.scores.requires_grad
            alone = lm.run(model, prompt, method, queries=[-1], max_memory=MUCH)
            torch.testing.assert_close(found.scores, alone.scores, atol=1e-10, rtol=0)


def test_a_model_that_reads_the_length_has_whole_prompts_alone(monkeypatch, lengths):
    model = build_or_skip(bridge, "gpt2", torch.float64)
    prompt = prompt_of(model)
    expected = lm.run(model, prompt, "gim").scores
    monkeypatch.setattr(Lens, "angles_differ", lambda lens, shorter, longer: shorter != longer)
    lengths.clear()
    torch.testing.assert_close(lm.run(model, prompt, "gim").scores, expected, atol=1e-10, rtol=0)
    # The first prefix is tried.
    assert lengths.count(2) == 1
    assert set(lengths) == {2, 7}


def test_operations_without_a_vectorized_gradient_run_row_by_row(monkeypatch):
    model = build_or_skip(bridge, "gpt2", torch.float64)
    prompt, differentiate, refused = prompt_of(model), torch.autograd.grad, []

    def grad(*args, is_grads_batched=False, **options):
        if is_grads_batched:
            refused.append(True)
            raise RuntimeError("no batching rule")
        return differentiate(*args, **options)

    expected = lm.run(model, prompt, list(METHODS))
    assert not refused
    monkeypatch.setattr(torch.autograd, "grad", grad)
    for name, found in lm.run(model, prompt, list(METHODS)).items():
        torch.testing.assert_close(found.scores, expected[name].scores, atol=1e-10, rtol=0)
    assert refused


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_user_hooks_at_a_position(name, lengths):
    model = build_or_skip(bridge, name, torch.float64)
    prompt = prompt_of(model)

    def halve(tensor, hook):
        tensor[:, -2] *= 0.5
        return tensor

    before = lm.run(model, prompt, "gim").scores
    with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", halve)]):
        lengths.clear()
        require_alike(model, prompt, METHODS)
        assert set(lengths) == {7}
        assert not torch.allclose(lm.run(model, prompt, "gim").scores, before, atol=1e-6)


def test_hooks_that_change_tensors_in_place_reach_gradient_attention():
    model = build_or_skip(bridge, "gpt2", torch.float64)

    def clear(tensor, hook):
        tensor[:, 0] = 0

    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", clear)]):
        found = lm.run(model, prompt_of(model), "gradient_attention").scores
    assert bool(found.isfinite().all())


def test_an_interrupt_frees_the_graphs(monkeypatch):
    model = build_or_skip(bridge, "gpt2", torch.float64)
    released, release = [], row_gradients.AutogradGraph.release

    def gradients(graph, *args, **options):
        raise KeyboardInterrupt

    def counted(graph):
        released.append(graph)
        release(graph)

    monkeypatch.setattr(row_gradients.AutogradGraph, "gradients", gradients)
    monkeypatch.setattr(row_gradients.AutogradGraph, "release", counted)
    with pytest.raises(KeyboardInterrupt):
        lm.run(model, prompt_of(model), "input_gradients")
    # They are those of the first prefix and of the clean pass.
    assert len(released) == 2
    assert all(not graph._changed.streams for graph in released)
    assert all(not point.fwd_hooks for point in model.hook_dict.values())


@pytest.mark.parametrize("method", METHODS)
def test_a_target_that_does_not_read_the_output_has_no_gradient(method):
    model, learned = build_or_skip(bridge, "gpt2"), torch.nn.Parameter(torch.ones(1))
    for function in (lambda logits: logits[:, -1, 4].detach(), lambda logits: learned.expand(len(logits))):
        explained = dataclasses.replace(method, target=function)
        with pytest.raises(ValueError, match="target: expected a differentiable function"):
            lm.run(model, prompt_of(model), explained, queries=[-1])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("after_final_norm", [False, True])
def test_a_target_on_the_last_residual_needs_no_gradient_through_the_final_norm(name, after_final_norm):
    model = build_or_skip(lambda: bridge(name, torch.float64))
    target = lm.targets.head(lambda resid: resid[:, -1, 0], after_final_norm=after_final_norm)
    methods = [lm.methods.Gim(target), lm.methods.FrozenGradients(target)]
    require_alike(model, prompt_of(model), methods, queries=[-1])
    found = lm.run(model, prompt_of(model), [*methods, "gim"][1:], queries=[-1])
    assert all(each.scores.any() for each in found.values())
