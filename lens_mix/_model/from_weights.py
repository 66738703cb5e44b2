"""Build a TransformerLens model from given weights, in any release.

Before release 4 it is a HookedTransformer, later a TransformerBridge around TransformerLens's native model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lens_mix._classes.model_classes import TransformerLensModel, transformer_lens_version

NormKind = Literal["LN", "RMS"]


@dataclasses.dataclass(frozen=True)
class Weights:
    """All weights of a small pre-norm transformer with learned positions and without biases.

        >>> layers = {name: torch.rand(1, 2, 4, 2) for name in ("query", "key", "value")}
        >>> inputs = {"embedding": torch.rand(9, 4), "positions": torch.rand(5, 4)}
        >>> outputs = {"output": torch.rand(1, 2, 2, 4), "unembedding": torch.rand(4, 9)}
        >>> model = lm.models.model_from_weights(lm.models.Weights(**inputs, **layers, **outputs))
        >>> lm.run(model, torch.tensor([1, 8, 3]), "attention").scores

    Attention scores are divided by √d_head.

    Attributes:
        embedding: The token embedding.
        positions: The position embedding.
        query: The query weights of all layers.
        key: The key weights of all layers.
        value: The value weights of all layers.
        output: The output weights of attention of all layers.
        unembedding: The unembedding.
        mlp_in: The feed-forward is `relu(x mlp_in) mlp_out`. None: the blocks have no feed-forward.
        mlp_out: The output weights of the feed-forward; None if `mlp_in` is None.
        causal: Whether a position sees only itself and earlier ones.
        norm: "LN" for LayerNorm, "RMS" for RMSNorm, None for no norms.
    """

    embedding: Float[Tensor, "d_vocab d_model"]
    positions: Float[Tensor, "n_ctx d_model"]
    query: Float[Tensor, "layer head d_model d_head"]
    key: Float[Tensor, "layer head d_model d_head"]
    value: Float[Tensor, "layer head d_model d_head"]
    output: Float[Tensor, "layer head d_head d_model"]
    unembedding: Float[Tensor, "d_model d_vocab_out"]
    mlp_in: Float[Tensor, "layer d_model d_mlp"] | None = None
    mlp_out: Float[Tensor, "layer d_mlp d_model"] | None = None
    causal: bool = True
    norm: NormKind | None = None


def model_from_weights(weights: Weights) -> TransformerLensModel:
    """Return the model in evaluation mode and float32, without a tokenizer.

        >>> layers = {name: torch.rand(1, 2, 4, 2) for name in ("query", "key", "value")}
        >>> inputs = {"embedding": torch.rand(9, 4), "positions": torch.rand(5, 4)}
        >>> outputs = {"output": torch.rand(1, 2, 2, 4), "unembedding": torch.rand(4, 9)}
        >>> model = lm.models.model_from_weights(lm.models.Weights(**inputs, **layers, **outputs))
        >>> lm.run(model, torch.tensor([1, 8, 3]), "attention").scores

    The global random state does not change.

    Raises:
        ValueError: If the shapes of the weights do not fit each other.
    """
    layers, heads, d_model, d_head = weights.query.shape
    options: dict[str, Any] = {
        "n_layers": layers,
        "n_heads": heads,
        "d_model": d_model,
        "d_head": d_head,
        "d_mlp": None if weights.mlp_in is None else weights.mlp_in.shape[-1],
        "d_vocab": len(weights.embedding),
        "d_vocab_out": weights.unembedding.shape[-1],
        "n_ctx": len(weights.positions),
        "act_fn": "relu",
        "attn_only": weights.mlp_in is None,
        "attention_dir": "causal" if weights.causal else "bidirectional",
        "normalization_type": weights.norm,
        "device": "cpu",
    }
    # TransformerLens prints the device, and draws random weights, which are replaced below.
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        if transformer_lens_version()[0] < 4:
            import transformer_lens as library

            model = library.HookedTransformer(library.HookedTransformerConfig(**options))
            named = _names_of_hooked(weights)
        else:
            from transformer_lens.config import TransformerBridgeConfig
            from transformer_lens.model_bridge import TransformerBridge

            model = TransformerBridge.boot_native(TransformerBridgeConfig(**options))
            named = _names_of_native(weights)
        # The user may have changed torch's default dtype, which new modules have.
        model = model.to(torch.float32)
    for name, parameter in model.named_parameters():
        plain = name.replace("._original_component", "")
        if plain in named and named[plain].shape != parameter.shape:
            expected, got = tuple(parameter.shape), tuple(named[plain].shape)
            raise ValueError(f"weights: expected the shape {expected} for {plain}, got {got}")
        # Norms keep their first weights 1 and biases 0.
        if "ln" not in plain:
            parameter.data.copy_(named.get(plain, torch.zeros_like(parameter)))
    evaluated: TransformerLensModel = model.eval()
    return evaluated


def _names_of_hooked(weights: Weights) -> dict[str, Tensor]:
    """Return the weights by the names of a HookedTransformer."""
    tops = {"embed.W_E": weights.embedding, "pos_embed.W_pos": weights.positions}
    named = {**tops, "unembed.W_U": weights.unembedding}
    per_layer = {
        "attn.W_Q": weights.query,
        "attn.W_K": weights.key,
        "attn.W_V": weights.value,
        "attn.W_O": weights.output,
        "mlp.W_in": weights.mlp_in,
        "mlp.W_out": weights.mlp_out,
    }
    return {**named, **_by_layer("blocks", per_layer)}


def _names_of_native(weights: Weights) -> dict[str, Tensor]:
    """Return the weights by the names of a native model, in the shape of torch's linear layers [out, in]."""
    tops = {"tok_embed.weight": weights.embedding, "pos.weight": weights.positions}
    named = {**tops, "head.weight": weights.unembedding.T}
    split, joined = "layer head d_model d_head", "layer (head d_head) d_model"
    per_layer = {
        "attn.q.weight": rearrange(weights.query, f"{split} -> {joined}"),
        "attn.k.weight": rearrange(weights.key, f"{split} -> {joined}"),
        "attn.v.weight": rearrange(weights.value, f"{split} -> {joined}"),
        "attn.o.weight": rearrange(
            weights.output, "layer head d_head d_model -> layer d_model (head d_head)"
        ),
        "mlp.fc_in.weight": None if weights.mlp_in is None else weights.mlp_in.mT,
        "mlp.fc_out.weight": None if weights.mlp_out is None else weights.mlp_out.mT,
    }
    return {**named, **_by_layer("layers", per_layer)}


def _by_layer(prefix: str, stacked: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {
        f"{prefix}.{layer}.{name}": values
        for name, stack in stacked.items()
        if stack is not None
        for layer, values in enumerate(stack)
    }
