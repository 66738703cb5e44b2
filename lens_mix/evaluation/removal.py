"""Ways to take tokens out of a prompt: another token, the attention mask, values zeroed in every layer."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.arguments import several, whole_number
from lens_mix.evaluation.intervention_passes import InterventionPasses
from lens_mix.hooks import HookPair, must_fire, watch_pattern, zero_values
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.prompts import vocabulary
from lens_mix.targets import Context


@dataclasses.dataclass(frozen=True)
class Removal(abc.ABC):
    """How a position of the mapped stack is taken out."""

    # Whether the position that the target reads can't be taken out.
    keeps_target: ClassVar[bool] = False

    @abc.abstractmethod
    def values(self, passes: InterventionPasses, removed: Bool[Tensor, "copy pos"]) -> Float[Tensor, " copy"]:
        """The target when in each copy of the prompt the positions marked are taken out, all at once."""


class _OtherTokens(Removal):
    """A position that is taken out holds another token; the mean over several fillings."""

    def values(self, passes: InterventionPasses, removed: Bool[Tensor, "copy pos"]) -> Float[Tensor, " copy"]:
        return torch.stack([_filled(passes, removed, fill) for fill in self._fills(passes)]).mean(0)

    @abc.abstractmethod
    def _fills(self, passes: InterventionPasses) -> Int[Tensor, "fill pos"]:
        """What each position holds when it is taken out."""


@dataclasses.dataclass(frozen=True)
class ReplaceTokens(_OtherTokens):
    """Every position that is taken out holds another token; the mean over the tokens given.

    The prompt stays a prompt that the model can read, but says something else: what is measured is the
    difference to these tokens, and a token that fits as well is "unimportant".

    Attributes:
        tokens: a token (its text, leading space included, or its number) or several; each takes all places,
            and the target is averaged over them.
    """

    tokens: str | int | Sequence[str | int]

    def __post_init__(self) -> None:
        listed = several("tokens", self.tokens, "tokens", 1, alone=True)
        checked = [one if isinstance(one, str) else whole_number("tokens", one, 0) for one in listed]
        object.__setattr__(self, "tokens", tuple(checked))

    def _fills(self, passes: InterventionPasses) -> Int[Tensor, "fill pos"]:
        # Only the width is read.
        logits = torch.empty(1, 1, _vocabulary(passes), dtype=torch.float32, device="meta")
        as_target = passes.checked.session.lens.stack.reads_target
        tokenizer = passes.first_block.tokenizer
        context = Context(passes.checked.token_ids(0), logits, tokenizer, as_target=as_target)
        listed = several("tokens", self.tokens, "tokens")
        tokens = torch.tensor(
            [context.token_id(token, "tokens") for token in listed], dtype=torch.long, device="cpu"
        )
        return tokens[:, None].expand(-1, passes.length)


@dataclasses.dataclass(frozen=True)
class SampleTokens(_OtherTokens):
    """Every position that is taken out holds a token drawn at random, the same one whenever it is taken out.

    Attributes:
        among: the token numbers to draw from, alike; None: the vocabulary but for special tokens. A
            position's own token is never drawn, where there is another.
        samples: how many draws the target is averaged over.
        seed: of the draws.
    """

    among: Sequence[int] | None = None
    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("samples", self.samples, 1)
        whole_number("seed", self.seed, 0)
        if self.among is not None:
            listed = several("among", self.among, "token numbers", 1)
            object.__setattr__(self, "among", tuple(whole_number("among", one, 0) for one in listed))

    def _fills(self, passes: InterventionPasses) -> Int[Tensor, "fill pos"]:
        tokens, size = passes.checked.token_ids(0).cpu(), _vocabulary(passes)
        if self.among is None:
            special = getattr(passes.first_block.tokenizer, "all_special_ids", [])
            pool = torch.arange(size, device="cpu")
            pool = pool[~torch.isin(pool, torch.tensor(special, dtype=torch.long, device="cpu"))]
        else:
            pool = torch.tensor(
                [whole_number("among", token, 0, size - 1) for token in self.among],
                dtype=torch.long,
                device="cpu",
            ).unique()
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(len(pool), (self.samples, len(tokens)), generator=generator, device="cpu")
        # In place of a position's own token the next one of the pool.
        return pool[(drawn + (pool[drawn] == tokens).long()) % len(pool)]


@dataclasses.dataclass(frozen=True)
class Drop(Removal):
    """No position attends to those that are taken out: the attention mask hides them, as it hides padding.

    TransformerLens counts the positions of most models along the mask, so that the rest closes up, as if the
    tokens had been cut out; where a model has no such count (HookedEncoder), every token keeps its place. The
    position that the target reads would keep its residual stream, and is never taken out.
    """

    keeps_target: ClassVar[bool] = True

    def values(self, passes: InterventionPasses, removed: Bool[Tensor, "copy pos"]) -> Float[Tensor, " copy"]:
        lens = passes.checked.session.lens
        if lens.stack.name == "decoder":
            raise UnsupportedModelError(
                "Drop: the decoder's side of an encoder-decoder takes no mask; use ReplaceTokens, "
                "SampleTokens or ZeroValues"
            )
        values = []
        for chunk in removed.split(_at_once(passes, removed)):
            batch = passes.batch(len(chunk))
            hidden = _padded(chunk, batch.real)
            stays = batch.real & ~hidden
            leaks: list[float] = []
            note = functools.partial(_note_leak, hidden=hidden, stays=stays, leaks=leaks)
            hooks = [
                watch_pattern(layer, note, attention=lens.stack.attention_template)
                for layer in range(lens.n_layers)
            ]
            # A model that ignores its mask would give a curve as if nothing had been taken out.
            values.append(passes.values(len(chunk), hooks, batch=dataclasses.replace(batch, real=stays)))
            if len(leaks) < lens.n_layers or max(leaks) > 0:
                raise UnsupportedModelError(
                    "Drop: expected the attention mask to hide what is taken out, got attention to it "
                    f"(weight {max(leaks, default=0.0):.1e}); use ReplaceTokens, SampleTokens or ZeroValues"
                )
        return torch.cat(values)


@dataclasses.dataclass(frozen=True)
class ZeroValues(Removal):
    """The value vectors of the positions that are taken out are zero in every layer of the stack.

    They are still attended to, but pass on nothing; their own residual stream goes on. Patterns are not
    frozen: above the first layer they change with what the queries and keys have lost.
    """

    def values(self, passes: InterventionPasses, removed: Bool[Tensor, "copy pos"]) -> Float[Tensor, " copy"]:
        lens = passes.checked.session.lens
        values = []
        for chunk in removed.split(passes.at_once):
            zeroed = _padded(chunk, passes.checked.clean.real)
            pairs: list[HookPair] = [
                zero_values(layer, zeroed, attention=lens.stack.attention_template)
                for layer in range(lens.n_layers)
            ]
            with must_fire(*pairs) as hooks:
                values.append(passes.values(len(zeroed), hooks))
        return torch.cat(values)


_NAMED: dict[str, type[Removal]] = {"drop": Drop, "sample": SampleTokens, "zero_values": ZeroValues}


def as_removal(removal: Any) -> Removal:
    """A removal as it is, or one of `_NAMED` with its defaults; TypeError, ValueError if neither."""
    if isinstance(removal, str) and removal in _NAMED:
        return _NAMED[removal]()
    if isinstance(removal, Removal):
        return removal
    expected = f"removal: expected one of {sorted(_NAMED)} or a Removal (ReplaceTokens(' the'), say)"
    error = ValueError if isinstance(removal, str) else TypeError
    raise error(f"{expected}, got {removal!r}")


def _at_once(passes: InterventionPasses, dropped: Bool[Tensor, "copy pos"]) -> int:
    """Return how many copies run together: one, if a model's angles depend on how many tokens are left."""
    left = (~dropped).sum(-1)
    differ = passes.first_block.angles_differ(int(left.min()), int(left.max()))
    return 1 if differ else passes.at_once


def _note_leak(
    pattern: Float[Tensor, "copy head query key"],
    hidden: Bool[Tensor, "copy key"],
    stays: Bool[Tensor, "copy query"],
    leaks: list[float],
) -> None:
    """The largest weight of what stays on what is hidden."""
    leaking = stays[:, :, None] & hidden[:, None, :]
    leaks.append(float(pattern.abs().amax(1).masked_fill(~leaking, 0).max()))


def _filled(
    passes: InterventionPasses, removed: Bool[Tensor, "copy pos"], fill: Int[Tensor, " pos"]
) -> Float[Tensor, " copy"]:
    """The target with other tokens in the places that are taken out."""
    values = []
    for chunk in removed.split(passes.at_once):
        tokens = passes.first_block.tokens.repeat(len(chunk), 1)
        prompt = tokens[:, : passes.length]
        prompt[:] = torch.where(chunk.to(prompt.device), fill.to(prompt.device), prompt)
        values.append(passes.values(len(chunk), batch=passes.batch(len(chunk), tokens)))
    return torch.cat(values)


def _padded(
    removed: Bool[Tensor, "copy pos"], real: Bool[Tensor, "#copy padded"]
) -> Bool[Tensor, "copy padded"]:
    """Marks over the prompt's positions, as marks over those of the batch."""
    beyond = real.shape[1] - removed.shape[1]
    return torch.nn.functional.pad(removed, (0, beyond)).to(real.device)


def _vocabulary(passes: InterventionPasses) -> int:
    lens = passes.checked.session.lens
    return vocabulary(lens.model, "target" if lens.stack.name == "decoder" else "prompt")
