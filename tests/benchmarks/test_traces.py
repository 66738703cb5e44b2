"""The trace benchmarks: their prompts, their removals, their maps on a tiny Llama, and their scores."""

from __future__ import annotations

import gc
import itertools
import math
import random
import re
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lens_mix as lm
from tests.tiny_models import available, bridge, wrapped_model

# The scripts need TransformerLens 3 or later.
if not available(bridge, "llama"):
    pytest.skip("no TransformerBridge in this TransformerLens", allow_module_level=True)

from benchmarks.traces import drops, gold, maps, prompts, scores, table
from benchmarks.traces.gold import Record


def first(half: str, family: str, count: int = 12) -> list[prompts.TracePrompt]:
    return list(itertools.islice(prompts.make(half, family), count))


# ------------------------------------------------------------------ prompts


def test_the_halves_have_no_word_and_no_template_in_common() -> None:
    choose, held_out = (prompts.WORDS[half] for half in prompts.HALVES)
    for name in choose:
        assert not set(choose[name]) & set(held_out[name])
    for made in (prompts.FILLERS, prompts.NEEDLES, prompts.INJECTIONS, prompts.PAYLOADS, prompts.REQUESTS):
        assert not set(made["choose"]) & set(made["held_out"])


@pytest.mark.parametrize("half", prompts.HALVES)
@pytest.mark.parametrize("family", prompts.FAMILIES)
def test_prompts_are_the_same_each_time_and_have_the_answer_in_a_gold_sentence(
    half: str, family: str
) -> None:
    made = first(half, family)
    assert made == first(half, family)
    assert len({prompt.text for prompt in made}) == len(made)
    for prompt in made:
        assert not re.search(r"[{}]", prompt.text)
        golden = [piece.text for piece in prompt.pieces if piece.is_gold]
        assert (not golden) == (family == "statement")
        assert all(any(value in text for text in golden) for value in prompt.values)
        assert all(piece.document is not None for piece in prompt.pieces if piece.is_gold)


def test_a_conflict_has_two_claims_in_two_passages_of_four() -> None:
    for prompt in first("held_out", "conflict"):
        golden = [piece for piece in prompt.pieces if piece.is_gold]
        assert len({piece.document for piece in golden}) == len(golden) == 2
        assert {piece.document for piece in prompt.pieces} == {None, 0, 1, 2, 3}


def test_a_needle_of_several_keys_has_one_gold_sentence_of_four() -> None:
    prompt = prompts.make_needle(random.Random(0), "choose", "several keys", 200)
    assert sum(piece.is_gold for piece in prompt.pieces) == 1
    assert len(prompt.answers) == 1
    assert prompt.text.count(prompt.answers[0].strip()) == 1


def test_a_chain_of_variables_has_a_gold_sentence_for_each_hop() -> None:
    prompt = prompts.make_variables(random.Random(0), "choose", 3, 200)
    golden = [piece.text for piece in prompt.pieces if piece.is_gold]
    assert len(golden) == 4
    assert prompt.values[0] in golden[0]
    assert prompt.values[0] not in " ".join(golden[1:])


@pytest.mark.parametrize("family", sorted(set(prompts.LENGTHS) - set(prompts.SAME_FORM)))
def test_long_prompts_come_in_turns_and_have_their_values_in_one_sentence(family: str) -> None:
    made = list(itertools.islice(prompts.make_long("held_out", family), 9))
    assert [prompt.family for prompt in made] == ["needle", "conflict", "variables"] * 3
    assert {prompt.kind for prompt in made} >= {"several keys", "several values", "single", "3 hops"}
    for prompt in made:
        # The sentences have about five letters a word, and a token is at most a word.
        words = len(prompt.text.split())
        assert 0.5 * prompts.LENGTHS[family] < words < prompts.LENGTHS[family]
        if prompt.family == "conflict":
            assert [prompt.text.count(value) for value in prompt.values] == [1, 1]


@pytest.mark.parametrize("family", prompts.SAME_FORM)
def test_distractors_have_the_form_of_the_right_sentence_and_another_value(family: str) -> None:
    made = list(itertools.islice(prompts.make_long("held_out", family), 12))
    assert [prompt.kind for prompt in made[::2]] == ["all keys"] * 6
    for needle in made[::2]:
        assert needle.text.count("The locker code that belongs to") == 13
        assert sum(piece.is_gold for piece in needle.pieces) == 1
        assert needle.text.count(needle.values[0]) == 1
    for conflict in made[1::2]:
        assert conflict.family == "conflict"
        firms = prompts.WORDS["held_out"]["firm"]
        said = [
            sum(firm in piece.text for piece in conflict.pieces if piece.document is not None)
            for firm in firms
        ]
        assert sorted(said) == [1] * 7 + [2]
        assert [conflict.text.count(value) for value in conflict.values] == [1, 1]


# ------------------------------------------------------------------ tokens and removals


class CharacterTokenizer:
    """A tokenizer with one token per character, and a first token of its own."""

    bos_token_id = 1
    eos_token_id = 0

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        ids = [2 + ord(each) % 40 for each in text]
        return {"input_ids": ids, "offset_mapping": [(i, i + 1) for i in range(len(text))]}


def test_tokens_belong_to_the_piece_of_their_last_character() -> None:
    pieces = (prompts.Piece("ab", 0, True), prompts.Piece(" cd", 0), prompts.Piece("e"))
    prompt = prompts.TracePrompt("choose", "needle", "single", pieces, values=("b",))
    tokens, piece_of = gold.tokenize(CharacterTokenizer(), prompt)
    assert piece_of.tolist() == [-1, 0, 0, 1, 1, 1, 2]
    assert tokens[0] == 1
    assert gold.find_deciding(CharacterTokenizer(), prompt, [0], 1) == [2]


def make_record(**options: Any) -> Record:
    """Return a record of 12 prompt tokens in five pieces, the second to fourth of which are sentences."""
    piece_of = torch.tensor([-1, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4])
    tokens = torch.randint(2, 50, (15,), generator=torch.Generator().manual_seed(0))
    record = Record("needle, single", 0, tokens, 12, piece_of, [-1, 0, 0, 0, -1], [2], [6])
    record.sentences = [1, 2, 3]
    for name, value in options.items():
        setattr(record, name, value)
    return record


@pytest.fixture(scope="module")
def models() -> maps.Models:
    plain = wrapped_model("llama").requires_grad_(False)
    plain.set_attn_implementation("eager")
    return maps.Models(plain, bridge("llama"), None)


def test_removals_with_a_shared_beginning_are_those_of_whole_passes(models: maps.Models) -> None:
    record = make_record()
    record.log_p = gold.log_p_of(models.plain, record.tokens, record.n_written)
    groups = [[1], [2], [3], [1, 2]]
    found = gold.remove_each(models.plain, record, groups)
    wanted = [record.log_p - gold.log_p_without(models.plain, record, group) for group in groups]
    torch.testing.assert_close(found, torch.tensor(wanted), atol=1e-5, rtol=1e-4)
    assert found.abs().min() > 1e-4


def test_of_long_prompts_only_what_the_gold_needs_is_removed(
    models: maps.Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = []

    def remove_each(model: Any, record: Record, groups: list[list[int]]) -> torch.Tensor:
        removed.extend(groups)
        return torch.tensor([2.0] * len(groups))

    monkeypatch.setattr(gold, "remove_each", remove_each)
    monkeypatch.setattr(gold, "LONG", 11)
    variables = prompts.TracePrompt("choose", "variables", "1 hop", ())
    record = make_record(name="variables, 1 hop", gold=[1, 3])
    assert gold._measure(None, variables, record)
    assert (removed, record.effects) == ([[1], [3]], [])
    removed.clear()
    conflict = prompts.TracePrompt("choose", "conflict", "x", ())
    record = make_record(name="conflict, x", document_of=[-1, 0, 1, 0, -1], gold=[1, 2])
    assert gold._measure(None, conflict, record)
    assert (removed, record.effects, record.gold) == ([[1, 3], [2]], [], [1])


def test_the_log_probability_is_that_of_a_plain_softmax(models: maps.Models) -> None:
    record = make_record()
    with torch.no_grad():
        log_p = models.plain(record.tokens[None]).logits[0].log_softmax(-1)
    wanted = sum(float(log_p[i - 1, record.tokens[i]]) for i in range(12, 15))
    assert gold.log_p_of(models.plain, record.tokens, 3) == pytest.approx(wanted, abs=1e-5)
    found = lm.run(models.bridge, record.tokens, lm.methods.Gim(maps.span_target(record)), queries=[-1])
    assert found.explained[0].value == pytest.approx(wanted, abs=1e-5)


# ------------------------------------------------------------------ maps


def test_maps_of_one_plain_pass_are_the_librarys(models: maps.Models) -> None:
    record = make_record()
    found, target = maps.gradients(models, record), maps.span_target(record)

    def row(m: lm.MixingMap, rows: list[int]) -> torch.Tensor:
        return m.scores[-1, rows].sum(0)[:12].double()

    weighted = lm.run(models.bridge, record.tokens, lm.methods.GradientAttention(target))
    attention = lm.run(models.bridge, record.tokens, "attention")
    plain = lm.run(models.bridge, record.tokens, lm.methods.InputGradients(target), queries=[-1])
    wanted = {
        "input_gradients, norm": row(plain, [0]),
        "gradient_attention, mean": weighted.scores[:, record.rows].mean(0).sum(0)[:12].double(),
        "gradient_attention, gradient_rollout": row(lm.gradient_rollout(weighted), record.rows),
        "attention, rollout": row(lm.rollout(attention), record.rows),
        "attention, rollout, total mixing 1.5": row(lm.rollout(attention, total_mixing=1.5), record.rows),
    }
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, atol=1e-6, rtol=1e-4, msg=name)
    assert found["features: attention"].shape[-1] == 5


def test_the_autograd_graph_of_plain_gradients_is_freed(models: maps.Models) -> None:
    def count_tensors() -> int:
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    record = make_record()
    maps.gradients(models, record)
    before = count_tensors()
    maps.gradients(models, record)
    assert count_tensors() == before


def test_maps_of_long_prompts_are_those_of_short_ones(models: maps.Models) -> None:
    record = make_record()
    layers = maps.layers(models, record) | maps.rollouts(models, record) | maps.changed(models, record)
    alone: maps.Rows = {}
    for name in ("default", "reference", "gim", "alti", "value_zeroing"):
        alone |= maps.GROUPS[name](models, record)
    assert list(alone) == [table.RECOMMENDED, table.REFERENCE, "gim", "alti, mean", "value_zeroing, mean"]
    for name, row in alone.items():
        torch.testing.assert_close(row, layers[name], atol=1e-6, rtol=1e-4, msg=name)


def test_maps_of_shuffled_weights_are_others_of_the_same_names(models: maps.Models) -> None:
    record = make_record()
    before = maps.gradients(models, record) | maps.changed(models, record) | maps.rollouts(models, record)
    found = maps.shuffled(models, record)
    for name, row in found.items():
        own = before[name.removesuffix(table.SHUFFLED)]
        assert row.shape == own.shape
        assert not torch.allclose(row.double() / row.norm(), own.double() / own.norm(), atol=1e-3), name
    assert f"attention, rollout{table.SHUFFLED}" in found
    after = maps.gradients(models, record)
    torch.testing.assert_close(after["attention, mean"], before["attention, mean"])


@pytest.mark.parametrize("residual", [0.0, 0.5])
def test_rows_of_a_rollout_are_those_of_the_whole_one(residual: float) -> None:
    scores = torch.rand(3, 6, 6).tril()
    whole = lm.rollout(
        lm.MixingMap(scores=scores, tokens=list("abcdef"), method="attention", causal=True), residual=residual
    )
    start = torch.zeros(1, 6)
    start[0, [3, 5]] = 1
    wanted = whole.scores[-1, [3, 5]].sum(0)
    torch.testing.assert_close(maps.rollout_rows(scores, start, residual)[0], wanted)


# ------------------------------------------------------------------ scores


def test_the_score_of_a_sentence_is_the_sum_over_its_tokens() -> None:
    record, row = make_record(), torch.arange(12.0)
    assert scores.sentence_scores(record, row).tolist() == [7, 18, 17]
    assert scores.strongest(record, row, 2) == (2, 3)
    assert scores.source_accuracy(record, row) == 1
    assert scores.source_accuracy(make_record(gold=[3]), row) == 0
    assert scores.source_accuracy(make_record(gold=[1, 3]), row) == 0.5
    assert scores.is_right(make_record(gold=[1, 3]), row) == 0
    assert scores.is_right(make_record(gold=[1, 2]), row) == 1


def test_the_source_of_a_conflict_is_a_passage() -> None:
    record = make_record(name="conflict, x", document_of=[-1, 0, 1, 0, -1], gold=[1])
    assert scores.source_accuracy(record, torch.arange(12.0)) == 1
    assert scores.source_accuracy(record, torch.tensor([0.0] * 5 + [9.0] + [0.0] * 6)) == 0


def test_recovery_counts_gold_tokens_in_the_top_tenth_without_the_first_token() -> None:
    record = make_record()
    row = torch.zeros(12)
    row[0], row[6] = 9, 1
    # A tenth of 11 tokens is one place, and the gold sentence has three tokens.
    assert scores.recovery(record, row) == pytest.approx(1 / 3)
    assert scores.recovery(record, torch.zeros(12)) == 0
    assert scores.deciding_rank(record, row) == 1
    row[1] = 2
    assert scores.deciding_rank(record, row) == 0.5
    assert math.isnan(scores.deciding_rank(make_record(deciding=[]), row))


def test_lds_is_the_rank_correlation_with_random_removals() -> None:
    masks = [[True, False, False], [False, True, False], [True, True, True], [False, False, False]]
    record = make_record(masks=masks, mask_log_p=[-3.0, -2.0, -1.0, -4.0])
    assert scores.data_modelling(record, torch.arange(12.0)) == pytest.approx(1)
    assert scores.data_modelling(record, -torch.arange(12.0)) == pytest.approx(-1)
    assert scores.data_modelling(record, torch.zeros(12)) == 0
    assert math.isnan(scores.data_modelling(make_record(), torch.zeros(12)))


def test_what_the_strongest_sentences_explain_is_compared_with_the_best_ones() -> None:
    record = make_record(effects=[3.0, 1.0, 2.0], drops={(1, 3): 6.0, (2, 3): 3.0})
    assert scores.best_sentences(record, 2) == (1, 3)
    assert scores.explained(record, torch.arange(12.0), 2) == 0.5
    assert scores.drop(record, torch.arange(12.0), 1) == 1.0
    assert scores.drop(record, torch.arange(12.0), 2) == 3.0
    assert scores.explained(record, -torch.arange(12.0), 2) == 1.0
    assert math.isnan(scores.explained(record, torch.arange(12.0), 1))
    row = drops.removal_row(record)
    assert row is not None
    assert scores.sentence_scores(record, row).tolist() == [3, 1, 2]
    assert drops.removal_row(make_record()) is None


def test_the_best_set_is_known_if_all_sets_were_removed() -> None:
    sets = {(1, 2): 8.0, (1, 3): 6.0, (2, 3): 4.0}
    record = make_record(effects=[3.0, 1.0, 2.0], drops={**sets, (1,): 3.0})
    assert scores.explained_of_best(record, torch.arange(12.0), 2) == 0.5
    assert scores.explained_of_best(record, -torch.arange(12.0), 2) == 0.75
    assert math.isnan(scores.explained_of_best(record, torch.arange(12.0), 1))
    sets.pop((1, 2))
    part = make_record(effects=[3.0, 1.0, 2.0], drops=sets)
    assert math.isnan(scores.explained_of_best(part, torch.arange(12.0), 2))


def test_shares_have_an_interval_although_all_prompts_are_right() -> None:
    assert table.cell([1.0] * 10) == "1.00 [0.72, 1.00]"
    assert table.cell([0.5, 0.5]) == "0.50 [0.50, 0.50]"
    assert table.cell([]) == ""
    assert table.percent([1.0] * 10) == "100 [72, 100]"
    a, b, c = (("smollm2", "needle", str(i)) for i in range(3))
    assert table.difference({a: 1.0, b: 1.0}, {b: 0.5, c: 0.0}) == "0.50 [0.50, 0.50]"


def test_long_prompts_and_shuffled_weights_have_their_own_tables() -> None:
    families = (*table.LONG_PAGE.families, "needle")
    keys = [("smollm2", family, f"{i}.record.pt") for i, family in enumerate(families)]
    values = dict(zip(keys, (1.0, 0.0, 1.0, 1.0), strict=True))
    found: Any = defaultdict(lambda: defaultdict(dict))
    found[table.RECOMMENDED]["right"] = found[table.REFERENCE]["right"] = values
    found["gim"]["right"] = {keys[1]: 0.0}
    found["gim, shuffled weights"]["right"] = {keys[3]: 0.0}
    found[f"{table.RECOMMENDED}, shuffled weights"]["right"] = {keys[3]: 0.0}
    long = table.length_table(found, "right", ("smollm2",))
    assert (
        f"| **{table.RECOMMENDED}** | 2 | 0.50 [0.09, 0.91] | 1 | 1.00 [0.21, 1.00] | 0.00 [0.00, 0.00] |"
        in long
    )
    assert f"| {table.REFERENCE} | 2 | 0.50 [0.09, 0.91] | 1 | 1.00 [0.21, 1.00] |  |" in long
    assert "| gim | 1 | 0.00 [0.00, 0.79] | 0 |  | 0.00 [0.00, 0.00] |" in long
    assert "shuffled" not in long
    short = table.make_table(found, "right", ("smollm2",))
    assert "shuffled" not in short
    assert "| 1 | 1.00 [0.21, 1.00] |" in short
    shuffled = table.shuffled_table(found, ("smollm2",))
    assert f"| {table.RECOMMENDED} | 1 | 1.00 [0.21, 1.00] | 0.00 [0.00, 0.79] |" in shuffled
    # The map `gim` has no prompt with and without shuffled weights.
    assert "| gim |" not in shuffled


def test_the_rows_of_one_method_are_replaced_and_no_others() -> None:
    header = f"| map | n | all, 95 % | {table.LESS_THIS}, 95 % |\n| --- | --- | --- | --- |\n"
    rows = {
        table.REFERENCE: "2 | 0.50 [0.09, 0.91] |  |",
        "gim": "2 | 0.40 [0.09, 0.91] | 0.10 [0.00, 0.20] |",
        "alti": "2 | 0.30 [0.09, 0.91] | 0.20 [0.00, 0.20] |",
    }

    def page(rows: dict[str, str]) -> str:
        lines = "".join(f"| {name} | {cells}\n" for name, cells in rows.items())
        return f"# Page\n\nMeasured 2026-11-26 with torch 2.\n\n## Score\n\n{header}{lines}"

    fresh = {
        "gim, absolute": "2 | 0.60 [0.09, 0.91] | -0.10 [0.00, 0.20] |",
        table.REFERENCE: rows[table.REFERENCE],
        "gim": "2 | 0.20 [0.09, 0.91] | 0.30 [0.00, 0.20] |",
    }
    merged = table.merge_page(page(rows), page(fresh), "gim")
    order = ("gim, absolute", table.REFERENCE, "alti", "gim")
    expected = page({name: {**rows, **fresh}[name] for name in order})
    assert re.sub(r" \(gim: [\d-]+\)", "", merged) == expected
    assert "Measured 2026-11-26 (gim: " in merged
    assert "alti" in table.merge_page(merged, page(fresh), "gim")
    fresh[table.REFERENCE] = "2 | 0.90 [0.09, 0.91] |  |"
    with pytest.raises(ValueError, match="Score: gim, ratio, absolute was"):
        table.merge_page(page(rows), page(fresh), "gim")


def test_records_are_stored_and_read_back(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = gold.folder("smollm2", "choose", "needle")
    record = make_record(drops={(1, 2): 0.5})
    gold.store(place / "0003.record.pt", record)
    stored = {"a": torch.ones(12), "alti, mean": torch.arange(4.0), "features: b": torch.ones(2)}
    torch.save({"rows": stored}, place / "0003.x.pt")
    ((path, found),) = gold.records("smollm2", "choose", "needle")
    assert found.drops == record.drops
    rows = drops.rows_of(path)
    assert list(rows) == ["a", "alti, mean", "alti, mean, above the median"]
    assert rows["alti, mean, above the median"].tolist() == [0, 0, 1, 2]
    torch.testing.assert_close(found.tokens, record.tokens)


def test_the_first_prompts_that_are_answered_are_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def accept(model: Any, tokenizer: Any, prompt: Any, number: int) -> Record | None:
        return make_record(number=number) if number % 2 else None

    monkeypatch.setattr(gold, "accept", accept)
    for count in (1, 3, 2):
        gold.find(None, SimpleNamespace(), "smollm2", "choose", "needle", count)
    assert [record.number for _, record in gold.records("smollm2", "choose", "needle")] == [1, 3, 5]
