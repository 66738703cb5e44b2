"""Test the graph of information-flow routes, with maps made by hand and with models."""

import networkx as nx
import pytest
import torch

import lens_mix as lm
from lens_mix.graphs import information_flow_routes, load_graph, prune_graph, save_graph
from lens_mix.methods.component_shares import part_shares
from lens_mix.view import information_flow
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import bridge, hooked_encoder_decoder, hooked_transformer, tokens

TOKENS = [" one", " t", "wo"]


def by_hand(heads=None, parallel=False, **fields):
    """Return a map of two layers over three tokens, with the residual's share on the diagonal."""
    resid_pre = torch.tensor([[1.0, 0.5, 0.4], [1.0, 0.7, 0.03]], dtype=torch.float64)
    layers = [
        [[0.0, 0.0, 0.0], [0.48, 0.02, 0.0], [0.3, 0.3, 0.0]],
        [[0.0, 0.0, 0.0], [0.28, 0.02, 0.0], [0.02, 0.6, 0.35]],
    ]
    attention = torch.tensor(layers, dtype=torch.float64)
    scores = attention + torch.diag_embed(resid_pre)
    if heads is not None:
        scores = torch.stack([attention * share for share in heads], dim=1)
        scores = scores + torch.diag_embed(resid_pre / len(heads))[:, None]
    parts = [
        {"layer": 4 + place, "tokens": 3, "queries": [0, 1, 2], "parallel": parallel}
        | {"resid_pre": resid_pre[place].tolist(), "mlp_out": mlp, "resid_mid": [1 - share for share in mlp]}
        for place, mlp in enumerate([[0.2, 0.0, 0.99], [0.5, 0.03, 0.3]])
    ]
    record = {"tokens": TOKENS, "method": "information_flow_routes", "causal": True, "layers": [4, 5]}
    return lm.MixingMap(scores=scores, **record | {"provenance": {"details": {"parts": parts}}} | fields)


def weights(graph):
    return {edge: round(weight, 9) for *edge, weight in graph.edges(data="weight") for edge in [tuple(edge)]}


def test_only_what_is_above_the_threshold_and_leads_to_the_query():
    graph = information_flow_routes(by_hand())
    assert weights(graph) == {
        # Layer 5: the output comes from the feed-forward and the residual stream, the latter from " t" and
        # "wo".
        ((4, 2), (6, 2)): 0.7,
        ((5, 2), (6, 2)): 0.3,
        ((4, 2), (5, 2)): 1.0,
        ((3, 1), (4, 2)): 0.6,
        # This is the attention to itself alone, because the residual's 0.03 is below the threshold.
        ((3, 2), (4, 2)): 0.35,
        # Layer 4: "wo" comes from the feed-forward alone, and " t" from the residual stream alone.
        ((2, 2), (3, 2)): 0.99,
        ((1, 2), (2, 2)): 1.0,
        ((1, 1), (3, 1)): 1.0,
        ((0, 0), (1, 2)): 0.3,
        ((0, 1), (1, 2)): 0.3,
        ((0, 2), (1, 2)): 0.4,
        ((0, 0), (1, 1)): 0.48,
        ((0, 1), (1, 1)): 0.5,
    }
    own, stays = graph.edges[(3, 2), (4, 2)], graph.edges[(0, 1), (1, 1)]
    assert own == {
        "weight": pytest.approx(0.35),
        "attention": pytest.approx(0.35),
        "residual": 0.0,
        "layer": 5,
    }
    assert (stays["attention"], stays["residual"], stays["layer"]) == (0.0, 0.5, 4)
    assert graph.nodes[5, 2] == {"level": 5, "position": 2, "token": "wo", "layer": 5, "kind": "mlp_out"}
    kinds = {level: kind for (level, _), kind in graph.nodes(data="kind")}
    assert kinds == dict(enumerate(["resid_pre", *["resid_mid", "mlp_out", "resid_post"] * 2]))
    assert (graph.nodes[0, 0]["layer"], graph.graph["target"], graph.graph["threshold"]) == (3, (6, 2), 0.04)


def test_another_query_several_and_a_higher_threshold():
    graph = information_flow_routes(by_hand(), " one")
    assert {position for _, position in graph} == {0}
    assert set(graph.in_edges((6, 0))) == {((4, 0), (6, 0)), ((5, 0), (6, 0))}
    both = information_flow_routes(by_hand(), [0, -1])
    alone = nx.compose(graph, information_flow_routes(by_hand(), -1))
    assert nx.utils.graphs_equal(nx.DiGraph(both.edges), nx.DiGraph(alone.edges))
    assert both.graph["targets"] == ((6, 0), (6, 2))
    assert "target" not in both.graph
    # A branch ends at a node without an edge above the threshold.
    few = information_flow_routes(by_hand(), threshold=0.6)
    assert weights(few) == {((4, 2), (6, 2)): 0.7}
    assert set(information_flow_routes(by_hand(), threshold=1)) == {(6, 2)}


def test_each_head_is_an_edge_of_its_own():
    """Check heads of 0.36, 0.18 and 0.06, of which a threshold of 0.1 removes the last."""
    graph = information_flow_routes(by_hand([0.6, 0.1, 0.3]), threshold=0.1)
    edge = graph.edges[(3, 1), (4, 2)]
    assert [head for head, _ in edge["heads"]] == [0, 2]
    assert [share for _, share in edge["heads"]] == pytest.approx([0.36, 0.18])
    assert (edge["weight"], edge["attention"]) == (pytest.approx(0.54), pytest.approx(0.54))
    # The residual is one edge, although each head's diagonal contains a share of it.
    assert graph.edges[(0, 2), (1, 2)] == {
        "weight": 0.4,
        "attention": 0,
        "residual": 0.4,
        "layer": 4,
        "heads": [],
    }


def test_the_feed_forward_of_a_parallel_block_reads_its_input():
    graph = information_flow_routes(by_hand(parallel=True))
    assert set(graph.in_edges((5, 2))) == {((3, 2), (5, 2))}


def test_words():
    graph = information_flow_routes(by_hand(), " two", words="words")
    assert graph.graph["tokens"] == [" one", " two"]
    # The rows of " t" and "wo" are averaged, and their columns summed, with attention within the word.
    edge = graph.edges[(3, 1), (4, 1)]
    assert edge["residual"] == pytest.approx((0.7 + 0.03) / 2)
    assert edge["attention"] == pytest.approx((0.02 + 0.6 + 0.35) / 2)
    assert graph.edges[(3, 0), (4, 1)]["weight"] == pytest.approx((0.28 + 0.02) / 2)
    assert graph.edges[(5, 1), (6, 1)]["weight"] == pytest.approx((0.03 + 0.3) / 2)
    for words in ([[0], [1, 2]], ["one", "two"]):
        again = information_flow_routes(by_hand(), words=words)
        assert weights(again) == weights(graph)


@pytest.mark.parametrize("name", ["gpt2", "bert", "gpt_neox", "LN"])
@pytest.mark.parametrize("per_head", [False, True])
def test_of_a_model_it_is_the_cut_of_all_edges(name, per_head):
    factory = hooked_transformer if name == "LN" else bridge
    model = build_or_skip(factory, name, torch.float64)
    found = lm.run(model, tokens(model, 1, 7, 1), lm.methods.InformationFlowRoutes(per_head=per_head))
    everything = information_flow_routes(found, list(range(7)), threshold=0)
    mids = [node for node, kind in everything.nodes(data="kind") if kind in ("resid_mid", "resid_post")]
    for node in mids:
        # All edges into a node sum to 1, because they are the shares of its inputs.
        assert sum(values["weight"] for *_, values in everything.in_edges(node, data=True)) == pytest.approx(
            1
        )
    some = information_flow_routes(found, threshold=0.1)
    assert 1 < len(some) < len(everything)
    for start, end, values in some.edges(data=True):
        assert values["weight"] > 0.1
        assert values["weight"] <= everything.edges[start, end]["weight"] + 1e-12
    assert set(some) - {(6, 6)} == nx.ancestors(some, (6, 6))
    assert everything.edges[(4, 6), (6, 6)]["weight"] == pytest.approx(
        float(part_shares(found).resid_mid[1, -1])
    )


def joint_by_hand(maps, query, threshold):
    """Return the edges that lead to a target position, by a recursion over the maps of the three parts."""
    source, edges, seen = len(maps["encoder"].tokens), {}, set()
    depth = len(maps["encoder"])

    def share(part, name, layer, query):
        return maps[part].provenance["details"]["parts"][layer][name][query]

    def add(start, end, weight):
        if weight > threshold:
            edges[start, end] = edges.get((start, end), 0) + weight
            follow(start)

    def attend(part, layer, query, end, below, first, own):
        scores, residual = maps[part].scores[layer, ..., query, :], share(part, "resid_pre", layer, query)
        scores = scores.reshape(-1, scores.shape[-1]).clone()
        if part == "cross":
            scores = scores[:, :-1]
        else:
            scores[:, query] -= residual / len(scores)
        for head in scores:
            for key, weight in enumerate(head.tolist()):
                add((below, first + key), end, weight)
        add(own, end, residual)

    def follow(node):
        level, position = node
        if node in seen or level == 0 or (level == 3 * depth and position >= source):
            return
        seen.add(node)
        if position < source:
            layer, step = divmod(level - 1, 3)
            part, query, steps = "encoder", position, ["encoder", "mlp", "out"]
        else:
            layer, step = divmod(level - 3 * depth - 1, 4)
            part, query, steps = "cross", position - source, ["decoder", "cross", "mlp", "out"]
        if steps[step] in maps:
            first = source if steps[step] == "decoder" else 0
            below = 3 * depth if steps[step] == "cross" else level - 1
            attend(steps[step], layer, query, node, below, first, (level - 1, position))
        elif steps[step] == "mlp":
            add((level - 1, position), node, 1.0)
        else:
            add((level - 2, position), node, share(part, "resid_mid", layer, query))
            add((level - 1, position), node, share(part, "mlp_out", layer, query))

    follow((3 * depth + 4 * len(maps["cross"]), source + query))
    return edges


@pytest.mark.parametrize("name", ["t5", "bart", "marian", "HookedEncoderDecoder"])
@pytest.mark.parametrize("per_head", [False, True])
def test_of_an_encoder_decoder_down_to_source_and_prefix(name, per_head, tmp_path):
    hooked = name == "HookedEncoderDecoder"
    model = build_or_skip(*((hooked_encoder_decoder,) if hooked else (bridge, name)), torch.float64)
    try:
        maps = lm.run(
            model, prompt_of(model), lm.methods.InformationFlowRoutes(per_head=per_head), part="all"
        )
    except lm.UnsupportedModelError as reason:
        pytest.skip(str(reason))
    source, target = len(maps["encoder"].tokens), len(maps["decoder"].tokens)
    everything = information_flow_routes(maps, list(range(target)), threshold=0)
    for node, kind in everything.nodes(data="kind"):
        if kind in ("resid_mid", "resid_mid_cross", "resid_post"):
            assert sum(weight for *_, weight in everything.in_edges(node, data="weight")) == pytest.approx(1)
    for query in (-1, 1):
        some = information_flow_routes(maps, query, threshold=0.05)
        assert weights(some) == pytest.approx(joint_by_hand(maps, query % target, 0.05))
        assert {position < source for _, position in some} == {True, False}
    depth = 3 * len(maps["encoder"])
    assert some.graph["target"] == (depth + 4 * len(maps["cross"]), source + 1)
    assert some.graph["source"] == source
    assert some.graph["tokens"] == maps["encoder"].tokens + maps["decoder"].tokens
    kinds = {kind for (_, position), kind in some.nodes(data="kind") if position >= source}
    assert kinds == {"resid_pre", "resid_mid", "resid_mid_cross", "mlp_out", "resid_post"}
    crossing = [edge for edge in some.edges if edge[0][1] < source <= edge[1][1]]
    assert crossing
    assert all(start[0] == depth for start, _ in crossing)
    save_graph(prune_graph(some), tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json").graph["source"] == source
    assert information_flow(some).get_size_inches()[1] > 1


def test_parts_that_do_not_fit_are_refused():
    model = build_or_skip(bridge, "bart", torch.float64)
    maps = lm.run(model, prompt_of(model), "information_flow_routes", part="all")
    with pytest.raises(ValueError, match="words: expected None for the parts of an encoder-decoder"):
        information_flow_routes(maps, words="words")
    with pytest.raises(ValueError, match="expected the layers of decoder and cross to be the same"):
        information_flow_routes({**maps, "decoder": maps["decoder"].select_layers([0])})
    others = lm.run(model, prompt_of(model), "alti", part="all")
    with pytest.raises(ValueError, match="expected a map of information_flow_routes, got method 'alti'"):
        information_flow_routes(others)


def test_it_goes_where_other_graphs_go(tmp_path):
    graph = information_flow_routes(by_hand([0.5, 0.5]))
    pruned = prune_graph(graph, threshold=0.04)
    top = sum(values["share"] for *_, values in pruned.in_edges((6, 2), data=True))
    assert top == pytest.approx(1)
    assert information_flow(graph).get_size_inches()[1] > 1
    for ending in ("json", "graphml"):
        save_graph(graph, tmp_path / f"graph.{ending}")
        again = load_graph(tmp_path / f"graph.{ending}")
        assert weights(again) == weights(graph)
        assert again.graph["targets"] == ((6, 2),)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="expected a map of information_flow_routes, got method 'attention'"):
        information_flow_routes(by_hand(method="attention", provenance={}))
    with pytest.raises(ValueError, match="threshold: expected"):
        information_flow_routes(by_hand(), threshold=2)
    with pytest.raises(ValueError, match="queries: expected at least one position, each once"):
        information_flow_routes(by_hand(), [-1, 2])
    with pytest.raises(ValueError, match="queries: expected a text that the prompt contains"):
        information_flow_routes(by_hand(), "three")
    with pytest.raises(ValueError, match="expected the rows of all 3 positions"):
        information_flow_routes(by_hand().select_queries([-1]))
    with pytest.raises(ValueError, match="expected layers that follow one another"):
        information_flow_routes(by_hand(layers=[4, 6]))
    with pytest.raises(ValueError, match="after tokens were dropped or merged; words="):
        information_flow_routes(by_hand().merge_words())
    with pytest.raises(TypeError, match="mixing_map: expected a MixingMap"):
        information_flow_routes("attention")
