"""Targets: the number that an attribution explains, as a function of the model's output.

Any callable `logits [copy pos d_vocab] -> [copy]` is a target: it gets one prompt at a time, in copies,
without padding, so that position -1 is the prompt's last. The functions here make the usual ones:

    lm.targets.predicted()                         probability of what the model predicts (Hao et al., 2021)
    lm.targets.token(" Paris")                     probability of a given next token
    lm.targets.logit(" Paris", position=4)         its logit, at any position
    lm.targets.logit_difference(" is", " are")
    lm.targets.loss()                              next-token cross-entropy of the prompt
    lm.targets.masked_token("cat")                 at the prompt's mask token
    lm.targets.class_(2)                           of a model whose output is [batch, class]
    lm.targets.hf_classifier(hf_model, 2)          of a classifier of transformers with the same weights
    lm.targets.head(classifier)                    a head that TransformerLens does not hold

For encoder-decoders the logits are the decoder's, whichever stack is mapped, and positions count in the
target text; `head` reads the mapped stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix import classifiers
from lens_mix.arguments import flags, instance, one_of, shown, whole_number
from lens_mix.lens import texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Context",
    "Target",
    "class_",
    "head",
    "hf_classifier",
    "logit",
    "logit_difference",
    "loss",
    "masked_token",
    "predicted",
    "probability",
    "token",
]

Measure = Literal["probability", "log_probability", "logit"]
Reads = Literal["logits", "last_residual"]
Explained = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Context:
    """What a target may know of one prompt.

    Attributes:
        tokens: the tokens that the output stands over (of an encoder-decoder the target's, for logits).
        output: the output of the clean pass, logits [1 pos d_vocab] or [1 class], or the residual stream.
        tokenizer: the model's; None where it has none.
        inputs: the model's further inputs, of the mapped tokens' shape, by name.
        as_target: whether text is read as the decoder of an encoder-decoder writes it (Marian has another
            vocabulary of pieces there).
    """

    tokens: Int[Tensor, " pos"]
    output: Float[Tensor, "batch ..."]
    tokenizer: PreTrainedTokenizerBase | None = None
    inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    as_target: bool = False

    def token_id(self, token: str | int, name: str = "token") -> int:
        """A token's number, checked.

        Raises:
            TypeError, ValueError: neither text nor number; text of several tokens; no such token.
        """
        if not isinstance(token, str):
            return whole_number(name, token, 0, self.output.shape[-1] - 1)
        if self.tokenizer is None:
            raise ValueError(
                f"{name}: {token!r} needs a tokenizer and this model has none; expected a token number"
            )
        ids = texts.token_ids(self.tokenizer, token, as_target=self.as_target)
        if len(ids) != 1:
            read_as = self.tokenizer.convert_ids_to_tokens(ids)
            raise ValueError(
                f"{name}: expected the text of one token (mind the leading space), got {token!r}, "
                f"which is {len(ids)} tokens: {read_as}"
            )
        return int(ids[0])

    def position(self, position: int) -> int:
        """A position of the output, negative from the end, as a number from 0; an error if out of range."""
        count = len(self.tokens)
        return whole_number("position", position, -count, count - 1) % count


@dataclasses.dataclass(frozen=True)
class Target:
    """Base of the targets made here: the fields are the parameters, `of_prompt` binds them to one prompt."""

    reads: ClassVar[Reads] = "logits"

    def of_prompt(self, context: Context) -> Explained:
        """The function output [copy ...] -> [copy]; TypeError, ValueError if it does not fit the prompt."""
        raise NotImplementedError(f"{type(self).__name__} defines no of_prompt")

    def reads_position(self, context: Context) -> int | None:
        """The only position of [copy pos d_vocab] that it reads, from 0; None: several, or not known."""
        return None


TargetLike = Target | Explained  # of other callables: logits -> [copy]


@dataclasses.dataclass(frozen=True)
class _Token(Target):
    """One token at one position (or one class); None: the one that the clean pass predicts, the only mask."""

    token: str | int | None
    position: int | None
    of: Measure

    def of_prompt(self, context: Context) -> Explained:
        place = _place(context, self.position)
        if self.token is None:
            token = int(_row(context.output, place)[0].argmax())
        else:
            token = context.token_id(self.token)
        return lambda logits: _measured(_row(logits, place), self.of)[:, token]

    def reads_position(self, context: Context) -> int | None:
        return _place(context, self.position)


@dataclasses.dataclass(frozen=True)
class _LogitDifference(Target):
    good: str | int
    bad: str | int
    position: int

    def of_prompt(self, context: Context) -> Explained:
        place = _place(context, self.position)
        good, bad = context.token_id(self.good, "good"), context.token_id(self.bad, "bad")
        if good == bad:
            raise ValueError(f"good, bad: expected two different tokens, got {self.good!r} and {self.bad!r}")
        return lambda logits: _row(logits, place)[:, good] - _row(logits, place)[:, bad]

    def reads_position(self, context: Context) -> int | None:
        return _place(context, self.position)


@dataclasses.dataclass(frozen=True)
class _Class(Target):
    index: int | None
    of: Measure

    def of_prompt(self, context: Context) -> Explained:
        if context.output.ndim != 2:
            raise ValueError(
                "class_: expected a model whose output is [batch, class], got logits of shape "
                f"{tuple(context.output.shape)}; for a token use targets.token, for a classifier that "
                "TransformerLens does not hold targets.head"
            )
        index = int(context.output[0].argmax()) if self.index is None else context.token_id(self.index, "k")
        return lambda logits: _measured(logits, self.of)[:, index]


@dataclasses.dataclass(frozen=True)
class _MaskedToken(_Token):
    """The same under the name that records have for it."""


@dataclasses.dataclass(frozen=True)
class _Loss(Target):
    label: str | int | None
    position: int

    def of_prompt(self, context: Context) -> Explained:
        if self.label is not None:
            surprise = _Token(self.label, self.position, "log_probability").of_prompt(context)
            return lambda logits: -surprise(logits)
        if context.output.ndim != 3:
            raise ValueError(
                "label: expected the class for a model whose output is [batch, class], got None "
                "(next-token loss)"
            )
        if len(context.tokens) < 2:
            raise ValueError("loss: expected at least two tokens for a next-token loss, got one")
        following = context.tokens[1:]

        def loss(logits: Tensor) -> Tensor:
            log_probabilities = _measured(logits, "log_probability")[:, :-1]
            right = following.expand(len(logits), -1)[..., None]
            return -log_probabilities.gather(-1, right)[..., 0].mean(-1)

        return loss

    def reads_position(self, context: Context) -> int | None:
        return None if self.label is None else _place(context, self.position)


@dataclasses.dataclass(frozen=True)
class _Custom(Target):
    """Any callable on the logits."""

    function: Explained

    def of_prompt(self, context: Context) -> Explained:
        return self.function


@dataclasses.dataclass(frozen=True)
class Head(_Custom):
    """A user's function of the last residual stream (see `head`)."""

    reads: ClassVar[Reads] = "last_residual"

    after_final_norm: bool = False


@dataclasses.dataclass(frozen=True)
class _HfClassifier(Head):
    """A class of a classifier of transformers (see `hf_classifier`); `function` is its head."""

    hf_model: PreTrainedModel = dataclasses.field(kw_only=True)
    index: int | None = None
    of: Measure = "probability"

    def of_prompt(self, context: Context) -> Explained:
        inputs = {name: value[None] for name, value in context.inputs.items()}
        hidden = classifiers.last_hidden(self.hf_model, context.tokens[None], **inputs)
        if hidden.shape != context.output.shape or not classifiers.close(context.output, hidden):
            raise ValueError(
                "hf_model: expected the weights of the mapped model, got one whose last hidden states differ "
                "on this prompt; load both from the same folder, without folding or centring weights"
            )
        dtype = next(iter(self.hf_model.parameters())).dtype

        def logits(resid: Tensor) -> Tensor:
            return self.function(resid.to(dtype))

        index = int(logits(context.output)[0].argmax()) if self.index is None else self.index
        return lambda resid: _measured(logits(resid), self.of)[:, index]


# ------------------------------------------------------------------ what users call


def predicted(position: int = -1, of: Measure = "probability") -> Target:
    """What the model predicts in the clean pass: its token at `position`, or its class.

    Args:
        position: negative from the end; ignored where the output is [batch, class].
        of: "probability" (0..1), "log_probability" or "logit" (without bound).
    """
    return _Token(None, whole_number("position", position), _checked_measure(of))


def token(token: str | int, position: int = -1, of: Measure = "probability") -> Target:
    """A given token: its text (leading space included) or its number.

    ValueError where it meets a prompt: text of several tokens, or no tokenizer to read it with.
    """
    return _Token(_checked_token("token", token), whole_number("position", position), _checked_measure(of))


def probability(token: str | int | None = None, position: int = -1) -> Target:
    """The probability of a token, or of the predicted one; 0..1."""
    return _Token(_checked("token", token), whole_number("position", position), "probability")


def logit(token: str | int | None = None, position: int = -1) -> Target:
    """The logit of a token, or of the predicted one."""
    return _Token(_checked("token", token), whole_number("position", position), "logit")


def logit_difference(good: str | int, bad: str | int, position: int = -1) -> Target:
    """logit(good) - logit(bad): positive where the model prefers `good`."""
    position = whole_number("position", position)
    return _LogitDifference(_checked_token("good", good), _checked_token("bad", bad), position)


def class_(k: int | None = None, of: Measure = "probability") -> Target:
    """Class `k` (None: the predicted one) of a model whose output is [batch, class]."""
    return _Class(None if k is None else whole_number("k", k, 0), _checked_measure(of))


def loss(label: str | int | None = None, position: int = -1) -> Target:
    """Cross-entropy, 0 or more, in nats.

    Args:
        label: the right token at `position`, or the right class. None: the prompt's own next tokens, mean
            over its positions (for causal models and decoders).
        position: where the label belongs; ignored with None and where the output is [batch, class].
    """
    return _Loss(_checked("label", label), whole_number("position", position))


def masked_token(
    token: str | int | None = None, position: int | None = None, of: Measure = "probability"
) -> Target:
    """A token (None: the predicted one) at `position` (None: the only mask), for masked language models."""
    place = None if position is None else whole_number("position", position)
    return _MaskedToken(_checked("token", token), place, _checked_measure(of))


def head(function: Explained, after_final_norm: bool = False) -> Target:
    """A head of your own: `function(last residual [copy pos d_model]) -> [copy]`.

    It gets what the mapped stack's last block gives, without padding, and no head of the model is run. Put a
    trained classifier here, as in
    `lm.targets.head(lambda resid: classifier(torch.tanh(pooler(resid[:, 0]))).softmax(-1)[:, 1])`.

    Args:
        function: must be differentiable.
        after_final_norm: the model's final norm is applied first, where it has one. A run refuses where none
            is mapped and the model may have one.
    """
    instance("function", function, Callable, "a callable on the last residual")
    flags(after_final_norm=after_final_norm)
    return Head(function, after_final_norm)


def hf_classifier(
    hf_model: PreTrainedModel, class_: int | str | None = None, of: Measure = "probability"
) -> Target:
    """A class of a classifier of transformers, whose head TransformerLens drops when it loads the model.

    Map the model with TransformerBridge as it loads (a `BertForMaskedLM`, say), and give the classifier of
    the same weights here:

        hf_model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        lm.run(bridge, text, lm.InputGradients(target=lm.targets.hf_classifier(hf_model, 3)), queries=[0])

    Its head is read off the model and proven: on four tokens here, and on each prompt that the mapped model
    ends in the hidden states that the classifier reads (one pass of `hf_model` per prompt).

    Args:
        hf_model: in evaluation mode, on the mapped model's device.
        class_: its number, or its name in `config.label2id`; None: the one that it predicts.
        of: "probability" (0 to 1), "log_probability" or "logit".

    Raises:
        TypeError: no such model. ValueError: training mode, a head of unknown form, no such class; when it
            meets a prompt, other weights than the mapped model's.
    """
    function, after = classifiers.read_head(hf_model)
    names, count = hf_model.config.label2id or {}, hf_model.config.num_labels
    if isinstance(class_, str):
        if class_ not in names:
            raise ValueError(f"class_: expected one of {list(names)}, got {shown(class_)}")
        class_ = names[class_]
    index = None if class_ is None else whole_number("class_", class_, 0, count - 1)
    return _HfClassifier(function, after, index, _checked_measure(of), hf_model=hf_model)


# ------------------------------------------------------------------ reading targets


def as_target(target: TargetLike) -> Target:
    """A target as it is, any other callable as a target on the logits; TypeError if neither."""
    if isinstance(target, Target):
        return target
    if not callable(target):
        raise TypeError(
            "target: expected one of lens_mix.targets or a callable logits [copy pos d_vocab] -> [copy], "
            f"got {type(target).__name__}"
        )
    return _Custom(target)


def describe(target: Target) -> dict[str, Any]:
    """The target in plain words and numbers, for records."""
    fields = {field.name: getattr(target, field.name) for field in dataclasses.fields(target)}
    plain = {
        name: getattr(value, "__qualname__", type(value).__name__) if callable(value) else value
        for name, value in fields.items()
    }
    return {"target": type(target).__name__.lstrip("_"), **plain}  # the classes are private, records are not


def from_record(record: Mapping[str, Any]) -> Target:
    """The target that `describe` described. ValueError: one that holds a function, which no record keeps."""
    classes = (_Token, _LogitDifference, _Class, _MaskedToken, _Loss)
    known = {each.__name__.lstrip("_"): each for each in classes}
    fields = dict(record)
    name = fields.pop("target", None)
    if name not in known:
        raise ValueError(f"target: expected one of {sorted(known)} to make it again, got {name!r}")
    return known[name](**fields)


def _place(context: Context, position: int | None) -> int | None:
    """A position of the output from 0 (None: the only mask's); None for an output without positions."""
    if position is None:
        mask = getattr(context.tokenizer, "mask_token_id", None)
        if mask is None:
            raise ValueError(
                "position: expected the masked position, as the model's tokenizer has no mask token, got None"
            )
        places = (context.tokens == mask).nonzero()[:, 0].tolist()
        if len(places) != 1:
            raise ValueError(
                f"position: expected a prompt with one mask token, got {len(places)}; give the position"
            )
        position = places[0]
    return context.position(position) if context.output.ndim == 3 else None


def _row(logits: Tensor, place: int | None) -> Float[Tensor, "copy d_vocab"]:
    return logits if place is None else logits[:, place]


def _measured(logits: Float[Tensor, "copy *pos d_vocab"], of: Measure) -> Float[Tensor, "copy *pos d_vocab"]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if of == "logit":
        return logits
    return logits.softmax(-1) if of == "probability" else logits.log_softmax(-1)


def _checked_measure(of: Measure) -> Measure:
    one_of("of", of, get_args(Measure))
    return of


def _checked_token(name: str, token: Any) -> str | int:
    return token if isinstance(token, str) else whole_number(name, token, 0, what="a token's text or number")


def _checked(name: str, token: Any) -> str | int | None:
    return None if token is None else _checked_token(name, token)
