"""Make targets: the number that an attribution explains, as a function of the model's output.

A target is written in one of three ways, wherever an argument `target` is accepted:

- the text of a token, such as `target="Paris"`: the log probability of that token at the last position. The
  text means the token "Paris" or " Paris", whichever the model may write there; of several rows, the last one
  decides. The rule: the text with a space before it (or without, if it was written with one) is explained if
  it is ten times as probable as the text that is written, and the latter has a probability below 0.01 or is
  not one token. A note of the map then says so. `lm.targets.token("Paris")` is exactly the token that is
  written;
- a function of this module, with its own unit: `of="log_probability"`, "probability" or "logit";
- any callable `logits [copy pos d_vocab] -> [copy]`. It gets copies of one prompt without padding, so
  position -1 is the prompt's last.

Where a `target` is accepted, `against` is too: `target="Paris", against="Rome"` explains by how much the
model prefers the one to the other, the difference of their log probabilities. (It equals the difference of
their logits, by which maps name it.) The other text has a space before it if the explained token has. Without
a `target`, it is the model's own prediction against the other token.

The functions of this module make the usual targets:

    lm.targets.predicted()                         probability of the predicted token (Hao et al., 2021)
    lm.targets.token(" Paris")                     probability of a given next token
    lm.targets.logit(" Paris", position=4)         logit of a token at a position
    lm.targets.logit_difference(" is", " are")     logit of a token minus that of another
    lm.targets.loss()                              next-token cross-entropy of the prompt
    lm.targets.next_token()                        log probability of the prompt's own next token
    lm.targets.span(12, 15)                        log probability of the prompt's own tokens 12 to 14
    lm.targets.masked_token("cat")                 probability of a token at the prompt's mask
    lm.targets.class_(2)                           probability of a class, if the output is [batch, class]
    lm.targets.class_difference(2, 0)              logit of a class minus that of another
    lm.targets.hf_classifier(hf_model, 2)          probability of a class of a transformers classifier
    lm.targets.head(classifier)                    any function of the last residual stream

In an encoder-decoder, logits and positions are those of the decoder, whichever part is mapped. `head` reads
the mapped part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix import classifiers
from lens_mix._inputs import texts
from lens_mix._passes.predictions import name_token, read_predictions
from lens_mix.arguments import check_choice, check_flags, check_instance, check_whole_number, describe_value
from lens_mix.maps.explained import Explained
from lens_mix.maps.spans import find_query
from lens_mix.maps.token_strings import strings_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lens_mix._classes.model_classes import TransformerLensModel

__all__ = [
    "Context",
    "Target",
    "class_",
    "class_difference",
    "head",
    "hf_classifier",
    "logit",
    "logit_difference",
    "loss",
    "masked_token",
    "next_token",
    "predicted",
    "probability",
    "span",
    "token",
]


def __dir__() -> list[str]:
    return __all__


TargetMeasure = Literal["probability", "log_probability", "logit"]
TargetReads = Literal["logits", "last_residual"]
TargetFunction = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Context:
    """The data of one prompt that a target may read.

        >>> tokens = model.to_tokens("The Eiffel Tower is in the city of")
        >>> context = lm.targets.Context(tokens[0], model(tokens).detach(), model.tokenizer)
        >>> lm.targets.logit(" Paris").of_prompt(context)(context.output)

    Attributes:
        tokens: The tokens of the output's positions (for logits of an encoder-decoder, those of the target).
        output: The output of the clean pass: logits `[1 pos d_vocab]` or `[1 class]`, or the residual stream.
        tokenizer: The model's tokenizer, or None.
        inputs: Further inputs of the model by name, with one value per mapped token (per source token, if
            there is a source).
        as_target: Whether text is tokenized as a target of an encoder-decoder, for which Marian's tokenizer
            has another vocabulary.
        source: The tokens that the encoder reads, if the last residual is that of a decoder.
        found: Values that a target has computed for this prompt, for its other rows.
    """

    tokens: Int[Tensor, " pos"]
    output: Float[Tensor, "batch ..."]
    tokenizer: PreTrainedTokenizerBase | None = None
    inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    as_target: bool = False
    source: Int[Tensor, " source"] | None = None
    found: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def token_id(self, token: str | int, name: str = "token") -> int:
        """Return the number of a token that is given by text or number.

        Raises:
            TypeError: If it is neither text nor a number.
            ValueError: If the token does not exist, the text is several tokens, or there is no tokenizer.
        """
        if not isinstance(token, str):
            return check_whole_number(name, token, 0, self.output.shape[-1] - 1)
        if self.tokenizer is None:
            raise ValueError(
                f"{name}: expected the number of a token, because the model has no tokenizer, got {token!r}"
            )
        ids = self._token_ids(token)
        if len(ids) != 1:
            raise ValueError(
                f"{name}: expected the text of one token (mind the leading space), got {token!r}, which is "
                f"{len(ids)} tokens: {self.tokenizer.convert_ids_to_tokens(ids)}{self._suggest(token, ids)}"
            )
        return ids[0]

    def is_known_token(self, text: str) -> bool:
        """Return whether a text is one token of the tokenizer, other than its token for unknown text."""
        ids = [] if self.tokenizer is None else self._token_ids(text)
        return len(ids) == 1 and ids[0] != getattr(self.tokenizer, "unk_token_id", None)

    def _token_ids(self, text: str) -> list[int]:
        return [int(token) for token in texts.token_ids(self.tokenizer, text, as_target=self.as_target)]

    def _suggest(self, token: str, ids: list[int]) -> str:
        """Return what to write instead of a text that is not one token, for errors."""
        spaced = f" {token.strip()}"
        if spaced != token and token.strip() and len(self._token_ids(spaced)) == 1:
            return f"; write {spaced!r}"
        return f"; lm.targets.token({ids[0]}) is the first of them alone" if ids else ""

    def token_text(self, token: str | int) -> str:
        """Return the text of a token in quotation marks, or its number if the model has no tokenizer."""
        number = self.token_id(token)
        return str(number) if self.tokenizer is None else repr(name_token(self.tokenizer, number))

    def position(self, position: int | str) -> int:
        """Return a position of the output as a number from 0.

        Args:
            position: A position (negative: from the end), or a text, of which the last token is meant.

        Raises:
            TypeError: If it is neither a whole number nor a text.
            ValueError: If the position does not exist, or the text is not found.
        """
        if isinstance(position, str) and (self.tokenizer is None or bool((self.tokens < 0).any())):
            raise ValueError(f"position: expected a number, because the prompt has no text, got {position!r}")
        tokens = self.tokens.tolist()
        texts = strings_of(self.tokenizer, tokens) if isinstance(position, str) else [""] * len(tokens)
        return find_query(texts, position, "position")


@dataclasses.dataclass(frozen=True)
class Target:
    """The base of all targets of this module. Fields are parameters; `of_prompt` binds them to a prompt.

        >>> target: lm.targets.Target = lm.targets.token(" Paris", of="logit")
        >>> method = lm.methods.GradientAttention(target=target)
        >>> lm.run(model, "The Eiffel Tower is in the city of", method).top(3)

    Attributes:
        reads: The output of the model of which the target is a function.
        reads_tokens: Whether the functions of `of_prompt` take the tokens of the copies, `[copy pos]`, as a
            second argument. They need them if the tokens of a copy differ from the prompt's.
        reads_row_alone: Whether the target that `at_row` returns reads no logits but those of the row. Then
            the output in the context of every function here may be these alone, [1 1 d_vocab].
    """

    reads: ClassVar[TargetReads] = "logits"
    reads_tokens: ClassVar[bool] = False
    reads_row_alone: ClassVar[bool] = False

    @property
    def reads_end_alone(self) -> bool:
        """Whether, in a method with one number for all rows, it reads the last position's logits alone."""
        return False

    def of_prompt(self, context: Context) -> TargetFunction:
        """Return the function of one prompt, from the output `[copy ...]` to the value `[copy]`.

        Raises:
            TypeError: If a parameter has a wrong type for the prompt.
            ValueError: If a parameter does not fit the prompt.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define of_prompt")

    def reads_position(self, context: Context) -> int | None:
        """Return the only position of `[copy pos d_vocab]` that the target reads, or None if it is unknown.

        A target that reads several positions also returns None. The functions of `of_prompt` also take the
        logits of this position alone, [copy 1 d_vocab]: with those of all positions, the gradient would have
        zeros for all others.
        """
        return None

    def rows_read(self, tokens: Int[Tensor, " pos"]) -> range | None:
        """Return the positions whose logits are enough for the target; None: it needs those of all positions.

        The functions of `of_prompt` then also take the logits of these positions alone, which saves most of
        the unembedding's time and memory.

        Args:
            tokens: The tokens of the output's positions.
        """
        return None

    def default_row(self, context: Context) -> int | None:
        """Return the default position of the map's row, or None for the default of the model."""
        return self.reads_position(context)

    def in_words(self, context: Context) -> str:
        """Return a description of the target, such as "log probability of ' Italian'"."""
        return type(self).__name__.lstrip("_")

    def explain(self, context: Context, value: float, *, names_position: bool = True) -> Explained:
        """Return the target, its value, and the model's prediction at the position that it reads.

        Args:
            context: The prompt.
            value: The value.
            names_position: Whether to name the position. The target of a row is read at the row's own.
        """
        position = self.reads_position(context) if names_position else None
        where = "" if position is None else f" at position {position}"
        return self.predict(context)._replace(target=f"{self.in_words(context)}{where}", value=value)

    def predict(self, context: Context) -> Explained:
        """Return the prediction at the position that the target reads; an empty entry if it is unknown."""
        position = self.reads_position(context)
        if self.reads != "logits" or context.output.ndim != 3 or position is None:
            return Explained()
        logits = _select_position(context.output[:1], position)
        return read_predictions(logits, lambda token: name_token(context.tokenizer, token))[0]

    def at_row(self, position: int, context: Context) -> Target | None:
        """Return the target read at a row's position, or None if the row does not choose what is read."""
        return None

    def find_likelier_texts(self, context: Context) -> list[tuple[float, str]]:
        """Return the probabilities of texts that the user probably meant instead, each with a sentence."""
        return []

    def settle(self, context: Context, positions: Sequence[int]) -> tuple[Target, list[str]]:
        """Return the target of one prompt, in which each text is a certain token, and notes about this.

        Args:
            context: The prompt.
            positions: The position at which the target decides which token a text is, if it has one.
        """
        return self, []

    def own_position(self, context: Context) -> int | None:
        """Return the only position whose row the target explains, from 0; None: it states no position."""
        return self.reads_position(context)


# A string is the text of a token (see the docstring of this module). A callable that is not a `Target` is a
# function logits -> [copy].
TargetLike = Target | TargetFunction | str
# A token by its text, its number or `lm.targets.token`.
TokenLike = str | int | Target


class _AtPosition(Target):
    """The base of the targets that are read at one position of the logits.

    Attributes:
        position: The position. None: that of the row, or `unstated` in a method that has one number for all
            rows.
        unstated: The position in such a method.
    """

    unstated: ClassVar[int] = -1

    position: int | str | None

    @property
    def reads_end_alone(self) -> bool:
        return self.reads_row_alone and self.position is None and self.unstated == -1

    def reads_position(self, context: Context) -> int | None:
        if context.output.ndim != 3:
            return None
        return context.position(self.unstated if self.position is None else self.position)

    def at_row(self, position: int, context: Context) -> Target | None:
        if self.position is not None or self.reads_position(context) is None:
            return None
        changes: dict[str, Any] = {"position": position}
        return dataclasses.replace(self, **changes)

    def find_likelier_texts(self, context: Context) -> list[tuple[float, str]]:
        texts = [getattr(self, name, None) for name in ("token", "good", "bad", "label")]
        found = [self._find_other_space(context, text) for text in texts if isinstance(text, str)]
        return [each for each in found if each is not None]

    def _find_other_space(self, context: Context, text: str) -> tuple[float, str] | None:
        """Return the probability of a text with another space before it and a sentence, if it is likelier."""
        position = self.reads_position(context)
        found = None if position is None else _compare_spaces(context, text, [position])
        return None if found is None else (found.likelier, found.sentence)


# A text with another space before it is likelier if it has at least this probability, and this many times
# that of the text which was given.
_LIKELY, _LIKELIER = 0.01, 10


class _OtherSpace(NamedTuple):
    """A text with, or without, a space before it, which is likelier than the text as it was given.

    Attributes:
        text: The likelier text.
        likelier: Its probability.
        asked: The probability of the text that was given; 0 if it is not one token.
        sentence: A sentence with both.
    """

    text: str
    likelier: float
    asked: float
    sentence: str


def _compare_spaces(
    context: Context, text: str, positions: Sequence[int], least: float = _LIKELY
) -> _OtherSpace | None:
    """Return the text with another space before it, if that is much likelier at one of some positions.

    Args:
        context: The prompt.
        text: The text.
        positions: The positions.
        least: The probability that the other text has at least.
    """
    other, space = (text[1:], "without") if text.startswith(" ") else (f" {text}", "with")
    if context.output.ndim != 3 or not other.strip() or not context.is_known_token(other):
        return None
    ids = [context.token_id(each) for each in (text, other) if context.is_known_token(each)]
    rows = [
        _measure(_select_position(context.output[:1], position), "probability")[0, ids]
        for position in positions
    ]
    if not rows:
        return None
    asked, likelier = ([0.0] if len(ids) == 1 else []) + torch.stack(rows).amax(0).tolist()
    if likelier == 0 or likelier < max(least, _LIKELIER * asked):
        return None
    own = f"has probability {asked:.2g}" if len(ids) > 1 else "is not one token"
    sentence = f"{text!r} {own}; {other!r}, {space} a space, has {likelier:.2g}"
    return _OtherSpace(other, likelier, asked, sentence)


def _choose_text(context: Context, text: str, positions: Sequence[int]) -> tuple[str, list[str]]:
    """Return the text of the token that a text means, and a note if it is another one.

    The module's docstring has the rule.
    """
    found = _compare_spaces(context, text, positions, least=0)
    if found is None or found.asked >= _LIKELY:
        return text, []
    return found.text, [
        f"target: {found.sentence}, and is explained; lm.targets.token({text!r}) is exactly the text as it "
        "is written"
    ]


@dataclasses.dataclass(frozen=True)
class _Token(_AtPosition):
    """One token at one position, or one class.

    Attributes:
        token: The token or class; None: the one that the clean pass predicts.
        position: As in `_AtPosition`.
        of: The measure.
    """

    reads_row_alone: ClassVar[bool] = True

    token: str | int | None
    position: int | str | None
    of: TargetMeasure

    def of_prompt(self, context: Context) -> TargetFunction:
        position, token = self.reads_position(context), self._resolve_token(context)
        return lambda logits: _measure(_select_position(logits, position), self.of)[:, token]

    def _resolve_token(self, context: Context) -> int:
        if self.token is not None:
            return _find_token(context, self.token)
        return int(_select_position(context.output, self.reads_position(context))[0].argmax())

    def in_words(self, context: Context) -> str:
        token, measure = self._resolve_token(context), self.of.replace("_", " ")
        return f"{measure} of {context.token_text(token) if context.output.ndim == 3 else f'class {token}'}"

    def predict(self, context: Context) -> Explained:
        return _predict_class(context) if context.output.ndim == 2 else super().predict(context)


@dataclasses.dataclass(frozen=True)
class _Text(_Token):
    """The token that a text means, with or without a space before it."""

    def settle(self, context: Context, positions: Sequence[int]) -> tuple[Target, list[str]]:
        assert isinstance(self.token, str)
        text, notes = _choose_text(context, self.token, positions)
        _find_token(context, text, "target")
        return _Token(text, self.position, self.of), notes


@dataclasses.dataclass(frozen=True)
class _LogitDifference(_AtPosition):
    reads_row_alone: ClassVar[bool] = True

    # None: the token that the clean pass predicts.
    good: str | int | None
    bad: str | int
    position: int | str | None

    def of_prompt(self, context: Context) -> TargetFunction:
        position = self.reads_position(context)
        good, bad = self._resolve_good(context), _find_token(context, self.bad, "bad")
        if good == bad:
            raise ValueError(
                f"good, bad: expected two different tokens, got {context.token_text(good)} and {self.bad!r}"
            )
        return lambda logits: (
            _select_position(logits, position)[:, good] - _select_position(logits, position)[:, bad]
        )

    def in_words(self, context: Context) -> str:
        good = self._resolve_good(context)
        return f"logit of {context.token_text(good)} minus that of {context.token_text(self.bad)}"

    def _resolve_good(self, context: Context) -> int:
        if self.good is not None:
            return _find_token(context, self.good, "good")
        return _Token(None, self.position, "logit")._resolve_token(context)


@dataclasses.dataclass(frozen=True)
class _Contrast(_LogitDifference):
    """A logit difference of tokens that are given as texts, with or without a space before them.

    Attributes:
        exact: The names of the fields with the texts of tokens exactly as they are written.
    """

    exact: Sequence[str] = ()

    def __post_init__(self) -> None:
        # A record that was read from a file has a list.
        object.__setattr__(self, "exact", tuple(self.exact))

    def settle(self, context: Context, positions: Sequence[int]) -> tuple[Target, list[str]]:
        good, bad, notes = self.good, self.bad, list[str]()
        if isinstance(good, str) and "good" not in self.exact:
            good, notes = _choose_text(context, good, positions)
        settled = _LogitDifference(good, bad, self.position)
        if isinstance(bad, str) and "bad" not in self.exact:
            explained = name_token(context.tokenizer, settled._resolve_good(context))
            spaced = f"{' ' * explained.startswith(' ')}{bad.removeprefix(' ')}"
            # Otherwise the difference would contain that of a space.
            if spaced != bad and context.is_known_token(spaced):
                notes.append(f"against: {bad!r} is read as {spaced!r}, with the space of {explained!r}")
                settled = dataclasses.replace(settled, bad=spaced)
        # Errors name the arguments that the user gave.
        token = settled._resolve_good(context) if good is None else _find_token(context, good, "target")
        if _find_token(context, settled.bad, "against") == token:
            text = context.token_text(token)
            raise ValueError(f"target, against: expected two different tokens, got {text} twice")
        return settled, notes


@dataclasses.dataclass(frozen=True)
class _Class(Target):
    index: int | None
    of: TargetMeasure

    def of_prompt(self, context: Context) -> TargetFunction:
        _require_classes(context, "class_")
        index = self._find_index(context)
        return lambda logits: _measure(logits, self.of)[:, index]

    def _find_index(self, context: Context) -> int:
        return int(context.output[0].argmax()) if self.index is None else context.token_id(self.index, "k")

    def in_words(self, context: Context) -> str:
        return f"{self.of.replace('_', ' ')} of class {self._find_index(context)}"

    def predict(self, context: Context) -> Explained:
        return _predict_class(context)


@dataclasses.dataclass(frozen=True)
class _ClassDifference(Target):
    good: int
    bad: int

    def of_prompt(self, context: Context) -> TargetFunction:
        _require_classes(context, "class_difference")
        good, bad = context.token_id(self.good, "good"), context.token_id(self.bad, "bad")

        def compute_difference(logits: Tensor) -> Tensor:
            float_logits = _measure(logits, "logit")
            return float_logits[:, good] - float_logits[:, bad]

        return compute_difference

    def in_words(self, context: Context) -> str:
        return f"logit of class {self.good} minus that of class {self.bad}"

    def predict(self, context: Context) -> Explained:
        return _predict_class(context)


@dataclasses.dataclass(frozen=True)
class _MaskedToken(_Token):
    """A token at a mask.

    Attributes:
        position: The position; None: that of the only mask.
    """

    def reads_position(self, context: Context) -> int | None:
        position = _find_mask(context) if self.position is None else self.position
        return context.position(position) if context.output.ndim == 3 else None

    def at_row(self, position: int, context: Context) -> Target | None:
        return None


@dataclasses.dataclass(frozen=True)
class _Loss(_AtPosition):
    label: str | int | None
    position: int | str | None

    def of_prompt(self, context: Context) -> TargetFunction:
        if self.label is not None:
            log_probability = _Token(self.label, self.position, "log_probability").of_prompt(context)
            return lambda logits: -log_probability(logits)
        if context.output.ndim != 3:
            raise ValueError(
                "label: expected the class for a model whose output is [batch, class], got None "
                "(next-token loss)"
            )
        _require_tokens(context, "loss")
        if len(context.tokens) < 2:
            raise ValueError("loss: expected at least two tokens for a next-token loss, got one")
        next_tokens = context.tokens[1:]

        def compute_loss(logits: Tensor) -> Tensor:
            log_probabilities = _measure(logits, "log_probability")[:, :-1]
            labels = next_tokens.expand(len(logits), -1)[..., None]
            return -log_probabilities.gather(-1, labels)[..., 0].mean(-1)

        return compute_loss

    def reads_position(self, context: Context) -> int | None:
        return None if self.label is None else super().reads_position(context)

    def in_words(self, context: Context) -> str:
        if self.label is None:
            return "loss of the next tokens"
        label = context.token_text(self.label) if context.output.ndim == 3 else f"class {self.label}"
        return f"loss of {label}"


@dataclasses.dataclass(frozen=True)
class _NextToken(_AtPosition):
    reads_row_alone: ClassVar[bool] = True
    unstated: ClassVar[int] = -2

    position: int | str | None

    def of_prompt(self, context: Context) -> TargetFunction:
        token = self._find_token(context)
        position = self.reads_position(context)
        return lambda logits: _measure(_select_position(logits, position), "log_probability")[:, token]

    def _find_token(self, context: Context) -> int:
        position = self.reads_position(_require_tokens(context, "next_token"))
        if position is None or position == len(context.tokens) - 1:
            raise ValueError(
                "next_token: expected a position that a token of the prompt follows, got "
                f"{self.position}, the last of {len(context.tokens)}; targets.predicted explains what the "
                "model predicts there"
            )
        return int(context.tokens[position + 1])

    def in_words(self, context: Context) -> str:
        return f"log probability of {context.token_text(self._find_token(context))}"


@dataclasses.dataclass(frozen=True)
class _Span(Target):
    start: int
    stop: int | None

    def of_prompt(self, context: Context) -> TargetFunction:
        rows = self.rows_read(_require_tokens(context, "span").tokens)
        tokens = context.tokens[rows.start + 1 : rows.stop + 1, None]

        def compute_log_probability(logits: Tensor) -> Tensor:
            # A prompt has more positions than the span, so the count says whether these are all of them.
            own = logits if logits.shape[1] == len(rows) else logits[:, rows.start : rows.stop]
            log_probabilities = _measure(own, "log_probability")
            return log_probabilities.gather(-1, tokens.expand(len(logits), -1, -1)).sum((1, 2))

        return compute_log_probability

    def rows_read(self, tokens: Int[Tensor, " pos"]) -> range:
        count = len(tokens)
        first, after, _ = slice(self.start, self.stop).indices(count)
        if not 1 <= first < after or (self.stop is not None and abs(self.stop) > count):
            raise ValueError(
                f"span: expected 1 <= start < stop <= {count}, the number of tokens, because "
                f"nothing predicts the first token; got {self.start} and {self.stop}"
            )
        return range(first - 1, after - 1)

    def in_words(self, context: Context) -> str:
        rows = self.rows_read(context.tokens)
        tokens = context.tokens[rows.start + 1 : rows.stop + 1].tolist()
        if context.tokenizer is None:
            return f"log probability of the tokens {tokens}"
        return f"log probability of {''.join(name_token(context.tokenizer, token) for token in tokens)!r}"


def _require_tokens(context: Context, name: str) -> Context:
    if bool((context.tokens < 0).any()):
        raise ValueError(f"{name}: expected a prompt of tokens, got a picture or sound, which has none")
    if context.output.ndim != 3:
        raise ValueError(
            f"{name}: expected a model whose output is [batch, pos, d_vocab], got [batch, class]; use "
            "targets.class_ for a class"
        )
    return context


@dataclasses.dataclass(frozen=True)
class _Custom(Target):
    """A user's function of the logits."""

    function: TargetFunction

    def of_prompt(self, context: Context) -> TargetFunction:
        return self.function

    def in_words(self, context: Context) -> str:
        return f"{getattr(self.function, '__name__', type(self.function).__name__)}({self.reads})"


@dataclasses.dataclass(frozen=True)
class _Head(_Custom):
    """A user's function of the last residual stream (see `head`)."""

    reads: ClassVar[TargetReads] = "last_residual"

    after_final_norm: bool = False


@dataclasses.dataclass(frozen=True)
class _HfClassifier(Target):
    """A label of a transformers classifier, or the difference of two labels (see `hf_classifier`).

    Attributes:
        hf_model: The classifier.
        index: The number of the label; None: the label that the classifier predicts.
        minus: The number of the label whose logit is subtracted; None: no label.
        of: The measure, as in `hf_classifier`.
        position: The position of the token, for token classification and question answering.
        multi_label: Whether each label has its own probability.
    """

    reads: ClassVar[TargetReads] = "last_residual"
    reads_tokens: ClassVar[bool] = True
    after_final_norm: ClassVar[bool] = True

    hf_model: PreTrainedModel = dataclasses.field(repr=False)
    index: int | None = None
    minus: int | None = None
    of: TargetMeasure = "probability"
    position: int | str | None = None
    multi_label: bool = False

    def of_prompt(self, context: Context) -> Callable[..., Tensor]:
        own = self._find_own_pass(context)
        position, index = self._find_position(own, context), self._find_index(context)

        def compute_value(resid: Tensor, tokens: Tensor | None = None) -> Tensor:
            logits = own.logits(resid, tokens)
            if self.minus is not None:
                float_logits = _select_position(_measure(logits, "logit"), position)
                return float_logits[:, index] - float_logits[:, self.minus]
            return _select_position(self._measure(logits), position)[:, index]

        return compute_value

    def default_row(self, context: Context) -> int | None:
        own = self._find_own_pass(context)
        if own.own.ndim == 3 and self.position is None and not self._answers_questions:
            return None
        position = self._find_position(own, context)
        return own.position if position is None else position

    def at_row(self, position: int, context: Context) -> Target | None:
        follows = self._find_own_pass(context).own.ndim == 3 and not self._answers_questions
        return dataclasses.replace(self, position=position) if follows and self.position is None else None

    def own_position(self, context: Context) -> int | None:
        return None if self.position is None else self._find_position(self._find_own_pass(context), context)

    def in_words(self, context: Context) -> str:
        describe_label = functools.partial(classifiers.describe_label, self.hf_model)
        position = self._find_position(self._find_own_pass(context), context)
        where = "" if position is None else f" at position {position}"
        label = describe_label(self._find_index(context))
        if self.minus is not None:
            return f"logit of {label} minus that of {describe_label(self.minus)}{where}"
        return f"{self.of.replace('_', ' ')} of {label}{where}"

    def predict(self, context: Context) -> Explained:
        if self._answers_questions or classifiers.gives_values(self.hf_model):
            return Explained()
        own = self._find_own_pass(context)
        logits = _select_position(own.own, self._find_position(own, context))[:1]
        return read_predictions(logits, functools.partial(classifiers.name_label, self.hf_model))[0]

    def _find_index(self, context: Context) -> int:
        own = self._find_own_pass(context)
        if self.index is not None:
            return self.index
        return int(_select_position(own.own, self._find_position(own, context))[0].argmax())

    @property
    def _answers_questions(self) -> bool:
        return classifiers.find_kind(self.hf_model) == "question answering"

    def _find_own_pass(self, context: Context) -> classifiers.ClassifierPass:
        """Return the classifier's pass over the prompt, which runs once per prompt and is checked."""
        if id(self.hf_model) not in context.found:
            own = classifiers.ClassifierPass(self.hf_model, context.tokens, context.inputs, context.source)
            own.check(context.output)
            context.found[id(self.hf_model)] = own
        found: classifiers.ClassifierPass = context.found[id(self.hf_model)]
        return found

    def _find_position(self, own: classifiers.ClassifierPass, context: Context) -> int | None:
        """Return the position whose logits are read, or None if the logits are of the whole prompt."""
        kind = type(self.hf_model).__name__
        if own.own.ndim == 2:
            if self.position is not None:
                raise ValueError(
                    f"position: expected None for {kind}, which classifies whole prompts, got {self.position}"
                )
            return None
        if self.position is not None:
            return context.position(self.position)
        if not self._answers_questions:
            raise ValueError(f"position: expected the position of a token, which {kind} classifies, got None")
        return int(own.own[0, :, self.index].argmax())

    def _measure(self, logits: Float[Tensor, "copy *pos label"]) -> Float[Tensor, "copy *pos label"]:
        if self._answers_questions:
            # For question answering, start and end are distributions over positions.
            return _measure(logits.mT, self.of).mT
        if not self.multi_label or self.of == "logit":
            return _measure(logits, self.of)
        log_probabilities = torch.nn.functional.logsigmoid(_measure(logits, "logit"))
        return log_probabilities if self.of == "log_probability" else log_probabilities.exp()


# ------------------------------------------------------------------ public functions


def predicted(position: int | str | None = None, of: TargetMeasure = "probability") -> Target:
    """Return the target for the token or class that the model predicts in the clean pass.

        >>> method = lm.methods.InputGradients(target=lm.targets.predicted(of="log_probability"))
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-1]).top(3)

    Args:
        position: As in `token`. It is ignored if the output is `[batch, class]`.
        of: The measure: "probability" (0 to 1), "log_probability" or "logit".
    """
    return _Token(None, _check_position(position), _check_measure(of))


def token(token: str | int, position: int | str | None = None, of: TargetMeasure = "probability") -> Target:
    """Return the target for a given token, exactly as it is written: "Paris" and " Paris" are two tokens.

        >>> method = lm.methods.InputGradients(target=lm.targets.token(" Paris", of="log_probability"))
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-1]).top(3)

    A run raises a ValueError if the text is several tokens on its prompt, or if the model has no tokenizer.

    Args:
        token: The text of the token, with its leading space, or its number.
        position: The position of the prediction (negative: from the end), or a text of the prompt, of which
            the last token is meant. A map has no other row than that of this position if its method reads the
            target at rows. None: the position of each row, or the last position in methods with one number
            for all rows (`AttentionAttribution`, `GradientAttention`).
        of: The measure: "probability" (0 to 1), "log_probability" or "logit".
    """
    return _Token(_check_token("token", token), _check_position(position), _check_measure(of))


def probability(token: str | int | None = None, position: int | str | None = None) -> Target:
    """Return the target for the probability of a token, 0 to 1.

        >>> method = lm.methods.InputGradients(target=lm.targets.probability(" Paris"))
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-1]).top(3)

    Args:
        token: The text of the token, with its leading space, or its number. None: the predicted token.
        position: As in `token`.
    """
    return _Token(_check_optional_token("token", token), _check_position(position), "probability")


def logit(token: str | int | None = None, position: int | str | None = None) -> Target:
    """Return the target for the logit of a token.

        >>> method = lm.methods.InputGradients(target=lm.targets.logit(" Paris"))
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-1]).top(3)

    Args:
        token: The text of the token, with its leading space, or its number. None: the predicted token.
        position: As in `token`.
    """
    return _Token(_check_optional_token("token", token), _check_position(position), "logit")


def logit_difference(good: str | int, bad: str | int, position: int | str | None = None) -> Target:
    """Return the target logit(good) - logit(bad), which is positive if the model prefers `good`.

        >>> method = lm.methods.InputGradients(target=lm.targets.logit_difference(" Paris", " Rome"))
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-1]).top(3)

    Args:
        good: The text of a token, with its leading space, or its number.
        bad: Another token, in the same form.
        position: As in `token`.
    """
    good, bad = _check_token("good", good), _check_token("bad", bad)
    return _LogitDifference(good, bad, _check_position(position))


def class_(k: int | None = None, of: TargetMeasure = "probability") -> Target:
    """Return the target for a class of a model with output `[batch, class]`.

        >>> method = lm.methods.InputGradients(target=lm.targets.class_(1))
        >>> lm.run(model, pixels, method, queries=[0]).top(3)

    Args:
        k: The number of the class, from 0. None: the predicted class.
        of: The measure: "probability" (0 to 1), "log_probability" or "logit".
    """
    return _Class(None if k is None else check_whole_number("k", k, 0), _check_measure(of))


def loss(label: str | int | None = None, position: int | str | None = None) -> Target:
    """Return the target for the cross-entropy, 0 or more, in nats.

        >>> method = lm.methods.GradientAttention(target=lm.targets.loss())
        >>> lm.run(model, "The Eiffel Tower is in the city of", method).top(3)

    Args:
        label: The correct token at `position`, or the correct class. None: the prompt's own next tokens,
            averaged over its positions, for causal models and decoders.
        position: As in `token`. It is ignored if `label` is None, or if the output is `[batch, class]`.
    """
    return _Loss(_check_optional_token("label", label), _check_position(position))


def next_token(position: int | str | None = None) -> Target:
    """Return the target for the token that the prompt itself has next, as its log probability in nats.

        >>> method = lm.methods.InputGradients(target=lm.targets.next_token())
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-2]).top(3)

    It is read at `position`, so it explains the token at `position + 1`.

    Args:
        position: As in `token`, but the position before the token. In methods with one number for all rows,
            None is the last position but one.
    """
    return _NextToken(_check_position(position))


def span(start: int, stop: int | None = None) -> Target:
    """Return the target for several neighboring tokens of the prompt, as their log probability in nats.

        >>> method = lm.methods.InputGradients(target=lm.targets.span(-2))
        >>> lm.run(model, "The Eiffel Tower is in the city of Paris", method, queries=[-1]).top(3)

    It is Σ log p(token i | the tokens before i) over the positions i from `start` to `stop` − 1, in causal
    models and decoders. It is one number of the prompt, so it needs a single row (`queries=[-1]`).

    Args:
        start: The position of the first token, 1 or more (negative: from the end).
        stop: The position after the last token. None: the end of the prompt.
    """
    start = check_whole_number("start", start)
    return _Span(start, None if stop is None else check_whole_number("stop", stop))


def masked_token(
    token: str | int | None = None, position: int | str | None = None, of: TargetMeasure = "probability"
) -> Target:
    """Return the target for a token at a mask, for masked language models.

        >>> method = lm.methods.InputGradients(target=lm.targets.masked_token(of="logit"))
        >>> position = tokens[0].tolist().index(model.tokenizer.mask_token_id)
        >>> lm.run(model, tokens, method, queries=[position]).top(3)

    Args:
        token: The text or number of the token. None: the predicted token.
        position: The position. None: that of the only mask.
        of: The measure: "probability" (0 to 1), "log_probability" or "logit".
    """
    return _MaskedToken(_check_optional_token("token", token), _check_position(position), _check_measure(of))


def head(function: TargetFunction, after_final_norm: bool = False) -> Target:
    """Return the target for your own function of the last residual stream.

        >>> target = lm.targets.head(lambda resid: resid[:, -1].norm(dim=-1))
        >>> method = lm.methods.InputGradients(target=target)
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-1]).top(3)

    The function gets the output of the mapped part's last block, without padding, and not the model's logits.
    Use it for a trained classifier, such as
    `lm.targets.head(lambda resid: classifier(torch.tanh(pooler(resid[:, 0]))).softmax(-1)[:, 1])`.

    Args:
        function: A differentiable function from the last residual `[copy pos d_model]` to a value `[copy]`.
        after_final_norm: Whether to apply the model's final norm first, if it has one. A run raises an error
            if the final norm was not found although the model may have one.
    """
    check_instance("function", function, Callable, "a callable on the last residual")
    check_flags(after_final_norm=after_final_norm)
    return _Head(function, after_final_norm)


def hf_classifier(
    hf_model: PreTrainedModel | TransformerLensModel,
    class_: int | str | None = None,
    of: TargetMeasure = "probability",
    position: int | str | None = None,
) -> Target:
    """Return the target for a class of a transformers classifier, which TransformerLens does not load.

    A model that `lm.wrap` made from a classifier contains it:

        >>> hf_model = AutoModelForSequenceClassification.from_pretrained(name)
        >>> model = lm.wrap(hf_model, AutoTokenizer.from_pretrained(name))
        >>> target = lm.targets.hf_classifier(model, "POSITIVE")
        >>> lm.run(model, "a fine film", lm.methods.InputGradients(target=target), queries=[0]).top(3)

    For other models, load the model with TransformerBridge, and give the classifier with the same weights
    here, `AutoModelForSequenceClassification.from_pretrained(folder).eval()`.

    The classifier itself runs on every prompt, from the last residual of the mapped model. It therefore
    chooses the token that it reads, and applies its own pooler and dense layers. (A decoder's classifier
    reads the last token that is not padding, even if the padding token is the end-of-sequence token.) A run
    raises an error unless the mapped model's last residual gives the classifier's own logits.

    - A single label without a problem type (rerankers, reward models), a regression, or multiple choice: the
      value itself is explained, whatever `of` is.
    - `problem_type="multi_label_classification"`: a probability is the sigmoid of a label's logit.
    - Token classification: `position` is that of the token. None: the position of each row, in methods that
      read the target at rows.
    - Question answering: `class_` is "start" or "end", and `position` is that of the token. None: the
      position that the classifier predicts, whatever the row. A probability is a softmax over positions.
    - Multiple choice: each prompt is one choice, and the target is its score.
    - T5 and BART classifiers read the decoder, at the position of the source's last end-of-sequence token.
      Map part="decoder", "cross" or "joint", with the target that they read: the source shifted right by one
      token.

    If a method replaces tokens (`Occlusion(by="replace")`), the classifier searches for the token to read in
    the changed prompt. With gradients, hidden tokens and zeroed values, it reads the same position as in the
    clean pass. T5 and BART classifiers always do.

    Args:
        hf_model: The model that `lm.wrap` made from a classifier. Or the classifier itself, in evaluation
            mode, on the mapped model's device, and preferably in its dtype.
        class_: The number of the class, or its name in `config.id2label`. None: the class that the classifier
            predicts.
        of: The measure: "probability" (0 to 1), "log_probability" or "logit".
        position: The position of a token (negative: from the end), for classifiers of tokens and question
            answering.

    Raises:
        TypeError: If `hf_model` is not a classifier of transformers.
        ValueError: If it is in training mode, or has no such class. A run raises a ValueError if the weights
            are not those of the mapped model, if `position` is missing or not needed, or if the classifier
            does not read the mapped part. It also does so if the logits depend on more than the last hidden
            states. In this case, use `lm.targets.head`.
    """
    hf_model = classifiers.find_classifier(hf_model)
    index = classifiers.find_label(hf_model, class_, "class_")
    of = _check_measure(of)
    of = "logit" if classifiers.gives_values(hf_model) else of
    is_multi_label = classifiers.takes_several(hf_model)
    return _HfClassifier(hf_model, index, None, of, _check_position(position), is_multi_label)


def class_difference(
    good: int | str,
    bad: int | str,
    hf_model: PreTrainedModel | TransformerLensModel | None = None,
    position: int | str | None = None,
) -> Target:
    """Return the target logit(good) - logit(bad) of two classes: above 0 if the classifier prefers `good`.

        >>> target = lm.targets.class_difference("POSITIVE", "NEGATIVE", model)
        >>> lm.run(model, "a fine film", lm.methods.InputGradients(target=target), queries=[0]).top(3)

    Args:
        good: The number of a class, or with `hf_model` its name.
        bad: The number of another class, or with `hf_model` its name.
        hf_model: A model of `lm.wrap` or a classifier of transformers, as in `hf_classifier`. None: the
            output of the mapped model is `[batch, class]`.
        position: The position of a token, for classifiers of tokens, as in `hf_classifier`.

    Raises:
        TypeError: As in `hf_classifier`, or if a class is neither a number nor a name.
        ValueError: As in `hf_classifier`, or if a class does not exist, or both are the same.
    """
    if hf_model is None:
        if position is not None:
            raise ValueError(f"position: expected None without hf_model, got {describe_value(position)}")
        numbers = (check_whole_number("good", good, 0), check_whole_number("bad", bad, 0))
        difference: Target = _ClassDifference(*numbers)
    else:
        hf_model = classifiers.find_classifier(hf_model)
        if classifiers.find_kind(hf_model) == "question answering":
            raise ValueError(
                "class_difference: expected a classifier with alternative classes, got one for the start and "
                "the end of an answer; explain one of them with lm.targets.hf_classifier"
            )
        numbers = (_find_class(hf_model, good, "good"), _find_class(hf_model, bad, "bad"))
        difference = _HfClassifier(hf_model, *numbers, "logit", _check_position(position))
    if numbers[0] == numbers[1]:
        raise ValueError(
            f"good, bad: expected two different classes, got {describe_value(good)} and {describe_value(bad)}"
        )
    return difference


def _find_class(hf_model: PreTrainedModel, label: Any, name: str) -> int:
    if not isinstance(label, str):
        check_whole_number(name, label, 0, what="a class's name or number")
    number = classifiers.find_label(hf_model, label, name)
    assert number is not None
    return number


# ------------------------------------------------------------------ conversion


def as_target(target: TargetLike, against: TokenLike | None = None) -> Target:
    """Return what is explained as a `Target`; one that is a `Target` already is returned unchanged.

    Args:
        target: The target: a `Target`, the text of a token, or a function of the logits.
        against: A token with which that of the target is contrasted, as a text, a number or
            `lm.targets.token(...)`. None: no contrast.

    Raises:
        TypeError: If it is none of these, or the target beside `against` is not a token.
    """
    if against is not None:
        return _make_contrast(target, against)
    if isinstance(target, Target):
        return target
    if isinstance(target, str):
        return _Text(target, None, "log_probability")
    if not callable(target):
        raise TypeError(
            "target: expected the text of a token, one of lens_mix.targets or a callable "
            f"logits [copy pos d_vocab] -> [copy], got {describe_value(target)}"
        )
    return _Custom(target)


def _make_contrast(target: TargetLike, against: TokenLike) -> Target:
    """Return the target for one token minus another."""
    good = as_target(target)
    if type(good) not in (_Token, _Text):
        got = type(good).__name__.lstrip("_")
        raise TypeError(
            f"target: expected beside against= the text of a token, lm.targets.token(...) or "
            f"lm.targets.predicted(), got {got}"
        )
    assert isinstance(good, _Token)
    bad: Any = against
    if isinstance(against, Target):
        if type(against) is not _Token or against.token is None:
            got = type(against).__name__.lstrip("_")
            raise TypeError(
                f"against: expected a token by its text, its number or lm.targets.token, got {got}"
            )
        bad = against.token
    exact = ("good",) * (type(good) is _Token) + ("bad",) * (not isinstance(against, str))
    return _Contrast(good.token, _check_token("against", bad), good.position, exact)


def describe(target: Target) -> dict[str, Any]:
    """Return the target's name and parameters as strings and numbers, for records."""
    fields = {field.name: getattr(target, field.name) for field in dataclasses.fields(target)}
    plain = {
        name: getattr(value, "__qualname__", type(value).__name__) if callable(value) else value
        for name, value in fields.items()
    }
    # The names of the private classes are written without their underscore.
    return {"target": type(target).__name__.lstrip("_"), **plain}


def from_record(record: Mapping[str, Any]) -> Target:
    """Return the target that `describe` described.

    Raises:
        ValueError: If the target was made from a function, which a record does not contain.
    """
    classes = (
        _Token,
        _Text,
        _LogitDifference,
        _Contrast,
        _Class,
        _ClassDifference,
        _MaskedToken,
        _Loss,
        _NextToken,
        _Span,
    )
    known = {each.__name__.lstrip("_"): each for each in classes}
    fields = dict(record)
    name = fields.pop("target", None)
    if name not in known:
        raise ValueError(
            f"target: expected one of {sorted(known)}, which a record fully describes, got {name!r}"
        )
    target_class: type[Target] = known[name]
    # Records of older releases have this number where no position was given.
    if issubclass(target_class, _AtPosition) and target_class is not _MaskedToken:
        position = fields.get("position")
        fields["position"] = None if position == target_class.unstated else position
    return target_class(**fields)


def _require_classes(context: Context, name: str) -> None:
    if context.output.ndim != 2:
        raise ValueError(
            f"{name}: expected a model whose output is [batch, class], got logits of shape "
            f"{tuple(context.output.shape)}; use targets.token for a token, targets.hf_classifier for a "
            "classifier of transformers, or targets.head for any other classifier"
        )


def _predict_class(context: Context) -> Explained:
    return read_predictions(context.output[:1], lambda index: f"class {index}")[0]


def _find_token(context: Context, token: str | int, name: str = "token") -> int:
    """Return the number of the token that a target names.

    Raises:
        TypeError: As in `Context.token_id`.
        ValueError: As in `Context.token_id`, or if the tokenizer does not know the text.
    """
    found, unknown = context.token_id(token, name), getattr(context.tokenizer, "unk_token", None)
    is_unknown = isinstance(token, str) and found == getattr(context.tokenizer, "unk_token_id", None)
    if is_unknown and token != unknown:
        raise ValueError(
            f"{name}: expected the text of a token of the model's vocabulary, got {token!r}, for which the "
            f"tokenizer has only its unknown token {unknown!r}"
        )
    return found


def _find_mask(context: Context) -> int:
    """Return the position of the only mask of a prompt."""
    mask = getattr(context.tokenizer, "mask_token_id", None)
    if mask is None:
        raise ValueError(
            "position: expected the masked position, because the model's tokenizer has no mask token, "
            "got None"
        )
    mask_positions: list[int] = (context.tokens == mask).nonzero()[:, 0].tolist()
    if len(mask_positions) != 1:
        raise ValueError(
            f"position: expected a prompt with one mask token, got {len(mask_positions)}; give the position"
        )
    return mask_positions[0]


def _select_position(logits: Tensor, position: int | None) -> Float[Tensor, "copy d_vocab"]:
    if position is None:
        return logits
    return logits[:, 0 if logits.shape[1] == 1 else position]


def _measure(
    logits: Float[Tensor, "copy *pos d_vocab"], of: TargetMeasure
) -> Float[Tensor, "copy *pos d_vocab"]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if of == "logit":
        return logits
    return logits.softmax(-1) if of == "probability" else logits.log_softmax(-1)


def _check_position(position: int | str | None) -> int | str | None:
    if position is None or isinstance(position, str):
        return position
    return check_whole_number("position", position, what="a text of the prompt or a whole number")


def _check_measure(of: TargetMeasure) -> TargetMeasure:
    check_choice("of", of, get_args(TargetMeasure))
    return of


def _check_token(name: str, token: Any) -> str | int:
    return (
        token
        if isinstance(token, str)
        else check_whole_number(name, token, 0, what="a token's text or number")
    )


def _check_optional_token(name: str, token: Any) -> str | int | None:
    return None if token is None else _check_token(name, token)
