"""Information flow routes against a case worked by hand and the definition written out, on every block."""

import pytest
import torch

import lens_mix as lm
from lens_mix.algebra.definitions import through_norm
from lens_mix.methods.information_flow_routes import head_parts, importance
from tests.norm_cases import CASES, blocks_of, heads_of, largest, written_out


def definition(block, biases="whole"):
    """Importance of each head's part of each key, and of the parts that are no key's, by name."""
    anatomy, x, path = block.anatomy, block.resid_pre, block.anatomy.value_path
    attention_out = path.project(block.recorded("z"))
    true = written_out(block)
    parts = head_parts(*heads_of(block))
    shape = parts.shape
    parts = through_norm(anatomy.attention_branch, parts.flatten(2, 3), attention_out)
    parts = torch.cat([parts * anatomy.residual_multiplier, x[:, :, None]], dim=2)
    parts = through_norm(anatomy.attention_residual, parts, true.summed)
    if biases == "part":
        parts = torch.cat([parts, (true.mid - parts.sum(2))[:, :, None]], dim=2)
    shares = importance(parts, true.mid)
    pairs = shape[2] * shape[3]
    names = ["resid_pre", "biases_mid"][: shares.shape[2] - pairs]
    others = dict(zip(names, shares[:, :, pairs:].unbind(2), strict=True))
    return shares[:, :, :pairs].unflatten(2, shape[2:4]).transpose(1, 2), others


@CASES
@pytest.mark.parametrize("biases", ["whole", "part"])
def test_equals_the_definition_written_out(case, biases):
    for block in blocks_of(case, lm.InformationFlowRoutes()):
        by_head, others = definition(block, biases)
        own = torch.diag_embed(others["resid_pre"])
        scores = lm.InformationFlowRoutes(biases=biases)(block)
        assert largest(scores, by_head.sum(1) + own) < 1e-10
        kept_apart = lm.InformationFlowRoutes(per_head=True, biases=biases)(block)
        assert largest(kept_apart, by_head + (own / by_head.shape[1])[:, None]) < 1e-10
        total = scores.sum(-1) + others.get("biases_mid", 0)
        assert largest(total, torch.ones_like(total)) < 1e-10
