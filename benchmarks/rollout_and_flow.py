"""Measure what rollout and flow find on maps whose answer is known.

    PYTHONPATH=.:demos python -m benchmarks.rollout_and_flow

It takes about a minute, needs SmolLM2-135M for its last table, and writes results/rollout_and_flow.md.

The maps are attention over random logits. In some, every layer prefers one key, or attends to the first
token. A method finds the key if it has the largest share of the last row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import lens_mix as lm
from benchmarks.common import describe_machine, markdown_table
from benchmarks.flow import random_map
from lens_mix.evaluation import spearman

OUT = Path(__file__).parent / "results" / "rollout_and_flow.md"
LAYERS, TOKENS, TRIALS, FLOW_TRIALS = 12, 32, 50, 12
Row = dict[str, Any]


def causal_map(logits: Float[Tensor, "layer query key"]) -> lm.MixingMap:
    """Return the causal attention of logits."""
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    tokens = [f"t{position}" for position in range(logits.shape[-1])]
    return lm.MixingMap(logits.masked_fill(hidden, -torch.inf).softmax(-1), tokens, "attention", causal=True)


def make_logits(
    generator: torch.Generator, noise: float, gain: float = 0.0, sink: float = 0.0
) -> tuple[Float[Tensor, "layer query key"], int]:
    """Return random logits, and the key that every layer prefers by `gain`."""
    key = int(torch.randint(2, TOKENS - 1, (1,), generator=generator))
    logits = noise * torch.randn(LAYERS, TOKENS, TOKENS, generator=generator, dtype=torch.float64)
    logits[:, :, key] += gain
    logits[:, :, 0] += sink
    return logits, key


def last_row(mixing_map: lm.MixingMap, **options: Any) -> Float[Tensor, " key"]:
    """Return the last row of the rollout of all layers."""
    return lm.rollout(mixing_map, **options).scores[-1, -1]


def count_found(options: Row, **made: float) -> str:
    """Return in how many percent of the trials the rollout finds the preferred key."""
    generator = torch.Generator().manual_seed(0)
    dropped = 1 if options.get("drop_bos") else 0
    hits = 0
    for _ in range(TRIALS):
        logits, key = make_logits(generator, **made)
        hits += int(last_row(causal_map(logits), **options).argmax()) + dropped == key
    return f"{100 * hits / TRIALS:.0f}"


def even_attention() -> list[Row]:
    """Measure the rollout of maps that prefer no key."""
    rows = []
    for layers in (12, 24, 48):
        even = causal_map(torch.zeros(layers, TOKENS, TOKENS, dtype=torch.float64))
        plain, normalised = last_row(even), last_row(even, receptive_field=True)
        shares = [f"{row[0]:.3f}" for row in (plain, normalised)]
        rows.append({"layers": f"{layers} layers", "rollout": shares[0], "with receptive field": shares[1]})
    return rows


def preferred_key() -> list[Row]:
    """Count how often rollout finds the preferred key."""
    rows = []
    for noise, gain in ((0.5, 1.5), (1.0, 2.0), (1.0, 1.0)):
        for residual in (0.5, 0.0):
            rows.append(
                {
                    "maps": f"noise {noise:g}, gain {gain:g}, residual weight {residual:g}",
                    "rollout": count_found({"residual": residual}, noise=noise, gain=gain),
                    "with receptive field": count_found(
                        {"residual": residual, "receptive_field": True}, noise=noise, gain=gain
                    ),
                }
            )
    return rows


def preferred_key_beside_a_sink() -> list[Row]:
    """Count the same for maps that also attend to the first token."""
    forms: dict[str, Row] = {
        "rollout": {},
        "with receptive field": {"receptive_field": True},
        "first token dropped, with receptive field": {"receptive_field": True, "drop_bos": True},
    }
    return [
        {
            "maps": f"sink {sink:g}",
            **{name: count_found(form, noise=0.5, gain=1.5, sink=sink) for name, form in forms.items()},
        }
        for sink in (2.0, 4.0, 6.0)
    ]


def sink_alone() -> list[Row]:
    """Measure the normalised rollout of maps that attend to the first token and prefer no other key."""
    logits, _ = make_logits(torch.Generator().manual_seed(0), noise=0.5, sink=6.0)
    rows = []
    for residual in (0.5, 0.0):
        row = last_row(causal_map(logits), receptive_field=True, residual=residual)
        rows.append(
            {
                "maps": f"residual weight {residual:g}",
                "first token": f"{row[0]:.2f}",
                "last token": f"{row[-1]:.2f}",
            }
        )
    return rows


def preferred_key_by_flow() -> list[Row]:
    """Count how often flow finds the key, and correlate share and position of the other keys."""
    forms: dict[str, Callable[[lm.MixingMap], Tensor]] = {
        "flow": lambda one: lm.flow(one, layer=-1, queries=-1).scores[0, 0],
        "flow, with receptive field": lambda one: lm.flow(
            one, layer=-1, queries=-1, receptive_field=True
        ).scores[0, 0],
        "rollout, with receptive field": lambda one: last_row(one, receptive_field=True),
    }
    rows = []
    for gain in (1.5, 3.0):
        for name, form in forms.items():
            generator = torch.Generator().manual_seed(0)
            hits, slopes = 0, []
            for _ in range(FLOW_TRIALS):
                logits, key = make_logits(generator, noise=0.5, gain=gain)
                row = form(causal_map(logits))
                hits += int(row.argmax()) == key
                others = torch.tensor([position for position in range(TOKENS - 1) if position != key])
                slopes.append(spearman(row[others], others.double()))
            rows.append(
                {
                    "maps": f"{name}, gain {gain:g}",
                    "found": f"{hits}",
                    "n": FLOW_TRIALS,
                    "correlation with position": f"{sum(slopes) / len(slopes):.2f}",
                }
            )
    return rows


def pairs_at_the_bound() -> list[Row]:
    """Measure the share of pairs whose flow equals what the first layer alone allows, on random maps."""
    rows = []
    for mask, causal in (("all positions", False), ("causal", True)):
        for layers in (3, 4, 6, 12):
            found = lm.flow(random_map(layers, TOKENS, causal), layer=-1)
            rows.append({"maps": f"{mask}, {layers} layers", "pairs": _percent(found)})
    return rows


def pairs_at_the_bound_of_a_model() -> list[Row]:
    """Measure the same on SmolLM2-135M."""
    import flow as demo
    import models

    model = models.smollm2()
    rows = []
    for name in ("attention", "value_zeroing"):
        mixing_map = lm.run(model, demo.PROMPT, name)
        tokens = len(mixing_map.tokens)
        rows.append({"map": name, "pairs": _percent(lm.flow(mixing_map, layer=-1)), "tokens": tokens})
    return rows


def _percent(found: lm.MixingMap) -> str:
    return f"{100 * found.provenance['aggregation']['first_layer_share'][0]:.0f}"


_WORDS = (
    "Maps are softmax of normal numbers whose standard deviation is the noise; the gain, or the "
    "sink, is added to the logits of the preferred key, or of the first token, in every layer. "
    "A trial finds the key if it has the largest share of the last row. The correlation with "
    "position is the mean rank correlation of share and position among the other keys: −1 means "
    "that every earlier key has more. No flow can be larger than what leaves its key in the "
    "first layer; pairs at this bound do not depend on the layers above. With residual weight "
    "0, the share of a late key is close to a product of single entries, which noise can hide."
)
_SIZE = f"{LAYERS} causal layers of {TOKENS} tokens"
SECTIONS: dict[str, tuple[str, Callable[[], list[Row]]]] = {
    "Even attention": (
        f"Share of the first of {TOKENS} tokens in the last row, residual weight 0.5.",
        even_attention,
    ),
    "A preferred key, rollout": (
        f"{_SIZE}; in how many percent of {TRIALS} trials the key that every layer prefers is found.",
        preferred_key,
    ),
    "A preferred key and a sink": (
        "The same, with noise 0.5, gain 1.5, residual weight 0.5, and a sink on the first token; percent.",
        preferred_key_beside_a_sink,
    ),
    "A sink and no preferred key": ("Sink 6, with receptive field; shares of the last row.", sink_alone),
    "A preferred key, flow": (
        f"{_SIZE}, noise 0.5; in how many trials the key is found.",
        preferred_key_by_flow,
    ),
    "Pairs at the bound of the first layer, random maps": (
        f"{TOKENS} tokens, flow from the last layer; percent of the pairs.",
        pairs_at_the_bound,
    ),
    "Pairs at the bound of the first layer, SmolLM2": (
        "SmolLM2-135M-Instruct, 30 layers, the prompt of demos/flow.py; percent of the pairs.",
        pairs_at_the_bound_of_a_model,
    ),
}


def section(heading: str) -> str:
    """Return one section of the results."""
    note, measure = SECTIONS[heading]
    return f"## {heading}\n\n{note}\n\n{markdown_table(measure())}\n"


def main() -> None:
    """Write all sections."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    texts = [section(heading) for heading in SECTIONS]
    title = "# Rollout and flow where the answer is known\n\n"
    title += f"Written by `python -m benchmarks.rollout_and_flow`.\n\n{_WORDS}\n"
    seconds = time.perf_counter() - start
    text = "\n".join([title, f"Machine: {describe_machine()}; {seconds:.0f} s.\n", *texts])
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
