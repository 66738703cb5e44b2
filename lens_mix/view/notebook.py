"""Whether this program is a notebook."""

from __future__ import annotations

import sys

# What notebooks of Jupyter, VS Code and Colab run in; the classes of the others are made from it.
_KERNEL = "ZMQInteractiveShell"


def shows_pages() -> bool:
    """Whether an IPython kernel runs this, whose cells show HTML; IPython in a terminal does not.

    A console on a kernel (qtconsole, Spyder) can't be told from a notebook. IPython is not imported.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return any(kind.__name__ == _KERNEL for kind in type(shell).__mro__)
