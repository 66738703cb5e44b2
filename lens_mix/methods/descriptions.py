"""Describe every method in plain words: its group, what a map says, and its cost in forward passes."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from lens_mix.lens.cost import COSTS, Cost
from lens_mix.method import Method

_RECOMMENDED = "Recommended"
_ATTENTION = "Attention weights"
_LAYER = "What each layer takes from each token"
_INPUT = "What reaches a position from the input tokens"
_ANSWER_BY_LAYER = "What the answer depends on, layer by layer"
_ANSWER_BY_TOKEN = "Which input tokens the answer depends on"
_OTHERS = "Other methods"

# The groups, in the order in which they are listed.
GROUPS = (_RECOMMENDED, _ATTENTION, _LAYER, _INPUT, _ANSWER_BY_LAYER, _ANSWER_BY_TOKEN, _OTHERS)


class Description(NamedTuple):
    """Describe a method for a list of methods, or under the title of a figure.

    Attributes:
        group: One of `GROUPS`.
        line: What a score of the map says, without a period.
        cost: The cost in forward passes; None if it is unknown.
    """

    group: str
    line: str
    cost: Cost | None = None


# The order within a group is the order in which the methods are listed. `input_map` is `lm.input_map`.
_LINES = {
    "input_map": (
        _RECOMMENDED,
        "how much the answer depends on each input token; the best-tested method for the model",
    ),
    "attention": (_ATTENTION, "how much a position attends to each token"),
    "attn_res_w": (_ATTENTION, "half the attention weight, and half for the position itself"),
    "value_zeroing": (_LAYER, "how much the block's output changes without a token's value vector"),
    "attn_res_ln": (
        _LAYER,
        "the size of what attention and residual stream bring from each token, after the norm",
    ),
    "attn_res": (_LAYER, "the size of what attention and residual stream bring from each token"),
    "value_norm": (_LAYER, "the size of what attention alone adds from each token"),
    "alti": (_LAYER, "how much closer each token brings the sum of contributions to the output of attention"),
    "information_flow_routes": (
        _LAYER,
        "how much closer each token brings the sum of contributions to the residual stream",
    ),
    "globenc": (
        _LAYER,
        "the size of each token's contribution to the block's output, without the feed-forward",
    ),
    "atb_ff": (_LAYER, "the size of what the feed-forward makes of each token"),
    "atb_ff_res": (_LAYER, "the size of each token's contribution to the block's output, before a last norm"),
    "atb_ff_res_ln": (_LAYER, "the size of each token's contribution to the output of the whole block"),
    "decompx_local": (_LAYER, "the size of each token's contribution to the block's output, biases included"),
    "decompx": (_INPUT, "the size of each input token's contribution to the residual stream after a layer"),
    "gradient_attention": (
        _ANSWER_BY_LAYER,
        "attention weights times their gradient: what raises the answer's score",
    ),
    "alti_logit": (_ANSWER_BY_LAYER, "what each input token adds to the answer's logit through attention"),
    "attention_attribution": (
        _ANSWER_BY_LAYER,
        "how much of the answer's score each attention weight accounts for",
    ),
    "attribution_patching": (
        _ANSWER_BY_TOKEN,
        "an estimate of how much the answer changes if a token is replaced",
    ),
    "gim": (_ANSWER_BY_TOKEN, "gradient times input, by a gradient that lets fewer effects cancel"),
    "frozen_gradients": (_ANSWER_BY_TOKEN, "gradient times input, with attention weights and norms constant"),
    "input_gradients": (_ANSWER_BY_TOKEN, "how sensitive the answer is to each token's embedding"),
    "occlusion": (_ANSWER_BY_TOKEN, "how much the answer's score falls if a token is replaced, measured"),
    "context_length": (
        _ANSWER_BY_TOKEN,
        "what the answer's score gains from one more token at the start of the context",
    ),
}


DESCRIPTIONS = {name: Description(group, line, COSTS.get(name)) for name, (group, line) in _LINES.items()}


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
    return Description(_OTHERS, first, None if method is None else method.default_cost())
