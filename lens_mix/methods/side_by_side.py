"""A pass over a prompt, stand-ins for some of its tokens, and copies of its last token that see them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.hooks import AttentionHook
from lens_mix.hooks.mixing import pass_tolerance, sink
from lens_mix.lens.replay import relative_error

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where what stands: the tokens, then a stand-in s_j for each chosen token j, and again for each set of
    stand-ins, then the copies of the last token, one per stand-in but the last token's, and one control.

    A stand-in s_j sees the tokens before j and itself; its copy of the last token sees s_j and not j. The
    control is a copy that sees the tokens: it has to come out as the last token, from the farthest place.

    Attributes:
        tokens: the indices of the tokens.
        replaced: the indices of the stand-ins; the last of a set is the last token's.
        read: the indices of which the logits count: the copies of each set, then its last stand-in.
        positions: the position of each index.
        allowed: which others each index may see.
    """

    tokens: Int[Tensor, " pos"]
    replaced: Int[Tensor, "set chosen"]
    read: Int[Tensor, "set chosen"]
    positions: Int[Tensor, " index"]
    allowed: Bool[Tensor, "index index"]

    @classmethod
    def of(cls, count: int, chosen: Int[Tensor, " chosen"], sets: int) -> Layout:
        """The layout of a prompt of `count` tokens; the last of the chosen positions is its last."""
        last, places = count - 1, chosen[:-1]
        replaced = count + torch.arange(sets * len(chosen)).unflatten(0, (sets, -1))
        copies = count + replaced.numel() + torch.arange(sets * len(places)).reshape(sets, -1)
        control = torch.tensor([count + replaced.numel() + copies.numel()])
        of_last = torch.full((copies.numel() + 1,), last)
        positions = torch.cat([torch.arange(count), chosen.repeat(sets), of_last])
        allowed = torch.eye(len(positions), dtype=torch.bool)
        # Each sees the tokens before its own position; of its own, only itself.
        allowed[:, :count] |= torch.arange(count) < positions[:, None]
        allowed[copies, places] = False
        allowed[copies, replaced[:, :-1]] = True
        read = torch.cat([copies, replaced[:, -1:]], dim=1)
        return cls(torch.cat([torch.arange(count), control]), replaced, read, positions, allowed)

    def filled(self, tokens: Int[Tensor, " pos"], others: Int[Tensor, "set chosen"]) -> Int[Tensor, " index"]:
        """The tokens of the pass."""
        filled = tokens[self.positions.to(tokens.device)]
        filled[self.replaced.to(tokens.device)] = others
        return filled


class SideBySide(AttentionHook):
    """Lets each index see in one layer what its layout allows: weights are shared out anew."""

    points = ("values", "pattern", "mixed")

    def __init__(self, block: Block, layout: Layout, mixed: Float[Tensor, "query head d_head"]) -> None:
        """`mixed` is z of the clean pass, which the tokens and the control have to have here too."""
        super().__init__(block.layer, block.attention_template)
        self._layout, self._clean = layout, torch.cat([mixed, mixed[-1:]])

    def on_pattern(self, pattern: Float[Tensor, "copy head query key"], values: Tensor) -> Tensor:
        shared, to_no_key = pattern * self._layout.allowed.to(pattern), sink(pattern)
        left = shared.sum(-1, keepdim=True, dtype=to_no_key.dtype) + to_no_key
        return (shared / left).to(pattern.dtype)

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> None:
        found = mixed[0, self._layout.tokens].flatten(-2).to(self._clean.dtype)
        error = relative_error(found, self._clean.flatten(-2))
        if not error <= pass_tolerance(mixed.dtype):
            raise RuntimeError(
                "expected attention to read tokens and their positions alone, so that a prompt can be run "
                "beside its stand-ins; got other mixed values for the same tokens (a sliding window shorter "
                "than the prompt and its stand-ins, or positions that are counted instead of taken, as with "
                "ALiBi?)"
            )
        self.calls += 1
