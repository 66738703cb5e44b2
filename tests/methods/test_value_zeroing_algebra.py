"""Value Zeroing by algebra against its definition by hooks, on every model of the factory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lens_mix as lm
from lens_mix.lens.model_classes import UnsupportedModelError
from tests.matrix import Case, cases
from tests.tiny_models import available, bridge, hooked_transformer, is_encoder_decoder, tokens

# Whose feed-forward or decoder block has no formula here.
BY_HOOKS = ("mixtral", "gpt_oss", "mixture", "decoder")
# Parallel blocks, norms on the attention's branch, no feed-forward: nothing to spare.
WITHOUT_RECORDED = (
    "gemma2",
    "gemma3",
    "gpt_neox",
    "gptj",
    "phi",
    "falcon_mqa",
    "olmo2",
    "cohere",
    "parallel",
    "attn_only",
    "sandwich",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "euclidean": {"metric": "euclidean"},
    "per head": {"per_head": True},
    "chosen heads": {"heads": [1, 2]},
    "heads by layer": {"heads": {0: [2], 1: [0, 1]}},
    "chosen heads, each": {"heads": [2, 0], "per_head": True},
    "spans": {"spans": [(0, 1), (3,), (5, 2, 6)]},
    "spans per head": {"spans": [(0, 3), (4,)], "per_head": True},
    "after the final norm": {"last_layer": "after_final_norm"},
    "threshold": {"threshold": 1e-2},
}
# Small enough that a map of nine positions takes several of each piece.


def a_model(dtype: torch.dtype = torch.float64, name: str = "gpt2", classic: str = "LN") -> Any:
    """A tiny model of the installed TransformerLens."""
    if available(bridge, name):
        return bridge(name, dtype)
    return hooked_transformer(classic, dtype)


def prompt_of(model: Any, length: int = 9, seed: int = 1) -> Any:
    """Tokens, or a pair for an encoder-decoder."""
    first = tokens(model, 1, length, seed)[0]
    return (first, tokens(model, 1, length - 2, seed + 1)[0]) if is_encoder_decoder(model) else first


def both(model: Any, prompt: Any, stack: str | None = None, **options: Any) -> tuple[Any, Any]:
    """The maps of both engines."""
    found = [
        lm.run(model, prompt, lm.ValueZeroing(**options), stack=stack, engine=engine)
        for engine in ("algebra", "hooks")
    ]
    return found[0], found[1]


def exactness(case: Case) -> float:
    """How near both engines must come.

    Hugging Face's GPT-Neo and GPT-J make their patterns in float32 in any model, and a matrix library may
    round those of one copy of a block otherwise than those of several.
    """
    return 1e-6 if case.label in ("bridge gpt_neo", "bridge gptj") else 1e-10


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.label)
def test_algebra_is_hooks_on_every_model(case: Case) -> None:
    if case.refusal:
        pytest.skip("refused altogether")
    model = case.build(torch.float64)
    prompt = prompt_of(model)
    auto = lm.run(model, prompt, "value_zeroing", stack=case.stack)
    if any(name in case.label for name in BY_HOOKS):
        assert auto.provenance["engine"] == "hooks"
        with pytest.raises(UnsupportedModelError, match=r"cross-attention|not proven"):
            lm.run(model, prompt, "value_zeroing", stack=case.stack, engine="algebra")
        return
    assert auto.provenance["engine"] == "algebra"
    for options in OPTIONS.values():
        algebra, hooks = both(model, prompt, case.stack, **options)
        assert algebra.scores.shape == hooks.scores.shape
        size = max(1.0, float(hooks.scores.max()))
        torch.testing.assert_close(algebra.scores, hooks.scores, rtol=0, atol=exactness(case) * size)
    assert float(auto.scores.abs().max()) > 1e-3
