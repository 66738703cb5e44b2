"""Attribution patching of replaced tokens, with the weights of the softmax worked out anew."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.arguments import one_of
from lens_mix.hooks import must_fire
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.method import Method
from lens_mix.methods import target_passes
from lens_mix.methods.interleaved import Interleaved, Layout, mixed_gradients
from lens_mix.methods.replacements import check_replacements, stand_ins
from lens_mix.methods.row_targets import RowTargets, bind_rows
from lens_mix.targets import TargetLike, as_target, describe, predicted

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class AttributionPatching(Method):
    """What replacing a token would do to the output, from a few passes instead of one per token.

    For every key token j and stand-in token, score[query, key] adds two estimates of the change of the target
    F at the query; the mean over the stand-ins is taken. F is read at the row's position.

    - Direct: |F(the query's token sees j's stand-in, in every layer) - F|, exactly, by one pass over copies
      of the query's token; of the query's own token it is the replacement itself.
    - Between: sqrt(sum_i E[i, j]²) over the positions i between the two, E[i, j] the sum over layers and
      heads of g · dz: g the gradient of F by the head's mixed values z_i, dz their change when the key and
      value of j are its stand-in's (attribution patching with the "QK fix" of AtP*, Kramár et al., 2024,
      arXiv 2403.00745; per edge as in Syed et al., 2023). With p the weight of j, r what it becomes before
      the row is scaled to 1 again, dz = (z - p v_j + r v'_j) / (1 - p + r) - z.

    What j's stand-in has as key and value is exact, as attention is causal: a copy that sees the clean tokens
    before j. g is of a backward pass with changed rules: norms at their scale, the softmax at temperature 2,
    activations and gates by their ratio (`lens_mix.lens.changed_backward`). The sum, the root and the rules
    are this library's choice, made on data: docs/input_map.md has the figures.

    One map [1, query, key], 0 or more, in the target's unit; per row a pass of 3 N tokens for every stand-in,
    and one forward and backward: ask for the rows that you need. Two stand-ins take about nine forwards.

    Args:
        target: what is explained (`lens_mix.targets`, or any callable logits -> [copy]), read at the row's
            position instead of its own; by default the log probability of what the model predicts there.
        replacements: stand-ins, as text of one token or as numbers; None: `n_samples` drawn from the
            vocabulary without special tokens. A token is never its own stand-in: the next number serves.
        n_samples, seed: how many are drawn, and from where.
        paths: "all", or one of the two terms: "direct" or "between".

    Raises:
        TypeError, ValueError: an unknown option; a target or stand-in that does not fit.
        UnsupportedModelError: a model that is not causal, that takes no positions, or whose attention reads
            more than these (a sliding window shorter than three prompts, ALiBi); model inputs besides tokens;
            a target that reads several positions.
    """

    name: ClassVar[str] = "attribution_patching"
    residual: ClassVar[float] = 0.0
    kind: ClassVar[Literal["layer", "input"]] = "input"
    whole_model: ClassVar[bool] = True
    causal_only: ClassVar[bool] = True
    places_tokens: ClassVar[bool] = True
    engines: ClassVar[tuple[str, ...]] = ("hooks",)
    citation: ClassVar[str] = "kramar-etal-2024-atp"

    target: TargetLike = dataclasses.field(default_factory=lambda: predicted(of="log_probability"))
    replacements: Sequence[str | int] | None = None
    n_samples: int = 2
    # Not that of `Occlusion`, the yardstick: a map that is scored must not know the yardstick's tokens.
    seed: int = 1
    paths: Literal["all", "direct", "between"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        as_target(self.target)
        one_of("paths", self.paths, ("all", "direct", "between"))
        check_replacements(self)

    def parameters(self) -> dict[str, object]:
        given = None if self.replacements is None else list(self.replacements)
        return {**super().parameters(), "target": describe(as_target(self.target)), "replacements": given}

    def of_stack(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        bound = bind_rows(blocks, self.target)
        if bound.positions is None:
            raise UnsupportedModelError(
                f"target: expected one that reads a single position, got {describe(bound.target)}, which "
                "reads several"
            )
        rows = bound.first.zeros(len(bound.functions), bound.first.real.shape[1])
        for row in range(len(rows)):
            self._fill(rows[row], blocks, bound, row)
        return [bound.scattered(rows, blocks[-1])]

    def _fill(
        self, scores: Float[Tensor, " pos"], blocks: Sequence[Block], bound: RowTargets, row: int
    ) -> None:
        """One row: its prompt up to the query, in a pass that holds clean tokens, stand-ins and copies."""
        first, prompt = bound.first, int(bound.prompts[row])
        if first.batch.prompts[prompt].inputs:
            raise UnsupportedModelError(
                "model inputs: expected tokens alone, as they are run at repeated positions, got "
                f"{sorted(first.batch.prompts[prompt].inputs)} besides"
            )
        places = first.real[prompt].nonzero()[:, 0]
        places = places[places <= bound.queries[row]]
        tokens = first.tokens[prompt, places]
        others = stand_ins(first, tokens[:, None], self.replacements, self.n_samples, self.seed).T
        layout = Layout.of(len(tokens))
        backward = mixed_gradients(blocks, bound, row, places)
        changes, effects = [], []
        for part in first.chunks(len(others), logits=True, positions=len(layout.positions)):
            hooks = []
            for block in blocks:
                gradient, mixed = backward[block.layer]
                effects_of = functools.partial(patched_effects, gradient)
                hooks.append(Interleaved(block, layout, effects_of, mixed))
            logits = self._run(first, hooks, layout, layout.filled(tokens, others[part]))
            as_prompt = logits[:, None].expand(-1, int(first.real[prompt].sum()), -1)
            changes.append(target_passes.evaluate(bound.functions[row], as_prompt))
            effects.append(torch.stack([hook.effects for hook in hooks]).sum(0))
        changed = torch.cat(changes).unflatten(0, (len(others), -1))
        terms = {
            "direct": (changed - bound.clean[row]).abs().mean(0),
            "between": between_paths(torch.cat(effects)),
        }
        terms["all"] = terms["direct"] + terms["between"]
        scores[places] = terms[self.paths].to(scores.dtype)

    def _run(
        self,
        first: Block,
        hooks: Sequence[Interleaved],
        layout: Layout,
        tokens: Int[Tensor, "copy index"],
    ) -> Float[Tensor, "read d_vocab"]:
        """The logits that the layout reads, copy after copy; the hooks fill themselves."""
        batch = first.placed_batch(tokens, layout.positions.to(tokens.device).expand(len(tokens), -1))
        pairs = [(hook.matches, hook) for hook in hooks]
        try:
            with torch.no_grad(), must_fire(*pairs):
                read = layout.read.expand(len(tokens), -1)
                return first.logits(pairs, batch=batch, positions=read).flatten(0, 1)
        except RuntimeError as problem:
            raise UnsupportedModelError(f"{self.name}: {problem}") from problem


def between_paths(effects: Float[Tensor, "copy query key"]) -> Float[Tensor, " key"]:
    """sqrt(sum_i E[i, j]²) over positions i between j and the last; the mean over stand-ins."""
    return effects.tril(-1)[:, :-1].pow(2).sum(1).sqrt().mean(0)


def patched_effects(
    gradient: Float[Tensor, "query head d_head"],
    pattern: Float[Tensor, "copy head query key"],
    value: Float[Tensor, "copy key head d_head"],
    weight: Float[Tensor, "copy head query key"],
    other: Float[Tensor, "copy key head d_head"],
) -> Float[Tensor, "copy query key"]:
    """g · dz of one layer, summed over heads (the class's docstring).

    Args:
        gradient: g.
        pattern, value: p and v of the clean tokens.
        weight, other: r and v' of their stand-ins.
    """
    axes = "query head d_head, copy key head d_head -> copy head query key"
    sent = pattern * einsum(gradient, value, axes)
    replaced = weight * einsum(gradient, other, axes)
    # What a row lacks of 1 is an attention sink that stands for no key.
    lacking = 1 - pattern.sum(-1, keepdim=True)
    lacking = torch.where(lacking > 1e-3, lacking, 0)
    # Sums over the other keys: 1 - p has no digits left where one key has nearly all of the weight.
    left = (_of_others(pattern) + lacking + weight).clamp_min(torch.finfo(pattern.dtype).tiny)
    return ((_of_others(sent) + replaced) / left - sent.sum(-1, keepdim=True)).sum(1)


def _of_others(x: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
    """For every key, the sum over all others."""
    before = torch.nn.functional.pad(x.cumsum(-1)[..., :-1], (1, 0))
    after = torch.nn.functional.pad(x.flip(-1).cumsum(-1)[..., :-1], (1, 0)).flip(-1)
    return before + after
