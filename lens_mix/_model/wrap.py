"""Wrap an encoder of transformers that TransformerLens does not know, and check every block of the result."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lens_mix._care.changes import Changes, forward_hook, forward_pre_hook
from lens_mix._care.state import all_modules, evaluation_mode
from lens_mix._classes.model_classes import (
    UnsupportedModelError,
    describe_inner_model,
    keep_original,
    transformer_lens_version,
)
from lens_mix._model.encoder_copy import copy_encoder
from lens_mix.arguments import check_instance, describe_value

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The largest accepted relative difference of a hidden state.
_TOLERANCE = 1e-6
# The longest prompt of the check.
_CHECKED_POSITIONS = 24
# The modules of a masked-language unembedding, by the names of TransformerLens.
_UNEMBEDDING = ("mlm_head", "ln_final", "unembed")


def wrap(hf_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> TransformerBridge:
    """Return a TransformerBridge of an encoder whose blocks are a BERT's under other names.

    TransformerLens knows BERT and RoBERTa by their names, and only with a masked-language head. This function
    also takes DistilBERT, ELECTRA, XLM-R, CamemBERT, Data2VecText, ALBERT, ERNIE, RemBERT, BertGeneration and
    DeBERTa (v2 and v3), and of all of them the base model as well as every class with a head:

        >>> from transformers import AutoModelForSequenceClassification, AutoTokenizer
        >>> hf_model = AutoModelForSequenceClassification.from_pretrained(name)
        >>> model = lm.wrap(hf_model, AutoTokenizer.from_pretrained(name))
        >>> method = lm.methods.Occlusion(target=lm.targets.hf_classifier(model, "POSITIVE"))
        >>> lm.run(model, "a fine film", method, queries=[0]).top(3)

    The weights are copied into the masked language model of the family, and TransformerLens makes a Bridge of
    it, with an adapter of its own or of lens_mix. A layer that runs several times, as all of ALBERT do,
    becomes several blocks that share their weights, and each has its own layer map. Then the input of the
    first block, the output of every block and the logits of a masked-language head are compared with those of
    `hf_model`, on prompts of random tokens with padding and token types. `hf_model` itself and the state of
    the random numbers do not change.

    Without this function, masked language models of these families load by their name with
    `TransformerBridge.boot_transformers`, after `ArchitectureAdapterFactory.discover_entry_points()`.

    A model without a masked-language head has no logits: methods that explain a token raise an error, and
    `model(tokens)` returns NaN. The result keeps `hf_model`, whose classes `lm.targets.hf_classifier(model)`
    explains.

    Args:
        hf_model: The model of transformers. A `LanguageModel` of nnsight contains it as `nn_model._module`,
            or `nn_model._model` in older releases.
        tokenizer: Its tokenizer. Without one, prompts are tokens.

    Returns:
        The Bridge, in evaluation mode, and in the dtype and on the device of `hf_model`.

    Raises:
        TypeError: If `hf_model` is not a model of transformers.
        UnsupportedModelError: If its family is not a BERT under other names, if a hidden state differs by
            more than a relative 1e-6 (the error names the first block that differs), or if this
            TransformerLens has no TransformerBridge.
    """
    _check_arguments(hf_model, tokenizer)
    bridge, has_logits = _build(hf_model, tokenizer)
    precise = torch.finfo(next(hf_model.parameters()).dtype).bits >= 32
    difference = _find_difference(hf_model, bridge, has_logits) if precise else None
    if difference is not None or not precise:
        # In a lower precision, a difference may be rounding, and rounding may hide one. float64 decides.
        whole = copy.deepcopy(hf_model).to("cpu", torch.float64)
        difference = _find_difference(whole, *_build(whole, None))
    if difference is not None:
        raise UnsupportedModelError(
            f"hf_model: expected blocks that are a BERT's under other names, got {difference}; hooks on the "
            "model, or code of its own, may be the reason"
        )
    keep_original(bridge, hf_model, has_logits)
    return bridge


def _check_arguments(hf_model: Any, tokenizer: Any) -> None:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    version = transformer_lens_version()
    if version[0] < 3:
        raise UnsupportedModelError(
            "lm.wrap: expected TransformerLens 3 or later, which has TransformerBridge, got "
            f"{version[0]}.{version[1]}; pip install 'transformer-lens>=3'"
        )
    # An object of nnsight seems to have every attribute of the model inside.
    if isinstance(hf_model, nn.Module) and hasattr(hf_model, "merge_and_unload"):
        raise TypeError(
            "hf_model: expected a model of transformers, got an adapter around one; give "
            "hf_model.merge_and_unload()"
        )
    inner = describe_inner_model(hf_model)
    if inner:
        raise TypeError(f"hf_model: expected a model of transformers, got {type(hf_model).__name__}{inner}")
    check_instance("hf_model", hf_model, PreTrainedModel, "a model of transformers")
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        raise TypeError(
            f"tokenizer: expected a tokenizer of transformers or None, got {describe_value(tokenizer)}"
        )


def _build(hf_model: PreTrainedModel, tokenizer: Any) -> tuple[Any, bool]:
    """Return the Bridge, and whether its logits are those of a masked-language head."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    from lens_mix._model.adapters import register_adapters

    register_adapters()
    copied, has_logits = copy_encoder(hf_model)
    weight = next(copied.base_model.parameters())
    try:
        bridge = build_bridge_from_module(
            copied,
            architecture=type(copied).__name__,
            hf_config=copied.config,
            dtype=weight.dtype,
            device=weight.device,
            model_name=hf_model.config._name_or_path or type(hf_model).__name__,
            post_adapter_hook=None if has_logits else functools.partial(_leave_out_logits, copied),
        )
    except ValueError as error:
        raise UnsupportedModelError(f"hf_model: {error}") from error
    # TransformerLens would load a tokenizer with a BOS token again from the hub, with other special tokens.
    bridge.tokenizer = tokenizer
    return bridge.eval(), has_logits


def _leave_out_logits(model: Any, adapter: Any) -> None:
    """Give a model without a masked-language head a narrow one, whose logits are NaN."""
    names = [
        str(adapter.component_mapping[key].name) for key in _UNEMBEDDING if key in adapter.component_mapping
    ]
    *transform, last = names
    like = next(model.base_model.parameters())
    # The first weights of a module would be drawn from the user's random numbers.
    make: Any = functools.partial(nn.utils.skip_init, dtype=like.dtype, device=like.device)
    count, width = model.get_submodule(last).weight.shape
    if transform:
        dense, norm = transform
        model.set_submodule(dense, make(nn.Linear, model.get_submodule(dense).in_features, 1))
        model.set_submodule(norm, make(nn.LayerNorm, 1))
        width = 1
    model.set_submodule(last, make(nn.Linear, width, count))
    for parameter in (p for name in names for p in model.get_submodule(name).parameters()):
        nn.init.zeros_(parameter)
    bias = model.get_submodule(last).bias
    nn.init.constant_(bias, float("nan"))
    # Some heads have the bias of their unembedding a second time.
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, bias)


def _find_difference(hf_model: PreTrainedModel, bridge: Any, has_logits: bool) -> str | None:
    """Return a description of the first difference between a model and its Bridge; None if there is none."""
    kind, blocks = type(hf_model).__name__, list(bridge.blocks)
    layer_class = type(blocks[0].original_component)
    layers = [module for module in hf_model.base_model.modules() if type(module) is layer_class]
    names = ["the input of block 0", *(f"the output of block {layer}" for layer in range(len(blocks)))]
    for inputs in _make_prompts(bridge):
        real = inputs["attention_mask"].bool()
        read = hf_model if has_logits else hf_model.base_model
        own, own_logits = _run(hf_model, read, inputs, layers)
        found, logits = _run(bridge, bridge, {"input": inputs.pop("input_ids"), **inputs}, blocks)
        if len(own) != len(found):
            return f"{len(own) - 1} runs of {kind}'s {len(blocks)} layers"
        pairs = list(zip(names, own, found, strict=True))
        if own_logits is not None and logits is not None:
            pairs.append(("the logits", own_logits, logits))
        for name, expected, got in pairs:
            error = _relative_error(expected[real], got[real])
            if not error <= _TOLERANCE:
                return f"{name} other than {kind}'s by a relative {error:.1e} (at most {_TOLERANCE:g})"
    return None


def _make_prompts(bridge: Any) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs of two passes: a prompt of random tokens, and two of which one is padded."""
    config, device = bridge.original_model.config, next(bridge.parameters()).device
    length = min(_CHECKED_POSITIONS, bridge.cfg.n_ctx)
    type_count = config.type_vocab_size if hasattr(bridge, "token_type_embed") else 0
    generator = torch.Generator().manual_seed(0)
    for batch, types in ((1, 1), (2, type_count)):
        shape = (batch, length)
        tokens = torch.randint(config.vocab_size, shape, dtype=torch.long, device="cpu", generator=generator)
        mask = torch.ones(shape, dtype=torch.long, device=torch.device("cpu"))
        mask[1:, length // 2 :] = 0
        if config.pad_token_id is not None:
            tokens[mask == 0] = config.pad_token_id
        inputs = {"input_ids": tokens, "attention_mask": mask}
        if type_count:
            inputs["token_type_ids"] = torch.randint(types, shape, device="cpu", generator=generator)
        yield {name: value.to(device) for name, value in inputs.items()}


def _run(
    model: nn.Module, read: nn.Module, inputs: dict[str, Tensor], layers: list[nn.Module]
) -> tuple[list[Tensor], Tensor | None]:
    """Return the input of the first layer and the output of every layer, and the logits if there are any.

    Args:
        model: The model whose state is kept.
        read: The module that runs: the model, or a part of it.
        inputs: Its inputs by name.
        layers: Its layers; one that runs several times has several outputs.
    """
    kept: list[Tensor] = []

    def keep_input(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not kept:
            kept.append(args[0] if args else kwargs["hidden_states"])

    def keep_output(module: nn.Module, args: Any, output: Any) -> None:
        kept.append(output if isinstance(output, Tensor) else output[0])

    unique = {id(layer): layer for layer in layers}.values()
    changes = [forward_pre_hook(layers[0], keep_input, with_kwargs=True)]
    changes += [forward_hook(layer, keep_output) for layer in unique]
    with evaluation_mode(model, all_modules(model)), Changes(changes):
        output = read(**inputs)
    names = ("logits", "prediction_logits")
    logits = [value for name in names if isinstance(value := getattr(output, name, None), Tensor)]
    logits = [output] if isinstance(output, Tensor) else logits
    return kept, logits[0] if logits else None


def _relative_error(expected: Tensor, got: Tensor) -> float:
    """Return the largest difference, relative to the largest expected entry; inf for different shapes."""
    if expected.shape != got.shape:
        return float("inf")
    return float((expected.double() - got.double()).abs().max() / expected.double().abs().max())
