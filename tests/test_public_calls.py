"""Call every public name of the library once, on tiny models, so that a release that breaks one is seen.

`make test-newest` runs this file with the newest release of every dependency. What the calls return is tested
elsewhere; here a call has to come back. A public name that this file does not use fails its first test.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import types
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import transformers

import lens_mix as lm
from lens_mix import registry
from tests.tiny_models import available, bridge, tokens, toy_tokenizer
from tests.traces.readers import reader
from tests.wrapped_models import encoder

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not available(bridge, "gpt2"), reason="no TransformerBridge here"),
]
PROMPT = "w3 w5 w7 w9 w4"
PROMPTS = (PROMPT, "w8 w6 w30 w31 w32")


def public_names():
    """Return the public names, such as `lm.run` and `lm.targets.span`, and whether each is a function."""
    modules = {f"lm.{name}": value for name in lm.__all__ if inspect.ismodule(value := getattr(lm, name))}
    named = {"lm": lm, **modules}
    found = {
        f"{path}.{name}": getattr(module, name) for path, module in named.items() for name in module.__all__
    }
    # A module may have a name of `lens_mix` too: `lm.aggregation.rollout` is `lm.rollout`.
    twice = {name for name in found if name.count(".") == 2 and f"lm.{name.rpartition('.')[2]}" in found}
    return {name: inspect.isfunction(found[name]) for name in found.keys() - twice - modules.keys()}


def uses():
    """Return the names that the tests of this file use, and those that they call, in the form `lm.run`."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    nodes = [node for test in tests for node in ast.walk(test)]
    used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    return used, {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}


def test_every_public_name_is_called_here():
    used, called = uses()
    names = public_names()
    assert {"lm.run", "lm.evaluation.lds", "lm.hooks.record"} <= names.keys()
    # The test of all methods calls these by their strings.
    methods = {f"lm.methods.{method.__name__}" for method in lm.METHODS.values()}
    assert sorted(name for name, is_function in names.items() if is_function and name not in called) == []
    assert sorted(set(names) - used - methods) == []


@pytest.fixture(scope="module")
def maps(model):
    return lm.run(model, PROMPT, ["attention", "value_zeroing", "information_flow_routes"])


@pytest.fixture(scope="module")
def row(maps):
    return lm.rollout(maps["value_zeroing"]).scores[-1, -1]


@pytest.mark.parametrize("name", sorted(lm.METHODS))
def test_methods(name, model):
    assert lm.check(model, PROMPT).ok
    assert lm.citation(name)
    assert lm.support(model)[name] != ""
    assert lm.run(model, PROMPT, name).scores.isfinite().all()


def test_runs(model, maps, tmp_path):
    assert len(list(lm.run_many(model, PROMPTS, "attention"))) == 2
    first = maps["value_zeroing"]
    assert torch.equal(lm.run_again(model, first).scores, first.scores)
    assert lm.input_map(model, PROMPT, exact=1).kind == "input"
    first.save(tmp_path / "map.safetensors")
    assert isinstance(lm.MixingMap.load(tmp_path / "map.safetensors"), lm.MixingMap)
    maps.save(tmp_path / "maps.safetensors")
    assert list(lm.Maps.load(tmp_path / "maps.safetensors")) == list(maps)
    assert lm.models.find_positions(model, PROMPT, [-1, 0]) == [len(first.tokens) - 1, 0]
    assert lm.Lens(model).n_layers == 2
    with pytest.raises(lm.UnsupportedModelError, match="without attention"):
        lm.run(bridge("mamba"), torch.tensor([5, 9, 12]), "attention")


def test_models_from_weights():
    draw = functools.partial(torch.rand, generator=torch.Generator().manual_seed(0))
    weights = lm.models.Weights(
        embedding=draw(9, 4),
        positions=draw(5, 4),
        **{name: draw(1, 2, 4, 2) for name in ("query", "key", "value")},
        output=draw(1, 2, 2, 4),
        unembedding=draw(4, 9),
    )
    made: lm.models.TransformerLensModel = lm.models.model_from_weights(weights)
    tokens = torch.tensor([1, 8, 3])
    assert torch.equal(lm.models.prompt_logits(made, tokens), made(tokens[None])[0])
    assert lm.models.hooks_failure(made) is None


def test_wrapped_models():
    for family in ("DistilBert", "DebertaV2"):
        model = encoder(family, "ForSequenceClassification")
        wrapped = lm.wrap(model)
        ids = torch.tensor([[5, 9, 12, 7]])
        explained = lm.methods.InputGradients(target=lm.targets.hf_classifier(wrapped, 1))
        assert lm.run(wrapped, ids, explained, queries=[0]).scores.any()
        explained = lm.methods.InputGradients(target=lm.targets.class_difference(0, 1, wrapped))
        assert lm.run(wrapped, ids, explained, queries=[0]).scores.any()


def test_pictures(tmp_path):
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    folded = lm.models.fold_layer_scale(transformers.Dinov2Model(config).eval())
    assert isinstance(folded, transformers.ViTModel)
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = lm.run(bridge("vit"), pixels, lm.methods.InputGradients(target=lm.targets.class_(1)), queries=[0])
    lm.view.show_picture(found).savefig(tmp_path / "picture.png")


def test_aggregations(model, maps):
    for aggregated in (lm.rollout, lm.flow, lm.layer_mean):
        assert aggregated(maps["value_zeroing"]).kind == "input"
    assert lm.rollout(maps["value_zeroing"]).kind == lm.flow(maps["value_zeroing"]).kind
    gradient = lm.run(model, PROMPT, "gradient_attention")
    assert lm.gradient_rollout(gradient).kind == lm.layer_mean(gradient).kind == "input"
    assert lm.aggregation.tree_text(lm.attribution_tree(maps["attention"], threshold=0.1))
    both = bridge("bart", torch.float64)
    pair = (tokens(both, 1)[0], tokens(both, 1, seed=2)[0])
    by_part = {part: lm.run(both, pair, "attention", part=part) for part in ("encoder", "decoder", "cross")}
    joined = lm.aggregation.joint(by_part)
    assert lm.rollout(joined).scores.isfinite().all()
    assert isinstance(lm.experiments.align(by_part["cross"], [[0], [1]], [[1], [2]]), frozenset)


def test_traces():
    model = reader()
    documents = lm.Documents({"a": "A fine film.", "b": "The end."}, question="Was it fine?")
    assert isinstance(lm.trace(model, documents, answer=" It was."), lm.Trace)
    written = lm.trace(model, "A fine film.", generate=2, sources="token")
    assert isinstance(written, lm.Trace)
    assert len(list(lm.trace_many(model, ["A film.", "The end."], answers=[" It was.", " No."]))) == 2
    assert isinstance(lm.audit(model, documents, answer=" It was."), lm.Audit)


def test_corpora(model, tmp_path):
    mean = lm.corpus.Mean(by=("layer",))
    reduce = {"mean": mean, "largest": lm.corpus.Mean(by=("layer", "head"), of=lm.corpus.largest_per_head)}
    method = lm.methods.AttentionWeights(per_head=True)
    assert lm.corpus.largest_per_head(lm.run(model, PROMPT, method), {}).shape == (2, 4)
    done = lm.corpus.run(model, list(PROMPTS), method, reduce=reduce, out=tmp_path / "corpus")
    assert isinstance(done, lm.corpus.Summary)
    assert len(lm.corpus.load(tmp_path / "corpus")) > 0
    assert len(list(lm.corpus.maps(tmp_path / "corpus"))) == 2
    assert [prompt for prompt, _ in lm.corpus.by_prompt(tmp_path / "corpus")] == [0, 1]


def test_targets(model):
    targets = (
        lm.targets.head(lambda resid: resid[:, -1].sum(-1)),
        lm.targets.logit("w5"),
        lm.targets.logit_difference("w5", "w6"),
        lm.targets.loss("w5"),
        lm.targets.predicted(),
        lm.targets.probability("w5"),
        lm.targets.span(4),
        lm.targets.token("w5"),
    )
    # The last token has no next one.
    rows = [*((target, [-1]) for target in targets), (lm.targets.next_token(), [-2])]
    for target, queries in rows:
        assert isinstance(target, lm.targets.Target)
        assert (
            lm.run(model, PROMPT, lm.methods.InputGradients(target=target), queries=queries)
            .scores.isfinite()
            .all()
        )
    masked = bridge("bert", torch.float64)
    ids = tokens(masked, 1)
    explained = lm.methods.InputGradients(target=lm.targets.masked_token(5, position=2))
    assert lm.run(masked, ids, explained, queries=[2]).scores.isfinite().all()
    context = lm.targets.Context(ids[0], torch.zeros(1, 7, 50))
    assert lm.targets.logit(5).of_prompt(context)(context.output) == 0


def test_figures_pages_and_tables(maps, row, tmp_path):
    first = maps["value_zeroing"]
    graph = lm.graphs.information_flow_graph(first)
    figures = (
        lm.show_position(first),
        lm.view.show_position(lm.rollout(first)),
        lm.view.layer_maps(first),
        lm.view.token_bars({"a": row}, first.tokens),
        lm.view.information_flow(graph),
    )
    for number, figure in enumerate(figures):
        figure.savefig(tmp_path / f"{number}.png")
    assert lm.view.STYLE
    assert lm.page(maps).html.startswith("<!DOCTYPE html>")
    assert len(lm.compare(maps))
    assert lm.table([first], {"first": [0]}) is not None


def test_graphs(maps, tmp_path):
    layered = lm.graphs.layered_graph(maps["value_zeroing"])
    lm.graphs.save_graph(layered, tmp_path / "graph.graphml")
    assert len(lm.graphs.load_graph(tmp_path / "graph.graphml")) == len(layered)
    assert len(lm.graphs.to_neuronpedia(layered, model="tiny")["links"]) == layered.number_of_edges()
    routes = lm.graphs.information_flow_routes(maps["information_flow_routes"])
    assert len(lm.graphs.prune_graph(routes, threshold=0.1)) <= len(routes)


def test_statistics(model):
    heads = lm.run(model, PROMPT, lm.methods.AttentionWeights(per_head=True))
    assert lm.experiments.attention_statistics(heads) is not None
    assert lm.experiments.probe_heads(heads, [(1, 3), (2, 4)]).best


def test_hooks(model):
    ids, store = tokens(model, 1, 5), {}
    pattern, allowed = (
        torch.full((4, 5, 5), 0.2, dtype=torch.float64),
        torch.ones(5, 5, dtype=torch.bool).tril(),
    )
    norm = "blocks.0.ln1"
    pairs: list[lm.hooks.HookPair] = [
        lm.hooks.record(store, "blocks.0.hook_out"),
        *lm.hooks.record_all(store, ["blocks.0.hook_in"]),
        *lm.hooks.record_attention(0, store, ["pattern", "value"]),
        lm.hooks.record_mixing(1, store),
        lm.hooks.watch_pattern(0, lambda weights: None),
        lm.hooks.scale_pattern(0, 0.5),
        lm.hooks.add_to_pattern(0, 0.0 * pattern),
        lm.hooks.replace_pattern(0, pattern),
        lm.hooks.freeze_pattern(0, pattern[None]),
        lm.hooks.mask_attention(0, allowed),
        lm.hooks.mask_keys(1, 0),
        lm.hooks.zero_values(0, 1),
        lm.hooks.zero_queries(1),
        lm.hooks.prune_heads(1, 0),
        lm.hooks.scale_gradient("blocks.0.hook_out", 0.5),
        lm.hooks.scale_pattern_gradient(1, 0.5),
        lm.hooks.freeze_scale(norm),
    ]
    # These act together: one reads what another multiplies.
    ratio = lm.hooks.hold_activation_ratio(
        "blocks.1.mlp", lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    )
    for together in (*((pair,) for pair in pairs), ratio):
        with lm.hooks.must_fire(*together) as hooks, torch.enable_grad():
            logits = model.run_with_hooks(ids, fwd_hooks=hooks)
            # Some hooks act in the backward pass.
            torch.autograd.grad(logits.sum(), next(model.parameters()))
    assert store
    hook = lm.hooks.zero_values(0, 1, attention=lm.hooks.DEFAULT_ATTENTION)[1]
    assert isinstance(hook, lm.hooks.AttentionHook)
    assert callable(lm.hooks.HookFunction.__call__)
    assert isinstance(lm.hooks.HookName, types.UnionType)


def test_methods_of_users(model, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})

    @dataclasses.dataclass(frozen=True)
    class Parts(lm.Method):
        """Map the norms of what each key adds to the output of a block."""

        name: ClassVar[str] = "norm_of_parts"
        residual: ClassVar[float] = 0.5
        engines: ClassVar[tuple[str, ...]] = ("algebra",)
        records: ClassVar[frozenset[str]] = frozenset({"pattern", "value"})
        needs: ClassVar[frozenset[str]] = frozenset({"projection", "residual"})
        citation: ClassVar[str] = ""

        def __call__(self, block):
            parts = lm.models.block_parts(block)
            assert isinstance(parts, lm.models.BlockParts)
            states = lm.models.states_of(block)
            assert states.attention_out.shape == block.resid_pre.shape
            shares: lm.models.FeedForwardShares = lm.models.feed_forward_shares(block)
            assert shares.share(states.mid).shape == states.mid.shape
            return parts.keys.norm(dim=-1)

    lm.testing.check_method(Parts, model)
    assert callable(next(iter(lm.testing.method_checks(Parts))))
    assert lm.run(model, PROMPT, lm.register(Parts)()).scores.any()


def test_scales(model, maps, row):
    cases = [lm.evaluation.Case(PROMPT, relevant=(2,), sources={"a": [1, 2], "b": [3, 4]})]
    tasks = (
        lm.evaluation.Cues(cases, leave_out=(0,)),
        lm.evaluation.Sources(cases, ablations=8),
        lm.evaluation.Importance([PROMPT]),
        lm.evaluation.Removals([PROMPT], exact=2, beam=1),
        lm.evaluation.Cells([PROMPT]),
    )
    for task in tasks:
        assert isinstance(task, lm.evaluation.Task)
        board = lm.evaluate(model, task, ["attention"], ["mean"])
        assert isinstance(board, lm.evaluation.Leaderboard)
    assert lm.evaluation.evaluate(model, tasks[0], ["attention"]).records
    cells = lm.evaluation.keep_cells(model, PROMPT, maps["attention"], fractions=(0, 0.5, 1))
    assert isinstance(cells, lm.evaluation.CellFaithfulness)
    assert lm.evaluation.pool_cells([cells, cells]).cells >= cells.cells
    removals = (
        lm.evaluation.Drop(),
        lm.evaluation.MaskKeys(),
        lm.evaluation.ReplaceTokens("w5"),
        lm.evaluation.SampleTokens(samples=2),
        lm.evaluation.ZeroValues(),
    )
    for removal in removals:
        assert isinstance(removal, lm.evaluation.Removal)
        found = lm.evaluation.removal_curves(model, PROMPT, row, removal=removal, exact=0, beam=0)
        assert isinstance(found, lm.evaluation.RemovalCurves)
    soft = lm.evaluation.soft_faithfulness(model, PROMPT, row, samples=2)
    assert isinstance(soft, lm.evaluation.SoftFaithfulness)
    sources, weights = [[1, 2], [3, 4]], torch.tensor([0.5, 0.2])
    ablations = lm.evaluation.source_ablations(model, PROMPT, sources, ablations=8)
    assert isinstance(ablations, lm.evaluation.SourceAblations)
    assert lm.evaluation.lds(model, PROMPT, weights, sources, ablations=8) is not None
    drop = lm.evaluation.top_k_drop(model, PROMPT, weights, sources, k=1)
    assert isinstance(drop, lm.evaluation.TopKDrop)
    with lm.evaluation.randomised(model) as other:
        assert lm.run(other, PROMPT, "attention").scores.isfinite().all()
    with pytest.raises(ValueError, match="planted facts"):
        lm.experiments.planted_facts(reader(), 2)


def test_numbers(tmp_path):
    scores, truth = torch.tensor([0.5, 0.1, 0.3, 0.9]), torch.tensor([True, False, False, True])
    other = scores.square()
    assert lm.evaluation.average_precision(scores, truth) == 1
    assert lm.evaluation.mass_accuracy(scores, truth) > 0.5
    assert lm.evaluation.reciprocal_rank(scores, truth) == 1
    assert lm.experiments.roc_area(scores, truth) == 1
    assert lm.evaluation.spearman(scores, other) == pytest.approx(1)
    assert lm.evaluation.partial_spearman(scores, other) <= 1
    assert lm.evaluation.top_k_overlap(scores, other, 2) == 1
    interval = lm.evaluation.bootstrap(scores.tolist(), draws=100)
    assert isinstance(interval, lm.evaluation.Interval)
    assert lm.experiments.align_words(torch.rand(3, 3), [[0], [1]], [[0], [1]])
    (tmp_path / "gold").write_text("1-1 2p3\n")
    (gold,) = lm.experiments.read_gold(tmp_path / "gold")
    assert isinstance(gold, lm.experiments.GoldAlignment)
    errors = lm.experiments.alignment_errors([lm.experiments.diagonal(2, 3)], [gold])
    assert isinstance(errors, lm.experiments.AlignmentErrors)


def test_blimp(tmp_path):
    line = {"UID": "determiner_noun_agreement_1", "one_prefix_method": True, "one_prefix_prefix": "w5 w6 w7"}
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps(line | {"one_prefix_word_good": "w8", "one_prefix_word_bad": "w9"})
    )
    model = bridge("gpt2", tokenizer=toy_tokenizer())
    assert lm.experiments.blimp_cases(model, tmp_path / "pairs.jsonl")


def test_heads(model):
    ids = tokens(model, 2)

    def measure(model):
        with torch.no_grad():
            return model(ids)[:, -1].log_softmax(-1)[:, 5].mean().item()

    by_attribution = lm.experiments.head_importance(model, PROMPTS)
    assert isinstance(by_attribution, lm.experiments.HeadImportance)
    by_ablation = lm.experiments.ablation_importance(model, measure)
    assert len(lm.experiments.importance_correlations({"a": by_attribution, "b": by_ablation}))
    curves = lm.experiments.pruning_curves(model, measure, {"a": by_ablation}, fractions=(0, 0.5), random=1)
    assert isinstance(curves, lm.experiments.PruningCurves)
    with lm.experiments.pruned(model, [(0, 1)]) as other:
        assert lm.run(other, PROMPT, "attention").scores.isfinite().all()


def test_probing(model):
    prompts = [torch.tensor([3, 5, 7, token]) for token in range(8, 24)]
    states = lm.experiments.residuals_at(model, prompts)
    values, types = [token % 2 for token in range(8, 24)], list(range(8, 24))
    probing = lm.experiments.probe_layers(states, values, types)
    assert isinstance(probing, lm.experiments.Probing)
    agreement = lm.experiments.probing_agreement(probing, torch.rand(len(states), len(prompts)))
    assert isinstance(agreement, lm.experiments.ProbingAgreement)


def test_triggers(model):
    examples = [lm.experiments.Example((1, *range(3 + n, 9 + n), 2), n % 2) for n in range(2)]
    triggers = lm.experiments.extract_triggers(model, examples, special={1, 2}, least=0.0)
    assert isinstance(triggers[0], lm.experiments.Trigger)
    assert lm.experiments.insert_trigger(triggers[0], examples[1], special={1, 2}).tokens
    predict = lm.experiments.predict_by_token(model, {0: 5, 1: 6})
    report = lm.experiments.trigger_report(examples, triggers[:1], predict, special={1, 2})
    assert isinstance(report, lm.experiments.TriggerReport)


def test_constructed_models():
    copy = lm.experiments.constructed_models()["copy"]
    assert isinstance(copy, lm.experiments.ConstructedModel)
    assert len(lm.experiments.score_constructed("alti_logit", [copy], count=2))
    assert lm.experiments.Routes.__doc__
