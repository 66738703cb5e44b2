"""Test that a table or an array that was changed is an error that names what is wrong, or a correct map."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import lens_mix as lm

WRONG = (None, 1.5, -1, float("nan"), float("inf"), "x", b"x", [1], {}, 10**30, pd.NA, object())
WRONG_JSON = ("{", "", "[1]", '{"0": 3}', '"x"', "[" * 100_000, "3", 5, None, '{"0": {"others": [3]}}')
ARGUMENTS = (
    *("table", "array", "attrs", "scores", "tokens", "queries", "layers", "mask", "explained", "notes"),
    *("parameters", "provenance", "residual", "default_query", "grid", "kind", "method", "causal"),
)


def make(**changes):
    scores = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fields = {"tokens": ["a", "b", "c"], "method": "attention", "parameters": {"a": 1}, "notes": ("n",)}
    return lm.MixingMap(
        scores, **{**fields, "explained": [{"prediction": "b", "probability": 0.5}] * 3, **changes}
    )


def require_named_error_or_map(make_map, what):
    try:
        found = make_map()
    except (ValueError, TypeError) as problem:
        assert str(problem).startswith(ARGUMENTS), (what, str(problem))
    else:
        assert found.tokens == ["a", "b", "c"], what
        assert torch.equal(found.scores.isfinite(), torch.ones(2, 3, 3, dtype=torch.bool)), what
        found.top(2), repr(found), found.to_dataframe()


def test_a_wrong_cell_or_column():
    table = make().to_dataframe()
    for name in ("layer", "query", "key", "score"):
        for value in WRONG:
            for rows in ([4], list(range(len(table)))):
                changed = table.astype({name: object})
                for row in rows:
                    changed.at[row, name] = value
                changed.attrs = table.attrs
                require_named_error_or_map(lambda t=changed: lm.MixingMap.from_dataframe(t), (name, value))


def test_whole_numbers_as_floats_are_read():
    table = make().to_dataframe()
    changed = table.astype(dict.fromkeys(("layer", "query", "key"), float))
    changed.attrs = table.attrs
    assert torch.equal(lm.MixingMap.from_dataframe(changed).scores, make().scores)
    with pytest.raises(ValueError, match=r"table: expected whole numbers in layer, got .*0\.5"):
        lm.MixingMap.from_dataframe(changed.assign(layer=changed["layer"] + 0.5))


def test_wrong_attributes():
    table, array = make().to_dataframe(), make().to_xarray()
    for name in table.attrs:
        for value in WRONG_JSON:
            changed, other = table.copy(), array.copy()
            changed.attrs = {**table.attrs, name: value}
            other.attrs = {**array.attrs, name: value}
            if name in ("causal", "keys_are_tokens", "unit", "tokens", "method"):
                continue
            require_named_error_or_map(lambda t=changed: lm.MixingMap.from_dataframe(t), (name, value))
            require_named_error_or_map(lambda a=other: lm.MixingMap.from_xarray(a), (name, value))


def test_wrong_arrays():
    array = make().to_xarray()
    for wrong, message in (
        (array.astype(str), "array: expected numbers"),
        (array.assign_coords(key=["a", "b", "c"]), r"array\['key'\]: expected a whole number"),
        (array.assign_coords(layer=[0.5, 1.5]), r"array\['layer'\]: expected a whole number"),
        (array.isel(key=[2, 1, 0]), "array: expected keys 0 to 2 in order"),
        (array.isel(key=[1, 2]), "array: expected keys 0 to 1 in order"),
        (array.drop_vars("key_token").assign_coords(key_token="a"), "array: expected a token for each key"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            lm.MixingMap.from_xarray(wrong)
    assert torch.equal(lm.MixingMap.from_xarray(array.isel(query=[2, 0])).scores, make().scores[:, [2, 0]])
    assert np.array_equal(array.values, make().scores)
