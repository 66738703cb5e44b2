"""Test the verdicts of claims on tables of losses, the search for smallest sets, and what stays."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

import lens_mix as lm
from lens_mix.traces.auditor import find_kept
from lens_mix.traces.claims import VERDICTS, Rules
from lens_mix.traces.removals import find_blocking
from tests.traces.planted import (
    QUESTION,
    SURE,
    PlantedPasses,
    Word,
    audit_planted,
    model_of,
    sentence,
    trace_of,
)
from tests.traces.readers import PLAIN, reader

pytestmark = pytest.mark.filterwarnings("ignore")

# ------------------------------------------------------------------ smallest sets


class Losses:
    """What is lost without sources: for each set of the table, its loss if all of it is removed."""

    def __init__(self, table):
        self.table, self.calls = table, 0

    def __call__(self, removed):
        assert len(set(removed)) == len(removed)
        self.calls += 1
        return sum(loss for group, loss in self.table.items() if set(group) <= set(removed))


def blocking(table, n, enough=5.0, most=4, ranked=None):
    return find_blocking(Losses(table), list(range(n)) if ranked is None else ranked, enough, most)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [4, 9, 33])
def test_any_of_several_sources_is_found(size, n):
    draw = random.Random(n * size)
    for _ in range(20):
        group = tuple(sorted(draw.sample(range(n), size)))
        ranked = draw.sample(range(n), n)
        found = blocking({group: 10.0}, n, ranked=ranked)
        assert sorted(found) == list(group)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        # Without one of two that are both needed, enough is lost. The stronger one is found.
        ({(1,): 10.0, (3,): 10.0}, [{1}]),
        # One of two parts is lost without source 2 alone, and it is enough.
        ({(2,): 6.0, (0, 1): 4.0}, [{2}]),
        # Source 0 is in both sets.
        ({(0, 1): 5.0, (0, 2): 5.0}, [{0, 1}]),
        # Half of what is needed from each.
        ({(0,): 2.5, (4,): 2.5}, [{0, 4}]),
        ({(0,): 1.0, (1,): 1.0, (2,): 1.0, (3,): 2.0}, [{0, 1, 2, 3}]),
    ],
)
def test_structures_of_several_losses(table, expected):
    assert set(blocking(table, 6)) in expected


def test_more_sources_than_allowed_or_too_small_losses_give_none():
    assert blocking({(0, 1, 2, 3, 4): 10.0}, 8) is None
    assert sorted(blocking({(0, 1, 2, 3, 4): 10.0}, 8, most=5)) == [0, 1, 2, 3, 4]
    assert blocking({(0,): 4.9}, 8) is None
    assert blocking({}, 3) is None
    assert blocking({(0,): 10.0}, 0) is None


def test_each_member_is_needed_and_no_smaller_set_of_the_first_sources_is_enough():
    draw = random.Random(5)
    for _ in range(300):
        n = draw.randint(1, 7)
        groups = [
            tuple(sorted(draw.sample(range(n), draw.randint(1, min(3, n)))))
            for _ in range(draw.randint(1, 4))
        ]
        table = {group: draw.choice([2.0, 3.0, 5.0]) for group in groups}
        loss = Losses(table)
        found = find_blocking(loss, list(range(n)), 5.0, 7)
        if found is None:
            # Losses never fall with more removals, so all sources together are not enough.
            assert loss(range(n)) < 5
            continue
        assert loss(found) >= 5
        for member in found:
            assert loss([each for each in found if each != member]) < 5


@pytest.mark.parametrize("n", [4, 64, 1024])
def test_a_member_takes_a_logarithm_of_its_rank(n):
    for place in {0, 1, 2, n // 2, n - 2, n - 1}:
        loss = Losses({(place,): 10.0})
        assert find_blocking(loss, list(range(n)), 5.0, 4) == [place]
        # The number removed is doubled until it contains the member, halved, and the set is measured once.
        assert loss.calls <= 2 * math.ceil(math.log2(place + 2)) + 1
    loss = Losses({(0, n - 1): 10.0})
    assert sorted(find_blocking(loss, list(range(n)), 5.0, 4)) == [0, n - 1]
    assert loss.calls <= 4 * math.ceil(math.log2(n + 1)) + 2


def test_a_strong_source_is_found_with_few_losses():
    loss = Losses({(0,): 10.0})
    find_blocking(loss, list(range(1024)), 5.0, 4)
    assert loss.calls == 2


# ------------------------------------------------------------------ verdicts


def audited(monkeypatch, words, n=4, answer=" Ann has a cat.", order=None, **options):
    return audit_planted(monkeypatch, trace_of(n, answer, order), words, **options)


def names(sources):
    return [each.text for each in sources]


def other_token(text=" dog"):
    return model_of().tokenizer(text, add_special_tokens=False)["input_ids"][0]


def test_a_claim_that_needs_one_source_is_supported(monkeypatch):
    for order in itertools.permutations(range(3)):
        audit = audited(monkeypatch, [Word("cat", {(1,): 12.0})], n=3, order=order)
        (claim,) = audit
        word = audit.trace["cat"]
        assert (claim.verdict, claim.reason) == ("supported", "")
        # All tokens of a word count.
        assert claim.decisive == tuple(range(word.start, word.stop))
        assert names(claim.sources) == [sentence(1)]
        assert claim.redundant == []
        assert claim.against == ()
        (ground,) = claim.grounds
        assert ground.text == "cat"
        assert ground.tokens == claim.decisive
        assert ground.loss == pytest.approx(12)
        assert ground.shares == pytest.approx([1])
        assert ground.instead == f" written {word.start} without [1]"
        assert list(claim.sufficient.values()) == pytest.approx([1])
        assert [names(each.sources) for each in claim.necessary] == [[sentence(1)]]
        assert claim.necessary[0].loss == pytest.approx(12)
        assert claim.memory.loss == pytest.approx(12)
        assert len(claim.memory.sources) == 3
        count = audit.trace[0].trace.reading.n_written
        assert claim.memory.probability == pytest.approx(math.exp(count * SURE - 12))
        assert f"the model would write 'written {word.start} without [1]'" in claim.describe()
        assert "loses 12.0 nats" in claim.describe()


def test_two_sources_that_are_both_needed(monkeypatch):
    (claim,) = audited(monkeypatch, [Word("cat", {(0,): 7.0, (2,): 6.0})])
    assert claim.verdict == "supported"
    assert [names(each.sources) for each in claim.necessary] == [[sentence(0)], [sentence(2)]]
    assert [each.loss for each in claim.alone[:2]] == pytest.approx([7, 6])
    assert claim.memory.loss == pytest.approx(13)


@pytest.mark.parametrize("group", [(0, 3), (1, 2, 3), (0, 1, 2, 3)])
def test_sources_of_which_one_is_enough_are_redundant(monkeypatch, group):
    (claim,) = audited(monkeypatch, [Word("cat", {group: 12.0})], n=6)
    assert claim.verdict == "redundant"
    assert sorted(names(claim.sources)) == [sentence(each) for each in group]
    assert [sorted(names(each)) for each in claim.redundant] == [[sentence(each) for each in group]]
    assert claim.necessary == []
    assert list(claim.sufficient.values()) == pytest.approx([1] * len(group))
    alone = {each.sources[0].text: each.loss for each in claim.alone}
    assert all(alone[sentence(each)] == pytest.approx(0) for each in group)


def test_a_source_that_brings_little_alone_is_not_one_of_which_each_is_enough(monkeypatch):
    # Half of the 14 nats are lost without sources 0 and 1. Source 0 keeps them all, and source 1 keeps 1.
    words = [Word("cat", {(0,): 6.0, (0, 1): 1.0, (0, 2): 7.0})]
    (claim,) = audited(monkeypatch, words)
    (ground,) = claim.grounds
    assert names(ground.sources) == [sentence(0)]
    assert ground.shares == pytest.approx([1])
    # The loss is that without the sources of the ground, and the text is that without both.
    assert ground.loss == claim.necessary[0].loss == pytest.approx(6)
    assert ground.instead.endswith("without [0, 1]")
    # In this table, source 1 keeps 5 of 15 nats.
    words = [Word("cat", {(0,): 4.0, (0, 1): 5.0, (0, 2): 6.0})]
    (claim,) = audited(monkeypatch, words)
    assert sorted(names(claim.sources)) == [sentence(0), sentence(1)]
    assert sorted(claim.sufficient.values()) == pytest.approx([5 / 15, 1])
    assert claim.grounds[0].loss == pytest.approx(9)


def test_more_than_four_sources_are_unclear(monkeypatch):
    (claim,) = audited(monkeypatch, [Word("cat", {(0, 1, 2, 3, 4): 12.0})], n=7)
    assert (claim.verdict, claim.reason) == ("unclear", "it depends on more than 4 sources")
    assert claim.describe() == claim.reason
    assert claim.sources == []
    assert claim.memory.loss == pytest.approx(12)


@pytest.mark.parametrize("loss", [-3.0, 0.0, 0.9])
def test_a_claim_that_loses_little_is_from_memory(monkeypatch, loss):
    (claim,) = audited(monkeypatch, [Word("cat", {(0,): loss})])
    assert (claim.verdict, claim.reason) == ("from memory", "")
    assert claim.sources == []
    assert claim.describe().startswith("its probability is ")


BETWEEN = (Rules().memory - Rules().between, Rules().memory + Rules().between)


@pytest.mark.parametrize("loss", [BETWEEN[0] + 0.1, Rules().memory, BETWEEN[1] - 0.1])
def test_a_loss_between_two_verdicts_is_unclear(monkeypatch, loss):
    (claim,) = audited(monkeypatch, [Word("cat", {(0,): loss})])
    assert claim.verdict == "unclear"
    assert claim.reason == f"without any source it loses {loss:.1f} nats, between two verdicts"
    # What it rests on was found, and it is contradicted if another source says something else.
    assert names(claim.sources) == [sentence(0)]
    other = Word("cat", {(1,): 6.0}, token=other_token(), log_probability=-0.5)
    (claim,) = audited(monkeypatch, [Word("cat", {(0,): loss}), other])
    assert (claim.verdict, claim.reason) == ("conflicting", "")


def test_a_loss_beyond_the_range_between_two_verdicts_is_supported(monkeypatch):
    (claim,) = audited(monkeypatch, [Word("cat", {(0,): BETWEEN[1] + 0.1})])
    assert claim.verdict == "supported"


@pytest.mark.parametrize(("word", "number"), [("cat", 0), ("Ann", 1)])
def test_what_the_model_would_not_write_is_unclear(monkeypatch, word, number):
    # The first word of a claim may be less probable than others.
    least = Rules().written[number]
    for share, verdict in ((0.7, "unclear"), (1.5, "supported")):
        words = [Word(word, {(0,): 12.0}, log_probability=math.log(share * least))]
        (claim,) = audited(monkeypatch, words)
        assert claim.verdict == verdict
        if verdict == "unclear":
            start = (
                f"the model would hardly write {word!r} itself: probability {share * least:.1g}, without any"
            )
            assert claim.reason.startswith(start)
            assert claim.describe() == claim.reason


def test_a_small_budget_is_unclear(monkeypatch):
    words = [Word("cat", {(0, 2): 12.0})]
    whole = audited(monkeypatch, words, passes=99)
    for passes in range(2, whole.passes):
        audit = audited(monkeypatch, words, passes=passes)
        assert (audit[0].verdict, audit[0].reason) == ("unclear", "the budget of passes was too small")
        assert audit.passes == passes
        # The first two passes measure what it loses without all sources.
        assert audit[0].memory.loss == pytest.approx(12)
    assert repr(audited(monkeypatch, words, passes=whole.passes)) == repr(whole)


def test_a_loss_that_was_not_measured_is_no_number(monkeypatch):
    # The weakest of five sources stays. It is another one for the second claim, so that needs a third pass.
    t = trace_of(5, " Ann has a cat. Ben has a dog.")
    first, second = t.spans
    scores = t._computed[first.start, first.stop]
    positions = [source.positions[0] for source in t.sources() if source.is_content][:5]
    other = scores.clone()
    other[positions] = scores[positions].flip(0)
    t._computed[second.start, second.stop] = other
    audit = audit_planted(monkeypatch, t, [], passes=2)
    assert audit[1].reason == "the budget of passes was too small"
    assert math.isnan(audit[1].memory.loss)
    assert math.isnan(audit[1].memory.probability)


# Another token is nearly as probable, and becomes the most probable one without source 0.
LITTLE = Rules().support - 0.1
OTHER = {"losses": {(1,): 6.0}, "log_probability": -2.0}


def test_a_claim_with_a_source_against_it_is_conflicting(monkeypatch):
    token = other_token()
    (claim,) = audited(monkeypatch, [Word("cat", {(0,): 12.0}), Word("cat", token=token, **OTHER)])
    assert claim.verdict == "conflicting"
    (ground,), (against,) = claim.grounds, claim.against
    assert names(ground.sources) == [sentence(0)]
    assert names(against.sources) == [sentence(1)]
    assert names(claim.sources) == [sentence(0), sentence(1)]
    assert against.support == pytest.approx(6)
    assert against.margin == pytest.approx(2 - 0.01)
    assert against.token == claim.decisive[0]
    assert against.instead == model_of().tokenizer.decode([token])
    # A token that a source makes much more probable may be less probable with all sources.
    words = [Word("cat", {(0,): 12.0}), Word("cat", {(1,): 6.0}, token=token, log_probability=-4.9)]
    assert audited(monkeypatch, words)[0].verdict == "conflicting"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([Word("cat", {(0,): 12.0})], "no other token"),
        ([Word("cat", {(0,): 12.0}), {**OTHER, "log_probability": -5.2}], "improbable with all sources"),
        (
            [Word("cat", {(0,): 12.0}), {**OTHER, "losses": {(1,): Rules().support - 0.1}}],
            "no source supports it",
        ),
        ([Word("cat", {(0,): 12.0}), {**OTHER, "misfit": 2.5}], "it does not fit into the claim"),
        ([Word("cat", {(0,): 12.0}), {**OTHER, "losses": {(0,): 6.0}}], "the same source supports it"),
        (
            [Word("cat", {(0,): 2.6}), {**OTHER, "log_probability": -2.5, "losses": {(1,): 1.9, (0,): 0.5}}],
            "the claim stays more probable",
        ),
        ([Word("cat", {(0,): 12.0}), {**OTHER, "losses": {(1, 2, 3): 6.0}}], "three sources support it"),
    ],
    ids=lambda given: given.replace(" ", "-") if isinstance(given, str) else "",
)
def test_what_is_no_conflict(monkeypatch, words, why):
    token = other_token()
    made = [each if isinstance(each, Word) else Word("cat", token=token, **each) for each in words]
    (claim,) = audited(monkeypatch, made)
    assert (claim.verdict, claim.against) == ("supported", ()), why


def test_a_word_of_several_tokens_may_be_contradicted(monkeypatch):
    # "c", "a" and "t" are one word; another source brings another word of two tokens.
    other = [other_token(), other_token()]
    monkeypatch.setattr(PlantedPasses, "other_word", lambda self, place, removed, first=None: other)
    monkeypatch.setattr(
        PlantedPasses,
        "of_other",
        lambda self, place, tokens, removed=(): -1.0 - 5.0 * (2 in removed) + 0.5 * (0 in removed),
    )
    monkeypatch.setattr(PlantedPasses, "misfit", lambda *_: 0.0)
    (claim,) = audited(monkeypatch, [Word("cat", {(0,): 12.0})])
    (against,) = claim.against
    assert (claim.verdict, names(against.sources)) == ("conflicting", [sentence(2)])
    assert against.instead == model_of().tokenizer.decode(other)
    # All sources but the weakest are removed for the support, and none for the margin.
    assert against.support == pytest.approx(5)
    assert against.margin == pytest.approx(1 + 3 * SURE)
    monkeypatch.setattr(PlantedPasses, "misfit", lambda *_: 2.5)
    assert audited(monkeypatch, [Word("cat", {(0,): 12.0})])[0].verdict == "supported"


def test_if_little_is_lost_another_weak_source_stays(monkeypatch):
    # The only source of the claim is the one with the lowest score, which stays at first.
    words = [Word("cat", {(0,): 12.0})]
    (claim,) = audited(monkeypatch, words, n=6, order=[1, 2, 3, 4, 5, 0])
    assert (claim.verdict, names(claim.sources)) == ("supported", [sentence(0)])
    assert sentence(5) not in names(claim.memory.sources)
    # Where nothing is lost, the weakest source stays.
    (claim,) = audited(monkeypatch, [], n=6, order=[1, 2, 3, 4, 5, 0])
    assert claim.verdict == "from memory"
    assert sentence(0) not in names(claim.memory.sources)


def test_the_written_token_that_stays_the_most_probable_one_is_not_contradicted(monkeypatch):
    other = {"token": other_token(), "log_probability": -2.4, "losses": {(1,): 6.0}}
    (claim,) = audited(monkeypatch, [Word("cat", {(0,): 2.6}), Word("cat", **other)])
    assert claim.verdict == "conflicting"
    (claim,) = audited(monkeypatch, [Word("cat", {(0,): 1.6, (1,): 1.0}), Word("cat", **other)])
    assert claim.verdict == "supported"


def test_what_the_model_knows_against_a_source_is_conflicting(monkeypatch):
    # The claim is more probable without source 1, which says something else.
    words = [
        Word("cat", {(1,): -1.5}, log_probability=-1.6),
        Word("cat", {(1,): 4.0}, token=other_token(), log_probability=-1.7),
    ]
    (claim,) = audited(monkeypatch, words)
    assert claim.verdict == "conflicting"
    assert claim.grounds == ()
    assert names(claim.sources) == [sentence(1)]
    assert claim.against[0].margin == pytest.approx(0.1)
    # What the model itself prefers with all sources contradicts nothing.
    words[1] = Word("cat", {(1,): 4.0}, token=other_token(), log_probability=-1.5)
    assert audited(monkeypatch, words)[0].verdict == "from memory"
    # Nor does what no source makes more probable.
    words[1] = Word("cat", {(1,): Rules().support - 0.1}, token=other_token(), log_probability=-1.7)
    assert audited(monkeypatch, words)[0].verdict == "from memory"


def test_words_of_the_question_are_not_decisive(monkeypatch):
    # The question "Who has what?" has one of the words.
    (claim,) = audited(monkeypatch, [Word("has", {(0,): 12.0})])
    assert (claim.verdict, claim.decisive) == ("from memory", ())
    (claim,) = audited(monkeypatch, [Word("has", {(0,): 12.0}), Word("cat", {(1,): 6.0})])
    assert (claim.verdict, names(claim.sources)) == ("supported", [sentence(1)])
    assert claim.memory.loss == pytest.approx(6)
    # If it has all words of the claim, all count.
    (claim,) = audited(monkeypatch, [Word("has", {(0,): 12.0})], answer=" Who has what.")
    assert claim.verdict == "supported"


def test_a_source_about_something_else_contradicts_nothing(monkeypatch):
    # Only source 1 has the claim's rare word, its number.
    words = [Word("cat", {(1,): 12.0}), Word("cat", {(2,): 6.0}, token=other_token(), log_probability=-2.0)]
    (claim,) = audited(monkeypatch, words, answer=" The plan 1 has a cat.")
    assert (claim.verdict, claim.against) == ("supported", ())
    (claim,) = audited(monkeypatch, words, answer=" The plan has a cat.")
    assert claim.verdict == "conflicting"


def test_what_the_sources_say_instead_is_unclear(monkeypatch):
    # With all sources, the model prefers another token, which source 0 brings.
    other = Word("cat", {(0,): 6.0}, token=other_token(), log_probability=-0.1)
    words = [Word("cat", log_probability=-0.1 - Rules().preferred), other]
    (claim,) = audited(monkeypatch, words)
    assert claim.verdict == "unclear"
    assert "the model prefers" in claim.reason
    assert claim.describe() == claim.reason
    # It does not matter if the sources do not bring it, if the lead is small, or in the first word.
    little = Word("cat", {(0,): Rules().support - 0.1}, token=other_token(), log_probability=-0.1)
    assert audited(monkeypatch, [words[0], little])[0].verdict == "from memory"
    near = Word("cat", log_probability=-0.05 - Rules().preferred)
    assert audited(monkeypatch, [near, other])[0].verdict != "unclear"
    first = [
        Word("Ann", log_probability=-4.0),
        Word("Ann", {(0,): 6.0}, token=other_token(), log_probability=-0.1),
    ]
    assert audited(monkeypatch, first)[0].verdict == "from memory"


def test_further_words_on_many_sources_leave_the_verdict(monkeypatch):
    words = [Word("cat", {(0,): 12.0}), Word("Ann", {(1, 2, 3, 4, 5): 9.0})]
    (claim,) = audited(monkeypatch, words, n=7)
    assert (claim.verdict, names(claim.sources)) == ("supported", [sentence(0)])


def test_two_words_with_two_grounds(monkeypatch):
    words = [Word("Ann", {(2,): 9.0}), Word("cat", {(0,): 12.0})]
    (claim,) = audited(monkeypatch, words)
    assert claim.verdict == "supported"
    assert sorted(names(each.sources)[0] for each in claim.grounds) == [sentence(0), sentence(2)]
    assert [each.loss for each in claim.grounds] == pytest.approx([12, 9])
    assert [names(each.sources)[0] for each in claim.necessary] == [sentence(0), sentence(2)]
    # Of several grounds, that of the largest loss decides.
    words = [Word("Ann", {(2, 3): 9.0}), Word("cat", {(0,): 12.0})]
    (claim,) = audited(monkeypatch, words)
    assert claim.verdict == "supported"
    assert [sorted(names(each)) for each in claim.redundant] == [[sentence(2), sentence(3)]]
    for own in ((2,), (2, 3)):
        words = [Word("Ann", {own: 9.0}), Word("cat", {(0, 1): 12.0})]
        (claim,) = audited(monkeypatch, words)
        assert claim.verdict == "redundant"
        assert len(claim.grounds) == 2


def test_a_word_that_loses_little_beside_another_one_has_no_ground(monkeypatch):
    (claim,) = audited(monkeypatch, [Word("Ann", {(2,): 3.0}), Word("cat", {(0,): 12.0})])
    assert names(claim.sources) == [sentence(0)]


def test_punctuation_is_not_decisive(monkeypatch):
    (claim,) = audited(monkeypatch, [Word("cat.", {}), Word(".", {(0,): 12.0})])
    assert claim.decisive == ()
    assert claim.verdict == "from memory"


TWICE = " Ann has a cat. So the cat sees Ben."


def test_a_claim_that_repeats_an_earlier_one_follows_it(monkeypatch):
    whole = (0, 1, 2, 3)
    # Source 4 is the first written sentence.
    words = [Word("cat. So", {(0,): 12.0}), Word("cat sees", {(*whole, 4): 10.0})]
    audit = audited(monkeypatch, words, answer=TWICE)
    first, second = audit
    assert first.follows is None
    assert second.follows.text == first.span.text
    assert second.span.text == audit.trace.spans[1].text
    assert second.verdict == first.verdict == "supported"
    assert (second.grounds, second.alone) == (first.grounds, first.alone)
    # What it loses without all sources is what its own decisive tokens lose.
    assert second.decisive == ()
    assert second.describe() == "it repeats what the answer says before: 'Ann has a cat.'"
    assert second.memory.loss == pytest.approx(0)


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        # It depends more on the prompt.
        ({(3,): 12.0, (0, 1, 2, 3, 4): 10.0}, "supported"),
        # It depends on nothing.
        ({(0, 1, 2, 3, 4): 1.5}, "from memory"),
    ],
)
def test_a_claim_with_sources_of_its_own_follows_none(monkeypatch, losses, verdict):
    words = [Word("cat. So", {(0,): 12.0}), Word("cat sees", losses)]
    _, second = audited(monkeypatch, words, answer=TWICE)
    assert (second.follows, second.verdict) == (None, verdict)


def test_what_only_the_first_word_of_a_claim_loses_is_not_followed(monkeypatch):
    words = [Word("cat", {(0,): 12.0}), Word("Ann sees", {(0, 1, 2, 3, 4): 10.0})]
    _, second = audited(monkeypatch, words, answer=" Ann has a cat. Ann sees Ben.")
    assert (second.follows, second.verdict) == (None, "from memory")


def test_a_word_that_the_earlier_sentence_does_not_have_is_not_repeated(monkeypatch):
    words = [Word("cat. So", {(0,): 12.0}), Word("sees Ben", {(0, 1, 2, 3, 4): 10.0})]
    _, second = audited(monkeypatch, words, answer=TWICE)
    assert (second.follows, second.verdict) == (None, "from memory")


def test_the_weakest_of_many_sources_stays(monkeypatch):
    for n in (4, 5):
        (claim,) = audited(monkeypatch, [], n=n, order=range(n - 1, -1, -1))
        assert len(claim.memory.sources) == 4
        assert (sentence(0) in names(claim.memory.sources)) == (n == 4)


def test_every_verdict_is_known(monkeypatch):
    assert Rules().most == 4
    for words in ([], [Word("cat", {(0,): 12.0})], [Word("cat", {(0, 1): 12.0})]):
        assert audited(monkeypatch, words)[0].verdict in VERDICTS


# ------------------------------------------------------------------ what stays

FACTS = "Oslo has trains. It has 120 employees."


def kept(prompt, keep=None, model=None, **options):
    t = lm.trace(model or model_of(), prompt, answer=" Oslo", method="attention", **options)
    return [source.text for source in find_kept(t, keep)]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        # A question.
        ("Where is it?", ["Where is it?"]),
        ('He asks: "Where is it?"', ['He asks: "Where is it?"']),
        ("Question: on which hardware.\nAnswer: yes.", ["Question: on which hardware.", "Answer: yes."]),
        # A sentence without an end, with a question before it and without one.
        ("Where is it? It is in", ["Where is it?", "It is in"]),
        ("The place is", ["The place is"]),
        # The last sentence, if there is nothing else.
        ("Trains run every hour.", ["Trains run every hour."]),
        # A finished last sentence is a source if a question is before it.
        ("Where is it? Trains run every hour.", ["Where is it?"]),
    ],
)
def test_what_is_asked_stays(end, expected):
    assert kept(f"{FACTS} {end}") == expected


def test_what_is_asked_stays_in_lines():
    assert kept(f"{FACTS}\n\nQuestion: Where?\nAnswer:") == ["Question: Where?", "Answer:"]
    assert kept(f"{FACTS}\n\nQ: the place\na: it is") == ["Q: the place", "a: it is"]
    # A word that only begins like one of these marks is none.
    assert kept(f"Questions are rare.\n\n{FACTS}\n\nAnswers: two.") == ["Answers: two."]


DOCUMENTS = lm.Documents({"report": FACTS, "press": "Is it new? Yes"}, "Where?", "Use the documents.")


@pytest.mark.parametrize("unit", ["sentence", "document", "word", "token"])
def test_questions_and_instructions_of_documents_stay(unit):
    t = lm.trace(model_of(), DOCUMENTS, answer=" Oslo", sources=unit, method="attention")
    found = find_kept(t, None)
    assert {each.kind for each in found} == {"question", "instruction"}
    assert found == [each for each in t.sources() if each.kind in ("question", "instruction")]


def test_a_message_of_the_system_stays():
    model = reader(template=PLAIN)
    chat = [{"role": "system", "content": "Use the documents."}, {"role": "user", "content": FACTS}]
    for unit in ("sentence", "message"):
        t = lm.trace(model, chat, answer="Oslo", sources=unit, method="attention")
        assert [each.text for each in find_kept(t, None) if each.kind == "system"] == ["Use the documents."]
    asked = [*chat[:1], {"role": "user", "content": f"{FACTS} Where is it?"}]
    assert kept(asked, model=model) == ["Use the documents.", "Where is it?"]
    # A finished last sentence is a source if an instruction stays.
    assert kept(chat, model=model) == ["Use the documents."]


def test_given_texts_stay():
    prompt = f"{FACTS} Where is it?"
    assert kept(prompt, ["trains"]) == ["Oslo has trains."]
    assert kept(prompt, ["It has", "Where"]) == ["It has 120 employees.", "Where is it?"]
    assert kept(prompt, []) == []
    # Several sources may contain a text.
    assert kept(prompt, ["has"]) == ["Oslo has trains.", "It has 120 employees."]
    with pytest.raises(ValueError, match=r"keep: expected texts of the prompt, got 'cars', which no source"):
        kept(prompt, ["trains", "cars"])


def test_a_plain_prompt_of_tokens_keeps_nothing():
    t = lm.trace(model_of(), torch.arange(10, 16), answer=[20], sources="token", method="attention")
    assert find_kept(t, None) == []


def test_what_stays_is_in_no_set(monkeypatch):
    audit = audited(monkeypatch, [])
    assert names(audit.kept) == [QUESTION]
    audit = audited(monkeypatch, [], keep=["plan 2"])
    assert names(audit.kept) == [sentence(2)]
    assert sorted(names(audit[0].memory.sources)) == sorted([sentence(0), sentence(1), sentence(3), QUESTION])
