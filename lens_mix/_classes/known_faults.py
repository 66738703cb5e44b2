"""Models whose outputs are wrong in TransformerLens itself. They raise an error with the reason.

Each entry was found by a comparison with Hugging Face on the same random weights, of logits or of attention
patterns. A run cannot find these faults, because TransformerBridge changes the Hugging Face model in place,
so that there is no model to compare with.
"""

from __future__ import annotations

from typing import Any

from lens_mix._classes.model_classes import ModelClass, TransformerLensModel, find_missing_logits


def known_fault(
    model: TransformerLensModel, model_class: ModelClass, part: str, version: tuple[int, int]
) -> str | None:
    """Return why this model's maps would be wrong; None if it has no known fault.

    Args:
        model: The model.
        model_class: Its class.
        part: The part of the model that is mapped.
        version: (major, minor) of TransformerLens.
    """
    if model_class is ModelClass.HOOKED_ENCODER_DECODER and part != "encoder" and version[0] < 3:
        return (
            "the decoder's self-attention of HookedEncoderDecoder is not causal in TransformerLens 2.x "
            "(positions see later ones, logits differ from Hugging Face's by .5); "
            "expected TransformerLens >= 3"
        )
    return _bridge_fault(model, version) if model_class is ModelClass.BRIDGE else None


def wrong_logits(
    model: TransformerLensModel, model_class: ModelClass, version: tuple[int, int]
) -> str | None:
    """Return why the logits of a model are wrong or missing, so that a target cannot use them, or None.

    Args:
        model: The model.
        model_class: The class of the model.
        version: (major, minor) of TransformerLens.
    """
    if model_class is ModelClass.HOOKED_ENCODER_DECODER and version[0] < 3:
        return (
            "the decoder's self-attention is not causal in TransformerLens 2.x, so the logits that a "
            "target reads are wrong; expected TransformerLens >= 3"
        )
    return find_missing_logits(model)


def picture_fault(model: TransformerLensModel, version: tuple[int, int]) -> str | None:
    """Return why maps of a decoder would be wrong on pictures, but not on text; None if they would not.

    Args:
        model: A TransformerBridge.
        version: (major, minor) of TransformerLens.
    """
    config = getattr(getattr(model, "original_model", None), "config", None)
    if getattr(config, "model_type", "") == "gemma3" and version[0] < 4:
        # The first norm of the vision encoder returns other numbers for the same input.
        return _wrong("Gemma 3 with pictures before TransformerLens 4", "1.5")
    return None


def _bridge_fault(model: TransformerLensModel, version: tuple[int, int]) -> str | None:
    config = getattr(getattr(model, "original_model", None), "config", None)
    match getattr(config, "model_type", ""):
        case "falcon" if getattr(config, "alibi", False):
            return _wrong("Falcon with alibi", "0.2 to 0.5")
        case "falcon" if getattr(config, "new_decoder_architecture", False):
            return _wrong("Falcon's new decoder architecture", "3.1")
        case "gpt2" if not getattr(config, "scale_attn_weights", True):
            return _wrong("GPT-2 with scale_attn_weights=False", "1.2")
        case "stablelm" if (rotary := _rotary_dimensions(model, config)) % 2:
            return _wrong(f"StableLM with {rotary} rotary dimensions (an odd number)", "5.5")
        case "gpt_oss" if getattr(model, "compatibility_mode", False):
            return _wrong("gpt-oss in compatibility mode", "1.2 (log probabilities)")
        case "cohere" if version[0] < 4:
            return _wrong("Cohere before TransformerLens 4", "0.14")
        case "deepseek_v3" if version[0] < 4:
            return _wrong("DeepSeek-V3 before TransformerLens 4", "4.8")
        case "t5" | "mt5" if version[0] < 4:
            return (
                "TransformerBridge before TransformerLens 4 cannot run T5 (the forward pass fails on recent "
                "transformers, and on older ones hook_pattern has the position bias); "
                "expected HookedEncoderDecoder, or TransformerLens >= 4"
            )
        case "opt" if not getattr(config, "do_layer_norm_before", True):
            return (
                "TransformerBridge cannot run OPT with do_layer_norm_before=False: "
                "its forward pass calls a final norm that this model does not have"
            )
    return None


def _rotary_dimensions(model: TransformerLensModel, config: Any) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    return int(model.cfg.d_head * share)


def _wrong(what: str, difference: str) -> str:
    return (
        f"TransformerBridge is known to run {what} wrongly: its logits differ from Hugging Face's by "
        f"{difference} on the same weights, so any map would describe another model"
    )
