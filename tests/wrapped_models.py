"""Build tiny random encoders of the families that `lm.wrap` takes, from their own classes of transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from tests.tiny_models import randomise

_BERT = {
    "vocab_size": 64,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "type_vocab_size": 2,
}
_ROBERTA = {**_BERT, "pad_token_id": 1, "bos_token_id": 0, "type_vocab_size": 1}
_DISTILBERT = {
    "vocab_size": 64,
    "dim": 24,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 40,
}
_NARROW = {**_BERT, "embedding_size": 16}
# Each family by its prefix in transformers, with its configuration.
FAMILIES: dict[str, dict[str, Any]] = {
    "DistilBert": _DISTILBERT,
    "Electra": _NARROW,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "Roberta": _ROBERTA,
    "Data2VecText": _ROBERTA,
    # Two groups of two layers, of which the first runs for two of three steps.
    "Albert": {**_NARROW, "num_hidden_groups": 2, "inner_group_num": 2},
    "Ernie": {**_BERT, "use_task_id": True},
    "RemBert": {**_BERT, "input_embedding_size": 16, "output_embedding_size": 20},
    # The settings of DeBERTa-v3: shared matrices, buckets of positions, a norm of their embeddings.
    "DebertaV2": {
        **_BERT,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
    },
    "BertGeneration": _BERT,
    "Bert": _BERT,
}


def encoder(
    family: str, kind: str = "Model", dtype: torch.dtype = torch.float64, seed: int = 0, **config: Any
) -> Any:
    """Return a tiny random encoder in evaluation mode, such as `DistilBertForTokenClassification`.

    `config` overrides fields of its configuration.
    """
    settings = getattr(transformers, f"{family}Config")(**{**FAMILIES[family], **config})
    kind = "Encoder" if (family, kind) == ("BertGeneration", "Model") else kind
    return randomise(getattr(transformers, f"{family}{kind}")(settings), seed).to(dtype).eval()


@functools.cache
def kinds_of(family: str) -> tuple[str, ...]:
    """Return the names of the classes that transformers has of a family, without the family's prefix."""
    kinds = ("Model", "MaskedLM", "PreTraining", "SequenceClassification", "TokenClassification")
    kinds += ("QuestionAnswering", "MultipleChoice")
    named = [kind if kind == "Model" else f"For{kind}" for kind in kinds]
    if family == "BertGeneration":
        return ("Model",)
    return tuple(kind for kind in named if hasattr(transformers, family + kind))
