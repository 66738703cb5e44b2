"""Value Zeroing by algebra is compared with its definition by hooks, on every model of the factory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lens_mix as lm
from lens_mix._algebra import value_zeroing, value_zeroing_pairs, weight_cache
from lens_mix._algebra.clean_block import CleanBlock, _NormChange
from lens_mix._algebra.feed_forward_change import neurons_of
from lens_mix._algebra.value_zeroing_pairs import _CPU, _GPU, Sizes, chunks, find_zeroed_groups, in_best_order
from lens_mix._blocks.states import BlockStates
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._model.anatomy import BlockAnatomy, FeedForward, Norm
from tests import kept_products
from tests.matrix import Case, build_or_skip, cases, slow
from tests.norm_cases import NO_FORMULA
from tests.tiny_models import available, bridge, gpt2_like, is_encoder_decoder, tokens

CASES = cases(cross=True, refused=False)
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
# These sizes are so small that maps of nine positions need several of each.
SMALL = Sizes(rectangle=6, chunk=9, neurons=32, keys=4, positions=18)


def prompt_of(model: Any, length: int = 9, seed: int = 1) -> Any:
    """Return tokens, or a pair of them for an encoder-decoder."""
    first = tokens(model, 1, length, seed)[0]
    return (first, tokens(model, 1, length - 2, seed + 1)[0]) if is_encoder_decoder(model) else first


def both(model: Any, prompt: Any, stack: str | None = None, **options: Any) -> tuple[Any, Any]:
    """Return the maps of both engines."""
    found = [
        lm.run(model, prompt, lm.methods.ValueZeroing(**options), part=stack, engine=engine)
        for engine in ("algebra", "hooks")
    ]
    return found[0], found[1]


def is_by_algebra(case: Case) -> bool:
    """Return whether the blocks have a formula."""
    return not case.is_a(*NO_FORMULA["value_zeroing"])


def exactness(case: Case) -> float:
    """Return the accepted difference of the engines.

    Hugging Face's GPT-Neo and GPT-J compute their patterns in float32 in any model. A matrix library may
    round those of one copy of a block in another way than those of several.
    """
    return 1e-6 if case.label in ("bridge gpt_neo", "bridge gptj") else 1e-10


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_algebra_is_hooks_on_every_model(case: Case) -> None:
    model = case.build(torch.float64)
    prompt = prompt_of(model)
    auto = lm.run(model, prompt, "value_zeroing", part=case.part)
    if not is_by_algebra(case):
        assert auto.provenance["engine"] == "hooks"
        with pytest.raises(UnsupportedModelError, match=r"cross-attention|not verified"):
            lm.run(model, prompt, "value_zeroing", part=case.part, engine="algebra")
        return
    assert auto.provenance["engine"] == "algebra"
    for options in OPTIONS.values():
        algebra, hooks = both(model, prompt, case.part, **options)
        assert algebra.scores.shape == hooks.scores.shape
        size = max(1.0, float(hooks.scores.max()))
        torch.testing.assert_close(algebra.scores, hooks.scores, rtol=0, atol=exactness(case) * size)
    assert float(auto.scores.abs().max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", [*filter(is_by_algebra, CASES)], ids=lambda case: case.label)
def test_rows_are_the_cut_of_the_whole_map(case: Case) -> None:
    """Compare the code for one row, which multiplies one vector per key, and for few, with that for all."""
    model = case.build(torch.float64)
    prompt = prompt_of(model)
    for options in OPTIONS.values():
        method = lm.methods.ValueZeroing(**options)
        whole = lm.run(model, prompt, method, part=case.part, engine="algebra").scores
        size = max(1.0, float(whole.max()))
        for queries in ([-1], [5, 2]):
            rows = lm.run(model, prompt, method, part=case.part, engine="algebra", queries=queries).scores
            expected = whole[..., queries, :]
            torch.testing.assert_close(rows, expected, rtol=0, atol=1e-10 * size)


@pytest.mark.parametrize("case", [*filter(is_by_algebra, CASES)], ids=lambda case: case.label)
def test_maps_without_products_of_matrices(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model = case.build(torch.float64)
    for name in ("plain", "chosen heads, each", "spans"):
        found: list[torch.Tensor] = []
        for pays in (True, False):
            monkeypatch.setattr(value_zeroing, "pays", lambda *sizes, pays=pays, **given: pays)
            method = lm.methods.ValueZeroing(**OPTIONS[name])
            found.append(lm.run(model, prompt_of(model), method, part=case.part, engine="algebra").scores)
        torch.testing.assert_close(*found, rtol=0, atol=1e-10 * max(1.0, float(found[0].max())))


@pytest.mark.parametrize("queries", [None, [-1]])
def test_maps_without_products_if_the_norm_on_the_branch_needs_float64(
    queries: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_or_skip(bridge, "gemma2", torch.float32)
    found: list[torch.Tensor] = []
    for pays in (True, False):
        monkeypatch.setattr(value_zeroing, "pays", lambda *sizes, pays=pays, **given: pays)
        found.append(lm.run(model, prompt_of(model), "value_zeroing", queries=queries).scores)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("queries", [None, [-1], [0, 2]])
def test_rows_of_a_padded_batch(queries: list[int] | None) -> None:
    model = gpt2_like(torch.float64)
    prompts = [prompt_of(model, length, seed) for length, seed in ((9, 1), (4, 2), (3, 3), (6, 4))]
    together = lm.run_many(model, prompts, "value_zeroing", engine="algebra", queries=queries)
    for prompt, found in zip(prompts, together, strict=True):
        alone = lm.run(model, prompt, "value_zeroing", engine="hooks", queries=queries)
        torch.testing.assert_close(found.scores, alone.scores, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sizes", [SMALL, _GPU], ids=["small", "whole"])
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", *map(slow, ("bert", "gemma2", "mistral", "gpt_neox", "granite"))]
)
@pytest.mark.parametrize("options", ["plain", slow("per head"), "spans per head"])
def test_what_is_done_at_once_makes_no_difference(
    name: str, options: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not available(bridge, name):
        pytest.skip("no such bridge")
    model = bridge(name, torch.float64)
    prompts = [prompt_of(model, length, seed) for length, seed in ((9, 1), (7, 2), (9, 3))]
    found = []
    for of_device, start in ((value_zeroing_pairs._CPU, 2**22), (sizes, 2**12)):
        monkeypatch.setattr(value_zeroing_pairs, "_CPU", of_device)
        monkeypatch.setattr(value_zeroing_pairs, "_CPU_START", start)
        maps = lm.run_many(model, prompts, lm.methods.ValueZeroing(**OPTIONS[options]), engine="algebra")
        found.append([each.scores for each in maps])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama"])
def test_weights_that_may_not_be_kept(name: str) -> None:
    """Check that products are not stored under a memory bound, nor computed for short prompts."""
    if not available(bridge, name):
        pytest.skip("no such bridge")
    model = bridge(name, torch.float64)
    for length in (4, 9, 30):
        prompt = prompt_of(model, length)
        kept_products.forget()
        bounded = lm.run(model, prompt, "value_zeroing", engine="algebra", max_memory=10**8).scores
        assert kept_products.number("folded torch.float64") == 0
        hooks = lm.run(model, prompt, "value_zeroing", engine="hooks").scores
        torch.testing.assert_close(bounded, hooks, rtol=0, atol=1e-10)


def largest_error(scores: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest relative error of scores above 1e-7."""
    counted = exact > 1e-7
    assert int(counted.sum()) > 100
    return float(((scores.double() - exact).abs() / exact)[counted].max())


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "olmo2", "bert", "bloom", "opt", "phi"])
def test_float32_keeps_five_digits_of_the_float64_oracle(name: str) -> None:
    if not available(bridge, name):
        pytest.skip("no such bridge")
    exact_model, model = bridge(name, torch.float64), bridge(name, torch.float32)
    # Both models have the same weights, because the engine does not round them.
    exact_model.load_state_dict(model.state_dict())
    prompt = prompt_of(exact_model, 16)
    exact = lm.run(exact_model, prompt, "value_zeroing", engine="hooks").scores
    scores = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    assert largest_error(scores, exact) < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "granite", "bert", "gpt_neox"])
def test_float32_adds_little_to_what_the_clean_pass_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # With 24 numbers per vector, errors hardly average out, and a float32 clean pass alone can cause 1e-5.
    # The error of a difference of two activations also depends on the CPU's products.
    if not available(bridge, name):
        pytest.skip("no such bridge")
    model = bridge(name, torch.float32)
    prompt = prompt_of(model, 16)
    scores = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    monkeypatch.setattr(value_zeroing, "_dtypes", lambda block: (torch.float64, torch.float64))
    exact = lm.run(model, prompt, "value_zeroing", engine="algebra").scores.double()
    assert largest_error(scores, exact) < (1.5e-4 if name == "granite" else 3e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_float32(dtype: torch.dtype) -> None:
    model = gpt2_like(dtype)
    prompt = prompt_of(model)
    scores = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    assert scores.dtype == torch.float32
    wide = gpt2_like(torch.float32)
    exact = lm.run(wide, prompt, "value_zeroing", engine="hooks").scores
    torch.testing.assert_close(scores, exact, rtol=0.3, atol=0.02)
    assert torch.isfinite(scores).all()


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_batch_is_each_prompt_alone(side: str) -> None:
    model = gpt2_like(torch.float64)
    prompts = [prompt_of(model, length, seed) for length, seed in ((9, 1), (4, 2), (1, 3), (6, 4))]
    together = lm.run_many(model, prompts, "value_zeroing", engine="algebra", padding_side=side)
    for prompt, found in zip(prompts, together, strict=True):
        alone = lm.run(model, prompt, "value_zeroing", engine="hooks")
        torch.testing.assert_close(found.scores, alone.scores, rtol=0, atol=1e-10)


@pytest.mark.parametrize("lengths", [[40], [40, 40, 40], [40, 9, 37, 38]])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("spare", [0, 4])
def test_only_pairs_with_weight_are_computed(spare: int, window: int | None, lengths: list[int]) -> None:
    """Check that each pair of causal maps, or of a sliding window, is computed once, and few others."""
    real = torch.arange(40) < torch.tensor(lengths)[:, None]
    seen = torch.ones(40, 40).tril().bool() & real[:, None] & real[:, :, None]
    seen = seen if window is None else seen.triu(1 - window)
    sizes, times, rectangles = _CPU._replace(spare=spare), torch.zeros(seen.shape), 0
    zeroed = in_best_order(find_zeroed_groups(seen, real, None), sizes)
    for chunk in chunks(zeroed, sizes):
        assert sum(rectangle.pairs for rectangle in chunk) <= _CPU.chunk
        for rectangle in chunk:
            keys, prompts, _ = rectangle.shape
            in_order = [
                (prompt, rectangle.key + key)
                for key in range(keys)
                for prompt in range(rectangle.prompts.start, rectangle.prompts.start + prompts)
            ]
            assert [(each.prompt, each.key) for each in zeroed[rectangle.zeroed]] == in_order
            times[(*rectangle.place, slice(rectangle.key, rectangle.key + keys))] += 1
            rectangles += 1
    assert bool((times[seen] == 1).all())
    assert int(times.max()) == 1
    assert int(times.sum()) <= int(seen.sum()) + spare * (len(zeroed) - rectangles)


@pytest.mark.parametrize(
    ("lengths", "most"),
    [([20] * 16, 20), ([19, 20, 20, 20], 20), ([40, 20], 20), ([37, 38, 39, 40] * 4, 160)],
)
def test_prompts_or_keys_share_rectangles(lengths: list[int], most: int) -> None:
    """Check that similar prompts take one rectangle per key, and others no more than prompt by prompt."""
    sizes, real = _CPU._replace(spare=4), torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    seen = torch.ones(max(lengths), max(lengths)).tril().bool() & real[:, None] & real[:, :, None]
    by_prompt = find_zeroed_groups(seen, real, None)
    in_order = in_best_order(by_prompt, sizes)
    counts = [sum(len(chunk) for chunk in chunks(groups, sizes)) for groups in (by_prompt, in_order)]
    assert counts[1] <= min(most, counts[0])
    assert sorted(in_order) == by_prompt


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_norms_change_keeps_its_digits(kind: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(2, 5, 64, generator=generator)
    change = 1e-6 * torch.randn(3, 2, 5, 64, generator=generator)
    norm = Norm(kind, torch.randn(64, generator=generator), torch.randn(64, generator=generator), 1e-6)
    of_clean = _NormChange(norm, clean)
    everything = (slice(None), slice(None))
    found = of_clean.output(everything, of_clean.sizes(everything, change))
    wide = Norm(kind, norm.weight.double(), norm.bias.double(), 1e-6)
    exact = wide(clean.double() + change.double()) - wide(clean.double())
    assert float((found - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1, 1.0, 10.0, 1e2, 1e3])
def test_a_gated_silu_layers_change_keeps_its_digits(scale: float) -> None:
    """Compare each number, relative to its two terms, up to changes far beyond the exponential's range."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(2, 6, 200, generator=generator) * torch.tensor([10.0, 3.0])[:, None, None]
    changes = torch.randn(2, 4, 6, 200, generator=generator) * scale
    (g, u), (dg, du) = clean.double(), changes.double()
    silu = torch.nn.functional.silu
    exact = silu(g + dg) * (u + du) - silu(g) * u
    terms = ((silu(g + dg) - silu(g)) * (u + du)).abs() + (silu(g) * du).abs()
    found = []
    for dtype in (torch.float32, torch.float64):
        layer = FeedForward("silu", torch.eye(400)[:, 200:], torch.eye(200, 400), torch.eye(400)[:, :200])
        read = torch.cat(list(clean), dim=1)[None].to(dtype)
        (neurons,) = neurons_of(layer, [read], None, dtype, [200])
        # Each row has one key's value, to which only this row attends.
        vectors, weights = list(changes.to(dtype)), torch.eye(6, dtype=dtype).expand(4, 6, 6)
        found.append(torch.empty(4, 1, 6, 200, dtype=dtype))
        neurons.change((slice(None), slice(None)), [], weights, vectors, found[-1])
    narrow, wide = found[0][:, 0].double(), found[1][:, 0]
    # `exact` is a difference, so it has a rounding error too.
    torch.testing.assert_close(wide, exact, rtol=1e-9, atol=1e-12)
    assert float((narrow - exact).norm() / exact.norm()) < 2e-7
    if scale <= 1:
        least = 1e-14 * (1 + (silu(g) * u).abs())
        assert bool(((narrow - exact).abs() <= 4e-6 * terms + least).all())


def test_a_change_along_the_clean_vector_keeps_its_digits() -> None:
    """Check the component across the clean vector, which a difference of squares would lose."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(1, 4, 64, generator=generator)
    anatomy = BlockAnatomy("none", False, None, None, "none")
    states = BlockStates(anatomy, clean, torch.zeros_like(clean))
    block = CleanBlock(states, clean, None, [])
    change = 0.5 * clean[None] + 1e-5 * torch.randn(3, 1, 4, 64, generator=generator)
    found = block.distance((slice(None), slice(None)), change, torch.zeros_like(change), "cosine")
    moved = clean[None].double() + change.double()
    unit, other = (
        x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (clean.double()[None], moved)
    )
    torch.testing.assert_close(found.double(), (unit - other).square().sum(-1) / 2, rtol=1e-2, atol=0)


@pytest.mark.parametrize("silent", [["W_O"], ["W_V", "b_V"]])
def test_what_sends_nothing_has_no_effect(silent: list[str]) -> None:
    """Check that the score of a head without weights in W_O, or with zero values, is exactly 0.

    By hooks it is only as near to 0 as a CPU's products of one prompt and of several copies agree.
    """
    model = gpt2_like(torch.float32)
    prompt, method = prompt_of(model), lm.methods.ValueZeroing(heads=[1])
    assert float(lm.run(model, prompt, method, engine="algebra").scores.abs().max()) > 1e-5
    for block in model.blocks:
        for name in silent:
            getattr(block.attn, name).data[1] = 0
            assert not bool(getattr(block.attn, name)[1].any())
    for engine, rounding in (("algebra", 0.0), ("hooks", 1e-12)):
        assert float(lm.run(model, prompt, method, engine=engine).scores.abs().max()) <= rounding


class _Looks(TorchDispatchMode):
    """Count the operations that copy numbers from a GPU to the CPU."""

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
    model = gpt2_like(torch.float32)
    prompt = prompt_of(model, 30)

    def looks() -> int:
        with _Looks() as counter:
            lm.run(model, prompt, "value_zeroing", engine="algebra")
        return counter.count

    looks()
    whole = looks()
    monkeypatch.setattr(value_zeroing_pairs, "_CPU", SMALL)
    assert looks() == whole


def test_weights_edited_through_data_are_seen() -> None:
    model = gpt2_like(torch.float64)
    prompt = prompt_of(model)
    before = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    # These are all matrices except the embeddings of 50 tokens and 32 positions.
    edited = [p for p in model.parameters() if p.ndim >= 2 and not {50, 32} & set(p.shape)]
    for weight in edited:
        weight.data.mul_(1.5)
    after, hooks = both(model, prompt)
    torch.testing.assert_close(after.scores, hooks.scores, rtol=0, atol=1e-10)
    assert edited
    assert not torch.allclose(after.scores, before)


def test_folded_matrices_are_kept_only_up_to_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2_like(torch.float64)
    prompt = prompt_of(model)
    kept_products.forget()
    first = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    assert kept_products.number("folded torch.float64") == model.cfg.n_layers
    kept_products.forget()
    monkeypatch.setattr(weight_cache, "_KEPT_BYTES", 0)
    anew = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    assert kept_products.number("folded torch.float64") == 0
    torch.testing.assert_close(anew, first, rtol=0, atol=1e-12)


def test_threshold_counts_small_scores_as_zero() -> None:
    model = gpt2_like(torch.float64)
    prompt = prompt_of(model)
    plain = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    cut = lm.run(model, prompt, lm.methods.ValueZeroing(threshold=1e-2), engine="algebra").scores
    assert torch.equal(cut, torch.where(plain < 1e-2, 0.0, plain))
    assert int((cut == 0).sum()) > int((plain == 0).sum())


def test_the_model_is_as_before() -> None:
    model = gpt2_like(torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lm.run(model, prompt_of(model), "value_zeroing", engine="algebra")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
