"""Convert what a user gives as a prompt to the tensors that a model takes."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix._classes.known_faults import picture_fault
from lens_mix._classes.model_classes import (
    ModelClass,
    TransformerLensModel,
    UnsupportedModelError,
    reads_features,
    transformer_lens_version,
    wrapped_config,
)
from lens_mix._classes.offloading import execution_device
from lens_mix._inputs import speech, texts
from lens_mix._inputs.batches import Prompt
from lens_mix._inputs.pictures import (
    PICTURE_INPUTS,
    Picture,
    image_token,
    note_missing_pixels,
    note_missing_types,
    only_grid,
)
from lens_mix.arguments import check_dense_tensor, check_flags, check_whole_number
from lens_mix.plain_text import advise, as_text

# Tokenizers return these on request, but no model takes them.
_NOT_FOR_MODELS = {"offset_mapping", "special_tokens_mask", "length", "overflow_to_sample_mapping"}

# These are names of inputs that are pictures, sound or embeddings.
_NOT_TEXT = re.compile(r"pixel|image|video|audio|speech|input_features|input_values|inputs_embeds")

# Positions of these kinds are computed for any length. Learned positions are a table that ends at n_ctx.
_EXTENSIBLE_POSITIONS = {"alibi", "relative_positional_bias", "none"}


def is_encoder_decoder(model: TransformerLensModel, model_class: ModelClass) -> bool:
    """Return whether the model takes a pair of source and target."""
    is_hooked = model_class is ModelClass.HOOKED_ENCODER_DECODER
    return is_hooked or bool(wrapped_config(model, "is_encoder_decoder"))


def is_causal_model(model: TransformerLensModel, model_class: ModelClass) -> bool:
    """Return whether the model is a causal decoder according to its class and its configuration."""
    if model_class is ModelClass.HOOKED_ENCODER or is_encoder_decoder(model, model_class):
        return False
    if reads_features(model):
        return False
    # TransformerBridge 3 sets attention_dir="causal" for BERT too, so the name of the wrapped class decides.
    name = type(getattr(model, "original_model", None)).__name__
    if "MaskedLM" in name or "NextSentence" in name or "PreTraining" in name:
        return bool(wrapped_config(model, "is_decoder"))
    return getattr(model.cfg, "attention_dir", "causal") == "causal"


def further_inputs(model: TransformerLensModel, model_class: ModelClass) -> list[str]:
    """Return the inputs that the forward pass takes besides tokens. It ignores others silently."""
    if model_class is not ModelClass.BRIDGE:
        return ["token_type_ids"] if model_class is ModelClass.HOOKED_ENCODER else []
    wrapped: Any = getattr(model, "original_model", None)
    parameters = inspect.signature(type(wrapped).forward).parameters.values()
    given = {"input_ids", "attention_mask", "use_cache", "decoder_input_ids", "self"}
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in given]


def read_prompt(
    model: TransformerLensModel,
    model_class: ModelClass,
    prompt: object,
    *,
    prepend_bos: bool | None = None,
    attention_mask: Any = None,
    inputs: Mapping[str, Any] | None = None,
    target_for: str | None = None,
) -> Prompt:
    """Return the tensors of one prompt that the user gave.

    A prompt is one of these:

    - A string, or a pair of strings for an encoder (BERT: `[CLS] a [SEP] b [SEP]`, with token types). Bytes
      are text in UTF-8. For a causal decoder, the tokens are those of TransformerLens (`to_tokens`,
      `prepend_bos`), with a note if the tokenizer's own differ. For other models they are those of
      `model.tokenizer(text)` or `model.tokenizer(a, b)`, with the special tokens of the tokenizer's files
      (`own_template`).
    - Tokens [pos] or [1, pos]: a tensor, a NumPy array or a list of whole numbers.
    - What a tokenizer of Hugging Face returns: a `BatchEncoding` with its mask and token types.
    - Chat messages, `[{"role": "user", "content": "..."}]`, which the tokenizer's chat template converts.
    - What the processor of a model of pictures and text returns: a `BatchFeature` with `pixel_values`, for a
      TransformerBridge. The tokens have the image token at the position of each patch.
    - (source, target) for an encoder-decoder. The source is any of the above, the target is a string or
      tokens. Tokens are what the decoder reads, from the start token on. A string becomes
      `model.tokenizer(text_target=target)`, shifted to the right as the model does it in training: T5 reads
      `<pad> a b`, BART `</s> <s> a b`, mBART `ro_RO a b`. The decoder does not read the end of the sentence
      that the tokenizer adds; it only predicts it.
    - For a model of pictures or sound: pixels [channel, height, width], a waveform [sample], a spectrogram
      [time, band], what the model's processor returns, or a PIL picture
      (`lens_mix._inputs.features.read_features`). For Whisper, (sound, target). The decoder reads the start
      token, the language, the task and "no times" before a string.

    Args:
        model: The model.
        model_class: Its class.
        prompt: The prompt.
        prepend_bos: As in TransformerLens, for strings of causal decoders only. None: the model's default.
        attention_mask: [pos] or [1, pos], 1 for the prompt's own tokens. Padding is removed.
        inputs: Further model inputs by name, [pos] or [1, pos] each. `decoder_input_ids` is the target.
        target_for: The part of the model that needs a target. None: without a target, the decoder reads only
            the start token.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has a wrong value, or does not fit the model.
    """
    if reads_features(model):
        if prepend_bos is not None:
            raise ValueError(f"prepend_bos: expected None for a model without tokens, got {prepend_bos}")
        return _read_features(model, model_class, prompt, attention_mask, inputs, target_for)
    prompt = read_plain("prompt", prompt)
    text = _as_text(prompt)
    given = dict(inputs or {})
    if prepend_bos is not None:
        check_flags(prepend_bos=prepend_bos)
    encoder_decoder = is_encoder_decoder(model, model_class)
    prompt, target = _source_and_target(model, model_class, prompt)
    notes: tuple[str, ...] = ()
    if _is_chat(prompt):
        _require_tokenizer(model, "prompt")
        prompt = _long_tensor(model, texts.chat_ids(model.tokenizer, prompt))
    elif isinstance(prompt, str) or _is_pair_of_strings(prompt):
        prompt, notes = _read_text(model, model_class, prompt, prepend_bos)
        prepend_bos = None
    if isinstance(prompt, Mapping):
        prompt, attention_mask, given = read_encoding(prompt, attention_mask, given)
    if encoder_decoder:
        target = _take_target(given, target, "source", target_for)
    elif given.pop("decoder_input_ids", None) is not None:
        raise ValueError(
            f"decoder_input_ids: expected an encoder-decoder, got a {type(model).__name__} without a decoder"
        )
    padded = _tokens(model, prompt, prepend_bos, "prompt")
    real = _real_positions(attention_mask, padded)
    tokens = _checked_tokens(model, padded[real], "prompt")
    picture_inputs = _picture_inputs(model, model_class, given)
    extra = {name: _like_tokens(value, padded, name)[real] for name, value in given.items()}
    notes += _notes_on_length(model, tokens, "prompt")
    pictures: tuple[Picture, ...] = ()
    if picture_inputs:
        from lens_mix._inputs.picture_inputs import find_pictures

        pictures, further = find_pictures(model, tokens, picture_inputs)
        notes += further + note_missing_types(further_inputs(model, model_class), extra)
    else:
        notes += note_missing_pixels(model, tokens)
    target_tokens: Tensor | None = None
    if encoder_decoder:
        if isinstance(target, str):
            notes += texts.notes_on_target(getattr(model, "tokenizer", None))
        target_tokens = _checked_tokens(model, _target_tokens(model, target), "target")
        notes += _notes_on_length(model, target_tokens, "target")
    grid = only_grid(pictures)
    return Prompt(tokens, target_tokens, extra, text, notes, pictures, picture_inputs, grid=grid)


def _read_features(
    model: TransformerLensModel,
    model_class: ModelClass,
    prompt: Any,
    attention_mask: Tensor | None,
    inputs: Mapping[str, Any] | None,
    target_for: str | None,
) -> Prompt:
    """Return the prompt of a picture or of sound, with what a decoder reads if there is one."""
    from lens_mix._inputs.features import read_features

    given, device = dict(inputs or {}), device_of(model)
    if not is_encoder_decoder(model, model_class):
        return read_features(model, prompt, device, attention_mask, given)
    features, target = _source_and_target(model, model_class, prompt)
    if isinstance(features, Mapping):
        given = {name: features[name] for name in ("decoder_input_ids", "labels") if name in features} | given
    target = _take_target(given, target, "sound", target_for)
    read = read_features(model, features, device, attention_mask, given)
    tokens = _checked_tokens(model, _target_tokens(model, target), "target")
    notes = read.notes + (speech.note_language(model) if isinstance(target, str) else ())
    return dataclasses.replace(read, target=tokens, notes=notes + _notes_on_length(model, tokens, "target"))


def read_plain(name: str, prompt: Any) -> Any:
    """Return a prompt in which bytes, and text of NumPy or pyarrow, are strings.

    Raises:
        ValueError: If bytes are not UTF-8, or text has a half of a surrogate pair.
    """
    if not isinstance(prompt, (tuple, list)) or len(prompt) != 2:
        return as_text(name, prompt)
    pair = [as_text(name, one) for one in prompt]
    return pair if isinstance(prompt, list) else tuple(pair)


def _picture_inputs(
    model: TransformerLensModel, model_class: ModelClass, given: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the inputs of pictures, which are removed from the given ones; none if the model takes none.

    Raises:
        TypeError: If they are not tensors of numbers.
        ValueError: If pixels are missing, NaN or infinite.
        UnsupportedModelError: If TransformerLens is known to run the model wrongly on pictures.
    """
    names = PICTURE_INPUTS & given.keys() & set(further_inputs(model, model_class))
    if not names or image_token(model) is None:
        return {}
    if "pixel_values" not in names:
        raise ValueError(
            f"pixel_values: expected the pixels of the pictures beside {sorted(names)}, got none"
        )
    fault = picture_fault(model, transformer_lens_version())
    if fault is not None:
        raise UnsupportedModelError(fault)
    inputs = {name: given.pop(name) for name in sorted(names)}
    for name, value in inputs.items():
        if not torch.is_tensor(value):
            inputs[name] = value = tensor_of(value, name)
        check_dense_tensor(name, value)
    pixels = inputs["pixel_values"]
    if not pixels.is_floating_point():
        raise TypeError(
            f"pixel_values: expected real numbers, as the model's processor returns, got {pixels.dtype}"
        )
    if not bool(torch.isfinite(pixels).all()):
        raise ValueError("pixel_values: expected finite numbers, got NaN or infinity")
    if pixels.ndim == 3:
        # One picture without a batch axis.
        inputs["pixel_values"] = pixels[None]
    return inputs


def _source_and_target(
    model: TransformerLensModel, model_class: ModelClass, prompt: object
) -> tuple[object, object]:
    """Return the source and the target of a prompt; the target is None if there is none."""
    is_pair = isinstance(prompt, (tuple, list)) and len(prompt) == 2 and not all(map(_is_number, prompt))
    if not is_pair or _is_chat(prompt):
        return prompt, None
    source, target = cast(Sequence[object], prompt)
    if is_encoder_decoder(model, model_class):
        return source, target
    if _is_pair_of_strings(prompt) and _joins_pairs(model, model_class):
        return prompt, None
    raise ValueError(
        "prompt: a pair (source, target) is for encoder-decoders, and a pair of strings for encoders "
        f"whose tokenizer joins pairs; {type(model).__name__} is neither; for several prompts use "
        "run_many"
    )


def _take_target(given: dict[str, Any], target: object, source: str, target_for: str | None) -> object:
    """Return what the decoder reads, from the pair or from the inputs, out of which it is taken.

    Args:
        given: The further inputs by name.
        target: The target of the pair; None if there is none.
        source: What the encoder reads, for the errors: "source" or "sound".
        target_for: The part of the model that needs a target.

    Raises:
        ValueError: If the target was given twice, as labels, or not at all though a part needs it.
    """
    by_name, labels = given.pop("decoder_input_ids", None), given.pop("labels", None)
    if by_name is not None and target is not None:
        raise ValueError("prompt: the target was given twice, in the pair and as decoder_input_ids")
    target = target if by_name is None else by_name
    if target is None and labels is not None:
        raise ValueError(
            "labels: expected a target that the decoder reads, got labels, which it predicts; give a pair "
            f"({source}, target) with the target's text, or decoder_input_ids"
        )
    if target is None and target_for is not None:
        raise ValueError(
            f"target: expected a pair ({source}, target) for part={target_for!r}, got the {source} alone; "
            'the target is a string ("" for an empty one), or the decoder\'s tokens from the start token on'
        )
    return target


def has_target(model: TransformerLensModel, model_class: ModelClass, prompt: object) -> bool:
    """Return whether a prompt gives what the decoder reads, as a pair or by name."""
    if not is_encoder_decoder(model, model_class):
        return False
    if isinstance(prompt, Mapping):
        return prompt.get("decoder_input_ids") is not None
    return _source_and_target(model, model_class, prompt)[1] is not None


def _as_text(prompt: object) -> Any:
    """Return the prompt if it is text, for a map's record; None if it is not."""
    is_text = isinstance(prompt, str) or _is_chat(prompt) or _is_pair_of_strings(prompt)
    return prompt if is_text else None


def _is_pair_of_strings(prompt: object) -> bool:
    return isinstance(prompt, (tuple, list)) and len(prompt) == 2 and all(isinstance(p, str) for p in prompt)


def _joins_pairs(model: TransformerLensModel, model_class: ModelClass) -> bool:
    """Return whether the tokenizer joins two texts with special tokens, for a model that is not causal."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    if tokenizer is None or is_causal_model(model, model_class):
        return False
    with texts.own_template(tokenizer):
        added: int = tokenizer.num_special_tokens_to_add(pair=True)
    return added > 0


def _is_chat(prompt: object) -> bool:
    """Return whether these are chat messages. Mappings with input_ids are what tokenizers return."""
    several = isinstance(prompt, (tuple, list)) and bool(prompt)
    return several and all(isinstance(m, Mapping) and "input_ids" not in m for m in cast(Any, prompt))


def _read_text(
    model: TransformerLensModel, model_class: ModelClass, text: Any, prepend_bos: bool | None
) -> tuple[object, tuple[str, ...]]:
    """Return the tokens of a string or of a pair of strings, or what the tokenizer returns, and notes."""
    _require_tokenizer(model, "prompt")
    if isinstance(text, str) and is_causal_model(model, model_class):
        return _causal_tokens(model, text, prepend_bos)
    if prepend_bos is not None:
        reason = (
            f"expected None for {model_class.value}, whose tokenizer adds special tokens, got {prepend_bos}"
            if isinstance(text, str)
            else f"expected None for a pair, which the tokenizer joins, got {prepend_bos}"
        )
        raise ValueError(
            f"prepend_bos: {reason}; to choose the tokens, give tokens instead of a string, for example "
            "model.tokenizer(text, add_special_tokens=False)"
        )
    encoding = texts.encoded(model.tokenizer, text)
    taken = {"input_ids", "token_type_ids"} & {"input_ids", *further_inputs(model, model_class)}
    read = {name: encoding[name] for name in taken if name in encoding}
    return read, texts.notes_on_template(model.tokenizer)


def _causal_tokens(
    model: TransformerLensModel, text: str, prepend_bos: bool | None
) -> tuple[Int[Tensor, " pos"], tuple[str, ...]]:
    """Return TransformerLens's tokens of a string, and notes if those of the tokenizer differ."""

    def read(prepend_bos: bool | None) -> Int[Tensor, " pos"]:
        options = {} if prepend_bos is None else {"prepend_bos": prepend_bos}
        # By default TransformerLens truncates a long prompt without a warning.
        tokens: Tensor = model.to_tokens(text, truncate=False, **options)[0]
        return tokens

    tokens = read(prepend_bos)
    notes = texts.notes_on_string(
        model.tokenizer,
        text,
        tokens.tolist(),
        lambda value: read(value).tolist(),
        prepend_bos is not None,
    )
    return tokens, notes


def read_encoding(
    encoding: Mapping[str, Any], attention_mask: Any, given: dict[str, Any]
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Return the tokens, the mask and the further inputs of what a tokenizer returned.

    Args:
        encoding: What the tokenizer returned.
        attention_mask: A mask that replaces the tokenizer's; None: the tokenizer's.
        given: Further inputs of the user, which replace the tokenizer's.

    Raises:
        TypeError: If there are no tokens in it.
        ValueError: If its prompts have different lengths.
    """
    if "input_ids" not in encoding:
        raise TypeError(
            f"prompt: expected what a tokenizer returns (with input_ids), got a mapping with {list(encoding)}"
        )
    taken = {name: value for name, value in encoding.items() if name not in {*_NOT_FOR_MODELS, *given}}
    try:
        tensors = {
            name: value if torch.is_tensor(value) else tensor_of(value, name) for name, value in taken.items()
        }
    except (TypeError, ValueError) as problem:
        raise ValueError(
            "prompt: expected what a tokenizer returns for prompts of one length (padding=True), got "
            f"{problem}"
        ) from problem
    # Some tokenizers return token types for models that take none. Without them a model reads zeros.
    if "token_type_ids" in tensors and not bool(tensors["token_type_ids"].any()):
        del tensors["token_type_ids"]
    own_mask = tensors.pop("attention_mask", None)
    tokens = tensors.pop("input_ids")
    return tokens, own_mask if attention_mask is None else attention_mask, {**tensors, **given}


def _is_number(token: object) -> bool:
    """Return whether this is one number of any kind, and not a prompt."""
    return isinstance(token, (numbers.Number, np.bool_)) or (torch.is_tensor(token) and token.ndim == 0)


def _tokens(
    model: TransformerLensModel, prompt: object, prepend_bos: bool | None, name: str
) -> Int[Tensor, " pos"]:
    """Return tokens that were given as numbers, after a check of their form.

    Raises:
        TypeError: If they are not whole numbers.
        ValueError: If they have a wrong shape, or `prepend_bos` was given.
    """
    if isinstance(prompt, np.ndarray):
        prompt = tensor_of(prompt, name)
    if isinstance(prompt, (list, tuple)):
        if not all(map(_is_number, prompt)):
            raise TypeError(
                f"{name}: expected one prompt (a string, or tokens [pos] or [1, pos]), "
                f"got a {type(prompt).__name__} of {len(prompt)}; for several prompts use run_many"
            )
        # This is the range of int64. A later check compares the tokens with the vocabulary.
        prompt = torch.tensor(
            [check_whole_number(name, one, -(2**63), 2**63 - 1) for one in prompt],
            dtype=torch.long,
            device="cpu",
        )
    if not torch.is_tensor(prompt):
        hint = "" if name == "prompt" else " (labels of a tokenizer are not what the decoder reads)"
        hint *= isinstance(prompt, Mapping)
        hint += advise(prompt)
        raise TypeError(f"{name}: expected a string or a tensor of tokens, got {type(prompt).__name__}{hint}")
    check_dense_tensor(name, prompt)
    if not prompt.numel():
        # torch makes floats of an empty list, and of an empty string's tokens.
        prompt = prompt.long()
    if prompt.dtype.is_floating_point or prompt.dtype.is_complex or prompt.dtype == torch.bool:
        raise TypeError(f"{name}: expected integer tokens, got a tensor of {prompt.dtype}")
    if prompt.ndim == 2 and prompt.shape[0] == 1:
        prompt = prompt[0]
    if prompt.ndim != 1:
        raise ValueError(
            f"{name}: expected [pos] or [1, pos], got shape {list(prompt.shape)}; for a batch use run_many"
        )
    if prepend_bos is not None:
        raise ValueError(
            f"prepend_bos: expected None for tokens, which are used as they are, got {prepend_bos} ({name})"
        )
    return prompt.to(device_of(model), torch.long)


def tensor_of(values: Any, name: str) -> Tensor:
    """Return an array or a list of numbers as a tensor on the CPU, whatever torch's defaults are.

    torch accepts neither all dtypes of NumPy nor all strides. Whole numbers become int64, and the other
    numbers of a list float32.

    Raises:
        TypeError: If they are not numbers.
        ValueError: If lists have different lengths, or a number is too large for int64.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "iufcb":
        raise TypeError(f"{name}: expected an array of whole numbers, got one of {array.dtype}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > 2**63 - 1:
        raise ValueError(f"{name}: expected numbers below 2**63, got {int(array.max())}")
    dtype = np.dtype(np.int64) if array.dtype.kind in "iu" else array.dtype.newbyteorder("=")
    if array.dtype.kind == "f" and not isinstance(values, np.ndarray):
        dtype = np.dtype(np.float32)
    return torch.from_numpy(array.astype(dtype))


def _long_tensor(model: TransformerLensModel, ids: Sequence[int]) -> Int[Tensor, " pos"]:
    return torch.tensor(list(ids), dtype=torch.long, device=device_of(model))


def _require_tokenizer(model: TransformerLensModel, name: str) -> None:
    if getattr(model, "tokenizer", None) is None:
        raise ValueError(
            f"{name}: a string needs a tokenizer and this model has none; "
            "expected tokens [pos], or a model with model.tokenizer set"
        )


def _target_tokens(model: TransformerLensModel, target: object) -> Int[Tensor, " target_pos"]:
    """Return the tokens that the decoder reads: given tokens, or those of a string as in training."""
    if target is not None and not isinstance(target, str):
        return _tokens(model, target, None, "target")
    if isinstance(target, str) and speech.is_speech_model(model):
        _require_tokenizer(model, "target")
        first = speech.find_first_tokens(model)
        return _long_tensor(model, [*first, *texts.token_ids(model.tokenizer, target)])
    config = getattr(getattr(model, "original_model", None), "config", model.cfg)
    start = getattr(config, "decoder_start_token_id", None)
    has_tokenizer = getattr(model, "tokenizer", None) is not None
    # With a tokenizer, an empty string also has the special tokens that the tokenizer adds to a text.
    if not target and start is not None and (target is None or not has_tokenizer):
        return _long_tensor(model, [start])
    _require_tokenizer(model, "target")
    return _long_tensor(model, texts.decoder_input(model.tokenizer, target or "", _find_shift(model, start)))


def _find_shift(model: TransformerLensModel, start: int | None) -> Callable[[Sequence[int]], list[int]]:
    """Return the function that makes the decoder's input from labels: the model's own if there is one."""
    own = getattr(getattr(model, "original_model", None), "prepare_decoder_input_ids_from_labels", None)

    def shift(labels: Sequence[int]) -> list[int]:
        if own is None and start is None:
            raise ValueError("target: the model has no decoder_start_token_id; give the decoder's tokens")
        if own is None:
            return [cast(int, start), *labels[:-1]]
        try:
            shifted: list[int] = own(_long_tensor(model, labels)[None])[0].tolist()
            return shifted
        except (ValueError, AssertionError) as problem:
            raise ValueError(
                f"target: the model can't make its decoder's input from labels ({problem}); give the tokens, "
                "from the start token on"
            ) from problem

    return shift


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
            f"got zeros inside the prompt: {mask.int().tolist()}"
        )
    return real


def _like_tokens(value: Any, tokens: Int[Tensor, " pos"], name: str) -> Tensor:
    """Return a further input of the model, after a check that it has one number per token.

    Raises:
        TypeError: If it is not a tensor of the expected kind of number.
        ValueError: If it is not for text, or has another shape than the tokens.
    """
    if isinstance(value, np.ndarray):
        value = tensor_of(value, name)
    if not torch.is_tensor(value):
        raise TypeError(
            f"{name}: expected a tensor of the tokens' shape, got {type(value).__name__}; "
            f"if {name} is meant as an option, run has none of that name (methods take theirs: "
            "lm.methods.ValueZeroing(per_head=True))"
        )
    check_dense_tensor(name, value)
    if _NOT_TEXT.search(name) or value.ndim > 2:
        raise ValueError(
            f"{name}: expected text alone (inputs [pos] or [1, pos], one number per token), got "
            f"{list(value.shape)}; the model takes no such input beside its tokens, or lens_mix can't map "
            "it: give the tokens of a prompt without it"
        )
    whole = name.endswith("_ids") or name == "labels"
    if whole and (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
        raise TypeError(f"{name}: expected whole numbers, got {value.dtype}")
    if value.ndim == 2 and value.shape[0] == 1:
        value = value[0]
    if value.shape != tokens.shape:
        raise ValueError(
            f"{name}: expected the tokens' shape [{len(tokens)}] or [1, ...], got {list(value.shape)}"
        )
    placed: Tensor = value.to(tokens.device)
    return placed


def _checked_tokens(
    model: TransformerLensModel, tokens: Int[Tensor, " pos"], name: str
) -> Int[Tensor, " pos"]:
    if len(tokens) == 0:
        raise ValueError(f"{name}: expected at least one token, got none")
    d_vocab = vocabulary(model, name)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= d_vocab:
        raise ValueError(f"{name}: expected tokens in 0..{d_vocab - 1}, got tokens in {low}..{high}")
    n_ctx = most_tokens(model)
    if n_ctx is not None and len(tokens) > n_ctx:
        raise ValueError(
            f"{name}: expected at most n_ctx={n_ctx} tokens, got {len(tokens)}; shorten it, or load the "
            "model with a longer context"
        )
    return tokens


def most_tokens(model: TransformerLensModel) -> int | None:
    """Return the number of tokens that the model has positions for; None if it computes any position."""
    n_ctx: int | None = getattr(model.cfg, "n_ctx", None)
    return n_ctx if n_ctx and not _has_positions_beyond(model) else None


def _notes_on_length(model: TransformerLensModel, tokens: Int[Tensor, " pos"], name: str) -> tuple[str, ...]:
    """Return a note if a prompt is longer than the context that the model was trained with."""
    longest = context_length(model, name)
    if longest is None or len(tokens) <= longest:
        return ()
    return (
        f"{name}: {len(tokens)} tokens are more than the context length that the model was trained with, "
        f"{longest}; positions beyond it were never trained",
    )


def context_length(model: TransformerLensModel, name: str) -> int | None:
    """Return the context length in tokens that the model was trained with; None if it is not known.

    Args:
        model: The model.
        name: "prompt" or "target".
    """
    wrapped: Any = getattr(getattr(model, "original_model", None), "config", None)
    if wrapped is None:
        return getattr(model.cfg, "n_ctx", None)
    # If the model also reads pictures or sound, its text model has a separate configuration.
    config = wrapped.get_text_config() if hasattr(wrapped, "get_text_config") else wrapped
    sides = ("decoder", "target") if name == "target" else ("encoder", "source")
    own = (f"max_{sides[0]}_position_embeddings", f"max_{sides[1]}_positions")
    names = (*own, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
    found = next((size for each in names if isinstance(size := getattr(config, each, None), int)), None)
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    trained, factor = rotary.get("original_max_position_embeddings"), rotary.get("factor")
    if found is None or not trained or not factor:
        return found
    # The configured length may be the length before an extension (by YaRN, for example).
    return max(found, int(trained * factor))


def _has_positions_beyond(model: TransformerLensModel) -> bool:
    """Return whether positions from n_ctx on can be computed."""
    kind = getattr(model.cfg, "positional_embedding_type", None)
    wrapped = getattr(model, "original_model", None)
    if kind != "rotary" or wrapped is None:
        return kind in _EXTENSIBLE_POSITIONS
    # Hugging Face computes the angles of any position, except in GPT-J and CodeGen, which have tables.
    return not any(name.endswith("embed_positions") for name, _ in wrapped.named_buffers())


def vocabulary(model: TransformerLensModel, name: str) -> int:
    """Return the size of the vocabulary of a "prompt" or of a "target", which may have a separate one."""
    separate = wrapped_config(model, "decoder_vocab_size") if name == "target" else None
    return int(separate or model.cfg.d_vocab)


def device_of(model: TransformerLensModel) -> torch.device:
    """Return the device of the first parameter, or the device that runs the model if it is offloaded."""
    own = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), None)
    wrapped: Any = getattr(model, "original_model", model)
    return own or execution_device(wrapped) or torch.device("meta")


def pad_token(model: TransformerLensModel) -> int:
    """Return the tokenizer's padding token, or 0. Padding is masked, so any token is correct."""
    token = getattr(getattr(model, "tokenizer", None), "pad_token_id", None)
    return int(token) if token is not None and 0 <= token < vocabulary(model, "prompt") else 0
