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
from torch.utils.weak import WeakTensorKeyDictionary

from lens_mix.lens.anatomy import ValuePath
from lens_mix.methods.zeroing.clean_block import CleanBlock
from lens_mix.methods.zeroing.fold import probe

# Bytes of turned matrices that are kept in all; they go with the models that they belong to.
KEPT_BYTES = 1 << 30

# Neurons per step of the staircase: narrower products would run slower than what they save.
STEP = 128

# A block of fewer pairs would not earn the decomposition back in a handful of runs.
LEAST_PAIRS = 8192

# By the block's W_out as the proof has read it: a new proof reads anew.
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A block's output in other axes.

    Attributes:
        axes: Q, orthogonal.
        second: W_out Q.
        W_O: W_O Q.
        depth: of how many neurons the rows have zeros.
        probes: what `_probes` found of W_out and W_O.
    """

    axes: Float[Tensor, "d_model axis"]
    second: Float[Tensor, "d_mlp axis"]
    W_O: Float[Tensor, "head d_head axis"]
    depth: int
    probes: tuple[Tensor, Tensor]

    @property
    def nbytes(self) -> int:
        """What keeping it costs."""
        return self.axes.nbytes + self.second.nbytes + self.W_O.nbytes

    def steps(self, neurons: slice) -> Iterator[tuple[slice, int]]:
        """Some neurons cut where the staircase has its steps: which, and how many axes they reach."""
        start = neurons.start
        while start < min(neurons.stop, self.depth):
            stop = min(neurons.stop, start - start % STEP + STEP)
            yield slice(start, stop), stop
            start = stop
        if start < neurons.stop:
            yield slice(start, neurons.stop), self.second.shape[1]


def rotated(clean: CleanBlock, path: ValuePath, pairs: int) -> Rotation | None:
    """A block's rotation; None where a norm follows, or where making it would cost more than it saves.

    Args:
        clean: the block.
        path: its value path.
        pairs: how many will go through.
    """
    if pairs < LEAST_PAIRS or not clean.free_axes or clean.anatomy.feed_forward is None:
        return None
    name, dtype = clean.anatomy.feed_forward.W_out, clean.dtype
    depth = name.shape[1] * 5 // 6 // STEP * STEP
    if name.device.type != "cpu" or not 0 < depth <= name.shape[0]:
        return None
    kept = _kept.get(name)
    probes = _probes(clean.second, path.W_O)
    # An edit through `.data` leaves no trace that could be asked.
    if kept is not None and all(map(torch.equal, probes, kept.probes)):
        return kept
    found = _rotation(clean.second, path.W_O.to(dtype), depth, probes)
    if found.nbytes + sum(other.nbytes for other in _kept.values() if other is not kept) <= KEPT_BYTES:
        _kept[name] = found
    return found


def forget() -> None:
    """Drop what is kept; the next run makes it anew."""
    _kept.clear()


def _rotation(
    second: Float[Tensor, "d_mlp d_model"],
    W_O: Float[Tensor, "head d_head d_model"],
    depth: int,
    probes: tuple[Tensor, Tensor],
) -> Rotation:
    # In float64: lengths in axes that are orthogonal to float32's last digit would lose two.
    axes = torch.linalg.qr(second[:depth].T.double(), mode="complete").Q.to(second.dtype)
    return Rotation(axes, second @ axes, W_O @ axes, depth, probes)


def _probes(
    second: Float[Tensor, "d_mlp d_model"], W_O: Float[Tensor, "head d_head d_model"]
) -> tuple[Tensor, Tensor]:
    return probe(second), probe(W_O.flatten(0, 1).to(second.dtype))
