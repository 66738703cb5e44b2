"""One block of one clean pass, as a method reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lens_mix._blocks.components import FINAL_NORM, measure_end
from lens_mix._blocks.recorded import RecordedEnd
from lens_mix._blocks.verification_record import Verification
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._inputs.batches import Batch
from lens_mix._inputs.rows import rows_at
from lens_mix._model.anatomy import BlockAnatomy, Norm, read_norm
from lens_mix._model.stacks import Stack
from lens_mix._model.unembedding import Unembedding
from lens_mix._passes.clean_pass import CleanPass
from lens_mix._passes.copies import count_copies
from lens_mix._passes.effort import Effort
from lens_mix.hooks.base import HookPair
from lens_mix.hooks.recording import ATTENTION_ROLES, RESID_PRE
from lens_mix.maps.explained import Explained

if TYPE_CHECKING:
    from lens_mix._passes.continuation import Continuation

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LayerRecord:
    """What a method reports about its map of one block, for each prompt of the batch.

    Attributes:
        details: The named details of the map's provenance.
        warnings: The sentences for the map's notes.
        default_rows: The position, counted without padding, that the method's target reads. None: it reads
            no single position, or the logits are of other tokens than the rows.
        explained: What the target explains in each row, by the row's index on the query axis. The key None
            is for a target that is one number for all rows.
        rows_read: The positions, counted without padding, whose outputs the number of a map's only row
            reads. None: each row reads its own position.
    """

    details: list[dict[str, Any]]
    warnings: list[list[str]]
    default_rows: list[int | None]
    explained: list[dict[int | None, Explained]]
    rows_read: list[range | None]

    @classmethod
    def of(cls, prompts: int) -> LayerRecord:
        """Return an empty record for a number of prompts."""
        return cls(
            [{} for _ in range(prompts)],
            [[] for _ in range(prompts)],
            [None] * prompts,
            [{} for _ in range(prompts)],
            [None] * prompts,
        )


class Block:
    """What a method may ask for: recorded tensors, the anatomy, a replay, a pass from this block on.

    Args:
        clean: The clean pass.
        layer: The number of the block.
        verification: What this block and those above it were found to be.
        engine: The engine of the method.
        max_memory: The number of bytes for the temporary tensors of one chunk. None: no bound.
        queries: The positions of the asked rows. None: all. A prompt with fewer rows than another repeats its
            last one.
        effort: The warnings and progress bars of the run. None: there are none.
        key_positions: For each prompt, the positions of each key, counted without padding. None: each key is
            one position.

    Attributes:
        layer: As given.
        engine: As given.
        max_memory: As given.
        clean: As given, for functions of the library. `clean.lens` is the lens on the model.
        verification: As given.
        key_positions: As given.
        record: What the method reports about its map. `detail` and `warn` write into it.
        anatomy: The components of the block.
        stack: The stack of blocks: its number of layers is `len(stack)`, `stack.attention_template` is what
            `lens_mix.hooks` take as `attention=`, and `stack.is_cross` and `stack.is_joint` say which part of
            an encoder-decoder is mapped.
        n_heads: The number of query heads.
        is_last: Whether this is the last block of the stack.
        batch: The prompts, padded.
        tokens: The tokens that the mapped stack reads.
        real: Which positions are the prompts' own. The others are padding.
        real_keys: Which keys are the prompts' own. For cross-attention, the keys are the source's positions.
        real_inputs: Which positions of `inputs` are the prompts' own.
        queries: The positions of the asked rows, in the padded batch.
        every_query: Whether the rows are those of all positions, in order.
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
        key_positions: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> None:
        self._effort, self.key_positions = effort or Effort(), key_positions
        self._lens, self._queries = clean.lens, queries
        self.clean, self.verification = clean, verification
        self.layer, self.engine, self.max_memory = layer, engine, max_memory
        self.record = LayerRecord.of(len(clean.batch))
        self.anatomy: BlockAnatomy = verification.anatomy[layer]
        self.stack: Stack = clean.lens.stack
        self.n_heads: int = clean.lens.n_heads
        self.is_last: bool = layer == len(self.stack) - 1
        self.batch: Batch = clean.batch
        self.tokens: Int[Tensor, "batch pos"] = (
            self.batch.logits_tokens if self.stack.reads_target else self.batch.tokens
        )
        self.real: Bool[Tensor, "batch pos"] = clean.real
        self.real_keys: Bool[Tensor, "batch key"] = clean.real_keys
        self.real_inputs: Bool[Tensor, "batch input"] = clean.real_inputs
        every = torch.arange(self.real.shape[1], device=self.real.device).expand(self.real.shape)
        self.queries: Int[Tensor, "batch query"] = every if queries is None else queries
        self.every_query: bool = queries is None

    # ------------------------------------------------------------- the record of the map

    def detail(self, index: int, name: str, value: Any) -> None:
        """Record a detail of one prompt's layer map (`provenance["details"][name]`)."""
        self.record.details[index][name] = value

    def warn(self, index: int, text: str) -> None:
        """Record a warning about one prompt's layer map, for its notes."""
        self.record.warnings[index].append(f"layer {self.layer}: {text}")

    @property
    def cache(self) -> dict[Any, Any]:
        """What the methods of one run share about this block. It is emptied when the next one is mapped."""
        return self.clean.cache.setdefault(self.layer, {})

    # ------------------------------------------------------------- recorded tensors

    def rows_of(self, tensor: Tensor, axis: int = 1) -> Tensor:
        """Return the asked rows of a tensor over all positions.

        Args:
            tensor: The tensor, whose first axis is the batch.
            axis: The axis of the positions.
        """
        return rows_at(tensor, self._queries, axis)

    @property
    def real_queries(self) -> Bool[Tensor, "batch query"]:
        """Which of the asked rows are the prompts' own positions."""
        return self.rows_of(self.real)

    @property
    def attended(self) -> Bool[Tensor, "batch query key"]:
        """Which keys got weight from any head in the clean pass."""
        return self._select_recorded_rows(self.clean.attended[self.layer])

    @property
    def inputs(self) -> Float[Tensor, "batch input d_model"]:
        """What enters the first block. For the joint part, the encoder's input and then the decoder's."""
        return self.clean.inputs

    @property
    def resid_pre(self) -> Float[Tensor, "batch query d_model"]:
        """The residual stream that enters the block (or its mapped cross-attention), at the asked rows."""
        return self.rows_of(self.clean.resid_pre(self.layer))

    @property
    def whole_resid_pre(self) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that enters the block, at all positions."""
        return self.clean.calls[self.layer].resid_pre

    @property
    def resid_post(self) -> Float[Tensor, "batch query d_model"]:
        """The residual stream that leaves the block, at the asked rows."""
        return self.rows_of(self.clean.calls[self.layer].resid_post)

    def recorded(self, role: str) -> Tensor:
        """Return a tensor that the method records: "value" at every key, all others at the asked rows.

        If a user hook scales z, "pattern" is multiplied by its factors.

        Args:
            role: "pattern", "value", "z", "query" or "resid_pre".

        Raises:
            ValueError: The method's `records` does not contain the role.
        """
        if role == RESID_PRE:
            return self.resid_pre
        name = self.stack.hook_name(role, self.layer) if role in ATTENTION_ROLES else ""
        if name not in self.clean.recorded:
            raise ValueError(
                f"role: expected one of {sorted(ATTENTION_ROLES)} that the method's `records` names, got "
                f"{role!r}; write records: ClassVar[frozenset[str]] = frozenset({{{role!r}}})"
            )
        if role == "pattern":
            return self._select_recorded_rows(self.clean.effective_pattern(self.layer), axis=2)
        tensor = self.clean.recorded[name]
        return tensor if role == "value" else self._select_recorded_rows(tensor)

    def _select_recorded_rows(self, tensor: Tensor, axis: int = 1) -> Tensor:
        """Return the asked rows of a recorded tensor, which may have these rows only."""
        return tensor if self.clean.rows is not None else self.rows_of(tensor, axis)

    def with_every_query(self) -> Block:
        """Return this block with all rows and the same record; the only recorded tensor is the pattern."""
        if self.every_query:
            return self
        clean = self.clean if self.clean.rows is None else self.clean.with_whole_pattern(self.layer)
        whole = Block(clean, self.layer, self.verification, self.engine, self.max_memory, effort=self._effort)
        # What a method reports about the whole block belongs to the map of the asked rows.
        whole.record = self.record
        return whole

    # ------------------------------------------------------------- running the model

    def replay(
        self, rows: Int[Tensor, " copy"], fwd_hooks: Sequence[HookPair] = ()
    ) -> Float[Tensor, "copy pos d_model"]:
        """Return the block's output in a replay with hooks.

        Args:
            rows: For each copy, the index of its prompt in the batch.
            fwd_hooks: TransformerLens hooks, which get `[copy, ...]` tensors.

        Raises:
            UnsupportedModelError: A replay without hooks does not give the block's own output.
        """
        return self.clean.replay(self.layer).run(fwd_hooks, rows)

    def continuation(self, fwd_hooks: Sequence[HookPair] = (), **options: Any) -> Continuation:
        """Return the pass from this block on, with hooks; options are those of `Continuation`."""
        from lens_mix._passes.continuation import Continuation

        return Continuation(self.clean, self.layer, fwd_hooks, **options)

    # ------------------------------------------------------------- norms behind the block

    def next_norm(self) -> Norm | None:
        """Return the norm that reads the block's output: the next block's first one, or the final norm.

        Raises:
            UnsupportedModelError: The norm is not known (the next block has no attention, say), or the
                model's own final norm gives other numbers than its components.
        """
        if self.is_last:
            return self._read_final_norm()
        self._require_known_norm(self.layer)
        if self.verification.anatomy[self.layer + 1].attention_input is None:
            return None
        # Gemma stores weight - 1, so the verification has a copy, which an edit of it does not change.
        return read_norm(getattr(self.stack.blocks[self.layer + 1], "ln1", None), self._lens.model.cfg)

    def after_final_norm(
        self, resid: Float[Tensor, "*batch d_model"], gradients: bool = False
    ) -> Float[Tensor, "*batch d_model"]:
        """Return the last residual stream after the model's final norm, or unchanged if there is none.

        Args:
            resid: The residual stream.
            gradients: Whether to build the autograd graph.

        Raises:
            UnsupportedModelError: It is not known which norm reads the output of the last block.
        """
        norm = self._final_norm
        if norm is None:
            return resid
        with self._lens.evaluation_mode(gradients):
            normed: Tensor = norm(resid)
            return normed

    def unembedding(self) -> Unembedding:
        """Return the model's final norm and unembedding, verified on these prompts.

        Raises:
            UnsupportedModelError: The logits are not the final norm followed by the unembedding.
        """
        from lens_mix._blocks.ends import unembedding_from

        has_norm = self._lens.final_norm() is not None
        return unembedding_from(self.clean, self._read_final_norm() if has_norm else None)

    @property
    def _final_norm(self) -> nn.Module | None:
        """The module of the final norm, verified to read the last block's output; None if there is none."""
        self._require_known_norm(len(self.stack) - 1)
        return self._lens.final_norm()

    def _require_known_norm(self, layer: int) -> None:
        if layer in self.verification.next_norm_failures:
            raise UnsupportedModelError(self.verification.next_norm_failures[layer])

    def _read_final_norm(self) -> Norm | None:
        """Return the final norm as its components, compared with the model's own on these prompts."""
        module = self._final_norm
        if module is None:
            return None
        norm = read_norm(module, self._lens.model.cfg)
        last = self.rows_of(self.clean.calls[len(self.stack) - 1].resid_post)
        resid = last[self.real_queries].to(self._lens.wide_dtype)
        normed = self.after_final_norm(last)[self.real_queries].to(resid.dtype)
        error = measure_end(FINAL_NORM, RecordedEnd(resid[None], norm=norm, normed=normed[None]))
        if not error <= self._lens.tolerance:  # This way, NaN is an error too.
            raise UnsupportedModelError(
                f"final norm: expected {FINAL_NORM.claim} within {self._lens.tolerance:.0e}, "
                f"got a relative error of {error:.1e}"
            )
        return norm

    # ------------------------------------------------------------- memory and progress

    def chunks(self, copies: int, *, logits: bool = False) -> Iterator[slice]:
        """Yield slices over copies of a prompt, as many at a time as the memory bound allows.

        Args:
            copies: The number of copies.
            logits: Whether the logits of all positions are computed too.
        """
        outputs = self.batch.logits_tokens.shape[1] if logits else 0
        fitting = count_copies(self._lens, self.max_memory, self.real_inputs.shape[1], logits=outputs)
        step = self._effort.at_once(fitting, copies)
        starts = range(0, copies, step)
        for start in self.with_bar(starts, len(starts), "chunks"):
            yield slice(start, min(start + step, copies))

    def copies_with_gradients(self, copies: int, *, logits: bool, own_graphs: bool = True) -> int:
        """Return how many of `copies` prompts may run at once from this block on, with gradients.

        Args:
            copies: The number of copies.
            logits: Whether the target reads the logits, which need memory too.
            own_graphs: Whether each copy has an autograd graph of its own.

        Raises:
            ValueError: The memory bound does not allow one copy.
        """
        outputs = self.batch.logits_tokens.shape[1] if logits else 0
        source, positions = self.stack.source, self.real_inputs.shape[1]
        # A gradient passes through all blocks from this one on and, for the joint part, through the encoder.
        blocks = len(self.stack) - self.layer + (0 if source is None else len(source))
        fitting = count_copies(
            self._lens, self.max_memory, positions, blocks=blocks, logits=outputs, own_graphs=own_graphs
        )
        return max(1, min(copies, self._effort.at_once(fitting, copies)))

    def with_bar(self, chunks: Iterable[T], total: int, unit: str) -> Iterator[T]:
        """Yield the chunks of a method's work, with a progress bar if the user asked for one."""
        return self._effort.bar(chunks, total, unit)

    def zeros(self, *shape: int) -> Float[Tensor, ...]:
        """Return a tensor of zeros for results, on the block's device, at least float32."""
        call = self.clean.calls.get(self.layer)
        # A pass that was cached may lack the residual stream of a block whose weights alone are read.
        like = self.clean.tensor("pattern", self.layer) if call is None else call.resid_post
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.zeros(shape, dtype=dtype, device=like.device)
