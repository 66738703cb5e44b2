"""Passes whose values are the model's own, and whose gradients follow other rules.

Gradients are changed at hook points (`lens_mix.hooks.gradient`), or a value y is replaced by y − y' + y',
with only y' in the autograd graph. The replacement y' is first compared with y. Without gradients, the rules
have no effect. Each rule counts its calls in the backward pass, and a rule without a call is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lens_mix._care.changes import Change, Changes, forward_hook, forward_pre_hook
from lens_mix._care.precision import relative_error
from lens_mix._classes.model_classes import ModelClass, UnsupportedModelError
from lens_mix._model.anatomy import (
    ACTIVATIONS,
    BlockAnatomy,
    FeedForward,
    Norm,
    find_gated,
    read_norm,
    read_value_path,
)
from lens_mix._model.model import Lens
from lens_mix._model.stacks import Stack
from lens_mix._model.unembedding import read_b_U
from lens_mix._passes.backward_rules import Activations, AttentionRule, BackwardRules, PlainRules
from lens_mix._passes.replay import BlockCall, enter_with, first_tensor, with_first
from lens_mix.hooks.base import HookFunction, HookName, HookPair
from lens_mix.hooks.gradient import (
    Constant,
    GradientCounter,
    beside,
    hold_activation_ratio,
    is_differentiated,
    replace_gradient,
    scale_gradient,
    scale_pattern_gradient,
)
from lens_mix.hooks.mixing import tolerance

if TYPE_CHECKING:
    from lens_mix._passes.fused_attention import FusedAttention


@dataclasses.dataclass(frozen=True)
class Rules:
    """Rules that change attention by `lens_mix.hooks.scale_pattern_gradient`, with `scores` as its factor."""

    temperature: float = 1.0
    scores: float = 1.0
    activations: Activations = "gradient"

    @property
    def attention_rule(self) -> AttentionRule:
        """The rule of attention."""
        return AttentionRule(self.temperature, self.scores)

    @property
    def gate_up(self) -> float:
        """Half of the gradient with the ratio rule, which is linear only then; else all of it."""
        return 0.5 if self.activations == "ratio" else 1.0

    def interventions(self, layer: int, *, attention: str) -> list[HookPair]:
        """Return the hooks on one attention module."""
        return [scale_pattern_gradient(layer, self.scores, temperature=self.temperature, attention=attention)]


@contextlib.contextmanager
def changed_backward(
    lens: Lens,
    anatomies: Sequence[BlockAnatomy],
    rules: BackwardRules,
    *,
    below: Sequence[BlockAnatomy] | None = None,
    after: Sequence[int] = (),
    constants: Float[Tensor, " copy"] | None = None,
    logits: bool = True,
) -> Iterator[dict[int, Float[Tensor, "copy pos d_model"]]]:
    """Enter a context whose backward passes follow the rules, and yield the residual streams after blocks.

    Args:
        lens: The lens of the model.
        anatomies: The anatomies of all blocks of the stack.
        rules: The rules of the backward pass.
        below: For the joint part, the anatomies of the encoder's blocks; gradients propagate through them
            too.
        after: Numbers of blocks, each 1 or more; the residual stream after so many blocks is kept.
        constants: A leaf with a 1 per example of the passes. With rules that conserve, its gradient is the
            share of the target that comes from no token: from biases and, in a decoder alone, from the
            encoder.
        logits: Whether the passes compute logits.

    Yields:
        number of blocks -> the residual stream after them, once a pass has run.

    Raises:
        UnsupportedModelError: A rule got no gradient, or a component differs from its anatomy.
    """
    changed = ChangedRules(
        lens, anatomies, rules, below=below, after=after, constants=constants, logits=logits
    )
    with changed.applied():
        yield changed.streams
    changed.require_gradients()


class ChangedRules:
    """The rules on one model, for several passes; other arguments and errors are as in `changed_backward`.

    Args:
        leaf: Whether the first pass starts from a leaf: the detached residual stream before the first block.
        fused: The fused attention of the passes, which applies the rule of attention itself; None for eager
            attention.

    Attributes:
        streams: Number of blocks -> the residual stream after them, from passes with gradients.
    """

    def __init__(
        self,
        lens: Lens,
        anatomies: Sequence[BlockAnatomy],
        rules: BackwardRules,
        *,
        below: Sequence[BlockAnatomy] | None = None,
        after: Sequence[int] = (),
        constants: Float[Tensor, " copy"] | None = None,
        logits: bool = True,
        leaf: bool = False,
        fused: FusedAttention | None = None,
    ) -> None:
        self._lens, self._rules, self._constants, self._leaf = lens, rules, constants, leaf
        self._fused = fused
        self.streams: dict[int, Float[Tensor, "copy pos d_model"]] = {}
        self._pairs: list[HookPair] = []
        self._changes: list[Change] = []
        self._required: list[HookFunction | GradientCounter] = []
        # The final norm gets no gradient from a target that is computed from the stream before it.
        self._final: list[HookFunction | GradientCounter] = []
        # The model's own backward pass needs none of these changes, which cost time in every module.
        if not isinstance(rules, PlainRules):
            self._stacks(anatomies, below or ())
            self._norms(logits)
        if logits and constants is not None and (b_U := read_b_U(lens.model)) is not None:
            self._module(lens.model.unembed, Constant(b_U, constants, "unembed"))
        if leaf:
            self._changes.append(forward_pre_hook(lens.stack.blocks[0], self._enter, with_kwargs=True))
        self._changes += [self._kept(number) for number in after]

    @contextlib.contextmanager
    def applied(self, fwd_hooks: Sequence[HookPair] = ()) -> Iterator[None]:
        """Enter a context whose passes with gradients follow the rules.

        Args:
            fwd_hooks: Further TransformerLens hooks, which run after those of the rules.
        """
        # Hooks that record see the tensors after the rules, so that these have the changed gradient.
        with self._lens.hooked([*self._pairs, *fwd_hooks]), Changes(self._changes):
            yield

    def require_gradients(self, *, through_final_norm: bool = True) -> None:
        """Raise UnsupportedModelError if a rule got no gradient; to be called after the backward pass."""
        required = [*self._required, *self._final * through_final_norm]
        unused = [repr(rule) for rule in required if not rule.calls]
        if unused:
            raise UnsupportedModelError(
                "a backward pass with changed rules: expected a gradient through "
                f"{', '.join(unused[:5])}; got none"
            )

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace the first block's input by a leaf; later passes change nothing."""
        if 0 in self.streams:
            return None
        leaf = self.streams[0] = BlockCall(args, kwargs, None).resid_pre.detach().requires_grad_(True)
        return enter_with(leaf)(module, args, kwargs)

    def _kept(self, number: int) -> Change:
        """Return the change that records the residual stream after a number of blocks."""
        blocks = self._lens.stack.blocks

        def keep(stream: Tensor) -> None:
            # Later passes from a stream of the first pass show other tensors, which are not in its graph.
            if torch.is_grad_enabled() and not (self._leaf and number in self.streams):
                self.streams[number] = stream

        def record_input(module: nn.Module, args: Any, kwargs: Any) -> None:
            keep(BlockCall(args, kwargs, None).resid_pre)

        def record_output(module: nn.Module, args: Any, output: Any) -> None:
            keep(first_tensor(output))

        if number == len(blocks):
            # No block reads the stream after the last one.
            return forward_hook(blocks[-1], record_output)
        return forward_pre_hook(blocks[number], record_input, with_kwargs=True)

    def _stacks(self, anatomies: Sequence[BlockAnatomy], below: Sequence[BlockAnatomy]) -> None:
        """Add the rules of all blocks."""
        for layer, anatomy in enumerate(anatomies):
            self._block(self._lens.stack, layer, anatomy)
        if self._lens.stack.source is not None:
            for layer, anatomy in enumerate(below):
                self._block(self._lens.stack.source, layer, anatomy)

    def _block(self, stack: Stack, layer: int, anatomy: BlockAnatomy) -> None:
        """Add the rules of one block: of its patterns, values, feed-forward and biases."""
        block, module = stack.template.format(layer=layer), stack.blocks[layer]
        attention, cross = stack.attention_template.format(layer=layer), f"{block}.cross_attn"
        self._attention(layer, stack.attention_template)
        if self._constants is not None and anatomy.value_path is not None:
            self._constant(f"{attention}.hook_v", anatomy.value_path.b_V)
            self._output(module, attention, "o", anatomy.value_path.b_O)
        if anatomy.cross:
            # The encoder's outputs are constants, unless gradients propagate through the encoder.
            is_joint = self._lens.stack.source is not None
            self._attention(layer, f"{stack.template}.cross_attn", values=is_joint)
            if self._constants is not None and anatomy.value_path is not None:
                path = read_value_path(module.get_submodule("cross_attn"))
                if not is_joint:
                    self._point(f"{cross}.hook_v", Constant(None, self._constants, cross))
                elif path is not None:
                    self._constant(f"{cross}.hook_v", path.b_V)
                self._output(module, cross, "o", None if path is None else path.b_O)
        if anatomy.feed_forward is not None and self._rules.activations == "ratio":
            self._feed_forward(module, f"{block}.mlp", anatomy.feed_forward)
        elif self._rules.gate_up != 1:
            self._gate_up(module, f"{block}.mlp", anatomy)

    def _norms(self, logits: bool) -> None:
        """Add the rules of every norm of the model, including norms on queries and keys and the final one."""
        lens = self._lens
        # A Bridge wraps each norm of transformers in another module, and the rule must be applied once.
        inner = {id(getattr(module, "original_component", None)) for module in lens.modules}
        final, between, blocks = id(lens.final_norm()) if logits else None, set(), list(lens.stack.blocks)
        if lens.stack.source is not None:
            below = Lens(lens.model, lens.stack.source.name)
            between, blocks = {id(below.final_norm())}, [*below.stack.blocks, *blocks]
        # Other norms, such as those of embeddings, need not get a gradient.
        required = {id(module) for block in blocks for module in block.children()} | between
        for module in lens.modules:
            if "Norm" not in type(module).__name__ or id(module) in inner:
                continue
            norm = read_norm(module, lens.model.cfg)
            if norm is not None:
                rule = _NormRule(norm, self._constants)
                self._module(module, rule, required=id(module) in required)
                self._final += [rule] * (id(module) == final)

    def _module(self, module: nn.Module, rule: Constant | _NormRule, required: bool = True) -> None:
        """Add a rule on the output of a module of torch."""
        hook = functools.partial(_on_module, rule) if isinstance(rule, Constant) else rule.on_module
        self._changes.append(forward_hook(module, hook, with_kwargs=True))
        self._required += [rule] * required

    def _point(self, name: HookName, rule: HookFunction, required: bool = True) -> None:
        if isinstance(name, str) and name not in self._lens.hook_points:
            raise UnsupportedModelError(f"changed rules: expected a hook point {name!r}, found none")
        self._pairs.append((name, rule))
        self._required += [rule] * required

    def _attention(self, layer: int, attention: str, values: bool = True) -> None:
        """Add the interventions of one attention module; `values`: whether its values have a gradient."""
        if self._fused is not None:
            self._required.append(self._fused.counters[layer])
            return
        value_hook = f"{attention.format(layer=layer)}.hook_v"
        for name, rule in self._rules.interventions(layer, attention=attention):
            self._point(name, rule, required=values or name != value_hook)

    def _feed_forward(self, block: nn.Module, mlp: str, feed_forward: FeedForward) -> None:
        gated = feed_forward.W_gate is not None
        self._constant(f"{mlp}.hook_pre", feed_forward.b_gate if gated else feed_forward.b_in)
        if gated:
            self._constant(f"{mlp}.hook_pre_linear", feed_forward.b_in)
        act, b_hidden = ACTIVATIONS[feed_forward.activation], feed_forward.b_hidden
        share = self._rules.gate_up
        for name, rule in hold_activation_ratio(mlp, act, gated=gated, gate_up=share, bias=b_hidden):
            self._point(name, rule)
        self._constant(f"{mlp}.hook_post", b_hidden)
        self._output(block, mlp, "out", feed_forward.b_out)

    def _gate_up(self, block: nn.Module, mlp: str, anatomy: BlockAnatomy) -> None:
        """Add the rule of gate and up: at their hook points, or at the input of what computes both.

        The input's gradient is the sum of those through gate and up, so one factor for it is the same rule.
        Experts run many or no tokens and show neither gate nor up; one of them at least has a gradient.
        """
        if anatomy.feed_forward_kind == "gated":
            for point in ("hook_pre", "hook_pre_linear"):
                self._point(*scale_gradient(f"{mlp}.{point}", self._rules.gate_up))
        elif anatomy.feed_forward_kind != "plain":
            found = find_gated(block)
            if found is None:
                raise UnsupportedModelError(
                    f"gate_up: expected to find gate and up in the feed-forward {mlp}, or that it has none, "
                    "and could not read it; gate_up=1 computes without the rule for gated feed-forwards"
                )
            rule = _InputRule(f"the input of gate and up in {mlp}", self._rules.gate_up)
            self._changes += [forward_pre_hook(each, rule.on_module, with_kwargs=True) for each in found]
            self._required += [rule] * bool(found)

    def _constant(self, name: str, bias: Tensor | None) -> None:
        if self._constants is not None and bias is not None:
            self._point(name, Constant(bias, self._constants, name))

    def _output(self, block: nn.Module, module: str, matrix: str, bias: Tensor | None) -> None:
        """Add the rule of the last matrix's bias; the hooked classes show it in the module's output only."""
        if self._lens.model_class is ModelClass.BRIDGE:
            self._constant(f"{module}.{matrix}.hook_out", bias)
        elif self._constants is not None and bias is not None:
            submodule = block.get_submodule(module.rpartition(".")[2])
            self._module(submodule, Constant(bias, self._constants, module))


# ------------------------------------------------------------------ rules on modules of torch

# Norms have their rules on modules, because not all have a hook point for their scale, and a hook there
# changes the rounding of a TransformerBridge. Biases do if they are visible in a module's output only.


class _InputRule(GradientCounter):
    """A module whose gradient with respect to its first input is multiplied by a factor."""

    def __init__(self, name: str, factor: float) -> None:
        super().__init__(name)
        self._factor = factor

    def on_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = next(iter(kwargs), None)
        x = args[0] if args else kwargs[name]
        if not is_differentiated(x):
            return None
        changed = self.follow(replace_gradient(self._factor * x, x))
        return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, name: changed})


class _NormRule(GradientCounter):
    """A norm whose scale is treated as constant: only its centring and its weight are differentiated."""

    def __init__(self, norm: Norm, constants: Tensor | None) -> None:
        super().__init__(f"a norm of kind {norm.kind!r}")
        self._norm, self._constants = norm, constants

    def on_module(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        if not is_differentiated(x):
            return None
        # Models of transformers compute their norms in float32 too, with which this one is compared.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        self._require_alike(self._norm(wide.detach()), output)
        linear = self._norm.linear_at(wide)(wide)
        if self._constants is not None and self._norm.bias is not None:
            linear = linear + beside(self._constants, output) * self._norm.bias.to(wide.dtype)
        return self.follow(replace_gradient(linear, output))

    def _require_alike(self, rebuilt: Tensor, output: Tensor) -> None:
        accepted = tolerance(output.dtype)
        error = relative_error(rebuilt.detach(), output.detach())
        if not error <= accepted:
            raise UnsupportedModelError(
                f"{self!r}: expected its components to give its output within {accepted:.0e}, got a relative "
                f"error of {error:.1e}: its gradient can't be changed"
            )


def _on_module(rule: Constant, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Apply a rule to the output of a module of torch."""
    changed = rule(first_tensor(output), None)
    return None if changed is None else with_first(output, changed)
