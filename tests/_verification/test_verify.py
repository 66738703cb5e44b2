"""The verification finds the anatomy of every kind of block, and fails for models that differ from it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import lens_mix as lm
from lens_mix import session
from lens_mix._blocks import verification_record
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._inputs.batches import Prompt
from lens_mix._passes.clean_pass import StopForward, clean_pass
from lens_mix._verification import verify as verifications
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import bridge, hooked_encoder, hooked_transformer, llama_like

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("factory", "name", "placement", "parallel", "kind", "activation"),
    [
        (bridge, "gpt2", "pre", False, "plain", "gelu_tanh"),
        (bridge, "llama", "pre", False, "gated", "silu"),
        (bridge, "gemma2", "sandwich", False, "gated", "gelu_tanh"),
        (bridge, "olmo2", "branch", False, "gated", "silu"),
        (bridge, "gpt_neox", "pre", True, "plain", "gelu"),
        (bridge, "falcon_mqa", "pre", True, "plain", "gelu"),
        (bridge, "bert", "post", False, "plain", "gelu"),
        (bridge, "opt", "pre", False, "plain", "relu"),
        (bridge, "bloom", "pre", False, "plain", "gelu_tanh_bloom"),
        (bridge, "mixtral", "pre", False, "mixture", None),
        (hooked_transformer, "LN", "pre", False, "plain", "gelu"),
        (hooked_transformer, "sandwich", "sandwich", False, "plain", "gelu"),
        (hooked_transformer, "parallel", "pre", True, "plain", "gelu"),
        (hooked_transformer, "none", "none", False, "plain", "gelu"),
        (hooked_transformer, "attn_only", "pre", False, "none", None),
        (hooked_transformer, "gated", "pre", False, "gated", "silu"),
        (hooked_encoder, None, "post", False, "plain", "gelu"),
    ],
)
def test_anatomy_as_found(factory, name, placement, parallel, kind, activation):
    # float64 is needed, because gelu and BLOOM's rounded formula differ by 1e-9.
    arguments = (name, torch.float64) if name else (torch.float64,)
    model = build_or_skip(factory, *arguments)
    for anatomy in lm.check(model, prompt_of(model)).verification.anatomy.values():
        assert (anatomy.placement, anatomy.parallel, anatomy.feed_forward_kind) == (placement, parallel, kind)
        assert (anatomy.feed_forward.activation if anatomy.feed_forward else None) == activation


@pytest.mark.parametrize(
    ("factory", "name", "options"),
    [
        (hooked_transformer, "grouped", {"ungroup_grouped_query_attention": True}),
        (hooked_transformer, "LN", {"use_attn_result": True}),
        (hooked_transformer, "LN", {"use_split_qkv_input": True}),
        (hooked_transformer, "LN", {"positional_embedding_type": "shortformer"}),
    ],
)
def test_options_of_hooked_transformer_change_nothing(factory, name, options):
    model = build_or_skip(factory, name, **options)
    assert lm.check(model, prompt_of(model)).ok
    plain = lm.run(hooked_transformer(name), prompt_of(model), "value_zeroing")
    same = "positional_embedding_type" not in options
    m = lm.run(model, prompt_of(model), "value_zeroing")
    assert bool((m.scores - plain.scores).abs().max() < 1e-6) == same


@pytest.mark.parametrize("setting", ["set_use_attn_result", "set_use_split_qkv_input"])
def test_settings_of_the_bridge_change_nothing(setting):
    model = build_or_skip(bridge, "gpt2")
    plain = lm.run(model, prompt_of(model), "value_zeroing")
    getattr(model, setting)(True)
    assert lm.check(model, prompt_of(model)).ok
    m = lm.run(model, prompt_of(model), "value_zeroing")
    torch.testing.assert_close(m.scores, plain.scores, atol=1e-6, rtol=0)


@pytest.mark.parametrize("norm", ["LN", "RMS", None])
def test_native_bridges(norm):
    try:
        from transformer_lens.config import TransformerBridgeConfig
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        pytest.skip("no TransformerBridge in this TransformerLens")
    config = TransformerBridgeConfig(
        d_model=24,
        d_head=6,
        n_heads=4,
        n_layers=2,
        n_ctx=32,
        d_vocab=50,
        d_mlp=48,
        act_fn="gelu",
        normalization_type=norm,
        seed=0,
    )
    model = TransformerBridge.boot_native(config).eval()
    report = lm.check(model, prompt_of(model))
    assert report.ok, str(report)


def test_granite_multiplies_its_branches():
    model = build_or_skip(bridge, "granite")
    multiplier = model.original_model.config.residual_multiplier
    assert multiplier != 1
    anatomy = lm.check(model, prompt_of(model)).verification.anatomy[0]
    assert anatomy.residual_multiplier == multiplier


def test_an_interpolated_attention_is_an_error():
    """Check a model whose z is not pattern @ values, so that zeroing a value has another effect."""
    model = llama_like()
    name = next(n for n in model.hook_dict if n.endswith(("attn.hook_z", "attn.o.hook_in")))
    model.add_hook(name, lambda z, hook: z * 0.5 + 0.1)
    with pytest.raises(
        lm.UnsupportedModelError, match=r"block 0: mixing is not verified: .* got relative error"
    ):
        lm.run(model, prompt_of(model), "attention")
    assert "NOT" not in str(lm.support(model))
    assert not lm.check(model, prompt_of(model)).ok


def test_a_value_hook_without_effect_is_an_error():
    """Check a model that overwrites z, so that zeroing values has no effect on the output."""
    model = llama_like()
    kept = {}
    name = next(n for n in model.hook_dict if n.endswith("blocks.0.attn.hook_z"))

    def freeze(z, hook):
        return kept.setdefault(tuple(z.shape), z.detach().clone())

    model.add_hook(name, freeze)
    with pytest.raises(lm.UnsupportedModelError, match=r"zero_value is not verified|mixing is not verified"):
        lm.run(model, prompt_of(model), "value_zeroing", engine="hooks")


def test_a_changed_feed_forward_forbids_algebra_but_not_hooks():
    model = llama_like()
    name = next(n for n in model.hook_dict if n.endswith("blocks.0.hook_mlp_out"))
    before = lm.run(model, prompt_of(model), "value_zeroing")
    model.add_hook(name, lambda out, hook: out * 2)
    report = lm.check(model, prompt_of(model))
    assert report.verification.hooks_failure is None
    assert "block 0: residual is not verified" in report.verification.algebra_failure or (
        "block 0: block is not verified" in report.verification.algebra_failure
    )
    after = lm.run(model, prompt_of(model), "value_zeroing")
    assert after.provenance["engine"] == "hooks"
    assert (after.scores - before.scores).abs().max() > 1e-5


def scale_one_position(x, position):
    return torch.cat([x[:, :position], 1.5 * x[:, position : position + 1], x[:, position + 1 :]], dim=1)


ON_ONE_POSITION = pytest.mark.parametrize(
    ("factory", "name"), [(bridge, "llama"), (hooked_transformer, "LN")]
)


@ON_ONE_POSITION
@pytest.mark.parametrize("where", ["mlp.hook_post", "attn.hook_z", "hook_attn_out", "mlp", "attn"])
def test_a_hook_on_one_position_is_noticed_wherever_it_is(factory, name, where):
    """Change one position that the verification's shorter prompt and four sampled positions do not have."""
    model = build_or_skip(factory, name, torch.float64)
    tokens = torch.arange(30)[None] % model.cfg.d_vocab
    before = lm.run(model, tokens, ["value_zeroing", "attn_res"])

    def edit(x, hook=None):
        return x if x.shape[1] <= 17 else scale_one_position(x, 17)

    def edit_output(module, given, out):
        return (edit(out[0]), *out[1:]) if isinstance(out, tuple) else edit(out)

    if "hook" in where:
        model.add_hook(f"blocks.0.{where}", edit)
    else:
        getattr(model.blocks[0], where).register_forward_hook(edit_output)
    found = lm.run(model, tokens, "value_zeroing")
    assert found.provenance["engine"] == "hooks"
    assert not torch.allclose(found.scores, before["value_zeroing"].scores)
    with pytest.raises(
        UnsupportedModelError, match="expected its components to give its output on this prompt"
    ):
        lm.run(model, tokens, "attn_res")


@ON_ONE_POSITION
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_hook_on_one_position_of_a_padded_batch_is_noticed(factory, name, side):
    """Change position 21 of the padded batch: a token of the long prompt, and one or padding of the short."""
    # In float64, a Bridge computes NaN for padding on the left.
    model = build_or_skip(factory, name)
    long, short = torch.arange(30) % model.cfg.d_vocab, torch.arange(3, 17) % model.cfg.d_vocab
    model.add_hook(
        "blocks.0.hook_mlp_out", lambda x, hook: x if x.shape[1] <= 21 else scale_one_position(x, 21)
    )
    found, by_hooks = (
        lm.run_many(model, [long, short], "value_zeroing", engine=engine, batch_size=2, padding_side=side)
        for engine in ("auto", "hooks")
    )
    with pytest.raises(
        UnsupportedModelError, match="expected its components to give its output on this prompt"
    ):
        list(lm.run_many(model, [long, short], "attn_res", batch_size=2, padding_side=side))
    for own, expected in zip(found, by_hooks, strict=True):
        assert own.provenance["engine"] == "hooks"
        torch.testing.assert_close(own.scores, expected.scores)


@ON_ONE_POSITION
def test_a_forward_replaced_by_hand_is_noticed(factory, name):
    """Change one position without a hook of any library on the model."""
    model = build_or_skip(factory, name, torch.float64)
    tokens = torch.arange(30)[None] % model.cfg.d_vocab
    lm.run(model, tokens, "attn_res")
    module = model.blocks[0].mlp
    # A Bridge calls the original component.
    module = getattr(module, "original_component", module)
    original = module.forward

    def forward(*args, **kwargs):
        out = original(*args, **kwargs)
        return out if out.shape[1] <= 17 else scale_one_position(out, 17)

    module.forward = forward
    assert lm.run(model, tokens, "value_zeroing").provenance["engine"] == "hooks"
    with pytest.raises(
        UnsupportedModelError, match="expected its components to give its output on this prompt"
    ):
        lm.run(model, tokens, "attn_res")


NEEDS_THE_FEED_FORWARD = ["atb_ff", "atb_ff_res", "atb_ff_res_ln", "decompx"]


@ON_ONE_POSITION
def test_a_forward_replaced_on_its_class_is_noticed(factory, name, monkeypatch):
    """Change a class, not its instances, at a position between those that are sampled."""
    model = build_or_skip(factory, name)
    tokens = torch.arange(30)[None] % model.cfg.d_vocab
    lm.run(model, tokens, [*NEEDS_THE_FEED_FORWARD, "attn_res", "value_zeroing"])
    module = model.blocks[0].mlp
    kind = type(getattr(module, "original_component", module))
    original = kind.forward

    def forward(self, x):
        out = original(self, x).clone()
        out[:, 21:22] = 0
        return out

    monkeypatch.setattr(kind, "forward", forward)
    for method in [*NEEDS_THE_FEED_FORWARD, "attn_res"]:
        with pytest.raises(
            UnsupportedModelError, match="expected its components to give its output on this prom"
        ):
            lm.run(model, tokens, method)
    assert lm.run(model, tokens, "value_zeroing").provenance["engine"] == "hooks"
    # The requested rows are before the changed position.
    lm.run(model, tokens, "atb_ff", queries=slice(0, 20))
    monkeypatch.undo()
    lm.run(model, tokens, NEEDS_THE_FEED_FORWARD)


def _zero_one_position(monkeypatch):
    """Let the activation of feed-forwards be 0 at position 21, where no module shows it."""
    silu = torch.nn.functional.silu

    def changed(x, *args, **kwargs):
        out = silu(x, *args, **kwargs)
        return torch.cat([out[:, :21], 0 * out[:, 21:22], out[:, 22:]], dim=1) if out.shape[1] > 21 else out

    monkeypatch.setattr(torch.nn.functional, "silu", changed)


@pytest.mark.parametrize("method", [*NEEDS_THE_FEED_FORWARD, "value_zeroing"])
def test_what_acts_inside_the_feed_forward_is_noticed_though_no_module_shows_it(method, monkeypatch):
    model = build_or_skip(bridge, "llama")
    tokens = torch.arange(30)[None] % model.cfg.d_vocab
    _zero_one_position(monkeypatch)
    with pytest.raises(
        UnsupportedModelError, match="expected its components to give its output on this prompt"
    ):
        lm.run(model, tokens, method, engine="algebra")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "bert", "mixtral"])
@pytest.mark.parametrize("length", [5, 20])
def test_a_first_call_makes_one_more_pass_and_has_the_maps_of_a_later_one(kind, length, monkeypatch):
    model = build_or_skip(bridge, kind)
    tokens = torch.arange(length)[None] % model.cfg.d_vocab
    made = []
    for module in (verifications, session):
        monkeypatch.setattr(module, "clean_pass", lambda *a, **k: made.append(1) or clean_pass(*a, **k))
    methods = ["attention", "value_zeroing", "attn_res_ln"]
    first = lm.run(model, tokens, methods)
    assert len(made) == 2
    later = lm.run(model, tokens, methods)
    assert len(made) == 3
    for name, mixing_map in first.items():
        assert torch.equal(mixing_map.scores, later[name].scores)
        assert mixing_map.explained == later[name].explained
        assert mixing_map.notes == later[name].notes
        assert mixing_map.provenance["engine"] == later[name].provenance["engine"]


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_first_call_has_the_scores_of_the_definition(kind):
    model = build_or_skip(bridge, kind, torch.float64)
    tokens = torch.arange(20)[None] % model.cfg.d_vocab
    first = lm.run(model, tokens, "value_zeroing", engine="algebra")
    by_hooks = lm.run(build_or_skip(bridge, kind, torch.float64), tokens, "value_zeroing", engine="hooks")
    assert torch.allclose(first.scores, by_hooks.scores, rtol=0, atol=1e-10)


def test_a_late_change_does_not_enter_the_stored_verification(monkeypatch):
    model = build_or_skip(bridge, "llama")
    tokens = torch.arange(30)[None] % model.cfg.d_vocab
    _zero_one_position(monkeypatch)
    assert lm.run(model, tokens, "value_zeroing").provenance["engine"] == "hooks"
    assert lm.run(model, tokens[:, :20], "value_zeroing").provenance["engine"] == "algebra"


def test_globenc_relies_on_the_feed_forward_where_a_norm_reads_it(monkeypatch):
    model = build_or_skip(bridge, "bert")
    tokens = torch.arange(30)[None] % model.cfg.d_vocab
    activation = next(m for m in model.original_model.modules() if type(m).__name__ == "GELUActivation")
    original = activation.act

    def changed(x):
        out = original(x)
        return torch.cat([out[:, :21], 0 * out[:, 21:22], out[:, 22:]], dim=1) if out.shape[1] > 21 else out

    lm.run(model, tokens, "globenc")
    monkeypatch.setattr(activation, "act", changed)
    with pytest.raises(
        UnsupportedModelError, match="expected its components to give its output on this prompt"
    ):
        lm.run(model, tokens, "globenc")


def test_the_verification_is_stored_until_weights_or_hooks_change(monkeypatch):
    model = llama_like()
    made = []
    original = verifications.verify
    monkeypatch.setattr("lens_mix._verification.verify.verify", lambda *a: made.append(1) or original(*a))
    prompt = prompt_of(model)
    lm.run(model, prompt, "attention")
    lm.run(model, prompt, "attention")
    lm.run(model, prompt, "alti_logit")
    assert len(made) == 1
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    lm.run(model, prompt, "attention")
    assert len(made) == 2
    model.add_hook(next(n for n in model.hook_dict if n.endswith("hook_resid_post")), lambda t, hook: t)
    lm.run(model, prompt, "attention")
    assert len(made) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tolerance_follows_the_dtype(dtype):
    model = llama_like(dtype)
    report = lm.check(model, prompt_of(model))
    assert report.ok, str(report)
    m = lm.run(model, prompt_of(model), "value_zeroing")
    assert m.scores.dtype == torch.promote_types(dtype, torch.float32)
    assert m.provenance["dtype"] == str(dtype).removeprefix("torch.")
    single = lm.run(llama_like(), prompt_of(model), "value_zeroing")
    assert (m.scores - single.scores).abs().max() < {torch.float64: 1e-5, torch.float32: 1e-6}.get(
        dtype, 0.05
    )


def test_short_prompts_are_verified_on_longer_ones():
    short = verifications._verification_prompt(Prompt(torch.tensor([5, 6, 7])), 32)
    assert short.tokens.tolist() == [5, 6, 7, 5, 6, 7, 5, 6]
    assert len(verifications._verification_prompt(Prompt(torch.arange(30)), 32).tokens) == 16
    assert len(verifications._verification_prompt(Prompt(torch.tensor([5])), 4).tokens) == 4


def test_a_prompt_of_one_token():
    model = llama_like()
    maps = lm.run(model, torch.tensor([7]), ["attention", "value_zeroing"])
    assert maps["attention"].scores.shape == (2, 1, 1)
    assert maps["attention"].normalized().scores.flatten().tolist() == [1, 1]


def test_check_and_support_print_and_tabulate():
    model = llama_like()
    report = lm.check(model, prompt_of(model))
    text = str(report)
    assert "zero_value" in text
    assert "hooks: verified" in text
    assert "pre-norm, feed-forward" in text
    frame = report.to_dataframe()
    assert list(frame.columns) == ["layer", "component", "error", "tolerance", "ok", "note"]
    assert frame["ok"].all()
    table = lm.support(model)
    assert table["attention"] == "ok (recorded)"
    assert set(table.to_dataframe()["method"]) == set(lm.METHODS)
    with pytest.raises(KeyError, match="expected one of"):
        table["nothing"]


def test_a_component_with_a_large_error_is_reported_with_its_numbers():
    entry = verification_record.ComponentError(3, "block", 0.5, 1e-4)
    made = verification_record.Verification((entry,), {}, True)
    assert made.failure(("block",)) == (
        "block 3: block is not verified: expected relative error <= 1e-04, got relative error 5.0e-01"
    )
    assert dataclasses.replace(entry, error=1e-5).ok
    assert not dataclasses.replace(entry, error=None).ok
    assert not dataclasses.replace(entry, error=float("nan")).ok


def test_a_replay_ends_early_only_if_a_change_is_certain():
    """Check the function that ends a replay at a feed-forward, and that user hooks switch it off."""
    x = torch.ones(2, 3)
    verifications._end_if_changed([x])(x.clone())
    with pytest.raises(StopForward):
        verifications._end_if_changed([x])(x + 1)
    # It is not known which of several calls this is.
    verifications._end_if_changed([x, x])(x + 1)
    verifications._end_if_changed([])(x)
    model = llama_like()
    assert len(verifications._feed_forward_modules(lm.Lens(model))) == model.cfg.n_layers
    model.add_hook("blocks.0.hook_mlp_out", lambda x, hook: x)
    assert not verifications._feed_forward_modules(lm.Lens(model))
