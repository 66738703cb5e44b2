"""One face over every TransformerLens model: its stacks, its hook points, its forward pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from lens_mix.arguments import check_whole_number
from lens_mix.hooks import AttentionHook, HookName, HookPair
from lens_mix.hooks.mixing import tolerance
from lens_mix.lens import known_faults
from lens_mix.lens.angles import angles_differ, forget_longer_passes, rotary_modules
from lens_mix.lens.batches import Batch
from lens_mix.lens.changes import Change, Changes, forward_pre_hook, hooked
from lens_mix.lens.hidden_keys import HiddenKeys
from lens_mix.lens.model_classes import (
    ModelClass,
    TransformerLensModel,
    UnsupportedModelError,
    model_class_of,
    transformer_lens_version,
)
from lens_mix.lens.prompts import (
    device_of,
    further_inputs,
    is_encoder_decoder,
    wrapped_config,
)
from lens_mix.lens.stacks import Stack, stacks_of
from lens_mix.lens.state import all_modules, evaluation_mode


class Lens:
    """One stack of one TransformerLens model.

    Args:
        model: HookedTransformer, HookedEncoder, HookedEncoderDecoder or TransformerBridge.
        part: "encoder" (default), "decoder", "cross" or "joint" of an encoder-decoder; elsewhere "blocks".

    Attributes:
        model, stack: as given, and the stack of blocks that `part` names.
        model_class: which of TransformerLens's classes the model is of.
        n_layers, n_heads: numbers of the stack's blocks, and of query heads.
        encoder_decoder: whether prompts are pairs.
        bears_a_mask: whether an attention mask only hides padding: OpenAI GPT's takes the place of the causal
            one.

    Raises:
        TypeError: not a TransformerLens model.
        ValueError: no such part.
        UnsupportedModelError: the model has no attention, or its outputs are known to be wrong.
    """

    def __init__(self, model: TransformerLensModel, part: str | None = None) -> None:
        self.model_class = model_class_of(model)
        # Each class has attributes of its own besides, which are asked for where they are needed.
        self.model = cast(Any, model)
        for sense, kind in {"visual": "a visual model", "audio": "an audio model"}.items():
            if getattr(model.cfg, f"is_{sense}_model", False):
                raise UnsupportedModelError(f"model: expected a model that reads tokens, got {kind}")
        stacks = stacks_of(self.model)
        name = next(iter(stacks)) if part is None else part
        if not isinstance(name, str) or name not in stacks:
            alone = " (no encoder-decoder: a part is of these)" * ("blocks" in stacks)
            if name in ("cross", "joint") and "decoder" in stacks:
                alone = (
                    " (its decoder has no cross-attention of its own; T5Gemma 2 merges it with the other one)"
                )
            raise ValueError(
                f"part: expected one of {sorted(stacks)} for {self.model_class.value}{alone}, got {part!r}"
            )
        self.stack: Stack = stacks[name]
        if self.device.type == "meta":
            raise UnsupportedModelError(
                "model: expected weights, got a model on 'meta', which holds shapes only"
            )
        fault = known_faults.known_fault(model, self.model_class, name, transformer_lens_version())
        if fault is not None:
            raise UnsupportedModelError(fault)
        self._all_blocks: list[nn.Module] = list(
            dict.fromkeys(block for stack in stacks.values() for block in stack.blocks)
        )
        self.n_layers: int = len(self.stack)
        self.n_heads: int = int(model.cfg.n_heads)
        self.encoder_decoder: bool = is_encoder_decoder(model, self.model_class)
        self.bears_a_mask: bool = wrapped_config(model, "model_type") != "openai-gpt"

    # ------------------------------------------------------------- what the model is

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's parameters."""
        # Quantised weights are whole numbers.
        return next(p.dtype for p in self.model.parameters() if p.dtype.is_floating_point)

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter; if all are offloaded, the device that runs the model."""
        return device_of(self.model)

    @functools.cached_property
    def rotary_modules(self) -> list[nn.Module]:
        """The modules that compute rotary angles from frequencies that they keep."""
        return rotary_modules(self.modules)

    def angles_differ(self, shorter: int, longer: int) -> bool:
        """Return whether prompts of two lengths, or of any between, get other angles in a batch than alone.

        A length is the largest position plus one. Long RoPE and dynamic NTK have such angles.
        """
        # The angles of the first position are always 0.
        shorter, longer = max(shorter, 2), max(longer, 2)
        if shorter == longer or not self.rotary_modules:
            return False
        with self.evaluation_mode():
            return any(angles_differ(module, shorter, longer) for module in self.rotary_modules)

    @property
    def tolerance(self) -> float:
        """Largest accepted relative error of a verification in the model's dtype."""
        return tolerance(self.dtype)

    @property
    def wide_dtype(self) -> torch.dtype:
        """What verifications compute in: float32 at least."""
        return torch.promote_types(self.dtype, torch.float32)

    @functools.cached_property
    def modules(self) -> list[nn.Module]:
        """Every module, gone through once: a lens serves one run, in which no module comes or goes."""
        return all_modules(self.model)

    @functools.cached_property
    def hook_points(self) -> Mapping[str, HookPoint]:
        """TransformerLens's hook points by name, aliases included."""
        return self.model.hook_dict

    def where(self, layer: int) -> str:
        """Name of a block, for errors."""
        return self.stack.template.format(layer=layer)

    def layer_index(self, layer: int) -> int:
        """A layer number, negative from the end, checked."""
        return check_whole_number("layer", layer, -self.n_layers, self.n_layers - 1) % self.n_layers

    def final_norm(self) -> nn.Module | None:
        """The norm after the last block; None where none is mapped, though the model may have one."""
        names = {
            "blocks": ("ln_final",),
            "encoder": ("encoder_final_ln", "encoder_ln_final"),
            "decoder": ("decoder_final_ln", "decoder_ln_final"),
        }["decoder" if self.stack.reads_target else self.stack.name]
        for name in names:
            norm = getattr(self.model, name, None)
            # The masked-language heads of BERT-like models are mapped to `ln_final` too, but that norm sits
            # inside the head, after a dense layer: it is no norm of the residual stream.
            if not isinstance(norm, nn.Module) or hasattr(self.model, "mlm_head"):
                continue
            # A Bridge may have a place for a norm, and nothing in it.
            if not hasattr(norm, "hook_in") or getattr(norm, "original_component", None) is not None:
                return norm
        return None

    # ------------------------------------------------------------- running it

    def evaluation_mode(self, gradients: bool = False, *, precise: bool = True) -> Changes:
        """Evaluation mode, eager attention, no gradients, full precision; all as before afterwards."""
        return evaluation_mode(self.model, self.modules, gradients, precise=precise)

    def hooked(self, fwd_hooks: Sequence[HookPair]) -> Changes:
        """The model with TransformerLens hooks on; unknown names are refused (Bridge 3.x ignores them).

        The hook points are asked themselves: the model's own `hooks` goes through all of them, once on the
        way in and once on the way out.
        """
        pairs = [(point, function) for name, function in fwd_hooks for point in self._points(name)]
        return Changes([hooked(point, function) for point, function in pairs])

    def _points(self, name: HookName) -> list[HookPoint]:
        """The hook points of a name, or those whose names a filter takes, each once."""
        if not isinstance(name, str):
            hook = getattr(name, "__self__", None)
            # A filter is called on the names of all hook points, unless it says which it takes.
            known = hook.names if isinstance(hook, AttentionHook) else filter(name, self.hook_points)
            points = [self.hook_points[key] for key in known if key in self.hook_points]
            return list(dict.fromkeys(points))
        if name not in self.hook_points:
            raise ValueError(f"hook name: expected one of the model's hook points, got {name!r}")
        return [self.hook_points[name]]

    def forward(self, batch: Batch, *, as_given: bool = False, **options: Any) -> Any:
        """The model's forward pass over a batch, with its masks, hidden keys and inputs.

        `as_given`, for a batch without padding: the user's pass, without what the lens adds to a Bridge's.

        Raises:
            ValueError: inputs that the model does not take; it would swallow them without a word.
            UnsupportedModelError: keys can't be hidden in the stack's attention.
        """
        forget_longer_passes(self.rotary_modules)
        if batch.hidden is None:
            return self._forward(batch, as_given, options)
        layers = self.stack.attention_layers
        hiding = [HiddenKeys(self.stack, layer, batch.hidden, self.dtype) for layer in layers]
        with self.hooked([each.watch for each in hiding]), Changes([each.change for each in hiding]):
            return self._forward(batch, as_given, options)

    def _forward(self, batch: Batch, as_given: bool, options: Mapping[str, Any]) -> Any:
        taken = further_inputs(self.model, self.model_class)
        unknown = sorted(set(batch.inputs) - {*taken, "attention_mask"})
        if unknown:
            raise ValueError(
                f"model inputs: {self.model_class.value} takes {sorted(taken)} besides tokens, got {unknown}"
            )
        mask = batch.real.long()
        inputs: dict[str, Tensor | None] = dict(batch.inputs)
        if self.model_class is ModelClass.HOOKED_TRANSFORMER:
            return self.model(batch.tokens, attention_mask=mask, **options)
        if self.model_class is ModelClass.HOOKED_ENCODER:
            return self.model(batch.tokens, one_zero_attention_mask=mask, **inputs, **options)
        if self.model_class is ModelClass.HOOKED_ENCODER_DECODER:
            # In the model's dtype: it is multiplied by that dtype's lowest number, and 0 * -inf is NaN.
            return self.model(
                batch.tokens, batch.target, one_zero_attention_mask=mask.to(self.dtype), **options
            )
        if batch.target is not None:
            inputs["decoder_input_ids"] = batch.target
        if as_given:
            return self.model(batch.tokens, **inputs, **options)
        # Where it keeps no cache, a model of transformers reads packed prompts off positions that restart,
        # unless it is given a mask.
        packs = wrapped_config(self.model, "use_cache") is False or not self.bears_a_mask
        inputs.setdefault("attention_mask", None if packs and bool(batch.real.all()) else mask)
        with Changes(self._finite_masks()):
            # use_cache=False: a block that is run again must not find the keys of its first run.
            return self.model(batch.tokens, use_cache=False, **inputs, **options)

    def _finite_masks(self) -> list[Change]:
        """Return changes that keep float64 masks finite in float32, in which the softmax is computed.

        transformers adds the lowest number of the dtype to masked scores. In float32 that of float64 is -inf,
        so that a row that sees nothing (padding, or a removed position) becomes NaN, and makes all others so.
        """
        if self.dtype != torch.float64:
            return []
        return [forward_pre_hook(block, _lift_masks, with_kwargs=True) for block in self._all_blocks]

    def takes_input(self, name: str) -> bool:
        """Whether the forward pass takes a further input of that name."""
        return name in further_inputs(self.model, self.model_class)


def _lift_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise what is below the lowest float32 to it, in every argument; a forward pre-hook."""
    lowest = torch.finfo(torch.float32).min

    def lifted(value: Any) -> Any:
        is_mask = torch.is_tensor(value) and value.dtype == torch.float64 and bool((value < lowest).any())
        return value.clamp_min(lowest) if is_mask else value

    return tuple(map(lifted, args)), {name: lifted(value) for name, value in kwargs.items()}
