"""Fold LayerScale into the weights of a vision transformer, so that TransformerLens can load it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lens_mix._care.precision import relative_error
from lens_mix._classes.model_classes import NO_REGISTERS
from lens_mix.arguments import check_whole_number

if TYPE_CHECKING:
    from transformers import Dinov2Model, Dinov2PreTrainedModel, ViTModel

# The largest accepted relative error of a block's output, in multiples of the precision of the dtype. Sums in
# another order differ by a few units of it.
_ACCEPTED = 200
_NAMES = (("encoder.layer.", "layers."), ("norm1", "layernorm_before"), ("norm2", "layernorm_after"))


def fold_layer_scale(hf_model: Dinov2PreTrainedModel, image_size: int | None = None) -> ViTModel:
    """Return a DINOv2 as a ViT of transformers, whose weights contain the factors of LayerScale.

    LayerScale (Touvron et al., ICCV 2021) multiplies what attention and the feed-forward add to the residual
    stream by a factor per dimension. The factors become part of the last matrix and bias of each. Both models
    then run on a random picture, and the outputs of every block are compared.

        >>> from transformers import Dinov2Model
        >>> vit = lm.models.fold_layer_scale(Dinov2Model.from_pretrained(name), image_size=224)
        >>> model = TransformerBridge.boot_transformers("dinov2", hf_model=vit)

    The result is the body without a classifier. A classifier of the original reads the last hidden state
    after the final norm, so explain it with `lm.targets.head(function, after_final_norm=True)`.

    Args:
        hf_model: A `Dinov2Model` or a model that contains one as `dinov2`, such as a
            `Dinov2ForImageClassification`. It is not changed.
        image_size: The height and width of the pictures. Position embeddings are interpolated to it, as the
            original does. None: those of the configuration.

    Raises:
        TypeError: If it is not a DINOv2.
        ValueError: If it has parts that a ViT does not have, such as registers, or a block's output differs.
    """
    body: Dinov2Model = hf_model.base_model if hasattr(hf_model, "base_model") else hf_model
    config: Any = getattr(body, "config", None)
    if getattr(config, "model_type", None) == "dinov2_with_registers":
        raise ValueError(f"hf_model: {NO_REGISTERS}, got {type(hf_model).__name__}")
    if getattr(config, "model_type", None) != "dinov2" or not hasattr(body, "encoder"):
        raise TypeError(f"hf_model: expected a DINOv2 of transformers, got {type(hf_model).__name__}")
    if config.use_swiglu_ffn:
        raise ValueError(
            "hf_model: expected a feed-forward of two matrices, got a gated one (use_swiglu_ffn), which a "
            "ViT does not have"
        )
    size = config.image_size if image_size is None else check_whole_number("image_size", image_size, 1)
    vit = _make_vit(config, size).to(body.dtype).to(body.device).eval()
    weights = _fold(body, size, config.patch_size)
    if weights.keys() != vit.state_dict().keys():
        raise ValueError(
            "fold_layer_scale: expected the weights of a ViT of transformers 5, got others: "
            f"{sorted(weights.keys() ^ vit.state_dict().keys())[:3]}"
        )
    vit.load_state_dict(weights)
    _require_same_outputs(body, vit, size)
    # TransformerLens chooses the adapter by this name.
    vit.config.architectures = [type(vit).__name__]
    return vit


def _make_vit(config: Any, size: int) -> ViTModel:
    from transformers import ViTConfig, ViTModel

    names = "hidden_size num_hidden_layers num_attention_heads hidden_act layer_norm_eps qkv_bias".split()
    same = {name: getattr(config, name) for name in (*names, "num_channels", "patch_size")}
    width = int(config.hidden_size * config.mlp_ratio)
    random_state = torch.get_rng_state()
    try:
        return ViTModel(ViTConfig(**same, image_size=size, intermediate_size=width), add_pooling_layer=False)
    finally:
        # The weights are replaced, so the user's random numbers must not depend on them.
        torch.set_rng_state(random_state)


@torch.no_grad()
def _fold(body: Dinov2Model, size: int, patch: int) -> dict[str, Tensor]:
    """Return the weights of the ViT by its names."""
    weights = {name: tensor.clone() for name, tensor in body.state_dict().items()}
    weights.pop("embeddings.mask_token", None)
    positions = weights["embeddings.position_embeddings"]
    count = (size // patch) ** 2 + 1
    blank = positions.new_zeros(1, count, positions.shape[-1])
    weights["embeddings.position_embeddings"] = body.embeddings.interpolate_pos_encoding(blank, size, size)
    for layer in range(body.config.num_hidden_layers):
        block = f"encoder.layer.{layer}."
        for scale, matrix in (("layer_scale1", "attention.o_proj"), ("layer_scale2", "mlp.fc2")):
            factors = weights.pop(f"{block}{scale}.lambda1")
            for name in (f"{block}{matrix}.weight", f"{block}{matrix}.bias"):
                if name in weights:
                    weights[name] *= factors[:, None] if name.endswith("weight") else factors
    return {_rename(name): tensor for name, tensor in weights.items()}


def _rename(name: str) -> str:
    for old, new in _NAMES:
        name = name.replace(old, new)
    return name


@torch.no_grad()
def _require_same_outputs(body: Dinov2Model, vit: ViTModel, size: int) -> None:
    """Raise a ValueError that names the first block whose output differs, on a random picture."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, body.config.num_channels, size, size)
    pixels = torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
    pixels = pixels.to(body.device, body.dtype)
    was_training = body.training
    try:
        own = body.eval()(pixels, output_hidden_states=True).hidden_states
    finally:
        body.train(was_training)
    folded = vit(pixels, output_hidden_states=True).hidden_states
    accepted = _ACCEPTED * torch.finfo(body.dtype).eps
    for layer, (expected, got) in enumerate(zip(own, folded, strict=True)):
        error = relative_error(got, expected)
        if not error <= accepted:  # This is also true for NaN.
            where = "the embeddings" if layer == 0 else f"block {layer - 1}"
            raise ValueError(
                f"hf_model: expected a ViT with LayerScale, got another output of {where} (relative error "
                f"{error:.1e}, accepted {accepted:.0e})"
            )
