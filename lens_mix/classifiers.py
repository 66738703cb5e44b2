"""Classifiers of transformers, run from their last hidden states on.

This module does not know which position a classifier reads, or what lies between the hidden states and its
logits: the classifier itself runs, and only the forward pass of its base model is replaced.
"""

from __future__ import annotations

import difflib
import inspect
import reprlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lens_mix.arguments import shown, whole_number
from lens_mix.hooks.mixing import pass_tolerance
from lens_mix.lens.changes import Changes, forward_hook, forward_pre_hook, replaced_method
from lens_mix.lens.state import all_modules, evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Kind = Literal["sequence", "token", "question answering", "multiple choice"]

# Parts of the names of transformers' classes.
_KINDS: dict[str, Kind] = {
    "TokenClassification": "token",
    "QuestionAnswering": "question answering",
    "MultipleChoice": "multiple choice",
}
_OWN_FUNCTION = "explain it with a function of your own, lm.targets.head(function)"


def check_classifier(model: PreTrainedModel) -> None:
    """Raise an error unless this is a classifier of transformers in evaluation mode.

    Raises:
        TypeError: another class of model. ValueError: training mode.
    """
    from transformers import PreTrainedModel

    wrong = None
    if hasattr(model, "merge_and_unload"):
        wrong = (
            "an adapter around one: hf_model.merge_and_unload() gives the model (map the merged weights too)"
        )
    elif not isinstance(model, PreTrainedModel):
        wrong = ""
    elif model.get_output_embeddings() is not None:
        wrong = "a language model: lm.targets.token explains a token"
    elif model.base_model is model:
        wrong = f"which has no base model inside: {_OWN_FUNCTION}"
    if wrong is not None:
        got = ", ".join(filter(None, (type(model).__name__, wrong)))
        raise TypeError(
            "hf_model: expected a classifier of transformers (AutoModelForSequenceClassification), got " + got
        )
    _require_evaluation_mode(model)


def kind_of(model: PreTrainedModel) -> Kind:
    """Return what kind of classifier this is, by the name of its class."""
    names = [base.__name__ for base in type(model).__mro__]
    return next((kind for part, kind in _KINDS.items() if any(part in name for name in names)), "sequence")


def gives_values(model: PreTrainedModel) -> bool:
    """Return whether its outputs are plain values: of a regression, of a single label, or of a choice."""
    kind, config = kind_of(model), model.config
    if kind == "multiple choice":
        return True
    if kind == "sequence" and getattr(config, "problem_type", None) == "regression":
        return True
    return kind != "question answering" and config.num_labels == 1 and not takes_several(model)


def takes_several(model: PreTrainedModel) -> bool:
    """Return whether several labels may be true at once, each with a probability of its own."""
    problem = getattr(model.config, "problem_type", None)
    return kind_of(model) == "sequence" and problem == "multi_label_classification"


def label_number(model: PreTrainedModel, label: Any, name: str) -> int | None:
    """Return the number of a label that is given by number or name; None stays None where it is allowed.

    Args:
        model: the classifier.
        label: a number, a name of `config.id2label` or `config.label2id`, or None. For question answering
            "start" (0) or "end" (1).
        name: the argument's name, for errors.

    Raises:
        TypeError, ValueError: no such label.
    """
    names, count = _labels(model)
    if label is None and kind_of(model) != "question answering":
        return None
    if label is None or (isinstance(label, str) and label not in names):
        near = difflib.get_close_matches(label, names, 1, 0.5) if label else []
        meant = f"; did you mean {near[0]!r}?" if near else ""
        short = reprlib.Repr()
        short.maxlist = 20
        raise ValueError(f"{name}: expected one of {short.repr(list(names))}, got {shown(label)}{meant}")
    return names[label] if isinstance(label, str) else whole_number(name, label, 0, count - 1)


def _labels(model: PreTrainedModel) -> tuple[dict[str, int], int]:
    """Return the labels' numbers by name, and how many labels there are."""
    kind, config = kind_of(model), model.config
    if kind == "question answering":
        return {"start": 0, "end": 1}, 2
    if kind == "multiple choice":
        return {}, 1
    # A configuration may set only one of the two tables and leave the other at its default.
    by_number = {str(label): int(number) for number, label in (config.id2label or {}).items()}
    by_name = {str(label): int(number) for label, number in (config.label2id or {}).items()}
    names = {**by_number, **{label: number for label, number in by_name.items() if label not in by_number}}
    return {label: number for label, number in names.items() if number < config.num_labels}, config.num_labels


class ClassifierPass:
    """A classifier's own pass over one prompt, and passes from other last hidden states on.

    Args:
        model: the classifier.
        tokens: what the mapped stack reads.
        inputs: further inputs of the model by name, [pos] each.
        source: what the encoder reads, if the decoder of an encoder-decoder is mapped.

    Attributes:
        own: the classifier's own logits, [1 label] or [1 pos label]. For question answering the labels are
            start and end.
        position: the only position whose hidden states the logits depend on. None: there are several, or
            each position has logits.

    Raises:
        ValueError: training mode; another device; a part of an encoder-decoder that it does not read; an
            error in its own pass; logits that depend on more than the base model's last hidden states.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: Int[Tensor, " pos"],
        inputs: Mapping[str, Tensor],
        source: Int[Tensor, " source"] | None = None,
    ) -> None:
        _require_evaluation_mode(model)
        self._model, self._base, self._modules = model, model.base_model, all_modules(model)
        taken = inspect.signature(model.forward).parameters
        self._reads_decoder = "decoder_input_ids" in taken
        self._require_same_part(source)
        own_device = next(model.parameters()).device
        if own_device != tokens.device:
            raise ValueError(
                f"hf_model: expected the mapped model's device, {tokens.device}, got {own_device}; "
                f"hf_model.to({str(tokens.device)!r})"
            )
        read = tokens if source is None else source
        named = {"input_ids": read, "attention_mask": torch.ones_like(read), **inputs}
        # Token types that are all zero mean a single text, which needs none.
        if "token_type_ids" not in taken and "token_type_ids" in named and not named["token_type_ids"].any():
            del named["token_type_ids"]
        self._inputs = {name: self._shaped(value[None]) for name, value in named.items()}
        self._tokens = tokens
        with torch.no_grad():
            self.own = self._own_pass(source)
            self._require_hidden_states_alone()
        self.position = None if self.own.ndim == 3 else self._only_position()

    def logits(
        self, hidden: Float[Tensor, "copy pos d_model"], tokens: Int[Tensor, "copy pos"] | None = None
    ) -> Float[Tensor, "copy *pos label"]:
        """Return the classifier's logits from other last hidden states.

        Args:
            hidden: what takes the place of the base model's last hidden states.
            tokens: the tokens of each copy, in which it may look for the position to read; None: the
                prompt's. The decoder of an encoder-decoder is always read at the prompt's own position.
        """
        inputs = {name: value.expand(len(hidden), *value.shape[1:]) for name, value in self._inputs.items()}
        if tokens is not None and not self._reads_decoder:
            inputs["input_ids"] = self._shaped(tokens)
        dtype = next(p.dtype for p in self._model.parameters() if p.dtype.is_floating_point)
        # Without a padding token, classifiers of transformers raise an error for several prompts.
        pad = getattr(self._model.config.get_text_config(), "pad_token_id", None)
        step = max(1, len(hidden)) if pad is not None else 1
        made = []
        with evaluation_mode(self._model, self._modules, gradients=torch.is_grad_enabled()):
            for start in range(0, len(hidden), step):
                chunk = slice(start, start + step)
                output = self._base_output(hidden[chunk].to(dtype))
                with Changes([replaced_method(self._base, "forward", _returning(output))]):
                    made.append(self._called({name: value[chunk] for name, value in inputs.items()}))
        return torch.cat(made)

    @torch.no_grad()
    def check(self, hidden: Float[Tensor, "1 pos d_model"]) -> None:
        """Raise a ValueError unless the mapped model's last residual gives the classifier's own logits."""
        own, dtypes = self._hidden, {self._hidden.dtype, hidden.dtype}
        if hidden.shape != own.shape:
            raise ValueError(
                "hf_model: expected the weights of the mapped model, got one whose last hidden states have "
                f"the shape {list(own.shape)}, where the mapped model's have {list(hidden.shape)}; load both "
                "from the same folder"
            )
        accepted = max(map(pass_tolerance, dtypes))
        error = float((hidden.double() - own.double()).abs().max() / own.double().abs().max())
        made = self.logits(hidden)
        if error <= accepted and _close(made, self.own, accepted):
            return
        several = f", and both in one dtype (here {dtypes})" if len(dtypes) > 1 else ""
        raise ValueError(
            "hf_model: expected the weights of the mapped model, got one whose last hidden states differ on "
            f"this prompt, by a relative {error:.1e}: {_both(made, self.own)}; load both from the same "
            f"folder, without folding or centring weights{several}"
        )

    def _shaped(self, values: Tensor) -> Tensor:
        """Return [copy pos] in the shape that the classifier takes: [copy choice pos] for multiple choice."""
        return values[:, None] if kind_of(self._model) == "multiple choice" else values

    def _require_same_part(self, source: Tensor | None) -> None:
        name = type(self._model).__name__
        if self._reads_decoder and source is None:
            raise ValueError(
                f"hf_model: {name} reads the decoder; expected a map of part='decoder' (or 'cross', 'joint') "
                "of an encoder-decoder, got one of another stack"
            )
        if not self._reads_decoder and source is not None:
            raise ValueError(f"hf_model: {name} has no decoder; expected a map of part='encoder'")
        eos = getattr(self._model.config, "eos_token_id", None)
        if source is not None and kind_of(self._model) == "sequence" and eos not in source.tolist():
            raise ValueError(
                f"hf_model: {name} reads the decoder where the source has its last end-of-sequence token, "
                f"{eos}; expected a source with that token, got {source.tolist()}"
            )

    def _own_pass(self, source: Tensor | None) -> Tensor:
        """Return the classifier's logits, and keep its last hidden states."""
        changes = [forward_hook(self._base, self._keep)]
        decoder_reads: list[Tensor] = []
        if self._reads_decoder:
            note = _note_tokens(decoder_reads)
            changes.append(forward_pre_hook(self._base.get_decoder(), note, with_kwargs=True))
        try:
            with evaluation_mode(self._model, self._modules), Changes(changes):
                logits = self._called(self._inputs)
        except Exception as problem:
            raise ValueError(
                f"hf_model: expected {type(self._model).__name__} to run on the prompt's inputs "
                f"{sorted(self._inputs)}, got {type(problem).__name__}: {problem}"
            ) from problem
        if decoder_reads and not torch.equal(decoder_reads[0][0], self._tokens):
            raise ValueError(
                "hf_model: expected the target that the classifier's decoder reads by itself, its source "
                f"moved right by one token: {decoder_reads[0][0].tolist()}, got {self._tokens.tolist()}; "
                "give the former as the target, lm.run(model, (source, target), ...)"
            )
        positions = self._hidden.shape[1]
        if logits.ndim not in (2, 3) or (logits.ndim == 3 and logits.shape[1] != positions):
            raise ValueError(
                f"hf_model: expected logits of the prompt [1, label] or of its {positions} positions, got "
                f"shape {list(logits.shape)}; {_OWN_FUNCTION}"
            )
        return logits

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self._hidden: Tensor = output[0]
        self._output_class = type(output)
        self._fields = () if isinstance(output, tuple) else tuple(output)

    def _base_output(self, hidden: Tensor) -> Any:
        """Return the base model's output with other last hidden states, and with these pooled anew."""
        pooler = getattr(self._base, "pooler", None)
        if not self._fields:
            return (hidden,) if pooler is None else (hidden, pooler(hidden))
        fields = {self._fields[0]: hidden}
        if pooler is not None and "pooler_output" in self._fields:
            fields["pooler_output"] = pooler(hidden)
        return self._output_class(**fields)

    def _called(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of one call."""
        output = self._model(**inputs, return_dict=True)
        logits = getattr(output, "logits", None)
        if logits is None and getattr(output, "start_logits", None) is not None:
            logits = torch.stack([output.start_logits, output.end_logits], -1)
        if logits is None:
            raise ValueError(f"no logits in the output, {list(output)}; {_OWN_FUNCTION}")
        return logits

    def _require_hidden_states_alone(self) -> None:
        try:
            made = self.logits(self._hidden)
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as problem:
            found = f"from these alone it raises {type(problem).__name__}: {problem}"
        else:
            if _close(made, self.own, pass_tolerance(made.dtype)):
                return
            found = _both(made, self.own)
        raise ValueError(
            "hf_model: expected logits that are made from the last hidden states of its base model alone, "
            f"{type(self._base).__name__}; {found}; {_OWN_FUNCTION}"
        )

    def _only_position(self) -> int | None:
        with torch.enable_grad():
            hidden = self._hidden.detach().requires_grad_(True)
            logits = self.logits(hidden)[0]
            # Weights that differ, so that labels whose gradients sum to 0 do not hide a position.
            weights = torch.arange(1, len(logits) + 1, device=logits.device).to(logits.dtype)
            (gradient,) = torch.autograd.grad((logits * weights).sum(), hidden)
        places = gradient[0].abs().amax(-1).nonzero()[:, 0].tolist()
        return places[0] if len(places) == 1 else None


def _returning(output: Any) -> Callable[..., Any]:
    """Return a `forward` that returns this output, whatever its arguments are."""
    return lambda *args, **kwargs: output


def _require_evaluation_mode(model: nn.Module) -> None:
    if model.training:
        raise ValueError("hf_model: expected evaluation mode, got training mode; call hf_model.eval() first")


def _note_tokens(read: list[Tensor]) -> Any:
    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        read.append(kwargs["input_ids"] if "input_ids" in kwargs else args[0])

    return note


def _close(made: Tensor, own: Tensor, accepted: float) -> bool:
    """Return whether logits agree: relative to the largest one, or absolutely if that is below 1."""
    if made.shape != own.shape:
        return False
    largest = max(1.0, float(own.double().abs().max()))
    return bool((made.double() - own.double()).abs().max() <= accepted * largest)


def _both(made: Tensor, own: Tensor) -> str:
    """Describe where two tensors of logits differ most."""
    if made.shape != own.shape:
        return f"logits of shape {list(made.shape)} where the classifier gives {list(own.shape)}"
    worst = int((made.double() - own.double()).abs().argmax())
    ours, its_own = (float(logits.flatten()[worst]) for logits in (made, own))
    return f"a logit would be {ours:.6g} where the classifier gives {its_own:.6g}"
