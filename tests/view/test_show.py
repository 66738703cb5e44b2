"""`m.show()`: the page in a notebook, a figure elsewhere."""

from __future__ import annotations

import sys
import types

import pytest
from matplotlib.figure import Figure

import lens_mix as lm
from lens_mix.view.page import Page
from tests.random_maps import map_of


class ZMQInteractiveShell:
    """By its name what ipykernel runs."""


class Shell(ZMQInteractiveShell):
    """What Colab makes of it."""


class TerminalInteractiveShell:
    """By its name what IPython runs in a terminal."""


@pytest.fixture
def running(monkeypatch):
    def run(shell):
        module = ipython()
        module.get_ipython = lambda: shell
        monkeypatch.setitem(sys.modules, "IPython", module)

    return run


def ipython():
    """One that has yet to start; matplotlib reads its version."""
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
    # None: an import of it would raise.
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert isinstance(map_of().show(), Figure)
    # Half imported, as in the middle of its own start.
    monkeypatch.setitem(sys.modules, "IPython", ipython())
    assert isinstance(map_of().show(), Figure)


def test_what_show_refuses():
    with pytest.raises(ValueError, match="kind: expected 'page' or 'figure', got 'html'"):
        map_of().show("html")
    with pytest.raises(ValueError, match="expected 'figure' with layer, head=, which"):
        map_of().show("page", layer=1, head=0)
