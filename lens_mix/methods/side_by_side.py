"""Run a prompt beside copies with other tokens, in one pass that runs only what differs from the prompt."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lens_mix.hooks import mask_attention, must_fire
from lens_mix.hooks.mixing import pass_tolerance
from lens_mix.lens.changes import forward_hook
from lens_mix.lens.copies import count_copies, pack_passes
from lens_mix.lens.layout import Layout, batch_of_rows
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.prefix_keys import PrefixKeys
from lens_mix.lens.replay import first_tensor, relative_error
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
class SideBySide:
    """A prompt of a clean pass, which can run beside copies of it.

    Attributes:
        blocks: All blocks of the model.
        bound: The target of all rows.
        rows: The indices of the rows that are read, all of one prompt.
        keys: The keys and values of the prompt in the clean pass, so that no pass runs the prompt; None if
            they are not known.
    """

    blocks: Sequence[Block]
    bound: BoundRows
    rows: Sequence[int]
    keys: PrefixKeys | None = None

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
        places = self.places
        rerun = (copies.removed.cumsum(-1) > 0 if rerun is None else rerun)[:, places]
        rerun = rerun & (places <= self.last)
        own = self.bound.block.tokens[self.prompt, places]
        others = copies.others[copies.sample, self.prompt][:, places]
        others = torch.where(copies.removed[:, places], others, own)
        left, sizes = torch.arange(len(rerun), device=rerun.device), rerun.sum(-1).tolist()
        passes = self._plan(sizes)
        prefix = PrefixKeys(len(places)) if any(rows is not None for _, rows in passes) else None
        if prefix is not None and passes[0][1] is not None and self.keys is not None:
            prefix = self.keys.first(len(places))
        for run, rows in self.bound.block.with_bar(passes, len(passes), "chunks"):
            some = torch.tensor(run, dtype=torch.long, device=rerun.device)
            try:
                found = self._read(own, others[some], rerun[some], distributions, rows, prefix)
            except UnsupportedModelError:
                if prefix is None:
                    raise
                # The model's attention does not read `prefix`, or changes the keys before it reads them. So
                # each pass needs the prompt, also for other rows.
                if self.keys is not None:
                    self.keys.kept.clear()
                break
            left = left[~torch.isin(left, some)]
            for row, read, values in found:
                yield row, some[read], values
        for chunk in self._split([sizes[copy] for copy in left.tolist()]) if len(left) else ():
            some = left[chunk]
            for row, read, values in self._read(own, others[some], rerun[some], distributions):
                yield row, some[read], values

    def _plan(self, sizes: Sequence[int]) -> list[tuple[list[int], list[list[int]] | None]]:
        """Return the passes over copies of these numbers of tokens.

        Each has its copies, and for a later pass (`Layout`) the copies in each row, by their index in it.
        """
        lens, max_memory = self.bound.block.clean.lens, self.bound.block.max_memory
        beside = [list(range(len(sizes)))[chunk] for chunk in self._split(sizes)]
        alone: list[tuple[list[int], list[list[int]] | None]] = [(copies, None) for copies in beside]
        has_keys = self._has_keys
        if (len(beside) == 1 and not has_keys) or not lens.takes_padding_mask:
            return alone
        # A row has one place more than the longest copy, for the control or a copy of one token. Rows have
        # about the length of the prompt, and one length, so that few places are left.
        count, total = len(self.places), sum(sizes) + 1
        rows = math.ceil(total / (count + 1))
        width = max(max(sizes) + 1, math.ceil(total / rows))
        try:
            size = count_copies(lens, max_memory, count + width, logits=width)
        except ValueError:  # Fewer tokens may fit beside the prompt.
            return alone
        start = 0 if has_keys else len(beside[0])
        passes = pack_passes(sizes[start:], width, size)
        later = [([copy + start for copy in copies], rows) for copies, rows in passes]
        return [*([] if has_keys else alone[:1]), *later]

    @property
    def _has_keys(self) -> bool:
        """Whether the keys and values of all layers are known, at the places of the prompt."""
        lens, places = self.bound.block.clean.lens, self.places
        if self.keys is None or set(self.keys.kept) != set(lens.stack.attention_layers):
            return False
        return torch.equal(places, torch.arange(len(places), device=places.device))

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
        self,
        own: Tensor,
        others: Tensor,
        rerun: Bool[Tensor, "copy pos"],
        distributions: bool,
        rows: list[list[int]] | None = None,
        prefix: PrefixKeys | None = None,
    ) -> Iterator[tuple[int, Int[Tensor, " read"], Float[Tensor, " read *d_vocab"]]]:
        """Run one pass, and return an iterator as `values_by_row`."""
        first, places = self.bound.block, self.places
        queries = torch.stack([(places == self.bound.queries[row]).nonzero()[0, 0] for row in self.rows])
        is_read = torch.zeros_like(rerun)
        is_read[:, queries] = rerun[:, queries]
        if has_user_hooks(first.clean.lens.modules):
            # A hook on certain positions misses the copies, which the prompt's own tokens detect.
            known = None if rows is None else prefix
            logits = self._run(own, own.expand_as(others), rerun, is_read, rows, known)
            for row, _, values in self._split_by_row(logits, is_read, queries, False):
                _check_same(values, self.bound.clean[row], pass_tolerance(first.inputs.dtype))
        logits = self._run(own, others, rerun, is_read, rows, prefix)
        return self._split_by_row(logits, is_read, queries, distributions)

    def _split_by_row(
        self,
        logits: Float[Tensor, "read d_vocab"],
        is_read: Bool[Tensor, "copy pos"],
        queries: Tensor,
        whole: bool,
    ) -> Iterator[tuple[int, Int[Tensor, " read"], Float[Tensor, " read *d_vocab"]]]:
        """Yield the logits of one pass as `values_by_row`, or log probabilities if `whole`."""
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
        self,
        own: Tensor,
        others: Tensor,
        rerun: Bool[Tensor, "copy pos"],
        is_read: Bool[Tensor, "copy pos"],
        rows: list[list[int]] | None,
        prefix: PrefixKeys | None,
    ) -> Float[Tensor, "read d_vocab"]:
        """Return the logits at the read positions of copies, after a check of the prompt's own tokens.

        A control is added after the copies: the last position, which sees the prompt itself.
        """
        first = self.bound.block
        control = torch.arange(len(own), device=rerun.device) == len(own) - 1
        layout = Layout.of(torch.cat([rerun, control[None]]), rows)
        tokens = layout.fill(own, torch.cat([others, own[None]]))
        compared = layout.index[-1, -1:]
        clean = [call.resid_post[self.prompt, self.places] for call in first.clean.calls.values()]
        expected = [resid[-1:] for resid in clean]
        if rows is None:
            compared = torch.cat([torch.arange(len(own), device="cpu"), compared])
            expected = [torch.cat([resid, resid[-1:]]) for resid in clean]
        read = layout.index[:-1][is_read.cpu()]
        return run_rows(first, tokens, layout.positions, layout.allowed, read, compared, expected, prefix)


def run_rows(
    first: Block,
    tokens: Int[Tensor, "row index"],
    positions: Int[Tensor, "row index"],
    allowed: Bool[Tensor, "row index key"],
    read: Int[Tensor, " read"],
    compared: Int[Tensor, " compared"],
    expected: Sequence[Float[Tensor, "compared d_model"]],
    prefix: PrefixKeys | None = None,
) -> Float[Tensor, "read d_vocab"]:
    """Return logits of a pass over tokens at any positions, after a check of tokens that the clean pass has.

    Args:
        first: The model's first block.
        tokens: The tokens of each row.
        positions: Their positions, which may repeat.
        allowed: Which keys each of them may see; with `prefix`, its keys come first.
        read: The indices, counted over all rows, whose logits are returned.
        compared: The indices of the tokens that are checked.
        expected: Their residual stream after each block.
        prefix: As in `lens_mix.lens.continuation.run_from`.

    Raises:
        UnsupportedModelError: The model gives the compared tokens other residual streams, or cannot run so.
    """
    device = tokens.device
    masks, pairs = first.clean.lens.takes_padding_mask, []
    batch = batch_of_rows(tokens, positions, allowed if masks else None, first.clean.lens.dtype)
    if not masks:
        layers, template = range(len(first.stack)), first.stack.attention_template
        pairs = [mask_attention(layer, allowed, attention=template) for layer in layers]
    found: dict[int, Tensor] = {}
    keeping = [
        forward_hook(block, functools.partial(_keep, found, layer, compared.to(device)))
        for layer, block in enumerate(first.stack.blocks)
    ]
    row, place = read // tokens.shape[1], read % tokens.shape[1]
    earlier = torch.nn.functional.one_hot(row, len(tokens)).cumsum(0)
    slot = earlier.gather(1, row[:, None])[:, 0] - 1
    of_rows = torch.zeros(len(tokens), int(earlier.max()), dtype=torch.long, device="cpu")
    of_rows[row, slot] = place
    try:
        with must_fire(*pairs) as hooks:
            logits = first.logits(
                hooks, batch=batch, positions=of_rows.to(device), changes=keeping, prefix=prefix
            )
    except Exception as problem:
        # A model that does not expect `prefix` may fail in any way.
        if prefix is None and not isinstance(problem, RuntimeError):
            raise
        raise UnsupportedModelError(str(problem)) from problem
    for layer, clean in enumerate(expected):
        _check_control(found[layer], clean)
    return logits[row.to(device), slot.to(device)]


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
        if not first.batch.prompts[int(bound.prompt_index[rows[0]])].input_names
    ]


def _keep(
    found: dict[int, Tensor], layer: int, index: Tensor, module: nn.Module, args: Any, output: Any
) -> None:
    """Keep some indices of a block's output, counted over all rows. This is a forward hook."""
    found[layer] = first_tensor(output).flatten(0, 1)[index]


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
