"""`MixingMap`, the record that methods and aggregations return."""

from lens_mix.maps.grid import Grid
from lens_mix.maps.record import MixingMap, Source

__all__ = ["Grid", "MixingMap", "Source"]
