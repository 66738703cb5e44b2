"""Removals: ways to take groups of positions (a token, a span, a sentence) out of a model's passes.

A removal replaces the tokens of a group, deletes them, hides them by a mask, or zeroes their value vectors.
Patches of a picture are filled.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from lens_mix._care.precision import relative_error
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._inputs.features import as_features, blurred, covered_cells, mean_of
from lens_mix._inputs.pictures import image_token
from lens_mix._inputs.prompts import vocabulary
from lens_mix.arguments import check_choice, check_items, check_whole_number
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, mask_keys, must_fire, watch_pattern, zero_values
from lens_mix.hooks.base import HookFunction, HookPointLike
from lens_mix.targets import Context

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block
    from lens_mix._inputs.batches import Batch
    from lens_mix.maps.grid import Grid

# The changes of a pass: the copies as another batch (None if they equal their prompts), and hooks.
Changed = tuple["Batch | None", list[HookPair]]


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies of prompts, each without a group of positions; `Removal.make_copies` makes them.

    Attributes:
        prompt_index: For each copy, the index of its prompt in the batch.
        removed: For each copy, which positions of the inputs (`Block.inputs`) are removed, all at once.
        sample: For each copy, the index of its sample of other tokens.
        others: For each sample, the token that replaces each position's if it is removed; the position's own
            token if the removal replaces no tokens.
    """

    prompt_index: Int[Tensor, " copy"]
    removed: Bool[Tensor, "copy input"]
    sample: Int[Tensor, " copy"]
    others: Int[Tensor, "sample batch input"]

    def __len__(self) -> int:
        return len(self.prompt_index)

    @property
    def samples(self) -> int:
        """The number of samples, which is the number of consecutive copies of each group."""
        return len(self.others)

    def at(self, chunk: slice | Bool[Tensor, " copy"]) -> Copies:
        """Return some of the copies."""
        return Copies(self.prompt_index[chunk], self.removed[chunk], self.sample[chunk], self.others)


@dataclasses.dataclass(frozen=True)
class Removal(abc.ABC):
    """How a group of positions of the mapped part is removed from a pass.

        >>> prompt, removal = "The Eiffel Tower is in", lm.evaluation.MaskKeys()
        >>> row = lm.rollout(lm.run(model, prompt, "attention")).scores[-1, -1]
        >>> lm.evaluation.removal_curves(model, prompt, row, removal=removal)

    Class attributes:
        keeps_target: Whether the position that the target reads can't be removed.
    """

    keeps_target: ClassVar[bool] = False

    def make_copies(
        self, block: Block, prompt_index: Int[Tensor, " group"], removed: Bool[Tensor, "group input"]
    ) -> Copies:
        """Return copies without each group, one per group and sample of the removal.

        Args:
            block: The model's first block, as in all methods of this class.
            prompt_index: For each group, the index of its prompt.
            removed: For each group, its positions in the inputs (`Block.inputs`).
        """
        return Copies(prompt_index, removed, torch.zeros_like(prompt_index), _input_tokens(block)[None])

    @abc.abstractmethod
    def changes(self, block: Block, copies: Copies) -> contextlib.AbstractContextManager[Changed]:
        """Yield the batch and the hooks of a pass over copies, and check afterwards that the hooks acted.

        Raises:
            UnsupportedModelError: The model can't be changed in this way.
            RuntimeError: A hook did not act in the pass.
        """

    def interventions(
        self, layer: int, position: int | slice | Tensor, *, attention: str = DEFAULT_ATTENTION
    ) -> list[HookPair]:
        """Return the hooks that remove positions in one layer; none if the removal changes the batch.

        The arguments are those of `lens_mix.hooks.zero_values`.
        """
        return []

    def acts_on(self, block: Block, removed: Bool[Tensor, "group input"]) -> Bool[Tensor, " group"]:
        """Return which groups the removal can change anything of."""
        return removed.any(-1)

    def runs_alone(self, block: Block, removed: Bool[Tensor, "group input"]) -> bool:
        """Return whether the copies without these groups have to run one at a time."""
        return False

    def _every_layer(self, block: Block, removed: Bool[Tensor, "copy input"]) -> list[HookPair]:
        layers = range(len(block.stack))
        pairs = (
            self.interventions(layer, removed, attention=block.stack.attention_template) for layer in layers
        )
        return [pair for of_layer in pairs for pair in of_layer]


class OtherTokens(Removal):
    """The base class of removals by replacement: each removed position gets another token.

    A score is the mean over the samples of other tokens.
    """

    @abc.abstractmethod
    def others(self, block: Block, tokens: Int[Tensor, " pos"]) -> Int[Tensor, "sample pos"]:
        """Return the token that replaces each token of a prompt, for each sample.

        Raises:
            TypeError, ValueError: A given token is not in the model's vocabulary.
        """

    @override
    def make_copies(
        self, block: Block, prompt_index: Int[Tensor, " group"], removed: Bool[Tensor, "group input"]
    ) -> Copies:
        if block.batch.features is not None and block.stack.name != "decoder":
            raise UnsupportedModelError(
                f"{type(self).__name__}: expected a model that reads tokens, got one of pictures or sound; "
                "use FillPatches, MaskKeys or ZeroValues"
            )
        tokens, real = _input_tokens(block), block.real_inputs
        by_prompt = []
        for own, is_own in zip(tokens, real, strict=True):
            others = self.others(block, own[is_own])
            padded = own.repeat(len(others), 1)
            padded[:, is_own] = others
            by_prompt.append(padded)
        others = torch.stack(by_prompt, dim=1)
        sample = torch.arange(len(others), device=prompt_index.device).repeat(len(prompt_index))
        prompt_index, removed = (each.repeat_interleave(len(others), 0) for each in (prompt_index, removed))
        return Copies(prompt_index, removed, sample, others)

    @contextlib.contextmanager
    @override
    def changes(self, block: Block, copies: Copies) -> Iterator[Changed]:
        others = copies.others[copies.sample, copies.prompt_index]
        own = _input_tokens(block)[copies.prompt_index]
        if not block.batch.has_pictures:
            yield _with_tokens(block, copies.prompt_index, torch.where(copies.removed, others, own)), []
            return
        # The model reads as many image tokens as patches, so at a patch the embedding is replaced instead.
        replaced = copies.removed & _patches(block)[copies.prompt_index]
        tokens = torch.where(copies.removed & ~replaced, others, own)
        batch = _with_tokens(block, copies.prompt_index, tokens)
        with must_fire(_replace_embeddings(block, replaced, others)) as hooks:
            yield batch, hooks


@dataclasses.dataclass(frozen=True)
class ReplaceTokens(OtherTokens):
    """Replace every removed token by a given one; with several, each is a sample.

        >>> prompt, removal = "The Eiffel Tower is in", lm.evaluation.ReplaceTokens(" the")
        >>> row = lm.rollout(lm.run(model, prompt, "attention")).scores[-1, -1]
        >>> lm.evaluation.removal_curves(model, prompt, row, removal=removal)

    The prompt remains one that the model can read, but with another meaning. The score measures the
    difference from these tokens, so a token that is as good as its replacement has the score 0.

    Attributes:
        tokens: A token (its text with any leading space, or its number) or several. Each one replaces all
            removed tokens, and the target is averaged over them.
        own: The replacement of a token that is itself the given one: "kept" for the token itself, or "next"
            for the next number of the vocabulary, as in `lens_mix.methods.Occlusion`.
        argument: The name of `tokens` in errors.
    """

    tokens: str | int | Sequence[str | int]
    own: Literal["kept", "next"] = "kept"
    argument: str = dataclasses.field(default="tokens", repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice("own", self.own, ("kept", "next"))
        listed = check_items(self.argument, self.tokens, "tokens", 1, alone=True)
        checked = [
            one if isinstance(one, str) else check_whole_number(self.argument, one, 0) for one in listed
        ]
        object.__setattr__(self, "tokens", tuple(checked))

    @override
    def others(self, block: Block, tokens: Int[Tensor, " pos"]) -> Int[Tensor, "sample pos"]:
        # The context needs only the width of the logits.
        logits = torch.empty(1, _vocabulary_size(block), dtype=torch.float32, device="meta")
        as_target = _is_decoder(block) and not block.stack.is_joint
        context = Context(tokens, logits, block.clean.lens.tokenizer, as_target=as_target)
        listed = [
            context.token_id(one, self.argument) for one in check_items("tokens", self.tokens, "tokens")
        ]
        given = torch.tensor(listed, dtype=torch.long, device=tokens.device)[:, None]
        if block.batch.has_pictures and image_token(block.clean.lens.model) in listed:
            raise ValueError(f"{self.argument}: expected other tokens than the image token, got {listed}")
        if self.own == "kept":
            return given.expand(-1, len(tokens))
        return torch.where(given == tokens, (given + 1) % _vocabulary_size(block), given)


@dataclasses.dataclass(frozen=True)
class SampleTokens(OtherTokens):
    """Replace every removed token by one drawn at random, which depends on the position, not on the group.

        >>> prompt, removal = "The Eiffel Tower is in", lm.evaluation.SampleTokens(samples=2)
        >>> row = lm.rollout(lm.run(model, prompt, "attention")).scores[-1, -1]
        >>> lm.evaluation.removal_curves(model, prompt, row, removal=removal)

    Attributes:
        among: The token numbers to draw from with equal probability; None for the vocabulary without special
            tokens. A position's own token is replaced by the next of these numbers, if there is another.
        samples: The number of draws that the target is averaged over.
        seed: The seed of the draws.
        draw: "per_position" draws a token for each position of each sample, with repetition. "per_sample"
            draws one token for all positions of a sample, and no two samples are equal; there are fewer than
            `samples` if there are fewer tokens. `lens_mix.methods.Occlusion` uses the latter.
    """

    among: Sequence[int] | None = None
    samples: int = 1
    seed: int = 0
    draw: Literal["per_position", "per_sample"] = "per_position"

    def __post_init__(self) -> None:
        check_whole_number("samples", self.samples, 1)
        check_whole_number("seed", self.seed, 0)
        check_choice("draw", self.draw, ("per_position", "per_sample"))
        if self.among is not None:
            listed = check_items("among", self.among, "token numbers", 1)
            object.__setattr__(self, "among", tuple(check_whole_number("among", one, 0) for one in listed))

    @override
    def others(self, block: Block, tokens: Int[Tensor, " pos"]) -> Int[Tensor, "sample pos"]:
        pool = self._pool(block)
        # Drawing on the CPU makes a seed give the same tokens on every device.
        generator = torch.Generator().manual_seed(self.seed)
        if self.draw == "per_sample":
            drawn = torch.randperm(len(pool), generator=generator, device="cpu")[: self.samples, None]
        else:
            shape = (self.samples, len(tokens))
            drawn = torch.randint(len(pool), shape, generator=generator, device="cpu")
        is_own = pool[drawn] == tokens.cpu()
        return pool[(drawn + is_own.long()) % len(pool)].to(tokens.device)

    def _pool(self, block: Block) -> Int[Tensor, " token"]:
        """Return the tokens to draw from, ascending."""
        size = _vocabulary_size(block)
        if self.among is not None:
            checked = [check_whole_number("among", token, 0, size - 1) for token in self.among]
            chosen: Tensor = torch.tensor(checked, dtype=torch.long, device="cpu").unique()
            return chosen
        special = list(getattr(block.clean.lens.tokenizer, "all_special_ids", ()))
        special += [image_token(block.clean.lens.model)] if block.batch.has_pictures else []
        pool = torch.arange(size, device="cpu")
        return pool[~torch.isin(pool, torch.tensor(special, dtype=torch.long, device="cpu"))]


def replacement(tokens: Sequence[str | int] | None, samples: int, seed: int) -> ReplaceTokens | SampleTokens:
    """Return the removal for the arguments `replacements`, `n_samples` and `seed` of a method.

    A token is never replaced by itself, and all positions are replaced by the same tokens.

    Raises:
        TypeError, ValueError: An argument is out of range or of a wrong type.
    """
    check_whole_number("n_samples", samples, 1)
    check_whole_number("seed", seed, 0)
    if tokens is None:
        return SampleTokens(samples=samples, seed=seed, draw="per_sample")
    return ReplaceTokens(tokens, own="next", argument="replacements")


@dataclasses.dataclass(frozen=True)
class FillPatches(Removal):
    """Fill removed patches of a picture, or frames of sound, with other content before the model reads it.

    A group of positions is filled at once. If cells of the grid overlap (AST, HuBERT), a neighbor loses the
    part that it has in common with a removed cell. Positions without a place, such as [CLS], have nothing to
    fill.

    Attributes:
        fill: "mean": the mean of the picture, for each channel, or that of the sound. "blur": the picture or
            sound itself after a Gaussian blur, whose standard deviation is the size of a cell.
    """

    fill: Literal["mean", "blur"] = "mean"

    def __post_init__(self) -> None:
        check_choice("fill", self.fill, ("mean", "blur"))

    @override
    def acts_on(self, block: Block, removed: Bool[Tensor, "group input"]) -> Bool[Tensor, " group"]:
        positions = torch.tensor(self._grid(block).positions, dtype=torch.long, device=removed.device)
        return removed[:, positions].any(-1)

    @contextlib.contextmanager
    @override
    def changes(self, block: Block, copies: Copies) -> Iterator[Changed]:
        batch, grid = block.batch.select(copies.prompt_index), self._grid(block)
        own, originals = batch.features, block.batch.features
        assert own is not None
        assert originals is not None
        covered = as_features(covered_cells(grid, copies.removed), own)
        fills = mean_of if self.fill == "mean" else functools.partial(blurred, grid=grid)
        filled = torch.stack([fills(features) for features in originals])
        features = torch.where(covered, filled[copies.prompt_index], own)
        yield dataclasses.replace(batch, features=features), []

    def _grid(self, block: Block) -> Grid:
        grid = block.batch.prompts[0].grid
        if block.stack.name == "decoder":
            raise UnsupportedModelError(
                "FillPatches: expected a part that reads the sound, got part='decoder', which reads tokens; "
                "use ReplaceTokens, SampleTokens or ZeroValues"
            )
        if grid is None or block.batch.features is None:
            raise UnsupportedModelError(
                "FillPatches: expected a model of pictures or sound, got one that reads tokens; use "
                "ReplaceTokens, SampleTokens, MaskKeys or ZeroValues"
            )
        return grid


@dataclasses.dataclass(frozen=True)
class Drop(Removal):
    """Cut removed positions out of the prompt, so that the remaining tokens are a shorter prompt.

        >>> prompt, removal = "The Eiffel Tower is in", lm.evaluation.Drop()
        >>> row = lm.rollout(lm.run(model, prompt, "attention")).scores[-1, -1]
        >>> lm.evaluation.removal_curves(model, prompt, row, removal=removal)

    In a causal model of one stack the tokens are deleted. In other models, the attention mask hides them like
    padding; the models of TransformerLens that count positions along the mask, which are most, then give the
    remaining tokens the positions of a shorter prompt. The position that the target reads is never removed,
    because its prediction would be that of the token before it. A picture is deleted as a whole.
    """

    keeps_target: ClassVar[bool] = True

    @contextlib.contextmanager
    @override
    def changes(self, block: Block, copies: Copies) -> Iterator[Changed]:
        if _is_decoder(block):
            raise UnsupportedModelError(
                "Drop: the decoder of an encoder-decoder takes no mask; use ReplaceTokens, "
                "SampleTokens or ZeroValues"
            )
        if block.batch.features is not None:
            raise UnsupportedModelError(
                "Drop: expected a model that reads tokens, because pictures and sound have one size; use "
                "FillPatches, MaskKeys or ZeroValues"
            )
        batch = block.batch.select(copies.prompt_index)
        if block.verification.predicts_next and batch.target is None:
            yield batch.cut(copies.removed), []
            return
        remaining = batch.real & ~copies.removed
        leaks: list[float] = []
        note = functools.partial(_note_leak, hidden=copies.removed, remaining=remaining, leaks=leaks)
        layers = range(len(block.stack))
        hooks = [watch_pattern(layer, note, attention=block.stack.attention_template) for layer in layers]
        yield dataclasses.replace(batch, real=remaining), hooks
        # A model that ignores its mask would return the clean output.
        if len(leaks) < len(block.stack) or max(leaks) > 0:
            raise UnsupportedModelError(
                "Drop: expected the attention mask to hide removed positions, got attention to them "
                f"(weight {max(leaks, default=0.0):.1e}); use ReplaceTokens, SampleTokens or ZeroValues"
            )

    @override
    def runs_alone(self, block: Block, removed: Bool[Tensor, "group input"]) -> bool:
        if block.batch.has_pictures:
            # The copies may have different numbers of pictures.
            return True
        # Rotary angles may depend on the number of tokens.
        left = (block.real_inputs & ~removed).sum(-1)
        return block.clean.lens.angles_differ(int(left.min()), int(left.max()))


@dataclasses.dataclass(frozen=True)
class MaskKeys(Removal):
    """Hide removed positions in the attention of every layer: no position attends to them.

        >>> prompt, removal = "The Eiffel Tower is in", lm.evaluation.MaskKeys()
        >>> row = lm.rollout(lm.run(model, prompt, "attention")).scores[-1, -1]
        >>> lm.evaluation.removal_curves(model, prompt, row, removal=removal)

    Nothing else changes: all tokens keep their positions. A removed position keeps its own residual stream.
    The attention of a row that attends to no other key is not changed.
    """

    @contextlib.contextmanager
    @override
    def changes(self, block: Block, copies: Copies) -> Iterator[Changed]:
        if self._acts_on(block):
            with must_fire(*self._every_layer(block, copies.removed)) as hooks:
                yield None, hooks
        else:
            batch = block.batch.select(copies.prompt_index)
            yield dataclasses.replace(batch, hidden=copies.removed), []

    @override
    def interventions(
        self, layer: int, position: int | slice | Tensor, *, attention: str = DEFAULT_ATTENTION
    ) -> list[HookPair]:
        return [mask_keys(layer, position, attention=attention)]

    def _acts_on(self, block: Block) -> bool:
        """Return whether hooks can change the pattern before it mixes; otherwise a mask has to hide keys."""
        pairs = self.interventions(block.layer, 0, attention=block.stack.attention_template)
        try:
            block.replay(block.real.new_zeros(1, dtype=torch.long), pairs)
        except RuntimeError:
            return False
        return True


@dataclasses.dataclass(frozen=True)
class ZeroValues(Removal):
    """Zero the value vectors of removed positions in every layer of the part.

        >>> prompt, removal = "The Eiffel Tower is in", lm.evaluation.ZeroValues()
        >>> row = lm.rollout(lm.run(model, prompt, "attention")).scores[-1, -1]
        >>> lm.evaluation.removal_curves(model, prompt, row, removal=removal)

    They are still attended to, but send zero vectors, and they keep their own residual stream. Patterns are
    not fixed: above the first layer, they change because queries and keys do.
    """

    @contextlib.contextmanager
    @override
    def changes(self, block: Block, copies: Copies) -> Iterator[Changed]:
        with must_fire(*self._every_layer(block, copies.removed)) as hooks:
            yield None, hooks

    @override
    def interventions(
        self, layer: int, position: int | slice | Tensor, *, attention: str = DEFAULT_ATTENTION
    ) -> list[HookPair]:
        return [zero_values(layer, position, attention=attention)]


_NAMED: dict[str, Callable[[], Removal]] = {
    "blur": functools.partial(FillPatches, "blur"),
    "drop": Drop,
    "mask": MaskKeys,
    "mean": FillPatches,
    "sample": SampleTokens,
    "zero_values": ZeroValues,
}


def as_removal(removal: Any) -> Removal:
    """Return a removal as it is, or the one with a given name with its defaults.

    Raises:
        TypeError, ValueError: It is neither a removal nor a name.
    """
    if isinstance(removal, str) and removal in _NAMED:
        return _NAMED[removal]()
    if isinstance(removal, Removal):
        return removal
    expected = f"removal: expected one of {sorted(_NAMED)} or a Removal (ReplaceTokens(' the'), say)"
    error = ValueError if isinstance(removal, str) else TypeError
    raise error(f"{expected}, got {removal!r}")


def each_group(
    real: Bool[Tensor, "batch input"], spans: Sequence[Sequence[Sequence[int]]] | None
) -> tuple[Int[Tensor, " group"], Bool[Tensor, "group input"], Int[Tensor, " group"]]:
    """Return the groups of every prompt: the prompt's index, the group's positions, and its key on the map.

    Args:
        real: The mask of the padded batch's positions that are the prompts' own.
        spans: For each prompt, groups of positions, counted without padding; None for each position as a
            group and key.
    """
    groups = torch.diag_embed(real)
    if spans is not None:
        groups = torch.zeros(len(real), len(spans[0]), real.shape[1], dtype=torch.bool, device=real.device)
        for prompt, is_real in enumerate(real):
            places = is_real.nonzero()[:, 0]
            for key, span in enumerate(spans[prompt]):
                groups[prompt, key, places[list(span)]] = True
    # Without spans, the positions of padding have no group.
    prompt_index, keys = groups.any(-1).nonzero().unbind(-1)
    return prompt_index, groups[prompt_index, keys], keys


def _input_tokens(block: Block) -> Int[Tensor, "batch input"]:
    """Return the tokens at the positions of `Block.inputs`: for the joint part, the source's come first."""
    return torch.cat([block.batch.tokens, block.tokens], 1) if block.stack.is_joint else block.tokens


def _patches(block: Block) -> Bool[Tensor, "batch pos"]:
    """Return which positions of a decoder's prompts stand for patches of pictures."""
    patches = torch.zeros_like(block.real)
    for index, prompt in enumerate(block.batch.prompts):
        patches[index, block.real[index]] = prompt.is_picture
    return patches


class _ReplaceEmbeddings(HookFunction):
    """Replace the input of the first block at some positions of each copy."""

    def __init__(
        self, replaced: Bool[Tensor, "copy pos"], embedded: Float[Tensor, "copy pos d_model"]
    ) -> None:
        self._replaced, self._embedded = replaced, embedded

    @override
    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor:
        self.calls += 1
        return torch.where(self._replaced[..., None], self._embedded.to(tensor), tensor)


def _replace_embeddings(
    block: Block, replaced: Bool[Tensor, "copy pos"], tokens: Int[Tensor, "copy pos"]
) -> HookPair:
    """Return the hook that gives positions the embeddings of other tokens, as the input of the first block.

    Raises:
        UnsupportedModelError: The first block does not read the embeddings of the prompt's own tokens.
    """
    wrapped = block.clean.lens.model.original_model
    with torch.no_grad():
        embed = wrapped.get_input_embeddings()
        text = block.real & ~_patches(block)
        own, read = embed(block.tokens)[text], block.clean.inputs[text]
        if relative_error(own, read) > block.clean.lens.tolerance:
            raise UnsupportedModelError(
                "pictures: expected a first block that reads the embeddings of tokens, to replace patches by "
                "them, got other inputs; use by='mask' or by='values'"
            )
        embedded = embed(tokens)

    return f"{block.stack.template.format(layer=0)}.hook_resid_pre", _ReplaceEmbeddings(replaced, embedded)


def _with_tokens(
    block: Block, prompt_index: Int[Tensor, " copy"], tokens: Int[Tensor, "copy input"]
) -> Batch:
    """Return copies of prompts with other tokens at the positions of `Block.inputs`."""
    batch = block.batch.select(prompt_index)
    if block.stack.is_joint:
        source, target = tokens.split([batch.tokens.shape[1], block.tokens.shape[1]], dim=1)
        return dataclasses.replace(batch, tokens=source, target=target)
    if block.stack.reads_target:
        return dataclasses.replace(batch, target=tokens)
    return dataclasses.replace(batch, tokens=tokens)


def _vocabulary_size(block: Block) -> int:
    """Return the number of tokens on the mapped side of the model; for the joint part, on both sides."""
    side = "target" if block.stack.reads_target else "prompt"
    sides = ("prompt", "target") if block.stack.is_joint else (side,)
    return min(vocabulary(block.clean.lens.model, name) for name in sides)


def _is_decoder(block: Block) -> bool:
    """Return whether the mapped part is the decoder of an encoder-decoder."""
    return block.batch.target is not None and block.stack.reads_target


def _note_leak(
    pattern: Float[Tensor, "copy head query key"],
    hidden: Bool[Tensor, "copy key"],
    remaining: Bool[Tensor, "copy query"],
    leaks: list[float],
) -> None:
    """Append the largest weight of a remaining position on a hidden one."""
    is_leak = remaining[:, :, None] & hidden[:, None, :]
    leaks.append(float(pattern.abs().amax(1).masked_fill(~is_leak, 0).max()))
