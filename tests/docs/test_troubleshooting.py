"""Test that every error and note which docs/guides/troubleshooting.md quotes is raised as it is written."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lens_mix as lm
from tests.demos.tiny_folder import save_tiny_llama
from tests.tiny_models import available, bridge, gpt2_like, toy_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
PROMPT = "My grandmother was born in Italy and she cooked the food of home and sang to us in Italy"
SENTENCE = "She left the country with her three children"

# Texts that TransformerLens, torch and the shell write.
NOT_OURS = {"Unsupported architecture", "CUDA out of memory", "lens-mix: command not found"}
# Texts that need a model or an environment that is not here; the source has them.
IN_THE_SOURCE = {"hooks that never fired", "figures need matplotlib"}


def quoted() -> set[str]:
    """Return the texts that headings and answers quote as errors or notes."""
    headings = re.findall(r"^### `([^`]+)`", PAGE, re.MULTILINE)
    # In an answer, a quoted message is a code span of several words without a call.
    return {*headings, *re.findall(r"`((?:max_memory: )?expected [^`]+)`", PAGE)}


def run(model: Any, prompt: Any, *arguments: Any, **options: Any) -> Any:
    return lm.run(model, prompt, *(arguments or ("attention",)), **options)


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        run(model, SENTENCE, "attention_attribution")


def with_hook(model: Any, change: Callable[[Any], Any]) -> None:
    hooked = copy.deepcopy(model)
    hooked.add_hook("blocks.1.attn.hook_z", lambda z, hook: change(z))
    run(hooked, SENTENCE, "value_zeroing")


def with_a_broken_weight(model: Any) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    run(broken, SENTENCE)


def with_a_stale_cache(model: Any) -> None:
    tokens = model.to_tokens(SENTENCE)
    _, cache = model.run_with_cache(tokens)
    run(model, tokens.flip(1), "attn_res_ln", cache=cache)


def in_a_used_folder(model: Any, folder: Path) -> None:
    lm.corpus.run(model, [SENTENCE], "attention", out=folder)
    lm.corpus.run(model, [SENTENCE], "value_zeroing", out=folder)


TOKEN_IDS = torch.tensor([[3, 4, 5, 6]])

RAISED: dict[str, Callable[[Any, Path], Any]] = {
    "expected a TransformerLens model": lambda model, _: run(model.original_model, SENTENCE),
    "can't run on this model": lambda _, __: run(bridge("mixtral"), TOKEN_IDS, "decompx"),
    "is not verified: expected relative error": lambda model, _: with_hook(model, lambda z: z + 1),
    "these hooks are on the model": lambda model, _: with_hook(model, lambda z: z + 1),
    "has no attention module in any block": lambda _, __: run(bridge("mamba"), TOKEN_IDS),
    "expected finite outputs, got NaN or infinity": lambda model, _: with_a_broken_weight(model),
    "a run is already open on it in this thread": lambda model, _: run_inside_a_run(model),
    "expected the text of one token (mind the leading space)": lambda model, _: lm.input_map(
        model, SENTENCE, target="left home"
    ),
    "expected a text that occurs once": lambda model, _: run(model, PROMPT).positions(" Italy"),
    "expected a text that the prompt contains": lambda model, _: run(model, PROMPT).positions(" Rome"),
    "expected a text of whole tokens": lambda model, _: run(model, PROMPT).positions("tal"),
    "for several prompts use run_many": lambda model, _: run(model, [PROMPT] * 3),
    "expected padding on the left or on the right only": lambda model, _: run(
        model, torch.tensor([[3, 2, 4, 5]]), attention_mask=torch.tensor([[1, 0, 1, 1]])
    ),
    "has no argument of this name": lambda model, _: run(model, SENTENCE, "value_zeroing", per_head=True),
    "expected the row of this position": lambda model, _: run(
        model, SENTENCE, lm.methods.Gim(target=lm.targets.token(" home", position=3))
    ),
    "expected to be outside torch.inference_mode": lambda model, _: in_inference_mode(model),
    "to be what this model computes for the prompt": lambda model, _: with_a_stale_cache(model),
    "expected the rows of all": lambda model, _: lm.rollout(run(model, SENTENCE, queries=[-1])),
    "expected layers that follow one another": lambda model, _: lm.rollout(
        run(model, SENTENCE, layers=[0, 2])
    ),
    "max_memory: expected at least": lambda model, _: run(model, SENTENCE, "value_zeroing", max_memory=1000),
    "expected none below 0 to make rows sum to 1": lambda model, _: run(
        model, SENTENCE, "gim", queries=[-1]
    ).normalized(),
    "because no token has a word mark": lambda _, __: run(
        gpt2_like(tokenizer=toy_tokenizer()), "w3 w4 w5"
    ).merge_words(),
    "expected a map with all rows of some word": lambda model, _: run(
        model, SENTENCE, queries=[-1]
    ).merge_words(groups=[[0, 1, 2, 3], [4, 5, 6, 7, 8]]),
    "which differs in": in_a_used_folder,
}


def run_inside_a_run(model: Any) -> None:
    hooked = copy.deepcopy(model)

    def ask(z: Any, hook: Any) -> Any:
        run(hooked, SENTENCE)
        return z

    hooked.add_hook("blocks.1.attn.hook_z", ask)
    run(hooked, SENTENCE)


NOTES: dict[str, Callable[[Any], Any]] = {
    "prepend_bos: the prompt begins with": lambda model: run(model, f"<s>{SENTENCE}"),
    "are more than the context length": lambda model: run(model, SENTENCE * 10),
    "rows of the last layer": lambda _: lm.rollout(collapsing_map()),
    "prepend_bos: the model read": lambda model: run(without_bos_of_its_own(model), SENTENCE),
}


def collapsing_map() -> lm.MixingMap:
    """Return layer maps whose products put every row on the first token."""
    layer = torch.full((12, 12), 0.001).tril()
    layer[:, 0] = 1
    scores = (layer / layer.sum(-1, keepdim=True)).expand(12, 12, 12)
    return lm.MixingMap(scores=scores, tokens=list("abcdefghijkl"), causal=True, residual=0.5)


def without_bos_of_its_own(model: Any) -> Any:
    """Return a model whose tokenizer adds no BOS itself, as SmolLM2's does not."""
    from tokenizers import processors

    other = copy.deepcopy(model)
    other.tokenizer._tokenizer.post_processor = processors.TemplateProcessing("$A", special_tokens=[])
    other.tokenizer.init_kwargs["add_bos_token"] = other.cfg.tokenizer_prepends_bos = False
    return other


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    if not available(bridge, "llama"):
        pytest.skip("the page is about TransformerBridge")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "demos")
        import models

        loaded = models.load(folder)
        patch.delitem(sys.modules, "models")
    return loaded


def test_every_quoted_text_has_a_test() -> None:
    assert quoted() == {*RAISED, *NOTES, *NOT_OURS, *IN_THE_SOURCE}


@pytest.mark.parametrize("text", RAISED)
def test_errors_are_raised_as_they_are_quoted(text: str, model: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=re.escape(text)):
        RAISED[text](model, tmp_path / "maps")


@pytest.mark.parametrize("text", NOTES)
def test_notes_are_as_they_are_quoted(text: str, model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixing = NOTES[text](model)
    assert any(text in note for note in mixing.notes), mixing.notes


def test_the_other_texts_are_in_the_source() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "lens_mix").rglob("*.py"))
    # A message is written on several lines, so their quotation marks are taken out.
    code = re.sub(r'"\s*f?"', "", code)
    assert [text for text in IN_THE_SOURCE if text not in code] == []


def test_what_the_answers_say_to_write_works(model: Any) -> None:
    mixing = run(model, PROMPT)
    assert mixing.top(1, query="born in Italy") is not None
    assert mixing.top(1, query=6) is not None
    assert lm.input_map(model, SENTENCE, target=lm.targets.token(12)).explained
    own_tokens = run(model, SENTENCE, prepend_bos=False)
    assert own_tokens.tokens[0] == "She"
    assert len(list(lm.run_many(model, [PROMPT, SENTENCE], "attention"))) == 2
    with torch.no_grad():
        signed = run(model, SENTENCE, "gim", queries=[-1])
    assert signed.normalized("absolute").scores.sum(-1) == pytest.approx(1)
    lm.flow(run(model, SENTENCE), layer=-1, queries=[-1])
    unmarked = run(gpt2_like(tokenizer=toy_tokenizer()), "w3 w4 w5")
    assert unmarked.merge_words(groups=["<bos>", "w3 w4", "w5"]).tokens == ["<bos>", "w3 w4", "w5"]


def test_weights_are_those_of_hugging_face_on_the_same_tokens(model: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokens = model.to_tokens(SENTENCE, prepend_bos=False)
    weights = run(model, SENTENCE, lm.methods.AttentionWeights(per_head=True), prepend_bos=False).scores
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected = torch.cat(theirs(tokens, output_attentions=True).attentions)
    torch.testing.assert_close(weights, expected.detach())


def test_sdpa_needs_no_change(model: Any) -> None:
    other = copy.deepcopy(model)
    other.original_model.set_attn_implementation("sdpa")
    assert run(other, SENTENCE).scores.sum(-1).detach() == pytest.approx(1, abs=1e-5)
    assert other.original_model.config._attn_implementation == "sdpa"


@pytest.mark.skipif(importlib.util.find_spec("typer") is None, reason="the command line needs typer")
def test_the_module_is_the_command() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "lens_mix", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "corpus" in printed.stdout
