"""Measure how well the rows of a map find the sound of each word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.ndimage import median_filter

FRAME = 0.02  # seconds of a frame
# The heads that OpenAI chose by hand for word times in Whisper base, as (layer, head).
ALIGNMENT_HEADS = ((3, 1), (4, 2), (4, 3), (4, 7), (5, 1), (5, 2), (5, 4), (5, 6))
BASELINE = "letters"
WITH_END = ", with the end"
# OpenAI's width of the median filter, in frames.
_WIDTH = 7
# [layer or head, token, frame]
Stack = np.ndarray


def stack_of(record: dict[str, Any], name: str) -> Stack:
    """Return the maps of a record as one stack, of all frames.

    "attention" is the mean over heads, "eight heads" are OpenAI's, and "all heads" are all of them. "with the
    end" adds the row that predicts the end of the text.
    """
    maps = record["maps"]
    if name.endswith(WITH_END):
        heads = np.concatenate([maps["heads"], maps["end"]], axis=-2)
        return np.stack([heads[layer, head].astype(np.float64) for layer, head in ALIGNMENT_HEADS])
    if name == BASELINE:
        return _spread_letters(record)
    if name == "attention":
        return np.asarray(maps["heads"].mean(1), np.float64)
    if name == "all heads":
        return np.asarray(maps["heads"].flatten(0, 1), np.float64)
    if name == "eight heads":
        return np.stack(
            [np.asarray(maps["heads"][layer, head], np.float64) for layer, head in ALIGNMENT_HEADS]
        )
    return np.asarray(maps[name], np.float64)


def _spread_letters(record: dict[str, Any]) -> Stack:
    """Return a map that gives each letter of the text as many frames as any other."""
    tokens, frames = record["maps"]["heads"].shape[-2:]
    found = np.zeros((1, tokens, frames))
    letters = np.array([len(word.replace(" ", "")) for word in record["spelled"]])
    ends = np.cumsum(letters) / letters.sum() * np.ceil(record["samples"] / 320)
    first = 0
    for own, end in zip(record["words"], ends, strict=True):
        for row, part in zip(own, np.array_split(np.arange(first, round(end)), len(own)), strict=True):
            found[0, row, part] = 1
        first = round(end)
    return found


def select(stack: Stack, layers: str) -> Stack:
    """Return the "all", "lower half", "upper half" or "last" of a stack's layers."""
    half = len(stack) // 2
    places = {
        "all": slice(None),
        "lower half": slice(half),
        "upper half": slice(half, None),
        "last": slice(-1, None),
    }
    return stack[places[layers]]


def crop(stack: Stack, seconds: float) -> Stack:
    """Return a stack without the frames of padding, whose rows are divided by their sums."""
    own = np.maximum(stack[..., : max(1, int(np.ceil(seconds / FRAME)))], 0)
    return own / np.maximum(own.sum(-1, keepdims=True), 1e-30)


def join_plainly(stack: Stack) -> np.ndarray:
    """Return the mean of the stack."""
    return np.asarray(stack.mean(0))


def join_like_openai(stack: Stack) -> np.ndarray:
    """Return the mean after OpenAI's preparation: standardized over the tokens, and a median filter."""
    spread = stack.std(-2, keepdims=True)
    standard = (stack - stack.mean(-2, keepdims=True)) / np.maximum(spread, 1e-30)
    return np.asarray(median_filter(standard, size=(1, 1, _WIDTH), mode="reflect").mean(0))


JOINS: dict[str, Callable[[Stack], np.ndarray]] = {"mean": join_plainly, "standardized": join_like_openai}


def find_strongest(row: np.ndarray) -> float:
    """Return the strongest frame, the middle one if several are (a removal gives its stretch one score)."""
    first = int(row.argmax())
    same = row[first:] == row[first]
    count = len(same) if same.all() else int(same.argmin())
    return first + (count - 1) / 2


def warp(matrix: np.ndarray) -> np.ndarray:
    """Return the first frame of each token on the best monotone path (dynamic time warping, as OpenAI's).

    Args:
        matrix: [token, frame], larger where a frame belongs to a token.
    """
    rows, columns = matrix.shape
    cost = np.full((rows + 1, columns + 1), np.inf)
    step = np.zeros((rows + 1, columns + 1), np.int8)
    cost[0, 0] = 0
    for column in range(1, columns + 1):
        for row in range(1, rows + 1):
            options = cost[row - 1, column - 1], cost[row - 1, column], cost[row, column - 1]
            best = int(np.argmin(options))
            cost[row, column] = options[best] - matrix[row - 1, column - 1]
            step[row, column] = best
    step[0, :], step[:, 0] = 2, 1
    row, column = rows, columns
    first = np.zeros(rows, int)
    while row > 0:
        if column > 0:
            first[row - 1] = column - 1
        move = step[row, column]
        row, column = row - (move != 2), column - (move != 1)
    return first


def errors(record: dict[str, Any], name: str, layers: str, join: str, shift: float = 0.0) -> dict[str, float]:
    """Return a sentence's mean errors of a map.

    signed start: the mean of the found starts less the true ones, in milliseconds.

    inside: the share of words whose strongest frame lies inside of the word.
    inside of 30 s: the same with the frames of padding.
    center: the distance of the strongest frame from the middle of the word, in milliseconds.
    start, middle: those of the word's start and middle by dynamic time warping, in milliseconds.
    """
    seconds = record["samples"] / 16_000
    starts = np.array(record["starts"])
    ends = np.array([*record["starts"][1:], record["end"]])
    whole = select(stack_of(record, name), layers)
    cropped = JOINS[join](crop(whole, seconds))
    rows = record["words"]

    def strongest(matrix: np.ndarray) -> np.ndarray:
        return np.array([FRAME * (find_strongest(matrix[own].sum(0)) + 0.5) for own in rows])

    def inside(times: np.ndarray) -> float:
        return float(((times >= starts) & (times < ends)).mean())

    times = strongest(cropped)
    first = FRAME * warp(cropped)
    found = np.array([first[own[0]] for own in rows]) - shift / 1000
    # A word ends where the next token begins; the full stop is one.
    after = [own[-1] + 1 for own in rows]
    stops = np.array([first[next_one] if next_one < len(first) else seconds for next_one in after])
    return {
        "inside": inside(times),
        "inside of 30 s": inside(strongest(JOINS[join](crop(whole, 30)))),
        "center": float(1000 * np.abs(times - (starts + ends) / 2).mean()),
        "signed start": float(1000 * (found - starts).mean()),
        "start": float(1000 * np.abs(found - starts).mean()),
        "middle": float(1000 * np.abs((found + stops) / 2 - (starts + ends) / 2).mean()),
    }


def in_stretches(record: dict[str, Any], name: str, layers: str) -> dict[str, float]:
    """Return a sentence's scores of a map as `lm.trace` makes it: plain means, with the frames of padding.

    frame: the share of words whose strongest frame lies inside of the word.
    stretch: the share whose strongest stretch of 0.2 seconds overlaps the word.
    outside: the share of the rows that the padding has.
    """
    rows = np.maximum(select(stack_of(record, name), layers).mean(0), 0)
    count = int(np.ceil(record["samples"] / 320))
    rows = rows / np.maximum(rows.sum(-1, keepdims=True), 1e-30)
    found: dict[str, list[float]] = {"frame": [], "stretch": [], "outside": []}
    ends = [*record["starts"][1:], record["end"]]
    for own, start, end in zip(record["words"], record["starts"], ends, strict=True):
        row = rows[own].mean(0)
        frame = FRAME * (find_strongest(row) + 0.5)
        sums = np.add.reduceat(row[:count], np.arange(0, count, 10))
        first = 10 * FRAME * sums.argmax()
        found["frame"].append(start <= frame < end)
        found["stretch"].append(first < end and first + 10 * FRAME > start)
        found["outside"].append(row[count:].sum())
    return {key: float(np.mean(values)) for key, values in found.items()}


def words_read(record: dict[str, Any], name: str, layers: str) -> dict[str, float]:
    """Return in how many words the strongest frame of plain means lies in the word, or in the one before."""
    rows = crop(select(stack_of(record, name), layers), record["samples"] / 16_000).mean(0)
    edges = [*record["starts"], record["end"]]
    own, before = [], []
    for word, tokens in enumerate(record["words"]):
        time = FRAME * (find_strongest(rows[tokens].sum(0)) + 0.5)
        own.append(edges[word] <= time < edges[word + 1])
        if word:
            before.append(edges[word - 1] <= time < edges[word])
    return {"own": float(np.mean(own)), "before": float(np.mean(before))}
