from __future__ import annotations

import dataclasses

import pytest
import torch

import lens_mix as lm
from lens_mix._model.from_weights import Weights, model_from_weights

TOKENS = torch.tensor([1, 2, 3, 4, 5])


def weights(**options) -> Weights:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return 0.4 * torch.randn(*shape, generator=generator)

    per_head = [drawn(2, 3, 10, 5) for _ in range(3)]
    made = Weights(drawn(9, 10), drawn(6, 10), *per_head, drawn(2, 3, 5, 10), drawn(10, 4))
    feed_forward = {"mlp_in": drawn(2, 10, 7), "mlp_out": drawn(2, 7, 10)}
    return dataclasses.replace(
        made, **(feed_forward if options.pop("feed_forward", False) else {}), **options
    )


def normed(x: torch.Tensor, norm: str | None) -> torch.Tensor:
    if norm is None:
        return x
    x = x - x.mean(-1, keepdim=True) if norm == "LN" else x
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def logits(w: Weights) -> torch.Tensor:
    """Return the logits by the definition."""
    x = w.embedding[TOKENS] + w.positions[: len(TOKENS)]
    later = torch.ones(len(TOKENS), len(TOKENS)).triu(1).bool()
    for layer in range(2):
        y = normed(x, w.norm)
        for head in range(3):
            q, k, v = (part[layer, head] for part in (w.query, w.key, w.value))
            scores = (y @ q) @ (y @ k).T / 5**0.5
            pattern = (scores.masked_fill(later, -torch.inf) if w.causal else scores).softmax(-1)
            x = x + pattern @ (y @ v) @ w.output[layer, head]
        if w.mlp_in is not None:
            x = x + (normed(x, w.norm) @ w.mlp_in[layer]).relu() @ w.mlp_out[layer]
    return normed(x, w.norm) @ w.unembedding


@pytest.mark.parametrize("norm", [None, "LN", "RMS"])
@pytest.mark.parametrize("feed_forward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_it_computes_what_the_weights_say(norm, feed_forward, causal):
    w = weights(norm=norm, feed_forward=feed_forward, causal=causal)
    model = model_from_weights(w)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS[None])[0], logits(w), atol=1e-5, rtol=1e-5)
    assert not model.training
    assert lm.check(model, TOKENS).ok


def test_the_random_state_stays():
    state = torch.get_rng_state()
    model_from_weights(weights())
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_that_do_not_fit_are_refused():
    w = weights()
    # This way of setting a field avoids the tests' shape checks.
    object.__setattr__(w, "output", torch.zeros(2, 3, 5, 8))
    with pytest.raises(ValueError, match=r"weights: expected the shape \(.*\) for .*\.0\.attn\..*, got \("):
        model_from_weights(w)
