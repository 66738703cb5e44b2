"""Find out whether this program runs in a notebook, and make what a notebook shows of a map or a trace."""

from __future__ import annotations

import base64
import html
import itertools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lens_mix.maps import MixingMap
from lens_mix.maps.exchange import describe
from lens_mix.traces.documents import TEMPLATE
from lens_mix.view.position import PositionView
from lens_mix.view.position_svg import draw_svg
from lens_mix.view.strongest import MOSTLY, NOISE

if TYPE_CHECKING:
    from lens_mix.traces.spans import SourceScore
    from lens_mix.traces.trace import Trace

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
    noise = view.describe_noise(view.panels[0])
    said = f"{view.sentence} {noise[0].upper()}{noise[1:]}." if noise else view.sentence
    line, title, sentence = map(html.escape, (describe(mixing_map), view.title, said))
    return (
        f"<div><code>{line}</code></div><div><strong>{title}</strong></div><div>{sentence}</div>"
        f'<img alt="{title}. {sentence}" src="data:image/svg+xml;base64,{image}">'
    )


def describe_maps_html(maps: Mapping[str, MixingMap]) -> str:
    """Return what `describe_html` does for each of several maps: the first one open, the others folded."""
    folded = (
        f"<details{'' if index else ' open'}><summary><strong>{html.escape(name)}</strong></summary>"
        f"{describe_html(each)}</details>"
        for index, (name, each) in enumerate(maps.items())
    )
    return "".join(folded)


def describe_trace_html(trace: Trace) -> str:
    """Return the sources of everything that a trace's model wrote, colored by their shares.

    Nothing is computed but the scores of everything that was written, which a trace has. It has no script,
    so that a notebook shows it before it is trusted. The colors are transparent, so that they suit a light
    and a dark notebook.
    """
    line, span = repr(trace).splitlines()[0], trace[:]
    scored = sorted(span.top(len(trace.tokens), everything=True), key=lambda each: each.source.positions)
    shown = [each for each in scored if each.source.kind != TEMPLATE]
    most = max((abs(each.share) for each in shown), default=0.0) or 1.0
    if most < NOISE and sum(abs(each.share) for each in scored if each.source.kind == TEMPLATE) > MOSTLY:
        # Beside a template that has nearly everything, the rest is noise, which must not look like a finding.
        most = 1.0
    # Words and tokens have their spaces, and pieces of text have none around them.
    space = "" if trace.unit in ("token", "word") else " "
    parts = []
    for name, sources in itertools.groupby(shown, lambda each: each.source.name):
        pieces = space.join(_color_source(each, most) for each in sources)
        parts.append(f"<div><strong>{html.escape(name)}</strong> {pieces}</div>")
    listed = "".join(f"<li>{each.share:.0%} {html.escape(str(each.source))}</li>" for each in span.top(5))
    return (
        f"<div><code>{html.escape(line)}</code></div>"
        f'<div style="white-space:pre-wrap;max-width:60em">{"".join(parts)}</div>'
        f"<div>{html.escape(span.top(1).explanation)}</div><ol>{listed}</ol>"
        "<div><code>.show()</code> shows the sources of each sentence.</div>"
    )


def _color_source(scored: SourceScore, most: float) -> str:
    """Return the text of a source on a ground that is blue, or orange for a negative score."""
    color = "11,92,173" if scored.score >= 0 else "217,95,2"
    title = html.escape(f"{scored.source.name}: {scored.share:.0%}")
    style = f"background:rgba({color},{0.55 * (abs(scored.share) / most) ** 0.5:.2f})"
    return f'<span title="{title}" style="{style}">{html.escape(scored.source.text)}</span>'
