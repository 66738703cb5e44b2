"""A pass over a prompt, stand-ins for some of its tokens, and copies of its last token that see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.hooks import HookPair, must_fire, record_attention
from lens_mix.hooks.mixing import pass_tolerance
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.replay import relative_error
from lens_mix.methods import target_passes
from lens_mix.methods.row_targets import RowTargets

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class Layout:
    """One sequence: the prompt; for each set one stand-in per chosen token; copies of the last token, each
    seeing one stand-in instead of its token; one copy that sees the prompt itself, as a check (the control).

    A stand-in s_j sees the tokens before j and itself; its copy of the last token sees s_j and not j. That of
    the last token has no copy. The control has to come out as the last token, from the farthest place.

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
        replaced = count + torch.arange(sets * len(chosen), device="cpu").unflatten(0, (sets, -1))
        copies = count + replaced.numel() + torch.arange(sets * len(places), device="cpu").reshape(sets, -1)
        control = torch.tensor([count + replaced.numel() + copies.numel()], dtype=torch.long, device="cpu")
        of_last = torch.full((copies.numel() + 1,), last, dtype=torch.long, device="cpu")
        positions = torch.cat([torch.arange(count, device="cpu"), chosen.repeat(sets), of_last])
        allowed = torch.eye(len(positions), dtype=torch.bool, device="cpu")
        # Each sees the tokens before its own position; of its own, only itself.
        allowed[:, :count] |= torch.arange(count, device="cpu") < positions[:, None]
        allowed[copies, places] = False
        allowed[copies, replaced[:, :-1]] = True
        read = torch.cat([copies, replaced[:, -1:]], dim=1)
        return cls(
            torch.cat([torch.arange(count, device="cpu"), control]), replaced, read, positions, allowed
        )

    def reaching(self, last: int) -> Layout:
        """Return the layout with one more index, which nothing sees, at the prompt's last position."""
        positions = torch.cat([self.positions, torch.tensor([last], dtype=torch.long, device="cpu")])
        allowed = torch.block_diag(self.allowed, torch.ones(1, 1, dtype=torch.bool, device="cpu"))
        return dataclasses.replace(self, positions=positions, allowed=allowed)

    def filled(self, tokens: Int[Tensor, " pos"], others: Int[Tensor, "set chosen"]) -> Int[Tensor, " index"]:
        """The tokens of the pass."""
        filled = tokens[self.positions.clamp_max(len(tokens) - 1).to(tokens.device)]
        filled[self.replaced.to(tokens.device)] = others
        return filled


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """One row's prompt up to the query, run with stand-ins for some of its tokens beside it.

    Attributes:
        blocks: of the whole model.
        bound: the target of all rows.
        row: which of them.
        places: the positions of the prompt's tokens in the padded batch, up to the query.
        chosen: which of these are to be replaced; the last is the query.
        mixed: by layer, z of the clean pass at the places.
        edits: makes the hooks that let each index see what its layout allows, as `AttributionPatching.interventions`.
    """

    blocks: Sequence[Block]
    bound: RowTargets
    row: int
    places: Int[Tensor, " pos"]
    chosen: Int[Tensor, " chosen"]
    mixed: Mapping[int, Float[Tensor, "pos head d_head"]]
    interventions: Callable[..., list[HookPair]]

    @property
    def tokens(self) -> Int[Tensor, " pos"]:
        """The tokens up to the query."""
        return self.bound.first.tokens[self.bound.prompts[self.row], self.places]

    def changes(self, others: Int[Tensor, "set chosen"]) -> Float[Tensor, "set chosen"]:
        """What `targets` of all sets differ by from the clean target.

        Raises:
            UnsupportedModelError: as `targets`, and where hooks of the user's act on some positions alone.
            ValueError: as `targets`.
        """
        first, clean = self.bound.first, self.bound.clean[self.row]
        if first.carries_users_hooks:
            # A hook that knows positions misses the stand-ins: tokens that stand in for themselves tell.
            error = float((self.targets(self.tokens[self.chosen][None]) - clean).abs().max())
            if not error <= pass_tolerance(first.inputs.dtype) * max(1.0, float(clean.abs())):
                raise UnsupportedModelError(
                    "attribution_patching: expected the model's hooks to act alike at all positions, as "
                    "stand-ins run at others; tokens that stand in for themselves change the target by "
                    f"{error:.1e}"
                )
        # Together they share the tokens; many of them would spend more on attention among each other.
        parts = others.split(8 if first.max_memory is None else 1)
        return torch.cat(list(map(self.targets, parts))) - clean

    def targets(self, others: Int[Tensor, "set chosen"]) -> Float[Tensor, "set chosen"]:
        """The target when the query's token sees others in the place of the chosen ones, one at a time.

        Raises:
            UnsupportedModelError: the edits don't act, or the tokens themselves come out otherwise.
            ValueError: the pass is beyond the memory bound.
        """
        first, layout = self.bound.first, Layout.of(len(self.places), self.chosen, len(others))
        prompt = int(self.bound.prompts[self.row])
        whole = int(first.real[prompt].sum())
        if first.angles_differ(len(self.places), whole):
            # A model whose angles depend on the largest position gets that of the clean pass.
            layout = layout.reaching(whole - 1)
        first.check_memory(len(layout.positions))
        recorded: dict[str, Tensor] = {}
        pairs, controls, queries = [], [], layout.tokens[None].to(self.places.device)
        for block in self.blocks:
            options = {"attention": block.attention_template}
            pairs += self.interventions(block.layer, layout.allowed, **options)
            controls += record_attention(block.layer, recorded, ["z"], queries=queries, **options)
        tokens = layout.filled(self.tokens, others)[None]
        batch = first.placed_batch(tokens, layout.positions.to(tokens.device)[None])
        read = layout.read.flatten()[None]
        try:
            with torch.no_grad(), must_fire(*pairs, *controls) as hooks:
                logits = first.logits(hooks, batch=batch, positions=read)[0]
        except RuntimeError as problem:
            raise UnsupportedModelError(f"attribution_patching: {problem}") from problem
        for block, (name, _) in zip(self.blocks, controls, strict=True):
            _check_control(recorded[str(name)][0], self.mixed[block.layer])
        as_prompt = logits[:, None].expand(-1, int(first.real[prompt].sum()), -1)
        values = target_passes.evaluate(self.bound.functions[self.row], as_prompt)
        return values.unflatten(0, (-1, len(self.chosen)))


def _check_control(mixed: Float[Tensor, " index *axes"], clean: Float[Tensor, "pos head d_head"]) -> None:
    """The tokens, and the control after them, have to mix what the tokens of the clean pass do."""
    expected = torch.cat([clean, clean[-1:]]).flatten(1)
    error = relative_error(mixed.flatten(1).to(expected.dtype), expected)
    if not error <= pass_tolerance(mixed.dtype):
        raise UnsupportedModelError(
            "attribution_patching: expected attention to read tokens and their positions alone, so that a "
            "prompt can be run beside its stand-ins; got other mixed values for the same tokens (a sliding "
            "window shorter than the prompt and its stand-ins, or positions that are counted instead of "
            "taken, as with ALiBi?)"
        )
