"""Test the leaderboard: its scores, controls, files and tasks."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers

import lens_mix as lm
from lens_mix.aggregation.candidates import aggregations_by_name, candidate_rows
from lens_mix.evaluation import (
    Case,
    Cells,
    Cues,
    Importance,
    Removals,
    ReplaceTokens,
    leaderboard,
    randomised,
)
from lens_mix.evaluation.agreement import bootstrap
from lens_mix.evaluation.controls import control_rows
from lens_mix.evaluation.leaderboard import Leaderboard
from lens_mix.experiments import blimp_cases, planted_facts, plausibility
from tests import tiny_models
from tests.matrix import build_or_skip
from tests.random_maps import map_of, random_attention
from tests.tiny_models import gpt2_like

OCCLUSION = lm.methods.Occlusion(replacements=[3, 5], measure="absolute")


def word_tokenizer(words):
    """Return a tokenizer with one token per word, and `<bos>` in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{word: i + 3 for i, word in enumerate(words)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<eos>",
        name_or_path="words",
        add_bos_token=True,
    )


def copying_model(words):
    """Return a model that repeats what followed the last two words before: it finds every planted fact.

    In training mode, as with dropout, it predicts nothing.
    """
    tokenizer = word_tokenizer(words)
    if tiny_models.available(tiny_models.bridge, "gpt2"):
        sizes = {"vocab_size": len(tokenizer), "n_positions": 128}
        model = tiny_models.bridge("gpt2", tokenizer=tokenizer, **sizes)
    else:
        sizes = {"d_vocab": len(tokenizer), "n_ctx": 128}
        model = tiny_models.hooked_transformer("LN", tokenizer=tokenizer, **sizes)

    def forward(tokens, **options):
        ids, logits = tokens[0].tolist(), torch.zeros(1, tokens.shape[1], len(tokenizer))
        places = [i for i in range(2, len(ids)) if ids[i - 2 : i] == ids[-2:]]
        logits[0, -1, ids[places[0]] if model.knows and places and not model.training else 0] = 1
        return logits

    model.forward, model.knows = forward, True
    return model


def prompts(model, count=4):
    return [tiny_models.tokens(model, 1, length, seed)[0] for seed, length in enumerate((7, 5, 9, 6)[:count])]


def test_a_map_that_is_the_truth_scores_one(model):
    task = Importance(prompts(model), OCCLUSION)
    board = lm.evaluate(model, task, ["attention", OCCLUSION], ["rollout", "mean"])
    table = board.table().set_index(["method", "aggregation"])
    for metric in task.metrics:
        assert table.loc[("occlusion", "-"), metric] == pytest.approx(1)
    assert table.loc[("position", "-"), "partial_spearman"] == 0
    assert set(board.to_dataframe()["method"]) == {"random", "position", "attention", "occlusion"}
    assert set(board.to_dataframe()["aggregation"]) == {"-", "rollout", "mean"}
    assert len(board.to_dataframe()) == 4 * (2 + 1 + 2)


def test_scores_are_those_of_the_rows(model):
    import scipy.stats

    tokens = prompts(model)[0]
    board = lm.evaluate(model, Importance([tokens], OCCLUSION), "attention", ["mean"])
    truth = lm.run(model, tokens, OCCLUSION, queries=[-1]).scores[0, 0, 1:]
    row = lm.run(model, tokens, "attention").scores.mean(0)[-1, 1:]
    (record,) = [record for record in board.records if record["method"] == "attention"]
    assert record["spearman"] == pytest.approx(scipy.stats.spearmanr(row, truth).statistic)
    assert record["top_1"] == float(row[:-1].argmax() == truth[:-1].argmax())


def test_a_random_row_scores_as_chance(model):
    """Over many seeds, 0 is within the interval of the mean."""
    task = Importance(prompts(model, 1), OCCLUSION)
    truth = task.truth(model, task.cases(model)[0])
    scores = [
        task.score(control_rows(len(truth), seed)["random"], truth, -1)["spearman"] for seed in range(400)
    ]
    found = bootstrap(torch.tensor(scores))
    assert found.low < 0 < found.high


def test_a_constant_row_and_the_position_say_nothing(model):
    task = Importance(prompts(model, 1), OCCLUSION)
    truth = task.truth(model, task.cases(model)[0])
    for row in (torch.ones(len(truth)), torch.arange(len(truth)).double()):
        assert task.score(row, truth, -1)["partial_spearman"] == 0
    assert task.score(torch.ones(len(truth)), truth, -1)["spearman"] == 0


def test_one_token_is_undefined(model):
    board = lm.evaluate(model, Importance([torch.tensor([4])], OCCLUSION), "attention", ["mean"])
    assert {record["spearman"] for record in board.records} == {None}
    assert math.isnan(board.table()["spearman"][0])


def test_cues_by_hand(model):
    task = Cues([Case(prompts(model)[0], relevant=(1, 3))], leave_out=(0,))
    truth = task.truth(model, task.cases(model)[0])
    assert truth[1:].tolist() == [1, 0, 1, 0, 0, 0]
    assert truth[0].isnan()
    scores = task.score(torch.tensor([9.0, 0.5, 0.0, 0.2, 0.3, 0.0, 0.0]), truth, -1)
    # The ranks are 1 and 3 of the six that are scored.
    assert scores["average_precision"] == pytest.approx((1 + 2 / 3) / 2)
    assert scores["reciprocal_rank"] == 1
    assert scores["mass_accuracy"] == pytest.approx(0.7)


def test_the_target_of_a_case_is_explained(model):
    tokens = prompts(model)[0]
    target = lm.targets.logit_difference(3, 5)
    board = lm.evaluate(
        model, Cues([Case(tokens, relevant=(2,), target=target)]), "input_gradients", ["mean"]
    )
    row = lm.run(model, tokens, lm.methods.InputGradients(target=target), queries=[-1]).scores[0, 0]
    (record,) = [record for record in board.records if record["method"] == "input_gradients"]
    assert record["mass_accuracy"] == pytest.approx(float(row[2] / row.sum()))


def test_removals_and_cells_are_those_of_their_own_functions(model):
    tokens = prompts(model)[1]
    m = lm.run(model, tokens, "attention")
    board = lm.evaluate(model, Removals([tokens], "zero_values"), "attention", ["mean"])
    (record,) = [record for record in board.records if record["method"] == "attention"]
    curve = lm.evaluation.removal_curves(model, tokens, m.scores.mean(0)[-1], removal="zero_values", beam=3)
    assert record["deletion"] == pytest.approx(curve.comprehensiveness)
    assert record["insertion"] == pytest.approx(1 - curve.sufficiency)
    board = lm.evaluate(model, Cells([tokens], "mean"), ["attention", "input_gradients"])
    raw, shares = [record for record in board.records if record["method"] == "attention"]
    kept = lm.evaluation.keep_cells(model, tokens, m, operator="mean")
    assert (raw["aggregation"], shares["aggregation"]) == ("raw", "shares")
    assert (raw["closeness"], raw["area"]) == pytest.approx((-kept.distance, kept.area))
    assert "no cells" in board.refused["input_gradients"]
    assert {"random", "position"} < set(board.to_dataframe()["method"])


def test_a_part_of_an_encoder_decoder_is_scored():
    model = build_or_skip(tiny_models.bridge, "bart", torch.float64)
    pair = torch.arange(3, 9), torch.arange(20, 25)
    for task in (Importance([pair], OCCLUSION), Removals([pair], ReplaceTokens(8)), Cells([pair])):
        board = lm.evaluate(model, task, "attention", ["mean"], part="decoder")
        older = lm.evaluate(model, task, "attention", ["mean"], part="decoder")
        assert board.records == older.records
    with pytest.raises(ValueError, match=r"part: expected one of .*'decoder'.*got 'all'"):
        lm.evaluate(model, Cells([pair]), "attention", part="all")
    m = lm.run(model, pair, "attention", part="decoder")
    expected = lm.evaluation.keep_cells(model, pair, m, part="decoder")
    record = next(record for record in board.records if record["method"] == "attention")
    assert record["closeness"] == pytest.approx(-expected.distance)
    # The control shuffles only the part whose maps are scored. A decoder's maps depend only on its own
    # weights.
    board = lm.evaluate(model, Cells([pair]), "attention", part="decoder", randomised_model=True)
    with lm.evaluation.randomised(model, part="decoder"):
        shuffled = lm.run(model, pair, "attention", part="decoder")
    expected = lm.evaluation.keep_cells(model, pair, shuffled, part="decoder")
    name = "attention, randomised model"
    record = next(record for record in board.records if record["method"] == name)
    assert record["closeness"] == pytest.approx(-expected.distance)


def test_of_an_input_map_only_the_row_that_is_scored_is_made(model, monkeypatch):
    (prompt,), asked = prompts(model, 1), []

    def run(model, prompt, method, **options):
        asked.append((method.name, options.get("queries")))
        return lm.run(model, prompt, method, **options)

    monkeypatch.setattr(leaderboard, "run", run)
    task = Importance([prompt], OCCLUSION)
    board = lm.evaluate(model, task, ["decompx", "alti_logit", "attention"], ["mean"])
    assert asked == [("decompx", [-1]), ("alti_logit", [-1]), ("attention", None)]
    whole = lm.run(model, prompt, ["decompx", "alti_logit"])
    rows = {"decompx": whole["decompx"].scores[-1, -1], "alti_logit": whole["alti_logit"].scores.sum(0)[-1]}
    for name, score in task.scores(model, task.cases(model)[0], rows).items():
        (record,) = [record for record in board.records if record["method"] == name]
        assert {metric: record[metric] for metric in task.metrics} == pytest.approx(score)


def test_resumes_where_it_stopped(model, tmp_path):
    path = tmp_path / "runs" / "board.jsonl"
    task = Importance(prompts(model), OCCLUSION)
    whole = lm.evaluate(model, task, "attention", ["mean"], resume=path)
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 4
    # The run is stopped in the middle of the third case.
    path.write_text("\n".join([*lines[:3], lines[3][:20]]))
    again = lm.evaluate(model, task, "attention", ["mean"], resume=path)
    assert again.records == whole.records
    finished = json.loads(lines[1])
    assert finished["records"] == [record for record in whole.records if record["case"] == 0]
    with pytest.raises(ValueError, match="differs in methods"):
        lm.evaluate(model, task, "alti", ["mean"], resume=path)
    with pytest.raises(ValueError, match="differs in options"):
        lm.evaluate(model, task, "attention", ["mean"], resume=path, prepend_bos=False)


def test_what_a_model_cannot_run_is_named(model):
    bert = (
        tiny_models.bridge("bert", torch.float64)
        if tiny_models.available(tiny_models.bridge, "bert")
        else None
    )
    if bert is None:
        pytest.skip("no bridge for bert")
    tokens = tiny_models.tokens(bert, 1)[0]
    board = lm.evaluate(bert, Importance([tokens], OCCLUSION), ["attention", "context_length"], ["mean"])
    assert "causal model" in board.refused["context_length"]


def test_the_control_on_shuffled_weights_leaves_the_model_as_it_was(model):
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    task = Importance(prompts(model, 2), OCCLUSION)
    board = lm.evaluate(model, task, "attention", ["mean"], randomised_model=True)
    assert "attention, randomised model" in set(board.to_dataframe()["method"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    with randomised(model):
        assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(ZeroDivisionError), randomised(model):
        1 / 0  # noqa: B018
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_aggregations():
    m = map_of(random_attention(3, size=5))
    rows = candidate_rows(
        m, -1, aggregations_by_name(["rollout", "rollout, receptive field", "flow", "last"])
    )
    torch.testing.assert_close(rows["rollout"], lm.rollout(m).scores[-1, -1])
    torch.testing.assert_close(rows["last"], m.scores[-1, -1].double())
    own = candidate_rows(m, 2, {"double": lambda m: lm.layer_mean(m).replace(method="x")})
    torch.testing.assert_close(own["double"], m.scores[:, 2].mean(0).double())
    with pytest.raises(ValueError, match="aggregations: expected some of"):
        aggregations_by_name(["average"])


def test_rollouts_with_the_measured_residual_whatever_they_are_called(model):
    """Maps have measured residual shares, except those of a method for which they are not defined."""
    mine = {"mine": lambda m: lm.rollout(m, residual="measured"), "mean": lm.layer_mean}
    (prompt,) = prompts(model, 1)
    board = lm.evaluate(model, Importance([prompt], OCCLUSION), ["attention", "attn_res"], mine)
    known = lm.evaluate(
        model, Importance([prompt], OCCLUSION), ["attention", "attn_res"], ["rollout, residual measured"]
    )
    for method in ("attention", "attn_res"):
        ours, theirs = (
            [r["spearman"] for r in one.records if (r["method"], r["aggregation"]) == (method, name)]
            for one, name in ((board, "mine"), (known, "rollout, residual measured"))
        )
        assert ours == theirs
        assert len(ours) == 1
    rolled = lm.rollout(lm.run(model, prompt, "attention", residual_shares=True), residual="measured")
    task = Importance([prompt], OCCLUSION)
    (case,) = task.cases(model)
    expected = task.score(rolled.scores[-1, -1], task.truth(model, case), -1)["spearman"]
    assert next(r["spearman"] for r in board.records if r["aggregation"] == "mine") == expected
    assert {r["aggregation"] for r in board.records} == {"-", "mine", "mean"}


def test_signed_maps_have_no_rollout():
    m = map_of(random_attention(2, size=4))
    signed = m.replace(scores=-m.scores)
    assert set(candidate_rows(signed, -1, aggregations_by_name(["rollout", "mean"]))) == {"mean"}


def test_tables_and_pictures():
    records = tuple(
        {"case": case, "method": method, "aggregation": "-", "score": value + case / 10}
        for case in range(3)
        for method, value in (("position", 0.1), ("mine", 0.4))
    )
    board = Leaderboard(records, {"task": "by hand"}, ("score",), "none")
    table = board.table()
    assert list(table["method"]) == ["mine", "position"]
    assert table["score"].tolist() == pytest.approx([0.5, 0.2])
    # The paired difference is the same in every case.
    assert table.loc[0, ["score_gain", "score_gain_low", "score_gain_high"]].tolist() == pytest.approx(
        [0.3] * 3
    )
    over_cases = bootstrap([0.4, 0.5, 0.6])
    found = table.loc[0, ["score_low", "score_high"]].tolist()
    assert found == pytest.approx([over_cases.low, over_cases.high])
    assert found[0] < 0.4
    assert found[1] > 0.6
    assert "| mine | - | 0.50 [0.00, 1.00] | 3 |" in board.to_markdown()
    figure = board.show()
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["position", "mine"]
    with pytest.raises(ValueError, match="against: expected"):
        board.table("nobody")


def test_the_verdict_compares_with_the_controls():
    def board(**gains):
        values = {"random": 0.3, "position": 0.1, "mine, randomised model": 0.9}
        records = tuple(
            {"case": case, "method": method, "aggregation": name, "score": value + (gain if case % 2 else 0)}
            for case in range(4)
            for method, name, value, gain in (
                *((method, "-", value, 0.0) for method, value in values.items()),
                *((method, "mean", *numbers) for method, numbers in gains.items()),
            )
        )
        return Leaderboard(records, {"task": "by hand"}, ("score",), "none")

    # The second number is what every second case has more, so that the interval is wide.
    assert board(mine=(0.25, 0.1), other=(0.2, 0.0)).verdict() == [
        "Nothing beats 'random' in score: the best, mine, mean, is 0.00 [-0.25, 0.25] above it.",
        "1 of 2 beat 'position' in score: the best, mine, mean, is 0.20 [-0.05, 0.45] above it.",
    ]
    assert board().verdict() == [
        "No method was scored against 'random'.",
        "No method was scored against 'position'.",
    ]


def test_blimp_cues(tmp_path):
    pairs = [
        ("anaphor_number_agreement", "A lot of girls had bothered", "themselves", "herself", [0, 1, 2, 3]),
        ("anaphor_number_agreement", "Many teenagers were helping", "themselves", "herself", [0, 1]),
        ("anaphor_number_agreement", "Mary should criticize", "herself", "themselves", [0]),
        ("determiner_noun_agreement_1", "Diane works with these", "waiters", "waiter", [3]),
        ("regular_plural_subject_verb_agreement_1", "The hamster", "is", "were", [0, 1]),
        ("determiner_noun_agreement_1", "Diane works with these", "cats", "cats", None),
    ]
    words = sorted({word for _, *texts, _ in pairs for text in texts for word in text.split()})
    model = gpt2_like(torch.float32, tokenizer=word_tokenizer(words))
    path = tmp_path / "pairs.jsonl"
    lines = [
        {"UID": uid, "one_prefix_method": True, "one_prefix_prefix": prefix}
        | {"one_prefix_word_good": good, "one_prefix_word_bad": bad}
        for uid, prefix, good, bad, _ in pairs
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    cases = blimp_cases(model, path)
    added = len(cases[0].prompt) - 6
    assert [list(case.relevant) for case in cases] == [
        [added + p for p in places] for *_, places in pairs[:5]
    ]
    assert len(blimp_cases(model, path, count=2)) == 2
    path.write_text(json.dumps({"UID": "other", "one_prefix_method": False}))
    with pytest.raises(ValueError, match="one_prefix_method"):
        blimp_cases(model, path)


def test_planted_facts():
    texts = [*plausibility._FILLERS, *(template for template, _ in plausibility._FACTS)]
    answers = [word.strip() for _, words in plausibility._FACTS for word in words]
    words = {word for text in texts for word in text.split()} | set(answers) | set(plausibility._NAMES)
    words |= {f"{word}." for word in answers} | {f"{name}'s" for name in plausibility._NAMES}
    words |= {text.split("{1}")[0].split()[-1] for text in texts}
    # A word and its full stop are two tokens, as with real tokenizers.
    model = copying_model(sorted(word for word in words if word not in {f"{answer}." for answer in answers}))
    model.tokenizer.backend_tokenizer.pre_tokenizer = _full_stops_apart()
    cases = planted_facts(model, 10, sentences=4, seed=3)
    assert len(cases) == 10
    for case in cases:
        (position,) = case.relevant
        assert model.tokenizer.decode(case.prompt[position]) in answers
        # The words before the answer are the last words of the prompt.
        assert case.prompt[position - 2 : position].tolist() == case.prompt[-2:].tolist()
    in_training = planted_facts(model.train(), 10, sentences=4, seed=3)
    assert [case.relevant for case in in_training] == [case.relevant for case in cases]
    assert model.training
    model.knows = False
    with pytest.raises(ValueError, match="finds planted facts"):
        planted_facts(model, 2)


def _full_stops_apart():
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\.$"), "isolated")]
    )
