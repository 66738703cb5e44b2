"""From what a user calls a prompt to the tensors a model takes, and back to strings."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix.arguments import as_model_input, flags, plain_tensor, shown, whole_number
from lens_mix.lens.batches import Prompt
from lens_mix.lens.model_classes import ModelClass, TransformerLensModel
from lens_mix.lens.offloading import execution_device

# What tokenizers return besides, on request.
_NOT_FOR_MODELS = {"offset_mapping", "special_tokens_mask", "length", "overflow_to_sample_mapping"}

# Learned positions are tables: a longer prompt has no row to read.
_EXTENSIBLE_POSITIONS = {"alibi", "relative_positional_bias", "none"}


def is_encoder_decoder(model: TransformerLensModel, model_class: ModelClass) -> bool:
    """Whether the model takes a pair of source and target."""
    is_hooked = model_class is ModelClass.HOOKED_ENCODER_DECODER
    return is_hooked or bool(wrapped_config(model, "is_encoder_decoder"))


def wrapped_config(model: TransformerLensModel, name: str) -> Any:
    """A setting of the model of transformers that a TransformerBridge wraps; None where there is none."""
    return getattr(getattr(getattr(model, "original_model", None), "config", None), name, None)


def read_prompt(
    model: TransformerLensModel,
    model_class: ModelClass,
    prompt: object,
    *,
    prepend_bos: bool | None = None,
    attention_mask: Tensor | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    target_for: str | None = None,
) -> Prompt:
    """One prompt as the user gave it.

    A string; tokens `[pos]` or `[1, pos]`; what a tokenizer of Hugging Face's returns (a `BatchEncoding` with
    its mask and token types); chat messages, `[{"role": "user", "content": "..."}]`, which go through the
    tokenizer's chat template; a pair (source, target) for an encoder-decoder; a pair of strings for an
    encoder whose tokenizer joins pairs (BERT: `[CLS] a [SEP] b [SEP]`, with token types).

    Args:
        prepend_bos: as in TransformerLens; None for the model's default. Strings only.
        attention_mask: [pos] or [1, pos], 1 for the prompt's own tokens; padding is cut away.
        inputs: further model inputs by name, [pos] or [1, pos] each; `decoder_input_ids` is the target.
        target_for: the part of the model that can't do without a target; None: the start token will do.

    Raises:
        TypeError, ValueError: with what was expected and what was got.
    """
    text = _as_text(prompt)
    given = dict(inputs or {})
    if _is_pair_of_strings(prompt) and _joins_pairs(model, model_class):
        if prepend_bos is not None:
            raise ValueError("prepend_bos: expected None for a pair, which the tokenizer joins")
        first, second = cast(Sequence[str], prompt)
        prompt = model.tokenizer(first, second)
    elif _is_chat(prompt):
        prompt = _chat_tokens(model, prompt)
    if isinstance(prompt, Mapping):
        prompt, attention_mask, given = of_encoding(prompt, attention_mask, given)
    target = given.pop("decoder_input_ids", None)
    encoder_decoder = is_encoder_decoder(model, model_class)
    if prepend_bos is not None:
        flags(prepend_bos=prepend_bos)
    if isinstance(prompt, (tuple, list)) and len(prompt) == 2 and not all(map(_is_number, prompt)):
        if not encoder_decoder:
            raise ValueError(
                "prompt: a pair (source, target) is for encoder-decoders, and a pair of strings for encoders "
                f"whose tokenizer joins pairs; {type(model).__name__} is neither; for several prompts use "
                "run_many"
            )
        if target is not None:
            raise ValueError("prompt: the target was given twice, in the pair and as decoder_input_ids")
        prompt, target = prompt
    if target is None and target_for is not None:
        raise ValueError(
            f"target: expected a pair (source, target) for part={target_for!r}, got the source alone; the "
            'target is a string, or the decoder\'s tokens from the start token on ("" for that alone)'
        )
    padded = _tokens(model, model_class, prompt, prepend_bos, "prompt")
    real = _real_positions(attention_mask, padded)
    tokens = _checked_tokens(model, padded[real], "prompt")
    extra = {name: _like_tokens(value, padded, name)[real] for name, value in given.items()}
    if isinstance(prompt, str) and model_class is ModelClass.HOOKED_ENCODER and "token_type_ids" not in extra:
        extra["token_type_ids"] = model.to_tokens(prompt)[1][0].to(tokens.device)
    if encoder_decoder:
        target = _checked_tokens(model, _target_tokens(model, model_class, target), "target")
    elif target is not None:
        raise ValueError(f"decoder_input_ids: {type(model).__name__} has no decoder side")
    return Prompt(tokens, target, extra, text)


def _as_text(prompt: object) -> Any:
    """The prompt if it is text, for the record."""
    is_text = isinstance(prompt, str) or _is_chat(prompt) or _is_pair_of_strings(prompt)
    return prompt if is_text else None


def _is_pair_of_strings(prompt: object) -> bool:
    return isinstance(prompt, (tuple, list)) and len(prompt) == 2 and all(isinstance(p, str) for p in prompt)


def _joins_pairs(model: TransformerLensModel, model_class: ModelClass) -> bool:
    """Whether the model reads two texts as one, its tokenizer putting a separator between them."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    if is_encoder_decoder(model, model_class) or getattr(tokenizer, "sep_token_id", None) is None:
        return False
    decoder = model_class is ModelClass.HOOKED_TRANSFORMER or bool(wrapped_config(model, "is_decoder"))
    return not decoder and tokenizer.num_special_tokens_to_add(pair=True) > 1


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, (tuple, list)) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)


def _chat_tokens(model: TransformerLensModel, messages: Any) -> Int[Tensor, " pos"]:
    """Messages through the chat template; where the last one is the user's, the assistant is to go on."""
    _require_tokenizer(model, "prompt")
    if not getattr(model.tokenizer, "chat_template", None):
        raise ValueError(
            "prompt: expected a tokenizer with a chat template for chat messages, got one without; set "
            "model.tokenizer.chat_template, or give a string"
        )
    if not all({"role", "content"} <= set(message) for message in messages):
        raise ValueError(f'prompt: expected messages with "role" and "content", got {shown(messages)}')
    goes_on = messages[-1]["role"] != "assistant"
    text = model.tokenizer.apply_chat_template(
        list(map(dict, messages)), tokenize=False, add_generation_prompt=goes_on
    )
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has written them
    return torch.tensor(ids, dtype=torch.long, device=device_of(model))


def of_encoding(
    encoding: Mapping[str, Any], attention_mask: Any, given: dict[str, Any]
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """What a tokenizer returned: its tokens, their mask, and the inputs that models take."""
    if "input_ids" not in encoding:
        raise TypeError(
            f"prompt: expected what a tokenizer returns (with input_ids), got a mapping with {list(encoding)}"
        )
    taken = {name: value for name, value in encoding.items() if name not in {*_NOT_FOR_MODELS, *given}}
    try:
        tensors = {
            name: value if torch.is_tensor(value) else as_model_input(value) for name, value in taken.items()
        }
    except (TypeError, ValueError) as problem:
        raise ValueError(
            "prompt: expected what a tokenizer returns for prompts of one length (padding=True), got "
            f"{problem}"
        ) from problem
    # Some tokenizers give them for models that take none; zeros are what a model reads without.
    if "token_type_ids" in tensors and not bool(tensors["token_type_ids"].any()):
        del tensors["token_type_ids"]
    own_mask = tensors.pop("attention_mask", None)
    tokens = tensors.pop("input_ids")
    return tokens, own_mask if attention_mask is None else attention_mask, {**tensors, **given}


def _is_number(token: object) -> bool:
    """Whether this is a number, a bad one maybe, and no prompt."""
    return isinstance(token, (numbers.Number, np.bool_)) or (torch.is_tensor(token) and token.ndim == 0)


def _tokens(
    model: TransformerLensModel, model_class: ModelClass, prompt: object, prepend_bos: bool | None, name: str
) -> Int[Tensor, " pos"]:
    if isinstance(prompt, str):
        return _tokenize(model, model_class, prompt, prepend_bos)
    if isinstance(prompt, (list, tuple)):
        if not all(map(_is_number, prompt)):
            raise TypeError(
                f"{name}: expected one prompt (a string, or tokens [pos] or [1, pos]), "
                f"got a {type(prompt).__name__} of {len(prompt)}; for several prompts use run_many"
            )
        # Whether the vocabulary has them is asked later; here they have to fit.
        prompt = torch.tensor(
            [whole_number(name, one, -(2**63), 2**63 - 1) for one in prompt], dtype=torch.long, device="cpu"
        )
    if not torch.is_tensor(prompt):
        raise TypeError(f"{name}: expected a string or a tensor of tokens, got {type(prompt).__name__}")
    plain_tensor(name, prompt)
    if prompt.dtype.is_floating_point or prompt.dtype.is_complex or prompt.dtype == torch.bool:
        raise TypeError(f"{name}: expected integer tokens, got a tensor of {prompt.dtype}")
    if prompt.ndim == 2 and prompt.shape[0] == 1:
        prompt = prompt[0]
    if prompt.ndim != 1:
        raise ValueError(
            f"{name}: expected [pos] or [1, pos], got shape {list(prompt.shape)}; for a batch use run_many"
        )
    if prepend_bos is not None:
        raise ValueError(f"prepend_bos: applies to strings only, and {name} is tokens (used as they are)")
    return prompt.to(device_of(model), torch.long)


def _tokenize(
    model: TransformerLensModel, model_class: ModelClass, text: str, prepend_bos: bool | None
) -> Int[Tensor, " pos"]:
    _require_tokenizer(model, "prompt")
    if model_class in (ModelClass.HOOKED_ENCODER, ModelClass.HOOKED_ENCODER_DECODER):
        if prepend_bos is not None:
            raise ValueError(
                f"prepend_bos: {model_class.value} adds its own special tokens; expected None, got "
                f"{prepend_bos}"
            )
        # By default a long prompt would be cut without a word. These classes return masks besides.
        tokens = model.to_tokens(text, truncate=False)[0]
    else:
        options = {} if prepend_bos is None else {"prepend_bos": prepend_bos}
        tokens = model.to_tokens(text, truncate=False, **options)
    return tokens[0].to(device_of(model))


def _require_tokenizer(model: TransformerLensModel, name: str) -> None:
    if getattr(model, "tokenizer", None) is None:
        raise ValueError(
            f"{name}: a string needs a tokenizer and this model has none; "
            "expected tokens [pos], or a model with model.tokenizer set"
        )


def _target_tokens(
    model: TransformerLensModel, model_class: ModelClass, target: object
) -> Int[Tensor, " target_pos"]:
    """The decoder's input: the start token and the target's tokens; given tokens are used as they are."""
    if target is not None and not isinstance(target, str):
        return _tokens(model, model_class, target, None, "target")
    config = getattr(getattr(model, "original_model", None), "config", model.cfg)
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        raise ValueError("target: the model names no decoder_start_token_id; give the decoder's tokens")
    ids = [start]
    if target:
        _require_tokenizer(model, "target")
        ids += model.tokenizer(target, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long, device=device_of(model))


def _real_positions(attention_mask: Tensor | None, tokens: Int[Tensor, " pos"]) -> Bool[Tensor, " pos"]:
    if attention_mask is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    mask = _like_tokens(attention_mask, tokens, "attention_mask")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            "attention_mask: expected 1 for the prompt's own tokens and 0 for padding, got other values"
        )
    real = mask.bool()
    inside = real.nonzero()[:, 0]
    if len(inside) and not bool(real[inside[0] : inside[-1] + 1].all()):
        raise ValueError(
            "attention_mask: expected padding on the left or on the right only, "
            f"got holes inside the prompt: {mask.int().tolist()}"
        )
    return real


def _like_tokens(value: Tensor, tokens: Int[Tensor, " pos"], name: str) -> Tensor:
    if not torch.is_tensor(value):
        raise TypeError(
            f"{name}: expected a tensor of the tokens' shape, got {type(value).__name__}; "
            f"if {name} is meant as an option, run has none of that name (methods take theirs: "
            "lm.ValueZeroing(per_head=True))"
        )
    plain_tensor(name, value)
    whole = name.endswith("_ids") or name == "labels"
    if whole and (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
        raise TypeError(f"{name}: expected whole numbers, got {value.dtype}")
    if value.ndim == 2 and value.shape[0] == 1:
        value = value[0]
    if value.shape != tokens.shape:
        raise ValueError(
            f"{name}: expected the tokens' shape [{len(tokens)}] or [1, ...], got {list(value.shape)}"
        )
    return value.to(tokens.device)


def _checked_tokens(
    model: TransformerLensModel, tokens: Int[Tensor, " pos"], name: str
) -> Int[Tensor, " pos"]:
    if len(tokens) == 0:
        raise ValueError(f"{name}: expected at least one token, got none")
    d_vocab = vocabulary(model, name)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= d_vocab:
        raise ValueError(f"{name}: expected tokens in 0..{d_vocab - 1}, got tokens in {low}..{high}")
    n_ctx = getattr(model.cfg, "n_ctx", None)
    if n_ctx and len(tokens) > n_ctx and not _has_positions_beyond(model):
        raise ValueError(
            f"{name}: expected at most n_ctx={n_ctx} tokens, got {len(tokens)}; cut it, or load the model "
            "with a longer context"
        )
    return tokens


def _has_positions_beyond(model: TransformerLensModel) -> bool:
    """Whether positions from n_ctx on can be computed."""
    kind = getattr(model.cfg, "positional_embedding_type", None)
    wrapped = getattr(model, "original_model", None)
    if kind != "rotary" or wrapped is None:
        return kind in _EXTENSIBLE_POSITIONS
    # Hugging Face computes the angles of any position, but for the tables of GPT-J and CodeGen.
    return not any(name.endswith("embed_positions") for name, _ in wrapped.named_buffers())


def vocabulary(model: TransformerLensModel, name: str) -> int:
    """How many tokens the model knows in a "prompt", or, where that has its own ones, in a "target"."""
    separate = wrapped_config(model, "decoder_vocab_size") if name == "target" else None
    return int(separate or model.cfg.d_vocab)


def device_of(model: TransformerLensModel) -> torch.device:
    """The device of the model's first parameter; where all are offloaded, the one that runs it."""
    own = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), None)
    wrapped: Any = getattr(model, "original_model", model)
    return own or execution_device(wrapped) or torch.device("meta")


def pad_token(model: TransformerLensModel) -> int:
    """The tokenizer's padding token, or 0: padding is masked, so any token in the vocabulary will do."""
    token = getattr(getattr(model, "tokenizer", None), "pad_token_id", None)
    return int(token) if token is not None and 0 <= token < vocabulary(model, "prompt") else 0


def token_strings(model: TransformerLensModel, tokens: Int[Tensor, " pos"]) -> list[str]:
    """One string per token, a leading space kept where the tokenizer has one; numbers without a tokenizer.

    SentencePiece loses the leading space when one token is decoded, so it is read off the raw piece there.
    """
    ids = tokens.tolist()
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return [str(token) for token in ids]
    pieces = tokenizer.convert_ids_to_tokens(ids)
    return [
        piece.replace("▁", " ")
        if isinstance(piece, str) and ("▁" in piece or piece.startswith("##"))
        else tokenizer.decode([token], clean_up_tokenization_spaces=False)
        for token, piece in zip(ids, pieces, strict=True)
    ]
