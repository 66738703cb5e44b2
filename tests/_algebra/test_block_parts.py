"""The vectors of `block_parts` sum to a block's output on every anatomy, and each one is as documented."""

import dataclasses
from typing import ClassVar

import pytest
import torch

import lens_mix as lm
from lens_mix._model.stacks import stacks_of
from tests.matrix import cases, model_of, prompt_of

CASES = {case.label: case for case in cases(refused=False)}
pytestmark = pytest.mark.filterwarnings("ignore")


@dataclasses.dataclass(frozen=True)
class Probe(lm.Method):
    """Record the vectors of every block, and the output that they have to sum to."""

    name: ClassVar[str] = "probe"
    residual: ClassVar[float] = 0.0
    engines: ClassVar[tuple[str, ...]] = ("algebra",)
    reads: ClassVar[str] = "above"
    records: ClassVar[frozenset[str]] = frozenset({"pattern", "value"})
    needs: ClassVar[frozenset[str]] = frozenset({"projection", "residual"})

    kept: list = dataclasses.field(default_factory=list)

    def of_blocks(self, blocks):
        found = [(block, lm.models.block_parts(block), block.resid_post) for block in blocks]
        self.kept.extend(found)
        return [parts.keys.norm(dim=-1) for _, parts, _ in found]

    def parameters(self):
        return {}


@pytest.mark.parametrize("label", CASES)
def test_the_vectors_sum_to_the_output(label):
    model, probe = model_of(CASES[label], torch.float64), Probe()
    lm.run(model, prompt_of(model), probe, part=CASES[label].part)
    assert len(probe.kept) == len(stacks_of(model)[CASES[label].part or "blocks"].attention_layers)
    for block, parts, output in probe.kept:
        assert torch.allclose(parts.total(), output, atol=1e-10, rtol=1e-10)
        assert (parts.cross.abs().max() > 0) == block.anatomy.cross
        assert (parts.feed_forward.abs().max() > 0) == (block.anatomy.feed_forward_kind != "none")
        assert parts.keys.shape[:3] == (1, *block.recorded("pattern").shape[2:])


def test_the_vectors_of_a_block_with_cross_attention_sum_to_the_output():
    """The usual Bridges have none, so the fast cases of the test above do not read its output."""
    label = next(
        (label for label in CASES if label in ("bridge t5 decoder", "HookedEncoderDecoder decoder")), None
    )
    if label is None:
        pytest.skip("no decoder with cross-attention in this TransformerLens")
    test_the_vectors_sum_to_the_output(label)


@pytest.mark.parametrize(
    "label", [label for label in CASES if "gpt2" in label or label.endswith(("LN", "bert"))]
)
def test_against_the_method_of_the_same_vectors(label):
    """Compare with AttnN of Kobayashi et al. (2020), ‖Σ_h a u‖, and with AttnRes for the residual."""
    model, probe = model_of(CASES[label], torch.float64), Probe()
    vectors = lm.run(model, prompt_of(model), probe)
    norms = lm.run(model, prompt_of(model), lm.methods.AttnResLn())
    for block, parts, _ in probe.kept:
        keys = parts.keys + torch.diag_embed(parts.residual.mT).permute(0, 2, 3, 1)
        if block.anatomy.feed_forward_residual is None:
            assert torch.allclose(keys.norm(dim=-1)[0], norms.scores[block.layer], atol=1e-9)
    assert vectors.scores.shape == norms.scores.shape


def test_some_rows_only():
    label = next(iter(CASES))
    model, whole, cut = model_of(CASES[label], torch.float64), Probe(), Probe()
    lm.run(model, prompt_of(model), whole, part=CASES[label].part)
    lm.run(model, prompt_of(model), cut, part=CASES[label].part, queries=[-1, 2])
    for (_, parts, _), (_, rows, _) in zip(whole.kept, cut.kept, strict=True):
        assert torch.allclose(rows.keys, parts.keys[:, [-1, 2]])
        assert torch.allclose(rows.feed_forward, parts.feed_forward[:, [-1, 2]])
