"""Check arguments, and convert them to plain values.

Each function returns the plain value, or raises an error that names the argument and says what was expected
and what was got: a TypeError for a wrong type, a ValueError for a wrong value. The argument's name is the
first parameter, `name`.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def describe_value(value: object) -> str:
    """Return a short description of a value, for errors."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{type(value).__name__} of {value.dtype}, shape {tuple(value.shape)}"
    if not isinstance(value, (str, bytes, numbers.Number, list, tuple, set, Mapping, slice, type(None))):
        return type(value).__name__
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = shortener.maxlong = 80
    try:
        return shortener.repr(value)
    except ValueError:
        # Python does not write whole numbers of thousands of digits.
        return f"{type(value).__name__} with a very long number"


def write_count(count: int, noun: str) -> str:
    """Return a number with its noun: "1 note", "2 notes"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def check_whole_number(
    name: str, value: Any, least: int | None = None, largest: int | None = None, what: str = "a whole number"
) -> int:
    """Return an integer of any library, or a scalar tensor of one, as an int.

    Args:
        name: The name of the argument.
        value: The value. A boolean is not an integer, and neither is 2.0.
        least: The smallest allowed number; None: no bound.
        largest: The largest allowed number; None: no bound.
        what: What was expected, for errors.

    Raises:
        TypeError: If the value is not an integer.
        ValueError: If the value is out of bounds.
    """
    bounds = (
        "" if least is None else f", {least} or more" if largest is None else f" from {least} to {largest}"
    )
    expected = f"{name}: expected {what}{bounds}"
    try:
        is_boolean = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
        if is_boolean or getattr(value, "ndim", None) or getattr(value, "is_meta", False):
            raise TypeError
        whole = operator.index(value)
    except TypeError:
        raise TypeError(f"{expected}, got {describe_value(value)}") from None
    if (least is not None and whole < least) or (largest is not None and whole > largest):
        raise ValueError(f"{expected}, got {describe_value(whole)}")
    return whole


def check_layer(name: str, layer: Any, layers: Sequence[int], what: str = "a whole number") -> int:
    """Return the index of a layer among those that exist, of which a negative number counts from the end.

    Args:
        name: The name of the argument.
        layer: The number of the layer.
        layers: The numbers of the layers that exist.
        what: What `layer` should be, for errors.

    Raises:
        TypeError: If `layer` is not a whole number.
        ValueError: If the layer does not exist.
    """
    number, count = check_whole_number(name, layer, what=what), len(layers)
    if -count <= number < 0:
        return count + number
    if number not in layers:
        first, last = layers[0], layers[-1]
        is_range = list(layers) == list(range(first, last + 1))
        known = f"{first} to {last}" if is_range else ", ".join(map(str, layers))
        known = f"{known}, or -{count} to -1 from the end" if count > 1 else f"{first}, or -1"
        raise ValueError(f"{name}: layer {number} does not exist; expected {known}, got {number}")
    return list(layers).index(number)


def check_slice(name: str, value: slice) -> slice:
    """Return the slice, if its bounds are whole numbers; raise a TypeError otherwise."""
    for bound in (value.start, value.stop, value.step):
        if bound is not None:
            check_whole_number(name, bound, what="a slice of whole numbers")
    return value


def check_number(
    name: str, value: Any, least: float = -math.inf, largest: float = math.inf, above: bool = False
) -> float:
    """Return a finite real number of any library, or a scalar tensor of one, as a float.

    Args:
        name: The name of the argument.
        value: The value. A boolean is not a number.
        least: The smallest allowed number.
        largest: The largest allowed number.
        above: Whether `least` itself is excluded.

    Raises:
        TypeError: If the value is not a real number.
        ValueError: If the value is not finite or is out of bounds.
    """
    start = f"above {least}" if above else f"{least} or more"
    bounds = f", {start}" if largest == math.inf else f" from {least} to {largest}"
    bounds = f" above {least}, at most {largest}" if above and largest < math.inf else bounds
    bounds = "" if least == -math.inf else bounds
    expected = f"{name}: expected a {'finite ' if largest == math.inf else ''}number{bounds}"
    scalar = value.item() if isinstance(value, Tensor) and value.ndim == 0 and not value.is_meta else value
    if isinstance(scalar, bool) or not isinstance(scalar, numbers.Real):
        raise TypeError(f"{expected}, got {describe_value(value)}")
    try:
        real = float(scalar)
    except OverflowError:
        real = math.inf
    if not math.isfinite(real) or not least <= real <= largest or (above and real == least):
        raise ValueError(f"{expected}, got {describe_value(scalar)}")
    return real


def check_flags(**arguments: Any) -> None:
    """Raise a TypeError unless each argument is True or False, because text such as "false" would be true."""
    for name, value in arguments.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name}: expected True or False, got {describe_value(value)}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise a ValueError unless the value is one of some strings."""
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        expected = f"{', '.join(others)} or {last}" if len(others) < 3 else f"one of {list(choices)}"
        raise ValueError(f"{name}: expected {expected}, got {describe_value(value)}")


def check_instance(name: str, value: Any, kind: Any, expected: str) -> Any:
    """Return the value if it has a type, which `expected` describes; raise a TypeError otherwise."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {expected}, got {describe_value(value)}")
    return value


def check_items(
    name: str, values: Any, what: str, least: int = 0, kind: Any = object, alone: bool = False
) -> list[Any]:
    """Return the items of an iterable as a list. A string or a mapping is not an iterable here.

    Args:
        name: The name of the argument.
        values: The items.
        what: What was expected, for errors.
        least: The smallest allowed number of items, 0 to 2.
        kind: The type that all items must have.
        alone: Whether a value that is not an iterable counts as the only item.

    Raises:
        TypeError: If the value is not an iterable, or an item has another type.
        ValueError: If there are too few items.
    """
    is_single = isinstance(values, (str, bytes, Mapping)) or getattr(values, "ndim", 1) == 0
    is_single = is_single or not isinstance(values, Iterable)
    if is_single and not alone:
        raise TypeError(f"{name}: expected {what}, got {describe_value(values)}")
    listed = [values] if is_single else list(values)
    if len(listed) < least:
        count = ("one", "two")[least - 1]
        raise ValueError(f"{name}: expected at least {count} ({what}), got {len(listed) or 'none'}")
    for item in listed:
        check_instance(name, item, kind, what)
    return listed


def check_pairs(name: str, values: Any, what: str) -> list[tuple[Any, Any]]:
    """Return tuples or lists of two items as a list of tuples; raise a TypeError for anything else."""
    listed = check_items(name, values, what)
    for pair in listed:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{name}: expected {what}, got {describe_value(pair)}")
    return [(first, second) for first, second in listed]


def check_heads(heads: Any) -> Any:
    """Return heads as a list, or as a dict of lists by layer; None means all heads.

    Args:
        heads: The heads (a list, a tensor, a range or a set), or such heads by layer.

    Raises:
        TypeError: If a head or a layer is not a whole number.
        ValueError: If a head or a layer is below 0, a head occurs twice, or there are none.
    """
    if heads is None:
        return None
    if isinstance(heads, Mapping):
        return {
            check_whole_number("heads (layer)", layer, 0): check_heads(layer_heads)
            for layer, layer_heads in heads.items()
        }
    listed = _list_whole_numbers("heads", heads)
    if len(set(listed)) != len(listed):
        raise ValueError(f"heads: expected each head once, got {listed}")
    return listed


def _list_whole_numbers(name: str, values: Any) -> list[int]:
    items = check_items(name, values, "whole numbers in a list", least=1)
    return [check_whole_number(name, item, 0) for item in items]


def check_dense_tensor(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor, if torch can compute with it.

    Raises:
        TypeError: If it is sparse, quantised, on the device "meta", or of 8-bit floats.
    """
    is_8_bit = tensor.is_floating_point() and tensor.element_size() == 1
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or is_8_bit:
        kind = f"{tensor.layout}, {tensor.dtype}, on {tensor.device}"
        raise TypeError(f"{name}: expected a dense tensor with numbers in it, got one of {kind}")
    return tensor


def check_real_tensor(name: str, values: Any) -> Tensor:
    """Return real numbers as a detached tensor.

    Args:
        name: The name of the argument.
        values: A tensor, an array or an evenly nested list.

    Raises:
        TypeError: If the values are not real numbers.
        ValueError: If a list is not evenly nested.
    """
    if not isinstance(values, Tensor):
        expected = f"{name}: expected a tensor, an array or an evenly nested list"
        try:
            items = values if isinstance(values, (list, tuple)) else ()
            if items and all(isinstance(item, Tensor) for item in items):
                values = torch.stack([item.detach() for item in items])
            else:
                array = np.array(values)
                if array.dtype.kind not in "fiubc":
                    raise TypeError(f"{name}: expected numbers, got {type(values).__name__} of {array.dtype}")
                values = torch.from_numpy(array)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{expected}, got {error}") from error
    tensor = check_dense_tensor(name, values)
    if tensor.is_complex():
        raise TypeError(f"{name}: expected real numbers, got {tensor.dtype}")
    return tensor.detach()


def check_file_path(name: str, path: Any, write: bool = False) -> str:
    """Return the path of a file as a string.

    Args:
        name: The name of the argument.
        path: The path.
        write: Whether the file is to be written. Then only its folder must exist, else the file itself.

    Raises:
        TypeError: If `path` is not a path.
        ValueError: If it is the path of a folder, or cannot be the path of a file.
        FileNotFoundError: If the file, or the folder to write to, does not exist.
    """
    text: str = os.fspath(check_instance(name, path, (str, os.PathLike), "a path"))
    is_folder = "\0" not in str(text) and os.path.isdir(text)
    if is_folder or not text or "\0" in str(text):
        raise ValueError(
            f"{name}: expected the path of a file, got {'the folder ' if is_folder else ''}{text!r}"
        )
    required, what = (os.path.dirname(text) or ".", "a folder") if write else (text, "a file")
    if not os.path.exists(required):
        raise FileNotFoundError(f"{name}: expected {what} that exists, got {required}")
    return text


def check_columns(name: str, table: Any, columns: Iterable[str]) -> None:
    """Raise a ValueError unless `table` is a table with all of `columns`."""
    columns = list(columns)
    missing = [column for column in columns if column not in getattr(table, "columns", ())]
    if missing:
        got = f"{describe_value(table)}, missing {missing}"
        raise ValueError(f"{name}: expected a table with the columns {columns}, got {got}")
