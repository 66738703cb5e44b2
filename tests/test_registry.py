"""Test methods of other authors: how they are registered, loaded as plugins, and checked."""

import dataclasses
import importlib.metadata
import itertools
from typing import ClassVar

import pytest
import torch

import lens_mix as lm
from lens_mix import registry
from lens_mix._blocks.cost import COSTS, Cost
from lens_mix.aggregation.candidates import join_layers
from lens_mix.aggregation.rollout import includes_residual
from lens_mix.named_maps import read_names
from tests.tiny_models import gpt2_like

TOKENS = torch.tensor([5, 9, 12, 7, 30, 21])


@dataclasses.dataclass(frozen=True)
class Largest(lm.Method):
    """Map the largest weight of any head."""

    name: ClassVar[str] = "largest"
    residual: ClassVar[float] = 0.5
    engines: ClassVar[tuple[str, ...]] = ("recorded",)
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})
    citation: ClassVar[str] = "@misc{me, title={Largest}}"

    floor: float = 0.0

    def __call__(self, block):
        largest = block.recorded("pattern").amax(dim=1)
        return largest.where(largest >= self.floor, 0.0)


def variant(**changes):
    """Return the method with other class attributes; None removes one."""
    body = {name: value for name, value in vars(Largest).items() if name in (*WORDS, "__call__")}
    body |= {"__annotations__": {}} | changes
    return type("Variant", (lm.Method,), {name: value for name, value in body.items() if value is not None})


WORDS = ("name", "residual", "engines", "records", "citation")


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def test_a_registered_name_works_everywhere():
    model = gpt2_like()
    with pytest.raises(ValueError, match=r"methods: expected one of .*got 'largest'"):
        lm.run(model, TOKENS, "largest")
    assert lm.register(Largest) is Largest
    made = lm.run(model, TOKENS, "largest")
    assert torch.equal(made.scores, lm.run(model, TOKENS, Largest()).scores)
    assert lm.support(model)["largest"] == "ok (recorded)"
    assert lm.citation("largest") == Largest.citation
    assert torch.equal(lm.run_again(model, made).scores, made.scores)
    assert "largest" not in lm.METHODS
    # A cell of a notebook that runs twice makes another class of the same name.
    again = type("Largest", (Largest,), {"__module__": Largest.__module__, "__qualname__": "Largest"})
    assert (
        lm.run(model, TOKENS, lm.register(dataclasses.dataclass(frozen=True)(again)).name).method == "largest"
    )


def test_a_rollout_of_a_map_made_by_hand_adds_what_a_registered_method_declares():
    made = lm.MixingMap([[[1.0, 0.0], [0.5, 0.5]]], ["a", "b"], "largest", causal=True)
    with pytest.raises(ValueError, match="method 'largest' is none of"):
        lm.rollout(made)
    lm.register(Largest)
    assert lm.rollout(made).residual == 0.5
    # Its maps are of attention only, so a weight of 0 does not say that they contain the residual.
    assert not includes_residual(made.replace(residual=0))


def test_a_registered_method_with_heads_has_maps_per_head():
    @dataclasses.dataclass(frozen=True)
    class Heads(Largest):
        name: ClassVar[str] = "heads"
        per_head: bool = False

        def __call__(self, block):
            return block.recorded("pattern") if self.per_head else super().__call__(block)

    lm.register(Heads)
    assert read_names(["heads"], per_head=True) == {"heads": Heads(per_head=True)}
    lm.register(Largest)
    with pytest.raises(ValueError, match=r"whose maps have heads \(.*heads\), got largest"):
        read_names(["largest"], per_head=True)


def test_a_target_is_a_parameter_of_the_methods_that_explain_one():
    assert [field.name for field in dataclasses.fields(lm.Method)] == []
    for method in lm.METHODS.values():
        has_target = "target" in {field.name for field in dataclasses.fields(method)}
        assert (method().target is not None) == has_target
        assert method().explain_next_tokens().target == (lm.targets.next_token() if has_target else None)


def test_layers_of_a_method_that_is_not_registered_add_up():
    class Another(lm.methods.AltiLogit):
        name = "another"

    found = lm.run(gpt2_like(), TOKENS, Another())
    assert torch.equal(join_layers(found), found.scores.sum(0))
    assert torch.equal(join_layers(found.replace(provenance={})), found.scores[-1])


def test_every_built_in_method_is_described():
    lines = {name: method.description for name, method in lm.METHODS.items()}
    assert len(set(lines.values())) == len(lines)
    for name, line in {**lines, "input_map": registry.describe("input_map").line}.items():
        assert 15 < len(line) <= 110, name
        assert not line.endswith("."), name
        assert line.isascii(), name
        described = registry.describe(name)
        assert described == (described.group, line, COSTS.get(name))
    assert {method.group for method in lm.METHODS.values()} == {*registry._GROUPS} - {"Other methods"}


def test_methods_are_listed_by_group_and_place():
    lm.register(Largest)
    lm.register(variant(name="in_its_group", group="Attention weights"))
    lm.register(variant(name="before_it", group="Attention weights", place_in_list=99))
    listed = registry.list_names()
    assert listed[0] == "input_map"
    some = ["attention", "attn_res_w", "before_it", "in_its_group", "value_zeroing", "occlusion"]
    assert [name for name in listed if name in some] == some
    assert listed[-1] == "largest"
    groups = [registry.describe(name).group for name in listed]
    assert list(dict.fromkeys(groups)) == ["Recommended", *registry._GROUPS]
    assert len(groups) - len(set(groups)) == sum(a == b for a, b in itertools.pairwise(groups))


def test_a_method_without_a_description_is_described_by_its_docstring():
    @dataclasses.dataclass(frozen=True)
    class Documented(Largest):
        """Return the largest weight of any head.

        More.
        """

        name: ClassVar[str] = "documented"

    @dataclasses.dataclass(frozen=True)
    class Plain(Largest):
        name: ClassVar[str] = "plain"
        size: int = 3

    @dataclasses.dataclass(frozen=True)
    class Described(Documented):
        name: ClassVar[str] = "described"
        description: ClassVar[str] = "the largest weight"

        @classmethod
        def default_cost(cls):
            return Cost(2, per_row=5)

    for method in (Documented, Plain, Described):
        lm.register(method)
    assert registry.describe("documented") == ("Other methods", "Return the largest weight of any head", None)
    assert registry.describe("plain").line == ""
    assert registry.describe("described") == ("Other methods", "the largest weight", Cost(2, per_row=5))
    assert registry.describe("by hand") == ("Other methods", "", None)
    assert registry.describe("plain").cost_in_words == "an unknown number of forward passes"


def test_another_class_can_not_take_a_name():
    lm.register(Largest)
    with pytest.raises(
        ValueError, match=r"Variant: expected a name that no other method has, got 'largest', .*Largest"
    ):
        lm.register(variant())
    with pytest.raises(ValueError, match=r"'attention', the name of lens_mix.*AttentionWeights"):
        lm.register(variant(name="attention"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": None},
            r"class attribute `name`, the name to pass to lm.run, got none; write\s+name: ClassVar",
        ),
        ({"residual": None}, "class attribute `residual`"),
        ({"engines": None}, "class attribute `engines`"),
        ({"name": "largest weight"}, "Variant.name: expected a word"),
        ({"residual": "half"}, "Variant.residual: expected a number from 0 to 1, got 'half'"),
        ({"records": frozenset({"patern"})}, r"Variant.records: .*got 'patern'; did you mean 'pattern'\?"),
        ({"records": "pattern"}, "Variant.records: expected several of"),
        ({"engines": ("fast",)}, r"Variant.engines: expected some of .*'algebra'.*, got 'fast'"),
        ({"engines": ()}, "Variant.engines: expected at least one"),
        ({"needs": ("residul",)}, r"Variant.needs: .*did you mean 'residual'\?"),
        ({"group": "Attention weight"}, r"Variant.group: .*did you mean 'Attention weights'\?"),
        ({"reads": "blok"}, r"Variant.reads: .*did you mean 'block'\?"),
        ({"reads": "below"}, r"Variant: expected an of_blocks\(self, blocks\) .* reads is 'below', got none"),
        ({"layers_add_up": True}, "Variant.layers_add_up: expected False, because .* with reads = 'block'"),
        (
            {"of_blocks": lambda self, blocks: []},
            "Variant.reads: expected 'above', 'below' or 'model', because",
        ),
        ({"__call__": None}, r"expected a __call__\(self, block\)"),
        (
            {"__annotations__": {"floor": float}},
            r"parameters \['floor'\], got a plain class; write\s+@dataclasses",
        ),
        (
            {"__annotations__": {"target": str}, "target": "a"},
            r"parameters \['target'\], got a plain class; write\s+@dataclasses",
        ),
    ],
)
def test_what_is_no_method_is_refused_in_words(changes, message):
    uses = [lm.register, lm.testing.check_method]
    # A method that is not a dataclass can run, but cannot be registered.
    uses += [] if "dataclasses" in message else [lambda kind: lm.run(gpt2_like(), TOKENS, kind())]
    for use in uses:
        with pytest.raises(ValueError, match=message):
            use(variant(**changes))


def test_parameters_have_defaults():
    @dataclasses.dataclass(frozen=True)
    class Needy(Largest):
        name: ClassVar[str] = "needy"
        size: int = dataclasses.field(kw_only=True)

    with pytest.raises(ValueError, match=r"Needy.size: expected a default"):
        lm.register(Needy)


@pytest.mark.parametrize("wrong", ["largest", Largest(), dict, lm.Method])
def test_only_classes_of_methods(wrong):
    with pytest.raises(TypeError, match=r"expected a class derived from lens_mix.Method"):
        lm.register(wrong)


@pytest.mark.parametrize(
    ("give", "error", "message"),
    [
        (lambda block: None, TypeError, "largest: expected a tensor of real numbers .*got NoneType"),
        (lambda block: block.recorded("pattern").long(), TypeError, "a tensor of torch.int64"),
        (lambda block: block.recorded("pattern")[0, 0], ValueError, r"expected a map \[batch, \(head,\)"),
        (
            lambda block: block.recorded("pattern")[..., :4],
            ValueError,
            "a key per position, 6 or more, got 4",
        ),
        (lambda block: block.recorded("value"), ValueError, r"role: .*records: ClassVar.*'value'"),
        (lambda block: block.recorded("paterns"), ValueError, "role: expected one of .*got 'paterns'"),
    ],
)
def test_what_a_method_gives_is_checked(give, error, message):
    kind = variant(__call__=lambda self, block: give(block))
    with pytest.raises(error, match=message):
        lm.run(gpt2_like(), TOKENS, kind())


# ---------------------------------------------------------------------- plugins


class Entry:
    name, value = "largest", "package:Largest"

    def __init__(self, method):
        self._method = method

    def load(self):
        if self._method is None:
            raise ImportError("no module named package")
        return self._method


@pytest.fixture
def installed(monkeypatch):
    def install(*methods):
        entries = [Entry(method) for method in methods]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
        registry._plugins.cache_clear()

    yield install
    monkeypatch.undo()
    registry._plugins.cache_clear()


def test_plugins_work_by_name(installed):
    installed(Largest)
    assert lm.run(gpt2_like(), TOKENS, "largest").method == "largest"


def test_a_plugin_that_fails_leaves_the_others(installed):
    installed(None, variant(engines=("fast",)), variant(name="attention"), Largest)
    with pytest.warns(UserWarning, match="does not provide a method") as told:
        assert "largest" in registry.all_methods()
    assert [str(each.message).partition("does not provide a method: ")[2][:20] for each in told] == [
        "no module named pack",
        "Variant.engines: exp",
        "another method has t",
    ]


def test_the_group_is_the_one_that_the_page_names():
    assert registry.PLUGINS in (registry.__doc__ or "")
