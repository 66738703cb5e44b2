"""Occlusion: what the output loses when a token is replaced, hidden, or passes on nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import one_of
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, mask_keys, must_fire, zero_values
from lens_mix.lens.effort import Passes
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.method import Method
from lens_mix.methods.bound_target import bind_rows
from lens_mix.methods.replacements import Copies, TakesReplacements
from lens_mix.targets import as_target

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

By = Literal["replace", "mask", "values"]
Measure = Literal["difference", "absolute", "kl"]


@dataclasses.dataclass(frozen=True)
class Occlusion(TakesReplacements):
    """What the output at a position loses without a token (Zeiler & Fergus, ECCV 2014; Li et al., 2016).

    score[query, key] = F(x) − F(x without key), F the target at the position of the row, in the target's
    unit; a forward pass per token (times replacements) serves all rows. One map [1, query, key]. A token is
    taken out in one of three ways:

    - "replace": another token stands in its place; the mean over several;
    - "mask": no position attends to it, in any layer, as if the attention mask hid it;
    - "values": its value vectors are zero in every layer: Value Zeroing through the whole stack. The patterns
      above change with what they read; the token is still attended to.

    With "mask" and "values" the token keeps its own residual stream: the diagonal says little. Where nothing
    but itself is left to see, "mask" says 0.

    Args:
        target: what is explained (`lens_mix.targets`, or any callable logits -> [copy]), read at the row's
            position instead of its own; by default the log probability of what the model predicts there.
        by: how the token is taken out.
        replacements: tokens to put in, as text of one token or as numbers; None: `n_samples` drawn from the
            vocabulary without special tokens. A token is never replaced by itself: the next number serves.
        n_samples, seed: how many are drawn, and from where.
        measure: "difference", signed; "absolute", the mean of its size over the replacements; or "kl", the
            divergence KL(p(x) ‖ p(x without key)) of what is predicted at the row, in nats, whatever the
            target.

    Raises:
        TypeError, ValueError: an unknown option; a target or a replacement that does not fit.
    """

    name: ClassVar[str] = "occlusion"
    parts: ClassVar[frozenset[str]] = Method.parts | {"joint"}
    citation: ClassVar[str] = "li-etal-2016-understanding"

    by: By = "replace"
    replacements: Sequence[str | int] | None = None
    n_samples: int = 4
    seed: int = 0
    measure: Measure = "difference"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("by", self.by, ("replace", "mask", "values"))
        one_of("measure", self.measure, ("difference", "absolute", "kl"))
        if self.measure == "kl" and as_target(self.target).reads != "logits":
            raise ValueError(
                "measure: 'kl' compares the model's predictions; expected a target on its logits"
            )
        if self.replacements is not None and self.by != "replace":
            raise ValueError(f"replacements: for by='replace' only, got by={self.by!r}")

    def passes(self, blocks: Sequence[Block]) -> Passes:
        stand_ins = self.n_samples if self.replacements is None else len(self.replacements)
        each = stand_ins if self.by == "replace" else 1
        counts = (each * blocks[0].real_inputs.sum(dim=1)).tolist()
        fewer = "fewer replacements (n_samples) take fewer, and " if each > 1 else ""
        return Passes(counts, f"{each} for each token", f"{fewer}lm.input_map takes about five")

    def of_stack(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        first, last = blocks[0], blocks[-1]
        if first.is_joint and self.by != "replace":
            raise UnsupportedModelError(
                f"by={self.by!r} can't take a source token out of part='joint'; expected by='replace'"
            )
        bound = bind_rows(blocks, self.target)
        scores = first.zeros(len(bound.functions), first.real_inputs.shape[1])
        by_kl = self.measure == "kl"
        clean = bound.distributions() if by_kl else bound.clean
        copies = Copies.of(first, self, replaced=self.by == "replace")
        for chunk in first.chunks(len(copies.prompts), logits=not bound.reads_one_position):
            of_chunk = copies.chunk(chunk)
            batch, pairs = of_chunk.taken_out(self.by, blocks, self.interventions)
            with torch.no_grad(), must_fire(*pairs) as hooks:
                changes = bound.values_by_row(of_chunk.prompts, hooks, batch=batch, distributions=by_kl)
                for row, of_prompt, changed in changes:
                    change = self._change(clean[row], changed)
                    scores[row].index_add_(0, of_chunk.positions[of_prompt], change.to(scores.dtype))
        if self.by == "mask":
            # In any layer, because behind a window or a chunk a row may see more in a higher layer.
            attended = torch.stack([block.with_every_query().attended for block in blocks]).any(0)
            scores[attended.sum(-1)[bound.prompt_index, bound.queries] < 2] = 0
        return [bound.scatter(scores / copies.repeats, last)]

    def interventions(
        self, layer: int, position: int | slice | Tensor, *, attention: str = DEFAULT_ATTENTION
    ) -> list[HookPair]:
        """The hooks that take positions out in one layer, by "mask" or "values". On your run, for column j:

            hooks = [pair for layer in range(model.cfg.n_layers) for pair in method.interventions(layer, j)]
            column = target(model(tokens)) - target(model.run_with_hooks(tokens, fwd_hooks=hooks))

        None for "replace", which changes the tokens. Where a model mixes before its pattern shows, the hooks
        of "mask" raise in the pass; the method then hides the token in the mask of every attention module.

        Args as in `lens_mix.hooks.zero_values`.
        """
        if self.by == "replace":
            return []
        edit = mask_keys if self.by == "mask" else zero_values
        return [edit(layer, position, attention=attention)]

    def _change(self, clean: Tensor, changed: Float[Tensor, " copy *d_vocab"]) -> Float[Tensor, " copy"]:
        if self.measure == "kl":
            return (clean.exp() * (clean - changed)).sum(-1)
        return (clean - changed).abs() if self.measure == "absolute" else clean - changed


def lost_without_key(
    target: Callable[[int | None], Float[Tensor, "sample query"]], n_keys: int
) -> Float[Tensor, "query key"]:
    """F(x) - F(x without key), a key at a time; slow, the oracle of the method.

    `target(key)` is F over each query without that key, once per stand-in; `target(None)` is F(x).
    """
    columns = [target(None) - target(key) for key in range(n_keys)]
    return reduce(torch.stack(columns), "key sample query -> query key", "mean")
