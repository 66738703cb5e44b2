"""Convert text to tokens with the model's own tokenizer."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lens_mix._care.changes import Changes, replace_attributes
from lens_mix._classes.model_names import strip_path
from lens_mix.arguments import describe_value, write_count
from lens_mix.maps.token_strings import strings_of

# The value of a tokenizer is [the template of special tokens in its files] if TransformerLens has replaced
# it, [] if it has not, and None if the files cannot be read.
_templates: weakref.WeakKeyDictionary[Any, list[Any] | None] = weakref.WeakKeyDictionary()
# Chat templates read these parts of a message beside its content, or in place of it.
_INSTEAD_OF_CONTENT = (
    "tool_calls",
    "function_call",
    "tool_plan",
    "reasoning_content",
    "reasoning",
    "thinking",
)


def own_template(tokenizer: Any) -> Changes:
    """Return a context in which the tokenizer adds the special tokens that its files name.

    TransformerLens loads tokenizers with `add_bos_token=True`. From transformers 5 on this replaces the
    template of special tokens of many fast tokenizers: T5's `a </s>` becomes `a`, and `<s> a </s> b </s>`
    becomes `<s> a <s> b`. The files have the template that the model was trained with. If they are not on
    this machine, the tokenizer does not change, and `notes_on_template` returns a note.
    """
    if not _has_template_of_flags(tokenizer):
        return Changes([])
    if tokenizer not in _templates:
        _templates[tokenizer] = _template_of_files(tokenizer)
    values = [(tokenizer.backend_tokenizer, template) for template in _templates[tokenizer] or ()]
    return Changes([replace_attributes(values, "post_processor")])


def _has_template_of_flags(tokenizer: Any) -> bool:
    """Return whether transformers made the template of special tokens from `add_bos_token`."""
    if not getattr(tokenizer, "is_fast", False) or "add_bos_token" not in tokenizer.init_kwargs:
        return False
    start = [tokenizer.bos_token] if getattr(tokenizer, "add_bos_token", False) else []
    end = [tokenizer.eos_token] if getattr(tokenizer, "add_eos_token", False) else []
    state = _state(tokenizer)
    template = {
        name: [next(iter(piece.values()))["id"] for piece in state.get(name, ())]
        for name in ("single", "pair")
    }
    single = [*start, "A", *end]
    return template == {"single": single, "pair": [*single, *start, "B", *end]}


def _state(tokenizer: Any) -> dict[str, Any]:
    processor = tokenizer.backend_tokenizer.post_processor
    state = {} if processor is None else json.loads(processor.__getstate__())
    return state if state.get("type") == "TemplateProcessing" else {}


def _template_of_files(tokenizer: Any) -> list[Any] | None:
    """Return [the template in the tokenizer's files]; [] if it is the same; None if they cannot be read."""
    from transformers import AutoTokenizer

    options = {**tokenizer.init_kwargs, "local_files_only": True}
    name, _ = options.pop("name_or_path", None), options.pop("add_bos_token")
    if not name:
        return None
    try:
        plain = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError):
        return None
    is_same = not getattr(plain, "is_fast", False) or _state(plain) == _state(tokenizer)
    return [] if is_same else [plain.backend_tokenizer.post_processor]


def notes_on_template(tokenizer: Any) -> tuple[str, ...]:
    """Return the notes on a text, if TransformerLens has, or may have, replaced its special tokens."""
    template = _templates.get(tokenizer, [])
    if not _has_template_of_flags(tokenizer) or template == []:
        return ()
    if template is None:
        return (
            "strings: TransformerLens loaded the tokenizer with add_bos_token=True, which replaces the "
            "special tokens of many tokenizers, and its files "
            f"({strip_path(str(tokenizer.name_or_path)) or 'unnamed'}) can't be read to compare; the model "
            "read the special tokens of model.tokenizer; to choose them, give tokens instead of a string",
        )
    return (
        "strings: TransformerLens loaded the tokenizer with add_bos_token=True, so model.tokenizer adds "
        "other special tokens than its files name; the model read those of the files "
        f"({strip_path(str(tokenizer.name_or_path))})",
    )


def encoded(tokenizer: Any, text: str | Sequence[str]) -> Mapping[str, Any]:
    """Return the tokenizer's encoding of a text or of a pair of texts, with the template of its files."""
    with own_template(tokenizer):
        encoding: Mapping[str, Any] = tokenizer(*([text] if isinstance(text, str) else text))
        return encoding


def notes_on_string(
    tokenizer: Any,
    text: str,
    tokens: Sequence[int],
    read: Callable[[bool], Sequence[int]],
    is_chosen: bool,
) -> tuple[str, ...]:
    """Return the notes on a string whose tokens TransformerLens made.

    Args:
        tokenizer: The model's tokenizer.
        text: The string.
        tokens: TransformerLens's tokens of the string.
        read: A function of `prepend_bos` that returns TransformerLens's tokens of the string.
        is_chosen: Whether the user chose `prepend_bos`.
    """
    notes, own, bos = [], list(encoded(tokenizer, text)["input_ids"]), tokenizer.bos_token_id
    tokens = list(tokens)
    # A user who chose prepend_bos knows what a tokenizer adds that adds a start itself.
    adds_nothing = own == token_ids(tokenizer, text)
    if own != tokens and (adds_nothing or not is_chosen):
        same = [value for value in (False, True) if list(read(value)) == own]
        hint = f"use prepend_bos={same[0]} for those" if same else "for those give tokens instead of a string"
        read_and_own = (
            f"{_shorten(tokenizer, tokens)}, which TransformerLens makes of the string; the tokenizer itself "
            f"makes {_shorten(tokenizer, own)} ({hint})"
        )
        notes.append(
            f"prepend_bos: the model read {read_and_own}"
            if adds_nothing
            else f"strings: the model read {read_and_own}"
        )
    if bos is not None and tokens[:2] == [bos, bos]:
        notes.append(
            f"prepend_bos: the prompt begins with {tokenizer.bos_token} twice, because the text already has "
            "one (the text of a chat template?); give the chat messages themselves, or prepend_bos=False"
        )
    return tuple(notes)


def _shorten(tokenizer: Any, ids: Sequence[int]) -> str:
    """Describe tokens by their number, the first two tokens and the last one."""
    written = [repr(token) for token in strings_of(tokenizer, ids)]
    shortened = written if len(written) < 5 else [*written[:2], "…", written[-1]]
    return f"{write_count(len(written), 'token')} ({' '.join(shortened)})"


def decoder_input(
    tokenizer: Any, text: str, shift: Callable[[Sequence[int]], Sequence[int]]
) -> Sequence[int]:
    """Return the tokens of a target that the decoder of an encoder-decoder reads.

    These are the tokenizer's labels, `tokenizer(text_target=text)`, shifted to the right as the model shifts
    them in training. The decoder does not read the end of the sentence that the tokenizer adds; it only
    predicts it.

    Args:
        tokenizer: The model's tokenizer.
        text: The target.
        shift: The model's shift of labels. It drops the last label, or moves it to the front (mBART).
    """
    end = tokenizer.eos_token_id
    with own_template(tokenizer), _reads_targets(tokenizer):
        labels = list(tokenizer(text_target=text)["input_ids"])
    given = token_ids(tokenizer, text, as_target=True).count(end)
    if labels.count(end) == given:
        # The tokenizer adds no end, so the shift would drop the last word.
        labels.append(0 if end is None else end)
    read = list(shift(labels))
    # mBART's shift moves the language code, its last label, to the front. The decoder would then read the
    # end.
    return read[:-1] if len(read) > 1 and read[-1] == end and read[1:].count(end) > given else read


def notes_on_target(tokenizer: Any) -> tuple[str, ...]:
    """Return the notes on a target whose language is not set."""
    if not hasattr(tokenizer, "tgt_lang") or tokenizer.tgt_lang is not None:
        return ()
    return (
        "target: model.tokenizer.tgt_lang is None, so the target has the source's language code; set it for "
        "another language",
    )


@contextlib.contextmanager
def _reads_targets(tokenizer: Any) -> Iterator[None]:
    """Restore the tokenizer's language, which reading a target may change.

    Raises:
        ValueError: If the tokenizer raises an error.
    """
    language = getattr(tokenizer, "tgt_lang", None)
    try:
        yield
    except Exception as problem:
        getattr(tokenizer, "_switch_to_input_mode", lambda: None)()
        raise ValueError(
            f"target: model.tokenizer(text_target=...) raises {type(problem).__name__}: {problem}; give the "
            "decoder's tokens, from the start token on"
        ) from problem
    finally:
        if hasattr(tokenizer, "tgt_lang"):
            tokenizer.tgt_lang = language


def token_ids(tokenizer: Any, text: str, *, as_target: bool = False) -> list[int]:
    """Return the tokens of a text without special tokens.

    Args:
        tokenizer: The model's tokenizer.
        text: The text.
        as_target: Whether the text is a target for the decoder.
    """
    if not as_target:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    with _reads_targets(tokenizer):
        return list(tokenizer(text_target=text, add_special_tokens=False)["input_ids"])


def chat_ids(tokenizer: Any, messages: Any) -> list[int]:
    """Return the tokens of chat messages; if the last is not the assistant's, its answer begins at the end.

    Raises:
        ValueError: If the tokenizer has no chat template, or a message has no role or content.
    """
    check_messages(tokenizer, messages)
    # The text of the template already has the special tokens.
    return list(tokenizer(render_messages(tokenizer, messages), add_special_tokens=False)["input_ids"])


def check_messages(tokenizer: Any, messages: Any) -> None:
    """Raise a ValueError if the tokenizer has no chat template, or a message has no role or content."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "prompt: expected a tokenizer with a chat template for chat messages, got one without; set "
            "model.tokenizer.chat_template, or give a string"
        )
    if not all("role" in each and ("content" in each or needs_no_content(each)) for each in messages):
        raise ValueError(
            'prompt: expected messages with "role" and "content" (only one with '
            f"{', '.join(_INSTEAD_OF_CONTENT)} needs no content), got {describe_value(messages)}"
        )


def needs_no_content(message: Mapping[str, Any]) -> bool:
    """Return whether a message has tool calls, or reasoning alone, which chat templates read by these names.

    A template writes nothing for a name that it does not read, so any other name is an error.
    """
    return any(message.get(name) for name in _INSTEAD_OF_CONTENT)


def render_messages(tokenizer: Any, messages: Any, options: Mapping[str, Any] | None = None) -> str:
    """Return the text that the chat template makes of messages and of its options; see `chat_ids`."""
    chosen = {"add_generation_prompt": messages[-1]["role"] != "assistant", **(options or {})}
    text: str = tokenizer.apply_chat_template(list(map(dict, messages)), tokenize=False, **chosen)
    return text
