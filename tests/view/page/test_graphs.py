"""Test the flow and the trees of the page in a real browser: their numbers, their roots, keys and clicks."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import networkx as nx
import pytest
import torch

import lens_mix as lm
from lens_mix.graphs import information_flow_graph, information_flow_routes, layered_graph
from lens_mix.methods.component_shares import part_shares
from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401
from tests.random_maps import map_of, random_attention
from tests.tiny_models import llama_like, tokens
from tests.view.page.routes import routes_map
from tests.view.page.test_in_a_browser import all_of, doing, exported, open_pages, place, tip_of  # noqa: F401

pytestmark = NEEDS_CHROMIUM


def attribution(heads=2):
    scores = random_attention(heads=heads) - 0.1 * torch.ones(6, 6).tril()
    return map_of(scores, provenance={"has_tree": True})


def routes(heads=None):
    """Return routes in which some edges and components are below the published threshold."""
    return routes_map(heads=heads)


def drawn_edges(browser):
    """Return the weights of the drawn edges by their ends."""
    script = "return [...document.querySelectorAll('#view line[data-from]')].map(line => ({...line.dataset}))"
    return {
        (place(values["from"]), place(values["to"])): float(values["weight"])
        for values in browser.execute_script(script)
    }


def drawn_nodes(browser):
    script = "return [...document.querySelectorAll('#view [data-node]')].map(mark => mark.dataset.node)"
    return set(map(place, browser.execute_script(script)))


def assert_drawn(browser, graph, tolerance):
    """Assert that the page draws this graph."""
    drawn = drawn_edges(browser)
    assert set(drawn) == set(graph.edges)
    assert drawn_nodes(browser) == set(graph)
    for edge, weight in drawn.items():
        assert weight == pytest.approx(graph.edges[edge]["weight"], **tolerance)
    ((root,),) = [{place(mark.get_attribute("data-node")) for mark in all_of(browser, ".root[data-node]")}]
    assert root == graph.graph.get("root", graph.graph.get("target"))


def explain(browser, position):
    doing(browser, lambda: browser.execute_script("set({ query: arguments[0] })", position))


def click(browser, selector):
    browser.execute_script(
        "document.querySelector(arguments[0]).dispatchEvent(new MouseEvent('click', {bubbles: true}))",
        selector,
    )


# ---------------------------------------------------------------------- the flow

SINK = map_of(random_attention(heads=2) * 2 / 3, provenance={"sink": True})
SPECIAL = ["[CLS]", " t1", " t2", " t3", " t4", "[SEP]"]
BOTH_WAYS = map_of(random_attention(heads=2, causal=False), causal=False, tokens=SPECIAL)
ZERO_ROWS = random_attention()
ZERO_ROWS[1:, 4] = 0
FLOWS = {
    "heads": map_of(random_attention(heads=2)),
    "residual in the map": map_of(random_attention(seed=1), method="alti", residual=0.0),
    "sink": SINK,
    "both ways": BOTH_WAYS,
    "rows of zeros": map_of(ZERO_ROWS, residual=0.5),
}


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("first", [1, 0])
def test_the_flow_is_a_rollout(opened, name, first):
    m = FLOWS[name]
    left = [] if first else [0] if m.causal else [0, 5]
    kept = [position for position in range(6) if position not in left]
    browser = opened(m, f"view=flow&threshold=0.01&query=4&first={first}")
    dropped = m.drop(left) if left else m
    graph = information_flow_graph(dropped, kept.index(4), threshold=1e-9)
    amounts = {
        ((low, kept[key]), (high, kept[query])): values["amount"]
        for (low, key), (high, query), values in graph.edges(data=True)
    }
    drawn = drawn_edges(browser)
    assert drawn == pytest.approx({edge: amounts[edge] for edge in drawn}, abs=2e-3)
    assert {edge for edge, amount in amounts.items() if amount > 0.012} <= set(drawn)
    assert all(weight >= 0.01 for weight in drawn.values())
    shown = browser.find_element("css selector", "p[data-left]")
    whole = lm.rollout(m).scores[-1, 4, left].sum().item()
    assert float(shown.get_attribute("data-left")) == pytest.approx(whole, abs=2e-3)
    assert (f"{100 * whole:.0f} % of the whole" in shown.text) == bool(left)
    rolled = lm.rollout(dropped).scores[-1, kept.index(4)]
    written = re.findall(r"(\d+) “[^”]+” \(([\d.]+) %\)", shown.text)
    assert written
    for position, share in written:
        assert float(share) == pytest.approx(100 * rolled[kept.index(int(position))].item(), abs=0.7)


def test_the_first_token_is_a_number_in_each_layer(opened):
    m = FLOWS["heads"]
    browser = opened(m, "view=flow&threshold=0.01&query=5&first=0")
    assert not any(position == 0 for edge in drawn_edges(browser) for _, position in edge)
    said = all_of(browser, ".graph > svg")[0].get_attribute("aria-label")
    scores, drop = m.merge_heads().scores, m.drop(0).merge_heads().normalized().scores
    top, below = scores[-1, 5, 0].item(), 0.5 * torch.eye(6, dtype=torch.float64)[5]
    below[1:] += 0.5 * drop[-1, 4]
    for layer, share in ((3, 0.5 * top), (2, 0.5 * (below @ scores[-2])[0].item())):
        written = float(re.search(rf"layer {layer} ([\d.]+) %", said).group(1))
        assert written == pytest.approx(100 * share, abs=0.7)
    (button,) = all_of(browser, "#options button[data-option=first]")
    doing(browser, button.click)
    assert any(position == 0 for edge in drawn_edges(browser) for _, position in edge)


def test_the_flow_to_the_first_token_itself(opened):
    browser = opened(FLOWS["heads"], "view=flow&query=0&first=0")
    assert set(drawn_edges(browser)) == {((level, 0), (level + 1, 0)) for level in range(4)}


def test_the_flow_starts_with_the_map_that_gives_the_first_token_least(opened):
    collecting = random_attention() * 0.01
    collecting[..., 0] = 1 - collecting[..., 1:].sum(-1)
    attention, alti = map_of(collecting), map_of(random_attention(seed=1), method="alti", residual=0.0)
    other = map_of(random_attention(seed=1) + 0.2 * torch.eye(6)[0], method="value_zeroing", residual=0.0)
    maps = {"attention": attention, "value_zeroing": other, "alti": alti}
    heading = "return document.querySelector('#view .caption').textContent"
    browser = opened(maps, "view=layers&query=5")
    doing(browser, browser.find_element("css selector", "button[data-view=flow]").click)
    assert "ALTI: a rollout" in browser.execute_script(heading)
    assert browser.find_element("id", "map").get_property("value") == "2"
    # The default of the flow is not that of other views, and is not kept in the address.
    assert "map=&" in browser.current_url
    doing(browser, browser.find_element("css selector", "button[data-view=grid]").click)
    assert browser.execute_script("return map().label") == "attention"
    doing(browser, lambda: browser.execute_script("set({ map: 1 })"))
    doing(browser, browser.find_element("css selector", "button[data-view=flow]").click)
    assert "Value Zeroing: a rollout" in browser.execute_script(heading)
    browser = opened(maps, "view=flow&map=0&query=5")
    assert "Attention: a rollout" in browser.execute_script(heading)


def test_the_flow_says_first_that_almost_all_is_from_the_first_token(opened):
    scores = random_attention() * 0.1
    scores[..., 0] = 1 - scores[..., 1:].sum(-1)
    m = map_of(scores, residual=0.1)
    browser = opened(m, "view=flow&query=5&first=0")
    whole = lm.rollout(m).scores[-1, 5, 0].item()
    assert whole > 0.95
    said = "more than 99.9 %" if whole > 0.999 else f"{100 * whole:.1f} %"
    finding = browser.find_element("css selector", ".finding").text
    assert finding.startswith(
        f"Almost all of this rollout ({said}) is from the first token; the shares below are of the rest. "
    )
    assert f"{said} of the whole" in browser.find_element("css selector", "p[data-left]").text
    # With the first token drawn, the shares are of the whole.
    browser = opened(m, "view=flow&query=5&first=1")
    assert "Almost all" not in browser.find_element("css selector", ".finding").text
    browser = opened(FLOWS["residual in the map"], "view=flow&query=5&first=0")
    assert "Almost all" not in browser.find_element("css selector", ".finding").text


def test_the_smallest_share_is_a_percentage(opened):
    browser = opened(map_of(), "view=flow&query=5")
    slider = browser.find_element("css selector", "input[data-option=threshold]")
    output = browser.find_element("css selector", "#options label:has([data-option=threshold]) output")
    assert (output.text, slider.get_attribute("aria-valuetext")) == ("4 %", "4 %")
    doing(browser, lambda: browser.execute_script("set({ threshold: .125 })"))
    assert (output.text, slider.get_attribute("aria-valuetext")) == ("12.5 %", "12.5 %")
    caption = browser.find_element("css selector", "p[data-share]").text
    assert "a path whose drawing ends continues below that share" in caption


def test_the_flow_ends_at_the_chosen_layer(opened):
    m = FLOWS["residual in the map"]
    browser = opened(m, "view=flow&query=5&first=1&layer=1&threshold=0.000001")
    assert max(level for level, _ in drawn_nodes(browser)) == 2
    bottom = {}
    for ((level, key), _), weight in drawn_edges(browser).items():
        bottom[key] = bottom.get(key, 0) + weight * (level == 0)
    expected = lm.rollout(m).scores[1, 5].tolist()
    assert [bottom[key] for key in range(6)] == pytest.approx(expected, abs=2e-3)


def test_the_flow_is_offered_where_it_works(opened):
    chain, signed = map_of(), map_of(random_attention() - 0.1 * torch.ones(6, 6).tril(), method="custom")
    cross = lm.MixingMap(torch.rand(2, 6, 5), [f" t{i}" for i in range(6)], key_tokens=list("vwxyz"))
    maps = {
        "chain": (chain, True),
        "signed": (signed, False),
        "some rows": (chain.select_queries([3, 5]), False),
        "other order": (chain.select_queries([1, 0, 2, 3, 4, 5]), False),
        "gaps": (chain.select_layers([0, 2]), False),
        "cross": (cross, False),
        "input": (lm.rollout(signed.replace(scores=signed.scores.abs(), method="alti", residual=0.0)), True),
    }
    browser = opened({name: m for name, (m, _) in maps.items()}, "view=text")
    offered = browser.execute_script(
        "return Object.fromEntries(maps().map(m => [m.label, flowIsOffered(m)]))"
    )
    assert offered == {name: is_offered for name, (_, is_offered) in maps.items()}
    alone = opened({name: m for name, (m, _) in maps.items() if name != "chain"}, "view=text")
    assert not alone.execute_script("return maps().some(flowIsOffered)")


def test_an_input_map_has_the_flow_of_a_layer_map(opened):
    attention, alti = map_of(), map_of(random_attention(seed=1), method="alti", residual=0.0)
    maps = {"attention": attention, "alti": alti, "whole": lm.rollout(alti)}
    browser = opened(maps, "view=flow&map=2&query=5&first=1&threshold=0.01")
    assert "this is the flow of “ALTI”" in browser.find_element("css selector", "p[data-share]").text
    graph = information_flow_graph(alti, 5, threshold=1e-9)
    drawn = drawn_edges(browser)
    assert drawn == pytest.approx({edge: graph.edges[edge]["amount"] for edge in drawn}, abs=2e-3)
    assert {edge for edge in graph.edges if graph.edges[edge]["amount"] > 0.012} <= set(drawn)
    other = lm.rollout(alti).replace(method="gim")
    browser = opened(maps | {"whole": other}, "view=flow&map=2")
    assert "this is the flow of “Attention”" in browser.find_element("css selector", "p[data-share]").text


def test_the_flow_has_the_feed_forwards_of_routes(opened):
    m = routes()
    shares = part_shares(m).mlp_out
    browser = opened(m, "view=flow&threshold=0.01&query=5&first=1")
    squares = all_of(browser, "rect.feed-forward[data-share]")
    assert len(squares) == sum(level > 0 for level, _ in drawn_nodes(browser)) > 3
    reached = [torch.zeros(6, dtype=torch.float64) for _ in range(4)]
    reached[3][5] = 1
    for level in (2, 1, 0):
        reached[level] = reached[level + 1] @ m.scores[level]
    for square in squares:
        level = m.layer_labels.index(int(square.get_attribute("data-layer"))) + 1
        token = int(square.get_attribute("data-token"))
        share, weight = shares[level - 1, token].item(), reached[level][token].item()
        said = tip_of(browser, square)
        assert f"feed-forward of layer {m.layer_labels[level - 1]}: {token} “t{token}”" in said
        assert percent(said, "of the layer's output") == pytest.approx(share, abs=6e-3)
        assert percent(said, "of what reached") == pytest.approx(share * weight, abs=6e-3)
        area = float(square.get_attribute("width")) * float(square.get_attribute("height"))
        assert area == pytest.approx(144 * share * weight, rel=5e-3)
    assert "feed-forward" in browser.find_element("css selector", ".graph-legend").text
    browser = opened(map_of(), "view=flow")
    assert not all_of(browser, "rect.feed-forward")
    assert "feed-forward" not in browser.find_element("id", "view").text


def percent(text, what):
    return float(re.search(rf"([\d.]+) % {what}", text).group(1)) / 100


# ---------------------------------------------------------------------- trees


@pytest.mark.parametrize("heads", [None, 2])
def test_a_tree_is_computed_again_for_each_position(opened, heads):
    m = attribution(heads)
    browser = opened({"plain": map_of(), "tree": m}, "view=tree&map=1&query=5&first=1")
    assert_drawn(browser, lm.attribution_tree(m, root=5), {"rel": 1e-12})
    for root in (4, 3, 2, 1, 0):
        explain(browser, root)
        assert_drawn(browser, lm.attribution_tree(m, root=root), {"abs": 1e-3})
        assert "Computed in the page" in browser.find_element("css selector", "[data-pruned]").text
    doing(browser, browser.find_element("css selector", "[data-whole]").click)
    assert_drawn(browser, lm.attribution_tree(m, root=5), {"rel": 1e-12})
    assert not all_of(browser, "[data-whole]")


@pytest.mark.parametrize("heads", [None, 2])
def test_routes_are_computed_again_for_each_position(opened, heads):
    m = routes(heads)
    browser = opened({"plain": map_of(), "routes": m}, "view=tree&map=1&query=5&first=1")
    assert_drawn(browser, information_flow_routes(m, 5), {"rel": 1e-12})
    for root in (4, 3, 2, 1, 0):
        explain(browser, root)
        graph = information_flow_routes(m, root)
        assert_drawn(browser, graph, {"abs": 1e-3})
        for line in all_of(browser, "line[data-from]")[:3]:
            edge = place(line.get_attribute("data-from")), place(line.get_attribute("data-to"))
            said, values = tip_of(browser, line), graph.edges[edge]
            for head, weight in values.get("heads", ()):
                assert number_after(said, f"head {head}:") == pytest.approx(weight, abs=1e-3)
            if "residual" in values:
                assert number_after(said, "residual") == pytest.approx(values["residual"], abs=1e-3)


def number_after(text, word):
    return float(re.search(rf"{word} (-?[\d.e+-]+)", text).group(1))


def test_trees_of_a_model_are_computed_again(opened):
    """The page's numbers are rounded, so this also shows that no edge here is that close to a threshold."""
    model = llama_like()
    target = lm.targets.predicted(position=5)
    methods = {
        "tree": lm.methods.AttentionAttribution(target, n_steps=3),
        "routes": lm.methods.InformationFlowRoutes(per_head=True),
    }
    prompt = tokens(model, 1, 7, 1)[0]
    maps = {name: lm.run(model, prompt, method) for name, method in methods.items()}
    for number, (name, grow) in enumerate((("tree", grow_tree), ("routes", information_flow_routes))):
        browser = opened(maps, f"view=tree&tree={number}&map={number}&first=1")
        for root in (6, 5, 3, 1):
            explain(browser, root)
            assert_drawn(browser, grow(maps[name], root), {"rel": 1e-2, "abs": 1e-3})


def grow_tree(m, root):
    return lm.attribution_tree(m, root=root)


@pytest.mark.parametrize("name", ["tree", "routes"])
def test_the_threshold_of_a_tree_can_be_changed(opened, name):
    maps = {"tree": attribution(), "routes": routes(2)}
    browser = opened(maps, f"view=tree&tree={list(maps).index(name)}&query=5&first=1")
    (slider,) = all_of(browser, "#options input[data-option=cut]")
    assert float(slider.get_property("value")) == (0.4 if name == "tree" else 0.04)
    move = "arguments[0].value = 0.16; arguments[0].dispatchEvent(new Event('input'))"
    doing(browser, lambda: browser.execute_script(move, slider))
    if name == "tree":
        graph = lm.attribution_tree(maps["tree"], root=5, threshold=0.16)
    else:
        graph = information_flow_routes(maps["routes"], 5, threshold=0.16)
    assert_drawn(browser, graph, {"abs": 1e-3})
    assert "0.16" in browser.find_element("css selector", "[data-pruned]").text
    # Another tree has its own threshold.
    other = 1 - list(maps).index(name)
    doing(browser, lambda: browser.execute_script(f"set({{ tree: {other} }})"))
    assert browser.execute_script("return state.cut") is None
    doing(browser, lambda: browser.execute_script("set({ tree: arguments[0] })", 1 - other))
    doing(browser, lambda: browser.execute_script("set({ cut: 0.16 })"))
    doing(browser, browser.find_element("css selector", "[data-whole]").click)
    first = grow_tree(maps["tree"], 5) if name == "tree" else information_flow_routes(maps["routes"], 5)
    assert_drawn(browser, first, {"rel": 1e-12})


@pytest.mark.parametrize("view", ["flow", "tree"])
def test_the_edges_of_a_node_below_the_pointer_are_drawn_strongly(opened, view):
    browser = opened(routes(), f"view={view}&query=5&first=1&threshold=0.01")
    (root,) = all_of(browser, ".root[data-node]")
    tip_of(browser, root)
    node = root.get_attribute("data-node")
    expected = [edge for edge in drawn_edges(browser) if place(node) in edge]
    lit = browser.execute_script(
        "return [...document.querySelectorAll('#view .lit line.on')]"
        ".map(line => [line.dataset.from, line.dataset.to])"
    )
    assert expected
    assert {(place(start), place(end)) for start, end in lit} == set(expected)


def test_a_clicked_node_becomes_the_root(opened):
    m = routes()
    graph = information_flow_routes(m, 5)
    node = min(node for node in graph if node[1] == 3)
    browser = opened({"routes": m}, "view=tree&query=5&first=1")
    doing(browser, lambda: click(browser, f"[data-node='{node[0]},3']"))
    assert "query=3" in browser.current_url
    assert_drawn(browser, information_flow_routes(m, 3), {"abs": 1e-3})
    (label,) = (label for label in all_of(browser, "svg .label") if label.text == "t2")
    doing(browser, label.click)
    assert_drawn(browser, information_flow_routes(m, 2), {"abs": 1e-3})


def test_a_given_graph_is_reduced_to_what_leads_to_the_clicked_node(opened):
    graph = layered_graph(map_of(), threshold=0.1)
    node = (3, 4)
    below = nx.DiGraph(graph.subgraph({node} | nx.ancestors(graph, node)))
    below.graph["target"] = node
    assert 3 < len(below) < len(graph)
    browser = opened({"m": map_of()}, "view=tree&first=1", trees={"all": graph, "other": graph})
    assert set(drawn_edges(browser)) == set(graph.edges)
    doing(browser, lambda: click(browser, "[data-node='3,4']"))
    assert_drawn(browser, below, {"rel": 1e-12})
    assert "part of the given graph" in browser.find_element("css selector", "[data-pruned]").text
    doing(browser, lambda: click(browser, "[data-node='2,4']"))
    assert drawn_nodes(browser) == {(2, 4)} | nx.ancestors(graph, (2, 4))
    doing(browser, lambda: browser.execute_script("set({ tree: 1 })"))
    assert drawn_nodes(browser) == set(graph)
    doing(browser, lambda: click(browser, "[data-node='3,4']"))
    doing(browser, browser.find_element("css selector", "[data-whole]").click)
    assert drawn_nodes(browser) == set(graph)


@pytest.mark.parametrize("root", [5, 4])
def test_a_tree_without_the_first_token(opened, root):
    m = routes()
    graph = information_flow_routes(m, root)
    kept = graph.subgraph([node for node in graph if node[1]])
    target = graph.graph["target"]
    kept = kept.subgraph({target} | nx.ancestors(kept, target))
    left_out = [
        values["weight"] for start, end, values in graph.edges(data=True) if start[1] == 0 and end in kept
    ]
    assert left_out
    browser = opened(m, f"view=tree&query={root}&first=0")
    assert set(drawn_edges(browser)) == set(kept.edges)
    written = browser.find_element("css selector", "[data-pruned]").text
    assert f"{len(left_out)} edges from the first token are left out; the largest is" in written
    assert number_after(written, "the largest is") == pytest.approx(max(left_out), rel=0.06)
    browser = opened(m, "view=tree&query=0&first=0")
    assert drawn_nodes(browser) == set(information_flow_routes(m, 0))


def test_a_tree_names_each_layer_once(opened):
    browser = opened(routes(), "view=tree&query=5&first=1")
    names = [text.text for text in all_of(browser, ".graph > svg text")]
    assert names == ["layer", "4", "3", "2", "input"]


# ---------------------------------------------------------------------- keys, words, accessibility


@pytest.mark.parametrize("view", ["flow", "tree"])
def test_the_keyboard_follows_edges_and_chooses_a_node(opened, view):
    from selenium.webdriver.common.keys import Keys

    m = routes()
    browser = opened(m, f"view={view}&query=5&first=1&threshold=0.01")
    focusable = all_of(browser, "#view svg [tabindex='0']")
    assert len(focusable) == 1
    assert "root" in focusable[0].get_attribute("class")
    browser.execute_script("arguments[0].focus()", focusable[0])
    here, edges = place(focusable[0].get_attribute("data-node")), drawn_edges(browser)
    for _ in range(2):
        browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
        expected = max((weight, start) for (start, end), weight in edges.items() if end == here)[1]
        focused = browser.switch_to.active_element
        here = place(focused.get_attribute("data-node"))
        assert here == expected
        said = focused.get_attribute("aria-label")
        assert f"{here[1]} “t{here[1]}”" in said
        assert said.split(",")[0] in browser.find_element("css selector", "[data-detail]").text
    assert browser.execute_script("return state.query") == 5
    level = [node for node in drawn_nodes(browser) if node[0] == here[0] and node[1] < here[1]]
    browser.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    focused = browser.switch_to.active_element
    assert place(focused.get_attribute("data-node")) == (max(level) if level else here)
    chosen = place(focused.get_attribute("data-node"))[1]
    if chosen == 5:
        browser.execute_script("document.querySelector('[data-node$=\",3\"]').focus()")
        chosen = 3
    doing(browser, lambda: browser.switch_to.active_element.send_keys(Keys.ENTER))
    assert f"query={chosen}" in browser.current_url
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    focused = browser.switch_to.active_element
    assert place(focused.get_attribute("data-node"))[1] == chosen
    assert "root" in focused.get_attribute("class")


def test_a_click_on_an_edge_shows_its_heads(opened):
    m = FLOWS["heads"]
    browser = opened(m, "view=flow&query=5&first=1&threshold=0.01")
    click(browser, "line.edge[data-from='3,1'][data-to='4,5']")
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    detail = browser.find_element("css selector", "[data-detail]").text
    assert detail.startswith("layer 3: 5 “t5” from 1 “t1”")
    for head in range(2):
        expected = m.scores[3, head, 5, 1].item()
        assert number_after(detail, f"head {head}:") == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("view", ["flow", "tree"])
def test_the_strongest_edges_are_in_words(opened, view):
    browser = opened(routes(), f"view={view}&query=5&first=1")
    moves = {edge: weight for edge, weight in drawn_edges(browser).items() if edge[0][1] != edge[1][1]}
    (start, end), _ = max(moves.items(), key=lambda item: item[1])
    text = f"{end[1]} “t{end[1]}” from {start[1]} “t{start[1]}”"
    assert text in browser.find_element("css selector", "#view g[role=img]").get_attribute("aria-label")
    assert text in all_of(browser, "#view details li")[0].get_property("textContent")


@pytest.mark.parametrize("view", ["flow", "tree"])
def test_a_picture_has_the_drawing_and_no_hints(opened, view):
    browser = opened(routes(), f"view={view}&query=5&first=1&threshold=0.01")
    count = len(drawn_edges(browser))
    drawn = ElementTree.fromstring(exported(browser, "svg"))
    texts = ["".join(node.itertext()) for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    headline = "The flow to the last position" if view == "flow" else "what leads to the last position"
    assert any(headline in text for text in texts)
    assert not any("Click an edge" in text or "The strongest edges" in text for text in texts)
    lines = [node for node in drawn.iter("{http://www.w3.org/2000/svg}line") if node.get("data-from")]
    assert len(lines) == count
    assert all(line.get("stroke") and not line.get("class") for line in lines)
