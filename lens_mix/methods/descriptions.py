"""Describe every method in plain words: its group, what a map says, and its cost in forward passes."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from lens_mix.method import Method

# The prompt length for which the cost of all rows is shown; the benchmarks ran at this length.
_SHOWN_TOKENS = 64

_RECOMMENDED = "Recommended"
_ATTENTION = "Attention weights"
_LAYER = "What each layer takes from each token"
_INPUT = "What reaches a position from the input tokens"
_ANSWER_BY_LAYER = "What the answer depends on, layer by layer"
_ANSWER_BY_TOKEN = "Which input tokens the answer depends on"
_OTHERS = "Other methods"

# The groups, in the order in which they are listed.
GROUPS = (_RECOMMENDED, _ATTENTION, _LAYER, _INPUT, _ANSWER_BY_LAYER, _ANSWER_BY_TOKEN, _OTHERS)


class Cost(NamedTuple):
    """Estimate the cost of a method in forward passes of the same prompt.

    The numbers are within a factor of 2 of benchmarks/RESULTS.md: of the rows of "What calls cost", and for
    methods that have none there, of those of "Every method, gpt2-like". They differ between models, by a
    factor of 2 and more.

    Attributes:
        base: The passes that every map needs, the clean pass included.
        per_row: The passes for each row that is computed, which is one position of the prompt.
        per_token: The passes for each token of the prompt, whichever rows are computed.
        per_layer: The passes for each layer that is computed.
    """

    base: float
    per_row: float = 0.0
    per_token: float = 0.0
    per_layer: float = 0.0

    def passes(self, tokens: int, rows: int, layers: int) -> float:
        """Return the estimated number of forward passes.

        Args:
            tokens: The number of tokens of the prompt.
            rows: The number of rows to compute.
            layers: The number of layers to compute.
        """
        return self.base + self.per_row * rows + self.per_token * tokens + self.per_layer * layers

    def __str__(self) -> str:
        if self.per_layer:
            return f"about {self.per_layer:g} forward passes per layer"
        if self.per_token:
            return f"about {self.per_token:g} forward passes per token"
        if self.per_row:
            one, every = (self.passes(_SHOWN_TOKENS, rows, 1) for rows in (1, _SHOWN_TOKENS))
            return f"about {one:.2g} forward passes for one position, {every:.0f} for all {_SHOWN_TOKENS}"
        return "about 1 forward pass" if self.base == 1 else f"about {self.base:g} forward passes"


class Description(NamedTuple):
    """Describe a method for a list of methods, or under the title of a figure.

    Attributes:
        group: One of `GROUPS`.
        line: What a score of the map says, without a period.
        cost: The cost in forward passes; None if it is unknown, as for a registered method.
    """

    group: str
    line: str
    cost: Cost | None = None


_ONE_PASS, _NORMS, _PAIRS = Cost(1), Cost(1.5), Cost(1.5, per_row=0.15)
_GRADIENTS = Cost(1.5, per_row=0.42)

# The order within a group is the order in which the methods are listed. `input_map` is `lm.input_map`.
DESCRIPTIONS: dict[str, Description] = {
    "input_map": Description(
        _RECOMMENDED,
        "how much the answer depends on each input token; the best-tested method for the model",
        Cost(3.9, per_row=3),
    ),
    "attention": Description(_ATTENTION, "how much a position attends to each token", _ONE_PASS),
    "attn_res_w": Description(
        _ATTENTION, "half the attention weight, and half for the position itself", _ONE_PASS
    ),
    "value_zeroing": Description(
        _LAYER, "how much the block's output changes without a token's value vector", _PAIRS
    ),
    "attn_res_ln": Description(
        _LAYER, "the size of what attention and residual stream bring from each token, after the norm", _NORMS
    ),
    "attn_res": Description(
        _LAYER, "the size of what attention and residual stream bring from each token", _NORMS
    ),
    "value_norm": Description(_LAYER, "the size of what attention alone adds from each token", _NORMS),
    "alti": Description(
        _LAYER,
        "how much closer each token brings the sum of contributions to the output of attention",
        Cost(2),
    ),
    "information_flow_routes": Description(
        _LAYER,
        "how much closer each token brings the sum of contributions to the residual stream",
        Cost(4),
    ),
    "globenc": Description(
        _LAYER,
        "the size of each token's contribution to the block's output, without the feed-forward",
        _NORMS,
    ),
    "atb_ff": Description(_LAYER, "the size of what the feed-forward makes of each token", _PAIRS),
    "atb_ff_res": Description(
        _LAYER,
        "the size of each token's contribution to the block's output, before a last norm",
        _PAIRS,
    ),
    "atb_ff_res_ln": Description(
        _LAYER,
        "the size of each token's contribution to the output of the whole block",
        _PAIRS,
    ),
    "decompx_local": Description(
        _LAYER,
        "the size of each token's contribution to the block's output, biases included",
        Cost(1.5, per_row=0.3),
    ),
    "decompx": Description(
        _INPUT,
        "the size of each input token's contribution to the residual stream after a layer",
        Cost(1.5, per_token=0.4),
    ),
    "gradient_attention": Description(
        _ANSWER_BY_LAYER, "attention weights times their gradient: what raises the answer's score", Cost(3)
    ),
    "alti_logit": Description(
        _ANSWER_BY_LAYER, "what each input token adds to the answer's logit through attention", Cost(3)
    ),
    "attention_attribution": Description(
        _ANSWER_BY_LAYER,
        "how much of the answer's score each attention weight accounts for",
        Cost(1.5, per_layer=6),
    ),
    "attribution_patching": Description(
        _ANSWER_BY_TOKEN,
        "an estimate of how much the answer changes if a token is replaced",
        Cost(2, per_row=3),
    ),
    "gim": Description(
        _ANSWER_BY_TOKEN,
        "gradient times input, by a gradient that lets fewer effects cancel",
        _GRADIENTS,
    ),
    "frozen_gradients": Description(
        _ANSWER_BY_TOKEN, "gradient times input, with attention weights and norms constant", _GRADIENTS
    ),
    "input_gradients": Description(
        _ANSWER_BY_TOKEN, "how sensitive the answer is to each token's embedding", _GRADIENTS
    ),
    "occlusion": Description(
        _ANSWER_BY_TOKEN,
        "how much the answer's score falls if a token is replaced, measured",
        Cost(1, per_token=3),
    ),
    "context_length": Description(
        _ANSWER_BY_TOKEN,
        "what the answer's score gains from one more token at the start of the context",
        Cost(1, per_token=0.35),
    ),
}


def describe(name: str, method: type[Method] | None = None) -> Description:
    """Return the description of a method.

    Args:
        name: The name of the method, or "input_map".
        method: The class, for a method that is not built in: the first line of its docstring is shown.
            `lens_mix.registry.describe` finds the class of a registered method.
    """
    if name in DESCRIPTIONS:
        return DESCRIPTIONS[name]
    documented = inspect.cleandoc(method.__doc__ or "") if method is not None else ""
    # Python writes the docstring of a dataclass that has none: its name and its parameters.
    is_written = not (method is not None and documented.startswith(f"{method.__name__}("))
    first = documented.partition("\n")[0].rstrip(".") if is_written else ""
    return Description(_OTHERS, first)
