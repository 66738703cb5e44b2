"""Test the table of models: it is that of the matrix, and what was recorded is still so."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from docs.make import models
from tests.matrix import case_of, every_case, pictured_cases, wide_cases
from tests.record_models import record

pytestmark = pytest.mark.filterwarnings("ignore")
RELEASE = importlib.metadata.version("transformer-lens")
RECORDED = models.read_result()


def test_the_table_has_every_model_of_the_matrix():
    if RELEASE not in RECORDED:
        pytest.skip("the table is of other releases")
    labels = {case.label for case in (*every_case(), *pictured_cases()) if case.exists}
    labels |= {case.label for case in wide_cases()} if RELEASE >= "4" else set()
    assert set(RECORDED[RELEASE]) == labels


def test_what_was_recorded_is_still_so():
    if RELEASE not in RECORDED:
        pytest.skip("the table is of other releases")
    for label in ("bridge gpt2", "bridge falcon_alibi", "bridge mamba", "HookedEncoder"):
        if label in RECORDED[RELEASE]:
            assert record(case_of(label)) == RECORDED[RELEASE][label]


def test_every_model_has_maps_or_a_reason():
    for release, found in RECORDED.items():
        assert len(found) > 10, release
        assert all(entry["methods"] or entry["reason"] for entry in found.values()), release


def test_the_page_has_one_row_per_model_and_each_reason():
    page = models.write_page()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    labels = set().union(*RECORDED.values())
    assert len(rows) == 2 + len(labels)
    assert "- CLIP and others" in page
    assert "LlavaForConditionalGeneration" in page


def test_a_model_of_transformers_that_has_no_adapter_raises_an_error_that_says_so():
    import transformers

    import lens_mix as lm

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 50}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    whisper = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    )
    with pytest.raises(TypeError, match="expected a TransformerLens model"):
        lm.run(whisper, torch.tensor([[1, 2, 3]]), "attention")
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=tower, vision_config={**tower, "image_size": 16, "patch_size": 8})
    )
    with pytest.raises(TypeError, match="expected a TransformerLens model"):
        lm.run(clip, torch.tensor([[1, 2, 3]]), "attention")
