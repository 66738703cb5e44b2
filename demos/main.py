"""Show which tokens a real model used for the last position, in numbers and pictures.

make demo                                                 SmolLM2-135M, the two prompts below
python demos/main.py --prompt "Once upon a time"          another prompt
python demos/main.py --model HuggingFaceTB/SmolLM2-360M   any model that TransformerLens loads
"""

from __future__ import annotations

import argparse
import itertools
import textwrap
import time
from pathlib import Path
from typing import Any

import models

import lens_mix as lm
from lens_mix.view import layer_maps, token_bars
from lens_mix.view.labels import make_visible

OUTPUTS = Path(__file__).resolve().parent.parent / "outputs"
PROMPTS = {
    "eiffel": "The Eiffel Tower is in the city of",
    # The prediction depends on "Italy", 29 tokens before the end: with Japan, Germany, Russia or France
    # instead, the same model predicts Japanese, German, Russian or French.
    "grandmother": "My grandmother was born in Italy. She left the country with her three children after the "
    "war, but all her life she cooked the food of her home and sang to us in",
}
METHODS = ["attention", "value_zeroing"]
ROLLOUTS: dict[str, dict[str, Any]] = {
    "rollout": {},
    "rollout, residual measured": {"residual": "measured"},
    "rollout, receptive field": {"receptive_field": True},
    "rollout, first token dropped": {"drop_bos": True},
    "rollout, first token dropped, receptive field": {"drop_bos": True, "receptive_field": True},
}


def main() -> None:
    """Map the prompts, draw the pictures, and write the page."""
    options = read_options()
    model = models.load(options.model) if options.model else models.demo_model()
    prompts = {"prompt": options.prompt} if options.prompt else PROMPTS
    pictures: list[Path] = []
    pages: list[dict[str, lm.MixingMap]] = []
    for name, prompt in prompts.items():
        drawn, maps = map_prompt(model, name, prompt, options.outputs)
        pictures += drawn
        # The last prompt is the longest, and the page should show it first.
        pages.insert(0, maps)
    print("\nPictures:")
    for picture in pictures:
        print(f"  {picture}")
    path = options.outputs / "page.html"
    lm.page(pages, path)
    print(f"\nThe maps as a page for the browser:\n  {path}")


def map_prompt(
    model: Any, name: str, prompt: str, folder: Path
) -> tuple[list[Path], dict[str, lm.MixingMap]]:
    """Map one prompt and print the sources of its last position; return the pictures and the page's maps."""
    start = time.perf_counter()
    maps = lm.run(model, prompt, [*METHODS, "alti"], residual_shares=True)
    seconds = time.perf_counter() - start
    layers = {method: maps[method] for method in METHODS}
    tokens = layers["attention"].tokens
    print(f"\n{prompt!r}\n  {len(tokens)} tokens, mapped in {seconds:.1f} s")
    print(f"  prediction {layers['attention'].explanation()}")
    recommended = lm.input_map(model, prompt)
    recommended_name = f"input map ({recommended.method.replace('_', ' ')})"
    rows = {recommended_name: recommended.normalized(), **compute_rows(layers)}
    print_sources(rows)
    print_largest_by_layer(layers)
    shown = {recommended_name: recommended, **maps}
    shown |= {row: mixing_map for row, mixing_map in rows.items() if row.endswith(("rollout", "measured"))}
    return draw(name, layers, {recommended_name: recommended, **maps}, rows, folder), shown


def draw(
    name: str,
    layers: dict[str, lm.MixingMap],
    at_last_position: dict[str, lm.MixingMap],
    rows: dict[str, lm.MixingMap],
    folder: Path,
) -> list[Path]:
    """Draw the last position in each layer below the recommended map, all layer maps, and bars of sources.

    Returns:
        The paths of the pictures.
    """
    tokens = layers["attention"].tokens
    last = f"“{make_visible(tokens[-1])}”"
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [folder / f"{name}_last_position.png"]
    lm.show_position(at_last_position).savefig(pictures[-1])
    for method, mixing_map in layers.items():
        title = f"{method.replace('_', ' ')}, every layer"
        pictures.append(folder / f"{name}_{method}_layers.png")
        layer_maps(mixing_map, title=title).savefig(pictures[-1])
    pictures.append(folder / f"{name}_sources.png")
    token_bars(rows, tokens, title=f"Sources of the last position, {last}").savefig(pictures[-1])
    return pictures


def compute_rows(layers: dict[str, lm.MixingMap]) -> dict[str, lm.MixingMap]:
    """Return the last layer and the rollouts of each method, to compare with the recommended map.

    The rows sum to 1.
    """
    rows = {}
    for method, mixing_map in layers.items():
        name = method.replace("_", " ")
        rows[f"{name}, last layer"] = mixing_map.normalized()
        for variant, options in ROLLOUTS.items():
            rows[f"{name} {variant}"] = lm.rollout(mixing_map, **options)
    return rows


def print_sources(rows: dict[str, lm.MixingMap], count: int = 5) -> None:
    """Print the `count` largest sources of the last position, one line per method and variant."""
    cells = {
        name: [f"{make_visible(source.token)} {source.score:.3f}" for source in row.top(count)]
        for name, row in rows.items()
    }
    first = max(len(name) for name in cells)
    width = max(len(cell) for line in cells.values() for cell in line)
    print(f"\n  {'sources of the last position':<{first}}  " + "token and share")
    for name, line in cells.items():
        print(f"  {name:<{first}}  " + "  ".join(f"{cell:<{width}}" for cell in line).rstrip())


def print_largest_by_layer(layers: dict[str, lm.MixingMap]) -> None:
    """Print the largest source of the last position in every layer, with one entry for equal neighbors."""
    print("\n  its largest source, layer by layer")
    for method, mixing_map in layers.items():
        sources = [(label, mixing_map.top(1, layer=label)[0]) for label in mixing_map.layer_labels]
        entries = []
        for (_, token), same in itertools.groupby(sources, lambda entry: (entry[1].position, entry[1].token)):
            labels = [label for label, _ in same]
            span = f"{labels[0]}" if len(labels) == 1 else f"{labels[0]}–{labels[-1]}"
            entries.append(f"{span}\xa0{make_visible(token)}")
        # A line must not break inside an entry, so its space is replaced by a no-break space.
        lines = textwrap.wrap("  ".join(entries), 90, break_long_words=False, break_on_hyphens=False)
        for heading, line in itertools.zip_longest([method.replace("_", " ")], lines, fillvalue=""):
            print(f"  {heading:<13}  {line}".replace("\xa0", " "))


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a model's hub name or folder; default: SmolLM2-135M")
    parser.add_argument("--prompt", help="one prompt instead of the two built-in ones")
    parser.add_argument("--outputs", type=Path, default=OUTPUTS, help="folder for the pictures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
