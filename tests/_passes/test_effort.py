"""Test that a run that takes long says so beforehand, in seconds."""

from __future__ import annotations

import functools
import re
import time
import warnings

import pytest
import torch

import lens_mix as lm
from lens_mix._blocks.cost import COSTS
from lens_mix._passes import effort
from tests.shared_models import decoder

PROMPT = torch.tensor([1, *range(4, 27)])
EXPENSIVE = [
    # The first three have one vectorized backward pass, which no count of passes describes.
    lm.methods.Gim(),
    lm.methods.FrozenGradients(),
    lm.methods.InputGradients(),
    lm.methods.InputGradients(score="integrated", n_steps=4),
    lm.methods.TokenPatching(),
    lm.methods.Occlusion(),
    lm.methods.Occlusion(by="values"),
    lm.methods.ContextLength(),
    lm.methods.AttentionAttribution(n_steps=20),
]


@pytest.fixture
def low_limit(monkeypatch):
    monkeypatch.setattr(effort, "_LONG", 0.0)


def say(model, method, **options):
    """Return what a run says beforehand."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            lm.run(model, PROMPT, method, **options)
        except lm.UnsupportedModelError as problem:
            pytest.skip(str(problem))
    (one,) = [each for each in warned if "takes about" in str(each.message)]
    assert one.filename == __file__, "the warning names the user's line"
    return str(one.message)


def read_seconds(sentence):
    return float(re.search(r"takes about ([\d.e-]+) s", sentence)[1])


def slow_down(model, monkeypatch, seconds):
    """Let each block of the model take longer."""
    block = type(next(module for name, module in model.named_modules() if name.endswith("blocks.0")))
    forward = block.forward

    @functools.wraps(forward)
    def slow(self, *args, **kwargs):
        time.sleep(seconds)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(block, "forward", slow)


@pytest.mark.parametrize("method", EXPENSIVE, ids=repr)
def test_many_passes_are_announced_before_they_are_made(model, method, low_limit, monkeypatch):
    class Reached(Exception):
        pass

    def stop(*_):
        raise Reached

    monkeypatch.setattr(type(method), "of_blocks", stop)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            lm.run(model, PROMPT, method)
        except lm.UnsupportedModelError as problem:
            pytest.skip(str(problem))
        except Reached:
            pass
    assert any("as long as" in str(each.message) for each in warned)


@pytest.mark.parametrize("method", EXPENSIVE[3:], ids=repr)
def test_the_announced_number_is_about_right(method, low_limit, monkeypatch):
    """Count the positions that pass through the blocks, forwards and backwards."""
    model = decoder()
    block = type(next(module for name, module in model.named_modules() if name.endswith("blocks.0")))
    forward, counted = block.forward, []

    @functools.wraps(forward)
    def counting(self, *args, **kwargs):
        stream = args[0] if args else next(v for v in kwargs.values() if torch.is_tensor(v))
        size = stream.shape[0] * stream.shape[1]
        counted.append(size)
        output = forward(self, *args, **kwargs)
        stream = output[0] if isinstance(output, tuple) else output
        if stream.requires_grad:
            stream.register_hook(lambda _: counted.append(size))
        return output

    monkeypatch.setattr(block, "forward", counting)
    stated = float(re.search(r"as long as ([\d,]+)", say(model, method))[1].replace(",", ""))
    passes = sum(counted) / len(PROMPT) / model.cfg.n_layers
    # Most of these passes have no logits, or share the blocks below, so each takes less than a forward pass.
    assert passes / 4 < stated < passes * 2, (stated, passes)


def test_the_time_of_a_forward_pass_is_measured(low_limit, monkeypatch):
    model = decoder()
    lm.run(model, PROMPT, "attention", progress=None)
    slow_down(model, monkeypatch, 0.2)
    sentence = say(model, "gim", queries=[-1])
    each = float(re.search(r"forward passes of ([\d.]+) s", sentence)[1])
    # The blocks themselves take about a millisecond, and a busy machine some more.
    assert 0.4 <= each < 0.6
    assert read_seconds(sentence) == pytest.approx(
        each * (lm.METHODS["gim"].default_cost().passes(24, 1, 2) - 1)
    )


class Slow(lm.Method):
    """Let each block take longer than the one below it."""

    name, residual, engines = "slow", 0.5, ("recorded",)
    needs, records = frozenset(), frozenset({"pattern"})
    mapped = 0

    def __call__(self, block):
        time.sleep(0.1 * (block.layer + 1))
        Slow.mapped += 1
        return block.rows_of(block.clean.tensor("pattern", block.layer).mean(1))


def test_the_time_of_a_map_is_measured_on_the_first_block(low_limit, monkeypatch):
    model = decoder()
    lm.run(model, PROMPT, "attention", progress=None)
    sentence = say(model, Slow())
    assert 0.2 <= read_seconds(sentence) < 0.4
    assert "(2 layers, measured on the first one); queries=[-1] makes the last row alone" in sentence
    monkeypatch.setattr(Slow, "mapped", 0)
    warnings.filterwarnings("error", message=".*takes about")
    with pytest.raises(UserWarning, match="takes about"):
        lm.run(model, PROMPT, Slow())
    assert Slow.mapped == 1, "it is said before the second block is mapped"


def test_what_takes_less_time(model, low_limit):
    hooks = say(model, "value_zeroing", engine="hooks", queries=[-1, 3])
    assert "layers=[-1] maps the last layer alone" in hooks
    gradients = say(model, "gim")
    row = "0] makes the first" if "[0]" in gradients else "-1] makes the last"
    assert f"queries=[{row} row alone" in gradients
    assert re.search(
        r"gim with queries=\[(-1|0)\] takes about [\d.e-]+ s", say(model, "occlusion", queries=[-1])
    )


def test_nothing_is_said_of_a_short_run(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.run(model, PROMPT, ["attention", "value_zeroing", "gim", "occlusion"])


def test_nothing_is_said_of_one_layer_that_is_done(model, low_limit):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.run(model, PROMPT, "attention", layers=[-1])


def test_a_method_without_a_record_says_nothing(low_limit, monkeypatch):
    monkeypatch.delitem(COSTS, "gim")
    assert lm.methods.Gim.default_cost() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.run(decoder(), PROMPT, "gim")


def test_a_bar_or_none_instead_of_the_warning(model, low_limit, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.run(model, PROMPT, lm.methods.InputGradients(internal_batch_size=6), progress=True)
        bars = capsys.readouterr().err
        lm.run(model, PROMPT, lm.methods.InputGradients(internal_batch_size=6), progress=None)
    # There are 24 rows, six at a time.
    assert "/4 " in bars


def test_a_bar_moves(model, capsys):
    whole = lm.run(model, PROMPT, "input_gradients", progress=None)
    capsys.readouterr()
    found = lm.run(model, PROMPT, "input_gradients", progress=True)
    # There are eight rows at a time, although all would fit.
    assert "/3 " in capsys.readouterr().err
    torch.testing.assert_close(found.scores, whole.scores)


def test_a_stream_warns_once(model, low_limit):
    prompts = [PROMPT, PROMPT[:23], PROMPT[:22]]
    with pytest.warns(UserWarning, match="takes about") as warned:
        list(lm.run_many(model, prompts, "gim", batch_size=1))
    assert [str(each.message).partition(" take")[0] for each in warned] == ["gim", "the other 1 prompt"]


def test_the_scales_are_silent(model, low_limit):
    task = lm.evaluation.Importance([PROMPT, PROMPT[:20]])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*takes about.*")
        lm.evaluate(model, task, ["attention", "gim"])


@pytest.mark.parametrize("value", [0, "yes", 1.0])
def test_progress_takes_true_false_or_none(model, value):
    with pytest.raises(TypeError, match="progress"):
        lm.run(model, PROMPT, "attention", progress=value)


def test_many_prompts_that_take_long_are_announced_after_the_second_batch(model, low_limit):
    prompts = [PROMPT] * 5
    with pytest.warns(UserWarning, match="the other 3 prompts take about") as warned:
        list(lm.run_many(model, prompts, "attention", batch_size=1))
    assert [str(each.message).partition(" take")[0] for each in warned if "other" in str(each.message)] == [
        "the other 3 prompts"
    ]
    assert {each.filename for each in warned} == {__file__}
    for quiet in ({"progress": None}, {"batch_size": 5}):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="the other")
            list(lm.run_many(model, prompts, "attention", **{"batch_size": 1, **quiet}))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the other")
        list(lm.run_many(model, iter(prompts), "attention", batch_size=1))
