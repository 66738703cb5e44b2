"""Write text with the model: the tokens that its `generate` returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lens_mix.arguments import describe_value
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.lens.replay import is_out_of_memory

# lm.trace sets these itself, or has arguments of its own for them.
_OWN = ("self", "input", "max_new_tokens", "return_type", "prepend_bos", "generation_kwargs")
_OTHER_RESULTS = ("output_logits", "return_cache", "return_input_tokens", "names_filter")
# With other values of these options, the next token may not be the most probable one.
_MOST_PROBABLE = {
    "do_sample": False,
    "freq_penalty": 0.0,
    "repetition_penalty": 1.0,
    "forced_bos_token_id": None,
    "stopping_criteria": None,
}


def check_options(model: TransformerLensModel, options: Mapping[str, Any]) -> None:
    """Raise a TypeError unless the model's `generate` has options of these names."""
    generate = getattr(model, "generate", None)
    known = [] if generate is None else list(inspect.signature(generate).parameters)
    taken = [name for name in known if name not in (*_OWN, *_OTHER_RESULTS)]
    for name, value in options.items():
        if name not in taken:
            raise TypeError(
                f"{name}: expected an argument of lm.trace or an option of model.generate ({taken}), got "
                f"{name}={describe_value(value)}"
            )


def takes_most_probable(options: Mapping[str, Any]) -> bool:
    """Return whether each token that is written with these options is the most probable one."""
    return all(options.get(name, usual) == usual for name, usual in _MOST_PROBABLE.items())


def has_cache_option(model: TransformerLensModel) -> bool:
    """Return whether the model's `generate` can run without a cache of keys and values."""
    generate = getattr(model, "generate", None)
    return generate is not None and "use_past_kv_cache" in inspect.signature(generate).parameters


def generate_tokens(
    model: TransformerLensModel,
    tokens: Int[Tensor, " pos"],
    count: int,
    *,
    part: str | None,
    seed: int,
    options: Mapping[str, Any],
) -> Int[Tensor, " written"]:
    """Return the tokens that a model writes after a prompt, without the end of the text at which it stops.

    The most probable token is taken, unless the options say otherwise (`do_sample=True`, `temperature=`, …).

    Args:
        model: The model.
        tokens: The prompt, or the source of an encoder-decoder.
        count: The largest number of tokens.
        part: "joint" for an encoder-decoder, whose tokens start with the decoder's start token.
        seed: The seed of the draws. The state of torch's own generators is as before afterwards.
        options: Options of the model's `generate`.

    Raises:
        ValueError: If the model writes nothing but the end of the text.
        UnsupportedModelError: If the model cannot generate.
    """
    lens = Lens(model, part)
    ends = _find_ends(model)
    chosen: dict[str, Any] = {"do_sample": False, "verbose": False, "stop_at_eos": bool(ends), **options}
    if ends and chosen["stop_at_eos"]:
        chosen.setdefault("eos_token_id", ends if len(ends) > 1 else ends[0])
    devices = [lens.device] if lens.device.type == "cuda" else []
    with torch.random.fork_rng(devices), lens.evaluation_mode():
        torch.manual_seed(seed)
        try:
            output: Tensor = lens.model.generate(
                tokens[None].to(lens.device), max_new_tokens=count, return_type="tokens", **chosen
            )
        except Exception as problem:
            if is_out_of_memory(problem):
                raise
            needs_tokenizer = " (in some releases it needs a tokenizer)" * (lens.tokenizer is None)
            raise UnsupportedModelError(
                f"generate: expected model.generate to write text, got {type(problem).__name__}: "
                f"{problem}{needs_tokenizer}; give what was written as answer="
            ) from problem
    written = output[0] if part == "joint" else output[0, len(tokens) :]
    is_end = [bool(chosen["stop_at_eos"]) and token in ends for token in written.tolist()]
    start = 1 if part == "joint" else 0
    stop = is_end.index(True, start) if True in is_end[start:] else len(written)
    if stop <= start:
        raise ValueError(
            "generate: expected the model to write at least one token, got only the end of the text; change "
            "the prompt, or give answer="
        )
    return written[:stop].to(tokens)


def _find_ends(model: TransformerLensModel) -> list[int]:
    """Return the tokens that end a text: those of the tokenizer and of the wrapped model's configuration."""
    tokenizer = getattr(model, "tokenizer", None)
    generation = getattr(getattr(model, "original_model", None), "generation_config", None)
    found: list[int] = []
    for given in (getattr(tokenizer, "eos_token_id", None), getattr(generation, "eos_token_id", None)):
        listed = given if isinstance(given, (list, tuple)) else [given]
        found += [int(token) for token in listed if token is not None and int(token) not in found]
    return found
