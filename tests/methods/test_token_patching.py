"""Test token patching against plain transformers, occlusion, and a recomputed softmax."""

import dataclasses
import math
import re
import textwrap

import pytest
import torch

import lens_mix as lm
from benchmarks.input_map.cheaper import hidden_rows
from benchmarks.input_map.decoder import Decoder
from lens_mix._model.model import Lens
from lens_mix._passes.autograd_graph import Mixing
from lens_mix.experiments.passes import run_prompt
from lens_mix.hooks import mixing as hooks_mixing
from lens_mix.hooks import record_mixing, zero_values
from lens_mix.methods.bound_target import bind_rows
from lens_mix.methods.row_gradients import make_graph
from lens_mix.methods.token_patching import (
    hidden_effects,
    hidden_key_effects,
    rescale,
)
from tests.matrix import build_or_skip, cases, prompt_of, slow, wide_cases
from tests.tiny_models import bridge, hooked_transformer, tokens, wrapped_model

CASES = [*cases(refused=False), *(case for case in wide_cases() if case.refusal is None)]
STAND_INS = [5, 11]
# These are from the main matrix. The others raise an error, in `support` and `run` (tests/test_matrix.py).
RUNNING = {
    *("gpt2", "llama", "gemma", "qwen2", "qwen3", "gpt_neox", "gpt_neox_seq", "phi", "phi3", "falcon_mqa"),
    *("olmo", "olmo2", "stablelm", "granite", "gpt_bigcode", "cohere", "mixtral"),
}


def last_row(model, prompt, **options):
    method = lm.methods.TokenPatching(**{"replacements": STAND_INS, **options})
    return lm.run(model, prompt, method, queries=[-1]).scores[0, 0]


@pytest.mark.parametrize("n_exact", [0, 3, 24])
def test_equals_plain_transformers_layer_by_layer(n_exact):
    """The second implementation is in benchmarks/input_map, and does not use TransformerLens."""
    model, prompt = build_or_skip(bridge, "llama", torch.float64), torch.arange(20, 29)
    untouched = wrapped_model("llama", torch.float64, attn_implementation="eager")
    decoder, words = Decoder(untouched.requires_grad_(False)), torch.tensor(STAND_INS)
    (expected,) = hidden_rows(decoder, prompt, words, [n_exact]).values()
    # Hugging Face's norms are float32 in any dtype.
    torch.testing.assert_close(last_row(model, prompt, n_exact=n_exact), expected, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_without_tokens_between_it_is_occlusion(case):
    model = case.build(torch.float64)
    prompt, options = prompt_of(model), {"part": case.part, "queries": [-1]}
    runs = case.label.startswith("bridge ") and case.label.split(" ")[1] in RUNNING
    try:
        found = lm.run(model, prompt, lm.methods.TokenPatching(replacements=STAND_INS), **options).scores
    except lm.UnsupportedModelError:
        assert not runs
        return
    replaced = lm.methods.Occlusion(replacements=STAND_INS, measure="absolute")
    expected = lm.run(model, prompt, replaced, **options).scores
    torch.testing.assert_close(found[..., -2:], expected[..., -2:], atol=1e-5, rtol=0)


def test_terms_add_up_and_neighbors_have_nothing_between():
    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 10)
    direct, between, both = (last_row(model, prompt, paths=paths) for paths in ("direct", "between", "all"))
    torch.testing.assert_close(both, direct + between)
    assert bool((between[:-2] > 0).all())
    assert bool((between[-2:] == 0).all())


@pytest.mark.parametrize("n_measured", [2, slow(0), slow("auto")])
def test_rows_and_prompts_are_as_alone(n_measured):
    model = build_or_skip(bridge, "gpt2", torch.float64)
    method = lm.methods.TokenPatching(replacements=STAND_INS, n_measured=n_measured)
    prompts = [tokens(model, 1, length, seed=length)[0] for length in (7, 4)]
    together = list(lm.run_many(model, prompts, method, batch_size=2))
    for prompt, found in zip(prompts, together, strict=True):
        for query in range(len(prompt)):
            alone = lm.run(model, prompt[: query + 1], method, queries=[-1]).scores[0, 0]
            torch.testing.assert_close(found.scores[0, query, : query + 1], alone, atol=1e-9, rtol=0)
            assert bool((found.scores[0, query, query + 1 :] == 0).all())


@pytest.mark.parametrize("position", [2, 5, 6])
def test_hooks_that_know_positions_are_refused(position):
    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 10)
    pairs = [zero_values(layer, position) for layer in (0, 1)]
    with (
        model.hooks(fwd_hooks=pairs),
        pytest.raises(lm.UnsupportedModelError, match="alike at all"),
    ):
        last_row(model, prompt)


def test_a_hook_behind_the_blocks_that_knows_positions_is_refused():
    """No block differs, so only the numbers of tokens that replace themselves detect it."""
    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 10)

    def change_last(tensor, hook):
        tensor[:, 6] += torch.arange(tensor.shape[-1])
        return tensor

    hooks = [("unembed.hook_out", change_last)]
    with (
        model.hooks(fwd_hooks=hooks),
        pytest.raises(lm.UnsupportedModelError, match="alike at all"),
    ):
        last_row(model, prompt)


def test_hooks_that_act_everywhere_are_a_part_of_the_model():
    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 10)
    before = last_row(model, prompt)
    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda tensor, hook: 0.5 * tensor)]):
        found = last_row(model, prompt)
        replaced = lm.methods.Occlusion(replacements=STAND_INS, measure="absolute")
        expected = lm.run(model, prompt, replaced, queries=[-1]).scores[0, 0]
    torch.testing.assert_close(found[-2:], expected[-2:], atol=1e-5, rtol=0)
    assert not torch.allclose(found, before, atol=1e-3)


def test_the_clean_pass_leaves_the_graph_of_a_prompt_alone(monkeypatch):
    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 10)
    method = lm.methods.TokenPatching(replacements=STAND_INS)
    lm.run(model, prompt, method)
    passes, forward = [], Lens.forward

    def counted(lens, *args, **options):
        passes.append(torch.is_grad_enabled())
        return forward(lens, *args, **options)

    monkeypatch.setattr(Lens, "forward", counted)
    # There are the clean pass, which has the logits of the only row, and the pass with replacements. Two rows
    # need the unembedding of all positions, and each needs its own unembedding and one pass.
    for queries, expected in (([-1], 2), ([-2, -1], 6)):
        passes.clear()
        lm.run(model, prompt, method, queries=queries)
        assert len(passes) == expected
    passes.clear()
    # With a memory bound, the autograd graph has a pass of its own, and its logits are computed from it.
    lm.run(model, prompt, method, queries=[-1], max_memory=10_000_000)
    assert (len(passes), passes.count(True)) == (2 + 2, 2)
    passes.clear()
    # If everything is measured, nothing is estimated: the clean pass, one pass with copies.
    measured = lm.methods.TokenPatching(replacements=STAND_INS, n_measured="auto")
    lm.run(model, prompt, measured, queries=[-1])
    assert len(passes) == 2


def test_other_methods_of_the_run_are_out_of_the_graph():
    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 10)
    methods = ["attention", "value_zeroing", "alti", "gim", "value_norm", "occlusion"]
    together = lm.run(model, prompt, [*methods, lm.methods.TokenPatching(replacements=STAND_INS)])
    for name, found in together.items():
        assert not found.scores.requires_grad
        if name in methods:
            torch.testing.assert_close(found.scores, lm.run(model, prompt, name).scores)


def mixing(scores, values, gradient):
    pattern = scores.softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", pattern, values)
    return Mixing(pattern, values, mixed, gradient)


@pytest.mark.parametrize("most_weights", [1, 32, 1 << 20])
def test_effects_are_those_of_a_softmax_worked_out_anew(monkeypatch, most_weights):
    monkeypatch.setattr(hooks_mixing, "_MOST_WEIGHTS", most_weights)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    scores, values, gradient = normal(3, 4, 4), normal(4, 3, 3), normal(4, 3, 3)
    clean = mixing(scores, values, gradient)
    found = hidden_effects(clean)
    torch.testing.assert_close(found, hidden_key_effects(clean.pattern, values, gradient))
    for key in range(4):
        hidden = scores.clone()
        hidden[..., key] = -torch.inf
        changed = mixing(hidden, values, gradient).mixed - clean.mixed
        torch.testing.assert_close(found[:, key], (gradient * changed).sum((1, 2)))


def test_values_that_heads_share():
    generator = torch.Generator().manual_seed(0)
    scores, values = torch.randn(4, 3, 3, generator=generator), torch.randn(3, 2, 5, generator=generator)
    gradient = torch.randn(3, 4, 5, generator=generator)
    shared = hidden_effects(Mixing(scores.softmax(-1), values, gradient, gradient))
    each = values[:, [0, 0, 1, 1]]
    torch.testing.assert_close(shared, hidden_effects(mixing(scores, each, gradient)))


def test_a_key_with_nearly_all_of_the_weight_keeps_its_digits():
    scores, values = torch.tensor([[[0.0, -20.0, -21.0]]]), torch.tensor([5.0, 1.0, 3.0]).reshape(3, 1, 1)
    found = hidden_effects(mixing(scores, values, torch.ones(1, 1, 1)))
    # Without the first key, the others share the row by e to 1.
    e = math.e
    assert found[0, 0] == pytest.approx((e * 1 + 3) / (e + 1) - 5, rel=1e-5)


def test_as_many_keys_as_asked_are_exact():
    model, prompt = build_or_skip(bridge, "gpt2", torch.float64), torch.arange(3, 10)
    exact = last_row(model, prompt, paths="direct")
    for n_exact in (0, 2, 4):
        some = last_row(model, prompt, paths="direct", n_exact=n_exact)
        same = torch.isclose(some, exact, atol=1e-9, rtol=0)
        assert int(same.sum()) == n_exact + 1
        assert bool(same[-1])


# Hugging Face's RMSNorms and softmaxes are float32 in any dtype.
@pytest.mark.parametrize(("name", "bound"), [("gpt2", 1e-10), ("llama", 1e-5)])
def test_edits_on_a_run_of_ones_own_give_the_direct_term(name, bound):
    """The example of `TokenPatching.interventions` runs unchanged."""
    model, prompt = build_or_skip(bridge, name, torch.float64), torch.arange(3, 10)
    method = lm.methods.TokenPatching(replacements=STAND_INS[:1], paths="direct")
    found = lm.run(model, prompt, method, queries=[-1]).scores[0, 0]
    with torch.no_grad():
        clean = model(prompt[None])[0, -1]
    (example,) = re.findall(r"run:\n\n(.*?)\n\n", method.interventions.__doc__, re.DOTALL)
    for j in (0, 2, 4):
        names = {"model": model, "tokens": prompt, "method": method, "torch": torch, "layers": range(2)}
        # The token at position 2 is the stand-in itself, so the next one of the vocabulary replaces it.
        names |= {"j": j, "other_token": STAND_INS[0] + (j == 2)}
        names["target"] = lambda logits: logits.log_softmax(-1)[clean.argmax()]
        with torch.no_grad():
            exec(textwrap.dedent(example), names)
        torch.testing.assert_close(found[j], names["direct"], atol=bound, rtol=0)
        assert float(found[j]) > 100 * bound
        assert all(function.calls == 1 for _, function in names["hooks"])


@pytest.mark.parametrize(("name", "bound"), [("gpt2", 1e-10), ("llama", 1e-6)])
def test_effects_are_the_formula_on_what_hooks_record(name, bound):
    """This is a run of one's own, whose backward pass is the model's."""
    model, prompt = build_or_skip(bridge, name, torch.float64), torch.arange(3, 10)
    store = {}
    hooks = [record_mixing(layer, store) for layer in range(2)]
    logits = model.run_with_hooks(prompt[None], fwd_hooks=hooks)[0, -1].log_softmax(-1)
    for layer in range(2):
        pattern, values, mixed = (store[f"blocks.{layer}.attn.hook_{it}"] for it in ("pattern", "v", "z"))
        (gradient,) = torch.autograd.grad(logits.max(), mixed, retain_graph=True)
        whole = Mixing(pattern.detach(), values.detach(), mixed.detach(), gradient).at(torch.arange(7))
        shared = whole.values.repeat_interleave(pattern.shape[1] // values.shape[2], dim=1)
        found, expected = hidden_effects(whole), hidden_key_effects(whole.pattern, shared, whole.gradient)
        torch.testing.assert_close(found.tril(-1), expected.tril(-1), atol=bound, rtol=0)
        assert float(found.tril(-1).abs().max()) > 1e-4


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_terms_to_first_order_are_the_formula_on_the_gradients_of_the_rules(name):
    model, prompt = build_or_skip(bridge, name, torch.float64), torch.arange(3, 10)
    method, last = lm.methods.TokenPatching(), len(prompt) - 1
    blocks = run_prompt(model, prompt, method).blocks
    # The graph of the run has been freed, so another one is made.
    rules = method.clean_rules([block.anatomy for block in blocks])
    graph = make_graph(blocks[0], blocks[0].batch, rules)
    value = bind_rows(blocks, method.target).values_in(graph, torch.tensor([last]))
    effects = torch.zeros(len(prompt), len(prompt), dtype=torch.float64)

    def add(layer: int, whole: Mixing) -> None:
        mixing = whole.at(torch.arange(len(prompt)))
        values = mixing.values.repeat_interleave(len(mixing.pattern) // mixing.values.shape[1], dim=1)
        effects.add_(hidden_key_effects(mixing.pattern, values, mixing.gradient).tril(-1))

    graph.read_mixing(value, add)
    between = last_row(model, prompt, paths="between")
    torch.testing.assert_close(between, effects[:-1].square().sum(0).sqrt(), atol=1e-6, rtol=0)
    direct = last_row(model, prompt, paths="direct", n_exact=0)
    torch.testing.assert_close(direct[:-1], effects[-1, :-1].abs(), atol=1e-6, rtol=0)


# Hugging Face's RMSNorms and softmaxes are float32 in any dtype.
@pytest.mark.parametrize(("name", "bound"), [("gpt2", 1e-10), ("llama", 1e-6)])
def test_the_strongest_scores_are_measured_and_the_others_keep_their_order(name, bound):
    model, prompt = build_or_skip(bridge, name, torch.float64), torch.arange(3, 12)
    replaced = lm.methods.Occlusion(replacements=STAND_INS, measure="absolute")
    expected = lm.run(model, prompt, replaced, queries=[-1]).scores[0, 0]
    estimated = last_row(model, prompt)
    found = lm.run(
        model, prompt, lm.methods.TokenPatching(replacements=STAND_INS, n_measured=3), queries=[-1]
    )
    row, (chosen,) = found.scores[0, 0], found.provenance["details"]["measured"][0]
    assert chosen == sorted([*estimated[:-1].topk(3).indices.tolist(), 8])
    assert found.provenance["details"]["measured_passes"] == [[2 * len(chosen)]]
    torch.testing.assert_close(row[chosen], expected[chosen], atol=bound, rtol=0)
    assert not torch.allclose(row[chosen], estimated[chosen], atol=1e-3)
    others = [j for j in range(9) if j not in chosen]
    factor = expected[chosen].sum() / estimated[chosen].sum()
    torch.testing.assert_close(row[others], estimated[others] * factor, atol=bound, rtol=0)


def test_all_scores_of_a_short_prompt_are_measured_and_some_of_a_long_one():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    for length, everything in ((17, True), (18, False), (32, False)):
        prompt = tokens(model, 1, length, seed=length)[0]
        method = lm.methods.TokenPatching(replacements=STAND_INS, n_measured="auto")
        found = lm.run(model, prompt, method, queries=[-1])
        replaced = lm.methods.Occlusion(replacements=STAND_INS, measure="absolute")
        expected = lm.run(model, prompt, replaced, queries=[-1], progress=None).scores[0, 0]
        (chosen,) = found.provenance["details"]["measured"][0]
        assert (len(chosen) == length) == everything
        assert length - 1 in chosen
        torch.testing.assert_close(found.scores[0, 0, chosen], expected[chosen], atol=1e-10, rtol=0)
        # Replacements change at most 1.5 times the tokens of the estimate, which takes 7.5 passes or less.
        changed = sum(2 * (length - key) for key in chosen) / length
        assert 4 < changed <= (2.5 if everything else 1.5) * 7.5


def test_rows_of_more_than_32_tokens_are_estimated_alone():
    model = build_or_skip(bridge, "gpt2", torch.float64, n_positions=64)
    prompt, method = tokens(model, 1, 33, seed=0)[0], lm.methods.TokenPatching(replacements=STAND_INS)
    auto = dataclasses.replace(method, n_measured="auto")
    found, estimated = (lm.run(model, prompt, each, queries=[10, -1]) for each in (auto, method))
    assert torch.equal(found.scores[0, 1], estimated.scores[0, 1])
    assert not torch.allclose(found.scores[0, 0], estimated.scores[0, 0])
    assert found.provenance["details"] == {
        "measured": [[list(range(11)), []]],
        "measured_passes": [[22, 0]],
    }
    some = lm.run(model, prompt, dataclasses.replace(method, n_measured=2), queries=[-1])
    assert len(some.provenance["details"]["measured"][0][0]) == 3


def test_rescaled_by_hand():
    found = rescale(torch.tensor([4.0, 1.0, 2.0, 2.0]), torch.tensor([0, 3]), torch.tensor([9.0, 0.0]))
    assert found.tolist() == [9.0, 1.5, 3.0, 0.0]
    nothing = rescale(torch.tensor([0.0, 0.0]), torch.tensor([1]), torch.tensor([3.0]))
    assert nothing.tolist() == [0.0, 3.0]


def test_one_token():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    found = last_row(model, torch.tensor([7]))
    expected = lm.run(
        model, torch.tensor([7]), lm.methods.Occlusion(replacements=STAND_INS, measure="absolute")
    )
    torch.testing.assert_close(found, expected.scores[0, 0])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mistral", "a sliding window shorter than the prompt and its replacements"),
        ("gptj", "leaves attention to transformers"),
    ],
)
def test_models_it_can_not_run_on_say_why(name, reason):
    model = build_or_skip(bridge, name, torch.float64)
    with pytest.raises(lm.UnsupportedModelError, match=reason):
        last_row(model, torch.arange(3, 12))
    assert reason in lm.support(model)["token_patching"]


def test_hooked_transformers_are_refused():
    with pytest.raises(lm.UnsupportedModelError, match="decoder-only TransformerBridge"):
        last_row(build_or_skip(hooked_transformer, "LN", torch.float64), torch.arange(3, 8))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"paths": "indirect"}, ValueError, "paths: expected 'all'"),
        ({"n_samples": 0}, ValueError, "n_samples"),
        ({"n_measured": -1}, ValueError, "n_measured"),
        ({"n_measured": "all"}, TypeError, "n_measured"),
        ({"n_measured": 2, "paths": "direct"}, ValueError, "n_measured: measures all paths"),
        ({"replacements": []}, ValueError, "replacements"),
        ({"target": 3}, TypeError, "target"),
    ],
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        lm.methods.TokenPatching(**options)


def test_targets_of_several_positions_are_refused():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    with pytest.raises(lm.UnsupportedModelError, match="one that reads a single position"):
        last_row(model, torch.arange(3, 9), target=lambda logits: logits.sum((1, 2)))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gpt_neox"])
def test_a_model_that_keeps_no_cache_gets_the_same_map(name):
    """Without cache and mask, transformers takes positions that restart for several prompts."""
    model = build_or_skip(bridge, name)
    prompt = tokens(model, 1, 7)
    expected = last_row(model, prompt)
    model.original_model.config.use_cache = False
    torch.testing.assert_close(last_row(model, prompt), expected)
    assert lm.input_map(model, prompt).method == "token_patching"
    assert model.original_model.config.use_cache is False
