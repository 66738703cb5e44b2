"""Test maps of some rows: each method returns the same rows as it does for the map of all rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lens_mix as lm
from lens_mix.experiments import attention_statistics
from lens_mix.experiments.contextualisation import amplification, change, top_pairs
from lens_mix.experiments.head_probe import probe_heads
from lens_mix.graphs import layered_graph
from lens_mix.maps import MixingMap
from tests.random_maps import random_attention

TOKENS = ["<|endoftext|>", "The", " Eif", "fel", " Tower", " is"]
SIZE = len(TOKENS)


def whole(layers=3, heads=None, seed=0, **changes):
    fields = {"tokens": TOKENS, "method": "attention", "causal": True, **changes}
    return MixingMap(scores=random_attention(layers, heads, SIZE, seed=seed), **fields)


def masked(**changes):
    window = torch.ones(SIZE, SIZE, dtype=torch.bool).tril()
    masks = torch.stack([window, window, window])
    return whole(mask=masks, **changes)


def same(one: MixingMap, other: MixingMap) -> None:
    assert torch.equal(one.scores, other.scores)
    assert torch.equal(one.visible(), other.visible())
    for name in ("tokens", "queries", "key_tokens", "causal", "layers", "kind", "method", "residual"):
        assert getattr(one, name) == getattr(other, name), name


ROWS = [[5], [2, 3], [4, 1], [3, 0, 5]]


# ---------------------------------------------------------------------- construction


def test_made_by_hand():
    cut = MixingMap(scores=whole().scores[:, [5, 2]], tokens=TOKENS, causal=True, queries=[-1, 2])
    assert cut.queries == cut.query_positions == [5, 2]
    assert cut.query_labels == [" is", " Eif"]
    assert cut.key_labels == TOKENS
    assert cut.visible().shape == (3, 2, SIZE)
    assert cut.visible()[0].sum(-1).tolist() == [6, 3]


def test_all_rows_in_order_are_a_whole_map():
    assert whole(queries=range(SIZE)).queries is None
    assert whole().query_positions == list(range(SIZE))
    assert whole().query_labels == TOKENS


def test_with_other_keys():
    cut = MixingMap(scores=torch.rand(1, 2, 3), tokens=TOKENS, key_tokens=list("xyz"), queries=[1, 4])
    assert (cut.query_labels, cut.key_labels) == (["The", " Tower"], list("xyz"))
    assert set(cut.to_networkx(0)) == {("query", 1), ("query", 4), *(("key", i) for i in range(3))}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"queries": [1]}, ValueError, "queries: expected 6 positions, one per row of scores, got 1"),
        ({"queries": [6]}, ValueError, "queries: expected a position from -6 to 5, got 6"),
        ({"queries": [1, -5, 0, 2, 3, 4]}, ValueError, "queries: expected at least one position, each once"),
        ({"queries": 5}, TypeError, "queries: expected a list of positions, got 5"),
        ({"tokens": TOKENS[:5], "queries": [0]}, ValueError, "tokens: expected 6, one per key position"),
    ],
)
def test_bad_fields(changes, error, message):
    with pytest.raises(error, match=message):
        whole(**changes)


def test_entries_are_named_by_their_position():
    scores = torch.zeros(1, 2, SIZE)
    for value, message in (
        (1.0, r"layer 7, query 2, key 4, because a causal"),
        (torch.nan, "query 2, key 4"),
    ):
        wrong = scores.clone()
        wrong[0, 1, 4] = value
        with pytest.raises(ValueError, match=message):
            MixingMap(scores=wrong, tokens=TOKENS, causal=True, queries=[5, 2], layers=[7])
    mask = torch.ones(2, SIZE, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"no visible key above the diagonal .* query 2, key 3"):
        MixingMap(scores=scores, tokens=TOKENS, causal=True, queries=[5, 2], mask=mask)


# ---------------------------------------------------------------------- selecting


@pytest.mark.parametrize("make", [whole, masked, lambda: whole(heads=2)])
@pytest.mark.parametrize("rows", ROWS)
def test_select_queries(make, rows):
    cut = make().select_queries(rows)
    assert torch.equal(cut.scores, make().scores[..., rows, :])
    assert torch.equal(cut.visible(), make().visible()[:, rows])
    assert cut.queries == rows
    same(cut.select_queries(rows[-1:]), make().select_queries(rows[-1:]))


def test_select_queries_by_number_and_slice():
    same(whole().select_queries(-1), whole().select_queries([5]))
    same(whole().select_queries(slice(-2, None)), whole().select_queries([4, 5]))
    assert whole().select_queries(slice(None)).queries is None


def test_select_queries_needs_rows_that_the_map_has():
    with pytest.raises(ValueError, match=r"queries: .* \[5, 2\], got 3 .*lm.run\(\.\.\., queries=\[3\]"):
        whole().select_queries([5, 2]).select_queries([3])
    with pytest.raises(ValueError, match="queries: expected at least one position"):
        whole().select_queries(slice(9, None))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.normalized(),
        lambda m: m.merge_heads(),
        lambda m: m.merge_heads("max"),
        lambda m: m.head(1),
        lambda m: m.select_layers([2, 0]),
        lambda m: m.layer(-1),
    ],
)
def test_row_by_row_methods_equal_a_selection_from_the_whole(change, rows):
    for make in (lambda: whole(heads=2), lambda: masked(heads=2)):
        same(change(make().select_queries(rows)), change(make()).select_queries(rows))


def test_an_empty_row_is_noted_by_its_position():
    scores = whole().scores.clone()
    scores[1, 4] = 0
    (note,) = whole().replace(scores=scores).select_queries([5, 4]).normalized().notes
    assert note.endswith("layer 1 query 4")


# ---------------------------------------------------------------------- dropping and merging


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=SIZE, unique=True),
    gone=st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=SIZE - 1),
    axis=st.sampled_from(["both", "query", "key"]),
    with_mask=st.booleans(),
)
def test_drop_equals_a_selection_from_the_whole(rows, gone, axis, with_mask):
    every = masked() if with_mask else whole()
    kept = [position for position in range(SIZE) if axis == "key" or position not in gone]
    left = [kept.index(position) for position in rows if position in kept]
    cut = every.select_queries(rows)
    if left:
        same(cut.drop(gone, axis), every.drop(gone, axis).select_queries(left))
    else:
        with pytest.raises(ValueError, match="tokens: expected at least one row to remain"):
            cut.drop(gone, axis)


@pytest.mark.parametrize("make", [whole, masked, lambda: whole(heads=2)])
def test_merge_words_returns_the_words_with_all_rows(make):
    cut = make().select_queries([5, 3, 2]).merge_words()
    merged = make().merge_words()
    assert cut.tokens == merged.tokens == ["<|endoftext|>", "The", " Eiffel", " Tower", " is"]
    same(cut, merged.select_queries([2, 4]))
    assert cut.notes == ()


def test_merge_words_leaves_out_words_with_some_rows():
    cut = whole().select_queries([3, 5]).merge_words()
    same(cut, whole().merge_words().select_queries([4]))
    assert cut.notes == (
        "words without a row, because the map does not have all their rows: ' Eiffel' (positions [2, 3])",
    )
    with pytest.raises(ValueError, match=r"expected a map with all rows of some word, got the rows \[3\]"):
        whole().select_queries([3]).merge_words()


def test_merge_words_keeps_the_word_that_an_input_map_explains():
    """Merge the last word of a prompt that ends within a word, of which `input_map` has only the last row."""
    rows = whole().replace(kind="input")
    cut = rows.select_queries([3]).merge_words()
    assert cut.tokens == whole().merge_words().tokens
    assert cut.queries == [2]
    assert torch.equal(cut.scores, whole().merge_words(queries="last").select_queries([2]).scores)
    assert cut.notes == (
        "the row of ' Eiffel' (positions [2, 3]) is merged from [3] alone, because the map does not have the "
        "word's other rows",
    )
    # Other rows do not change this, nor does a layer map whose target sets `default_query`.
    for made in (rows.replace(default_query=3), whole().replace(default_query=3)):
        assert made.select_queries([5, 3]).merge_words().queries == [2, 4]
        same(made.merge_words(), made.merge_words(queries="mean"))


@pytest.mark.parametrize(("how", "row"), [("last", 3), ("first", 2)])
def test_merge_words_by_one_row_needs_that_row_only(how, row):
    cut = whole().select_queries([row]).merge_words(queries=how)
    same(cut, whole().merge_words(queries=how).select_queries([2]))


def test_merge_words_out_of_order():
    groups = [[0], [1, 3], [2], [4, 5]]
    cut = whole().select_queries([3, 1, 2]).merge_words(groups)
    same(cut, whole().merge_words(groups).select_queries([1, 2]))


# ---------------------------------------------------------------------- reading


@pytest.mark.parametrize("query", [-1, 5, " is", 3, "fel"])
def test_top(query):
    cut = whole(heads=2).select_queries([5, 3])
    for head in (None, 1):
        assert cut.top(9, query=query, head=head) == whole(heads=2).top(9, query=query, head=head)


def test_top_of_a_missing_row():
    cut = whole().select_queries([2, 3])
    for query, position in ((-1, 5), ("The", 1)):
        message = rf"query: expected one of the rows .*\[2, 3\], got .*position {position}\).*queries="
        with pytest.raises(ValueError, match=message):
            cut.top(query=query)


def test_tables_and_arrays_name_positions():
    cut = whole(heads=2).select_queries([5, 2])
    every, part = whole(heads=2).to_dataframe(), cut.to_dataframe()
    keys = ["layer", "head", "query", "key"]
    expected = every[every["query"].isin([5, 2])].set_index(keys).sort_index()
    assert part.set_index(keys).sort_index().equals(expected)
    pytest.importorskip("xarray")
    array = cut.to_xarray()
    assert array.sel(layer=1, head=0, query=5).values.tolist() == whole(heads=2).scores[1, 0, 5].tolist()
    assert array.query_token.values.tolist() == [" is", " Eif"]


def test_graph_of_one_layer():
    graph = whole().select_queries([5, 2]).to_networkx(-1)
    every = whole().to_networkx(-1)
    assert dict(graph.nodes(data=True)) == dict(every.nodes(data=True))
    assert {*graph.edges} == {edge for edge in every.edges if edge[1] in (5, 2)}


@pytest.mark.parametrize("make", [whole, masked])
def test_files(make, tmp_path):
    cut = make().select_queries([5, 2])
    cut.save(tmp_path / "map")
    same(MixingMap.load(tmp_path / "map"), cut)


def test_files_from_before_rows_could_be_asked_for(tmp_path):
    import json

    from safetensors.torch import save_file

    record = {name: getattr(whole(), name) for name in ("tokens", "method", "causal", "notes")}
    record["key_tokens"] = None
    record |= {"parameters": {}, "residual": None, "kind": "layer", "layers": [0, 1, 2], "provenance": {}}
    metadata = {"format": "lens_mix.MixingMap/1", "record": json.dumps(record)}
    save_file({"scores": whole().scores}, tmp_path / "map", metadata=metadata)
    same(MixingMap.load(tmp_path / "map"), whole())


def test_repr_and_html_say_which_rows():
    cut = whole().select_queries([3, 1])
    assert "query=2 key=6" in repr(cut)
    assert "queries [3, 1] of 6 positions" in repr(cut)
    assert "What position 3, " in cut._repr_html_()
    assert f"What position {SIZE - 1}, " in whole()._repr_html_()


# ---------------------------------------------------------------------- functions that need all rows


@pytest.mark.parametrize(
    "use",
    [
        lambda m: lm.rollout(m),
        lambda m: lm.rollout(m, receptive_field=True),
        lambda m: lm.flow(m),
        lambda m: lm.flow(m, queries=-1),
        lambda m: lm.gradient_rollout(m),
        lambda m: lm.attribution_tree(m),
        lambda m: m.to_networkx(),
        lambda m: layered_graph(m),
        lambda m: attention_statistics(m),
        lambda m: change(m, m),
    ],
)
def test_missing_rows(use):
    message = r"expected the rows of all 6 positions for .*, got only those of \[5\]; .*queries=None"
    with pytest.raises(ValueError, match=message):
        use(whole().select_queries(-1))


def test_missing_layers():
    with pytest.raises(ValueError, match=r"layers that follow one another, got layers \[0, 2\]; .*layers="):
        lm.rollout(whole().select_layers([0, 2]))


def test_amplification_and_its_pairs_work_on_rows():
    before, after = whole(), whole(seed=1)
    cut = amplification(before.select_queries([5, 2]), after.select_queries([5, 2]))
    same(cut, amplification(before, after).select_queries([5, 2]))
    pairs = top_pairs(amplification(before, after), 100)
    expected = pairs[pairs["query"].isin([5, 2])].reset_index(drop=True)
    assert top_pairs(cut, 100).equals(expected)
    with pytest.raises(ValueError, match="with the same rows"):
        amplification(before.select_queries([5]), after.select_queries([2]))


def test_a_head_probe_needs_the_rows_it_asks_about():
    pairs = [(5, 4), (2, 0), (5, 1)]
    every = probe_heads(whole(heads=2), pairs)
    cut = probe_heads(whole(heads=2).select_queries([5, 2]), pairs)
    assert torch.equal(cut.accuracy, every.accuracy)
    assert cut.visible == every.visible
    with pytest.raises(ValueError, match=r"relations: expected one of the rows .* got 3"):
        probe_heads(whole(heads=2).select_queries([5, 2]), [(3, 0)])


# ---------------------------------------------------------------------- figures


def drawn(figure):
    return [axes.images[0].get_array().filled(-1).tolist() for axes in figure.axes if axes.images]


def test_layer_maps_draw_the_rows_of_the_map():
    pytest.importorskip("matplotlib")
    figure = whole().select_queries([2, 5]).show("layers")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["·Eif", "·is"]
    assert len(axes.get_xticklabels()) == SIZE
    rows = [panel[2:6:3] for panel in drawn(whole().show("layers"))]
    assert drawn(figure) == rows


def test_positions_and_bars_take_the_row_by_its_position():
    pytest.importorskip("matplotlib")
    from lens_mix.view import show_position, token_bars

    one, other = whole(), whole(seed=1)
    for query in (-1, 2):
        parts = {"a": one.select_queries([5, 2]), "b": other.select_queries([2, 5, 0])}
        assert drawn(show_position(parts, query=query)) == drawn(
            show_position({"a": one, "b": other}, query=query)
        )
        heights = [
            [bar.get_height() for axes in token_bars(maps, TOKENS, query=query).axes for bar in axes.patches]
            for maps in (parts, {"a": one, "b": other})
        ]
        assert heights[0] == heights[1]
    for draw in (
        lambda m: show_position({"a": m}, query=-1),
        lambda m: token_bars({"a": m}, TOKENS, query=-1),
    ):
        with pytest.raises(ValueError, match=r"quer(y|ies): expected one of the rows .*\[2\]"):
            draw(one.select_queries(2))
