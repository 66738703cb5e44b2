"""Provide a tiny model that reads words, and a corpus of them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import tiny_models


@functools.cache
def build():
    """Return a decoder of two layers that reads the words of `toy_tokenizer`."""
    return tiny_models.gpt2_like(torch.float32, tokenizer=tiny_models.toy_tokenizer())


def draw_texts(count: int, longest: int = 20, seed: int = 0) -> list[str]:
    """Return texts of 3 to `longest` words."""
    draw = random.Random(seed)
    words = [f"w{number}" for number in range(3, 40)]
    return [" ".join(draw.choices(words, k=draw.randint(3, longest))) for _ in range(count)]


@pytest.fixture(scope="session")
def tiny():
    return build()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a folder by their names."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


Build = Callable[[], object]
