"""Test rows that have a prompt and tokens of its copies, and their check."""

import pytest
import torch

import lens_mix as lm
from lens_mix.lens.layout import Layout
from lens_mix.methods import side_by_side
from tests.matrix import build_or_skip
from tests.tiny_models import bridge

REPLACEMENTS = [5, 11]


def test_layout_by_hand():
    rerun = torch.tensor([[False, True, True], [True, False, True]])
    layout = Layout.of(rerun)
    assert layout.positions.tolist() == [[0, 1, 2, 1, 2, 0, 2]]
    assert layout.index.tolist() == [[0, 3, 4], [5, 1, 6]]
    seen = [row.nonzero()[:, 0].tolist() for row in layout.allowed[0]]
    assert seen[:3] == [[0], [0, 1], [0, 1, 2]]
    # The first copy is run again from position 1 on. The last token of the second sees the clean token 1.
    assert seen[3:] == [[0, 3], [0, 3, 4], [5], [1, 5, 6]]
    filled = layout.fill(torch.tensor([7, 8, 9]), torch.tensor([[7, 1, 9], [2, 8, 9]]))
    assert filled.tolist() == [[7, 8, 9, 1, 9, 2, 9]]


def test_a_control_that_sees_more_than_it_may_is_found(monkeypatch):
    layout_of = Layout.of

    def leaking(rerun):
        layout = layout_of(rerun)
        layout.allowed[0, int(layout.index[-1, -1])] = True  # The control sees a copy.
        return layout

    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 12)
    monkeypatch.setattr(Layout, "of", leaking)
    with pytest.raises(lm.UnsupportedModelError, match="attention to read only tokens and their positions"):
        lm.run(model, prompt, lm.AttributionPatching(replacements=REPLACEMENTS), queries=[-1])


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_window_is_found_by_the_longest_row(name):
    """The row's mask replaces the model's window."""
    model, method = build_or_skip(bridge, name, torch.float64), lm.AttributionPatching(n_exact=3)
    with pytest.raises(lm.UnsupportedModelError, match="a sliding window shorter than the prompt"):
        lm.run(model, torch.arange(3, 15), method, queries=[-1])


def test_several_passes_equal_one(monkeypatch):
    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 12)
    method = lm.AttributionPatching(replacements=REPLACEMENTS)
    expected = lm.run(model, prompt, method).scores
    monkeypatch.setitem(side_by_side._MOST_TOKENS, "cpu", 3)
    torch.testing.assert_close(lm.run(model, prompt, method).scores, expected, atol=1e-10, rtol=0)
