"""Test that what `verify` measured is kept: by the span, in tables, and in files."""

from __future__ import annotations

import math

import pytest
import torch

import lens_mix as lm
from lens_mix.traces import spans
from lens_mix.traces.trace import Trace
from tests.traces.readers import reader


@pytest.fixture
def t(model):
    return lm.trace(
        model, torch.arange(1, 9), answer=torch.tensor([9, 10, 11]), sources="token", method="attention"
    )


def test_a_source_is_measured_once(t, monkeypatch):
    calls = []
    read = spans.read_written
    monkeypatch.setattr(spans, "read_written", lambda *given: calls.append(given) or read(*given))
    part = t[1:3]
    assert [each.loss for each in part.top(4)] == [None] * 4
    first = part.verify(2)
    assert len(calls) == 2
    assert len(part.verify(3)) == 3
    assert len(calls) == 3
    assert [each.loss for each in part.top(2)] == [each.loss for each in first]
    # Other spans were not measured.
    assert [each.loss for each in t[0:3].top(2)] == [None, None]
    assert (1, 3) in [(span.start, span.stop) for span in t.computed_spans]


def test_a_loss_is_that_of_the_positions_in_every_unit(model):
    groups = [[0, 1], [2], [3], [4, 5], [6], [7]]
    given = lm.trace(model, torch.arange(1, 9), answer=torch.tensor([9, 10, 11]), sources=groups)
    losses = {each.source.positions: each.loss for each in given[1:3].verify(6)}
    for each in given.by("token")[1:3].top(99):
        assert each.loss == losses.get(each.source.positions)
    assert len(losses) == 6


def test_tables_and_files_have_the_losses(t, tmp_path):
    measured = t.verify(2)
    table = t.to_dataframe()
    found = dict(zip(table["position"], table["loss"], strict=True))
    for each in measured:
        assert found[each.source.positions[0]] == each.loss
    assert sum(not math.isnan(loss) for loss in found.values()) == 2
    t.save(tmp_path / "t.safetensors")
    loaded = Trace.load(tmp_path / "t.safetensors")
    assert [each.loss for each in loaded[:].top(2)] == [each.loss for each in measured]
    # Without a model only what was measured is there.
    assert loaded.verify(2) == measured
    with pytest.raises(ValueError, match="expected a trace with its model"):
        loaded.verify(3)


def test_a_list_is_aligned_if_some_sources_are_measured(t):
    t.verify(1)
    _, first, second = str(t.top(2)).splitlines()
    assert " nats  " in first
    assert first.index("'w") == second.index("'w")


# ------------------------------------------------------------------ a model that was changed


def scale_weights(model):
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.5)


def add_hook(model):
    model.add_hook("blocks.1.attn.hook_z", lambda z, hook: 0 * z)


@pytest.mark.parametrize("change", [scale_weights, add_hook])
def test_another_model_computes_nothing(change):
    model = reader()
    t = lm.trace(model, "The company was founded in Oslo.", answer=" On eight GPUs. Yes.")
    known = t[:].scores.clone()
    change(model)
    for compute in (
        lambda: t[0].scores,
        lambda: t.by("word").steps,
        lambda: t[:].verify(1),
        t.through,
        t.show,
    ):
        with pytest.raises(ValueError, match=r"model: expected the model of the trace, .* or trace again"):
            compute()
    assert torch.equal(t[:].scores, known)


def test_a_change_without_effect_is_none():
    model = reader()
    t = lm.trace(model, "The company was founded in Oslo.", answer=" On eight GPUs.")
    expected = t[:].verify(1)[0].loss
    model.add_hook("blocks.1.attn.hook_z", lambda z, hook: z + 0)
    other = lm.trace(model, "The company was founded in Oslo.", answer=" On eight GPUs.")
    assert t[1].verify(1)
    model.reset_hooks()
    assert other[:].verify(1)[0].loss == pytest.approx(expected, abs=1e-9)


def test_the_table_has_the_losses_of_every_measured_span():
    t = lm.trace(reader(), "The company was founded in Oslo. It has trains.", answer=" Oslo has trains.")
    t["Oslo"].verify(1)
    table = t.to_dataframe()
    measured = table[table["loss"].notna()]
    assert measured["span"].str.strip().tolist() == ["Oslo"]
    assert set(table["span"]) - set(measured["span"])
