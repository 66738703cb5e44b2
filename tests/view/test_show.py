"""Test `m.show()`: which figure it draws, and where it shows it."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

import lens_mix as lm
from lens_mix.maps.explained import Explained
from lens_mix.view import window
from lens_mix.view.page import Page
from tests.random_maps import map_of, random_attention
from tests.view.test_figures import heat_maps


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


@pytest.fixture
def opened(monkeypatch):
    """Return the figures that a window was opened for, with whether it blocks."""
    figures: list[tuple[Any, bool]] = []
    monkeypatch.setattr(window, "_said", set())
    monkeypatch.setattr(window, "_has_terminal", lambda: True)
    monkeypatch.setattr(matplotlib, "get_backend", lambda: "QtAgg")
    monkeypatch.setattr(pyplot, "figure", lambda figure: figures.append((figure, None)))
    monkeypatch.setattr(pyplot, "show", lambda block: figures.append((figures.pop()[0], block)))
    return figures


def is_position(figure: Any) -> bool:
    """Return whether the rows of the figure are layers."""
    return heat_maps(figure)[0].get_ylabel() == "layer"


def test_one_row_a_causal_map_and_an_explained_map_show_the_position() -> None:
    free = map_of(random_attention(causal=False), causal=False)
    assert not is_position(free.show())
    assert is_position(free.select_queries([2]).show())
    assert is_position(free.replace(explained=[Explained("x", 0.5)] * 6).show())
    assert is_position(map_of().show())
    assert is_position(free.show("position"))
    assert not is_position(map_of().show("layers"))


def test_an_option_of_layer_maps_shows_them() -> None:
    for options in ({"layer": 1}, {"head": None}, {"queries": [1, 2]}, {"diagonal": False}):
        assert not is_position(map_of().show(**options))
    for options in ({"query": 2}, {"title": "mine"}, {"scale": "log"}):
        assert is_position(map_of().show(**options))


def test_the_page_is_asked_for_by_name() -> None:
    m = map_of()
    shown = m.show("page")
    assert isinstance(shown, Page)
    assert shown.html == lm.page(m).html


@pytest.mark.parametrize("shell", [ZMQInteractiveShell, Shell])
def test_a_notebook_shows_the_figure_itself(running, opened, shell, capsys):
    running(shell())
    figure = map_of().show()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert opened == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("shell", [None, TerminalInteractiveShell()])
def test_a_script_in_a_terminal_opens_a_window_until_it_is_closed(
    running, opened, shell, capsys, monkeypatch
):
    running(shell)
    monkeypatch.delattr(sys, "ps1", raising=False)
    figure = map_of().show()
    assert opened == [(figure, True)]
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert opened[1:] == []
    other = map_of().show()
    assert opened[1:] == [(other, False)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("backend", ["agg", "svg", "module://matplotlib_inline.backend_inline"])
def test_without_windows_one_line_says_what_to_call(opened, monkeypatch, capsys, backend):
    monkeypatch.setattr(matplotlib, "get_backend", lambda: backend)
    assert isinstance(map_of().show(), Figure)
    map_of().show()
    gc.collect()
    assert opened == []
    (line,) = capsys.readouterr().err.splitlines()
    assert "savefig('map.png')" in line
    assert "lm.page(m).open()" in line


def test_a_program_without_a_terminal_never_waits_and_imports_no_ipython() -> None:
    code = (
        "import sys, torch, lens_mix as lm\n"
        "sys.modules['IPython'] = None\n"
        "m = lm.MixingMap(scores=torch.eye(3)[None], tokens=list('abc'), causal=True)\n"
        "m.show(); m.show()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr.count("savefig") == 1


def run_script(lines: str) -> str:
    """Return what a program without a terminal prints to stderr."""
    code = (
        "import sys, io, torch, lens_mix as lm\n"
        "m = lm.MixingMap(scores=torch.eye(3)[None], tokens=list('abc'), causal=True)\n" + lines
    )
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr


@pytest.mark.slow
def test_a_figure_that_is_written_needs_no_advice(opened, monkeypatch, capsys):
    assert run_script("m.show(layer=0).savefig(io.BytesIO())\nf = m.show()\nf.savefig(io.BytesIO())") == ""
    assert run_script("m.show().savefig(io.BytesIO())\nm.show()").count("savefig") == 1
    assert run_script("f = m.show()").count("savefig") == 1
    monkeypatch.setattr(matplotlib, "get_backend", lambda: "agg")
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    kept = map_of().show()
    assert "savefig" in capsys.readouterr().err
    assert isinstance(kept, Figure)


def test_axes_of_a_user_are_shown_by_the_user(opened) -> None:
    axes = Figure().subplots()
    assert map_of().show(ax=axes) is axes.figure
    assert opened == []


def test_what_show_refuses():
    with pytest.raises(ValueError, match="kind: expected 'page', 'position' or 'layers', got 'html'"):
        map_of().show("html")
    with pytest.raises(ValueError, match="'position' or 'layers' with layer=, head=, which a page lacks"):
        map_of().show("page", layer=1, head=0)
