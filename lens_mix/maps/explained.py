"""Define what a row of a map explains: the prediction of the model at its position, and the target."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lens_mix.arguments import check_instance, check_items, check_number, check_pairs, describe_value

_EXPECTED = "one lens_mix.maps.explained.Explained (or a dict of its fields) per row"


# A target that is this measure of the prediction is not named beside it. Other units are.
_USUAL_MEASURE = "log probability"
# The prediction has the name of the class alone.
_CLASS_NUMBER = re.compile(r" \(class \d+\)$")


class Explained(NamedTuple):
    """What the model predicts at the position of a row, and the target that the row explains.

    Attributes:
        prediction: The most probable next token; in an encoder, the most probable token at this position; for
            a classifier, the name of the class. None: unknown.
        probability: The probability of `prediction`, 0 to 1. None: unknown.
        others: The next most probable tokens with their probabilities, the most probable one first.
        target: A description of the target, such as "log probability of ' Italian'". None: the method has no
            target.
        value: The value of the target, in its own unit. None: the method has no target.
    """

    prediction: str | None = None
    probability: float | None = None
    others: tuple[tuple[str, float], ...] = ()
    target: str | None = None
    value: float | None = None

    def without_prediction(self) -> Explained:
        """Return the target and its value alone."""
        return Explained(target=self.target, value=self.value)

    def __str__(self) -> str:
        """Return the prediction, and the target if it is not its log probability: `' Italian' 0.66`."""
        prediction = "" if self.prediction is None else f"{self.prediction!r} {self.probability:.2f}"
        names = (repr(self.prediction), self.prediction)
        target = None if self.target is None else _CLASS_NUMBER.sub("", self.target)
        is_same = target in {f"{_USUAL_MEASURE} of {name}" for name in names}
        if self.target is None or is_same:
            return prediction
        target = f"{self.target} = {self.value:.3g}"
        return f"{prediction}; {target}" if prediction else target


def as_explained(value: object, rows: int) -> tuple[Explained, ...] | None:
    """Return what each row explains; None if nothing is known of any row.

    Args:
        value: One entry per row, each an `Explained`, a dict of its fields, or None.
        rows: The number of rows.

    Raises:
        TypeError: If an entry is neither.
        ValueError: If there are not `rows` entries, or a probability is not from 0 to 1.
    """
    if value is None:
        return None
    entries = tuple(_as_entry(entry) for entry in check_items("explained", value, _EXPECTED))
    if len(entries) != rows:
        raise ValueError(f"explained: expected {rows} entries, one per row of scores, got {len(entries)}")
    return entries if any(entry != Explained() for entry in entries) else None


def _as_entry(entry: Any) -> Explained:
    if isinstance(entry, Mapping) and set(entry) <= set(Explained._fields):
        pairs = check_pairs("explained", entry.get("others", ()), "pairs of a token and its probability")
        others = tuple((str(token), check_number("explained", number)) for token, number in pairs)
        for name, kind in (("prediction", str), ("target", str), ("value", (float, int))):
            if entry.get(name) is not None:
                check_instance(
                    "explained", entry[name], kind, f"{name} as text" if kind is str else "a number"
                )
        entry = Explained(**{**entry, "others": others})
    if entry is None:
        return Explained()
    if not isinstance(entry, Explained):
        raise TypeError(f"explained: expected {_EXPECTED}, got {describe_value(entry)}")
    if (entry.prediction is None) != (entry.probability is None):
        raise ValueError(f"explained: expected a prediction with its probability, got {tuple(entry)}")
    if entry.probability is not None:
        check_number("explained", entry.probability, 0, 1)
    return entry


def as_records(explained: Sequence[Explained] | None) -> list[dict[str, Any]] | None:
    """Return the entries as dicts without the unknown fields, for JSON."""
    if explained is None:
        return None
    unknown = Explained()._asdict()
    return [
        {name: field for name, field in entry._asdict().items() if field != unknown[name]}
        for entry in explained
    ]


def label_row(token: str, entry: Explained) -> str:
    """Return the label of a row of a causal map: its token, and the token that the model predicts next."""
    if entry.prediction is None:
        return token
    return f"{token.strip() or token} → {entry.prediction.strip() or entry.prediction}"
