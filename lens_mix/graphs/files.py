"""Graphs as files, through networkx: GraphML (for Gephi, Cytoscape, yEd) and node-link JSON (for d3)."""

from __future__ import annotations

import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import networkx as nx

from lens_mix.arguments import file_path, instance
from lens_mix.files import replacing

# What `lens_mix.graphs` and attribution trees write on a graph that is no string and no number.
_NODES = {"target", "targets", "root"}
_LISTS = {"tokens", *_NODES}
# The characters that XML 1.0 forbids, and the one that it changes when it is read (\r).
_FORBIDDEN = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def save_graph(graph: nx.DiGraph, path: str | os.PathLike[str]) -> None:
    r"""Write a graph as GraphML or JSON, by the ending of `path`: `.graphml` or `.json`.

    JSON keeps everything. GraphML holds strings and numbers only: nodes and lists are written as JSON
    (`[3, 0]`); None is left out; characters that XML forbids are written as in Python (`\x00`).

    Raises:
        TypeError: not a networkx graph; something that JSON cannot hold.
        ValueError: another ending; values in too many levels of nesting for JSON.
    """
    instance("graph", graph, nx.Graph, "a networkx graph")
    ending = _ending(file_path("path", path, write=True))
    # Values other than strings and numbers become JSON, before the file is opened.
    try:
        is_json = ending == ".json"
        text = json.dumps(nx.node_link_data(graph, **_edges_option())) if is_json else ""
        plain = graph if is_json else _for_xml(graph)
    except RecursionError as error:
        raise ValueError("graph: expected values in a few levels of nesting, got more") from error
    with replacing(path) as file:
        if is_json:
            Path(file).write_text(text, encoding="utf-8")
        else:
            nx.write_graphml(plain, file, encoding="utf-8")


def load_graph(path: str | os.PathLike[str]) -> nx.DiGraph:
    """Read a graph that `save_graph` wrote.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another ending; a file that holds no graph.
    """
    ending = _ending(instance("path", path, (str, os.PathLike), "a path"))
    path = file_path("path", path)
    expected = "path: expected a graph written by save_graph, got"
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
            # networkx's own: the defaults of attributes, of which there are none.
            for name in ("node_default", "edge_default"):
                graph.graph.pop(name, None)
        for name in _NODES & set(graph.graph):
            graph.graph[name] = _as_node(graph.graph[name])
        return nx.relabel_nodes(graph, names)
    except UnicodeDecodeError as error:
        raise ValueError(f"{expected} {path}, which is not text: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{expected} {path}, which has too many levels of nesting") from error
    except (ValueError, KeyError, TypeError, AttributeError, nx.NetworkXError, SyntaxError) as error:
        raise ValueError(f"{expected} {error} in {path}") from error


def _ending(path: str | os.PathLike[str]) -> str:
    ending = Path(path).suffix.lower()
    if ending not in (".graphml", ".json"):
        raise ValueError(f"path: expected one that ends in .graphml or .json, got {os.fspath(path)!r}")
    return ending


def _edges_option() -> dict[str, str]:
    """The name of the list of edges in JSON, which older releases of networkx call `link`."""
    return {"edges" if "edges" in inspect.signature(nx.node_link_data).parameters else "link": "edges"}


def _as_node(name: Any) -> Any:
    return tuple(_as_node(part) for part in name) if isinstance(name, (list, tuple)) else name


def _for_xml(graph: nx.DiGraph) -> nx.DiGraph:
    # Nodes are pairs, which GraphML can't hold: their names are JSON.
    plain = nx.relabel_nodes(graph, {node: _printable(json.dumps(node)) for node in graph}, copy=True)
    groups = [plain.graph, *(values for _, values in plain.nodes(data=True))]
    groups += [values for _, _, values in plain.edges(data=True)]
    # relabel_nodes copies the dictionaries, so the graph that was given stays as it is.
    for values in groups:
        for name in list(values):
            if values[name] is None:
                del values[name]
            elif isinstance(values[name], str):
                values[name] = _printable(values[name])
            elif not isinstance(values[name], (bool, int, float)):
                values[name] = _printable(json.dumps(values[name], ensure_ascii=False))
    return plain


def _printable(text: str) -> str:
    return _FORBIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
