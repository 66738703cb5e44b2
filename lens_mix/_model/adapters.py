"""Adapters with which TransformerLens loads Whisper, and encoders that are a BERT under other names.

`pyproject.toml` declares them as entry points of the group `transformer_lens.architectures`. This file
imports nothing of lens_mix, so that TransformerLens can take over the classes as they are.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from transformer_lens.factories.architecture_adapter_factory import (
    SUPPORTED_ARCHITECTURES,
    ArchitectureAdapterFactory,
)
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    BlockBridge,
    EmbeddingBridge,
    LinearBridge,
    MLPBridge,
    NormalizationBridge,
    PosEmbedBridge,
    UnembeddingBridge,
)
from transformer_lens.model_bridge.supported_architectures.bart import BartFamilyArchitectureAdapter
from transformer_lens.model_bridge.supported_architectures.bert import BertArchitectureAdapter
from transformer_lens.utilities.architectures import MASKED_LM_ARCHITECTURES


class EncoderArchitectureAdapter(BertArchitectureAdapter):  # type: ignore[misc]
    """Architecture adapter for encoders that compute what a BERT does, in modules of other names.

    A subclass names the modules. The defaults are BERT's own names.

    Attributes:
        base: The module of the masked language model that has the embeddings and the layers.
        layers: The list of layers in it.
        attention: The attention in a layer, then its matrices of queries, keys, values and outputs.
        mlp: The module of a layer's feed-forward, or None, then the two matrices, named from that module.
        norms: The norm after a layer's attention, and the norm after its feed-forward.
        mlm_head: The dense layer and the norm of the masked-language head, if there are any, then the
            unembedding.
    """

    base: str = "bert"
    layers: str = "encoder.layer"
    attention: tuple[str, ...] = ("attention", "self.query", "self.key", "self.value", "output.dense")
    mlp: tuple[str | None, str, str] = (None, "intermediate.dense", "output.dense")
    norms: tuple[str, str] = ("attention.output.LayerNorm", "output.LayerNorm")
    mlm_head: tuple[str, ...] = (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
    )

    def __init__(self, cfg: Any) -> None:
        """Initialize the adapter.

        Args:
            cfg: The configuration object.
        """
        super().__init__(cfg)
        # TransformerLens 3 does not say this of a BERT.
        self.cfg.attention_dir = "bidirectional"
        embeddings = f"{self.base}.embeddings"
        attention, *matrices = self.attention
        container, expand, contract = self.mlp
        *transform, unembed = self.mlm_head
        self.component_mapping = {
            "embed": EmbeddingBridge(name=f"{embeddings}.word_embeddings"),
            "token_type_embed": EmbeddingBridge(name=f"{embeddings}.token_type_embeddings"),
            "pos_embed": PosEmbedBridge(name=f"{embeddings}.position_embeddings"),
            "embed_ln": self._norm(f"{embeddings}.LayerNorm"),
            "blocks": BlockBridge(
                name=f"{self.base}.{self.layers}",
                # As in BERT, whose layer has the matrices of its feed-forward side by side.
                hook_alias_overrides={"hook_mlp_out": "mlp.out.hook_out", "hook_mlp_in": "mlp.in.hook_in"},
                submodules={
                    "ln1": self._norm(self.norms[0]),
                    "ln2": self._norm(self.norms[1]),
                    "attn": AttentionBridge(
                        name=attention,
                        config=self.cfg,
                        submodules={
                            key: LinearBridge(name=name) for key, name in zip("qkvo", matrices, strict=True)
                        },
                    ),
                    "mlp": MLPBridge(
                        name=container,
                        config=self.cfg,
                        submodules={"in": LinearBridge(name=expand), "out": LinearBridge(name=contract)},
                    ),
                },
            ),
            "unembed": UnembeddingBridge(name=unembed),
        }
        if transform:
            self.component_mapping["mlm_head"] = LinearBridge(name=transform[0])
            self.component_mapping["ln_final"] = self._norm(transform[1])

    def _norm(self, name: str) -> NormalizationBridge:
        return NormalizationBridge(name=name, config=self.cfg, use_native_layernorm_autograd=True)

    def prepare_model(self, hf_model: Any) -> None:
        """Leave out the embeddings that the model does not have, and read the length of its context.

        Raises:
            ValueError: If the model is a decoder.
        """
        config = hf_model.config
        if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
            raise ValueError(f"expected an encoder, got a {type(hf_model).__name__} that is a decoder")
        embeddings = hf_model.get_submodule(f"{self.base}.embeddings")
        for key in ("token_type_embed", "pos_embed"):
            if getattr(embeddings, str(self.component_mapping[key].name).rpartition(".")[2], None) is None:
                del self.component_mapping[key]
        table = getattr(embeddings, "position_embeddings", None)
        if table is None:
            self.cfg.positional_embedding_type = "none"
        else:
            # A table that counts positions from the padding token has rows that no token reads.
            reserved = 0 if table.padding_idx is None else table.padding_idx + 1
            self.cfg.n_ctx = table.num_embeddings - reserved


class DistilBertArchitectureAdapter(EncoderArchitectureAdapter):
    """Architecture adapter for ``DistilBertForMaskedLM``: no token types, and a feed-forward of its own."""

    base = "distilbert"
    layers = "transformer.layer"
    attention = ("attention", "q_lin", "k_lin", "v_lin", "out_lin")
    mlp = ("ffn", "lin1", "lin2")
    norms = ("sa_layer_norm", "output_layer_norm")
    mlm_head = ("vocab_transform", "vocab_layer_norm", "vocab_projector")


class ElectraArchitectureAdapter(EncoderArchitectureAdapter):
    """Architecture adapter for ``ElectraForMaskedLM``: narrow embeddings, then a projection."""

    base = "electra"
    mlm_head = ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head")


class RobertaFamilyArchitectureAdapter(EncoderArchitectureAdapter):
    """Architecture adapter for RoBERTa, XLM-R and CamemBERT: positions start after the padding token's."""

    base = "roberta"
    mlm_head = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")


class Data2VecTextArchitectureAdapter(RobertaFamilyArchitectureAdapter):
    """Architecture adapter for ``Data2VecTextForMaskedLM``: a RoBERTa."""

    base = "data2vec_text"


class ErnieArchitectureAdapter(EncoderArchitectureAdapter):
    """Architecture adapter for ``ErnieForMaskedLM``: a BERT whose embeddings may have a task's too."""

    base = "ernie"


class RemBertArchitectureAdapter(EncoderArchitectureAdapter):
    """Architecture adapter for ``RemBertForMaskedLM``: narrow embeddings, and an unembedding as narrow."""

    base = "rembert"
    mlm_head = ("cls.predictions.dense", "cls.predictions.LayerNorm", "cls.predictions.decoder")


class BertGenerationArchitectureAdapter(EncoderArchitectureAdapter):
    """Architecture adapter for ``BertGenerationDecoder`` with ``is_decoder=False``: an unembedding alone."""

    mlm_head = ("lm_head.decoder",)


class AlbertArchitectureAdapter(EncoderArchitectureAdapter):
    """Architecture adapter for ``AlbertForMaskedLM``, whose layers run several times.

    Each run of a layer becomes a block. The blocks of one layer share its weights.
    """

    base = "albert"
    layers = "encoder.albert_layer_groups.0.albert_layers"
    attention = ("attention", "query", "key", "value", "dense")
    mlp = (None, "ffn", "ffn_output")
    norms = ("attention.LayerNorm", "full_layer_layer_norm")
    mlm_head = ("predictions.dense", "predictions.LayerNorm", "predictions.decoder")

    def prepare_model(self, hf_model: Any) -> None:
        """Make one group that has every run of a layer as a layer of its own."""
        super().prepare_model(hf_model)
        encoder = hf_model.albert.encoder
        steps, groups = encoder.config.num_hidden_layers, encoder.albert_layer_groups
        per_group = steps / len(groups)
        runs = [layer for step in range(steps) for layer in groups[int(step / per_group)].albert_layers]
        layers = [_share_weights(run) for run in runs]
        groups[0].albert_layers = nn.ModuleList(layers)
        del groups[1:]
        # The encoder reads how often it runs its groups from its configuration.
        encoder.config = copy.copy(encoder.config)
        encoder.config.num_hidden_layers = encoder.config.num_hidden_groups = 1
        self.cfg.n_layers = len(layers)


class DebertaV2ArchitectureAdapter(EncoderArchitectureAdapter):
    """Architecture adapter for ``DebertaV2ForMaskedLM``: scores with terms of relative positions."""

    base = "deberta"
    attention = ("attention", "self.query_proj", "self.key_proj", "self.value_proj", "output.dense")

    def prepare_model(self, hf_model: Any) -> None:
        """Give relative positions matrices of their own, so that hooks of queries and keys see tokens only.

        Raises:
            ValueError: If the encoder has a convolution beside its first layer.
        """
        super().prepare_model(hf_model)
        encoder = hf_model.deberta.encoder
        if encoder.conv is not None:
            raise ValueError("expected layers only, got a convolution beside the first one")
        # Without it, attention returns no weights.
        hf_model.config.output_attentions = True
        for layer in encoder.layer:
            attention = layer.attention.self
            if attention.share_att_key and attention.relative_attention:
                attention.pos_query_proj = _share_weights(attention.query_proj)
                attention.pos_key_proj = _share_weights(attention.key_proj)
            attention.share_att_key = False
            attention.register_forward_pre_hook(functools.partial(_add_positions, encoder), with_kwargs=True)
        # A block then gets nothing but its batch, so it can run alone on other prompts.
        encoder.get_rel_pos = encoder.get_rel_embedding = _return_none
        if not hf_model.legacy:
            self._rename_unembedding(hf_model)

    def _rename_unembedding(self, hf_model: Any) -> None:
        """Name the newer head, which multiplies by the embeddings, as the older one."""
        from transformers.models.deberta_v2.modeling_deberta_v2 import LegacyDebertaV2OnlyMLMHead

        own = hf_model.lm_predictions.lm_head
        with torch.device("meta"):
            hf_model.cls = LegacyDebertaV2OnlyMLMHead(hf_model.config)
        predictions = hf_model.cls.predictions
        for name in ("dense", "transform_act_fn", "LayerNorm"):
            setattr(predictions.transform, name, getattr(own, name))
        predictions.decoder.weight = hf_model.deberta.embeddings.word_embeddings.weight
        predictions.decoder.bias = predictions.bias = own.bias
        del hf_model.lm_predictions
        hf_model.legacy = True


class WhisperArchitectureAdapter(BartFamilyArchitectureAdapter):  # type: ignore[misc]
    """Architecture adapter for ``WhisperForConditionalGeneration``, which reads sound and writes text.

    The blocks are those of an mBART. Instead of tokens, the encoder reads a spectrogram through two
    convolutions.
    """

    has_final_stack_norm = True
    supports_generation: bool = False

    def __init__(self, cfg: Any) -> None:
        """Initialize the adapter.

        Args:
            cfg: The configuration object.
        """
        super().__init__(cfg)
        self.cfg.is_audio_model = True

    def _build_component_mapping(self) -> dict[str, Any]:
        mapping: dict[str, Any] = super()._build_component_mapping()
        # The table of an encoder's positions is added as a weight, and so is not called.
        for name in ("embed", "pos_embed"):
            del mapping[name]
        return mapping | {"unembed": UnembeddingBridge(name="proj_out")}

    def prepare_model(self, hf_model: Any) -> None:
        """Let the model take its spectrogram under the name that TransformerLens has for all sound."""
        # The frames have a table of positions of their own, which they fill.
        self.cfg.n_ctx = hf_model.config.max_target_positions
        hf_model.register_forward_pre_hook(_rename_sound, with_kwargs=True)


def _rename_sound(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if "input_values" in kwargs:
        kwargs = {**kwargs, "input_features": kwargs["input_values"]}
        del kwargs["input_values"]
    return args, kwargs


def _share_weights(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})


def _add_positions(encoder: Any, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Give an attention the embeddings of relative positions; it computes the distances of tokens itself."""
    return args, {**kwargs, "rel_embeddings": type(encoder).get_rel_embedding(encoder)}


def _return_none(*_: Any) -> None:
    return None


_ADAPTERS: dict[str, type[ArchitectureAdapter]] = {
    "AlbertForMaskedLM": AlbertArchitectureAdapter,
    "BertGenerationDecoder": BertGenerationArchitectureAdapter,
    "CamembertForMaskedLM": RobertaFamilyArchitectureAdapter,
    "Data2VecTextForMaskedLM": Data2VecTextArchitectureAdapter,
    "DebertaV2ForMaskedLM": DebertaV2ArchitectureAdapter,
    "DistilBertForMaskedLM": DistilBertArchitectureAdapter,
    "ElectraForMaskedLM": ElectraArchitectureAdapter,
    "ErnieForMaskedLM": ErnieArchitectureAdapter,
    "RemBertForMaskedLM": RemBertArchitectureAdapter,
    # TransformerLens 3 has no adapter for RoBERTa.
    "RobertaForMaskedLM": RobertaFamilyArchitectureAdapter,
    "WhisperForConditionalGeneration": WhisperArchitectureAdapter,
    "XLMRobertaForMaskedLM": RobertaFamilyArchitectureAdapter,
}

# `boot_transformers` looks here for the class to load, before TransformerLens reads entry points.
for _name, _adapter in _ADAPTERS.items():
    SUPPORTED_ARCHITECTURES.setdefault(_name, _adapter)
    if _name.endswith("ForMaskedLM"):
        MASKED_LM_ARCHITECTURES.add(_name)
# TransformerLens 4 has its own adapter for RoBERTa, and would warn of an entry point with the same name.
ArchitectureAdapterFactory._adapters.setdefault("RobertaForMaskedLM", RobertaFamilyArchitectureAdapter)


def register_adapters() -> None:
    """Register the adapters for those architectures that have none yet, of whatever package."""
    ArchitectureAdapterFactory.discover_entry_points()
    for name, adapter in _ADAPTERS.items():
        if name not in ArchitectureAdapterFactory._adapters:
            ArchitectureAdapterFactory.register_adapter(name, adapter)
