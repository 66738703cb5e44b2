"""Which keys each query may see: measured in the clean pass, and not read from the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._inputs.rows import rows_at
from lens_mix._passes.clean_pass import CleanPass
from lens_mix.hooks.recording import record

_CHUNK_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class AllowedKeys:
    """Which keys each computed row of a padded batch may see, in some layers.

    Attributes:
        by_layer: The mask of each layer.
        positions: The positions of the rows in the padded batch.
        causal_model: Whether the verification found the model causal. A few rows cannot show this.
        rounding: The eps of the coarsest dtype that the model computes in.
        cross: Whether the keys are positions of another sequence, so that no key is later than a query.
    """

    by_layer: dict[int, Bool[Tensor, "batch query key"]]
    positions: Int[Tensor, "batch query"]
    causal_model: bool
    rounding: float
    cross: bool = False

    def reaching(self) -> AllowedKeys:
        """Return which input tokens can affect each query up to each layer, for input maps.

        This needs all rows of all layers, from the first layer on.
        """
        first = self.by_layer[0]
        own = torch.eye(first.shape[-1], device=first.device, dtype=torch.bool)
        distinct = list({id(mask): mask for mask in self.by_layer.values()}.values())
        # More than this cannot be reached, so the products, which take long, end there.
        most = torch.ones_like(own)
        most = most.tril() if not any(bool(mask.triu(1).any()) for mask in distinct) else most
        reached, layers = own.expand_as(first), {}
        for layer in sorted(self.by_layer):
            seen = self.by_layer[layer] | own
            if bool((seen | ~most).all()):
                reached = most.expand_as(first)
            elif not bool((reached | ~most).all()):
                # torch has no matrix product of booleans.
                reached = (seen.float() @ reached.float()) > 0
            layers[layer] = reached
        return dataclasses.replace(self, by_layer=layers)

    def of_prompt(self, index: int, rows: Tensor, keys: Tensor, layers: Sequence[int]) -> PromptMask:
        """Return which of one prompt's keys its rows may see.

        Args:
            index: The index of the prompt in the batch.
            rows: The indices of its rows in `positions`.
            keys: The positions of its keys in the padded batch.
            layers: The layers, in the order of the result.
        """
        masks = [self.by_layer[layer] for layer in layers]
        # Layers with equal masks have one tensor in common, which need not be copied once for each of them.
        masks = masks[:1] if all(mask is masks[0] for mask in masks) else masks
        allowed = torch.stack([mask[index][rows][:, keys] for mask in masks])
        positions = self.positions[index][rows]
        return PromptMask(allowed, positions, keys, self.causal_model, self.rounding, self.cross)


@dataclasses.dataclass(frozen=True)
class PromptMask:
    """Which of one prompt's keys its rows may see.

    Attributes:
        allowed: The mask of each layer, or one mask for all layers.
        positions: The positions of the rows in the padded batch.
        keys: The positions of the keys in the padded batch.
        causal_model: As in `AllowedKeys`.
        rounding: As in `AllowedKeys`.
        cross: As in `AllowedKeys`.
    """

    allowed: Bool[Tensor, "#layer query key"]
    positions: Int[Tensor, " query"]
    keys: Int[Tensor, " key"]
    causal_model: bool
    rounding: float
    cross: bool = False

    def with_rows(self, others: PromptMask) -> PromptMask:
        """Return this mask with the keys that other rows may see; in a causal model, up to each row."""
        seen = others.allowed.any(1, keepdim=True)
        seen = seen & (self.keys <= self.positions[:, None]) if self.causal_model else seen
        return dataclasses.replace(self, allowed=self.allowed | seen)

    def with_own_key(self) -> PromptMask:
        """Return this mask with one more key at the end, which every row may see."""
        allowed = torch.cat([self.allowed, torch.ones_like(self.allowed[..., :1])], dim=-1)
        return dataclasses.replace(self, allowed=allowed, keys=torch.cat([self.keys, self.keys[-1:] + 1]))

    def with_source(self, count: int) -> PromptMask:
        """Return this mask with the keys of a source of `count` tokens first, which every row may see."""
        source = self.allowed.new_ones(*self.allowed.shape[:2], count)
        keys = torch.arange(count + len(self.keys), device=self.keys.device)
        return dataclasses.replace(self, allowed=torch.cat([source, self.allowed], -1), keys=keys, cross=True)

    def causal_and_mask(self) -> tuple[bool, Bool[Tensor, "*layer query key"] | None]:
        """Return whether the prompt's attention is causal, and its mask if it has other gaps.

        Returns:
            (causal, mask). The mask is None if each query sees all keys, or, in a causal model, all keys up
            to itself. Else its shape is [query, key], or [layer, query, key] if the layers differ.
        """
        layers = self.allowed.cpu()
        mask = layers[0] if bool((layers == layers[0]).all()) else layers
        triangle = (self.keys <= self.positions[:, None]).cpu()
        # A map of one token, or of some rows only, may look causal in any model.
        every_row = len(self.positions) == len(self.keys)
        causal = not self.cross and len(self.keys) > 1 and not bool((layers & ~triangle).any())
        causal = causal and (every_row or self.causal_model)
        complete = bool(layers.all()) or (causal and bool((layers == triangle).all()))
        return causal, None if complete else mask

    def without_rounding(
        self,
        scores: Float[Tensor, "layer *head query key"],
        groups: Sequence[Sequence[int]] | None,
        accepted: float = 0.0,
    ) -> Float[Tensor, "layer *head query key"]:
        """Set the scores of the keys that a query does not see to exact zeros, and return the scores.

        A replay of several copies rounds differently from the clean pass. A score is then 1e-16, for example,
        although the definition says 0. A larger score has another cause, and is an error.

        Args:
            scores: The prompt's maps, which are changed in place.
            groups: The group of positions of each key. None: each key is one position.
            accepted: The largest accepted rounding error, relative to the largest score. At least 100 units
                in the last place are always accepted, which is enough for a map of one block.

        Raises:
            UnsupportedModelError: If a masked key has an effect.
        """
        hidden = ~self.allowed
        if groups is not None:
            # A group is hidden only if none of its positions can be seen.
            hidden = torch.stack([hidden[:, :, list(group)].all(dim=-1) for group in groups], dim=-1)
        if not bool(hidden.any()):
            return scores
        hidden = hidden[:, None] if scores.ndim == 4 else hidden
        # As many layers at a time as need little memory.
        step = max(1, _CHUNK_BYTES // scores[0].nbytes)
        hidden_chunks = hidden.expand(len(scores), *hidden.shape[1:]).split(step)
        chunks = zip(scores.split(step), hidden_chunks, strict=True)
        largest = float(torch.stack([torch.where(mask, part, 0).abs().max() for part, mask in chunks]).max())
        if largest == 0:
            return scores
        whole = max(map(abs, torch.stack(scores.aminmax()).tolist()))
        # Small scores are often differences of numbers near 1, whose rounding is measured against 1.
        if largest > max(accepted, 100 * self.rounding) * max(1.0, whole):
            raise UnsupportedModelError(
                f"a key that the attention mask hides has a score of {largest:.1e} (expected 0): "
                "the model mixes tokens in another way than by attention, or the method computes scores of "
                "keys that `block.attended` excludes"
            )
        return scores.masked_fill_(hidden, 0)


def allowed_keys(clean: CleanPass, causal_model: bool) -> AllowedKeys:
    """Return the keys that can get weight, in each layer whose pattern was recorded.

    A weight other than 0 shows that a key is allowed. A weight of exactly 0 may be a masked key, or a softmax
    that underflowed. To distinguish them, a block is replayed with zero queries, so that its scores are only
    the position bias: a key that then gets no weight from any head is masked. The replay is not needed if
    each query attends to all keys, or to all keys up to itself.

    Args:
        clean: The clean pass.
        causal_model: Whether the verification found the model causal.
    """
    batch, length = clean.real.shape
    places = torch.arange(length, device=clean.real.device)
    positions = places.expand(batch, length) if clean.rows is None else clean.rows.positions
    real_pairs = clean.real_rows[:, :, None] & clean.real_keys[:, None, :]
    # In cross-attention the keys are another sequence, so no key is later than a query.
    cross = clean.lens.stack.is_cross
    triangle = torch.ones_like(real_pairs) if cross else places <= positions[:, :, None]
    layers = {}
    complete: Tensor | None = None
    for layer, attended in clean.attended.items():
        # Neighboring layers with equal masks have one tensor in common.
        if attended is not complete:
            attended_pairs = attended & real_pairs
            is_complete = attended_pairs.equal(real_pairs) or attended_pairs.equal(real_pairs & triangle)
            if is_complete or clean.fused is not None:
                # Fused attention has shown its mask, and not which keys got weight.
                complete = attended
            else:
                attended = attended | rows_at(_attended_without_queries(clean, layer), positions)
        layers[layer] = attended
    # Hugging Face computes some patterns and norms in float32 even in float64 models (GPT-Neo, GPT-J).
    rounding = max(torch.finfo(clean.lens.dtype).eps, torch.finfo(torch.float32).eps)
    return AllowedKeys(layers, positions, causal_model, rounding, cross)


def _attended_without_queries(clean: CleanPass, layer: int) -> Bool[Tensor, "batch query key"]:
    from lens_mix.hooks.vectors import zero_queries

    stack = clean.lens.stack
    store: dict[str, Tensor] = {}
    name = stack.hook_name("pattern", layer)
    clean.replay(layer).run([zero_queries(layer, attention=stack.attention_template), record(store, name)])
    return (store[name] != 0).any(dim=1)


def padding_leaks(clean: CleanPass) -> list[int]:
    """Return the watched layers in which a prompt's own position has weight on padding."""
    hidden = clean.real_rows[:, :, None] & ~clean.real_keys[:, None, :]
    return [layer for layer, attended in clean.attended.items() if bool((attended & hidden).any())]
