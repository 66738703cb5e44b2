"""Test that maps on a CUDA device equal those on the CPU; skipped without such a device."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix.methods import METHODS
from tests.matrix import cases, prompt_of
from tests.test_matrix import default_method

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

CASES = {case.label: case for case in cases(cross=True, refused=False)}
pytestmark = pytest.mark.filterwarnings("ignore")
DEVICE = "cuda"
MORE = {
    "occlusion by mask": lm.methods.Occlusion(by="mask"),
    "occlusion by values": lm.methods.Occlusion(by="values"),
    "integrated gradients": lm.methods.InputGradients(score="integrated", baseline="mean"),
    "value zeroing by hooks": lm.methods.ValueZeroing(per_head=True),
}


def maps_of(model, case):
    """Return each method's scores, or the error that says why there are none."""
    prompt = prompt_of(model)
    methods = {name: default_method(name) for name in METHODS} | MORE
    found = {}
    for name, method in methods.items():
        engine = "hooks" if name == "value zeroing by hooks" else "auto"
        try:
            mixing_map = lm.run(model, prompt, method, part=case.part, engine=engine, progress=None)
            found[name] = mixing_map.scores.cpu()
            if mixing_map.kind == "layer" and mixing_map.scores.shape[-1] == mixing_map.scores.shape[-2]:
                found[f"rollout of {name}"] = lm.rollout(mixing_map).scores.cpu()
        except (lm.UnsupportedModelError, ValueError) as problem:
            found[name] = type(problem).__name__
    if case.part is None:
        shorter = prompt.flatten()[:4]
        try:
            batch = lm.run_many(model, [prompt.flatten(), shorter], "value_zeroing", progress=None)
            found["padded"] = list(batch)[1].scores.cpu()
            found["input_map"] = lm.input_map(model, prompt, progress=None).scores.cpu()
        except lm.UnsupportedModelError as problem:
            found["input_map"] = type(problem).__name__
    return found


@pytest.mark.parametrize("label", CASES)
def test_maps_on_cuda_equal_those_on_the_processor(label):
    case = CASES[label]
    model = case.build(torch.float64)
    on_processor = maps_of(model, case)
    on_device = maps_of(model.to(DEVICE), case)
    assert on_device.keys() == on_processor.keys()
    wrong = []
    for name, expected in on_processor.items():
        found = on_device[name]
        if isinstance(expected, str) or isinstance(found, str):
            if not isinstance(found, str) or found != expected:
                wrong.append(f"{name}: {found} for {expected}")
        # transformers computes rotary angles and some norms in float32, whatever the model's dtype is, and
        # the two devices round them differently.
        elif not torch.allclose(found, expected, atol=1e-5, rtol=1e-5, equal_nan=True):
            wrong.append(f"{name}: off by {(found - expected).abs().max():.1e}")
    assert not wrong, "\n".join(wrong)
