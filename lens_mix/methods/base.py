"""What every method is: a small frozen dataclass (its parameters) with one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.lens.proof.record import ALGEBRA_PARTS

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class Method:
    """Base of all methods: the fields are the parameters, the call turns one block into a layer map.

    Class attributes:
        name: the method's name in strings (`lm.run(model, prompt, name)`).
        residual: the residual weight that the method's own paper mixes in when maps
            are rolled out: 0.5 where the map holds the attention branch only, 0 where
            it already holds the residual.
        engines: the ways it can be computed, fastest first. "recorded" reads the clean pass,
            "hooks" intervenes and runs blocks again, "algebra" needs a proven anatomy.
        kind: "layer" for maps of one block, "input" for maps from the stack down to the tokens.
        needs: hook points whose tensors the clean pass must record ("pattern", "value", "z").
        wants: hook points whose tensors spare the algebra engine some work, recorded where the model has them
            and the prompts are short ("pre", "pre_linear").
        parts: the parts of a block that must be proven for the algebra engine (`lens_mix.lens.proof.prove`).
        checks_parts: whether its algebra holds what it rebuilds against the prompts' own clean pass, at four
            positions of each at least, and raises `NotRebuiltError`. The runner does that before any map if
            not, if other methods run too, and if memory is bound.
        citation: the paper, in BibTeX.
    """

    name: ClassVar[str]
    residual: ClassVar[float]
    engines: ClassVar[tuple[str, ...]]
    kind: ClassVar[Literal["layer", "input"]] = "layer"
    needs: ClassVar[frozenset[str]] = frozenset()
    wants: ClassVar[frozenset[str]] = frozenset()
    parts: ClassVar[tuple[str, ...]] = ALGEBRA_PARTS
    checks_parts: ClassVar[bool] = False
    citation: ClassVar[str]

    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        """The layer map of one block, for every prompt of the batch; padding is cut later."""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")

    def of_stack(self, blocks: Sequence[Block]) -> Float[Tensor, "batch layer *head query key"]:
        """The maps of all blocks. Methods that carry something from block to block define this instead."""
        return torch.stack([self(block) for block in blocks], dim=1)

    def parameters(self) -> dict[str, object]:
        """The parameters by name, as the record keeps them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def key_groups(self, positions: int) -> list[list[int]] | None:
        """Groups of positions that the key axis stands for; None where it stands for the positions."""
        return None

    def refuses(self, anatomy: BlockAnatomy) -> str | None:
        """Why the algebra engine has no formula for such a block; None where it has."""
        return None

    def check(self, n_heads: int, n_layers: int) -> None:
        """Refuse parameters that this model can't have (a head out of range, say).

        Raises:
            ValueError: with what was expected and what was got.
        """
