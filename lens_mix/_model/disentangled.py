"""DeBERTa's attention under the names of a BERT's, so that TransformerBridge finds its matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

from lens_mix._classes.model_classes import UnsupportedModelError

if TYPE_CHECKING:
    from lens_mix._model.renamed import ModuleCopies


class DisentangledAttention(DisentangledSelfAttention):  # type: ignore[misc]
    """The self-attention of a DeBERTa of version 2 or 3 (He et al., 2021), as a BERT's layer calls it.

    Args:
        base: The base model, which has the embeddings of relative positions.
        layer: The layer.
        copies: The copies of its weights.

    Raises:
        UnsupportedModelError: If the encoder has a convolution beside its first layer.
    """

    share_att_key: bool

    def __init__(self, base: Any, layer: nn.Module, copies: ModuleCopies) -> None:
        with torch.device("meta"):
            super().__init__(base.config)
        if base.encoder.conv is not None:
            raise UnsupportedModelError(
                "hf_model: expected blocks only, got a convolution beside the first one"
            )
        for name in ("query", "key", "value"):
            del self._modules[f"{name}_proj"]
            setattr(self, name, copies.of(layer, f"attention.self.{name}_proj"))
        # Relative positions have modules of their own, so that the hooks of queries and keys see tokens only.
        names = {"pos_key_proj": "key_proj", "pos_query_proj": "query_proj"}
        for name, shared in names.items():
            if name.removesuffix("_proj") in self._position_names():
                own = shared if self.share_att_key else name
                setattr(self, name, copies.of(layer, f"attention.self.{own}"))
        self.share_att_key = False
        if self.relative_attention:
            self.rel_embeddings = copies.of(base.encoder, "rel_embeddings")
            has_norm = "layer_norm" in base.encoder.norm_rel_ebd
            self.rel_norm = copies.of(base.encoder, "LayerNorm") if has_norm else nn.Identity()

    def _position_names(self) -> set[str]:
        if not self.relative_attention:
            return set()
        return {{"c2p": "pos_key", "p2c": "pos_query"}[kind] for kind in self.pos_att_type}

    # DeBERTa's code calls the matrices by its own names.
    @property
    def query_proj(self) -> Any:
        """Return the queries' matrix."""
        return self.query

    @property
    def key_proj(self) -> Any:
        """Return the keys' matrix."""
        return self.key

    @property
    def value_proj(self) -> Any:
        """Return the values' matrix."""
        return self.value

    def forward(
        self,
        hidden_states: Float[Tensor, "batch pos d_model"],
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the mixed values [batch, pos, d_model] and the attention weights [batch, head, pos, pos]."""
        if attention_mask is None:
            positions = hidden_states.shape[1]
            shape = (len(hidden_states), 1, positions, positions)
            visible = torch.ones(shape, dtype=torch.bool, device=hidden_states.device)
        elif attention_mask.dtype == torch.bool:
            visible = attention_mask
        else:
            # A BERT adds its mask to the scores: 0 for visible keys.
            visible = attention_mask == 0
        relative = self.rel_norm(self.rel_embeddings.weight) if self.relative_attention else None
        mixed: tuple[Tensor, Tensor] = super().forward(
            hidden_states, visible, output_attentions=True, rel_embeddings=relative
        )
        return mixed
