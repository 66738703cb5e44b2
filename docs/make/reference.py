"""Write the pages of the reference: every public name once, with a directive that mkdocstrings replaces.

mkdocstrings reads the signature and the docstring from the source. Only the names are listed here.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lens_mix as lm
from docs.make import markdown, models


@dataclasses.dataclass(frozen=True)
class Page:
    """Describe a page of the reference.

    Attributes:
        file: The name of the file, without its ending.
        title: What a user wants to do.
        line: One sentence on what the page contains.
        names: The names of `lens_mix` that it describes.
        modules: The public modules of `lens_mix` of which it describes every name.
        others: Names that a user meets but does not import from `lens_mix`, with their full path.
        links: The pages on how and when to use these names, from `docs`, by their titles.
        boost: By how much the search prefers the page. Who searches for the name of a function wants its
            description before the pages that use it.
    """

    file: str
    title: str
    line: str
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    links: dict[str, str] = dataclasses.field(default_factory=dict)
    boost: float = 2


PAGES = (
    Page(
        "running",
        "Run methods",
        "Compute maps of one prompt or of many, and find out which methods a model supports.",
        (
            "wrap",
            "run",
            "run_many",
            "run_again",
            "input_map",
            "support",
            "check",
            "citation",
            "UnsupportedModelError",
        ),
        others=(
            "lens_mix._inputs.prompts.read_prompt",
            "lens_mix._verification.support.Support",
            "lens_mix._verification.support.Check",
        ),
        links={
            "Get started": "tutorial",
            "Many prompts": "guides/many_prompts",
            "Kinds of models": "guides/models",
            "Evidence for the input map": "evidence/input_map",
            "Verification": "evidence/verification",
        },
    ),
    Page(
        "maps",
        "Use a map",
        "Read, combine, save and export a map, and average the maps of many prompts.",
        ("MixingMap", "Maps", "table"),
        others=(
            "lens_mix.maps.record.Source",
            "lens_mix.maps.record.HeadScore",
            "lens_mix.maps.explained.Explained",
            "lens_mix.maps.characters.join_tokens",
            "lens_mix.tables.Table",
            "lens_mix.tables.read_csv",
        ),
        links={
            "Read a map": "read_a_map",
            "Save and export maps": "how_to/save",
            "200 sentences with intervals": "how_to/many_sentences",
        },
    ),
    Page(
        "traces",
        "Trace written text",
        "Find out which documents, sentences or tokens of a prompt a written text came from, and check it.",
        ("trace", "trace_many", "audit", "Trace", "Audit", "Documents"),
        others=(
            "lens_mix.traces.spans.WrittenSpan",
            "lens_mix.traces.spans.SourceScore",
            "lens_mix.traces.spans.SourceScores",
            "lens_mix.traces.claims.Claim",
            "lens_mix.traces.claims.Ground",
            "lens_mix.traces.claims.Contradiction",
            "lens_mix.traces.removals.Removal",
            "lens_mix.traces.sources.TextSource",
            "lens_mix.traces.documents.Section",
        ),
        links={
            "Which passage did this answer come from?": "how_to/passage",
            "Can I trust this answer?": "how_to/audit",
            "Explain a generation": "how_to/generation",
            "Read the page of a trace": "read_a_map",
            "From the shell": "how_to/shell",
            "Course: traces": "courses/traces",
            "Course: audits": "courses/audit",
        },
    ),
    Page(
        "corpus",
        "Map a corpus",
        "Map many prompts in files that survive an interruption, and reduce the maps meanwhile.",
        modules=("corpus",),
        links={"Many prompts and corpora": "guides/many_prompts", "Speed": "evidence/speed"},
    ),
    Page(
        "aggregation",
        "Aggregate layers: rollout, flow, mean",
        "Compute input maps from the maps of single layers, for example by attention rollout.",
        ("rollout", "flow", "gradient_rollout", "layer_mean", "attribution_tree"),
        ("aggregation",),
        links={
            "Course: rollout and flow": "courses/rollout_and_flow",
            "Which aggregation to use": "guides/choose_a_method",
            "Evidence for aggregations": "evidence/aggregation",
        },
        boost=4,
    ),
    Page(
        "targets",
        "Explain a target",
        "Choose the number that a map explains: a logit, a probability, a loss, or a function of your own.",
        modules=("targets",),
        links={"Explain a classifier": "how_to/classifier", "Kinds of models": "guides/models"},
    ),
    Page(
        "figures",
        "Look at maps",
        "Draw maps as figures, or as one HTML page.",
        ("page", "show_position"),
        ("view",),
        others=("lens_mix.view.page.Page",),
        links={"Gallery": "gallery", "Read a map": "read_a_map"},
    ),
    Page(
        "evaluation",
        "Compare and score",
        "Compare maps, and measure how far to trust them.",
        ("compare", "evaluate"),
        ("evaluation",),
        links={"Score maps": "guides/score_a_map", "What is known exactly": "evidence/known_truth"},
    ),
    Page(
        "experiments",
        "Run experiments",
        "Describe patterns and heads, prune heads, find triggers, align words, use models with known routes.",
        modules=("experiments",),
        links={"Which heads move a word?": "how_to/heads"},
    ),
    Page(
        "graphs",
        "Build graphs",
        "Build graphs from maps, prune and save them.",
        modules=("graphs",),
        links={"Gallery": "gallery"},
    ),
    Page(
        "hooks",
        "Use the hooks",
        "Record and change what a model computes, in your own `run_with_hooks`.",
        modules=("hooks",),
        links={"Which hook does what": "guides/hooks"},
    ),
    Page(
        "extending",
        "Extend the library",
        "Write a method of your own, from the data of one block, and test it.",
        ("Method", "register", "Lens"),
        ("models", "testing"),
        others=("lens_mix._blocks.block.Block", "lens_mix._model.anatomy.BlockAnatomy"),
        links={"Add a method": "guides/add_a_method"},
    ),
    Page(
        "methods",
        "Classes of the methods",
        "Create a method with parameters. The page of each method has its formula, picture and scores.",
        ("METHODS",),
        modules=("methods",),
        links={"All methods": "methods/index"},
        boost=1,
    ),
)


def write(folder: Path) -> None:
    """Write the pages of the reference, and delete those of an earlier run.

    A page that is already as it should be keeps its time, so that a build knows that it is unchanged.
    """
    pages = write_pages()
    for path in folder.rglob("*.md"):
        if str(path.relative_to(folder)) not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def write_pages() -> dict[str, str]:
    """Return the text of every page of the reference, by its path in `docs/reference`.

    Raises:
        LookupError: If a public name is on no page.
    """
    _check_complete()
    pages = {f"{page.file}.md": _write_page(page) for page in PAGES}
    source = markdown.ROOT / "CHANGELOG.md"
    changelog = markdown.convert(source.read_text(encoding="utf-8"), source, "reference/changelog.md")
    tables = {"changelog.md": changelog, "models.md": models.write_page()}
    return {"index.md": _write_index(), **tables, **pages}


def list_pages() -> list[str]:
    """Return the paths of all pages in `docs/reference`."""
    return [
        "index.md",
        "changelog.md",
        "models.md",
        *(f"{page.file}.md" for page in PAGES),
    ]


def list_directives(page: Page) -> list[tuple[str, list[str]]]:
    """Return the sections of a page: a heading with its text ("" for none), and the paths of its names."""
    sections = [("", [f"lens_mix.{name}" for name in page.names])]
    described = {id(getattr(lm, name)) for name in page.names}
    for name in page.modules:
        module = getattr(lm, name)
        sections += [(title, paths) for title, paths in _sections_of(module, described)]
    if page.others:
        sections.append(("## Objects that these functions take or return", list(page.others)))
    return [(title, paths) for title, paths in sections if paths]


def find(path: str) -> Any:
    """Return the object of a full path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def first_line(path: str) -> str:
    """Return the first line of the docstring of a name; for a constant, of the string below it."""
    thing = find(path)
    is_constant = not (inspect.isclass(thing) or inspect.isroutine(thing))
    documented = _docstring_of_constant(path) if is_constant else inspect.getdoc(thing)
    return (documented or "").partition("\n")[0]


def _docstring_of_constant(path: str) -> str:
    """Return the string that follows the assignment of a constant, in the module that assigns it."""
    module, _, name = path.rpartition(".")
    source = Path(inspect.getfile(importlib.import_module(module)))
    # A package that imports its names when they are first used lists them in a stub.
    for file in (source.with_suffix(".pyi"), source):
        body = ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []
        for node in body:
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                place = f"{module if node.level else ''}.{node.module}.{name}".lstrip(".")
                return _docstring_of_constant(place)
        for node, after in itertools.pairwise(body):
            is_string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if is_string and isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return str(after.value.value)
    return ""


def _sections_of(module: ModuleType, described: set[int]) -> Iterator[tuple[str, list[str]]]:
    """Yield the names of a public module, by topic if there are many."""
    paths = [
        f"{module.__name__}.{name}" for name in module.__all__ if id(getattr(module, name)) not in described
    ]
    if len(paths) < 40:
        yield "", paths
        return
    by_topic: dict[str, list[str]] = {}
    for path in paths:
        # The file, or the folder of files, that defines the name.
        below = find(path).__module__.removeprefix(f"{module.__name__}.").removeprefix("lens_mix.")
        by_topic.setdefault(below.partition(".")[0], []).append(path)
    for topic, names in sorted(by_topic.items()):
        defined_in = sys.modules.get(f"{module.__name__}.{topic}") or sys.modules[f"lens_mix.{topic}"]
        title = f"{topic[0].upper()}{topic[1:]}".replace("_", " ")
        line = (inspect.getdoc(defined_in) or "").partition("\n")[0]
        yield f"## {title}\n\n{line}", names


def _check_complete() -> None:
    """Raise a LookupError if a public name of lens_mix is on no page."""
    listed = {name for page in PAGES for name in (*page.names, *page.modules)}
    missing = sorted(set(lm.__all__) - listed)
    if missing:
        raise LookupError(
            f"PAGES of {__file__}: expected every public name of lens_mix, got none of {missing}"
        )


def _write_page(page: Page) -> str:
    links = " · ".join(f"[{title}](../{path}.md)" for title, path in page.links.items())
    head = f"---\nsearch:\n  boost: {page.boost:g}\n---"
    parts = [head, f"# {page.title}", page.line, f"See also: {links}"]
    for title, paths in list_directives(page):
        if title:
            parts.append(title)
        # Without a heading above them, names are the second level of the page.
        level = 3 if title else 2
        parts += [_write_directive(path, level) for path in paths]
    return "\n\n".join(parts) + "\n"


def _write_directive(path: str, level: int) -> str:
    """Return the directive of a name."""
    thing = find(path)
    # A function with the name of its module: mkdocstrings would describe the module.
    place = f"{thing.__module__}.{thing.__name__}" if path in sys.modules else path
    options: dict[str, object] = {"heading": path} if place != path else {}
    if path == "lens_mix.METHODS":
        options["show_attribute_values"] = False
    elif inspect.isclass(thing) and issubclass(thing, lm.Method) and thing is not lm.Method:
        options |= {"show_bases": False, "members": _own_members(thing) or False}
    given = {"heading_level": level, **options}
    lines = [f"      {name}: {json.dumps(value)}" for name, value in given.items()]
    return "\n".join([f"::: {place}", "    options:", *lines])


def _own_members(method: type[lm.Method]) -> list[str]:
    """Return the functions of a method that are its own, and not what every method defines for the runner."""
    shared = {name for name in vars(lm.Method) if name not in ("hooks", "interventions")}
    functions = [name for name, member in vars(method).items() if inspect.isfunction(member)]
    return [name for name in functions if name[0] != "_" and name not in shared]


def _write_index() -> str:
    parts = [
        "# Reference",
        "Every public name of `lens_mix`, by what you want to do. After `import lens_mix as lm`, `run` is "
        "`lm.run`, and `hooks.zero_values` is `lm.hooks.zero_values`. Shapes name the axes of tensors: "
        "`layer`, `head`, `query` (the position that reads) and `key` (the position that is read).",
        "The methods have [pages of their own](../methods/index.md): picture, formula, scores and advice.",
    ]
    for page in PAGES:
        rows = [
            f"| [`{_short(path, page)}`]({page.file}.md#{_anchor(path)}) | {_cell(first_line(path))} |"
            for _, paths in list_directives(page)
            for path in paths
        ]
        parts += [
            f"## [{page.title}]({page.file}.md)",
            page.line,
            "\n".join(["| name | what it does |", "|---|---|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def _short(path: str, page: Page) -> str:
    return path.rpartition(".")[2] if path in page.others else path.removeprefix("lens_mix.")


def _anchor(path: str) -> str:
    """Return the name of a directive's anchor, which is the path that mkdocstrings describes."""
    return _write_directive(path, 2).partition("\n")[0].removeprefix("::: ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
