"""Run the clean pass of each prompt and return its blocks, for statistics that need more than maps."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from lens_mix import UnsupportedModelError
from lens_mix.arguments import check_items
from lens_mix.method import Method
from lens_mix.methods.attention import AttentionWeights
from lens_mix.models import TransformerLensModel
from lens_mix.session import Session

if TYPE_CHECKING:
    from lens_mix.method import Block

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class PromptBlocks:
    """Contain one prompt and its blocks after a clean pass.

    Attributes:
        tokens: The tokens as strings.
        token_ids: The tokens as numbers.
        key_tokens: The tokens that are keys; those of the source in cross-attention.
        queries: The positions of the blocks' rows.
        blocks: The requested blocks, with a batch axis of one and no padding.
    """

    tokens: list[str]
    token_ids: Int[Tensor, " pos"]
    key_tokens: list[str]
    queries: list[int]
    blocks: Sequence[Block]


def run_prompt(
    model: TransformerLensModel,
    prompt: Any,
    methods: Method | Sequence[Method],
    *,
    queries: int | slice | Iterable[int] | Tensor | None = None,
    layers: int | slice | Iterable[int] | Tensor | None = None,
    cross: bool = False,
    part: str | None = None,
    prepend_bos: bool | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> PromptBlocks:
    """Return one prompt's blocks after a clean pass that recorded what the methods need.

    Args:
        model: Any TransformerLens model.
        prompt: The prompt, as in `lens_mix.run`.
        methods: The methods whose recorded tensors are needed.
        queries: As in `lens_mix.run`.
        layers: As in `lens_mix.run`.
        cross: Whether cross-attention is accepted, whose keys are another sequence than its queries.
        part: As in `lens_mix.run`.
        prepend_bos: As in `lens_mix.run`.
        attention_mask: As in `lens_mix.run`.
        **inputs: Further model inputs, as in `lens_mix.run`.

    Raises:
        UnsupportedModelError: The model, or one of the methods on it, is not verified.
    """
    listed = [methods] if isinstance(methods, Method) else list(methods)
    labeled = {method.name: method for method in listed}
    session = Session(model, labeled, part=part, queries=queries, layers=layers)
    if session.lens.stack.is_cross and not cross:
        raise UnsupportedModelError(
            "statistics: expected part 'encoder' or 'decoder', got 'cross', whose keys are another sequence "
            "than its queries, so that there is no diagonal"
        )
    read = session.read(prompt, prepend_bos=prepend_bos, attention_mask=attention_mask, inputs=inputs)
    with session.checked_pass([read]) as checked:
        blocks = checked.blocks(listed[-1].name)
        positions = blocks[0].queries[0].tolist()
        tokens = checked.tokens(0)
        keys = checked.key_tokens(0) or tokens
        return PromptBlocks(tokens, checked.token_ids(0), keys, positions, blocks)


def require_matrices(layer: int, path: T | None) -> T:
    """Return the value path of a block; raise a ValueError if the block has none."""
    if path is None:
        raise ValueError(f"block {layer}: expected value and output matrices, found none")
    return path


def read_tokens(model: TransformerLensModel, prompt: Any, **options: Any) -> Int[Tensor, " pos"]:
    """Return the tokens of a prompt, as `lens_mix.run` reads it.

    Args:
        model: Any TransformerLens model.
        prompt: The prompt, as in `lens_mix.run`.
        **options: `prepend_bos`, `attention_mask` and `inputs`, as in `lens_mix.session.Session.read`.
    """
    tokens: Tensor = Session(model, {"attention": AttentionWeights()}).read(prompt, **options).tokens
    return tokens


def iterate_prompts(
    model: TransformerLensModel, prompts: Any, methods: Method | Sequence[Method], **options: Any
) -> Iterator[PromptBlocks]:
    """Yield the blocks of one prompt or of several, one prompt after another, without gradients.

    Args:
        model: Any TransformerLens model.
        prompts: A string, a pair or a token tensor is one prompt; a list of these is several.
        methods: As in `run_prompt`.
        **options: Further arguments of `run_prompt`.
    """
    # A list of whole numbers is the tokens of one prompt.
    is_single = not isinstance(prompts, list) or (
        prompts and all(isinstance(token, numbers.Integral) for token in prompts)
    )
    for prompt in (
        [prompts] if is_single else check_items("prompts", prompts, "one prompt or a list of them", least=1)
    ):
        with torch.no_grad():
            checked = run_prompt(model, prompt, methods, **options)
        yield checked
