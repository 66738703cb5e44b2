"""Write the tables of the benchmark of speech from what is stored: `python -m benchmarks.speech.table`.

The layers and the preparation of each map are chosen on one half of the sentences, and reported on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import markdown_table
from benchmarks.input_map.table import interval
from benchmarks.speech.alignment import BASELINE, JOINS, WITH_END, errors, in_stretches, words_read
from benchmarks.speech.maps import ROLLOUT, records

RESULT = Path(__file__).parent / "results" / "alignment.md"
LAYERS = ("all", "upper half", "last")
# Maps of layers, in which the layers are chosen; and maps without them, of fewer sentences.
LAYER_MAPS = ("value_norm", "value_zeroing", "alti", "attention")
HEADS = ("eight heads", f"eight heads{WITH_END}", "all heads")
BASELINES = (BASELINE,)
# What is done with these cannot be chosen, so both preparations are reported.
STANDARDIZED = ", standardized"
SLOW = ("removal", "input_gradients", ROLLOUT)
PREPARED = tuple(f"{name}{suffix}" for name in SLOW for suffix in ("", STANDARDIZED))
NAMES = {
    "attention": "attention, mean over heads",
    "eight heads": "attention, OpenAI's eight heads",
    f"eight heads{WITH_END}": "attention, OpenAI's eight heads and the end's row",
    "all heads": "attention, all heads",
    BASELINE: "equal time for each letter",
    "removal": "removal of 0.2 s",
    "input_gradients": "input gradients",
    ROLLOUT: "ALTI+, rollout of encoder and decoder",
}
NAMES |= {f"{name}{STANDARDIZED}": f"{NAMES[name]}{STANDARDIZED}" for name in SLOW}
REFERENCE = "value_norm"
Setting = tuple[str, str]


def settings_of(name: str) -> list[Setting]:
    """Return the layers and the preparations of a map to choose from."""
    layers = LAYERS if name in LAYER_MAPS else ("all",)
    if name.startswith("eight heads") or name.endswith(STANDARDIZED):
        # The heads are chosen already, and so is what is done with them.
        return [("all", "standardized")]
    joins = ("mean",) if name in (*PREPARED, *BASELINES) else tuple(JOINS)
    return [(one, join) for one in layers for join in joins]


class Half:
    """The sentences of a half, and the errors of maps, which are computed once."""

    def __init__(self, half: str) -> None:
        self.records: list[dict[str, Any]] = [record for _, record in records(half)]
        self._known: dict[tuple[str, Setting], list[dict[str, float]]] = {}

    def errors(self, name: str, setting: Setting) -> list[dict[str, float]]:
        """Return the errors of each sentence that has the map."""
        key = name, setting
        if key not in self._known:
            own = name.removesuffix(STANDARDIZED)
            self._known[key] = [errors(record, own, *setting) for record in self.having(name)]
        return self._known[key]

    def having(self, name: str) -> list[dict[str, Any]]:
        """Return the sentences that have a map."""
        slow = name.removesuffix(STANDARDIZED)
        needed = slow if slow in SLOW else "end" if name.endswith(WITH_END) else "heads"
        return [record for record in self.records if needed in record["maps"]]

    def mean(self, name: str, setting: Setting, metric: str) -> float:
        """Return the mean of a metric over the sentences."""
        return float(np.mean([each[metric] for each in self.errors(name, setting)]))


def choose(half: Half, name: str, metric: str) -> Setting:
    """Return the setting with the best mean of a metric; the first one if there is nothing to choose on."""
    settings = settings_of(name)
    if len(settings) == 1:
        return settings[0]
    sign = -1 if metric == "inside" else 1
    return min(settings, key=lambda setting: sign * half.mean(name, setting, metric))


def cell(values: Sequence[float], digits: int) -> str:
    """Return a mean with its 95 % interval."""
    array = np.array(values)
    low, high = interval(array)
    return f"{array.mean():.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def rows_of(chosen: Half, reported: Half) -> list[dict[str, str]]:
    """Return a row for each map."""
    rows = []
    for name in (*LAYER_MAPS, *HEADS, *PREPARED, *BASELINES):
        if not reported.errors(name, settings_of(name)[0]):
            continue
        frames, times = choose(chosen, name, "inside"), choose(chosen, name, "start")
        shift = float(np.mean([each["signed start"] for each in chosen.errors(name, times)] or [np.nan]))
        found = reported.errors(name, frames)
        warped = (
            [errors(record, name, *times, shift=shift) for record in reported.having(name)]
            if name not in PREPARED
            else []
        )
        by_time = reported.errors(name, times)
        rows.append(
            {
                "map": f"**{NAMES.get(name, name)}**" if name == REFERENCE else NAMES.get(name, name),
                "n": str(len(found)),
                "layers": f"{frames[0]}, {frames[1]}",
                "strongest frame inside": cell([each["inside"] for each in found], 2),
                "its distance from the middle, ms": cell([each["center"] for each in found], 0),
                "layers, times": f"{times[0]}, {times[1]}",
                "start, ms": cell([each["start"] for each in by_time], 0),
                "start, shifted, ms": cell([each["start"] for each in warped], 0) if warped else "",
                "middle, ms": cell([each["middle"] for each in by_time], 0),
            }
        )
    return rows


def plain_rows(reported: Half) -> list[dict[str, str]]:
    """Return the shares of right frames and stretches of maps as a trace makes them."""
    rows = []
    for name in (*LAYER_MAPS, *SLOW, *BASELINES):
        for layers in LAYERS if name in LAYER_MAPS else LAYERS[:1]:
            found = [in_stretches(record, name, layers) for record in reported.having(name)]
            if found:
                row = {"map": NAMES.get(name, name), "layers": layers, "n": str(len(found))}
                titles = {"frame": "strongest frame inside", "stretch": "right stretch", "outside": "padding"}
                row |= {title: cell([each[key] for each in found], 2) for key, title in titles.items()}
                rows.append(row)
    return rows


def rows_read(reported: Half) -> list[dict[str, str]]:
    """Return whether the row before a word shows that word or the one before."""
    rows = []
    for name in LAYER_MAPS:
        for layers in ("lower half", "upper half"):
            found = [words_read(record, name, layers) for record in reported.records]
            row = {"map": NAMES.get(name, name), "layers": layers, "n": str(len(found))}
            for key, title in (("own", "in the word"), ("before", "in the word before")):
                row[title] = cell([each[key] for each in found], 2)
            rows.append(row)
    return rows


def compare(chosen: Half, reported: Half) -> list[dict[str, str]]:
    """Return the paired differences of each map to the reference."""
    rows = []
    for name in (*LAYER_MAPS, *HEADS, *PREPARED):
        if name == REFERENCE or not reported.errors(name, settings_of(name)[0]):
            continue
        row = {"map": NAMES.get(name, name)}
        for metric, title, digits in (("inside", "inside", 2), ("start", "start, ms", 0)):
            ours = reported.errors(REFERENCE, choose(chosen, REFERENCE, metric))
            theirs = reported.errors(name, choose(chosen, name, metric))
            # Slow maps are of the first sentences.
            pairs = zip(ours[: len(theirs)], theirs, strict=True)
            row[title] = cell([other[metric] - own[metric] for own, other in pairs], digits)
        rows.append(row)
    return rows


def by_condition(chosen: Half, reported: Half) -> list[dict[str, str]]:
    """Return the errors of some maps by the noise and by the speed."""
    rows = []
    for field, values in (("decibels", (None, 20.0, 10.0)), ("speed", (120, 150, 180))):
        for value in values:
            places = [
                place for place, record in enumerate(reported.records) if record["sentence"][field] == value
            ]
            said = {"decibels": "no noise" if value is None else f"noise of {value:g} dB below"}
            row = {"speech": said.get(field, f"{value} words per minute"), "n": str(len(places))}
            for name in (REFERENCE, "value_zeroing", "attention", "eight heads"):
                for metric, title, digits in (("inside", "inside", 2), ("start", "start, ms", 0)):
                    found = reported.errors(name, choose(chosen, name, metric))
                    row[f"{NAMES.get(name, name)}, {title}"] = cell(
                        [found[place][metric] for place in places], digits
                    )
            rows.append(row)
    return rows


def require_same(half: Half) -> None:
    """Raise an error if attn_res_ln is another map than value_norm, which stands for both."""
    for record in half.records:
        maps = record["maps"]
        if not maps["attn_res_ln"].equal(maps["value_norm"]):
            raise ValueError(f"expected one map, got two of {record['sentence']}; report attn_res_ln, too")


def main() -> None:
    """Write the record."""
    chosen, reported = Half("choose"), Half("report")
    require_same(reported)
    words = sum(len(record["words"]) for record in reported.records)
    text = f"""# Which sound a word was read from

Written by `python -m benchmarks.speech.table` from what `python -m benchmarks.speech.maps` stored. Whisper
base, cross-attention. Sentences are synthetic (espeak-ng), so the times of words are known. The rows are
those that predict the words, of the frames of the sound alone. The layers ("all", "upper half", "last") and
the preparation were chosen on {len(chosen.records)} sentences, and the numbers are of {len(reported.records)}
others ({words} words), whose words, names and places are other ones. Intervals are 95 %, over sentences.

Measured {date.today().isoformat()} with TransformerLens {version("transformer-lens")}, torch
{version("torch")}, transformers {version("transformers")}.

## Words

"mean" is the mean over layers or heads. "standardized" is OpenAI's preparation for times: standardized over
the tokens, a median filter of seven frames, then the mean. Times are by dynamic time warping, with OpenAI's
steps. "shifted": the mean error of the other half is taken away. Removals, gradients and ALTI+ are of fewer
sentences, with both preparations, because there is nothing to choose on. `alti` is of the cross-attention.
`attn_res_ln` is not listed: it is the same map as `value_norm` here, because the norm is before the attention
(no number differs).

{markdown_table(rows_of(chosen, reported))}

## As `lm.trace` makes them

The mean of the layers' raw rows, with the frames of padding; nothing was chosen. "right stretch": the
strongest 0.2 seconds overlap the word.

{markdown_table(plain_rows(reported))}

## Which word a row shows

The share of words whose strongest frame lies in the word that the row predicts, or in the word before it,
which the decoder has just read. Plain means of layers without padding.

{markdown_table(rows_read(reported))}

## Paired differences to {REFERENCE}

{markdown_table(compare(chosen, reported))}

## By noise and speed

{markdown_table(by_condition(chosen, reported))}
"""
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
