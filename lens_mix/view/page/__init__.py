"""One self-contained HTML page: no server, no network, no library."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import importlib.resources
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lens_mix.arguments import file_path, instance
from lens_mix.files import replacing
from lens_mix.maps import MixingMap
from lens_mix.maps.exchange import full_name
from lens_mix.measured import best_of_methods
from lens_mix.version import __version__
from lens_mix.view.page.data import pack
from lens_mix.view.page.trees import Graphs, trees_of

Maps = MixingMap | Mapping[str, MixingMap] | Sequence[MixingMap | Mapping[str, MixingMap]]

# One script, in this order: the last one starts it.
_SCRIPTS = ("numbers.js", "maps.js", "graphs.js", "export.js", "page.js")


@dataclasses.dataclass(frozen=True)
class Page:
    """A page about some maps. In a notebook it shows itself; `save` writes the file.

    Attributes:
        html: the whole file.
    """

    html: str

    def __repr__(self) -> str:
        return f"Page({len(self.html) / 1e6:.1f} MB of HTML; .save('page.html') writes it)"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file, whole or not at all: on a full disk an old file stays as it was.

        Raises:
            FileNotFoundError: the folder is not there. ValueError: the path is that of a folder.
            OSError: the file can't be written.
        """
        place = Path(file_path("path", path, write=True))
        with replacing(place) as beside:
            Path(beside).write_text(self.html, encoding="utf-8")
        return place

    def _repr_html_(self) -> str:
        """A frame that holds the page, and grows to its height."""
        # A page may be shown twice in a notebook: each frame has a name of its own.
        name = f"lens-mix-{uuid.uuid4().hex[:12]}"
        return (
            f'<iframe id="{name}" srcdoc="{html.escape(self.html)}" sandbox="allow-scripts allow-downloads" '
            'allow="fullscreen" style="width:100%;height:640px;border:0"></iframe>'
            '<script>addEventListener("message",e=>{'
            f'const f=document.getElementById("{name}");if(f&&e.source===f.contentWindow&&e.data&&'
            "e.data.lensMixHeight)f.style.height=Math.min(e.data.lensMixHeight,2000)+'px'})</script>"
        )


def page(
    maps: Maps, path: str | os.PathLike[str] | None = None, *, trees: Graphs | Sequence[Graphs] | None = None
) -> Page:
    """One HTML file in which maps can be looked through: text, grid, flow, methods side by side, and trees.

    It needs no server, no network and no library, and holds the numbers themselves: as float16, or one byte
    each where there are more than 400,000 (the largest error stands beside them).

    Args:
        maps: a map; several of one prompt, as `lm.run` returns them; or a list with one of these per prompt.
        path: also write the file there.
        trees: graphs of `attribution_tree` or `lens_mix.graphs`, one, several by name, or a list with one of
            these per prompt; {}: none. None: for each map that has all rows, the attribution tree of
            `attention_attribution` from the explained position (`MixingMap.default_query`; without one, from
            the token with the largest sum), and the routes of `information_flow_routes` to the row that is
            meant.
            Of a graph with more than 4,000 edges the largest are held, and the page says so.

    Returns:
        The page; the last expression of a notebook's cell shows it.

    Raises:
        TypeError: no maps; trees that are no networkx graphs. ValueError: no map at all; a folder that is not
            there; trees for another number of prompts, or without levels, tokens and weights.
    """
    prompts = [_labelled(one) for one in _by_prompt(maps)]
    best = best_of_methods()
    scored = next(iter(best.values()))
    data = {
        "version": __version__,
        "scores": {name: fact.value for name, fact in best.items()},
        "scored": f"{scored.score}; {scored.model}, {scored.n} {scored.cases}",
        "prompts": [[pack(m, label) for label, m in labelled.items()] for labelled in prompts],
        "trees": trees_of(prompts, trees),
    }
    made = Page(_document(data))
    if path is not None:
        made.save(path)
    return made


def _by_prompt(maps: Maps) -> list[MixingMap | Mapping[str, MixingMap]]:
    if isinstance(maps, (MixingMap, Mapping)):
        return [maps]
    instance("maps", maps, Sequence, "a MixingMap, several by name, or a list with one of these per prompt")
    if not maps:
        raise ValueError("maps: expected at least one map, got none")
    return list(maps)


def _labelled(one: MixingMap | Mapping[str, Any]) -> dict[str, MixingMap]:
    if isinstance(one, MixingMap):
        return {full_name(one): one}
    instance("maps", one, Mapping, "a MixingMap or a dict of them per prompt")
    if not one:
        raise ValueError("maps: expected at least one map, got an empty dict")
    return {str(label): instance("maps", m, MixingMap, "MixingMaps") for label, m in one.items()}


def _document(data: Mapping[str, Any]) -> str:
    files = importlib.resources.files(__package__)
    template, style = ((files / name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    script = "\n".join((files / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": _json(data)}
    # Each place once and in one go: what a token spells is never taken for a place.
    return "".join(parts.get(piece, piece) for piece in template.split("%%"))


def digest(text: str) -> str:
    """The source of a script or a style in a Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json(data: Mapping[str, Any]) -> str:
    """JSON that can't end the element it stands in; ASCII, so that no lone surrogate breaks the file."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
