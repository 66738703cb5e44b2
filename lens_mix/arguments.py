"""Arguments, checked alike everywhere: the plain value, or an error that says what was expected and got.

A value of a wrong type is a TypeError, one out of bounds a ValueError; both name the argument.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import reprlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def shown(value: object) -> str:
    """A value in a few words."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{type(value).__name__} of {value.dtype}, shape {tuple(value.shape)}"
    if not isinstance(value, (str, bytes, numbers.Number, list, tuple, set, Mapping, slice, type(None))):
        return type(value).__name__
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def whole_number(
    name: str, value: Any, least: int | None = None, largest: int | None = None, what: str = "a whole number"
) -> int:
    """An integer of any library, or a tensor [] of one; no boolean and no 2.0. `what` it is, for errors."""
    end = "" if least is None else f", {least} or more" if largest is None else f" from {least} to {largest}"
    expected = f"{name}: expected {what}{end}"
    try:
        boolean = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
        if boolean or getattr(value, "ndim", None) or getattr(value, "is_meta", False):
            raise TypeError
        whole = operator.index(value)
    except TypeError:
        raise TypeError(f"{expected}, got {shown(value)}") from None
    if (least is not None and whole < least) or (largest is not None and whole > largest):
        raise ValueError(f"{expected}, got {shown(whole)}")
    return whole


def whole_slice(name: str, value: slice) -> slice:
    """A slice whose bounds are whole numbers."""
    for bound in (value.start, value.stop, value.step):
        if bound is not None:
            whole_number(name, bound, what="a slice of whole numbers")
    return value


def number(
    name: str, value: Any, least: float = -math.inf, largest: float = math.inf, above: bool = False
) -> float:
    """A finite number of any library, `least` or more (or `above` it), up to `largest`; no boolean."""
    start = f"above {least}" if above else f"{least} or more"
    bounds = f", {start}" if largest == math.inf else f" from {least} to {largest}"
    bounds = "" if least == -math.inf else bounds
    expected = f"{name}: expected a {'finite ' if largest == math.inf else ''}number{bounds}"
    given = value.item() if isinstance(value, Tensor) and value.ndim == 0 and not value.is_meta else value
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"{expected}, got {shown(value)}")
    try:
        real = float(given)
    except OverflowError:
        real = math.inf
    if not math.isfinite(real) or not least <= real <= largest or (above and real == least):
        raise ValueError(f"{expected}, got {shown(given)}")
    return real


def flags(**given: Any) -> None:
    """Refuse what is neither True nor False: any text, "false" too, would count as True."""
    for name, value in given.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name}: expected True or False, got {shown(value)}")


def one_of(name: str, value: Any, choices: Collection[str]) -> None:
    """Refuse all but some strings."""
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        expected = f"{', '.join(others)} or {last}" if len(others) < 3 else f"one of {list(choices)}"
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}")


def instance(name: str, value: Any, kind: Any, expected: str) -> Any:
    """The value, if it is of a type; `expected` names it."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {expected}, got {shown(value)}")
    return value


def several(
    name: str, values: Any, what: str, least: int = 0, kind: Any = object, alone: bool = False
) -> list[Any]:
    """What comes one after another, as a list: no string, no mapping, at least so many, all of one type.

    `alone`: what is no series counts as the only item.
    """
    single = isinstance(values, (str, bytes, Mapping)) or getattr(values, "ndim", 1) == 0
    single = single or not isinstance(values, Iterable)
    if single and not alone:
        raise TypeError(f"{name}: expected {what}, got {shown(values)}")
    listed = [values] if single else list(values)
    if len(listed) < least:
        count = ("one", "two")[least - 1]
        raise ValueError(f"{name}: expected at least {count} ({what}), got {len(listed) or 'none'}")
    for item in listed:
        instance(name, item, kind, what)
    return listed


def pairs(name: str, values: Any, what: str) -> list[tuple[Any, Any]]:
    """Tuples or lists of two, as tuples."""
    listed = several(name, values, what)
    for pair in listed:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{name}: expected {what}, got {shown(pair)}")
    return [(first, second) for first, second in listed]


def heads_by_layer(heads: Any) -> Any:
    """Heads as a list, each once, or layer -> list; a tensor, a range or a set will do. None: all."""
    if heads is None:
        return None
    if isinstance(heads, Mapping):
        return {whole_number("heads (layer)", layer, 0): heads_by_layer(of) for layer, of in heads.items()}
    listed = _from_zero_up("heads", heads)
    if len(set(listed)) != len(listed):
        raise ValueError(f"heads: expected each head once, got {listed}")
    return listed


def groups_of_positions(name: str, groups: Any) -> list[list[int]]:
    """Groups of positions as lists, none of them empty; no position is in two."""
    listed = [_from_zero_up(name, group) for group in several(name, groups, "groups of positions", least=1)]
    positions = [position for group in listed for position in group]
    if len(set(positions)) != len(positions):
        raise ValueError(f"{name}: expected each position in one group at most, got {listed}")
    return listed


def _from_zero_up(name: str, values: Any) -> list[int]:
    return [whole_number(name, one, 0) for one in several(name, values, "whole numbers in a list", least=1)]


def plain_tensor(name: str, tensor: Tensor) -> Tensor:
    """The tensor, if it can be calculated with: not sparse, quantised, on "meta", or of 8-bit floats."""
    eight_bits = tensor.is_floating_point() and tensor.element_size() == 1
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or eight_bits:
        kind = f"{tensor.layout}, {tensor.dtype}, on {tensor.device}"
        raise TypeError(f"{name}: expected a dense tensor with numbers in it, got one of {kind}")
    return tensor


def real_tensor(name: str, values: Any) -> Tensor:
    """Real numbers as a detached tensor: a tensor, an array or an evenly nested list."""
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
    if plain_tensor(name, values).is_complex():
        raise TypeError(f"{name}: expected real numbers, got {values.dtype}")
    return values.detach()


def file_path(name: str, path: Any, write: bool = False) -> str:
    """The path of a file that can be there: its folder is, and to read it, the file itself."""
    place = os.fspath(instance(name, path, (str, os.PathLike), "a path"))
    folder = "\0" not in str(place) and os.path.isdir(place)
    if folder or not place or "\0" in str(place):
        raise ValueError(
            f"{name}: expected the path of a file, got {'the folder ' if folder else ''}{place!r}"
        )
    required, what = (os.path.dirname(place) or ".", "a folder") if write else (place, "a file")
    if not os.path.exists(required):
        raise FileNotFoundError(f"{name}: expected {what} that is there, got {required}")
    return place


def check_columns(name: str, table: Any, columns: Iterable[str]) -> None:
    """Refuse what is no table, or lacks a column."""
    columns = list(columns)
    missing = [column for column in columns if column not in getattr(table, "columns", ())]
    if missing:
        got = f"{shown(table)}, missing {missing}"
        raise ValueError(f"{name}: expected a table with the columns {columns}, got {got}")
