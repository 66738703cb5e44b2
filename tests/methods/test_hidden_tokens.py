"""Test tokens that are hidden in every layer, against a model of transformers with -inf in its softmax.

Nothing else of its pass changes: positions, chunks and biases are those of the whole prompt.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lens_mix as lm
from lens_mix._model.hidden_keys import HiddenKeys
from lens_mix.hooks import mask_keys
from lens_mix.methods.occlusion import lost_without_key
from lens_mix.session import Session
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import (
    available,
    bridge,
    hooked_encoder,
    hooked_encoder_decoder,
    hooked_transformer,
    wrapped_model,
)

NAMES = (
    "gpt2",
    "llama",
    "mistral",
    "gemma2",
    "gpt_neox",
    "gpt_neo",
    "gptj",
    "phi3",
    "opt",
    "xglm",
    "bloom",
    "mpt",
    "gpt_oss",
    "llama4",
    "nanochat",
    "modernbert_decoder",
    "bert",
    "roberta",
    "bart",
    "marian",
    "mbart",
    "m2m100",
    "pegasus",
    "t5",
)
# Layers with chunks, and above them a layer without positions.
_CHUNKED = {
    "num_hidden_layers": 3,
    "attention_chunk_size": 3,
    "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
    "no_rope_layers": [1, 1, 0],
}
_CONFIG: dict[str, dict[str, Any]] = {"llama4": _CHUNKED}
_FLOAT32_ONLY = ("xglm",)


@contextlib.contextmanager
def hidden_in_every_softmax(keys: list[int], length: int, sinks: int) -> Iterator[None]:
    """Hide keys in square attention of that length (and sinks), for rows that see another key."""
    own = {torch.nn.functional: torch.nn.functional.softmax, torch: torch.softmax}

    def edited(softmax: Any) -> Any:
        def apply(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if keys and scores.shape[-2:] == (length, length + sinks):
                visible = scores > scores.amax(-1, keepdim=True) - 1e4 + 100
                visible[..., keys] = False
                columns = scores[..., keys].masked_fill(visible.any(-1, keepdim=True), -torch.inf)
                scores = scores.clone()
                scores[..., keys] = columns
            return softmax(scores, *args, **kwargs)

        return apply

    for owner, softmax in own.items():
        owner.softmax = edited(softmax)
    try:
        yield
    finally:
        for owner, softmax in own.items():
            owner.softmax = softmax


def expected_losses(
    model: Any, inputs: dict[str, Tensor], length: int, groups: list[list[int]] | None = None
) -> Tensor:
    groups = [[key] for key in range(length)] if groups is None else groups
    sinks = any("sinks" in name for name, _ in model.named_parameters())

    def log_probabilities(key: int | None) -> Tensor:
        keys = [] if key is None else groups[key]
        with torch.no_grad(), hidden_in_every_softmax(keys, length, int(sinks)):
            return model(**inputs, use_cache=False).logits[0].log_softmax(-1)

    predicted = log_probabilities(None).argmax(-1, keepdim=True)
    return lost_without_key(lambda key: log_probabilities(key).gather(-1, predicted)[None, :, 0], len(groups))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hidden_token_changes_nothing_but_the_softmax(name, dtype):
    if dtype == torch.float64 and name in _FLOAT32_ONLY:
        pytest.skip("its own pass fails in float64")
    config = _CONFIG.get(name, {})
    model = build_or_skip(bridge, name, dtype, **config)
    reference = wrapped_model(name, dtype, **config)
    reference.set_attn_implementation("eager")
    tokens = prompt_of(model)
    pair = isinstance(tokens, tuple)
    read = tokens[1] if pair else tokens
    inputs = {"input_ids": tokens[0], "decoder_input_ids": read} if pair else {"input_ids": tokens}
    assert not pair or tokens[0].shape != read.shape
    expected = expected_losses(reference, inputs, read.shape[-1])
    if name == "gpt_oss":
        expected[0, 0] = 0  # Only the query itself remains visible, whatever the weight of its sink.
    try:
        found = lm.run(
            model, tokens, lm.methods.Occlusion(by="mask"), part="decoder" if pair else None
        ).scores[0]
    except lm.UnsupportedModelError as problem:
        if name == "t5" and "cannot run T5" in str(problem):
            pytest.skip("no T5 before TransformerLens 4")
        raise
    # Some softmaxes of transformers are always in float32.
    torch.testing.assert_close(found, expected.to(found), atol=2e-5, rtol=2e-4)
    assert float(found[-1].abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bert", "opt", "bloom", "bart", "t5"])
def test_a_hidden_group_changes_nothing_but_the_softmax(name):
    """In an encoder-decoder, of its decoder."""
    model, reference = build_or_skip(bridge, name, torch.float64), wrapped_model(name, torch.float64)
    reference.set_attn_implementation("eager")
    tokens, spans = prompt_of(model), [[0, 1], [2], [3, 4]]
    pair = isinstance(tokens, tuple)
    read = tokens[1] if pair else tokens
    inputs = {"input_ids": tokens[0], "decoder_input_ids": read} if pair else {"input_ids": tokens}
    expected = expected_losses(reference, inputs, read.shape[-1], spans)
    method = lm.methods.Occlusion(by="mask", spans=spans)
    try:
        found = lm.run(model, tokens, method, part="decoder" if pair else None).scores[0]
    except lm.UnsupportedModelError as problem:
        if name == "t5" and "cannot run T5" in str(problem):
            pytest.skip("no T5 before TransformerLens 4")
        raise
    torch.testing.assert_close(found, expected.to(found), atol=2e-5, rtol=2e-4)
    assert float(found[-1].abs().max()) > 1e-3


@pytest.mark.parametrize("padding", [0, 2])
def test_the_positions_of_roberta_stay(padding):
    """Positions are counted from the padding token on, in a padded batch too."""
    model = build_or_skip(bridge, "roberta", torch.float64)
    reference = wrapped_model("roberta", torch.float64)
    reference.set_attn_implementation("eager")
    prompts = [prompt_of(model, 6, 1), prompt_of(model, 6 - padding, 2)]
    for tokens, m in zip(prompts, lm.run_many(model, prompts, lm.methods.Occlusion(by="mask")), strict=True):
        expected = expected_losses(reference, {"input_ids": tokens}, tokens.shape[-1])
        torch.testing.assert_close(m.scores[0], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loudness", [1.0, 6.0])
def test_a_sink_is_left_what_it_takes(dtype, loudness):
    """If a hidden key had nearly all of the weight, an attention sink gets much of the rest."""
    model = build_or_skip(bridge, "gpt_oss", dtype)
    reference = wrapped_model("gpt_oss", dtype)
    reference.set_attn_implementation("eager")
    for each in (*model.original_model.modules(), *reference.modules()):
        if type(each).__name__ == "GptOssAttention":
            each.sinks.data -= 1.5 * loudness
            for matrix in (each.q_proj, each.k_proj):
                getattr(matrix, "original_component", matrix).weight.data *= loudness**0.5
    tokens = prompt_of(model)
    with torch.no_grad():
        clean = [each(tokens, use_cache=False).logits for each in (model.original_model, reference)]
    torch.testing.assert_close(*clean, atol=1e-4, rtol=0)
    expected = expected_losses(reference, {"input_ids": tokens}, tokens.shape[-1])
    expected[0, 0] = 0
    found = lm.run(model, tokens, lm.methods.Occlusion(by="mask")).scores[0]
    torch.testing.assert_close(found, expected.to(found), atol=2e-4, rtol=2e-4)


BUILT = [
    (hooked_encoder,),
    (hooked_transformer, "LN"),
    (hooked_transformer, "rotary"),
    (hooked_transformer, "alibi"),
    (hooked_transformer, "local"),
    (hooked_encoder_decoder,),
    (bridge, "gpt2"),
    (bridge, "llama"),
    (bridge, "bloom"),
]


@pytest.mark.parametrize("build", BUILT, ids=lambda build: " ".join([build[0].__name__, *build[1:]]))
def test_a_batch_with_hidden_keys_is_what_hooks_on_the_pattern_give(build):
    """The mask of each attention hides the key, in every class."""
    if not available(*build):
        pytest.skip("not in this TransformerLens")
    model = build[0](*build[1:], dtype=torch.float64)
    tokens, method = prompt_of(model), lm.methods.Occlusion(by="mask")
    part = "decoder" if isinstance(tokens, tuple) else None
    try:
        session = Session(model, {"occlusion": method}, part=part)
        with session.checked_pass([session.read(tokens)]) as checked:
            blocks = checked.blocks("occlusion")
            first = blocks[0]
            rows = torch.zeros(3, dtype=torch.long)
            masked = torch.zeros_like(first.tokens[rows], dtype=torch.bool)
            masked[1, 2] = masked[2, 0] = masked[2, 3] = True
            with torch.no_grad():
                batch = dataclasses.replace(first.batch.select(rows), hidden=masked)
                found = first.continuation(batch=batch).logits()
                hooks = [mask_keys(b.layer, masked, attention=b.stack.attention_template) for b in blocks]
                expected = first.continuation(hooks, prompt_index=rows).logits()
    except lm.UnsupportedModelError as problem:
        pytest.skip(str(problem))
    # Rows that see nothing else have any value, if a model masks later keys by a mask of its own.
    torch.testing.assert_close(found[:, 1:], expected[:, 1:], atol=1e-6, rtol=0)
    assert float((found[1:, -1] - found[0, -1]).abs().max()) > 1e-3


@pytest.mark.parametrize("damaged", ["_mask", "_hide_keys"])
def test_a_model_that_ignores_the_mask_is_refused(damaged, monkeypatch):
    """The mask may not reach the module, or have no effect on its pattern."""
    hide = HiddenKeys._hide_keys

    def ignore(keys, mask):
        hide(keys, mask)
        return mask

    ways = {"_mask": lambda keys, module, args, kwargs: (args, kwargs), "_hide_keys": ignore}
    monkeypatch.setattr(HiddenKeys, damaged, ways[damaged])
    # It leaves attention to transformers, so hooks on its pattern change nothing.
    model = build_or_skip(bridge, "bert")
    words = "expected its attention mask to hide a key from every query"
    with pytest.raises(lm.UnsupportedModelError, match=words):
        lm.run(model, prompt_of(model), lm.methods.Occlusion(by="mask"))
