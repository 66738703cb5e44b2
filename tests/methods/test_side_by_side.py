"""Test passes that run copies beside their prompt against one whole pass per copy."""

import pytest
import torch

import lens_mix as lm
from lens_mix.hooks import zero_values
from lens_mix.lens.layout import Layout
from lens_mix.lens.prefix_keys import PrefixKeys
from lens_mix.methods import occlusion, side_by_side
from lens_mix.methods.side_by_side import SideBySide
from tests.matrix import build_or_skip, cases, prompt_of
from tests.methods.passes import SHARED
from tests.tiny_models import bridge, hooked_transformer

REPLACEMENTS = [5, 11]


def in_whole_passes(monkeypatch, *args, **options):
    """Return the maps of one whole pass for each copy, which is the definition."""
    with monkeypatch.context() as patched:
        patched.setattr(occlusion, "rows_beside_copies", lambda bound: [])
        return lm.run(*args, progress=None, **options)


@pytest.fixture(params=["beside the prompt", "in rows"])
def passes(request, monkeypatch):
    """Return where copies run: all in the pass of the prompt, or most in later passes of rows."""
    if request.param == "in rows":
        monkeypatch.setitem(side_by_side._MOST_TOKENS, "cpu", 16)
    return request.param


def test_layout_by_hand():
    rerun = torch.tensor([[False, True, True], [True, False, True]])
    layout = Layout.of(rerun)
    assert layout.positions.tolist() == [[0, 1, 2, 1, 2, 0, 2]]
    assert layout.index.tolist() == [[0, 3, 4], [5, 1, 6]]
    seen = [row.nonzero()[:, 0].tolist() for row in layout.allowed[0]]
    assert seen[:3] == [[0], [0, 1], [0, 1, 2]]
    # The first copy is run again from position 1 on. The last token of the second sees the clean token 1.
    assert seen[3:] == [[0, 3], [0, 3, 4], [5], [1, 5, 6]]
    filled = layout.fill(torch.tensor([7, 8, 9]), torch.tensor([[7, 1, 9], [2, 8, 9]]))
    assert filled.tolist() == [[7, 8, 9, 1, 9, 2, 9]]


def test_layout_of_a_later_pass_by_hand():
    rerun = torch.tensor([[False, True, True], [True, False, True], [False, False, True]])
    layout = Layout.of(rerun, [[0], [1]])
    assert layout.positions.tolist() == [[1, 2, 2], [0, 2, 0]]
    assert layout.index[rerun].tolist() == [0, 1, 3, 4, 2]
    # The first three keys are the prompt's.
    seen = [[key.nonzero()[:, 0].tolist() for key in row] for row in layout.allowed]
    assert seen[0] == [[0, 3], [0, 3, 4], [0, 1, 5]]
    assert seen[1][:2] == [[3], [1, 3, 4]]
    filled = layout.fill(torch.tensor([7, 8, 9]), torch.tensor([[7, 1, 9], [2, 8, 9], [7, 8, 5]]))
    assert filled[0].tolist() == [1, 9, 5]
    assert filled[1, :2].tolist() == [2, 9]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", cases(refused=False), ids=lambda case: case.label)
def test_equals_whole_passes(case, passes, monkeypatch):
    model = case.build(torch.float64)
    prompt = prompt_of(model)
    for measure in ("difference", "kl"):
        method = lm.Occlusion(replacements=REPLACEMENTS, measure=measure)
        try:
            expected = in_whole_passes(monkeypatch, model, prompt, method, part=case.part).scores
        except lm.UnsupportedModelError:
            return
        found = lm.run(model, prompt, method, part=case.part, progress=None).scores
        # Hugging Face's RMSNorms and softmaxes are float32 in any dtype.
        torch.testing.assert_close(found, expected, atol=1e-10 if "gpt2" in case.label else 1e-6, rtol=0)


def separate_passes(model, prompt):
    """Return the definition, by plain calls of the model: one pass for each token and replacement."""
    scores = torch.zeros(len(prompt), dtype=torch.float64)
    with torch.no_grad():
        clean = model(prompt[None])[0, -1].log_softmax(-1)
        for position in range(len(prompt)):
            for token in REPLACEMENTS:
                copy = prompt.clone()
                copy[position] = token + int(prompt[position] == token)
                changed = model(copy[None])[0, -1].log_softmax(-1)
                scores[position] += (changed - clean)[clean.argmax()].abs() / len(REPLACEMENTS)
    return scores


def widen_softmax(monkeypatch):
    """Let transformers compute softmax in the dtype of the model, instead of float32 in any dtype."""
    softmax = torch.nn.functional.softmax

    def wide(scores, *args, dtype=None, **options):
        return softmax(scores, *args, dtype=scores.dtype, **options)

    monkeypatch.setattr(torch.nn.functional, "softmax", wide)


@pytest.mark.parametrize("name", [*SHARED, "phi3", "falcon_mqa", "gpt_bigcode"])
def test_measured_scores_equal_separate_passes_of_the_model(name, passes, monkeypatch):
    model, prompt = build_or_skip(bridge, name, torch.float64), torch.arange(3, 15)
    # The model is built first, because torch compiles some models' functions when they are imported.
    widen_softmax(monkeypatch)
    expected = separate_passes(model, prompt)
    assert float(expected.min()) > 1e-5
    measured = lm.AttributionPatching(replacements=REPLACEMENTS, n_measured="auto")
    replaced = lm.Occlusion(replacements=REPLACEMENTS, measure="absolute")
    for method in (measured, replaced):
        found = lm.run(model, prompt, method, queries=[-1], progress=None)
        torch.testing.assert_close(found.scores[0, 0], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["LN", "RMSPre", "grouped"])
def test_replacement_equals_separate_passes_of_a_hooked_transformer(name):
    """It takes no positions, so each copy has a pass of its own."""
    model, prompt = build_or_skip(hooked_transformer, name, torch.float64), torch.arange(3, 15)
    method = lm.Occlusion(replacements=REPLACEMENTS, measure="absolute")
    found = lm.run(model, prompt, method, queries=[-1], progress=None)
    torch.testing.assert_close(found.scores[0, 0], separate_passes(model, prompt), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", SHARED)
def test_copies_are_run_from_the_replaced_token_on(name, passes, count_tokens, monkeypatch):
    model = build_or_skip(bridge, name)
    prompt, method = torch.arange(3, 15), lm.Occlusion(replacements=REPLACEMENTS, measure="absolute")
    lm.run(model, prompt, "attention")
    count_tokens()
    expected = in_whole_passes(monkeypatch, model, prompt, method)
    whole = count_tokens()
    found = lm.run(model, prompt, method, progress=None)
    # The clean pass, twice the suffixes, the prompt beside them, and the control.
    needed = whole - 2 * 12 * 12 + 12 * 13 + 12 + 1
    if passes == "beside the prompt":
        assert count_tokens() == needed
    else:
        # Rows of one place more than the prompt leave few places.
        assert needed < count_tokens() <= needed + 13
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=0)
    assert float(found.scores.max()) > 1e-3


@pytest.mark.parametrize("options", [{}, {"spans": [(4, 2), (6,)]}, {"measure": "kl"}, {"n_samples": 3}])
def test_options_rows_batches_and_memory(options, passes, monkeypatch):
    model = build_or_skip(bridge, "gpt2", torch.float64)
    method = lm.Occlusion(**options)
    prompts = [prompt_of(model, length, length) for length in (9, 7)]
    for prompt, found in zip(prompts, lm.run_many(model, prompts, method, progress=None), strict=True):
        expected = in_whole_passes(monkeypatch, model, prompt, method).scores
        torch.testing.assert_close(found.scores, expected, atol=1e-10, rtol=0)
        for bytes_ in (1_000_000, 300_000):
            some = lm.run(model, prompt, method, queries=[2, -1], max_memory=bytes_, progress=None).scores
            torch.testing.assert_close(some[0], expected[0, [2, -1]], atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_whole_passes_where_none_can_be_shared(name, passes, count_tokens, monkeypatch):
    """A short sliding window hides tokens from copies, and a user hook on a position misses them."""
    model, method = build_or_skip(bridge, name, torch.float64), lm.Occlusion(replacements=REPLACEMENTS)
    prompt = torch.arange(3, 12)
    hooks = [zero_values(0, 2)] if name == "gpt2" else []
    with model.hooks(fwd_hooks=hooks):
        expected = in_whole_passes(monkeypatch, model, prompt, method).scores
        whole = count_tokens()
        found = lm.run(model, prompt, method, progress=None).scores
    assert count_tokens() > whole
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_tokens_that_see_more_than_they_may_are_found(passes, monkeypatch):
    layout_of = Layout.of

    def leaking(rerun, rows=None):
        layout = layout_of(rerun, rows)
        leaks_here = (rows is None) == (passes == "beside the prompt")
        control = divmod(int(layout.index[-1, -1]), layout.positions.shape[1])
        if leaks_here:
            layout.allowed[control[0], control[1]] = True  # The control sees a copy.
        return layout

    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 12)
    monkeypatch.setattr(Layout, "of", leaking)
    method = lm.AttributionPatching(replacements=REPLACEMENTS, n_measured="auto")
    if passes == "beside the prompt":
        # The keys of the clean pass would make all passes later ones.
        monkeypatch.setattr(SideBySide, "_has_keys", False)
        with pytest.raises(
            lm.UnsupportedModelError, match="attention to read only tokens and their positions"
        ):
            lm.run(model, prompt, method, queries=[-1])
    else:
        # The copies then run beside the prompt.
        found = lm.run(model, prompt, method, queries=[-1]).scores
        monkeypatch.undo()
        expected = lm.run(model, prompt, method, queries=[-1]).scores
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["openai_gpt", "llama"])
def test_copies_run_beside_the_prompt_if_attention_does_not_read_its_keys(name, monkeypatch):
    model, prompt = build_or_skip(bridge, name, torch.float64), torch.arange(3, 15)
    # openai_gpt has no cache of keys; another model may ignore what it is given.
    monkeypatch.setattr(PrefixKeys, "update", lambda self, keys, values, *args, **kwargs: (keys, values))
    monkeypatch.setitem(side_by_side._MOST_TOKENS, "cpu", 16)
    method = lm.AttributionPatching(replacements=REPLACEMENTS, n_measured="auto")
    found = lm.run(model, prompt, method, queries=[-1], progress=None).scores[0, 0]
    widen_softmax(monkeypatch)
    torch.testing.assert_close(found, separate_passes(model, prompt), atol=1e-6, rtol=0)


def test_the_explained_token_is_that_of_the_clean_pass():
    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 12)
    answer = int(model(prompt[None])[0, -1].argmax())
    named = lm.targets.predicted(of="log_probability")
    maps = [
        lm.run(model, prompt, lm.Occlusion(target, replacements=REPLACEMENTS), queries=[-1], progress=None)
        for target in (named, lm.targets.token(answer, of="log_probability"))
    ]
    torch.testing.assert_close(maps[0].scores, maps[1].scores, atol=1e-12, rtol=0)
