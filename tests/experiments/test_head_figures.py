from __future__ import annotations

import networkx as nx
import pytest
import torch

import lens_mix as lm
from lens_mix.experiments import HeadImportance, PruningCurves
from lens_mix.experiments.head_figures import head_map, pruning_figure
from lens_mix.view.tree_figure import tree_figure

matplotlib = pytest.importorskip("matplotlib")


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_tree_figure(tmp_path):
    scores = torch.zeros(4, 4, 4)
    scores[3, 3, 1], scores[1, 1, 0] = 2.0, 1.0
    mixing_map = lm.MixingMap(scores=scores, tokens=["The", " $keys", " to", " are"], causal=True)
    tree = lm.attribution_tree(mixing_map)
    figure = tree_figure(tree, title="a $ tree")
    (axes,) = figure.axes
    assert texts(axes) == ["·are", "·$keys", "The"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["The", "·$keys", "·to", "·are"]
    # A token is at the level of the block whose output it comes from: here below layers 3 and 1.
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "after layer 0",
        "after layer 2",
        "after layer 3",
    ]
    points = {tuple(map(float, line.get_xydata()[0])) for line in axes.lines}
    assert points == {(3.0, 2.0), (1.0, 1.0), (0.0, 0.0)}
    figure.savefig(tmp_path / "tree.png")
    with pytest.raises(ValueError, match="expected a graph of attribution_tree"):
        tree_figure(nx.DiGraph())


def test_head_map(tmp_path):
    importance = HeadImportance(torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]), "taylor", 7)
    figure = importance.show()
    image = figure.axes[0].images[0]
    assert image.get_array().tolist() == importance.scores.tolist()
    assert image.get_clim() == (0.0, 5.0)
    assert figure.texts[0].get_text() == "Head importance by taylor,\n7 examples"
    signed = head_map(HeadImportance(importance.scores - 3, "ablation", 7), title="mine")
    assert signed.axes[0].images[0].get_clim() == (-3.0, 3.0)
    signed.savefig(tmp_path / "heads.png")
    cut = importance.show(vmax=2.0)
    assert cut.axes[0].images[0].get_clim() == (0.0, 2.0)
    assert cut.axes[0].images[0].colorbar.extend == "max"
    with pytest.raises(ValueError, match="vmax: expected a finite number, above 0, got 0"):
        importance.show(vmax=0)


def test_pruning_figure(tmp_path):
    values = {"a_$b": (1.0, 0.5, 0.0), "random": (1.0, 0.4, 0.0)}
    curves = PruningCurves(
        (0.0, 0.5, 1.0),
        (0, 4, 8),
        values,
        {"a_$b": values["a_$b"], "random": (1.0, 0.3, 0.0)},
        {"a_$b": values["a_$b"], "random": (1.0, 0.6, 0.0)},
        8,
    )
    figure = pruning_figure(curves, metric="accuracy")
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["a_$b", "random"]
    assert axes.lines[0].get_xydata().tolist() == [[0, 1.0], [50, 0.5], [100, 0.0]]
    assert len(axes.collections) == 1
    assert axes.get_ylabel() == "accuracy"
    curves.show().savefig(tmp_path / "curves.png")


def test_a_tree_of_a_long_prompt_fits_on_a_page():
    tree = nx.DiGraph(tokens=[f" t{position}" for position in range(60)], root=(30, 59))
    for level in range(31):
        tree.add_node((level, 59), token=" t59", position=59, layer=level - 1)
    tree.add_edges_from([((level, 59), (level + 1, 59)) for level in range(30)], weight=0.5)
    tree.add_node((0, 7), token=" t7", position=7, layer=-1)
    tree.add_edge((0, 7), (1, 59), weight=0.5)
    figure = tree_figure(tree)
    assert figure.get_size_inches()[0] <= 7.5
    assert figure.get_size_inches()[1] <= 10
    # The tokens of the tree have labels before others.
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert {"·t7", "·t59"} <= set(labels)
