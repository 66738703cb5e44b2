"""Test that every script is drawn with a font that has it, or readable numbers, and never with boxes."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import font_manager

from lens_mix.view import fonts, layer_maps, show_position, token_bars
from lens_mix.view.fonts import list_families, make_readable
from tests.random_maps import map_of
from tests.view.test_figures import heat_maps, tick_labels

# DejaVu Sans has none of these: Chinese, Japanese, Korean, Devanagari, an emoji.
SCRIPTS = {"Han": "我", "Kana": "の", "Hangul": "한", "Devanagari": "न", "Emoji": "\U0001f680"}


def make_font(folder: Path, family: str, characters: str) -> Path:
    """Write a font with a square for each character."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    pen = TTGlyphPen(None)
    pen.moveTo((0, 0)), pen.lineTo((800, 0)), pen.lineTo((800, 800)), pen.closePath()
    names = [".notdef", *(f"uni{ord(character):05X}" for character in characters)]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(c): name for c, name in zip(characters, names[1:], strict=True)})
    builder.setupGlyf(dict.fromkeys(names, pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (900, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2(sTypoAscender=800)
    builder.setupPost()
    path = folder / f"{family.replace(' ', '')}.ttf"
    builder.save(path)
    return path


@pytest.fixture(autouse=True)
def only_dejavu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a list of fonts with DejaVu alone, and forget what other tests found."""
    known = [font for font in font_manager.fontManager.ttflist if font.name == "DejaVu Sans"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", known)
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    monkeypatch.setattr(fonts, "_tried", set())
    monkeypatch.setattr(fonts, "_warned", set())
    fonts._search.cache_clear()
    yield
    fonts._search.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, *files: Path) -> None:
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(file) for file in files])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_font_that_was_installed_after_the_list_was_written_is_found(script, monkeypatch, tmp_path) -> None:
    character = SCRIPTS[script]
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    install(monkeypatch, tmp_path / "broken.ttf", make_font(tmp_path, f"Tiny {script}", character))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list_families([f"ab{character}"])[-1] == f"Tiny {script}"
        assert make_readable(f"ab{character}") == f"ab{character}"
        figure = layer_maps(map_of().replace(tokens=[character, *"bcdef"]), layer=0)
        figure._repr_png_()
    label = heat_maps(figure)[0].get_xticklabels()[0]
    assert label.get_text() == character
    assert f"Tiny {script}" in label.get_fontfamily()


def test_the_language_of_a_text_decides_between_fonts_with_the_same_character(monkeypatch, tmp_path) -> None:
    families = ("Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans CJK SC", "An Unknown Font")
    install(monkeypatch, *(make_font(tmp_path, family, "日の한") for family in families))
    assert list_families(["日"])[-1] == "Noto Sans CJK SC"
    assert list_families(["日", "の"])[-1] == "Noto Sans CJK JP"
    assert list_families(["日", "한"])[-1] == "Noto Sans CJK KR"


def test_an_unknown_font_is_better_than_none_and_a_font_of_boxes_is_not(monkeypatch, tmp_path) -> None:
    boxes = [make_font(tmp_path, family, "日") for family in ("LastResort", "Noto Color Emoji")]
    install(monkeypatch, *boxes)
    assert make_readable("日") == "U+65E5"
    install(monkeypatch, *boxes, make_font(tmp_path, "An Unknown Font", "日"))
    assert make_readable("日") == "日"
    assert list_families(["日"])[-1] == "An Unknown Font"


def test_without_a_font_there_are_numbers_and_one_warning(tmp_path: Any) -> None:
    tokens = ["<s>", "我", "喜欢", "日本", "\U0001f680", "été"]
    m = map_of().replace(tokens=tokens)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        first = layer_maps(m, title="日本")
        first.savefig(tmp_path / "figure.png")
    messages = [str(warning.message) for warning in seen]
    assert len(messages) == 2
    assert messages[0].startswith(
        "No installed font has 我 (U+6211), so figures show its number. Install a font"
    )
    assert "a font with emoji or signs" in messages[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in (first, token_bars({"été": torch.rand(6)}, tokens), show_position(m, as_numbers=False)):
            figure.savefig(tmp_path / "figure.png")
            labels = tick_labels(
                next(axes for axes in reversed(figure.axes) if tick_labels(axes.xaxis)).xaxis
            )
            assert {"<s>", "U+6211", "U+559CU+6B22", "U+1F680", "été"} <= set(labels)


def test_the_font_of_the_users_settings_comes_first(monkeypatch) -> None:
    monkeypatch.setitem(fonts.rcParams, "font.family", ["serif"])
    assert list_families(["abc"]) == ["serif", "DejaVu Sans"]


@pytest.mark.slow
def test_matplotlibs_stale_cache(tmp_path: Path) -> None:
    """Install a font between two programs; the second one has the list of fonts of the first."""
    environment = {**os.environ, "MPLCONFIGDIR": str(tmp_path / "settings"), "XDG_DATA_HOME": str(tmp_path)}
    (tmp_path / "fonts").mkdir()
    run = {"check": True, "env": environment, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], **run)
    assert list((tmp_path / "settings").glob("fontlist*.json"))
    make_font(tmp_path / "fonts", "Tiny Han", "我")
    code = (
        "import matplotlib.font_manager as fonts\n"
        "assert 'Tiny Han' not in {font.name for font in fonts.fontManager.ttflist}\n"
        "from lens_mix.view.fonts import list_families\n"
        "print(list_families(['我']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], **run)
    assert "Tiny Han" in done.stdout
