"""Test the adapters through TransformerLens itself: entry points, checkpoints and what they refuse."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import lens_mix as lm
from tests.family_tokenizers import family_tokenizer
from tests.matrix import slow
from tests.tiny_models import available, bridge
from tests.wrapped_models import encoder

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not available(bridge, "bert"), reason="no BERT in a Bridge here"),
]
GROUP = "transformer_lens.architectures"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
TOKENS = torch.tensor([[5, 9, 12, 7, 9]])


def declared():
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    found = project["entry-points"][GROUP]
    return [importlib.metadata.EntryPoint(name, value, GROUP) for name, value in found.items()]


@pytest.fixture
def factory(monkeypatch):
    """Return TransformerLens's factory as in a new process in which the wheel of lens_mix is installed."""
    from transformer_lens.factories import architecture_adapter_factory as module

    from lens_mix._model.adapters import _ADAPTERS

    found = module.ArchitectureAdapterFactory
    own = {name: kind for name, kind in found._adapters.items() if _ADAPTERS.get(name) is not kind}
    monkeypatch.setattr(found, "_adapters", own)
    monkeypatch.setattr(found, "_entry_points_discovered", False)
    monkeypatch.setattr(module, "entry_points", lambda group: declared() if group == GROUP else [])
    return found


def test_every_adapter_is_declared_except_those_of_transformer_lens():
    from lens_mix._model.adapters import _ADAPTERS

    found = {each.name: each.load() for each in declared()}
    assert found == {name: kind for name, kind in _ADAPTERS.items() if name != "RobertaForMaskedLM"}
    for name in _ADAPTERS:
        assert hasattr(transformers, name)


def test_entry_points_and_registration_agree_without_a_warning(factory):
    from lens_mix._model.adapters import _ADAPTERS, register_adapters

    native = dict(factory._adapters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_adapters()
        register_adapters()
    assert factory._adapters == {**_ADAPTERS, **native}


def test_an_adapter_that_is_registered_before_stays(factory):
    from lens_mix._model.adapters import ElectraArchitectureAdapter, register_adapters

    class Other(ElectraArchitectureAdapter):
        pass

    factory.discover_entry_points()
    factory.register_adapter("ElectraForMaskedLM", Other)
    register_adapters()
    assert factory._adapters["ElectraForMaskedLM"] is Other
    assert type(lm.wrap(encoder("Electra")).adapter) is Other


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("DistilBert", "bert"),
        ("Camembert", "camembert"),
        ("Albert", "albert"),
        ("DebertaV2", "deberta_v2"),
        slow("Electra", "electra"),
        slow("XLMRoberta", "xlm_roberta"),
        slow("Ernie", "bert"),
        slow("RemBert", "bert"),
        slow("Data2VecText", "roberta"),
    ],
)
def test_a_checkpoint_is_booted(family, name, tmp_path, factory):
    from transformer_lens.model_bridge import TransformerBridge

    tokenizer = family_tokenizer(name, tmp_path / "tokenizer")
    if tokenizer is None:
        pytest.skip("this transformers can't build the tokenizer from a list")
    own = encoder(family, "ForMaskedLM", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    for each in (own, tokenizer):
        each.save_pretrained(tmp_path / "model")
    # TransformerLens reads entry points after it has looked for the architecture.
    factory.discover_entry_points()
    found = TransformerBridge.boot_transformers(str(tmp_path / "model"), device="cpu", dtype=torch.float64)
    assert type(found.original_model) is type(own)
    with torch.no_grad():
        expected = own(TOKENS, output_hidden_states=True)
        logits, cache = found.run_with_cache(TOKENS)
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-10)
    last = f"blocks.{len(found.blocks) - 1}"
    torch.testing.assert_close(cache[f"{last}.hook_out"], expected.hidden_states[-1], rtol=0, atol=1e-10)
    assert cache[f"{last}.attn.hook_pattern"].shape == (1, 4, 5, 5)
    assert lm.check(found, TOKENS).ok
    wrapped = lm.run(lm.wrap(own, tokenizer), "a b c", ["attention", "value_zeroing"])
    for method, mixing in lm.run(found, "a b c", ["attention", "value_zeroing"]).items():
        torch.testing.assert_close(mixing.scores, wrapped[method].scores, rtol=0, atol=1e-10)


def test_a_decoder_is_an_error():
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    from lens_mix._model.adapters import register_adapters

    register_adapters()
    config = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertGenerationDecoder(
        transformers.BertGenerationConfig(**config, intermediate_size=8, is_decoder=True)
    )
    with pytest.raises(
        ValueError, match="expected an encoder, got a BertGenerationDecoder that is a decoder"
    ):
        build_bridge_from_module(model, architecture="BertGenerationDecoder", hf_config=model.config)


def test_a_convolution_beside_a_layer_is_an_error():
    with pytest.raises(lm.UnsupportedModelError, match="expected layers only, got a convolution"):
        lm.wrap(encoder("DebertaV2", conv_kernel_size=3))


def test_as_many_prompts_as_relative_positions():
    # The embeddings of relative positions have eight rows, and they aren't those of eight prompts.
    model = lm.wrap(encoder("DebertaV2"))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 60, (6,), generator=generator) for _ in range(8)]
    many = lm.run_many(model, prompts, "value_zeroing", batch_size=8)
    for found, prompt in zip(many, prompts, strict=True):
        alone = lm.run(model, prompt, "value_zeroing").scores
        torch.testing.assert_close(found.scores, alone, rtol=0, atol=1e-12)


def test_the_file_can_be_offered_to_transformer_lens():
    from lens_mix._model import adapters

    nodes = list(ast.walk(ast.parse(inspect.getsource(adapters))))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    assert names
    assert not [name for name in names if name.startswith("lens_mix")]
