"""Test `m.show()`, which returns the page in a notebook and a figure elsewhere."""

from __future__ import annotations

import sys
import types

import pytest
from matplotlib.figure import Figure

import lens_mix as lm
from lens_mix.view.page import Page
from tests.random_maps import map_of


class ZMQInteractiveShell:
    """Have the name of the shell of ipykernel."""


class Shell(ZMQInteractiveShell):
    """Derive from the shell of ipykernel, as Colab's shell does."""


class TerminalInteractiveShell:
    """Have the name of IPython's shell in a terminal."""


@pytest.fixture
def running(monkeypatch):
    def run(shell):
        module = ipython()
        module.get_ipython = lambda: shell
        monkeypatch.setitem(sys.modules, "IPython", module)

    return run


def ipython():
    """Return a module without a running shell; it has a version, which matplotlib reads."""
    module = types.ModuleType("IPython")
    module.version_info = (9, 0)
    return module


@pytest.mark.parametrize("shell", [ZMQInteractiveShell, Shell])
def test_a_notebook_shows_the_page(running, shell):
    running(shell())
    m = map_of()
    shown = m.show()
    assert isinstance(shown, Page)
    assert shown.html == lm.page(m).html
    assert shown._repr_html_().startswith("<iframe")


def test_a_figure_in_a_notebook_is_asked_for_by_its_options_or_by_name(running):
    running(ZMQInteractiveShell())
    for options in ({"layer": 1}, {"head": None}, {"title": "mine"}, {"kind": "figure"}):
        assert isinstance(map_of().show(**options), Figure)
    assert isinstance(map_of().show("figure", layer=-1), Figure)


@pytest.mark.parametrize("shell", [None, TerminalInteractiveShell()])
def test_a_terminal_shows_a_figure(running, shell):
    running(shell)
    assert isinstance(map_of().show(), Figure)
    assert isinstance(map_of().show("page"), Page)


def test_a_script_shows_a_figure_and_imports_no_ipython(monkeypatch):
    # With None as the module, an import of IPython raises an error.
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert isinstance(map_of().show(), Figure)
    # A module without `get_ipython` is one that is not completely imported.
    monkeypatch.setitem(sys.modules, "IPython", ipython())
    assert isinstance(map_of().show(), Figure)


def test_what_show_refuses():
    with pytest.raises(ValueError, match="kind: expected 'page' or 'figure', got 'html'"):
        map_of().show("html")
    with pytest.raises(ValueError, match="expected 'figure' with layer, head=, which"):
        map_of().show("page", layer=1, head=0)
