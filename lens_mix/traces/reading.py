"""Read a prompt and what was written after it: as tokens, and as text whose tokens are known."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lens_mix._care.state import reading
from lens_mix._classes.model_classes import TransformerLensModel, model_class_of, wrapped_config
from lens_mix._inputs import speech, texts
from lens_mix._inputs.batches import Prompt
from lens_mix._inputs.features import Fill, replace_frames
from lens_mix._inputs.prompts import has_target, is_encoder_decoder, read_prompt, tensor_of, vocabulary
from lens_mix._inputs.token_strings import token_strings
from lens_mix.arguments import check_dense_tensor, describe_value
from lens_mix.maps.grid import Grid
from lens_mix.maps.words import is_special
from lens_mix.plain_text import as_text
from lens_mix.traces.chat import count_equal, render_chat
from lens_mix.traces.documents import PICTURE, Documents, Section
from lens_mix.traces.sources import PlacedText, Splitter, TextSource, find_sources, label_positions


@dataclasses.dataclass(frozen=True)
class Reading:
    """A prompt and the tokens that were written after it.

    Attributes:
        prompt: The prompt and the written tokens, as `lens_mix.run` reads them.
        n_source: The number of tokens that an encoder reads; 0 without an encoder.
        n_prompt: The number of tokens before the written ones: the source and the decoder's start, or the
            prompt of a causal model.
        tokens: One string per token: the source's, the prompt's and the written ones.
        prompt_text: The text of the prompt and its tokens; None if the prompt was given as tokens.
        written_text: The same for what was written; None if it was given as tokens.
    """

    prompt: Prompt
    n_source: int
    n_prompt: int
    tokens: list[str]
    prompt_text: PlacedText | None
    written_text: PlacedText | None

    @property
    def part(self) -> str | None:
        """Return the part of the model that is mapped: "joint" for an encoder-decoder."""
        return None if self.prompt.target is None else "joint"

    @functools.cached_property
    def ids(self) -> Int[Tensor, " pos"]:
        """Return the numbers of all tokens."""
        target = self.prompt.target
        return self.prompt.tokens if target is None else torch.cat([self.prompt.tokens, target])

    @property
    def n_written(self) -> int:
        """Return the number of written tokens."""
        return len(self.tokens) - self.n_prompt

    def row(self, written: int) -> int:
        """Return the position of the row that explains a written token: the token before it predicts it."""
        return self.n_prompt - self.n_source - 1 + written

    def find_sources(self, unit: str, split: Splitter, groups: Any = None) -> list[TextSource]:
        """Return the sources of a unit; see `lens_mix.traces.sources.find_sources`."""
        return find_sources(
            unit,
            self.prompt_text,
            self.written_text,
            self.tokens,
            self.n_prompt,
            split,
            groups,
            self.n_source,
            self.sound_grid,
        )

    @property
    def sound_grid(self) -> Grid | None:
        """Return the frames of the sound that an encoder reads; None for text."""
        return None if self.prompt.features is None else self.prompt.grid

    @property
    def seconds(self) -> float | None:
        """Return the length of the sound; None for text."""
        grid = self.sound_grid
        return None if grid is None else grid.size[1] * (grid.seconds or 0)

    def label_positions(self) -> list[tuple[str, str]]:
        """Return the kind and the name of the section of each position."""
        return label_positions(self.prompt_text, self.tokens, self.n_prompt, self.n_source, self.sound_grid)

    def without(self, positions: Sequence[int], fill: Fill | None = None) -> Prompt | None:
        """Return the prompt and what was written, without some tokens of the prompt.

        None: The prompt has no other token, so that nothing would predict the first written one.

        Args:
            positions: The positions of the tokens, or the frames of a sound.
            fill: What replaces the frames of a sound, which keeps its length. None: silence. A text has no
                other value.

        Raises:
            ValueError: If something is to replace tokens, which are deleted.
            UnsupportedModelError: If only some patches of a picture would remain, or noise is to replace
                frames of a spectrogram, or the frames are padding.
        """
        if self.prompt.features is not None:
            return replace_frames(self.prompt, positions, fill or "silence")
        if fill is not None:
            raise ValueError(f"fill: expected None for a text, whose tokens are deleted, got {fill!r}")
        tokens, count = self.prompt.tokens, self.n_source or self.n_prompt
        keeps = torch.ones(len(tokens), dtype=torch.bool, device="cpu")
        keeps[list(positions)] = False
        if not keeps[:count].any():
            return None
        return self.prompt.keep(keeps.to(tokens.device))


@dataclasses.dataclass(frozen=True)
class PromptText:
    """The text of a prompt.

    Attributes:
        text: The text.
        sections: Its sections.
        is_template: Whether a chat template wrote it, with all special tokens.
        notes: Sentences that a reader should know, such as which messages the template leaves out.
    """

    text: str
    sections: list[Section]
    is_template: bool
    notes: tuple[str, ...] = ()


def read_prompt_text(
    model: TransformerLensModel, prompt: Any, options: Mapping[str, Any] | None = None
) -> PromptText | None:
    """Return the text of a prompt and its sections; None for tokens.

    Args:
        model: The model.
        prompt: The prompt.
        options: What the chat template gets besides the messages, as in `render_chat`.

    Raises:
        TypeError: If a message's content is not text.
        ValueError: If chat messages have no template or an unusable one, or end with what was written.
    """
    tokenizer = getattr(model, "tokenizer", None)
    is_chat = _is_chat(prompt)
    if not (isinstance(prompt, (str, Documents)) or is_chat):
        return None
    if tokenizer is None:
        raise ValueError(
            f"prompt: expected tokens, because the model has no tokenizer, got {describe_value(prompt)}"
        )
    if is_chat and prompt[-1].get("role") == "assistant":
        raise ValueError(
            "prompt: expected messages that end before what was written, got a message of the assistant as "
            "the last one, which the template ends; give its text as answer="
        )
    if isinstance(prompt, str):
        kind = "source" if is_encoder_decoder(model, model_class_of(model)) else "prompt"
        return PromptText(prompt, [Section(kind, kind, 0, len(prompt))], False)
    if isinstance(prompt, Documents) and not getattr(tokenizer, "chat_template", None):
        text, sections = prompt.to_text()
        return PromptText(as_text("prompt", text), sections, False)
    messages, inside = prompt.to_messages() if isinstance(prompt, Documents) else (prompt, None)
    text, sections, notes = render_chat(tokenizer, messages, inside, options)
    return PromptText(as_text("prompt", text), sections, True, notes)


def takes_template(prompt: Any) -> bool:
    """Return whether a chat template writes the prompt, if the tokenizer has one."""
    return isinstance(prompt, Documents) or _is_chat(prompt)


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)


def read_prompt_alone(
    model: TransformerLensModel, prompt: Any, text: PromptText | None, prepend_bos: bool | None
) -> Prompt:
    """Return a prompt, or the source of an encoder-decoder, without what was written after it.

    Raises:
        TypeError, ValueError: As in `lens_mix.run`.
        ValueError: If the prompt says what an encoder-decoder's decoder reads.
    """
    given = prompt if text is None else text.text
    if has_target(model, model_class_of(model), given):
        raise ValueError(
            "prompt: expected the source alone, got also what the decoder reads (a pair, or "
            "decoder_input_ids); give what was written as answer="
        )
    if text is not None and text.is_template:
        given = torch.tensor(texts.token_ids(model.tokenizer, text.text), dtype=torch.long, device="cpu")
        prepend_bos = None
    with reading(model):
        read = read_prompt(model, model_class_of(model), given, prepend_bos=prepend_bos)
    return read if text is None else dataclasses.replace(read, notes=(*text.notes, *read.notes))


def add_answer(model: TransformerLensModel, prompt: Prompt, text: PromptText | None, answer: Any) -> Reading:
    """Return the reading of a prompt and of what was written after it.

    Args:
        model: The model.
        prompt: The prompt, as `read_prompt_alone` returns it.
        text: The text of the prompt; None if it was given as tokens.
        answer: The text that was written, or its tokens: the decoder's tokens from the start token on, if
            the model has an encoder.

    Raises:
        TypeError: If the answer is neither text nor tokens.
        ValueError: If it is empty, or the prompt's last token merges with it.
    """
    has_encoder = is_encoder_decoder(model, model_class_of(model))
    read = (_add_to_source if has_encoder else _add_to_prompt)(model, prompt, text, answer)
    notes = tuple(dict.fromkeys((*prompt.notes, *read.prompt.notes)))
    return dataclasses.replace(read, prompt=dataclasses.replace(read.prompt, notes=notes))


def _add_to_prompt(
    model: TransformerLensModel, prompt: Prompt, text: PromptText | None, answer: Any
) -> Reading:
    """Return the reading of a causal model's prompt and an answer; see `add_answer`."""
    tokenizer, tokens = getattr(model, "tokenizer", None), prompt.tokens
    prompt_text = None if text is None else _place(tokenizer, text, tokens)
    written_text: PlacedText | None
    if text is None and prompt.pictures and tokenizer is not None:
        prompt_text = _place_pictures(tokenizer, prompt)
    if isinstance(answer, str):
        if prompt_text is None:
            raise ValueError("answer: expected tokens, because the prompt was given as tokens, got text")
        written, written_text = _read_answer(tokenizer, prompt_text.text, tokens, answer)
    else:
        written = _as_tokens(answer, tokens, vocabulary(model, "prompt"))
        written_text = None if prompt_text is None else _place_written(tokenizer, tokens, written)
    whole = torch.cat([tokens, written])
    with reading(model):
        # It raises an error if both together are too long.
        read = read_prompt(model, model_class_of(model), whole, inputs=_extend_inputs(prompt, len(written)))
    strings = read.label(token_strings(model, whole))
    return Reading(read, 0, len(tokens), strings, prompt_text, written_text)


def _extend_inputs(prompt: Prompt, count: int) -> dict[str, Tensor]:
    """Return the inputs of a prompt and of `count` written tokens, which are of the type of text.

    Raises:
        ValueError: If the prompt has inputs whose values for written tokens are not known.
    """
    others = sorted(name for name in prompt.inputs if not name.endswith("token_type_ids"))
    if others:
        raise ValueError(f"model inputs: expected tokens, their types and pictures, got also {others}")
    inputs = {name: torch.cat([types, types.new_zeros(count)]) for name, types in prompt.inputs.items()}
    return inputs | dict(prompt.picture_inputs)


def _place_pictures(tokenizer: Any, prompt: Prompt) -> PlacedText:
    """Return the text that the tokenizer decodes from a prompt with pictures, each of which is a section."""
    tokens = prompt.tokens
    placed = _place_written(tokenizer, tokens[:0], tokens)
    sections: list[Section] = []
    stop = 0
    for picture in prompt.pictures:
        first, last = (placed.offsets[picture.positions[place]] for place in (0, -1))
        sections += [Section("prompt", "prompt", stop, first[0])] if first[0] > stop else []
        sections.append(Section(PICTURE, picture.name, first[0], last[1]))
        stop = last[1]
    sections += [Section("prompt", "prompt", stop, len(placed.text))] if len(placed.text) > stop else []
    return placed._replace(sections=sections, first=0)


def _add_to_source(
    model: TransformerLensModel, source: Prompt, text: PromptText | None, answer: Any
) -> Reading:
    """Return the reading of an encoder-decoder's source and an answer; see `add_answer`."""
    given = source.tokens if source.features is None else source.features
    try:
        with reading(model):
            prompt = read_prompt(model, model_class_of(model), (given, answer), target_for="joint")
    except (TypeError, ValueError) as problem:
        # The target of `lens_mix.run` is the answer here.
        name, _, message = str(problem).partition(":")
        raise type(problem)(f"{'answer' if name == 'target' else name}:{message}") from problem
    target: Any = prompt.target
    tokenizer: Any = getattr(model, "tokenizer", None)
    n_source = len(prompt.tokens)
    tokens = [*(prompt.labels or token_strings(model, prompt.tokens)), *token_strings(model, target)]
    prompt_text = written_text = None
    start = 1
    if speech.is_speech_model(model):
        start = _count_before_text(model, target.tolist(), tokens[n_source:])
    if isinstance(answer, str):
        own = texts.token_ids(tokenizer, answer, as_target=True)
        start = len(target) - len(own)
        if not own or start < 1 or target[start:].tolist() != own:
            raise ValueError(f"answer: expected text of at least one token, got {answer!r}")
        encoding = tokenizer(text_target=answer, add_special_tokens=False, return_offsets_mapping=True)
        written_text = PlacedText(answer, (), n_source + start, _offsets_of(encoding))
    if len(target) <= start:
        raise ValueError("answer: expected at least one token after the decoder's start, got none")
    if written_text is None and tokenizer is not None:
        written_text = _place_written(tokenizer, target[:start], target[start:])._replace(
            first=n_source + start
        )
    if text is not None:
        with texts.own_template(tokenizer):
            encoding = tokenizer(text.text, return_offsets_mapping=True)
        _require_equal(list(encoding["input_ids"]), prompt.tokens.tolist())
        prompt_text = PlacedText(text.text, text.sections, 0, _offsets_of(encoding))
    return Reading(prompt, n_source, n_source + start, tokens, prompt_text, written_text)


def _count_before_text(model: TransformerLensModel, target: Sequence[int], strings: Sequence[str]) -> int:
    """Return how many tokens are before a transcript: those up to the start, the language and the task.

    Raises:
        ValueError: If the start token is not among the tokens.
    """
    first = wrapped_config(model, "decoder_start_token_id")
    if first not in target:
        raise ValueError(
            f"answer: expected the decoder's tokens from the start token {first} on, got tokens without it"
        )
    # What was said before may be before the start.
    start = len(target) - list(target)[::-1].index(first)
    return start + len(list(itertools.takewhile(is_special, strings[start:])))


def _place(tokenizer: Any, text: PromptText, tokens: Int[Tensor, " pos"]) -> PlacedText:
    """Return the text of a prompt with the offsets of its tokens.

    Raises:
        ValueError: If the tokenizer's own tokens are others than those that the model reads.
    """
    offsets, ids = _encode(tokenizer, text.text)
    added = len(tokens) - len(ids)
    _require_equal(ids, tokens.tolist()[max(added, 0) :])
    return PlacedText(text.text, text.sections, 0, [(0, 0)] * added + offsets)


def _encode(tokenizer: Any, text: str) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the offsets and the numbers of a text's tokens, without special tokens.

    Raises:
        ValueError: If the tokenizer cannot return offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "prompt: expected a fast tokenizer, which maps text to tokens by offsets, got "
            f"{type(tokenizer).__name__}; give the prompt and the answer as tokens"
        )
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return _offsets_of(encoding), list(encoding["input_ids"])


def _offsets_of(encoding: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [tuple(each) for each in encoding["offset_mapping"]]


def _require_equal(found: Sequence[int], read: Sequence[int]) -> None:
    if list(found) != list(read):
        raise ValueError(
            "prompt: expected the tokens of the tokenizer, whose offsets map text to tokens, got others from "
            "TransformerLens; give the prompt as tokens, with sources as groups of positions"
        )


def _read_answer(
    tokenizer: Any, text: str, tokens: Int[Tensor, " pos"], answer: str
) -> tuple[Int[Tensor, " written"], PlacedText]:
    """Return the tokens of a written text, as the tokenizer reads it after the prompt.

    Raises:
        ValueError: If it has no token of its own, or the prompt's last token merges with it.
    """
    offsets, ids = _encode(tokenizer, text + answer)
    _, alone = _encode(tokenizer, text)
    if ids[: len(alone)] != alone:
        raise ValueError(
            "answer: expected a text that starts at a boundary between tokens, got "
            f"{answer!r} after {text[-12:]!r}, which merge into one token; begin the answer with the space "
            "or line break instead of ending the prompt with it"
        )
    own = ids[len(alone) :]
    if not own:
        raise ValueError(f"answer: expected text of at least one token, got {answer!r}")
    # A token that begins with the prompt's last characters begins with the answer's first one.
    places = [(max(start - len(text), 0), stop - len(text)) for start, stop in offsets[len(alone) :]]
    written = torch.tensor(own, dtype=tokens.dtype, device=tokens.device)
    return written, PlacedText(answer, (), len(tokens), places)


def _place_written(
    tokenizer: Any, tokens: Int[Tensor, " pos"], written: Int[Tensor, " written"]
) -> PlacedText:
    """Return the text of written tokens, with offsets that are the lengths of what the tokenizer decodes.

    Encoding the text again may give other tokens than the model wrote, so the offsets are not those of an
    encoding. Each token is decoded with all tokens before it, because its text may depend on them.
    """
    own = written.tolist()

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    # The token before them decides whether the first space is kept. The bytes of a character need all others.
    before = tokens.tolist()[-1:]
    before = tokens.tolist() if before and "\ufffd" in decode(before) else before
    start = decode(before) if before else ""
    if not decode([*before, *own]).startswith(start):
        # The first token changes the character before it.
        before, start = [], ""
    decoded = [decode([*before, *own[:count]])[len(start) :] for count in range(1, len(own) + 1)]
    # Bytes of an incomplete character are decoded as replacement characters, which later tokens change.
    settled = [count_equal(each, decoded[-1]) for each in decoded]
    settled = list(itertools.accumulate(reversed(settled), min))[::-1]
    return PlacedText(decoded[-1], (), len(tokens), _find_offsets(decoded, settled))


def _find_offsets(decoded: Sequence[str], settled: Sequence[int]) -> list[tuple[int, int]]:
    """Return the offsets of tokens: the characters that their bytes belong to, as in an encoding.

    Args:
        decoded: The text up to each token.
        settled: For each of them, how many of its characters no later token changes.
    """
    text, end, waiting = decoded[-1], 0, 0
    offsets: list[tuple[int, int]] = []
    wholes = [stop for each, stop in zip(decoded, settled, strict=True) if len(each) == stop]
    for each, stop in zip(decoded, settled, strict=True):
        waiting += 1
        is_whole, characters = len(each) == stop, text[end:stop]
        if not characters and not is_whole:
            continue
        owners = [end + index for index, one in enumerate(characters) for _ in one.encode()]
        if not characters:
            # They are further bytes of the same replacement character.
            first = end - 1 if text[end - 1 : end] == "\ufffd" else end
            offsets += [(first, end)] * waiting
        elif is_whole and set(characters) == {"\ufffd"} and waiting == len(characters):
            # Some tokenizers decode each byte of a broken character by itself.
            offsets += [(place, place + 1) for place in range(end, stop)]
        elif is_whole and waiting == len(owners):
            offsets += [(place, place + 1) for place in owners]
        else:
            offsets += [(end, end + 1)] * (waiting - 1)
            # The next token after which all characters are complete ends the one that this token begins.
            limit = next(whole for whole in wholes if whole >= stop)
            offsets.append((end, stop if is_whole else min(stop + 1, limit)))
        end, waiting = stop, 0
    return offsets


def _as_tokens(answer: Any, like: Int[Tensor, " pos"], d_vocab: int) -> Int[Tensor, " written"]:
    """Return written tokens as a tensor.

    Raises:
        TypeError: If they are not whole numbers.
        ValueError: If there are none, they have several rows, or one of them is not in the vocabulary.
    """
    try:
        given = answer if torch.is_tensor(answer) else tensor_of(answer, "answer")
        written = check_dense_tensor("answer", given)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise TypeError(f"answer: expected text or tokens [pos], got {describe_value(answer)}") from problem
    written = written[0] if written.ndim == 2 and len(written) == 1 else written
    if written.ndim != 1 or not len(written):
        raise ValueError(f"answer: expected at least one token [pos], got shape {list(written.shape)}")
    if written.is_floating_point() or written.is_complex() or written.dtype == torch.bool:
        raise TypeError(f"answer: expected text or tokens [pos], got a tensor of {written.dtype}")
    if int(written.min()) < 0 or int(written.max()) >= d_vocab:
        raise ValueError(f"answer: expected tokens in 0..{d_vocab - 1}, got {describe_value(answer)}")
    return written.to(like)
