"""Test that imports go down the floors, and that every store that outlives a call is listed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.source_tree import (
    LIBRARY,
    ROOT,
    Import,
    imports,
    module_level_stores,
    module_name,
    trees,
)

# A file imports only from its own floor or a lower one. The lowest floor comes first.
_BY_FLOOR = (
    ("hooks", "arguments", "files", "inputs", "measured", "plain_text", "tables", "version"),
    ("maps", "_classes"),
    ("_care",),
    ("_inputs",),
    ("_model",),
    ("_passes", "classifiers", "targets"),
    ("_blocks",),
    ("_verification", "_algebra"),
    ("method", "method_list", "models", "pass_plan", "session", "removal"),
    ("methods",),
    ("aggregation", "graphs", "registry", "residual_shares"),
    ("map_prompts", "runner", "evaluation"),
    ("again", "corpus", "recommended", "supported_methods", "traces", "view"),
    ("app", "citations", "named_maps", "report", "testing"),
    # lens_mix itself imports its names when they are first used.
    ("",),
    # Experiments use lens_mix as a user does.
    ("experiments",),
    ("cli", "__main__"),
)
FLOORS = {name: floor for floor, names in enumerate(_BY_FLOOR) for name in names}

# What only some prompts, methods or files need. `METHODS` imports all methods, and with them most of these.
RARELY_NEEDED = {
    "classifiers",
    "hooks.gradient",
    "inputs",
    "_passes.autograd_graph",
    "_passes.cached_pass",
    "_passes.continuation",
    "_passes.fused_attention",
    "_inputs.features",
    "_inputs.picture_inputs",
    "_verification.fused",
    "_verification.support",
    "_verification.verify",
    "maps.exchange",
    "maps.words",
    "residual_shares",
    "targets",
}

# These methods of records call a function of a higher floor, which they import when they are called.
DRAWING = {"view"}
DRAWING_FUNCTIONS = {"show", "page", "_repr_html_"}
SHORTCUTS = {"compare": "evaluation"}

# These stores are at module level, including cached functions. Each has the reason why it outlives a call.
STORES = {
    "aggregation.flow._compute_even_flow": "flows of uniform attention: two numbers each, for 4,096 cases",
    "aggregation.flow_rows._network": "what a worker process was started with",
    "_algebra.activations._nodes": "Gauss-Legendre points and weights, per number of points",
    "_algebra.quadrature.nested_rules": "points and weights of nested rules, per number of points",
    "_algebra.weight_cache._store": "the one cache of products of weights, up to one bound",
    "_care.changes._open_changes": "the changes that are active, for a process that is forked meanwhile",
    "_classes.model_classes.transformer_lens_version": "the version that is installed",
    "_care.precision._float32_products": "the user's setting, which is one setting for all threads",
    "_passes.fused_attention._active": "modules whose attention is fused at this moment",
    "_verification.kept._verifications": "verifications, by the model",
    "_algebra.sketch.random_vectors": "8 numbers per unit of a matrix's width; 64 widths",
    "_care.signals._waiting": "signals that wait at this moment",
    "_inputs.texts._templates": "what TransformerLens has replaced in a tokenizer, by the tokenizer",
    "_care.state._evaluated_models": "models that are in evaluation mode at this moment",
    "_care.state._locks": "which thread has a model open, by the model",
    "registry._plugins": "methods of installed packages, which are loaded, and warned of, once",
    "registry._registered": "methods that the user registered, for names to work in every later call",
    "view.fonts._search": "which installed font has a character",
    "view.fonts._tried": "files of fonts that were added to matplotlib's list, or that it cannot read",
    "view.fonts._warned": "scripts without a font, which are warned of once",
    "view.window._said": "the advice where no window can open, which is printed once",
    "view.window._waiting": "figures that were shown where no window can open, and not written yet",
}


def package(module: str) -> str:
    """Return the package of a module, "methods" for "methods.alti"; the module itself outside packages."""
    return module.split(".")[0]


def innermost_package(module: str) -> str:
    """Return the innermost package of a module; the module itself if it is directly in lens_mix."""
    is_package = (LIBRARY / module.replace(".", "/")).is_dir()
    return module if is_package else module.rpartition(".")[0] or module


def run_upwards(arrows: Iterable[Import]) -> Iterator[Import]:
    return (arrow for arrow in arrows if FLOORS[package(arrow.imported)] > FLOORS[package(arrow.importer)])


def arrows() -> list[Import]:
    """Return the imports that run code."""
    return [arrow for arrow in imports() if arrow.when != "types"]


def arrows_but_drawing() -> list[Import]:
    """Return all imports except those of drawing and of the shortcut of `Maps`.

    An import in a function can close a circle too.
    """
    return [a for a in arrows() if not (_is_drawing(a) or _is_shortcut(a))]


def _is_drawing(arrow: Import) -> bool:
    return arrow.function in DRAWING_FUNCTIONS and package(arrow.imported) in DRAWING


def _is_shortcut(arrow: Import) -> bool:
    is_of_maps = arrow.importer == "maps.maps" and arrow.function is not None
    return is_of_maps and SHORTCUTS.get(str(arrow.function)) == package(arrow.imported)


def circles(edges: Iterable[tuple[str, str]]) -> set[tuple[str, ...]]:
    """Return the groups of two or more nodes that reach each other."""
    following: dict[str, set[str]] = {}
    for start, end in edges:
        following.setdefault(start, set()).add(end)
    reached = {start: _reached(start, following) for start in following}
    return {
        tuple(sorted(other for other in reached[start] if start in reached.get(other, ())))
        for start in following
        if start in reached[start]
    }


def _reached(start: str, following: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        ahead += (new := following.get(ahead.pop(), set()) - seen)
        seen |= new
    return seen


def test_every_file_is_on_a_floor():
    assert {package(module) for module in trees()} == set(FLOORS)


def test_imports_run_down_the_floors():
    wrong = [arrow for arrow in run_upwards(arrows()) if arrow.when == "module"]
    assert not wrong, "\n".join(map(str, wrong))


def test_imports_from_above_within_a_function_are_for_drawing_and_shortcuts():
    upward = [arrow for arrow in run_upwards(arrows()) if arrow.when == "function"]
    wrong = [a for a in upward if not (_is_drawing(a) or _is_shortcut(a))]
    assert not wrong, "\n".join(map(str, wrong))


def test_imports_for_type_checkers_run_down_too():
    # `Maps` returns a page, as the function that it calls does.
    own = ("maps.maps", "view.page")
    found = [a for a in imports() if a.when == "types" and (a.importer, a.imported) != own]
    wrong = list(run_upwards(found))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_run_imports_what_not_every_run_needs_only_when_it_does():
    following: dict[str, set[str]] = {}
    for arrow in imports():
        if arrow.when == "module":
            following.setdefault(arrow.importer, set()).add(arrow.imported)
    assert not _reached("runner", following) & RARELY_NEEDED
    assert set(trees()) >= RARELY_NEEDED


def private_imports(tree: ast.Module) -> list[str]:
    """Return the imports of lens_mix with a part that begins with an underscore, wherever they are."""
    return [
        path
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        for path in [".".join(filter(None, [getattr(node, "module", None), alias.name]))]
        if path.startswith("lens_mix") and "._" in path
    ]


def test_experiments_are_written_on_public_names():
    wrong = {
        name: found
        for name, tree in trees().items()
        if package(name) == "experiments" and (found := private_imports(tree))
    }
    assert not wrong


def test_private_imports_are_found():
    source = """
import lens_mix._blocks
from lens_mix import Lens, _care
from lens_mix.models import states_of
def show():
    from lens_mix._model.model import Lens
"""
    expected = ["lens_mix._blocks", "lens_mix._care", "lens_mix._model.model.Lens"]
    assert private_imports(ast.parse(source)) == expected


def test_no_circle_of_files():
    edges = {(arrow.importer, arrow.imported) for arrow in arrows_but_drawing()}
    assert not circles(edge for edge in edges if edge[0] != edge[1])


def test_no_circle_of_packages():
    """Check that of two packages on one floor at most one imports the other."""
    edges = {(package(arrow.importer), package(arrow.imported)) for arrow in arrows_but_drawing()}
    assert not circles(edge for edge in edges if edge[0] != edge[1])


def test_no_circle_of_inner_packages():
    """Check that a package and one inside it do not import each other."""
    edges = {
        (innermost_package(arrow.importer), innermost_package(arrow.imported))
        for arrow in arrows_but_drawing()
    }
    assert not circles(edge for edge in edges if edge[0] != edge[1])


def test_circles_are_found():
    assert circles([("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]) == {("b", "c")}


def test_no_symbolic_link():
    """Check that there are no links, because archives of a release may follow or drop them."""
    visible = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    links = [path for path in visible if path.is_symlink()]
    links += [path for top in visible if top.is_dir() for path in top.rglob("*") if path.is_symlink()]
    assert not links


def test_nothing_is_kept_at_module_level():
    """Check that only the listed stores outlive a call. Other state belongs to the session of a call."""
    kept = {f"{module}.{name}" for module, tree in trees().items() for name in module_level_stores(tree)}
    assert kept == set(STORES)


def test_stores_are_found():
    source = """
class Counter:
    def add(self): self.count += 1
class Plain:
    def __init__(self): self.count = 0
    def double(self): return 2 * self.count
plain = Plain()
counting = Counter()
nodes = functools.cache(leggauss)
models: Any = weakref.WeakSet()
filled = {}
fixed = {}
def fill(): filled["key"] = fixed["key"]
@functools.lru_cache(maxsize=8)
def sized(): ...
@cache
def unsized(): ...
"""
    found = module_level_stores(ast.parse(source))
    assert found == ["counting", "filled", "models", "nodes", "sized", "unsized"]


def test_folders_of_tests_mirror_the_library():
    """Check that each folder of tests has the name of a package, or of a folder of scripts or pages."""
    scripts = {"benchmarks", "demos", "docs"}
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")} - {ROOT / "tests"}
    for folder in folders:
        relative = folder.relative_to(ROOT / "tests")
        home = ROOT if relative.parts[0] in scripts else LIBRARY
        assert (home / relative).is_dir(), f"tests/{relative}: no folder {relative} in {home.name}"
    assert module_name(LIBRARY / "view" / "page" / "__init__.py") == "view.page"
