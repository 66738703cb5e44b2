"""One face over every TransformerLens model: prompts in, one clean pass, blocks out."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lens_mix.hooks import record
from lens_mix.lens.model_classes import (
    ModelClass,
    UnsupportedModelError,
    model_class_of,
    transformer_lens_version,
)
from lens_mix.lens.prompts import Batch, is_encoder_decoder
from lens_mix.lens.proof import known_faults
from lens_mix.lens.replay import BlockCall, BlockReplay, captured_calls, enter_with, first_tensor
from lens_mix.lens.sampled_patterns import SampledPatterns, see_keys_of
from lens_mix.lens.stacks import Stack, stacks_of
from lens_mix.lens.state import undisturbed
from lens_mix.lens.unembedding import row_at, unembedding_at
from lens_mix.lens.users_hooks import carries_users_hooks

# Largest accepted relative error of a rebuilt vector. A wrong reading of a block is off by 1e-2 or more.
# Hugging Face's RMSNorms compute in float32 even in a float64 model: 1e-7 is the best they can agree.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}

HookPair = tuple[str | Callable[[str], bool], Callable[..., Any]]


class _Stop(Exception):
    """Ends a forward pass once the last wanted block has run."""


@dataclasses.dataclass(frozen=True)
class CleanPass:
    """What one forward pass without interventions left behind.

    Attributes:
        batch: the prompts.
        calls: per block, its arguments and output.
        recorded: hook name -> tensor, for the hooks that were asked.
        seen: per layer, which keys got any weight from any head.
        sampled: the patterns of some queries of every prompt, to check by.
        replays: per block, the way it is run again, once that has been proven.
        kept: per block, what the methods of one run share.
    """

    batch: Batch
    calls: dict[int, BlockCall]
    recorded: dict[str, Tensor]
    seen: dict[int, Bool[Tensor, "batch query key"]]
    sampled: SampledPatterns
    replays: dict[int, BlockReplay] = dataclasses.field(default_factory=dict)
    kept: dict[int, dict[Any, Any]] = dataclasses.field(default_factory=dict)


class Lens:
    """One stack of one TransformerLens model.

    Args:
        model: HookedTransformer, HookedEncoder, HookedEncoderDecoder or TransformerBridge.
        stack: "encoder" (default) or "decoder" of an encoder-decoder; None or "blocks" elsewhere.

    Raises:
        TypeError: not a TransformerLens model.
        ValueError: no such stack.
        UnsupportedModelError: the model has no attention, or its outputs are known to be wrong.
    """

    def __init__(self, model: Any, stack: str | None = None) -> None:
        self.model_class = model_class_of(model)
        self.model = model
        for sense in ("visual", "audio"):
            if getattr(model.cfg, f"is_{sense}_model", False):
                raise UnsupportedModelError(f"model: expected a model that reads tokens, got a {sense} model")
        stacks = stacks_of(model)
        name = next(iter(stacks)) if stack is None else stack
        if name not in stacks:
            raise ValueError(
                f"stack: expected one of {sorted(stacks)} for {self.model_class.value}, got {stack!r}"
            )
        self.stack: Stack = stacks[name]
        fault = known_faults.known_fault(model, self.model_class, name, transformer_lens_version())
        if fault is not None:
            raise UnsupportedModelError(fault)

    # ------------------------------------------------------------- facts

    @property
    def n_layers(self) -> int:
        """Number of blocks of the stack."""
        return len(self.stack)

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return int(self.model.cfg.n_heads)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's parameters."""
        return next(p.dtype for p in self.model.parameters() if p.dtype.is_floating_point)

    @property
    def tolerance(self) -> float:
        """Largest accepted relative error of a proof in the model's dtype."""
        return TOLERANCES.get(self.dtype, TOLERANCES[torch.float32])

    @property
    def encoder_decoder(self) -> bool:
        """Whether prompts are pairs."""
        return is_encoder_decoder(self.model, self.model_class)

    def where(self, layer: int) -> str:
        """Name of a block, for errors."""
        return self.stack.template.format(layer=layer)

    # ------------------------------------------------------------- passes

    def undisturbed(self, gradients: bool = False) -> contextlib.AbstractContextManager[None]:
        """Evaluation mode, eager attention, no gradients; everything as before afterwards."""
        return undisturbed(self.model, gradients)

    def clean_pass(
        self,
        batch: Batch,
        names: Sequence[str] = (),
        *,
        see_keys: bool = True,
        stop_after: int | None = None,
        optional: Sequence[str] = (),
        to_be_checked: bool = False,
    ) -> CleanPass:
        """One forward pass that records the blocks' calls and the named hook points.

        Args:
            batch: the prompts.
            names: hook points to keep, TransformerLens's names.
            see_keys: also keep, per layer, which keys got weight.
            stop_after: last block to run; the pass ends there. None: the stack's last block.
            optional: further hook points to keep, which need not fire.
            to_be_checked: whether proven parts will be held against this pass (`proof.holds_here`): the
                patterns of all queries are kept then where the user's hooks are on the model, since a hook
                may act on any one position. What is no hook treats all alike, and few will do.

        Raises:
            ValueError: a hook name that the model does not have, or a block output that is not finite.
            UnsupportedModelError: a hook that the model has but that never fired.
        """
        last = self.n_layers - 1 if stop_after is None else self.layer_index(stop_after)
        calls: dict[int, BlockCall] = {}
        recorded: dict[str, Tensor] = {}
        seen: dict[int, Tensor] = {}
        everywhere = to_be_checked and carries_users_hooks(self.model)
        sampled = SampledPatterns.at(batch.real_positions(self.stack.name), everywhere)
        fwd_hooks: list[HookPair] = [record(recorded, name) for name in (*names, *optional)]
        if see_keys:
            fwd_hooks += [
                (self.stack.hook_name("pattern", layer), see_keys_of(layer, seen, sampled))
                for layer in range(last + 1)
            ]
        with self.undisturbed(), self.hooked(fwd_hooks), contextlib.ExitStack() as handles:
            for handle in captured_calls(self.stack.blocks[: last + 1], calls):
                handles.callback(handle.remove)
            handles.callback(self.stack.blocks[last].register_forward_hook(_stop).remove)
            with contextlib.suppress(_Stop):
                self._forward(batch)
        clean = CleanPass(batch, calls, recorded, seen, sampled)
        self._require_complete(clean, names, last, see_keys)
        return clean

    def logits(
        self,
        clean: CleanPass,
        *,
        fwd_hooks: Sequence[HookPair] = (),
        start_at_layer: int = 0,
        resid_pre: Float[Tensor, "row pos d_model"] | None = None,
        rows: Int[Tensor, " row"] | None = None,
        gradients: bool = False,
        positions: Int[Tensor, " row"] | None = None,
    ) -> Float[Tensor, "row pos d_vocab"]:
        """The model's logits, with hooks, from the residual stream before a block on.

        The blocks below are not run: each gives back what it gave in the clean pass. This holds on every
        class alike, where TransformerLens's own `start_at_layer` is missing or wrong on several.

        Args:
            clean: the clean pass to start from.
            fwd_hooks: TransformerLens hooks for this pass, which see `[row, ...]` tensors.
            start_at_layer: first block to run.
            resid_pre: the residual stream to enter that block; the clean one by default.
            rows: which prompt of the clean batch each row is (repeats allowed); all, once, by default.
            gradients: build the graph.
            positions: unembed one position per row only, [row 1 d_vocab].

        Raises:
            UnsupportedModelError: the block does not give its own output when run again.
        """
        with unembedding_at(self.model, positions) as narrowed:
            out = self._from_block(clean, fwd_hooks, start_at_layer, resid_pre, rows, gradients)
        logits = out if torch.is_tensor(out) else out.logits
        return logits if positions is None or narrowed else row_at(logits, positions)

    def last_residual(
        self,
        clean: CleanPass,
        *,
        fwd_hooks: Sequence[HookPair] = (),
        start_at_layer: int = 0,
        rows: Int[Tensor, " row"] | None = None,
        gradients: bool = False,
    ) -> Float[Tensor, "row pos d_model"]:
        """What the stack's last block gives, before any final norm; else as `logits`. No head is run."""
        kept: list[Tensor] = []
        with contextlib.suppress(_Stop):
            self._from_block(clean, fwd_hooks, start_at_layer, None, rows, gradients, kept)
        return kept[0]

    def _from_block(
        self,
        clean: CleanPass,
        fwd_hooks: Sequence[HookPair],
        start_at_layer: int,
        resid_pre: Tensor | None,
        rows: Tensor | None,
        gradients: bool,
        kept: list[Tensor] | None = None,
    ) -> Any:
        """The model's output from a block on (see `logits`); with `kept`, it ends after the last block."""
        start = self.layer_index(start_at_layer)
        whole = rows is None
        rows = torch.arange(len(clean.batch), device=clean.batch.tokens.device) if rows is None else rows
        replay = self.replay(clean, start)
        with self.undisturbed():
            replay.prepare()
        entering = clean.calls[start].resid_pre.index_select(0, rows) if resid_pre is None else resid_pre
        with self.undisturbed(gradients), self.hooked(fwd_hooks), contextlib.ExitStack() as stack:
            for layer in range(start):
                output = clean.calls[layer].output
                output = output if whole else replay.expand(output, rows)
                stack.enter_context(_skipped(self.stack.blocks[layer], output))
            enter = self.stack.blocks[start].register_forward_pre_hook(enter_with(entering), with_kwargs=True)
            stack.callback(enter.remove)
            if kept is not None:
                end = self.stack.blocks[-1].register_forward_hook(_keep_and_stop(kept))
                stack.callback(end.remove)
            return self._forward(clean.batch if whole else clean.batch.select(rows), return_type="logits")

    def replay(self, clean: CleanPass, layer: int) -> BlockReplay:
        """Block `layer` of the clean pass, ready to run again in any number of copies."""
        if layer not in clean.replays:
            real = clean.batch.real_positions(self.stack.name)
            where, call = self.where(layer), clean.calls[layer]
            block = self.stack.blocks[layer]
            clean.replays[layer] = BlockReplay(block, call, real, self.n_heads, self.tolerance, where)
        return clean.replays[layer]

    @contextlib.contextmanager
    def hooked(self, fwd_hooks: Sequence[HookPair]) -> Iterator[None]:
        """The model with TransformerLens hooks on; unknown names are refused (Bridge 3.x ignores them)."""
        names = [name for name, _ in fwd_hooks if isinstance(name, str)]
        known = self.model.hook_dict if names else {}
        for name in names:
            if name not in known:
                raise ValueError(f"hook name: expected one of the model's hook points, got {name!r}")
        with self.model.hooks(fwd_hooks=list(fwd_hooks)):
            yield

    def layer_index(self, layer: int) -> int:
        """A layer number, negative from the end, checked."""
        if not -self.n_layers <= layer < self.n_layers:
            raise ValueError(f"layer: expected {-self.n_layers}..{self.n_layers - 1}, got {layer}")
        return layer % self.n_layers

    def final_norm(self) -> nn.Module | None:
        """The norm after the last block; None where there is none."""
        names = {
            "blocks": ("ln_final",),
            "encoder": ("encoder_final_ln", "encoder_ln_final"),
            "decoder": ("decoder_final_ln", "decoder_ln_final"),
        }[self.stack.name]
        for name in names:
            norm = getattr(self.model, name, None)
            # The masked-language heads of BERT-like models are mapped to `ln_final` too, but that norm sits
            # inside the head, after a dense layer: it is no norm of the residual stream.
            if isinstance(norm, nn.Module) and not hasattr(self.model, "mlm_head"):
                return norm
        return None

    def _forward(self, batch: Batch, **options: Any) -> Any:
        mask = batch.real.long()
        inputs = dict(batch.inputs)
        if self.model_class is ModelClass.HOOKED_TRANSFORMER:
            self._refuse_inputs(inputs, ())
            return self.model(batch.tokens, attention_mask=mask, **options)
        if self.model_class is ModelClass.HOOKED_ENCODER:
            self._refuse_inputs(inputs, ("token_type_ids",))
            return self.model(batch.tokens, one_zero_attention_mask=mask, **inputs, **options)
        if self.model_class is ModelClass.HOOKED_ENCODER_DECODER:
            self._refuse_inputs(inputs, ())
            # In the model's dtype: it is multiplied by that dtype's lowest number, and 0 * -inf is NaN.
            return self.model(
                batch.tokens, batch.target, one_zero_attention_mask=mask.to(self.dtype), **options
            )
        self._refuse_inputs(inputs, self._bridge_inputs())
        if batch.target is not None:
            inputs["decoder_input_ids"] = batch.target
        # use_cache=False: a block that is run again must not find the keys of its first run.
        return self.model(batch.tokens, attention_mask=mask, use_cache=False, **inputs, **options)

    def _bridge_inputs(self) -> list[str]:
        """What the wrapped model's forward pass takes by name; more would be swallowed without a word."""
        parameters = inspect.signature(type(self.model.original_model).forward).parameters.values()
        taken = {"input_ids", "attention_mask", "use_cache", "decoder_input_ids", "self"}
        return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in taken]

    def _refuse_inputs(self, inputs: dict[str, Tensor], allowed: Sequence[str]) -> None:
        unknown = sorted(set(inputs) - set(allowed))
        if unknown:
            raise ValueError(
                f"model inputs: {self.model_class.value} takes {sorted(allowed)} besides tokens, "
                f"got {unknown}"
            )

    def _require_complete(self, clean: CleanPass, names: Sequence[str], last: int, see_keys: bool) -> None:
        missing = [layer for layer in range(last + 1) if layer not in clean.calls]
        if missing:
            raise UnsupportedModelError(
                f"blocks {missing} of {self.stack.name!r} never ran in a forward pass"
            )
        silent = [name for name in names if name not in clean.recorded]
        if see_keys:
            silent += [
                self.stack.hook_name("pattern", layer) for layer in range(last + 1) if layer not in clean.seen
            ]
        if silent:
            raise UnsupportedModelError(
                f"hooks that never fired: {silent}; expected each to fire once in a forward pass "
                "(an attention kernel that keeps no pattern, or a module the model does not call)"
            )
        real = clean.batch.real_positions(self.stack.name)
        for layer, call in clean.calls.items():
            if not bool(torch.isfinite(call.resid_post[real]).all()):
                raise ValueError(
                    f"{self.where(layer)}: expected finite outputs, got NaN or infinity{self._bad_weight()}"
                )

    def _bad_weight(self) -> str:
        for name, parameter in self.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                return f"; the weight {name!r} holds NaN or infinity"
        return "; all weights are finite, so the activations overflow (dtype?)"

    # ------------------------------------------------------------- what a chunk costs

    def copies_within(
        self, max_memory: int | None, positions: int, *, blocks: int = 1, logits: int = 0
    ) -> int:
        """How many copies of one prompt a block may run at once.

        Args:
            max_memory: bytes for the temporaries of one step; None leaves only the bound that keeps a
                processor's caches useful.
            positions: the length of the prompt.
            blocks: how many blocks' temporaries live at once (those a gradient goes back through).
            logits: how many positions' logits do.

        Raises:
            ValueError: not even one copy fits.
        """
        cfg = self.model.cfg
        size = torch.finfo(self.dtype).bits // 8
        d_mlp = int(getattr(cfg, "d_mlp", None) or 4 * cfg.d_model)
        experts = int(getattr(cfg, "experts_per_token", None) or 1)
        per_position = 12 * cfg.d_model + 6 * self.n_heads * cfg.d_head + 4 * d_mlp * experts
        # Scores, masked scores, their float32 softmax and the pattern live at the same time.
        attention = self.n_heads * positions**2 * (3 * size + 8)
        through_one = positions * per_position * size + attention
        bytes_per_copy = blocks * through_one
        bytes_per_copy += 3 * logits * int(getattr(cfg, "d_vocab", 0) or 0) * size
        rows = 2048 if self.device.type == "cpu" else 65536
        copies = max(1, rows // positions)
        if max_memory is None:
            return copies
        # A replay is first proven on three copies: measured, up to 1.8 times the estimate of one.
        least = max(bytes_per_copy, 2 * through_one)
        if max_memory < least:
            raise ValueError(
                f"max_memory: expected at least {least} bytes "
                f"({positions} positions through {blocks} block(s)), got {max_memory}"
            )
        return min(copies, math.floor(max_memory / bytes_per_copy))

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter lives."""
        return next(iter(self.model.parameters())).device


def _stop(module: nn.Module, args: Any, output: Any) -> None:
    raise _Stop


def _keep_and_stop(kept: list[Tensor]) -> Callable[..., None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept.append(first_tensor(output))
        raise _Stop

    return keep


@contextlib.contextmanager
def _skipped(block: nn.Module, output: Any) -> Iterator[None]:
    """The block gives back a recorded output instead of running."""
    own = block.__dict__.get("forward")  # a forward that somebody else put on this block
    try:
        block.__dict__["forward"] = lambda *args, **kwargs: output
        yield
    finally:
        if own is None:
            block.__dict__.pop("forward", None)
        else:
            block.__dict__["forward"] = own
