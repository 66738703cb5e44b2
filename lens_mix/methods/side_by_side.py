"""Run a prompt beside replacements of some of its tokens, with copies of its last token that read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.hooks import HookPair, must_fire, record_attention
from lens_mix.hooks.mixing import pass_tolerance
from lens_mix.lens.batches import Batch, Prompt
from lens_mix.lens.copies import count_copies
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.replay import relative_error
from lens_mix.lens.users_hooks import has_user_hooks
from lens_mix.methods.bound_target import BoundRows, evaluate

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class Layout:
    """The order of tokens in one sequence that measures many replacements in one pass.

    The sequence contains, in this order:

    - the prompt;
    - for each set, one replacement of every chosen token;
    - copies of the last token, each of which sees one replacement instead of the replaced token;
    - one copy that sees the prompt itself (the control).

    A replacement of the token at position j sees the tokens before j and itself. Its copy of the last token
    sees the replacement and not j. A replacement of the last token needs no copy. The control must give the
    same values as the last token, from the end of the sequence.

    Attributes:
        tokens: The indices of the prompt's tokens and of the control.
        replaced: The indices of the replacements. The last of a set replaces the last token.
        read: The indices whose logits are read: the copies of each set, then its last replacement.
        positions: The position of each index.
        allowed: Which indices each index may see.
    """

    tokens: Int[Tensor, " pos"]
    replaced: Int[Tensor, "set chosen"]
    read: Int[Tensor, "set chosen"]
    positions: Int[Tensor, " index"]
    allowed: Bool[Tensor, "index index"]

    @classmethod
    def of(cls, count: int, chosen: Int[Tensor, " chosen"], sets: int) -> Layout:
        """Return the layout of a prompt of `count` tokens. The last chosen position is its last."""
        last, replaced_positions = count - 1, chosen[:-1]
        replaced = count + torch.arange(sets * len(chosen), device="cpu").unflatten(0, (sets, -1))
        copies = (
            count
            + replaced.numel()
            + torch.arange(sets * len(replaced_positions), device="cpu").reshape(sets, -1)
        )
        control = torch.tensor([count + replaced.numel() + copies.numel()], dtype=torch.long, device="cpu")
        of_last = torch.full((copies.numel() + 1,), last, dtype=torch.long, device="cpu")
        positions = torch.cat([torch.arange(count, device="cpu"), chosen.repeat(sets), of_last])
        allowed = torch.eye(len(positions), dtype=torch.bool, device="cpu")
        # An index sees the tokens before its position, and of those at its position only itself.
        allowed[:, :count] |= torch.arange(count, device="cpu") < positions[:, None]
        allowed[copies, replaced_positions] = False
        allowed[copies, replaced[:, :-1]] = True
        read = torch.cat([copies, replaced[:, -1:]], dim=1)
        return cls(
            torch.cat([torch.arange(count, device="cpu"), control]), replaced, read, positions, allowed
        )

    def extend_to(self, last: int) -> Layout:
        """Return the layout with one more index, which nothing sees, at the prompt's last position."""
        positions = torch.cat([self.positions, torch.tensor([last], dtype=torch.long, device="cpu")])
        allowed = torch.block_diag(self.allowed, torch.ones(1, 1, dtype=torch.bool, device="cpu"))
        return dataclasses.replace(self, positions=positions, allowed=allowed)

    def fill(self, tokens: Int[Tensor, " pos"], others: Int[Tensor, "set chosen"]) -> Int[Tensor, " index"]:
        """Return the tokens of the pass, with the replacements at their indices."""
        filled = tokens[self.positions.clamp_max(len(tokens) - 1).to(tokens.device)]
        filled[self.replaced.to(tokens.device)] = others
        return filled


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """The prompt of one row up to the query, run with replacements for some of its tokens beside it.

    Attributes:
        blocks: All blocks of the model.
        bound: The target of all rows.
        row: The number of the row.
        token_positions: The positions of the prompt's tokens in the padded batch, up to the query.
        chosen: Which of these are replaced. The last one is the query.
        mixed: For each layer, z of the clean pass at these positions.
        interventions: The function that makes the hooks for a layout: `AttributionPatching.interventions`.
    """

    blocks: Sequence[Block]
    bound: BoundRows
    row: int
    token_positions: Int[Tensor, " pos"]
    chosen: Int[Tensor, " chosen"]
    mixed: Mapping[int, Float[Tensor, "pos head d_head"]]
    interventions: Callable[..., list[HookPair]]

    @property
    def tokens(self) -> Int[Tensor, " pos"]:
        """Return the tokens up to the query."""
        return self.bound.block.tokens[self.bound.prompt_index[self.row], self.token_positions]

    def compute_changes(self, others: Int[Tensor, "set chosen"]) -> Float[Tensor, "set chosen"]:
        """Return how much the target of each replacement differs from that of the clean pass.

        Args:
            others: The replacements of the chosen tokens.

        Raises:
            UnsupportedModelError: As in `compute_targets`, and if user hooks act on some positions only.
            ValueError: As in `compute_targets`.
        """
        first, clean = self.bound.block, self.bound.clean[self.row]
        if has_user_hooks(first.clean.lens.modules):
            # A hook on certain positions misses the replacements. Tokens that replace themselves detect that.
            error = float((self.compute_targets(self.tokens[self.chosen][None]) - clean).abs().max())
            if not error <= pass_tolerance(first.inputs.dtype) * max(1.0, float(clean.abs())):
                raise UnsupportedModelError(
                    "attribution_patching: expected the model's hooks to act alike at all positions, because "
                    "replacements run at others; tokens that replace themselves change the target by "
                    f"{error:.1e}"
                )
        # A pass serves several sets, which share the prompt. More sets would cost more in attention.
        chunks = others.split(8 if first.max_memory is None else 1)
        return torch.cat(list(map(self.compute_targets, chunks))) - clean

    def compute_targets(self, others: Int[Tensor, "set chosen"]) -> Float[Tensor, "set chosen"]:
        """Return the target if the query's token sees another token instead of a chosen one.

        The chosen tokens are replaced one at a time.

        Args:
            others: The replacements of the chosen tokens.

        Raises:
            UnsupportedModelError: The interventions have no effect, or change the prompt's own tokens.
            ValueError: The pass needs more memory than `max_memory`.
        """
        first, layout = self.bound.block, Layout.of(len(self.token_positions), self.chosen, len(others))
        prompt = int(self.bound.prompt_index[self.row])
        whole = int(first.real[prompt].sum())
        if first.clean.lens.angles_differ(len(self.token_positions), whole):
            # If the angles depend on the largest position, the pass needs the same one as the clean pass.
            layout = layout.extend_to(whole - 1)
        length = len(layout.positions)
        count_copies(first.clean.lens, first.max_memory, length, logits=length)
        recorded: dict[str, Tensor] = {}
        pairs, controls, queries = [], [], layout.tokens[None].to(self.token_positions.device)
        for block in self.blocks:
            options = {"attention": block.stack.attention_template}
            pairs += self.interventions(block.layer, layout.allowed, **options)
            controls += record_attention(block.layer, recorded, ["z"], queries=queries, **options)
        tokens = layout.fill(self.tokens, others)[None]
        batch = _make_batch(first, tokens, layout.positions.to(tokens.device)[None])
        read = layout.read.flatten()[None]
        try:
            with torch.no_grad(), must_fire(*pairs, *controls) as hooks:
                logits = first.logits(hooks, batch=batch, positions=read)[0]
        except RuntimeError as problem:
            raise UnsupportedModelError(f"attribution_patching: {problem}") from problem
        for block, (name, _) in zip(self.blocks, controls, strict=True):
            _check_control(recorded[str(name)][0], self.mixed[block.layer])
        as_prompt = logits[:, None].expand(-1, int(first.real[prompt].sum()), -1)
        values = evaluate(self.bound.functions[self.row], as_prompt)
        by_row: Tensor = values.unflatten(0, (-1, len(self.chosen)))
        return by_row


def _make_batch(first: Block, tokens: Int[Tensor, "copy pos"], positions: Int[Tensor, "copy pos"]) -> Batch:
    """Return tokens at given positions, which may repeat, for a model that takes `position_ids`."""
    inputs = {"position_ids": positions}
    if first.clean.lens.takes_padding_mask:
        # Without a mask and a cache, transformers takes positions that restart for several prompts.
        inputs["attention_mask"] = torch.ones_like(tokens)
    prompts = tuple(Prompt(copy) for copy in tokens)
    return Batch(prompts, tokens, torch.ones_like(tokens, dtype=torch.bool), None, None, inputs)


def _check_control(mixed: Float[Tensor, " index *axes"], clean: Float[Tensor, "pos head d_head"]) -> None:
    """Check that the tokens and the control mix the same values as the tokens of the clean pass."""
    expected = torch.cat([clean, clean[-1:]]).flatten(1)
    error = relative_error(mixed.flatten(1).to(expected.dtype), expected)
    if not error <= pass_tolerance(mixed.dtype):
        raise UnsupportedModelError(
            "attribution_patching: expected attention to read only tokens and their positions, so that a "
            "prompt can be run beside its replacements; got other mixed values for the same tokens. Likely "
            "causes: a sliding window shorter than the prompt and its replacements, or positions that are "
            "counted instead of read, as with ALiBi"
        )
