"""Value Zeroing by algebra against its definition by hooks, on every model of the factory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lens_mix as lm
from lens_mix.lens.kinds import UnsupportedModelError
from lens_mix.methods import value_zeroing_algebra
from lens_mix.methods.zeroing import fold, pieces
from tests.matrix import Case, cases
from tests.tiny_models import available, bridge, hooked_transformer, is_encoder_decoder, tokens

# Whose feed-forward or decoder block has no formula here.
BY_HOOKS = ("mixtral", "gpt_oss", "mixture", "decoder")
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
SMALL = dataclasses.replace(pieces.CPU, window=4, slab=6, columns=32, tile=64, chunk=9, keys=3)
WHOLE_WINDOWS = dataclasses.replace(pieces.GPU, window=4, slab=12, chunk=16, keys=5)


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
        torch.testing.assert_close(algebra.scores, hooks.scores, rtol=0, atol=1e-10 * size)
    assert float(auto.scores.abs().max()) > 1e-3


@pytest.mark.parametrize("sizes", [SMALL, WHOLE_WINDOWS], ids=["small", "whole windows"])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama", "bert", "mistral", "gpt_neox", "granite"])
@pytest.mark.parametrize("options", ["plain", "per head", "spans per head"])
def test_the_pieces_make_no_difference(
    name: str, options: str, sizes: pieces.Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not available(bridge, name):
        pytest.skip("no such bridge")
    model = bridge(name, torch.float64)
    whole = lm.run(model, prompt_of(model), lm.ValueZeroing(**OPTIONS[options]), engine="algebra")
    monkeypatch.setattr(value_zeroing_algebra, "CPU", sizes)
    cut = lm.run(model, prompt_of(model), lm.ValueZeroing(**OPTIONS[options]), engine="algebra")
    torch.testing.assert_close(cut.scores, whole.scores, rtol=0, atol=1e-11)


def largest_error(scores: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, where the score is above 1e-7."""
    counted = exact > 1e-7
    assert int(counted.sum()) > 100
    return float(((scores.double() - exact).abs() / exact)[counted].max())


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "olmo2", "bert", "bloom", "opt", "phi"])
def test_float32_keeps_five_digits_of_the_float64_oracle(name: str) -> None:
    if not available(bridge, name):
        pytest.skip("no such bridge")
    exact_model, model = bridge(name, torch.float64), bridge(name, torch.float32)
    exact_model.load_state_dict(model.state_dict())  # the rounding of weights is not the engine's
    prompt = prompt_of(exact_model, 16)
    exact = lm.run(exact_model, prompt, "value_zeroing", engine="hooks").scores
    scores = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    assert largest_error(scores, exact) < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "granite", "bert", "gpt_neox"])
def test_float32_adds_little_to_what_the_clean_pass_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # With 24 numbers per vector little averages out, and a float32 clean pass alone can cost 1e-5.
    if not available(bridge, name):
        pytest.skip("no such bridge")
    model = bridge(name, torch.float32)
    prompt = prompt_of(model, 16)
    scores = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    monkeypatch.setattr(value_zeroing_algebra, "_dtypes", lambda block: (torch.float64, torch.float64))
    exact = lm.run(model, prompt, "value_zeroing", engine="algebra").scores.double()
    assert largest_error(scores, exact) < (1e-4 if name == "granite" else 1.5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_float32(dtype: torch.dtype) -> None:
    model = a_model(dtype)
    prompt = prompt_of(model)
    scores = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    assert scores.dtype == torch.float32
    wide = a_model(torch.float32)
    exact = lm.run(wide, prompt, "value_zeroing", engine="hooks").scores
    torch.testing.assert_close(scores, exact, rtol=0.3, atol=0.02)
    assert torch.isfinite(scores).all()


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_batch_is_each_prompt_alone(side: str) -> None:
    model = a_model()
    prompts = [prompt_of(model, length, seed) for length, seed in ((9, 1), (4, 2), (1, 3), (6, 4))]
    together = lm.run_many(model, prompts, "value_zeroing", engine="algebra", padding_side=side)
    for prompt, found in zip(prompts, together, strict=True):
        alone = lm.run(model, prompt, "value_zeroing", engine="hooks")
        torch.testing.assert_close(found.scores, alone.scores, rtol=0, atol=1e-10)


def test_only_the_triangle_is_computed() -> None:
    pattern = torch.ones(1, 2, 40, 40).tril()
    sources = pieces.find_sources(pattern, torch.ones(1, 40, dtype=torch.bool), None)
    lot = slice(0, len(sources))
    rows = sum(slab.rows for chunk in pieces.chunks(sources, lot, SMALL) for slab in chunk)
    assert rows == 40 * 41 // 2


def test_only_the_band_of_a_sliding_window_is_computed() -> None:
    pattern = torch.ones(1, 2, 40, 40).tril().triu(-4)
    sources = pieces.find_sources(pattern, torch.ones(1, 40, dtype=torch.bool), None)
    lot = slice(0, len(sources))
    slabs = [slab for chunk in pieces.chunks(sources, lot, SMALL) for slab in chunk]
    assert sum(slab.rows for slab in slabs) == int(pattern[0, 0].sum())
    reached = torch.zeros(40, 40)
    for slab in slabs:
        reached[slab.queries, slab.sources] += 1
    assert torch.equal(reached, pattern[0, 0])


class _Looks(TorchDispatchMode):
    """Counts the operations that make a GPU's numbers known to the processor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += any(
            part in name for part in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero")
        )
        return func(*args, **(kwargs or {}))


def test_no_look_at_the_numbers_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model(torch.float32)
    prompt = prompt_of(model, 30)

    def looks() -> int:
        with _Looks() as counter:
            lm.run(model, prompt, "value_zeroing", engine="algebra")
        return counter.count

    looks()
    whole = looks()
    monkeypatch.setattr(value_zeroing_algebra, "CPU", SMALL)
    assert looks() == whole


def test_weights_edited_through_data_are_seen() -> None:
    model = a_model()
    prompt = prompt_of(model)
    before = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    # All matrices but the embeddings of 50 tokens and 32 positions.
    edited = [p for p in model.parameters() if p.ndim >= 2 and not {50, 32} & set(p.shape)]
    for weight in edited:
        weight.data.mul_(1.5)
    after, hooks = both(model, prompt)
    torch.testing.assert_close(after.scores, hooks.scores, rtol=0, atol=1e-10)
    assert edited
    assert not torch.allclose(after.scores, before)


def test_folded_matrices_are_kept_only_up_to_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    prompt = prompt_of(model)
    fold.forget()
    kept = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    assert len(fold._kept) == model.cfg.n_layers
    fold.forget()
    monkeypatch.setattr(fold, "KEPT_BYTES", 0)
    anew = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    assert len(fold._kept) == 0
    torch.testing.assert_close(anew, kept, rtol=0, atol=1e-12)


def test_threshold_counts_small_scores_as_zero() -> None:
    model = a_model()
    prompt = prompt_of(model)
    plain = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    cut = lm.run(model, prompt, lm.ValueZeroing(threshold=1e-2), engine="algebra").scores
    assert torch.equal(cut, torch.where(plain < 1e-2, 0.0, plain))
    assert int((cut == 0).sum()) > int((plain == 0).sum())


def test_the_model_is_as_before() -> None:
    model = a_model(torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lm.run(model, prompt_of(model), "value_zeroing", engine="algebra")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
