"""Test that a pass with fused attention gives what one with eager attention does, and when it is made."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import pytest
import torch

import lens_mix as lm
from lens_mix import session
from lens_mix._model.model import Lens
from lens_mix._passes import autograd_graph, fused_attention
from lens_mix._passes.copies import total_memory
from lens_mix.runner import plan
from tests.matrix import cases, prompt_of
from tests.tiny_models import available, bridge

if not available(bridge, "llama"):
    pytest.skip("no TransformerBridge in this TransformerLens", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")
METHODS = {
    **{name: name for name in ("attention", "value_norm", "attn_res", "attn_res_ln", "globenc", "alti")},
    "value_zeroing": "value_zeroing",
    "gim": lm.methods.Gim(),
    "streams": lm.methods.Gim(after_blocks=1, readout="absolute"),
    "input_gradients": lm.methods.InputGradients(),
    "frozen_gradients": lm.methods.FrozenGradients(),
    "gradient_attention": lm.methods.GradientAttention(),
    "heads": lm.methods.GradientAttention(per_head=True, rectify=False),
}
# transformers does not compute the attention of these through its attention functions.
EAGER = ("gpt_neo", "bloom", "mpt", "falcon_mqa")
TOKENS = torch.tensor([5, 9, 14, 3, 22, 31, 8, 41, 17, 26, 11, 7, 35, 29])


def both(monkeypatch, model, prompt, method, **options):
    """Return the maps with eager and with fused attention, and whether the second is fused."""
    monkeypatch.setattr(session, "_LEAST_FUSED", 10**9)
    eager = lm.run(model, prompt, method, **options)
    monkeypatch.setattr(session, "_LEAST_FUSED", 1)
    is_fused = plan(model, prompt, method, **options).is_fused
    return eager, lm.run(model, prompt, method, **options), is_fused


def assert_equal(eager, fused, bound=4e-6):
    torch.testing.assert_close(
        fused.scores, eager.scores, rtol=0, atol=bound * float(eager.scores.abs().max())
    )
    assert (fused.mask is None) == (eager.mask is None)
    assert fused.mask is None or fused.mask.equal(eager.mask)
    assert fused.causal == eager.causal


@pytest.mark.parametrize("case", cases(refused=False), ids=lambda case: case.label)
def test_fused_attention_gives_the_maps_of_eager_attention(monkeypatch, case):
    if case.wrong_logits or case.part is not None or not case.label.startswith("bridge "):
        pytest.skip("not a TransformerBridge of one stack")
    model, name = case.build(torch.float32), case.label.removeprefix("bridge ")
    for label, method in METHODS.items():
        try:
            eager, fused, is_fused = both(monkeypatch, model, prompt_of(model), method, queries=[-1, 2])
        except lm.UnsupportedModelError:
            continue
        assert_equal(eager, fused)
        # Value Zeroing replays blocks whose feed-forward has no formula.
        replays = label == "value_zeroing" and eager.provenance["engine"] == "hooks"
        assert is_fused == (name not in EAGER and not replays)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
@pytest.mark.parametrize("label", METHODS)
def test_in_float64_they_differ_by_rounding(monkeypatch, name, label):
    eager, fused, is_fused = both(monkeypatch, bridge(name).double(), TOKENS, METHODS[label], queries=[-1, 3])
    assert is_fused
    assert_equal(eager, fused, 1e-10)


# Windows of four tokens, softcaps, sinks, norms on queries and keys.
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("label", METHODS)
def test_windows_are_those_of_the_model(monkeypatch, name, label):
    if not available(bridge, name):
        pytest.skip("not in this release")
    # Some rows at a time see fewer keys than there are.
    monkeypatch.setattr(fused_attention, "_ROWS_AT_ONCE", 3)
    eager, fused, is_fused = both(monkeypatch, bridge(name), TOKENS, METHODS[label], queries=[-1, 9])
    assert is_fused or label == "value_zeroing"
    assert_equal(eager, fused)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("queries", [None, [-1]])
def test_all_rows_and_several_kinds_of_methods(monkeypatch, name, queries):
    if not available(bridge, name):
        pytest.skip("not in this release")
    monkeypatch.setattr(fused_attention, "_ROWS_AT_ONCE", 3)
    model = bridge(name)
    for label, method in METHODS.items():
        eager, fused, is_fused = both(monkeypatch, model, TOKENS, method, queries=queries)
        assert is_fused or label == "value_zeroing"
        assert_equal(eager, fused)
    several = ["gim", "attention", "alti"]
    eager, fused, is_fused = both(monkeypatch, model, TOKENS, several, queries=queries)
    assert is_fused
    for each in several:
        assert_equal(eager[each], fused[each])


@pytest.mark.parametrize("kept", [0, 1 << 30])
def test_gradients_of_blocks_that_are_run_again(monkeypatch, kept):
    monkeypatch.setattr(autograd_graph, "_MOST_KEPT", kept)
    model = bridge("gpt2").double()
    every = list(range(2, len(TOKENS)))
    for method in (METHODS["gim"], METHODS["streams"], METHODS["frozen_gradients"], METHODS["heads"]):
        for queries in ([-1], every):
            eager, fused, is_fused = both(monkeypatch, model, TOKENS, method, queries=queries)
            assert is_fused
            assert_equal(eager, fused, 1e-10)


def test_a_trace_is_that_of_eager_attention(monkeypatch):
    model, found = bridge("llama"), []
    for least in (10**9, 1):
        monkeypatch.setattr(session, "_LEAST_FUSED", least)
        found.append(lm.trace(model, TOKENS[:9], answer=TOKENS[9:], sources="token"))
    eager, fused = found
    torch.testing.assert_close(fused[:].scores, eager[:].scores, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(fused[1:3].scores, eager[1:3].scores, rtol=1e-4, atol=1e-6)
    shares = [each.context_share().select_dtypes("number") for each in found]
    assert shares[0].shape == (5, 3)
    assert (shares[0] - shares[1]).abs().to_numpy().max() < 1e-5


def test_prompts_of_one_length_are_a_batch(monkeypatch):
    model, prompts = bridge("llama"), [TOKENS[:7], TOKENS[7:]]
    monkeypatch.setattr(session, "_LEAST_FUSED", 10**9)
    eager = lm.run_many(model, prompts, "alti", queries=[-1])
    monkeypatch.setattr(session, "_LEAST_FUSED", 1)
    for one, other in zip(eager, lm.run_many(model, prompts, "alti", queries=[-1]), strict=True):
        assert_equal(one, other)


def test_a_corpus_of_long_prompts_has_fused_attention(monkeypatch, tmp_path):
    from lens_mix.corpus import work

    model, prompts = bridge("llama"), [TOKENS[:9].tolist(), TOKENS[2:].tolist()]
    monkeypatch.setattr(session, "_LEAST_FUSED", 10**9)
    eager = [lm.run(model, torch.tensor(each), "alti", queries=[-1]) for each in prompts]
    monkeypatch.setattr(session, "_LEAST_FUSED", 1)
    # A batch of long prompts does not fit, and has one prompt.
    monkeypatch.setattr(work, "_BATCH_BYTES", 1)
    made = []
    own = fused_attention.FusedAttention._read
    monkeypatch.setattr(
        fused_attention.FusedAttention, "_read", lambda *given: (made.append(given[1]), own(*given))[1]
    )
    lm.corpus.run(lambda: model, prompts, "alti", out=tmp_path, queries=[-1])
    assert made[-2 * model.cfg.n_layers :] == [*range(model.cfg.n_layers)] * 2
    found = lm.corpus.maps(tmp_path)
    for alone, (_, _, stored) in zip(eager, found, strict=True):
        torch.testing.assert_close(stored.scores, alone.scores, atol=1e-5, rtol=0)


def test_the_plan_says_so_and_why_it_is_eager(monkeypatch):
    monkeypatch.setattr(session, "_LEAST_FUSED", len(TOKENS))
    model = bridge("llama")

    def line(method="attention", prompt=TOKENS, **options):
        return str(plan(model, prompt, method, **options)).splitlines()[1].strip()

    assert line(queries=[-1]) == "attention fused, the weights beside it"
    assert line(queries=[-1], engine="hooks", method="value_zeroing") == "attention eager"
    # A short prompt, a method that needs the whole pattern.
    assert line() == line(queries=[-1])
    assert line(queries=[-1], prompt=TOKENS[:-1]) == "attention eager"
    assert line(queries=[-1], method=lm.methods.TokenPatching()) == "attention eager"
    with model.hooks([("blocks.0.attn.hook_pattern", lambda pattern, hook: pattern)]):
        assert line(queries=[-1]) == "attention eager"


def test_a_row_that_is_not_what_the_kernel_mixed_makes_the_pass_eager(monkeypatch):
    model = bridge("llama")
    eager, _, is_fused = both(monkeypatch, model, TOKENS, "attention", queries=[-1])
    assert is_fused
    own = fused_attention._Attention.pattern
    monkeypatch.setattr(fused_attention._Attention, "pattern", lambda self, rows: own(self, rows).roll(1, -1))
    assert_equal(eager, lm.run(model, TOKENS, "attention", queries=[-1]), 1e-7)


@pytest.mark.parametrize("name", ["rows", "windows", "gradients"])
def test_a_kernel_with_other_outputs_is_found_by_the_verification(monkeypatch, name):
    from transformers.integrations import sdpa_attention

    own = sdpa_attention.sdpa_attention_forward

    def wrong(*args, **options):
        mixed, weights = own(*args, **options)
        return mixed * 1.01, weights

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", wrong)
    monkeypatch.setattr(session, "_LEAST_FUSED", 1)
    model = bridge("mistral")
    method = lm.methods.Gim() if name == "gradients" else "attention"
    found = plan(model, TOKENS, method, queries=[-1])
    assert not found.is_fused
    assert found.verification.fused_failures[name] is not None


def test_a_kernel_with_other_gradients_is_found_by_the_verification(monkeypatch):
    from transformers.integrations import sdpa_attention

    own = sdpa_attention.sdpa_attention_forward

    def wrong(*args, **options):
        mixed, weights = own(*args, **options)
        return mixed + (mixed - mixed.detach()), weights

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", wrong)
    monkeypatch.setattr(session, "_LEAST_FUSED", 1)
    found = plan(bridge("llama"), TOKENS, lm.methods.GradientAttention(), queries=[-1])
    assert not found.is_fused
    assert "gradient with fused attention differs" in found.verification.fused_failures["gradients"]


def settings(model):
    attention = [block.attn for block in model.blocks]
    return [
        (vars(each).get("forward"), each.original_component.config._attn_implementation) for each in attention
    ]


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_model_is_afterwards_as_before(monkeypatch, error):
    monkeypatch.setattr(session, "_LEAST_FUSED", 1)
    model = bridge("llama")
    before = settings(model)
    lm.run(model, TOKENS, "attention", queries=[-1])
    if error is not None:
        seen = []

        def fail(self, rows):
            seen.append(self)
            raise error("in the middle")

        monkeypatch.setattr(fused_attention._Attention, "pattern", fail)
        with pytest.raises((error, lm.UnsupportedModelError)):
            lm.run(model, TOKENS, "attention", queries=[-1])
        assert seen
    assert settings(model) == before
    assert not fused_attention._active


def test_which_keys_are_reached_is_the_product_of_the_masks():
    from lens_mix._passes.masks import AllowedKeys

    draw = torch.Generator().manual_seed(0)
    causal = torch.rand(1, 6, 6, generator=draw).gt(0.5).tril()
    whole, free = torch.ones(1, 6, 6, dtype=torch.bool), torch.rand(1, 6, 6, generator=draw).gt(0.7)
    some_masks = (
        [causal, whole.tril(), causal],
        [causal, causal.roll(1, -2).tril()],
        [free, whole, free],
        [free] * 3,
    )
    for masks in some_masks:
        allowed = AllowedKeys(dict(enumerate(masks)), torch.arange(6)[None], True, 0.0)
        expected = torch.eye(6)[None]
        for layer, mask in enumerate(masks):
            expected = ((mask.float() + torch.eye(6)) @ expected > 0).float()
            assert allowed.reaching().by_layer[layer].equal(expected > 0)


def test_the_support_says_which_attention_long_prompts_have():
    assert str(lm.support(bridge("llama"))).splitlines()[-1].endswith("  fused attention")
    if available(bridge, "bloom"):
        line = lm.support(bridge("bloom")).long_prompts
        assert line.startswith("eager attention (attention: expected a module of transformers")


class WithoutHooks(lm.methods.Gim):
    """A subclass, whose hooks are not those of its inherited rule of attention."""

    name = "without_hooks"

    def interventions(self, layer, *, attention="blocks.{layer}.attn"):
        return []


def test_a_subclass_and_hooks_on_gradients_have_eager_attention(monkeypatch):
    model = bridge("llama")
    eager, other, is_fused = both(monkeypatch, model, TOKENS, WithoutHooks(), queries=[-1])
    assert not is_fused
    assert_equal(eager, other, 1e-7)
    assert both(monkeypatch, model, TOKENS, "input_gradients", queries=[-1])[2]
    model.add_hook("blocks.0.attn.hook_pattern", lambda gradient, hook: gradient * 0, dir="bwd")
    try:
        eager, other, is_fused = both(monkeypatch, model, TOKENS, "input_gradients", queries=[-1])
    finally:
        model.reset_hooks()
    assert not is_fused
    assert_equal(eager, other, 1e-7)
    assert both(monkeypatch, model, TOKENS, "input_gradients", queries=[-1])[2]


@dataclasses.dataclass(frozen=True)
class FromInputs(lm.Method):
    """A method of a user, which reads the input of the model, or runs a block."""

    name, residual, engines, records = "from_inputs", 0.5, ("recorded",), frozenset({"pattern"})
    what: str = "inputs"

    def __call__(self, block):
        if self.what == "replay":
            block.replay([])
        if self.what == "below" and block.layer == 2:
            assert block.clean.calls[1].resid_pre is not None
        return block.recorded("pattern").mean(1) * block.inputs.norm(dim=-1)[:, None]


def test_a_method_of_the_user_reads_inputs_and_runs_no_block(monkeypatch):
    eager, fused, is_fused = both(monkeypatch, bridge("llama"), TOKENS, FromInputs(), queries=[-1])
    assert is_fused
    assert_equal(eager, fused)
    with pytest.raises(ValueError, match="engines = "):
        lm.run(bridge("llama"), TOKENS, FromInputs("replay"), queries=[-1])
    with pytest.raises(ValueError, match="reads = 'below'"):
        lm.run(bridge("llama", num_hidden_layers=3), TOKENS, FromInputs("below"), queries=[-1])


def least_bytes(model, method, prompts=1, with_maps=True, **options):
    """Return what a plan needs at least, for prompts of the same tokens."""
    made = session.Session(model, {"a": method}, **options)
    return made.plan_prompts([made.read(TOKENS)] * prompts).least_bytes(with_maps=with_maps)


def test_the_least_memory_is_that_of_the_maps_and_of_one_recorded_pattern(monkeypatch):
    monkeypatch.setattr(session, "_LEAST_FUSED", 1)
    model = bridge("llama")
    count, heads, layers = len(TOKENS), model.cfg.n_heads, model.cfg.n_layers
    attention, per_head = lm.methods.AttentionWeights(), lm.methods.AttentionWeights(per_head=True)
    row = count * 4
    assert least_bytes(model, attention, queries=[-1]) == (heads + layers) * row
    assert least_bytes(model, attention) == (heads + layers) * count * row
    assert least_bytes(model, attention, 3) == 3 * (heads + layers) * count * row
    assert least_bytes(model, attention, layers=[1]) == (heads + 1) * count * row
    assert least_bytes(model, per_head, queries=[-1, 2]) == (heads + layers * heads) * 2 * row
    assert least_bytes(model, attention, with_maps=False) == heads * count * row
    # No pattern is recorded for a gradient, and an input map is one map.
    assert least_bytes(model, lm.methods.Gim(), queries=[-1]) == row
    # Groups of keys are fewer than tokens, and eager attention has all rows.
    assert least_bytes(model, lm.methods.Occlusion(spans=[[0, 1]]), queries=[-1]) == heads * count * row
    half = least_bytes(bridge("llama").to(torch.bfloat16), attention)
    assert half == (heads + layers) * count * row / 2


@pytest.mark.parametrize(
    ("queries", "prompts", "advice"),
    [
        (None, 1, r"ask for some rows \(queries=\[-1\]\)"),
        ([-1], 1, "run the methods one by one"),
        (None, 2, "run fewer prompts at once"),
    ],
)
def test_maps_that_cannot_fit_in_memory_are_refused_before_the_pass(monkeypatch, queries, prompts, advice):
    model = bridge("llama")
    needed = least_bytes(model, lm.methods.AttentionWeights(), prompts, queries=queries)
    given = [TOKENS] * prompts
    monkeypatch.setattr(session, "total_memory", lambda lens: needed)
    list(lm.run_many(model, given, "attention", queries=queries))
    monkeypatch.setattr(session, "total_memory", lambda lens: needed - 1)
    monkeypatch.setattr(session, "clean_pass", lambda *args, **options: pytest.fail("a pass was made"))
    with pytest.raises(
        ValueError, match=f"expected maps that fit .* got {prompts} of 14 positions.* {advice}"
    ):
        list(lm.run_many(model, given, "attention", queries=queries))


def test_the_memory_of_a_machine_is_known():
    model = bridge("llama")
    found = total_memory(Lens(model))
    if sys.platform == "linux":
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        kilobytes = next(line.split()[1] for line in lines if line.startswith("MemTotal"))
        assert found == pytest.approx(1024 * int(kilobytes), rel=0.2)
    assert found is None or found > 1 << 28
