"""One block of one clean pass, as a method sees it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lens_mix.hooks import HookPair, record
from lens_mix.hooks.record import ATTENTION_ROLES, RESID_PRE
from lens_mix.lens.anatomy import BlockAnatomy, Norm, read_norm
from lens_mix.lens.autograd_graph import AutogradGraph
from lens_mix.lens.batches import Batch, Prompt, pad
from lens_mix.lens.changed_backward import BackwardRules, Rules, changed_backward
from lens_mix.lens.clean_pass import CleanPass, clean_pass
from lens_mix.lens.components import FINAL_NORM, measure_end
from lens_mix.lens.continuation import last_residual_from, logits_from, unembedding_from
from lens_mix.lens.copies import copies_within
from lens_mix.lens.effort import Effort
from lens_mix.lens.hidden_keys import takes_masks
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.prompts import pad_token, vocabulary
from lens_mix.lens.recorded import RecordedEnd
from lens_mix.lens.rows import rows_at
from lens_mix.lens.unembedding import Unembedding
from lens_mix.lens.users_hooks import carries_users_hooks
from lens_mix.lens.verification_record import Verification

T = TypeVar("T")


class Block:
    """What a method may ask for: recorded tensors, the anatomy, a replay. Never the model.

    Args:
        clean: the clean pass.
        layer: which block.
        verification: what this block and those above were found to be.
        engine: how the method is to be computed.
        max_memory: bytes for the temporaries of one step; None: no bound.
        queries: positions of the asked rows; None: all. A prompt with fewer than another repeats its last.
        effort: the warnings and bars of the run; None: there are none.

    Attributes:
        layer, engine, max_memory: as given.
        anatomy: what the block is made of.
        n_heads: number of query heads.
        n_layers: number of the stack's blocks.
        attention_template: the attention module's name template, for `lens_mix.hooks` (`attention=`).
        is_last: whether this is the stack's last block.
        is_cross: whether its attention is the cross-attention: keys are the encoder's outputs.
        is_joint: whether the map is of source and target, down through both stacks.
        batch: the prompts, padded.
        tokens: the tokens that the mapped stack reads.
        real: which positions are the prompts' own; the rest is padding.
        real_keys: which keys are the prompts' own: positions, but for cross-attention those of the source.
        input_tokens, real_inputs: the tokens that stand at `inputs`, and which of these positions are the
            prompts' own.
        queries: the positions of the rows that are asked for, in the padded batch.
        every_query: whether the rows are those of all positions, in order.
        logits_tokens: the tokens that the logits stand over.
        logits_real: which positions of the logits are the prompts' own: the decoder's, where there is one.
        tokenizer: the model's tokenizer; None where it has none.
        details, warnings, default_rows: per prompt, what `detail`, `warn` and `set_default_row` have recorded.
    """

    def __init__(
        self,
        clean: CleanPass,
        layer: int,
        verification: Verification,
        engine: str,
        max_memory: int | None,
        queries: Int[Tensor, "batch query"] | None = None,
        effort: Effort | None = None,
    ) -> None:
        self._effort = effort or Effort()
        self._lens, self._clean, self._queries, self._verification = clean.lens, clean, queries, verification
        self.layer, self.engine, self.max_memory = layer, engine, max_memory
        self.anatomy: BlockAnatomy = verification.anatomy[layer]
        lens, stack, batch = clean.lens, clean.lens.stack, clean.batch
        self.n_heads: int = lens.n_heads
        self.n_layers: int = lens.n_layers
        self.attention_template: str = stack.attention_template
        self.is_last: bool = layer == lens.n_layers - 1
        self.is_cross: bool = stack.is_cross
        self.is_joint: bool = stack.source is not None
        self.batch: Batch = batch
        self.real: Bool[Tensor, "batch pos"] = clean.real
        self.real_keys: Bool[Tensor, "batch key"] = clean.real_keys
        self.logits_tokens: Int[Tensor, "batch pos"] = batch.tokens if batch.target is None else batch.target
        self.tokens: Int[Tensor, "batch pos"] = self.logits_tokens if stack.reads_target else batch.tokens
        self.logits_real: Bool[Tensor, "batch pos"] = (
            batch.real if batch.target_real is None else batch.target_real
        )
        both = torch.cat([batch.tokens, self.tokens], 1) if self.is_joint else self.tokens
        self.input_tokens: Int[Tensor, "batch input"] = both
        self.real_inputs: Bool[Tensor, "batch input"] = clean.real_inputs
        every = torch.arange(self.real.shape[1], device=self.real.device).expand(self.real.shape)
        self.queries: Int[Tensor, "batch query"] = every if queries is None else queries
        self.every_query: bool = queries is None
        self.tokenizer: Any = getattr(lens.model, "tokenizer", None)
        self.details: list[dict[str, Any]] = [{} for _ in batch.prompts]
        self.warnings: list[list[str]] = [[] for _ in batch.prompts]
        self.default_rows: list[int | None] = [None for _ in batch.prompts]

    def detail(self, index: int, name: str, value: Any) -> None:
        """Put a detail of one prompt's layer map into its record (`provenance["details"][name]`)."""
        self.details[index][name] = value

    def warn(self, index: int, text: str) -> None:
        """Put a warning about one prompt's layer map into its record (`notes`)."""
        self.warnings[index].append(f"layer {self.layer}: {text}")

    def set_default_row(self, index: int, position: int | None) -> None:
        """Tell which position of one prompt, counted without padding, a target reads: the map's default row.

        It has none where the target reads no single position (None), or where the logits stand over other
        tokens than the rows (an encoder's map of an encoder-decoder).
        """
        self.default_rows[index] = position if self.logits_tokens is self.tokens else None

    def logits(self, fwd_hooks: Sequence[HookPair] = (), **options: Any) -> Float[Tensor, "row *pos d_vocab"]:
        """The model's logits when run from this block on; `options` of `logits_from`, `run_from`."""
        return logits_from(self._clean, self.layer, fwd_hooks, **options)

    def last_residual(
        self, fwd_hooks: Sequence[HookPair] = (), *, after_final_norm: bool = False, **options: Any
    ) -> Float[Tensor, "row pos d_model"]:
        """The residual stream after the last block when run from this one on, or after the final norm.

        `options` as in `run_from`.
        """
        resid = last_residual_from(self._clean, self.layer, fwd_hooks, **options)
        return self.after_final_norm(resid, options.get("gradients", False)) if after_final_norm else resid

    @property
    def inputs(self) -> Float[Tensor, "batch input d_model"]:
        """What enters the model below a whole map: `whole_resid_pre` of the first block; of the joint part
        what enters the encoder's first block, then what enters the decoder's."""
        return self._clean.inputs

    def altered_batch(
        self,
        rows: Int[Tensor, " row"],
        *,
        tokens: Int[Tensor, "row pos"] | None = None,
        masked: Bool[Tensor, "row pos"] | None = None,
    ) -> Batch:
        """Copies of the prompts with other tokens, or with tokens that nothing may attend to.

        Args:
            rows: which prompt each copy is of.
            tokens: the tokens that the mapped stack reads; of the joint part `input_tokens`.
            masked: which of them no query of the mapped stack sees, besides padding; all tokens keep their
                positions of the clean pass, however the model counts these.
        """
        batch, decoder = self.batch.select(rows), self._lens.stack.reads_target
        if tokens is not None and self.is_joint:
            source, target = tokens.split([batch.tokens.shape[1], self.tokens.shape[1]], dim=1)
            batch = dataclasses.replace(batch, tokens=source, target=target)
        elif tokens is not None and decoder:
            batch = dataclasses.replace(batch, target=tokens)
        elif tokens is not None:
            batch = dataclasses.replace(batch, tokens=tokens)
        return batch if masked is None else dataclasses.replace(batch, hidden=masked)

    def prompts_with(self, prompt: int, tokens: Sequence[Int[Tensor, " pos"]]) -> Batch:
        """One prompt with other tokens for the mapped stack, several times, filled up on the right.

        For causal models: what fills up is not masked, as no position of the prompt reads it. (In float64
        rows of Hugging Face's that see nothing but padding are NaN, and make the others so.) Make a batch for
        each length if these need different angles (`angles_differ`).

        Raises:
            ValueError: the prompt has further inputs, which belong to its own tokens.
        """
        given = self.batch.prompts[prompt]
        if given.inputs:
            raise ValueError(
                f"model inputs: expected tokens alone, as they are cut, got {sorted(given.inputs)} besides"
            )
        decoder = self._lens.stack.reads_target and given.target is not None
        altered = [Prompt(given.tokens, one) if decoder else Prompt(one, given.target) for one in tokens]
        batch = pad(altered, pad_token(self._lens.model), "right")
        return dataclasses.replace(batch, real=torch.ones_like(batch.real))

    def angles_differ(self, shorter: int, longer: int) -> bool:
        """Return whether prompts of two lengths get other rotary angles in a batch than alone (long RoPE)."""
        return self._lens.angles_differ(shorter, longer)

    def placed_batch(self, tokens: Int[Tensor, "copy pos"], positions: Int[Tensor, "copy pos"]) -> Batch:
        """Tokens at positions that are given, which may repeat; for models that take `position_ids`."""
        prompts = tuple(Prompt(row) for row in tokens)
        inputs = {"position_ids": positions}
        if self._lens.bears_a_mask:
            # Without a mask and a cache, transformers takes positions that restart for several prompts.
            inputs["attention_mask"] = torch.ones_like(tokens)
        return Batch(prompts, tokens, torch.ones_like(tokens, dtype=torch.bool), None, None, inputs)

    def own_tokens(self, prompt: int) -> Int[Tensor, " pos"]:
        """The tokens of one prompt that the mapped stack reads, without padding."""
        return self.tokens[prompt][self.real[prompt]]

    @property
    def masks_by_input(self) -> bool:
        """Whether every attention of the mapped stack takes a mask, in which keys can be hidden."""
        return takes_masks(self._lens.stack)

    @property
    def d_vocab(self) -> int:
        """How many tokens the model knows on the side that is mapped; for the joint part, on both sides."""
        side = "target" if self._lens.stack.reads_target else "prompt"
        read = ("prompt", "target") if self.is_joint else (side,)
        return min(vocabulary(self._lens.model, name) for name in read)

    def rows_of(self, tensor: Tensor, axis: int = 1) -> Tensor:
        """The asked rows of a tensor over all positions.

        Args:
            tensor: the first axis is the batch.
            axis: the axis of the positions.
        """
        return rows_at(tensor, self._queries, axis)

    @property
    def attended(self) -> Bool[Tensor, "batch query key"]:
        """Which keys got any weight from any head in the clean pass."""
        return self._of_recorded_rows(self._clean.attended[self.layer])

    @property
    def real_queries(self) -> Bool[Tensor, "batch query"]:
        """Which of the asked rows are the prompts' own positions."""
        return self.rows_of(self.real)

    @property
    def resid_pre(self) -> Float[Tensor, "batch query d_model"]:
        """The residual stream entering the block (on cross-attention: entering that), at the asked rows."""
        return self.rows_of(self._clean.resid_pre(self.layer))

    @property
    def whole_resid_pre(self) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream entering the block, at all positions."""
        return self._clean.calls[self.layer].resid_pre

    @property
    def resid_post(self) -> Float[Tensor, "batch query d_model"]:
        """The residual stream leaving the block, at the asked rows."""
        return self.rows_of(self._clean.calls[self.layer].resid_post)

    @property
    def final_residual(self) -> Float[Tensor, "batch query d_model"]:
        """The residual stream leaving the stack's last block, at the asked rows."""
        return self.rows_of(self._clean.calls[self._lens.n_layers - 1].resid_post)

    def recorded(self, role: str) -> Tensor:
        """What the method records: "value" of every key, all else at the asked rows.

        Where a hook of the user's scales z, "pattern" is times its factors.
        """
        if role == RESID_PRE:
            return self.resid_pre
        name = self._lens.stack.hook_name(role, self.layer) if role in ATTENTION_ROLES else ""
        if name not in self._clean.recorded:
            raise ValueError(
                f"role: expected one of {sorted(ATTENTION_ROLES)} that the method's `records` names, got "
                f"{role!r}; write records: ClassVar[frozenset[str]] = frozenset({{{role!r}}})"
            )
        if role == "pattern":
            return self._of_recorded_rows(self._clean.effective_pattern(self.layer), axis=2)
        tensor = self._clean.recorded[name]
        return tensor if role == "value" else self._of_recorded_rows(tensor)

    def _of_recorded_rows(self, tensor: Tensor, axis: int = 1) -> Tensor:
        """The asked rows of what the clean pass kept: of all positions, or of these rows already."""
        return tensor if self._clean.rows is not None else self.rows_of(tensor, axis)

    def with_every_query(self) -> Block:
        """This block with all rows, and the same record; of what the method records, the pattern alone."""
        if self.every_query:
            return self
        clean = self._clean if self._clean.rows is None else self._clean.with_whole_pattern(self.layer)
        whole = Block(
            clean, self.layer, self._verification, self.engine, self.max_memory, effort=self._effort
        )
        whole.details, whole.warnings, whole.default_rows = self.details, self.warnings, self.default_rows
        return whole

    @property
    def cache(self) -> dict[Any, Any]:
        """What the methods of one run share about this block; emptied when the next one is mapped."""
        return self._clean.cache.setdefault(self.layer, {})

    def replay(
        self, rows: Int[Tensor, " row"], fwd_hooks: Sequence[HookPair] = ()
    ) -> Float[Tensor, "row pos d_model"]:
        """The block's output when run again with hooks, one row per copy.

        Args:
            rows: which prompt of the batch each copy is.
            fwd_hooks: TransformerLens hooks, which see `[row, ...]` tensors.

        Raises:
            UnsupportedModelError: the block does not give its own output when run again without hooks.
        """
        return self._clean.replay(self.layer).run(fwd_hooks, rows)

    def cross_output(self) -> Float[Tensor, "batch query d_model"] | None:
        """What a decoder's cross-attention gave, before any norm, at the asked rows; None without one.

        Raises:
            UnsupportedModelError: as `replay`; no hook point shows it.
        """
        if not self.anatomy.cross:
            return None
        outputs: dict[str, Tensor] = {}
        where = self._lens.where(self.layer)
        # The Bridge's name, and that of HookedEncoderDecoder.
        names = (f"{where}.cross_attn.o.hook_out", f"{where}.hook_cross_attn_out")
        name = next((name for name in names if name in self._lens.hook_points), None)
        if name is None:
            raise UnsupportedModelError(f"{where}: no hook point shows what its cross-attention gives")
        self.replay(torch.arange(len(self.batch), device=self.real.device), [record(outputs, name)])
        return self.rows_of(outputs[name])

    def after_final_norm(
        self, resid: Float[Tensor, "*batch d_model"], gradients: bool = False
    ) -> Float[Tensor, "*batch d_model"]:
        """The last residual stream after the model's final norm; unchanged where the model has none.

        Raises:
            UnsupportedModelError: as `final_norm`, of a norm that is not there.
        """
        norm = self._final_norm
        if norm is None:
            return resid
        with self._lens.evaluation_mode(gradients):
            return norm(resid)

    @property
    def _final_norm(self) -> nn.Module | None:
        """The model's own final norm, verified to read the last block's output; None where there is none."""
        self._require_known_norm(self._lens.n_layers - 1)
        return self._lens.final_norm()

    def _require_known_norm(self, layer: int) -> None:
        if layer in self._verification.next_norm_failures:
            raise UnsupportedModelError(self._verification.next_norm_failures[layer])

    def next_norm(self) -> Norm | None:
        """The norm that reads the block's output: the next block's first one, after the last the final one.

        Raises:
            UnsupportedModelError: it is not known (the next block has no attention, say), or the final norm's
                parts don't give what the model's own norm gives.
        """
        if self.is_last:
            return self.final_norm()
        self._require_known_norm(self.layer)
        return self._verification.anatomy[self.layer + 1].attention_input

    def final_norm(self) -> Norm | None:
        """The model's final norm as its parts, verified on the last block's output; None where there is none.

        Raises:
            UnsupportedModelError: the parts don't give what the model's own norm gives, or it is not known
                which norm reads that output.
        """
        module = self._final_norm
        if module is None:
            return None
        norm = read_norm(module, self._lens.model.cfg)
        resid = self.final_residual[self.real_queries].to(self._lens.wide_dtype)
        normed = self.after_final_norm(self.final_residual)[self.real_queries].to(resid.dtype)
        error = measure_end(FINAL_NORM, RecordedEnd(resid[None], norm=norm, normed=normed[None]))
        if not error <= self._lens.tolerance:  # so that NaN is refused too
            raise UnsupportedModelError(
                f"final norm: expected {FINAL_NORM.claim} within {self._lens.tolerance:.0e}, "
                f"got a relative error of {error:.1e}"
            )
        return norm

    def unembedding(self) -> Unembedding:
        """The model's head, verified on this prompt.

        Raises:
            UnsupportedModelError: the logits are not final norm, then unembedding.
        """
        return unembedding_from(self._clean, None if self._lens.final_norm() is None else self.final_norm())

    @property
    def is_smooth(self) -> bool:
        """Whether all feed-forwards of the stack are verified to be smooth: without ReLU and experts."""
        return self._verification.is_smooth

    def changed_backward(
        self, rules: BackwardRules, above: Sequence[Block], **options: Any
    ) -> contextlib.AbstractContextManager[dict[int, Tensor]]:
        """Backward passes from this, the first block, with other rules; `options` as of the function."""
        anatomies = [self.anatomy, *(block.anatomy for block in above)]
        below = (
            None if self._verification.source is None else list(self._verification.source.anatomy.values())
        )
        return changed_backward(self._lens, anatomies, rules, below=below, **options)

    def graph(self, prompt: int, rules: Rules) -> AutogradGraph:
        """One prompt's graph under changed rules: the clean pass's (`Method.clean_rules`), or of another."""
        left = self._clean.graph
        if left is not None and left.rules == rules:
            return left
        made = AutogradGraph(self._lens, list(self._verification.anatomy.values()), rules)
        alone = self.batch.select(torch.tensor([prompt], device=self.tokens.device, dtype=torch.long))
        clean_pass(self._lens, alone, watched=(), graph=made)
        return made

    def chunks(self, copies: int, *, logits: bool = False) -> Iterator[slice]:
        """Yield slices over `copies` copies of a prompt, as many at a time as the memory bound allows.

        Args:
            copies: how many there are.
            logits: whether the logits of all positions are made too.
        """
        outputs = self.logits_tokens.shape[1] if logits else 0
        fitting = copies_within(self._lens, self.max_memory, self.real_inputs.shape[1], logits=outputs)
        step = self._effort.at_once(fitting, copies)
        starts = range(0, copies, step)
        for start in self.with_bar(starts, len(starts), "chunks"):
            yield slice(start, min(start + step, copies))

    def with_bar(self, chunks: Iterable[T], total: int, unit: str) -> Iterator[T]:
        """Yield the chunks of a method's work and show how many are done, if the user asked for a bar."""
        return self._effort.bar(chunks, total, unit)

    @property
    def carries_users_hooks(self) -> bool:
        """Whether anyone but TransformerLens and lens_mix has hooked the model."""
        return carries_users_hooks(self._lens.modules)

    def check_memory(self, positions: int) -> None:
        """Raises ValueError: a pass over so many positions, with their logits, is beyond the memory bound."""
        copies_within(self._lens, self.max_memory, positions, logits=positions)

    def gradient_rows(self, copies: int, *, logits: bool) -> int:
        """How many of `copies` prompts may run at once from here to the target, with gradients.

        Args:
            copies: how many there are.
            logits: whether the target reads the logits (which take memory too).

        Raises:
            ValueError: the memory bound does not allow one.
        """
        outputs = self.logits_tokens.shape[1] if logits else 0
        source, places = self._lens.stack.source, self.real_inputs.shape[1]
        blocks = self._lens.n_layers - self.layer + (0 if source is None else len(source))
        fitting = copies_within(self._lens, self.max_memory, places, blocks=blocks, logits=outputs)
        return max(1, min(copies, self._effort.at_once(fitting, copies)))

    def zeros(self, *shape: int) -> Float[Tensor, ...]:
        """A result tensor on the block's device, at least float32."""
        dtype = torch.promote_types(self.resid_post.dtype, torch.float32)
        return torch.zeros(shape, dtype=dtype, device=self.resid_post.device)
