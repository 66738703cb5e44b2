"""The stacks of blocks of a model, and the names of their hook points."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lens_mix._classes.model_classes import ModelClass, UnsupportedModelError, model_class_of
from lens_mix._inputs.batches import Prompt
from lens_mix.hooks.recording import ATTENTION_ROLES


@dataclasses.dataclass(frozen=True)
class Stack:
    """One stack of blocks: all blocks of a decoder or an encoder, or one part of an encoder-decoder.

    Attributes:
        name: "blocks", "encoder", "decoder", "cross" (the decoder's blocks with their cross-attention) or
            "joint" (the decoder's blocks with the encoder below).
        template: The name of block `layer`, for example "encoder_blocks.{layer}".
        attention: The name of the attention module in a block.
        blocks: The modules of the blocks.
        before: For "cross", the name of the self-attention that comes first in a block. Else None.
        source: For "joint", the encoder. Else None.
    """

    name: str
    template: str
    attention: str
    blocks: tuple[nn.Module, ...]
    before: str | None = None
    source: Stack | None = None

    @property
    def is_cross(self) -> bool:
        """Return whether the keys are the encoder's outputs."""
        return self.name == "cross"

    @property
    def is_joint(self) -> bool:
        """Whether the encoder and the decoder are mapped together, down through both stacks."""
        return self.source is not None

    @property
    def reads_target(self) -> bool:
        """Return whether the queries are the tokens that the decoder of an encoder-decoder reads."""
        return self.name in ("decoder", "cross", "joint")

    @property
    def attention_template(self) -> str:
        """Return the name of block `layer`'s attention, for the argument `attention` of `lens_mix.hooks`."""
        return f"{self.template}.{self.attention}"

    def mapped_tokens(self, prompt: Prompt) -> Int[Tensor, " pos"]:
        """Return the tokens of a prompt that this part reads."""
        return prompt.target if self.reads_target and prompt.target is not None else prompt.tokens

    def key_tokens(self, prompt: Prompt) -> Int[Tensor, " key"]:
        """Return the tokens of the keys of a prompt."""
        if self.is_joint:
            return torch.cat([prompt.tokens, self.mapped_tokens(prompt)])
        return prompt.tokens if self.is_cross else self.mapped_tokens(prompt)

    def hook_name(self, role: str, layer: int) -> str:
        """Return the name of an attention's hook point by its role: "query", "value", "pattern" or "z"."""
        return f"{self.attention_template.format(layer=layer)}.{ATTENTION_ROLES[role]}"

    def attention_module(self, layer: int) -> nn.Module:
        """Return the attention module of block `layer`."""
        module: nn.Module = getattr(self.blocks[layer], self.attention)
        return module

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def attention_layers(self) -> list[int]:
        """Return the layers with attention, in order: all layers unless the model is a hybrid."""
        return [layer for layer, block in enumerate(self.blocks) if hasattr(block, self.attention)]

    @property
    def gaps(self) -> str | None:
        """Return the note on the blocks of a hybrid that have no maps; None if every block has attention."""
        present = self.attention_layers
        if len(present) == len(self):
            return None
        return (
            f"a hybrid: of {len(self)} blocks of {self.name!r} only {present} have attention; the others mix "
            "tokens without values or patterns"
        )


def _modules(model: nn.Module, name: str) -> tuple[nn.Module, ...]:
    blocks = getattr(model, name, None)
    return tuple(blocks) if isinstance(blocks, nn.ModuleList) else ()


def stacks_of(model: nn.Module) -> dict[str, Stack]:
    """Return the stacks of a model by name: {"blocks"} or {"encoder", "decoder", "cross", "joint"}.

    Raises:
        UnsupportedModelError: If a stack has no blocks, or if none of them has an attention module.
    """
    model_class = model_class_of(model)
    if model_class is ModelClass.HOOKED_ENCODER_DECODER:
        layout = [("encoder", "encoder", "attn"), ("decoder", "decoder", "attn")]
    elif model_class is ModelClass.BRIDGE and _modules(model, "encoder_blocks"):
        # The Bridge has another name for a decoder's self-attention than for all other attention.
        layout = [("encoder", "encoder_blocks", "attn"), ("decoder", "decoder_blocks", "self_attn")]
    else:
        layout = [("blocks", "blocks", "attn")]
    stacks = {
        name: Stack(name, f"{attribute}.{{layer}}", attention, _modules(model, attribute))
        for name, attribute, attention in layout
    }
    for stack in stacks.values():
        _require_attention(stack)
    if "decoder" in stacks:
        decoder = stacks["decoder"]
        cross = dataclasses.replace(decoder, name="cross", attention="cross_attn", before=decoder.attention)
        if cross.attention_layers:
            stacks["cross"] = cross
            stacks["joint"] = dataclasses.replace(decoder, name="joint", source=stacks["encoder"])
    return stacks


def choose_stack(model: nn.Module, part: Any, others: tuple[str, ...] = ()) -> Stack:
    """Return the stack that an argument `part` names; None: the first.

    Args:
        model: The model.
        part: The name of the stack.
        others: Other values that the argument may have for an encoder-decoder, for the error.

    Raises:
        ValueError: If the model has no such stack.
    """
    stacks = stacks_of(model)
    name = next(iter(stacks)) if part is None else part
    if isinstance(name, str) and name in stacks:
        return stacks[name]
    reason = " (only encoder-decoders have parts)" * ("blocks" in stacks)
    if name in ("cross", "joint") and "decoder" in stacks:
        reason = " (its decoder has no separate cross-attention; T5Gemma 2 merges it with self-attention)"
    known = [*sorted(stacks), *(others if "cross" in stacks else ())]
    close = difflib.get_close_matches(str(part), known, 1)
    raise ValueError(
        f"part: expected one of {known} for {model_class_of(model).value}{reason}, got {part!r}"
        + "".join(f"; did you mean {word!r}?" for word in close if word != part)
    )


def _require_attention(stack: Stack) -> None:
    if not stack.blocks:
        raise UnsupportedModelError(f"the model has no {stack.name}: expected a stack of blocks, found none")
    if stack.attention_layers:
        return
    names = sorted(name for name, _ in stack.blocks[0].named_children() if not name.startswith(("hook", "_")))
    raise UnsupportedModelError(
        f"TransformerLens has no attention module in any block of {stack.name!r} (expected "
        f"{stack.attention!r}, found {names}): without attention there are no values or patterns, and "
        "context mixing is not defined (state-space and recurrent models)"
    )
