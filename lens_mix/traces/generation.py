"""Write text with the model, and compare it with the predictions of one pass over all tokens."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lens_mix._care.tracebacks import is_out_of_memory
from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError, model_class_of
from lens_mix._inputs.batches import Prompt
from lens_mix._inputs.picture_inputs import join_inputs
from lens_mix._inputs.prompts import context_length, is_encoder_decoder, most_tokens, vocabulary
from lens_mix._inputs.speech import find_first_tokens, is_speech_model, make_model_input, note_language
from lens_mix._model.model import Lens
from lens_mix.arguments import check_flags, check_number, check_whole_number, describe_value
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
# The options that transformers has by the same names, for models of speech.
_OF_SOUND = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id")
# Those that have another name there, or none.
_KEPT_OF_SOUND = ("stop_at_eos", "use_past_kv_cache", "verbose")
# TransformerLens itself checks none of these, and ignores a frequency penalty below 0.
_NUMBERS: dict[str, dict[str, Any]] = {
    "temperature": {"least": 0},
    "top_p": {"least": 0, "largest": 1, "above": True},
    "freq_penalty": {"least": 0},
    "repetition_penalty": {"least": 0, "above": True},
}
_FLAGS = {"do_sample", "stop_at_eos", "use_past_kv_cache", "verbose"}
_TOKENS = ("eos_token_id", "forced_bos_token_id")
# Before tokens are drawn, as many of the most probable ones are compared with the predictions of a pass.
_TRIED = 8


def find_options(model: TransformerLensModel) -> list[str]:
    """Return the names of the options of the model's `generate` that `lm.trace` does not set itself."""
    generate = getattr(model, "generate", None)
    known = [] if generate is None else list(inspect.signature(generate).parameters)
    return [name for name in known if name not in (*_OWN, *_OTHER_RESULTS)]


def check_options(model: TransformerLensModel, options: Mapping[str, Any]) -> None:
    """Check the options of the model's `generate`.

    Raises:
        TypeError: If an option has a wrong type.
        ValueError: If it is out of range, or has no effect, because no tokens are drawn.
    """
    unknown = sorted(options.keys() - {*_OF_SOUND, *_KEPT_OF_SOUND}) if is_speech_model(model) else []
    if unknown:
        raise ValueError(
            f"{unknown[0]}: expected one of {sorted({*_OF_SOUND, *_KEPT_OF_SOUND})} for a model of speech, "
            f"got {unknown[0]}={describe_value(options[unknown[0]])}"
        )
    for name in _FLAGS & options.keys():
        check_flags(**{name: options[name]})
    for name, bounds in _NUMBERS.items():
        if options.get(name) is not None:
            check_number(name, options[name], **bounds)
    if options.get("top_k") is not None:
        check_whole_number("top_k", options["top_k"], 1)
    for name in _TOKENS:
        listed = options.get(name)
        for token in listed if isinstance(listed, (list, tuple)) else [listed]:
            if token is not None:
                check_whole_number(name, token, 0, vocabulary(model, "target") - 1, what="a token")
    for name in _OF_DRAWS:
        if options.get(name) is not None and not options.get("do_sample", False):
            raise ValueError(
                f"{name}: expected do_sample=True with it, because by default the most probable token is "
                f"written, got {name}={describe_value(options[name])} alone"
            )


def _limit_count(model: TransformerLensModel, prompt: Prompt, count: int, part: str | None) -> int:
    """Return how many tokens a model can write at most after a prompt, within its context.

    Raises:
        ValueError: If it cannot write any.
    """
    most = most_tokens(model)
    longest = context_length(model, "prompt" if part is None else "target") if most is None else most
    if longest is None:
        return count
    before = _count_first(model) if part == "joint" else len(prompt.tokens)
    if before < longest:
        return min(count, longest - before)
    if most is None:
        # The prompt has a note that it is longer than any text of the training.
        return min(count, longest)
    raise ValueError(
        f"generate: expected a prompt that leaves room in the n_ctx={longest} tokens that the model can "
        f"read, got one of {before} tokens; shorten it"
    )


def _count_first(model: TransformerLensModel) -> int:
    """Return how many tokens a decoder reads before what it writes: the start, for speech also others."""
    return len(find_first_tokens(model)) if is_speech_model(model) else 1


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
        ValueError: If the prompt leaves no room in the model's context.
        UnsupportedModelError: If the model cannot write, or its tokens are not those that the pass predicts.
    """
    part = "joint" if is_encoder_decoder(model, model_class_of(model)) else None
    allowed = rounding_of(Lens(model, part))
    most = _limit_count(model, prompt, count, part)

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
        _, tried = attempt(min(most, _TRIED), {"stop_at_eos": False})
        reason = _find_other_prediction(tried, allowed)
        if reason is not None:
            reasons.append(reason)
            del attempts[0]
    for given in attempts:
        reading, written = attempt(most, given)
        reason = _find_other_prediction(written, allowed) if is_checked else None
        if reason is None:
            notes = list(note_language(model)) if is_speech_model(model) else []
            notes += [f"generate: written without the cache, because with it {each}" for each in reasons]
            if reading.n_written == most < count:
                notes.append(f"generate: the text ends after {most} tokens, where the model's context ends")
            return reading, written, notes
        reasons.append(reason)
    raise UnsupportedModelError(
        f"generate: expected model.generate to write what a pass over all tokens predicts, got another text: "
        f"{reasons[-1]}; give the text as answer="
    )


def continue_prompt(
    model: TransformerLensModel, prompt: Prompt, count: int
) -> Int[Tensor, " written"] | None:
    """Return the most probable tokens after a prompt; None if the model writes none, or cannot.

    Args:
        model: The model.
        prompt: The prompt, or the source of an encoder-decoder.
        count: The largest number of tokens.
    """
    part = "joint" if is_encoder_decoder(model, model_class_of(model)) else None
    try:
        most = _limit_count(model, prompt, count, part)
        return _generate_tokens(model, prompt, most, part=part, seed=0, options={})
    except (UnsupportedModelError, ValueError):
        return None


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
    with torch.random.fork_rng(devices), lens.evaluation_mode(), warnings.catch_warnings():
        # TransformerLens passes the cache by the name of transformers before 5.24, which no user can change.
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
        torch.manual_seed(seed)
        try:
            output: Tensor = (
                lens.model.generate(
                    tokens[None].to(lens.device), max_new_tokens=count, return_type="tokens", **chosen
                )
                if prompt.features is None
                else _write_from_sound(lens, prompt.features, count, chosen)
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
    start = _count_first(model) if part == "joint" else 0
    stop = is_end.index(True, start) if True in is_end[start:] else len(written)
    if stop <= start:
        raise ValueError(
            "generate: expected the model to write at least one token, got only the end of the text; change "
            "the prompt, or give answer="
        )
    return written[:stop].to(tokens)


def _write_from_sound(
    lens: Lens, features: Tensor, count: int, options: dict[str, Any]
) -> Int[Tensor, "1 target_pos"]:
    """Return what the decoder of a model of speech writes, from the start token on.

    TransformerLens does not generate from sound. Whisper's own `generate` forbids some tokens and divides the
    sound by times, so the plain one of transformers writes here.
    """
    from transformers import GenerationMixin

    wrapped: Any = lens.model.original_model
    known = {name: options[name] for name in _OF_SOUND if options.get(name) is not None}
    if not options["stop_at_eos"]:
        known |= {"eos_token_id": None, "min_new_tokens": count}
    first = torch.tensor([find_first_tokens(lens.model)], dtype=torch.long, device=lens.device)
    written: Tensor = GenerationMixin.generate(
        wrapped,
        input_features=make_model_input(lens.model, features[None].to(lens.device)),
        decoder_input_ids=first,
        max_new_tokens=count,
        use_cache=bool(options.get("use_past_kv_cache", True)),
        suppress_tokens=None,
        begin_suppress_tokens=None,
        forced_decoder_ids=None,
        **known,
    )
    return written


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
