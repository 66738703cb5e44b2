"""Find out whether this program runs in a notebook, and make what a notebook shows of a map."""

from __future__ import annotations

import base64
import html
import sys

from lens_mix.maps import MixingMap
from lens_mix.maps.exchange import describe
from lens_mix.view.position import PositionView
from lens_mix.view.position_svg import draw_svg

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


def describe_html(mixing_map: MixingMap) -> str:
    """Return the line of `repr`, and what the default row used in each layer as a picture.

    The picture is an SVG image inside an `img` element. Such an image is shown without a script, in a page
    with a strict content security policy, and in a notebook that is not trusted.
    """
    view = PositionView.from_maps(mixing_map)
    image = base64.b64encode(draw_svg(view).encode("utf-8", "replace")).decode("ascii")
    line, title, sentence = map(html.escape, (describe(mixing_map), view.title, view.sentence))
    return (
        f"<div><code>{line}</code></div><div><strong>{title}</strong></div><div>{sentence}</div>"
        f'<img alt="{title}. {sentence}" src="data:image/svg+xml;base64,{image}">'
    )
