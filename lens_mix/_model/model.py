"""The same interface for every TransformerLens model: its stacks, its hook points and its forward pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from lens_mix._care.angles import angles_differ, forget_longer_passes, rotary_modules
from lens_mix._care.changes import Change, Changes, forward_pre_hook, hooked, replace_attributes
from lens_mix._care.state import all_modules, evaluation_mode
from lens_mix._classes import known_faults
from lens_mix._classes.model_classes import (
    ModelClass,
    TransformerLensModel,
    UnsupportedModelError,
    model_class_of,
    reads_features,
    transformer_lens_version,
    wrapped_config,
)
from lens_mix._inputs.batches import Batch
from lens_mix._inputs.prompts import device_of, further_inputs, is_encoder_decoder
from lens_mix._inputs.speech import make_model_input
from lens_mix._model.hidden_keys import HiddenKeys
from lens_mix._model.stacks import Stack, choose_stack, stacks_of
from lens_mix.arguments import check_layer
from lens_mix.hooks.base import AttentionHook, HookName, HookPair
from lens_mix.hooks.mixing import tolerance

# Names of windows of attention in configurations of transformers.
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")
# Larger windows are not verified: an eager pass over so many tokens would take longer than the user's run.
_LARGEST_WINDOW = 1024


class Lens:
    """One stack of one TransformerLens model.

        >>> lens = lm.Lens(model)
        >>> lens.n_layers, lens.n_heads

    Args:
        model: HookedTransformer, HookedEncoder, HookedEncoderDecoder or TransformerBridge.
        part: "encoder" (default), "decoder", "cross" or "joint" of an encoder-decoder. "blocks" or None for
            other models.

    Attributes:
        model: The model.
        stack: The stack of blocks that `part` names.
        model_class: Which of TransformerLens's classes the model has.
        n_layers: The number of the stack's blocks.
        n_heads: The number of query heads.
        encoder_decoder: Whether a prompt is a pair of source and target.
        takes_padding_mask: Whether an attention mask only hides padding. In OpenAI GPT it replaces the causal
            mask.

    Raises:
        TypeError: If it is not a TransformerLens model.
        ValueError: If the model has no such part.
        UnsupportedModelError: If the model has no attention, or its outputs are known to be wrong.
    """

    def __init__(self, model: TransformerLensModel, part: str | None = None) -> None:
        self.model_class = model_class_of(model)
        # Each class also has attributes that the protocol does not have.
        self.model = cast(Any, model)
        if reads_features(self.model):
            from lens_mix._inputs.features import require_known_features

            require_known_features(self.model)
        stacks = stacks_of(self.model)
        self.stack: Stack = choose_stack(self.model, part)
        name = self.stack.name
        if self.device.type == "meta":
            raise UnsupportedModelError(
                "model: expected weights, got a model on 'meta', which has only their shapes"
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
        self.takes_padding_mask: bool = wrapped_config(model, "model_type") != "openai-gpt"

    # ------------------------------------------------------------- what the model is

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the model's parameters."""
        # Quantised weights are whole numbers, which are no dtype to compute in.
        dtype: torch.dtype = next(p.dtype for p in self.model.parameters() if p.dtype.is_floating_point)
        return dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter, or the device that runs the model if it is offloaded."""
        return device_of(self.model)

    @functools.cached_property
    def windows(self) -> list[int]:
        """Return the windows of attention in the configurations of the modules, except very large ones."""
        configs = {id(config): config for each in self.modules if (config := vars(each).get("config"))}
        found = {getattr(config, name, None) for config in configs.values() for name in _WINDOWS}
        return sorted(each for each in found if isinstance(each, int) and 1 < each <= _LARGEST_WINDOW)

    @functools.cached_property
    def rotary_modules(self) -> list[nn.Module]:
        """Return the modules that compute rotary angles from frequencies in a buffer."""
        return rotary_modules(self.modules)

    def angles_differ(self, shorter: int, longer: int) -> bool:
        """Return whether a batch with a longer prompt changes the angles of a shorter one.

        Long RoPE and dynamic NTK have such angles.

        Args:
            shorter: The largest position plus one of the shortest prompt.
            longer: The largest position plus one of the longest prompt.
        """
        # The angles of the first position are always 0.
        shorter, longer = max(shorter, 2), max(longer, 2)
        if shorter == longer or not self.rotary_modules:
            return False
        with self.evaluation_mode():
            return any(angles_differ(module, shorter, longer) for module in self.rotary_modules)

    @property
    def tolerance(self) -> float:
        """Return the largest accepted relative error of a verification in the model's dtype."""
        return tolerance(self.dtype)

    @property
    def wide_dtype(self) -> torch.dtype:
        """Return the dtype that verifications compute in: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    @functools.cached_property
    def modules(self) -> list[nn.Module]:
        """Return every module of the model. The list is made once, because a run does not change it."""
        return all_modules(self.model)

    @functools.cached_property
    def hook_points(self) -> Mapping[str, HookPoint]:
        """Return TransformerLens's hook points by name, with their aliases."""
        hook_points: Mapping[str, HookPoint] = self.model.hook_dict
        if self.model_class is ModelClass.BRIDGE and type(self.model).__name__ != "TransformerBridge":
            from transformer_lens.model_bridge import TransformerBridge

            # The Bridge of SAELens does not list aliases. A name at which it has put an SAE is not a hook
            # point.
            listed = cast(Any, TransformerBridge.hook_dict).fget(self.model)
            hook_points = {name: point for name, point in listed.items() if isinstance(point, HookPoint)}
        return hook_points

    def where(self, layer: int) -> str:
        """Return the name of a block, for errors."""
        return self.stack.template.format(layer=layer)

    def layer_index(self, layer: int) -> int:
        """Return a layer from 0 on. A negative number counts from the end.

        Raises:
            TypeError: If it is not a whole number.
            ValueError: If the layer does not exist.
        """
        return check_layer("layer", layer, range(self.n_layers))

    def final_norm(self) -> nn.Module | None:
        """Return the norm after the last block; None if it has no hook points, or if there is none."""
        names = {
            "blocks": ("ln_final",),
            "encoder": ("encoder_final_ln", "encoder_ln_final"),
            "decoder": ("decoder_final_ln", "decoder_ln_final"),
        }["decoder" if self.stack.reads_target else self.stack.name]
        if wrapped_config(self.model, "do_stable_layer_norm"):
            # HuBERT and wav2vec2 have one norm, before or after the blocks, which has one name.
            names = ("embed_ln",)
        for name in names:
            norm = getattr(self.model, name, None)
            # In BERT-like models `ln_final` is a norm inside the unembedding, after a dense layer. It does
            # not read the residual stream.
            if not isinstance(norm, nn.Module) or hasattr(self.model, "mlm_head"):
                continue
            # A Bridge may have an attribute for the norm of a model without one.
            if not hasattr(norm, "hook_in") or getattr(norm, "original_component", None) is not None:
                return norm
        return None

    # ------------------------------------------------------------- running it

    def evaluation_mode(self, gradients: bool = False, *, precise: bool = True) -> Changes:
        """Return a context with evaluation mode, eager attention, no gradients and full precision.

        At the end of the context, all settings are restored.

        Args:
            gradients: Whether gradients with respect to activations are on. Parameters never get gradients.
            precise: Whether autocast and reduced float32 products are off.
        """
        return evaluation_mode(self.model, self.modules, gradients, precise=precise)

    def hooked(self, fwd_hooks: Sequence[HookPair]) -> Changes:
        """Return a context in which the model has these hooks.

        The hooks are added to the hook points directly. The model's method `hooks` is slower, because it
        iterates over all hook points twice. A Bridge of TransformerLens 3 also ignores unknown names there.

        Args:
            fwd_hooks: Pairs of a hook point's name, or a filter of names, and a function.

        Raises:
            ValueError: If the model has no hook point of a name.
        """
        pairs = [(point, function) for name, function in fwd_hooks for point in self._points(name)]
        return Changes([hooked(point, function) for point, function in pairs])

    def _points(self, name: HookName) -> list[HookPoint]:
        """Return the hook point of a name, or those whose names a filter accepts, each once."""
        if not isinstance(name, str):
            hook = getattr(name, "__self__", None)
            # An AttentionHook has a list of its names, so that the filter need not read all names.
            known = hook.names if isinstance(hook, AttentionHook) else filter(name, self.hook_points)
            points = [self.hook_points[key] for key in known if key in self.hook_points]
            return list(dict.fromkeys(points))
        if name not in self.hook_points:
            raise ValueError(f"hook name: expected one of the model's hook points, got {name!r}")
        return [self.hook_points[name]]

    def forward(self, batch: Batch, *, as_given: bool = False, **options: Any) -> Any:
        """Run the model's forward pass on a batch, with its masks, hidden keys and inputs.

        Args:
            batch: The batch.
            as_given: Whether a Bridge gets no attention mask and no other option of the lens, as in the
                user's own pass. The batch must have no padding.
            options: Further arguments of the model.

        Returns:
            What the model returns.

        Raises:
            ValueError: If the model does not take some inputs. It would ignore them silently.
            UnsupportedModelError: If keys cannot be hidden in the stack's attention.
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
        if batch.features is not None:
            given = {} if batch.target is None else {"decoder_input_ids": batch.target, "use_cache": False}
            return self.model(make_model_input(self.model, batch.features), **given, **options)
        mask = batch.real.long()
        inputs: dict[str, Tensor | None] = dict(batch.inputs)
        if self.model_class is ModelClass.HOOKED_TRANSFORMER:
            return self.model(batch.tokens, attention_mask=mask, **options)
        if self.model_class is ModelClass.HOOKED_ENCODER:
            return self.model(batch.tokens, one_zero_attention_mask=mask, **inputs, **options)
        if self.model_class is ModelClass.HOOKED_ENCODER_DECODER:
            # The mask is multiplied by the lowest number of its dtype. In another dtype than the model's that
            # number may become -inf, and 0 * -inf is NaN.
            return self.model(
                batch.tokens, batch.target, one_zero_attention_mask=mask.to(self.dtype), **options
            )
        if batch.target is not None:
            inputs["decoder_input_ids"] = batch.target
        if batch.has_pictures:
            from lens_mix._inputs.picture_inputs import join_inputs

            inputs |= join_inputs([one.picture_inputs for one in batch.prompts], self.dtype, self.device)
            with Changes([_kept_rope_deltas(self.modules)]):
                return self._forward_bridge(batch, inputs, as_given, options)
        return self._forward_bridge(batch, inputs, as_given, options)

    def _forward_bridge(
        self, batch: Batch, inputs: dict[str, Tensor | None], as_given: bool, options: Mapping[str, Any]
    ) -> Any:
        if as_given:
            return self.model(batch.tokens, **inputs, **options)
        # If a model of transformers keeps no cache and gets no mask, it takes positions that restart for
        # several packed prompts.
        packs = wrapped_config(self.model, "use_cache") is False or not self.takes_padding_mask
        inputs.setdefault("attention_mask", None if packs and bool(batch.real.all()) else batch.real.long())
        with Changes(self._finite_masks()):
            # A replayed block must not find the keys of its first run in a cache.
            return self.model(batch.tokens, use_cache=False, **inputs, **options)

    def _finite_masks(self) -> list[Change]:
        """Return changes that keep float64 masks finite in float32, in which the softmax is computed.

        transformers adds the lowest number of the dtype to masked scores. For float64 that number is -inf in
        float32. A row that sees nothing (padding, or a removed position) then becomes NaN, and NaN spreads to
        all other rows.
        """
        if self.dtype != torch.float64:
            return []
        return [forward_pre_hook(block, _clamp_masks, with_kwargs=True) for block in self._all_blocks]

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None if it has none."""
        return getattr(self.model, "tokenizer", None)

    def takes_input(self, name: str) -> bool:
        """Return whether the forward pass takes a further input of this name."""
        return name in further_inputs(self.model, self.model_class)


def _kept_rope_deltas(modules: Sequence[nn.Module]) -> Change:
    """Return a change after which the modules have the position offsets that they have now.

    Models with positions in three dimensions keep those of the last pass for generation.
    """
    owners = [(module, module.rope_deltas) for module in modules if hasattr(module, "rope_deltas")]
    return replace_attributes(owners, "rope_deltas")


def _clamp_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Clamp every argument to at least the lowest float32. This is a forward pre-hook."""
    lowest = torch.finfo(torch.float32).min

    def clamp(value: Any) -> Any:
        is_mask = torch.is_tensor(value) and value.dtype == torch.float64 and bool((value < lowest).any())
        return value.clamp_min(lowest) if is_mask else value

    return tuple(map(clamp, args)), {name: clamp(value) for name, value in kwargs.items()}
