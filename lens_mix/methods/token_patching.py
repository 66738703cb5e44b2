"""Estimate what patching each token does to the output, with an exact direct effect of the strongest keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from lens_mix._blocks.cost import Cost, Growth
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._passes.autograd_graph import AutogradGraph, Mixing
from lens_mix._passes.changed_backward import Rules
from lens_mix.arguments import check_choice, check_items, check_whole_number
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, mask_attention
from lens_mix.hooks.mixing import heads_at_once, sink
from lens_mix.methods.bound_target import BoundRows, RowTargetMethod, bind_rows
from lens_mix.methods.row_gradients import make_graph
from lens_mix.methods.side_by_side import measure_direct
from lens_mix.removal import replacement
from lens_mix.targets import describe

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block
    from lens_mix._model.anatomy import BlockAnatomy


# With n_measured="auto", the replacements that are measured may change this many times the tokens that the
# estimate runs.
_MEASURED_TOKENS = 1.5
# In longer rows this is too little to improve the map (docs/evidence/input_map.md), so nothing is measured.
LONGEST_MEASURED = 32
# What the backward pass of a row takes in forward passes, where estimating and measuring are weighed up.
_BACKWARD = 1.5


@dataclasses.dataclass(frozen=True)
class TokenPatching(RowTargetMethod):
    """Estimate what replacing each token would do to the output, from a few passes per row.

    Measuring it takes one pass per token (`Occlusion`). A score adds two estimates of the change of the
    target F, read at the position of the query:

        score[query, j] = between + direct
        between = sqrt(Σ_i E[i, j]²)    over positions i between j and the query
        direct  = mean of |F' - F|      over the replacements of token j
        E[i, j] = Σ g · dz              over layers and heads
        dz      = (z - p v_j) / (1 - p) - z

    - Between: E[i, j] is the first-order change of F when i no longer sees j. g is the gradient of F with
      respect to the mixed values z_i of a head. dz is their change when the softmax is computed without j,
      where p is the weight of j. This is attribution patching of edges (Syed et al., 2023) with an exact
      softmax, as in the "QK fix" of AtP* (Kramár et al., 2024, arXiv 2403.00745).
    - Direct: F' is the target when the query's token sees the replacement of j instead of j, in every layer.
      One pass over copies of the query's token computes it. For the query's own token, that token itself is
      replaced. Since attention is causal and the replacement sees the tokens before j, the term is exact. It
      is computed for the `n_exact` keys that are strongest to first order. The other keys have |E[query, j]|.

    g is the gradient of a backward pass with changed rules. Norms are linear maps at the scale of the clean
    pass, the softmax has temperature 2, and activations and gates follow the rule "ratio" of `Gim`. The sum,
    the square root and the rules are a choice of this library, made on data: the documentation has the
    measurements. `attribution_patch` of TransformerLens scores nodes and edges of the model, not tokens.

    The result is one map [1, query, key], at least 0, in the target's unit. Each row takes one backward pass,
    and for every replacement a forward pass over N + 2 `n_exact` tokens, where N is the row's number of
    tokens. Ask only for the rows that you need.

    With `n_measured`, the strongest scores are measured instead: each is the mean of |F' - F| over whole
    passes in which the token is replaced, as `Occlusion(by="replace", measure="absolute")` computes it. The
    other estimates are multiplied by Σ measured / Σ estimated, summed over the measured keys. So they
    keep their order. One of them is above a measured score only if that score is smaller than its estimate
    said. They are not bounded by the smallest measured score, which may belong to a token that was estimated
    far too high.
    `provenance["details"]` has for each row its keys that were "measured", and "measured_passes": the number
    of forward passes that the measurement took.

    The method needs a causal model that takes position ids and whose attention reads nothing but tokens and
    their positions.

        >>> method = lm.methods.TokenPatching(n_measured="auto")
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-1]).top(3)

    Args:
        target: The number that is explained: the text of a token, one of `lens_mix.targets`, or any callable
            logits -> [copy]. It is read at the row's position instead of its own. The default is the log
            probability of the prediction there.
        against: A token with which that of the target is contrasted (`lens_mix.targets`). None: no contrast.
        replacements: The tokens that replace others, as text of one token or as vocabulary numbers. A token
            never replaces itself: the next vocabulary number is used instead. None: `n_samples` tokens, drawn
            from the vocabulary without special tokens.
        n_samples: The number of drawn replacements.
        seed: The seed of the draw.
        paths: "all", or one of the two terms: "direct" or "between".
        n_exact: The number of keys of a row, besides the query's own, whose direct term is exact.
        n_measured: The number of keys of a row, besides the query's own, whose score is measured; 0 for none.
            "auto": as many as the time of a few estimates allows. If measuring all keys
            takes no longer, all are measured and nothing is estimated; with two replacements that is so up
            to 17 tokens. Nothing is measured in rows of more than 32 tokens, because at this cost it did not
            improve the map of longer prompts.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is unknown, or the target or a replacement does not fit the prompt.
        UnsupportedModelError: The method is not defined here. That is the case for

            - a model that is not causal or takes no position ids;
            - a model whose attention reads more than tokens and positions (a sliding window shorter than the
              row, ALiBi), or computes its mixing inside transformers, unless all scores are measured;
            - hooks on the model that act on some positions only;
            - model inputs besides tokens;
            - a target that reads several positions.
    """

    name: ClassVar[str] = "token_patching"
    description: ClassVar[str] = "an estimate of how much the answer changes if a token is replaced"
    place_in_list: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"gradients", "causal", "position_ids"})
    needs_one_position: ClassVar[bool] = True
    cost_grows_with: ClassVar[Growth] = "rows"
    citation: ClassVar[str] = "kramar-etal-2024-atp"

    replacements: Sequence[str | int] | None = None
    n_samples: int = 2
    # `Occlusion` has another seed: it scores these maps, which must not use the tokens of their own measure.
    seed: int = 1
    paths: Literal["all", "direct", "between"] = "all"
    n_exact: int = 24
    n_measured: int | Literal["auto"] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replacements is not None:
            listed = check_items("replacements", self.replacements, "tokens", least=1)
            object.__setattr__(self, "replacements", listed)
        replacement(self.replacements, self.n_samples, self.seed)
        check_whole_number("n_exact", self.n_exact, 0)
        check_choice("paths", self.paths, ("all", "direct", "between"))
        if self.n_measured != "auto":
            check_whole_number("n_measured", self.n_measured, 0)
        if self.n_measured and self.paths != "all":
            raise ValueError(f"n_measured: measures all paths; expected 0 for paths={self.paths!r}")

    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        """Return why offloaded feed-forwards are unsupported: they would give other maps than loaded ones."""
        if anatomy.feed_forward_kind != "offloaded":
            return None
        return "the weights of its feed-forward are offloaded and not read; load the model on one device"

    @override
    def clean_rules(self, anatomies: Sequence[BlockAnatomy]) -> Rules:
        written = all(anatomy.is_written_down for anatomy in anatomies)
        # The softmax at temperature 2 has a derivative of half its size.
        return Rules(temperature=2.0, scores=0.5, activations="ratio" if written else "gradient")

    def interventions(
        self, layer: int, allowed: Bool[Tensor, "*axes query key"], *, attention: str = DEFAULT_ATTENTION
    ) -> list[HookPair]:
        """Return the hooks that let each token of a pass see only the tokens that it is allowed to see.

        The direct term is computed in a row with the replacement of token j and, once more, the last token
        after the prompt. In your own run:

            n = len(tokens)
            row = torch.cat([tokens, torch.tensor([other_token, tokens[-1]])])
            positions = torch.tensor([*range(n), j, n - 1])
            allowed = torch.eye(n + 2, dtype=torch.bool)  # each token sees itself
            allowed[:, :n] |= torch.arange(n) < positions[:, None]  # and the prompt before it
            allowed[-1, [j, n]] = torch.tensor([False, True])  # the last one: the replacement instead of j
            hooks = [pair for layer in layers for pair in method.interventions(layer, allowed)]
            with model.hooks(fwd_hooks=hooks):
                logits = model(row[None], position_ids=positions[None])[0]
            direct = (target(logits[-1]) - target(logits[n - 1])).abs()

        Args:
            layer: The number of the block.
            allowed: Which tokens of the pass each of them may see.
            attention: The name of the attention module, with `{layer}`.
        """
        return [mask_attention(layer, allowed, attention=attention)]

    @override
    def scale_cost(self, cost: Cost, blocks: Sequence[Block]) -> Cost:
        positions, samples = blocks[0].real.shape[1], self._samples
        each = self._passes_of_estimate(positions)
        if self.n_measured == "auto":
            each *= 2 if positions <= LONGEST_MEASURED else 1
        else:
            each += samples * min(self.n_measured, positions)
        return cost.times(each / TokenPatching()._passes_of_estimate(positions))

    @property
    def _samples(self) -> int:
        return self.n_samples if self.replacements is None else len(self.replacements)

    def _passes_of_estimate(self, count: int) -> float:
        """Return the passes of the estimate for a row of `count` tokens."""
        beside = 0 if self.paths == "between" else 1 + 2 * min(self.n_exact + 1, count) / count
        return _BACKWARD + self._samples * beside

    @override
    def of_blocks(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        first, bound = blocks[0], bind_rows(blocks, self.target)
        if bound.positions is None:
            raise UnsupportedModelError(
                f"target: expected one that reads a single position, got {describe(bound.target)}, which "
                "reads several"
            )
        rows = first.zeros(len(bound.functions), first.real.shape[1])
        rules = self.clean_rules([block.anatomy for block in blocks])
        for prompt in bound.prompt_index.unique().tolist():
            if first.batch.prompts[prompt].input_names:
                raise UnsupportedModelError(
                    "model inputs: expected tokens alone, because they run at repeated positions, got also "
                    f"{first.batch.prompts[prompt].input_names}"
                )
            graph = first.clean.graph
            # A run keeps no graph of a batch, and only one graph if its methods have several rules.
            if graph is None or graph.rules != rules:
                alone = torch.tensor([prompt], dtype=torch.long, device=first.tokens.device)
                graph = make_graph(first, first.batch.select(alone), rules)
            rows_of_prompt = (bound.prompt_index == prompt).nonzero()[:, 0].tolist()
            for row in first.with_bar(rows_of_prompt, len(rows_of_prompt), "rows"):
                self._fill_row(rows[row], blocks, bound, row, graph)
        return [bound.scatter(rows, blocks[-1])]

    def _fill_row(
        self,
        scores: Float[Tensor, " pos"],
        blocks: Sequence[Block],
        bound: BoundRows,
        row: int,
        graph: AutogradGraph,
    ) -> None:
        """Write one row of scores, from the tokens of its prompt up to the query."""
        prompt = int(bound.prompt_index[row])
        places = bound.block.real[prompt].nonzero()[:, 0]
        # In a causal model, later tokens have no effect on the row.
        places = places[places <= bound.queries[row]]
        # A late token counts less, because its replacement changes fewer tokens of the row.
        costs = self._samples * torch.arange(len(places), 0, -1, device=places.device)
        of_estimate = self._passes_of_estimate(len(places)) * len(places)
        is_short = len(places) <= LONGEST_MEASURED
        if self.n_measured == "auto" and is_short and costs.sum() <= (1 + _MEASURED_TOKENS) * of_estimate:
            chosen = torch.arange(len(places), device=places.device)
            found = self._measure(bound, row, places)
        else:
            found = self._estimate(bound, row, places, graph)
            chosen = self._choose(found, costs, _MEASURED_TOKENS * of_estimate)
            if len(chosen) > 0:
                found = rescale(found, chosen, self._measure(bound, row, places[chosen]))
        if self.n_measured:
            details = blocks[-1].record.details[prompt]
            details.setdefault("measured", []).append(chosen.tolist())
            details.setdefault("measured_passes", []).append(self._samples * len(chosen))
        scores[places] = found.to(scores.dtype)

    def _choose(
        self, estimates: Float[Tensor, " pos"], costs: Int[Tensor, " pos"], most: float
    ) -> Int[Tensor, " chosen"]:
        """Return the positions to measure, ascending: the strongest ones and the query's own, or none.

        Args:
            estimates: The estimated scores.
            costs: The number of tokens of all samples that replacing each position changes.
            most: The largest sum of costs if `n_measured` is "auto".
        """
        last = len(estimates) - 1
        if self.n_measured == 0 or (self.n_measured == "auto" and len(estimates) > LONGEST_MEASURED):
            return costs.new_zeros(0)
        strongest = estimates[:last].argsort(descending=True)
        if self.n_measured == "auto":
            strongest = strongest[costs[strongest].cumsum(0) + costs[last] <= most]
        else:
            strongest = strongest[: self.n_measured]
        return torch.cat([strongest.sort().values, strongest.new_tensor([last])])

    def _estimate(
        self, bound: BoundRows, row: int, places: Int[Tensor, " pos"], graph: AutogradGraph
    ) -> Float[Tensor, " pos"]:
        """Return the estimated scores of one row, at the positions of its tokens in the padded batch."""
        last = len(places) - 1
        wide = torch.promote_types(bound.clean.dtype, torch.float32)
        effects = torch.zeros(len(places), len(places), dtype=wide, device=places.device)

        def add(layer: int, whole: Mixing) -> None:
            # A token always sees itself, so no token is hidden from its own position.
            effects.add_(hidden_effects(whole.at(places)).to(wide).tril_(-1))

        index = torch.tensor([row], dtype=torch.long, device=places.device)
        graph.read_mixing(bound.values_in(graph, index), add)
        between, direct = effects[:-1].square().sum(0).sqrt(), effects[-1].abs()
        if self.paths != "between":
            strongest = direct[:last].topk(min(self.n_exact, last)).indices.tolist()
            chosen = torch.tensor([*sorted(strongest), last], dtype=torch.long, device=places.device)
            measured = self._measure(bound, row, places[chosen], is_direct=True)
            direct[chosen] = measured.to(direct.dtype)
        return {"direct": direct, "between": between, "all": direct + between}[self.paths]

    def _measure(
        self, bound: BoundRows, row: int, chosen: Int[Tensor, " chosen"], *, is_direct: bool = False
    ) -> Float[Tensor, " chosen"]:
        """Return the mean size of the change of the target over the replacements of each chosen position.

        Args:
            bound: The target of all rows.
            row: The index of the row.
            chosen: Positions of the padded batch.
            is_direct: Whether only the row's own position reads the replacement; otherwise all later ones do.
        """
        first, prompt = bound.block, bound.prompt_index[row]
        removed = torch.zeros(len(chosen), first.real.shape[1], dtype=torch.bool, device=chosen.device)
        removed.scatter_(1, chosen[:, None], True)
        removal = replacement(self.replacements, self.n_samples, self.seed)
        copies = removal.make_copies(first, prompt.expand(len(chosen)), removed)
        if is_direct:
            values = measure_direct(bound, row, copies)
        else:
            index, by_chunk = prompt.new_tensor([row]), []
            for chunk in first.chunks(len(copies)):
                some = copies.at(chunk)
                with torch.no_grad(), removal.changes(first, some) as (batch, hooks):
                    by_chunk.append(bound.values(index.expand(len(some)), hooks, batch=batch))
            values = torch.cat(by_chunk)
        changes = (values - bound.clean[row]).abs()
        means: Tensor = changes.unflatten(0, (-1, copies.samples)).mean(-1)
        return means


def rescale(
    estimates: Float[Tensor, " pos"], chosen: Int[Tensor, " chosen"], measured: Float[Tensor, " chosen"]
) -> Float[Tensor, " pos"]:
    """Return measured scores at the chosen positions, and the other estimates in the same unit.

    The others are multiplied by Σ measured / Σ estimated over the chosen positions.
    """
    total = estimates[chosen].sum()
    scores = estimates * (measured.sum() / total if float(total) > 0 else 1.0)
    scores[chosen] = measured.to(scores.dtype)
    return scores


def hidden_effects(mixing: Mixing) -> Float[Tensor, "query key"]:
    """Return Σ_h g · dz of one layer, for each query that no longer sees a key (see `TokenPatching`).

    The result has no meaning for a query that sees only one key, because nothing remains without it.

    Args:
        mixing: The pattern, values, mixed values and gradient of one prompt, without a batch axis.

    Raises:
        ValueError: The attention is fused, and so has no whole pattern.
    """
    whole, wide = mixing.pattern, torch.promote_types(mixing.mixed.dtype, torch.float32)
    if whole is None:
        raise ValueError("mixing: expected one with a whole pattern, got that of fused attention")
    pattern, values, gradient = (each.to(wide) for each in (whole, mixing.values, mixing.gradient))
    values = values.repeat_interleave(pattern.shape[0] // values.shape[1], dim=1)
    effects = torch.zeros(pattern.shape[1:], dtype=wide, device=pattern.device)
    step, axes = heads_at_once(pattern), "query head d_head, key head d_head -> head query key"
    for start in range(0, len(pattern), step):
        some = slice(start, start + step)
        attributions = einsum(gradient[:, some], values[:, some], axes).mul_(pattern[some])
        strongest = pattern[some].argmax(-1, keepdim=True)
        # The weight of an attention sink that is not a token remains if a key is hidden.
        left = _sum_others(pattern[some], strongest).add_(sink(whole[some]))
        # A query that sees a single key has no weight left, which must not make NaN.
        left.clamp_min_(torch.finfo(wide).tiny)
        changes = _sum_others(attributions, strongest).div_(left).sub_(attributions.sum(-1, keepdim=True))
        effects.add_(changes.sum(0))
    return effects


def _sum_others(
    x: Float[Tensor, "head query key"], strongest: Int[Tensor, "head query 1"]
) -> Float[Tensor, "head query key"]:
    """Return, for every key, the sum over all other keys.

    It is the sum of all less the key's own. For the key with the largest weight, which may be nearly all of
    the row, that would lose all digits, so there the others are summed.

    Args:
        x: What is summed.
        strongest: The key with the largest weight in each row.
    """
    rest = x.scatter(-1, strongest, 0).sum(-1, keepdim=True)
    return (x.sum(-1, keepdim=True) - x).scatter_(-1, strongest, rest)


def hidden_key_effects(
    pattern: Float[Tensor, "head query key"],
    values: Float[Tensor, "key head d_head"],
    gradient: Float[Tensor, "query head d_head"],
) -> Float[Tensor, "query key"]:
    """Return E, the sum over heads of g · ((z - p v) / (1 - p) - z), by the formula.

    This is slow. Tests compare `hidden_effects` with it.

    Args:
        pattern: The weights p.
        values: The values v, one head for each query head.
        gradient: g, the gradient of the target with respect to the mixed values z.
    """
    mixed = einsum(pattern, values, "head query key, key head d_head -> query head d_head")
    weight = rearrange(pattern, "head query key -> query key head 1")
    mixed = rearrange(mixed, "query head d_head -> query 1 head d_head")
    changed = (mixed - weight * values) / (1 - weight) - mixed
    return einsum(gradient, changed, "query head d_head, query key head d_head -> query key")
