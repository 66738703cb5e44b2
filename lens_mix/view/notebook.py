"""Find out whether this program runs in a notebook."""

from __future__ import annotations

import sys

# The class of the shell in notebooks of Jupyter and VS Code; the shells of other notebooks derive from it.
_KERNEL = "ZMQInteractiveShell"


def is_notebook() -> bool:
    """Return whether an IPython kernel runs this program, so that a cell can show HTML.

    It is False for IPython in a terminal. A console on a kernel (qtconsole, Spyder) cannot be distinguished
    from a notebook. IPython is not imported.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return any(kind.__name__ == _KERNEL for kind in type(shell).__mro__)
