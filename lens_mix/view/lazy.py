"""matplotlib is imported when a figure is drawn, not before."""

from __future__ import annotations

import importlib
from types import ModuleType


def need_canvas() -> ModuleType:
    """`lens_mix.view.canvas`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("lens_mix.view.canvas")
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'lens_mix[plots]'") from error
