"""Build tiny random decoders that read pictures beside tokens, and prompts for them, without a hub.

Each has an image token (42), tokens around a picture (40 and 41), pictures of 16 x 16 pixels in patches of
4 x 4 pixels, and the parameters of `tests.tiny_models`. No processor is needed: a prompt is what one would
return.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from tests.tiny_models import _GEMMA, _LLAMA, _SCALAR, _SLIDING, _WRAPPED, Unavailable, bridge

IMAGE_TOKEN = 42
_TOKEN = {"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN}
_LONG = {"max_position_embeddings": 128}
_TEXT = {**_LLAMA, **_LONG, "model_type": "llama"}
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_CLIP = {**_VISION, "model_type": "clip_vision_model", "projection_dim": 16}
# The output of its last layer without the class token.
_FEATURES = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
_ANY_SIZE = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_MERGING = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 24,
    "in_channels": 3,
}
_QWEN_TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": 43}


def _in_three_dimensions(model_type: str, **rope: Any) -> dict[str, Any]:
    """Return a text configuration whose positions have a time, a row and a column."""
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1], **rope}
    return {**_LLAMA, **_LONG, "model_type": model_type, "rope_parameters": rotary}


_PICTURED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3_pictures": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": {
                **_GEMMA,
                **_SCALAR,
                **_SLIDING,
                **_LONG,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "boi_token_index": 40,
            "eoi_token_index": 41,
            **_TOKEN,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"text_config": _TEXT, "vision_config": _CLIP, **_FEATURES, **_TOKEN},
    ),
    "llava_next": (
        "LlavaNextForConditionalGeneration",
        "LlavaNextConfig",
        {"text_config": _TEXT, "vision_config": _CLIP, **_FEATURES, **_ANY_SIZE, **_TOKEN},
    ),
    "llava_onevision": (
        "LlavaOnevisionForConditionalGeneration",
        "LlavaOnevisionConfig",
        {
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "vision_config": _VISION,
            "video_token_index": 43,
            **_FEATURES,
            "vision_feature_select_strategy": "full",
            **_ANY_SIZE,
            **_TOKEN,
        },
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        {
            "text_config": _TEXT,
            "vision_config": {**_VISION, "model_type": "idefics3_vision"},
            "scale_factor": 2,
            "image_token_id": IMAGE_TOKEN,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 6, "sliding_window": None},
            "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8},
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            **_TOKEN,
        },
    ),
    "llama4_pictures": (
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        {
            "text_config": {
                **_TEXT,
                "model_type": "llama4_text",
                "head_dim": 8,
                "intermediate_size_mlp": 48,
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 128,
            },
            "vision_config": {
                **_VISION,
                "model_type": "llama4_vision_model",
                "intermediate_size": 64,
                "pixel_shuffle_ratio": 0.5,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
                "vision_output_dim": 16,
            },
            "boi_token_index": 40,
            "eoi_token_index": 41,
            **_TOKEN,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "text_config": _in_three_dimensions("qwen2_5_vl_text"),
            "vision_config": {**_MERGING, "window_size": 16, "fullatt_block_indexes": [1]},
            **_QWEN_TOKENS,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "text_config": {
                **_in_three_dimensions("qwen3_vl_text", mrope_section=[2, 1, 1], mrope_interleaved=True),
                "head_dim": 8,
            },
            "vision_config": {**_MERGING, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **_QWEN_TOKENS,
        },
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        "Glm4vConfig",
        {
            "text_config": _in_three_dimensions("glm4v_text", partial_rotary_factor=1.0),
            "vision_config": {**_MERGING, "image_size": 16},
            "video_start_token_id": 44,
            "video_end_token_id": 45,
            "image_start_token_id": 40,
            "image_end_token_id": 41,
            **_QWEN_TOKENS,
        },
    ),
}
PICTURED_NAMES: tuple[str, ...] = tuple(_PICTURED)
_WRAPPED.update(_PICTURED)
# The patches of one picture, in rows and columns. The sizes of pictures of any size are not known.
GRIDS: dict[str, tuple[int, int] | None] = {
    **dict.fromkeys(PICTURED_NAMES, (2, 2)),
    "llava": (4, 4),
    "llava_next": None,
    "llava_onevision": None,
    "llama4_pictures": None,
}
_COUNTS = {"llava": 16, "llava_next": 52, "llava_onevision": 52}


def pictured(name: str, dtype: torch.dtype = torch.float64, tokenizer: Any = None) -> Any:
    """Return a TransformerBridge of a tiny decoder of pictures and text.

    Raises:
        Unavailable: If TransformerLens has no such Bridge.
    """
    with _without_processor():
        built = bridge(name, dtype, tokenizer=tokenizer)
    built.original_model.set_attn_implementation("eager")
    return built


@contextlib.contextmanager
def _without_processor() -> Iterator[None]:
    """Build models whose processor needs torchvision, which the models themselves do not, without it."""
    try:
        module = importlib.import_module("transformer_lens.model_bridge.architecture_adapter")
    except ImportError as error:
        raise Unavailable("this TransformerLens has no TransformerBridge") from error
    adapter = module.ArchitectureAdapter
    check = adapter.__dict__.get("_check_required_libraries")
    if check is not None:
        adapter._check_required_libraries = lambda self: None
    try:
        yield
    finally:
        if check is not None:
            adapter._check_required_libraries = check


def picture_prompt(name: str, pictures: int = 1, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Return what a processor would: tokens [1, pos] with image tokens, and the inputs of the pictures."""
    generator = torch.Generator().manual_seed(3)
    count = _COUNTS.get(name, 4)
    picture = [40, *[IMAGE_TOKEN] * count, 41]
    tokens = torch.tensor([[5, 6, *picture * pictures, 7, 8, 9]])
    inputs: dict[str, Any] = {"input_ids": tokens}
    types = (tokens == IMAGE_TOKEN).long()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    if name in ("qwen2_5_vl", "qwen3_vl", "glm4v"):
        # Four patches of one group are neighbors, and each has two equal times.
        grid = torch.tensor([[1, 4, 4]] * pictures)
        pixels = draw(16 * pictures, 3 * 2 * 4 * 4)
        return {**inputs, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types.int()}
    if name in ("llava_next", "llava_onevision"):
        sizes = torch.tensor([[16, 32]] * pictures)
        return {**inputs, "pixel_values": draw(pictures, 3, 3, 16, 16), "image_sizes": sizes}
    pixels = draw(pictures, 3, 16, 16)
    if name == "idefics3":
        return {**inputs, "pixel_values": pixels[None]}
    if name == "mistral3":
        return {**inputs, "pixel_values": pixels, "image_sizes": torch.tensor([[16, 16]] * pictures)}
    if name == "gemma3_pictures":
        inputs["token_type_ids"] = types
    return {**inputs, "pixel_values": pixels}
