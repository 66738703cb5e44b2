"""The measured temporaries of the norm-based maps do not exceed the requested bound."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lens_mix as lm
from benchmarks.common import PeakMemory
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix.method import Method
from tests.matrix import slow
from tests.methods.test_memory import model_of
from tests.tiny_models import tokens

LENGTH = 16
METHODS = [
    lm.methods.ValueNorms(),
    lm.methods.ValueNorms(per_head=True),
    lm.methods.AttnRes(),
    lm.methods.AttnResLn(next_norm=True),
    lm.methods.AttnResWeights(),
    lm.methods.AtbFf(),
    lm.methods.AtbFfResLn(biases="fixed"),
    lm.methods.GlobEnc(),
    lm.methods.Alti(),
    lm.methods.AltiLogit(),
    lm.methods.DecompX(),
    lm.methods.DecompXLocal(),
]


class _OneByOne(list):
    """A list of blocks that records the peak memory of each one as it is iterated."""

    def __init__(self, blocks: list[Any], counter: PeakMemory) -> None:
        super().__init__(blocks)
        self.counter, self.peaks = counter, []

    def __iter__(self) -> Iterator[Any]:
        for block in super().__iter__():
            gc.collect()
            before = self.counter.peak = self.counter.live
            yield block
            self.peaks.append(self.counter.peak - before)


def peak_of(model: Any, method: Method, bound: int | None) -> tuple[int, list[Any]]:
    """Return the most bytes of temporaries of one block's maps of two prompts, and the maps."""
    peaks, name = [], "__call__" if method.reads == "block" else "of_blocks"
    computed = getattr(type(method), name)

    def measure_block(self: Method, block: Any) -> Any:
        gc.collect()
        with PeakMemory() as counter:
            scores = computed(self, block)
        peaks.append(counter.peak - scores.nbytes)
        return scores

    def measure_blocks(self: Method, blocks: Any) -> Any:
        with PeakMemory() as counter:
            watched = _OneByOne(list(blocks), counter)
            scores = computed(self, watched)
        peaks.append(max(watched.peaks) - scores[0].nbytes)
        return scores

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(method), name, measure_block if name == "__call__" else measure_blocks)
        prompts = [tokens(model, 1, length, 1)[0] for length in (LENGTH, LENGTH - 4)]
        found = list(lm.run_many(model, prompts, method, max_memory=bound))
    return max(peaks), [one.scores for one in found]


def least_of(model: Any, method: Method) -> int:
    """Return the bound that the error requires."""
    with pytest.raises(ValueError, match=r"expected at least|can't run") as refused:
        peak_of(model, method, 1000)
    if isinstance(refused.value, UnsupportedModelError):
        pytest.skip(str(refused.value))
    return int(str(refused.value).split("at least ")[1].split()[0])


@pytest.mark.parametrize("name", ["gpt2", *(slow(name) for name in ("llama", "gemma2", "bert", "phi"))])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_temporaries_fit_into_the_bound(name: str, method: Method) -> None:
    model = model_of(name)
    least = least_of(model, method)
    _, free = peak_of(model, method, None)
    for factor in (1, 1.5, 4):
        bound = int(least * factor)
        peak, found = peak_of(model, method, bound)
        assert peak <= bound
        if factor == 1:
            # The least bound is an upper bound of the temporaries; it has to be near them.
            assert peak > least / 12
        for one, other in zip(found, free, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
