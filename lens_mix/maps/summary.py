"""Summarize the maps of many prompts in one table, with means and intervals over the prompts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_choice, check_number, describe_value
from lens_mix.maps.arithmetic import at_least_float32, normalize_by_magnitude
from lens_mix.maps.checks import require_visible_keys
from lens_mix.maps.record import MixingMap
from lens_mix.maps.spans import Span, find_positions
from lens_mix.tables import Table

# The maps of one prompt: a map, or one for each method.
OfPrompt = MixingMap | Mapping[str, MixingMap]
# One span for all prompts, a function of each map, or an iterable with one span per prompt.
Keys = Span | Callable[[MixingMap], Span] | Iterable[Span]
Query = int | str | None | Callable[[MixingMap], int | str]

_COLUMNS = ["method", "layer", "head", "keys", "mean", "low", "high", "n"]
_OPTIONAL = ("method", "head", "keys")
_NO_ENTRY: Any = object()


def table(
    maps: OfPrompt | Iterable[OfPrompt],
    keys: Keys | Mapping[str, Keys],
    *,
    query: Query | Iterable[int | str] = None,
    unit: Literal["share", "raw"] = "share",
    confidence: float = 0.95,
) -> Table:
    """Return a table of how much a row used some keys, per layer: means over prompts, with intervals.

    The mean share on a cue, per layer, over many sentences, where `cues` has one text per sentence:

        >>> sentences, cues = ["Anna lives in Rome", "Ben lives in Oslo"], ["Anna", "Ben"]
        >>> maps = lm.run_many(model, sentences, "value_zeroing", queries=[-1])
        >>> print(lm.table(maps, keys=cues))

    The value of a prompt is the sum of the row's scores on the keys. The interval is Student's t interval of
    the mean over prompts, and is NaN for a single prompt. The maps are read one after another and are not
    kept.

    Args:
        maps: The maps of several prompts, such as the result of `lm.run_many`, or those of one prompt. With
            several methods they are dicts of maps, and the table has a column `method`.
        keys: The keys. A position (negative: from the end) or a text (" Eiffel Tower") is the same for every
            prompt. A list has one entry per prompt: a position, a text, or several of these. A function
            returns such an entry for a map. A dict of named keys, {"subject": subjects, "cue": cues}, adds
            a column `keys`.
        query: The row: a position or a text, of which the last token is meant, a list with one of these per
            prompt, or a function of the map. None: the default row of each map.
        unit: "share": each row is divided by the sum of its magnitudes. "raw": scores as the method defines
            them.
        confidence: The confidence of the intervals, 0 to 1.

    Returns:
        A table with the columns (method), layer, (head), (keys), mean, low, high and n, the number of
        prompts.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If there are no maps, their methods, layers or heads differ between prompts, or there is
            not one entry per prompt. Also if a prompt does not have a key, or its row cannot see the key; the
            error names the prompt.
    """
    check_choice("unit", unit, ("share", "raw"))
    confidence = check_number("confidence", confidence, 0, 1)
    if isinstance(keys, Mapping) and not keys:
        raise ValueError("keys: expected at least one name in the dict, got none")
    named = keys if isinstance(keys, Mapping) else {"": keys}
    entries = {name: _Entries(_name_argument(name), of_name) for name, of_name in named.items()}
    rows = _Entries("query", query)
    results: dict[str, _MethodValues] | None = None
    for index, of_prompt in enumerate(_list_prompts(maps)):
        row, spans = rows.next(index), {name: each.next(index) for name, each in entries.items()}
        found = {label: _read(index, one, row, spans, unit) for label, one in of_prompt.items()}
        results = found if results is None else _append(index, results, found)
    if results is None:
        raise ValueError(
            "maps: expected at least one map, got none; the maps of lm.run_many can be read once only, and "
            "list(lm.run_many(...)) keeps them"
        )
    count = len(next(iter(results.values())).by_prompt)
    for each in (rows, *entries.values()):
        each.require_end(count)
    places = [
        {"method": label or None, **place}
        for label, values in results.items()
        for place in values.summarize(confidence)
    ]
    summary: Table = Table(places, columns=_COLUMNS)
    # One method, maps without heads and keys without a name need no column.
    summary = summary.drop(columns=[name for name in _OPTIONAL if summary[name].isna().all()])
    summary.attrs = {"unit": unit, "confidence": confidence, "interval": "Student's t, over prompts"}
    return summary


class _Entries:
    """The entries of an argument, one per prompt, in the order of the prompts."""

    def __init__(self, argument: str, value: Any) -> None:
        self.argument = argument
        self.is_list = isinstance(value, Iterable) and not isinstance(value, str)
        # A 0-dimensional array or tensor is one number.
        self.is_list = self.is_list and getattr(value, "ndim", 1) > 0
        self._values: Iterator[Any] = iter(value) if self.is_list else itertools.repeat(value)

    def next(self, index: int) -> Any:
        """Return the entry of the next prompt."""
        entry = next(self._values, _NO_ENTRY)
        if entry is _NO_ENTRY:
            raise ValueError(f"{self.argument}: expected one entry per prompt, got {index}, and more prompts")
        return entry

    def require_end(self, count: int) -> None:
        """Raise a ValueError if there are more entries than prompts."""
        if self.is_list and next(self._values, _NO_ENTRY) is not _NO_ENTRY:
            one = "; several keys of one prompt are [[...]]" if count == 1 else ""
            raise ValueError(f"{self.argument}: expected one entry per prompt ({count}), got more{one}")


@dataclasses.dataclass
class _MethodValues:
    """The values of one method.

    Attributes:
        layers: The labels of the layers.
        n_heads: The number of heads; None: the maps have no heads.
        names: The names of the keys.
        by_prompt: One array per prompt, `[keys, layer]` or `[keys, layer, head]`.
    """

    layers: list[int]
    n_heads: int | None
    names: list[str]
    by_prompt: list[Any]

    def summarize(self, confidence: float) -> Iterator[dict[str, Any]]:
        """Yield the row of the table for each layer, head and name of keys."""
        from scipy.special import stdtrit

        values, count = np.stack(self.by_prompt), len(self.by_prompt)
        means, margins = values.mean(0), np.full(values.shape[1:], math.nan)
        if count > 1:
            quantile = stdtrit(count - 1, (1 + confidence) / 2)
            margins = quantile * values.std(0, ddof=1) / math.sqrt(count)
        heads = [()] if self.n_heads is None else [(head,) for head in range(self.n_heads)]
        for (row, layer), head, (index, name) in itertools.product(
            enumerate(self.layers), heads, enumerate(self.names)
        ):
            mean, margin = means[(index, row, *head)], margins[(index, row, *head)]
            place = {"layer": layer, **({"head": head[0]} if head else {}), "keys": name or None}
            yield {**place, "mean": mean, "low": mean - margin, "high": mean + margin, "n": count}


def _name_argument(name: str) -> str:
    """Return what errors call the keys of a name; the name is "" for keys without one."""
    return f"keys[{name!r}]" if name else "keys"


def _list_prompts(maps: Any) -> Iterator[Mapping[str, MixingMap]]:
    """Yield the maps of each prompt by the labels of the methods; the label of a map alone is ""."""
    expected = "maps: expected MixingMaps, or dicts of them, one per prompt (the result of lm.run_many)"
    is_one_prompt = isinstance(maps, (MixingMap, Mapping))
    if not is_one_prompt and (isinstance(maps, str) or not isinstance(maps, Iterable)):
        raise TypeError(f"{expected}, got {describe_value(maps)}")
    for index, of_prompt in enumerate([maps] if is_one_prompt else maps):
        labeled = of_prompt if isinstance(of_prompt, Mapping) else {"": of_prompt}
        if not labeled:
            raise ValueError(f"{expected}, got an empty dict for prompt {index}")
        for one in labeled.values():
            if not isinstance(one, MixingMap):
                where = "a dict of " if isinstance(of_prompt, Mapping) else ""
                raise TypeError(f"{expected}, got {where}{describe_value(one)} for prompt {index}")
        yield labeled


def _read(
    index: int, mixing_map: MixingMap, query: Any, spans: Mapping[str, Any], unit: str
) -> _MethodValues:
    """Return the values of one prompt and one method."""
    try:
        row = mixing_map.row_index(query(mixing_map) if callable(query) else query)
        scores = mixing_map.scores[..., row, :]
        scores = at_least_float32(scores) if unit == "raw" else normalize_by_magnitude(scores)
        values = [_sum_keys(mixing_map, row, scores, name, span) for name, span in spans.items()]
    except (TypeError, ValueError) as problem:
        raise type(problem)(f"prompt {index}: {problem}") from problem
    n_heads = mixing_map.scores.shape[1] if mixing_map.has_heads else None
    by_prompt = [torch.stack(values).cpu().double().numpy()]
    return _MethodValues(mixing_map.layer_labels, n_heads, list(spans), by_prompt)


def _sum_keys(
    mixing_map: MixingMap, row: int, scores: Float[Tensor, "layer *head key"], name: str, span: Any
) -> Float[Tensor, " layer *head"]:
    """Return the sum of the scores on a span, which the row must be able to see."""
    argument = _name_argument(name)
    span = span(mixing_map) if callable(span) else span
    positions = find_positions(mixing_map.key_labels, span, argument)
    require_visible_keys(mixing_map, row, positions, argument)
    return scores[..., positions].sum(-1)


def _append(
    index: int, results: dict[str, _MethodValues], found: dict[str, _MethodValues]
) -> dict[str, _MethodValues]:
    """Return the results with the values of one more prompt."""
    for label, values in found.items():
        before = results.get(label)
        if before is None or list(results) != list(found):
            raise ValueError(
                f"maps: expected the methods {list(results)} for every prompt, got {list(found)} for prompt "
                f"{index}"
            )
        if (before.layers, before.n_heads) != (values.layers, values.n_heads):
            raise ValueError(
                f"maps: expected layers {before.layers} and {before.n_heads or 'no'} heads for every prompt, "
                f"got layers {values.layers} and {values.n_heads or 'no'} heads for prompt {index}"
            )
        before.by_prompt.extend(values.by_prompt)
    return results
