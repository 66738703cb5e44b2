"""Provide the tensors that a clean pass recorded in one block, or after the last one, for rebuilding."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix._inputs.rows import rows_at
from lens_mix._model.anatomy import BlockAnatomy, Norm
from lens_mix._model.unembedding import Unembedding
from lens_mix._passes.clean_pass import CleanPass, StopForward
from lens_mix.hooks.base import HookPair
from lens_mix.hooks.recording import record


@dataclasses.dataclass(frozen=True)
class RecordedBlock:
    """The recorded tensors of one block, and its anatomy.

    A tensor is converted to `wide_dtype` when it is first read, so unread tensors cost nothing.

    Attributes:
        clean: The clean pass, which recorded the tensors that the components read.
        layer: The block.
        anatomy: The anatomy to rebuild the block with.
        outputs: Role -> output of a module in the block, at all positions (`BlockOutputs`).
        places: Indices into the rows that the clean pass recorded; None for all of them.
    """

    clean: CleanPass
    layer: int
    anatomy: BlockAnatomy
    outputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    places: Int[Tensor, "batch row"] | None = None

    def at(self, places: Int[Tensor, "batch row"]) -> RecordedBlock:
        """Return this block at some of the rows that the clean pass recorded."""
        return dataclasses.replace(self, places=places)

    def read_as(self, anatomy: BlockAnatomy) -> RecordedBlock:
        """Return the same tensors with another anatomy."""
        return dataclasses.replace(self, anatomy=anatomy)

    def with_activation(self, name: str) -> RecordedBlock:
        """Return this block with another activation of its feed-forward."""
        feed_forward = self.anatomy.feed_forward and dataclasses.replace(
            self.anatomy.feed_forward, activation=name
        )
        block = self.read_as(dataclasses.replace(self.anatomy, feed_forward=feed_forward))
        # The pre-activations are the same, and they take most of the time.
        vars(block)["pre_activations"] = self.pre_activations
        return block

    def scaled(self, factors: Float[Tensor, " head"]) -> RecordedBlock:
        """Return this block with its pattern multiplied by a factor per head."""
        clean = dataclasses.replace(self.clean, z_factors={**self.clean.z_factors, self.layer: factors})
        return dataclasses.replace(self, clean=clean)

    @property
    def attention_template(self) -> str:
        """The attention module's name template, for `lens_mix.hooks` (`attention=`)."""
        return self.clean.lens.stack.attention_template

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of the rebuilding: the model's, but float32 at least."""
        return self.clean.lens.wide_dtype

    @property
    def tolerance(self) -> float:
        """The largest accepted relative error in the model's dtype."""
        return self.clean.lens.tolerance

    @property
    def z_factors(self) -> Float[Tensor, " head"] | None:
        """The factors by which user hooks multiply z of each head; None if they do not."""
        return self.clean.z_factors.get(self.layer)

    @functools.cached_property
    def pattern(self) -> Float[Tensor, "batch head row key"]:
        """The recorded pattern times `z_factors`."""
        pattern = self._wide(rows_at(self.clean.tensor("pattern", self.layer), self.places, axis=2))
        factors = self.z_factors
        return pattern if factors is None else pattern * factors.to(pattern.dtype)[:, None, None]

    @functools.cached_property
    def value(self) -> Float[Tensor, "batch key ..."]:
        """The values of every key."""
        return self._wide(self.clean.tensor("value", self.layer))

    @functools.cached_property
    def z(self) -> Float[Tensor, "batch row ..."]:
        """The mixed values; their heads may be flattened."""
        return self._wide(rows_at(self.clean.tensor("z", self.layer), self.places))

    @functools.cached_property
    def key_input(self) -> Float[Tensor, "batch key d_model"] | None:
        """The residual stream that values are computed from; None for cross-attention."""
        is_cross = self.clean.lens.stack.is_cross
        return None if is_cross else self._wide(self.clean.calls[self.layer].resid_pre)

    @functools.cached_property
    def resid_pre(self) -> Float[Tensor, "batch row d_model"]:
        """The residual stream that the attention's branch is added to."""
        x, before = self._of_positions(self.clean.resid_pre(self.layer)), self.output("before")
        # With the anatomy of its cross-attention, a block starts after its self-attention.
        return x if before is None else self.anatomy.entered(x, before)

    @functools.cached_property
    def resid_post(self) -> Float[Tensor, "batch row d_model"]:
        """The residual stream that leaves the block."""
        return self._of_positions(self.clean.calls[self.layer].resid_post)

    def output(self, role: str) -> Float[Tensor, "batch row d_model"] | None:
        """Return the output of a module in the block; None if it was not recorded, or has another size."""
        output, stream = self.outputs.get(role), self.clean.calls[self.layer].resid_post
        # A module may be called with the rows of all prompts on one axis, or several times with some of them.
        if output is None or output.numel() != stream.numel():
            return None
        return self._of_positions(output.reshape(stream.shape))

    @functools.cached_property
    def mid(self) -> Float[Tensor, "batch row d_model"] | None:
        """The residual stream between the attention's branches and the feed-forward's; None if unknown."""
        attention_out = self.output("attention_out")
        if attention_out is None:
            return None
        return self.anatomy.after_attention(self.resid_pre, attention_out, self.output("cross_out"))

    @functools.cached_property
    def pre_activations(self) -> list[Float[Tensor, "batch row d_mlp"]]:
        """The pre-activations of the feed-forward that reads `mid`; none if either is unknown."""
        feed_forward = self.anatomy.feed_forward
        if feed_forward is None or self.mid is None:
            return []
        return feed_forward.pre_activations(self.anatomy.feed_forward_in(self.resid_pre, self.mid))

    def replay_with(self, fwd_hooks: Sequence[HookPair]) -> tuple[Tensor | None, Tensor | None]:
        """Return the block's output and z in a replay with hooks; z is None if its hook never fired.

        The output is None if a hook ended the replay (`StopForward`).
        """
        store: dict[str, Tensor] = {}
        name, out = self.clean.lens.stack.hook_name("z", self.layer), None
        with contextlib.suppress(StopForward):
            out = self._of_positions(self.clean.replay(self.layer).run([*fwd_hooks, record(store, name)]))
        return out, self._of_positions(store[name]) if name in store else None

    @property
    def real_rows(self) -> Bool[Tensor, "batch row"]:
        """The mask of the rows that are the prompts' own; the others are padding."""
        return rows_at(self.clean.real_rows, self.places)

    @property
    def real_keys(self) -> Bool[Tensor, "batch key"]:
        """The mask of the positions of `key_input` that are the prompts' own."""
        return self.clean.real

    @functools.cached_property
    def _positions(self) -> Int[Tensor, "batch row"] | None:
        rows = self.clean.rows
        if rows is None:
            return self.places
        # `places` are indices into the recorded rows, which may be some of the positions only.
        return rows.positions if self.places is None else rows_at(rows.positions, self.places)

    def _of_positions(self, tensor: Tensor) -> Tensor:
        return self._wide(rows_at(tensor, self._positions))

    def _wide(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.wide_dtype)


@dataclasses.dataclass(frozen=True)
class RecordedEnd:
    """The tensors recorded after the last block, at the prompts' own positions, and the modules read there.

    Attributes:
        resid_post: The residual stream that leaves the last block.
        read: The input of the model's final norm.
        norm: The final norm; None if there is none.
        normed: The output of the model's final norm.
        unembedding: The final norm and the unembedding.
        logits: The model's logits.
    """

    resid_post: Float[Tensor, "1 row d_model"]
    read: Float[Tensor, "1 row d_model"] | None = None
    norm: Norm | None = None
    normed: Float[Tensor, "1 row d_model"] | None = None
    unembedding: Unembedding | None = None
    logits: Float[Tensor, "1 row d_vocab"] | None = None
    # All rows are the prompts' own here, so a comparison masks nothing (`Component`).
    real_rows: None = None
    real_keys: None = None
