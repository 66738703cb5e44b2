"""The verification of fused attention: what it gives is compared with what eager attention gives."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from lens_mix._blocks.verification_record import Verification
from lens_mix._care.precision import relative_error
from lens_mix._care.tracebacks import is_out_of_memory
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._inputs.batches import Batch, Prompt, pad
from lens_mix._inputs.prompts import pad_token
from lens_mix._inputs.rows import Rows
from lens_mix._model.model import Lens
from lens_mix._passes.autograd_graph import AutogradGraph, Mixing
from lens_mix._passes.backward_rules import BackwardRules, PlainRules
from lens_mix._passes.changed_backward import Rules
from lens_mix._passes.clean_pass import FUSED_ROLES, clean_pass
from lens_mix._passes.fused_attention import FusedAttention
from lens_mix.hooks.mixing import pass_tolerance
from lens_mix.hooks.recording import record_attention

# The number of tokens of the prompt, and by how many it exceeds a window.
_COUNT, _BEYOND_WINDOW = 32, 8


def find_fused_failure(lens: Lens, prompt: Prompt, verification: Verification, name: str) -> str | None:
    """Return why fused attention does not give what eager attention does; None if it does.

    Args:
        lens: The lens of the model.
        prompt: The prompt, whose first tokens are used.
        verification: The verification of the model.
        name: "rows" for blocks and recorded rows, "windows" for the same on a prompt that is longer than
            windows of attention, or "gradients" for the model's own gradients and those with changed
            rules.
    """
    short = Prompt(prompt.tokens[:_COUNT], inputs={key: each[:_COUNT] for key, each in prompt.inputs.items()})
    if name == "windows":
        count = max(lens.windows) + _BEYOND_WINDOW
        # The prompt is longer than some window, but need not be as long as the largest.
        short = Prompt(prompt.tokens[:count])
    batch = pad([short], pad_token(lens.model), "right")
    try:
        if name == "gradients":
            return _compare_gradients(lens, batch, verification)
        return _compare_rows(lens, batch)
    except UnsupportedModelError as problem:
        return str(problem)
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        # Whatever an attention needs that its fused form does not have, eager attention is there.
        return f"attention: transformers' own module fails: {type(problem).__name__}: {problem}"


def _compare_rows(lens: Lens, batch: Batch) -> str | None:
    last = batch.tokens.shape[1]
    rows = Rows.of([last - 1, last // 2], batch.real, [list])
    layers, template = lens.stack.attention_layers, lens.stack.attention_template
    eager, found = dict[str, Tensor](), dict[str, Tensor]()
    pairs = [
        pair
        for layer in layers
        for pair in record_attention(
            layer, eager, sorted(FUSED_ROLES), queries=rows.positions, attention=template
        )
    ]
    own = clean_pass(lens, batch, pairs, eager, rows=rows)
    fused = FusedAttention(lens, dict.fromkeys(layers, sorted(FUSED_ROLES)), rows.positions)
    other = clean_pass(lens, batch, (), found, rows=rows, fused=fused)
    if fused.failure is not None:
        return fused.failure
    for layer, call in own.calls.items():
        error = relative_error(other.calls[layer].resid_post, call.resid_post)
        if not error <= lens.tolerance:
            return f"{lens.where(layer)}: fused attention gives another output (relative error {error:.1e})"
        # A weight may be 0 without a mask.
        if layer in layers and bool((own.attended[layer] & ~other.attended[layer]).any()):
            return f"{lens.where(layer)}: fused attention has another mask"
    for name, tensor in eager.items():
        got = found.get(name)
        # The heads of z may be flattened.
        if got is None or got.numel() != tensor.numel():
            return f"{name}: fused attention has another tensor there"
        error = relative_error(got.reshape(tensor.shape), tensor)
        if not error <= lens.tolerance:
            return f"{name}: fused attention differs there (relative error {error:.1e})"
    return None


def _compare_gradients(lens: Lens, batch: Batch, verification: Verification) -> str | None:
    # With other rules than the kernel's, gradients are computed from some rows at a time.
    for rules in (PlainRules(), Rules(temperature=2.0, scores=0.25)):
        own, other = (
            _gradients(lens, batch, verification, rules, fused)
            for fused in (None, FusedAttention(lens, {}, None, rules.attention_rule))
        )
        for name, expected in own.items():
            error = relative_error(other[name].flatten()[None], expected.flatten()[None])
            if not error <= pass_tolerance(lens.dtype):
                return f"{name}: its gradient with fused attention differs (relative error {error:.1e})"
    return None


def _gradients(
    lens: Lens, batch: Batch, verification: Verification, rules: BackwardRules, fused: FusedAttention | None
) -> dict[str, Tensor]:
    """Return the gradients of a number of the last residual stream: of the first one, and of each z."""
    anatomies, positions = list(verification.anatomy.values()), batch.tokens.shape[1]
    graph = AutogradGraph(lens, anatomies, rules, positions, fused)
    try:
        clean_pass(lens, batch, watched=(), graph=graph, fused=fused)
        with torch.enable_grad():
            # All coordinates of some streams have the same sum.
            value = graph.resid_post[0, -1].square().sum()[None]
        ((_, gradient),) = graph.gradients(value, [0], reads_logits=False)
        found = {"attention": gradient}

        def read(layer: int, mixing: Mixing) -> None:
            found[lens.stack.hook_name("z", layer)] = mixing.gradient
            found[lens.stack.hook_name("value", layer)] = mixing.values

        # Only the model's own gradients are read there, and changed rules expect one through the final norm.
        # BERT's eager attention shows no mixing.
        with contextlib.suppress(*[UnsupportedModelError] * (fused is None)):
            if rules == PlainRules():
                graph.read_mixing(value, read, check=False)
        return found
    finally:
        graph.release()
