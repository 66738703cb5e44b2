"""Test the outputs within blocks that a pass records."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lens_mix as lm
from lens_mix._blocks.recorded import RecordedBlock
from lens_mix._inputs.batches import Prompt, pad
from lens_mix._model.model import Lens
from lens_mix._passes.block_outputs import BlockOutputs
from lens_mix._passes.clean_pass import clean_pass
from lens_mix.pass_plan import PassPlan
from lens_mix.session import Session
from tests.matrix import build_or_skip
from tests.tiny_models import bridge, hooked_encoder, hooked_transformer, tokens

ROLES = ("attention_out", "feed_forward_out")
MODELS = pytest.mark.parametrize(
    ("factory", "name"),
    [
        *((bridge, name) for name in ("llama", "gpt2", "gpt_neox", "granite_moe", "opt")),
        *((hooked_transformer, "LN"), (hooked_encoder, "")),
    ],
)


def build(factory: Any, name: str) -> Any:
    return build_or_skip(factory, *([name] if name else []))


def record(model: Any, roles: tuple[str, ...]) -> tuple[BlockOutputs, Any]:
    """Record outputs in both blocks, in a pass over two prompts of different lengths."""
    lens = Lens(model)
    outputs = BlockOutputs(lens, [0, 1], roles)
    batch = pad([Prompt(tokens(model, 1, length)[0], None, {}) for length in (7, 5)], 0, "right")
    return outputs, clean_pass(lens, batch, watched=(), outputs=outputs)


@MODELS
def test_they_are_what_the_block_adds_and_are_kept_once(factory: Any, name: str) -> None:
    model = build(factory, name)
    outputs, clean = record(model, ROLES)
    for layer in (0, 1):
        taken = outputs.take(layer)
        stream = clean.calls[layer].resid_post
        assert taken.keys() == set(ROLES)
        if name not in ("granite_moe", ""):
            # Blocks without a norm or a factor on their branches add the two.
            added = taken["attention_out"].view_as(stream) + taken["feed_forward_out"].view_as(stream)
            expected = (clean.calls[layer].resid_pre + added)[clean.real]
            torch.testing.assert_close(expected, stream[clean.real])
        assert outputs.take(layer) == {}
    assert outputs.take(5) == {}


@MODELS
def test_only_the_requested_ones_are_recorded(factory: Any, name: str) -> None:
    outputs, _ = record(build(factory, name), ("feed_forward_out",))
    assert outputs.take(1).keys() == {"feed_forward_out"}


@pytest.mark.parametrize(
    ("name", "method", "expected"),
    [
        ("llama", "attn_res", {0, 1}),
        ("llama", "attention", set()),
        ("llama", "value_zeroing", set()),
        ("llama", "globenc", {0, 1}),
        ("granite_moe", "attn_res", {0, 1}),
        ("bert", "globenc", set()),
    ],
)
def test_a_run_records_those_that_no_method_computes(
    name: str, method: str, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, recorded = build_or_skip(bridge, name), []
    prompt = tokens(model, 1, 9)
    lm.run(model, prompt, method)
    make = PassPlan.block_outputs

    def spy(plan: PassPlan) -> BlockOutputs | None:
        recorded.append(make(plan))
        return recorded[-1]

    monkeypatch.setattr(PassPlan, "block_outputs", spy)
    lm.run(model, prompt, method)
    (outputs,) = recorded
    assert (set() if outputs is None else set(outputs._points)) == expected
    assert all(outputs is None or outputs.take(layer) == {} for layer in (0, 1)), "they are not freed"


def test_an_output_of_another_size_is_not_used() -> None:
    """Record half of the rows, as of a module that is called in pieces."""
    model = build_or_skip(bridge, "llama")
    session = Session(model, {"attn_res": lm.methods.AttnRes()})
    with session.checked_pass([session.read(tokens(model, 1, 8)[0])]) as checked:
        stream = checked.clean.calls[0].resid_post
        anatomy = checked.verification.anatomy[0]
        for output, is_used in ((stream[:, :4], False), (stream.flatten(0, 1), True), (stream, True)):
            block = RecordedBlock(checked.clean, 0, anatomy, {"feed_forward_out": output})
            read = block.output("feed_forward_out")
            assert (read is not None) == is_used
            assert read is None or torch.equal(read, stream)
