"""Use the installed library, outside the checkout: `python smoke.py EXTRA...` with the installed extras.

`make test-wheel` runs it. Without an extra, its feature has to raise an error that names the extra.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import _onnx_weights, _quietly, load
from tiny_folder import save_tiny_llama

import lens_mix as lm

PROMPT = "My grandmother was born in Italy"


def use_library(model: Any, folder: Path) -> None:
    """Use what needs no extra."""
    mixing_map = lm.run(model, PROMPT, "value_zeroing")
    assert mixing_map.scores.shape == (3, 7, 7)
    assert torch.allclose(mixing_map.normalized().scores.sum(-1), torch.tensor(1.0))
    rolled = lm.rollout(mixing_map)
    assert rolled.tokens == mixing_map.tokens
    assert lm.flow(mixing_map).scores.shape == rolled.scores.shape
    assert len(lm.input_map(model, PROMPT).top(3)) == 3
    mixing_map.save(folder / "map.safetensors")
    assert torch.equal(lm.MixingMap.load(folder / "map.safetensors").scores, mixing_map.scores)
    assert len(mixing_map.to_dataframe()) > 0
    assert lm.page(mixing_map, folder / "page.html").html.startswith("<!DOCTYPE html>")
    assert "value_zeroing" in str(lm.support(model))
    assert "algebra: verified" in str(lm.check(model))


def use_adapters(tokenizer: Any, folder: Path) -> None:
    """Load an encoder with an adapter that the wheel declares, by TransformerLens alone."""
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    ArchitectureAdapterFactory.discover_entry_points()
    sizes = {"vocab_size": len(tokenizer), "dim": 24, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    own = DistilBertForMaskedLM(DistilBertConfig(**sizes)).eval()
    own.save_pretrained(folder / "encoder")
    encoder = TransformerBridge.boot_transformers(str(folder / "encoder"), tokenizer=tokenizer, device="cpu")
    tokens = torch.tensor([[5, 7, 9, 11]])
    assert torch.allclose(encoder(tokens), own(tokens).logits, atol=1e-4)
    assert lm.run(encoder, tokens, "value_zeroing").scores.shape == (2, 4, 4)


def use_plots(model: Any, folder: Path) -> None:
    """Draw a figure."""
    figure = lm.show_position(lm.run(model, PROMPT, ["attention", "value_zeroing"]))
    figure.savefig(folder / "figure.png")
    assert (folder / "figure.png").stat().st_size > 10_000


def use_xarray(model: Any, _: Path) -> None:
    """Convert a map to a labeled array and back."""
    mixing_map = lm.run(model, PROMPT, "attention")
    array = mixing_map.to_xarray()
    assert array.dims == ("layer", "query", "key")
    assert torch.allclose(lm.MixingMap.from_xarray(array).scores, mixing_map.scores)


def use_cli(_: Any, folder: Path) -> None:
    """Run the installed command."""
    command = Path(sys.executable).with_name("lens-mix")
    for arguments in (("--version",), ("methods",), ("map", folder / "model", PROMPT)):
        done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ImportError(done.stderr)
    assert "value_zeroing" in done.stdout


def use_serve(model: Any, _: Path) -> None:
    """Start the app, and ask it for a map."""
    from lens_mix.app import launch

    served, url = launch(model)
    from gradio_client import Client

    frame, _ = Client(url, verbose=False).predict(PROMPT, "", [], False, api_name="/map")
    served.close()
    assert frame.startswith("<iframe ")


def use_demos(_: Any, folder: Path) -> None:
    """Read the weights of an ONNX file, as the demos do, and import what reads GGUF files."""
    if importlib.util.find_spec("onnx") is None:
        _onnx_weights(folder / "decoder.onnx", "", "")
    import gguf
    import onnx

    assert gguf.GGUFReader
    tensor = onnx.numpy_helper.from_array(torch.ones(2).numpy(), "norm.weight")
    graph = onnx.helper.make_graph([], "weights", [], [], [tensor])
    onnx.save(onnx.helper.make_model(graph), str(folder / "decoder.onnx"))
    assert torch.equal(_onnx_weights(folder / "decoder.onnx", "", "")["norm.weight"], torch.ones(2))


def use_ray(_: Any, folder: Path) -> None:
    """Map a corpus with one actor of a local cluster."""
    prompts = [PROMPT, "She left"]
    load_model = functools.partial(load, folder / "model")
    done = lm.corpus.run(load_model, prompts, "attention", out=folder / "corpus", actors=1)
    assert done.is_finished
    assert len(lm.corpus.load(folder / "corpus")) == 2


# Each extra with its feature and the package that it brings.
FEATURES: dict[str, tuple[Callable[[Any, Path], None], str]] = {
    "plots": (use_plots, "matplotlib"),
    "xarray": (use_xarray, "xarray"),
    "cli": (use_cli, "typer"),
    "serve": (use_serve, "gradio"),
    "demos": (use_demos, "onnx"),
    "ray": (use_ray, "ray"),
}


def check_extra(extra: str, installed: list[str], model: Any, folder: Path) -> str:
    """Use the feature of an extra, or check the error without it. Return what was found."""
    use, package = FEATURES[extra]
    if extra in installed:
        use(model, folder)
        return "works"
    if importlib.util.find_spec(package) is not None:
        use(model, folder)
        return f"works, because another dependency needs {package}"
    try:
        use(model, folder)
    except ImportError as error:
        assert f"[{extra}]" in str(error), f"the error does not name the extra: {error}"
        return f"raises: {str(error).strip()}"
    raise AssertionError(f"{package} is not installed, but no error was raised")


def main(*installed: str) -> None:
    """Use the library, if no extra is installed, then each extra."""
    print(f"lens_mix {lm.__version__} in {Path(lm.__file__).parent}, torch {torch.__version__}")
    assert Path(lm.__file__).is_relative_to(sys.prefix), "not the installed library"
    assert FEATURES.keys() >= set(installed), "an extra without a feature to try"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _quietly():
            save_tiny_llama(folder / "model")
        model = load(folder / "model")
        if not installed:
            use_library(model, folder)
            with _quietly():
                use_adapters(model.tokenizer, folder)
        for extra in FEATURES:
            print(f"   {extra}: {check_extra(extra, list(installed), model, folder)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
