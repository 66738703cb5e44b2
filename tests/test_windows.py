"""Test every method on prompts that are longer than a model's sliding window or chunks of attention.

No expected number comes from a pass of this library that has several prompts or copies in one row. If all
layers have a window, the last row of a prompt depends on its last tokens only, so it equals that of these
tokens alone. If only some layers have one, plain calls of transformers give the numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import lens_mix as lm
from lens_mix.methods import METHODS
from tests.hugging_face_oracle import Reference, attention_attribution, gradient_attention
from tests.tiny_models import Unavailable, available, bridge, wrapped_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens"),
]

WINDOW, LENGTH = 4, 16
_SLIDING = {"sliding_window": WINDOW}
_SWITCHED = {**_SLIDING, "use_sliding_window": True}
# What each model needs besides `layer_types`, and the name of its layers with a window.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "mistral": (_SLIDING, ""),
    "gemma3": (_SLIDING, "sliding_attention"),
    "gemma2": (_SLIDING, "sliding_attention"),
    "gpt_oss": (_SLIDING, "sliding_attention"),
    "mixtral": (_SLIDING, ""),
    "phi3": (_SLIDING, ""),
    "starcoder2": (_SLIDING, ""),
    "cohere2": (_SLIDING, "sliding_attention"),
    "qwen2": (_SWITCHED, "sliding_attention"),
    "qwen3": (_SWITCHED, "sliding_attention"),
    "olmo3": (_SLIDING, "sliding_attention"),
    "exaone4": (_SLIDING, "sliding_attention"),
    "smollm3": (_SWITCHED, "sliding_attention"),
    "vaultgemma": (_SLIDING, "sliding_attention"),
    "modernbert_decoder": ({"local_attention": WINDOW}, "sliding_attention"),
    "llama4": ({"attention_chunk_size": WINDOW}, "chunked_attention"),
    "gpt_neo": ({"max_position_embeddings": 32}, ""),
}
# GPT-Neo has a layer without a window, and learned positions, which a cut changes.
EVERYWHERE = [name for name in MODELS if name != "gpt_neo"]
FAST = ("mistral", "gemma3")
REPLACEMENTS = [5, 11]


def marked(names):
    return [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in names]


def config_of(name, *, everywhere):
    config, kind = MODELS[name]
    layers = [kind, kind if everywhere else "full_attention"]
    config = {**config, "layer_types": layers} if kind else config
    # SmolLM3 and Llama 4 rotate no queries in some layers, and Llama 4 has no chunks there.
    return {**config, "no_rope_layers": [1, int(everywhere)]} if name in ("smollm3", "llama4") else config


@functools.cache
def model_of(name, everywhere):
    try:
        return bridge(name, torch.float64, **config_of(name, everywhere=everywhere))
    except Unavailable as problem:
        pytest.skip(str(problem))


@functools.cache
def plain(name, everywhere=False):
    """Return the model of transformers with the same weights, which TransformerLens has not changed."""
    config = config_of(name, everywhere=everywhere)
    return wrapped_model(name, torch.float64, **config, attn_implementation="eager")


def prompt():
    return torch.randint(3, 40, (LENGTH,), generator=torch.Generator().manual_seed(1))


def assert_agree(found, expected):
    # Softmaxes and norms of transformers may be float32 in any dtype.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", marked(EVERYWHERE))
def test_the_last_row_is_that_of_the_tokens_in_reach(name, method):
    model, tokens = model_of(name, everywhere=True), prompt()
    # Two layers reach two windows, and chunks end at the first token of the last one.
    reach = WINDOW if name == "llama4" else 2 * WINDOW - 1
    options = {"queries": [-1], "progress": None}
    try:
        alone = lm.run(model, tokens[-reach:], method, **options).scores[..., -1, :]
    except lm.UnsupportedModelError as problem:
        assert method not in ("attention", "value_zeroing", "context_length", "occlusion"), problem
        return
    try:
        whole = lm.run(model, tokens, method, **options).scores[..., -1, :]
    except lm.UnsupportedModelError as problem:
        assert (method, "attention to read only tokens" in str(problem)) == ("token_patching", True)
        return
    assert_agree(whole[..., -reach:], alone)
    if (name, method) == ("llama4", "context_length"):
        return  # A cut moves the borders of chunks, so a token before the last chunk counts too.
    assert float(whole[..., :-reach].abs().max()) <= 1e-6


@torch.no_grad()
def log_probabilities(name, tokens, everywhere=False):
    """Return the log probabilities after the last token, by a plain call."""
    return plain(name, everywhere)(input_ids=tokens[None], use_cache=False).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("name", marked(MODELS))
@pytest.mark.parametrize("everywhere", [False, True])
def test_contexts_are_prompts_of_their_own(name, everywhere):
    model, tokens = model_of(name, everywhere=everywhere), prompt()
    token = log_probabilities(name, tokens, everywhere).argmax()
    values = torch.stack(
        [log_probabilities(name, tokens[start:], everywhere)[token] for start in range(LENGTH)]
    )
    assert float((values[:-1] - values[1:]).abs().max()) > 1e-2
    for max_memory in (None, 10**6):
        options = {"queries": [-1], "max_memory": max_memory, "progress": None}
        found = lm.run(model, tokens, lm.methods.ContextLength(keep_first=False), **options).scores[0, 0]
        assert_agree(found[:-1], values[:-1] - values[1:])


@pytest.mark.parametrize("name", marked(MODELS))
def test_replacements_are_prompts_of_their_own(name):
    model, tokens = model_of(name, everywhere=False), prompt()
    clean = log_probabilities(name, tokens)
    expected = torch.zeros(LENGTH, dtype=torch.float64)
    for position in range(LENGTH):
        for other in REPLACEMENTS:
            copy = tokens.clone()
            copy[position] = other + int(tokens[position] == other)
            changed = log_probabilities(name, copy)
            expected[position] += (changed - clean)[clean.argmax()].abs() / len(REPLACEMENTS)
    occlusion = lm.methods.Occlusion(replacements=REPLACEMENTS, measure="absolute")
    assert_agree(lm.run(model, tokens, occlusion, queries=[-1], progress=None).scores[0, 0], expected)
    measured = lm.methods.TokenPatching(replacements=REPLACEMENTS, n_measured="auto")
    try:
        found = lm.run(model, tokens, measured, queries=[-1], progress=None).scores[0, 0]
    except lm.UnsupportedModelError as problem:
        assert "leaves attention to transformers" in str(problem) or "position_ids" in str(problem)
        return
    assert_agree(found, expected)


def input_gradients(reference):
    """Return the norms of the gradients of the largest logit with respect to the first layer's input."""
    entering = []

    def enter(module, args, kwargs):
        entering.append((args[0] if args else kwargs["hidden_states"]).detach().requires_grad_(True))
        named = {**kwargs, "hidden_states": entering[0]}
        return ((entering[0], *args[1:]), kwargs) if args else (args, named)

    with reference.layers[0].register_forward_pre_hook(enter, with_kwargs=True):
        logits = reference.model(**reference.inputs, **reference.options).logits[0, -1]
    (gradient,) = torch.autograd.grad(logits.max(), entering)
    return gradient[0].norm(dim=-1)


@pytest.mark.parametrize("name", marked(MODELS))
def test_layer_maps_and_gradients_agree_with_transformers(name):
    model, tokens = model_of(name, everywhere=False), prompt()
    reference = Reference(plain(name), tokens[None])
    found = lm.run(model, tokens, ["attention", "value_zeroing", "value_norm"], progress=None)
    assert_agree(found["attention"].scores, reference.attention().mean(1))
    assert_agree(found["value_zeroing"].scores, reference.value_zeroing())
    assert_agree(found["value_norm"].scores, reference.value_shares().norm(dim=-1))
    row = lm.run(model, tokens, lm.methods.InputGradients(), queries=[-1]).scores[0, 0]
    assert_agree(row, input_gradients(reference))
    if reference.has_one_function:
        methods = ["gradient_attention", lm.methods.AttentionAttribution(n_steps=5)]
        found = lm.run(model, tokens, methods, progress=None)
        for layer in range(2):
            expected = gradient_attention(reference, layer)
            assert_agree(found["gradient_attention"].scores[layer], expected)
            expected = attention_attribution(reference, layer, steps=5)
            assert_agree(found["attention_attribution"].scores[layer], expected)


def span_by_replacement(name, tokens, start):
    """Return the change of the log probability of the tokens from `start` on without each token."""

    @torch.no_grad()
    def compute(copy):
        logits = plain(name, everywhere=True)(input_ids=copy[None], use_cache=False).logits[0]
        rows = logits[start - 1 : -1].log_softmax(-1)
        return rows.gather(-1, tokens[start:, None]).sum()

    copies = tokens.repeat(LENGTH, 1)
    copies[range(LENGTH), range(LENGTH)] = torch.where(tokens == REPLACEMENTS[0], tokens + 1, REPLACEMENTS[0])
    return compute(tokens) - torch.stack([compute(copy) for copy in copies])


def test_a_span_is_explained_by_the_keys_that_its_rows_see():
    """The last row sees none of the first tokens, but the first tokens of the span depend on them."""
    model, tokens, start = model_of("mistral", everywhere=True), prompt(), 8
    target = lm.targets.span(start, LENGTH)
    methods = [
        lm.methods.Occlusion(target, replacements=REPLACEMENTS[:1]),
        lm.methods.InputGradients(target),
        lm.methods.Gim(target),
    ]
    found = lm.run(model, tokens, methods, queries=[-1], progress=None)
    assert_agree(found["occlusion"].scores[0, 0], span_by_replacement("mistral", tokens, start))
    first = start - 1 - (2 * WINDOW - 2)
    for row in found.values():
        seen = row.mask[0]
        assert seen.tolist() == [key >= first for key in range(LENGTH)]
        assert bool((row.scores[0, 0, ~seen] == 0).all())
        assert bool((row.scores[0, 0, first:-1] != 0).all())
    traced = lm.trace(
        model, tokens[:start], answer=tokens[start:], sources="token", method=lm.methods.InputGradients()
    )
    spanned = traced.scores_of(0, LENGTH - start)
    torch.testing.assert_close(spanned, found["input_gradients"].scores[0, 0].to(spanned), rtol=0, atol=1e-8)


def test_a_function_of_the_logits_may_read_any_row_up_to_the_asked_one():
    model, tokens = model_of("mistral", everywhere=True), prompt()
    method = lm.methods.InputGradients(lambda logits: logits[:, 2, 5] + logits[:, -1, 7])
    found = lm.run(model, tokens, method, queries=[-1])
    assert bool((found.scores[0, 0, :3] > 0).all())
    assert found.mask is None
