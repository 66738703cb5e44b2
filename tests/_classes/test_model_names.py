"""Test that the name of a model is never a path."""

from __future__ import annotations

import pytest

from lens_mix._classes.model_names import strip_path
from lens_mix._verification.support import Support


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("gpt2", "gpt2"),
        (
            "/home/ann/.cache/hub/models--google--flan-t5-small/snapshots/0fc9ddf78a1e988dac52e2dac162b0ede4fd74ab",
            "google/flan-t5-small",
        ),
        ("/home/ann/models/llama-3", "llama-3"),
        ("/data/smollm2-135m/transformers-5", "smollm2-135m"),
        ("./my-model/", "my-model"),
        ("../my-model", "my-model"),
        ("C:\\Users\\ann\\bert\\model", "bert"),
        ("/data/bert/snapshots/0fc9ddf78a1e988dac52e2dac162b0ede4fd74ab/", "bert"),
        ("/model", "model"),
        ("", ""),
    ],
)
def test_the_name_of_a_model_is_never_a_path(model: str, name: str) -> None:
    assert strip_path(model) == name


def test_a_table_of_support_is_titled_with_the_name() -> None:
    support = Support("/home/ann/models/llama-3", (("attention", "recorded", ""),))
    assert str(support).startswith("support for llama-3")
