"""Value Zeroing by algebra against its definition by hooks, on every model of the factory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lens_mix as lm
from lens_mix import batches
from lens_mix.algebra import value_zeroing_algebra, weight_cache
from lens_mix.algebra.value_zeroing_old import clean_block, neurons, pieces, rotation
from lens_mix.algebra.value_zeroing_old.clean_block import CleanBlock
from lens_mix.algebra.value_zeroing_old.first_matrix import FirstMatrix
from lens_mix.algebra.value_zeroing_old.norms import NormChange
from lens_mix.algebra.value_zeroing_old.silu import CleanSilu
from lens_mix.algebra.workspace import Workspace
from lens_mix.lens.anatomy import FeedForward, Norm
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
SMALL = dataclasses.replace(pieces.CPU, group=3, slab=6, columns=32, chunk=9, keys=4)
TILED = dataclasses.replace(pieces.CPU, group=4, triangle=2, slab=8, columns=32, chunk=20, keys=8)
WHOLE_WINDOWS = dataclasses.replace(pieces.GPU, group=3, slab=12, chunk=16, keys=5)


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


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.label)
def test_recorded_pre_activations_change_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts spare a product by the model's own pre-activations; long ones must give the same."""
    if case.refusal or any(name in case.label for name in BY_HOOKS):
        pytest.skip("not by algebra")
    model = case.build(torch.float64)
    found: list[bool] = []

    def watched(read: neurons.CleanInput) -> bool:
        found.append(is_of_the_parts(read))
        return found[-1]

    is_of_the_parts = neurons._is_of_the_parts
    monkeypatch.setattr(neurons, "_is_of_the_parts", watched)
    recorded = lm.run(model, prompt_of(model), "value_zeroing", stack=case.stack, engine="algebra")
    assert set(found) <= {True}
    assert bool(found) or any(name in case.label for name in WITHOUT_RECORDED)
    blocks = len(found)
    monkeypatch.setattr(batches, "_WANTED_BYTES", 0)
    computed = lm.run(model, prompt_of(model), "value_zeroing", stack=case.stack, engine="algebra")
    assert len(found) == blocks
    # Hugging Face's RMSNorms round to float32 in any model, so what was recorded is that far off.
    torch.testing.assert_close(recorded.scores, computed.scores, rtol=1e-6, atol=1e-10)


def test_recorded_pre_activations_that_are_not_the_parts_are_left_alone() -> None:
    torch.manual_seed(0)
    feed_forward = FeedForward("gelu", torch.randn(8, 32).double(), torch.randn(32, 8).double())
    first = FirstMatrix(feed_forward, torch.float64)
    norm = NormChange(Norm("layer", None, torch.randn(8).double(), 1e-5), torch.randn(5, 8).double())
    read = norm.norm(norm.centred)
    pre = read @ feed_forward.W_in
    right = neurons.CleanInput(first, [norm], True, read, [pre])
    edited = pre.clone()
    edited[2, 7] += 0.1
    wrong = [dataclasses.replace(right, recorded=[some]) for some in (pre * 1.001, edited)]
    none = dataclasses.replace(right, recorded=[])
    made = [neurons.clean_neurons(given, 20, torch.float64, Workspace()) for given in (right, *wrong, none)]
    assert [part.columns for part in made[0]] == [slice(0, 16), slice(16, 32)]
    for parts in made:
        found = torch.cat([part.pre[0] for part in parts], 1), torch.cat([p.bases[0][0] for p in parts], 1)
        torch.testing.assert_close(found, (pre, norm.base @ feed_forward.W_in), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [SMALL, TILED, WHOLE_WINDOWS], ids=["small", "tiled", "whole windows"])
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
    # With 24 numbers per vector little averages out, and a float32 clean pass alone can cost 1e-5. What the
    # difference of two activations costs depends on the processor's products too.
    if not available(bridge, name):
        pytest.skip("no such bridge")
    model = bridge(name, torch.float32)
    prompt = prompt_of(model, 16)
    scores = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    monkeypatch.setattr(value_zeroing_algebra, "_dtypes", lambda block: (torch.float64, torch.float64))
    exact = lm.run(model, prompt, "value_zeroing", engine="algebra").scores.double()
    assert largest_error(scores, exact) < (1.5e-4 if name == "granite" else 3e-5)


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
    seen = torch.ones(1, 40, 40).tril().bool()
    sources = pieces.find_sources(seen, torch.ones(1, 40, dtype=torch.bool), None)
    lot = slice(0, len(sources))
    rows = sum(slab.rows for chunk in pieces.chunks(sources, lot, SMALL) for slab in chunk)
    assert rows == 40 * 41 // 2


def test_only_the_band_of_a_sliding_window_is_computed() -> None:
    seen = torch.ones(1, 40, 40).tril().triu(-4).bool()
    sources = pieces.find_sources(seen, torch.ones(1, 40, dtype=torch.bool), None)
    lot = slice(0, len(sources))
    slabs = [slab for chunk in pieces.chunks(sources, lot, SMALL) for slab in chunk]
    assert sum(slab.rows for slab in slabs) == int(seen.sum())
    assert torch.equal(reached_by(slabs), seen[0].float())


def piece_slab(piece: pieces.Slab | pieces.Stairs) -> pieces.Slab:
    """Of a piece."""
    return piece if isinstance(piece, pieces.Slab) else piece.slab


def reached_by(found: list[pieces.Slab | pieces.Stairs], length: int = 40) -> torch.Tensor:
    """How often each pair is in a piece."""
    reached = torch.zeros(length, length)
    for piece in found:
        slab = piece_slab(piece)
        pairs = torch.ones(slab.rows)
        if isinstance(piece, pieces.Stairs):
            pairs.zero_()[piece.places()] = 1
        for tile, own in enumerate(pairs.view(slab.tiles, slab.keys, slab.width)):
            query, source = slab.queries.start + tile * slab.step, slab.sources.start + tile * slab.step
            reached[query : query + slab.width, source : source + slab.keys] += own.T
    return reached


@pytest.mark.parametrize("group", [1, 4, 6, 7, 16, 64])
@pytest.mark.parametrize("triangle", [1, 2, 8])
@pytest.mark.parametrize("slab", [6, 50, 512])
@pytest.mark.parametrize("causal", [True, False])
def test_slabs_and_stairs_are_what_exists(group: int, triangle: int, slab: int, causal: bool) -> None:
    """A causal map, and one whose keys reach anything between nothing and everything."""
    seen = torch.ones(40, 40).tril().bool()
    if not causal:
        bounds = torch.randint(0, 41, (40, 2), generator=torch.Generator().manual_seed(0)).sort(dim=-1).values
        query = torch.arange(40)[:, None]
        seen = (query >= bounds[:, 0]) & (query < bounds[:, 1])
    sources = pieces.find_sources(seen[None], torch.ones(1, 40, dtype=torch.bool), None)
    sizes = dataclasses.replace(pieces.CPU, group=group, triangle=triangle, slab=slab)
    found = [piece for chunk in pieces.chunks(sources, slice(0, len(sources)), sizes) for piece in chunk]
    columns = torch.tensor(sources.column)
    assert torch.equal(reached_by(found)[:, : len(columns)], seen[:, columns].float())
    slabs = [piece_slab(piece) for piece in found]
    assert all(piece.rows <= slab and piece.keys <= group for piece in slabs)
    stairs = [piece for piece in found if isinstance(piece, pieces.Stairs)]
    assert all(piece.rows > 0 for piece in found)
    assert bool(stairs) == (group > 1)
    # A whole diagonal is halved where half of a group fits a slab; tiles where two triangles do.
    halved = causal and group % 2 == 0 and triangle < group <= 40 and (group // 2) ** 2 <= slab
    width = group
    while width > triangle and width % 2 == 0:
        width //= 2
    assert any(piece.tiles > 1 for piece in slabs) == (halved and 2 * width**2 <= slab)


def test_the_diagonal_of_another_prompt_and_a_shifted_one_are_whole_too() -> None:
    """Left padding, and keys that reach queries only from the third after them on."""
    real = torch.ones(2, 24, dtype=torch.bool)
    real[1, :5] = False
    seen = torch.ones(2, 24, 24).tril().bool()
    seen[0] = torch.ones(24, 24).tril(-3).bool()
    sources = pieces.find_sources(seen, real, None)
    found = [piece for chunk in pieces.chunks(sources, slice(0, len(sources)), TILED) for piece in chunk]
    for prompt, pairs in ((0, seen[0]), (1, seen[1] & real[1] & real[1][:, None])):
        own = [n for n, of in enumerate(sources.prompt) if of == prompt]
        columns = torch.tensor([sources.column[n] for n in own])
        reached = reached_by([piece for piece in found if piece_slab(piece).prompt == prompt], 64)
        assert torch.equal(reached[:24, own[0] : own[-1] + 1], pairs[:, columns].float())
        assert any(piece_slab(piece).tiles > 1 for piece in found if piece_slab(piece).prompt == prompt)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norms_change_from_factors_is_that_of_the_sums(kind: str, dtype: torch.dtype) -> None:
    """Heads that cancel to 1e-4 of their size, two prompts."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(10, 16, generator=generator).to(dtype)
    vectors = torch.randn(6, 3, 16, generator=generator).to(dtype)
    vectors[:, 1] = -vectors[:, 0] + 1e-4 * torch.randn(6, 16, generator=generator).to(dtype)
    weights = torch.rand(6, 5, 3, generator=generator).to(dtype)
    weights[..., 1] = weights[..., 0]
    weights[..., 2] *= 1e-4
    norm = NormChange(Norm(kind, None, None, 1e-6), clean)
    prompts = torch.tensor([0, 0, 0, 1, 1, 1])
    products = vectors.double() @ norm.centred.view(2, 5, 16)[prompts].double().transpose(1, 2)
    axes = torch.linalg.qr(torch.randn(16, 16, generator=generator).double()).Q
    room = Workspace()
    turned = norm.from_factors(
        weights.mT, vectors.double() @ axes, products.clone(), axes.sum(0), prompts, room
    )
    plain = norm.from_factors(weights.mT, vectors, products, torch.ones(16), prompts, room)
    exact = NormChange(Norm(kind, None, None, 1e-6), clean.double())
    bound = 1e-9 if dtype == torch.float64 else 1e-3
    for inverse, drift in (plain, turned):
        size = drift.abs().max().item()
        for source in range(6):
            rows = slice(5 * (source // 3), 5 * (source // 3) + 5)
            sums = (weights[source].double() @ vectors[source].double())[None]
            expected = exact.change(rows, sums, Workspace())
            torch.testing.assert_close(inverse[source].double(), expected.inverse[0], rtol=1e-6, atol=0)
            torch.testing.assert_close(
                drift[source].double(), expected.drift[0], rtol=bound, atol=bound * size
            )


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1, 1.0, 10.0, 1e2, 1e3])
def test_a_gated_silu_layers_change_keeps_its_digits(scale: float) -> None:
    """Relative to its two terms, number by number; up to changes far past the exponential's range."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(2, 6, 200, generator=generator) * torch.tensor([10.0, 3.0])[:, None, None]
    gate, linear = torch.randn(2, 4, 6, 200, generator=generator) * scale
    (g, u), (dg, du) = clean.double(), (gate.double(), linear.double())
    silu = torch.nn.functional.silu
    exact = silu(g + dg) * (u + du) - silu(g) * u
    terms = ((silu(g + dg) - silu(g)) * (u + du)).abs() + (silu(g) * du).abs()
    found = []
    for dtype in (torch.float32, torch.float64):
        found.append(gate.to(dtype, copy=True))
        of_clean = CleanSilu.of([some.to(dtype) for some in clean], dtype)
        of_clean.change(slice(0, 6), found[-1], linear.to(dtype, copy=True), found[-1], Workspace())
    narrow, wide = found[0].double(), found[1]
    # `exact` is a difference itself.
    torch.testing.assert_close(wide, exact, rtol=1e-9, atol=1e-12)
    assert float((narrow - exact).norm() / exact.norm()) < 2e-7
    if scale <= 1:
        own = 1e-14 * (1 + (silu(g) * u).abs())
        assert bool(((narrow - exact).abs() <= 4e-6 * terms + own).all())


def test_a_change_along_the_clean_vector_keeps_its_digits() -> None:
    """Differences of squares would leave nothing of what lies across."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(4, 64, generator=generator)
    block = object.__new__(CleanBlock)
    size = torch.linalg.vector_norm(clean, dim=-1)
    block.direction = clean / size[:, None]
    change = 0.5 * clean[None] + 1e-5 * torch.randn(3, 4, 64, generator=generator)
    along, across = block.along_and_across([slice(0, 4)], change.flatten(0, 1), [change], Workspace())
    found = block.cosine_distance(along.view(3, 4), across.view(3, 4), size)
    wide, moved = clean.double(), (clean[None].double() + change.double())
    unit, other = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (wide[None], moved))
    expected = (unit - other).square().sum(-1) / 2
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=0)


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

    # As on a GPU, where looking costs.
    monkeypatch.setattr(clean_block, "_numbers_at_hand", lambda x: False)
    looks()
    whole = looks()
    monkeypatch.setattr(value_zeroing_algebra, "CPU", dataclasses.replace(SMALL, ragged=False))
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
    weight_cache.forget()
    first = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    assert weight_cache.number("folded torch.float64") == model.cfg.n_layers
    weight_cache.forget()
    monkeypatch.setattr(kept, "KEPT_BYTES", 0)
    anew = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    assert weight_cache.number("folded torch.float64") == 0
    torch.testing.assert_close(anew, first, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sizes", [pieces.CPU, SMALL, TILED], ids=["cpu", "small", "tiled"])
def test_other_axes_change_nothing(
    turned: None, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sizes: pieces.Sizes
) -> None:
    monkeypatch.setattr(value_zeroing_algebra, "CPU", sizes)
    model = a_model()
    found, exact = both(model, prompt_of(model), **options)
    assert weight_cache.number(rotation.KIND) == model.cfg.n_layers - ("last_layer" in options)
    torch.testing.assert_close(found.scores, exact.scores, rtol=0, atol=1e-10)
    again = lm.run(model, prompt_of(model), lm.ValueZeroing(**options), engine="algebra")
    assert torch.equal(again.scores, found.scores)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.label)
def test_other_axes_on_every_model(turned: None, case: Case) -> None:
    if case.refusal or any(name in case.label for name in BY_HOOKS):
        pytest.skip("not by algebra")
    model = case.build(torch.float64)
    found, exact = both(model, prompt_of(model), case.stack)
    size = max(1.0, float(exact.scores.max()))
    torch.testing.assert_close(found.scores, exact.scores, rtol=0, atol=exactness(case) * size)
    if case.label in ("bridge gpt2", "bridge llama", "HookedTransformer LN"):
        assert weight_cache.number(rotation.KIND) == model.cfg.n_layers
    if case.label in ("bridge bert", "bridge gemma2", "bridge phi"):
        assert not weight_cache.number(rotation.KIND), "a norm follows, or attention is not read"


def test_rotated_matrices_see_edits_and_keep_to_their_bound(
    turned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model()
    prompt = prompt_of(model)
    before = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    assert weight_cache.number(rotation.KIND) == model.cfg.n_layers
    edited = [p for p in model.parameters() if p.ndim >= 2 and not {50, 32} & set(p.shape)]
    for weight in edited:
        weight.data[0] *= 1.5
    after, hooks = both(model, prompt)
    torch.testing.assert_close(after.scores, hooks.scores, rtol=0, atol=1e-10)
    assert not torch.allclose(after.scores, before)
    weight_cache.forget()
    monkeypatch.setattr(kept, "KEPT_BYTES", 0)
    anew = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    assert not weight_cache.number(rotation.KIND)
    torch.testing.assert_close(anew, after.scores, rtol=0, atol=1e-12)


def test_other_axes_that_cannot_be_kept_are_made_where_one_run_earns_them_back(
    turned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], rotation._rotation
    monkeypatch.setattr(rotation, "_rotation", lambda *parts: made.append(1) or make(*parts))
    monkeypatch.setattr(kept, "KEPT_BYTES", 0)
    model = a_model()
    enough = rotation.PAIRS_PER_AXIS * model.cfg.d_model
    pairs, short, long = 30 * 31 // 2, tokens(model, 1, 30), tokens(model, 3, 30)
    assert pairs < enough <= 3 * pairs
    lm.run(model, short[0], "value_zeroing", engine="algebra")
    assert not made
    for _ in range(2):
        made.clear()
        list(lm.run_many(model, list(long), "value_zeroing", engine="algebra"))
        assert len(made) == model.cfg.n_layers


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


@pytest.mark.parametrize("method", ["value_zeroing", ["attention", "value_zeroing"]])
def test_an_edit_between_the_checked_positions_is_left_to_hooks(method: Any) -> None:
    """A post-norm block is rebuilt at every position by Value Zeroing itself, by the runner at four."""
    if not available(bridge, "bert"):
        pytest.skip("no such bridge")
    model = bridge("bert", torch.float64)
    prompt = prompt_of(model, 20)

    def edit(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        edited = tensor.clone()
        edited[:, 17:18] += 1
        return edited

    model.add_hook("blocks.1.mlp.hook_post", edit)
    found = lm.run(model, prompt, method)
    found = found if isinstance(method, str) else found["value_zeroing"]
    assert found.provenance["engine"] == "hooks"
    with pytest.raises(UnsupportedModelError, match="expected its parts to give its output"):
        lm.run(model, prompt, method, engine="algebra")
