"""The second matrix in axes where a corner of it is zero, kept between runs.

Where no norm follows, a score sees lengths and angles of what the second matrix makes, and these are the same
in any axes. With W_out[:n]ᵀ = Q R (QR decomposition of the first n neurons' rows), row i of W_out Q has i + 1
numbers and zeros from there on, which the one large product need not multiply: at n = 5/6 d_model and
d_mlp = 4 d_model, a tenth less. What else enters or measures the sum is turned by Q too: W_O, and the clean
block's direction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra import weight_cache
from lens_mix.algebra.value_zeroing_old.clean_block import CleanBlock
from lens_mix.lens.anatomy import ValuePath

# Neurons per step of the staircase: narrower products would run slower than what they save.
STEP = 128

# A block of fewer pairs would not earn the decomposition back in a handful of runs.
LEAST_PAIRS = 8192

# Pairs per number of d_model that earn it back in one run, where it can't be kept. In d_model³ operations,
# with d_mlp = 4 d_model: W_out Q takes 8, W_O Q 2, the decomposition as long as 8 more (2.3 in float64, at a
# third of a product's speed). A pair saves 0.97 d_model² operations, three quarters of them in time: 25, as
# measured on one thread (26 at d_model 768). More threads speed the products up more than the decomposition.
PAIRS_PER_AXIS = 40

# Its name in the store of what is kept.
KIND = "turned"


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A block's output in other axes.

    Attributes:
        axes: Q, orthogonal.
        second: W_out Q.
        W_O: W_O Q.
        depth: of how many neurons the rows have zeros.
    """

    axes: Float[Tensor, "d_model axis"]
    second: Float[Tensor, "d_mlp axis"]
    W_O: Float[Tensor, "head d_head axis"]
    depth: int

    @property
    def nbytes(self) -> int:
        """What keeping it costs."""
        return self.axes.nbytes + self.second.nbytes + self.W_O.nbytes

    def reach(self, neurons: slice) -> int:
        """How many axes some neurons reach at most."""
        return neurons.stop if neurons.stop <= self.depth else self.second.shape[1]

    def steps(self, neurons: slice) -> Iterator[tuple[slice, int]]:
        """Some neurons cut where the staircase has its steps: which, and how many axes they reach."""
        start = neurons.start
        while start < min(neurons.stop, self.depth):
            stop = min(neurons.stop, start - start % STEP + STEP)
            yield slice(start, stop), stop
            start = stop
        if start < neurons.stop:
            yield slice(start, neurons.stop), self.second.shape[1]


def rotated(
    clean: CleanBlock, path: ValuePath, W_O_sketch: Float[Tensor, "row vector"], pairs: int
) -> Rotation | None:
    """A block's rotation; None where a norm follows, or where making it would cost more than it saves.

    Args:
        clean: the block.
        path: its value path.
        W_O_sketch: its W_O, sketched.
        pairs: how many will go through.
    """
    if pairs < LEAST_PAIRS or not clean.free_axes or clean.anatomy.feed_forward is None:
        return None
    name, dtype = clean.anatomy.feed_forward.W_out, clean.dtype
    depth = name.shape[1] * 5 // 6 // STEP * STEP
    if name.device.type != "cpu" or not 0 < depth <= name.shape[0]:
        return None
    probes = [clean.second_sketch, W_O_sketch]
    found: Rotation | None = weight_cache.recall(name, KIND, probes)
    if found is not None:
        return found
    d_model = name.shape[1]
    size = (d_model * d_model + name.numel() + path.W_O.numel()) * dtype.itemsize
    keeps = weight_cache.fits(name, KIND, size)
    if not keeps and pairs < PAIRS_PER_AXIS * d_model:
        return None
    found = _rotation(clean.second, path.W_O.to(dtype), depth)
    if keeps:
        weight_cache.keep(name, KIND, probes, found)
    return found


def _rotation(
    second: Float[Tensor, "d_mlp d_model"],
    W_O: Float[Tensor, "head d_head d_model"],
    depth: int,
) -> Rotation:
    # In float64: lengths in axes that are orthogonal to float32's last digit would lose two.
    axes = torch.linalg.qr(second[:depth].T.double(), mode="complete").Q.to(second.dtype)
    return Rotation(axes, second @ axes, W_O @ axes, depth)
