from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import lens_mix as lm
from lens_mix.pass_plan import VERIFICATION
from lens_mix.runner import plan
from tests.matrix import build_or_skip
from tests.tiny_models import bridge, gpt2_like, tokens


def test_a_plan_is_what_the_run_records_and_who_visits():
    model = gpt2_like(torch.float64)
    made = plan(model, tokens(model, 1, 9), ["attention", "value_zeroing"], queries=[-1])
    last = model.cfg.n_layers - 1
    assert set(made.layers) == set(range(last + 1))
    assert made.last == last
    for planned in made.layers.values():
        assert planned.visitors == (VERIFICATION, "attention", "value_zeroing")
        assert set(planned.records) >= {"pattern", "value"}
        assert planned.kept == ()
    assert made.engines == {"attention": "recorded", "value_zeroing": "algebra"}
    assert made.recorded_rows is made.rows is not None
    assert made.rules is None
    assert made.after_pass == []
    assert made.predict_at is not None
    assert made.predict_at.tolist() == [[8]]
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.last = 0


def test_methods_of_the_whole_model_run_after_the_pass_and_their_records_are_kept():
    model = gpt2_like(torch.float64)
    made = plan(model, tokens(model, 1, 9), ["attention", "alti_logit", "gim"], queries=[-1])
    assert made.after_pass == ["alti_logit", "gim"]
    assert all("pattern" in planned.kept for planned in made.layers.values())
    assert made.recorded_rows is None
    assert made.rules is not None


def test_definitions_by_hooks_need_no_verification_of_the_prompt():
    model = gpt2_like(torch.float64)
    made = plan(model, tokens(model, 1, 9), "value_zeroing", engine="hooks")
    assert made.after_pass == ["value_zeroing"]
    assert not made.compared
    assert all(planned.visitors == () for planned in made.layers.values())


def test_user_hooks_are_compared_at_every_row():
    model = gpt2_like(torch.float64)
    model.add_hook("blocks.1.attn.hook_z", lambda z, hook: z * 1.0)
    try:
        made = plan(model, tokens(model, 1, 9), "attention")
    finally:
        model.reset_hooks()
    assert made.compared == {"recorded"}
    assert made.has_hooks
    assert all(planned.is_whole and "z" in planned.records for planned in made.layers.values())


def test_a_printed_plan_names_every_step():
    model = gpt2_like(torch.float64)
    text = str(plan(model, tokens(model, 1, 9), ["attention", "value_zeroing", "gim"], queries=[-1]))
    last = model.cfg.n_layers - 1
    assert text.splitlines()[:3] == [
        "clean pass of 1 prompt, 9 tokens; asked: rows [8]",
        "  attention eager",
        f"  layers 0 to {last}",
    ]
    for line in (
        "visited   by the verification, ",
        "visited   by attention (recorded)",
        "visited   by value_zeroing (algebra)",
        "ends      with the logits: predictions at 1 position; autograd graph: by Gim",
        "after     gim (hooks)",
    ):
        assert line in text
    assert str(plan(model, tokens(model, 1, 9), "attention")).startswith(
        "clean pass of 1 prompt, 9 tokens; asked: all rows\n"
    )


def test_a_plan_has_the_errors_of_a_run():
    model = gpt2_like(torch.float64)
    with pytest.raises(ValueError, match="queries"):
        plan(model, tokens(model, 1, 9), "attention", queries=[20])
    with pytest.raises(TypeError, match="n_steps"):
        plan(model, tokens(model, 1, 9), "attention_attribution", n_steps=3)


def test_the_plan_on_the_page_is_the_one_of_a_model_with_as_many_blocks():
    model = build_or_skip(bridge, "llama", num_hidden_layers=30)
    page = (Path(__file__).parents[1] / "docs" / "development" / "run.md").read_text(encoding="utf-8")
    shown = page.split("```\nclean pass")[1].split("```")[0]
    made = plan(model, tokens(model, 1, 10), ["attention", "value_zeroing"], queries=[-1])
    assert f"{made}\n" == f"clean pass{shown}"
    assert len(page.split()) <= 650
    for name in re.findall(r"`?((?:\w+/)*\w+\.py)`?", page):
        assert (Path(lm.__file__).parent / name).exists(), name
