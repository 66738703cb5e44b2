"""Test maps with positions that the user gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lens_mix as lm
from tests.matrix import slow
from tests.tiny_models import available, bridge, tokens

RESTARTING = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6])
LATER = torch.arange(12) + 3


def plain_pattern(model: Any, prompt: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the first block's pattern in a pass without this library, as the mean over heads."""
    found = []
    model.original_model.set_attn_implementation("eager")
    with torch.no_grad(), model.hooks([("blocks.0.attn.hook_pattern", lambda t, hook: found.append(t))]):
        model(prompt[None], position_ids=positions[None])
    return found[0][0].mean(0)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("positions", [RESTARTING, LATER], ids=["restarting", "later"])
@pytest.mark.parametrize("name", ["llama", "gpt2", *map(slow, ("qwen3", "gemma3", "mistral", "gpt_neox"))])
def test_maps_are_of_the_models_own_pass(name: str, positions: torch.Tensor, cache: bool) -> None:
    """Use positions that restart, which models of transformers without a cache take for packed prompts."""
    if not available(bridge, name):
        pytest.skip("no such bridge")
    model = bridge(name, torch.float64)
    prompt = tokens(model, 1, 12, 1)[0]
    model.original_model.config.use_cache = cache
    expected = plain_pattern(model, prompt, positions)
    found = lm.run(model, prompt, "attention", position_ids=positions)
    torch.testing.assert_close(found.scores[0], expected)
    if positions is RESTARTING and not cache:
        assert float(expected[8, 0]) == 0
    shorter = lm.run(model, prompt[:6], "attention", position_ids=positions[:6])
    together = lm.run_many(model, [prompt, prompt[:6]], "attention", position_ids=[positions, positions[:6]])
    for one, other in zip((found, shorter), together, strict=True):
        torch.testing.assert_close(one.scores, other.scores)


def test_another_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if not available(bridge, "llama"):
        pytest.skip("no such bridge")
    model = bridge("llama", torch.float64)
    prompt = tokens(model, 1, 12, 1)[0]
    original = model.original_model.forward

    def by_mask(*arguments: Any, **options: Any) -> Any:
        if options.get("attention_mask") is not None:
            options["position_ids"] = torch.arange(12)[None]
        return original(*arguments, **options)

    monkeypatch.setattr(model.original_model, "forward", by_mask)
    expected = r"own pass with \['position_ids'\], got a relative error"
    with pytest.raises(lm.UnsupportedModelError, match=expected):
        lm.run(model, prompt, "attention", position_ids=RESTARTING)
