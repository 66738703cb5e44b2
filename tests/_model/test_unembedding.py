"""Test that the unembedding of one position equals this position of all logits, for every model."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix._model.unembedding import row_at, unembedding_at
from tests.matrix import cases, prompt_of

CASES = {case.label: case for case in cases(refused=False)}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("label", CASES)
def test_a_target_of_one_position_is_the_same_as_read_from_all(label):
    case = CASES[label]
    model = case.build(torch.float64)
    asked = {"part": case.part}
    narrow = lm.methods.AttentionAttribution(target=lm.targets.logit(7, position=-1), n_steps=2)
    whole = lm.methods.AttentionAttribution(
        target=lambda logits: logits[:, -1, 7] if logits.ndim == 3 else logits[:, 7], n_steps=2
    )
    try:
        expected = lm.run(model, prompt_of(model), whole, **asked).scores
    except lm.UnsupportedModelError as refusal:
        pytest.skip(str(refusal))
    found = lm.run(model, prompt_of(model), narrow, **asked).scores
    assert expected.abs().max() > 0
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unembed = torch.nn.Linear(3, 5)


def test_it_is_narrow_inside_and_whole_again_after_an_exception():
    model, resid = _Model(), torch.randn(2, 4, 3)
    places = torch.tensor([3, 1])
    whole = model.unembed(resid)
    with unembedding_at(model, places) as narrowed:
        assert not narrowed
        assert torch.allclose(model.unembed(resid), row_at(whole, places))
        assert narrowed
    with pytest.raises(RuntimeError), unembedding_at(model, places):
        raise RuntimeError
    assert model.unembed(resid).equal(whole)


def test_without_positions_or_without_such_a_module_nothing_changes():
    model, resid = _Model(), torch.randn(2, 4, 3)
    with unembedding_at(model, None) as narrowed:
        assert model.unembed(resid).shape == (2, 4, 5)
    with unembedding_at(torch.nn.Linear(3, 5), torch.tensor([0])) as other:
        pass
    assert not narrowed
    assert not other
