"""Test the trees of a page: which ones it has, and that their numbers are those of the graphs."""

from __future__ import annotations

import networkx as nx
import pytest
import torch

import lens_mix as lm
from lens_mix.graphs import information_flow_graph, information_flow_routes, layered_graph
from lens_mix.methods.component_shares import part_shares
from lens_mix.view.page import trees
from tests.random_maps import map_of, random_attention
from tests.tiny_models import llama_like, tokens
from tests.view.page.routes import routes_map
from tests.view.page.test_page import data_of
from tests.view.page.tokens import NASTY


def attribution(**fields):
    scores = random_attention(heads=2) - 0.1 * torch.ones(6, 6).tril()
    return map_of(scores, provenance={"has_tree": True}, **fields)


def graph_of(packed):
    """Return the graph that the page contains."""
    graph, places = nx.DiGraph(), [(node["level"], node["position"]) for node in packed["nodes"]]
    graph.add_nodes_from(zip(places, packed["nodes"], strict=True))
    graph.add_edges_from((places[start], places[end], values) for start, end, values in packed["edges"])
    return graph


def assert_same(packed, graph):
    held = graph_of(packed)
    assert set(held) == set(graph)
    for node, values in graph.nodes(data=True):
        assert held.nodes[node] == {**values, "level": node[0], "position": node[1]}
    assert {(a, b): values for a, b, values in held.edges(data=True)} == {
        (a, b): values for a, b, values in graph.edges(data=True)
    }
    assert packed["whole"] == [len(graph), graph.number_of_edges()]
    assert packed["tokens"] == graph.graph["tokens"]


@pytest.mark.parametrize("heads", [None, 2])
def test_maps_that_have_a_tree_bring_it(heads):
    maps = {"plain": map_of(), "tree": attribution(), "routes": routes_map(heads=heads)}
    (packed,) = data_of(lm.page(maps))["trees"]
    assert [one["name"] for one in packed] == ["tree", "routes"]
    assert_same(packed[0], lm.attribution_tree(maps["tree"], root=5))
    assert packed[0]["options"] == {
        "threshold": 0.4,
        "cost": 0.0,
        "order": "score",
        "within_layer": False,
    }
    assert_same(packed[1], information_flow_routes(maps["routes"], maps["routes"].default_query_position))
    top = packed[1]["nodes"][packed[1]["roots"][0]]
    assert (top["level"], top["position"]) == (9, 5)
    shares = part_shares(maps["routes"])
    for name in ("resid_pre", "resid_mid"):
        held = torch.tensor(packed[1]["shares"][name], dtype=torch.float64)
        assert torch.allclose(held, getattr(shares, name), rtol=6e-4, atol=0)
    assert packed[1]["shares"]["parallel"] == shares.parallel
    assert [one["of"] for one in packed] == ["tree", "routes"]


@pytest.mark.parametrize("position", [2, 4, 5])
def test_a_tree_starts_at_the_explained_position(position):
    """Without a position, `attribution_tree` would start at the token with the largest sum."""
    scores = attribution().scores.clone()
    scores[:, :, 3] += 0.3 * (scores[:, :, 3] > 0)
    m = attribution().replace(scores=scores, default_query=position)
    assert lm.attribution_tree(m).graph["root"][1] == 3
    ((packed,),) = data_of(lm.page(m))["trees"]
    assert_same(packed, lm.attribution_tree(m, root=position))
    top = packed["nodes"][packed["roots"][0]]
    assert (top["level"], top["position"]) == (4, position)


def test_a_tree_of_a_run_starts_at_the_explained_position():
    model = llama_like()
    prompt = tokens(model, 1, 7, 1)[0]
    target = lm.targets.predicted(position=3)
    m = lm.run(model, prompt, lm.methods.AttentionAttribution(target, n_steps=2))
    assert m.default_query == 3
    ((packed,),) = data_of(lm.page(m))["trees"]
    assert packed["nodes"][packed["roots"][0]]["position"] == 3


def test_maps_that_can_have_none():
    cut, rolled = routes_map().select_queries([-1]), lm.rollout(routes_map())
    none = attribution().replace(scores=-torch.ones(4, 2, 6, 6).tril())
    assert data_of(lm.page([cut, rolled, none]))["trees"] == [[], [], []]


def test_trees_that_are_given():
    m = attribution()
    tree = lm.attribution_tree(m, threshold=0.1, cost=0.05, root=3)
    flow = information_flow_graph(map_of(), 4)
    pages = {
        "one": lm.page(m, trees=tree),
        "named": lm.page(m, trees={"mine": tree, "flow": flow}),
        "per prompt": lm.page([m, m], trees=[{}, tree]),
        "none": lm.page(m, trees={}),
    }
    held = {name: data_of(page)["trees"] for name, page in pages.items()}
    assert [[one["name"] for one in prompt] for prompt in held["per prompt"]] == [[], ["tree"]]
    assert held["none"] == [[]]
    assert_same(held["one"][0][0], tree)
    assert_same(held["named"][0][1], flow)
    assert held["named"][0][1]["options"]["edges_before"] == flow.graph["edges_before"]


def test_of_a_large_graph_the_largest_edges(monkeypatch):
    monkeypatch.setattr(trees, "_MOST_EDGES", 5)
    graph = layered_graph(map_of())
    (packed,) = data_of(lm.page(map_of(), trees=graph))["trees"][0]
    largest = sorted((values["weight"] for *_, values in graph.edges(data=True)), reverse=True)
    assert [values["weight"] for *_, values in packed["edges"]] == largest[:5]
    assert packed["whole"] == [len(graph), graph.number_of_edges()]


def test_hostile_tokens_stay_text():
    m = map_of(random_attention(size=len(NASTY)), tokens=list(NASTY))
    page = lm.page(m, trees={"</script>": lm.attribution_tree(m, threshold=0.0)})
    ((packed,),) = data_of(page)["trees"]
    assert packed["tokens"] == list(NASTY)
    assert packed["name"] == "</script>"
    assert page.html.count("</script>") == 4


def test_what_is_no_tree():
    m, tree = map_of(), lm.attribution_tree(map_of())
    plain = nx.DiGraph([((0, 0), (1, 0))])
    weightless = tree.copy()
    next(iter(weightless.edges(data=True)))[2]["weight"] = float("nan")
    for wrong, kind, says in (
        (3, TypeError, "trees: expected a graph, several by name"),
        ([m], TypeError, "trees: expected graphs by name"),
        ({"m": m}, TypeError, "trees: expected a networkx graph"),
        ([tree, tree], ValueError, "trees: expected one entry per prompt, 1, got 2"),
        (plain, ValueError, "trees: expected edges with a finite weight, got None"),
        (weightless, ValueError, "trees: expected edges with a finite weight, got nan"),
        (nx.DiGraph([("a", "b", {"weight": 1.0})]), ValueError, r"trees: expected nodes \(level, position\)"),
    ):
        with pytest.raises(kind, match=says):
            lm.page(m, trees=wrong)
