"""Test graphs of maps: the meaning of their edges, pruning, and files."""

import networkx as nx
import pytest
import torch

import lens_mix as lm
from lens_mix.aggregation.tree import attribution_tree
from lens_mix.graphs import information_flow_graph, layered_graph, load_graph, prune_graph, save_graph
from lens_mix.view import information_flow
from tests.random_maps import map_of, random_attention


def level_shares(graph):
    """Return the sum of the nodes' shares of each level."""
    levels = {}
    for (level, _), share in graph.nodes(data="share"):
        levels[level] = levels.get(level, 0) + share
    return levels


# ---------------------------------------------------------------------- the layered graph


def test_edges_are_the_capacities_of_flow():
    mixing_map = map_of(random_attention(heads=2))
    graph = layered_graph(mixing_map)
    merged = 0.5 * mixing_map.scores.mean(1) + 0.5 * torch.eye(6)
    for (level, key), (above, query), values in graph.edges(data=True):
        assert above == level + 1
        assert values["layer"] == level
        assert values["capacity"] == values["weight"]
        assert values["weight"] == pytest.approx(merged[level, query, key].item(), abs=1e-12)
    assert graph.number_of_edges() == 4 * 21
    assert graph.nodes[3, 5] == {"token": " t5", "position": 5, "level": 3, "layer": 2}
    assert graph.nodes[0, 0]["layer"] == -1
    assert graph.graph["tokens"] == mixing_map.tokens


def test_maximum_flow_through_it_is_flow():
    mixing_map = map_of()
    graph = layered_graph(mixing_map, layer=2)
    raw = lm.flow(mixing_map, layer=2, normalize=False).scores[0]
    for query, key in ((5, 0), (4, 2), (3, 3)):
        value = nx.maximum_flow_value(graph, (0, key), (3, query))
        assert value == pytest.approx(raw[query, key].item(), abs=1e-8)


def test_its_paths_are_the_rollout():
    mixing_map = map_of(random_attention(3), method="value_zeroing")
    graph = information_flow_graph(mixing_map, threshold=0.0)
    expected = lm.rollout(mixing_map).scores[-1, -1]
    for position in range(6):
        assert graph.nodes[0, position]["share"] == pytest.approx(expected[position].item(), abs=1e-12)


def test_residual_bos_and_threshold():
    mixing_map = map_of()
    assert layered_graph(mixing_map, residual=1.0).number_of_edges() == 4 * 6
    assert layered_graph(mixing_map, drop_bos=True).graph["tokens"] == mixing_map.tokens[1:]
    thick = layered_graph(mixing_map, threshold=0.2)
    assert 0 < thick.number_of_edges() < 4 * 21
    assert min(weight for *_, weight in thick.edges(data="weight")) > 0.2
    late = layered_graph(mixing_map.select_layers([2, 3]))
    assert (late.nodes[0, 0]["layer"], late.nodes[2, 0]["layer"]) == (1, 3)


def test_a_layer_map_has_its_own_graph():
    graph = map_of().to_networkx(1)
    assert set(graph.nodes) == set(range(6))


# ---------------------------------------------------------------------- information flow


@pytest.mark.parametrize(("by", "key"), [("rollout", None), ("flow", 1), ("flow", " t1"), ("weight", None)])
@pytest.mark.parametrize("query", [-1, 4, " t4"])
def test_only_what_leads_from_the_input_to_the_query(by, key, query):
    mixing_map = map_of()
    graph = information_flow_graph(mixing_map, query, by=by, key=key, threshold=0.05)
    target = (4, 5 if query == -1 else 4)
    assert graph.graph["target"] == target
    assert set(graph) == nx.ancestors(graph, target) | {target}
    for node in graph:
        entering = [weight for *_, weight in graph.in_edges(node, data="weight")]
        assert (sum(entering) == pytest.approx(1)) if node[0] > 0 else not entering
    assert all(amount > 0.05 for *_, amount in graph.edges(data="amount"))
    assert level_shares(graph) == pytest.approx(dict.fromkeys(range(5), 1.0))
    assert graph.nodes[target]["share"] == 1
    if key is not None:
        assert [node for node in graph if node[0] == 0] == [(0, 1)]


def test_every_edge_above_the_threshold_on_a_path_is_kept():
    mixing_map = map_of(random_attention(2))
    whole, graph = layered_graph(mixing_map), information_flow_graph(mixing_map, threshold=0.05)
    kept = 0
    for key in range(6):
        for middle in range(key, 6):
            lower, upper = whole.edges[(0, key), (1, middle)], whole.edges[(1, middle), (2, 5)]
            amounts = lower["weight"] * upper["weight"], upper["weight"]
            expected = min(amounts) > 0.05
            assert graph.has_edge((0, key), (1, middle)) == expected
            kept += expected
    assert 0 < kept < 21


def test_the_amounts_of_a_flow_are_a_flow():
    graph = information_flow_graph(map_of(), by="flow", key=0, threshold=0.0)
    for node in graph:
        into = sum(amount for *_, amount in graph.in_edges(node, data="amount"))
        out = sum(amount for *_, amount in graph.out_edges(node, data="amount"))
        assert (into if node != (0, 0) else out) == pytest.approx(1 if node in ((0, 0), (4, 5)) else out)
    raw = lm.flow(map_of(), normalize=False).scores[-1, 5, 0].item()
    assert all(v["amount"] * raw <= v["capacity"] + 1e-8 for *_, v in graph.edges(data=True))


def test_the_threshold_by_itself_leaves_a_path():
    even = torch.full((6, 300, 300), 1 / 300)
    graph = information_flow_graph(lm.MixingMap(even[:, :40, :40], ["a"] * 40, "attention"), residual=0.0)
    assert graph.graph["threshold"] < 0.01
    assert any(node[0] == 0 for node in graph)
    assert information_flow_graph(map_of()).graph["threshold"] == 0.01


def test_a_threshold_that_leaves_nothing_says_which_would():
    with pytest.raises(ValueError, match=r"threshold: expected less than (\S+) to keep a path") as caught:
        information_flow_graph(map_of(), threshold=0.9)
    largest = float(str(caught.value).split("less than ")[1].split(" ")[0])
    assert information_flow_graph(map_of(), threshold=largest * 0.999)
    with pytest.raises(ValueError, match="threshold"):
        information_flow_graph(map_of(), threshold=largest * 1.001)


def test_wrong_questions_are_refused():
    for wrong in ({"by": "gradient"}, {"by": "flow"}, {"key": 1}):
        with pytest.raises(ValueError, match=r"by: expected 'rollout'|key: expected a key with by='flow'"):
            information_flow_graph(map_of(), **wrong)
    with pytest.raises(ValueError, match="query: expected a position"):
        information_flow_graph(map_of(), 6)
    with pytest.raises(ValueError, match="key: expected a position"):
        information_flow_graph(map_of(), by="flow", key=9)
    with pytest.raises(ValueError, match=r"key: expected an input with a flow above 0 to \(4, 2\)"):
        information_flow_graph(map_of(), 2, by="flow", key=4)
    for threshold in (-0.1, float("nan"), float("inf"), "0.1", True):
        with pytest.raises((TypeError, ValueError), match="threshold: expected a finite number, 0 or more"):
            layered_graph(map_of(), threshold=threshold)
    with pytest.raises(ValueError, match="expected layer maps"):
        layered_graph(lm.rollout(map_of()))
    with pytest.raises(TypeError, match="expected a MixingMap"):
        layered_graph(map_of().scores)


# ---------------------------------------------------------------------- any graph: a tree


def tree():
    graph = nx.DiGraph()
    graph.add_node((3, 4), token="root")
    for start, end, weight in [
        ((2, 1), (3, 4), 0.6),
        ((2, 3), (3, 4), 0.2),
        ((1, 0), (2, 1), 0.5),
        ((1, 2), (2, 3), 0.9),
    ]:
        graph.add_edge(start, end, weight=weight)
    return graph


def test_a_tree_is_pruned_and_renormalized():
    graph = prune_graph(tree(), (3, 4), 0.3)
    assert set(graph.edges) == {((2, 1), (3, 4)), ((1, 0), (2, 1))}
    assert graph.edges[(2, 1), (3, 4)]["weight"] == 1
    assert graph.edges[(2, 1), (3, 4)]["raw_weight"] == 0.6
    whole = prune_graph(tree(), (3, 4))
    assert whole.edges[(2, 1), (3, 4)]["weight"] == pytest.approx(0.75)
    assert whole.nodes[1, 2]["share"] == pytest.approx(0.25)
    raw = prune_graph(tree(), (3, 4), renormalize=False)
    assert raw.edges[(2, 1), (3, 4)] == {"weight": 0.6}
    subtree = prune_graph(tree(), (2, 3))
    assert set(subtree) == {(2, 3), (1, 2)}


def test_an_attribution_tree_takes_the_same_way(tmp_path):
    scores = torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(0))
    grown = attribution_tree(lm.MixingMap(scores, list("abcdef")), threshold=0.5)
    assert grown.number_of_edges() > 1
    pruned = prune_graph(grown)
    assert set(pruned) == nx.ancestors(grown, grown.graph["root"]) | {grown.graph["root"]}
    assert pruned.nodes[grown.graph["root"]]["share"] == 1
    assert prune_graph(grown, threshold=0.9).number_of_edges() < grown.number_of_edges()
    for ending in ("json", "graphml"):
        save_graph(grown, tmp_path / f"tree.{ending}")
        assert nx.utils.graphs_equal(load_graph(tmp_path / f"tree.{ending}"), grown)
    information_flow(grown).savefig(tmp_path / "tree.png")


def test_the_given_graph_stays_as_it_is():
    given = tree()
    prune_graph(given, (3, 4), 0.3)
    assert nx.utils.graphs_equal(given, tree())


def test_graphs_that_cannot_be_pruned_are_refused():
    with pytest.raises(TypeError, match="graph: expected a networkx DiGraph, got Graph"):
        prune_graph(nx.Graph(), (3, 4))
    with pytest.raises(ValueError, match=r"target: expected one of the \d+ nodes of the graph"):
        prune_graph(tree(), (9, 9))
    with pytest.raises(ValueError, match=r"target: expected one of the \d+ nodes of the graph, got None"):
        prune_graph(tree())
    with pytest.raises(ValueError, match="'capacity' and 'weight', got \\['weight'\\]"):
        prune_graph(tree(), (3, 4), by="capacity")
    with pytest.raises(ValueError, match=r"threshold: expected less than 0.6 to keep a path .*, got 0.6"):
        prune_graph(tree(), (3, 4), 0.6)
    circle = tree()
    circle.add_edge((3, 4), (1, 0), weight=1.0)
    with pytest.raises(ValueError, match="graph: expected an acyclic graph"):
        prune_graph(circle, (3, 4))


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("ending", ["json", "graphml"])
def test_a_graph_survives_its_file(tmp_path, ending):
    graph = information_flow_graph(map_of())
    save_graph(graph, tmp_path / f"graph.{ending}")
    again = load_graph(tmp_path / f"graph.{ending}")
    assert isinstance(again, nx.DiGraph)
    assert nx.utils.graphs_equal(again, graph)
    for other in (tree(), map_of().to_networkx(1)):
        save_graph(other, str(tmp_path / f"other.{ending}"))
        assert nx.utils.graphs_equal(load_graph(tmp_path / f"other.{ending}"), other)


@pytest.mark.parametrize("token", ["\x00", "a\r\nb", "\ud800", "<&\"'>", " the", "\n", "\ufffe", "é🙂"])
def test_any_token_can_be_written(tmp_path, token):
    graph = nx.DiGraph()
    graph.add_node((0, 0), token=token, layer=None, spans=[1, 2])
    save_graph(graph, tmp_path / "graph.graphml")
    again = load_graph(tmp_path / "graph.graphml").nodes[0, 0]
    escapes = {"\x00": "\\x00", "a\r\nb": "a\\r\nb", "\ud800": "\\ud800", "\ufffe": "\\ufffe"}
    assert again["token"] == escapes.get(token, token)
    assert again["spans"] == "[1, 2]"
    assert "layer" not in again
    assert graph.nodes[0, 0]["token"] == token
    save_graph(graph, tmp_path / "graph.json")
    assert nx.utils.graphs_equal(load_graph(tmp_path / "graph.json"), graph)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"path: expected one that ends in .graphml or .json, got .*graph.gexf"
    ):
        save_graph(tree(), tmp_path / "graph.gexf")
    with pytest.raises(TypeError, match="graph: expected a networkx graph, got MixingMap"):
        save_graph(map_of(), tmp_path / "graph.json")
    with pytest.raises(FileNotFoundError):
        load_graph(tmp_path / "none.json")
    for ending, text in (("json", "[1]"), ("json", "{"), ("graphml", "<a>"), ("graphml", "")):
        (tmp_path / f"bad.{ending}").write_text(text)
        with pytest.raises(ValueError, match="path: expected a graph written by save_graph"):
            load_graph(tmp_path / f"bad.{ending}")


DEEP = "[" * 50_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("binary.json", bytes(range(256)), "which is not text"),
        ("binary.graphml", bytes(range(256)), "which is not text"),
        ("utf16.json", '{"nodes": []}'.encode("utf-16"), "which is not text"),
        ("deep.json", DEEP.encode(), "too many levels"),
        (
            "deep_node.json",
            f'{{"nodes": [{{"id": {"[" * 900 + "]" * 900}}}], "edges": []}}'.encode(),
            "levels",
        ),
        (
            "deep_node.graphml",
            b"<graphml xmlns='http://graphml.graphdrawing.org/xmlns'><graph edgedefault='directed'>"
            b"<node id='" + DEEP.encode() + b"'/></graph></graphml>",
            "levels",
        ),
        ("null.json", b"null", "NoneType"),
        ("empty.graphml", b"", "no element"),
    ],
)
def test_files_that_hold_no_graph(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"path: expected a graph written by save_graph, got .*{message}"):
        load_graph(tmp_path / name)


@pytest.mark.parametrize("ending", ["json", "graphml"])
def test_a_graph_of_many_levels_is_refused(tmp_path, ending):
    deep = []
    for _ in range(50_000):
        deep = [deep]
    graph = nx.DiGraph()
    graph.add_node((0, 0), token=deep)
    with pytest.raises(ValueError, match="graph: expected values in a few levels of nesting"):
        save_graph(graph, tmp_path / f"deep.{ending}")
