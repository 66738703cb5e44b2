"""One prompt's blocks, for statistics that need more of a block than a map."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lens_mix.arguments import several
from lens_mix.lens.block import Block
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.lens.rows import Selection
from lens_mix.method import Method
from lens_mix.session import Session


@dataclasses.dataclass(frozen=True)
class PromptBlocks:
    """One prompt after a clean pass: its tokens (strings, numbers), its keys and the blocks asked for.

    The blocks have a batch axis of one and no padding; `queries` are the positions of their rows.
    """

    tokens: list[str]
    token_ids: Int[Tensor, " pos"]
    key_tokens: list[str]
    queries: list[int]
    blocks: Sequence[Block]


def prompt_blocks(
    model: TransformerLensModel,
    prompt: Any,
    methods: Method | Sequence[Method],
    *,
    queries: Selection | None = None,
    layers: Selection | None = None,
    cross: bool = False,
    part: str | None = None,
    prepend_bos: bool | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> PromptBlocks:
    """A clean pass over one prompt, with what the methods need recorded; the rest as in `lens_mix.run`.

    `cross`: cross-attention will do, whose keys are another sequence than its queries.

    Raises:
        UnsupportedModelError: the model, or one of the methods on it, can't be trusted.
    """
    asked = [methods] if isinstance(methods, Method) else list(methods)
    labelled = {method.name: method for method in asked}
    session = Session(model, labelled, part=part, queries=queries, layers=layers)
    if session.lens.stack.is_cross and not cross:
        raise UnsupportedModelError(
            "statistics: expected part 'encoder' or 'decoder', got 'cross', whose keys are another sequence "
            "than its queries: there is no diagonal to set apart"
        )
    read = session.read(prompt, prepend_bos=prepend_bos, attention_mask=attention_mask, inputs=inputs)
    with session.checked_pass([read]) as checked:
        blocks = checked.blocks(asked[-1].name)
        positions = blocks[0].queries[0].tolist()
        tokens = checked.tokens(0)
        keys = checked.key_tokens(0) or tokens
        return PromptBlocks(tokens, checked.token_ids(0), keys, positions, blocks)


def each_prompt(
    model: TransformerLensModel, prompts: Any, methods: Method | Sequence[Method], **options: Any
) -> Iterator[PromptBlocks]:
    """`prompt_blocks` of one prompt or of several, one after another, without gradients.

    `prompts`: a string, a pair or a token tensor is one prompt; a list of these is several.
    """
    # A list of numbers is the tokens of one prompt.
    one = not isinstance(prompts, list) or (
        prompts and all(isinstance(token, numbers.Integral) for token in prompts)
    )
    for prompt in [prompts] if one else several("prompts", prompts, "one prompt or a list of them", least=1):
        with torch.no_grad():
            checked = prompt_blocks(model, prompt, methods, **options)
        yield checked
