"""One prompt's blocks, for statistics that need more of a block than a map."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lens_mix.lens.block import Block
from lens_mix.lens.model_classes import TransformerLensModel
from lens_mix.methods.base import Method
from lens_mix.session import Session


@dataclasses.dataclass(frozen=True)
class PromptBlocks:
    """One prompt after a clean pass.

    Attributes:
        tokens: as strings, one per position.
        token_ids: the same as numbers.
        blocks: the stack's blocks, first to last; their tensors have a batch axis of one and no padding.
    """

    tokens: list[str]
    token_ids: Int[Tensor, " pos"]
    blocks: Sequence[Block]


def prompt_blocks(
    model: TransformerLensModel,
    prompt: Any,
    methods: Method | Sequence[Method],
    *,
    stack: str | None = None,
    prepend_bos: bool | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> PromptBlocks:
    """A clean pass over one prompt, with what the methods need recorded.

    Args:
        model, prompt, stack, prepend_bos, attention_mask, inputs: as in `lens_mix.run`.
        methods: whose tensors to record; all must be able to run on the model.

    Raises:
        UnsupportedModelError: the model, or one of the methods on it, can't be trusted.
    """
    asked = [methods] if isinstance(methods, Method) else list(methods)
    session = Session(model, {method.name: method for method in asked}, stack=stack)
    read = session.read(prompt, prepend_bos=prepend_bos, attention_mask=attention_mask, inputs=inputs)
    with session.passed([read]) as passed:
        return PromptBlocks(passed.tokens(0), passed.token_ids(0), passed.blocks(asked[-1].name))


def each_prompt(
    model: TransformerLensModel, prompts: Any, methods: Method | Sequence[Method], **options: Any
) -> Iterator[PromptBlocks]:
    """`prompt_blocks` of one prompt or of several, one after another, without gradients.

    Args:
        prompts: a string, a pair or a token tensor is one prompt; a list of these is several.
        model, methods, options: as in `prompt_blocks`.
    """
    one = not isinstance(prompts, list) or all(isinstance(token, int) for token in prompts)
    several: Iterable[Any] = [prompts] if one else prompts
    for prompt in several:
        with torch.no_grad():
            passed = prompt_blocks(model, prompt, methods, **options)
        yield passed
