"""Attention flow on a real model: 30 layers, 40 tokens, exact; the way that information takes; single heads.

    python demos/flow.py                       SmolLM2-135M (downloaded once, 93 MB)
    python demos/flow.py --prompt "…"          another prompt, of any length

Prints the sources of the last position by flow and by rollout, how far flow degenerates, and the heads that
always look to one place; draws one row of bars per method, and the information-flow graphs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import models

import lens_mix as lm
from lens_mix.graphs import information_flow_graph, save_graph
from lens_mix.statistics import attention_statistics
from lens_mix.view import information_flow, token_bars
from lens_mix.view.labels import make_visible

OUTPUTS = Path(__file__).resolve().parent.parent / "outputs"
PROMPT = (
    "My grandmother was born in Italy. She left the country with her two sisters and her three children "
    "after the war, but all her life she cooked the food of her home and sang to us in"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a model's hub name or folder; default: SmolLM2-135M")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--outputs", type=Path, default=OUTPUTS, help="folder of the pictures")
    options = parser.parse_args()
    model = models.load(options.model) if options.model else models.smollm2()
    options.outputs.mkdir(parents=True, exist_ok=True)
    for path in explain(model, options.prompt, options.outputs):
        print(f"  {path}")


def set_default_row(model: Any, prompt: str, folder: Path) -> list[Path]:
    """Maps one prompt, prints what flow says of it, and returns the files written to `folder`."""
    heads = lm.run(model, prompt, lm.AttentionWeights(per_head=True))
    maps = {"attention": heads.merge_heads(), "value zeroing": lm.run(model, prompt, "value_zeroing")}
    layers, tokens = len(heads.layer_labels), heads.tokens
    print(f"{prompt!r}\n{layers} layers, {len(tokens)} tokens\n")
    rows = {}
    for name, mixing_map in maps.items():
        rows[f"{name}, flow"] = timed_flow(name, mixing_map)
        rows[f"{name}, flow, receptive field"] = lm.flow(
            mixing_map, layer=-1, queries=-1, receptive_field=True
        )
        rows[f"{name}, rollout, receptive field"] = lm.rollout(mixing_map, receptive_field=True)
    print_sources(rows)
    print_heads(heads)
    return draw(maps, rows, tokens, folder)


def timed_flow(name: str, mixing_map: lm.MixingMap) -> lm.MixingMap:
    start = time.perf_counter()
    found = lm.flow(mixing_map, layer=-1, progress=True)
    seconds = time.perf_counter() - start
    pairs = int(found.visible().sum())
    print(f"{name}: flow of {pairs} pairs through all layers in {seconds:.2f} s")
    share = found.provenance["aggregation"]["first_layer_share"][0]
    if share is not None:
        print(f"  {100 * share:.1f} % of them are what the first layer alone allows")
    return found


def print_sources(rows: dict[str, lm.MixingMap], count: int = 5) -> None:
    width = max(len(name) for name in rows)
    print(f"\n{'the last position took':<{width}}  from (share)")
    for name, row in rows.items():
        cells = (f"{make_visible(source.token)} {source.score:.3f}" for source in row.top(count))
        print(f"{name:<{width}}  " + "  ".join(f"{cell:<18}" for cell in cells).rstrip())


def print_heads(heads: lm.MixingMap, count: int = 8) -> None:
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
    title = f"What went into the last position, “{make_visible(tokens[-1])}”"
    paths = [folder / "flow_sources.png"]
    token_bars(rows, tokens, title=title).savefig(paths[0])
    print("\nWritten:")
    for name, mixing_map in maps.items():
        # Without the first token, on which most heads rest.
        graph = information_flow_graph(mixing_map, drop_bos=True)
        paths.append(folder / f"flow_graph_{name.replace(' ', '_')}.png")
        information_flow(graph, title=f"{name}: the way to the last position").savefig(paths[-1])
        paths.append(paths[-1].with_suffix(".graphml"))
        save_graph(graph, paths[-1])
    return paths


if __name__ == "__main__":
    main()
