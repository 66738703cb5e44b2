"""Test that the suite's type checker finds wrong shapes."""

from __future__ import annotations

import ast
import dataclasses

import pytest
import torch
from jaxtyping import Float, TypeCheckError, config, jaxtyped
from torch import Tensor

from lens_mix._algebra.distances import distance
from tests.shape_checks import shapes
from tests.source_tree import trees

pytestmark = pytest.mark.skipif(config.jaxtyping_disable, reason="shapes are checked on TransformerLens 4.3")
checked = jaxtyped(typechecker=shapes)


@checked
def total(
    x: Float[Tensor, "row column"], y: Float[Tensor, "row column"] | None = None
) -> Float[Tensor, "row column"]:
    if y is not None and len(x) != len(y):
        raise ValueError("y: expected as many rows as x has")
    return x if y is None else x + y


@checked
def turned(x: Float[Tensor, "row column"], times: int) -> tuple[Float[Tensor, "column row"], int]:
    return x.T if times % 2 else x, int(times)


@checked
@dataclasses.dataclass
class Pair:
    rows: int
    x: Float[Tensor, "row column"]
    y: Float[Tensor, "row column"]


def test_right_shapes_pass():
    assert total(torch.ones(2, 3), torch.ones(2, 3)).shape == total(torch.ones(2, 3)).shape
    assert turned(torch.ones(2, 3), 1)[0].shape == (3, 2)
    Pair(2, torch.ones(2, 3), torch.ones(2, 3))


def test_what_is_no_shape_is_left_to_mypy():
    assert turned(torch.ones(2, 3), 1.0)[1] == 1
    Pair("two", torch.ones(2, 3), torch.ones(2, 3))


def test_a_function_without_a_shape_stays_as_it_is():
    def plain(times: int) -> int:
        return times

    assert checked(plain) is plain
    assert checked(total.__wrapped__) is not total.__wrapped__


@pytest.mark.parametrize(
    "call",
    [
        lambda: total(torch.ones(2, 3, dtype=torch.bool)),
        lambda: total(torch.ones(2, 2, 3)),
        lambda: total(torch.ones(2, 3), torch.ones(2, 1)),
        lambda: turned(torch.ones(2, 3), 2),
        lambda: Pair(2, torch.ones(2, 3), torch.ones(3, 2)),
    ],
    ids=["dtype", "axes", "size", "result", "field"],
)
def test_wrong_shapes_are_found(call):
    with pytest.raises(TypeCheckError):
        call()


def test_a_functions_own_words_come_first():
    with pytest.raises(ValueError, match="y: expected as many rows as x has"):
        total(torch.ones(2, 3), torch.ones(3, 3))


def test_the_library_is_checked(request):
    if not request.config.getoption("--jaxtyping-packages"):
        pytest.skip("run without --jaxtyping-packages")
    assert hasattr(distance, "__wrapped__")


def unquoted_shapes(tree: ast.AST) -> list[str]:
    """Return annotations such as Float[Tensor, copy *axes], which are products of unknown names."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Tuple)
        and ast.unparse(node.slice.elts[0]) == "Tensor"
        and not isinstance(node.slice.elts[1], ast.Constant)
        and ast.unparse(node.value) in SHAPED
    ]


SHAPED = ("Bool", "Float", "Int", "Num", "Real", "Shaped")


def test_shapes_stand_in_quotes():
    """Check the quotes of shapes: linters remove those of "copy *axes", but not those of " copy *axes"."""
    assert not {module: shapes for module, tree in trees().items() if (shapes := unquoted_shapes(tree))}
    mistake = ast.parse("def f(x: Float[Tensor, copy *axes], y: Float[Tensor, ' copy *axes']): ...")
    assert unquoted_shapes(mistake) == ["Float[Tensor, copy * axes]"]
