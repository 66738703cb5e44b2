"""Choose fonts for the characters of a text, among the fonts that are installed.

This file imports matplotlib, so other files must import it inside functions only.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import unicodedata
import warnings
from collections.abc import Iterable, Iterator

import regex
from matplotlib import font_manager, rcParams

# The fonts to try first, by script: the same Chinese character has another shape in Japan and in Korea. Other
# installed fonts come after these, so an unknown font is found too.
_JAPANESE = ("Noto Sans CJK JP", "Noto Sans JP", "Hiragino Sans", "Yu Gothic", "IPAexGothic", "TakaoGothic")
_KOREAN = ("Noto Sans CJK KR", "Noto Sans KR", "Apple SD Gothic Neo", "Malgun Gothic", "NanumGothic")
_CHINESE = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "PingFang SC", "Microsoft YaHei"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback"),
)
_OTHERS = (
    *("Noto Sans Arabic", "Noto Sans Devanagari", "Noto Sans Thai", "Noto Sans", "Arial Unicode MS"),
    *("Noto Emoji", "Symbola", "Segoe UI Symbol", "Segoe UI Emoji", "Unifont"),
)
# matplotlib cannot draw colored emoji, and the others of these fonts have a box for every character.
_UNUSABLE = regex.compile(r"Color ?Emoji|Apple Emoji|Last ?Resort|Adobe Blank|\.LastResort")
_IS_JAPANESE = regex.compile(r"[\p{Hiragana}\p{Katakana}]")
_IS_KOREAN = regex.compile(r"\p{Hangul}")

# Joiners, marks of direction and selectors of a variant change other characters, and are not drawn.
_IS_INVISIBLE = regex.compile(r"\p{Cf}|[\uFE00-\uFE0F]")
_MOST_NUMBERS = 2  # how many numbers are written for neighboring characters without a font

_warned: set[str] = set()


def list_families(texts: Iterable[str]) -> list[str]:
    """Return the font families that together have every character of the texts, as far as installed fonts do.

    The first families are those of matplotlib's settings (`rcParams["font.family"]`) and its own DejaVu Sans.
    """
    characters = "".join(sorted({*"".join(texts)}))
    if characters.isascii():
        return _base_families()
    found = (_find_family(character, _order_scripts(characters)) for character in characters)
    return list(dict.fromkeys([*_base_families(), *(family for family in found if family)]))


def make_readable(text: str) -> str:
    """Return the text with a number, such as U+4E2D, for each character that no installed font has.

    Of more than two such characters in a row, two have their numbers, and … is for the others.
    The first time that a script has no font, a warning says what to install.
    """
    if text.isascii():
        return text
    order = _order_scripts(text)
    missing = [character for character in dict.fromkeys(text) if _find_family(character, order) is None]
    for character in missing:
        _warn_once(character)
    shown = []
    for is_missing, run in itertools.groupby(text, missing.__contains__):
        characters = list(run)
        if is_missing:
            shown += [f"U+{ord(character):04X}" for character in characters[:_MOST_NUMBERS]]
            shown += ["…"] if len(characters) > _MOST_NUMBERS else []
        else:
            shown += characters
    return "".join(shown)


def _base_families() -> list[str]:
    return list(dict.fromkeys([*rcParams["font.family"], "DejaVu Sans"]))


def _order_scripts(text: str) -> tuple[str, ...]:
    """Return the preferred families, those of the text's language first."""
    if _IS_JAPANESE.search(text):
        return (*_JAPANESE, *_CHINESE, *_KOREAN, *_OTHERS)
    if _IS_KOREAN.search(text):
        return (*_KOREAN, *_CHINESE, *_JAPANESE, *_OTHERS)
    return (*_CHINESE, *_JAPANESE, *_KOREAN, *_OTHERS)


def _find_family(character: str, preferred: tuple[str, ...]) -> str | None:
    """Return a family that has the character; None if no installed font has it."""
    if character.isascii() or _IS_INVISIBLE.match(character):
        return _base_families()[0]
    base = tuple(_base_families())
    if (family := _search(character, base, preferred)) is None and _add_new_fonts():
        _search.cache_clear()
        family = _search(character, base, preferred)
    return family


@functools.cache
def _search(character: str, base: tuple[str, ...], preferred: tuple[str, ...]) -> str | None:
    for family in base:
        file = font_manager.findfont(font_manager.FontProperties(family=[family]))
        if _has_glyph(file, character):
            return family
    return next((family for family, file in _list_fonts(preferred) if _has_glyph(file, character)), None)


def _list_fonts(preferred: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Return the upright fonts that matplotlib finds, with their files: first the preferred, then by name."""
    rank = {name: index for index, name in enumerate(preferred)}
    usable = (
        (font.name, font.fname)
        for font in font_manager.fontManager.ttflist
        if font.style == "normal" and not _UNUSABLE.search(font.name)
    )
    yield from sorted(
        set(usable), key=lambda font: (rank.get(font[0], len(rank)), "Sans" not in font[0], font)
    )


def _has_glyph(file: str, character: str) -> bool:
    # A file of the cache may have been deleted or be broken.
    with contextlib.suppress(OSError, RuntimeError):
        return bool(font_manager.get_font(file).get_char_index(ord(character)))
    return False


def _add_new_fonts() -> bool:
    """Add the fonts that were installed after matplotlib wrote its list; return whether there are any.

    matplotlib searches the folders of fonts only once, and keeps the list in its cache.
    """
    known = {font.fname for font in font_manager.fontManager.ttflist} | _tried
    new = [file for file in font_manager.findSystemFonts() if file not in known]
    _tried.update(new)
    for file in new:
        # matplotlib cannot read fonts of colored bitmaps, among others.
        with contextlib.suppress(Exception):
            font_manager.fontManager.addfont(file)
    return bool(new)


_tried: set[str] = set()


def _warn_once(character: str) -> None:
    """Warn that no font has the character, once for its script."""
    # The first word of a letter's name is its script: "CJK UNIFIED IDEOGRAPH-4E2D", "DEVANAGARI LETTER NA".
    name = unicodedata.name(character, "OTHER")
    script = "emoji or signs" if unicodedata.category(character)[0] == "S" else name.split(" ")[0]
    if script in _warned:
        return
    _warned.add(script)
    warnings.warn(
        f"No installed font has {character} (U+{ord(character):04X}), so figures show its number. Install a "
        f"font with {script}, such as one of Noto; it is then found without a restart.",
        stacklevel=2,
    )
