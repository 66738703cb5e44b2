"""Test replaced tokens beside their prompt against whole prompts in a batch, and the control of their row."""

import pytest
import torch

import lens_mix as lm
from lens_mix._passes.replay import first_tensor, with_first
from lens_mix.methods import side_by_side
from tests.matrix import build_or_skip, slow
from tests.tiny_models import bridge

STAND_IN = 11
WORDS = "attention to read only tokens and their positions"


def log_probabilities(model, tokens, hook):
    handles = [block.register_forward_hook(hook) for block in model.blocks]
    with torch.no_grad():
        logits = model(tokens)
    for handle in handles:
        handle.remove()
    return logits.log_softmax(-1)


def direct_terms_in_a_batch(model, prompt, query):
    """Return the direct term of each token up to the query, from one whole copy of the prompt for each.

    The output of each block is that of the clean pass, except at the replaced position and the query.
    """
    count = query + 1
    copies, rerun = prompt.repeat(count, 1), torch.zeros(count, len(prompt), dtype=torch.bool)
    copies[range(count), range(count)] = STAND_IN + (prompt[:count] == STAND_IN).long()
    rerun[range(count), range(count)] = True
    rerun[:, query] = True
    clean = {}

    def keep(block, args, output):
        clean[block] = first_tensor(output).clone()

    def put_back(block, args, output):
        return with_first(output, torch.where(rerun[..., None], first_tensor(output), clean[block]))

    own, others = (
        log_probabilities(model, tokens, hook)[:, query]
        for tokens, hook in ((prompt[None], keep), (copies, put_back))
    )
    return (others[:, own.argmax()] - own.max()).abs()


# In OpenAI GPT, hooks mask the row instead of a mask of the model's own.
@pytest.mark.usefixtures("softmax_in_the_dtype_of_the_model")
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "openai_gpt", *map(slow, ("gpt_neox", "falcon_mqa", "gemma", "mixtral", "phi"))]
)
def test_equals_whole_prompts_in_a_batch(name):
    model, prompt = build_or_skip(bridge, name, torch.float64), torch.arange(3, 13)
    method = lm.methods.TokenPatching(replacements=[STAND_IN], paths="direct")
    found = lm.run(model, prompt, method, queries=[4, -1]).scores[0]
    for row, query in zip(found, (4, 9), strict=True):
        expected = direct_terms_in_a_batch(model, prompt, query)
        torch.testing.assert_close(row[: query + 1], expected, atol=1e-10, rtol=0)
        assert float(expected[2:].min()) > 1e-7


def test_a_token_that_sees_too_little_of_the_prompt_is_found(monkeypatch):
    """The control is the only token whose pass is damaged."""
    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 12)
    whole = side_by_side.Batch

    def damaged(*args):
        mask = args[-1]["attention_mask"]
        assert bool((mask[0, 0, -1, : len(prompt) - 1] == 0).all())
        mask[0, 0, -1, 4] = torch.finfo(mask.dtype).min
        return whole(*args)

    monkeypatch.setattr(side_by_side, "Batch", damaged)
    with pytest.raises(lm.UnsupportedModelError, match=WORDS):
        lm.run(model, prompt, lm.methods.TokenPatching(replacements=[STAND_IN]), queries=[-1])


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_window_is_found_by_the_control(name):
    """The row's mask replaces the model's window."""
    model, method = build_or_skip(bridge, name, torch.float64), lm.methods.TokenPatching(n_exact=3)
    with pytest.raises(lm.UnsupportedModelError, match="a sliding window shorter than the prompt"):
        lm.run(model, torch.arange(3, 15), method, queries=[-1])


def test_several_passes_equal_one(monkeypatch):
    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 12)
    method = lm.methods.TokenPatching(replacements=[5, STAND_IN])
    expected = lm.run(model, prompt, method).scores
    monkeypatch.setattr(side_by_side, "_MOST_COPIES", 2)
    torch.testing.assert_close(lm.run(model, prompt, method).scores, expected, atol=1e-10, rtol=0)
