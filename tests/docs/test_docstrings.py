"""Test what an editor shows of the public objects: an example that runs, a return type, and no internal path.

The examples run on tiny random models. What they print is compared only if the docstring has it.
"""

from __future__ import annotations

import doctest
import inspect
import json
import pathlib
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import lens_mix as lm
from lens_mix import registry
from tests.demos.tiny_folder import save_tiny_bert, save_tiny_classifier, save_tiny_llama, save_tiny_t5
from tests.tiny_models import available, bridge

pytestmark = pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge here")

MODULES = [name for name in lm.__all__ if inspect.ismodule(getattr(lm, name))]
# Functions make these records, and the example of the function shows what to do with its record.
RETURNED = {
    "lm.corpus.Summary": "lm.corpus.run",
    "lm.evaluation.CellFaithfulness": "lm.evaluation.keep_cells",
    "lm.evaluation.Interval": "lm.evaluation.bootstrap",
    "lm.evaluation.Leaderboard": "lm.evaluate",
    "lm.evaluation.RemovalCurves": "lm.evaluation.removal_curves",
    "lm.evaluation.SoftFaithfulness": "lm.evaluation.soft_faithfulness",
    "lm.evaluation.SourceAblations": "lm.evaluation.source_ablations",
    "lm.evaluation.TopKDrop": "lm.evaluation.top_k_drop",
    "lm.experiments.AlignmentErrors": "lm.experiments.alignment_errors",
    "lm.experiments.ConstructedModel": "lm.experiments.constructed_models",
    "lm.experiments.HeadImportance": "lm.experiments.head_importance",
    "lm.experiments.Probing": "lm.experiments.probe_layers",
    "lm.experiments.ProbingAgreement": "lm.experiments.probing_agreement",
    "lm.experiments.PruningCurves": "lm.experiments.pruning_curves",
    "lm.experiments.Routes": "lm.experiments.constructed_models",
    "lm.experiments.Trigger": "lm.experiments.extract_triggers",
    "lm.experiments.TriggerReport": "lm.experiments.trigger_report",
    "lm.models.BlockParts": "lm.models.block_parts",
    "lm.models.FeedForwardShares": "lm.models.feed_forward_shares",
}
# Examples whose `model` is not a causal decoder of text.
OTHER_MODELS = {
    "lm.aggregation.joint": "t5",
    "lm.experiments.align": "t5",
    "lm.targets.class_": "vit",
    "lm.targets.class_difference": "classifier",
    "lm.targets.masked_token": "bert",
    "lm.view.show_picture": "vit",
}
# These read a corpus that another call has written.
READS_CORPUS = {"lm.corpus.by_prompt", "lm.corpus.load", "lm.corpus.maps"}
# A random model predicts none of the planted facts.
NOT_RUN = {"lm.experiments.planted_facts"}
# What TransformerLens and transformers return has the type that their releases give it.
UNTYPED = {
    "lm.Lens.forward",
    "lm.Lens.tokenizer",
    "lm.models.TransformerLensModel.cfg",
    "lm.models.TransformerLensModel.to_tokens",
    "lm.models.TransformerLensModel.tokenizer",
}

# Paths and modules of the repository, which a user of the package does not have or should not import.
_INTERNAL = re.compile(
    r"\b(?:docs|tests|benchmarks|demos)/|\.\./|\b\w+\.(?:md|py|bib)\b|\blens_mix(?:\.\w+)*\._|`_[a-z]"
)


def list_public_objects() -> dict[str, Any]:
    """Return the public classes and functions, `lm.METHODS`, and two modules with examples, by name."""
    found = {"lm": lm, "lm.hooks": lm.hooks}
    found |= {f"lm.{name}": getattr(lm, name) for name in lm.__all__ if name not in MODULES}
    known = {id(thing) for thing in found.values()}
    for name in MODULES:
        module = getattr(lm, name)
        things = {f"lm.{name}.{each}": getattr(module, each) for each in module.__all__}
        found |= {path: thing for path, thing in things.items() if id(thing) not in known}
    # Strings and types of arguments have no docstring of their own.
    without = (str, types.UnionType, types.GenericAlias)
    return {path: thing for path, thing in found.items() if not isinstance(thing, without)}


PUBLIC = list_public_objects()
DOCSTRINGS = {path: inspect.getdoc(thing) or "" for path, thing in PUBLIC.items()}
RUNNABLE = {path for path, text in DOCSTRINGS.items() if ">>>" in text} - NOT_RUN


def list_members() -> dict[str, Any]:
    """Return the public objects, and the public methods and properties that their classes define."""
    members = dict(PUBLIC)
    for path, thing in PUBLIC.items():
        for name, member in vars(thing).items() if inspect.isclass(thing) else ():
            member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(member) and not name.startswith("_"):
                members[f"{path}.{name}"] = member
    return members


@pytest.fixture(scope="module", name="folders")
def make_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of tiny models that have the words of the examples in their vocabulary."""
    words = sorted(set(re.findall(r"[^\W\d_]+|[.,?]", "\n".join(DOCSTRINGS.values()))))
    folders = {
        name: tmp_path_factory.mktemp(name) for name in ("llama", "t5", "bert", "classifier", "dinov2")
    }
    save_tiny_llama(folders["llama"], words, context=512)
    save_tiny_t5(folders["t5"], words)
    save_tiny_bert(folders["bert"])
    save_tiny_classifier(folders["classifier"])
    config = folders["classifier"] / "config.json"
    labels = {"id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    config.write_text(json.dumps(json.loads(config.read_text()) | labels))
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 56}
    torch.manual_seed(0)
    transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).save_pretrained(folders["dinov2"])
    return folders


@pytest.fixture(scope="module", name="models")
def load_models(folders: dict[str, Path]) -> dict[str, Any]:
    """Return the tiny models by what they read; those of `OTHER_MODELS` are used by name."""
    from transformer_lens.model_bridge import TransformerBridge

    load = transformers.AutoModelForSequenceClassification.from_pretrained
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["classifier"])
    return {
        **{name: TransformerBridge.boot_transformers(str(folders[name])) for name in ("llama", "t5", "bert")},
        "classifier": lm.wrap(load(folders["classifier"]), tokenizer),
        "vit": bridge("vit"),
    }


class AnyOutput(doctest.OutputChecker):
    """Compare what is printed only if the docstring has it."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def test_every_public_object_has_an_example() -> None:
    # tests/hooks/test_examples.py runs the examples of hooks, which are blocks of Python.
    has_block = {
        path for path, text in DOCSTRINGS.items() if path.startswith("lm.hooks.") and "```python" in text
    }
    assert PUBLIC.keys() - RUNNABLE - RETURNED.keys() - has_block - NOT_RUN == set()
    assert set(RETURNED.values()) - RUNNABLE == set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted(RUNNABLE))
def test_the_example_runs(
    path: str,
    folders: dict[str, Path],
    models: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = make_names(path, folders, models)
    test = doctest.DocTestParser().get_doctest(DOCSTRINGS[path], names, path, None, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    write_blimp(tmp_path / "determiner_noun_agreement_1.jsonl")
    if path in READS_CORPUS:
        lm.corpus.run(names["model"], ["Anna lives in Rome."], ["attention", "value_zeroing"], out="maps")
    said: list[str] = []
    failed, _ = doctest.DocTestRunner(AnyOutput(), verbose=False).run(test, out=said.append)
    assert failed == 0, "".join(said)


def make_names(path: str, folders: dict[str, Path], models: dict[str, Any]) -> dict[str, Any]:
    """Return what the example of an object may use without making it."""
    from transformer_lens.model_bridge import TransformerBridge

    model = models[OTHER_MODELS.get(path, "llama")]
    text = (
        "The Eiffel Tower is in [MASK]" if model is models["bert"] else "The Eiffel Tower is in the city of"
    )
    return {
        "lm": lm,
        "torch": torch,
        "pathlib": pathlib,
        "pytest": pytest,
        "TransformerBridge": TransformerBridge,
        "model": model,
        "tokens": None if model is models["vit"] else torch.tensor([model.tokenizer(text)["input_ids"]]),
        "pixels": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
        "name": str(folders["dinov2" if path == "lm.models.fold_layer_scale" else "classifier"]),
        "AutoModelForSequenceClassification": transformers.AutoModelForSequenceClassification,
        "AutoTokenizer": transformers.AutoTokenizer,
        "A": torch.tensor([[[1.0, 0.0], [0.5, 0.5]]]),
        "MyMethod": lm.methods.ValueZeroing,
    }


def write_blimp(path: Path) -> None:
    """Write one pair in the form of a file of BLiMP."""
    pair = {"UID": path.stem, "one_prefix_method": True, "one_prefix_prefix": "Anna lives in the"}
    path.write_text(json.dumps(pair | {"one_prefix_word_good": "city", "one_prefix_word_bad": "keys"}))


def test_an_example_that_fails_is_noticed() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n>>> [][0]\n>>> 1\n", {}, "", None, None)
    said: list[str] = []
    assert doctest.DocTestRunner(AnyOutput(), verbose=False).run(test, out=said.append).failed == 2


def test_every_list_of_exceptions_is_needed() -> None:
    members = list_members()
    named = {*RETURNED, *RETURNED.values(), *OTHER_MODELS, *READS_CORPUS, *NOT_RUN, *UNTYPED}
    assert named - members.keys() == set()
    assert RUNNABLE & RETURNED.keys() == set()
    assert [path for path in UNTYPED if not is_untyped(members[path])] == []


def is_untyped(function: Any) -> bool:
    """Return whether an editor can't show what a function returns."""
    returned = inspect.signature(function).return_annotation
    if returned in ("Any", Any) and typing.get_overloads(function):
        return False
    return returned is inspect.Signature.empty or bool(
        re.fullmatch(r"(?:\w+\[)?(?:typing\.)?Any\]?", str(returned))
    )


def test_every_function_says_what_it_returns() -> None:
    functions = {path: member for path, member in list_members().items() if inspect.isfunction(member)}
    assert len(functions) > 200
    assert [path for path in functions if path not in UNTYPED and is_untyped(functions[path])] == []


def test_no_docstring_names_a_path_of_the_repository() -> None:
    found = {path: _INTERNAL.findall(inspect.getdoc(thing) or "") for path, thing in list_members().items()}
    assert {path: paths for path, paths in found.items() if paths} == {}


@pytest.mark.parametrize(
    "text",
    [
        "see docs/evidence/aggregation.md",
        "`lens_mix._inputs.prompts.read_prompt`",
        "a key of `references.bib`",
    ],
)
def test_a_path_of_the_repository_is_noticed(text: str) -> None:
    assert _INTERNAL.search(text)
