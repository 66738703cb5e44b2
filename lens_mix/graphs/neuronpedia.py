"""Write graphs as the attribution-graph JSON that Neuronpedia and circuit-tracer show.

The schema is `apps/webapp/app/api/graph/graph-schema.json` of github.com/hijohnnylin/neuronpedia (version
1.0.0), which circuit-tracer's files have too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import networkx as nx

from lens_mix.arguments import check_file_path, check_instance
from lens_mix.files import replacing
from lens_mix.maps.characters import join_tokens
from lens_mix.version import __version__

# Neuronpedia shows these two kinds of nodes in their own way, and any other kind as a circle with a label.
_EMBEDDING, _LOGIT = "embedding", "logit"
# The number of a node among those of its layer and position.
_KINDS = ("resid_pre", "resid_mid", "resid_mid_cross", "mlp_out", "resid_post", "source")


def to_neuronpedia(
    graph: nx.DiGraph,
    path: str | os.PathLike[str] | None = None,
    *,
    model: str,
    slug: str = "lens-mix",
    prompt: str | None = None,
) -> dict[str, Any]:
    """Return a graph as Neuronpedia's JSON, and write it to a file if there is a path.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "information_flow_routes")
        >>> routes = lm.graphs.information_flow_routes(m)
        >>> graph = lm.graphs.to_neuronpedia(routes, "routes.json", model="gpt2-small", slug="eiffel")

    Upload the file on neuronpedia.org/graph/validator. Inputs of the first layer are embeddings. Each target
    is a circle that leads, with a link of weight 1, to a logit with the model's prediction, if the graph has
    it. In the graph of a trace, sources are circles and written spans are logits. All other nodes are circles
    whose label names their component and token. Weights of links are those of the graph's edges.

    Args:
        graph: The graph of all layers of a map (`information_flow_routes`, `information_flow_graph`,
            `layered_graph`, `prune_graph`, `lm.attribution_tree`, `MixingMap.to_networkx()`), or that of a
            trace (`Trace.to_networkx()`).
        path: The file, which is replaced if it exists. None: no file.
        model: The name of the model on Neuronpedia, such as "gpt2-small" or "gemma-2-2b".
        slug: The name of the graph in its address: letters, digits and hyphens.
        prompt: The text of the prompt. None: the text that the tokens spell.

    Raises:
        TypeError: If `graph` is not a DiGraph, or a name is not a string.
        ValueError: If the nodes have no levels, as those of a single layer, or no edge is left.
    """
    check_instance("graph", graph, nx.DiGraph, "a networkx DiGraph")
    for name, value in (("model", model), ("slug", slug)):
        check_instance(name, value, str, "a name")
    if graph.number_of_edges() == 0:
        raise ValueError("graph: expected at least one edge, got none; lower the threshold")
    tokens = _read_tokens(graph)
    nodes = _make_nodes(graph)
    links = [
        {"source": nodes[start]["node_id"], "target": nodes[end]["node_id"], "weight": float(weight)}
        for start, end, weight in graph.edges(data="weight", default=1.0)
    ]
    logits, ends = _make_logits(graph, nodes)
    first = next((node for node in [*logits, *nodes.values()] if node["feature_type"] == _LOGIT), None)
    result = {
        "metadata": {
            "slug": slug,
            "scan": model,
            "transcoder_list": [],
            "prompt_tokens": tokens,
            "prompt": join_tokens(tokens) if prompt is None else prompt,
            "schema_version": 1,
            "info": {"generator": {"name": "lens_mix", "version": __version__}},
        },
        "qParams": {
            "pinnedIds": [],
            "supernodes": [],
            "linkType": "both",
            "clickedId": "" if first is None else first["node_id"],
            "sg_pos": "",
        },
        "nodes": [*nodes.values(), *logits],
        "links": links + ends,
    }
    if path is not None:
        text = json.dumps(result, ensure_ascii=False)
        with replacing(check_file_path("path", path, write=True)) as file:
            Path(file).write_text(text, encoding="utf-8")
    return result


def _read_tokens(graph: nx.DiGraph) -> list[str]:
    """Return one string per position of the graph."""
    if "tokens" in graph.graph:
        return list(graph.graph["tokens"])
    known = {values.get("position"): values.get("token") for _, values in graph.nodes(data=True)}
    return [str(known.get(position, "")) for position in range(1 + max(_places(graph)))]


def _places(graph: nx.DiGraph) -> list[int]:
    for node, values in graph.nodes(data=True):
        if not {"level", "position"} <= set(values):
            raise ValueError(
                "graph: expected nodes with a level and a position, as in the graph of all layers, got "
                f"{node!r} with {sorted(values)}; write m.to_networkx() or information_flow_routes(m)"
            )
    return [position for _, position in graph.nodes(data="position")]


def _make_nodes(graph: nx.DiGraph) -> dict[Hashable, dict[str, Any]]:
    """Return the entry of each node of a graph."""
    _places(graph)
    n_source = graph.graph.get("source", 0)
    layers = {node: values.get("layer", values["level"] - 1) for node, values in graph.nodes(data=True)}
    if n_source:
        # The layers of a decoder are above those of the encoder.
        places = dict(graph.nodes(data="position"))
        below = 1 + max(layer for node, layer in layers.items() if places[node] < n_source)
        layers = {node: layer + below * (places[node] >= n_source) for node, layer in layers.items()}
    # Neuronpedia shows no graph whose highest layer is 0.
    shift = int(max(layers.values()) == 0)
    made: dict[Hashable, dict[str, Any]] = {}
    for node, values in graph.nodes(data=True):
        layer, place, text = layers[node], values["position"], values.get("token", "")
        kind = values.get("kind", "resid_pre" if values["level"] == 0 else "resid_post")
        is_input = kind == "resid_pre" and values.get("layer", -1) < 0
        if kind == "written":
            label = _label_logit(text, f"{values['probability']:.3g}")
            made[node] = _make_node(str(layer + shift), place, place, _LOGIT, label)
        elif is_input:
            made[node] = _make_node("E", place, place, _EMBEDDING, text)
        else:
            label = text if kind == "source" else f"{kind}, layer {values.get('layer', layer)}: {text}"
            number = _KINDS.index(kind) if kind in _KINDS else len(_KINDS)
            # The input of a higher layer than the first one is the output of the layer below.
            made[node] = _make_node(str(max(layer, 0) + shift), number, place, kind, label)
    return made


def _make_node(layer: str, feature: int, place: int, kind: str, label: str) -> dict[str, Any]:
    return {
        "node_id": f"{layer}_{feature}_{place}",
        "feature": feature,
        "layer": layer,
        "ctx_idx": place,
        "feature_type": kind,
        "token_prob": 0.0,
        "is_target_logit": False,
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": f"{layer}_{feature}-{place}",
        "clerp": label,
        "influence": None,
        "activation": None,
    }


def _label_logit(text: str, probability: str) -> str:
    # The viewer reads the probability of a logit from the first "(p=" of its label.
    return f"{text.replace('(p=', '(p =')} (p={probability})"


def _make_logits(
    graph: nx.DiGraph, nodes: dict[Hashable, dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a logit for each target of a graph of layers, and the links to them."""
    record = graph.graph
    if "target" in record:
        # The graph was pruned, and has only what leads to this target.
        given = [record["target"]]
    else:
        given = record.get("targets", [record["root"]] if "root" in record else [])
    highest = max(int(node["layer"]) for node in nodes.values() if node["layer"] != "E")
    logits, links = [], []
    for target in given:
        values, place = graph.nodes[target], nodes[target]["ctx_idx"]
        probability = values.get("probability")
        output = f'Output "{values.get("prediction")}"'
        label = "" if probability is None else _label_logit(output, f"{probability:.3f}")
        logit = _make_node(str(highest + 1), place, place, _LOGIT, label)
        logit |= {"token_prob": float(probability or 0.0), "is_target_logit": True}
        logits.append(logit)
        links.append({"source": nodes[target]["node_id"], "target": logit["node_id"], "weight": 1.0})
    return logits, links
