"""Write graphs to files, as GraphML (for Gephi, Cytoscape, yEd) or node-link JSON (for d3), and read them."""

from __future__ import annotations

import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import networkx as nx

from lens_mix.arguments import check_file_path, check_instance
from lens_mix.files import NO_DIGEST, is_unchanged, replacing, seal

# The attributes of a graph from `lens_mix` that are neither strings nor numbers.
_NODES = {"target", "targets", "root"}
_LISTS = {"tokens", *_NODES}
# The digest of a file is a key of the JSON object, and a comment at the end of GraphML. Other programs ignore
# both. Quotes in strings of JSON, and < in the text of XML, are escaped.
_DIGEST = "lens_mix.digest"
_MARKERS = {".json": f'"{_DIGEST}": "'.encode(), ".graphml": f"<!--{_DIGEST}:".encode()}
# XML 1.0 forbids these characters, and readers of XML change the last one, \r.
_FORBIDDEN = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def save_graph(graph: nx.DiGraph, path: str | os.PathLike[str]) -> None:
    r"""Write a graph as GraphML or JSON, depending on the ending of `path`: `.graphml` or `.json`.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "attention")
        >>> lm.graphs.save_graph(lm.graphs.layered_graph(m), "graph.graphml")

    JSON keeps all values. GraphML contains only strings and numbers: nodes and lists are written as JSON
    (`[3, 0]`), None is left out, and characters that XML forbids are written as in Python (`\x00`).

    Args:
        graph: A networkx graph.
        path: The file, which is replaced if it exists.

    Raises:
        TypeError: If `graph` is not a networkx graph, or contains a value that JSON cannot represent.
        ValueError: If the ending is another one, or values have too many levels of nesting for JSON.
    """
    check_instance("graph", graph, nx.Graph, "a networkx graph")
    ending = _read_ending(check_file_path("path", path, write=True))
    # The values are converted first, so that a value that JSON cannot represent leaves an old file as it was.
    try:
        is_json = ending == ".json"
        data = {_DIGEST: NO_DIGEST, **nx.node_link_data(graph, **_edges_option())} if is_json else {}
        text = json.dumps(data)
        plain = graph if is_json else _convert_for_xml(graph)
    except RecursionError as error:
        raise ValueError("graph: expected values in a few levels of nesting, got more") from error
    with replacing(path) as file:
        if is_json:
            Path(file).write_text(text, encoding="utf-8")
        else:
            nx.write_graphml(plain, file, encoding="utf-8")
            with open(file, "ab") as end:
                end.write(_MARKERS[ending] + f"{NO_DIGEST}-->\n".encode())
        seal(file, _MARKERS[ending], last=not is_json)


def load_graph(path: str | os.PathLike[str]) -> nx.DiGraph:
    """Read a graph that `save_graph` wrote.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "attention")
        >>> lm.graphs.save_graph(lm.graphs.layered_graph(m), "graph.json")
        >>> lm.graphs.load_graph("graph.json")

    A file that another program has written is read too, if it has no digest.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the ending is not `.graphml` or `.json`, or if the file does not contain a graph, or
            was changed after it was written.
    """
    ending = _read_ending(check_instance("path", path, (str, os.PathLike), "a path"))
    path = check_file_path("path", path)
    expected = "path: expected a graph written by save_graph, got"
    if is_unchanged(path, _MARKERS[ending], last=ending == ".graphml") is False:
        raise ValueError(
            f"{expected} {path}, which was changed after it was written; if the change was intended, delete "
            f"its {_DIGEST}"
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
        if ending == ".json":
            graph = nx.node_link_graph(json.loads(text), **_edges_option())
            names = {node: _as_node(node) for node in graph}
        else:
            graph = nx.parse_graphml(text)
            names = {node: _as_node(json.loads(node)) for node in graph}
            for name in _LISTS & set(graph.graph):
                graph.graph[name] = json.loads(graph.graph[name])
            # networkx adds empty dictionaries for the defaults of attributes.
            for name in ("node_default", "edge_default"):
                graph.graph.pop(name, None)
        for name in _NODES & set(graph.graph):
            graph.graph[name] = _as_node(graph.graph[name])
        return nx.relabel_nodes(graph, names)
    except UnicodeDecodeError as error:
        raise ValueError(f"{expected} {path}, which is not text: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{expected} {path}, which has too many levels of nesting") from error
    except (ValueError, LookupError, TypeError, AttributeError, nx.NetworkXError, SyntaxError) as error:
        raise ValueError(f"{expected} {error} in {path}") from error


def _read_ending(path: str | os.PathLike[str]) -> str:
    ending = Path(path).suffix.lower()
    if ending not in (".graphml", ".json"):
        raise ValueError(f"path: expected one that ends in .graphml or .json, got {os.fspath(path)!r}")
    return ending


def _edges_option() -> dict[str, str]:
    """Return the option of networkx for the name of the list of edges, which older releases call `link`."""
    return {"edges" if "edges" in inspect.signature(nx.node_link_data).parameters else "link": "edges"}


def _as_node(name: Any) -> Any:
    return tuple(_as_node(item) for item in name) if isinstance(name, (list, tuple)) else name


def _convert_for_xml(graph: nx.DiGraph) -> nx.DiGraph:
    """Return a copy of the graph whose values GraphML can represent."""
    # Nodes are pairs, which GraphML cannot represent, so their names are written as JSON.
    plain = nx.relabel_nodes(graph, {node: _escape(json.dumps(node)) for node in graph}, copy=True)
    attributes = [plain.graph, *(values for _, values in plain.nodes(data=True))]
    attributes += [values for _, _, values in plain.edges(data=True)]
    # relabel_nodes has copied the dictionaries, so changes do not affect the given graph.
    for values in attributes:
        for name in list(values):
            if values[name] is None:
                del values[name]
            elif isinstance(values[name], str):
                values[name] = _escape(values[name])
            elif not isinstance(values[name], (bool, int, float)):
                values[name] = _escape(json.dumps(values[name], ensure_ascii=False))
    return plain


def _escape(text: str) -> str:
    return _FORBIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
