"""Figures of mixing maps. matplotlib (`pip install lens_mix[plots]`) is imported when one is drawn."""

from lens_mix.view.figures import layer_maps, query_maps, token_bars

__all__ = ["layer_maps", "query_maps", "token_bars"]
