"""Passes whose values are the model's own and whose gradients follow other rules.

Gradients are changed where they pass hook points, or values are replaced by y − y' + y' with only y' in the
graph (`_with_gradient_of`); what is replaced is first held against what it stands for. Without gradients
nothing here has an effect, and each rule counts its calls in the backward pass: a rule that gets none was put
where no gradient goes through, and is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lens_mix.hooks import HookFunction, HookPair
from lens_mix.hooks.mixing import sink, tolerance
from lens_mix.lens.anatomy import ACTIVATIONS, BlockAnatomy, FeedForward, Norm, read_norm, read_value_path
from lens_mix.lens.changes import Change, Changes, forward_hook, forward_pre_hook
from lens_mix.lens.head import read_b_U
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import ModelClass, UnsupportedModelError
from lens_mix.lens.replay import BlockCall, first_tensor, relative_error, with_first
from lens_mix.lens.stacks import Stack


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the backward pass does instead of differentiating; norms are always held at their scale.

    Attributes:
        temperature: of the attention softmax in the backward pass.
        scores: factor of the gradient of the attention scores; 0 freezes the patterns.
        values: factor of the gradient of the value vectors.
        activations: "gradient"; or "ratio": act(z) as z times act(z)/z, which is held, and half of the
            gradient to each factor of a gated feed-forward's act(gate) × up.
    """

    temperature: float = 1.0
    scores: float = 1.0
    values: float = 1.0
    activations: Literal["gradient", "ratio"] = "gradient"


@contextlib.contextmanager
def changed_backward(
    lens: Lens,
    anatomies: Sequence[BlockAnatomy],
    rules: Rules,
    *,
    below: Sequence[BlockAnatomy] | None = None,
    after: Sequence[int] = (),
    constants: Float[Tensor, " row"] | None = None,
    logits: bool = True,
) -> Iterator[dict[int, Float[Tensor, "row pos d_model"]]]:
    """Backward passes inside follow the rules; yields the streams after some blocks, as passes fill it.

    Args:
        lens: the face of the model.
        anatomies: of all blocks of its stack.
        rules: the rules.
        below: of the joint part, anatomies of the encoder's blocks: gradients go down through these too.
        after: numbers of blocks, 1 or more: the residual stream after so many is kept, for its gradient.
        constants: a leaf of ones per row of the passes: its gradient is the share of the target that comes
            from no token, but from biases and, in a decoder alone, from the encoder. For rules that conserve.
        logits: whether the passes go through the model's head.

    Raises:
        UnsupportedModelError: a rule that no gradient went through, or a part that is not as it was read.
    """
    changed = ChangedRules(lens, anatomies, rules, below=below, constants=constants, logits=logits)
    streams: dict[int, Tensor] = {}
    keeping = [
        forward_pre_hook(lens.stack.blocks[n], functools.partial(_keep, streams, n), with_kwargs=True)
        for n in after
    ]
    with lens.hooked(changed.pairs), Changes([*changed.changes, *keeping]):
        yield streams
    changed.require_gradients()


def _keep(streams: dict[int, Tensor], number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
    if torch.is_grad_enabled():
        streams[number] = BlockCall(args, kwargs, None).resid_pre


class ChangedRules:
    """The hooks of one pass: of TransformerLens in `pairs`, of torch in `changes`.

    Arguments and errors as of `changed_backward`.
    """

    def __init__(
        self,
        lens: Lens,
        anatomies: Sequence[BlockAnatomy],
        rules: Rules,
        *,
        below: Sequence[BlockAnatomy] | None = None,
        constants: Float[Tensor, " row"] | None = None,
        logits: bool = True,
    ) -> None:
        self._lens, self._rules, self._constants = lens, rules, constants
        self.pairs: list[HookPair] = []
        self.changes: list[Change] = []
        self._required: list[_Counting] = []
        for layer, anatomy in enumerate(anatomies):
            self._block(lens.stack, layer, anatomy)
        if lens.stack.source is not None:
            for layer, anatomy in enumerate(below or ()):
                self._block(lens.stack.source, layer, anatomy)
        self._norms(logits)
        if logits and constants is not None and (b_U := read_b_U(lens.model)) is not None:
            self._module(lens.model.unembed, _Constant(b_U, constants, "unembed"))

    def require_gradients(self) -> None:
        """After the backward pass. Raises UnsupportedModelError: a rule that no gradient went through."""
        idle = [repr(rule) for rule in self._required if not rule.calls]
        if idle:
            raise UnsupportedModelError(
                "a backward pass with changed rules: expected a gradient through "
                f"{', '.join(idle[:5])}; got none"
            )

    def _block(self, stack: Stack, layer: int, anatomy: BlockAnatomy) -> None:
        """One block's patterns, values, feed-forward, and the constants that it adds."""
        block, module = stack.template.format(layer=layer), stack.blocks[layer]
        own, cross = stack.attention_template.format(layer=layer), f"{block}.cross_attn"
        self._attention(own)
        if self._constants is not None and anatomy.value_path is not None:
            self._constant(f"{own}.hook_v", anatomy.value_path.b_V)
            self._output(module, own, "o", anatomy.value_path.b_O)
        if anatomy.cross:
            # The encoder's outputs are constants, unless gradients go down through it.
            joint = self._lens.stack.source is not None
            self._attention(cross, values=joint)
            if self._constants is not None and anatomy.value_path is not None:
                path = read_value_path(module.get_submodule("cross_attn"))
                if not joint:
                    self._point(f"{cross}.hook_v", _Constant(None, self._constants, cross))
                elif path is not None:
                    self._constant(f"{cross}.hook_v", path.b_V)
                self._output(module, cross, "o", None if path is None else path.b_O)
        if anatomy.feed_forward is not None and self._rules.activations == "ratio":
            self._feed_forward(module, f"{block}.mlp", anatomy.feed_forward)

    def _norms(self, logits: bool) -> None:
        """Every norm that the model calls, those on queries and keys and in its head too."""
        lens = self._lens
        inner = {id(getattr(module, "original_component", None)) for module in lens.modules}
        final, blocks = ({id(lens.final_norm())} if logits else set()), list(lens.stack.blocks)
        if lens.stack.source is not None:
            below = Lens(lens.model, lens.stack.source.name)
            final, blocks = final | {id(below.final_norm())}, [*below.stack.blocks, *blocks]
        own = {id(module) for block in blocks for module in block.children()} | final
        for module in lens.modules:
            if "Norm" not in type(module).__name__ or id(module) in inner:
                continue
            norm = read_norm(module, lens.model.cfg)
            if norm is not None:
                self._module(module, _LinearNorm(norm, self._constants), required=id(module) in own)

    def _module(self, module: nn.Module, rule: _Rule | _LinearNorm, required: bool = True) -> None:
        """A rule on what a module of torch puts out."""
        self.changes.append(forward_hook(module, rule.on_module, with_kwargs=True))
        self._required += [rule] * required

    def _point(self, name: str, rule: _Rule) -> None:
        if name not in self._lens.hook_points:
            raise UnsupportedModelError(f"changed rules: expected a hook point {name!r}, found none")
        self.pairs.append((name, rule))
        self._required.append(rule)

    def _attention(self, attention: str, values: bool = True) -> None:
        change = functools.partial(pattern_gradient, self._rules.temperature, self._rules.scores)
        self._point(f"{attention}.hook_pattern", _Gradient(f"{attention}.hook_pattern", change))
        if values and self._rules.values != 1:
            self._point(f"{attention}.hook_v", _Gradient(f"{attention}.hook_v", self._scaled))

    def _scaled(self, shown: Tensor, gradient: Tensor) -> Tensor:
        return gradient * self._rules.values

    def _feed_forward(self, block: nn.Module, mlp: str, feed_forward: FeedForward) -> None:
        hidden = _Hidden(mlp, feed_forward)
        gated = feed_forward.W_gate is not None
        biases = {"hook_pre": feed_forward.b_gate if gated else feed_forward.b_in}
        biases |= {"hook_pre_linear": feed_forward.b_in} if gated else {}
        for name, bias in biases.items():
            self._constant(f"{mlp}.{name}", bias)
            self._point(f"{mlp}.{name}", _Read(hidden, name))
        self._point(f"{mlp}.hook_post", hidden)
        self._constant(f"{mlp}.hook_post", feed_forward.b_hidden)
        self._output(block, mlp, "out", feed_forward.b_out)

    def _constant(self, name: str, bias: Tensor | None) -> None:
        if self._constants is not None and bias is not None:
            self._point(name, _Constant(bias, self._constants, name))

    def _output(self, block: nn.Module, module: str, matrix: str, bias: Tensor | None) -> None:
        """The bias of the last matrix; the hooked classes show what it gives as the module's output alone."""
        if self._lens.model_class is ModelClass.BRIDGE:
            self._constant(f"{module}.{matrix}.hook_out", bias)
        elif self._constants is not None and bias is not None:
            found = block.get_submodule(module.rpartition(".")[2])
            self._module(found, _Constant(bias, self._constants, module))


# ------------------------------------------------------------------ the rules


class _Counting:
    """Counts in `calls` the gradients that came through."""

    name: str
    calls: int = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__.lstrip('_')}({self.name})"

    def _counted(self, tensor: Tensor) -> Tensor:
        tensor.register_hook(self._count)
        return tensor

    def _count(self, gradient: Tensor) -> None:
        self.calls += 1


class _Rule(_Counting, HookFunction):
    """A rule at a hook point, or on a module's output."""

    def on_module(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        changed = self(first_tensor(output), None)
        return None if changed is None else with_first(output, changed)


class _Gradient(_Rule):
    """The gradient by what a hook point shows goes through `change(shown, gradient)`."""

    def __init__(self, name: str, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.name, self._change = name, change

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor | None:
        if not _differentiated(tensor):
            return None
        tensor.register_hook(functools.partial(self._changed, tensor.detach()))
        # A hook point with a conversion shows a rearranged copy, which only gets a gradient if the pass goes
        # on from it: it does where the hook returns it.
        return tensor if getattr(hook, "hook_conversion", None) is not None else None

    def _changed(self, shown: Tensor, gradient: Tensor) -> Tensor:
        self.calls += 1
        return self._change(shown, gradient)


def pattern_gradient(
    temperature: float,
    factor: float,
    pattern: Float[Tensor, "batch head query key"],
    gradient: Float[Tensor, "batch head query key"],
) -> Float[Tensor, "batch head query key"]:
    """The gradient by P that the model's own softmax turns into factor · P_T ⊙ (g − Σ P_T g) by the scores.

    P_T = softmax(log P / T) = softmax(scores / T). The softmax makes P ⊙ (g' − Σ P g') of what is given here.
    Weight that a row leaves to no key (an attention sink's) counts as one key more.
    """
    if factor == 0:
        return torch.zeros_like(gradient)
    if temperature == 1:
        return factor * gradient
    wide = torch.promote_types(pattern.dtype, torch.float32)
    weights, given = pattern.to(wide), gradient.to(wide)
    to_no_key = sink(pattern)
    all_weights = torch.cat([weights, to_no_key], dim=-1)
    tempered = (all_weights.log() / temperature).softmax(-1).nan_to_num(0)[..., :-1]
    wanted = tempered * (given - (tempered * given).sum(-1, keepdim=True))
    changed = torch.where(weights > 0, wanted / weights, 0)
    # With a sink the wanted numbers don't sum to 0, and the softmax's own Σ P g' has to be made up for.
    changed = changed + torch.where(to_no_key > 0, wanted.sum(-1, keepdim=True) / to_no_key, 0)
    return (factor * changed).to(gradient.dtype)


class _LinearNorm(_Counting):
    """A norm with its scale held: centring and weight are what is differentiated."""

    def __init__(self, norm: Norm, constants: Tensor | None) -> None:
        self.name, self._norm, self._constants = f"a norm of kind {norm.kind!r}", norm, constants

    def on_module(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        if not _differentiated(x):
            return None
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        _refuse_unlike(self, self._norm(wide.detach()), output)
        linear = self._norm.linearised(wide)
        if self._constants is not None and self._norm.bias is not None:
            linear = linear + _ones(self._constants, output) * self._norm.bias.to(wide.dtype)
        return self._counted(_with_gradient_of(linear, output))


class _Hidden(_Rule):
    """act(gate) × up, or act(in), by the ratio rule (`Rules.activations`)."""

    def __init__(self, name: str, feed_forward: FeedForward) -> None:
        self.name, self._feed_forward = name, feed_forward
        self.read: dict[str, Tensor] = {}

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor | None:
        if not _differentiated(tensor):
            return None
        act, b_hidden = ACTIVATIONS[self._feed_forward.activation], self._feed_forward.b_hidden
        z, up = self.read.pop("hook_pre"), self.read.pop("hook_pre_linear", None)
        rebuilt = act(z.detach()) if up is None else act(z.detach()) * up.detach()
        _refuse_unlike(self, rebuilt if b_hidden is None else rebuilt + b_hidden.to(rebuilt.dtype), tensor)
        linear = ratio(act, z.detach()) * z
        if up is not None:
            linear = (linear * up.detach() + linear.detach() * up) / 2
        return self._counted(_with_gradient_of(linear, tensor))


class _Read(_Rule):
    """Hands what a hook point shows to the feed-forward's rule."""

    def __init__(self, hidden: _Hidden, role: str) -> None:
        self.name, self._hidden, self._role = f"{hidden.name}.{role}", hidden, role

    def __call__(self, tensor: Tensor, hook: Any) -> None:
        if _differentiated(tensor):
            self._hidden.read[self._role] = self._counted(tensor)


class _Constant(_Rule):
    """A bias (None: all that is shown) times the leaf that stands for what comes from no token."""

    def __init__(self, bias: Tensor | None, constants: Tensor, name: str) -> None:
        self.name, self._bias, self._constants = name, bias, constants

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        bias = tensor.detach() if self._bias is None else self._bias.to(tensor.dtype)
        if self._bias is not None and bias.ndim == 2 and tensor.ndim == 3:
            bias = bias.flatten()
        added = _ones(self._constants, tensor) * bias
        return self._counted(tensor + (added - added.detach()))


def ratio(act: Callable[[Tensor], Tensor], z: Float[Tensor, "*batch d_mlp"]) -> Float[Tensor, "*batch d_mlp"]:
    """act(z) / z; next to 0 the mean slope there."""
    near, small = z.abs() < 1e-9, torch.full_like(z[..., :1], 1e-3)
    slope = (act(small) - act(-small)) / (2 * small)
    return torch.where(near, slope, act(z) / torch.where(near, 1, z))


def _with_gradient_of(linear: Tensor, output: Tensor) -> Tensor:
    """The output as it is, with the gradient of something else."""
    return output.detach() + (linear - linear.detach()).to(output.dtype)


def _ones(constants: Float[Tensor, " row"], like: Tensor) -> Tensor:
    """The leaf beside a tensor whose first axis is the rows, or the rows' positions."""
    each = constants.repeat_interleave(len(like) // len(constants)).to(like.dtype)
    return each.reshape(-1, *[1] * (like.ndim - 1))


def _differentiated(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _refuse_unlike(rule: _Counting, rebuilt: Tensor, output: Tensor) -> None:
    accepted = tolerance(output.dtype)
    error = relative_error(rebuilt.detach(), output.detach())
    if not error <= accepted:
        raise UnsupportedModelError(
            f"{rule!r}: expected its parts to give its output within {accepted:.0e}, got a relative error of "
            f"{error:.1e}: its gradient can't be changed"
        )
