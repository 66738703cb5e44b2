"""Compare Value Zeroing by algebra with all alternatives, at base size.

    python -m benchmarks.value_zeroing                       quick: gpt2-like, 3 layers, 64 and 128 positions
    python -m benchmarks.value_zeroing --full                12 layers, three models, 32 to 256 positions

The alternatives run in turns, and times are medians of one run:

- forward: one plain pass of the same model
- hooks: the library's definition, whole blocks replayed in copies
- naive: a plain loop over layers and positions, one block call each, in transformers without a library
- naive in TransformerLens: the same loop over the wrapped model's blocks, with its hooks
- batched: the same with as many copies per call as the caches hold
- one product: pairs × d_mlp × d_model, the lower bound of any exact method that applies W_out per pair
- two products: with W_in applied per pair too (and W_gate, if there is one)
- inseq: one forward pass per position (benchmarks/peers), if its environment exists
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

import lens_mix as lm
from benchmarks import common
from benchmarks.baselines import PlainModel, value_zeroing_by_blocks
from benchmarks.peers import peer_seconds
from lens_mix._blocks.block import Block

# Above these numbers of positions the slow alternatives take minutes.
HOOKS_UP_TO, NAIVE_UP_TO, BATCHED_UP_TO = 128, 128, 256
ROWS = 1536


def compare(name: str, positions: int, layers: int, repeats: int, peers: bool = False) -> dict[str, Any]:
    """Return the seconds of each alternative, and their ratios to the algebra engine."""
    model = common.MODELS[name](layers=layers)
    plain = PlainModel(common.MODELS[name](layers=layers, wrapped=False))
    tokens = common.random_tokens(model, positions)
    ways: dict[str, Callable[[], object]] = {
        "algebra": lambda: lm.run(model, tokens, "value_zeroing", engine="algebra"),
        "forward": lambda: _run_forward(model, tokens),
        "product": _make_product(model, positions, name),
    }
    if positions <= HOOKS_UP_TO:
        ways["hooks"] = lambda: lm.run(model, tokens, "value_zeroing", engine="hooks")
    if positions <= NAIVE_UP_TO:
        ways["naive"] = lambda: value_zeroing_by_blocks(plain, tokens)
        ways["naive in TransformerLens"] = lambda: _run_one_by_one(model, tokens)
    if positions <= BATCHED_UP_TO:
        ways["batched"] = lambda: value_zeroing_by_blocks(plain, tokens, max(1, 2048 // positions))
    # The slow alternatives make many passes each, so their first run is like the others.
    seconds = common.interleaved(ways, repeats, warm_up=("algebra", "forward", "product"))
    pairs = _count_pairs(name, positions)
    one = seconds.pop("product") * layers * pairs / min(pairs, ROWS)
    first = 2 if _has_gate(model) else 1
    seconds |= {"one product": one, "two products": (1 + first) * one}
    if peers and name == "gpt2-like":
        seconds |= peer_seconds("inseq_value_zeroing", layers, positions)
    algebra = seconds["algebra"]
    row: dict[str, Any] = {"model": name, "layers": layers, "positions": positions, "algebra s": algebra}
    row |= {f"{way} ÷ algebra": value / algebra for way, value in seconds.items() if way != "algebra"}
    row["peak MB"] = common.peak_bytes(ways["algebra"]) / 1e6
    return row


@torch.no_grad()
def _run_forward(model: Any, tokens: torch.Tensor) -> None:
    model(tokens[None])


def _run_one_by_one(model: Any, tokens: torch.Tensor) -> None:
    """Run the definition by hooks, one copy of a block at a time."""
    single = lambda block, copies: (slice(start, start + 1) for start in range(copies))  # noqa: E731
    with mock.patch.object(Block, "chunks", single):
        lm.run(model, tokens, "value_zeroing", engine="hooks")


def _has_gate(model: Any) -> bool:
    return getattr(model.cfg, "gated_mlp", False) or hasattr(model.blocks[0].mlp, "gate")


def _count_pairs(name: str, positions: int) -> int:
    return positions**2 if name == "bert-like" else positions * (positions + 1) // 2


def _make_product(model: Any, positions: int, name: str) -> Callable[[], object]:
    d_mlp = int(model.cfg.d_mlp or 4 * model.cfg.d_model)
    return common.gemm(min(_count_pairs(name, positions), ROWS), d_mlp, model.cfg.d_model)


def rows(
    models: Sequence[str], sizes: Sequence[int], layers: int, repeats: int, peers: bool = False
) -> list[dict[str, Any]]:
    """Return a row per model and length."""
    return [compare(name, size, layers, repeats, peers) for name in models for size in sizes]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--models", nargs="+", choices=list(common.MODELS))
    parser.add_argument("--sizes", nargs="+", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(common.machine())
    models = options.models or (list(common.MODELS) if options.full else ["gpt2-like"])
    sizes = options.sizes or ([32, 64, 128, 256] if options.full else [64, 128])
    layers = options.layers or (12 if options.full else 3)
    print(common.markdown_table(rows(models, sizes, layers, options.repeats, peers=True)))


if __name__ == "__main__":
    main()
