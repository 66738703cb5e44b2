"""What Whisper reads: 30 seconds of sound, and tokens for the language and the task before a text.

Its encoder always reads a whole window. After the end of a sound the window is padding, to which the model
attends as to anything else.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._classes.model_classes import TransformerLensModel

SPEECH = "whisper"
# The language of a multilingual model whose tokenizer has none set.
_LANGUAGE, _TASK = "<|en|>", "<|transcribe|>"
_ENGLISH_VOCABULARY = 51_864
_START, _NO_TIMES = "<|startoftranscript|>", "<|notimestamps|>"


def model_type_of(model: TransformerLensModel) -> str:
    """Return the model type of transformers; "" without one."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    return str(getattr(config, "model_type", ""))


def is_speech_model(model: TransformerLensModel) -> bool:
    """Return whether the model reads a window of sound and writes text."""
    return model_type_of(model) == SPEECH


def find_extractor(model: TransformerLensModel) -> Any:
    """Return what makes a log-mel spectrogram of a waveform.

    Raises:
        TypeError: If the model has none.
    """
    processor = getattr(model, "processor", None)
    extractor = getattr(processor, "feature_extractor", processor)
    if not hasattr(extractor, "hop_length"):
        raise TypeError(
            "prompt: expected a log-mel spectrogram [band, time] for a model without a processor, got a "
            "waveform; set model.processor = WhisperFeatureExtractor.from_pretrained(name), or give what it "
            "returns"
        )
    return extractor


def check_waveform(model: TransformerLensModel, samples: Float[Tensor, " sample"]) -> None:
    """Raise a ValueError if a waveform is empty or longer than the window."""
    extractor = find_extractor(model)
    window = extractor.n_samples
    if not 0 < len(samples) <= window:
        raise ValueError(
            f"prompt: expected 1 to {window} samples, the {window / extractor.sampling_rate:g} seconds that "
            f"the model reads at {extractor.sampling_rate} samples per second, got {len(samples)}; cut the "
            "sound"
        )


def make_model_input(model: TransformerLensModel, features: Float[Tensor, " example *axes"]) -> Tensor:
    """Return pictures or sounds in the form that the model takes.

    Whisper takes log-mel spectrograms [example, band, time]. Prompts have waveforms [example, sample], or
    spectrograms [example, time, band]. All other models take what the prompts have.
    """
    if not is_speech_model(model):
        return features
    if features.ndim == 3:
        return features.mT.contiguous()
    extractor = find_extractor(model)
    sounds = list(features.detach().to("cpu", torch.float32).numpy())
    encoding = extractor(sounds, sampling_rate=extractor.sampling_rate, return_tensors="pt")
    # Half precision is for the spectrogram: samples that were rounded before would have another one.
    dtype = next(each.dtype for each in model.parameters() if each.dtype.is_floating_point)
    spectrograms: Tensor = encoding["input_features"].to(features.device, dtype)
    return spectrograms


def count_columns(spectrogram: Float[Tensor, "time band"]) -> int:
    """Return the number of columns up to the last one that differs from the final one, which is padding."""
    differs = (spectrogram != spectrogram[-1]).any(-1)
    places = differs.nonzero()
    # Padding has more than one column.
    return int(places[-1]) + 1 if len(places) and not bool(differs[-2]) else len(spectrogram)


def find_first_tokens(model: TransformerLensModel) -> list[int]:
    """Return the tokens that the decoder reads before a text: the start, the language, the task, no times.

    They are the tokenizer's own (`set_prefix_tokens`) if it has a language, else those of a transcript in
    English. Models for English alone have no language and no task.

    Raises:
        ValueError: If the model has no tokenizer, or the tokenizer has no such tokens.
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(
            "tokenizer: expected a model with one, which has the tokens before a text, got none; set "
            "model.tokenizer = WhisperTokenizer.from_pretrained(name, language='english', task='transcribe')"
        )
    own = list(getattr(tokenizer, "prefix_tokens", None) or ())
    if own and getattr(tokenizer, "language", None) is not None:
        return own
    known = tokenizer.get_vocab()
    names = [
        _START,
        *((_LANGUAGE, _TASK) if _is_multilingual(model) and _LANGUAGE in known else ()),
        _NO_TIMES,
    ]
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(
            f"target: expected a tokenizer with the tokens {names}, which begin a transcript, got one "
            f"without {missing}; give the decoder's tokens, from the start token on"
        )
    return [int(known[name]) for name in names]


def _is_multilingual(model: TransformerLensModel) -> bool:
    wrapped: Any = getattr(model, "original_model", None)
    said = getattr(getattr(wrapped, "generation_config", None), "is_multilingual", None)
    # The models for English alone have this vocabulary, which has no token for a language of its own.
    return wrapped.config.vocab_size != _ENGLISH_VOCABULARY if said is None else bool(said)


def note_language(model: TransformerLensModel) -> tuple[str, ...]:
    """Return a note if a text is taken for English because the tokenizer has no language."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    if getattr(tokenizer, "language", None) is not None or not _is_multilingual(model):
        return ()
    if tokenizer.get_vocab().get(_LANGUAGE) not in find_first_tokens(model):
        return ()
    return (
        "target: model.tokenizer has no language, so the decoder reads <|en|> and <|transcribe|> before the "
        "text; for others load it with WhisperTokenizer.from_pretrained(name, language='french', "
        "task='transcribe')",
    )
