"""Test the plots of the evidence pages: equal to their records, with a baseline, and used by a page."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.make import plots
from tests.source_tree import ROOT

EVIDENCE = sorted((ROOT / "docs" / "evidence").glob("*.md"))
# An image of a page: its alternative text and its name.
_IMAGE = re.compile(r"^!\[([^\]]*)\]\(\.\./images/evidence/(\w+)\.svg\)$", re.MULTILINE)
DECLARED = {
    "axis": "score",
    "better": "right",
    "scale": "linear",
    "panel": [
        {
            "title": "A model",
            "rows": [["decompx", "smollm2-importance: decompx"]],
            "baselines": [["position alone", 0.0]],
        }
    ],
}


def test_every_plot_is_as_its_record_says() -> None:
    drawn = plots.draw_all()
    assert {path.name for path in drawn} == {path.name for path in plots.DRAWN.glob("*.svg")}
    for path, text in drawn.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m docs.make.plots"


@pytest.mark.parametrize("page", EVIDENCE, ids=lambda page: page.stem)
def test_an_evidence_page_opens_with_a_plot(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    opening, *sections = text.split("\n## ")
    # The overview has a plot for each question instead.
    places = sections[:-1] if page.stem == "index" else [opening]
    assert all(_IMAGE.search(place) for place in places), f"{page.name}: expected a plot in {places}"


def test_every_plot_is_on_a_page_and_is_described() -> None:
    shown: dict[str, str] = {}
    for page in EVIDENCE:
        shown |= {name: alt for alt, name in _IMAGE.findall(page.read_text(encoding="utf-8"))}
    assert set(shown) == {path.stem for path in plots.DECLARED.glob("*.toml")}
    assert [name for name, alt in shown.items() if len(alt.split()) < 8] == []


def test_a_plot_shows_the_recorded_figure_its_interval_and_its_cases() -> None:
    (dot, baseline) = plots.read_dots(DECLARED["panel"][0])
    row = tomllib.loads('value = "0.42 [0.35, 0.49]"')["value"]
    assert dot.text == row
    assert (dot.value, dot.ends, dot.n) == (0.42, (0.35, 0.49), 40)
    assert (baseline.ends, baseline.n, baseline.text) == (None, None, "by definition")
    drawing = ElementTree.fromstring(plots.draw(DECLARED))
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"A model, n = 40", "decompx", "position alone", row, "score (better →)"} <= set(texts)
    marks = {element.get("class"): element for element in drawing.iter() if element.get("class")}
    whisker = marks["whisker method"]
    low, high = float(whisker.get("x1")), float(whisker.get("x2"))
    # The interval is symmetric, so that its dot is in the middle.
    assert float(next(drawing.iter("{http://www.w3.org/2000/svg}circle")).get("cx")) == pytest.approx(
        (low + high) / 2, abs=0.2
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"baselines": []}, "expected at least one entry in baselines"),
        ({"rows": [["a" * 40, 1.0]]}, "expected at most 32 characters"),
        ({"rows": [["decompx", "smollm2-importance: nobody"]]}, "expected a row 'nobody'"),
    ],
)
def test_a_wrong_declaration_is_an_error(change: dict[str, list[object]], said: str) -> None:
    with pytest.raises((LookupError, ValueError), match=said):
        plots.read_dots(DECLARED["panel"][0] | change)


def test_a_logarithmic_axis_keeps_ratios() -> None:
    dots = [plots.Dot(str(value), "baseline", value, None, "", None) for value in (1.0, 10.0, 100.0)]
    places = [plots._Axis.around(dots, is_log=True).place(dot.value) for dot in dots]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)


AGAINST_COUNTS = DECLARED | {
    "across": "passes",
    "panel": [
        {
            "title": "A model",
            "rows": [
                ["one", "smollm2-importance: decompx", 1],
                ["another", "smollm2-importance: decompx", 1],
            ],
            "rivals": [["a third one", 0.42, 1], ["far", 0.4, 64]],
            "baselines": [["position alone", 0.0, 0]],
        }
    ],
}


def test_dots_with_the_same_count_are_side_by_side() -> None:
    drawing = ElementTree.fromstring(plots.draw(AGAINST_COUNTS))
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"one", "another", "far", "score (better ↑)", "passes (← better)", "0", "50"} <= set(texts)
    # The last circle is that of the legend.
    *circles, _ = drawing.iter("{http://www.w3.org/2000/svg}circle")
    places = [float(circle.get("cx")) for circle in circles]
    assert places[1] - places[0] == plots._BESIDE
    assert len({circle.get("cy") for circle in circles}) == 1


def test_no_label_covers_a_dot_or_another_label() -> None:
    area = plots._Box(0, 0, 688, 320)
    taken = [plots._Box(x - 8, 42, x + 8, 58) for x in (100, 115, 130)]
    boxes = []
    for x in (100, 115, 130):
        box = plots._find_room(x, 50, 120, [*taken, *boxes], area)
        boxes.append(box)
    pairs = [(a, b) for i, a in enumerate(boxes) for b in [*taken, *boxes[:i]]]
    assert not any(a.meets(b) for a, b in pairs)
    with pytest.raises(ValueError, match="expected room for every label"):
        plots._find_room(100, 50, 120, [area], area)


def test_counts_have_0_on_their_axis_and_grow_by_ratios() -> None:
    axis = plots._Axis.of_counts([0, 99])
    places = [axis.place(1 + count) for count in (0, 9, 99)]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)
    assert [tick - 1 for tick in axis.ticks] == [0, 1, 2, 5, 10, 20, 50]
