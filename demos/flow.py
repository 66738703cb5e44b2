"""Compute exact attention flow on a real model: 30 layers, 40 tokens, and heads with a fixed offset.

    python demos/flow.py                       SmolLM2-135M (downloaded once, 93 MB)
    python demos/flow.py --prompt "…"          another prompt, of any length

The program prints the sources of the last position by flow and by rollout, how much of the flow is limited by
the first layer alone, and the heads that attend to one relative position. It draws one row of bars per
method, and the information-flow graphs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import models

import lens_mix as lm
from lens_mix.experiments import attention_statistics
from lens_mix.graphs import information_flow_graph, save_graph
from lens_mix.view import information_flow, token_bars
from lens_mix.view.labels import make_visible

OUTPUTS = Path(__file__).resolve().parent.parent / "outputs"
PROMPT = (
    "My grandmother was born in Italy. She left the country with her two sisters and her three children "
    "after the war, but all her life she cooked the food of her home and sang to us in"
)


def main() -> None:
    """Read the options, explain the prompt, and print the paths of the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a model's hub name or folder; default: SmolLM2-135M")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--outputs", type=Path, default=OUTPUTS, help="folder of the pictures")
    options = parser.parse_args()
    model = models.load(options.model) if options.model else models.smollm2()
    options.outputs.mkdir(parents=True, exist_ok=True)
    for path in map_prompt(model, options.prompt, options.outputs):
        print(f"  {path}")


def map_prompt(model: Any, prompt: str, folder: Path) -> list[Path]:
    """Map one prompt, print its flow and rollout, and return the files written to `folder`."""
    heads = lm.run(model, prompt, lm.methods.AttentionWeights(per_head=True))
    maps = {"attention": heads.merge_heads(), "value zeroing": lm.run(model, prompt, "value_zeroing")}
    layers, tokens = len(heads.layer_labels), heads.tokens
    print(f"{prompt!r}\n{layers} layers, {len(tokens)} tokens\n")
    rows = {}
    for name, mixing_map in maps.items():
        rows[f"{name}, flow"] = compute_flow(name, mixing_map)
        rows[f"{name}, flow, receptive field"] = lm.flow(
            mixing_map, layer=-1, queries=-1, receptive_field=True
        )
        rows[f"{name}, rollout, receptive field"] = lm.rollout(mixing_map, receptive_field=True)
    print_sources(rows)
    print_heads(heads)
    return draw(maps, rows, tokens, folder)


def compute_flow(name: str, mixing_map: lm.MixingMap) -> lm.MixingMap:
    """Return the flow of a map, and print its time and how much the first layer limits."""
    start = time.perf_counter()
    found = lm.flow(mixing_map, layer=-1, progress=True)
    seconds = time.perf_counter() - start
    pairs = int(found.visible().sum())
    print(f"{name}: flow of {pairs} pairs through all layers in {seconds:.2f} s")
    share = found.provenance["aggregation"]["first_layer_share"][0]
    if share is not None:
        print(f"  {100 * share:.1f} % of them equal the flow that the first layer alone allows")
    return found


def print_sources(rows: dict[str, lm.MixingMap], count: int = 5) -> None:
    """Print the `count` largest sources of the last position, one line per map."""
    width = max(len(name) for name in rows)
    print(f"\n{'sources of the last position':<{width}}  token and share")
    for name, row in rows.items():
        cells = (f"{make_visible(source.token)} {source.score:.3f}" for source in row.top(count))
        print(f"{name:<{width}}  " + "  ".join(f"{cell:<18}" for cell in cells).rstrip())


def print_heads(heads: lm.MixingMap, count: int = 8) -> None:
    """Print the heads that attend to one relative position or to the first token."""
    found = attention_statistics(heads)
    total = found.entropy.numel()
    fixed, first = found.fixed_offset_heads(), found.group_heads("first")
    print(f"\n{len(fixed)} of {total} heads put more than half of their attention on one relative position:")
    for head in fixed[:count]:
        print(f"  layer {head.layer} head {head.head}: {100 * head.share:.0f} % on offset {head.offset:+d}")
    print(f"{len(first)} of {total} heads put more than half on the first token")


def draw(
    maps: dict[str, lm.MixingMap], rows: dict[str, lm.MixingMap], tokens: list[str], folder: Path
) -> list[Path]:
    """Draw the bars and the graphs, and return the paths of the files."""
    title = f"Sources of the last position, “{make_visible(tokens[-1])}”"
    paths = [folder / "flow_sources.png"]
    token_bars(rows, tokens, title=title).savefig(paths[0])
    print("\nWritten:")
    for name, mixing_map in maps.items():
        # The first token is dropped, because most heads attend to it and would hide the other edges.
        graph = information_flow_graph(mixing_map, drop_bos=True)
        paths.append(folder / f"flow_graph_{name.replace(' ', '_')}.png")
        information_flow(graph, title=f"{name}: paths to the last position").savefig(paths[-1])
        paths.append(paths[-1].with_suffix(".graphml"))
        save_graph(graph, paths[-1])
    return paths


if __name__ == "__main__":
    main()
