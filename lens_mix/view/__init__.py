"""Draw figures of mixing maps.

They need matplotlib (`pip install lens_mix[plots]`), which is imported when a figure is drawn.
"""

from pathlib import Path

from lens_mix.view.figures import layer_maps, token_bars
from lens_mix.view.graph_figures import information_flow
from lens_mix.view.picture_figure import show_picture
from lens_mix.view.position_figure import show_position

STYLE = str(Path(__file__).with_name("lens_mix.mplstyle"))
"""The path of a matplotlib style sheet that makes other axes look like these figures.

Use it with `plt.style.use(lens_mix.view.STYLE)`.
"""

__all__ = ["STYLE", "information_flow", "layer_maps", "show_picture", "show_position", "token_bars"]


def __dir__() -> list[str]:
    return __all__
