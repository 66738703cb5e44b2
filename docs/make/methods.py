"""Write one page per method, from its class, its description and the recorded tables of the leaderboard."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import unicodedata

import lens_mix as lm
from docs.make import scores
from lens_mix._blocks.components import COMPONENTS, LOGITS, UNEMBEDDING, VALUE, names_needed_for
from lens_mix.method import Method
from lens_mix.registry import Description, describe, list_names

# What the engines do, in the words of `lens_mix.method.Method`.
_ENGINES = {
    "recorded": "reads the clean pass",
    "algebra": "computes the number in closed form from the verified components of a block",
    "hooks": "runs the definition: blocks or passes again, with interventions or gradients",
}
_SHAPES = {
    "block": "a map of each block, `[layer, query, key]`",
    "above": "a map of each block, `[layer, query, key]`",
    "below": "an input map after each block, from there down to the tokens, `[layer, query, key]`",
    "model": "one input map of the whole model, `[1, query, key]`",
}
_PARTS = ("encoder", "decoder", "cross", "joint")
# What `Method.needs` lists besides components of a block.
_CONDITIONS = {
    "causal": "a causal model",
    "gradients": "gradients with respect to tensors inside the model",
    "position_ids": "a TransformerBridge whose model takes `position_ids`",
}
# The course that uses the methods of a module, and the page with the evidence on them.
_COURSES = {
    "attention": "rollout_and_flow",
    "value_norms": "norms",
    "attn_res": "norms",
    "atb_ff": "norms",
    "attention_attribution": "attention_attribution",
    "value_zeroing": "value_zeroing",
}
_EVIDENCE = {
    "attention": ("flow", "receptive_field"),
    "value_norms": ("norms",),
    "attn_res": ("norms",),
    "atb_ff": ("norms",),
    "globenc": ("norms",),
    "value_zeroing": ("value_zeroing",),
    "attention_attribution": ("attention_attribution",),
    "gradient_attention": ("attention_attribution",),
    "information_flow_routes": ("information_flow_routes",),
    "token_patching": ("input_map",),
    "gim": ("input_map", "input_gradients"),
    "frozen_gradients": ("input_gradients",),
    "input_gradients": ("input_gradients",),
}


def write_pages() -> dict[str, str]:
    """Return the text of the page of every method and of their index, by its path in `docs/reference`."""
    pages = {f"methods/{name}.md": _write_page(name, method) for name, method in lm.METHODS.items()}
    return {"methods/index.md": _write_index(), **pages}


def list_pages() -> list[str]:
    """Return the paths of the pages of methods in `docs/reference`, in the order of lists."""
    return ["methods/index.md", *(f"methods/{name}.md" for name in _list_built_in())]


def write_navigation(settings: str) -> str:
    """Return the text of `mkdocs.yml` with the page of every method in its navigation."""
    listed = "".join(f"          - reference/{page}\n" for page in list_pages())
    return re.sub(r"(?:^ +- reference/methods/\w+\.md\n)+", listed, settings, flags=re.MULTILINE)


def write_directive(path: str, level: int, **options: object) -> str:
    """Return the directive that mkdocstrings replaces by a signature and a docstring.

    Args:
        path: The full path of the object.
        level: The level of its heading.
        options: Options of mkdocstrings; those that are None are left out.
    """
    given = {"heading_level": level, **options}
    lines = [f"      {name}: {json.dumps(value)}" for name, value in given.items() if value is not None]
    return "\n".join([f"::: {path}", "    options:", *lines])


def _write_page(name: str, method: type[Method]) -> str:
    described = describe(name)
    parts = [
        f"# {name}",
        f"{described.line[0].upper()}{described.line[1:]}.",
        _table(*_facts_of(name, method, described)),
        "## Formula and parameters",
        write_directive(
            f"lens_mix.methods.{method.__name__}", 3, show_bases=False, members=_own_members(method) or False
        ),
        "## Paper",
        _paper(name),
        "## Engines",
        _engines(method),
        "## Scores",
        scores.write_table(name),
    ]
    links = _links(method)
    if links:
        parts += ["## See also", "\n".join(f"- {link}" for link in links)]
    return "\n\n".join(parts) + "\n"


def _own_members(method: type[Method]) -> list[str]:
    """Return the functions of a method that are its own, and not what every method defines for the runner."""
    shared = {name for name in vars(Method) if name not in ("hooks", "interventions")}
    functions = [name for name, member in vars(method).items() if inspect.isfunction(member)]
    return [name for name in functions if name[0] != "_" and name not in shared]


def _facts_of(
    name: str, method: type[Method], described: Description
) -> tuple[tuple[str, str], list[tuple[str, ...]]]:
    """Return the header and the rows of the table at the head of a page."""
    fields = {field.name for field in dataclasses.fields(method)}
    shape = _SHAPES[method.reads]
    if "per_head" in fields:
        shape += ", or `[layer, head, query, key]` with `per_head=True`"
    conditions = [text for need, text in _CONDITIONS.items() if need in method.needs]
    header = ("Pass to `lm.run`", f'`"{name}"` or `lm.methods.{method.__name__}(...)`')
    rows = [
        ("Group", described.group),
        ("Map", shape),
        ("Rows", "sum to 1" if method.has_unit_rows else "need not sum to 1; `m.normalized()` scales them"),
        ("Residual stream", "on the diagonal" if method.includes_residual else "not on the diagonal"),
        ("Residual weight in `lm.rollout`", f"{method.residual:g}, unless you pass `residual=`"),
        ("Target", "needs one: `target=`, by default the prediction" if "target" in fields else "needs none"),
        ("Needs", ", ".join(conditions) or "nothing beyond the verification below"),
        (
            "Parts of an encoder-decoder",
            ", ".join(f'`part="{part}"`' for part in _PARTS if part in method.parts),
        ),
        ("Cost", described.cost_in_words),
    ]
    if method.reads in ("below", "model"):
        rows = [row for row in rows if not row[0].startswith("Residual")]
    return header, rows


def _list_built_in() -> list[str]:
    """Return the names of the library's methods, in the order of lists."""
    return [name for name in list_names() if name in lm.METHODS]


def _engines(method: type[Method]) -> str:
    """Return the table of engines: which compute the method, and which components they need verified."""
    rows = []
    for engine, does in _ENGINES.items():
        if engine not in method.engines:
            rows.append((f"`{engine}`", does, "no", ""))
            continue
        place = method.engines.index(engine)
        chosen = (
            "yes" if len(method.engines) == 1 else "yes, first choice" if place == 0 else "yes, otherwise"
        )
        names = ", ".join(f"`{each}`" for each in _verified_for(method, engine))
        rows.append((f"`{engine}`", does, chosen, names))
    components = {each for engine in method.engines for each in _verified_for(method, engine)}
    formulas = [
        f"- `{each.name}`: {each.formula}, against {each.recorded}"
        for each in (*COMPONENTS, LOGITS)
        if each.name in components
    ]
    sentence = (
        "Before the first run, these components are rebuilt on your model and compared with its tensors:"
    )
    support = "`lm.support(model)` shows which engine your model gets, and `lm.check(model)` the errors."
    if method.unsupported_block is not Method.unsupported_block:
        instead = "`hooks` is used" if len(method.engines) > 1 else "the run raises an error"
        support = f"The method has no formula for some kinds of blocks. For these, {instead}. {support}"
    header = ("engine", "what it does", "computes this method", "verified first")
    return "\n\n".join([_table(header, rows), sentence, "\n".join(formulas), support])


def _verified_for(method: type[Method], engine: str) -> list[str]:
    """Return the components that have to be verified before an engine computes a method."""
    needed = set(names_needed_for("hooks"))
    if engine == "algebra":
        needed |= method.needs & {*names_needed_for("algebra"), VALUE, UNEMBEDDING}
    return [each.name for each in (*COMPONENTS, LOGITS) if each.name in needed]


def _paper(name: str) -> str:
    entry = lm.citation(name)
    fields = {key: _plain(value) for key, value in _bibtex_fields(entry).items()}
    where = next((fields[key] for key in ("booktitle", "journal") if key in fields), "")
    if "eprint" in fields:
        where = where or f"arXiv:{fields['eprint']}"
    title = f"[{fields['title']}]({fields['url']})" if "url" in fields else fields["title"]
    authors = fields["author"].replace(" and ", "; ")
    line = f"{authors} ({fields['year']}). {title}.{f' {where}.' if where else ''}"
    return f'{line}\n\n`lm.citation("{name}")` returns:\n\n```bibtex\n{entry}\n```'


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


def _links(method: type[Method]) -> list[str]:
    module = method.__module__.rpartition(".")[2]
    links = []
    if module in _COURSES:
        course = _COURSES[module]
        links.append(f"[Course: {course.replace('_', ' ')}](../../courses/{course}.md)")
    links += [
        f"[Evidence: {page.replace('_', ' ')}](../../evidence/{page}.md)"
        for page in _EVIDENCE.get(module, ())
    ]
    links += ["[All scores of the leaderboard](../../evidence/leaderboard.md)"]
    links += ["[How to choose a method](../../guides/choose_a_method.md)"]
    return links


def _write_index() -> str:
    parts = [
        "# Methods",
        "Every method, by what its map shows. Pass the name to `lm.run`. The page of a method has its "
        "formula, parameters, engines and scores. The cost is an estimate, in forward passes of the same "
        "prompt. If it grows with the number of positions, the prompt has 64 tokens.",
    ]
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name in _list_built_in():
        described = describe(name)
        called = f"`lm.methods.{lm.METHODS[name].__name__}`"
        row = (f"[`{name}`]({name}.md)", called, described.line, described.cost_in_words)
        groups.setdefault(described.group, []).append(row)
    for group, rows in groups.items():
        parts += [f"## {group}", _table(("name", "class", "what a score is", "cost"), rows)]
    parts += ["## All methods by name", write_directive("lens_mix.METHODS", 3, show_attribute_values=False)]
    return "\n\n".join(parts) + "\n"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
