"""One prompt's blocks, for statistics that need more of a block than a map."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lens_mix.lens.block import Block
from lens_mix.lens.model import Lens
from lens_mix.lens.prompts import pad, pad_token, read_prompt, token_strings
from lens_mix.lens.proof.support import choose_engine, needs_head, proof_of
from lens_mix.methods.base import Method


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
    model: Any,
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
    lens = Lens(model, stack)
    read = read_prompt(
        model, lens.model_class, prompt, prepend_bos=prepend_bos, attention_mask=attention_mask, inputs=inputs
    )
    proof = proof_of(lens, read, head=needs_head(asked))
    engines = [choose_engine(method, proof, "auto") for method in asked]
    roles = sorted(frozenset().union(*(method.needs for method in asked)))
    names = [lens.stack.hook_name(role, layer) for role in roles for layer in range(lens.n_layers)]
    clean = lens.clean_pass(pad([read], pad_token(model), "right"), names)
    own = read.target if lens.stack.name == "decoder" and read.target is not None else read.tokens
    anatomy = proof.anatomy
    above = [*(anatomy[layer] for layer in range(1, lens.n_layers)), None]
    blocks = [
        Block(lens, clean, layer, anatomy[layer], engines[-1], None, next_anatomy=above[layer])
        for layer in range(lens.n_layers)
    ]
    return PromptBlocks(token_strings(model, own), own, blocks)


def each_prompt(
    model: Any, prompts: Any, methods: Method | Sequence[Method], **options: Any
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
