"""A pass over clean tokens, their stand-ins and copies of the last token, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from einops import repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.hooks import AttentionHook, HookPair
from lens_mix.hooks.mask import shared_out_anew
from lens_mix.hooks.mixing import mix, tolerance
from lens_mix.lens.changed_backward import Rules
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.replay import relative_error
from lens_mix.methods import target_passes
from lens_mix.methods.row_targets import RowTargets

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where what stands in a pass over a prompt: [t_0, s_0, t_1, s_1, ...], then copies of the last token.

    A stand-in s_j sees the clean tokens before j and itself; copy j of the last token sees s_j, not t_j.

    Attributes:
        clean, replaced: the indices of the tokens and their stand-ins.
        read: the indices of which the logits count: the copies, then the last stand-in.
        positions: the position of each index.
        allowed: which others each index may see.
    """

    clean: Int[Tensor, " pos"]
    replaced: Int[Tensor, " pos"]
    read: Int[Tensor, " pos"]
    positions: Int[Tensor, " index"]
    allowed: Bool[Tensor, "index index"]

    @classmethod
    def of(cls, count: int) -> Layout:
        """The layout of a prompt of so many tokens."""
        clean, last = 2 * torch.arange(count), 2 * count + torch.arange(count - 1)
        replaced = clean + 1
        positions = torch.cat([torch.arange(count).repeat_interleave(2), torch.full_like(last, count - 1)])
        allowed = torch.eye(len(positions), dtype=torch.bool)
        earlier = torch.ones(count, count, dtype=torch.bool).tril(-1)
        for index in (clean, replaced):
            allowed[index[:, None], clean] |= earlier
        allowed[last[:, None], clean[:-1]] = ~torch.eye(count - 1, dtype=torch.bool)
        allowed[last, replaced[:-1]] = True
        return cls(clean, replaced, torch.cat([last, replaced[-1:]]), positions, allowed)

    def filled(
        self, tokens: Int[Tensor, " pos"], others: Int[Tensor, "copy pos"]
    ) -> Int[Tensor, "copy index"]:
        """The tokens of the pass, a row per stand-in."""
        filled = tokens[self.positions.to(tokens.device)].repeat(len(others), 1)
        filled[:, self.replaced] = others
        return filled


def mixed_gradients(
    blocks: Sequence[Block], bound: RowTargets, row: int, places: Int[Tensor, " pos"]
) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer: the gradient of a row's target by z under the changed rules, and z; [query head d_head]."""
    written = all(block.anatomy.is_written_down for block in blocks)
    # The softmax at temperature 2 has a derivative of half its size.
    rules = Rules(temperature=2.0, scores=0.5, activations="ratio" if written else "gradient")
    keepers = {block.layer: _KeepGradient(block.layer, block.attention_template) for block in blocks}
    index = torch.tensor([row], device=bound.prompts.device)
    x = bound.first.whole_resid_pre[bound.prompts[index]].detach().requires_grad_(True)
    changed = bound.first.changed_backward(rules, blocks[1:], logits=bound.target.reads == "logits")
    pairs: list[HookPair] = [(keeper.matches, keeper) for keeper in keepers.values()]
    with torch.enable_grad(), changed:
        values = bound.values(index, pairs, resid_pre=x, gradients=True)
        target_passes.gradients_of(values, [x])
    kept = {}
    for layer, keeper in keepers.items():
        if keeper.gradient is None or keeper.mixed is None:
            raise UnsupportedModelError(f"hooks: no gradient came back to {keeper.module}.hook_z")
        kept[layer] = (_wide(keeper.gradient[0, places]), _wide(keeper.mixed[0, places]))
    return kept


class _KeepGradient(AttentionHook):
    """Keeps z and the gradient that comes back to it."""

    points = ("values", "mixed")
    gradient: Tensor | None = None
    mixed: Tensor | None = None

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor | None:
        if not (torch.is_grad_enabled() and mixed.requires_grad):
            return None
        self.mixed = mixed.detach()
        mixed.register_hook(self._keep)
        self.calls += 1
        # The pass goes on from what was looked at, or no gradient comes back to it.
        return mixed

    def _keep(self, gradient: Tensor) -> None:
        self.gradient = gradient.detach()


class Interleaved(AttentionHook):
    """Lets each index see what its layout allows, and reads the effects of the stand-ins off one layer."""

    points = ("values", "pattern", "mixed")
    effects: Float[Tensor, "copy query key"]

    def __init__(
        self,
        block: Block,
        layout: Layout,
        effects_of: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        mixed: Tensor,
    ) -> None:
        """`effects_of` takes pattern and values of the clean tokens, and both of their stand-ins.

        `mixed` is z of the clean pass, which the clean tokens have to have here too.
        """
        super().__init__(block.layer, block.attention_template)
        self._layout, self._effects_of, self._clean = layout, effects_of, mixed

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        layout = self._layout
        allowed = layout.allowed.to(mixed.device)
        shared = shared_out_anew(self, "stand-ins", mixed, values, pattern, allowed)
        edited = mix(shared, values)
        self._refuse_unlike(edited[:, layout.clean])
        assert pattern is not None
        kept = (pattern * allowed).sum(-1, keepdim=True)
        scale = shared.sum(-1, keepdim=True) / kept.clamp_min(torch.finfo(kept.dtype).tiny)
        rows, clean, other = layout.clean[:, None], layout.clean, layout.replaced
        n = pattern.shape[1] // values.shape[2]
        each = repeat(values, "copy key head d_head -> copy key (head n) d_head", n=n)
        # No token reads a stand-in of a later one.
        weight = (pattern * scale)[:, :, rows, other].tril(-1)
        self.effects = self._effects_of(
            _wide(shared[:, :, rows, clean]),
            _wide(each[:, clean]),
            _wide(weight),
            _wide(each[:, other]),
        )
        self.calls += 1
        return edited

    def _refuse_unlike(self, found: Float[Tensor, "copy query head d_head"]) -> None:
        """The clean tokens have to be what they are in the clean pass."""
        error = relative_error(_wide(found).flatten(-2), self._clean.expand_as(found).flatten(-2))
        # What whole passes round differently, every block on the way makes larger.
        if not error <= max(1e-3, tolerance(found.dtype)):
            raise RuntimeError(
                "expected attention to read tokens and their positions alone, so that a prompt can be run "
                "beside its stand-ins; got other mixed values for the same tokens (a sliding window shorter "
                "than three prompts, or positions that are counted instead of taken, as with ALiBi?)"
            )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
