"""Run attention by transformers' own modules and a fused kernel, and record rows of the pattern beside it.

A fused kernel keeps no pattern, so the memory of a pass grows with the length of the prompt and not with its
square. Recorded rows of the pattern are computed from the same queries and keys, and are compared with what
the kernel returns. Gradients with other rules than the kernel's are computed from some rows at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lens_mix._care.changes import Change, Undo, replace_attributes, replace_method
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._inputs.rows import rows_at
from lens_mix._model.model import Lens
from lens_mix._passes.backward_rules import AttentionRule
from lens_mix.hooks.gradient import GradientCounter
from lens_mix.hooks.mixing import tolerance

# The name under which transformers knows this attention.
_NAME = "lens_mix_rows"
# Where the kernel does not do, the pattern of so many rows exists at once.
_ROWS_AT_ONCE = 64
# The modules whose attention is fused at this moment.
_active: dict[nn.Module, _Use] = {}


class _Use(NamedTuple):
    """What is done with the attention of one module: who reads it, and how it is differentiated.

    Attributes:
        read: A function that gets the attention and what it mixed; None for none.
        rule: How it is differentiated.
        read_graph: The same as `read`, in passes with gradients.
    """

    read: Callable[[_Attention, Tensor], None] | None
    rule: AttentionRule
    read_graph: Callable[[_Attention, Tensor], None]


@dataclasses.dataclass(frozen=True)
class _Attention:
    """The tensors of one attention, as transformers' module hands them to its kernel.

    Attributes:
        query: The queries [batch head query d_head].
        key: The keys [batch key_head key d_head].
        value: The values [batch value_head key d_value].
        mask: Whether a query may see a key [batch or 1, head or 1, query, key]; None without a mask.
        is_causal: Whether no query sees a later key. A mask says it itself, so it counts only without one.
        scaling: The factor of the scores.
        softcap: The bound of the scores; None without one.
        sinks: The score of each head's sink, which takes weight from all keys; None without sinks.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scaling: float
    softcap: float | None
    sinks: Tensor | None

    def allowed(self, positions: Int[Tensor, "batch row"] | None) -> Bool[Tensor, "batch row key"]:
        """Return which keys some rows may see; None: all rows."""
        batch, count, keys = len(self.query), self.query.shape[2], self.key.shape[2]
        if self.mask is None:
            every = torch.ones(count, keys, dtype=torch.bool, device=self.query.device)
            mask = (every.tril() if self.is_causal else every)[None]
        else:
            mask = _is_allowed(self.mask)
            mask = mask[:, 0] if mask.shape[1] == 1 else mask.any(1)
        return rows_at(mask.expand(batch, -1, -1), positions)

    def seen(self, first: int, last: int) -> slice:
        """Return the keys that the rows from `first` on and before `last` may see."""
        if self.mask is None:
            return slice(0, last if self.is_causal else self.key.shape[2])
        # In layers with a window, most keys of a long prompt are seen by no row of a few.
        found = _is_allowed(self.mask[:, :, first:last]).flatten(0, 2).any(0).nonzero()[:, 0]
        return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, self.key.shape[2])

    def scores(
        self, positions: Int[Tensor, "batch row"], seen: slice = slice(0, None)
    ) -> tuple[Float[Tensor, "batch head row key"], Float[Tensor, "batch head row key"]]:
        """Return the scores of some rows and some keys, without the mask and with it."""
        query = rows_at(self.query, positions, axis=2)
        keys = _repeat(self.key[:, :, seen], query.shape[1])
        scores = (query @ keys.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32))
        scores = scores * self.scaling
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        if self.mask is None and not self.is_causal:
            return scores, scores
        if self.mask is None:
            places = torch.arange(seen.start, seen.start + keys.shape[2], device=keys.device)
            allowed = places <= positions[:, :, None]
            return scores, scores.masked_fill(~allowed[:, None], -torch.inf)
        mask = rows_at(self.mask.expand(len(query), -1, -1, -1), positions, axis=2)[..., seen]
        masked = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return scores, masked

    def softmax(
        self, masked: Float[Tensor, "batch head row key"], temperature: float = 1.0
    ) -> Float[Tensor, "batch head row key"]:
        """Return the weights of masked scores at a temperature, without those of sinks."""
        count = masked.shape[-1]
        if self.sinks is not None:
            sinks = self.sinks.to(masked).reshape(1, -1, 1, 1).expand(*masked.shape[:3], 1)
            masked = torch.cat([masked, sinks], -1)
        return (masked / temperature).softmax(-1)[..., :count]

    def pattern(self, positions: Int[Tensor, "batch row"] | None) -> Float[Tensor, "batch head row key"]:
        """Return some rows of the pattern; None: all, computed from some at a time."""
        if positions is not None:
            return self.softmax(self.scores(positions)[1]).to(self.query.dtype)
        batch, heads, count, _ = self.query.shape
        whole = self.query.new_zeros(batch, heads, count, self.key.shape[2])
        for positions, rows, seen in self.blocks():
            whole[:, :, rows, seen] = self.softmax(self.scores(positions, seen)[1])
        return whole

    def mix(
        self, pattern: Float[Tensor, "batch head row key"], seen: slice = slice(0, None)
    ) -> Float[Tensor, "batch row head d_value"]:
        """Return what rows of the pattern mix of the values of some keys."""
        return (pattern @ _repeat(self.value[:, :, seen], pattern.shape[1])).transpose(1, 2)

    def mix_all(self) -> Float[Tensor, "batch query head d_value"]:
        """Return what all rows mix, computed from some rows at a time."""
        parts = [
            self.mix(self.softmax(self.scores(positions, seen)[1]).to(self.query.dtype), seen)
            for positions, _, seen in self.blocks()
        ]
        return torch.cat(parts, 1).contiguous()

    def blocks(self) -> Iterator[tuple[Int[Tensor, "batch row"], slice, slice]]:
        """Yield all rows, some at a time: their positions, the same as a slice, and the keys they see."""
        every = torch.arange(self.query.shape[2], device=self.query.device)
        for start in range(0, len(every), _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, len(every)))
            yield every[rows].expand(len(self.query), -1), rows, self.seen(rows.start, rows.stop)


class _ByRows(torch.autograd.Function):
    """Attention with the gradients of an `AttentionRule`, from some rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, attention: _Attention, rule: Any
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.attention, ctx.rule = attention, rule
        return mixed.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        rule: AttentionRule = ctx.rule
        own = dataclasses.replace(ctx.attention, query=query, key=key, value=value)
        heads, wide = query.shape[1], torch.promote_types(query.dtype, torch.float32)
        keys, values = (_repeat(each, heads).to(wide) for each in (key, value))
        of_mixed = gradient.transpose(1, 2).to(wide)
        of_query, of_keys, of_values = (torch.zeros_like(each, dtype=wide) for each in (query, keys, values))
        for positions, rows, seen in own.blocks():
            of_rows = of_mixed[:, :, rows]
            scores, masked = own.scores(positions, seen)
            pattern = own.softmax(masked)
            of_values[:, :, seen] += pattern.transpose(-1, -2) @ of_rows
            if rule.scores == 0:
                continue
            of_pattern = of_rows @ values[:, :, seen].transpose(-1, -2)
            weights = pattern if rule.temperature == 1 else own.softmax(masked, rule.temperature)
            # In place, because these are the largest tensors of the backward pass.
            of_pattern -= (weights * of_pattern).sum(-1, keepdim=True)
            of_scores = of_pattern.mul_(weights).mul_(rule.scores * own.scaling)
            if own.softcap is not None:
                of_scores *= 1 - (scores / own.softcap).square()
            of_query[:, :, rows] = of_scores @ keys[:, :, seen]
            of_keys[:, :, seen] += of_scores.transpose(-1, -2) @ query[:, :, rows].to(wide)
        of_values *= rule.values
        # Neighboring query heads have common keys and values.
        of_key, of_value = (
            of_each.unflatten(1, (each.shape[1], -1)).sum(2).to(each.dtype)
            for of_each, each in ((of_keys, key), (of_values, value))
        )
        return of_query.to(query.dtype), of_key, of_value, None, None, None


def _is_allowed(mask: Tensor) -> Bool[Tensor, ...]:
    """Return a mask as booleans: whether a query may see a key."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def _repeat(tensor: Float[Tensor, "batch group pos d"], heads: int) -> Float[Tensor, "batch head pos d"]:
    """Return keys or values of every head; neighboring heads have common ones."""
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute an attention without its whole pattern, for what is done with it.

    The arguments are those with which transformers' modules call an attention function.

    Raises:
        NotImplementedError: The attention has a bias of positions.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if options.get("position_bias") is not None:
        raise NotImplementedError("fused attention with a bias of positions")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention = _Attention(query, key, value, attention_mask, causal, factor, softcap, s_aux)
    use = _active.get(module)
    is_plain = softcap is None and s_aux is None
    has_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    by_rows = has_gradient and use is not None and (use.rule != AttentionRule() or not is_plain)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not by_rows):
        if is_plain:
            given = {"scaling": scaling, "is_causal": is_causal}
            mixed, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **given, **options)
        else:
            mixed = attention.mix_all()
    if use is not None and by_rows:
        # The backward pass reads these three as saved tensors, which the graph can free.
        own = {name: getattr(attention, name).detach() for name in ("query", "key", "value")}
        detached = dataclasses.replace(attention, **own)
        mixed = _ByRows.apply(query, key, value, mixed, detached, use.rule)  # type: ignore[no-untyped-call]
    if use is not None and has_gradient:
        use.read_graph(attention, mixed)
    if use is not None and use.read is not None:
        use.read(attention, mixed)
    return mixed, None


class FusedAttention:
    """Fused attention in the blocks of a pass, of which some rows are recorded.

    Args:
        lens: The lens of the model.
        roles: Layer -> the roles that are recorded.
        positions: The positions of the rows; None for all of them.
        rule: How attention is differentiated in passes with gradients.

    Attributes:
        counters: Layer -> what counts the gradients through its attention.
        mixing: The values and the mixed values of passes with gradients, by the names of their hook points.
        failure: Why the rows do not agree with what a kernel returned; None if all do.
    """

    def __init__(
        self,
        lens: Lens,
        roles: Mapping[int, Sequence[str]],
        positions: Int[Tensor, "batch row"] | None,
        rule: AttentionRule | None = None,
    ) -> None:
        self._lens, self._roles, self._positions = lens, roles, positions
        self.rule = AttentionRule() if rule is None else rule
        names = ((layer, lens.stack.attention_template.format(layer=layer)) for layer in self._layers)
        self.counters = {layer: GradientCounter(name) for layer, name in names}
        self.mixing: dict[str, Tensor] = {}
        self.failure: str | None = None
        # Layers with one mask share what it allows.
        self._allowed: dict[tuple[int, bool], tuple[Tensor | None, Tensor]] = {}

    @property
    def _layers(self) -> list[int]:
        return self._lens.stack.attention_layers

    def with_rule_alone(self) -> FusedAttention:
        """Return the same attention for another pass, of which nothing is recorded."""
        return FusedAttention(self._lens, {}, None, self.rule)

    def changes(
        self, store: MutableMapping[str, Tensor] | None = None, attended: dict[int, Tensor] | None = None
    ) -> list[Change]:
        """Return the changes of the model in which its attention is fused.

        Args:
            store: The dict to fill, by the names of the hook points that eager attention would call.
            attended: Layer -> which keys the rows may see, to fill for the layers in `roles`. None: nothing
                is recorded.

        Raises:
            UnsupportedModelError: An attention calls no attention function of transformers.
        """
        _register()
        changes, configs = list[Change](), dict[int, Any]()
        for layer in self._layers:
            attention: Any = self._lens.stack.attention_module(layer)
            own: nn.Module = attention.original_component
            # BERT's attention contains the module that calls an attention function.
            inner = next((each for each in own.modules() if _has_implementation(each)), None)
            if inner is None:
                raise UnsupportedModelError(
                    "attention: expected a module of transformers that calls an attention function, got "
                    f"{type(own).__name__}, which computes its attention itself"
                )
            configs[id(inner.config)] = inner.config
            changes.append(replace_method(attention, "forward", own.forward))
            read = None
            if store is not None and attended is not None and layer in self._roles:
                read = functools.partial(self._read, layer, store, attended)
            use = _Use(read, self.rule, functools.partial(self._read_graph, layer))
            changes.append(_used(inner, use))
        named = [(config, _NAME) for config in configs.values()]
        # The setter of `_attn_implementation` would also change the configurations inside of these.
        return [replace_attributes(named, "_attn_implementation_internal"), *changes]

    def _read_graph(self, layer: int, attention: _Attention, mixed: Tensor) -> None:
        self.counters[layer].follow(mixed)
        for role, tensor in (("value", attention.value.transpose(1, 2)), ("z", mixed)):
            self.mixing[self._lens.stack.hook_name(role, layer)] = tensor

    @torch.no_grad()
    def _read(
        self,
        layer: int,
        store: MutableMapping[str, Tensor],
        attended: dict[int, Tensor],
        attention: _Attention,
        mixed: Tensor,
    ) -> None:
        key = (id(attention.mask), attention.is_causal)
        if key not in self._allowed:
            # The mask is kept, too, so that no other one gets its number.
            self._allowed[key] = (attention.mask, attention.allowed(self._positions))
        attended[layer] = self._allowed[key][1]
        if not self._roles[layer]:
            return
        pattern, rows = attention.pattern(self._positions), rows_at(mixed, self._positions)
        expected = attention.mix(pattern)
        error = float((rows - expected).abs().max())
        if not error <= tolerance(rows.dtype) * max(float(expected.abs().max()), 1e-6):
            self.failure = self.failure or (
                f"{self._lens.where(layer)}: expected pattern @ values from the fused kernel, got a "
                f"difference of {error:.1e}"
            )
        tensors = {"pattern": pattern, "value": attention.value.transpose(1, 2), "z": rows}
        for role in self._roles[layer]:
            store[self._lens.stack.hook_name(role, layer)] = tensors[role].detach()


def _has_implementation(module: nn.Module) -> bool:
    """Return whether a module has a configuration that names its attention function."""
    return hasattr(getattr(module, "config", None), "_attn_implementation_internal")


def _used(module: nn.Module, use: _Use) -> Change:
    """Return a change in which the attention of a module is used in a certain way."""

    def start() -> Undo:
        _active[module] = use
        return functools.partial(_active.pop, module)

    return start


def _register() -> None:
    """Register this attention with transformers, with the masks of transformers' own fused attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
