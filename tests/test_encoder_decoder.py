"""Compare cross-attention maps with inseq's numbers, and with transformers without TransformerLens."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import lens_mix as lm
from lens_mix._algebra.definitions import norms, through_norm, value_vectors
from lens_mix._model.anatomy import Norm
from lens_mix.experiments.contextualisation import top_pairs
from lens_mix.experiments.mixing_ratio import mixing_ratios
from lens_mix.method import RESIDUAL_KEY
from lens_mix.methods.alti import alti, normalize_rows
from tests.matrix import build_or_skip, prompt_of, slow, zeroed
from tests.reference_models import REFERENCE, inseq_t5
from tests.tiny_models import bridge, gpt2_like, hooked_encoder_decoder, toy_tokenizer, wrapped_model

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ["t5", "bart", "whisper", *map(slow, ("t5_gated", "mt5", "marian"))]
OTHERS = ["longt5", "blenderbot", "m2m100", "mbart", "pegasus"]
METHODS = ["attention", "value_norm", "value_zeroing", "attn_res", "attn_res_ln", "alti"]
GRADIENTS = ["attention_attribution", "gradient_attention"]


# ------------------------------------------------------------------ transformers alone


class Plain:
    """A decoder of transformers, like T5's or BART's, with torch's hooks only."""

    def __init__(self, name, pair):
        self.model = wrapped_model(name, torch.float64)
        self.model.set_attn_implementation("eager")
        self.pair, self.t5 = pair, hasattr(self.model, "decoder")
        decoder = self.model.decoder if self.t5 else self.model.model.decoder
        self.blocks = decoder.block if self.t5 else decoder.layers
        # Whisper has BART's modules in T5's order.
        self.pre_norm = self.t5 or name == "whisper"

    def cross(self, layer):
        block = self.blocks[layer]
        return block.layer[1].EncDecAttention if self.t5 else block.encoder_attn

    def part(self, layer, name):
        """Return the matrix "v" or "o" of the cross-attention."""
        long = {"v": "v_proj", "o": "out_proj"}[name]
        return getattr(self.cross(layer), name if self.t5 else long)

    def norm(self, layer):
        """Return the norm before (T5, Whisper) or after (BART) the cross-attention."""
        block = self.blocks[layer]
        return block.layer[1].layer_norm if self.t5 else block.encoder_attn_layer_norm

    def run(self, *, watch=(), edit=(), **options):
        """Return the output, and the inputs and outputs of the watched modules."""
        seen, handles = {}, []
        for module in watch:

            def keep(module, given, out):
                seen[module] = (given[0] if given else None), out[0] if isinstance(out, tuple) else out

            handles.append(module.register_forward_hook(keep))
        handles += [module.register_forward_hook(hook) for module, hook in edit]
        try:
            source = {self.model.main_input_name: self.pair[0]}
            out = self.model(**source, decoder_input_ids=self.pair[1], use_cache=False, **options)
        finally:
            for handle in handles:
                handle.remove()
        return out, seen

    def value_zeroing(self, layer, key):
        """Return 1 − cos of the block's output without the cross value of one source position."""
        block = self.blocks[layer]
        zero = (self.part(layer, "v"), lambda module, given, out: zeroed(out, key))
        with torch.no_grad():
            clean = self.run(watch=[block])[1][block][1]
            changed = self.run(watch=[block], edit=[zero])[1][block][1]
        return 1 - torch.cosine_similarity(clean, changed, dim=-1)[0]

    def vectors(self, layer):
        """Return Σ_h a_ijh u_jh, the true output of cross-attention, and the residual stream before it."""
        value, out, norm = self.part(layer, "v"), self.part(layer, "o"), self.norm(layer)
        with torch.no_grad():
            output, seen = self.run(watch=[value, out, norm], output_attentions=True)
        heads = self.model.config.num_attention_heads
        values = seen[value][1].unflatten(-1, (heads, -1))
        W_O = out.weight.T.unflatten(0, (heads, -1))
        sent = value_vectors(output.cross_attentions[layer], values, W_O)
        branch = seen[out][1]
        given = seen[norm][0]
        residual = given if self.pre_norm else given - branch
        return sent, branch, residual


@functools.cache
def pair_of(name):
    model = build_or_skip(bridge, name, torch.float64)
    try:
        lm.run(model, prompt_of(model), "attention", part="cross")
    except lm.UnsupportedModelError as problem:  # It is T5 before TransformerLens 4.
        pytest.skip(str(problem))
    pair = prompt_of(model)
    return model, pair, Plain(name, pair)


@pytest.mark.parametrize("name", [*NAMES, *map(slow, OTHERS)])
def test_attention_and_value_zeroing_equal_transformers_alone(name):
    model, pair, plain = pair_of(name)
    maps = lm.run(model, pair, [lm.methods.AttentionWeights(per_head=True), "value_zeroing"], part="cross")
    weights = torch.stack(plain.run(output_attentions=True)[0].cross_attentions)[:, 0]
    torch.testing.assert_close(maps["attention"].scores, weights, atol=1e-12, rtol=0)
    keys = range(weights.shape[-1])
    columns = [[plain.value_zeroing(layer, key) for key in keys] for layer in range(2)]
    expected = torch.stack([torch.stack(of_layer, dim=-1) for of_layer in columns])
    assert expected.min() > 1e-9
    torch.testing.assert_close(maps["value_zeroing"].scores, expected, atol=1e-12, rtol=1e-6)
    hooks = lm.run(model, pair, "value_zeroing", part="cross", engine="hooks").scores
    torch.testing.assert_close(hooks, expected, atol=1e-12, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_norm_maps_equal_their_definitions_and_their_vectors_sum_to_the_real_output(name):
    model, pair, plain = pair_of(name)
    maps = lm.run(model, pair, ["value_norm", "attn_res", "attn_res_ln", "alti"], part="cross")
    for layer in range(2):
        sent, branch, residual = plain.vectors(layer)
        b_O = plain.part(layer, "o").bias
        bias = torch.zeros(1) if b_O is None else b_O
        torch.testing.assert_close(sent.sum(2) + bias, branch, atol=1e-10, rtol=0)
        whole = torch.cat([sent, residual[:, :, None]], dim=2)
        state, ending = residual + branch, None
        if not plain.pre_norm:
            norm = plain.norm(layer)
            ending = Norm("layer", norm.weight.detach(), norm.bias.detach(), norm.eps)
        normed = through_norm(ending, whole, state)
        after = state if ending is None else ending(state)
        expected = {
            "value_norm": norms(sent),
            "attn_res": norms(whole),
            "attn_res_ln": norms(normed),
            "alti": normalize_rows(alti(normed, after)),
        }
        for method, scores in expected.items():
            torch.testing.assert_close(maps[method].scores[layer], scores[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_by_cross_patterns_equal_transformers_own(name):
    model, pair, plain = pair_of(name)
    target = lm.targets.token(5, of="logit")
    out, _ = plain.run(output_attentions=True)
    gradients = torch.autograd.grad(out.logits[0, -1, 5], out.cross_attentions)
    weights = [weights.detach() for weights in out.cross_attentions]
    maps = lm.run(model, pair, lm.methods.GradientAttention(target=target), part="cross")
    for layer in range(2):
        weighted = (gradients[layer] * weights[layer])[0]
        torch.testing.assert_close(maps.scores[layer], weighted.clamp_min(0).mean(0), atol=1e-10, rtol=1e-5)
    one_step = lm.methods.AttentionAttribution(
        target=target, n_steps=1, method="riemann_right", per_head=True
    )
    attribution = lm.run(model, pair, one_step, part="cross")
    for layer in range(2):
        torch.testing.assert_close(
            attribution.scores[layer], (gradients[layer] * weights[layer])[0], atol=1e-10, rtol=1e-5
        )


@pytest.mark.parametrize("name", NAMES[1:])  # All but T5, because ReLU is not smooth.
def test_attributions_to_cross_patterns_sum_to_what_the_branch_does_to_the_target(name):
    model, pair, plain = pair_of(name)
    method = lm.methods.AttentionAttribution(target=lm.targets.token(5, of="logit"), n_steps=40)
    scores = lm.run(model, pair, method, part="cross").scores
    with torch.no_grad():
        clean = plain.run()[0].logits[0, -1, 5]
        for layer in range(2):
            matrix = plain.part(layer, "o")
            bias = torch.zeros(1) if matrix.bias is None else matrix.bias
            edit = (matrix, lambda module, given, result, bias=bias: torch.zeros_like(result) + bias)
            without = plain.run(edit=[edit])[0].logits[0, -1, 5]
            torch.testing.assert_close(scores[layer].sum(), clean - without, atol=1e-6, rtol=0)


# ------------------------------------------------------------------ inseq


@pytest.mark.parametrize("model_class", ["TransformerBridge", "HookedEncoderDecoder"])
def test_inseq_with_its_conventions(model_class):
    from lens_mix._classes.model_classes import transformer_lens_version

    model = build_or_skip(inseq_t5, model_class)
    if transformer_lens_version()[0] < (4 if model_class == "TransformerBridge" else 3):
        pytest.skip("this TransformerLens can't run it: refused, tested in the matrix")
    expected = inseq_arrays()
    target = torch.cat([torch.ones(1, dtype=torch.long), expected["target_ids"]])
    method = lm.methods.ValueZeroing(last_layer="after_final_norm", threshold=1e-5)
    maps = lm.run(model, (expected["source_ids"], target), method, part="all")
    for part, name in (("encoder", "enc_self"), ("decoder", "dec_self"), ("cross", "cross")):
        theirs = expected[name].double().permute(2, 1, 0).nan_to_num()
        ours = maps[part].normalized().scores[:, : theirs.shape[1]]
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


def inseq_arrays():

    with np.load(REFERENCE / "inseq_vz_t5_tiny.npz", allow_pickle=False) as arrays:
        names = ("source_ids", "target_ids", "enc_self", "dec_self", "cross")
        return {name: torch.from_numpy(arrays[name]) for name in names}


# ------------------------------------------------------------------ results


def any_pair_model(dtype=torch.float64):
    """Return BART in a Bridge, which does not exist before TransformerLens 3."""
    return build_or_skip(bridge, "bart", dtype)


def test_the_record_has_queries_of_the_target_and_keys_of_the_source(tmp_path):
    model = any_pair_model()
    source, target = torch.arange(3, 10), torch.arange(20, 24)
    m = lm.run(model, (source, target), "value_zeroing", part="cross")
    assert m.scores.shape == (2, 4, 7)
    assert m.tokens == [str(token) for token in target.tolist()]
    assert m.key_tokens == [str(token) for token in source.tolist()]
    assert not m.causal
    assert m.mask is None
    assert m.provenance["part"] == "cross"
    torch.testing.assert_close(m.normalized().scores.sum(-1), torch.ones(2, 4, dtype=torch.float64))
    best = m.top(1, query=2)[0]
    assert best.score == float(m.scores[-1, 2].max())
    assert best.token == m.key_tokens[best.position]
    m.save(tmp_path / "cross.safetensors")
    again = lm.MixingMap.load(tmp_path / "cross.safetensors")
    assert again.scores.equal(m.scores)
    assert again.key_tokens == m.key_tokens
    dropped = m.drop([0, 1], axis="key")
    assert dropped.scores.equal(m.scores[..., 2:])
    with pytest.raises(ValueError, match="expected 'query' or 'key' on a map with other keys"):
        m.drop(0)
    merged = m.merge_words(groups=[[0, 1], [2], [3]], key_groups=[[0, 1, 2], [3], [4, 5, 6]])
    torch.testing.assert_close(merged.scores[0, 0, 0], m.scores[0, :2, :3].sum(-1).mean())
    assert {"query", "key"} <= set(m.to_dataframe().columns)
    m.show()


@pytest.mark.parametrize("aggregate", [lm.rollout, lm.flow, lm.gradient_rollout])
def test_aggregations_of_square_maps_refuse_it_in_words(aggregate):
    model = any_pair_model()
    m = lm.run(model, prompt_of(model), "attention", part="cross")
    with pytest.raises(ValueError, match="expected the tokens as keys"):
        aggregate(m)


@pytest.mark.parametrize("method", ["attn_res", "attn_res_ln", "alti"])
def test_the_decoders_own_residual_stream_is_a_key_after_the_sources(method):
    model = any_pair_model()
    m = lm.run(model, (torch.arange(3, 10), torch.arange(20, 24)), method, part="cross")
    assert m.scores.shape == (2, 4, 8)
    assert m.key_tokens[-1] == RESIDUAL_KEY == "[RESIDUAL]"
    assert bool((m.scores[..., -1] > 0).all())
    torch.testing.assert_close(m.normalized().scores.sum(-1), torch.ones(2, 4, dtype=torch.float64))
    assert m.drop(RESIDUAL_KEY, axis="key").scores.equal(m.scores[..., :-1])


def test_all_parts_are_what_each_part_gives():
    model = any_pair_model()
    pair = prompt_of(model)
    one = lm.run(model, pair, "attention", part="all")
    several = lm.run(model, pair, ["attention", "value_norm"], part="all")
    many = list(lm.run_many(model, [pair, prompt_of(model, 5)], "attention", part="all"))
    streamed = list(lm.run_many(model, iter([pair]), "attention", part="all"))
    assert list(one) == list(several) == list(many[0]) == ["encoder", "decoder", "cross"]
    for part in one:
        alone = lm.run(model, pair, "attention", part=part).scores
        assert alone.equal(one[part].scores)
        for found in (several[part]["attention"], many[0][part], streamed[0][part]):
            torch.testing.assert_close(found.scores, alone)
    assert lm.run(model, pair, "attention", part="cross").scores.equal(one["cross"].scores)


@pytest.mark.parametrize("engine", ["algebra", "hooks"])
def test_rows_spans_and_heads_of_value_zeroing(engine):
    model = any_pair_model()
    pair = prompt_of(model)
    options = {"part": "cross", "engine": engine}
    whole = lm.run(model, pair, lm.methods.ValueZeroing(per_head=True), **options)
    rows = lm.run(model, pair, lm.methods.ValueZeroing(per_head=True), queries=[-1, 0], layers=[1], **options)
    assert whole.scores.shape == (2, 4, 5, 7)
    torch.testing.assert_close(rows.scores[0], whole.scores[1][:, [-1, 0]])
    spans = lm.run(model, pair, lm.methods.ValueZeroing(spans=[(0, 1), (6,)]), **options)
    single = lm.run(model, pair, "value_zeroing", **options)
    assert spans.key_tokens == ["".join(single.key_tokens[:2]), single.key_tokens[6]]
    torch.testing.assert_close(spans.scores[..., 1], single.scores[..., 6])
    with pytest.raises(ValueError, match=r"spans: expected positions 0\.\.6, got \[7\]"):
        lm.run(model, pair, lm.methods.ValueZeroing(spans=[(0, 7)]), **options)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_padded_source_gives_what_it_gives_alone(name, side):
    model, _, _ = pair_of(name)
    source, target, padding = torch.arange(3, 10), torch.arange(20, 24), torch.zeros(3, dtype=torch.long)
    ones = torch.ones_like(source)
    parts = [(padding, padding), (source, ones)] if side == "left" else [(source, ones), (padding, padding)]
    padded, mask = (torch.cat(kind) for kind in zip(*parts, strict=True))
    alone = lm.run(model, (source, target), METHODS, part="cross")
    for method, found in lm.run(model, (padded, target), METHODS, part="cross", attention_mask=mask).items():
        assert found.key_tokens == alone[method].key_tokens
        torch.testing.assert_close(found.scores, alone[method].scores)


def test_prompts_of_other_lengths_in_one_batch():
    """Map a batch in which the longest source has the shortest target."""
    model = bridge_or_hooked()
    pairs = [(torch.arange(3, 4 + n), torch.arange(20, 27 - n)) for n in range(5)]
    methods = [*METHODS, *GRADIENTS]
    for pair, maps in zip(pairs, lm.run_many(model, pairs, methods, part="cross"), strict=True):
        alone = lm.run(model, pair, methods, part="cross")
        for method in methods:
            torch.testing.assert_close(maps[method].scores, alone[method].scores)


def test_a_pruned_cross_head_is_in_no_map():
    model = bridge_or_hooked()
    pair = prompt_of(model)
    per_head = lm.run(model, pair, lm.methods.AttentionWeights(per_head=True), part="cross").scores
    with lm.experiments.pruned(model, [(0, 1)], part="cross"):
        found = lm.run(
            model, pair, [lm.methods.AttentionWeights(per_head=True), "value_zeroing"], part="cross"
        )
        hooks = lm.run(model, pair, "value_zeroing", part="cross", engine="hooks")
    assert float(found["attention"].scores[0, 1].abs().max()) == 0
    torch.testing.assert_close(found["attention"].scores[0, [0, 2, 3]], per_head[0, [0, 2, 3]])
    torch.testing.assert_close(found["value_zeroing"].scores, hooks.scores)


@pytest.mark.parametrize("method", [*METHODS, *GRADIENTS])
def test_a_source_of_one_token(method):
    model = any_pair_model()
    m = lm.run(model, (torch.tensor([7]), torch.arange(20, 24)), method, part="cross")
    assert m.scores.shape[1:] == (4, 1 + (method in ("attn_res", "attn_res_ln", "alti")))
    if method == "attention":
        assert bool((m.scores == 1).all())


def test_memory_bounds_hold_for_more_keys_than_queries():
    model = any_pair_model()
    pair = torch.arange(3, 33), torch.arange(3, 6)
    for method in METHODS:
        free = lm.run(model, pair, method, part="cross").scores
        bound = lm.run(model, pair, method, part="cross", max_memory=3_000_000).scores
        torch.testing.assert_close(bound, free)
        if method not in ("attention",):
            with pytest.raises(ValueError, match="max_memory: expected at least"):
                lm.run(model, pair, method, part="cross", max_memory=100)


def test_mixing_ratios_and_scales_of_edits_refuse_it_in_words():
    model = any_pair_model()
    pair = prompt_of(model)
    with pytest.raises(lm.UnsupportedModelError, match="statistics: expected part 'encoder' or 'decoder'"):
        mixing_ratios(model, pair, part="cross")
    with pytest.raises(lm.UnsupportedModelError, match="not for part='cross'"):
        lm.evaluation.removal_curves(model, pair, torch.arange(5.0), part="cross")
    pairs = top_pairs(lm.run(model, pair, "attention", part="cross"), count=70)
    assert len(pairs) == 2 * 5 * 7


def test_what_judges_maps_takes_the_part_by_either_name():
    model = any_pair_model()
    pair = source, target = torch.arange(3, 10), torch.arange(20, 24)
    m, row, scales = lm.run(model, pair, "attention", part="decoder"), torch.arange(4.0), lm.evaluation
    studies = lm.experiments
    example, decoder = studies.Example(tuple(source.tolist()), "x"), {"decoder_input_ids": target}

    def metric(model):
        return float(model(source[None], decoder_input=target[None])[0, -1, 7].detach())

    def pruned(**options):
        with studies.pruned(model, [(0, 1)], **options):
            return metric(model)

    def randomised(**options):
        with scales.randomised(model, **options):
            return metric(model)

    whole, none = metric(model), {"random": 1, "fractions": [0.5]}
    calls = [
        lambda **options: scales.keep_cells(model, pair, m, **options),
        lambda **options: scales.removal_curves(model, pair, row, **options),
        lambda **options: scales.soft_faithfulness(model, pair, row, **options),
        lambda **options: studies.head_importance(model, [pair], **options).scores.tolist(),
        lambda **options: studies.ablation_importance(model, metric, **options).scores.tolist(),
        lambda **options: studies.pruning_curves(model, metric, {}, **none, **options),
        lambda **options: studies.extract_triggers(model, [example], least=0.0, **decoder, **options),
        pruned,
        randomised,
    ]
    for call in calls:
        found = call(part="decoder")
        assert found == call(part="decoder")
        assert found not in (call(part="encoder") if call in (pruned, randomised) else None, whole)


# ------------------------------------------------------------------ errors


def test_an_unknown_part_is_an_error_with_all_parts():
    model = build_or_skip(bridge, "t5", torch.float64)
    known = r"part: expected one of \['cross', 'decoder', 'encoder', 'joint'"
    for run in (lm.run, lm.run_many):
        with pytest.raises(ValueError, match=known + r", 'all'\] .*got 'cros'; did you mean 'cross'\?"):
            run(
                model,
                [prompt_of(model)] if run is lm.run_many else prompt_of(model),
                "attention",
                part="cros",
            )
    with pytest.raises(ValueError, match=known + r"\] for .*, got 'all'$"):
        lm.Lens(model, "all")


def test_what_can_not_be_asked_is_an_error_in_words():
    model = any_pair_model()
    source = torch.arange(3, 10)
    for part in ("decoder", "cross"):
        with pytest.raises(ValueError, match=r"target: expected a pair \(source, target\) for part="):
            lm.run(model, source, "attention", part=part)
    alone = lm.run(model, (source, ""), "attention", part="cross")
    assert alone.scores.shape == (2, 1, 7)
    with pytest.raises(ValueError, match="prompt: expected at most n_ctx=32 tokens, got 33"):
        lm.run(model, (torch.full((33,), 5), source), "attention", part="cross")
    with pytest.raises(
        ValueError, match=r"expected one of \['cross', 'decoder', 'encoder', 'joint', 'all'\]"
    ):
        lm.run(model, (source, source), "attention", part="both")
    with pytest.raises(lm.UnsupportedModelError, match="not for part='cross'"):
        lm.run(model, (source, source), "globenc", part="cross")
    assert "not for part='cross'" in lm.support(model, part="cross")["decompx"]
    assert lm.support(model, part="cross")["alti"] == "ok (algebra)"
    assert lm.check(model, (source, source), part="cross").ok


def test_decoder_only_models_have_no_parts():
    model = gpt2_like()
    tokens = torch.arange(3, 9)
    for part in ("cross", "decoder"):
        with pytest.raises(ValueError, match=r"part: expected one of \['blocks'\]"):
            lm.run(model, tokens, "attention", part=part)
    with pytest.raises(ValueError, match="part: expected None, got 'all'"):
        lm.run(model, tokens, "attention", part="all")
    with pytest.raises(ValueError, match=r"a pair .* is for encoder-decoders"):
        lm.run(model, (tokens, tokens), "attention")


def test_a_hook_that_edits_what_the_proof_speaks_of_is_noticed():
    """Check that there is no map if cross-attention is not pattern @ values W_O + b_O."""
    model = bridge_or_hooked()
    pair = prompt_of(model)
    name = next(name for name in model.hook_dict if name.endswith("0.cross_attn.hook_z"))

    def shift(z, hook):
        return z + torch.linspace(0, 1, z.shape[1], dtype=z.dtype).reshape(1, -1, *[1] * (z.ndim - 2))

    refused = pytest.raises(lm.UnsupportedModelError, match="mixing is not verified")
    with model.hooks(fwd_hooks=[(name, shift)]), refused:
        lm.run(model, pair, "value_norm", part="cross")


def bridge_or_hooked():
    """Return an encoder-decoder that this TransformerLens can run."""
    from lens_mix._classes.model_classes import transformer_lens_version

    if transformer_lens_version()[0] < 3:
        pytest.skip("the decoder of TransformerLens 2 is refused: tested in the matrix")
    if transformer_lens_version()[0] < 4:
        return hooked_encoder_decoder(torch.float64)
    return bridge("t5", torch.float64)


def test_strings_with_a_tokenizer():
    model = build_or_skip(bridge, "bart", torch.float64)
    model.tokenizer = toy_tokenizer()
    m = lm.run(model, ("w5 w6 w7", "w8 w9"), "attention", part="cross")
    # Fast tokenizers of transformers 4 have no add_bos_token.
    first = model.tokenizer.convert_ids_to_tokens(model.tokenizer("w8")["input_ids"])[:-1]
    assert m.key_tokens == [*first, "w5", "w6", "w7"]
    assert m.tokens[1:] == [*first, "w8", "w9"]
