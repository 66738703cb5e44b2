"""Test that the guides on models, pictures, many prompts, hooks, scores and methods run as they are written.

They run on tiny models in the usual loop. Their outputs are compared on the demo models, if these are on this
machine (`python -m tests.docs.guides` writes them).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
import transformers

import lens_mix as lm
from lens_mix import registry
from lens_mix._blocks.block import Block
from lens_mix._classes.model_classes import transformer_lens_version
from lens_mix._model.anatomy import BlockAnatomy
from lens_mix.maps import Grid
from tests.demos.tiny_folder import save_tiny_bert, save_tiny_llama, save_tiny_t5
from tests.docs import guides, how_tos
from tests.docs.guides import GUIDES, STEPS_WITH_OUTPUT
from tests.docs.test_how_tos import assert_same_output
from tests.pictured_models import picture_prompt, pictured
from tests.tiny_models import available, bridge, speech_tokenizer, toy_tokenizer

each_guide = pytest.mark.parametrize("guide", GUIDES)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Llama with the layers of SmolLM2, which knows the words of the guides."""
    code = "".join(how_tos.read_code(page) for page in GUIDES.values())
    words = sorted(set(re.findall(r"[^\W\d_]+", code)))
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), words, context=512, layers=30)


def run(guide: str, model: Any, folder: Path) -> dict[str, Any]:
    """Run a guide with one model, and return its names."""
    with matplotlib.rc_context():
        results = guides.run(guide, lambda name: model, {}, folder)
    check_output(guide, results)
    return results[-1].names


def check_output(guide: str, results: list[guides.GuideResult]) -> None:
    """Compare the number of printed lines: a random model prints other numbers, but as many lines."""
    for result, step in zip(results, how_tos.read_steps(GUIDES[guide]), strict=False):
        if step.output is not None:
            assert len(result.printed.splitlines()) == len(step.output.splitlines())


# ---------------------------------------------------------------------- models and pictures


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    not available(bridge, "distilbert"), reason="no TransformerBridge in this TransformerLens"
)
def test_the_guide_on_models_runs(
    llama: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bert = save_tiny_bert(tmp_path_factory.mktemp("bert"))
    load = transformers.AutoTokenizer.from_pretrained
    words = ["see", "red", "house", "vois", "maison", "rouge", "."]
    t5 = save_tiny_t5(tmp_path_factory.mktemp("t5"), words)
    config = transformers.DistilBertConfig(
        vocab_size=len(load(bert)), dim=32, hidden_dim=64, n_layers=2, n_heads=4
    )
    classifier = transformers.DistilBertForSequenceClassification(config).eval()
    loaders = {
        "AutoModelForSequenceClassification": lambda name: classifier,
        # The library reads the files of a model's tokenizer in the same way.
        "AutoTokenizer": lambda name, **options: load(bert if "distilbert" in name else name, **options),
    }

    def find(name: str) -> Path:
        return next(folder for part, folder in {"bert": bert, "t5": t5, "": llama}.items() if part in name)

    # TransformerBridge runs T5, which is the last step, on TransformerLens 4.
    has_t5 = transformer_lens_version() >= (4,)
    results = guides.run("models", find, loaders, tmp_path, n_steps=None if has_t5 else -1)
    check_output("models", results)
    names = results[-1].names
    pair = lm.run(names["bert"], ("a fine film", "it was good"), "attention")
    assert names["wrapped"] is not names["bert"]
    assert pair.tokens[0] == "[CLS]"
    assert pair.tokens.count("[SEP]") == 2
    hidden = lm.run(names["wrapped"], "a fine film", names["occlusion"], queries=[0])
    assert float(hidden.scores.abs().max()) > 0
    if not has_t5:
        return
    cross, source, rollout = (names[name] for name in ("cross", "source", "rollout"))
    assert [token.strip("▁ ") for token in cross.key_tokens[-3:]] == ["house", ".", "</s>"]
    assert names["maps"]["cross"].key_tokens[-1] == "[RESIDUAL]"
    assert source.key_tokens == cross.key_tokens
    rows = rollout.layer(-1).select_queries(slice(rollout.provenance["joint"]["source"], None))
    assert rows.query_labels == cross.tokens
    assert float(rows.scores.sum(-1).min()) == pytest.approx(1)


@pytest.mark.parametrize(("name", "row"), [("bert", 0), ("llama", 4)])
def test_the_row_that_is_shown_by_default_is_that_of_the_table(name: str, row: int) -> None:
    if not available(bridge, name):
        pytest.skip(f"no {name} in this TransformerLens")
    assert lm.run(bridge(name), torch.arange(5), "attention").default_query_position == row


@pytest.mark.skipif(not available(bridge, "vit"), reason="no TransformerBridge in this TransformerLens")
def test_the_guide_on_pictures_runs(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    # The last step is of pictures beside text, for which `generate` takes inputs on TransformerLens 4.
    has_text = transformer_lens_version() >= (4,)
    image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)).save(tmp_path / "picture.png")
    sizes = {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 1, "patch_size": 14}
    dinov2 = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, image_size=224)).eval()
    models = {
        "vit": bridge("vit", patch_size=4, num_labels=300),
        "hubert": bridge("hubert"),
        # One second has fifty frames.
        "whisper": bridge("whisper", max_source_positions=50),
    }
    models["whisper"].processor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    if has_text:
        models["SmolVLM"] = pictured("idefics3", tokenizer=toy_tokenizer())

    def load_processor(name: str) -> Any:
        size = 224 if "dinov2" in name else 16

        def process(images: Any, return_tensors: str) -> dict[str, torch.Tensor]:
            pixels = torch.from_numpy(np.asarray(images.resize((size, size)))).permute(2, 0, 1)
            return {"pixel_values": pixels[None].float() / 255}

        return process

    loaders = {
        "Dinov2Model": lambda name: dinov2,
        "AutoImageProcessor": load_processor,
        "WhisperTokenizer": lambda name, **_: speech_tokenizer(["ĠA", "Ġfine", "Ġday", "."]),
        "AutoProcessor": lambda name: lambda **_: picture_prompt("idefics3"),
    }

    def find(name: str) -> Any:
        return next(model for part, model in models.items() if part in name)

    results = guides.run("pictures", find, loaders, tmp_path, n_steps=None if has_text else -1)
    check_output("pictures", results)
    names = results[-1].names
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert names["sound"].grid.seconds is not None
    if has_text:
        assert "picture 1" in {source.text for source in names["t"].sources()}
    assert lm.run(names["classifier"], names["picture"], "attention", queries=[0]).grid.rows == 4


@pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens")
def test_a_map_of_several_pictures_has_the_grid_of_each() -> None:
    model = pictured("idefics3", tokenizer=toy_tokenizer())
    m = lm.run(model, picture_prompt("idefics3", 2), "value_zeroing", queries=[-1])
    assert m.grid is None
    second = m.replace(grid=Grid(**m.provenance["pictures"][1]["grid"]))
    assert second.grid.rows == second.grid.columns


# ---------------------------------------------------------------------- decoders


def test_the_guide_on_many_prompts_runs(llama: Path, tmp_path: Path) -> None:
    names = run("many_prompts", llama, tmp_path)
    assert names["done"].failed == 0
    assert set(names["table"]["method"]) == {"attention", "attn_res_ln"}
    assert set(names["scores"]["text"]) == set(names["prompts"])
    assert {"layer", "key_kind", "mean", "spread"} <= set(lm.corpus.load(tmp_path / "means", "kinds"))


def test_the_guide_on_hooks_runs(llama: Path, tmp_path: Path) -> None:
    names = run("hooks", llama, tmp_path)
    assert names["hook"].calls > 0
    assert names["scores"].shape == names["tokens"].shape


def test_the_guide_on_scores_runs(llama: Path, tmp_path: Path) -> None:
    names = run("score_a_map", llama, tmp_path)
    assert {"attention", "value_zeroing", "position", "random"} == {
        record["method"] for record in names["board"].records
    }
    assert names["curves"]["value_zeroing"].exact
    assert set(names["cells"]) == {"value_zeroing", "attn_res_ln"}
    assert names["built"].name == "induction"
    assert set(names["frame"].method) == {"position", "attention", "value_zeroing"}
    found = names["m"].scores[names["routes"]].mean()
    assert found > names["m"].scores[~names["routes"]].mean()


def test_the_guide_on_adding_a_method_runs(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The registered method must not remain for other tests.
    monkeypatch.setattr(registry, "_registered", {})
    names = run("add_a_method", llama, tmp_path)
    found, model, prompt = names["m"], names["model"], names["prompt"]
    largest = lm.run(model, prompt, lm.methods.AttentionWeights(per_head=True)).scores.amax(1)
    assert found.parameters == {"floor": 0.1}
    assert found.scores.equal(largest.where(largest >= 0.1, 0.0))
    with pytest.raises(ValueError, match="floor: expected a number from 0 to 1, got 2"):
        names["LargestWeight"](floor=2)


# ---------------------------------------------------------------------- on the demo models


@pytest.mark.slow
@each_guide
def test_it_prints_what_the_guide_shows(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not available(bridge, "llama"):
        pytest.skip("no TransformerBridge in this TransformerLens")
    needed = "dinov2-small" if guide == "pictures" else "SmolLM2-135M-Instruct-Q4_1"
    if not (cache := how_tos.import_models().cache_folder() / needed).is_dir():
        pytest.skip(f"there is no demo model in {cache}")
    monkeypatch.setattr(registry, "_registered", {})
    results = guides.run_on_demo_models(guide, tmp_path)
    steps = how_tos.read_steps(GUIDES[guide])[: STEPS_WITH_OUTPUT[guide]]
    assert any(step.output for step in steps)
    for result, step in zip(results, steps, strict=True):
        if step.output is not None:
            assert_same_output(result.printed, step.output)


# ---------------------------------------------------------------------- docstrings that a guide names


@pytest.mark.once
@pytest.mark.parametrize("described", [Block, BlockAnatomy, lm.Method])
def test_a_docstring_describes_all_that_a_method_can_read_or_override(described: type) -> None:
    text = described.__doc__ or ""
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^ {8}([\w, ]+):", text, re.MULTILINE))))
    members = {name for name in vars(described) if not name.startswith("_")}
    members |= {name for name in described.__annotations__ if not name.startswith("_")}
    if dataclasses.is_dataclass(described):
        members |= {field.name for field in dataclasses.fields(described)}
    with_docstring = {name for name in members if describes_itself(vars(described).get(name))}
    assert sorted(members - named - with_docstring) == []


def describes_itself(member: Any) -> bool:
    """Return whether it is a method or property with a docstring."""
    for attribute in ("fget", "func", "__func__"):
        member = getattr(member, attribute, member)
    return inspect.isfunction(member) and bool(member.__doc__)
