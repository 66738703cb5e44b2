"""From a block to the number that is explained: passes from it on, and the target on each prompt's part."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.method import Method
from lens_mix.targets import Context, Target, TargetFunction, TargetLike, as_target, describe, predicted

if TYPE_CHECKING:
    from lens_mix.lens.batches import Batch
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class TargetMethod(Method):
    """Base of the methods that explain a target."""

    engines: ClassVar[tuple[str, ...]] = ("hooks",)

    target: TargetLike = dataclasses.field(default_factory=predicted)

    def __post_init__(self) -> None:
        super().__post_init__()
        as_target(self.target)

    def parameters(self) -> dict[str, object]:
        return {**super().parameters(), "target": describe(as_target(self.target))}

    def takes_rows(self, engine: str) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class BoundTarget:
    """A target bound to every prompt of a batch.

    Attributes:
        target: the target.
        functions: per prompt, output [copy ...] -> [copy].
        clean: per prompt, the value in the clean pass.
        positions: per prompt, the only position of the batch's logits that it reads; None: it reads several.
    """

    target: Target
    functions: tuple[TargetFunction, ...]
    clean: Float[Tensor, " batch"]
    positions: Int[Tensor, " batch"] | None = None

    @property
    def reads_logits(self) -> bool:
        """Whether it needs the model's logits (else the last residual)."""
        return self.target.reads == "logits"

    @property
    def is_probability(self) -> bool:
        """Whether it is known to lie in 0..1."""
        return getattr(self.target, "of", None) == "probability"


@torch.no_grad()
def bind(block: Block, target: TargetLike) -> BoundTarget:
    """Bind a target to the prompts of a clean pass, running the model from `block` on (any block will do).

    Raises TypeError, ValueError: the target does not fit a prompt; RuntimeError: inference mode is on.
    """
    read, functions, clean, places = as_target(target), [], [], []
    for _, start, context in contexts(block, read):
        functions.append(read.of_prompt(context))
        clean.append(evaluate(functions[-1], context.output))
        place = read.reads_position(context)
        places += [] if place is None else [place + start]
    device = context.output.device
    positions = (
        torch.tensor(places, device=device, dtype=torch.long) if len(places) == len(functions) else None
    )
    return BoundTarget(read, tuple(functions), torch.cat(clean), positions)


def contexts(block: Block, target: Target) -> Iterator[tuple[int, int, Context]]:
    """Each prompt, its first position, and what a target may know of it, with the output of the clean pass.

    To be called without gradients. The position that the target reads goes into the prompt's record.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "attribution needs gradients: expected to be outside torch.inference_mode, got it switched on "
            "(torch.no_grad is fine)"
        )
    of_logits, batch = target.reads == "logits", block.batch
    tokens, given = (block.logits_tokens, {}) if of_logits else (block.tokens, batch.inputs)
    # Further inputs belong to the source of an encoder-decoder, whichever stack is mapped.
    has_source = not of_logits and batch.target is not None and block.tokens is block.logits_tokens
    output = output_of(block, target)
    for prompt, span, part in parts(block, target, output, range(len(output))):
        own = batch.real[prompt] if has_source else span
        inputs = {name: value[prompt, own] for name, value in given.items()}
        source = batch.tokens[prompt, own] if has_source else None
        as_target = of_logits and batch.target is not None
        context = Context(
            tokens[prompt, span], part, block.tokenizer, inputs, source=source, as_target=as_target
        )
        block.set_default_row(prompt, target.default_row(context))
        yield prompt, span.start, context


def values(
    block: Block, bound: BoundTarget, fwd_hooks: Sequence[Any], rows: Int[Tensor, " row"], gradients: bool
) -> Float[Tensor, " row"]:
    """The target for rows of the batch when run from `block` on with TransformerLens hooks.

    `rows` tells which prompt each row is (the rows of one prompt have to stand together); the hooks see
    `[row, ...]` tensors. `gradients`: build the graph.
    """
    positions = None if bound.positions is None else bound.positions[rows.to(bound.positions.device)]
    with torch.set_grad_enabled(gradients):
        output = output_of(
            block, bound.target, fwd_hooks, positions=positions, rows=rows, gradients=gradients
        )
        by_prompt = parts(block, bound.target, output, rows.tolist())
        return torch.cat([evaluate(bound.functions[prompt], part) for prompt, _, part in by_prompt])


def gradients_of(values: Float[Tensor, " row"], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The derivative of each row's target by that row of every leaf. Raises ValueError: there is none."""
    gradients: Sequence[Tensor | None] = [None]
    if values.requires_grad:
        gradients = torch.autograd.grad(values, list(leaves), torch.ones_like(values), allow_unused=True)
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < len(leaves):
        raise ValueError(
            "target: expected a differentiable function of the output, got values without a gradient "
            "(a detach, an argmax or a no_grad inside?)"
        )
    return present


def evaluate(
    function: Callable[..., Tensor], output: Float[Tensor, " copy *axes"], *tokens: Int[Tensor, "copy pos"]
) -> Float[Tensor, " copy"]:
    """Return the target's value per copy; `tokens`: those of the copies, if the target reads them.

    Raises TypeError, ValueError: not a tensor [copy] of finite numbers.
    """
    values = function(output, *tokens)
    if not torch.is_tensor(values) or not values.is_floating_point():
        got = f"a tensor of {values.dtype}" if torch.is_tensor(values) else type(values).__name__
        raise TypeError(f"target: expected a tensor [copy] of real numbers, got {got}")
    if tuple(values.shape) != (len(output),):
        expected = f"expected one number per copy, shape ({len(output)},)"
        raise ValueError(f"target: {expected}, got {tuple(values.shape)}")
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"target: expected finite values, got NaN or infinity{_why_not_finite(output)}")
    return values


def _why_not_finite(output: Tensor) -> str:
    if not bool(output.isnan().any()):
        return ""
    reason = ": the output of the model, which it reads, has NaN"
    if output.dtype == torch.float64:
        reason += "; in float64 some models (MPT) give NaN if a position sees only masked ones: use float32"
    return reason


def tokens_read(target: Target, batch: Batch | None, copies: slice, span: slice) -> tuple[Tensor, ...]:
    """Return the tokens of altered copies for `evaluate`; nothing if the target does not read them."""
    return (batch.tokens[copies, span],) if batch is not None and target.reads_tokens else ()


def output_of(
    block: Block,
    target: Target,
    fwd_hooks: Sequence[Any] = (),
    *,
    positions: Int[Tensor, " row"] | None = None,
    **options: Any,
) -> Tensor:
    """What the target reads; `positions` of the logits, one per row, and `options` as of `Block.logits`."""
    if target.reads == "logits":
        logits = block.logits(fwd_hooks, positions=positions, **options)
        # The row that is read stands at every position, as a view: targets index as in the whole.
        return logits if positions is None else logits.expand(-1, block.logits_real.shape[1], -1)
    after = getattr(target, "after_final_norm", False)
    return block.last_residual(fwd_hooks, after_final_norm=after, **options)


def parts(
    block: Block, target: Target, output: Tensor, rows: Sequence[int]
) -> Iterator[tuple[int, slice, Tensor]]:
    """Each prompt, the span of its own positions (they stand together), and its rows there, as views."""
    real = block.logits_real if target.reads == "logits" else block.real
    start = 0
    for prompt, copies in itertools.groupby(rows):
        stop = start + len(list(copies))
        places = real[prompt].nonzero()[:, 0]
        span = slice(int(places[0]), int(places[-1]) + 1)
        yield prompt, span, output[start:stop, span] if output.ndim == 3 else output[start:stop]
        start = stop
