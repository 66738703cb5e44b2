"""Draw graphs over levels and positions: information flow, routes, layered graphs, attribution trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lens_mix.arguments import check_instance
from lens_mix.view.labels import FONT, INK, NAME_FONT, QUIET, count_labels, make_visible, space_evenly
from lens_mix.view.lazy import load_canvas

if TYPE_CHECKING:
    import networkx
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lens_mix.view.canvas import DrawnPicture

_STAYS = "#b5b5b5"
_MOVES = "#2c5f8a"
_TARGET = "#c1442e"
_FEED_FORWARD = "#b04a00"
_ALL_TOKENS = 48  # with more tokens, only those with a node are drawn
_PAGE = (7.0, 10.0)  # a figure fits on a page, in inches
_COLUMN, _LEVEL, _LINE = 0.3, 0.28, 0.16  # the largest sizes of a column, a level and a line of the legend
_LARGEST = 44.0  # the largest area of a node, in square points
THINNEST, THICKEST, STAYS = 0.4, 5.0, 0.8


def information_flow(
    graph: networkx.DiGraph,
    by: str | None = None,
    title: str | None = None,
    *,
    ax: Axes | None = None,
    figsize: tuple[float, float] | None = None,
) -> Figure:
    """Return a figure of a graph over the tokens, with the input at the bottom, on one page at most.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "information_flow_routes")
        >>> lm.view.information_flow(lm.graphs.information_flow_routes(m)).savefig("routes.png")

    Edges between two positions are blue, and their width shows their weight. Edges that stay at their
    position are thin and gray. The explained position is red, and feed-forwards are orange squares. The area
    of a node shows its `share`, if it has one. A legend explains these, and says how many edges were pruned.

    Args:
        graph: A graph with nodes `(level, position)`, their `token` if known, and edges from source to
            destination: of `lens_mix.graphs` (`information_flow_graph`, `information_flow_routes`, or
            `layered_graph`, best with a threshold), or a tree.
        by: The edge attribute shown as width, 0 or more; None: `share` if all edges have it, else `weight`.
        title: The title above the figure; None: no title.
        ax: matplotlib axes to draw in; None: a new figure. The legend is below the axes.
        figsize: The width and height of the figure in inches; None: as the graph needs, 7 x 10 at most.

    Raises:
        TypeError: The graph is not a networkx DiGraph, or `ax` is not matplotlib axes.
        ValueError: No nodes; a node that is not a pair of whole numbers; an edge without the attribute or
            with a negative or non-finite one; a `figsize` beside `ax`, or one that is too small for the
            labels.
        ImportError: Matplotlib is not installed.
    """
    canvas = load_canvas()
    _check_graph(graph)
    check_instance("title", title, (str, type(None)), "a text")
    name, widths = _read_widths(graph, by)
    plan = _Plan(graph, widths)
    if ax is not None:
        canvas.check_axes(ax, figsize, 1, "one graph")
        return _draw_in_axes(ax, graph, plan, name, title)
    size = _Size(plan, title, figsize)
    legend = _make_legend(graph, plan, name, size.inner)
    size.fit_height(len(legend))
    picture: DrawnPicture = canvas.DrawnPicture(*size.whole)
    axes = picture.add_box(size.left, size.bottom, size.inner, size.rows)
    _draw_graph(axes, graph, plan, size.inner, size.rows)
    picture.write_title(title)
    _write_legend(picture, legend, size.columns, loc="lower left", bbox_to_anchor=(0.05 / size.whole[0], 0.0))
    return picture


class _Plan:
    """Compute the columns of positions, the lines of levels, and their labels."""

    def __init__(self, graph: networkx.DiGraph, widths: dict[Any, float]) -> None:
        positions, self.tokens, self.leaves_out = _find_tokens(graph)
        levels = sorted({level for level, _ in graph.nodes})
        self.widths = widths
        self.columns = {position: column for column, position in enumerate(positions)}
        self.lines = {level: line for line, level in enumerate(levels)}
        self.names = {self.lines[level]: name for level, name in _name_levels(graph).items()}
        self.ranking = self._rank_columns(graph)
        self.token_length = load_canvas().measure_longest(self.tokens, FONT)
        self.name_length = load_canvas().measure_longest(self.names.values(), FONT)

    def find_place(self, node: tuple[int, int]) -> tuple[int, int]:
        return self.columns[node[1]], self.lines[node[0]]

    def _rank_columns(self, graph: networkx.DiGraph) -> list[int]:
        """Return the columns by their labels' importance: the explained one, then those with wide edges."""
        sizes = dict.fromkeys(self.columns, 0.0)
        for (start, end), width in self.widths.items():
            if start[1] != end[1]:
                sizes[start[1]] += width
                sizes[end[1]] += width
        for node in _find_targets(graph):
            sizes[node[1]] = float("inf")
        return [self.columns[position] for position in sorted(sizes, key=lambda at: -sizes[at])]

    def is_turned(self, inner: float) -> bool:
        """Return whether the tokens are longer than their columns, in a box of this width."""
        return bool(self.token_length > inner / len(self.tokens))


class _Size:
    """Compute the sizes of a figure of its own, in inches."""

    def __init__(self, plan: _Plan, title: str | None, figsize: tuple[float, float] | None) -> None:
        self._plan, self._top = plan, 0.42 if title else 0.15
        self._chosen = None if figsize is None else load_canvas().check_size(figsize)
        self.left, right = 0.42 + plan.name_length, 0.15
        widest = (_PAGE if self._chosen is None else self._chosen)[0] - self.left - right
        self.inner = min(max(_COLUMN * len(plan.columns), 3.0), widest) if figsize is None else widest
        self.columns = 2 if self.inner > 4.5 else 1
        self._width = self.left + self.inner + right

    def fit_height(self, lines: int) -> None:
        """Compute the heights, for a legend with this number of lines."""
        plan, legend = self._plan, _LINE * -(-lines // self.columns) + 0.08
        labels = plan.token_length if self.inner > 0 and plan.is_turned(self.inner) else 0.12
        self.bottom = 0.18 + legend + labels
        highest = (_PAGE if self._chosen is None else self._chosen)[1] - self._top - self.bottom
        self.rows = min(max(_LEVEL * len(plan.lines), 0.6), highest) if self._chosen is None else highest
        self.whole = (self._width, self._top + self.rows + self.bottom)
        if min(self.inner, self.rows) < 0.3:
            least = (self._width - self.inner + 0.3, self._top + self.bottom + 0.3)
            raise ValueError(
                f"figsize: expected at least {least[0]:.1f} x {least[1]:.1f} inches for the labels and the "
                f"legend, got {self._chosen}"
            )


def _draw_in_axes(ax: Axes, graph: networkx.DiGraph, plan: _Plan, name: str, title: str | None) -> Figure:
    """Draw the graph in axes of a user's figure, with the legend below them."""
    canvas = load_canvas()
    width, height = canvas.measure_axes(ax)
    _draw_graph(ax, graph, plan, width, height)
    if title:
        ax.set_title(title, size=NAME_FONT, color=INK, loc="left", parse_math=False)
    below = 0.1 + (plan.token_length if plan.is_turned(width) else 0.15)
    legend = _make_legend(graph, plan, name, width)
    _write_legend(ax, legend, 1, loc="upper left", bbox_to_anchor=(0.0, -below / height), borderaxespad=0.0)
    figure: Figure = canvas.finish_axes(ax)
    return figure


def _draw_graph(axes: Any, graph: networkx.DiGraph, plan: _Plan, width: float, height: float) -> None:
    _draw_edges(axes, plan, graph)
    # Nodes of neighboring levels do not overlap.
    room = min(72 * height / len(plan.lines), 72 * width / len(plan.columns))
    _draw_nodes(axes, plan, graph, min(1.0, (0.9 * room) ** 2 / _LARGEST))
    axes.set_xlim(-0.6, len(plan.columns) - 0.4)
    axes.set_ylim(-0.5, len(plan.lines) - 0.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=2)
    turned = plan.is_turned(width)
    limit = count_labels(width, FONT) if turned else None
    load_canvas().label_ticks(
        axes.xaxis, plan.tokens, limit, rotation=90 if turned else 0, strongest=plan.ranking
    )
    named = sorted(plan.names)
    chosen = [named[index] for index in space_evenly(len(named), count_labels(height, FONT))]
    axes.set_yticks(chosen, labels=[plan.names[line] for line in chosen], size=FONT, color=QUIET)
    axes.set_ylabel("layer", size=FONT, color=QUIET)


def _write_legend(artist: Any, handles: list[Any], columns: int, **place: Any) -> None:
    look = {"fontsize": FONT - 0.5, "labelcolor": QUIET, "frameon": False, "columnspacing": 1.5}
    legend = artist.legend(handles=handles, ncols=columns, **look, **place)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _make_legend(graph: networkx.DiGraph, plan: _Plan, name: str, width: float = float("inf")) -> list[Any]:
    """Return the lines of the legend: the meaning of colors, widths and sizes, and what was left out.

    Args:
        graph: The graph.
        plan: The places of its nodes.
        name: The attribute that widths show.
        width: The width in inches of the axes, on which labels may not fit.
    """
    from matplotlib.lines import Line2D

    dot: Any = {"marker": "o", "lw": 0, "markersize": 4}
    moves = [shown for (start, end), shown in plan.widths.items() if start[1] != end[1]]
    handles = []
    if moves:
        text = f"from another position; width: {name}, up to {max(moves):.3g}"
        handles.append(Line2D([], [], color=_MOVES, lw=3, label=text))
    if len(moves) < len(plan.widths):
        handles.append(Line2D([], [], color=_STAYS, lw=STAYS, label="stays at its position"))
    if targets := _find_targets(graph):
        text = "the explained position" + "s" * (len(targets) > 1)
        handles.append(Line2D([], [], color=_TARGET, label=text, **dot))
    if any(values.get("kind") == "mlp_out" for _, values in graph.nodes(data=True)):
        handles.append(Line2D([], [], color=_FEED_FORWARD, label="feed-forward", **dot | {"marker": "s"}))
    if any("share" in values for _, values in graph.nodes(data=True)):
        handles.append(Line2D([], [], color=INK, label="area: the position's share in its layer", **dot))
    if "threshold" in graph.graph:
        total = f" of {graph.graph['edges_before']}" if "edges_before" in graph.graph else ""
        above = f"those above {graph.graph['threshold']:.3g}"
        text = f"pruned: {graph.number_of_edges()}{total} edges are left, {above}"
        handles.append(Line2D([], [], lw=0, label=text))
    if plan.leaves_out:
        handles.append(Line2D([], [], lw=0, label="tokens without a node are left out"))
    if plan.is_turned(width) and len(plan.columns) > count_labels(width, FONT):
        text = "labeled: tokens with wide edges, as far as there is space"
        handles.append(Line2D([], [], lw=0, label=text))
    return handles


def _find_targets(graph: networkx.DiGraph) -> list[Any]:
    """Return the nodes that are explained."""
    one = graph.graph.get("target", graph.graph.get("root"))
    return [node for node in graph.graph.get("targets", [one]) if node is not None and node in graph]


def _find_tokens(graph: networkx.DiGraph) -> tuple[list[int], list[str], bool]:
    """Return the positions to draw, their tokens, and whether there are other positions.

    A position without a known token has its number.
    """
    used = sorted({position for _, position in graph.nodes})
    known = {node[1]: values["token"] for node, values in graph.nodes(data=True) if "token" in values}
    all_tokens = graph.graph.get("tokens")
    leaves_out = False
    if isinstance(all_tokens, list) and used[-1] < len(all_tokens):
        known = dict(enumerate(all_tokens)) | known
        if len(all_tokens) <= _ALL_TOKENS:
            used = list(range(len(all_tokens)))
        leaves_out = len(used) < len(all_tokens)
    return used, [make_visible(str(known.get(position, position))) for position in used], leaves_out


def _name_levels(graph: networkx.DiGraph) -> dict[int, str]:
    """Return the name of one level per layer, the last: the number of the layer, or "input"."""
    first_of_decoder = graph.graph.get("source")
    levels = {level for level, _ in graph.nodes}
    sources = {start[0] for start, _ in graph.edges}
    has_input = 0 in levels and 0 in sources and "level" in next(iter(graph.nodes.values()))
    last: dict[str, int] = {}
    for node, values in graph.nodes(data=True):
        # If the graph does not define its levels, level 0 may be a layer instead of the input.
        name = "input" if has_input and node[0] == 0 else str(values.get("layer", node[0]))
        if first_of_decoder is not None and name != "input":
            name = f"{'encoder' if node[1] < first_of_decoder else 'decoder'} {name}"
        last[name] = max(last.get(name, node[0]), node[0])
    return {level: name for name, level in last.items()}


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


def _draw_edges(axes: Any, plan: _Plan, graph: networkx.DiGraph) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgba

    moves = {edge: width for edge, width in plan.widths.items() if edge[0][1] != edge[1][1]}
    widest = max(moves.values(), default=0.0) or 1.0
    # What stays at a position is often most of it, so it has no width; the widest edges are on top.
    ordered = sorted(plan.widths, key=lambda edge: moves.get(edge, -1.0))
    ends = [[_shift(plan.find_place(node), graph.nodes[node]) for node in edge] for edge in ordered]
    colors = [
        to_rgba(_MOVES, 0.35 + 0.65 * moves[edge] / widest) if edge in moves else _STAYS for edge in ordered
    ]
    widths = [
        THINNEST + (THICKEST - THINNEST) * moves[edge] / widest if edge in moves else STAYS
        for edge in ordered
    ]
    look: Any = {"linewidths": widths, "colors": colors, "capstyle": "round", "zorder": 1}
    axes.add_collection(LineCollection(ends, **look))


def _shift(place: tuple[int, int], values: Any) -> tuple[float, int]:
    """Return the place of a node; a feed-forward is at the right of the residual stream that it reads."""
    return place[0] + 0.3 * (values.get("kind") == "mlp_out"), place[1]


def _draw_nodes(axes: Any, plan: _Plan, graph: networkx.DiGraph, scale: float) -> None:
    targets = set(_find_targets(graph))
    squares = {node for node, values in graph.nodes(data=True) if values.get("kind") == "mlp_out"}
    for nodes, marker in (([node for node in graph if node not in squares], "o"), (sorted(squares), "s")):
        if not nodes:
            continue
        across, up = zip(*(_shift(plan.find_place(node), graph.nodes[node]) for node in nodes), strict=True)
        sizes = [scale * _find_area(graph.nodes[node], node in targets) for node in nodes]
        plain = INK if marker == "o" else _FEED_FORWARD
        colors = [_TARGET if node in targets else plain for node in nodes]
        axes.scatter(across, up, s=sizes, c=colors, marker=marker, linewidths=0, zorder=2)


def _find_area(values: Any, is_target: bool) -> float:
    """Return the area of a node: its share, or a fixed one if it has none."""
    if "share" in values:
        return 4 + (_LARGEST - 4) * float(values["share"])
    inner = values.get("kind") in ("resid_mid", "resid_mid_cross")
    return 24.0 if is_target else 2.0 if inner else 6.0


def _check_graph(graph: Any) -> None:
    import networkx as nx

    check_instance("graph", graph, nx.DiGraph, "a networkx DiGraph")
    if not graph:
        raise ValueError("graph: expected at least one node, got none")
    for node in graph:
        is_pair = isinstance(node, tuple) and len(node) == 2
        if not is_pair or not all(isinstance(index, int) and not isinstance(index, bool) for index in node):
            raise ValueError(f"graph: expected nodes (level, position), got {node!r}")
