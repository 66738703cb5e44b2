"""Run a classifier of transformers from given last hidden states.

The classifier itself runs, and only the forward pass of its base model is replaced. So this module needs no
rules about the position that a classifier reads, or about its layers between hidden states and logits.
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

from lens_mix._care.changes import Changes, forward_hook, forward_pre_hook, replace_method
from lens_mix._care.state import all_modules, evaluation_mode
from lens_mix._classes.model_classes import find_original
from lens_mix.arguments import check_whole_number, describe_value
from lens_mix.hooks.mixing import pass_tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Kind = Literal["sequence", "token", "question answering", "multiple choice"]

# The kind of a classifier whose class name contains one of these words; for all others it is "sequence".
_KINDS: dict[str, Kind] = {
    "TokenClassification": "token",
    "QuestionAnswering": "question answering",
    "MultipleChoice": "multiple choice",
}
_OWN_FUNCTION = "explain it with a function of your own, lm.targets.head(function)"


def find_classifier(model: Any) -> PreTrainedModel:
    """Return a classifier of transformers in evaluation mode, or the one that `lm.wrap` made a model from.

    Raises:
        TypeError: If it is not a classifier of transformers.
        ValueError: If it is in training mode.
    """
    from transformers import PreTrainedModel

    original = find_original(model)
    model, reason = model if original is None else original, None
    if hasattr(model, "merge_and_unload"):
        reason = (
            "an adapter around one; use the model of hf_model.merge_and_unload(), and map its merged weights"
        )
    elif not isinstance(model, PreTrainedModel):
        reason = ""
    elif model.get_output_embeddings() is not None:
        reason = "a language model; explain a token with lm.targets.token"
    elif model.base_model is model:
        reason = f"which has no base model; {_OWN_FUNCTION}"
    if reason is not None:
        got = ", ".join(filter(None, (type(model).__name__, reason)))
        raise TypeError(
            "hf_model: expected a classifier of transformers (AutoModelForSequenceClassification), got " + got
        )
    _check_evaluation_mode(model)
    classifier: PreTrainedModel = model
    return classifier


def find_kind(model: PreTrainedModel) -> Kind:
    """Return the kind of classifier, from the name of its class."""
    names = [base.__name__ for base in type(model).__mro__]
    return next((kind for word, kind in _KINDS.items() if any(word in name for name in names)), "sequence")


def gives_values(model: PreTrainedModel) -> bool:
    """Return whether the outputs are plain values, as of a regression, a single label or a choice."""
    kind, config = find_kind(model), model.config
    if kind == "multiple choice":
        return True
    if kind == "sequence" and getattr(config, "problem_type", None) == "regression":
        return True
    return kind != "question answering" and config.num_labels == 1 and not takes_several(model)


def takes_several(model: PreTrainedModel) -> bool:
    """Return whether several labels may be true at once, each with its own probability."""
    problem = getattr(model.config, "problem_type", None)
    return find_kind(model) == "sequence" and problem == "multi_label_classification"


def find_label(model: PreTrainedModel, label: Any, name: str) -> int | None:
    """Return the number of a label that is given by its number or its name.

    Args:
        model: The classifier.
        label: A number, or a name of `config.id2label` or `config.label2id`. For question answering "start"
            (0) or "end" (1). None, except for question answering: the label that the classifier predicts.
        name: The name of the argument, for errors.

    Returns:
        The number, or None if `label` is None.

    Raises:
        TypeError: If the label is neither a number nor a name.
        ValueError: If the label does not exist, or if several classes have this name.
    """
    names, count = _list_labels(model)
    if isinstance(label, str) and len(names.get(label, ())) > 1:
        numbers = " and ".join(map(str, names[label]))
        raise ValueError(
            f"{name}: expected the name of one class, got {label!r}, the name of the classes {numbers}; "
            "give the number"
        )
    if label is None and find_kind(model) != "question answering":
        return None
    if label is None or (isinstance(label, str) and label not in names):
        close = difflib.get_close_matches(label, names, 1, 0.5) if label else []
        suggestion = f"; did you mean {close[0]!r}?" if close else ""
        shortener = reprlib.Repr()
        shortener.maxlist = 20
        expected = shortener.repr(list(names))
        raise ValueError(f"{name}: expected one of {expected}, got {describe_value(label)}{suggestion}")
    return names[label][0] if isinstance(label, str) else check_whole_number(name, label, 0, count - 1)


def name_label(model: PreTrainedModel, number: int) -> str:
    """Return the name of a label, with its number if others have the same name; the number if it has none."""
    names, _ = _list_labels(model)
    # The first name is that of `config.id2label`.
    name = next((label for label, numbers in names.items() if number in numbers), str(number))
    return name if len(names.get(name, ())) < 2 else f"{name} (class {number})"


def describe_label(model: PreTrainedModel, number: int) -> str:
    """Return the name of a label in quotation marks with its number, which alone says which class it is."""
    name = name_label(model, number).removesuffix(f" (class {number})")
    return f"class {number}" if name == str(number) else f"{name!r} (class {number})"


def _list_labels(model: PreTrainedModel) -> tuple[dict[str, list[int]], int]:
    """Return the numbers of the labels by their names, and the number of labels."""
    kind, config = find_kind(model), model.config
    if kind == "question answering":
        return {"start": [0], "end": [1]}, 2
    if kind == "multiple choice":
        return {}, 1
    # A configuration may set only one of the two tables and leave the other at its default, and the tables
    # may contradict each other.
    pairs = [(str(label), int(number)) for number, label in (config.id2label or {}).items()]
    pairs += [(str(label), int(number)) for label, number in (config.label2id or {}).items()]
    names: dict[str, list[int]] = {}
    for label, number in pairs:
        if number < config.num_labels and number not in names.setdefault(label, []):
            names[label].append(number)
    return {label: numbers for label, numbers in names.items() if numbers}, config.num_labels


class ClassifierPass:
    """A classifier's own pass over one prompt, and passes from other last hidden states.

    Args:
        model: The classifier.
        tokens: The tokens that the mapped part reads.
        inputs: Further inputs of the model by name, each `[pos]`.
        source: The tokens that the encoder reads, if the decoder of an encoder-decoder is mapped.

    Attributes:
        own: The classifier's own logits, `[1 label]` or `[1 pos label]`. For question answering, the labels
            are start and end.
        position: The only position whose hidden state changes the logits. None: there are several such
            positions, or each position has logits.

    Raises:
        ValueError: If the classifier is in training mode or on another device, does not read this part of an
            encoder-decoder, raises an error on the prompt, or has logits that depend on more than the last
            hidden states of its base model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: Int[Tensor, " pos"],
        inputs: Mapping[str, Tensor],
        source: Int[Tensor, " source"] | None = None,
    ) -> None:
        _check_evaluation_mode(model)
        self._model, self._base, self._modules = model, model.base_model, all_modules(model)
        parameters = inspect.signature(model.forward).parameters
        self._reads_decoder = "decoder_input_ids" in parameters
        self._check_part(source)
        own_device = next(model.parameters()).device
        if own_device != tokens.device:
            raise ValueError(
                f"hf_model: expected the mapped model's device, {tokens.device}, got {own_device}; "
                f"hf_model.to({str(tokens.device)!r})"
            )
        read = tokens if source is None else source
        named = {"input_ids": read, "attention_mask": torch.ones_like(read), **inputs}
        # Token types that are all zero have no meaning, and some classifiers do not accept any.
        types = named.get("token_type_ids")
        if "token_type_ids" not in parameters and types is not None and not types.any():
            del named["token_type_ids"]
        self._inputs = {name: self._add_choice_axis(value[None]) for name, value in named.items()}
        self._tokens = tokens
        with torch.no_grad():
            self.own = self._run_own_pass(source)
            self._require_hidden_states_only()
        self.position = None if self.own.ndim == 3 else self._find_position()

    def logits(
        self, hidden: Float[Tensor, "copy pos d_model"], tokens: Int[Tensor, "copy pos"] | None = None
    ) -> Float[Tensor, "copy *pos label"]:
        """Return the classifier's logits for other last hidden states.

        Args:
            hidden: The hidden states that replace those of the base model.
            tokens: The tokens of each copy, among which the classifier may search for the position to read.
                None: the tokens of the prompt. The decoder of an encoder-decoder is always read at the
                position of the prompt.
        """
        inputs = {name: value.expand(len(hidden), *value.shape[1:]) for name, value in self._inputs.items()}
        if tokens is not None and not self._reads_decoder:
            inputs["input_ids"] = self._add_choice_axis(tokens)
        dtypes = (parameter.dtype for parameter in self._model.parameters())
        dtype = next(dtype for dtype in dtypes if dtype.is_floating_point)
        # Without a padding token, classifiers of transformers raise an error for several prompts.
        pad = getattr(self._model.config.get_text_config(), "pad_token_id", None)
        chunk_size = max(1, len(hidden)) if pad is not None else 1
        logits = []
        with evaluation_mode(self._model, self._modules, gradients=torch.is_grad_enabled()):
            for start in range(0, len(hidden), chunk_size):
                chunk = slice(start, start + chunk_size)
                output = self._make_base_output(hidden[chunk].to(dtype))
                with Changes([replace_method(self._base, "forward", _make_forward(output))]):
                    logits.append(self._call({name: value[chunk] for name, value in inputs.items()}))
        return torch.cat(logits)

    @torch.no_grad()
    def check(self, hidden: Float[Tensor, "1 pos d_model"]) -> None:
        """Raise a ValueError unless the mapped model's last residual gives the classifier's own logits."""
        own, dtypes = self._hidden, {self._hidden.dtype, hidden.dtype}
        if hidden.shape != own.shape:
            raise ValueError(
                "hf_model: expected a classifier with the weights of the mapped model, whose last hidden "
                f"states have the shape {list(hidden.shape)}, got one with the shape {list(own.shape)}; load "
                "both from the same folder"
            )
        tolerance = max(map(pass_tolerance, dtypes))
        error = float((hidden.double() - own.double()).abs().max() / own.double().abs().max())
        logits = self.logits(hidden)
        if error <= tolerance and _are_close(logits, self.own, tolerance):
            return
        same_dtype = f", and both in one dtype (here {dtypes})" if len(dtypes) > 1 else ""
        raise ValueError(
            "hf_model: expected a classifier with the weights of the mapped model, got one whose last hidden "
            f"states differ on this prompt, by a relative {error:.1e} "
            f"({_describe_difference(logits, self.own)}); load both from the same folder, without folding or "
            f"centring weights{same_dtype}"
        )

    def _add_choice_axis(self, values: Tensor) -> Tensor:
        """Return values [copy pos] as [copy choice pos] for multiple choice, else unchanged."""
        return values[:, None] if find_kind(self._model) == "multiple choice" else values

    def _check_part(self, source: Tensor | None) -> None:
        """Raise a ValueError unless the classifier reads the mapped part."""
        name = type(self._model).__name__
        if self._reads_decoder and source is None:
            raise ValueError(
                "hf_model: expected a map of part='decoder', 'cross' or 'joint' of an encoder-decoder, "
                f"because {name} reads the decoder, got a map of another part"
            )
        if not self._reads_decoder and source is not None:
            raise ValueError(
                f"hf_model: expected a map of part='encoder', because {name} has no decoder, got a map of "
                "another part"
            )
        eos = getattr(self._model.config, "eos_token_id", None)
        if source is not None and find_kind(self._model) == "sequence" and eos not in source.tolist():
            raise ValueError(
                f"hf_model: expected a source with the end-of-sequence token {eos}, because {name} reads the "
                f"decoder at the position of the source's last one, got {source.tolist()}"
            )

    def _run_own_pass(self, source: Tensor | None) -> Tensor:
        """Return the classifier's logits, and store its last hidden states."""
        changes = [forward_hook(self._base, self._store_output)]
        decoder_reads: list[Tensor] = []
        if self._reads_decoder:
            hook = _make_token_hook(decoder_reads)
            changes.append(forward_pre_hook(self._base.get_decoder(), hook, with_kwargs=True))
        try:
            with evaluation_mode(self._model, self._modules), Changes(changes):
                logits = self._call(self._inputs)
        except Exception as problem:
            raise ValueError(
                f"hf_model: expected {type(self._model).__name__} to run on the prompt's inputs "
                f"{sorted(self._inputs)}, got {type(problem).__name__}: {problem}"
            ) from problem
        if decoder_reads and not torch.equal(decoder_reads[0][0], self._tokens):
            raise ValueError(
                "hf_model: expected the target that the classifier's own decoder reads, the source shifted "
                f"right by one token, {decoder_reads[0][0].tolist()}, got {self._tokens.tolist()}; give the "
                "former as the target in lm.run(model, (source, target), ...)"
            )
        positions = self._hidden.shape[1]
        if logits.ndim not in (2, 3) or (logits.ndim == 3 and logits.shape[1] != positions):
            raise ValueError(
                f"hf_model: expected logits of the prompt [1, label] or of its {positions} positions, got "
                f"shape {list(logits.shape)}; {_OWN_FUNCTION}"
            )
        return logits

    def _store_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """Store the last hidden states and the form of the base model's output, as a forward hook."""
        self._hidden: Tensor = output[0]
        self._output_class = type(output)
        self._fields = () if isinstance(output, tuple) else tuple(output)

    def _make_base_output(self, hidden: Tensor) -> Any:
        """Return the base model's output for other last hidden states, including that of its pooler."""
        has_pooler = getattr(self._base, "pooler", None) is not None
        if not self._fields:
            return (hidden, self._pool(hidden)) if has_pooler else (hidden,)
        fields = {self._fields[0]: hidden}
        if has_pooler and "pooler_output" in self._fields:
            fields["pooler_output"] = self._pool(hidden)
        return self._output_class(**fields)

    def _pool(self, hidden: Tensor) -> Tensor:
        pooler, activation = self._base.pooler, getattr(self._base, "pooler_activation", None)
        # ALBERT's pooler is a linear layer alone. Those of other models read the first position themselves.
        pooled: Tensor = pooler(hidden) if activation is None else activation(pooler(hidden[:, 0]))
        return pooled

    def _call(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of one call of the classifier."""
        output = self._model(**inputs, return_dict=True)
        logits: Tensor | None = getattr(output, "logits", None)
        if logits is None and getattr(output, "start_logits", None) is not None:
            logits = torch.stack([output.start_logits, output.end_logits], -1)
        if logits is None:
            raise ValueError(f"hf_model: expected an output with logits, got {list(output)}; {_OWN_FUNCTION}")
        return logits

    def _require_hidden_states_only(self) -> None:
        """Raise a ValueError if the logits depend on more than the last hidden states."""
        try:
            logits = self.logits(self._hidden)
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as problem:
            got = f"{type(problem).__name__} if the classifier gets only these: {problem}"
        else:
            if _are_close(logits, self.own, pass_tolerance(logits.dtype)):
                return
            got = f"others: {_describe_difference(logits, self.own)}"
        raise ValueError(
            "hf_model: expected logits that depend only on the last hidden states of the base model, "
            f"{type(self._base).__name__}, got {got}; {_OWN_FUNCTION}"
        )

    def _find_position(self) -> int | None:
        """Return the only position whose hidden state changes the logits, or None if there are several."""
        with torch.enable_grad():
            hidden = self._hidden.detach().requires_grad_(True)
            logits = self.logits(hidden)[0]
            # Different weights ensure that the gradients of two labels do not cancel at a position.
            weights = torch.arange(1, len(logits) + 1, device=logits.device).to(logits.dtype)
            (gradient,) = torch.autograd.grad((logits * weights).sum(), hidden)
        positions = gradient[0].abs().amax(-1).nonzero()[:, 0].tolist()
        return positions[0] if len(positions) == 1 else None


def _make_forward(output: Any) -> Callable[..., Any]:
    """Return a `forward` that returns this output for any arguments."""
    return lambda *args, **kwargs: output


def _check_evaluation_mode(model: nn.Module) -> None:
    if model.training:
        raise ValueError("hf_model: expected evaluation mode, got training mode; call hf_model.eval() first")


def _make_token_hook(store: list[Tensor]) -> Any:
    """Return a forward pre-hook that appends the tokens of the call to `store`."""

    def store_tokens(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        store.append(kwargs["input_ids"] if "input_ids" in kwargs else args[0])

    return store_tokens


def _are_close(logits: Tensor, own: Tensor, tolerance: float) -> bool:
    """Return whether logits agree, relative to the largest of the own logits, or to 1 if that is larger."""
    if logits.shape != own.shape:
        return False
    largest = max(1.0, float(own.double().abs().max()))
    return bool((logits.double() - own.double()).abs().max() <= tolerance * largest)


def _describe_difference(logits: Tensor, own: Tensor) -> str:
    """Return a description of the largest difference between two tensors of logits."""
    if logits.shape != own.shape:
        return f"logits of shape {list(logits.shape)}, while the classifier gives {list(own.shape)}"
    worst = int((logits.double() - own.double()).abs().argmax())
    found, expected = (float(each.flatten()[worst]) for each in (logits, own))
    return f"a logit of {found:.6g}, while the classifier gives {expected:.6g}"
