"""The records that methods and aggregations return: `MixingMap`, and `Maps` for several of one prompt."""

from lens_mix.maps.grid import Grid
from lens_mix.maps.maps import Maps
from lens_mix.maps.record import MixingMap, Source

__all__ = ["Grid", "Maps", "MixingMap", "Source"]
