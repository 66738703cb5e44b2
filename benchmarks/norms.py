"""Measure the norm-based methods at base size (d_model 768, 12 heads, 12 layers), beside one forward pass.

    python benchmarks/norms.py                 quick: 32 and 128 positions
    python benchmarks/norms.py --full          32, 128, 512 and 1024 positions, and memory at each

The printed medians are of interleaved runs, as ratios to what ran beside them: one plain forward pass of the
same model, and a straightforward version that computes every pair's vector (query × key × d_model).

- seven outputs: AttnN per head and per layer, AttnRes, AttnResLn, and the mixing ratios of the last three
- atb_ff: all three maps after the feed-forward, against one matrix product [pairs, d_mlp] @ [d_mlp, d_model]
- alti: L1 distances of all pairs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import MODELS, gemm, interleaved, random_tokens
from lens_mix._algebra.feed_forward import feed_forward_maps, feed_forward_shares
from lens_mix._algebra.vectors import Vectors, attention_vectors
from lens_mix.experiments.mixing_ratio import block_mixing_ratios
from lens_mix.experiments.passes import run_prompt
from lens_mix.method import Method
from lens_mix.methods.alti import Alti
from lens_mix.methods.atb_ff import AtbFfResLn
from lens_mix.methods.attn_res import AttnResLn
from lens_mix.methods.value_norms import ValueNorms

QUICK, FULL = (32, 128), (32, 128, 512, 1024)
# Above this number of positions the straightforward versions take minutes, and tens of gigabytes.
WRITTEN_OUT_UP_TO = 256
NORM_STAGES = ("attn_n", "attn_res", "attn_res_ln")


def main() -> None:
    """Print all measurements, or the memory of one of them for the script itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", choices=sorted(MODELS), default="bert-like")
    parser.add_argument("--memory", nargs=2, metavar=("WHAT", "POSITIONS"), help="used by the script itself")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        print_memory(options.model, options.memory[0], int(options.memory[1]))
        return
    print(f"{options.model}, 12 layers, torch {torch.__version__}, {options.threads} thread(s)")
    model = MODELS[options.model]()
    for positions in FULL if options.full else QUICK:
        seven_outputs(model, positions, options.repeats)
        memory(options.model, positions, options.threads)
    for positions in (32, 128, 256) if options.full else QUICK:
        after_feed_forward(model, positions, options.repeats)
    l1_distances(model, 256, options.repeats)


# ------------------------------------------------------------------ the seven outputs


def seven(model: Any, tokens: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Return all seven outputs of every block."""
    outputs = []
    with torch.no_grad():
        for block in run_prompt(model, tokens, AttnResLn()).blocks:
            vectors = attention_vectors(block)
            outputs.append(
                {
                    "attn_n": vectors.attention.norms(),
                    "heads": ValueNorms(per_head=True)(block),
                    "attn_res": vectors.residual.norms(),
                    "attn_res_ln": vectors.normed.norms(),
                    **block_mixing_ratios(block, NORM_STAGES),
                }
            )
    return outputs


def seven_written_out(model: Any, tokens: torch.Tensor) -> None:
    """Compute the same from query × key × d_model vectors."""
    with torch.no_grad():
        for block in run_prompt(model, tokens, AttnResLn()).blocks:
            vectors = attention_vectors(block)
            sent = vectors.pairs.heads.times(vectors.pairs.heads.matrices)
            length = torch.linalg.vector_norm(sent, dim=-1)
            _ = block.recorded("pattern") * length.transpose(1, 2)[:, :, None]
            for stage in (vectors.attention, vectors.residual, vectors.normed):
                written_out_outputs(stage)


def written_out_outputs(stage: Vectors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms and mixing ratios of a stage from the vectors of all pairs."""
    dense = stage.pairs.written_out() * stage.scale[..., None]
    dense.diagonal(dim1=1, dim2=2).copy_(stage.diagonal.mT)
    own = dense.diagonal(dim1=1, dim2=2).transpose(1, 2)
    mixed = torch.linalg.vector_norm(dense.sum(2) - own, dim=-1)
    return torch.linalg.vector_norm(dense, dim=-1), mixed / (mixed + torch.linalg.vector_norm(own, dim=-1))


def seven_outputs(model: Any, positions: int, repeats: int) -> None:
    """Print the times of a forward pass, of the seven outputs, and of the straightforward version."""
    tokens = random_tokens(model, positions)
    variants = {"forward": lambda: forward(model, tokens), "seven": lambda: seven(model, tokens)}
    if positions <= WRITTEN_OUT_UP_TO:
        variants["written out"] = lambda: seven_written_out(model, tokens)
    seconds = interleaved(variants, repeats)
    line = f"seven outputs, {positions:>4} positions: forward {seconds['forward']:.3f} s, "
    line += f"seven {seconds['seven']:.3f} s = {seconds['seven'] / seconds['forward']:.2f} x forward"
    if "written out" in seconds:
        line += f"; written out {seconds['written out'] / seconds['seven']:.1f} x as long"
    print(line, flush=True)


def forward(model: Any, tokens: torch.Tensor) -> None:
    """Run one forward pass."""
    with torch.no_grad():
        model(tokens[None])


# ------------------------------------------------------------------ memory


def memory(model: str, positions: int, threads: int) -> None:
    """Print the largest resident memory of two new processes: one forward pass, and the seven outputs."""
    peaks = {}
    for what in ("forward", "seven"):
        command = [sys.executable, __file__, "--model", model, "--threads", str(threads)]
        out = subprocess.run(
            [*command, "--memory", what, str(positions)], capture_output=True, text=True, check=True
        )
        peaks[what] = json.loads(out.stdout.splitlines()[-1])
    a, b = peaks["forward"], peaks["seven"]
    print(
        f"  resident memory: forward {a:.0f} MB, seven {b:.0f} MB = {b / a:.2f} x",
        flush=True,
    )


def print_memory(name: str, what: str, positions: int) -> None:
    """Print the largest resident memory of one computation in this process, in MB."""
    model = MODELS[name]()
    tokens = random_tokens(model, positions)
    if what == "forward":
        forward(model, tokens)
    else:
        seven(model, tokens)
    print(json.dumps(peak_resident()))


def peak_resident() -> float:
    """Return the largest resident memory of this process so far, in MB."""
    status = Path("/proc/self/status")
    if status.exists():
        # The number of getrusage includes that of the parent process, and this one does not.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1024**2 if sys.platform == "darwin" else 1024
    )


# ------------------------------------------------------------------ through the feed-forward, and ALTI


def block_of(model: Any, positions: int, method: Method) -> Any:
    """Return the middle block of a clean pass."""
    with torch.no_grad():
        return run_prompt(model, random_tokens(model, positions), method).blocks[6]


def after_feed_forward(model: Any, positions: int, repeats: int) -> None:
    """Print the time of the maps after the feed-forward, beside a matrix product as a lower bound."""
    block = block_of(model, positions, AtbFfResLn())
    pairs = int((block.recorded("pattern")[0] != 0).any(0).sum())
    feed_forward = block.anatomy.feed_forward
    d_mlp, d_model = feed_forward.W_out.shape
    rows = min(pairs, 1536)

    def maps() -> None:
        block.cache.clear()
        with torch.no_grad():
            feed_forward_maps(block, "on_path")

    def written_out() -> None:
        with torch.no_grad():
            vectors = attention_vectors(block)
            shares = feed_forward_shares(block, "on_path", vectors)
            sent = vectors.pairs.heads.times(vectors.pairs.heads.after(vectors.normed.pairs.chain))
            for query in range(positions):
                # The hidden layers of all pairs together do not fit in memory, so this runs per query.
                weights = vectors.normed.pairs.pattern[0, :, query]
                dense = torch.einsum("hk,khd->kd", weights, sent[0])
                hidden = sum((dense @ W) * m[0, query] for W, m in shares.multipliers)
                torch.linalg.vector_norm(hidden @ shares.W_out, dim=-1)

    seconds = interleaved(
        {"maps": maps, "floor": gemm(rows, d_mlp, d_model), "written out": written_out}, repeats
    )
    floor = seconds["floor"] * pairs / rows
    print(
        f"atb_ff, one block, {positions:>4} positions: {seconds['maps']:.3f} s, "
        f"floor / time = {floor / seconds['maps']:.2f}; "
        f"written out {seconds['written out'] / seconds['maps']:.2f} x as long",
        flush=True,
    )


def l1_distances(model: Any, positions: int, repeats: int) -> None:
    """Print the time of ALTI's distances, beside vectors per head."""
    # All blocks run in a row, because gigabytes of pair vectors would leave no warm cache for a single block.
    with torch.no_grad():
        blocks = run_prompt(model, random_tokens(model, positions), Alti()).blocks

    def factors() -> None:
        with torch.no_grad():
            for block in blocks:
                block.cache.clear()
                Alti()(block)

    def by_heads() -> None:
        """Compute as the released code does: heads × query × key × d_model, then summed over heads."""
        with torch.no_grad():
            for block in blocks:
                written_out_distances(block, positions)

    seconds = interleaved({"factors": factors, "by heads": by_heads}, repeats)
    print(
        f"alti, all blocks, {positions} positions: {seconds['factors'] * 1000:.0f} ms; "
        f"written out per head {seconds['by heads'] / seconds['factors']:.0f} x as long"
    )


def written_out_distances(block: Any, positions: int) -> torch.Tensor:
    """Return L1 distances from vectors that are all in memory together."""
    vectors = attention_vectors(block)
    pattern = block.recorded("pattern")[0]
    sent = vectors.pairs.heads.times(vectors.pairs.heads.matrices)
    per_head = torch.einsum("hqk,khd->hqkd", pattern, sent[0])
    dense = per_head.sum(0)
    index = torch.arange(positions)
    dense[index, index] += vectors.states.resid_pre[0]
    norm = block.anatomy.attention_residual
    if norm is not None:
        dense = (dense - dense.mean(-1, keepdim=True)) * norm.weight
        dense = dense / norm.scale(vectors.states.attention_sum)[0][:, None]
    return (dense - vectors.states.mid[0][:, None]).abs().sum(-1)


if __name__ == "__main__":
    main()
