"""Write text with the model, and compare it with the predictions of one pass over all tokens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lens_mix.arguments import describe_value
from lens_mix.lens.batches import Prompt
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError, model_class_of
from lens_mix.lens.pictures import join_inputs
from lens_mix.lens.prompts import is_encoder_decoder
from lens_mix.lens.replay import is_out_of_memory
from lens_mix.traces.attribution import Written, read_written, rounding_of
from lens_mix.traces.reading import PromptText, Reading, add_answer

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
# These options have no effect unless tokens are drawn.
_OF_DRAWS = ("temperature", "top_k", "top_p")
# Before tokens are drawn, as many of the most probable ones are compared with the predictions of a pass.
_TRIED = 8


def check_options(model: TransformerLensModel, options: Mapping[str, Any]) -> None:
    """Check the options of the model's `generate`.

    Raises:
        TypeError: If `generate` has no option of a name, or `lm.trace` sets it itself.
        ValueError: If an option has no effect, because no tokens are drawn.
    """
    generate = getattr(model, "generate", None)
    known = [] if generate is None else list(inspect.signature(generate).parameters)
    taken = [name for name in known if name not in (*_OWN, *_OTHER_RESULTS)]
    for name, value in options.items():
        if name not in taken:
            raise TypeError(
                f"{name}: expected an argument of lm.trace or an option of model.generate ({taken}), got "
                f"{name}={describe_value(value)}"
            )
        if name in _OF_DRAWS and value is not None and not options.get("do_sample", False):
            raise ValueError(
                f"{name}: expected do_sample=True with it, because by default the most probable token is "
                f"written, got {name}={describe_value(value)} alone"
            )


def write(
    model: TransformerLensModel,
    prompt: Prompt,
    text: PromptText | None,
    count: int,
    seed: int,
    options: Mapping[str, Any],
) -> tuple[Reading, Written, list[str]]:
    """Return the prompt and what the model writes after it, what a pass gives to it, and notes.

    The most probable tokens are compared with the predictions of one pass over all tokens. If some differ,
    the text is written again without the cache of keys and values, which is wrong in some models. Before
    other tokens are drawn, a few of the most probable ones are compared.

    Args:
        model: The model.
        prompt: The prompt, as `read_prompt_alone` returns it.
        text: The text of the prompt; None if it was given as tokens.
        count: The largest number of tokens.
        seed: The seed of the draws.
        options: Options of the model's `generate`.

    Raises:
        UnsupportedModelError: If the model cannot write, or its tokens are not those that the pass predicts.
    """
    part = "joint" if is_encoder_decoder(model, model_class_of(model)) else None
    allowed = rounding_of(Lens(model, part))

    def attempt(count: int, options: Mapping[str, Any]) -> tuple[Reading, Written]:
        answer = _generate_tokens(model, prompt, count, part=part, seed=seed, options=options)
        reading = add_answer(model, prompt, text, answer)
        return reading, read_written(model, reading)

    attempts: list[Mapping[str, Any]] = [options]
    # Without the cache, `generate` gives the pictures to its first pass alone.
    is_optional = not prompt.pictures and "use_past_kv_cache" not in options
    if _has_cache_option(model) and is_optional:
        attempts.append({**options, "use_past_kv_cache": False})
    reasons: list[str] = []
    is_checked = _takes_most_probable(options)
    if not is_checked and len(attempts) > 1:
        _, tried = attempt(min(count, _TRIED), {"stop_at_eos": False})
        reason = _find_other_prediction(tried, allowed)
        if reason is not None:
            reasons.append(reason)
            del attempts[0]
    for given in attempts:
        reading, written = attempt(count, given)
        reason = _find_other_prediction(written, allowed) if is_checked else None
        if reason is None:
            notes = [f"generate: written without the cache, because with it {each}" for each in reasons]
            return reading, written, notes
        reasons.append(reason)
    raise UnsupportedModelError(
        f"generate: expected model.generate to write what a pass over all tokens predicts, got another text: "
        f"{reasons[-1]}; give the text as answer="
    )


def _find_other_prediction(written: Written, allowed: float) -> str | None:
    """Return which written token is less probable than the prediction of the pass; None if none is.

    Args:
        written: What the pass gives to the written tokens.
        allowed: The difference of two log probabilities that rounding explains, in nats.
    """
    numbers = written.log_probabilities
    for index, (entry, number) in enumerate(zip(written.explained, numbers.tolist(), strict=True)):
        if entry.probability is not None and number < math.log(entry.probability) - allowed:
            return (
                f"token {index} has {entry.target} = {number:.3g}, where the pass predicts "
                f"{entry.prediction!r}"
            )
    return None


def _takes_most_probable(options: Mapping[str, Any]) -> bool:
    """Return whether each token that is written with these options is the most probable one."""
    return all(options.get(name, usual) == usual for name, usual in _MOST_PROBABLE.items())


def _has_cache_option(model: TransformerLensModel) -> bool:
    """Return whether the model's `generate` can run without a cache of keys and values."""
    generate = getattr(model, "generate", None)
    return generate is not None and "use_past_kv_cache" in inspect.signature(generate).parameters


def _generate_tokens(
    model: TransformerLensModel,
    prompt: Prompt,
    count: int,
    *,
    part: str | None,
    seed: int,
    options: Mapping[str, Any],
) -> Int[Tensor, " written"]:
    """Return the tokens that a model writes after a prompt, without the end of the text at which it stops.

    The most probable token is taken, unless `do_sample=True` is among the options.

    Args:
        model: The model.
        prompt: The prompt, or the source of an encoder-decoder.
        count: The largest number of tokens.
        part: "joint" for an encoder-decoder, whose tokens start with the decoder's start token.
        seed: The seed of the draws. The state of torch's own generators is as before afterwards.
        options: Options of the model's `generate`.

    Raises:
        ValueError: If the model writes nothing but the end of the text.
        UnsupportedModelError: If the model cannot generate.
    """
    lens, tokens = Lens(model, part), prompt.tokens
    ends = _find_ends(model, options)
    chosen: dict[str, Any] = {"do_sample": False, "verbose": False, "stop_at_eos": bool(ends), **options}
    if prompt.pictures:
        chosen |= {name: value[None].to(lens.device) for name, value in prompt.inputs.items()}
        chosen |= join_inputs([prompt.picture_inputs], lens.dtype, lens.device)
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


def _find_ends(model: TransformerLensModel, options: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text.

    They are those of the option `eos_token_id`; without it, those of the tokenizer and of the wrapped model's
    configuration.
    """
    tokenizer = getattr(model, "tokenizer", None)
    generation = getattr(getattr(model, "original_model", None), "generation_config", None)
    found: list[int] = []
    defaults = (getattr(tokenizer, "eos_token_id", None), getattr(generation, "eos_token_id", None))
    asked = options.get("eos_token_id")
    for given in defaults if asked is None else (asked,):
        listed = given if isinstance(given, (list, tuple)) else [given]
        found += [int(token) for token in listed if token is not None and int(token) not in found]
    return found
