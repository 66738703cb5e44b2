"""Which keys each query may see, measured on the model rather than read off its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.hooks import record, zero_queries
from lens_mix.lens.clean_pass import CleanPass
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.rows import rows_at


@dataclasses.dataclass(frozen=True)
class AllowedKeys:
    """Which keys each asked row of a padded batch may see, in some layers.

    Attributes:
        by_layer: layer -> mask.
        positions: of the rows, in the batch.
        causal_model: whether the model was verified to be causal, which a few rows alone can't tell.
        rounding: eps of the coarsest dtype that the model computes in.
        cross: whether keys are places in another sequence, so that none is later than a query.
    """

    by_layer: dict[int, Bool[Tensor, "batch query key"]]
    positions: Int[Tensor, "batch query"]
    causal_model: bool
    rounding: float
    cross: bool = False

    def reaching(self) -> AllowedKeys:
        """The same for maps down to the input: which inputs can have reached each query by each layer.

        All layers from the first on have to be here, with all their rows.
        """
        first = self.by_layer[0]
        identity = torch.eye(first.shape[-1], device=first.device, dtype=torch.float32)
        reached, layers = identity, {}
        for layer in sorted(self.by_layer):
            # Floats: torch has no product of booleans.
            reached = (((self.by_layer[layer].float() + identity) @ reached) > 0).float()
            layers[layer] = reached > 0
        return dataclasses.replace(self, by_layer=layers)

    def of_prompt(self, index: int, rows: Tensor, keys: Tensor, layers: Sequence[int]) -> PromptMask:
        """What one prompt's rows may see of its own keys.

        Args:
            index: which prompt of the batch.
            rows: places of its rows among `positions`.
            keys: its own positions in the batch.
            layers: which layers, in the order wanted.
        """
        allowed = torch.stack([self.by_layer[layer][index][rows][:, keys] for layer in layers])
        positions = self.positions[index][rows]
        return PromptMask(allowed, positions, keys, self.causal_model, self.rounding, self.cross)


@dataclasses.dataclass(frozen=True)
class PromptMask:
    """Which of one prompt's keys its rows may see (see `AllowedKeys`)."""

    allowed: Bool[Tensor, "layer query key"]
    positions: Int[Tensor, " query"]
    keys: Int[Tensor, " key"]
    causal_model: bool
    rounding: float
    cross: bool = False

    def with_own_key(self) -> PromptMask:
        """The same with one key more, which every row may see."""
        allowed = torch.cat([self.allowed, torch.ones_like(self.allowed[..., :1])], dim=-1)
        return dataclasses.replace(self, allowed=allowed, keys=torch.cat([self.keys, self.keys[-1:] + 1]))

    def with_source(self, count: int) -> PromptMask:
        """The same with the places of a source before its keys, which every row may see."""
        source = self.allowed.new_ones(*self.allowed.shape[:2], count)
        keys = torch.arange(count + len(self.keys), device=self.keys.device)
        return dataclasses.replace(self, allowed=torch.cat([source, self.allowed], -1), keys=keys, cross=True)

    def causal_and_mask(self) -> tuple[bool, Bool[Tensor, "*layer query key"] | None]:
        """Whether the prompt's attention is causal, and its mask where a triangle does not say it all.

        Returns:
            (causal, mask): mask None when every layer sees everything (not causal) or everything up to
            itself (causal); else bool [query, key], or [layer, query, key] where layers differ.
        """
        layers = self.allowed.cpu()
        mask = layers[0] if bool((layers == layers[0]).all()) else layers
        triangle = (self.keys <= self.positions[:, None]).cpu()
        # A map of one token, or of some rows, may look causal in any model.
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
        """The prompt's scores with exact zeros where the query can't see the key.

        A block that is run in copies rounds differently from the clean pass, which leaves 1e-16 where the
        definition gives 0. More than rounding there means that something else leaked: refused.

        Args:
            scores: the prompt's maps.
            groups: what the keys stand for; None: the positions.
            accepted: what passes for rounding, relative to the largest score; at least 100 units of the last
                place, which a map of one block keeps to.

        Raises:
            UnsupportedModelError: a key that is masked has an effect.
        """
        hidden = ~self.allowed
        if groups is not None:
            hidden = torch.stack([hidden[:, :, list(group)].all(dim=-1) for group in groups], dim=-1)
        if not bool(hidden.any()):
            return scores
        if scores.ndim == 4:
            hidden = hidden[:, None].expand_as(scores)
        largest = float(scores[hidden].abs().max())
        if largest > max(accepted, 100 * self.rounding) * max(1.0, float(scores.abs().max())):
            raise UnsupportedModelError(
                f"a key that the attention mask hides has a score of {largest:.1e} (expected 0): "
                "the model mixes tokens by another way than attention, or the method gives scores to keys "
                "whatever `block.attended` says"
            )
        return scores.masked_fill(hidden, 0)


def allowed_keys(clean: CleanPass, causal_model: bool) -> AllowedKeys:
    """Per watched layer, the keys that can get weight.

    A weight other than zero verifies that a key is allowed; a weight of exactly zero can also be a softmax that
    underflowed. So where the attended keys are neither everything nor everything up to the query, the block
    is run again with its queries zeroed: then no score is left but the position bias, and what gets no
    weight from any head is masked.

    Args:
        clean: the clean pass.
        causal_model: what the verification has found.
    """
    batch, length = clean.real.shape
    places = torch.arange(length, device=clean.real.device)
    positions = places.expand(batch, length) if clean.rows is None else clean.rows.positions
    real_pairs = clean.real_rows[:, :, None] & clean.real_keys[:, None, :]
    # On cross-attention a key's place says nothing of a query's: there is no triangle.
    cross = clean.lens.stack.is_cross
    triangle = torch.ones_like(real_pairs) if cross else places <= positions[:, :, None]
    layers = {}
    for layer, attended in clean.attended.items():
        attended_pairs = attended & real_pairs
        if not (attended_pairs.equal(real_pairs) or attended_pairs.equal(real_pairs & triangle)):
            attended = attended | rows_at(_attended_without_queries(clean, layer), positions)
        layers[layer] = attended
    # Hugging Face makes some patterns and norms in float32 in any model (GPT-Neo, GPT-J).
    step = max(torch.finfo(clean.lens.dtype).eps, torch.finfo(torch.float32).eps)
    return AllowedKeys(layers, positions, causal_model, step, cross)


def _attended_without_queries(clean: CleanPass, layer: int) -> Bool[Tensor, "batch query key"]:
    stack = clean.lens.stack
    store: dict[str, Tensor] = {}
    name = stack.hook_name("pattern", layer)
    clean.replay(layer).run([zero_queries(layer, attention=stack.attention_template), record(store, name)])
    return (store[name] != 0).any(dim=1)
