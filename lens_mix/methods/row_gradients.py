"""Gradients of many rows of one prompt, from the autograd graphs of few passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix._care.precision import relative_error
from lens_mix._care.users_hooks import has_user_hooks
from lens_mix._passes.autograd_graph import AutogradGraph
from lens_mix._passes.backward_rules import BackwardRules
from lens_mix._passes.clean_pass import clean_pass

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block
    from lens_mix._inputs.batches import Batch
    from lens_mix.methods.bound_target import BoundRows

# The gradients of so many rows are computed at once. With more, they do not fit into a processor's caches,
# and the rows share a longer prefix.
_ROWS = 16
# A pass over a prefix that is a larger share of the prompt takes longer than it saves.
_LONGEST_PREFIX = 0.75

Streams = list[tuple[Float[Tensor, "1 pos d_model"], Float[Tensor, "row pos d_model"]]]


def score_rows(
    bound: BoundRows,
    rules: BackwardRules,
    numbers: Sequence[int],
    score: Callable[[Streams], Float[Tensor, "row pos"]],
    largest: int | None = None,
) -> Float[Tensor, "row key"]:
    """Compute the scores of all rows of a single prompt from gradients of its residual streams.

    In a causal model, rows need the autograd graph of the positions up to their own only. So neighboring
    rows share the graph of a prefix of the prompt.

    Args:
        bound: The target of every row.
        rules: The rules of the backward pass.
        numbers: After how many blocks each residual stream is read.
        score: The scores of some rows from the streams, and the gradients with respect to them.
        largest: The largest number of rows whose gradients are computed at once. None: as many as is fast.
    """
    graphs = _Graphs(bound, rules)
    try:
        size = _ROWS if largest is None else min(_ROWS, largest)
        chunks = bound.chunks(size, own_graphs=False)
        scores = [score(graphs.differentiate(rows, numbers)) for rows in chunks]
    finally:
        graphs.release()
    positions = bound.block.real.shape[1]
    return torch.cat([torch.nn.functional.pad(each, (0, positions - each.shape[1])) for each in scores])


def make_graph(first: Block, batch: Batch, rules: BackwardRules) -> AutogradGraph:
    """Make the autograd graph of a single prompt in a pass of its own.

    Args:
        first: The first block of the clean pass.
        batch: The prompt, or its first positions.
        rules: The rules of the backward pass.
    """
    anatomies, positions = list(first.verification.anatomy.values()), batch.tokens.shape[1]
    fused = first.clean.fused
    fused = None if fused is None else fused.with_rule_alone()
    graph = AutogradGraph(first.clean.lens, anatomies, rules, positions, fused)
    try:
        clean_pass(first.clean.lens, batch, watched=(), graph=graph, fused=fused)
    except BaseException:
        graph.release()
        raise
    return graph


class _Graphs:
    """The autograd graphs of one prompt: that of the clean pass, and those of passes over its prefixes.

    Args:
        bound: The target of every row.
        rules: The rules of the backward pass.
    """

    def __init__(self, bound: BoundRows, rules: BackwardRules) -> None:
        first = bound.block
        self._bound, self._rules = bound, rules
        # The graphs that were made here. That of the whole prompt is kept, a prefix is replaced by the next.
        self._made: dict[str, AutogradGraph] = {}
        # User hooks may treat some positions or gradients differently. A single row does not need to know.
        self._is_regular = len(bound.functions) > 1 and not has_user_hooks(first.clean.lens.modules)
        self._can_cut = self._is_regular and first.verification.causal and bound.reads_own_logits
        # A prefix may end inside a picture.
        self._can_cut = self._can_cut and not first.batch.has_pictures

    def differentiate(self, rows: Int[Tensor, " row"], numbers: Sequence[int]) -> Streams:
        """Return residual streams, and the gradients of some rows with respect to them."""
        graph = self._find_graph(int(self._bound.queries[rows].max()) + 1)
        values = self._bound.values_in(graph, rows)
        if len(rows) > 1 and self._is_regular and self._bound.reads_own_logits:
            values = self._without_unembedding(graph, values, self._bound.queries[rows])
        reads_logits = self._bound.reads_logits
        return graph.gradients(values, numbers, at_once=self._is_regular, reads_logits=reads_logits)

    @staticmethod
    def _without_unembedding(
        graph: AutogradGraph, values: Float[Tensor, " row"], queries: Int[Tensor, " row"]
    ) -> Float[Tensor, " row"]:
        """Return numbers with the gradients of `values`, whose backward passes do not unembed.

        Each value reads the last residual stream at its own position alone. So one backward pass through the
        unembedding has the gradients of all values with respect to that stream.
        """
        stream = graph.resid_post
        if not values.requires_grad:
            return values
        ones = torch.ones_like(values)
        (gradient,) = torch.autograd.grad(values, stream, ones, retain_graph=True, allow_unused=True)
        if gradient is None:
            return values
        by_row = torch.zeros(len(values), *stream.shape[1:], dtype=gradient.dtype, device=gradient.device)
        number = torch.arange(len(values), dtype=torch.long, device=gradient.device)
        by_row[number, queries] = gradient[0, queries]
        # A model might mix positions after its last block, and a row might be requested twice.
        if not torch.equal(by_row.sum(0), gradient[0]):
            return values
        with torch.enable_grad():
            return einsum(stream[0], by_row, "pos d_model, row pos d_model -> row")

    def release(self) -> None:
        """Free the autograd graphs that were made here."""
        while self._made:
            self._made.popitem()[1].release()

    def _find_graph(self, length: int) -> AutogradGraph:
        """Return the autograd graph of the first positions, or that of the whole prompt."""
        first = self._bound.block
        positions = first.real.shape[1]
        if self._can_cut and length <= _LONGEST_PREFIX * positions:
            prefix = self._make("prefix", length)
            if self._is_prefix(prefix):
                return prefix
            self._can_cut = False
        if first.clean.graph is not None and first.clean.graph.rules == self._rules:
            return first.clean.graph
        return self._made.get("whole") or self._make("whole", positions)

    def _make(self, name: str, length: int) -> AutogradGraph:
        """Make the autograd graph of the first positions, in place of the last one of this name."""
        first = self._bound.block
        if name in self._made:
            self._made.pop(name).release()
        inputs = {key: value[:, :length] for key, value in first.batch.inputs.items()}
        tokens, real = first.batch.tokens[:, :length], first.batch.real[:, :length]
        batch = dataclasses.replace(first.batch, tokens=tokens, real=real, inputs=inputs)
        graph = self._made[name] = make_graph(first, batch, self._rules)
        return graph

    def _is_prefix(self, graph: AutogradGraph) -> bool:
        """Return whether a graph contains the numbers of the clean pass; some models read the length."""
        clean = self._bound.block.clean
        got, expected = graph.resid_post, clean.calls[clean.lens.n_layers - 1].resid_post
        if clean.lens.angles_differ(got.shape[1], expected.shape[1]):
            return False
        return relative_error(got.detach(), expected[:, : got.shape[1]]) <= clean.lens.tolerance
