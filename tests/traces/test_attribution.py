"""Compare the scores of traces with rows of `lm.run` that are summed by hand, and paths that are counted."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch

import lens_mix as lm
from lens_mix._passes import effort
from lens_mix.registry import all_methods
from lens_mix.traces.attribution import find_aggregation
from lens_mix.traces.paths import sum_paths
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import bridge, gpt2_like, llama_like, toy_tokenizer
from tests.traces.readers import PLAIN, reader

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.tensor([5, 9, 12, 7, 30, 21, 8, 17, 4])
N_PROMPT = 5
# A span, and the rows that explain its tokens: row q explains token q + 1.
START, STOP = 1, 4
ROWS = [N_PROMPT - 1 + index for index in range(START, STOP)]


@functools.cache
def model_of():
    return llama_like(torch.float64)


def trace(method=None, model=None, **options):
    model = model_of() if model is None else model
    options = {"sources": "token", **options}
    return lm.trace(model, TOKENS[:N_PROMPT], answer=TOKENS[N_PROMPT:], method=method, **options)


def padded(rows):
    return torch.nn.functional.pad(rows, (0, len(TOKENS) - rows.shape[-1]))


def require_close(found, expected, **options):
    # transformers computes Llama's softmax in float32.
    torch.testing.assert_close(found, padded(expected), **{"atol": 1e-8, "rtol": 1e-6, **options})


# ------------------------------------------------------------------ methods with a target


@pytest.mark.parametrize(
    "method",
    [
        None,
        "gim",
        "input_gradients",
        "frozen_gradients",
        "occlusion",
        lm.methods.InputGradients(score="times_input"),
        lm.methods.Occlusion(by="mask"),
    ],
    ids=str,
)
def test_one_backward_pass_explains_a_span(method):
    default = lm.methods.Gim(readout="absolute")
    method = {
        "gim": lm.methods.Gim(),
        "input_gradients": lm.methods.InputGradients(),
        "occlusion": lm.methods.Occlusion(),
    }.get(method, method)
    method = lm.methods.FrozenGradients() if method == "frozen_gradients" else method
    t = trace(method)
    given = default if method is None else method
    target = lm.targets.span(N_PROMPT + START, N_PROMPT + STOP)
    expected = lm.run(model_of(), TOKENS, given.__class__(**{**vars(given), "target": target}), queries=[-1])
    require_close(t[START:STOP].scores, expected.scores[-1, 0, : N_PROMPT + STOP - 1])
    assert not t[START:STOP].scores[N_PROMPT + STOP - 1 :].any()
    for index in (0, 2):
        target = lm.targets.next_token(N_PROMPT - 1 + index)
        row = lm.run(
            model_of(),
            TOKENS,
            given.__class__(**{**vars(given), "target": target}),
            queries=[N_PROMPT - 1 + index],
        )
        require_close(t.steps.scores[0, index], row.scores[-1, 0])


@pytest.mark.parametrize("score", ["times_input"])
def test_a_linear_method_has_the_sum_of_its_rows(score):
    """Check that a gradient of a sum is the sum of the gradients."""
    t = trace(lm.methods.InputGradients(score=score))
    for start, stop in ((0, 4), (1, 3), (2, 4)):
        require_close(t[start:stop].scores, t.steps.scores[0, start:stop].sum(0))


@pytest.mark.parametrize(
    "method", [lm.methods.TokenPatching(), lm.methods.ContextLength()], ids=["patching", "context"]
)
def test_methods_of_one_position_are_summed(method):
    try:
        t = trace(method)
    except lm.UnsupportedModelError as problem:
        # Token patching needs a Bridge.
        pytest.skip(str(problem))
    rows = []
    for row in ROWS:
        target = lm.targets.next_token(row)
        made = lm.run(model_of(), TOKENS, type(method)(target), queries=[row])
        rows.append(padded(made.scores[-1, 0]))
    require_close(t[START:STOP].scores, torch.stack(rows).sum(0))
    require_close(t.steps.scores[0, START:STOP], torch.stack(rows))


def test_gradient_attention_has_the_span_as_its_target():
    t = trace("gradient_attention")
    target = lm.targets.span(N_PROMPT + START, N_PROMPT + STOP)
    layers = lm.run(model_of(), TOKENS, lm.methods.GradientAttention(target=target)).scores
    require_close(t[START:STOP].scores, layers.mean(0)[ROWS].sum(0))
    target = lm.targets.span(N_PROMPT + 2, N_PROMPT + 3)
    layers = lm.run(model_of(), TOKENS, lm.methods.GradientAttention(target=target)).scores
    require_close(t.steps.scores[0, 2], layers.mean(0)[N_PROMPT + 1])
    require_close(t[2].scores, layers.mean(0)[N_PROMPT + 1])


# ------------------------------------------------------------------ methods without a target


@pytest.mark.parametrize("name", ["attention", "value_zeroing", "alti", "globenc", "value_norm"])
def test_layer_maps_are_combined_and_summed(name):
    layers = lm.run(model_of(), TOKENS, name).scores
    assert layers.shape == (2, len(TOKENS), len(TOKENS))
    for aggregation, rows in (
        (None, layers.mean(0)),
        ("mean", layers.mean(0)),
        ("max", layers.amax(0)),
        ("upper half", layers[1:].mean(0)),
        ("last", layers[-1]),
        (lambda m: m.layer(0).replace(kind="input"), layers[0]),
    ):
        t = trace(name, aggregation=aggregation)
        require_close(t[START:STOP].scores, rows[ROWS].sum(0))
        require_close(t.steps.scores[0, START:STOP], rows[ROWS])


def test_a_function_is_not_the_aggregation_of_its_name():
    def mean(layer_maps):
        # A rollout needs all rows, which the aggregation "mean" does not.
        return lm.rollout(layer_maps)

    t = trace("attention", aggregation=mean)
    assert t.method_name == "attention, function mean"
    assert torch.equal(t[:].scores, trace("attention", aggregation="rollout")[:].scores)


@pytest.mark.parametrize(
    "made", [lambda m: m, lambda m: 3, lambda m: m.scores], ids=["layers", "number", "tensor"]
)
def test_a_function_that_makes_no_input_map(made):
    with pytest.raises(TypeError, match=r"aggregation: expected a function that returns an input map"):
        trace("attention", aggregation=made)


@pytest.mark.parametrize("aggregation", ["rollout", "flow", "rollout, residual measured"])
def test_rollouts_and_flows(aggregation):
    layers = lm.run(model_of(), TOKENS, "attention", residual_shares="measured" in aggregation)
    made = find_aggregation(aggregation)[1](layers)
    t = trace("attention", aggregation=aggregation)
    require_close(t[START:STOP].scores, made.scores[-1][ROWS].sum(0))
    require_close(t.steps.scores[0, START:STOP], made.scores[-1][ROWS])
    assert t.method_name == f"attention, {aggregation}"


def test_heads_are_among_the_largest():
    layers = lm.run(model_of(), TOKENS, lm.methods.AttentionWeights(per_head=True)).scores
    t = trace(lm.methods.AttentionWeights(per_head=True), aggregation="max")
    require_close(t[START:STOP].scores, layers.amax((0, 1))[ROWS].sum(0))
    mean = trace(lm.methods.AttentionWeights(per_head=True))
    require_close(mean[START:STOP].scores, layers.mean((0, 1))[ROWS].sum(0))


def test_decompx_is_one_map_of_all_layers():
    made = lm.run(model_of(), TOKENS, "decompx").scores
    require_close(trace("decompx")[START:STOP].scores, made[-1][ROWS].sum(0))


def test_logits_of_the_written_tokens():
    """Check that `alti_logit` explains the written tokens, and not those that the model predicts."""
    model = gpt2_like(torch.float64)
    made = lm.run(model, TOKENS, lm.methods.AltiLogit(token="next")).scores.sum(0)
    for method in ("alti_logit", lm.methods.AltiLogit(token="next")):
        require_close(trace(method, model)[START:STOP].scores, made[ROWS].sum(0))
    predicted = lm.run(model, TOKENS, "alti_logit").scores.sum(0)[ROWS].sum(0)
    assert (predicted - made[ROWS].sum(0)).abs().max() > 1e-6


@pytest.mark.parametrize("name", sorted(all_methods()))
def test_every_method_has_scores_or_a_reason(name):
    try:
        t = trace(name, gpt2_like(torch.float64))
    except lm.UnsupportedModelError as problem:
        assert name in str(problem)
        return
    rows = t.steps.scores[0]
    for index, row in enumerate(rows):
        torch.testing.assert_close(row, t[index].scores, atol=1e-9, rtol=1e-6)
        assert not row[N_PROMPT + index :].any()
        assert row.abs().sum() > 0
    assert t.top(2)
    assert name in repr(t)


def test_parts_of_an_encoder_decoder():
    model = build_or_skip(bridge, "bart", torch.float64)
    source, target = prompt_of(model)
    t = lm.trace(model, source, answer=target, sources="token")
    wanted = lm.targets.span(2, 4)
    made = lm.run(
        model, (source, target), lm.methods.InputGradients(target=wanted), part="joint", queries=[-1]
    )
    expected = made.scores[-1, 0]
    torch.testing.assert_close(t[1:3].scores, expected, atol=1e-10, rtol=1e-7)
    assert len(t.tokens) == source.shape[1] + target.shape[1]
    assert t.steps.key_tokens == t.tokens
    assert t.steps.tokens == t.tokens[source.shape[1] :]


@pytest.mark.parametrize("method", ["attention", "attn_res_ln"])
def test_layer_maps_of_an_encoder_decoder_are_those_of_its_cross_attention(method):
    model = build_or_skip(bridge, "bart", torch.float64)
    source, target = prompt_of(model)
    t = lm.trace(model, source, answer=target, sources="token", method=method)
    made = lm.run(model, (source, target), method, part="cross")
    count = source.shape[1]
    # The row of a decoder's position predicts the next one.
    row = made.scores[:, 1].mean(0)
    expected = torch.zeros(len(t.tokens), dtype=row.dtype)
    expected[:count] = row[:count]
    if len(row) > count:
        # The residual stream is that of the position which is read.
        expected[count + 1] = row[count]
    torch.testing.assert_close(t[1].scores, expected)
    assert t.steps.scores.shape == (1, target.shape[1] - 1, len(t.tokens))


# ------------------------------------------------------------------ the rows


def test_rows_have_the_positions_of_what_they_explain():
    t = trace()
    steps = t.steps
    assert steps.queries == list(range(N_PROMPT, len(TOKENS)))
    assert steps.tokens == t.tokens
    assert [steps.tokens[position] for position in steps.query_positions] == t.tokens[N_PROMPT:]
    visible = steps.visible()[0]
    for index in range(len(TOKENS) - N_PROMPT):
        assert visible[index].tolist() == [key < N_PROMPT + index for key in range(len(TOKENS))]
    assert steps.kind == "input"
    with torch.no_grad():
        logits = model_of()(TOKENS[None])[0].log_softmax(-1)
    for index, entry in enumerate(steps.explained):
        row = N_PROMPT - 1 + index
        assert entry.prediction == str(int(logits[row].argmax()))
        assert entry.probability == pytest.approx(logits[row].exp().max().item(), rel=1e-5)
        assert entry.value == pytest.approx(logits[row, TOKENS[row + 1]].item(), abs=1e-6)
        assert str(int(TOKENS[row + 1])) in entry.target
    assert "target" not in steps.parameters
    assert steps.top(2, query=N_PROMPT + 1)


def test_chunks_of_rows_change_nothing(monkeypatch):
    expected = trace().steps.scores
    monkeypatch.setattr("lens_mix.traces.attribution._TOKENS_AT_ONCE", 2 * len(TOKENS))
    torch.testing.assert_close(trace().steps.scores, expected, atol=1e-12, rtol=0)
    monkeypatch.setattr("lens_mix.traces.attribution._TOKENS_AT_ONCE", 1)
    torch.testing.assert_close(trace().steps.scores, expected, atol=1e-12, rtol=0)


def test_scores_are_computed_once(monkeypatch):
    t = trace()
    first, steps = t[1:3].scores, t.steps.scores
    monkeypatch.setattr(
        "lens_mix.traces.attribution.run", lambda *args, **options: pytest.fail("computed again")
    )
    other = t.by("word")
    assert torch.equal(other[1:3].scores, first)
    assert torch.equal(other.steps.scores, steps)
    other.through(), other.context_share(), t[:].top(), other[:].top()
    with pytest.raises(BaseException, match="computed again"):
        t[0:2].top()


# ------------------------------------------------------------------ through what was written


def paths(shares, n_prompt, hops):
    """Return the sums over all paths from each written token to the prompt, one path after the other."""
    count = len(shares)
    total = torch.zeros(count, n_prompt, dtype=torch.float64)
    for row in range(count):
        most = row if hops is None else min(hops, row)
        for length in range(most + 1):
            for between in itertools.combinations(range(row), length):
                stops = [row, *reversed(between)]
                weight = 1.0
                for later, earlier in itertools.pairwise(stops):
                    weight *= float(shares[later, n_prompt + earlier])
                total[row] += weight * shares[stops[-1], :n_prompt]
    return total


@pytest.mark.parametrize("hops", [0, 1, 2, None])
@pytest.mark.parametrize(
    "method", [None, "attention", lm.methods.InputGradients(score="times_input")], ids=str
)
def test_through_is_the_sum_over_all_paths(method, hops):
    t = trace(method)
    rows = t.steps.scores[0].double().abs()
    expected = paths(rows / rows.sum(-1, keepdim=True), N_PROMPT, hops)
    reached = t.through(hops)
    steps = reached.steps
    require_close(steps.scores[0], expected)
    assert not steps.scores[0][:, N_PROMPT:].any()
    if hops is None:
        torch.testing.assert_close(steps.scores[0].sum(-1), torch.ones(4, dtype=torch.float64))
    require_close(reached[START:STOP].scores, expected[START:STOP].sum(0))
    require_close(reached[0].scores, t.through(0)[0].scores[:N_PROMPT])
    # The trace itself is as before, and a second step starts from its rows.
    require_close(reached.through(1).steps.scores[0], t.through(1).steps.scores[0])
    assert t.hops is None
    assert reached.top(2)
    assert repr(reached)


def test_more_hops_than_written_tokens_are_all_paths():
    t = trace()
    require_close(t.through(99).steps.scores[0], t.through().steps.scores[0])
    require_close(t.through(3).steps.scores[0], t.through().steps.scores[0])


def test_rows_of_zeros_stay():
    rows = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 2.0, 0.0]])
    assert sum_paths(rows, 2, None).tolist() == [[0, 0, 0, 0], [0.25, 0.25, 0, 0]]


@pytest.mark.parametrize("hops", [-1, 1.5, "2", True])
def test_wrong_hops(hops):
    with pytest.raises((TypeError, ValueError), match="hops: expected"):
        trace().through(hops)


# ------------------------------------------------------------------ shares of kinds of text


def test_context_share_is_a_count_by_hand():
    model = reader(template=PLAIN)
    prompt = lm.Documents(
        {"report": "The company was founded in Oslo.\n\nTrains run.", "press": "Critics liked it."},
        "Where?",
        "Use the documents.",
    )
    t = lm.trace(model, prompt, answer="In Oslo.", method="attention")
    table = t.context_share()
    assert list(table.columns) == [
        "token",
        "probability",
        "template",
        "instruction",
        "document",
        "question",
        "written",
    ]
    assert list(table["token"]) == t.tokens[t.n_prompt :]
    assert list(table["probability"]) == pytest.approx(t.log_probabilities.exp().tolist())
    rows = t.steps.scores[0].abs()
    rows = rows / rows.sum(-1, keepdim=True)
    by_kind = {}
    for source in t.by("document").sources():
        by_kind[source.kind] = by_kind.get(source.kind, 0) + rows[:, list(source.positions)].sum(-1)
    for kind, expected in by_kind.items():
        assert list(table[kind]) == pytest.approx(expected.tolist()), kind
    kinds = list(table.columns[2:])
    assert table[kinds].sum(axis=1).tolist() == pytest.approx([1.0] * t.reading.n_written)
    assert table["written"][0] == 0
    through = t.through().context_share()
    assert through["written"].tolist() == pytest.approx([0.0] * t.reading.n_written)
    tokens = trace().context_share()
    assert list(tokens.columns) == ["token", "probability", "prompt", "written"]


def test_a_table_of_sentences_and_sources():
    t = lm.trace(reader(), "The company was founded in Oslo. Trains run.", answer=" Oslo has trains. Yes.")
    table = t.to_dataframe()
    assert list(table.columns) == [
        "span",
        "log_probability",
        "source",
        "kind",
        "name",
        "position",
        "score",
        "share",
        "loss",
    ]
    for span in t.spans:
        rows = table[table["span"] == span.text]
        listed = span.top(99, everything=True)
        assert list(rows["score"]) == pytest.approx([each.score for each in listed])
        assert list(rows["position"]) == [each.source.positions[0] for each in listed]
        assert rows["share"].sum() == pytest.approx(1)
        assert set(rows["log_probability"]) == {span.log_probability}


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "rolout"}, ValueError, "methods?: expected"),
        ({"method": 3}, TypeError, "methods?: expected"),
        ({"method": ["attention", "alti"]}, TypeError, "method: expected one method"),
        ({"method": []}, ValueError, "methods?: expected"),
        ({"method": int}, TypeError, "methods?: expected"),
        (
            {"method": lm.methods.Gim(lm.targets.token(3))},
            ValueError,
            "method: expected 'gim' without a target",
        ),
        (
            {"method": lm.methods.Occlusion(target="w7")},
            ValueError,
            "method: expected 'occlusion' without a target",
        ),
        (
            {"method": lm.methods.Occlusion(spans=[(0, 1), (2,)])},
            ValueError,
            "method: expected one whose keys are the 9 tokens",
        ),
        ({"aggregation": "mean"}, ValueError, "aggregation: expected None, because 'gim' makes a map of all"),
        ({"method": "decompx", "aggregation": "max"}, ValueError, "aggregation: expected None"),
        (
            {"method": "attention", "aggregation": "rolout"},
            ValueError,
            "aggregation: expected 'max' or a name",
        ),
        ({"method": "attention", "aggregation": 3}, TypeError, "aggregation: expected a name or a function"),
        (
            {"method": "attention", "aggregation": ["mean"]},
            TypeError,
            "aggregation: expected a name or a fun",
        ),
        ({"max_memory": 0}, ValueError, "max_memory: expected"),
        ({"max_memory": "1GB"}, TypeError, "max_memory: expected"),
        ({"language": 3}, TypeError, "language: expected the code of a language"),
        ({"language": "english"}, ValueError, "language: expected the code of a language"),
        ({"language": ""}, ValueError, "language: expected the code of a language"),
        ({"prepend_bos": True}, ValueError, "prepend_bos: expected None for tokens"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        trace(**options)


def test_many_passes_are_announced(monkeypatch):
    monkeypatch.setattr(effort, "_LONG", 0.0)
    long = torch.arange(3, 15)
    method = lm.methods.InputGradients(score="integrated", n_steps=20)
    given = {"answer": torch.tensor([9, 10]), "sources": "token", "method": method}
    with pytest.warns(UserWarning, match=r"input_gradients takes about .* as long as \d+ forward passes"):
        t = lm.trace(model_of(), long, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert t.steps.scores.shape == (1, 2, 14)
        silent = lm.trace(model_of(), long, **given, progress=None)
    assert torch.equal(silent[:].scores, t[:].scores)
    with pytest.raises(TypeError, match="progress: expected"):
        lm.trace(model_of(), long, **given, progress=3)


@pytest.mark.parametrize("max_memory", [200_000, 10**9])
def test_less_memory_gives_the_same_scores(max_memory):
    torch.testing.assert_close(
        trace(max_memory=max_memory)[:].scores, trace()[:].scores, atol=1e-10, rtol=1e-7
    )


def test_a_model_without_the_default_method_is_an_error(monkeypatch):
    assert trace().notes == ()

    def refuse(self, anatomy):
        return "it is not for this test"

    monkeypatch.setattr(lm.methods.Gim, "unsupported_block", refuse)
    with pytest.raises(lm.UnsupportedModelError, match="it is not for this test"):
        trace()


def test_a_mixture_has_the_default_too():
    """Check a model in which the feed-forward runs as a whole."""
    model = build_or_skip(bridge, "mixtral", torch.float64)
    t = trace(None, model)
    assert not t.notes
    expected = lm.run(
        model,
        TOKENS,
        lm.methods.Gim(lm.targets.span(N_PROMPT + START, N_PROMPT + STOP), readout="absolute"),
        queries=[-1],
    )
    require_close(t[START:STOP].scores, expected.scores[-1, 0, : N_PROMPT + STOP - 1])


def test_tokens_of_words(model):
    t = lm.trace(model, "w3 w4 w5", answer=" w6 w7", sources="token")
    assert t.tokens == ["<bos>", "w3", "w4", "w5", "w6", "w7"]
    assert t["w6"].positions == range(4, 5)
    # This tokenizer has no tokens for spaces.
    assert t.text == "w6 w7"
    assert toy_tokenizer().is_fast
