"""Attribution patching of replaced tokens, with the weights of the softmax worked out anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.arguments import one_of, several, whole_number
from lens_mix.hooks import AttentionHook, HookPair, must_fire
from lens_mix.hooks.mask import shared_out_anew
from lens_mix.hooks.mixing import mix, tolerance
from lens_mix.lens.changed_backward import Rules
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.replay import relative_error
from lens_mix.method import Method
from lens_mix.methods import target_passes
from lens_mix.methods.replacements import stand_ins
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
        whole_number("n_samples", self.n_samples, 1)
        whole_number("seed", self.seed, 0)
        if self.replacements is not None:
            tokens = several("replacements", self.replacements, "tokens", least=1)
            object.__setattr__(self, "replacements", tuple(tokens))

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
        backward = _mixed_gradients(blocks, bound, row, places)
        changes, effects = [], []
        for part in first.chunks(len(others), logits=True, positions=len(layout.positions)):
            hooks = [_Interleaved(block, layout, *backward[block.layer]) for block in blocks]
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
        hooks: Sequence[_Interleaved],
        layout: Layout,
        tokens: Int[Tensor, "copy index"],
    ) -> Float[Tensor, "read d_vocab"]:
        """The logits that the layout reads, copy after copy; the hooks fill themselves."""
        batch = first.placed_batch(tokens, layout.positions.to(tokens.device).expand(len(tokens), -1))
        pairs = [(hook.matches, hook) for hook in hooks]
        try:
            with torch.no_grad(), must_fire(*pairs):
                return first.logits(pairs, batch=batch)[:, layout.read].flatten(0, 1)
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


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where what stands in a pass over a prompt: [t_0, s_0, t_1, s_1, ...], then copies of the last token.

    A stand-in s_j sees the clean tokens before j and itself; copy j of the last token sees s_j, not t_j.

    Attributes:
        clean, replaced: the indices of the tokens and their stand-ins.
        read: the indices of which the logits count: the copies, then the last stand-in.
        positions: the position of each index.
        allowed: which others each index may see.
    """

    clean: Int[Tensor, " pos"]
    replaced: Int[Tensor, " pos"]
    read: Int[Tensor, " pos"]
    positions: Int[Tensor, " index"]
    allowed: Bool[Tensor, "index index"]

    @classmethod
    def of(cls, count: int) -> Layout:
        """The layout of a prompt of so many tokens."""
        clean, last = 2 * torch.arange(count), 2 * count + torch.arange(count - 1)
        replaced = clean + 1
        positions = torch.cat([torch.arange(count).repeat_interleave(2), torch.full_like(last, count - 1)])
        allowed = torch.eye(len(positions), dtype=torch.bool)
        earlier = torch.ones(count, count, dtype=torch.bool).tril(-1)
        for index in (clean, replaced):
            allowed[index[:, None], clean] |= earlier
        allowed[last[:, None], clean[:-1]] = ~torch.eye(count - 1, dtype=torch.bool)
        allowed[last, replaced[:-1]] = True
        return cls(clean, replaced, torch.cat([last, replaced[-1:]]), positions, allowed)

    def filled(
        self, tokens: Int[Tensor, " pos"], others: Int[Tensor, "copy pos"]
    ) -> Int[Tensor, "copy index"]:
        """The tokens of the pass, a row per stand-in."""
        filled = tokens[self.positions.to(tokens.device)].repeat(len(others), 1)
        filled[:, self.replaced] = others
        return filled


def _mixed_gradients(
    blocks: Sequence[Block], bound: RowTargets, row: int, places: Int[Tensor, " pos"]
) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer: the gradient of a row's target by z under the changed rules, and z; [query head d_head]."""
    written = all(block.anatomy.is_written_down for block in blocks)
    # The softmax at temperature 2 has a derivative of half its size.
    rules = Rules(temperature=2.0, scores=0.5, activations="ratio" if written else "gradient")
    keepers = {block.layer: _KeepGradient(block.layer, block.attention_template) for block in blocks}
    index = torch.tensor([row], device=bound.prompts.device)
    x = bound.first.whole_resid_pre[bound.prompts[index]].detach().requires_grad_(True)
    changed = bound.first.changed_backward(rules, blocks[1:], logits=bound.target.reads == "logits")
    pairs: list[HookPair] = [(keeper.matches, keeper) for keeper in keepers.values()]
    with torch.enable_grad(), changed:
        values = bound.values(index, pairs, resid_pre=x, gradients=True)
        target_passes.gradients_of(values, [x])
    kept = {}
    for layer, keeper in keepers.items():
        if keeper.gradient is None or keeper.mixed is None:
            raise UnsupportedModelError(f"hooks: no gradient came back to {keeper.module}.hook_z")
        kept[layer] = (_wide(keeper.gradient[0, places]), _wide(keeper.mixed[0, places]))
    return kept


class _KeepGradient(AttentionHook):
    """Keeps z and the gradient that comes back to it."""

    points = ("values", "mixed")
    gradient: Tensor | None = None
    mixed: Tensor | None = None

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor | None:
        if not (torch.is_grad_enabled() and mixed.requires_grad):
            return None
        self.mixed = mixed.detach()
        mixed.register_hook(self._keep)
        self.calls += 1
        # The pass goes on from what was looked at, or no gradient comes back to it.
        return mixed

    def _keep(self, gradient: Tensor) -> None:
        self.gradient = gradient.detach()


class _Interleaved(AttentionHook):
    """Lets each index see what its layout allows, and reads the effects of the stand-ins off one layer."""

    points = ("values", "pattern", "mixed")
    effects: Float[Tensor, "copy query key"]

    def __init__(self, block: Block, layout: Layout, gradient: Tensor, mixed: Tensor) -> None:
        super().__init__(block.layer, block.attention_template)
        self._layout, self._gradient, self._clean = layout, gradient, mixed

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        layout = self._layout
        allowed = layout.allowed.to(mixed.device)
        shared = shared_out_anew(self, "stand-ins", mixed, values, pattern, allowed)
        edited = mix(shared, values)
        self._refuse_unlike(edited[:, layout.clean])
        assert pattern is not None
        kept = (pattern * allowed).sum(-1, keepdim=True)
        scale = shared.sum(-1, keepdim=True) / kept.clamp_min(torch.finfo(kept.dtype).tiny)
        rows, clean, other = layout.clean[:, None], layout.clean, layout.replaced
        n = pattern.shape[1] // values.shape[2]
        each = repeat(values, "copy key head d_head -> copy key (head n) d_head", n=n)
        # No token reads a stand-in of a later one.
        weight = (pattern * scale)[:, :, rows, other].tril(-1)
        self.effects = patched_effects(
            self._gradient,
            _wide(shared[:, :, rows, clean]),
            _wide(each[:, clean]),
            _wide(weight),
            _wide(each[:, other]),
        )
        self.calls += 1
        return edited

    def _refuse_unlike(self, found: Float[Tensor, "copy query head d_head"]) -> None:
        """The clean tokens have to be what they are in the clean pass."""
        error = relative_error(_wide(found).flatten(-2), self._clean.expand_as(found).flatten(-2))
        # What whole passes round differently, every block on the way makes larger.
        if not error <= max(1e-3, tolerance(found.dtype)):
            raise RuntimeError(
                "expected attention to read tokens and their positions alone, so that a prompt can be run "
                "beside its stand-ins; got other mixed values for the same tokens (a sliding window shorter "
                "than three prompts, or positions that are counted instead of taken, as with ALiBi?)"
            )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
