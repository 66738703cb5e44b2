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
    lm.targets.class_difference(2, 0)              logit of a class minus that of another
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
    "class_difference",
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
TargetFunction = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Context:
    """What a target may know of one prompt.

    Attributes:
        tokens: the tokens that the output stands over (of an encoder-decoder the target's, for logits).
        output: the output of the clean pass, logits [1 pos d_vocab] or [1 class], or the residual stream.
        tokenizer: the model's; None where it has none.
        inputs: the model's further inputs, of the mapped tokens' shape (the source's, if there is one), by
            name.
        as_target: whether text becomes tokens as a target of an encoder-decoder (Marian's tokenizer has
            other pieces for targets).
        source: what the encoder reads, if the last residual is that of an encoder-decoder's decoder.
        found: what a target has computed from the prompt, kept for the prompt's other rows.
    """

    tokens: Int[Tensor, " pos"]
    output: Float[Tensor, "batch ..."]
    tokenizer: PreTrainedTokenizerBase | None = None
    inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    as_target: bool = False
    source: Int[Tensor, " source"] | None = None
    found: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

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
    """Base of the targets made here: the fields are the parameters, `of_prompt` binds them to one prompt.

    Attributes:
        reads: the model's output that the target is a function of.
        reads_tokens: whether the functions of `of_prompt` take the tokens of the copies, [copy pos], as a
            second argument, for copies whose tokens are not the prompt's.
    """

    reads: ClassVar[Reads] = "logits"
    reads_tokens: ClassVar[bool] = False

    def of_prompt(self, context: Context) -> TargetFunction:
        """The function output [copy ...] -> [copy]; TypeError, ValueError if it does not fit the prompt."""
        raise NotImplementedError(f"{type(self).__name__} defines no of_prompt")

    def reads_position(self, context: Context) -> int | None:
        """The only position of [copy pos d_vocab] that it reads, from 0; None: several, or not known."""
        return None

    def default_row(self, context: Context) -> int | None:
        """Return the position of the row that is meant if none is named; None: the default of the model."""
        return self.reads_position(context)

    def at_row(self, place: int, context: Context) -> Target | None:
        """Return the target, read at a row's position; None if it is one number of the whole prompt."""
        moves = self.reads_position(context) is not None and isinstance(getattr(self, "position", None), int)
        return dataclasses.replace(self, position=place) if moves else None  # type: ignore[call-arg]


TargetLike = Target | TargetFunction  # of other callables: logits -> [copy]


@dataclasses.dataclass(frozen=True)
class _Token(Target):
    """One token at one position (or one class); None: the one that the clean pass predicts, the only mask."""

    token: str | int | None
    position: int | None
    of: Measure

    def of_prompt(self, context: Context) -> TargetFunction:
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

    def of_prompt(self, context: Context) -> TargetFunction:
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

    def of_prompt(self, context: Context) -> TargetFunction:
        _require_classes(context, "class_")
        index = int(context.output[0].argmax()) if self.index is None else context.token_id(self.index, "k")
        return lambda logits: _measured(logits, self.of)[:, index]


@dataclasses.dataclass(frozen=True)
class _ClassDifference(Target):
    good: int
    bad: int

    def of_prompt(self, context: Context) -> TargetFunction:
        _require_classes(context, "class_difference")
        good, bad = context.token_id(self.good, "good"), context.token_id(self.bad, "bad")

        def difference(logits: Tensor) -> Tensor:
            wide = _measured(logits, "logit")
            return wide[:, good] - wide[:, bad]

        return difference


@dataclasses.dataclass(frozen=True)
class _MaskedToken(_Token):
    """The same under the name that records have for it."""


@dataclasses.dataclass(frozen=True)
class _Loss(Target):
    label: str | int | None
    position: int

    def of_prompt(self, context: Context) -> TargetFunction:
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

    function: TargetFunction

    def of_prompt(self, context: Context) -> TargetFunction:
        return self.function


@dataclasses.dataclass(frozen=True)
class Head(_Custom):
    """A user's function of the last residual stream (see `head`)."""

    reads: ClassVar[Reads] = "last_residual"

    after_final_norm: bool = False


@dataclasses.dataclass(frozen=True)
class _HfClassifier(Target):
    """A label of a classifier of transformers, or the difference of two (see `hf_classifier`).

    Attributes:
        hf_model: the classifier.
        index: the label's number; None: the one that it predicts.
        minus: the number of the label whose logit is subtracted.
        of: as in `hf_classifier`.
        position: the token's position, for token classification and question answering.
        multi_label: whether each label has a probability of its own.
    """

    reads: ClassVar[Reads] = "last_residual"
    reads_tokens: ClassVar[bool] = True
    after_final_norm: ClassVar[bool] = True

    hf_model: PreTrainedModel = dataclasses.field(repr=False)
    index: int | None = None
    minus: int | None = None
    of: Measure = "probability"
    position: int | None = None
    multi_label: bool = False

    def of_prompt(self, context: Context) -> Callable[..., Tensor]:
        own = self._own_pass(context)
        place, index = self._place(own, context), self.index
        if index is None:
            index = int(_row(own.own, place)[0].argmax())

        def value(resid: Tensor, tokens: Tensor | None = None) -> Tensor:
            logits = own.logits(resid, tokens)
            if self.minus is not None:
                wide = _row(_measured(logits, "logit"), place)
                return wide[:, index] - wide[:, self.minus]
            return _row(self._measured(logits), place)[:, index]

        return value

    def default_row(self, context: Context) -> int | None:
        own = self._own_pass(context)
        if own.own.ndim == 3 and self.position is None and not self._answers_questions:
            return None
        place = self._place(own, context)
        return own.position if place is None else place

    def at_row(self, place: int, context: Context) -> Target | None:
        whole = self.position is None and self._answers_questions
        one_number = self._own_pass(context).own.ndim == 2 or whole
        return None if one_number else dataclasses.replace(self, position=place)

    @property
    def _answers_questions(self) -> bool:
        return classifiers.kind_of(self.hf_model) == "question answering"

    def _own_pass(self, context: Context) -> classifiers.ClassifierPass:
        """Return the classifier's pass over the prompt, made once; the mapped model has to agree with it."""
        if id(self.hf_model) not in context.found:
            own = classifiers.ClassifierPass(self.hf_model, context.tokens, context.inputs, context.source)
            own.check(context.output)
            context.found[id(self.hf_model)] = own
        return context.found[id(self.hf_model)]

    def _place(self, own: classifiers.ClassifierPass, context: Context) -> int | None:
        """Return the position whose logits are read; None if the logits are those of the whole prompt."""
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

    def _measured(self, logits: Float[Tensor, "copy *pos label"]) -> Float[Tensor, "copy *pos label"]:
        if self._answers_questions:
            # Each of start and end is a distribution over the positions.
            return _measured(logits.mT, self.of).mT
        if not self.multi_label or self.of == "logit":
            return _measured(logits, self.of)
        log_probabilities = torch.nn.functional.logsigmoid(_measured(logits, "logit"))
        return log_probabilities if self.of == "log_probability" else log_probabilities.exp()


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


def head(function: TargetFunction, after_final_norm: bool = False) -> Target:
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
    hf_model: PreTrainedModel,
    class_: int | str | None = None,
    of: Measure = "probability",
    position: int | None = None,
) -> Target:
    """A class of a classifier of transformers, whose head TransformerLens drops when it loads the model.

    Map the model with TransformerBridge as it loads (a `BertForMaskedLM`, say), and give the classifier of
    the same weights here:

        hf_model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        lm.run(bridge, text, lm.InputGradients(target=lm.targets.hf_classifier(hf_model, 3)), queries=[0])

    The classifier itself runs on every prompt. Whenever the target is evaluated, it runs again from the
    mapped model's last residual on, so that the token that it reads, its pooler and its dense layers are its
    own. (A decoder's classifier reads the last token that is not padding, even if the end-of-sequence token
    is the padding.) An error is raised unless the mapped model's residual gives the classifier's own logits.

    - One label without a problem type (rerankers, reward models), a regression, multiple choice: the value
      itself is explained, whatever `of` is.
    - `problem_type="multi_label_classification"`: a probability is the sigmoid of a label's logit.
    - Token classification: `position` is that of the token; an input map reads the row's position instead.
    - Question answering: `class_` is "start" or "end", `position` that of the token; None: the one that
      the classifier predicts. A probability is a softmax over positions.
    - Multiple choice: one choice per prompt, and its score.
    - T5 and BART classifiers read the decoder, at the position of the source's last end-of-sequence token:
      map part="decoder", "cross" or "joint", with the target that they read: the source shifted right by
      one token.

    If a method replaces tokens (`Occlusion(by="replace")`), the classifier looks for the token that it reads
    in the changed prompt. With gradients, hidden tokens and zeroed values, it reads the same position as in
    the clean pass. T5 and BART classifiers always do.

    Args:
        hf_model: in evaluation mode, on the mapped model's device, preferably in its dtype.
        class_: its number, or its name in `config.id2label`; None: the one that it predicts.
        of: "probability" (0 to 1), "log_probability" or "logit".
        position: of a token, negative from the end, for classifiers of tokens and question answering.

    Raises:
        TypeError: no such model. ValueError: training mode, no such class; when it meets a prompt, other
            weights than the mapped model's, a missing or needless position, a part of an encoder-decoder that
            the classifier does not read, or logits that depend on more than the last hidden states (write
            those with `lm.targets.head`).
    """
    classifiers.check_classifier(hf_model)
    index = classifiers.label_number(hf_model, class_, "class_")
    of = _checked_measure(of)
    of = "logit" if classifiers.gives_values(hf_model) else of
    several = classifiers.takes_several(hf_model)
    place = None if position is None else whole_number("position", position)
    return _HfClassifier(hf_model, index, None, of, place, several)


def class_difference(
    good: int | str, bad: int | str, hf_model: PreTrainedModel | None = None, position: int | None = None
) -> Target:
    """Return the target logit(good) - logit(bad) of two classes: above 0 if the classifier prefers `good`.

    Args:
        good, bad: numbers of classes; with `hf_model` also their names.
        hf_model: a classifier of transformers, as in `hf_classifier`; None: the mapped model's own output is
            [batch, class].
        position: of a token, for classifiers of tokens, as in `hf_classifier`.

    Raises:
        TypeError, ValueError: twice the same class, no such class; as `hf_classifier`.
    """
    if hf_model is None:
        if position is not None:
            raise ValueError(f"position: expected None without hf_model, got {shown(position)}")
        numbers = (whole_number("good", good, 0), whole_number("bad", bad, 0))
        difference: Target = _ClassDifference(*numbers)
    else:
        classifiers.check_classifier(hf_model)
        if classifiers.kind_of(hf_model) == "question answering":
            raise ValueError(
                "class_difference: expected classes of which one is right, got the start and the end of an "
                "answer; explain one of them with lm.targets.hf_classifier"
            )
        numbers = (_named_class(hf_model, good, "good"), _named_class(hf_model, bad, "bad"))
        place = None if position is None else whole_number("position", position)
        difference = _HfClassifier(hf_model, *numbers, "logit", place)
    if numbers[0] == numbers[1]:
        raise ValueError(f"good, bad: expected two different classes, got {shown(good)} and {shown(bad)}")
    return difference


def _named_class(hf_model: PreTrainedModel, label: Any, name: str) -> int:
    if not isinstance(label, str):
        whole_number(name, label, 0, what="a class's name or number")
    number = classifiers.label_number(hf_model, label, name)
    assert number is not None
    return number


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
    classes = (_Token, _LogitDifference, _Class, _ClassDifference, _MaskedToken, _Loss)
    known = {each.__name__.lstrip("_"): each for each in classes}
    fields = dict(record)
    name = fields.pop("target", None)
    if name not in known:
        raise ValueError(f"target: expected one of {sorted(known)} to make it again, got {name!r}")
    return known[name](**fields)


def _require_classes(context: Context, name: str) -> None:
    if context.output.ndim != 2:
        raise ValueError(
            f"{name}: expected a model whose output is [batch, class], got logits of shape "
            f"{tuple(context.output.shape)}; for a token use targets.token, for a classifier of transformers "
            "targets.hf_classifier, for any other classifier targets.head"
        )


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
