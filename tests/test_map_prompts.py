"""Test that blocks are mapped while the clean pass runs, with the same numbers and with little memory."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from typing import ClassVar

import pytest
import torch

import lens_mix as lm
from benchmarks.common import peak_bytes
from lens_mix._passes import effort
from lens_mix.methods import METHODS
from lens_mix.pass_plan import visits_blocks
from tests.matrix import cases, prompt_of, slow
from tests.tiny_models import available, bridge, hooked_transformer, tokens

EARLY = [name for name, method in METHODS.items() if visits_blocks(method(), "algebra")]
LENGTH = 96
HEADS, WIDTH = 16, 32


@dataclasses.dataclass(frozen=True)
class Watching(lm.Method):
    """Map the mean pattern, and store what is known of the blocks below."""

    name: ClassVar[str] = "watching"
    residual: ClassVar[float] = 0.5
    engines: ClassVar[tuple[str, ...]] = ("recorded",)
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})
    citation: ClassVar[str] = "@misc{me, title={Watching}}"
    seen: ClassVar[list[tuple[int, list[str], int]]] = []
    patterns: ClassVar[list[weakref.ref]] = []

    def __call__(self, block):
        alive = sum(reference() is not None for reference in self.patterns)
        self.seen.append((block.layer, sorted(block.clean.recorded), len(block.clean.calls), alive))
        pattern = block.recorded("pattern")
        self.patterns.append(weakref.ref(pattern))
        return pattern.mean(1)


def model_of(layers, heads=4, width=24, length=32):
    """Return a decoder of a class that this release has."""
    if available(bridge, "llama"):
        # The Bridge of GPT-2 itself keeps the last pattern of each layer.
        config = {
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
        }
        return bridge("llama", hidden_size=width, max_position_embeddings=length, **config)
    sizes = {"n_layers": layers, "n_heads": heads, "d_model": width, "n_ctx": length}
    return hooked_transformer("LN", **sizes, d_head=width // heads)


@pytest.fixture(autouse=True)
def forget():
    Watching.seen.clear()
    Watching.patterns.clear()


@contextlib.contextmanager
def finished_passes(monkeypatch):
    """Enter a context in which every block is mapped after the clean pass."""
    with monkeypatch.context() as patched:
        patched.setattr("lens_mix.session.visits_blocks", lambda method, engine: False)
        yield


def test_a_block_is_mapped_before_the_next_one_runs_and_its_records_are_freed():
    model = model_of(4)
    made = lm.run(model, tokens(model, 1, 7), Watching())
    name = "blocks.{}.attn.hook_pattern"
    assert Watching.seen == [(layer, [name.format(layer)], layer + 1, 0) for layer in range(4)]
    assert torch.equal(made.scores, lm.run(model, tokens(model, 1, 7), "attention").scores)


def test_the_records_that_a_later_method_reads_are_kept():
    model = model_of(3)
    prompt = tokens(model, 1, 7)
    alone = lm.run(model, prompt, "alti_logit", queries=[-1])
    both = lm.run(model, prompt, [Watching(), "alti_logit"], queries=[-1])
    assert [calls for _, _, calls, _ in Watching.seen] == [1, 2, 3]
    assert torch.equal(both["alti_logit"].scores, alone.scores)


def test_user_hooks_are_compared_when_a_block_has_run():
    model = model_of(3)
    model.add_hook("blocks.1.attn.hook_z", lambda z, hook: z * 1.0)
    try:
        lm.run(model, tokens(model, 1, 7), Watching())
    finally:
        model.reset_hooks()
    assert [calls for _, _, calls, _ in Watching.seen] == [1, 2, 3]


def test_a_warning_about_a_long_run_comes_after_the_first_block_and_names_the_users_line(monkeypatch):
    monkeypatch.setattr(effort, "_LONG", 0.0)
    model, ran = model_of(2, length=64), []
    hook = model.blocks[0].register_forward_hook(lambda *_: ran.append(1))
    lm.run(model, tokens(model, 1, 8), "value_zeroing")
    ran.clear()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        warnings.showwarning = lambda *given, **_: shown.append((*given, len(ran)))
        lm.run(model, tokens(model, 1, 64), lm.methods.ValueZeroing(per_head=True))
    hook.remove()
    ((message, _, filename, _, *_, blocks_run),) = shown
    assert "value_zeroing takes about" in str(message)
    assert filename == __file__
    assert blocks_run == 1


@pytest.mark.parametrize("case", cases(cross=True, refused=False), ids=lambda case: case.label)
@pytest.mark.filterwarnings("ignore")
def test_maps_of_a_running_pass_are_those_of_a_finished_one(case, monkeypatch):
    model = case.build(torch.float64)
    engines = {name: engine for name, engine, _ in lm.support(model, part=case.part)}
    names = [name for name in EARLY if engines[name] is not None]
    options = {"part": case.part, "residual_shares": case.part != "cross"}
    prompts = [prompt_of(model, 9, 1), prompt_of(model, 6, 2)]
    running = list(lm.run_many(model, prompts, names, **options))
    with finished_passes(monkeypatch):
        finished = list(lm.run_many(model, prompts, names, **options))
    for one, other in zip(running, finished, strict=True):
        for name in names:
            assert torch.equal(one[name].scores, other[name].scores), name
            assert one[name].notes == other[name].notes
            shares = one[name].residual_shares
            assert shares is None or torch.equal(shares, other[name].residual_shares)


@pytest.mark.parametrize(
    "options", [{"queries": [2, -1]}, {"layers": [2, 0]}, {"max_memory": 110_000}], ids=str
)
def test_selections_of_a_running_pass_are_those_of_a_finished_one(options, monkeypatch):
    model = model_of(3)
    prompt, names = tokens(model, 1, 9), ["attention", "attn_res_ln", "alti", "value_zeroing"]
    running = lm.run(model, prompt, names, **options)
    with finished_passes(monkeypatch):
        finished = lm.run(model, prompt, names, **options)
    for name in names:
        assert torch.equal(running[name].scores, finished[name].scores)
        assert running[name].queries == finished[name].queries
        assert running[name].layers == finished[name].layers


@pytest.mark.parametrize("problem", [ValueError("mine"), TypeError("mine"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("layer", [0, 2])
def test_an_error_of_a_method_ends_the_pass_and_leaves_no_hooks(layer, problem, monkeypatch):
    def raise_in_layer(self, block):
        if block.layer == layer:
            raise problem
        return block.recorded("pattern").mean(1)

    model = model_of(3)
    expected = lm.run(model, tokens(model, 1, 7), "attention").scores
    with monkeypatch.context() as patched:
        patched.setattr(Watching, "__call__", raise_in_layer)
        with pytest.raises(type(problem)) as raised:
            lm.run(model, tokens(model, 1, 7), Watching())
    assert raised.value is problem
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.blocks)
    assert torch.equal(lm.run(model, tokens(model, 1, 7), "attention").scores, expected)


@pytest.mark.parametrize(
    "run_block",
    [lambda block: block.replay(torch.tensor([0])), lambda block: block.continuation().logits()],
    ids=["replay", "logits"],
)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_method_that_runs_a_block_during_the_pass_is_told_what_to_declare(run_block, layer, monkeypatch):
    def run_in_layer(self, block):
        if block.layer == layer:
            run_block(block)
        return block.recorded("pattern").mean(1)

    model = model_of(3)
    monkeypatch.setattr(Watching, "__call__", run_in_layer)
    with pytest.raises(
        ValueError, match=rf"block {layer}: expected a method that reads .*engines = \('hooks'"
    ):
        lm.run(model, tokens(model, 1, 7), Watching())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.blocks)
    monkeypatch.setattr(Watching, "reads", "above")
    monkeypatch.setattr(Watching, "of_blocks", lambda self, blocks: [self(block) for block in blocks])
    found = lm.run(model, tokens(model, 1, 7), Watching()).scores
    assert torch.equal(found, lm.run(model, tokens(model, 1, 7), "attention").scores)


@pytest.mark.parametrize("name", ["attention", "attn_res_ln", "alti", slow("value_zeroing")])
def test_a_further_layer_takes_the_memory_of_its_map(name):
    """The pattern of a layer, with a map's bytes for each head, is freed."""
    peaks = []
    for layers in (2, 6):
        model = model_of(layers, HEADS, WIDTH, LENGTH)
        prompt = tokens(model, 1, LENGTH)
        lm.run(model, prompt[:, :8], name)
        peaks.append(peak_bytes(lambda: lm.run(model, prompt, name)))  # noqa: B023
    map_and_stream = 4 * (LENGTH**2 + LENGTH * WIDTH)
    assert (peaks[1] - peaks[0]) / 4 < 1.5 * map_and_stream < 4 * HEADS * LENGTH**2 / 4
