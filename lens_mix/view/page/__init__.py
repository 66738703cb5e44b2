"""Make one self-contained HTML page of maps, which needs no server, no network and no library."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import importlib.resources
import json
import os
import tempfile
import uuid
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lens_mix.arguments import check_file_path, check_instance
from lens_mix.files import replacing
from lens_mix.maps import MixingMap
from lens_mix.maps.exchange import full_name
from lens_mix.measured import best_of_methods
from lens_mix.version import __version__
from lens_mix.view.page.data import Numbers, pack
from lens_mix.view.page.pictures import pack_pictures
from lens_mix.view.page.trees import Graphs, pack_trees

MapsOfPage = MixingMap | Mapping[str, MixingMap] | Sequence[MixingMap | Mapping[str, MixingMap]]

# These files are joined to one script in this order. The last one starts it, so it must come last.
_SCRIPTS = (
    "common.js",
    "numbers.js",
    "drawing.js",
    "picture.js",
    "answer.js",
    "layers.js",
    "maps.js",
    "graphs.js",
    "export.js",
    "page.js",
)


@dataclasses.dataclass(frozen=True)
class Page:
    """One page of maps or of a trace; `save` writes it, and a notebook shows it as the result of a cell.

    Attributes:
        html: The whole file.
        title: What the page contains, as the title of its frame in a notebook.
    """

    html: str
    title: str = "maps of a prompt"

    def __repr__(self) -> str:
        return f"Page({len(self.html) / 1e6:.1f} MB of HTML; .save('page.html') writes it)"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file, and return its path; an old file is replaced only once the new one is complete.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: The path is that of a folder.
            OSError: The file cannot be written.
        """
        checked = Path(check_file_path("path", path, write=True))
        with replacing(checked) as temporary:
            Path(temporary).write_text(self.html, encoding="utf-8")
        return checked

    def open(self) -> Path:
        """Write the file to a temporary folder, open it in the browser, and return its path.

        If no browser can be started, the file is there nevertheless, and its path is returned.

        Raises:
            OSError: The file cannot be written.
        """
        path = self.save(Path(tempfile.mkdtemp(prefix="lens-mix-")) / "page.html")
        webbrowser.open(path.as_uri())
        return path

    def _repr_html_(self) -> str:
        """Return a frame that contains the page, and grows to its height."""
        # A notebook may show a page twice, so each frame has its own name.
        name = f"lens-mix-{uuid.uuid4().hex[:12]}"
        return (
            f'<iframe id="{name}" title="{self.title}" srcdoc="{html.escape(self.html)}" '
            'sandbox="allow-scripts allow-downloads" allow="fullscreen" '
            'style="width:100%;height:640px;border:0"></iframe>'
            '<script>addEventListener("message",e=>{'
            f'const f=document.getElementById("{name}");if(f&&e.source===f.contentWindow&&e.data&&'
            "e.data.lensMixHeight)f.style.height=Math.min(e.data.lensMixHeight,2000)+'px'})</script>"
        )


def page(
    maps: MapsOfPage,
    path: str | os.PathLike[str] | None = None,
    *,
    trees: Graphs | Sequence[Graphs] | None = None,
    picture: Any = None,
) -> Page:
    """Make one HTML file that shows what the model predicts, and which tokens that came from by each map.

        >>> maps = lm.run(model, "The Eiffel Tower is in the city of", ["attention", "value_zeroing"])
        >>> lm.page(maps, "page.html")

    It opens on the prediction, the text colored by the recommended input map, and the layer maps of one
    position side by side. Other views show all positions, the flow through the layers, the agreement of the
    maps, and trees. The file needs no server, no network and no library.

    It contains the numbers of the maps as float16. A map with more than 400,000 numbers has one byte for
    each, and the page shows the largest error.

    Args:
        maps: A map; several of one prompt, as `lm.run` returns them; or a list with one of these per prompt.
        path: The file to write; None: no file is written.
        trees: Graphs of `attribution_tree` or `lens_mix.graphs`: one, several by name, or a list with one of
            these per prompt; {}: none. None: for each map that has all rows, the attribution tree (of
            `attention_attribution`) or the routes (of `information_flow_routes`) to the explained position
            (`MixingMap.default_query_position`). The page computes these again for the token that is clicked.
            For a graph with more than 4,000 edges the page contains the largest ones, and says so.
        picture: For maps with a grid: the picture below a row, as in `lens_mix.view.show_picture`, or a list
            with one per prompt. None or True: what the model read. False: none. A page of sound shows the
            sound that the model read, and takes no picture.

    Returns:
        The page; a notebook shows it as the result of a cell.

    Raises:
        TypeError: `maps` contains something else than maps, or `trees` something else than networkx graphs.
        ValueError: No map at all; a folder that does not exist; trees for another number of prompts, or
            without levels, tokens and weights; a picture for maps without a grid or for sound.
        OSError: The file cannot be written.
    """
    prompts = [_label_maps(entry) for entry in _list_prompts(maps)]
    best = best_of_methods()
    scored = next(iter(best.values()))
    numbers = Numbers()
    data = {
        "version": __version__,
        "scores": {name: fact.value for name, fact in best.items()},
        "scored": f"{scored.score}; {scored.model}, {scored.n} {scored.cases}",
        "prompts": [[pack(m, label, numbers) for label, m in labeled.items()] for labeled in prompts],
        "trees": pack_trees(prompts, trees),
        **pack_pictures(prompts, picture),
    }
    made = Page(make_document(data, numbers, "page.html", ("page.css",), _SCRIPTS))
    if path is not None:
        made.save(path)
    return made


def _list_prompts(maps: MapsOfPage) -> list[MixingMap | Mapping[str, MixingMap]]:
    if isinstance(maps, (MixingMap, Mapping)):
        return [maps]
    check_instance(
        "maps", maps, Sequence, "a MixingMap, several by name, or a list with one of these per prompt"
    )
    if not maps:
        raise ValueError("maps: expected at least one map, got none")
    return list(maps)


def _label_maps(entry: MixingMap | Mapping[str, Any]) -> dict[str, MixingMap]:
    if isinstance(entry, MixingMap):
        return {full_name(entry): entry}
    check_instance("maps", entry, Mapping, "a MixingMap or a dict of them per prompt")
    if not entry:
        raise ValueError("maps: expected at least one map, got an empty dict")
    return {str(label): check_instance("maps", m, MixingMap, "MixingMaps") for label, m in entry.items()}


def make_document(
    data: Mapping[str, Any], numbers: Numbers, template: str, styles: Sequence[str], scripts: Sequence[str]
) -> str:
    """Return an HTML file that contains everything it needs and runs no other script.

    Args:
        data: What the scripts read, as values that JSON can represent.
        numbers: The stored numbers.
        template: The name of the file that contains %%DATA%% and the like.
        styles: The names of the style sheets, which are joined in this order.
        scripts: The names of the scripts, which are joined in this order.
    """
    files = importlib.resources.files(__package__)
    style, script = (
        "\n".join((files / name).read_text(encoding="utf-8") for name in names) for names in (styles, scripts)
    )
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    first, late = numbers.texts()
    contents = {
        "POLICY": policy,
        "STYLE": style,
        "SCRIPT": script,
        "DATA": _encode_json(data),
        "NUMBERS": first,
        "LATER": late,
    }
    # The template is split before anything is inserted, so that a token such as "%%DATA%%" is not replaced.
    text = (files / template).read_text(encoding="utf-8")
    return "".join(contents.get(piece, piece) for piece in text.split("%%"))


def digest(text: str) -> str:
    """Return the hash of a script or a style, as a Content-Security-Policy contains it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _encode_json(data: Mapping[str, Any]) -> str:
    """Return JSON that contains no markup; it is ASCII, so that no lone surrogate breaks the file."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
