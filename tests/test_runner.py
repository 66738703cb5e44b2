"""Test the runner: its arguments and results, batches, memory and progress."""

from __future__ import annotations

import re

import pytest
import torch

import lens_mix as lm
from lens_mix import runner
from lens_mix._care.state import all_modules
from lens_mix._care.users_hooks import has_user_hooks
from lens_mix._classes.model_classes import transformer_lens_version
from lens_mix.map_prompts import map_prompts
from lens_mix.method import Method
from lens_mix.runner import read_methods
from tests.matrix import build_or_skip, prompt_of
from tests.reference_models import to_bridge, to_hooked
from tests.tiny_models import (
    Unavailable,
    bridge,
    gpt2_like,
    hooked_encoder,
    hooked_encoder_decoder,
    hooked_transformer,
    tokens,
    toy_tokenizer,
    wrapped_model,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model():
    """Return a model in float32, like most models, because memory depends on the dtype."""
    return gpt2_like(tokenizer=toy_tokenizer())


def test_one_method_gives_a_map_several_give_a_dict(model):
    prompt = tokens(model, 1, 5)
    one = lm.run(model, prompt, "attention")
    assert isinstance(one, lm.MixingMap)
    assert one.scores.shape == (2, 5, 5)
    several = lm.run(model, prompt, ["attention", lm.methods.ValueZeroing(metric="euclidean")])
    assert list(several) == ["attention", "value_zeroing"]
    assert several["value_zeroing"].parameters["metric"] == "euclidean"
    torch.testing.assert_close(several["attention"].scores, one.scores, atol=0, rtol=0)
    assert list(lm.run(model, prompt, ["attention"])) == ["attention"]


def test_the_same_method_twice_gets_its_parameters_in_the_key(model):
    maps = lm.run(model, tokens(model, 1, 5), ["value_zeroing", lm.methods.ValueZeroing(metric="euclidean")])
    assert list(maps) == ["value_zeroing", "value_zeroing(metric='euclidean')"]


def test_one_clean_pass_serves_all_methods(model):
    prompt = tokens(model, 1, 5)
    # This makes the verification.
    lm.run(model, prompt, "attention")
    seen_by_embedding = []
    handle = model.embed.register_forward_hook(lambda *_: seen_by_embedding.append(1))
    try:
        # The verification is made again, because of a new hook.
        lm.run(model, prompt, "attention")
        seen_by_embedding.clear()
        lm.run(model, prompt, ["attention", lm.methods.AttentionWeights(per_head=True)])
    finally:
        handle.remove()
    assert len(seen_by_embedding) == 1


def test_prompts_in_all_their_forms_give_the_same(model):
    ids = [1, 5, 6, 7]
    forms = [torch.tensor(ids), torch.tensor([ids]), torch.tensor([ids], dtype=torch.int32), ids]
    first = lm.run(model, forms[0], "value_zeroing").scores
    for form in forms[1:]:
        torch.testing.assert_close(lm.run(model, form, "value_zeroing").scores, first, atol=0, rtol=0)


def test_strings_go_through_the_models_own_tokenizer(model):
    m = lm.run(model, "w5 w6 w7", "attention")
    assert m.tokens == ["<bos>", "w5", "w6", "w7"]
    without = lm.run(model, "w5 w6 w7", "attention", prepend_bos=False)
    assert without.tokens == ["w5", "w6", "w7"]
    assert without.provenance["prepend_bos"] is False
    assert lm.run(model, "w5", "attention", prepend_bos=True).tokens == ["<bos>", "w5"]


def test_attention_mask_cuts_padding_on_either_side(model):
    alone = lm.run(model, torch.tensor([5, 6, 7]), "value_zeroing")
    for ids, mask in (([0, 0, 5, 6, 7], [0, 0, 1, 1, 1]), ([5, 6, 7, 0], [1, 1, 1, 0])):
        m = lm.run(model, torch.tensor([ids]), "value_zeroing", attention_mask=torch.tensor([mask]))
        torch.testing.assert_close(m.scores, alone.scores, atol=0, rtol=0)
    batch = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 5, 6, 7]])
    masks = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    first, second = lm.run_many(model, batch, "value_zeroing", attention_mask=masks)
    torch.testing.assert_close(first.scores, alone.scores, atol=1e-6, rtol=1e-5)
    assert second.scores.shape == (2, 5, 5)


def test_a_pad_token_inside_a_prompt_is_a_token(model):
    """Keep GPT-2's end-of-text token, which is BOS, EOS and padding at once, unmasked in a prompt."""
    m = lm.run(model, torch.tensor([0, 5, 0, 6]), "attention")
    assert m.scores[:, 3, 0].min() > 0
    assert m.scores[:, 3, 2].min() > 0


def test_run_many_streams_in_order_whatever_the_batch_size(model):
    prompts = [tokens(model, 1, size, seed=size)[0] for size in (3, 7, 5, 4, 6)]
    drawn = []

    def stream():
        for prompt in prompts:
            drawn.append(len(prompt))
            yield prompt

    maps = lm.run_many(model, stream(), "value_zeroing", batch_size=2)
    assert drawn == []
    first = next(maps)
    assert len(drawn) == 2
    for prompt, m in zip(prompts, [first, *maps], strict=True):
        torch.testing.assert_close(
            m.scores, lm.run(model, prompt, "value_zeroing").scores, atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_a_list_is_grouped_by_length_and_its_maps_come_in_order(model, padding_side, monkeypatch):
    lengths = [3, 30, 3, 29, 3, 30, 21, 30]
    prompts = [tokens(model, 1, size, seed=size)[0] for size in lengths]
    batches = []

    def recorded(session, batch, *args, **options):
        batches.append(sorted(len(prompt.tokens) for prompt in batch))
        return map_prompts(session, batch, *args, **options)

    monkeypatch.setattr(runner, "map_prompts", recorded)
    maps = lm.run_many(model, prompts, "value_zeroing", batch_size=4, padding_side=padding_side)
    first = next(maps)
    assert batches == [[3, 3, 3]]
    found = [first, *maps]
    assert sorted(batches) == [[3, 3, 3], [21], [29, 30, 30, 30]]
    for prompt, m in zip(prompts, found, strict=True):
        alone = lm.run(model, prompt, "value_zeroing")
        torch.testing.assert_close(m.scores, alone.scores, atol=1e-6, rtol=1e-5)


def test_few_maps_of_long_prompts_wait_for_others(model, monkeypatch):
    monkeypatch.setattr(runner, "_MOST_WAITING", 2 * 9**2)
    prompts = [tokens(model, 1, size, seed=size)[0] for size in (9, 3, 9, 3, 3)]
    drawn = []

    def recorded(session, batch, *args, **options):
        drawn.append([len(prompt.tokens) for prompt in batch])
        return map_prompts(session, batch, *args, **options)

    monkeypatch.setattr(runner, "map_prompts", recorded)
    maps = lm.run_many(model, prompts, "attention", batch_size=2)
    assert [len(m.tokens) for m in maps] == [9, 3, 9, 3, 3]
    assert drawn == [[9, 3], [9, 3], [3]]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 16])
def test_run_many_gives_the_maps_before_a_bad_prompt_first(model, batch_size):
    good = [tokens(model, 1, size, seed=size)[0] for size in (3, 7, 5, 4)]
    alone = [lm.run(model, prompt, "value_zeroing").scores for prompt in good]

    def interrupted():
        yield from good
        raise RuntimeError("the file ends here")

    cases = [
        ([*good, torch.zeros(2, 2, dtype=torch.long), good[0]], ValueError, "prompt 4: "),
        ([*good, {"text": 1}, good[0]], TypeError, "prompt 4: "),
        (interrupted(), RuntimeError, "the file ends here"),
    ]
    for prompts, kind, message in cases:
        maps = lm.run_many(model, prompts, "value_zeroing", batch_size=batch_size)
        for expected in alone:
            torch.testing.assert_close(next(maps).scores, expected, atol=1e-6, rtol=1e-5)
        with pytest.raises(kind, match=message):
            next(maps)
        assert list(maps) == []
    with pytest.raises(ValueError, match="prompt 0: "):
        next(lm.run_many(model, [torch.zeros(2, 2, dtype=torch.long), *good], "attention"))


def test_max_memory_changes_the_chunks_and_not_the_numbers(model):
    prompt = tokens(model, 1, 12)
    whole = lm.run(model, prompt, "value_zeroing", engine="hooks").scores
    with pytest.raises(ValueError, match="max_memory: expected at least") as refusal:
        lm.run(model, prompt, "value_zeroing", engine="hooks", max_memory=10)
    least = int(str(refusal.value).split("at least ")[1].split()[0])
    ran = []
    handle = model.blocks[0].register_forward_hook(lambda *_: ran.append(1))
    small = lm.run(model, prompt, "value_zeroing", engine="hooks", max_memory=least).scores
    one_by_one = len(ran)
    ran.clear()
    lm.run(model, prompt, "value_zeroing", engine="hooks")
    handle.remove()
    torch.testing.assert_close(small, whole, atol=1e-6, rtol=1e-5)
    # Two copies at a time need more passes than all twelve copies at once.
    assert one_by_one >= len(ran) + 5


def test_progress_shows_a_bar(model, capsys):
    lm.run(model, tokens(model, 1, 4), "value_zeroing")
    assert capsys.readouterr().err == ""
    lm.run(model, tokens(model, 1, 4), "value_zeroing", progress=True)
    assert "value_zeroing" in capsys.readouterr().err
    list(lm.run_many(model, [tokens(model, 1, 4)] * 3, "attention", progress=True))
    assert "3/3" in capsys.readouterr().err


def test_provenance_says_where_a_map_came_from(model):
    m = lm.run(model, tokens(model, 1, 4), "value_zeroing", engine="hooks")
    assert m.provenance["engine"] == "hooks"
    assert m.provenance["dtype"] == "float32"
    assert m.provenance["value_biases"] == "present"
    assert m.provenance["model_class"] in ("TransformerBridge", "HookedTransformer")
    assert m.provenance["transformer_lens"].count(".") == 1
    assert m.residual == 0.0
    assert lm.run(model, tokens(model, 1, 4), "attention").residual == 0.5


def test_folded_value_biases_are_in_the_record_and_change_the_map():
    """Fold b_V into b_O, as TransformerLens does by default: logits stay, but Value Zeroing changes."""
    original = wrapped_model("gpt2")
    options = {"act_fn": "gelu_new", "eps": 1e-5, "n_ctx": 32}
    try:
        raw = to_hooked(original, "HookedTransformer", "convert_gpt2_weights", **options)
    except Unavailable:
        raw, folded = bridge("gpt2"), bridge("gpt2")
        folded.enable_compatibility_mode(disable_warnings=True)
    else:
        folded = to_hooked(original, "HookedTransformer", "convert_gpt2_weights", **options)
        folded.load_and_process_state_dict(
            {name: value.clone() for name, value in raw.state_dict().items()}, fold_value_biases=True
        )
    prompt = tokens(raw, 1, 6)
    first, second = (lm.run(model, prompt, "value_zeroing") for model in (raw, folded))
    assert first.provenance["value_biases"] == "present"
    assert second.provenance["value_biases"].startswith("none")
    assert (first.scores - second.scores).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("name", "convert", "options"),
    [
        ("gpt2", "convert_gpt2_weights", {"act_fn": "gelu_new", "eps": 1e-5}),
        (
            "llama",
            "convert_llama_weights",
            {
                "act_fn": "silu",
                "normalization_type": "RMS",
                "positional_embedding_type": "rotary",
                "rotary_dim": 6,
                "rotary_adjacent_pairs": False,
                "gated_mlp": True,
                "final_rms": True,
                "n_key_value_heads": 2,
                "eps": 1e-6,
            },
        ),
    ],
)
def test_the_same_weights_give_the_same_maps_on_both_classes(name, convert, options):
    original = wrapped_model(name)
    try:
        hooked = to_hooked(original, "HookedTransformer", convert, n_ctx=32, **options)
        wrapped = to_bridge(wrapped_model(name))
    except Unavailable as problem:
        pytest.skip(str(problem))
    prompt = tokens(hooked, 1, 9)
    with torch.no_grad():
        torch.testing.assert_close(hooked(prompt), wrapped(prompt), atol=1e-3, rtol=1e-3)
    methods = ["attention", "value_zeroing"]
    ours, theirs = lm.run(hooked, prompt, methods), lm.run(wrapped, prompt, methods)
    for method in methods:
        torch.testing.assert_close(ours[method].scores, theirs[method].scores, atol=1e-5, rtol=0)
        both = [lm.rollout(m[method], receptive_field=True).scores for m in (ours, theirs)]
        torch.testing.assert_close(*both, atol=1e-4, rtol=0)


def test_encoder_decoder_pairs():
    try:
        model = bridge("bart", tokenizer=toy_tokenizer())
    except Unavailable:
        model = hooked_encoder_decoder(tokenizer=toy_tokenizer())
    source, target = tokens(model, 1, 6), tokens(model, 1, 4, seed=2)
    encoder = lm.run(model, (source, target), "value_zeroing")
    assert encoder.scores.shape == (2, 6, 6)
    assert encoder.provenance["part"] == "encoder"
    assert not encoder.causal
    only_source = lm.run(model, source, "value_zeroing")
    torch.testing.assert_close(only_source.scores, encoder.scores, atol=0, rtol=0)
    by_name = lm.run(model, source, "value_zeroing", decoder_input_ids=target)
    torch.testing.assert_close(by_name.scores, encoder.scores, atol=0, rtol=0)
    if not _decoder_refused(model):
        decoder = lm.run(model, (source, target), "value_zeroing", part="decoder")
        assert decoder.scores.shape == (2, 4, 4)
        assert decoder.causal
        words = lm.run(model, ("w5 w6 w7", "w8 w9"), "attention", part="decoder")
        labels = model.tokenizer(text_target="w8 w9")["input_ids"]
        assert words.tokens[1:] == model.tokenizer.convert_ids_to_tokens(labels)


def _decoder_refused(model):
    try:
        lm.Lens(model, "decoder")
    except lm.UnsupportedModelError:
        return True
    return False


def test_token_type_ids_reach_an_encoder():
    try:
        model = bridge("bert")
    except Unavailable:
        model = hooked_encoder()
    prompt = tokens(model, 1, 6)
    kinds = torch.tensor([[0, 0, 0, 1, 1, 1]])
    plain = lm.run(model, prompt, "value_zeroing")
    typed = lm.run(model, prompt, "value_zeroing", token_type_ids=kinds)
    assert (plain.scores - typed.scores).abs().max() > 1e-5
    many = list(lm.run_many(model, [prompt, prompt], "value_zeroing", token_type_ids=kinds.repeat(2, 1)))
    torch.testing.assert_close(many[1].scores, typed.scores, atol=1e-6, rtol=1e-5)


def test_the_users_own_hooks_are_part_of_the_model(model):
    prompt = tokens(model, 1, 5)
    before = lm.run(model, prompt, "value_zeroing")
    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda t, hook: t * 0)]):
        ablated = lm.run(model, prompt, "value_zeroing").scores
    assert (before.scores[0] - ablated[0]).abs().max() > 1e-4
    after = lm.run(model, prompt, "value_zeroing")
    assert after.provenance["engine"] == before.provenance["engine"]
    torch.testing.assert_close(after.scores, before.scores, atol=0, rtol=0)


def test_a_method_of_ones_own_runs_like_any_other(model):
    """Run the example of the page "how to add a method"."""

    class ResidualNorms(Method):
        name = "residual_norms"
        residual = 0.5
        engines = ("recorded",)
        citation = "none"

        def __call__(self, block):
            norms = block.resid_pre.norm(dim=-1)
            block.detail(0, "largest", float(norms.max()))
            block.warn(0, "only a test")
            return torch.diag_embed(norms)

    m = lm.run(model, prompt_of(model, 4), ResidualNorms())
    assert m.method == "residual_norms"
    assert m.scores.shape == (2, 4, 4)
    assert len(m.provenance["details"]["largest"]) == 2
    assert "layer 1: only a test" in m.notes


def test_saved_and_loaded_maps_are_the_same(model, tmp_path):
    m = lm.run(model, "w5 w6 w7", "value_zeroing")
    m.save(tmp_path / "map.safetensors")
    back = lm.MixingMap.load(tmp_path / "map.safetensors")
    assert torch.equal(back.scores, m.scores)
    assert (back.tokens, back.method, back.causal, back.provenance) == (
        m.tokens,
        m.method,
        m.causal,
        m.provenance,
    )
    assert back.parameters == m.parameters


def test_bidirectional_hooked_transformer_ignores_masks_so_prompts_run_alone():
    model = build_or_skip(hooked_transformer, "bidirectional")
    prompts = [tokens(model, 1, 6), tokens(model, 1, 4, seed=3)]
    assert not lm.check(model, prompts[0]).verification.masks_padding["right"]
    for prompt, m in zip(prompts, lm.run_many(model, prompts, "value_zeroing"), strict=True):
        torch.testing.assert_close(m.scores, lm.run(model, prompt, "value_zeroing").scores, atol=1e-6, rtol=0)


ALGEBRA = ["value_zeroing", "value_norm", "attn_res_ln", "atb_ff_res_ln", "globenc", "alti", "decompx"]


def late_hook(start):
    """Return a hook that changes a block from a position on, beyond the prompt of the verification."""

    def hook(tensor, hook):
        out = tensor.clone()
        out[:, start:] = out[:, start:] * 1.5 + 0.3
        return out

    return hook


def test_a_hook_that_acts_beyond_the_proofs_prompt_is_noticed(model):
    prompt = tokens(model, 1, 28)
    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", late_hook(20))]):
        m = lm.run(model, prompt, "value_zeroing")
        assert m.provenance["engine"] == "hooks"
        for name in ALGEBRA[1:]:
            with pytest.raises(
                lm.UnsupportedModelError, match="its components to give its output on this prompt"
            ):
                lm.run(model, prompt, name)
    assert lm.run(model, prompt, "value_zeroing").provenance["engine"] == "algebra"


def test_a_hook_in_the_place_of_another_is_noticed(model):
    prompt = tokens(model, 1, 12)
    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda t, hook: t)]):
        assert lm.run(model, prompt, "value_zeroing").provenance["engine"] == "algebra"
    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda t, hook: t * 2 + 1)]):
        assert lm.run(model, prompt, "value_zeroing").provenance["engine"] == "hooks"


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        # Gemma stores weight - 1, so the verification has a copy; it has views of the others.
        ("gemma", "1.input_layernorm"),
        ("gemma", "1.post_attention_layernorm"),
        ("llama", "1.input_layernorm"),
        ("gpt2", "1.ln_2"),
    ],
)
@pytest.mark.parametrize(
    "methods", [ALGEBRA, *([each] for each in ALGEBRA), [lm.methods.AttnResLn(next_norm=True)]]
)
def test_weights_edited_behind_torchs_back_are_noticed(name, norm, methods):
    edited, fresh = build_or_skip(bridge, name), build_or_skip(bridge, name)
    prompt = tokens(edited, 1, 9)
    for _ in range(2):
        before = lm.run(edited, prompt, methods)
    weights = [
        next(p for n, p in model.named_parameters() if f".{norm}." in n.replace("._original_component", ""))
        for model in (edited, fresh)
    ]
    weights[0].data.mul_(1.7)
    with torch.no_grad():
        weights[1].mul_(1.7)
    found = lm.run(edited, prompt, methods)
    for method, m in lm.run(fresh, prompt, methods).items():
        torch.testing.assert_close(found[method].scores, m.scores, atol=1e-4, rtol=1e-4)
    if len(methods) > 1:
        assert any(not torch.allclose(before[method].scores, m.scores) for method, m in found.items())


@pytest.mark.parametrize("name", ["granite", "granite_moe"])
@pytest.mark.parametrize("method", ["attn_res", "alti", "globenc", "value_zeroing"])
@pytest.mark.parametrize("options", [{}, {"queries": [-1]}, {"max_memory": 10**7}])
def test_a_setting_edited_in_a_block_is_noticed(name, method, options):
    """Change how a block adds its branches, of which no weight and no hook shows anything."""
    model = build_or_skip(bridge, name)
    assert not has_user_hooks(all_modules(model))
    prompts = [tokens(model, 1, length)[0] for length in (12, 9)]
    for _ in range(2):
        before = list(lm.run_many(model, prompts, method, batch_size=2, **options))
    model.original_model.model.layers[1].residual_multiplier *= 2
    if method == "value_zeroing":
        assert {m.provenance["engine"] for m in before} == {"algebra" if name == "granite" else "hooks"}
        after = list(lm.run_many(model, prompts, method, batch_size=2, **options))
        assert {m.provenance["engine"] for m in after} == {"hooks"}
        assert not torch.allclose(before[0].scores, after[0].scores)
    else:
        with pytest.raises(lm.UnsupportedModelError, match="block 1: residual is not verified"):
            list(lm.run_many(model, prompts, method, batch_size=2, **options))


def test_a_setting_edited_in_a_block_is_noticed_by_an_input_map():
    """An input map is computed after the pass, from the records of all blocks."""
    model = build_or_skip(bridge, "granite_moe")
    prompt = tokens(model, 1, 12)
    lm.run(model, prompt, "alti_logit")
    model.original_model.model.layers[1].residual_multiplier *= 2
    with pytest.raises(lm.UnsupportedModelError, match="block 1: residual is not verified"):
        lm.run(model, prompt, "alti_logit")


def test_misspelt_inputs_are_refused():
    model = build_or_skip(bridge, "bert")
    prompt = tokens(model, 1, 6)
    with pytest.raises(ValueError, match=r"got \['token_type_id'\]"):
        lm.run(model, prompt, "attention", token_type_id=torch.zeros_like(prompt))
    with pytest.raises(TypeError, match="per_heads is meant as an option"):
        lm.run(model, prompt, "attention", per_heads=True)
    with pytest.raises(TypeError, match=r"batchsize: run_many has no .* mean batch_size=\?"):
        lm.run_many(model, [prompt], "attention", batchsize=4)
    with pytest.raises(ValueError, match="attention_mask: expected one entry per prompt, got 1 entries"):
        list(lm.run_many(model, [prompt, prompt], "attention", attention_mask=torch.ones(1, 6)))


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        (
            "attention",
            {"per_head": True},
            "per_head: run has no argument of this name; it is a parameter of AttentionWeights: write "
            "lm.run(model, prompt, lm.methods.AttentionWeights(per_head=True))",
        ),
        (
            ["attention", lm.methods.Occlusion(by="mask")],
            {"target": "w3"},
            "it is a parameter of Occlusion: "
            "write lm.run(model, prompt, lm.methods.Occlusion(..., target='w3'))",
        ),
        (
            "alti",
            {"metric": "euclidean"},
            "metric: run has no argument of this name, nor has Alti. Methods that have it: ValueZeroing; "
            "write, for example, lm.run(model, prompt, lm.methods.ValueZeroing(metric='euclidean'))",
        ),
        (
            "attention",
            {"target": " Paris"},
            "target: run has no argument of this name, nor has AttentionWeights. Methods that have it: ",
        ),
        ("attention", {"layer": 3}, "layer: run has no argument of this name; did you mean layers=?"),
        ("attention", {"query": 3}, "query: run has no argument of this name; did you mean queries=?"),
        ("attention", {"batch_size": 3}, "batch_size: run has no argument of this name; run_many has it"),
    ],
)
def test_a_parameter_of_a_method_says_where_to_write_it(model, methods, options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        lm.run(model, tokens(model, 1, 6), methods, **options)


def test_parameters_of_methods_in_the_other_functions(model):
    prompt = tokens(model, 1, 6)
    message = "write lm.run_many(model, prompts, lm.methods.AttentionWeights(per_head=True))"
    with pytest.raises(TypeError, match=re.escape(message)):
        lm.run_many(model, [prompt], "attention", per_head=True)
    with pytest.raises(TypeError, match=r"by: run has no argument .* Methods that have it: Occlusion"):
        lm.input_map(model, prompt, by="mask")
    with pytest.raises(
        TypeError, match=r"for example, lm.run\(model, prompt, lm.methods.Occlusion\(by='mask'\)\)"
    ):
        lm.run(model, prompt, "attention", by="mask")


@pytest.mark.parametrize(
    "method",
    [
        "value_zeroing",
        "ValueZeroing",
        "value-zeroing",
        "Value Zeroing",
        lm.methods.ValueZeroing,
        lm.methods.ValueZeroing(),
    ],
)
def test_ways_to_give_a_method(model, method):
    prompt = tokens(model, 1, 6)
    found = lm.run(model, prompt, method, layers=[-1], queries=[-1])
    assert (found.method, found.parameters["metric"]) == ("value_zeroing", "cosine")
    assert list(lm.run(model, prompt, [method, "attention"], queries=[-1])) == ["value_zeroing", "attention"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vz", r"methods: did you mean 'value_zeroing'\? expected one of \[.*'value_zeroing'.*\], got 'vz'$"),
        (
            "attention_weight",
            r"methods: did you mean 'attention'\? expected one of .*, got 'attention_weight'$",
        ),
        ("valuenorm_", None),
        (
            "rollout",
            r"methods: rollout is not a method, write lm\.rollout\(lm\.run\(model, prompt, method\)\); "
            r"expected one of .*, got 'rollout'$",
        ),
        ("input_map", r"write lm\.input_map\(model, prompt\); expected one of .*, got 'input_map'$"),
        ("xyz", r"methods: expected one of .*, got 'xyz'$"),
    ],
)
def test_an_unknown_method_says_which_was_meant(model, name, message):
    if message is None:
        assert list(read_methods(name)[0]) == ["value_norm"]
        return
    with pytest.raises(ValueError, match=message):
        lm.run(model, tokens(model, 1, 6), name)


def test_an_ablated_output_matrix_and_a_users_own_zero_values_give_zero_maps():
    from lens_mix.hooks import zero_values

    model = build_or_skip(bridge, "gpt2")
    prompt = tokens(model, 1, 6)
    with model.hooks(fwd_hooks=[zero_values(0, 0)]):
        maps = lm.run(model, prompt, ["attention", "value_zeroing"])
    assert float(maps["value_zeroing"].scores[0, :, 0].max()) < 1e-12
    assert float(maps["value_zeroing"].scores[0, 5, 1]) > 0
    with torch.no_grad():
        model.blocks[0].attn.o.weight.zero_()
    maps = lm.run(model, prompt, ["attention", "value_zeroing"])
    assert float(maps["value_zeroing"].scores[0].max()) < 1e-12
    assert any("all-zero" in note for note in maps["value_zeroing"].notes)
    assert float(maps["attention"].scores[0].max()) > 0


def test_heads_and_spans_in_any_form_are_saved(model, tmp_path):
    for number, method in enumerate(
        [
            lm.methods.ValueZeroing(heads={0: [1]}),
            lm.methods.ValueZeroing(heads=range(2)),
            lm.methods.ValueZeroing(heads=torch.tensor([0, 1])),
            lm.methods.ValueZeroing(spans=[range(2), (2,)]),
        ]
    ):
        m = lm.run(model, tokens(model, 1, 4), method)
        m.save(tmp_path / f"{number}.safetensors")
        assert torch.equal(lm.MixingMap.load(tmp_path / f"{number}.safetensors").scores, m.scores)
    with pytest.raises(ValueError, match=r"heads: expected each head once, got \[1, 1\]"):
        lm.run(model, tokens(model, 1, 4), lm.methods.ValueZeroing(heads=[1, 1]))
    with pytest.raises(TypeError, match="heads: expected whole numbers in a list, got 2"):
        lm.methods.ValueZeroing(heads=2)


def test_targets_on_a_decoder_that_is_not_causal_are_refused():
    if transformer_lens_version()[0] > 2:
        pytest.skip("mended in TransformerLens 3")
    model = hooked_encoder_decoder()
    with pytest.raises(lm.UnsupportedModelError, match=r"not causal in TransformerLens 2\.x"):
        lm.run(model, prompt_of(model), lm.methods.GradientAttention(target=lm.targets.predicted()))
