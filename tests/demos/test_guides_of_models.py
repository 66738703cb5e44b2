"""Test that the guides on wrapped encoders and on pictures run, with tiny models instead of a hub's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import lens_mix as lm
from lens_mix._classes.model_classes import transformer_lens_version
from tests.demos.test_pages import examples
from tests.demos.tiny_folder import save_tiny_bert
from tests.pictured_models import picture_prompt, pictured
from tests.tiny_models import available, bridge, toy_tokenizer

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def run_examples(page: str, names: dict[str, Any]) -> dict[str, Any]:
    for example in examples((GUIDES / page).read_text(encoding="utf-8")):
        exec(compile(example, page, "exec"), names)
    return names


def replace_loaders(monkeypatch: pytest.MonkeyPatch, **loaded: Any) -> None:
    """Let `from_pretrained` of classes of transformers return what is given, whatever the name."""
    for name, model in loaded.items():
        given = staticmethod(lambda _, model=model: model)
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", given)


def replace_bridge(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Let `boot_transformers` return a model, unless it gets one of transformers to wrap."""
    from transformer_lens.model_bridge import TransformerBridge

    boot = TransformerBridge.boot_transformers

    def load(name: str, hf_model: Any = None) -> Any:
        return model if hf_model is None else boot(name, hf_model=hf_model)

    monkeypatch.setattr(TransformerBridge, "boot_transformers", load)


@pytest.mark.skipif(
    not available(bridge, "distilbert"), reason="no TransformerBridge in this TransformerLens"
)
def test_the_guide_on_wrapped_encoders_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_bert(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    config = transformers.DistilBertConfig(
        vocab_size=len(tokenizer),
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=4,
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
    )
    classifier = transformers.DistilBertForSequenceClassification(config).eval()
    replace_loaders(monkeypatch, AutoModelForSequenceClassification=classifier, AutoTokenizer=tokenizer)
    masked = lm.wrap(transformers.DistilBertForMaskedLM(config).eval(), tokenizer)
    replace_bridge(monkeypatch, masked)
    names = run_examples("wrapped_encoders.md", {})
    assert names["m"].tokens[0] == "[CLS]"
    assert names["m"].scores.shape[0] == 2
    assert names["masked"] is masked
    hidden = lm.run(names["model"], "a fine film", lm.methods.Occlusion(target=names["target"]), queries=[0])
    assert float(hidden.scores.abs().max()) > 0


@pytest.mark.skipif(not available(bridge, "vit"), reason="no TransformerBridge in this TransformerLens")
def test_the_guide_on_pictures_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    picture = image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3))
    model = bridge("vit", patch_size=4, num_labels=300)

    def process(images: Any, return_tensors: str) -> dict[str, torch.Tensor]:
        pixels = torch.from_numpy(np.asarray(images)).permute(2, 0, 1)
        return {"pixel_values": pixels[None].float() / 255}

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "patch_size": 14}
    dinov2 = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, image_size=224)).eval()
    replace_loaders(monkeypatch, AutoImageProcessor=process, Dinov2Model=dinov2)
    replace_bridge(monkeypatch, model)
    picture.save("cat.jpg")
    names = run_examples("pictures.md", {})
    assert (names["m"].grid.rows, names["m"].grid.columns) == (4, 4)
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert names["model"] is not model
    assert lm.run(names["model"], torch.zeros(3, 224, 224), "attention", queries=[0]).grid.rows == 16


@pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens")
def test_the_guide_on_pictures_and_text_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if transformer_lens_version()[0] < 4:
        pytest.skip("generate takes no inputs of pictures before TransformerLens 4")
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    image.new("RGB", (16, 16)).save("cat.jpg")
    model = pictured("idefics3", tokenizer=toy_tokenizer())
    replace_loaders(monkeypatch, AutoProcessor=lambda **_: picture_prompt("idefics3"))
    replace_bridge(monkeypatch, model)
    one, several, trace = examples((GUIDES / "pictures_and_text.md").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(one, names)
    assert (tmp_path / "page.html").stat().st_size > 10_000
    # The other examples are of a prompt with two pictures.
    names["prompt"] = picture_prompt("idefics3", 2)
    names["m"] = lm.run(model, names["prompt"], "value_zeroing", queries=[-1])
    exec(several, names)
    exec(trace, names)
    assert names["second"].grid.rows == names["second"].grid.columns
    assert {"picture 1", "picture 2"} <= {source.text for source in names["t"].sources()}
