"""Which keys each query may see, measured on the model rather than read off its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.hooks import record, zero_queries
from lens_mix.lens.model import CleanPass, Lens
from lens_mix.lens.model_classes import UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class AllowedKeys:
    """Per layer, which keys each query of the padded batch may see; `rounding`: the model's coarsest step."""

    by_layer: tuple[Bool[Tensor, "batch query key"], ...]
    rounding: float

    def reaching(self) -> AllowedKeys:
        """The same for maps down to the input: which inputs can have reached each query by each layer."""
        here = torch.eye(self.by_layer[0].shape[-1], device=self.by_layer[0].device)
        reached, layers = here, []
        for allowed in self.by_layer:
            reached = (((allowed.float() + here) @ reached) > 0).float()
            layers.append(reached > 0)
        return AllowedKeys(tuple(layers), self.rounding)

    def of_prompt(self, index: int, own: Int[Tensor, " pos"]) -> tuple[bool, Tensor | None]:
        """Whether one prompt's attention is causal, and its mask where a triangle does not say it all.

        Args:
            index: which prompt of the batch.
            own: its own positions.

        Returns:
            (causal, mask): mask None when every layer sees everything (not causal) or everything up to
            itself (causal); else bool [query, key], or [layer, query, key] where layers differ.
        """
        layers = torch.stack([allowed[index][own][:, own] for allowed in self.by_layer]).cpu()
        triangle = torch.ones_like(layers[0]).tril()
        causal = len(own) > 1 and not bool((layers & ~triangle).any())
        if bool(layers.all()) or (causal and bool((layers == triangle).all())):
            return causal, None
        same = bool((layers == layers[0]).all())
        return causal, layers[0] if same else layers

    def without_rounding(
        self,
        scores: Float[Tensor, "layer *head query key"],
        index: int,
        own: Int[Tensor, " pos"],
        groups: Sequence[Sequence[int]] | None,
    ) -> Float[Tensor, "layer *head query key"]:
        """One prompt's scores with exact zeros where the query can't see the key.

        A block that is run in copies rounds differently from the clean pass, which leaves 1e-16 where the
        definition gives 0. More than rounding there means that something else leaked: refused.

        Args:
            scores: the prompt's maps.
            index: which prompt of the batch.
            own: its own positions.
            groups: what the keys stand for; None: the positions.

        Raises:
            UnsupportedModelError: a key that is masked has an effect.
        """
        hidden = ~torch.stack([allowed[index][own][:, own] for allowed in self.by_layer])
        if groups is not None:
            hidden = torch.stack([hidden[:, :, list(group)].all(dim=-1) for group in groups], dim=-1)
        if scores.ndim == 4:
            hidden = hidden[:, None].expand_as(scores)
        largest = float(scores[hidden].abs().max()) if bool(hidden.any()) else 0.0
        if largest > 100 * self.rounding * max(1.0, float(scores.abs().max())):
            raise UnsupportedModelError(
                f"a key that the attention mask hides has a score of {largest:.1e} (expected 0): "
                "the model mixes tokens by another way than attention"
            )
        return scores.masked_fill(hidden, 0)


def is_causal_model(lens: Lens) -> bool:
    """Whether the model says that its attention is causal (Bridge encoders may say so too: see the stack)."""
    if lens.model_class.value == "HookedEncoder":
        return False
    config = getattr(getattr(lens.model, "original_model", None), "config", None)
    name = type(getattr(lens.model, "original_model", None)).__name__
    if "MaskedLM" in name or "NextSentence" in name or "PreTraining" in name:
        return bool(getattr(config, "is_decoder", False))
    return getattr(lens.model.cfg, "attention_dir", "causal") == "causal"


def allowed_keys(lens: Lens, clean: CleanPass) -> AllowedKeys:
    """Per layer, the keys that can get weight.

    A weight other than zero proves that a key is allowed; a weight of exactly zero can also be a softmax that
    underflowed. So where the seen keys are neither everything nor everything up to the query, the block is
    run again with its queries zeroed: then no score is left but the position bias, and what gets no weight
    from any head is masked.
    """
    real = clean.batch.real_positions(lens.stack.name)
    layers = []
    for layer in range(lens.n_layers):
        seen = clean.seen[layer]
        wanted = real[:, :, None] & real[:, None, :]
        triangle = torch.ones_like(seen).tril()
        complete = bool((seen | ~wanted).all())
        causal = bool((seen | ~(wanted & triangle)).all()) and not bool((seen & wanted & ~triangle).any())
        if not (complete or causal):
            seen = seen | _seen_without_queries(lens, clean, layer)
        layers.append(seen)
    # Hugging Face makes some patterns and norms in float32 in any model (GPT-Neo, GPT-J).
    step = max(torch.finfo(lens.dtype).eps, torch.finfo(torch.float32).eps)
    return AllowedKeys(tuple(layers), step)


def _seen_without_queries(lens: Lens, clean: CleanPass, layer: int) -> Bool[Tensor, "batch query key"]:
    store: dict[str, Tensor] = {}
    name = lens.stack.hook_name("pattern", layer)
    call = clean.calls[layer]
    fwd_hooks = [zero_queries(layer, attention=lens.stack.attention_template), record(store, name)]
    with lens.undisturbed(), lens.hooked(fwd_hooks):
        lens.stack.blocks[layer](*call.args, **call.kwargs)
    return (store[name] != 0).any(dim=1)
