"""Test the names of the package and the cost of its import (its floors: tests/test_floors.py)."""

from __future__ import annotations

import ast
import inspect
import pickle
import pydoc
import re
import rlcompleter
import subprocess
import sys
import tomllib

import pytest

import lens_mix as lm
from benchmarks import facts
from lens_mix import registry
from lens_mix.method_list import read_descriptions
from tests.source_tree import ROOT, trees
from tests.stub import LISTED, STUB, listed_text, stub_text

# These are imported by another name than that of the distribution.
DISTRIBUTIONS = {"lazy_loader": "lazy-loader", "transformer_lens": "transformer-lens"}
# These extras are for scripts and tests outside the library.
BESIDE = {"demos", "dev"}


def test_every_public_name_is_there_and_documented():
    for name in lm.__all__:
        thing = getattr(lm, name)
        assert thing.__doc__ or isinstance(thing, dict), name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Attention", "methods.AttentionWeights? lens_mix.METHODS lists all methods"),
        ("ValueNorm", "methods.ValueNorms? lens_mix.METHODS lists all methods"),
        ("value_zeroing", "methods.ValueZeroing? lens_mix.METHODS lists all methods"),
        ("inputmap", "input_map?"),
    ],
)
def test_a_name_that_is_not_there_says_which_was_meant(name, meant):
    message = f"module 'lens_mix' has no attribute {name!r}; did you mean lens_mix.{meant}"
    with pytest.raises(AttributeError, match=re.escape(message)):
        getattr(lm, name)


def test_a_name_like_no_other_has_no_suggestion():
    with pytest.raises(AttributeError, match=r"has no attribute 'xyzzy'$"):
        getattr(lm, "xyzzy")  # noqa: B009
    assert not hasattr(lm, "__wrapped__")


def test_a_class_that_is_not_there_says_which_was_meant():
    message = "module 'lens_mix.methods' has no attribute {!r}; did you mean lens_mix.methods.{}?"
    for name, meant in (("AttributionPatching", "TokenPatching"), ("ValueNorm", "ValueNorms")):
        with pytest.raises(AttributeError, match=re.escape(message.format(name, meant))):
            getattr(lm.methods, name)
    assert not hasattr(lm.methods, "__wrapped__")


def test_methods_are_printed_by_the_question_that_they_answer():
    printed = str(lm.methods)
    assert printed == str(lm.METHODS)
    listed = []
    for group in printed.split("\n\n"):
        title, *lines = group.splitlines()
        for line in lines:
            name, written, score = re.split(r"  +", line.strip())
            method = lm.METHODS[name]
            assert (title, score) == (method.group, method.description)
            assert written == f"lm.methods.{method.__name__}"
            assert getattr(lm.methods, method.__name__) is method
            listed.append(name)
    assert listed == [name for name in registry.list_names() if name in lm.METHODS]


def test_the_module_of_methods_is_a_module_in_all_else():
    assert inspect.ismodule(lm.methods)
    assert pydoc.render_doc(lm.methods).startswith("Python Library Documentation: ")
    assert rlcompleter.Completer({"methods": lm.methods}).attr_matches("methods.ValueZ") == [
        "methods.ValueZeroing("
    ]
    method = lm.methods.ValueZeroing(metric="euclidean")
    assert pickle.loads(pickle.dumps(method)) == method


def test_no_two_methods_have_names_that_count_as_the_same():
    names = [name.replace("_", "") for name in lm.METHODS]
    classes = [method.__name__.casefold() for method in lm.METHODS.values()]
    different = {*names, *classes}
    own = sum(name == kind for name, kind in zip(names, classes, strict=True))
    assert len(different) == 2 * len(lm.METHODS) - own


def test_dir_shows_what_is_public():
    assert dir(lm) == sorted(lm.__all__)


MODULES = [name for name in lm.__all__ if inspect.ismodule(getattr(lm, name))]


def test_the_public_modules_are_known():
    verbs = ["aggregation", "corpus", "evaluation", "experiments", "graphs", "hooks"]
    assert [*verbs, "methods", "models", "targets", "testing", "view"] == MODULES


@pytest.mark.parametrize("name", MODULES)
def test_public_modules_say_what_is_public(name):
    module = getattr(lm, name)
    assert dir(module) == sorted(module.__all__)
    assert all(getattr(module, public).__doc__ for public in module.__all__)
    assert not [public for public in module.__all__ if public.startswith("_")]
    # The public names include all that a page uses by the module's name.
    text = "".join(page.read_text() for page in facts.PAGES)
    assert set(re.findall(rf"\blm\.{name}\.(\w+)\(", text)) <= set(module.__all__)


def test_type_checkers_see_the_same_names():
    stub = ast.parse((ROOT / "lens_mix" / "__init__.pyi").read_text())
    names = next(node.value for node in stub.body if isinstance(node, ast.Assign))
    assert sorted(ast.literal_eval(names)) == sorted(lm.__all__)


def test_the_stub_has_every_method():
    assert STUB.read_text(encoding="utf-8") == stub_text(), "run `make stub`"


def test_the_list_has_every_method():
    assert LISTED.read_text(encoding="utf-8") == listed_text(), "run `make stub`"
    for name, described in read_descriptions().items():
        assert described == registry.describe(name)


@pytest.mark.parametrize("name", sorted(lm.METHODS))
def test_every_method_cites_its_paper(name):
    text = lm.citation(name)
    assert text.startswith("@")
    assert "title" in text
    assert "year" in text
    assert lm.METHODS[name].__doc__


def test_a_method_is_cited_by_the_name_of_its_class_too():
    assert lm.citation("ValueZeroing") == lm.citation("value_zeroing")
    with pytest.raises(ValueError, match=r"name: did you mean 'value_zeroing'\? expected one of"):
        lm.citation("value_zeroin")


def test_aggregations_are_cited():
    assert "Abnar" in lm.citation("rollout")


def test_importing_lens_mix_leaves_large_modules_out():
    """Check that neither the import nor a list of the public packages' names imports matplotlib."""
    code = (
        "import transformer_lens, torch, sys; before = set(sys.modules); import lens_mix as lm;"
        "new = lambda: {module.split('.')[0] for module in set(sys.modules) - before};"
        "print(','.join(new()));"
        "print(lm.hooks.zero_values.__name__, lm.graphs.load_graph.__name__);"
        "print(lm.experiments.probe_heads.__name__, lm.view.token_bars.__name__);"
        "assert 'matplotlib' not in new()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    modules, *names = done.stdout.split()[-5:]
    assert names == ["zero_values", "load_graph", "probe_heads", "token_bars"]
    new = set(modules.split(","))
    assert "lens_mix" in new
    assert not {"matplotlib", "scipy", "networkx", "pandas", "xarray"} & new


def test_what_is_imported_is_declared():
    """Check all imports, also in functions and for type checkers, and that each declared package is used."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    imported = {module.split(".")[0] for module in modules} - {"lens_mix", *sys.stdlib_module_names}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(r for name in extras.keys() - BESIDE for r in extras[name])]
    declared = {re.split(r"[\[<>=~! ]", requirement)[0] for requirement in requirements}
    assert {DISTRIBUTIONS.get(name, name) for name in imported} == declared
