"""One prompt as tensors, and several prompts of different lengths as one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix._inputs.pictures import Picture, is_picture, label_pictures, only_grid

if TYPE_CHECKING:
    from lens_mix.maps.grid import Grid

PaddingSide = Literal["left", "right"]

_TYPES = "token_type_ids"
# Prompts that are grouped by length have at most this share of padding, or at most a few tokens of it.
_MOST_PADDING = 0.1
_FEW_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt, without padding.

    Attributes:
        tokens: The tokens that the first stack reads.
        target: The tokens that the decoder of an encoder-decoder reads. None for other models.
        inputs: Further model inputs by name, each with the shape of `tokens`.
        text: The prompt as the user gave it: a string, a pair of strings or chat messages. None for tokens.
        notes: The notes of its maps.
        pictures: The pictures that a decoder reads beside the tokens.
        picture_inputs: The model inputs of the pictures by name, which have other axes than `tokens`.
        features: The picture or sound that the model reads instead of tokens, which are then all -1. None for
            models that read tokens.
        grid: The places of the positions in the picture or sound. None without one.
        labels: The labels of the positions, instead of the texts of tokens. None for tokens.
    """

    tokens: Int[Tensor, " pos"]
    target: Int[Tensor, " target_pos"] | None = None
    inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    text: Any = None
    notes: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    picture_inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    features: Tensor | None = None
    grid: Grid | None = None
    labels: tuple[str, ...] | None = None

    @property
    def is_picture(self) -> Bool[Tensor, " pos"]:
        """Return which of the tokens stand for patches of pictures."""
        return is_picture(self.pictures, len(self.tokens), self.tokens.device)

    @property
    def pixels(self) -> Tensor | None:
        """Return the pixels of the only picture beside the tokens; None if there is none, or several."""
        if not self.pictures:
            return None
        from lens_mix._inputs.picture_inputs import find_pixels

        return find_pixels(self.pictures, self.picture_inputs)

    def label(self, strings: Sequence[str]) -> list[str]:
        """Return the strings of the tokens, with the labels of patches at their positions."""
        return label_pictures(strings, self.pictures)

    @property
    def input_names(self) -> list[str]:
        """Return the names of the inputs besides the tokens."""
        return sorted({*self.inputs, *self.picture_inputs})

    def keep(self, keeps: Bool[Tensor, " pos"]) -> Prompt:
        """Return the prompt without some of its tokens; a picture without its positions is removed too.

        Raises:
            UnsupportedModelError: If only some positions of a picture remain, or two would become one.
        """
        pictures, picture_inputs = self.pictures, self.picture_inputs
        if pictures:
            from lens_mix._inputs.picture_inputs import check_neighbors, drop_pictures

            pictures, picture_inputs = drop_pictures(self.pictures, self.picture_inputs, keeps)
            if any(name.endswith("token_type_ids") for name in self.inputs):
                check_neighbors(self.pictures, pictures)
        return dataclasses.replace(
            self,
            tokens=self.tokens[keeps],
            inputs={name: value[keeps] for name, value in self.inputs.items()},
            pictures=pictures,
            picture_inputs=picture_inputs,
            grid=only_grid(pictures),
        )

    def without_pictures(self) -> Prompt:
        """Return the text alone, of at least one token."""
        if not self.pictures:
            return self
        keeps = ~self.is_picture
        if not bool(keeps.any()):
            return Prompt(torch.zeros_like(self.tokens[:1]))
        return Prompt(self.tokens[keeps], None, {name: value[keeps] for name, value in self.inputs.items()})


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts that are padded to one length.

    Attributes:
        prompts: The prompts in order.
        tokens: The padded tokens.
        real: Which of the tokens belong to the prompt and are not padding.
        target: The padded tokens that the decoder reads. None without a decoder.
        target_real: Which of the decoder's tokens are not padding. None without a decoder.
        inputs: Further model inputs by name, padded with zeros.
        hidden: The keys of the mapped stack that no query sees, as if they were masked. They still count in
            the numbers of the positions. None if no key is hidden.
        places: For each position of the prompt before tokens were cut out, its place in `tokens`. A token
            that was cut out has the place of the last one that remains before it. None if none was cut out.
        features: The pictures or sounds that the model reads instead of tokens, [example, ...]. None for
            models that read tokens.
    """

    prompts: tuple[Prompt, ...]
    tokens: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]
    target: Int[Tensor, "batch target_pos"] | None
    target_real: Bool[Tensor, "batch target_pos"] | None
    inputs: Mapping[str, Tensor]
    hidden: Bool[Tensor, "batch key"] | None = None
    places: Int[Tensor, "batch whole_pos"] | None = None
    features: Tensor | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, examples: Int[Tensor, " example"]) -> Batch:
        """Return the batch of some of the examples, with their present padding.

        Args:
            examples: The index of each example. An index may occur several times.
        """
        prompts = tuple(self.prompts[example] for example in examples.tolist())
        target = None if self.target is None else self.target[examples]
        target_real = None if self.target_real is None else self.target_real[examples]
        inputs = {name: value[examples] for name, value in self.inputs.items()}
        hidden, places, features = (
            None if tensor is None else tensor[examples]
            for tensor in (self.hidden, self.places, self.features)
        )
        tokens, real = self.tokens[examples], self.real[examples]
        return Batch(prompts, tokens, real, target, target_real, inputs, hidden, places, features)

    def cut(self, removed: Bool[Tensor, "batch pos"]) -> Batch:
        """Return the batch without some tokens; those that remain move together, padded on the right.

        Args:
            removed: The tokens to cut out, not all of an example's.

        Raises:
            UnsupportedModelError: If only some positions of a picture are cut out.
        """
        remaining = self.real & ~removed
        counts = remaining.sum(1)
        # A stable sort keeps the order of the tokens that remain.
        order = (~remaining).long().argsort(dim=1, stable=True)[:, : int(counts.max())]
        return dataclasses.replace(
            self,
            prompts=self._keep(~removed) if self.has_pictures else self.prompts,
            tokens=self.tokens.gather(1, order),
            real=torch.arange(order.shape[1], device=order.device) < counts[:, None],
            inputs={name: value.gather(1, order) for name, value in self.inputs.items()},
            places=(remaining.cumsum(1) - 1).clamp_min(0),
        )

    def _keep(self, keeps: Bool[Tensor, "batch pos"]) -> tuple[Prompt, ...]:
        pairs = zip(self.prompts, keeps, self.real, strict=True)
        return tuple(prompt.keep(kept[real]) for prompt, kept, real in pairs)

    @property
    def has_pictures(self) -> bool:
        """Return whether an example reads pictures beside its tokens."""
        return any(prompt.picture_inputs for prompt in self.prompts)

    @property
    def logits_tokens(self) -> Int[Tensor, "batch pos"]:
        """The tokens of the positions that have logits: the target's, if there is one."""
        return self.tokens if self.target is None else self.target

    @property
    def logits_real(self) -> Bool[Tensor, "batch pos"]:
        """Which positions of the logits are the prompts' own."""
        return self.real if self.target_real is None else self.target_real

    def real_positions(self, part: str) -> Bool[Tensor, "batch pos"]:
        """Return which positions of a part's queries are not padding.

        Raises:
            ValueError: If the part has a decoder's queries, and the prompts have no target.
        """
        if part not in ("decoder", "cross", "joint"):
            return self.real
        if self.target_real is None:
            raise ValueError(f"part={part!r}: expected prompts with a target, got prompts without one")
        return self.target_real

    def real_keys(self, part: str) -> Bool[Tensor, "batch key"]:
        """Return which positions of a part's keys are not padding."""
        return self.real if part == "cross" else self.real_positions(part)


def group_by_length(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Return groups of prompts of similar length, which need little padding.

    Args:
        prompts: The prompts.
        batch_size: The most prompts of a group.

    Returns:
        The indices of the prompts of each group. The group with the first prompt comes first, and so on.
    """
    lengths = [(len(p.tokens), 0 if p.target is None else len(p.target)) for p in prompts]
    groups: list[list[int]] = []
    longest = total = 0
    for index in sorted(range(len(prompts)), key=lambda index: lengths[index], reverse=True):
        length = sum(lengths[index])
        padded = longest * (len(groups[-1]) + 1) if groups else 0
        padding = padded - total - length
        if not padded or len(groups[-1]) == batch_size or padding > max(_FEW_TOKENS, _MOST_PADDING * padded):
            groups.append([])
            longest, total = length, 0
        groups[-1].append(index)
        total += length
    return sorted(sorted(group) for group in groups)


def pad(prompts: Sequence[Prompt], pad_token: int, side: PaddingSide) -> Batch:
    """Return prompts of different lengths as one batch.

    Args:
        prompts: The prompts, at least one.
        pad_token: The token to pad with.
        side: The side of the padding. The target of an encoder-decoder is always padded on the right.

    Raises:
        ValueError: If the prompts do not have the same further inputs.
    """
    sources, target, target_real, min_length = [prompt.tokens for prompt in prompts], None, None, 1
    if prompts[0].target is not None and all(len(source) == 1 for source in sources):
        # For copies of a source of one token, TransformerBridge repeats T5's position bias and then fails.
        min_length, side = 2, "right"
    tokens, real = _pad(sources, pad_token, side, min_length)
    if prompts[0].target is not None:
        # A decoder is causal, so padding on the right cannot affect the target's own positions.
        target, target_real = _pad([p.target for p in prompts if p.target is not None], pad_token, "right")
    names = sorted(set().union(*(prompt.inputs for prompt in prompts)))
    if any(set(names) - set(prompt.inputs) - {_TYPES} for prompt in prompts):
        raise ValueError(f"model inputs: expected {names} for every prompt of a batch, got others for some")
    # In a batch with pairs, a prompt without token types is a single text, and its types are 0.
    given = {name: [p.inputs.get(name, torch.zeros_like(p.tokens)) for p in prompts] for name in names}
    inputs = {name: _pad(values, 0, side, min_length)[0] for name, values in given.items()}
    found = [prompt.features for prompt in prompts if prompt.features is not None]
    features = torch.stack(found) if found else None
    return Batch(tuple(prompts), tokens, real, target, target_real, inputs, features=features)


def _pad(
    sequences: Sequence[Tensor], value: int, side: PaddingSide, min_length: int = 1
) -> tuple[Tensor, Bool[Tensor, "batch pos"]]:
    longest = max(min_length, *(len(sequence) for sequence in sequences))
    padded = sequences[0].new_full((len(sequences), longest), value)
    real = torch.zeros_like(padded, dtype=torch.bool)
    for index, sequence in enumerate(sequences):
        span = slice(longest - len(sequence), longest) if side == "left" else slice(0, len(sequence))
        padded[index, span] = sequence
        real[index, span] = True
    return padded, real
