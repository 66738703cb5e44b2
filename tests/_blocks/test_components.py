"""The table of components: each entry finds a fault, in the verification and on a run's own prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lens_mix as lm
from lens_mix._blocks import components, verification_record
from lens_mix._blocks.recorded import RecordedBlock
from lens_mix.session import Session
from tests.matrix import build_or_skip
from tests.source_tree import ROOT
from tests.tiny_models import bridge, hooked_transformer

pytestmark = pytest.mark.filterwarnings("ignore")

LAYER = 1
LENGTH = 30
# The verification's prompt ends before this position.
LATE = 20


def bent(x: Tensor, start: int) -> Tensor:
    """Return a tensor over positions, changed from one position on by different factors."""
    return torch.cat([x[:, :start], x[:, start:] + 0.3 * x[:, start:].abs()], dim=1)


def bend_a_hook(model: Any, name: str, start: int) -> None:
    model.add_hook(f"blocks.{LAYER}.{name}", lambda x, hook: bent(x, start))


def bend_mixing(model: Any, start: int) -> None:
    bend_a_hook(model, "attn.hook_z", start)


def bend_values(model: Any, start: int) -> None:
    bend_a_hook(model, "attn.hook_v", start)


def bend_output(model: Any, hook: str, module: str, start: int) -> None:
    """Change the output of a module at its hook point, or else at the module, before it is read."""
    if hasattr(model, "original_model"):
        bend_a_hook(model, hook, start)
    else:
        place = model.blocks[LAYER].get_submodule(module)
        place.register_forward_hook(lambda module, given, out: bent(out, start))


def bend_projection(model: Any, start: int) -> None:
    bend_output(model, "attn.o.hook_out", "attn", start)


def bend_feed_forward(model: Any, start: int) -> None:
    bend_output(model, "mlp.out.hook_out", "mlp", start)


def bend_residual(model: Any, start: int) -> None:
    def bend_block(module: Any, given: Any, out: Any) -> Any:
        return (bent(out[0], start), *out[1:]) if isinstance(out, tuple) else bent(out, start)

    model.blocks[LAYER].register_forward_hook(bend_block)


def freeze_z(model: Any, start: int) -> None:
    """Make interventions on values have no effect on prompts that are longer than `start`."""
    kept: dict[torch.Size, Tensor] = {}

    def freeze(z: Tensor, hook: Any) -> Tensor:
        return kept.setdefault(z.shape, z.detach().clone()) if z.shape[1] > start else z

    model.add_hook(f"blocks.{LAYER}.attn.hook_z", freeze)


# By component: a function that changes it, the components that differ then, and a method that a run checks it
# for.
FAULTS: dict[str, tuple[Callable[[Any, int], None], set[str], str]] = {
    "mixing": (bend_mixing, {"mixing", "block", "zero_value"}, "attention"),
    "value": (bend_values, {"value"}, "decompx"),
    "projection": (bend_projection, {"projection", "block"}, "attn_res"),
    "feed_forward": (bend_feed_forward, {"feed_forward"}, "atb_ff"),
    "residual": (bend_residual, {"residual", "block"}, "attn_res"),
    "block": (bend_residual, {"residual", "block"}, "value_norm"),
    "zero_value": (freeze_z, {"zero_value"}, ""),
}
MODELS = pytest.mark.parametrize(("factory", "name"), [(bridge, "llama"), (hooked_transformer, "LN")])
EACH = pytest.mark.parametrize("component", FAULTS)
# No method needs ZERO_VALUE on a run's own prompt, because replays run with the user hooks of the model.
ON_A_PROMPT = pytest.mark.parametrize("component", [name for name, fault in FAULTS.items() if fault[2]])


def a_model(factory: Any, name: str) -> tuple[Any, Tensor]:
    model = build_or_skip(factory, name, torch.float64)
    return model, torch.arange(LENGTH)[None] % model.cfg.d_vocab


def failing_rows(model: Any, prompt: Tensor) -> set[str]:
    """Return the components that the verification does not verify; all are in the layer with the fault."""
    failing = [entry for entry in lm.check(model, prompt).verification.components if not entry.ok]
    assert {entry.layer for entry in failing} <= {LAYER}
    return {entry.component for entry in failing}


def is_found_on_the_prompt(model: Any, prompt: Tensor, component: str) -> bool:
    """Return whether a run reports a component that the verification of its model did not."""
    assert failing_rows(model, prompt) == set()
    claim = next(row.claim for row in components.COMPONENTS if row.name == component)
    try:
        lm.run(model, prompt, FAULTS[component][2])
    except lm.UnsupportedModelError as problem:
        assert f"block {LAYER}: expected {claim}" in str(problem)
        return True
    return False


def measured_on_the_prompt(model: Any, prompt: Tensor, row: Any) -> components.ComponentError:
    """Return the error of a component at some positions of a run's own clean pass."""
    session = Session(model, {"attention": lm.methods.AttentionWeights()})
    with session.checked_pass([session.read(prompt)]) as checked:
        block = RecordedBlock(checked.clean, LAYER, checked.verification.anatomy[LAYER])
        return components.measure(row, block, torch.tensor([[3, LENGTH - 1]]))


def drop(monkeypatch: pytest.MonkeyPatch, component: str) -> None:
    kept = tuple(row for row in components.COMPONENTS if row.name != component)
    assert len(kept) == len(components.COMPONENTS) - 1
    monkeypatch.setattr("lens_mix._verification.verify.COMPONENTS", kept)
    monkeypatch.setattr("lens_mix._verification.prompt_check.COMPONENTS", kept)


@MODELS
@EACH
def test_a_fault_is_found_by_the_verification(factory: Any, name: str, component: str) -> None:
    model, prompt = a_model(factory, name)
    assert failing_rows(model, prompt) == set()
    put, rows, _ = FAULTS[component]
    put(model, 3)
    assert failing_rows(model, prompt) == rows


@MODELS
@ON_A_PROMPT
def test_a_fault_is_found_by_the_check_of_a_prompt(factory: Any, name: str, component: str) -> None:
    model, prompt = a_model(factory, name)
    FAULTS[component][0](model, LATE)
    assert is_found_on_the_prompt(model, prompt, component)
    lm.run(model, prompt[:, :LATE], FAULTS[component][2])


@MODELS
@EACH
def test_a_fault_is_found_by_its_row_alone(
    factory: Any, name: str, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the fault is not found without the component's entry."""
    model, prompt = a_model(factory, name)
    put, rows, _ = FAULTS[component]
    drop(monkeypatch, component)
    put(model, 3)
    assert failing_rows(model, prompt) == rows - {component}


@MODELS
@ON_A_PROMPT
def test_a_fault_on_a_prompt_is_found_by_one_row_alone(
    factory: Any, name: str, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the entry of the component, or of the whole block, is the only one that finds the fault."""
    model, prompt = a_model(factory, name)
    row = next(row for row in components.COMPONENTS if row.name == component)
    drop(monkeypatch, component if row.checked_for else "block")
    FAULTS[component][0](model, LATE)
    assert not is_found_on_the_prompt(model, prompt, component)


@MODELS
def test_an_edit_without_effect_is_found_at_the_positions_of_a_prompt(factory: Any, name: str) -> None:
    model, prompt = a_model(factory, name)
    # With a user hook on the model, z is recorded after it.
    bend_a_hook(model, "attn.hook_z", LENGTH)
    assert measured_on_the_prompt(model, prompt, components.ZERO_VALUE).ok
    freeze_z(model, LATE)
    entry = measured_on_the_prompt(model, prompt, components.ZERO_VALUE)
    assert (entry.ok, entry.note) == (False, "the intervention did not change the block's output")


def bend_logits(model: Any, start: int) -> None:
    model.unembed.register_forward_hook(lambda module, given, out: bent(out, start))


@MODELS
def test_a_fault_in_the_unembedding_is_found_by_its_row_alone(
    factory: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = a_model(factory, name)
    bend_logits(model, LATE)
    assert lm.check(model, prompt).verification.unembedding_failure is None
    with pytest.raises(lm.UnsupportedModelError, match="unembedding: expected logits = final norm"):
        lm.run(model, prompt, "alti_logit")
    bend_logits(model, 3)
    assert "unembedding: expected logits" in str(lm.check(model, prompt).verification.unembedding_failure)
    blind = dataclasses.replace(components.LOGITS, rebuild=components.LOGITS.compare_with)
    monkeypatch.setattr("lens_mix._blocks.ends.LOGITS", blind)
    assert lm.check(model, prompt).verification.unembedding_failure is None
    lm.run(model, prompt, "alti_logit")


@MODELS
def test_a_fault_in_the_final_norm_is_found_by_its_row_alone(
    factory: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = a_model(factory, name)
    method = lm.methods.AtbFfResLn(next_norm=True)
    expected = lm.run(model, prompt, method)
    model.ln_final.register_forward_hook(lambda module, given, out: bent(out, 3))
    with pytest.raises(
        lm.UnsupportedModelError, match="final norm: expected its components to give its output"
    ):
        lm.run(model, prompt, method)
    blind = dataclasses.replace(components.FINAL_NORM, rebuild=components.FINAL_NORM.compare_with)
    monkeypatch.setattr("lens_mix._blocks.block.FINAL_NORM", blind)
    torch.testing.assert_close(lm.run(model, prompt, method).scores, expected.scores)


@MODELS
def test_a_fault_in_what_the_final_norm_reads_is_found_by_its_row_alone(
    factory: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = a_model(factory, name)
    last = model.cfg.n_layers - 1
    model.ln_final.register_forward_pre_hook(lambda module, given: (bent(given[0], 3), *given[1:]))
    (reason,) = lm.check(model, prompt).verification.next_norm_failures.values()
    assert "final norm: expected the norm that TransformerLens maps to read the last block's output" in reason
    with pytest.raises(lm.UnsupportedModelError, match="final norm: expected the norm"):
        lm.run(model, prompt, lm.methods.AtbFfResLn(next_norm=True), layers=[last])
    blind = dataclasses.replace(components.NEXT_NORM, rebuild=components.NEXT_NORM.compare_with)
    monkeypatch.setattr("lens_mix._verification.next_norms.NEXT_NORM", blind)
    assert not lm.check(model, prompt).verification.next_norm_failures


def test_the_table_is_in_its_docstring_and_its_names_are_in_the_docs() -> None:
    page = (ROOT / "docs" / "evidence" / "verification.md").read_text()
    for row in (*components.COMPONENTS, *components.END_COMPONENTS):
        assert f"{row.name:<13} {row.formula}, against {row.recorded}\n" in str(components.__doc__)
    for row in components.COMPONENTS:
        assert f"| `{row.name}` |" in page


def test_methods_need_names_of_the_table() -> None:
    names = {row.name for row in (*components.COMPONENTS, *components.END_COMPONENTS)}
    for method in lm.METHODS.values():
        assert method.needs <= names | {"gradients", "causal", "position_ids"}
    assert verification_record.ALGEBRA_COMPONENTS == ("projection", "feed_forward", "residual", "block")
    assert components.names_needed_for("hooks") == ("mixing", "zero_value")
