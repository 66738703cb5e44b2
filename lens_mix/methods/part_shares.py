"""What a map of information flow routes has on record of the parts that came from no other token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.distances import lengths
from lens_mix.algebra.feed_forward import without_last_norm
from lens_mix.algebra.head_vectors import linear_part
from lens_mix.algebra.vectors import AttentionVectors
from lens_mix.arguments import instance
from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.maps import MixingMap

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


class PartShares(NamedTuple):
    """Importance of the parts that came from no other token, `[layer, query]`, 0 to 1.

    Attributes:
        resid_pre: of the residual stream that enters the block, in the one after the attention branch.
        resid_mid: of the latter in the block's output.
        mlp_out: of the feed-forward in the block's output.
        parallel: per layer, whether the feed-forward reads what enters the block.
    """

    resid_pre: Float[Tensor, "layer query"]
    resid_mid: Float[Tensor, "layer query"]
    mlp_out: Float[Tensor, "layer query"]
    parallel: list[bool]


def part_shares(mixing_map: MixingMap) -> PartShares:
    """What the map's record says of residual and feed-forward, for the layers and rows that the map holds.

    Raises:
        ValueError: no map of `information_flow_routes`; tokens dropped or merged since; blocks whose
            feed-forward can't be told apart (cross-attention).
    """
    chosen = _entries(mixing_map)
    unknown = next((entry["layer"] for entry in chosen if "mlp_out" not in entry), None)
    if unknown is not None:
        raise ValueError(
            f"mixing_map: expected blocks whose output is attention, feed-forward and residual, got block "
            f"{unknown}, which has cross-attention, or a post-norm feed-forward that can't be rebuilt"
        )
    resid_pre, resid_mid, mlp_out = (
        _held(mixing_map, chosen, name) for name in ("resid_pre", "resid_mid", "mlp_out")
    )
    return PartShares(resid_pre, resid_mid, mlp_out, [entry["parallel"] for entry in chosen])


# What `record_shares` writes about every block.
_ENTRY = {"layer", "tokens", "queries", "parallel", "resid_pre"}


def own_share(mixing_map: MixingMap) -> Float[Tensor, "layer query"]:
    """`PartShares.resid_pre`, which every part of an encoder-decoder has. ValueError: as `part_shares`."""
    return _held(mixing_map, _entries(mixing_map), "resid_pre")


def _entries(mixing_map: MixingMap) -> list[dict[str, Any]]:
    """What the record says of each layer that the map holds."""
    instance("mixing_map", mixing_map, MixingMap, "a MixingMap")
    details = mixing_map.provenance.get("details")
    entries = details.get("parts") if isinstance(details, dict) else None
    listed = entries if isinstance(entries, list) else []
    whole = [entry for entry in listed if isinstance(entry, dict) and _ENTRY.issubset(entry)]
    by_layer = {entry["layer"]: entry for entry in whole if isinstance(entry["layer"], int)}
    missing = [layer for layer in mixing_map.layer_labels if layer not in by_layer]
    if missing:
        got = f"got method {mixing_map.method!r} and none of its record for layers {missing}"
        raise ValueError(f"mixing_map: expected a map of information_flow_routes, {got}")
    chosen = [by_layer[layer] for layer in mixing_map.layer_labels]
    if chosen[0]["tokens"] != len(mixing_map.tokens):
        raise ValueError(
            f"mixing_map: expected the {chosen[0]['tokens']} tokens of the run, got {len(mixing_map.tokens)} "
            "after tokens were dropped or merged; words= of graphs.information_flow_routes merges them"
        )
    return chosen


def _held(mixing_map: MixingMap, chosen: Sequence[dict[str, Any]], name: str) -> Float[Tensor, "layer query"]:
    """One of the shares, at the rows that the map holds."""
    queries = mixing_map.query_positions
    rows = [[entry[name][entry["queries"].index(query)] for query in queries] for entry in chosen]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def record_shares(
    block: Block, attention: AttentionVectors, shares: dict[str, Float[Tensor, "batch query"]]
) -> None:
    """Put each prompt's shares on record by the positions of its rows, padding cut away.

    `shares` are those after the attention branch; those of the block's output are added.
    """
    shares = shares | _after_feed_forward(block, attention, "biases_mid" in shares)
    for index, real in enumerate(block.real):
        is_real, place = real.tolist(), (real.cumsum(0) - 1).tolist()
        # A prompt with fewer rows than another repeats its last one.
        rows = {place[p]: row for row, p in enumerate(block.queries[index].tolist()) if is_real[p]}
        values = {name: share[index, list(rows.values())].tolist() for name, share in shares.items()}
        entry = {"layer": block.layer, "tokens": sum(is_real), "queries": list(rows)}
        block.detail(index, "parts", {**entry, "parallel": block.anatomy.parallel, **values})


def _after_feed_forward(
    block: Block, attention: AttentionVectors, biases: bool
) -> dict[str, Float[Tensor, "batch query"]]:
    """Importance of the parts of the block's output; none where they can't be told."""
    anatomy, mid = block.anatomy, attention.mid
    if ends_unknown(anatomy):
        return {}
    whole, norm, residual = block.resid_post.to(mid.dtype), anatomy.feed_forward_residual, mid
    added = torch.zeros_like(mid) if anatomy.feed_forward_kind == "none" else whole - mid
    if norm is not None and anatomy.feed_forward is not None:
        output = anatomy.feed_forward(anatomy.feed_forward_in(attention.resid_pre, mid))
        summed = without_last_norm(anatomy).after_feed_forward(mid, output)
        residual, added = (linear_part(norm, part) / norm.scale(summed) for part in (mid, summed - mid))
    parts = {"resid_mid": residual, "mlp_out": added}
    if biases and norm is not None:
        parts["biases_post"] = whole - residual - added
    near = {name: proximity(part, whole) for name, part in parts.items()}
    total = sum(near.values(), torch.zeros_like(whole[..., 0]))
    return {name: value / torch.where(total > 0, total, 1) for name, value in near.items()}


def ends_unknown(anatomy: BlockAnatomy) -> bool:
    """Whether the feed-forward's share of the block's output can't be told."""
    unbuilt = anatomy.feed_forward is None and anatomy.feed_forward_kind != "none"
    return anatomy.cross or (anatomy.feed_forward_residual is not None and unbuilt)


def proximity(
    part: Float[Tensor, "*batch d_model"], whole: Float[Tensor, "*batch d_model"]
) -> Float[Tensor, "*batch"]:
    """max(0, ‖whole‖₁ - ‖whole - part‖₁)."""
    return (lengths(whole, 1) - lengths(whole - part, 1)).clamp_min(0)
