"""What a map is scored on: cases with a row to score, the truth about it, and the scales."""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import os
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix import targets
from lens_mix.arguments import several, whole_number
from lens_mix.evaluation.agreement import (
    average_precision,
    mass_accuracy,
    partial_spearman,
    reciprocal_rank,
    spearman,
    top_k_overlap,
)
from lens_mix.methods import Occlusion
from lens_mix.runner import run
from lens_mix.targets import TargetLike


@dataclasses.dataclass(frozen=True)
class Case:
    """One prompt and the row that is scored.

    Attributes:
        prompt: as `lm.run` takes it.
        query: position of the row; negative from the end.
        relevant: positions of the tokens that decide, where that is known.
        target: what is explained there; None: what the model predicts.
    """

    prompt: Any
    query: int = -1
    relevant: tuple[int, ...] = ()
    target: TargetLike | None = None


class Task(abc.ABC):
    """Cases, and how a map's row is scored on each.

    Class attributes:
        name: in tables.
        metrics: the names of its scores; higher is better.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def cases(self, model: Any) -> list[Case]:
        """The prompts, as the model reads them."""

    @abc.abstractmethod
    def truth(self, model: Any, case: Case, **options: Any) -> Float[Tensor, " key"]:
        """What the row is compared with, one number per key; `options` as in `lm.run`."""

    @abc.abstractmethod
    def score(self, row: Float[Tensor, " key"], truth: Float[Tensor, " key"], query: int) -> dict[str, float]:
        """The scores of one row, by metric; NaN where undefined."""

    def describe(self) -> dict[str, Any]:
        """The task in plain words and numbers, for records."""
        return {"task": self.name}


@dataclasses.dataclass(frozen=True)
class Importance(Task):
    """Does the map order the tokens as taking them out does?

    The truth is `Occlusion` of the model's own prediction at the query, mean of the sizes; a map's row is
    taken by size too. Scored are the keys that the query may see but the left-out ones: Spearman, the same
    with the position partialled out (ranks), and whether the strongest source, the query itself left out, is
    the same.

    Args:
        prompts: as `lm.run` takes them.
        occlusion: how tokens are taken out.
        leave_out: positions that are not scored; by default the first (a causal model's sink).
        query: position of the row.
    """

    name: ClassVar[str] = "importance"
    metrics: ClassVar[tuple[str, ...]] = ("partial_spearman", "spearman", "top_1")

    prompts: Sequence[Any]
    occlusion: Occlusion = dataclasses.field(default_factory=lambda: Occlusion(measure="absolute"))
    leave_out: tuple[int, ...] = (0,)
    query: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", several("prompts", self.prompts, "several prompts", least=1))

    def cases(self, model: Any) -> list[Case]:
        return [Case(prompt, whole_number("query", self.query)) for prompt in self.prompts]

    def truth(self, model: Any, case: Case, **options: Any) -> Float[Tensor, " key"]:
        found = run(model, case.prompt, self.occlusion, queries=[case.query], **options)
        row = found.scores[0, 0].double()
        hidden = ~found.visible()[0, 0].to(row.device)
        hidden[[position for position in self.leave_out if -len(row) <= position < len(row)]] = True
        return row.masked_fill(hidden, torch.nan)

    def score(self, row: Float[Tensor, " key"], truth: Float[Tensor, " key"], query: int) -> dict[str, float]:
        scored = ~truth.isnan()
        positions = torch.arange(len(truth), dtype=torch.float64)
        others = scored & (positions != query % len(truth))
        ours, theirs = row.abs(), truth.abs()
        beyond = partial_spearman(ours[scored], theirs[scored], positions[scored])
        plain = spearman(ours[scored], theirs[scored])
        if int(scored.sum()) > 2 and float(theirs[scored].max()) > float(theirs[scored].min()):
            # A map that is constant, or nothing but the position, says nothing that the position does not.
            beyond, plain = (0.0 if math.isnan(value) else value for value in (beyond, plain))
        return {
            "partial_spearman": beyond,
            "spearman": plain,
            "top_1": top_k_overlap(ours[others], theirs[others], 1),
        }

    def describe(self) -> dict[str, Any]:
        return {"task": self.name, **self.occlusion.parameters(), "leave_out": list(self.leave_out)}


@dataclasses.dataclass(frozen=True)
class Cues(Task):
    """Does the map put its weight on the words that are known to decide?

    Args:
        given: cases with `relevant` positions, and a contrast as target where there is one.
        leave_out: positions that are not scored.
    """

    name: ClassVar[str] = "cues"
    metrics: ClassVar[tuple[str, ...]] = ("average_precision", "reciprocal_rank", "mass_accuracy")

    given: Sequence[Case]
    leave_out: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        cases = several("given", self.given, "cases", least=1, kind=Case)
        if not all(case.relevant for case in cases):
            raise ValueError("given: expected cases that name their relevant positions, got some without")
        object.__setattr__(self, "given", cases)

    def cases(self, model: Any) -> list[Case]:
        return list(self.given)

    def truth(self, model: Any, case: Case, **options: Any) -> Float[Tensor, " key"]:
        visible = run(model, case.prompt, "attention", queries=[case.query], layers=[-1], **options).visible()
        relevant = torch.zeros(visible.shape[-1], dtype=torch.float64)
        relevant[list(case.relevant)] = 1
        hidden = ~visible[0, 0].cpu()
        hidden[[position for position in self.leave_out if -len(relevant) <= position < len(relevant)]] = True
        return relevant.masked_fill(hidden, torch.nan)

    def score(self, row: Float[Tensor, " key"], truth: Float[Tensor, " key"], query: int) -> dict[str, float]:
        scored = ~truth.isnan()
        row, relevant = row[scored], truth[scored] > 0
        return {
            "average_precision": average_precision(row, relevant),
            "reciprocal_rank": reciprocal_rank(row, relevant),
            "mass_accuracy": mass_accuracy(row, relevant),
        }


# Where the word that decides stands in the context (the prefix) of BLiMP's minimal pairs.
_BLIMP_CUES = {
    "anaphor_number_agreement": "subject",
    "determiner_noun_agreement_1": "last",
    "regular_plural_subject_verb_agreement_1": "whole",
}
_DETERMINERS = {
    "a",
    "an",
    "the",
    "this",
    "that",
    "these",
    "those",
    "some",
    "most",
    "many",
    "all",
    "every",
    "each",
}


def blimp_cases(model: Any, path: str | os.PathLike[str], count: int | None = None) -> list[Case]:
    """Minimal pairs of BLiMP (Warstadt et al., TACL 2020), for causal models: the prefix, and what decides.

    The target is the logit difference of the good and the bad word, by the first token in which they differ
    (pairs without one are left out). The cue is the word that decides: the determiner before a noun, the
    subject's words otherwise; all its tokens are relevant.

    Args:
        path: a .jsonl file of BLiMP with `one_prefix_method`.
        count: the first so many pairs that can be used; None: all.

    Raises:
        ValueError: a file without prefixes, or no pair that can be used.
    """
    cases = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            pair = json.loads(line)
            if not pair.get("one_prefix_method"):
                raise ValueError(
                    f"path: expected BLiMP pairs with one_prefix_method (one context, two next words), got "
                    f"{pair.get('UID', 'something else')!r} without"
                )
            case = _blimp_case(model, pair)
            cases += [] if case is None else [case]
            if len(cases) == count:
                break
    if not cases:
        raise ValueError(f"path: expected pairs whose words differ in their first token, got none in {path}")
    return cases


def _blimp_case(model: Any, pair: dict[str, Any]) -> Case | None:
    prefix = pair["one_prefix_prefix"]
    words = [pair["one_prefix_word_good"], pair["one_prefix_word_bad"]]
    good, bad = (model.tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in words)
    if good[0] == bad[0]:
        return None
    tokens = model.to_tokens(prefix)[0]
    start, end = _cue_span(prefix, _BLIMP_CUES.get(pair["UID"], "whole"))
    offsets = model.tokenizer(prefix, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    # special tokens that the model put in front
    added = len(tokens) - len(offsets)
    relevant = tuple(added + place for place, (a, b) in enumerate(offsets) if a < end and b > start)
    return Case(tokens, -1, relevant, targets.logit_difference(good[0], bad[0])) if relevant else None


def _cue_span(prefix: str, where: str) -> tuple[int, int]:
    """Characters of the cue: the last word, the whole prefix, or the subject at its start."""
    words = prefix.split(" ")
    if where == "last":
        return len(prefix) - len(words[-1]), len(prefix)
    if where == "whole":
        return 0, len(prefix)
    count = 4 if prefix.startswith("A lot of ") else 2 if words[0].lower() in _DETERMINERS else 1
    return 0, len(" ".join(words[:count]))


_NAMES = ("Anna", "Peter", "Maria", "David", "Laura", "Simon", "Helen", "Robert")
# What is asked about a person, the sentence that plants it, and what can stand there: one word each.
_FACTS = (
    ("{0}'s favourite colour is{1}.", (" green", " red", " blue", " yellow", " white", " black")),
    ("{0} lives in the city of{1}.", (" Paris", " London", " Rome", " Berlin", " Madrid", " Tokyo")),
    ("The animal that {0} keeps is a{1}.", (" dog", " cat", " horse", " rabbit", " bird", " fish")),
)
_FILLERS = (
    "The meeting was moved to Thursday because of the weather.",
    "A new bridge is being built over the river this year.",
    "Most of the shops close early on Sunday.",
    "The train to the coast takes about three hours.",
    "Somebody left an umbrella under the table.",
    "The museum has opened two more rooms.",
    "It rained for most of the week.",
    "The students are reading a long novel about the sea.",
    "There is a small garden behind the school.",
    "The old clock in the hall has stopped again.",
)


def planted_facts(model: Any, count: int = 40, *, sentences: int = 6, seed: int = 0) -> list[Case]:
    """Long prompts in which one planted sentence holds the answer: does a map find its word? Causal models.

    Sentences on other matters surround "Anna lives in the city of Rome."; the prompt ends with the sentence's
    beginning once more. Only prompts that the model completes with the planted word are kept; that word's
    token is relevant, and what the model predicts is the target.

    Args:
        model: with a tokenizer.
        count: how many prompts to make, before those without the right answer go.
        sentences: how many other sentences there are.
        seed: of the draw.

    Raises:
        ValueError: the model finds none of the answers.
    """
    draw, cases = random.Random(whole_number("seed", seed, 0)), []
    for _ in range(whole_number("count", count, 1)):
        template, words = draw.choice(_FACTS)
        name, word = draw.choice(_NAMES), draw.choice(words)
        others = draw.sample(_FILLERS, whole_number("sentences", sentences, 0, len(_FILLERS)))
        place = draw.randrange(len(others) + 1)
        fact, question = template.format(name, word), template.split("{1}")[0].format(name)
        before = " ".join([*others[:place], fact.removesuffix(f"{word}.")])
        prompt = " ".join([*others[:place], fact, *others[place:], question])
        tokens = model.to_tokens(prompt)[0]
        position = len(model.to_tokens(before)[0])
        answer = model.tokenizer(word, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            right = int(tokens[position]) == answer[0] == int(model(tokens[None])[0, -1].argmax())
        cases += [Case(tokens, -1, (position,))] if right else []
    if not cases:
        raise ValueError("model: expected one that finds planted facts, got none of its answers right")
    return cases
