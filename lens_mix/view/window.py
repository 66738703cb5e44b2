"""Show a figure in a window, or say what to call."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from lens_mix.view.notebook import is_notebook

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ADVICE = (
    "lens_mix: no window can open here. To write the figure to a file: figure = m.show(); "
    "figure.savefig('map.png'). To see the maps in a browser: lm.page(m).open()."
)
_WITHOUT_WINDOWS = ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template")
_said: set[str] = set()
# The advice of each figure that was shown where no window can open, and not written to a file yet.
_waiting: weakref.WeakKeyDictionary[Figure, weakref.finalize[..., Figure]] = weakref.WeakKeyDictionary()


def show_figure(figure: Figure) -> None:
    """Open a window with the figure if a person can see one; else advise what to call.

    A notebook shows the figure as the result of the cell, so nothing is done there. In a script the window
    blocks until it is closed, as `plt.show()` does; at an interactive prompt it does not block. The advice is
    one line on stderr, once per program. In a script it is printed when the figure is no longer used and was
    not written to a file (`note_written`), so that `m.show().savefig(path)` prints nothing.
    """
    if is_notebook():
        return
    if _can_open_windows():
        _open_window(figure)
    elif _is_interactive():
        _advise()
    else:
        _waiting[figure] = weakref.finalize(figure, _advise)


def note_written(figure: Figure) -> None:
    """Drop the advice of a figure, because it is written to a file."""
    advice = _waiting.pop(figure, None)
    if advice is not None:
        advice.detach()


def _advise() -> None:
    if _ADVICE not in _said:
        _said.add(_ADVICE)
        print(_ADVICE, file=sys.stderr)


def _is_interactive() -> bool:
    """Return whether a person types at a prompt, where the advice must not come later."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _can_open_windows() -> bool:
    """Return whether matplotlib has an interactive backend, and a person runs this program in a terminal.

    Without a display, matplotlib chooses the backend `agg`, which has no windows.
    """
    if not _has_terminal():
        return False
    import matplotlib

    backend = matplotlib.get_backend().lower()
    return backend not in _WITHOUT_WINDOWS and "inline" not in backend


def _has_terminal() -> bool:
    """Return whether the program writes to a terminal; a window must never block a test, a pipe or a job."""
    return bool(getattr(sys.stdout, "isatty", bool)())


def _open_window(figure: Any) -> None:
    """Show a figure that was made without pyplot in a window of pyplot."""
    from matplotlib import _pylab_helpers, pyplot

    try:
        pyplot.figure(figure)
    except ValueError:
        # Before 3.11, pyplot accepts only figures that it made, so the figure gets a manager here.
        number = max(pyplot.get_fignums(), default=0) + 1
        holder = pyplot.figure(number)
        manager = type(holder.canvas).new_manager(figure, number + 1)
        pyplot.close(holder)
        _pylab_helpers.Gcf._set_new_active_manager(manager)
    pyplot.show(block=not _is_interactive())
