"""Draw graphs over levels and positions: information-flow graphs, layered graphs, attribution trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lens_mix.arguments import check_instance, check_number
from lens_mix.view.labels import FONT, INK, QUIET, count_labels, make_visible
from lens_mix.view.lazy import load_canvas

if TYPE_CHECKING:
    import networkx
    from matplotlib.figure import Figure

    from lens_mix.view.canvas import Picture

_STAYS = "#c9c9c9"
_MOVES = "#2c5f8a"
_TARGET = "#c1442e"
_ALL_TOKENS = 48  # with more tokens, only those with a node are drawn
THINNEST, THICKEST = 0.4, 5.0


def information_flow(
    graph: networkx.DiGraph, by: str | None = None, title: str | None = None, layer_height: float = 0.32
) -> Figure:
    """Return a figure of a graph over the tokens, with one row per level and the input at the bottom.

    The width of an edge shows its weight. Edges that stay at their position are grey, the others are blue; a
    `target` or `root` is red. The size of a node shows its `share`, if it has one. A legend explains these,
    and says how many edges were pruned.

    Args:
        graph: a graph with nodes `(level, position)`, their `token` if known, and edges from source to
            destination: of `lens_mix.graphs.information_flow_graph` or `layered_graph` (best with a
            threshold), or a tree.
        by: The edge attribute shown as width, 0 or more; None: `share` if all edges have it, else `weight`.
        title: The title above the figure; None: no title.
        layer_height: The height of a level in inches, above 0.

    Raises:
        TypeError: The graph is not a networkx DiGraph.
        ValueError: No nodes; a node that is not a pair of whole numbers; an edge without the attribute or
            with a negative or non-finite one; a `layer_height` that is not above 0.
        ImportError: Matplotlib is not installed.
    """
    canvas = load_canvas()
    _check_graph(graph)
    layer_height = check_number("layer_height", layer_height, 0, above=True)
    name, widths = _read_widths(graph, by)
    legend = _make_legend(graph, name, widths)
    frame = _Frame(graph, title, layer_height, len(legend))
    picture: Picture = canvas.Picture(frame.width, frame.height)
    axes = picture.add_box(frame.left, frame.bottom, frame.inner, frame.rows)
    _draw_edges(axes, frame, widths)
    _draw_nodes(axes, frame, graph)
    _write_labels(axes, frame)
    picture.write_title(title)
    look: dict[str, Any] = {
        "loc": "lower left",
        "bbox_to_anchor": (0.05 / frame.width, 0.0),
        "frameon": False,
    }
    for text in picture.legend(handles=legend, fontsize=FONT - 0.5, labelcolor=QUIET, **look).get_texts():
        text.set_parse_math(False)
    return picture


def _make_legend(graph: networkx.DiGraph, name: str, widths: dict[Any, float]) -> list[Any]:
    """Return the lines of the legend: the meaning of colours, widths and sizes, and what was pruned."""
    from matplotlib.lines import Line2D

    lines = {
        "stays at its position": (_STAYS, any(start[1] == end[1] for start, end in widths)),
        "comes from another position": (_MOVES, any(start[1] != end[1] for start, end in widths)),
    }
    handles = [Line2D([], [], color=hue, lw=2, label=text) for text, (hue, found) in lines.items() if found]
    if widths:
        text = f"width: {name}, up to {max(widths.values()):.3g}"
        handles.append(Line2D([], [], color=INK, lw=THICKEST, alpha=0.4, label=text))
    dot: Any = {"marker": "o", "lw": 0, "markersize": 4}
    if graph.graph.get("target", graph.graph.get("root")) in graph:
        handles.append(Line2D([], [], color=_TARGET, label="the explained position", **dot))
    if any("share" in values for _, values in graph.nodes(data=True)):
        handles.append(Line2D([], [], color=INK, label="size: the position's share in its layer", **dot))
    if "threshold" in graph.graph:
        total = f" of {graph.graph['edges_before']}" if "edges_before" in graph.graph else ""
        above = f"those above {graph.graph['threshold']:.3g}"
        text = f"pruned: {graph.number_of_edges()}{total} edges are left, {above}"
        handles.append(Line2D([], [], lw=0, label=text))
    return handles


class _Frame:
    """Compute the places of levels and positions, and the sizes of everything, in inches."""

    def __init__(self, graph: networkx.DiGraph, title: str | None, layer_height: float, lines: int) -> None:
        measure = load_canvas().measure_longest
        positions, self.tokens = _find_tokens(graph)
        levels = sorted({level for level, _ in graph.nodes})
        self.names = _name_levels(graph, levels)
        self.columns = {position: column for column, position in enumerate(positions)}
        self.lines = {level: line for line, level in enumerate(levels)}
        self.inner = min(max(0.3 * len(positions), 3.0), 14.0)
        self.rows = max(layer_height * len(levels), 0.6)
        self.turned = bool(measure(self.tokens, FONT) > self.inner / len(self.tokens))
        self.left = 0.3 + measure(self.names, FONT)
        legend_height = 0.16 * lines + 0.12
        self.bottom = 0.18 + legend_height + (measure(self.tokens, FONT) if self.turned else 0.12)
        self.width = self.left + self.inner + 0.15
        self.height = (0.42 if title else 0.12) + self.rows + self.bottom

    def find_place(self, node: tuple[int, int]) -> tuple[int, int]:
        return self.columns[node[1]], self.lines[node[0]]


def _find_tokens(graph: networkx.DiGraph) -> tuple[list[int], list[str]]:
    """Return the positions to draw, and their tokens; a position without a known token has its number."""
    used = sorted({position for _, position in graph.nodes})
    known = {node[1]: values["token"] for node, values in graph.nodes(data=True) if "token" in values}
    all_tokens = graph.graph.get("tokens")
    if isinstance(all_tokens, list) and used[-1] < len(all_tokens):
        known = dict(enumerate(all_tokens)) | known
        if len(all_tokens) <= _ALL_TOKENS:
            used = list(range(len(all_tokens)))
    return used, [make_visible(str(known.get(position, position))) for position in used]


def _name_levels(graph: networkx.DiGraph, levels: list[int]) -> list[str]:
    """Return the name of each level: the input, or the layer whose output it is."""
    layers = {node[0]: values["layer"] for node, values in graph.nodes(data=True) if "layer" in values}
    sources = {start[0] for start, _ in graph.edges}
    names = [f"layer {layers.get(level, level)}" for level in levels]
    # If the graph does not define its levels, level 0 may be a layer instead of the input.
    if levels[0] == 0 and 0 in sources and "level" in next(iter(graph.nodes.values())):
        names[0] = "input"
    return names


def _read_widths(graph: networkx.DiGraph, by: str | None) -> tuple[str, dict[Any, float]]:
    """Return the name of the attribute that is shown, and its value for every edge."""
    edges = list(graph.edges(data=True))
    name = by or ("share" if edges and all("share" in values for *_, values in edges) else "weight")
    widths = {}
    for start, end, values in edges:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            expected = f"expected every edge to have {name!r}, a finite number, 0 or more"
            raise ValueError(f"by: {expected}, got {value!r} at {start} -> {end}")
        widths[start, end] = float(value)
    return name, widths


def _draw_edges(axes: Any, frame: _Frame, widths: dict[Any, float]) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgba

    widest = max(widths.values(), default=0.0) or 1.0
    ordered = sorted(widths, key=lambda edge: widths[edge])  # the widest edges are drawn last, on top
    shares = [widths[edge] / widest for edge in ordered]
    ends = [[frame.find_place(start), frame.find_place(end)] for start, end in ordered]
    hues = [_STAYS if start[1] == end[1] else _MOVES for start, end in ordered]
    colours = [to_rgba(hue, 0.35 + 0.65 * share) for hue, share in zip(hues, shares, strict=True)]
    widths_in_points = [THINNEST + (THICKEST - THINNEST) * share for share in shares]
    look: Any = {"linewidths": widths_in_points, "colors": colours, "capstyle": "round", "zorder": 1}
    axes.add_collection(LineCollection(ends, **look))


def _draw_nodes(axes: Any, frame: _Frame, graph: networkx.DiGraph) -> None:
    target = graph.graph.get("target", graph.graph.get("root"))
    nodes = list(graph.nodes(data=True))
    across, up = zip(*(frame.find_place(node) for node, _ in nodes), strict=True)
    sizes = [4 + 40 * float(values.get("share", 0.0)) for _, values in nodes]
    colours = [_TARGET if node == target else INK for node, _ in nodes]
    axes.scatter(across, up, s=sizes, c=colours, linewidths=0, zorder=2)


def _write_labels(axes: Any, frame: _Frame) -> None:
    label_ticks = load_canvas().label_ticks
    axes.set_xlim(-0.6, len(frame.columns) - 0.4)
    axes.set_ylim(-0.5, len(frame.lines) - 0.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=2)
    limit, rotation = (count_labels(frame.inner, FONT), 90) if frame.turned else (None, 0)
    label_ticks(axes.xaxis, frame.tokens, limit, rotation=rotation)
    label_ticks(axes.yaxis, frame.names, count_labels(frame.rows, FONT), QUIET)


def _check_graph(graph: Any) -> None:
    import networkx as nx

    check_instance("graph", graph, nx.DiGraph, "a networkx DiGraph")
    if not graph:
        raise ValueError("graph: expected at least one node, got none")
    for node in graph:
        is_pair = isinstance(node, tuple) and len(node) == 2
        if not is_pair or not all(isinstance(index, int) and not isinstance(index, bool) for index in node):
            raise ValueError(f"graph: expected nodes (level, position), got {node!r}")
