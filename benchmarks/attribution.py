"""Compare self-attention attribution with the released code's schedule: time, error and memory.

    python benchmarks/attribution.py                     12 layers x 64 tokens, about two minutes
    python benchmarks/attribution.py --layers 4 --positions 32 --repeats 3

The released schedule (YRdddream/attattr) runs 20 left Riemann steps in one batch, for every layer, through
the whole model. It is rewritten here for a plain transformers BERT, whose attention function is replaced by
one that uses the scaled pattern. It makes one clean pass for all layers, and the released code one for each.
Both explain the probability of a class by the same classifier. Errors are relative to 64 Gauss-Legendre
points.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

import lens_mix as lm
from benchmarks import common

Head = Callable[[Tensor], Tensor]


def classifier(d_model: int) -> Head:
    """Return a function from the last residual stream to the probability of class 1, with random weights."""
    generator = torch.Generator().manual_seed(7)
    pool = torch.randn(d_model, d_model, generator=generator) / d_model**0.5
    out = torch.randn(d_model, 3, generator=generator) * 3 / d_model**0.5
    return lambda resid: (torch.tanh(resid[:, 0] @ pool) @ out).softmax(-1)[:, 1]


@contextlib.contextmanager
def injected(patterns: dict[Any, Tensor], kept: dict[Any, Tensor] | None = None) -> Iterator[None]:
    """Replace the patterns of some modules in BERT's attention function, and store those of the others."""
    from transformers.models.bert import modeling_bert

    original = modeling_bert.eager_attention_forward

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module in patterns:
            out = (patterns[module] @ value).transpose(1, 2).contiguous()
            return out, patterns[module]
        out, pattern = original(module, query, key, value, *args, **kwargs)
        if kept is not None:
            kept[module] = pattern
        return out, pattern

    modeling_bert.eager_attention_forward = attention
    try:
        yield
    finally:
        modeling_bert.eager_attention_forward = original


def released_schedule(model: Any, tokens: Tensor, head: Head, steps: int = 20) -> Tensor:
    """Return [layer, head, query, key]: each layer by the whole model, with all steps in one batch."""
    modules = [layer.attention.self for layer in model.bert.encoder.layer]
    kept: dict[Any, Tensor] = {}
    with torch.no_grad(), injected({}, kept):
        model.bert(tokens[None])
    maps = []
    for module in modules:
        pattern = kept[module]
        points = torch.arange(steps)[:, None, None, None] / steps
        scaled = (points * pattern).requires_grad_(True)
        with injected({module: scaled}):
            resid = model.bert(tokens.expand(steps, -1)).last_hidden_state
        (gradient,) = torch.autograd.grad(head(resid).sum(), scaled)
        maps.append((gradient.mean(0) * pattern[0]).detach())
    return torch.stack(maps)


def attribution(model: Any, tokens: Tensor, head: Head, **options: Any) -> Tensor:
    """Return the scores of lens_mix on the same model in a TransformerBridge."""
    method = lm.methods.AttentionAttribution(target=lm.targets.head(head), per_head=True, **options)
    return lm.run(model, tokens, method).scores


def relative_errors(found: Tensor, truth: Tensor) -> Tensor:
    """Return, for each layer, the norm of the difference divided by the norm of the truth."""
    return (found - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)


def speed(layers: int, positions: int, repeats: int) -> dict[str, Any]:
    """Return the times of both, and their errors."""
    plain = common.bert_like(layers, wrapped=False)
    bridge = common.bert_like(layers)
    tokens = common.random_tokens(bridge, positions)
    head = classifier(plain.config.hidden_size)
    found: dict[str, Tensor] = {}

    def released() -> None:
        found["released"] = released_schedule(plain, tokens, head)

    def ours() -> None:
        found["lens_mix"] = attribution(bridge, tokens, head)

    attribution(bridge, tokens[:8], head)  # The first run verifies the model, which is not timed.
    seconds = common.interleaved(
        {"released": released, "lens_mix": ours}, repeats, warm_up=None if repeats > 1 else ()
    )
    truth = attribution(bridge, tokens, head, n_steps=64)
    errors = {name: relative_errors(scores, truth) for name, scores in found.items()}
    return {
        "layers": layers,
        "tokens": positions,
        "released s": seconds["released"],
        "lens_mix s": seconds["lens_mix"],
        "ratio": seconds["released"] / seconds["lens_mix"],
        "released error (median, worst)": _format_errors(errors["released"]),
        "lens_mix error (median, worst)": _format_errors(errors["lens_mix"]),
    }


def against_captum(layers: int, positions: int, repeats: int, steps: int = 8) -> dict[str, Any]:
    """Compare integrated gradients of every layer's pattern with captum, which uses whole passes."""
    from captum.attr import IntegratedGradients

    model = common.gpt2_like(layers)
    tokens = common.random_tokens(model, positions)
    target = lm.targets.logit(7)
    clean = lm.run(model, tokens, lm.methods.AttentionWeights(per_head=True)).scores
    found: dict[str, Tensor] = {}

    def captum() -> None:
        maps = []
        for layer in range(layers):

            def logit(pattern: Tensor, name: str = f"blocks.{layer}.attn.hook_pattern") -> Tensor:
                hook = (name, lambda t, hook: pattern)
                return model.run_with_hooks(tokens.expand(len(pattern), -1), fwd_hooks=[hook])[:, -1, 7]

            explained = IntegratedGradients(logit)
            maps.append(explained.attribute(clean[layer][None], n_steps=steps, method="gausslegendre")[0])
        found["captum"] = torch.stack(maps).detach()

    def ours() -> None:
        method = lm.methods.AttentionAttribution(target=target, n_steps=steps, per_head=True)
        found["lens_mix"] = lm.run(model, tokens, method).scores

    seconds = common.interleaved({"captum": captum, "lens_mix": ours}, repeats)
    return {
        "layers": layers,
        "tokens": positions,
        "steps": steps,
        "captum s": seconds["captum"],
        "lens_mix s": seconds["lens_mix"],
        "captum ÷ lens_mix": seconds["captum"] / seconds["lens_mix"],
        "largest difference": float((found["captum"] - found["lens_mix"]).abs().max()),
        "largest score": float(found["captum"].abs().max()),
    }


def against_eight_points(
    name: str, layers: int, positions: int, repeats: int, tolerance: float | None
) -> dict[str, Any]:
    """Compare the points that each layer needs for a tolerance with eight points in every layer."""
    model = common.smollm2() if name == "SmolLM2-135M" else common.MODELS[name](layers=layers)
    tokens = common.random_tokens(model, positions)
    found: dict[str, lm.MixingMap] = {}

    def run(way: str, **options: Any) -> None:
        method = lm.methods.AttentionAttribution(target=lm.targets.predicted(of="probability"), **options)
        found[way] = lm.run(model, tokens, method)

    ways = {
        "by layer": lambda: run("by layer", tolerance=tolerance),
        "fixed": lambda: run("fixed", n_steps=8),
    }
    seconds = common.interleaved(ways, repeats)
    gaps = {key: torch.tensor(each.provenance["details"]["completeness_gap"]) for key, each in found.items()}
    noted = [note for note in found["by layer"].notes if "tolerance" in note or "degenerate" in note]
    return {
        "model": name,
        "layers": len(gaps["fixed"]),
        "tokens": positions,
        "tolerance": "1 % of the scores" if tolerance is None else str(tolerance),
        "by layer ÷ eight points": seconds["by layer"] / seconds["fixed"],
        "points": str(found["by layer"].provenance["details"]["steps"]),
        "largest gap": float(gaps["by layer"].abs().max()),
        "largest gap, eight points": float(gaps["fixed"].abs().max()),
        "layers with a note": len(noted),
    }


def _format_errors(errors: Tensor) -> str:
    return f"{errors.median():.1e}, {errors.max():.1e}"


def memory(layers: int, positions: int) -> list[dict[str, Any]]:
    """Return the peak bytes of new tensors for each `internal_batch_size`, and of the released schedule."""
    plain = common.bert_like(layers, wrapped=False)
    bridge = common.bert_like(layers)
    tokens = common.random_tokens(bridge, positions)
    head = classifier(plain.config.hidden_size)
    attribution(bridge, tokens[:8], head)
    rows = []
    for size in (1, 2, 4, 8):
        run = functools.partial(attribution, bridge, tokens, head, internal_batch_size=size)
        peak = common.peak_bytes(run)
        rows.append({"rows at once": size, "lens_mix MB": peak / 1e6})
    peak = common.peak_bytes(lambda: released_schedule(plain, tokens, head))
    rows.append({"rows at once": 20, "released MB": peak / 1e6})
    return rows


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    print(common.machine())
    row = speed(options.layers, options.positions, options.repeats)
    print(common.markdown_table([row]))
    print(common.markdown_table([against_captum(options.layers, options.positions, options.repeats)]))
    print(common.markdown_table(memory(min(options.layers, 4), options.positions)))


if __name__ == "__main__":
    main()
