"""Reduce maps to means, spreads and counts in groups, which are merged exactly over shards."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from lens_mix.arguments import check_choice, check_instance, check_items, describe_value
from lens_mix.maps import MixingMap
from lens_mix.maps.arithmetic import normalize_by_magnitude
from lens_mix.maps.exchange import to_numpy
from lens_mix.maps.spans import find_positions
from lens_mix.maps.token_kinds import token_kind

if TYPE_CHECKING:
    import pandas

# A function of a map and the fields of its prompt, which returns a number, or a tensor [layer],
# [layer, head], or with the shape of the map's scores.
MapFunction = Callable[[MixingMap, Mapping[str, Any]], Any]

_AXES = (
    *("layer", "head", "query", "key", "offset", "query_kind", "key_kind", "query_token"),
    *("key_token", "query_word", "key_word", "cue"),
)
_WORDS = {"query_word", "key_word"}
_MOMENTS = ["count", "mean", "m2"]


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean, the spread and the number of values of maps, in groups.

        >>> prompts = ["Anna lives in Rome.", "Ben lives in Oslo."]
        >>> reduce = {"kinds": lm.corpus.Mean(by=("layer", "key_kind"))}
        >>> lm.corpus.run(model, prompts, "attention", reduce=reduce, out="folder")
        >>> lm.corpus.load("folder", table="kinds")

    Attributes:
        by: What the groups are, fields of the prompts or some of "layer", "head", "query" and "key" (their
            positions), "offset" (how far the key is before the query), "query_kind" and "key_kind" (special,
            punctuation, mask, other), "query_token" and "key_token", "query_word" and "key_word" (the map is
            first merged to words), and "cue" (whether the key is in the text of the field `cue`). Each method
            has groups of its own.
        of: "share": each score divided by the sum of magnitudes of its row. "score": the score as the method
            defines it. Or a function of the map and the prompt's fields, which returns a number, or a tensor
            `[layer]`, `[layer, head]`, or of the shape of the map's scores.
        per: "cell": each visible key of each row is a value. "row": each row has a value per group, the sum
            over the row's keys in it. Rows without a visible key in a group have no value in it.
        methods: The labels of the methods whose maps are reduced. None: all.
    """

    by: Sequence[str] = ("layer",)
    of: Literal["share", "score"] | MapFunction = "share"
    per: Literal["cell", "row"] = "cell"
    methods: Sequence[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "by", tuple(check_items("by", self.by, "names of groups", kind=str)))
        check_choice("per", self.per, ("cell", "row"))
        if not callable(self.of):
            check_choice("of", self.of, ("share", "score"))
        if self.methods is not None:
            names = tuple(check_items("methods", self.methods, "labels of methods", kind=str))
            object.__setattr__(self, "methods", names)

    def check(self, name: str, fields: Sequence[str]) -> None:
        """Raise a ValueError unless every group is an axis or a field of the prompts."""
        needed = [*self.by, *(["cue"] if "cue" in self.by else [])]
        for group in needed:
            if group not in _AXES and group not in fields:
                raise ValueError(
                    f"reduce[{name!r}].by: expected some of {[*_AXES, *fields]}, got {group!r}; columns "
                    "of the prompts are groups if they are named in fields="
                )
        if "cue" in self.by and "cue" not in fields:
            raise ValueError(
                f"reduce[{name!r}].by: expected 'cue' among the fields of the prompts, got {list(fields)}"
            )

    def observe(self, method: str, mixing: MixingMap, fields: Mapping[str, Any]) -> pandas.DataFrame | None:
        """Return the groups of one map with their count, mean and sum of squared deviations.

        Args:
            method: The label of the method.
            mixing: The map.
            fields: The fields of the prompt.

        Returns:
            A table with the columns method, those of `by`, count, mean, m2. None if the method has no part in
            the reduction.

        Raises:
            ValueError: If the map does not have a group (a head, a cue), or the function returns something
                else.
        """
        if self.methods is not None and method not in self.methods:
            return None
        if _WORDS & set(self.by):
            mixing = mixing.merge_words()
        values, visible, axes = self._values(mixing, fields)
        codes, labels = np.zeros(values.shape, np.int64), []
        for group in self.by:
            names, places = self._labels(group, mixing, fields, values.shape, axes)
            codes = codes * len(names) + places
            labels.append(names)
        codes, values = codes[visible], values[visible].astype(np.float64)
        if self.per == "row" and axes == 3:
            rows = np.broadcast_to(
                np.arange(visible[..., 0].size).reshape(*visible.shape[:-1], 1), visible.shape
            )
            width = max(1, int(np.prod([len(names) for names in labels])))
            pairs, inside = np.unique(rows[visible] * width + codes, return_inverse=True)
            values = np.bincount(inside, values, len(pairs))
            codes = pairs % width
        return _to_frame(method, self.by, labels, codes, values)

    def _values(self, mixing: MixingMap, fields: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the values, which of them count, and on how many axes they are: 3 means layer to key."""
        if callable(self.of):
            found = self.of(mixing, fields)
            if not isinstance(found, Tensor):
                found = torch.as_tensor(found, dtype=torch.float64, device="cpu")
            if found.shape != mixing.scores.shape:
                expected = [(), mixing.scores.shape[:1], mixing.scores.shape[:2]]
                if tuple(found.shape) not in map(tuple, expected) or (
                    found.ndim == 2 and not mixing.has_heads
                ):
                    raise ValueError(
                        "of: expected a function that returns a number, or a tensor [layer], [layer, head], "
                        f"or of the shape of the scores {list(mixing.scores.shape)}, got {list(found.shape)}"
                    )
                values = to_numpy(found.detach())
                return values, np.ones(values.shape, bool), found.ndim
        else:
            found = normalize_by_magnitude(mixing.scores) if self.of == "share" else mixing.scores
        visible = mixing.visible()
        visible = visible[:, None].expand_as(found) if mixing.has_heads else visible
        return to_numpy(found.detach()), visible.cpu().numpy(), 3

    def _labels(
        self, group: str, mixing: MixingMap, fields: Mapping[str, Any], shape: tuple[int, ...], axes: int
    ) -> tuple[list[Any], np.ndarray]:
        """Return the names of one kind of group, and the index of each value's name."""
        if group not in _AXES:
            return [_field_label(fields[group])], np.zeros(shape, np.int64)
        needed = {"layer": 1, "head": 2}.get(group, 3)
        if needed > axes:
            raise ValueError(f"by: expected groups that {self.of!r} has values for, got {group!r}")
        if group == "layer":
            return mixing.layer_labels, _along(np.arange(len(mixing)), 0, shape)
        if group == "head":
            if not mixing.has_heads:
                raise ValueError(
                    "by: expected a map with heads for 'head', got one without; use per_head=True"
                )
            return list(range(mixing.scores.shape[1])), _along(np.arange(mixing.scores.shape[1]), 1, shape)
        queries, keys = np.asarray(mixing.query_positions), np.arange(len(mixing.key_labels))
        if group == "offset":
            offsets = queries[:, None] - keys
            unique, places = np.unique(offsets, return_inverse=True)
            return unique.tolist(), np.broadcast_to(places.reshape(offsets.shape), shape)
        if group == "cue":
            text = check_instance("cue", fields["cue"], str, "a text, whose keys are the group")
            cue = find_positions(mixing.key_labels, text, "cue")
            return [False, True], _along(np.isin(keys, cue).astype(np.int64), -1, shape)
        axis, _, what = group.partition("_")
        texts = mixing.query_labels if axis == "query" else mixing.key_labels
        found: Sequence[Any] = queries.tolist() if axis == "query" else keys.tolist()
        if what:
            found = [token_kind(text) if what == "kind" else text for text in texts]
            found = [text.strip() for text in found] if what == "word" else found
        names = sorted(set(found))
        index = {name: place for place, name in enumerate(names)}
        places = np.asarray([index[one] for one in found])
        return names, _along(places, -2 if axis == "query" else -1, shape)


def largest_per_head(mixing: MixingMap, fields: Mapping[str, Any]) -> Tensor:
    """Return the largest score of each head, `[layer, head]`.

        >>> method, of = lm.methods.AttentionWeights(per_head=True), lm.corpus.largest_per_head
        >>> reduce = {"largest": lm.corpus.Mean(by=("layer", "head"), of=of)}
        >>> lm.corpus.run(model, ["Anna lives in Rome."], method, reduce=reduce, out="folder")
        >>> lm.corpus.load("folder", table="largest")

    Its mean over prompts is the importance of a head for maps of attention attribution (Hao et al., AAAI
    2021, section 4): `Mean(by=("layer", "head"), of=largest_per_head)`.

    Args:
        mixing: A map with heads.
        fields: The fields of the prompt, which do not matter.

    Raises:
        ValueError: If the map has no heads.
    """
    if not mixing.has_heads:
        raise ValueError("of: expected a map with heads, got one without; use per_head=True")
    return mixing.scores.amax((-2, -1))


def check_reductions(reduce: Any, fields: Sequence[str]) -> dict[str, Mean]:
    """Return the reductions by their names.

    Raises:
        TypeError: If they are not `Mean` by name.
        ValueError: If a name cannot be the name of a folder, or a group does not exist.
    """
    if reduce is None:
        return {}
    check_instance("reduce", reduce, Mapping, "reductions by name, as in {'kinds': lm.corpus.Mean(...)}")
    for name, reduction in reduce.items():
        if not isinstance(name, str) or not name.replace("_", "").isalnum():
            raise ValueError(f"reduce: expected names of letters, digits and _, got {describe_value(name)}")
        check_instance(f"reduce[{name!r}]", reduction, Mean, "lm.corpus.Mean(...)").check(name, fields)
    return dict(reduce)


def merge_moments(tables: Sequence[pandas.DataFrame], by: Sequence[str]) -> pandas.DataFrame:
    """Return the groups of several tables together (Chan, Golub and LeVeque 1979, equation 2.1).

    Args:
        tables: Tables of `Mean.observe`, at least one. Their order decides the last digits.
        by: The columns of the groups.
    """
    import pandas as pd

    table = pd.concat(tables, ignore_index=True)
    table["total"] = table["count"] * table["mean"]
    groups = table.groupby(list(by), sort=True, dropna=False)
    sums = groups[["count", "total"]].sum()
    mean = sums["total"] / sums["count"]
    center = mean.loc[pd.MultiIndex.from_frame(table[list(by)]) if len(by) > 1 else table[by[0]]]
    table["m2"] = table["m2"] + table["count"] * (table["mean"] - center.to_numpy()) ** 2
    merged = table.groupby(list(by), sort=True, dropna=False)["m2"].sum()
    return pd.DataFrame({"count": sums["count"], "mean": mean, "m2": merged})[_MOMENTS].reset_index()


def finish_moments(table: pandas.DataFrame) -> pandas.DataFrame:
    """Return the groups with their count, mean and spread, the standard deviation of the values."""
    freedom = (table["count"] - 1).where(table["count"] > 1)
    return table.assign(spread=np.sqrt(table["m2"] / freedom)).drop(columns="m2")


def _along(places: np.ndarray, axis: int, shape: tuple[int, ...]) -> np.ndarray:
    form = [1] * len(shape)
    form[axis] = len(places)
    return np.broadcast_to(places.reshape(form), shape)


def _field_label(value: Any) -> str:
    """Return the text of a field in a file: the field as JSON, or text that is not JSON of another value."""
    is_unlike_json = isinstance(value, str) and _read_label(value) is value
    return value if is_unlike_json else json.dumps(value)


def _read_label(text: str) -> Any:
    """Return the field that `_field_label` wrote. Lists and mappings stay text, as groups need a name."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, (list, dict)) else value


def read_labels(table: pandas.DataFrame) -> pandas.DataFrame:
    """Return a table whose groups by fields have the fields' values, so that 1 and "1" are told apart."""
    fields = [name for name in table.columns if name not in ("method", *_AXES, *_MOMENTS, "spread")]
    read = {name: table[name].astype(object).map(_read_label, na_action="ignore") for name in fields}
    return table.assign(**{name: values.astype(object).infer_objects() for name, values in read.items()})


def _to_frame(
    method: str, by: Sequence[str], labels: Sequence[Sequence[Any]], codes: np.ndarray, values: np.ndarray
) -> pandas.DataFrame:
    """Return count, mean and m2 of the values of each code, with the labels that the code stands for."""
    import pandas as pd

    found, inside = np.unique(codes, return_inverse=True)
    inside = inside.reshape(-1)
    count = np.bincount(inside, minlength=len(found))
    mean = np.bincount(inside, values.reshape(-1), len(found)) / count
    m2 = np.bincount(inside, (values.reshape(-1) - mean[inside]) ** 2, len(found))
    columns: dict[str, Any] = {}
    rest = found
    for group, names in zip(reversed(by), reversed(labels), strict=True):
        columns[group] = [names[place] for place in rest % len(names)]
        rest = rest // len(names)
    ordered = {group: columns[group] for group in by}
    return pd.DataFrame({"method": method, **ordered, "count": count, "mean": mean, "m2": m2})
