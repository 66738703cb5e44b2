"""Test Neuronpedia's JSON of graphs against its public schema, and against what its viewer reads."""

from __future__ import annotations

import json
from collections import Counter

import networkx as nx
import pytest
import torch

import lens_mix as lm
from lens_mix.graphs import information_flow_graph, information_flow_routes, layered_graph, to_neuronpedia
from tests.graphs.test_routes import by_hand
from tests.matrix import build_or_skip, prompt_of
from tests.random_maps import random_attention
from tests.shared_models import decoder
from tests.tiny_models import bridge, tokens

pytestmark = pytest.mark.filterwarnings("ignore")

# The required fields and their types in apps/webapp/app/api/graph/graph-schema.json, version 1.0.0, of
# github.com/hijohnnylin/neuronpedia, read in November 2026.
METADATA = {"slug": str, "scan": str, "prompt_tokens": list, "prompt": str}
NODE = {
    "node_id": str,
    "feature": int,
    "layer": str,
    "ctx_idx": int,
    "feature_type": str,
    "jsNodeId": str,
    "clerp": str,
}
LINK = {"source": str, "target": str, "weight": float}


def checked(graph, **options):
    """Return the JSON of a graph, which satisfies the schema and can be shown."""
    data = to_neuronpedia(graph, model="gpt2-small", **options)
    assert set(data) == {"metadata", "qParams", "nodes", "links"}
    for entry, fields in (
        (data["metadata"], METADATA),
        *((node, NODE) for node in data["nodes"]),
        *((link, LINK) for link in data["links"]),
    ):
        for name, kind in fields.items():
            assert type(entry[name]) is kind, (name, entry)
    assert all(isinstance(token, str) for token in data["metadata"]["prompt_tokens"])
    assert all(type(node[name]) in (float, type(None)) for node in data["nodes"] for name in ("influence",))
    ids = Counter(node["node_id"] for node in data["nodes"])
    assert set(ids.values()) == {1}
    assert {link[end] for link in data["links"] for end in ("source", "target")} <= set(ids)
    # The viewer places a node at its token, and reads a probability from the label of a logit.
    assert all(0 <= node["ctx_idx"] < len(data["metadata"]["prompt_tokens"]) for node in data["nodes"])
    logits = [node for node in data["nodes"] if node["feature_type"] == "logit"]
    assert logits
    assert all(float(node["clerp"].split("(p=")[1].split(")")[0]) <= 1 for node in logits if node["clerp"])
    assert data["qParams"]["clickedId"] == logits[0]["node_id"]
    # It shows no graph whose highest layer is 0.
    assert max(int(node["layer"]) for node in data["nodes"] if node["layer"] != "E") > 0
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    return data


def test_routes_by_hand():
    parts = by_hand().provenance["details"]["parts"]
    parts = [{**part, "layer": layer} for layer, part in enumerate(parts)]
    m = by_hand(layers=[0, 1], provenance={"details": {"parts": parts}})
    graph = information_flow_routes(m)
    data = checked(graph, slug="hand", prompt="one two")
    assert data["metadata"] | {"info": 0} == {
        "slug": "hand",
        "scan": "gpt2-small",
        "transcoder_list": [],
        "prompt_tokens": [" one", " t", "wo"],
        "prompt": "one two",
        "schema_version": 1,
        "info": 0,
    }
    nodes = {node["node_id"]: node for node in data["nodes"]}
    inputs = [node for node in nodes.values() if node["feature_type"] == "embedding"]
    assert [(node["layer"], node["ctx_idx"], node["clerp"]) for node in inputs] == [
        ("E", position, token) for position, token in enumerate([" one", " t", "wo"])
    ]
    assert nodes["1_3_2"]["feature_type"] == "mlp_out"
    assert nodes["1_3_2"]["clerp"] == "mlp_out, layer 1: wo"
    weights = {(link["source"], link["target"]): link["weight"] for link in data["links"]}
    expected = {graph.edges[edge]["weight"] for edge in graph.edges}
    assert {round(weight, 12) for weight in weights.values()} == {round(weight, 12) for weight in expected}
    assert weights["1_3_2", "1_4_2"] == pytest.approx(0.3)
    assert len(weights) == graph.number_of_edges() + 1
    assert weights["1_4_2", "2_2_2"] == 1.0


def test_the_input_of_a_higher_layer_is_no_embedding():
    data = checked(information_flow_routes(by_hand()))
    kinds = {(node["layer"], node["feature_type"]) for node in data["nodes"]}
    assert ("3", "resid_pre") in kinds
    assert "embedding" not in {kind for _, kind in kinds}


def test_the_prediction_is_the_logit():
    model = decoder()
    prompt = tokens(model, 1, 6)
    m = lm.run(model, prompt, "information_flow_routes")
    data = checked(information_flow_routes(m, [-1, 2], threshold=0.01))
    logits = [node for node in data["nodes"] if node["feature_type"] == "logit"]
    assert [node["ctx_idx"] for node in logits] == [5, 2]
    for node in logits:
        entry = m.explained[node["ctx_idx"]]
        assert node["clerp"] == f'Output "{entry.prediction}" (p={entry.probability:.3f})'
        assert node["token_prob"] == entry.probability
    assert data["metadata"]["prompt"] == "".join(m.tokens)


def test_both_stacks_of_an_encoder_decoder():
    model = build_or_skip(bridge, "bart", torch.float64)
    maps = lm.run(model, prompt_of(model), "information_flow_routes", part="all")
    data = checked(information_flow_routes(maps, threshold=0.01))
    by_place = {node["node_id"]: node["ctx_idx"] for node in data["nodes"]}
    layers = {"encoder": set(), "decoder": set()}
    for node in data["nodes"]:
        if node["layer"] != "E" and node["feature_type"] != "logit":
            layers["encoder" if by_place[node["node_id"]] < 7 else "decoder"].add(int(node["layer"]))
    assert max(layers["encoder"]) < min(layers["decoder"])


@pytest.mark.parametrize("make", ["layered", "flow", "networkx", "tree", "one layer"])
def test_graphs_of_other_maps(make):
    scores = random_attention(3, None, 4)
    m = lm.MixingMap(scores=scores, tokens=list("abcd"), method="attention", causal=True, residual=0.5)
    graph = {
        "layered": lambda: layered_graph(m),
        "flow": lambda: information_flow_graph(m),
        "networkx": m.to_networkx,
        "tree": lambda: lm.attribution_tree(m),
        "one layer": lambda: information_flow_graph(m.select_layers([0])),
    }[make]()
    if make in ("layered", "networkx"):
        # Such a graph has no target, so no logit either.
        graph.graph["target"] = (3, 3)
    data = checked(graph)
    assert len(data["links"]) == graph.number_of_edges() + 1


def test_a_trace():
    model = decoder()
    t = lm.trace(model, "w5 w6 w7 w8", answer=" w9 w10", sources="token")
    graph = t.to_networkx()
    assert isinstance(graph, nx.DiGraph)
    table = t.to_dataframe()
    assert graph.number_of_edges() == len(table)
    assert sorted(graph.edges[edge]["weight"] for edge in graph.edges) == sorted(table["score"])
    data = checked(graph)
    (written,) = [node for node in data["nodes"] if node["feature_type"] == "logit"]
    assert written["ctx_idx"] == t.n_prompt
    assert written["clerp"].startswith(f"{t.text} (p=")
    assert {node["clerp"] for node in data["nodes"]} - {written["clerp"]} == set(table["source"])


def test_a_prediction_with_the_marks_of_a_probability():
    graph = information_flow_routes(by_hand())
    graph.nodes[6, 2].update(prediction="f(p=3)", probability=0.5)
    (logit,) = [node for node in checked(graph)["nodes"] if node["feature_type"] == "logit"]
    assert logit["clerp"] == 'Output "f(p =3)" (p=0.500)'


def test_a_file(tmp_path):
    path = tmp_path / "routes.json"
    data = to_neuronpedia(information_flow_routes(by_hand()), path, model="é")
    assert json.loads(path.read_text(encoding="utf-8")) == data


def test_graphs_that_cannot_be_shown():
    m = lm.MixingMap(scores=random_attention(2, None, 4), tokens=list("abcd"), causal=True)
    with pytest.raises(ValueError, match=r"nodes with a level and a position, .* write m.to_networkx\(\)"):
        to_neuronpedia(m.to_networkx(layer=0), model="gpt2-small")
    with pytest.raises(ValueError, match="at least one edge, got none; lower the threshold"):
        to_neuronpedia(m.to_networkx(threshold=2), model="gpt2-small")
    with pytest.raises(TypeError, match="graph: expected a networkx DiGraph"):
        to_neuronpedia(m, model="gpt2-small")
    with pytest.raises(TypeError, match="model: expected a name"):
        to_neuronpedia(m.to_networkx(), model=None)


def test_layers_of_a_map_keep_their_labels():
    scores = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]]])
    m = lm.MixingMap(scores=scores, tokens=["a", "b"], causal=True, layers=[6, 7])
    data = lm.graphs.to_neuronpedia(m.to_networkx(), model="x")
    labels = {node["clerp"] for node in data["nodes"]}
    assert {"resid_post, layer 6: b", "resid_post, layer 7: b"} <= labels
    assert not [node for node in data["nodes"] if node["feature_type"] == "embedding"]


def test_a_pruned_graph_has_its_target_once():
    model = decoder()
    m = lm.run(model, torch.tensor([1, 5, 9, 12]), "information_flow_routes")
    routes = lm.graphs.information_flow_routes(m, queries=[2, 3])
    target = routes.graph["targets"][0]
    data = lm.graphs.to_neuronpedia(lm.graphs.prune_graph(routes, target=target), model="x")
    ids = [node["node_id"] for node in data["nodes"]]
    assert len(ids) == len(set(ids))
    assert sum(node["is_target_logit"] for node in data["nodes"]) == 1
    assert len(data["links"]) == len({(link["source"], link["target"]) for link in data["links"]})
