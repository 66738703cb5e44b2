"""Test that a batch with a common prefix, run in one row, has the maps of the batch that runs as it is."""

import pytest
import torch

import lens_mix as lm
from lens_mix import session
from lens_mix.lens.batches import Prompt, pad
from lens_mix.lens.model import Lens
from lens_mix.lens.prompts import pad_token
from lens_mix.lens.shared_prefix import lay_out
from tests.matrix import build_or_skip
from tests.methods.test_side_by_side import widen_softmax
from tests.tiny_models import bridge, hooked_transformer

METHODS = ["attention", "attn_res_ln", "alti", "value_zeroing", "value_norm"]
PREFIX, COUNTS = 10, (2, 2, 1, 3, 2, 0)


def make_prompts(prefix=PREFIX, counts=COUNTS):
    draw = torch.Generator().manual_seed(0)
    return [
        torch.cat([torch.arange(3, 3 + prefix), torch.randint(3, 40, (count,), generator=draw)])
        for count in counts
    ]


@pytest.fixture
def tokens_run(monkeypatch):
    """Return the list of the numbers of tokens of each pass."""
    counts, forward = [], Lens.forward

    def counting(lens, batch, **options):
        counts.append(batch.tokens.numel())
        return forward(lens, batch, **options)

    monkeypatch.setattr(Lens, "forward", counting)
    return counts


def run_both(monkeypatch, tokens_run, model, prompts, methods, **options):
    """Return the maps of a batch that shares its prefix, those of one that does not, and the tokens run."""
    with monkeypatch.context() as patched:
        patched.setattr(session, "lay_out", lambda lens, batch: None)
        expected = list(lm.run_many(model, prompts, methods, progress=None, **options))
    tokens_run.clear()
    return list(lm.run_many(model, prompts, methods, progress=None, **options)), expected, sum(tokens_run)


def assert_same(found, expected, atol=1e-10):
    for ours, theirs in zip(found, expected, strict=True):
        for name, one in ours.items():
            other = theirs[name]
            torch.testing.assert_close(one.scores, other.scores, atol=atol, rtol=0)
            assert (one.tokens, one.causal, one.queries) == (other.tokens, other.causal, other.queries)
            assert (one.notes, one.default_query) == (other.notes, other.default_query)
            if one.residual_shares is not None:
                torch.testing.assert_close(one.residual_shares, other.residual_shares, atol=atol, rtol=0)
            assert (one.mask is None) == (other.mask is None)
            for mine, its in zip(one.explained, other.explained, strict=True):
                assert mine.prediction == its.prediction
                assert mine.probability == pytest.approx(its.probability, abs=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"residual_shares": True},
        {"queries": [-1]},
        {"queries": [0, -2]},
        {"layers": [1]},
        {"max_memory": 10**6},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "gemma", "falcon_mqa", "phi"])
def test_equals_the_batch_as_it_is(name, options, tokens_run, monkeypatch):
    model, prompts = build_or_skip(bridge, name, torch.float64), make_prompts()
    widen_softmax(monkeypatch)
    # The norms of these models are made float64, which counts as hooks of the user.
    monkeypatch.setattr(session, "has_user_hooks", lambda modules: False)
    found, expected, count = run_both(monkeypatch, tokens_run, model, prompts, METHODS, **options)
    # The longest prompt, what follows the prefix in each prompt, and the longest prompt alone.
    longest = PREFIX + max(COUNTS)
    assert count == longest + sum(COUNTS) + longest
    assert_same(found, expected)


def test_leaves_the_hooks_of_the_model(tokens_run):
    model, prompts = build_or_skip(bridge, "gpt2"), make_prompts()

    def hooks():
        return [
            dict(hooks)
            for module in model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    list(lm.run_many(model, prompts, METHODS, progress=None))
    before = hooks()
    list(lm.run_many(model, prompts, METHODS, progress=None))
    assert hooks() == before


def plain(name="gpt2", build=bridge):
    return build_or_skip(build, name, torch.float64)


def with_hook():
    model = plain()
    model.hook_dict["blocks.0.hook_resid_post"].add_hook(lambda tensor, hook: tensor * 1.5)
    return model


@pytest.mark.parametrize(
    ("make_model", "prompts", "methods", "options"),
    [
        (plain, make_prompts(4, (5, 5, 4)), METHODS, {}),
        (plain, make_prompts(), METHODS, {"padding_side": "left"}),
        (plain, make_prompts(), [*METHODS, "gradient_attention"], {}),
        (plain, make_prompts(), ["value_zeroing"], {"engine": "hooks"}),
        (with_hook, make_prompts(), ["attention"], {}),
        (lambda: plain("LN", hooked_transformer), make_prompts(), METHODS, {}),
        (lambda: plain("bloom"), make_prompts(), METHODS, {}),
    ],
    ids=["short prefix", "left padding", "gradients", "replays", "user hook", "HookedTransformer", "ALiBi"],
)
def test_runs_the_batch_as_it_is(make_model, prompts, methods, options, monkeypatch):
    model, started = make_model(), []
    monkeypatch.setattr(session, "clean_pass_in_row", lambda *args, **kwargs: started.append(args))
    found = list(lm.run_many(model, prompts, methods, progress=None, **options))
    assert len(found) == len(prompts)
    assert not started


@pytest.fixture
def rows_used(monkeypatch):
    """Return a list that gets, for each batch that may share its prefix, whether it does."""
    used, run = [], session.clean_pass_in_row

    def spy(*args, **options):
        used.append(False)
        clean = run(*args, **options)
        used[-1] = True
        return clean

    monkeypatch.setattr(session, "clean_pass_in_row", spy)
    return used


NEO = {"window_size": 20, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("name", "config", "prefix", "counts"),
    [
        ("mistral", {}, PREFIX, COUNTS),
        ("gemma2", {}, PREFIX, COUNTS),
        ("gpt_neo", NEO, 14, (2,) * 8),
        ("gpt_neo", {**NEO, "num_layers": 4, "attention_types": [[["global", "local"], 2]]}, 14, (2,) * 8),
    ],
)
def test_a_window_is_detected(name, config, prefix, counts, tokens_run, rows_used, monkeypatch):
    """transformers does not apply a sliding window to a mask that it is given.

    GPT-Neo's window counts places of the row: it is longer than a prompt, and shorter than the row.
    """
    model, prompts = build_or_skip(bridge, name, torch.float64, **config), make_prompts(prefix, counts)
    monkeypatch.setattr(session, "has_user_hooks", lambda modules: False)
    twice = [*prompts, *prompts]
    found, expected, _ = run_both(monkeypatch, tokens_run, model, twice, METHODS, batch_size=len(prompts))
    assert rows_used == [False, False]
    assert_same(found, expected)


@pytest.mark.parametrize("layers", [None, [0]])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_weights_that_underflow_to_zero_are_not_a_mask(name, layers, tokens_run, rows_used, monkeypatch):
    model, prompts = build_or_skip(bridge, name, torch.float32), make_prompts()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30)
    found, expected, _ = run_both(monkeypatch, tokens_run, model, prompts, ["attention"], layers=layers)
    assert any(bool((m["attention"].scores[0].tril() == 0).tril().any()) for m in expected)
    assert_same(found, expected)
    assert [m["attention"].causal for m in found] == [True] * len(prompts)


def test_an_error_of_a_method_is_raised(tokens_run, monkeypatch):
    model, prompts = build_or_skip(bridge, "gpt2"), make_prompts()

    def fail(self, block):
        raise KeyError("mine")

    monkeypatch.setattr(lm.AttentionWeights, "__call__", fail)
    with pytest.raises(KeyError, match="mine"):
        list(lm.run_many(model, prompts, "attention", progress=None))


def test_the_row_has_no_more_pairs_than_the_batch():
    lens = Lens(build_or_skip(bridge, "gpt2"), None)

    def share(prefix, counts):
        prompts = [Prompt(tokens) for tokens in make_prompts(prefix, counts)]
        return lay_out(lens, pad(prompts, pad_token(lens.model), "right"))

    assert share(12, (2,) * 8) is not None
    # One prompt, and two, would run as many tokens as before.
    assert share(12, (2,)) is None
    assert share(12, (0, 1)) is None
    # 12 + 8 * 9 tokens have more pairs than 8 times 21 tokens have.
    assert share(12, (9,) * 8) is None
    assert share(0, (9,) * 8) is None
