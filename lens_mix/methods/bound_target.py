"""A target bound to a clean pass: its value for each example or each row, in this pass and in others."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from lens_mix._blocks.cost import find_usual_row
from lens_mix._classes.model_classes import UnsupportedModelError, find_missing_logits
from lens_mix._model.unembedding import row_at
from lens_mix.method import Method, MethodGroup, Reads
from lens_mix.targets import (
    Context,
    Target,
    TargetFunction,
    TargetLike,
    TokenLike,
    as_target,
    describe,
    next_token,
    predicted,
)

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block
    from lens_mix._inputs.batches import Batch
    from lens_mix._passes.autograd_graph import AutogradGraph
    from lens_mix.hooks import HookPair


@dataclasses.dataclass(frozen=True)
class TargetMethod(Method):
    """The base class of the methods that explain a target.

    Attributes:
        target: The number that is explained (`lens_mix.targets`).
        against: A token with which that of the target is contrasted, by its text, its number or
            `lm.targets.token(...)`: `target="Paris", against="Rome"`. The contrast then is the `target`, and
            this is None again. None: the target alone.
    """

    group: ClassVar[MethodGroup] = "What the answer depends on, layer by layer"
    engines: ClassVar[tuple[str, ...]] = ("hooks",)
    reads: ClassVar[Reads] = "above"

    target: TargetLike = dataclasses.field(default_factory=predicted)
    against: TokenLike | None = dataclasses.field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        target = as_target(self.target, self.against)
        # A method shows its target in full, and other code reads the target's fields.
        is_function = not isinstance(self.target, (str, Target)) and self.against is None
        object.__setattr__(self, "target", self.target if is_function else target)
        # The contrast is a target itself, so a method that is made from this one must not form it again.
        object.__setattr__(self, "against", None)

    @override
    def explain_next_tokens(self) -> Self:
        return dataclasses.replace(self, target=next_token())

    @override
    def parameters(self) -> dict[str, object]:
        parameters = {**super().parameters(), "target": describe(as_target(self.target))}
        # The target contains it.
        del parameters["against"]
        return parameters


@dataclasses.dataclass(frozen=True)
class RowTargetMethod(TargetMethod):
    """The base class of the methods with one map, of the whole model, that explains a target at each row."""

    group: ClassVar[MethodGroup] = "Which input tokens the answer depends on"
    residual: ClassVar[float] = 0.0
    reads: ClassVar[Reads] = "model"

    target: TargetLike = dataclasses.field(default_factory=lambda: predicted(of="log_probability"))


@dataclasses.dataclass(frozen=True)
class BoundTarget:
    """A target bound to a clean pass: one number for each example, or for each row (`BoundRows`).

    Attributes:
        block: The block from which passes run, unless another is named.
        target: The target.
        spans: For each example, its own positions, without padding, in the output that the target reads.
        functions: For each number, the function from the output of its example, [copy ...], to [copy].
        prompt_index: For each number, the index of its prompt; numbers of one prompt are contiguous.
        clean: For each number, its value in the clean pass.
        positions: For each number, the only position of the batch's logits that it reads; None if any number
            reads several.
        rows_read: For each example, the positions of the batch's logits that are enough for the target
            (`Target.rows_read`); None if it needs all of them.
    """

    block: Block
    target: Target
    spans: tuple[slice, ...]
    functions: tuple[TargetFunction, ...]
    prompt_index: Int[Tensor, " number"]
    clean: Float[Tensor, " number"]
    positions: Int[Tensor, " number"] | None
    rows_read: Int[Tensor, "example read"] | None

    @property
    def reads_logits(self) -> bool:
        """Whether the target reads the model's logits; otherwise it reads the last residual stream."""
        return self.target.reads == "logits"

    @property
    def is_probability(self) -> bool:
        """Whether the target is known to be between 0 and 1."""
        return getattr(self.target, "of", None) == "probability"

    def chunks(
        self, largest: int | None = None, *, own_graphs: bool = True
    ) -> Iterator[Int[Tensor, " chunk"]]:
        """Yield the indices of the numbers, as many at a time as fit in memory with gradients.

        Args:
            largest: The most at a time; None if only memory bounds them.
            own_graphs: Whether each one's copy has an autograd graph of its own.
        """
        index = torch.arange(len(self.functions), device=self.prompt_index.device)
        largest_in_memory = self.block.copies_with_gradients(
            len(index), logits=self.reads_logits, own_graphs=own_graphs
        )
        size = largest_in_memory if largest is None else min(largest_in_memory, largest)
        chunks = index.split(size)
        yield from self.block.with_bar(chunks, len(chunks), "chunks")

    def values(
        self,
        index: Int[Tensor, " copy"],
        fwd_hooks: Sequence[HookPair] = (),
        *,
        block: Block | None = None,
        batch: Batch | None = None,
        gradients: bool = False,
        **options: Any,
    ) -> Float[Tensor, " copy"]:
        """Compute numbers in a pass with interventions, with one copy of its example for each.

        Args:
            index: The index of the number that each copy is for; repeats are allowed.
            fwd_hooks: TransformerLens hooks, which get `[copy, ...]` tensors.
            block: The block from which the pass runs; None for `self.block`.
            batch: The copies, if their tokens or masks are not those of the clean pass.
            gradients: Whether to build the autograd graph.
            **options: `resid_pre` or `resid_post`, as in `Continuation`.
        """
        index = index.to(self.prompt_index.device)
        copies = self.prompt_index[index]
        if self.positions is not None:
            options["positions"] = self.positions[index]
        elif self.rows_read is not None:
            options["positions"] = self.rows_read[copies]
        options |= {"prompt_index": copies, "batch": batch, "gradients": gradients}
        values = []
        with torch.set_grad_enabled(gradients):
            output = read_output(block or self.block, self.target, fwd_hooks, **options)
            # The function of a number is called once for all of its copies.
            for number, chosen in _runs(index):
                span = self.spans[int(self.prompt_index[number])]
                tokens = self._tokens_read(batch, chosen, span)
                own = _at(output[chosen], span) if options.get("positions") is None else output[chosen]
                values.append(evaluate(self.functions[number], own, *tokens))
            return torch.cat(values)

    def values_in(self, graph: AutogradGraph, index: Int[Tensor, " value"]) -> Float[Tensor, " value"]:
        """Compute numbers of one prompt as nodes of its autograd graph, with one unembedding for all.

        Args:
            graph: The graph of the prompt, or of its first positions if the numbers read one of them each.
            index: The index of each number.
        """
        index = index.to(self.prompt_index.device)
        prompt = self.prompt_index[index[:1]]
        clean, positions = self.block.clean, self.rows_read[prompt] if self.rows_read is not None else None
        if self.positions is not None:
            positions = self.positions[index][None]
            is_known = self.reads_logits and clean.logits_at(positions) is not None
            if is_known and graph is clean.graph and graph.logits is not None:
                with torch.enable_grad():
                    return evaluate(self.functions[int(index)], graph.logits)
        resid_post = graph.resid_post
        with torch.enable_grad(), graph.built():
            # Positions after a prefix are as in the clean pass, because models expect one for each token.
            rest = clean.calls[clean.lens.n_layers - 1].resid_post[prompt, resid_post.shape[1] :]
            output = read_output(
                self.block,
                self.target,
                positions=positions,
                prompt_index=prompt,
                resid_post=torch.cat([resid_post, rest.detach()], 1),
                gradients=True,
            )
            whole = output if positions is not None else _at(output, self.spans[int(prompt)])
            own = output.split(1, dim=1) if self.positions is not None else [whole] * len(index)
            pairs = zip(index.tolist(), own, strict=True)
            return torch.cat([evaluate(self.functions[number], each) for number, each in pairs])

    def _tokens_read(self, batch: Batch | None, copies: slice, span: slice) -> tuple[Tensor, ...]:
        """Return the tokens of altered copies for `evaluate`; nothing if the target does not read them."""
        # If tokens were cut out, the target reads the position that it reads in the clean pass.
        if batch is None or batch.places is not None or not self.target.reads_tokens:
            return ()
        return (batch.tokens[copies, span],)


@dataclasses.dataclass(frozen=True)
class BoundRows(BoundTarget):
    """A target bound to the requested rows of a clean pass: one number for each row of every prompt.

    Attributes:
        queries: For each row, its position in the padded batch.
        query_index: For each row, its index on the map's query axis.
    """

    queries: Int[Tensor, " row"]
    query_index: Int[Tensor, " row"]

    @property
    def reads_own_logits(self) -> bool:
        """Whether the number of each row is a function of the logits at the row alone."""
        return self.reads_logits and self.positions is not None and torch.equal(self.positions, self.queries)

    @property
    def reads_one_position(self) -> bool:
        """Whether each prompt has a single row, and its target reads the logits at this row alone."""
        if self.positions is None or len(self.prompt_index.unique()) < len(self.prompt_index):
            return False
        return torch.equal(self.positions, self.queries)

    def gradients(
        self, index: Int[Tensor, " copy"], resid_pre: Float[Tensor, "copy pos d_model"]
    ) -> Float[Tensor, "copy pos d_model"]:
        """Compute the gradient of numbers with respect to the input of the first block."""
        leaf = resid_pre.detach().requires_grad_(True)
        return gradients_of(self.values(index, resid_pre=leaf, gradients=True), [leaf])[0]

    def values_by_row(
        self,
        prompt_index: Int[Tensor, " copy"],
        fwd_hooks: Sequence[HookPair] = (),
        *,
        batch: Batch | None = None,
        distributions: bool = False,
    ) -> Iterator[tuple[int, slice, Float[Tensor, " copy *d_vocab"]]]:
        """Yield, for each row, the row's index, the copies of its prompt, and its number in each of them.

        All rows of a prompt are read from the same copies.

        Args:
            prompt_index: The index of each copy's prompt; copies of one prompt are contiguous.
            fwd_hooks: As in `values`.
            batch: As in `values`.
            distributions: Whether to yield the log probabilities of all tokens at the row, not its number.
        """
        positions = None
        if self.reads_one_position:
            query_of_prompt = self.queries.new_zeros(len(self.block.batch))
            query_of_prompt[self.prompt_index] = self.queries
            positions = query_of_prompt[prompt_index]
        output = read_output(
            self.block, self.target, fwd_hooks, positions=positions, prompt_index=prompt_index, batch=batch
        )
        for prompt, copies in _runs(prompt_index):
            span = self.spans[prompt]
            own = _at(output[copies], span) if positions is None else output[copies]
            tokens = self._tokens_read(batch, copies, span)
            for row in (self.prompt_index == prompt).nonzero()[:, 0].tolist():
                if distributions:
                    place = int(self.queries[row]) - span.start if positions is None else 0
                    yield row, copies, log_probabilities(own, place)
                else:
                    yield row, copies, evaluate(self.functions[row], own, *tokens)

    @torch.no_grad()
    def distributions(self) -> Float[Tensor, "row d_vocab"]:
        """Compute the log probabilities of all tokens at each row of the clean pass."""
        by_row = self.values_by_row(self.prompt_index.unique(), distributions=True)
        return torch.cat([log_probabilities for _, _, log_probabilities in by_row])

    def scatter(self, by_row: Float[Tensor, "row key"], last: Block) -> Float[Tensor, "batch query key"]:
        """Return scores of rows as a map with the rows of the block `last`; rows of padding are 0."""
        scores = by_row.new_zeros(*last.queries.shape, by_row.shape[-1])
        scores[self.prompt_index, self.query_index] = by_row
        return scores


def bind(blocks: Sequence[Block], target: TargetLike) -> BoundTarget:
    """Bind a target to every example of a clean pass.

    Args:
        blocks: The blocks; passes run from the first, and clean values are computed from the last.
        target: The target.

    Raises:
        TypeError, ValueError: The target does not fit a prompt.
        RuntimeError: torch's inference mode is on.
    """
    read = as_target(target)
    logits = _find_last_logits(blocks[-1], read)
    bound, _ = _bound(blocks, read, lambda read, context, prompt, start: {0: read}, logits)
    record = blocks[-1].record
    for by_row, position in zip(record.explained, record.default_rows, strict=True):
        # The target is one number for all rows, so it is not that of the first row alone.
        whole = by_row.pop(0)
        # A token that a decoder predicts is not a prediction at the rows of the encoder.
        is_elsewhere = position is None and bound.positions is not None
        by_row[None] = whole.without_prediction() if is_elsewhere else whole
    return bound


def _find_last_logits(block: Block, target: Target) -> Float[Tensor, "example 1 d_vocab"] | None:
    """Return the logits at the last positions if the clean pass has them and the target reads no others.

    Of a long prompt, the logits of all positions take more memory than anything else.
    """
    if not target.reads_end_alone:
        return None
    last = [real.nonzero()[-1] for real in block.batch.logits_real]
    return block.clean.logits_at(torch.stack(last))


def bind_rows(blocks: Sequence[Block], target: TargetLike) -> BoundRows:
    """Bind a target to the rows of the last block, at whose positions it is read if it states none.

    If it states a position, only the row of this position may be requested. A target of the whole prompt (a
    class, a loss, a callable) is one number, so only a single row may be requested.

    Args:
        blocks: As in `bind`.
        target: The target.

    Raises:
        TypeError, ValueError: The target does not fit a prompt or the rows.
        RuntimeError: torch's inference mode is on.
    """
    last = blocks[-1]
    read = as_target(target)
    # The clean pass may have read these logits for its predictions. Then no other pass is needed.
    logits = last.clean.logits_at(last.queries) if read.reads_row_alone else None
    bound, query_index = _bound(blocks, read, functools.partial(_targets_at_rows, last), logits)
    return BoundRows(
        **vars(bound), queries=last.queries[bound.prompt_index, query_index], query_index=query_index
    )


@torch.no_grad()
def _bound(
    blocks: Sequence[Block],
    target: TargetLike,
    targets_of: Callable[[Target, Context, int, int], dict[int, Target]],
    logits: Float[Tensor, "example 1 d_vocab"] | None = None,
) -> tuple[BoundTarget, Int[Tensor, " number"]]:
    """Return the bound target, and the index of each number among those of its prompt.

    Args:
        blocks: As in `bind`.
        target: As in `bind`.
        targets_of: Returns the targets of one prompt by their index, from the target, the prompt's context,
            its index and its first position in the batch.
        logits: The only logits that the targets read; None for the output of another pass.
    """
    read = as_target(target)
    spans: list[slice] = []
    functions: list[TargetFunction] = []
    clean: list[Tensor] = []
    positions: list[int] = []
    index: list[tuple[int, int]] = []
    rows_read = _find_rows_read(blocks[-1], read)
    for prompt, (span, context) in enumerate(_contexts(blocks[-1], read, rows_read, logits)):
        spans.append(span)
        likelier: list[tuple[float, str]] = []
        placed_by_row = targets_of(read, context, prompt, span.start)
        places = [placed.reads_position(context) for placed in placed_by_row.values()]
        # One token is explained for all rows: that of the last one, whichever other rows were asked for.
        settled, notes = read.settle(context, sorted(each for each in places if each is not None)[-1:])
        blocks[-1].record.warnings[prompt] += notes
        if settled is not read:
            placed_by_row = targets_of(settled, context, prompt, span.start)
        for within, placed in placed_by_row.items():
            functions.append(placed.of_prompt(context))
            clean.append(evaluate(functions[-1], context.output))
            blocks[-1].record.explained[prompt][within] = placed.explain(
                context, float(clean[-1]), names_position=placed is settled
            )
            position = placed.reads_position(context)
            positions += [] if position is None else [position + span.start]
            index.append((prompt, within))
            likelier += placed.find_likelier_texts(context)
        if likelier:
            # Many rows may have such a text. That of the largest probability is enough.
            blocks[-1].record.warnings[prompt].append(f"target: {max(likelier)[1]}")
    device = clean[0].device
    prompt_index, within_prompt = torch.tensor(index, dtype=torch.long, device=device).unbind(1)
    every = torch.tensor(positions, dtype=torch.long, device=device)
    only_positions = every if len(every) == len(functions) else None
    bound = BoundTarget(
        blocks[0],
        read,
        tuple(spans),
        tuple(functions),
        prompt_index,
        torch.cat(clean),
        only_positions,
        rows_read,
    )
    return bound, within_prompt


def _find_rows_read(block: Block, target: Target) -> Int[Tensor, "example read"] | None:
    """Return the positions of the batch's logits that are enough for the target, as many in each example."""
    if target.reads != "logits" or block.batch.logits_tokens.ndim != 2:
        return None
    found = []
    for tokens, real in zip(block.batch.logits_tokens, block.batch.logits_real, strict=True):
        rows = target.rows_read(tokens[real])
        if rows is None:
            return None
        found.append(real.nonzero()[rows.start : rows.stop, 0])
    # One tensor needs as many positions in each example. Otherwise all logits are computed.
    return torch.stack(found) if len(set(map(len, found))) == 1 else None


def _contexts(
    block: Block,
    target: Target,
    rows_read: Int[Tensor, "example read"] | None,
    logits: Float[Tensor, "example 1 d_vocab"] | None,
) -> Iterator[tuple[slice, Context]]:
    """Yield each example's own positions in the clean output, and the context that a target may use.

    The row that the target explains by default is recorded for the prompt's map.

    Args:
        block: The last block.
        target: The target.
        rows_read: The only positions of the output to compute; None for all.
        logits: As in `_bound`.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "attribution needs gradients: expected to be outside torch.inference_mode, got it switched on "
            "(torch.no_grad is fine)"
        )
    reads_logits, batch = target.reads == "logits", block.batch
    tokens, given = (block.batch.logits_tokens, {}) if reads_logits else (block.tokens, batch.inputs)
    # Further inputs belong to the source of an encoder-decoder, whichever part is mapped.
    has_source = not reads_logits and batch.target is not None and block.stack.reads_target
    # The last block need not run again if the clean pass has its output.
    end = block.clean.calls.get(block.clean.lens.n_layers - 1)
    known = None if end is None else end.resid_post
    output = read_output(block, target, positions=rows_read, resid_post=known) if logits is None else logits
    is_whole = rows_read is None and logits is None
    for prompt, real in enumerate(block.batch.logits_real if reads_logits else block.real):
        places = real.nonzero()[:, 0]
        span = slice(int(places[0]), int(places[-1]) + 1)
        own = batch.real[prompt] if has_source else span
        context = Context(
            tokens[prompt, span],
            _at(output[prompt : prompt + 1], span) if is_whole else output[prompt : prompt + 1],
            block.clean.lens.tokenizer,
            {name: value[prompt, own] for name, value in given.items()},
            source=batch.tokens[prompt, own] if has_source else None,
            as_target=reads_logits and batch.target is not None,
        )
        # Rows of an encoder's map are other positions than those of the logits.
        has_row = block.batch.target is None or block.stack.reads_target
        block.record.default_rows[prompt] = target.default_row(context) if has_row else None
        yield span, context


def _targets_at_rows(
    last: Block, target: Target, context: Context, prompt: int, start: int
) -> dict[int, Target]:
    """Return the target at each requested row of a prompt, by the row's index on the query axis."""
    query_index = last.real_queries[prompt].nonzero()[:, 0].tolist()
    places = [int(last.queries[prompt, index]) - start for index in query_index]
    at_rows = {}
    for index, place in zip(query_index, places, strict=True):
        placed = target.at_row(place, context)
        if placed is None:
            _require_own_row(target, places, context, last)
            last.record.rows_read[prompt] = _find_rows_of(target, context)
            if place < len(context.tokens) - 1:
                _require_whole_prompt(target, context, last, (prompt, index))
        at_rows[index] = target if placed is None else placed
    return at_rows


def _find_rows_of(target: Target, context: Context) -> range | None:
    """Return the positions that a target reads, all if it does not say; None if it is one, or of classes."""
    if target.reads_position(context) is not None or context.output.ndim != 3:
        return None
    rows = target.rows_read(context.tokens)
    return range(len(context.tokens)) if rows is None else rows


def _require_own_row(target: Target, places: Sequence[int], context: Context, last: Block) -> None:
    """Raise a ValueError if rows ask for another position than the target's, or for one number repeatedly."""
    name, own, asked = type(target).__name__.lstrip("_"), target.own_position(context), sorted(set(places))
    others = [place for place in asked if place != own]
    if own is not None and others:
        shown = ", ".join(map(str, others[:5])) + (", ..." if len(others) > 5 else "")
        plural = "" if len(others) == 1 else "s"
        unstated: dict[str, Any] = {"position": None} if hasattr(target, "position") else {}
        follows = dataclasses.replace(target, **unstated).at_row(asked[0], context) is not None
        advice = "; or leave out the target's position to explain that of each row"
        raise ValueError(
            f"target: {name} explains position {own}; expected the row of this position (queries=[{own}]), "
            f"got the row{plural} of position{plural} {shown}{advice if follows else ''}"
        )
    if len(asked) > 1:
        raise ValueError(
            f"target: {name} explains one number of the prompt, whatever the row; expected one row "
            f"(queries=[{_find_usual_row(target, context, last)}]), got {len(asked)} rows"
        )


def _find_usual_row(target: Target, context: Context, last: Block) -> int:
    """Return the row to recommend for one number of a prompt: that which `lm.input_map` computes."""
    if find_usual_row(last) == -1:
        return -1
    mask = getattr(context.tokenizer, "mask_token_id", None)
    masked = [] if mask is None else (context.tokens == mask).nonzero()[:, 0].tolist()
    return masked[0] if len(masked) == 1 else 0


def _require_whole_prompt(target: Target, context: Context, last: Block, row: tuple[int, int]) -> None:
    """Raise a ValueError if a classifier is explained in a row that does not attend to the prompt's end.

    A classifier of a causal model searches the whole prompt for the token that it reads.

    Args:
        target: The target.
        context: The prompt's context.
        last: The last block.
        row: The prompt's index, and the row's index on the query axis.
    """
    if target.own_position(context) is not None or target.default_row(context) is None:
        return
    query = int(last.queries[row])
    if not bool(last.attended[row][query + 1 :].any()):
        raise ValueError(
            f"target: {type(target).__name__.lstrip('_')} explains one number of the whole prompt; expected "
            f"the last row (queries=[-1]), got a row (position {query}) that does not attend to later ones"
        )


def read_output(
    block: Block,
    target: Target,
    fwd_hooks: Sequence[HookPair] = (),
    *,
    positions: Int[Tensor, " copy"] | Int[Tensor, "copy read"] | None = None,
    **options: Any,
) -> Tensor:
    """Return the output that a target reads, from a pass that runs from a block on.

    Args:
        block: The block from which the pass runs.
        target: The target.
        fwd_hooks: TransformerLens hooks.
        positions: For each copy, the only position whose logits are returned, or several; None for all.
        **options: As in `Continuation`. If tokens were cut out of a `batch`, the output is as before at the
            positions of the whole prompt.
    """
    places = getattr(options.get("batch"), "places", None)
    continuation = block.continuation(fwd_hooks, **options)
    if target.reads == "logits":
        missing = find_missing_logits(block.clean.lens.model)
        if missing is not None:
            raise UnsupportedModelError(missing)
        if positions is None:
            return _at_places(continuation.logits(), places)
        return continuation.logits(positions if places is None else row_at(places, positions))
    resid = _at_places(continuation.last_residual(), places)
    reads_normed = getattr(target, "after_final_norm", False)
    return block.after_final_norm(resid, options.get("gradients", False)) if reads_normed else resid


def _at_places(output: Float[Tensor, " copy *axes"], places: Int[Tensor, "copy pos"] | None) -> Tensor:
    """Return an output at the places of positions; a classifier's output has no positions."""
    return output if places is None or output.ndim != 3 else row_at(output, places)


def evaluate(
    function: Callable[..., Tensor], output: Float[Tensor, " copy *axes"], *tokens: Int[Tensor, "copy pos"]
) -> Float[Tensor, " copy"]:
    """Return the target's value for each copy.

    Args:
        function: The target's function of the output.
        output: The output of the copies.
        *tokens: The tokens of the copies, if the target reads them.

    Raises:
        TypeError, ValueError: The function does not return a tensor [copy] of finite numbers.
    """
    values = function(output, *tokens)
    if not torch.is_tensor(values) or not values.is_floating_point():
        got = f"a tensor of {values.dtype}" if torch.is_tensor(values) else type(values).__name__
        raise TypeError(f"target: expected a tensor [copy] of real numbers, got {got}")
    if tuple(values.shape) != (len(output),):
        expected = f"expected one number per copy, shape ({len(output)},)"
        raise ValueError(f"target: {expected}, got {tuple(values.shape)}")
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"target: expected finite values, got NaN or infinity{_why_not_finite(output)}")
    return values


def _why_not_finite(output: Tensor) -> str:
    return ": the output of the model, which it reads, has NaN" if bool(output.isnan().any()) else ""


def gradients_of(values: Float[Tensor, " copy"], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Compute the gradient of each copy's target with respect to each leaf.

    Raises:
        ValueError: The target has no gradient with respect to a leaf.
    """
    gradients: Sequence[Tensor | None] = [None]
    # No copy has an effect on another one, so one backward pass from the sum has the gradient of each.
    if values.requires_grad:
        gradients = torch.autograd.grad(values, list(leaves), torch.ones_like(values), allow_unused=True)
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < len(leaves):
        raise ValueError(
            "target: expected a differentiable function of the output, got values without a gradient "
            "(a detach, an argmax or a no_grad inside?)"
        )
    return present


def _runs(index: Int[Tensor, " copy"]) -> Iterator[tuple[int, slice]]:
    """Yield each number that an index repeats in a row, and the slice of these repeats."""
    start = 0
    for number, repeats in itertools.groupby(index.tolist()):
        stop = start + len(list(repeats))
        yield number, slice(start, stop)
        start = stop


def _at(output: Float[Tensor, " copy *whole"], span: slice) -> Float[Tensor, " copy *axes"]:
    """Return an example's own positions of an output, as a view; a classifier's output has no positions."""
    return output[:, span] if output.ndim == 3 else output


def log_probabilities(
    output: Float[Tensor, "copy *pos d_vocab"], place: int
) -> Float[Tensor, "copy d_vocab"]:
    """Return the log probabilities of all tokens at a position, at least in float32."""
    logits = output if output.ndim == 2 else output[:, place]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
