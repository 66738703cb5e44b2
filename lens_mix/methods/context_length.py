"""Compute context length probing: what each token adds when the context is cut just before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from lens_mix._blocks.cost import Growth
from lens_mix._classes.model_classes import wrapped_config
from lens_mix._inputs.batches import Batch, Prompt, pad
from lens_mix._inputs.prompts import pad_token
from lens_mix.methods.bound_target import BoundRows, RowTargetMethod, bind_rows, evaluate, read_output

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


@dataclasses.dataclass(frozen=True)
class ContextLength(RowTargetMethod):
    """Compute context length probing (Cífka & Liutkus, ACL 2023, eq. 5), for causal models.

        score[query, key] = F(key..query) − F(key+1..query)

    F is the target at the position of the row. The score is what F gains when a context that is cut on the
    left gets one more token. Each context is a prompt of its own, so a sliding window or chunks of attention
    act as in any prompt. Scores are signed, in the target's unit. A row sums to F(whole prompt) −
    F(the query alone), and its own key has 0.

    The result is one map [1, query, key]. One forward pass per token is enough for all rows. Tokens after the
    query stay in the prompt. They matter only if the model's rotary angles depend on the prompt's length
    (long RoPE, dynamic NTK).

        >>> method = lm.methods.ContextLength(target=" Paris")
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-1]).top(3)

    Args:
        target: The number that is explained: the text of a token, one of `lens_mix.targets`, or any callable
            logits -> [copy]. It is read at the row's position instead of its own. The default is the log
            probability of the prediction there.
        against: A token with which that of the target is contrasted (`lens_mix.targets`). None: no contrast.
        keep_first: Whether the first token of the prompt (a beginning-of-sequence token) stays in front of
            every cut. Its own score is then 0. None: if it is the tokenizer's beginning-of-sequence token.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is unknown, the target does not fit the prompt, or the model has inputs besides
            tokens.
    """

    name: ClassVar[str] = "context_length"
    description: ClassVar[str] = (
        "what the answer's score gains from one more token at the start of the context"
    )
    place_in_list: ClassVar[int] = 6
    needs: ClassVar[frozenset[str]] = frozenset({"causal"})
    needs_one_position: ClassVar[bool] = True
    cost_grows_with: ClassVar[Growth] = "tokens"
    citation: ClassVar[str] = "cifka-liutkus-2023-black"

    keep_first: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_first not in (None, True, False):
            raise TypeError(f"keep_first: expected True, False or None, got {self.keep_first!r}")

    @override
    def of_blocks(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        bound = bind_rows(blocks, self.target)
        scores = bound.block.zeros(len(bound.functions), bound.block.real.shape[1])
        if wrapped_config(blocks[0].clean.lens.model, "attention_chunk_size"):
            # A cut moves the borders of chunks, so a row may depend on tokens that it does not see.
            blocks[-1].record.rows_read[:] = [range(int(count)) for count in bound.block.real.sum(1)]
        for prompt in bound.prompt_index.unique().tolist():
            self._fill_rows(scores, bound, prompt)
        return [bound.scatter(scores, blocks[-1])]

    def _fill_rows(self, scores: Float[Tensor, "row key"], bound: BoundRows, prompt: int) -> None:
        """Write the rows of one prompt into the scores."""
        first, rows = bound.block, (bound.prompt_index == prompt).nonzero()[:, 0]
        places = first.real[prompt].nonzero()[:, 0]
        queries = bound.queries[rows] - places[0]
        prefix = self._count_prefix(first, prompt)
        starts = torch.arange(prefix, int(queries.max()) + 1, device=places.device)
        if len(starts) < 2:
            return  # No token before these rows can be cut.
        lengths = prefix + len(places) - starts
        with torch.no_grad():
            by_chunk = [
                self._compute_values(bound, rows, prompt, prefix, some)
                for chunk in first.chunks(len(starts), logits=not bound.reads_one_position)
                for some in starts[chunk].split(_count_contexts_per_batch(first, lengths[chunk]))
            ]
        values = torch.cat(by_chunk, dim=1)
        keys, gained = starts[:-1], gains(values)
        scores[rows[:, None], places[keys]] = gained.masked_fill(keys >= queries[:, None], 0)

    def _count_prefix(self, first: Block, prompt: int) -> int:
        """Return how many tokens stay in front of every cut."""
        if self.keep_first is None:
            token = first.batch.prompts[prompt].tokens[0]
            return int(getattr(first.clean.lens.tokenizer, "bos_token_id", None) == int(token))
        return int(self.keep_first)

    @staticmethod
    def _compute_values(
        bound: BoundRows, rows: Tensor, prompt: int, prefix: int, starts: Int[Tensor, " start"]
    ) -> Float[Tensor, "row start"]:
        """Return the target of some rows of a prompt, for contexts that start at `starts`."""
        first, queries = bound.block, bound.queries[rows] - bound.block.real[prompt].int().argmax()
        whole = first.tokens[prompt][first.real[prompt]]
        last, positions = int(queries.max()), None
        if bound.reads_own_logits:
            positions = (queries - starts[:, None] + prefix).clamp_min(0)
            # Tokens after the last row matter only if the angles depend on the length.
            is_same = not first.clean.lens.angles_differ(last + 1, len(whole))
            whole = whole[: last + 1] if is_same else whole
        contexts = [torch.cat([whole[:prefix], whole[start:]]) for start in starts.tolist()]
        batch = _make_batch(first, prompt, contexts)
        output = read_output(first, bound.target, positions=positions, batch=batch)
        has_cut = positions is None and output.ndim == 3
        if has_cut:
            # Targets use the positions of the whole prompt, so the output is moved back to them. What was cut
            # has no output and becomes NaN, so that a target that reads it (a loss of the whole prompt) does
            # not get a number.
            index = torch.arange(len(whole), device=starts.device)
            places = (index - starts[:, None] + prefix).clamp_min(0)
            output = output[torch.arange(len(starts), device=starts.device)[:, None], places]
            output = output.masked_fill((index < starts[:, None])[..., None], torch.nan)
        values = first.zeros(len(rows), len(starts))
        try:
            for number, row in enumerate(rows.tolist()):
                uncut = starts <= queries[number]
                if bool(uncut.any()):
                    own = output[uncut] if positions is None else output[uncut, number : number + 1]
                    value = evaluate(bound.functions[row], own)
                    values[number, uncut] = value.to(values.dtype)
        except ValueError as problem:
            if not has_cut:
                raise
            raise ValueError(
                "context_length: expected a target that reads only the row's position, because the positions "
                "before the cut do not exist; got one that reads them"
            ) from problem
        return values


def _make_batch(first: Block, prompt: int, contexts: Sequence[Int[Tensor, " pos"]]) -> Batch:
    """Return a batch of one prompt with other tokens for the mapped stack, padded on the right.

    The padding is not masked, because no position of a causal model's prompt reads it. With a mask, rows of
    transformers that see nothing but padding are NaN in float64, and make the others so.

    Args:
        first: The model's first block.
        prompt: The index of the prompt.
        contexts: The tokens of each copy. Their rotary angles must be alike (`Lens.angles_differ`).

    Raises:
        ValueError: The prompt has further inputs, which belong to its own tokens.
    """
    given = first.batch.prompts[prompt]
    if given.input_names:
        raise ValueError(
            f"model inputs: expected tokens alone, as they are cut, got {given.input_names} besides"
        )
    is_target = given.target is not None and first.stack.reads_target
    prompts = [
        dataclasses.replace(given, target=tokens) if is_target else Prompt(tokens, given.target)
        for tokens in contexts
    ]
    batch = pad(prompts, pad_token(first.clean.lens.model), "right")
    return dataclasses.replace(batch, real=torch.ones_like(batch.real))


def _count_contexts_per_batch(first: Block, lengths: Int[Tensor, " start"]) -> int:
    """Return how many contexts of these lengths run in one batch: one, if a model's angles depend on them."""
    return 1 if first.clean.lens.angles_differ(int(lengths.min()), int(lengths.max())) else len(lengths)


def gains(values: Float[Tensor, "row start"]) -> Float[Tensor, "row key"]:
    """Return what a context that starts at the key gains over one that starts after it (equation 5)."""
    return values[:, :-1] - values[:, 1:]
