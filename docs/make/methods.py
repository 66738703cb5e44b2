"""Write the page of each method and their index, from the classes, methods.toml and the recorded tables.

`make stub` writes them to docs/methods, and git keeps them. The text is Markdown that GitHub shows too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import re
import textwrap
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

import lens_mix as lm
from benchmarks import facts
from docs.make import scores
from docs.make.markdown import DOCS
from lens_mix.method import Method
from lens_mix.registry import Description, describe, list_names

FOLDER = DOCS / "methods"
TEXTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("methods.toml").read_text(encoding="utf-8"))
# What docs/make/pictures.py recorded.
SEEN: dict[str, Any] = json.loads((FOLDER / "images" / "seen.json").read_text(encoding="utf-8"))

_SHAPES = {
    "block": "a map of each block, `[layer, query, key]`",
    "above": "a map of each block, `[layer, query, key]`",
    "below": "an input map after each block, from there down to the tokens, `[layer, query, key]`",
    "model": "one input map of the whole model, `[1, query, key]`",
}
_PARTS = ("encoder", "decoder", "cross", "joint")
_ENGINES = {"recorded": "read from the model's own pass", "algebra": "closed form", "hooks": "interventions"}
_FIGURE = re.compile(r"\{([^{}:]+: [^{}]+)\}")
_ARGUMENT = re.compile(r"^ {4}(\w+): (.+?)(?=^ {4}\w+: |\Z)", re.MULTILINE | re.DOTALL)


def write_pages(folder: Path = FOLDER) -> None:
    """Write the page of every method and their index, and delete the pages of methods that are gone."""
    pages = make_pages()
    folder.mkdir(parents=True, exist_ok=True)
    for page in folder.glob("*.md"):
        page.unlink()
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")


def make_pages() -> dict[str, str]:
    """Return the text of the page of every method and of their index, by its name in `docs/methods`."""
    pages = {f"{name}.md": _make_page(name, method) for name, method in lm.METHODS.items()}
    return {"index.md": _make_index(), **pages}


def write_navigation(settings: str) -> str:
    """Return the text of `mkdocs.yml` with the page of every method in its navigation."""
    names = ["index", *_list_built_in()]
    listed = "".join(f"      - methods/{name}.md\n" for name in names)
    return re.sub(r"(?:^ +- methods/\w+\.md\n)+", listed, settings, flags=re.MULTILINE)


def describe_picture(name: str) -> str:
    """Return what the picture of a method shows, for readers who do not see it."""
    seen = SEEN[name]
    places: dict[str, list[int]] = {}
    for layer, token, sign in seen["cells"]:
        word = "the comma" if token.strip() == "," else f"“{token.strip()}”"
        places.setdefault(f"{word}{' (negative)' if sign == '−' else ''}", []).append(layer)
    if seen["layers"] == 1:
        return f"The prompt as colored text. The strongest tokens are {_join(list(places))}."
    # The words of neighboring cells with the same layers are named together.
    named = itertools.groupby(places.items(), key=lambda item: sorted(item[1]))
    cells = [
        f"{_join([word for word, _ in words])} in layer{'s'[: len(at) > 1]} {_join(at)}"
        for at, words in named
    ]
    return f"Heat map of layer by token for the last position. The darkest cells are {_join(cells)}."


def _make_page(name: str, method: type[Method]) -> str:
    described, texts = describe(name), TEXTS[name]
    formulas = [f"```math\n{formula}\n```" for formula in texts["formula"]]
    parts = [
        f"# {name}",
        f"{described.line[0].upper()}{described.line[1:]}. {texts['plain']}",
        "With `model` and `prompt` as in the [cheat sheet](../cheat_sheet.md):",
        f"```python\n{texts['call'].strip()}\n```",
        f"![{describe_picture(name)}](images/{name}.png)",
        "[How to read this picture](../read_a_map.md)",
        "## When should I use it?",
        _quote(texts["when"]),
        "## When not?",
        _quote(texts["when_not"]),
        "## What does it compute?",
        *formulas,
        texts["symbols"],
        "## Facts",
        _table(*_facts_of(name, method, described)),
    ]
    parameters = _parameters_of(method)
    if parameters:
        parts += ["## Parameters"]
        parts += [_table(("parameter", "default", "meaning"), parameters)]
    parts += ["## Scores", scores.write_table(name), "## Paper", _paper(name), " · ".join(_links(texts))]
    return "\n\n".join(_wrap(part) for part in parts) + "\n"


def _wrap(part: str) -> str:
    """Return a paragraph in lines of at most 120 characters; tables, code and lists as they are."""
    if re.match(r"[|`#\-!]", part) or "\n" in part:
        return part
    # Code and formulas are not broken.
    whole = re.sub(r"`[^`]+`|\[[^\]]+\]\([^)]+\)", lambda found: found[0].replace(" ", "\0"), part)
    return textwrap.fill(whole, 120, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def _quote(text: str) -> str:
    """Return a text with each name of a fact replaced by its figure, with the interval if it has one."""

    def replace(found: re.Match[str]) -> str:
        name = found[1]
        fact = facts.look_up(name.removesuffix(" [n]"))
        if name.endswith(" [n]"):
            return str(fact["n"])
        value, *ends = (each.replace("-", "−") for each in fact["texts"])
        return f"{value} [{', '.join(ends)}]" if ends else value

    return _FIGURE.sub(replace, text)


def _facts_of(
    name: str, method: type[Method], described: Description
) -> tuple[tuple[str, str], list[tuple[str, ...]]]:
    """Return the header and the rows of the table of facts."""
    fields = {field.name for field in dataclasses.fields(method)}
    shape = _SHAPES[method.reads]
    if "per_head" in fields:
        shape += ", or `[layer, head, query, key]` with `per_head=True`"
    rows = "rows sum to 1" if method.has_unit_rows else "rows need not sum to 1"
    residual = "in the map, on the diagonal" if method.includes_residual else "not in the map"
    added = f"adds it with weight {method.residual:g}" if method.residual else "adds none"
    engines = [f"{_ENGINES[engine]} (`{engine}`)" for engine in method.engines]
    facts_of = [
        ("Map", f"{shape}; {rows}"),
        ("Residual stream", f"{residual}; `lm.rollout` {added} by default"),
        ("Target", "by default the prediction" if fields & {"target", "token"} else "none"),
        ("Computed by", ", else ".join(engines)),
        ("Parts of an encoder-decoder", ", ".join(f"`{part}`" for part in _PARTS if part in method.parts)),
        ("Cost", described.cost_in_words),
    ]
    if method.reads in ("below", "model"):
        facts_of = [row for row in facts_of if row[0] != "Residual stream"]
    return ("Pass to `lm.run`", f'`"{name}"` or `lm.methods.{method.__name__}(...)`'), facts_of


def _parameters_of(method: type[Method]) -> list[tuple[str, ...]]:
    """Return a row for each parameter: its name, its default, and what the docstring of the class says."""
    documented = dict(_ARGUMENT.findall(_section(method, "Args")))
    rows = []
    for field in dataclasses.fields(method):
        default = "the prediction" if field.default is dataclasses.MISSING else _in_code(field.default)
        rows.append((f"`{field.name}`", default, _flatten(documented[field.name])))
    return rows


def _section(method: type[Method], title: str) -> str:
    documented = inspect.getdoc(method) or ""
    found = re.search(rf"^{title}:\n(.*?)(?=^\w+:\n|\Z)", documented, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def _flatten(text: str) -> str:
    """Return the text of a parameter in one line, with links to the methods that it names."""
    text = " ".join(re.sub(r"^ +- ", "", text, flags=re.MULTILINE).split())
    for name, method in lm.METHODS.items():
        text = text.replace(f"`{method.__name__}`", f"[`{name}`]({name}.md)")
    return text


def _in_code(value: object) -> str:
    return f"`{json.dumps(value)}`" if isinstance(value, str) else f"`{value!r}`"


@functools.cache
def _list_built_in() -> list[str]:
    """Return the names of the library's methods, in the order of lists."""
    return [name for name in list_names() if name in lm.METHODS]


def _paper(name: str) -> str:
    entry = lm.citation(name)
    fields = {key: _plain(value) for key, value in _bibtex_fields(entry).items()}
    where = next((fields[key] for key in ("booktitle", "journal") if key in fields), "")
    if "eprint" in fields:
        where = where or f"arXiv:{fields['eprint']}"
    title = f"[{fields['title']}]({fields['url']})" if "url" in fields else fields["title"]
    authors = fields["author"].replace(" and ", "; ")
    return (
        f"{authors} ({fields['year']}). {title}.{f' {where}.' if where else ''} "
        f'BibTeX: `lm.citation("{name}")`.'
    )


def _bibtex_fields(entry: str) -> dict[str, str]:
    """Return the fields of a BibTeX entry whose values are in braces."""
    found = re.findall(r"^  (\w+) = \{(.*?)\},?\s*$(?=\n  \w+ = |\n\})", entry, re.MULTILINE | re.DOTALL)
    return {key: " ".join(value.split()) for key, value in found}


def _plain(latex: str) -> str:
    """Return text without LaTeX's accents and braces."""
    # Each command, and the combining character that it stands for.
    marks = dict(zip("'`\"^~vc", "\u0301\u0300\u0308\u0302\u0303\u030c\u0327", strict=True))
    strokes = {"\\l": "ł", "\\o": "ø", "\\ss": "ß", "\\aa": "å", "\\i": "i"}

    def accented(found: re.Match[str]) -> str:
        return unicodedata.normalize("NFC", found["letter"].replace("\\i", "i") + marks[found["mark"]])

    letter = r"\{?(?P<letter>\\i|\w)\}?"
    text = re.sub(rf"\\(?P<mark>['`\"^~]|[vc](?=[ {{])) ?{letter}", accented, latex)
    for command, stroke in strokes.items():
        text = re.sub(rf"{re.escape(command)}(?![A-Za-z]) ?", stroke, text)
    return re.sub(r"[{}]", "", text).replace("--", "–")


def _links(texts: dict[str, Any]) -> list[str]:
    course = texts.get("course", "")
    links = [f"[Course: {course.replace('_', ' ')}](../courses/{course}.ipynb)"] if course else []
    links += [f"[Evidence: {page.replace('_', ' ')}](../evidence/{page}.md)" for page in texts["evidence"]]
    return [*links, "[Which method?](../guides/choose_a_method.md)"]


def _make_index() -> str:
    parts = [
        "# Methods",
        "Every method, grouped by what its map shows. Pass its name to `lm.run`. A method's page has a "
        "picture, the formula, parameters and scores, and says when to use it. The cost is an estimate, in "
        "forward passes of the same prompt. If it depends on the number of positions, it is for 64 tokens.",
        "Which one do you need? [Choose a method](../guides/choose_a_method.md).",
    ]
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name in _list_built_in():
        described = describe(name)
        called = f"`lm.methods.{lm.METHODS[name].__name__}`"
        row = (f"[`{name}`]({name}.md)", called, described.line, described.cost_in_words)
        groups.setdefault(described.group, []).append(row)
    for group, rows in groups.items():
        parts += [f"## {group}", _table(("name", "class", "what a score is", "cost"), rows)]
    return "\n\n".join(_wrap(part) for part in parts) + "\n"


def _join(words: list[Any]) -> str:
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    write_pages()
