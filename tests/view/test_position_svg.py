"""Read the picture of a bare map in a notebook back, and look at it in a browser with strict rules."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
import time
from html import escape
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

import lens_mix as lm
from lens_mix.maps.explained import Explained
from lens_mix.view.colors import BLUES, SIGNED, color_step
from lens_mix.view.position import PositionView
from lens_mix.view.position_svg import draw_svg
from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401
from tests.random_maps import map_of, random_attention

SVG = "{http://www.w3.org/2000/svg}"
HIDDEN_TOKEN = ' </text><script>alert("1")</script>&'


def draw(m: lm.MixingMap, query: int | None = None) -> Any:
    return ElementTree.fromstring(draw_svg(PositionView.from_maps(m, query)))


def texts(picture: Any) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def read_cells(picture: Any) -> dict[tuple[int, int], str]:
    """Return the color of each cell (layer, column) from the paths; the later path covers the earlier."""
    cells = {}
    for path in picture.iter(f"{SVG}path"):
        for x, y, width, height in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)", path.get("d")):
            for row in range(int(y), int(y) + int(height)):
                for column in range(int(x), int(x) + int(width)):
                    cells[row, column] = path.get("fill")
    return cells


def read_image(html: str) -> str:
    (data,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    return base64.b64decode(data).decode()


@pytest.mark.parametrize("is_signed", [False, True])
def test_each_cell_has_the_color_of_its_share(is_signed: bool) -> None:
    scores = random_attention(layers=5, heads=None, size=9)
    scores = scores * torch.linspace(-1, 1, 9) if is_signed else scores
    m = map_of(scores)
    shares = (m if is_signed else m.normalized()).scores[:, -1, 1:-1]
    high = float(shares.abs().max())
    colors = SIGNED if is_signed else BLUES
    cells = read_cells(draw(m))
    assert len(cells) == shares.numel()
    for (layer, column), color in cells.items():
        assert color == colors[color_step(float(shares[layer, column]) / high, is_signed)]


def test_keys_that_one_layer_cannot_see_are_grey() -> None:
    mask = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    mask[0, 3, 1] = False
    m = map_of(torch.rand(2, 4, 4) * mask, causal=False, mask=mask)
    cells = read_cells(draw(m))
    assert [place for place, color in cells.items() if color == "#e9e9e9"] == [(0, 1)]


def test_labels_and_numbers() -> None:
    m = map_of()
    written = texts(draw(m))
    assert {"Attention", "layer", "first", "own", "·t1", "·t4", "0", "3"} <= set(written)
    shares = m.normalized().scores[:, -1]
    for key in (0, -1):
        assert {f"{100 * share:.0f}%" for share in shares[:, key].tolist()} <= set(written)
    assert not any(element.get("id") for element in draw(m).iter())


def test_a_map_with_one_layer_is_a_colored_text_with_the_prediction() -> None:
    m = map_of(random_attention(layers=1), kind="input", explained=[Explained(" next", 0.5)] * 6)
    picture = draw(m)
    assert texts(picture)[-7:] == ["t0", "t1", "t2", "t3", "t4", "t5", "next"]
    assert [box.get("stroke-dasharray") for box in picture.iter(f"{SVG}rect")][-1] == "4 3"


@pytest.mark.parametrize("layers", [1, 4])
def test_a_token_is_text_and_nothing_else(layers: int) -> None:
    tokens = [HIDDEN_TOKEN, "日本", "\n", "\ud83d", "<b>", "\x00"]
    m = map_of(random_attention(layers=layers), tokens=tokens, explained=[Explained(HIDDEN_TOKEN, 1.0)] * 6)
    html = m._repr_html_()
    assert "<script" not in html
    assert "script" not in {
        element.tag.removeprefix(SVG) for element in ElementTree.fromstring(read_image(html)).iter()
    }


def test_the_picture_is_small_and_fast() -> None:
    m = map_of(random_attention(layers=30, heads=None, size=36))
    assert len(m._repr_html_()) < 100_000
    big = map_of(random_attention(layers=30, heads=None, size=300))
    start = time.perf_counter()
    html = big._repr_html_()
    repr(big)
    assert time.perf_counter() - start < 0.3
    assert len(html) < 400_000


def test_the_picture_needs_no_matplotlib() -> None:
    code = (
        "import sys, torch; sys.modules['matplotlib'] = None\n"
        "import lens_mix as lm\n"
        "m = lm.MixingMap(scores=torch.eye(3)[None], tokens=list('abc'), causal=True)\n"
        "assert '<img' in m._repr_html_()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "m",
    [
        map_of(random_attention(heads=3)),
        map_of().select_queries([2]),
        map_of(causal=False, scores=random_attention(causal=False)),
        lm.MixingMap(scores=torch.rand(2, 3, 2), tokens=["a", "b", "c"], key_tokens=["x", "y"]),
        lm.MixingMap(scores=torch.zeros(2, 3, 3), tokens=["a", "b", "c"]),
        lm.MixingMap(scores=torch.ones(1, 1, 1), tokens=["a"], causal=True),
        lm.MixingMap(scores=torch.ones(2, 1, 1), tokens=["a"], causal=True),
        map_of(random_attention(layers=90)),
    ],
)
def test_every_map_has_a_picture(m: lm.MixingMap) -> None:
    ElementTree.fromstring(read_image(m._repr_html_()))


# The rules of a notebook in VS Code are the second; the first one is stricter than any of a notebook.
@NEEDS_CHROMIUM
@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "default-src 'none'; img-src data:",
        "default-src 'none'; img-src https: data:; style-src 'unsafe-inline'",
    ],
)
@pytest.mark.parametrize("theme", ["#ffffff", "#111111"])
def test_a_sandboxed_frame_with_a_strict_policy_shows_it(browser, tmp_path, policy, theme) -> None:
    pictures = [map_of(random_attention(layers=layers)) for layers in (4, 1)]
    body = "".join(m._repr_html_() for m in [*pictures, *pictures])
    inner = f'<meta http-equiv="Content-Security-Policy" content="{policy}">{body}'
    file = tmp_path / "notebook.html"
    # A frame with `sandbox` runs no script; `allow-same-origin` lets the test read it.
    frame = f'<iframe sandbox="allow-same-origin" style="width:100%;height:800px" srcdoc="{escape(inner)}">'
    file.write_text(f'<body style="background:{theme}">{frame}', encoding="utf-8")
    browser.get_log("browser")
    browser.get(file.as_uri())
    browser.switch_to.frame(0)
    images = browser.find_elements("css selector", "img")
    assert len(images) == 4
    for image in images:
        assert int(image.get_property("naturalWidth")) > 300
        assert image.get_property("complete")
        assert image.get_attribute("alt").startswith("What position 5, ' t5', used.")
    assert [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]] == []
    # In both themes the picture has its own white ground, so its letters are dark on white.
    drawn = Image.open(io.BytesIO(images[0].screenshot_as_png)).convert("L")
    assert drawn.getpixel((drawn.width - 12, drawn.height // 2)) > 240
    assert drawn.getextrema()[0] < 80
    browser.switch_to.default_content()


@pytest.mark.parametrize("layers", [1, 2])
def test_noise_beside_the_first_token_is_not_colored_and_says_so(layers: int) -> None:
    row = torch.tensor([0.9985, 0.0005, 0.0005, 0.0003, 0.0002])
    m = lm.MixingMap(scores=row.expand(layers, 5, 5).tril(), tokens=list("abcde"), causal=True)
    image = read_image(m._repr_html_())
    assert "no other token has more than 0.05 %" in m._repr_html_().lower()
    scale = [float(number) for number in re.findall(r">([\d.]+) share of the row<", image)]
    assert scale == [1.0]
    dark = set(BLUES[3:])
    assert not dark & set(re.findall(r'<path fill="(#\w+)"', image))
