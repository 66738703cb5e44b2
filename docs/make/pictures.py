"""Record the pictures of the methods' pages and of the gallery: `python -m docs.make.pictures [NAME ...]`.

The names are those of methods, or "gallery". Each picture is the library's own figure of one prompt on
SmolLM2-135M-Instruct. git keeps the pictures, and in `seen.json` what those of the methods show, because it
takes the model to draw them.
"""

from __future__ import annotations

import io
import json
import sys
from typing import Any

from PIL import Image

import lens_mix as lm
from docs.make.markdown import DOCS

IMAGES = DOCS / "methods" / "images"
SEEN = IMAGES / "seen.json"
PROMPT = "My grandmother was born in Italy, so she sang to us in"  # of read_a_map.md
# At the width of a page, 690 pixels, the text is as large as the page's small text.
WIDTH, HEIGHT, ONE_ROW, DPI, COLORS = 6.4, 5.6, 1.75, 150, 256


def record(name: str, model: Any) -> None:
    """Draw the map of one method at the last position, and write down its strongest cells."""
    m = lm.run(model, PROMPT, name, queries=[-1])
    height = HEIGHT if len(m.layers) > 1 else ONE_ROW
    save(lm.show_position(m, figsize=(WIDTH, height)), IMAGES / f"{name}.png")
    seen = json.loads(SEEN.read_text(encoding="utf-8")) if SEEN.exists() else {}
    seen[name] = find_strongest(m)
    SEEN.write_text(json.dumps(dict(sorted(seen.items())), indent=1, ensure_ascii=False) + "\n")


def record_gallery(model: Any) -> None:
    """Draw the pictures of the gallery that are on no other page."""
    prompt = "The Eiffel Tower is in the city of"
    m, tokens = lm.run(model, prompt, "value_zeroing"), lm.input_map(model, prompt)
    save(m.show(), DOCS / "images" / "position.png")
    save(m.show(kind="layers", layers=[0, 1]), DOCS / "images" / "layers.png")
    save(lm.Maps({"input map": tokens, "value_zeroing": m}).show(), DOCS / "images" / "compare.png")
    save(tokens.show(title="next word"), DOCS / "images" / "text.png")
    tree = lm.attribution_tree(lm.run(model, prompt, "attention_attribution"), threshold=0.4)
    save(lm.view.information_flow(tree), DOCS / "images" / "tree.png")


def save(figure: Any, file: Path) -> None:
    """Write a figure in few colors, and rare ones such as the orange of a frame among them."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    picture = (
        Image.open(drawn)
        .convert("RGB")
        .quantize(COLORS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    picture.save(file, optimize=True)


def find_strongest(m: lm.MixingMap, count: int = 3) -> dict[str, Any]:
    """Return the number of layers that a figure has, and its darkest cells: layer and token.

    As in the figure, rows without negative scores sum to 1, and the first token and the position itself are
    left out.
    """
    scores = m.scores[:, -1, 1:-1] if (m.scores < 0).any() else m.normalized().scores[:, -1, 1:-1]
    darkest = scores.abs().flatten().argsort(descending=True)[:count].tolist()
    places = [divmod(index, scores.shape[1]) for index in darkest]
    cells = [[layer, m.tokens[key + 1], "−" if scores[layer, key] < 0 else "+"] for layer, key in places]
    return {"layers": len(scores), "cells": cells}


def main() -> None:
    """Record the pictures of all methods, or of those that the command line names."""
    from demos import models

    model = models.smollm2()
    for name in sys.argv[1:] or [*lm.METHODS, "gallery"]:
        if name == "gallery":
            record_gallery(model)
        else:
            record(name, model)
        print(name, flush=True)


if __name__ == "__main__":
    main()
