"""What the runner stores in a map besides its scores: provenance, a method's details and notes."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._blocks.block import Block
from lens_mix._care.precision import switched_off
from lens_mix._classes.model_classes import transformer_lens_version, wrapped_config
from lens_mix._classes.model_names import model_name
from lens_mix._inputs.batches import Prompt
from lens_mix._model.anatomy import read_weight
from lens_mix._model.model import Lens
from lens_mix.version import __version__

# TransformerBridge has no classifiers of these kinds.
_CLASSIFIERS = {
    *("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"),
    "NextSentencePrediction",
}


def details(blocks: list[Block], index: int) -> dict[str, Any]:
    """Return what a method recorded about its layers.

    Args:
        blocks: The blocks of the map.
        index: The index of the prompt in the batch.

    Returns:
        A dict with "details": the values of all layers by name. It is empty if the method recorded nothing.
    """
    names = dict.fromkeys(name for block in blocks for name in block.record.details[index])
    if not names:
        return {}
    return {"details": {name: [block.record.details[index].get(name) for block in blocks] for name in names}}


def notes(scores: Tensor, layers: Sequence[int], queries: Sequence[int] | None) -> tuple[str, ...]:
    """Return the notes that do not depend on the method: rows that are all zero, and reduced precision.

    Args:
        scores: [layer, (head,) query, key].
        layers: The labels of the layers.
        queries: The positions of the rows. None: all, in order.
    """
    texts = [
        f"{name} is on, but was off for this map, which was computed in full precision"
        for name in switched_off()
    ]
    rows = [
        [layers[layer], *head, query if queries is None else queries[query]]
        for layer, *head, query in (~scores.any(dim=-1)).nonzero().tolist()
    ]
    if rows:
        shown = "; ".join(map(str, rows[:5]))
        axes = "[layer, query]" if len(rows[0]) == 2 else "[layer, head, query]"
        more = " ..." if len(rows) > 5 else ""
        texts.append(f"{len(rows)} all-zero rows: no measurable effect at {axes} = {shown}{more}")
    return tuple(texts)


# This is the note of a map with `provenance["sink"]`.
SINK = (
    "some rows sum to less than 1: the rest of their weight is on an attention sink that is not a token (or "
    "a hook on the model scales the pattern)"
)


def has_sink(scores: Float[Tensor, "layer *head query key"], dtype: torch.dtype) -> bool:
    """Return whether some rows of attention weights sum to less than 1, by more than rounding.

    Rows that are all zero do not count, because their queries see no key.

    Args:
        scores: Attention weights.
        dtype: The dtype that the model computes in.
    """
    sums = scores.sum(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    # The error of a sum is half an epsilon if each weight was rounded, and less for a softmax in float32.
    rounding = max(1e-5, 2 * torch.finfo(dtype).eps)
    return bool(((sums > 0) & (sums < 1 - rounding)).any())


def of_run(lens: Lens, prepend_bos: bool | None) -> dict[str, Any]:
    """Return the provenance of all maps of a run: the model, the processing of its weights, and versions."""
    model = lens.model
    # TransformerLens folds the biases of all blocks, or of none.
    value_bias = read_weight(lens.stack.attention_module(lens.stack.attention_layers[0]), "b_V")
    has_bias = value_bias is not None and bool((value_bias != 0).any())
    return {
        "model": model_name(model),
        "model_class": lens.model_class.value,
        "part": lens.stack.name,
        "lens_mix": __version__,
        "transformer_lens": ".".join(map(str, transformer_lens_version())),
        "torch": torch.__version__,
        "dtype": str(lens.dtype).removeprefix("torch."),
        "normalization_type": getattr(model.cfg, "normalization_type", None),
        "compatibility_mode": bool(getattr(model, "compatibility_mode", False)),
        "value_biases": "present" if has_bias else "none (absent, or folded into b_O)",
        "prepend_bos": prepend_bos,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def of_prompt(prompt: Prompt) -> dict[str, Any]:
    """Return the text, the tokens and the inputs of a prompt, which `lens_mix.run_again` needs.

    Pixels are too many for a record, which has the names of the pictures' inputs instead, and the places of
    their patches.
    """
    target = {} if prompt.target is None else {"target_token_ids": prompt.target.tolist()}
    # Pictures and sounds have no tokens that a record could contain.
    if prompt.features is not None:
        features = list(prompt.features.shape)
        return {"prompt": None, "features": features, "positions": len(prompt.tokens), **target}
    inputs = {name: value.tolist() for name, value in prompt.inputs.items()}
    given: dict[str, Any] = {"inputs": inputs} if inputs else {}
    if prompt.pictures:
        given["picture_inputs"] = sorted(prompt.picture_inputs)
        given["pictures"] = [picture.record() for picture in prompt.pictures]
    return {"prompt": prompt.text, "token_ids": prompt.tokens.tolist(), **target, **given}


def dropped_classifier(lens: Lens) -> str | None:
    """Return the note that the Bridge does not have the model's classifier; None if it has, or there is none.

    TransformerBridge loads a BERT classifier as a masked language model with a random unembedding.
    """
    wrapped = getattr(lens.model, "original_model", None)
    named = wrapped_config(lens.model, "architectures") or []
    loaded = type(wrapped).__name__
    dropped = [name for name in named if name != loaded and name.partition("For")[2] in _CLASSIFIERS]
    if not dropped or wrapped is None:
        return None
    return (
        f"the Bridge wraps a {loaded} and dropped the classifier of {dropped[0]}, which config.architectures "
        "names: its logits are not that model's; lm.targets.hf_classifier(hf_model, class_) explains a class"
    )
