"""A target bound to every asked row: maps of the whole model explain what stands over each position."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.lens.effort import Passes
from lens_mix.method import Scope
from lens_mix.methods import target_passes
from lens_mix.methods.target_passes import TargetMethod
from lens_mix.targets import Context, Target, TargetFunction, TargetLike, as_target, predicted

if TYPE_CHECKING:
    from lens_mix.hooks import HookPair
    from lens_mix.lens.autograd_graph import AutogradGraph
    from lens_mix.lens.batches import Batch
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class RowTargetMethod(TargetMethod):
    """Base of the methods whose one map, of the whole model, explains a target over each position."""

    residual: ClassVar[float] = 0.0
    scope: ClassVar[Scope] = "model"

    target: TargetLike = dataclasses.field(default_factory=lambda: predicted(of="log_probability"))


@dataclasses.dataclass(frozen=True)
class RowTargets:
    """One number per asked row of every prompt, as functions of the model's output.

    Attributes:
        first: the model's first block, from which passes go on.
        target: the target.
        functions: per row, output of its prompt [copy ...] -> [copy].
        prompts: per row, which prompt of the batch it is of; the rows of one prompt stand together.
        columns: per row, its place among the asked rows of its prompt.
        queries: per row, its position in the padded batch.
        clean: per row, the value in the clean pass.
        positions: per row, the only position of the batch's logits that it reads; None: they read several.
    """

    first: Block
    target: Target
    functions: tuple[TargetFunction, ...]
    prompts: Int[Tensor, " row"]
    columns: Int[Tensor, " row"]
    queries: Int[Tensor, " row"]
    clean: Float[Tensor, " row"]
    positions: Int[Tensor, " row"] | None

    def chunks(self, largest: int | None = None) -> Iterator[Int[Tensor, " chunk"]]:
        """The rows' numbers, as many at a time as memory allows with gradients, `largest` at most."""
        numbers = torch.arange(len(self.functions), device=self.prompts.device)
        step = self.first.gradient_rows(len(numbers), logits=self.target.reads == "logits")
        chunks = numbers.split(step if largest is None else min(step, largest))
        yield from self.first.with_bar(chunks, len(chunks), "chunks")

    def values(
        self,
        rows: Int[Tensor, " chunk"],
        *,
        resid_pre: Float[Tensor, "chunk pos d_model"] | None = None,
        resid_post: Float[Tensor, "chunk pos d_model"] | None = None,
        gradients: bool = False,
    ) -> Float[Tensor, " chunk"]:
        """The target of some rows, by number, when the model runs from the first block on.

        Args:
            rows: numbers of rows, repeats allowed; those of one prompt stand together.
            resid_pre: what enters the first block; the clean pass's by default.
            resid_post: what leaves the last block: none is run.
            gradients: build the graph.
        """
        prompts = self.prompts[rows]
        positions = None if self.positions is None else self.positions[rows]
        options: dict[str, Any] = {"positions": positions, "rows": prompts, "gradients": gradients}
        options |= {"resid_pre": resid_pre, "resid_post": resid_post}
        with torch.set_grad_enabled(gradients):
            output = target_passes.output_of(self.first, self.target, **options)
            parts = target_passes.parts(self.first, self.target, output, prompts.tolist())
            outputs = (of_row for _, _, of_prompt in parts for of_row in of_prompt.split(1))
            values = [
                target_passes.evaluate(self.functions[row], of_row)
                for row, of_row in zip(rows.tolist(), outputs, strict=True)
            ]
            return torch.cat(values)

    def value_in(self, graph: AutogradGraph, row: int) -> Float[Tensor, " 1"]:
        """The target of one row, in the graph of its prompt."""
        index = torch.tensor([row], device=self.prompts.device, dtype=torch.long)
        with graph.built():
            return self.values(index, resid_post=graph.resid_post, gradients=True)

    def gradients(
        self, rows: Int[Tensor, " chunk"], resid_pre: Float[Tensor, "chunk pos d_model"]
    ) -> Float[Tensor, "chunk pos d_model"]:
        """The gradient of some rows' target by what enters the first block."""
        leaf = resid_pre.detach().requires_grad_(True)
        return target_passes.gradients_of(self.values(rows, resid_pre=leaf, gradients=True), [leaf])[0]

    @property
    def reads_one_position(self) -> bool:
        """Whether each prompt has one row, and its target reads the logits there and nowhere else."""
        alone = len(self.prompts.unique()) == len(self.prompts)
        return self.positions is not None and alone and bool((self.positions == self.queries).all())

    def of_copies(
        self,
        prompts: Int[Tensor, " copy"],
        fwd_hooks: Sequence[HookPair] = (),
        *,
        batch: Batch | None = None,
        distributions: bool = False,
    ) -> Iterator[tuple[int, slice, Float[Tensor, " copy *d_vocab"]]]:
        """Per row: which copies are of its prompt, and the target of each.

        Args:
            prompts: which prompt each copy is of; those of one prompt stand together.
            fwd_hooks: TransformerLens hooks, which see `[copy, ...]` tensors.
            batch: the copies, where they are not their prompts again.
            distributions: the log probabilities of all tokens at the row, instead of the target.
        """
        positions = None
        if self.reads_one_position:
            of_prompt = self.queries.new_zeros(len(self.first.batch))
            of_prompt[self.prompts] = self.queries
            positions = of_prompt[prompts]
        output = target_passes.output_of(
            self.first, self.target, fwd_hooks, positions=positions, rows=prompts, batch=batch
        )
        start = 0
        for prompt, span, part in target_passes.parts(self.first, self.target, output, prompts.tolist()):
            copies = slice(start, start + len(part))
            for row in (self.prompts == prompt).nonzero()[:, 0].tolist():
                if distributions:
                    yield row, copies, _log_probabilities(part, int(self.queries[row]) - span.start)
                else:
                    tokens = target_passes.tokens_read(self.target, batch, copies, span)
                    yield row, copies, target_passes.evaluate(self.functions[row], part, *tokens)
            start = copies.stop

    @torch.no_grad()
    def distributions(self) -> Float[Tensor, "row d_vocab"]:
        """Per row, the log probabilities of all tokens in the clean pass."""
        rows = self.of_copies(self.prompts.unique(), distributions=True)
        return torch.cat([log_probabilities for _, _, log_probabilities in rows])

    def scattered(self, by_row: Float[Tensor, "row key"], last: Block) -> Float[Tensor, "batch query key"]:
        """Numbers per row as a map with the rows that `last` holds; those of padding are 0."""
        scores = by_row.new_zeros(*last.queries.shape, by_row.shape[-1])
        scores[self.prompts, self.columns] = by_row
        return scores


@torch.no_grad()
def bind_rows(blocks: Sequence[Block], target: TargetLike) -> RowTargets:
    """Bind a target to the rows that the last of a model's blocks holds.

    A target is read at the row's position instead of its own. One that names no position (a class, a loss of
    the whole prompt, a callable) explains one number of the prompt: a single row has to be asked.

    Raises:
        TypeError, ValueError: the target does not fit a prompt or the rows. RuntimeError: inference mode.
    """
    first, last, read = blocks[0], blocks[-1], as_target(target)
    functions, clean, prompts, columns, positions = [], [], [], [], []
    for prompt, start, context in target_passes.contexts(last, read):
        prompt_columns = last.real_queries[prompt].nonzero()[:, 0].tolist()
        places = [int(last.queries[prompt, column]) - start for column in prompt_columns]
        for column, place in zip(prompt_columns, places, strict=True):
            placed = _at(read, place, context, len(set(places)))
            if placed is read and place < len(context.tokens) - 1:
                _require_whole_prompt(read, context, last, (prompt, column))
            functions.append(placed.of_prompt(context))
            clean.append(target_passes.evaluate(functions[-1], context.output))
            where = placed.reads_position(context)
            positions += [] if where is None else [where + start]
        prompts += [prompt] * len(prompt_columns)
        columns += prompt_columns
    device = context.output.device
    all_positions, of_prompt, of_column = (
        torch.tensor(each, dtype=torch.long, device=device) for each in (positions, prompts, columns)
    )
    narrow = all_positions if len(positions) == len(functions) else None
    queries = last.queries[of_prompt, of_column]
    return RowTargets(first, read, tuple(functions), of_prompt, of_column, queries, torch.cat(clean), narrow)


def row_passes(
    blocks: Sequence[Block], each: float, reason: str, cheaper: str = "lm.input_map takes about five"
) -> Passes:
    """Return about how many forward passes the asked rows take.

    Args:
        blocks: of the whole model.
        each: forward passes of one row.
        reason: what they are for.
        cheaper: what to ask for instead of one row; instead of several rows, the last one is cheaper.
    """
    rows = blocks[-1].real_queries.sum(dim=1)
    if int(rows.max()) > 1:
        cheaper = "queries=[-1] makes the last row alone"
    return Passes([each * count for count in rows.tolist()], reason, cheaper)


def _log_probabilities(
    output: Float[Tensor, "copy *pos d_vocab"], place: int
) -> Float[Tensor, "copy d_vocab"]:
    logits = output if output.ndim == 2 else output[:, place]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _at(target: Target, place: int, context: Context, rows: int) -> Target:
    """The target, read at the position of a row."""
    placed, reads = target.at_row(place, context), target.reads_position(context)
    if placed is not None:
        return placed
    if rows > 1 or reads not in (None, place):
        where = "one row (queries=[-1])" if reads is None else f"the row of the position it reads ({reads})"
        raise ValueError(
            f"target: {type(target).__name__.lstrip('_')} explains one number of the prompt, whatever the "
            f"row; expected {where}, got {rows} rows{'' if rows > 1 else f', of position {place}'}"
        )
    return target


def _require_whole_prompt(target: Target, context: Context, last: Block, row: tuple[int, int]) -> None:
    """Raise a ValueError if a classifier is explained in a row that does not see the prompt's end.

    `row`: the prompt, and the row's place among those asked. A classifier of a causal model looks for the
    token that it reads in the whole prompt.
    """
    if target.reads_position(context) is not None or target.default_row(context) is None:
        return
    query = int(last.queries[row])
    if not bool(last.attended[row][query + 1 :].any()):
        raise ValueError(
            f"target: {type(target).__name__.lstrip('_')} explains one number of the whole prompt; expected "
            f"the last row (queries=[-1]), got a row (position {query}) that does not see what comes after it"
        )
