"""Read and write the importance of residual stream and feed-forward in maps of information flow routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._algebra.distances import lengths
from lens_mix._blocks.states import BlockStates
from lens_mix._model.anatomy import BlockAnatomy
from lens_mix.arguments import check_instance
from lens_mix.maps import MixingMap

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


class PartShares(NamedTuple):
    """Importance of the components that came from no other token, in 0..1.

    Attributes:
        resid_pre: That of the residual stream that enters the block, in the one after the attention branch.
        resid_mid: That of the residual stream after the attention branch, in the block's output.
        mlp_out: That of the feed-forward, in the block's output.
        parallel: For each layer, whether the feed-forward reads the block's input.
    """

    resid_pre: Float[Tensor, "layer query"]
    resid_mid: Float[Tensor, "layer query"]
    mlp_out: Float[Tensor, "layer query"]
    parallel: list[bool]


def part_shares(mixing_map: MixingMap) -> PartShares:
    """Return the importance of residual stream and feed-forward, for the layers and rows of the map.

    Args:
        mixing_map: A map of `information_flow_routes`.

    Raises:
        TypeError: It is not a map.
        ValueError: The map is of another method, its tokens were dropped or merged since the run, or the
            components of a block's output are not known (cross-attention).
    """
    chosen = _read_entries(mixing_map)
    unknown = next((entry["layer"] for entry in chosen if "mlp_out" not in entry), None)
    if unknown is not None:
        raise ValueError(
            f"mixing_map: expected blocks whose output is attention, feed-forward and residual stream, got "
            f"block {unknown}, which has cross-attention, or a post-norm feed-forward that cannot be rebuilt"
        )
    resid_pre, resid_mid, mlp_out = (
        _select_rows(mixing_map, chosen, name) for name in ("resid_pre", "resid_mid", "mlp_out")
    )
    return PartShares(resid_pre, resid_mid, mlp_out, [entry["parallel"] for entry in chosen])


# The fields that `record_shares` writes for every block.
_FIELDS = {"layer", "tokens", "queries", "parallel", "resid_pre"}


def own_share(mixing_map: MixingMap) -> Float[Tensor, "layer query"]:
    """Return `PartShares.resid_pre` of a map, which is known in every part of an encoder-decoder.

    Args:
        mixing_map: A map of `information_flow_routes`.

    Raises:
        TypeError: As in `part_shares`.
        ValueError: The map is of another method, or its tokens were dropped or merged since the run.
    """
    return _select_rows(mixing_map, _read_entries(mixing_map), "resid_pre")


def _read_entries(mixing_map: MixingMap) -> list[dict[str, Any]]:
    """Return the record of each layer of the map."""
    check_instance("mixing_map", mixing_map, MixingMap, "a MixingMap")
    details = mixing_map.provenance.get("details")
    entries = details.get("parts") if isinstance(details, dict) else None
    # The map may come from a file, whose provenance may be anything.
    listed = entries if isinstance(entries, list) else []
    whole = [entry for entry in listed if isinstance(entry, dict) and _FIELDS.issubset(entry)]
    by_layer = {entry["layer"]: entry for entry in whole if isinstance(entry["layer"], int)}
    missing = [layer for layer in mixing_map.layer_labels if layer not in by_layer]
    if missing:
        got = f"got method {mixing_map.method!r} without a record of the shares in layers {missing}"
        raise ValueError(f"mixing_map: expected a map of information_flow_routes, {got}")
    chosen = [by_layer[layer] for layer in mixing_map.layer_labels]
    if chosen[0]["tokens"] != len(mixing_map.tokens):
        raise ValueError(
            f"mixing_map: expected the {chosen[0]['tokens']} tokens of the run, got {len(mixing_map.tokens)} "
            "after tokens were dropped or merged; words= of graphs.information_flow_routes merges them"
        )
    return chosen


def _select_rows(
    mixing_map: MixingMap, chosen: Sequence[dict[str, Any]], name: str
) -> Float[Tensor, "layer query"]:
    """Return one of the recorded shares, at the rows of the map."""
    queries = mixing_map.query_positions
    rows = [[entry[name][entry["queries"].index(query)] for query in queries] for entry in chosen]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def record_shares(block: Block, states: BlockStates, shares: dict[str, Float[Tensor, "batch query"]]) -> None:
    """Record each prompt's shares by the positions of its rows, without padding.

    Args:
        block: The block, whose record gets the shares.
        states: Its clean states.
        shares: Those after the attention branch. Those of the block's output are added.
    """
    shares = shares | _compute_output_shares(block, states, "biases_mid" in shares)
    for index, real in enumerate(block.real):
        is_real, place = real.tolist(), (real.cumsum(0) - 1).tolist()
        # A prompt with fewer rows than another repeats its last row, so a position may occur twice.
        rows = {place[p]: row for row, p in enumerate(block.queries[index].tolist()) if is_real[p]}
        values = {name: share[index, list(rows.values())].tolist() for name, share in shares.items()}
        entry = {"layer": block.layer, "tokens": sum(is_real), "queries": list(rows)}
        block.detail(index, "parts", {**entry, "parallel": block.anatomy.parallel, **values})


def _compute_output_shares(
    block: Block, states: BlockStates, biases: bool
) -> dict[str, Float[Tensor, "batch query"]]:
    """Return the importance of the components of the block's output, or nothing if they are not known."""
    anatomy, mid = block.anatomy, states.mid
    if lacks_block_output(anatomy):
        return {}
    whole, norm, residual = block.resid_post.to(mid.dtype), anatomy.feed_forward_residual, mid
    # Without a norm behind it, the feed-forward has added what the output has beyond `mid`.
    added = torch.zeros_like(mid) if anatomy.feed_forward_kind == "none" else whole - mid
    if norm is not None and anatomy.feed_forward is not None:
        last = states.feed_forward_residual
        residual, added = last(mid), last(states.feed_forward_added)
    parts = {"resid_mid": residual, "mlp_out": added}
    if biases and norm is not None:
        parts["biases_post"] = whole - residual - added
    near = {name: proximity(part, whole) for name, part in parts.items()}
    total = sum(near.values(), torch.zeros_like(whole[..., 0]))
    return {name: value / torch.where(total > 0, total, 1) for name, value in near.items()}


def lacks_block_output(anatomy: BlockAnatomy) -> bool:
    """Return whether the feed-forward's share of the block's output is unknown."""
    unbuilt = anatomy.feed_forward is None and anatomy.feed_forward_kind != "none"
    return anatomy.cross or (anatomy.feed_forward_residual is not None and unbuilt)


def proximity(
    part: Float[Tensor, "*batch d_model"], whole: Float[Tensor, "*batch d_model"]
) -> Float[Tensor, "*batch"]:
    """Return max(0, ‖whole‖₁ - ‖whole - part‖₁)."""
    return (lengths(whole, 1) - lengths(whole - part, 1)).clamp_min(0)
