"""Test that a run that needs many forward passes warns beforehand."""

from __future__ import annotations

import functools
import re
import warnings

import pytest
import torch

import lens_mix as lm
from lens_mix._blocks import cost
from lens_mix._blocks.cost import Cost
from tests.shared_models import decoder

# With 24 tokens, the gradients of all rows take the time of about ten forward passes.
PROMPT = torch.tensor([1, *range(4, 27)])
EXPENSIVE = [
    # The first three have one vectorised backward pass, which no count of passes describes.
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
# These need one pass, a closed form, or one backward pass.
CHEAP = ["attention", "value_norm", "value_zeroing", "attn_res_ln", "alti", "decompx", "gradient_attention"]


@pytest.fixture(autouse=True)
def low_limit(monkeypatch):
    monkeypatch.setattr(cost, "_MANY", 9)


def run_or_skip(model, method, **options):
    try:
        return lm.run(model, PROMPT, method, **options)
    except lm.UnsupportedModelError as problem:
        pytest.skip(str(problem))


def sentences(mixing_map):
    return [note for note in mixing_map.notes if "forward passes" in note]


@pytest.mark.parametrize("method", EXPENSIVE, ids=repr)
def test_many_passes_are_announced_before_they_are_made(model, method, monkeypatch):
    found = run_or_skip(model, method, progress=None)

    class Reached(Exception):
        pass

    def stop(*_):
        raise Reached

    monkeypatch.setattr(type(method), "of_blocks", stop)
    with pytest.warns(UserWarning, match="forward passes") as warned, pytest.raises(Reached):
        lm.run(model, PROMPT, method)
    assert warned[0].filename == __file__, "the warning names the user's line"
    assert sentences(found)[0] in str(warned[0].message)


@pytest.mark.parametrize("method", EXPENSIVE[3:], ids=repr)
def test_the_announced_number_is_about_right(method, monkeypatch):
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
    (sentence,) = sentences(run_or_skip(model, method, progress=None))
    stated = float(re.search(r"about ([\d,]+)", sentence)[1].replace(",", ""))
    passes = sum(counted) / len(PROMPT) / model.cfg.n_layers
    # Most of these passes have no logits, or share the blocks below, so each takes less than a forward pass.
    assert passes / 4 < stated < passes * 2, (stated, passes)


def test_one_row_and_cheap_methods_say_nothing(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = lm.run(model, PROMPT, CHEAP)
        found["gim"] = lm.run(model, PROMPT, "gim", queries=[-1])
    assert not any(sentences(each) for each in found.values())


@pytest.mark.parametrize(
    ("method", "last_row"),
    [
        (lm.methods.DecompX(), True),
        (lm.methods.DecompXLocal(), False),
        (lm.methods.AtbFfResLn(), False),
        (lm.methods.ValueZeroing(), False),
        (lm.methods.ValueZeroing(per_head=True), False),
    ],
    ids=repr,
)
def test_closed_forms_over_pairs_of_tokens_say_so_too(method, last_row, monkeypatch):
    """Let a row take a whole forward pass, because so few rows take few."""
    price = Cost(1, per_token=1) if last_row else Cost(1, per_row=1)
    monkeypatch.setitem(cost.COSTS, method.name, price)
    model = decoder()
    with pytest.warns(UserWarning, match="forward passes"):
        found = lm.run(model, PROMPT, method)
    assert "for each" in sentences(found)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("error" if not last_row else "ignore", message=".*forward passes.*")
        one = lm.run(model, PROMPT, method, queries=[-1])
    # DecompX computes all rows below the last layer.
    assert len(sentences(one)) == last_row
    half = lm.run(model, PROMPT, method, queries=range(12), progress=None)
    numbers = [int(re.search(r"about (\d+)", sentences(m)[0])[1]) for m in (found, half)]
    assert numbers[0] == (numbers[1] if last_row else 2 * numbers[1])


def test_a_bar_or_none_instead_of_the_warning(model, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = lm.run(model, PROMPT, lm.methods.InputGradients(internal_batch_size=6), progress=True)
        bars = capsys.readouterr().err
        silent = lm.run(model, PROMPT, lm.methods.InputGradients(internal_batch_size=6), progress=None)
    # There are 24 rows, six at a time.
    assert "/4 " in bars
    assert "queries=[-1]" in sentences(shown)[0]
    assert sentences(shown) == sentences(silent)


def test_a_bar_moves(model, capsys):
    whole = lm.run(model, PROMPT, "input_gradients", progress=None)
    capsys.readouterr()
    found = lm.run(model, PROMPT, "input_gradients", progress=True)
    # There are eight rows at a time, although all would fit.
    assert "/3 " in capsys.readouterr().err
    torch.testing.assert_close(found.scores, whole.scores)


def test_a_stream_warns_once(model):
    prompts = [PROMPT, PROMPT[:23], PROMPT[:22]]
    with pytest.warns(UserWarning, match="forward passes") as warned:
        maps = list(lm.run_many(model, prompts, "gim", batch_size=1))
    assert len(warned) == 1
    assert all(map(sentences, maps))


def test_the_scales_are_silent(model):
    task = lm.evaluation.Importance([PROMPT, PROMPT[:20]])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*forward passes.*")
        lm.evaluate(model, task, ["attention", "gim"])


@pytest.mark.parametrize("value", [0, "yes", 1.0])
def test_progress_takes_true_false_or_none(model, value):
    with pytest.raises(TypeError, match="progress"):
        lm.run(model, PROMPT, "attention", progress=value)
