"""Test pruning curves against pruning by hand, and their errors."""

from __future__ import annotations

import pytest
import torch

from lens_mix.experiments import HeadImportance, pruned, pruning_curves
from lens_mix.hooks import prune_heads
from tests import tiny_models


@pytest.fixture(scope="module")
def tokens(model):
    return tiny_models.tokens(model, 2)


@pytest.fixture(scope="module")
def metric(tokens):
    def value(model):
        return model(tokens)[:, -1].log_softmax(-1)[:, 5].mean().item()

    return value


SCORES = torch.tensor([[0.1, 0.9, 0.3, 0.4], [0.8, 0.2, 0.5, 0.0]])


def by_hand(model, tokens, heads) -> float:
    hooks = [prune_heads(layer, [h for at, h in heads if at == layer]) for layer in {at for at, _ in heads}]
    with torch.no_grad():
        return model.run_with_hooks(tokens, fwd_hooks=hooks)[:, -1].log_softmax(-1)[:, 5].mean().item()


def test_pruned_model(model, tokens, metric):
    with torch.no_grad():
        whole = metric(model)
    heads = [(0, 1), (0, 2), (1, 3)]
    with pruned(model, heads):
        assert metric(model) == pytest.approx(by_hand(model, tokens, heads), abs=1e-12)
    with torch.no_grad():
        assert metric(model) == whole


def test_curves(model, tokens, metric):
    curves = pruning_curves(
        model, metric, {"mine": SCORES, "reversed": HeadImportance(-SCORES, "reversed", 1)}, random=2
    )
    assert curves.fractions == tuple(step / 10 for step in range(11))
    assert curves.removed == (0, 1, 2, 2, 3, 4, 5, 6, 6, 7, 8)
    order = [(1, 3), (0, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 0), (0, 1)]
    for count, value in zip(curves.removed, curves.values["mine"], strict=True):
        assert value == pytest.approx(by_hand(model, tokens, order[:count]), abs=1e-12)
    for count, value in zip(curves.removed, curves.values["reversed"], strict=True):
        assert value == pytest.approx(by_hand(model, tokens, order[::-1][:count]), abs=1e-12)
    # Every ranking starts with the whole model and ends without heads.
    assert len({values[0] for values in curves.values.values()}) == 1
    assert len({values[-1] for values in curves.values.values()}) == 1
    assert set(curves.values) == {"mine", "reversed", "random"}
    low, high = curves.lowest["random"], curves.highest["random"]
    assert any(a < b for a, b in zip(low, high, strict=True))
    assert all(a <= m <= b for a, m, b in zip(low, curves.values["random"], high, strict=True))


def test_most_important_first_is_the_other_end(model, metric):
    least = pruning_curves(model, metric, {"mine": -SCORES}, fractions=[0.25, 0.5], random=0)
    most = pruning_curves(model, metric, {"mine": SCORES}, fractions=[0.25, 0.5], random=0, remove="most")
    assert least.values == most.values


def test_a_set_of_heads_is_measured_once(model, metric):
    calls = []

    def counted(model):
        calls.append(1)
        return metric(model)

    pruning_curves(model, counted, {"a": SCORES, "b": SCORES * 2}, fractions=[0, 0.5, 1], random=0)
    assert len(calls) == 3


def test_random_orders_follow_the_seed(model, metric):
    one, two, three = (
        pruning_curves(model, metric, {}, fractions=[0.3, 0.6], random=2, seed=seed) for seed in (1, 1, 2)
    )
    assert one.values == two.values
    assert one.values != three.values


def test_random_orders_on_any_default_device(model, metric):
    def on_the_cpu(model):
        with torch.device("cpu"):
            return metric(model)

    plain = pruning_curves(model, on_the_cpu, {}, fractions=[0.3, 0.6], random=2)
    # Numbers on this device cannot be read. A GPU would not accept the CPU's generator.
    with torch.device("meta"):
        elsewhere = pruning_curves(model, on_the_cpu, {}, fractions=[0.3, 0.6], random=2)
    assert elsewhere == plain


def test_table_and_area(model, metric):
    curves = pruning_curves(model, metric, {"mine": SCORES}, fractions=[0, 0.5, 1.0], random=0)
    table = curves.to_dataframe()
    assert table.shape == (3, 6)
    assert table.heads_removed.tolist() == [0, 4, 8]
    assert table.value.tolist() == list(curves.values["mine"])
    a, b, c = curves.values["mine"]
    assert curves.area()["mine"] == pytest.approx((a + 2 * b + c) / 4, rel=1e-6)


def test_the_model_comes_back(model, metric):
    before = [len(module._forward_hooks) for module in model.modules()]
    with pytest.raises(KeyboardInterrupt), pruned(model, [(0, 1)]):
        raise KeyboardInterrupt
    with pytest.raises(ZeroDivisionError):
        pruning_curves(model, lambda model: 1 / 0, {"mine": SCORES})
    assert [len(module._forward_hooks) for module in model.modules()] == before


def test_bad_input(model, metric):
    for keywords, message in [
        ({"rankings": {}, "random": 0}, "rankings: expected at least one"),
        ({"rankings": {"mine": SCORES.T}}, r"rankings\['mine'\]: expected shape \[2, 4\]"),
        ({"rankings": {"random": SCORES}}, "other names than 'random'"),
        ({"rankings": {"mine": SCORES}, "fractions": [0.5, 0.2]}, "fractions: expected ascending"),
        ({"rankings": {"mine": SCORES}, "fractions": [0, 1.1]}, "fractions: expected a number from 0 to 1"),
        ({"rankings": {"mine": SCORES}, "remove": "all"}, "remove: expected"),
    ]:
        with pytest.raises(ValueError, match=message):
            pruning_curves(model, metric, **keywords)
    with (
        pytest.raises(ValueError, match=r"heads: expected layers from 0 to 1, got 2"),
        pruned(model, [(2, 0)]),
    ):
        pass
    with pytest.raises(RuntimeError, match="expected every hook to fire"):
        pruning_curves(model, lambda model: 1.0, {"mine": SCORES})
