"""Likely causes of a failed verification, found from the names of modules; used in error messages only."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from torch import Tensor, nn

from lens_mix._blocks.components import FEED_FORWARD, MIXING, ComponentError

_KNOWN_CHILDREN = ("ln", "attn", "self_attn", "cross_attn", "mlp", "hook", "_")
_BEFORE = "before the output matrix"
_NEXT = "methods that do not need this component still run (`lens_mix.support`)"


def with_likely_cause(
    entry: ComponentError, block: nn.Module, attention: nn.Module, pattern: Tensor
) -> ComponentError:
    """Return an entry of a verification with the likely cause of its failure added to its note."""
    if entry.ok:
        return entry
    if entry.component == MIXING.name:
        reasons = _mixing(attention, pattern)
    else:
        reasons = itertools.chain(_block(block, entry.component), _unreadable(attention))
    notes = (entry.note, next(reasons, ""))
    return dataclasses.replace(entry, note="; ".join(note for note in notes if note))


def _mixing(attention: nn.Module, pattern: Tensor) -> Iterator[str]:
    """Yield the likely operations between pattern @ values and the output matrix."""
    if hasattr(attention, "hook_cross_pattern"):
        yield (
            "this attention reads the source and the target in one softmax (T5Gemma 2), and its hooks show "
            "the target's share alone: not supported; expected part='encoder'"
        )
    inner = getattr(attention, "original_component", attention)
    names = [name for name, _ in inner.named_children()]
    clip = getattr(getattr(inner, "config", None), "clip_qkv", None)
    sums = pattern.sum(dim=-1)  # They are below 1 in a model with attention sinks (gpt-oss).
    if bool((pattern < 0).any()) or bool((sums > 1.01).any()):
        yield "hook_pattern is not the attention weights (its rows do not sum to 1), but another tensor"
    if any("kv_b_proj" in name for name in names):
        yield "latent attention, whose values TransformerLens shows in another layout: not supported"
    if clip:
        yield f"queries, keys and values are clipped at {clip:g} (clip_qkv) after their hooks: not supported"
    for name in names:
        if "gate" in name or name == "g_proj":
            yield f"the mixed values are gated ({name}) {_BEFORE}: gated attention is not supported"
        if "sub_norm" in name:
            yield f"the mixed values are normalized ({name}) {_BEFORE}: not supported"
        if "v_norm" in name:
            yield f"the values are normalized ({name}) after their hook: not supported"
    query, out = _width(inner, "q_proj", 0), _width(inner, "o_proj", 1)
    if query is not None and out is not None and query == 2 * out:
        yield f"the mixed values are gated (by half of q_proj) {_BEFORE}: gated attention is not supported"


def _width(module: nn.Module, name: str, axis: int) -> int | None:
    weight = getattr(getattr(module, name, None), "weight", None)
    return weight.shape[axis] if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _block(block: nn.Module, component: str) -> Iterator[str]:
    """Yield the reasons why a block may not compute with its weights and modules as they are read."""
    for path, module in block.named_modules():
        name = path.replace("_original_component.", "").removesuffix("._original_component")
        if hasattr(module, "lora_A"):
            yield f"a LoRA adapter is on {name}: merge it into the weights, then wrap the model; {_NEXT}"
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            yield f"the weights of {name} are offloaded and not read: load the model on one device; {_NEXT}"
        weight = getattr(module, "weight", None)
        if callable(weight) or (isinstance(weight, Tensor) and not weight.is_floating_point()):
            kind = type(getattr(module, "original_component", module)).__name__
            yield f"{name} has quantised weights ({kind}), which are not read; {_NEXT}"
    children = [name for name, _ in block.named_children() if not name.startswith(_KNOWN_CHILDREN)]
    if children:
        yield f"besides attention and feed-forward, the block has {children}; {_NEXT}"
    activation = getattr(getattr(getattr(block, "mlp", None), "original_component", None), "act_fn", None)
    if component == FEED_FORWARD.name and activation is not None:
        yield f"the activation {type(activation).__name__} is unknown; {_NEXT}"


def _unreadable(attention: nn.Module) -> Iterator[str]:
    """Yield the reasons why TransformerLens can't read the matrices of attention."""
    for name in ("W_V", "W_O"):
        try:
            getattr(attention, name, None)
        except (TypeError, ValueError, RuntimeError) as problem:
            yield f"TransformerLens can't read {name}: {type(problem).__name__}: {problem}; {_NEXT}"
