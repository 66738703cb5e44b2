"""Test that the tables of models by kind of block are right, so that no test leaves out a model that runs.

The tables are those of `tests/matrix.py` and `tests/norm_cases.py`. Each model is built and verified here.
"""

from __future__ import annotations

import functools

import pytest
import torch

import lens_mix as lm
from lens_mix._algebra.logit_shares import token_directions
from lens_mix._classes.model_classes import transformer_lens_version
from lens_mix.experiments.passes import run_prompt
from lens_mix.methods import METHODS
from tests.matrix import KINDS, OF_EACH_KIND, Case, cases, every_case, prompt_of, wide_cases
from tests.norm_cases import NO_FORMULA, blocks_of, cases_for, verified_cases
from tests.tiny_models import WIDE_NAMES

pytestmark = pytest.mark.filterwarnings("ignore")
HERE = [*cases(), *(wide_cases() if transformer_lens_version()[0] > 3 else [])]
NOT_VERIFIED = [case for case in HERE if case not in verified_cases()]
ABSENT = [
    *(case for case in every_case() if not case.exists),
    *(case for case in (Case(f"bridge {name}") for name in WIDE_NAMES) if not case.exists),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ABSENT, ids=lambda case: case.label)
def test_a_model_that_is_left_out_cannot_be_built(case):
    with pytest.raises(pytest.skip.Exception):
        case.build()


@pytest.mark.parametrize("case", NOT_VERIFIED, ids=lambda case: case.label)
def test_a_model_that_is_left_out_has_no_verified_blocks(case):
    model = case.build(torch.float64)
    with pytest.raises(lm.UnsupportedModelError):
        run_prompt(model, prompt_of(model), lm.methods.AttnRes(), part=case.part)


@pytest.mark.parametrize("case", verified_cases(), ids=lambda case: case.label)
def test_the_kinds_of_a_model_are_those_of_its_blocks(case):
    blocks = blocks_of(case)
    anatomies = [block.anatomy for block in blocks]
    found = {
        "hybrid": len(blocks) < len(blocks[0].stack),
        "cross": anatomies[0].cross,
        "whole feed-forward": any(one.feed_forward_kind in ("mixture", "opaque") for one in anatomies),
        "no feed-forward": anatomies[0].feed_forward_kind == "none",
        "post-norm": anatomies[0].attention_residual is not None,
        "changed branch": any(
            one.residual_multiplier != 1 or (one.attention_branch, one.feed_forward_branch) != (None, None)
            for one in anatomies
        ),
        "parallel": all(one.parallel for one in anatomies),
        "no logits": case.part == "encoder",
    }
    if not found["no logits"]:
        found["changed logits"] = not has_token_directions(blocks) and not found["post-norm"]
    assert {kind: case.is_a(kind) for kind in found} == found


def has_token_directions(blocks):
    """Return whether the logits of one token can be read as a direction in the residual stream."""
    try:
        token_directions(blocks[-1], 5, 7)
    except lm.UnsupportedModelError:
        return False
    return True


@pytest.mark.parametrize("case", verified_cases(), ids=lambda case: case.label)
def test_a_method_is_tested_on_every_model_that_it_has_a_formula_for(case):
    blocks = blocks_of(case)
    for name, kinds in NO_FORMULA.items():
        assert can_be_tested(METHODS[name](), blocks) != case.is_a(*kinds), name


def can_be_tested(method, blocks):
    """Return whether the method has a formula for each block, and whether it can follow the stack."""
    if method.reads == "below" and [block.layer for block in blocks] != list(range(len(blocks[0].stack))):
        return False
    return all(is_supported(method, block.anatomy) for block in blocks)


def is_supported(method, anatomy):
    if method.unsupported_block(anatomy) is not None:
        return False
    if "feed_forward" in method.needs and anatomy.feed_forward is None:
        return anatomy.feed_forward_kind == "none"
    return True


@functools.cache
def traits(case):
    """Return what one model's blocks have: how they are wired, and each norm, bias, grouping, activation."""
    found = set()
    for block in blocks_of(case):
        anatomy, path = block.anatomy, block.anatomy.value_path
        norms = {
            place: getattr(anatomy, place)
            for place in (
                *("attention_input", "attention_branch", "attention_residual"),
                *("feed_forward_input", "feed_forward_branch", "feed_forward_residual"),
            )
        }
        wiring = (
            *(norm is not None for norm in norms.values()),
            *(anatomy.parallel, anatomy.cross, anatomy.feed_forward_kind, anatomy.residual_multiplier == 1),
            case.is_a("hybrid"),
        )
        found.add(("wiring", wiring))
        found |= {
            (place, norm.kind, norm.weight is None, norm.bias is None)
            for place, norm in norms.items()
            if norm is not None
        }
        found.add(("biases of attention", path.b_V is None, path.b_O is None))
        found.add(("grouped", len(path.W_O) > len(path.W_V), len(path.W_V) == 1))
        if anatomy.feed_forward is not None:
            feed_forward = anatomy.feed_forward
            found.add(("biases of the feed-forward", feed_forward.b_in is None, feed_forward.b_out is None))
            found.add(("activation", feed_forward.activation, feed_forward.W_gate is None))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attn_res", *NO_FORMULA])
def test_the_models_of_each_kind_leave_out_no_kind_of_block(name):
    """Compare the chosen models with all models, among those on which the method has a formula."""
    every = cases_for(name)
    chosen = [case for case in every if case.label in OF_EACH_KIND]
    assert set().union(*map(traits, chosen)) == set().union(*map(traits, every))


def test_every_label_of_the_tables_is_a_model():
    labels = {case.label for case in every_case()} | {case.label for case in wide_cases()}
    tables = [*KINDS.values(), OF_EACH_KIND]
    if transformer_lens_version()[0] > 3:
        # TransformerLens 4.3 runs CodeGen with transformers before 5.24 only.
        assert set().union(*tables) - {"bridge codegen"} <= labels
