"""The outputs of the attention and of the feed-forward within blocks, recorded while a pass runs."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from lens_mix._care.changes import Change, forward_hook
from lens_mix._classes.model_classes import ModelClass
from lens_mix._model.model import Lens
from lens_mix._passes.cross import names_before_cross
from lens_mix._passes.replay import first_tensor
from lens_mix.hooks.base import HookPair
from lens_mix.hooks.recording import record_all

_ROLES = ("attention_out", "cross_out", "feed_forward_out", "before")


class BlockOutputs:
    """The outputs of modules within some blocks, as one pass records them.

    Args:
        lens: The lens of the model.
        layers: The blocks.
        roles: The outputs, as far as a block has them: "attention_out", "feed_forward_out" and "cross_out";
            "before" is the self-attention's output if the cross-attention is mapped.
        by_name: Whether the hooked classes record by the names of hook points too, as a Bridge does. A norm
            may come between a module and its hook point, so not every output has one.

    Attributes:
        fwd_hooks: The TransformerLens hooks that record them in a Bridge, or by name.
        changes: The forward hooks of torch that record them in the hooked classes; none for a Bridge.
    """

    def __init__(
        self,
        lens: Lens,
        layers: Collection[int],
        roles: Collection[str] = _ROLES,
        *,
        by_name: bool = False,
    ) -> None:
        is_bridge = lens.model_class is ModelClass.BRIDGE
        find = _points if is_bridge else _named_points
        self._points = {layer: find(lens, layer, roles) if is_bridge or by_name else {} for layer in layers}
        self._fired: dict[str, Tensor] = {}
        self._called: dict[int, dict[str, Tensor]] = {}
        names = [name for points in self._points.values() for options in points.values() for name in options]
        self.fwd_hooks: list[HookPair] = record_all(self._fired, names)
        modules = {} if is_bridge or by_name else _modules(lens, layers, roles)
        self.changes: list[Change] = [
            forward_hook(module, functools.partial(self._keep, *key)) for key, module in modules.items()
        ]

    def _keep(self, layer: int, role: str, module: nn.Module, args: Any, output: Any) -> None:
        self._called.setdefault(layer, {})[role] = first_tensor(output).detach()

    def names(self, layer: int, role: str) -> Sequence[str]:
        """Return the hook points of an output, the best first; none if it is not recorded by name."""
        return self._points.get(layer, {}).get(role, ())

    def take(self, layer: int) -> dict[str, Tensor]:
        """Return role -> output of one block, and keep them no longer; nothing for other blocks."""
        outputs = self._called.pop(layer, {})
        for role, names in self._points.get(layer, {}).items():
            fired = [self._fired.pop(name) for name in names if name in self._fired]
            outputs |= {role: fired[0]} if fired else {}
        return outputs


def _points(lens: Lens, layer: int, roles: Collection[str]) -> dict[str, Sequence[str]]:
    """Return role -> hook points of a Bridge, the best first."""
    known = lens.hook_points
    block = lens.where(layer)
    attention = lens.stack.attention_template.format(layer=layer)
    points = {
        # The matrix's output is the first choice, because BLOOM's `attn.hook_out` includes the residual
        # stream. With use_attn_result the matrix is never called, so the attention's output is the second.
        "attention_out": (f"{attention}.o.hook_out", f"{attention}.hook_out"),
        "cross_out": (f"{block}.cross_attn.o.hook_out",),
        # The last matrix's output comes before any norm, scale or residual that some blocks have in `mlp`.
        "feed_forward_out": (f"{block}.mlp.out.hook_out", f"{block}.mlp.hook_out"),
    }
    if lens.stack.is_cross:
        # If cross-attention is mapped, a block begins after its self-attention, whose output is therefore
        # recorded.
        points |= {"before": tuple(names_before_cross(lens, [layer])), "cross_out": ()}
    return {role: [name for name in points[role] if name in known] for role in roles if role in points}


def _named_points(lens: Lens, layer: int, roles: Collection[str]) -> dict[str, Sequence[str]]:
    """Return role -> hook points of a hooked class."""
    points = {"cross_out": [f"{lens.where(layer)}.hook_cross_attn_out"]} if not lens.stack.is_cross else {}
    # Behind a norm on the branch, `hook_mlp_out` is not the feed-forward's own output.
    if not hasattr(lens.stack.blocks[layer], "ln2_post"):
        points["feed_forward_out"] = [f"{lens.where(layer)}.hook_mlp_out"]
    found = {role: [name for name in names if name in lens.hook_points] for role, names in points.items()}
    return {role: names for role, names in found.items() if role in roles}


def _modules(lens: Lens, layers: Collection[int], roles: Collection[str]) -> dict[tuple[int, str], nn.Module]:
    attention, cross = ("before", "attention_out") if lens.stack.is_cross else ("attention_out", "cross_out")
    by_name = {"attn": attention, "cross_attn": cross, "mlp": "feed_forward_out"}
    return {
        (layer, role): getattr(lens.stack.blocks[layer], name)
        for layer in layers
        for name, role in by_name.items()
        if role in roles and hasattr(lens.stack.blocks[layer], name)
    }
