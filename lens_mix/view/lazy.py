"""Import matplotlib when a figure is drawn, not earlier."""

from __future__ import annotations

import importlib
from types import ModuleType


def load_canvas() -> ModuleType:
    """Return the module `lens_mix.view.canvas`, which imports matplotlib.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    try:
        return importlib.import_module("lens_mix.view.canvas")
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'lens_mix[plots]'") from error
