"""Occlusion: the change of a target when a token, or a group of tokens, is removed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._blocks.cost import Cost, Growth
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix.arguments import check_choice, check_items
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair
from lens_mix.maps.spans import Group, Groups, check_groups, read_groups
from lens_mix.method import Method
from lens_mix.methods.bound_target import RowTargetMethod, bind_rows
from lens_mix.removal import FillPatches, MaskKeys, Removal, ZeroValues, each_group, replacement
from lens_mix.targets import as_target

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block

By = Literal["replace", "mask", "values", "mean", "blur"]
Measure = Literal["difference", "absolute", "kl"]


@dataclasses.dataclass(frozen=True)
class Occlusion(RowTargetMethod):
    """Measure the change of a target without each token (Zeiler & Fergus, ECCV 2014; Li et al., 2016).

        score[query, key] = F(x) − F(x without key)

    F is the target at the row's position. Scores are in the target's unit. There is one map of the whole
    model, [1, query, key]. It needs one forward pass per token (and replacement) for all rows. For tokens
    there are three removals:

    - "replace": the token is replaced by another one, and scores are means over several replacements;
    - "mask": no position attends to the token, in any layer, as if the attention mask hid it;
    - "values": its value vectors are zero in every layer, which is Value Zeroing of the whole model. The
      token is still attended to, and the patterns of higher layers change.

    For pictures and sound, two removals fill a patch or a frame (`lens_mix.removal.FillPatches`):

    - "mean": with the mean of the picture or sound;
    - "blur": with what a Gaussian blur makes of it.

    Positions without a place, such as [CLS], then have the score 0.

    With "mask" and "values" the token keeps its own residual stream, so the diagonal means little. For a row
    that attends to itself only, the scores of "mask" are 0.

        >>> method = lm.methods.Occlusion(spans=[" Eiffel Tower", " the city"])
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-1]).top(3)

    Args:
        target: The target (the text of a token, one of `lens_mix.targets`, or any callable logits -> [copy]),
            read at the row's position; by default the log probability of the model's prediction there.
        against: A token with which that of the target is contrasted (`lens_mix.targets`). None: no contrast.
        by: The removal.
        replacements: The replacing tokens, as texts of one token or as numbers; None to draw `n_samples` from
            the vocabulary without special tokens. A token that is its own replacement is replaced by the next
            number.
        n_samples: The number of tokens to draw.
        seed: The seed of the draws.
        spans: Groups of positions that are removed together, such as phrases or sentences. The key axis then
            has the groups. Each is a text of the prompt (" Eiffel Tower"), a slice, or a list of positions:
            [" Eiffel Tower", (6, 7)]. A dict names them: {"the subject": " Eiffel Tower"}. Positions in no
            group are never removed.
        measure: "difference", with its sign; "absolute", the mean of its absolute value over the
            replacements; or "kl", the divergence KL(p(x) ‖ p(x without key)) of the prediction at the row, in
            nats, which does not use the target.

    Raises:
        TypeError: An option has a wrong type.
        ValueError: An option is unknown, a target or a replacement is unsuitable, or the prompt does not have
            a position.
        UnsupportedModelError: The model, or its part, does not allow the removal.
    """

    name: ClassVar[str] = "occlusion"
    description: ClassVar[str] = "how much the answer's score falls if a token is replaced, measured"
    place_in_list: ClassVar[int] = 5
    parts: ClassVar[frozenset[str]] = Method.parts | {"joint"}
    cost_grows_with: ClassVar[Growth] = "tokens"
    citation: ClassVar[str] = "li-etal-2016-understanding"

    by: By = "replace"
    replacements: Sequence[str | int] | None = None
    n_samples: int = 4
    seed: int = 0
    measure: Measure = "difference"
    spans: Groups | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replacements is not None:
            listed = check_items("replacements", self.replacements, "tokens", least=1)
            object.__setattr__(self, "replacements", listed)
        replacement(self.replacements, self.n_samples, self.seed)
        if self.spans is not None:
            object.__setattr__(self, "spans", check_groups("spans", self.spans))
        check_choice("by", self.by, get_args(By))
        check_choice("measure", self.measure, ("difference", "absolute", "kl"))
        if self.measure == "kl" and as_target(self.target).reads != "logits":
            raise ValueError(
                "measure: 'kl' compares the model's predictions; expected a target on its logits"
            )
        if self.replacements is not None and self.by != "replace":
            raise ValueError(f"replacements: for by='replace' only, got by={self.by!r}")

    @property
    def needs_tokens(self) -> str | None:
        """Why the method can't explain pictures and sound; None if it can."""
        if self.by != "replace":
            return None
        return "it replaces tokens, and pictures and sound have none; write lm.methods.Occlusion(by='mean')"

    @override
    def key_groups(self, tokens: Sequence[str]) -> list[Group] | None:
        return None if self.spans is None else read_groups(tokens, self.spans, "spans")

    @override
    def scale_cost(self, cost: Cost, blocks: Sequence[Block]) -> Cost:
        samples = self.n_samples if self.replacements is None else len(self.replacements)
        cost = cost.times((samples if self.by == "replace" else 1) / Occlusion.n_samples)
        if self.spans is None:
            return cost
        # One pass for each span is enough, however many tokens there are.
        return cost._replace(base=cost.base + cost.per_token * len(self.spans), per_token=0.0)

    @override
    def of_blocks(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        first, last = blocks[0], blocks[-1]
        if first.stack.is_joint and self.by != "replace":
            raise UnsupportedModelError(
                f"by={self.by!r} can't remove a source token from part='joint'; expected by='replace'"
            )
        bound = bind_rows(blocks, self.target)
        by_kl = self.measure == "kl"
        clean = bound.distributions() if by_kl else bound.clean
        groups = each_group(first.real_inputs, first.key_positions)
        acts = self._removal.acts_on(first, groups[1])
        prompt_index, removed, keys = (each[acts] for each in groups)
        copies = self._removal.make_copies(first, prompt_index, removed)
        # A key has one copy of its prompt for each replacement.
        keys = keys.repeat_interleave(copies.samples)
        scores = first.zeros(len(clean), removed.shape[1] if self.spans is None else len(self.spans))
        for chunk in first.chunks(len(copies), logits=not bound.reads_one_position):
            some, of_chunk = copies.at(chunk), keys[chunk]
            with torch.no_grad(), self._removal.changes(first, some) as (batch, hooks):
                changes = bound.values_by_row(some.prompt_index, hooks, batch=batch, distributions=by_kl)
                for row, of_prompt, changed in changes:
                    change = self._change(clean[row], changed)
                    scores[row].index_add_(0, of_chunk[of_prompt], change.to(scores.dtype))
        if self.by == "mask":
            # Any layer counts, because layers with attention windows may attend to fewer keys than others.
            attended = torch.stack([block.with_every_query().attended for block in blocks]).any(0)
            # Nothing remains without the only key that a query sees, so its removal has no meaning.
            scores[attended.sum(-1)[bound.prompt_index, bound.queries] < 2] = 0
        return [bound.scatter(scores / copies.samples, last)]

    def interventions(
        self, layer: int, position: int | slice | Tensor, *, attention: str = DEFAULT_ATTENTION
    ) -> list[HookPair]:
        """Return the hooks that remove positions in one layer, by "mask" or "values".

        In your own run, the scores of key j are:

            hooks = [pair for layer in range(model.cfg.n_layers) for pair in method.interventions(layer, j)]
            scores = target(model(tokens)) - target(model.run_with_hooks(tokens, fwd_hooks=hooks))

        There are no hooks for "replace", "mean" and "blur", which change the model's input. If a model
        computes the mixed values before the hook on its pattern, the hooks of "mask" raise an error in the
        pass. The method then hides the token in the mask of every attention module.

        The arguments are those of `lens_mix.hooks.zero_values`.
        """
        return self._removal.interventions(layer, position, attention=attention)

    @property
    def _removal(self) -> Removal:
        if self.by == "replace":
            return replacement(self.replacements, self.n_samples, self.seed)
        if self.by in ("mean", "blur"):
            return FillPatches(self.by)
        return MaskKeys() if self.by == "mask" else ZeroValues()

    def _change(self, clean: Tensor, changed: Float[Tensor, " copy *d_vocab"]) -> Float[Tensor, " copy"]:
        if self.measure == "kl":
            return (clean.exp() * (clean - changed)).sum(-1)
        return (clean - changed).abs() if self.measure == "absolute" else clean - changed


def lost_without_key(
    target: Callable[[int | None], Float[Tensor, "sample query"]], n_keys: int
) -> Float[Tensor, "query key"]:
    """Return F(x) - F(x without key), computed key by key: the slow definition that tests compare with.

    Args:
        target: Returns F at each query without a key, once per replacement; for None, F(x).
        n_keys: The number of keys.
    """
    differences = [target(None) - target(key) for key in range(n_keys)]
    return reduce(torch.stack(differences), "key sample query -> query key", "mean")
