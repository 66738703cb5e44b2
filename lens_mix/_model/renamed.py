"""Build a BERT of transformers from an encoder whose blocks are a BERT's under other names.

A `Family` is one row of a table: where an encoder has the modules of a BERT's layer, its embeddings and its
masked-language head. `rename` copies these modules into a `BertForMaskedLM`. Whether the family's blocks
compute what a BERT's do is not assumed here: `lens_mix._model.wrap` compares the hidden states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lens_mix._classes.model_classes import NO_REGISTERS, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The modules of a BERT's layer, which most families name in the same way.
_BERT_LAYER = {
    name: name
    for name in (
        *(f"attention.self.{name}" for name in ("query", "key", "value")),
        *("attention.output.dense", "attention.output.LayerNorm"),
        *("intermediate.dense", "output.dense", "output.LayerNorm"),
    )
}
_DISTILBERT_LAYER = dict(
    zip(
        _BERT_LAYER,
        (
            *("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
            *("sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm"),
        ),
        strict=True,
    )
)
_ALBERT_LAYER = dict(
    zip(
        _BERT_LAYER,
        (
            *("attention.query", "attention.key", "attention.value", "attention.dense"),
            *("attention.LayerNorm", "ffn", "ffn_output", "full_layer_layer_norm"),
        ),
        strict=True,
    )
)


@dataclasses.dataclass(frozen=True)
class HeadModules:
    """Where a masked-language head has its modules. The names are those of the whole model.

    Attributes:
        dense: The dense layer.
        norm: The norm after it.
        decoder: The unembedding, or the embeddings whose weight it is.
        activation: The function between the dense layer and the norm; None: it is the GELU.
        bias: The bias of the unembedding, if the unembedding is not a module of its own.
    """

    dense: str
    norm: str
    decoder: str
    activation: str | None
    bias: str | None = None


_ROBERTA_HEAD = HeadModules("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", None)


@dataclasses.dataclass(frozen=True)
class Family:
    """Where the encoders of a family have the modules of a BERT.

    Attributes:
        find_layers: A function from the base model to its layers, in the order in which they run. A layer
            that runs several times is there several times.
        layer: The names of a BERT's modules in a layer, with the family's own names.
        embeddings: The module with the embeddings.
        projection: The linear map from the embeddings to the first layer, if there may be one.
        attention: A function that makes the module of a layer's attention, if it computes something else
            than a BERT's; None: the layer's own matrices in a BERT's attention.
        others: The names of further weights of a layer, which `attention` reads.
        skips_padding: Whether positions are counted from the padding token's number plus one, and only over
            tokens that are not padding.
        heads: The masked-language heads that a model of the family may have.
    """

    find_layers: Callable[[nn.Module], list[nn.Module]]
    heads: tuple[HeadModules, ...]
    layer: Mapping[str, str] = dataclasses.field(default_factory=lambda: _BERT_LAYER)
    embeddings: str = "embeddings"
    projection: str | None = None
    skips_padding: bool = False
    attention: Callable[[nn.Module, nn.Module, ModuleCopies], nn.Module] | None = None
    others: tuple[str, ...] = ()


def _list_layers(name: str) -> Callable[[nn.Module], list[nn.Module]]:
    # `children()` would leave out a layer that is in the list a second time.
    return lambda base: list(cast(nn.ModuleList, base.get_submodule(name)))


def _unroll_albert(base: Any) -> list[nn.Module]:
    """Return ALBERT's layers in the order in which they run: groups of layers that share their weights."""
    config, groups = base.config, base.encoder.albert_layer_groups
    per_group = config.num_hidden_layers / config.num_hidden_groups
    return [
        layer
        for step in range(config.num_hidden_layers)
        for layer in groups[int(step / per_group)].albert_layers
    ]


def _bert(
    prefix: str = "cls.predictions.transform", other_heads: tuple[HeadModules, ...] = (), **options: Any
) -> Family:
    head = HeadModules(f"{prefix}.dense", f"{prefix}.LayerNorm", "cls.predictions.decoder", None)
    activation = f"{prefix}.transform_act_fn" if prefix.endswith("transform") else f"{prefix}.activation"
    heads = (dataclasses.replace(head, activation=activation), *other_heads)
    return Family(_list_layers("encoder.layer"), heads, **options)


def _disentangle(base: nn.Module, layer: nn.Module, copies: ModuleCopies) -> nn.Module:
    """Return DeBERTa's attention, whose scores have terms of relative positions, with a BERT's names."""
    from lens_mix._model.disentangled import DisentangledAttention

    return DisentangledAttention(base, layer, copies)


_ROBERTA = Family(_list_layers("encoder.layer"), (_ROBERTA_HEAD,), skips_padding=True)
# The head of a DeBERTa with `legacy=False`.
_DEBERTA_HEAD = HeadModules(
    "lm_predictions.lm_head.dense",
    "lm_predictions.lm_head.LayerNorm",
    "deberta.embeddings.word_embeddings",
    "lm_predictions.lm_head.transform_act_fn",
    "lm_predictions.lm_head.bias",
)
# The families by the `model_type` of their configuration.
FAMILIES: dict[str, Family] = {
    "bert": _bert(),
    "bert-generation": _bert(),
    "ernie": _bert(),
    "rembert": _bert("cls.predictions", projection="encoder.embedding_hidden_mapping_in"),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "data2vec-text": _ROBERTA,
    "deberta-v2": _bert(
        other_heads=(_DEBERTA_HEAD,),
        layer={name: own for name, own in _BERT_LAYER.items() if ".self." not in name},
        attention=_disentangle,
        others=tuple(
            f"attention.self.{name}_proj" for name in ("query", "key", "value", "pos_key", "pos_query")
        ),
    ),
    "electra": Family(
        _list_layers("encoder.layer"),
        (
            HeadModules(
                "generator_predictions.dense",
                "generator_predictions.LayerNorm",
                "generator_lm_head",
                "generator_predictions.activation",
            ),
        ),
        projection="embeddings_project",
    ),
    "distilbert": Family(
        _list_layers("transformer.layer"),
        (HeadModules("vocab_transform", "vocab_layer_norm", "vocab_projector", "activation"),),
        layer=_DISTILBERT_LAYER,
    ),
    "albert": Family(
        _unroll_albert,
        (
            HeadModules(
                "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.activation"
            ),
        ),
        layer=_ALBERT_LAYER,
        projection="encoder.embedding_hidden_mapping_in",
    ),
}


class _Embeddings(nn.Module):
    """The embeddings of an encoder: norm(token + token type + position), then a projection if there is one.

    Args:
        parts: The three embeddings and the norm, by BERT's names.
        tasks: The embeddings of tasks, of which every token gets the first, or None.
        project: The linear map to the width of the blocks, or None.
        padding: The number of the padding token if positions are counted from it, without padding; else None.
    """

    # A Bridge finds these modules by their names, and replaces them.
    word_embeddings: nn.Module
    token_type_embeddings: nn.Module
    position_embeddings: nn.Module
    LayerNorm: nn.Module

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        tasks: nn.Embedding | None,
        project: nn.Module | None,
        padding: int | None,
    ) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.tasks = tasks
        self.project = nn.Identity() if project is None else project
        self.padding = padding

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
        position_ids: Int[Tensor, "batch pos"] | None = None,
        inputs_embeds: Float[Tensor, "batch pos embedding"] | None = None,
        **_: Any,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the input of the first block.

        A BERT also gives the length of its cache, under another name in every second release. An encoder has
        no cache, so it is not read.
        """
        words = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = self._count_positions(input_ids, words)
        if token_type_ids is None:
            token_type_ids = torch.zeros(words.shape[:2], dtype=torch.long, device=words.device)
        embedded = words + self.token_type_embeddings(token_type_ids) + self.position_embeddings(position_ids)
        if self.tasks is not None:
            embedded = embedded + self.tasks.weight[0]
        projected: Tensor = self.project(self.LayerNorm(embedded))
        return projected

    def _count_positions(self, tokens: Tensor | None, words: Tensor) -> Int[Tensor, "batch pos"]:
        if self.padding is None or tokens is None:
            first = 0 if self.padding is None else self.padding + 1
            return torch.arange(first, first + words.shape[1], device=words.device)[None]
        is_token = tokens.ne(self.padding).long()
        return is_token.cumsum(1) * is_token + self.padding


def find_family(hf_model: PreTrainedModel) -> Family:
    """Return the family of an encoder.

    Raises:
        UnsupportedModelError: If the model's family is not known, or if it is a decoder.
    """
    kind, config = hf_model.config.model_type, hf_model.config
    if kind not in FAMILIES:
        reason = _REASONS.get(kind, "its blocks are not those of a BERT under other names, as far as known")
        raise UnsupportedModelError(
            f"hf_model: expected an encoder of one of the families {', '.join(FAMILIES)}, got a {kind}: "
            f"{reason}; TransformerBridge.boot_transformers loads models that TransformerLens knows"
        )
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(
            f"hf_model: expected an encoder, got a {kind} with is_decoder={config.is_decoder} and "
            f"add_cross_attention={config.add_cross_attention}; a BERT's blocks are bidirectional"
        )
    return FAMILIES[kind]


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


def rename(hf_model: PreTrainedModel) -> tuple[Any, bool]:
    """Return a `BertForMaskedLM` with copies of an encoder's weights, and whether its logits are defined.

    If the encoder has no masked-language head, the logits are NaN. A layer that is there twice becomes two
    layers of the copy with the same weights. The encoder does not change.

    Raises:
        UnsupportedModelError: If the family is not known, or if a module that the table names does not exist
            or is not a plain one, as after quantisation or with an adapter.
    """
    from transformers import BertForMaskedLM

    family, base, copies = find_family(hf_model), hf_model.base_model, ModuleCopies()
    layers = family.find_layers(base)
    with torch.device("meta"):
        renamed: Any = BertForMaskedLM(_configure(hf_model, family, layers))
    renamed.bert.embeddings = _rename_embeddings(hf_model, family, copies)
    for own, layer in zip(layers, renamed.bert.encoder.layer, strict=True):
        if family.attention is not None:
            layer.attention.self = family.attention(base, own, copies)
        for name, own_name in family.layer.items():
            layer.set_submodule(name, copies.of(own, own_name))
        _require_nothing_else(own, family)
    has_head = _rename_head(hf_model, family.heads, renamed, copies)
    return renamed.eval(), has_head


def _configure(hf_model: Any, family: Family, layers: list[nn.Module]) -> Any:
    """Return the configuration of the BERT, read from the encoder's modules where they have it."""
    from transformers import BertConfig

    own, base, first = hf_model.config, hf_model.base_model, layers[0]
    embeddings = base.get_submodule(family.embeddings)
    types = getattr(embeddings, "token_type_embeddings", None)
    table = getattr(embeddings, "position_embeddings", None)
    positions = own.max_position_embeddings if table is None else table.num_embeddings
    feed_forward = first.get_submodule(family.layer["intermediate.dense"])
    return BertConfig(
        vocab_size=embeddings.word_embeddings.num_embeddings,
        hidden_size=feed_forward.in_features,
        num_hidden_layers=len(layers),
        num_attention_heads=own.num_attention_heads,
        intermediate_size=feed_forward.out_features,
        hidden_act=getattr(own, "hidden_act", None) or own.activation,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        # The first rows of a table that is counted from the padding token are never read.
        max_position_embeddings=positions - (own.pad_token_id + 1 if family.skips_padding else 0),
        type_vocab_size=_TYPES if types is None else types.num_embeddings,
        layer_norm_eps=first.get_submodule(family.layer["output.LayerNorm"]).eps,
        pad_token_id=own.pad_token_id,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        attn_implementation="eager",
    )


# A family without token types gets this many that are all zero, so that a tokenizer may return them.
_TYPES = 2


def _rename_embeddings(hf_model: Any, family: Family, copies: ModuleCopies) -> _Embeddings:
    base = hf_model.base_model
    own = base.get_submodule(family.embeddings)
    if getattr(own, "embed_proj", None) is not None:
        raise UnsupportedModelError(
            "hf_model: expected embeddings whose norm is before a projection, got it after"
        )
    words = copies.of(own, "word_embeddings")

    def table(name: str, rows: int) -> Any:
        if getattr(own, name, None) is not None:
            return copies.of(own, name)
        zeros = words.weight.new_zeros(rows, words.embedding_dim)
        return nn.Embedding.from_pretrained(zeros, freeze=False)

    parts = {
        "word_embeddings": words,
        # What a family does not have is zero. Positions of DeBERTa are in its attention.
        "position_embeddings": table("position_embeddings", hf_model.config.max_position_embeddings),
        "token_type_embeddings": table("token_type_embeddings", _TYPES),
        "LayerNorm": copies.of(own, "LayerNorm"),
    }
    # ERNIE adds the same task to all tokens, unless it gets another one as an input.
    tasks = copies.of(own, "task_type_embeddings") if _has(own, "task_type_embeddings") else None
    name = family.projection
    project = copies.of(base, name) if name is not None and _has(base, name) else None
    padding = hf_model.config.pad_token_id if family.skips_padding else None
    return _Embeddings(parts, tasks, project, padding)


def _rename_head(hf_model: Any, heads: Sequence[HeadModules], renamed: Any, copies: ModuleCopies) -> bool:
    """Give the BERT the masked-language head; without one, a narrow head whose logits are NaN."""
    predictions = renamed.cls.predictions
    transform = predictions.transform
    present = (
        head for head in heads if all(_has(hf_model, name) for name in (head.dense, head.norm, head.decoder))
    )
    head = next(present, None)
    if head is not None:
        transform.dense, transform.LayerNorm = copies.of(hf_model, head.dense), copies.of(hf_model, head.norm)
        predictions.decoder = copies.unembedding(hf_model, head)
        transform.transform_act_fn = (
            nn.GELU() if head.activation is None else hf_model.get_submodule(head.activation)
        )
    else:
        like = renamed.bert.embeddings.LayerNorm.weight
        options: Any = {"dtype": like.dtype, "device": like.device}
        # The first weights of a module would be drawn from the user's random numbers.
        make: Any = nn.utils.skip_init
        transform.dense = make(nn.Linear, renamed.config.hidden_size, 1, **options)
        transform.LayerNorm = make(nn.LayerNorm, 1, **options)
        predictions.decoder = make(nn.Linear, 1, renamed.config.vocab_size, **options)
        for parameter in (*transform.parameters(), *predictions.decoder.parameters()):
            nn.init.zeros_(parameter)
        nn.init.constant_(predictions.decoder.bias, float("nan"))
    if hasattr(predictions, "bias"):
        predictions.bias = predictions.decoder.bias
    return head is not None


def _has(module: nn.Module, name: str) -> bool:
    return any(name == own for own, _ in module.named_modules())


class ModuleCopies:
    """Copies of modules. A weight that several modules share is copied once."""

    def __init__(self) -> None:
        self._weights: dict[int, nn.Parameter] = {}

    def of(self, owner: nn.Module, name: str) -> Any:
        """Return a copy of a plain module, with weights of its own and without hooks.

        Raises:
            UnsupportedModelError: If the module does not exist or is not a plain one.
        """
        try:
            module: Any = owner.get_submodule(name)
        except AttributeError:
            raise UnsupportedModelError(
                f"hf_model: expected a module {name} in {type(owner).__name__}, found none"
            ) from None
        if type(module) is nn.Linear:
            made: Any = nn.Linear(
                module.in_features, module.out_features, module.bias is not None, device="meta"
            )
        elif type(module) is nn.LayerNorm:
            made = nn.LayerNorm(module.normalized_shape, module.eps, device="meta")
        elif type(module) is nn.Embedding:
            made = nn.Embedding(module.num_embeddings, module.embedding_dim, device="meta")
        else:
            raise UnsupportedModelError(
                f"hf_model: expected plain weights (Linear, LayerNorm or Embedding) in {name} of "
                f"{type(owner).__name__}, got {type(module).__module__}.{type(module).__name__}; load the "
                "model without quantisation, and merge adapters first"
            )
        for key, parameter in module.named_parameters():
            setattr(made, key, self._weights.setdefault(id(parameter), _copy(parameter)))
        if any(parameter.is_meta for parameter in made.parameters()):
            raise UnsupportedModelError(
                f"hf_model: expected the weights of {name} on a device, got none (offloaded?); load the "
                "model on one device"
            )
        return made

    def unembedding(self, owner: nn.Module, head: HeadModules) -> nn.Linear:
        """Return a copy of the linear map from a head to the logits."""
        made: nn.Linear | nn.Embedding = self.of(owner, head.decoder)
        if head.bias is None:
            assert isinstance(made, nn.Linear)
            return made
        count, width = made.weight.shape
        linear = nn.Linear(width, count, device="meta")
        bias = owner.get_parameter(head.bias)
        linear.weight, linear.bias = made.weight, self._weights.setdefault(id(bias), _copy(bias))
        return linear


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def _require_nothing_else(layer: nn.Module, family: Family) -> None:
    """Raise an error if a layer has weights that a BERT's layer does not have."""
    known = {*family.layer.values(), *family.others}
    others = [name for name, _ in layer.named_parameters() if name.rpartition(".")[0] not in known]
    if others:
        raise UnsupportedModelError(
            f"hf_model: expected a layer of the modules {', '.join(sorted(known))}, got further weights in "
            f"{type(layer).__name__}: {', '.join(others)}"
        )
