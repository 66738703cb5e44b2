"""Attribution patching of edges between tokens, and replaced tokens that the last one sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import one_of, whole_number
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, mask_attention
from lens_mix.hooks.mixing import sink
from lens_mix.lens.autograd_graph import AutogradGraph, Mixing
from lens_mix.lens.changed_backward import Rules
from lens_mix.lens.effort import GRADIENT_PASS, Passes
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.methods.replacements import TakesReplacements
from lens_mix.methods.row_targets import RowTargets, bind_rows, row_passes
from lens_mix.methods.side_by_side import SideBySide
from lens_mix.targets import describe

if TYPE_CHECKING:
    from lens_mix.lens.anatomy import BlockAnatomy
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class AttributionPatching(TakesReplacements):
    """What replacing a token would do to the output, from about five passes instead of one per token.

    score[query, key] adds two estimates of the change of the target F at the query, read at its position:

    - Between: sqrt(sum_i E[i, j]²) over the positions i between key j and the query. E[i, j] is what F loses
      when i no longer sees j, to first order: the sum over layers and heads of g · dz, g the gradient of F by
      the head's mixed values z_i, and dz their change when the softmax is worked out anew without j,
      dz = (z - p v_j) / (1 - p) - z with p the weight of j (attribution patching of edges, Syed et al., 2023,
      with the softmax exact as in the "QK fix" of AtP*, Kramár et al., 2024, arXiv 2403.00745).
    - Direct: |F(the query's token sees j's stand-in, in every layer) - F|, the mean over stand-ins, by one
      pass over copies of the query's token; of the query's own token it is the replacement itself. It is
      exact, as attention is causal: the stand-in sees the tokens before j. Where a row has more keys than
      `n_exact`, this is for those that are strongest to first order; the others have |E[query, j]|.

    g is of a backward pass with changed rules: norms at their scale, the softmax at temperature 2,
    activations and gates by their ratio (`lens_mix.lens.changed_backward`). The sum, the root and the rules
    are this library's choice, made on data: docs/input_map.md has the figures.

    One map [1, query, key], 0 or more, in the target's unit. Each row takes a backward pass, and a forward
    pass of N + 2 `n_exact` tokens for every stand-in: ask for the rows that you need.

    Args:
        target: what is explained (`lens_mix.targets`, or any callable logits -> [copy]), read at the row's
            position instead of its own; by default the log probability of what the model predicts there.
        replacements: stand-ins, as text of one token or as numbers; None: `n_samples` drawn from the
            vocabulary without special tokens. A token is never its own stand-in: the next number serves.
        n_samples, seed: how many are drawn, and from where.
        paths: "all", or one of the two terms: "direct" or "between".
        n_exact: for how many keys of a row, besides its own token, the direct term is exact.

    Raises:
        TypeError, ValueError: an unknown option; a target or stand-in that does not fit.
        UnsupportedModelError: a model that is not causal, that takes no positions, or whose attention reads
            more than these (a sliding window shorter than the passes, ALiBi), or mixes in transformers' own
            code; hooks on it that act by position; model inputs besides tokens; a target that reads several
            positions.
    """

    name: ClassVar[str] = "attribution_patching"
    needs: ClassVar[frozenset[str]] = frozenset({"gradients", "causal", "position_ids"})
    citation: ClassVar[str] = "kramar-etal-2024-atp"

    replacements: Sequence[str | int] | None = None
    n_samples: int = 2
    # Not that of `Occlusion`, the yardstick: a map that is scored must not know the yardstick's tokens.
    seed: int = 1
    paths: Literal["all", "direct", "between"] = "all"
    n_exact: int = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("n_exact", self.n_exact, 0)
        one_of("paths", self.paths, ("all", "direct", "between"))

    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        """Refuse offloaded feed-forwards, with which the map would be another than with weights in place."""
        if anatomy.feed_forward_kind != "offloaded":
            return None
        return "the weights of its feed-forward are offloaded and not read; load the model on one device"

    def clean_rules(self, anatomies: Sequence[BlockAnatomy]) -> Rules:
        written = all(anatomy.is_written_down for anatomy in anatomies)
        # The softmax at temperature 2 has a derivative of half its size.
        return Rules(temperature=2.0, scores=0.5, activations="ratio" if written else "gradient")

    def interventions(
        self, layer: int, allowed: Bool[Tensor, "index index"], *, attention: str = DEFAULT_ATTENTION
    ) -> list[HookPair]:
        """The hooks that let each index of a prompt with stand-ins beside it see what its layout allows.

        On your run, for the direct term of the tokens `chosen`, the last of which is the prompt's last:

            layout = Layout.of(len(tokens), chosen, sets=1)  # of lens_mix.methods.side_by_side
            hooks = [pair for layer in layers for pair in method.interventions(layer, layout.allowed)]
            with model.hooks(fwd_hooks=hooks):
                beside = layout.filled(tokens, stand_ins[None])  # one token per chosen one
                logits = model(beside[None], position_ids=layout.positions[None])[0]
            direct = (target(logits[layout.read[0]]) - target(logits[len(tokens) - 1])).abs()

        Args as in `lens_mix.hooks.mask_attention`.
        """
        return [mask_attention(layer, allowed, attention=attention)]

    def passes(self, blocks: Sequence[Block]) -> Passes:
        positions = blocks[0].real.shape[1]
        beside = 0 if self.paths == "between" else 1 + 2 * min(self.n_exact + 1, positions) / positions
        stand_ins = self.n_samples if self.replacements is None else len(self.replacements)
        reason = f"a backward pass and a pass with {stand_ins} replacements for each row"
        return row_passes(blocks, GRADIENT_PASS + stand_ins * beside, reason, "fewer replacements take fewer")

    def of_stack(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        first, bound = blocks[0], bind_rows(blocks, self.target)
        if bound.positions is None:
            raise UnsupportedModelError(
                f"target: expected one that reads a single position, got {describe(bound.target)}, which "
                "reads several"
            )
        rows = first.zeros(len(bound.functions), first.real.shape[1])
        rules = self.clean_rules([block.anatomy for block in blocks])
        for prompt in bound.prompts.unique().tolist():
            if first.batch.prompts[prompt].inputs:
                raise UnsupportedModelError(
                    "model inputs: expected tokens alone, as they are run at repeated positions, got "
                    f"{sorted(first.batch.prompts[prompt].inputs)} besides"
                )
            graph = first.graph(prompt, rules)
            rows_of_prompt = (bound.prompts == prompt).nonzero()[:, 0].tolist()
            for row in first.with_bar(rows_of_prompt, len(rows_of_prompt), "rows"):
                self._fill(rows[row], blocks, bound, row, graph)
        return [bound.scattered(rows, blocks[-1])]

    def _fill(
        self,
        scores: Float[Tensor, " pos"],
        blocks: Sequence[Block],
        bound: RowTargets,
        row: int,
        graph: AutogradGraph,
    ) -> None:
        """One row, of its prompt up to the query."""
        places = bound.first.real[bound.prompts[row]].nonzero()[:, 0]
        places = places[places <= bound.queries[row]]
        layers = graph.mixing(bound.value_in(graph, row))
        mixing = {layer: whole.at(places) for layer, whole in layers.items()}
        effects = torch.stack([hidden_effects(each) for each in mixing.values()]).sum(0).tril(-1)
        between, direct = effects[:-1].square().sum(0).sqrt(), effects[-1].abs()
        if self.paths != "between":
            last = len(places) - 1
            strongest = direct[:last].topk(min(self.n_exact, last)).indices.tolist()
            chosen = torch.tensor([*sorted(strongest), last], dtype=torch.long, device="cpu")
            mixed = {layer: each.mixed for layer, each in mixing.items()}
            beside = SideBySide(blocks, bound, row, places, chosen, mixed, self.interventions)
            changes = beside.changes(self.stand_ins(bound.first, beside.tokens[chosen]).T)
            direct[chosen] = changes.abs().mean(0).to(direct.dtype)
        terms = {"direct": direct, "between": between, "all": direct + between}
        scores[places] = terms[self.paths].to(scores.dtype)


def hidden_effects(mixing: Mixing) -> Float[Tensor, "query key"]:
    """g · dz of one layer when a query no longer sees a key, summed over heads (the class's docstring).

    Of one prompt, all without a batch axis; a row that sees one key alone has nothing left without it.
    """
    wide = torch.promote_types(mixing.mixed.dtype, torch.float32)
    pattern, values, gradient = (each.to(wide) for each in (mixing.pattern, mixing.values, mixing.gradient))
    values = values.repeat_interleave(pattern.shape[0] // values.shape[1], dim=1)
    attributions = pattern * einsum(gradient, values, "query head d_head, key head d_head -> head query key")
    # Sums over the other keys: 1 - p has no digits left where one key has nearly all of the weight.
    left = (_of_others(pattern) + sink(mixing.pattern)).clamp_min(torch.finfo(attributions.dtype).tiny)
    return (_of_others(attributions) / left - attributions.sum(-1, keepdim=True)).sum(0)


def _of_others(x: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
    """For every key, the sum over all others."""
    before = torch.nn.functional.pad(x.cumsum(-1)[..., :-1], (1, 0))
    after = torch.nn.functional.pad(x.flip(-1).cumsum(-1)[..., :-1], (1, 0)).flip(-1)
    return before + after


def hidden_key_effects(
    pattern: Float[Tensor, "head query key"],
    values: Float[Tensor, "key head d_head"],
    gradient: Float[Tensor, "query head d_head"],
) -> Float[Tensor, "query key"]:
    """E as it stands, g · ((z - p v) / (1 - p) - z), summed over heads; the oracle of `hidden_effects`."""
    mixed = einsum(pattern, values, "head query key, key head d_head -> query head d_head")
    weight = rearrange(pattern, "head query key -> query key head 1")
    mixed = rearrange(mixed, "query head d_head -> query 1 head d_head")
    changed = (mixed - weight * values) / (1 - weight) - mixed
    return einsum(gradient, changed, "query head d_head, query key head d_head -> query key")
