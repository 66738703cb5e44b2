"""Compute gradient times input under changed rules of the backward pass, which several papers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._blocks.cost import Growth
from lens_mix._model.anatomy import BlockAnatomy
from lens_mix._passes.backward_rules import Activations, AttentionRule, BackwardRules
from lens_mix._passes.changed_backward import changed_backward
from lens_mix.arguments import check_choice, check_items, check_whole_number
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair
from lens_mix.method import Method
from lens_mix.methods.bound_target import BoundRows, RowTargetMethod, bind_rows, gradients_of
from lens_mix.methods.row_gradients import Streams, score_rows
from lens_mix.targets import TargetLike, predicted

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block

# If the gap is a larger share than this of the sum's absolute terms, a note says that conservation fails.
_CONSERVATION_TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class ChangedGradients(RowTargetMethod):
    """Provide g · x of a target, where the backward pass of the gradient g follows the method's hooks.

    Base class. Its fields are described by `Gim`.
    """

    parts: ClassVar[frozenset[str]] = Method.parts | {"joint"}
    needs: ClassVar[frozenset[str]] = frozenset({"gradients"})
    cost_grows_with: ClassVar[Growth] = "rows"

    target: TargetLike = dataclasses.field(default_factory=lambda: predicted(of="logit"))
    readout: Literal["signed_sum", "absolute"] = "signed_sum"
    after_blocks: int | Sequence[int] = 0
    activations: Activations = "gradient"
    internal_batch_size: int | None = None

    def interventions(self, layer: int, *, attention: str = DEFAULT_ATTENTION) -> list[HookPair]:
        """Return the hooks that change the gradient at one layer's attention (`lens_mix.hooks.gradient`)."""
        raise NotImplementedError(f"{type(self).__name__} does not define interventions")

    @property
    def attention_rule(self) -> AttentionRule:
        """The rule of attention, which the hooks of `interventions` apply."""
        raise NotImplementedError(f"{type(self).__name__} does not define attention_rule")

    @property
    def conserves(self) -> bool:
        """Return whether the rules distribute all of the target, so that conservation can be checked."""
        return False

    @property
    def gate_up(self) -> float:
        """Return the factor of the gradients of gate and up: half with the ratio rule, which conserves."""
        return 0.5 if self.activations == "ratio" else 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("readout", self.readout, ("signed_sum", "absolute"))
        check_choice("activations", self.activations, ("gradient", "ratio"))
        if not self._list_streams():
            raise ValueError("after_blocks: expected at least one number of blocks, got none")
        if self.internal_batch_size is not None:
            check_whole_number("internal_batch_size", self.internal_batch_size, 1)

    @override
    def check(self, n_heads: int, n_layers: int, layers: Sequence[int]) -> None:
        for number in self._list_streams():
            check_whole_number("after_blocks", number, 0, n_layers - 1)

    @override
    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        if self.activations == "gradient" or anatomy.is_written_down:
            return None
        kind = anatomy.feed_forward_kind
        return f"activations='ratio' needs a feed-forward that is written down, got {kind!r}"

    @override
    def clean_rules(self, anatomies: Sequence[BlockAnatomy]) -> BackwardRules | None:
        # The shares of constants are gradients of copies of the prompt, which the clean pass does not have.
        if self.conserves:
            return None
        # Methods that differ in other fields have the same rules, and share the autograd graph.
        return dataclasses.replace(
            self, target=predicted(), readout="signed_sum", after_blocks=0, internal_batch_size=None
        )

    @override
    def of_blocks(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        if blocks[0].stack.is_joint and self._list_streams() != [0]:
            raise ValueError(
                "after_blocks: expected 0 with part='joint', because the encoder and the decoder have "
                f"separate residual streams, got {self.after_blocks!r}"
            )
        bound = bind_rows(blocks, self.target)
        rules = self.clean_rules([block.anatomy for block in blocks])
        if rules is not None and blocks[0].clean.graph is not None:
            size = self.internal_batch_size
            scores = score_rows(bound, rules, self._list_streams(), self._score_streams, size)
            return [bound.scatter(scores, blocks[-1])]
        chunks = [
            self._compute_scores(blocks, bound, rows) for rows in bound.chunks(self.internal_batch_size)
        ]
        scores, sums, constants = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        if self.conserves:
            self._report_conservation(bound, sums, constants, blocks[-1])
        return [bound.scatter(scores, blocks[-1])]

    def _list_streams(self) -> list[int]:
        """Return after how many blocks relevance is read. 0 means at the embeddings."""
        given: Any = self.after_blocks
        if isinstance(given, Sequence):
            return [
                check_whole_number("after_blocks", number, 0)
                for number in check_items("after_blocks", given, "")
            ]
        return list(range(check_whole_number("after_blocks", given, 0) + 1))

    def _score_streams(self, streams: Streams) -> Float[Tensor, "row pos"]:
        """Return the scores of some rows from the streams, and the gradients with respect to them."""
        wide = torch.promote_types(streams[0][0].dtype, torch.float32)
        return self._read_out([state.to(wide) * gradient.to(wide) for state, gradient in streams])

    def _compute_scores(
        self, blocks: Sequence[Block], bound: BoundRows, rows: Tensor
    ) -> tuple[Float[Tensor, "row key"], Float[Tensor, " row"], Float[Tensor, " row"]]:
        """Return some rows' scores, sums of g · x at the embeddings, and shares of the constants."""
        x = bound.block.inputs[bound.prompt_index[rows]].detach().requires_grad_(True)
        wide = torch.promote_types(x.dtype, torch.float32)
        ones = torch.ones(len(rows), dtype=wide, device=x.device, requires_grad=True)
        numbers = self._list_streams()
        after = [number for number in numbers if number]
        constants = ones if self.conserves else None
        source = blocks[0].verification.source
        changed = changed_backward(
            blocks[0].clean.lens,
            [block.anatomy for block in blocks],
            self,
            below=None if source is None else list(source.anatomy.values()),
            after=after,
            constants=constants,
            logits=bound.reads_logits,
        )
        with torch.enable_grad(), changed as streams:
            # Adding 0 times the ones gives them a gradient even if nothing in the model is constant.
            values = bound.values(rows, resid_pre=x, gradients=True) + 0 * ones
            states = [x, *(streams[number] for number in after)]
            *gradients, constant_shares = gradients_of(values, [*states, ones])
        products = [g.to(wide) * state.detach().to(wide) for g, state in zip(gradients, states, strict=True)]
        scores = self._read_out(products if 0 in numbers else products[1:])
        return scores, products[0].sum((-2, -1)), constant_shares

    def _read_out(self, products: Sequence[Float[Tensor, "row pos d_model"]]) -> Float[Tensor, "row pos"]:
        """Return Σ_d of each product or its absolute values. For several streams, average the scaled rows."""
        signed = self.readout == "signed_sum"
        axes = "row pos d_model -> row pos"
        scores = torch.stack([reduce(p if signed else p.abs(), axes, "sum") for p in products])
        if len(scores) == 1:
            return scores[0]
        sizes = scores.abs().sum(-1, keepdim=True)
        # The streams have different sizes, so the largest one would decide a plain mean.
        return (scores / torch.where(sizes > 0, sizes, 1)).mean(dim=0)

    @staticmethod
    def _report_conservation(bound: BoundRows, sums: Tensor, constants: Tensor, last: Block) -> None:
        """Record each row's conservation gap and share of the constants, with a note on large gaps."""
        gaps = sums + constants - bound.clean.to(sums.dtype)
        sizes = sums.abs() + constants.abs()
        for prompt in range(len(last.batch)):
            of_prompt = bound.prompt_index == prompt
            last.detail(prompt, "conservation_gap", gaps[of_prompt].tolist())
            last.detail(prompt, "constant_share", constants[of_prompt].tolist())
            large = (gaps.abs() > _CONSERVATION_TOLERANCE * sizes)[of_prompt]
            if bool(large.any()):
                worst = float(gaps[of_prompt].abs().max())
                last.warn(
                    prompt,
                    f"conservation fails in {int(large.sum())} of {len(large)} rows, by {worst:.2g} at most: "
                    "the target is not linear in the last residual stream after a frozen norm (a "
                    "probability, a soft cap, a layer in the classifier), or the precision is low",
                )
