"""Copy an encoder of transformers into the masked language model of its family."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from lens_mix._classes.model_classes import NO_REGISTERS, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The masked language model of each family, by the `model_type` of its configuration.
_ARCHITECTURES = {
    "bert": "BertForMaskedLM",
    "bert-generation": "BertGenerationDecoder",
    "ernie": "ErnieForMaskedLM",
    "rembert": "RemBertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",
    "camembert": "CamembertForMaskedLM",
    "data2vec-text": "Data2VecTextForMaskedLM",
    "deberta-v2": "DebertaV2ForMaskedLM",
    "electra": "ElectraForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "albert": "AlbertForMaskedLM",
}
# Why well-known encoders are not a BERT under other names.
_REASONS = {
    "dinov2": "it reads pictures; lm.models.fold_layer_scale(model) makes a ViT that TransformerLens knows",
    "dinov2_with_registers": f"it reads pictures, and for these lm.models.fold_layer_scale {NO_REGISTERS}",
    "deberta": "its queries, keys and values are one matrix, with terms of relative positions in the scores",
    "mpnet": "it adds a bias for the distance of query and key to the attention scores",
    "modernbert": "its blocks have rotary positions, norms before attention, and local attention",
    "longformer": "its attention is local, in windows",
    "big_bird": "its attention is sparse, in blocks",
    "convbert": "a part of its heads is a convolution",
    "mobilebert": "its blocks have bottlenecks and several feed-forwards",
    "squeezebert": "its matrices are grouped convolutions",
    "megatron-bert": "its norms are before attention and feed-forward",
    "xlm-roberta-xl": "its norms are before attention and feed-forward",
    "roberta-prelayernorm": "its norms are before attention and feed-forward",
    "esm": "its norms are before attention and feed-forward",
    "xmod": "its blocks have adapters for languages",
    "xlnet": "its attention has two streams and relative positions",
}


def _find_architecture(hf_model: PreTrainedModel) -> str:
    """Return the name of the masked language model of an encoder's family.

    Raises:
        UnsupportedModelError: If the family is not known, or if the model is a decoder.
    """
    kind, config = hf_model.config.model_type, hf_model.config
    if kind not in _ARCHITECTURES:
        reason = _REASONS.get(kind, "its blocks are not those of a BERT under other names, as far as known")
        raise UnsupportedModelError(
            f"hf_model: expected an encoder of one of the families {', '.join(_ARCHITECTURES)}, got a "
            f"{kind}: {reason}; TransformerBridge.boot_transformers loads models that TransformerLens knows"
        )
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(
            f"hf_model: expected an encoder, got a {kind} with is_decoder={config.is_decoder} and "
            f"add_cross_attention={config.add_cross_attention}; a BERT's blocks are bidirectional"
        )
    return _ARCHITECTURES[kind]


def copy_encoder(hf_model: PreTrainedModel) -> tuple[Any, bool]:
    """Return the masked language model of a family with copies of an encoder's weights, and without hooks.

    Returns:
        The model, and whether `hf_model` has its head. If not, the weights of the head are on no device.

    Raises:
        UnsupportedModelError: If the family is not known, or if a module that the family has does not exist
            or is another one, as after quantization or with an adapter.
    """
    kind = getattr(transformers, _find_architecture(hf_model))
    config = copy.deepcopy(hf_model.config)
    config._attn_implementation = "eager"
    if not hasattr(hf_model, "lm_predictions") and hasattr(config, "legacy"):
        # Only DeBERTa has this setting, which chooses between two heads.
        config.legacy = True
    with torch.device("meta"):
        copied = kind(config).eval()
    copies: dict[int, Tensor] = {}
    prefix = copied.base_model_prefix
    _copy_weights(hf_model.base_model, copied.base_model, copies)
    _require_nothing_else(hf_model.base_model, copied.base_model)
    names = [name for name, _ in copied.named_parameters(remove_duplicate=False)]
    unembedding = [name for name in names if not name.startswith(f"{prefix}.")]
    has_logits = all(_find_parameter(hf_model, name) is not None for name in unembedding)
    if has_logits:
        for name, child in copied.named_children():
            if name != prefix:
                _copy_weights(hf_model.get_submodule(name), child, copies)
    return copied, has_logits


def _find_parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    try:
        return model.get_parameter(name)
    except AttributeError:
        return None


def _copy_weights(own: nn.Module, copied: nn.Module, copies: dict[int, Tensor]) -> None:
    """Copy the weights and buffers of a module into another one. A shared weight is copied once.

    Args:
        own: The module of the user's model.
        copied: A new module of the same class, on no device.
        copies: The copies so far, by the id of the tensor that they are made from.
    """
    found = dict(own.named_modules(remove_duplicate=False))
    for name, module in copied.named_modules(remove_duplicate=False):
        wanted = {**module._parameters, **module._buffers}
        if name not in found:
            raise UnsupportedModelError(
                f"hf_model: expected a module {name} in {type(own).__name__}, found none"
            )
        values = {**found[name]._parameters, **found[name]._buffers}
        shapes = [{key: t.shape for key, t in each.items() if t is not None} for each in (values, wanted)]
        if wanted and (type(found[name]) is not type(module) or shapes[0] != shapes[1]):
            raise UnsupportedModelError(
                f"hf_model: expected plain weights ({_describe(module)}) in {name} of {type(own).__name__}, "
                f"got {_describe(found[name])}; load the model without quantization, merge adapters first, "
                "and keep its configuration equal to its weights"
            )
        for key, value in values.items():
            if value is None:
                continue
            if value.is_meta:
                raise UnsupportedModelError(
                    f"hf_model: expected the weights of {name} on a device, got none (offloaded?); load the "
                    "model on one device"
                )
            place = module._parameters if key in module._parameters else module._buffers
            place[key] = copies.setdefault(id(value), _copy(value))


def _copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(copied, requires_grad=tensor.requires_grad) if is_parameter else copied


def _describe(module: nn.Module) -> str:
    shapes = [f"{key} {list(value.shape)}" for key, value in module._parameters.items() if value is not None]
    return f"{type(module).__module__}.{type(module).__name__} with {', '.join(shapes) or 'no weights'}"


def _require_nothing_else(own: nn.Module, copied: nn.Module) -> None:
    """Raise an error if an encoder has weights that its family does not have, except those of a pooler."""
    known = {name for name, _ in copied.named_parameters(remove_duplicate=False)}
    names = [name for name, _ in own.named_parameters(remove_duplicate=False)]
    others = [name for name in names if name not in known and not name.startswith("pooler.")]
    if others:
        raise UnsupportedModelError(
            f"hf_model: expected the weights of a plain {type(copied).__name__}, got further weights in "
            f"{type(own).__name__}: {', '.join(others)}"
        )
