"""Provide prompts whose deciding words are known: BLiMP's minimal pairs, and planted facts."""

from __future__ import annotations

import json
import os
import random
from typing import Any

from lens_mix import check, targets
from lens_mix.arguments import check_whole_number
from lens_mix.evaluation.tasks import Case
from lens_mix.experiments.passes import read_tokens
from lens_mix.models import TransformerLensModel, prompt_logits

# Which words of the context (the prefix) decide in BLiMP's minimal pairs.
_BLIMP_CUES = {
    "anaphor_number_agreement": "subject",
    "determiner_noun_agreement_1": "last",
    "regular_plural_subject_verb_agreement_1": "whole",
}
_DETERMINERS = set("a an the this that these those some most many all every each".split())
_BLIMP_FIELDS = {"UID", "one_prefix_prefix", "one_prefix_word_good", "one_prefix_word_bad"}


def blimp_cases(
    model: TransformerLensModel, path: str | os.PathLike[str], count: int | None = None
) -> list[Case]:
    """Return minimal pairs of BLiMP (Warstadt et al., TACL 2020) as cases, for causal models.

        >>> cases = lm.experiments.blimp_cases(model, "determiner_noun_agreement_1.jsonl", count=100)
        >>> task = lm.evaluation.Cues(cases, leave_out=(0,))
        >>> print(lm.evaluate(model, task, ["attention", "value_zeroing"]))

    The prompt is the prefix. The target is the logit difference of the good and the bad word, by their first
    tokens. Pairs whose first tokens are equal are left out. The relevant tokens are all tokens of the words
    that decide: the determiner before a noun, and otherwise the words of the subject.

    Args:
        model: A causal model.
        path: A .jsonl file of BLiMP with `one_prefix_method`.
        count: The number of pairs to return, from the beginning of the file. None: all.

    Raises:
        ValueError: The model is not causal, or the file has no prefixes or no usable pair.
    """
    if not check(model).verification.causal:
        raise ValueError("model: expected a causal decoder, which predicts the word after a prefix")
    cases = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                pair = json.loads(line)
            except ValueError:
                pair = None
            if not isinstance(pair, dict):
                raise ValueError(
                    f"path: expected a BLiMP file, with a pair as a JSON object on each line, got {path}, "
                    f"whose line {number} is not one"
                )
            if not pair.get("one_prefix_method") or not _BLIMP_FIELDS.issubset(pair):
                raise ValueError(
                    f"path: expected BLiMP pairs with one_prefix_method (one context, two next words), got "
                    f"{pair.get('UID', 'something else')!r} without"
                )
            case = _make_blimp_case(model, pair)
            cases += [] if case is None else [case]
            if len(cases) == count:
                break
    if not cases:
        raise ValueError(f"path: expected pairs whose words differ in their first token, got none in {path}")
    return cases


def _make_blimp_case(model: TransformerLensModel, pair: dict[str, Any]) -> Case | None:
    prefix = pair["one_prefix_prefix"]
    words = [pair["one_prefix_word_good"], pair["one_prefix_word_bad"]]
    good, bad = (_read_word(model, f" {word}") for word in words)
    if good[0] == bad[0]:
        return None
    tokens = read_tokens(model, prefix)
    start, end = _find_cue(prefix, _BLIMP_CUES.get(pair["UID"], "whole"))
    offsets = model.tokenizer(prefix, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    # The tokens that the model puts in front have no characters, so they shift the positions.
    added = len(tokens) - len(offsets)
    relevant = tuple(added + place for place, (a, b) in enumerate(offsets) if a < end and b > start)
    return Case(tokens, -1, relevant, targets.logit_difference(good[0], bad[0])) if relevant else None


def _read_word(model: TransformerLensModel, word: str) -> list[int]:
    """Return the tokens of a word without special tokens."""
    return list(model.tokenizer(word, add_special_tokens=False)["input_ids"])


def _find_cue(prefix: str, where: str) -> tuple[int, int]:
    """Return the range of characters of the cue: the last word, the whole prefix, or the subject."""
    words = prefix.split(" ")
    if where == "last":
        return len(prefix) - len(words[-1]), len(prefix)
    if where == "whole":
        return 0, len(prefix)
    count = 4 if prefix.startswith("A lot of ") else 2 if words[0].lower() in _DETERMINERS else 1
    return 0, len(" ".join(words[:count]))


_NAMES = ("Anna", "Peter", "Maria", "David", "Laura", "Simon", "Helen", "Robert")
# For each fact, the sentence about a person, and the words of one token that can complete it.
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


def planted_facts(
    model: TransformerLensModel, count: int = 40, *, sentences: int = 6, seed: int = 0
) -> list[Case]:
    """Return long prompts in which one planted sentence has the answer, as cases for causal models.

        >>> cases = lm.experiments.planted_facts(model, count=8)
        >>> task = lm.evaluation.Cues(cases, leave_out=(0,))
        >>> print(lm.evaluate(model, task, ["attention", "gim"]))

    Sentences on other subjects surround "Anna lives in the city of Rome.", and the prompt ends with the
    beginning of that sentence. Only prompts that the model completes with the planted word are returned. The
    token of that word is relevant, and the prediction is the target.

    Args:
        model: A causal model with a tokenizer.
        count: The number of prompts that are made. Those with a wrong prediction are then left out.
        sentences: The number of other sentences.
        seed: The seed of the draw.

    Raises:
        ValueError: The model predicts none of the answers.
    """
    draw, cases = random.Random(check_whole_number("seed", seed, 0)), []
    for _ in range(check_whole_number("count", count, 1)):
        template, words = draw.choice(_FACTS)
        name, word = draw.choice(_NAMES), draw.choice(words)
        others = draw.sample(_FILLERS, check_whole_number("sentences", sentences, 0, len(_FILLERS)))
        place = draw.randrange(len(others) + 1)
        fact, question = template.format(name, word), template.split("{1}")[0].format(name)
        before = " ".join([*others[:place], fact.removesuffix(f"{word}.")])
        prompt = " ".join([*others[:place], fact, *others[place:], question])
        tokens = read_tokens(model, prompt)
        position = len(read_tokens(model, before))
        answer = _read_word(model, word)
        # The whole prompt may be split into other tokens than its beginning, so the position is checked.
        is_correct = int(tokens[position]) == answer[0] == int(prompt_logits(model, tokens)[-1].argmax())
        cases += [Case(tokens, -1, (position,))] if is_correct else []
    if not cases:
        raise ValueError("model: expected one that finds planted facts, got none of its answers right")
    return cases
