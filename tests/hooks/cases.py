"""List the attention modules for the tests of lens_mix.hooks, and compute the expected tensors by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.matrix import case_of
from tests.tiny_models import (
    BRIDGE_NAMES,
    HOOKED_TRANSFORMER_NAMES,
    available,
    bridge,
    hooked_encoder,
    hooked_encoder_decoder,
    hooked_transformer,
    inputs,
)

LAYER = 1
# The first has no attention; the forward pass of the second fails.
_NOT_RUNNABLE = ("mamba", "opt_postln")
# These leave attention to transformers: they show a pattern only with eager attention, and only after hook_z.
DELEGATED = ("gpt_neo", "gptj", "opt", "bert", "roberta", "t5", "t5_gated", "bart", "marian", "vit")
GROUPED = ("llama", "mistral", "gemma2", "qwen3", "phi3", "falcon_mqa", "gpt_bigcode", "mixtral", "gpt_oss")
_ENCODER_DECODER = ("t5", "t5_gated", "bart", "marian")
_CLASSES = {
    bridge: "bridge",
    hooked_transformer: "HookedTransformer",
    hooked_encoder: "HookedEncoder",
    hooked_encoder_decoder: "HookedEncoderDecoder",
}


@dataclass(frozen=True)
class Case:
    """Describe one attention module of one model."""

    build: Callable[..., Any]
    name: str = ""
    attention: str = "blocks.{layer}.attn"

    def __str__(self) -> str:
        module = self.attention.replace("blocks.{layer}.", "").replace(".{layer}", "")
        return "-".join(part for part in (self.build.__name__, self.name, module) if part)

    @property
    def label(self) -> str:
        """Return the label of `tests/matrix.py`, which chooses the cases of `make test`."""
        parts = {"cross_attn": "cross", "encoder": "encoder", "decoder": "decoder"}
        part = next((part for word, part in parts.items() if word in self.attention), "")
        return " ".join(word for word in (_CLASSES[self.build], self.name, part) if word)

    @property
    def prefix(self) -> str:
        return self.attention.format(layer=LAYER)

    @property
    def is_bridge(self) -> bool:
        return self.build is bridge

    @property
    def output_name(self) -> str:
        """Return the hook point of the attention output, with its bias, before any norm or residual."""
        if self.is_bridge:
            return f"{self.prefix}.o.hook_out"
        return f"{self.prefix.rsplit('.', 1)[0]}.hook_{'cross_' * ('cross' in self.prefix)}attn_out"

    def model(self) -> Any:
        return _model(self.build, self.name)[0]

    def hooks_left(self) -> int:
        """Return the number of hooks on the model beyond those that it was built with."""
        model, built_with = _model(self.build, self.name)
        return hook_count(model) - built_with


@functools.cache
def _model(build: Callable[..., Any], name: str) -> tuple[Any, int]:
    model = build(name, dtype=torch.float64) if name else build(dtype=torch.float64)
    if name in DELEGATED:
        model.original_model.set_attn_implementation("eager")
    return model, hook_count(model)


def _runs(name: str) -> bool:
    """Return whether the forward pass can run here: that of the T5 bridge fails on TransformerLens 3."""
    is_t5 = name in ("t5", "t5_gated")
    return name not in _NOT_RUNNABLE and available(bridge, name) and not (is_t5 and t5_fails())


def t5_fails() -> bool:
    """Return whether the forward pass of the T5 bridge fails here (`tests/test_matrix.py` checks it)."""
    return case_of("bridge t5 encoder").refusal is not None


def _all_cases() -> list[Case]:
    cases = []
    for name in filter(_runs, BRIDGE_NAMES):
        if name in _ENCODER_DECODER:
            modules = ("encoder_blocks.{layer}.attn", "decoder_blocks.{layer}.self_attn")
            cases += [
                Case(bridge, name, module) for module in (*modules, "decoder_blocks.{layer}.cross_attn")
            ]
        else:
            cases.append(Case(bridge, name))
    if available(hooked_transformer):
        cases += [Case(hooked_transformer, name) for name in HOOKED_TRANSFORMER_NAMES]
        cases.append(Case(hooked_encoder))
        modules = ("encoder.{layer}.attn", "decoder.{layer}.attn", "decoder.{layer}.cross_attn")
        cases += [Case(hooked_encoder_decoder, attention=module) for module in modules]
    # TransformerLens 3 has latent attention, but does not mark the layout of its values.
    if not available(bridge, "roberta"):
        cases = [case for case in cases if case.name != "deepseek_v3"]
    return cases


CASES = _all_cases()


def one_case(*names: str) -> Case:
    """Return the first case with one of these names."""
    return next(case for name in names for case in CASES if case.name == name)


@dataclass(frozen=True)
class Pass:
    """Contain the tensors that one forward pass showed of one attention module."""

    values: Tensor
    pattern: Tensor
    mixed: Tensor
    output: Tensor
    logits: Tensor


def run(case: Case, hooks: Any = (), examples: slice = slice(None)) -> Any:
    """Return the logits of one pass with hooks over chosen examples of the batch."""
    model = case.model()
    args, kwargs = inputs(model)
    args = tuple(tensor[examples] for tensor in args)
    kwargs = {name: tensor[examples] for name, tensor in kwargs.items()}
    return model.run_with_hooks(*args, **kwargs, fwd_hooks=list(hooks))


def observe(case: Case, hooks: Any = (), examples: slice = slice(None)) -> Pass:
    """Return the tensors of one pass with hooks, recorded by plain functions instead of lens_mix.hooks."""
    seen: dict[str, Tensor] = {}

    def keep(key: str) -> Callable[..., None]:
        def store(tensor: Tensor, hook: Any) -> None:
            seen[key] = tensor.detach().clone()

        return store

    prefix = case.prefix
    names = {"values": "hook_v", "pattern": "hook_pattern", "mixed": "hook_z"}
    recorders = [(f"{prefix}.{name}", keep(key)) for key, name in names.items()]
    recorders.append((case.output_name, keep("output")))
    with torch.no_grad():
        logits = run(case, [*hooks, *recorders], examples)
    if case.name == "deepseek_v3":
        seen["values"] = seen["values"].transpose(1, 2)
    heads = seen["pattern"].shape[1]
    seen["mixed"] = seen["mixed"].flatten(2).unflatten(2, (heads, -1))
    return Pass(**seen, logits=logits)


@functools.cache
def clean(case: Case) -> Pass:
    """Return the tensors of the pass without hooks."""
    return observe(case)


def mixed_by_hand(pattern: Tensor, values: Tensor, zero: Tensor | None = None) -> Tensor:
    """Return z [batch query head d_head], computed by loops.

    `zero` [batch key head] is True at the values that are zeroed for a head.
    """
    batch, heads, queries, _ = pattern.shape
    group_size = heads // values.shape[2]
    mixed = torch.zeros(batch, queries, heads, values.shape[3], dtype=values.dtype)
    for example in range(batch):
        for head in range(heads):
            own = values[example, :, head // group_size].clone()
            if zero is not None:
                own[zero[example, :, head]] = 0
            mixed[example, :, head] = pattern[example, head].to(values.dtype) @ own
    return mixed


def output_by_hand(case: Case, mixed: Tensor) -> Tensor:
    """Return the attention output for a given z: z times the output matrix, plus the bias."""
    module = case.model()
    for name in case.prefix.split("."):
        module = module[int(name)] if name.isdigit() else getattr(module, name)
    with torch.no_grad():
        if case.is_bridge:
            return module.o.original_component(mixed.flatten(2))
        output = torch.einsum("bqhd,hdm->bqm", mixed, module.W_O) + module.b_O
    if case.name != "sandwich":
        return output
    with torch.no_grad():
        return case.model().blocks[LAYER].ln1_post(output)


def hook_count(model: Any) -> int:
    """Return the number of forward hooks on all hook points of a model."""
    points = {id(point): point for point in model.hook_dict.values()}
    return sum(len(point.fwd_hooks) + len(point._forward_hooks) for point in points.values())
