"""Draw figures of mixing maps.

They need matplotlib (`pip install lens_mix[plots]`), which is imported when a figure is drawn.
"""

from lens_mix.view.figures import layer_maps, query_maps, token_bars
from lens_mix.view.graph_figures import information_flow

__all__ = ["information_flow", "layer_maps", "query_maps", "token_bars"]


def __dir__() -> list[str]:
    return __all__
