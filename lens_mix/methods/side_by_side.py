"""Run a prompt beside copies with other tokens, in one pass that runs only what differs from the prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.hooks import mask_attention, must_fire
from lens_mix.hooks.mixing import pass_tolerance
from lens_mix.lens.batches import Batch, Prompt
from lens_mix.lens.copies import count_copies
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.replay import BlockCall, captured_calls, relative_error
from lens_mix.lens.users_hooks import has_user_hooks
from lens_mix.methods.bound_target import BoundRows, evaluate, log_probabilities

if TYPE_CHECKING:
    from lens_mix.lens.block import Block
    from lens_mix.removal import Copies
    from lens_mix.targets import Target

# The most tokens that run after the prompt in one pass. More would cost more in attention than they save.
_MOST_TOKENS = {"cpu": 256}
_MOST_TOKENS_ELSEWHERE = 2048


@dataclasses.dataclass(frozen=True)
class Layout:
    """The order of tokens in one sequence that runs many copies of a prompt in one pass.

    The sequence contains the prompt, and then for each copy the positions that are run again. An index sees
    the tokens up to its position: of its own copy those that are run again, of the prompt all others. So two
    kinds of copies are possible if token j is replaced:

    - All positions from j on are run again. Attention is causal, so this is the whole pass over the copy.
    - Only j and the last position are run again. The tokens between them are those of the clean pass.

    Attributes:
        rerun: Which positions of each copy are run again.
        index: The index of each position of each copy: the prompt's own if it is not run again.
        positions: The position of each index.
        allowed: Which indices each index may see.
    """

    rerun: Bool[Tensor, "copy pos"]
    index: Int[Tensor, "copy pos"]
    positions: Int[Tensor, " index"]
    allowed: Bool[Tensor, "index index"]

    @classmethod
    def of(cls, rerun: Bool[Tensor, "copy pos"]) -> Layout:
        """Return the layout of copies, from the positions that are run again."""
        rerun = rerun.cpu()
        count, prompt = rerun.shape[1], torch.arange(rerun.shape[1], device="cpu")
        copy, position = rerun.nonzero().unbind(1)
        positions = torch.cat([prompt, position])
        owner = torch.cat([torch.full_like(prompt, -1), copy])
        allowed = owner[:, None] == owner
        allowed[count:, :count] = ~rerun[copy]
        allowed &= positions <= positions[:, None]
        index = prompt.repeat(len(rerun), 1)
        index[rerun] = count + torch.arange(len(copy), device="cpu")
        return cls(rerun, index, positions, allowed)

    def fill(self, tokens: Int[Tensor, " pos"], copies: Int[Tensor, "copy pos"]) -> Int[Tensor, " index"]:
        """Return the tokens of the pass, from those of the prompt and of the copies."""
        return torch.cat([tokens, copies[self.rerun.to(copies.device)]])


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """A prompt of a clean pass, which can run beside copies of it.

    Attributes:
        blocks: All blocks of the model.
        bound: The target of all rows.
        rows: The indices of the rows that are read, all of one prompt.
    """

    blocks: Sequence[Block]
    bound: BoundRows
    rows: Sequence[int]

    @property
    def prompt(self) -> int:
        """The index of the prompt."""
        return int(self.bound.prompt_index[self.rows[0]])

    @property
    def last(self) -> int:
        """The last position of the padded batch that is read."""
        return max(int(self.bound.queries[row]) for row in self.rows)

    @property
    def places(self) -> Int[Tensor, " pos"]:
        """The positions of the prompt's tokens in the padded batch, as far as they are run."""
        first = self.bound.block
        places = first.real[self.prompt].nonzero()[:, 0]
        read = places[places <= self.last]
        # If the angles depend on the largest position, the pass needs the same one as the clean pass.
        return places if first.clean.lens.angles_differ(len(read), len(places)) else read

    def _most_tokens(self, count: int, needed: int) -> int:
        """Return how many tokens may run after a prompt of `count` tokens, at least those of one copy."""
        lens, max_memory = self.bound.block.clean.lens, self.bound.block.max_memory
        most = max(needed, _MOST_TOKENS.get(lens.device.type, _MOST_TOKENS_ELSEWHERE))
        while True:
            length = count + most + 1
            try:
                count_copies(lens, max_memory, length, logits=length)
                return most
            except ValueError:
                if most == needed:
                    raise
                most = max(needed, most // 2)

    def values_by_row(
        self,
        copies: Copies,
        rerun: Bool[Tensor, "copy input"] | None = None,
        *,
        distributions: bool = False,
    ) -> Iterator[tuple[int, Int[Tensor, " read"], Float[Tensor, " read *d_vocab"]]]:
        """Yield, for each row, the row's index, some copies that run its query again, and its number in each.

        A row that no copy runs again is not yielded, because it does not change. Others may be yielded
        several times, for other copies.

        Args:
            copies: Copies of the prompt.
            rerun: Which positions of each copy are run again; None for all from the first removed one on.
            distributions: Whether to yield the log probabilities of all tokens at the row, not its number.

        Raises:
            UnsupportedModelError: The prompt's own tokens are not those of the clean pass, or user hooks act
                on some positions only.
            ValueError: A pass with one copy needs more memory than `max_memory`.
        """
        first, places = self.bound.block, self.places
        rerun = (copies.removed.cumsum(-1) > 0 if rerun is None else rerun)[:, places]
        rerun = rerun & (places <= self.last)
        own = first.tokens[self.prompt, places]
        others = copies.others[copies.sample, self.prompt][:, places]
        others = torch.where(copies.removed[:, places], others, own)
        chunks = self._split(rerun.sum(-1).tolist())
        for chunk in first.with_bar(chunks, len(chunks), "chunks"):
            some = rerun[chunk]
            if has_user_hooks(first.clean.lens.modules):
                # A hook on certain positions misses the copies, which the prompt's own tokens detect.
                for row, _, values in self._read(own, own.expand_as(others[chunk]), some, False):
                    _check_same(values, self.bound.clean[row], pass_tolerance(first.inputs.dtype))
            for row, read, values in self._read(own, others[chunk], some, distributions):
                yield row, read + chunk.start, values

    def _split(self, sizes: Sequence[int]) -> list[slice]:
        """Return slices over copies of these numbers of tokens, each of which is one pass."""
        most = self._most_tokens(len(self.places), max(sizes, default=0))
        chunks, start, total = [], 0, 0
        for copy, size in enumerate(sizes):
            if total + size > most and copy > start:
                chunks.append(slice(start, copy))
                start, total = copy, 0
            total += size
        return [*chunks, slice(start, len(sizes))]

    def _read(
        self, own: Tensor, others: Tensor, rerun: Bool[Tensor, "copy pos"], whole: bool
    ) -> Iterator[tuple[int, Int[Tensor, " read"], Float[Tensor, " read *d_vocab"]]]:
        """Run one pass and yield as `values_by_row`, or log probabilities if `whole`."""
        places = self.places
        queries = torch.stack([(places == self.bound.queries[row]).nonzero()[0, 0] for row in self.rows])
        is_read = torch.zeros_like(rerun)
        is_read[:, queries] = rerun[:, queries]
        logits = self._run(own, others, rerun, is_read)
        copy, query = is_read.nonzero().unbind(1)
        length = int(self.bound.block.real[self.prompt].sum())
        for row, own_query in zip(self.rows, queries, strict=True):
            of_row = query == own_query
            if not bool(of_row.any()):
                continue
            as_prompt = logits[of_row][:, None].expand(-1, length, -1)
            if whole:
                yield row, copy[of_row], log_probabilities(as_prompt, 0)
            else:
                yield row, copy[of_row], evaluate(self.bound.functions[row], as_prompt)

    @torch.no_grad()
    def _run(
        self, own: Tensor, others: Tensor, rerun: Bool[Tensor, "copy pos"], is_read: Bool[Tensor, "copy pos"]
    ) -> Float[Tensor, "read d_vocab"]:
        """Return the logits at the read positions of copies, after a check of the prompt's own tokens.

        A control is added after the copies: the last position, which sees the prompt itself.
        """
        first = self.bound.block
        control = torch.arange(len(own), device=rerun.device) == len(own) - 1
        layout = Layout.of(torch.cat([rerun, control[None]]))
        tokens = layout.fill(own, torch.cat([others, own[None]]))[None]
        batch = _make_batch(first, tokens, layout.positions.to(tokens.device)[None])
        calls: dict[int, BlockCall] = {}
        capturing = captured_calls(dict(enumerate(first.stack.blocks)), calls)
        template = first.stack.attention_template
        pairs = [mask_attention(block.layer, layout.allowed, attention=template) for block in self.blocks]
        read = layout.index[:-1][is_read.cpu()].to(tokens.device)[None]
        try:
            with must_fire(*pairs) as hooks:
                logits = first.logits(hooks, batch=batch, positions=read, changes=capturing)[0]
        except RuntimeError as problem:
            raise UnsupportedModelError(str(problem)) from problem
        compared = torch.cat([layout.positions[: len(own)], layout.index[-1, -1:]]).to(tokens.device)
        for layer, call in calls.items():
            clean = first.clean.calls[layer].resid_post[self.prompt, self.places]
            _check_control(call.resid_post[0, compared], torch.cat([clean, clean[-1:]]))
        return logits


def may_share_passes(first: Block, target: Target) -> bool:
    """Return whether a model and a target allow that prompts run beside their copies, without a pass."""
    lens, stack = first.clean.lens, first.stack
    takes_positions = lens.takes_input("position_ids") and not stack.reads_target and not stack.is_joint
    return (
        first.verification.causal and takes_positions and target.reads == "logits" and not target.reads_tokens
    )


def rows_beside_copies(bound: BoundRows) -> list[list[int]]:
    """Return the rows of each prompt that may run beside its copies, as far as is known without a pass.

    That needs a causal model that takes position ids, a prompt without further inputs, and a target that
    reads nothing but the logits of the row.
    """
    first = bound.block
    if bound.positions is None or not may_share_passes(first, bound.target):
        return []
    by_prompt = [(bound.prompt_index == prompt).nonzero()[:, 0] for prompt in bound.prompt_index.unique()]
    return [
        rows.tolist()
        for rows in by_prompt
        if not first.batch.prompts[int(bound.prompt_index[rows[0]])].inputs
    ]


def _make_batch(first: Block, tokens: Int[Tensor, "copy pos"], positions: Int[Tensor, "copy pos"]) -> Batch:
    """Return tokens at given positions, which may repeat, for a model that takes `position_ids`."""
    inputs = {"position_ids": positions}
    if first.clean.lens.takes_padding_mask:
        # Without a mask and a cache, transformers takes positions that restart for several prompts.
        inputs["attention_mask"] = torch.ones_like(tokens)
    prompts = tuple(Prompt(copy) for copy in tokens)
    return Batch(prompts, tokens, torch.ones_like(tokens, dtype=torch.bool), None, None, inputs)


def _check_same(values: Float[Tensor, " copy"], clean: Tensor, bound: float) -> None:
    """Check that copies with the prompt's own tokens have the target of the clean pass."""
    error = float((values - clean).abs().max())
    if not error <= bound * max(1.0, float(clean.abs())):
        raise UnsupportedModelError(
            "expected the model's hooks to act alike at all positions, because "
            "replacements run at others; tokens that replace themselves change the target by "
            f"{error:.1e}"
        )


def _check_control(found: Float[Tensor, "index d_model"], clean: Float[Tensor, "index d_model"]) -> None:
    """Check that the prompt's tokens and the control leave a block as in the clean pass."""
    error = relative_error(found, clean)
    if not error <= pass_tolerance(found.dtype):
        raise UnsupportedModelError(
            "expected attention to read only tokens and their positions, so that a "
            "prompt can be run beside its replacements; got other residual streams for the same tokens. "
            "Likely causes: a sliding window shorter than the prompt and its replacements, or positions that "
            "are counted instead of read, as with ALiBi"
        )
