"""The input map that the evidence recommends, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError, model_class_of
from lens_mix.lens.prompts import is_encoder_decoder
from lens_mix.lens.rows import Selection
from lens_mix.lens.texts import token_ids
from lens_mix.maps import MixingMap
from lens_mix.methods import AttributionPatching, DecompX, Gim, InputGradients, Method
from lens_mix.runner import run
from lens_mix.targets import TargetLike, predicted

_WORDS = (" thing", " green")  # the stand-ins that the figures were measured with (docs/input_map.md)

_JOINT = (
    "partial Spearman with measured replacement, flan-t5-small, 30 held-out pairs of English and French: "
    "0.58 [0.54, 0.61]"
)
_MEASURED = "partial Spearman with measured replacement, SmolLM2-135M, 105 held-out prompts"


def input_map(
    model: TransformerLensModel,
    prompt: Any,
    queries: Selection | None = -1,
    target: TargetLike | None = None,
    **options: Any,
) -> MixingMap:
    """Which input tokens an output came from: the map with the best evidence that this model allows.

    The first of these that can run on the model, the reasons against those before it in the notes:

    1. `attribution_patching`: what the target would change by if a token were another one, estimated in the
       time of five forwards. Causal models on a TransformerBridge that take positions. On 105 held-out
       prompts its order agreed with measured replacement by plain words, position partialled out, at
       0.51 [0.46, 0.57] on SmolLM2-135M; the next map, below, had 0.42, the best of layer maps 0.38. On
       prompts of more than 20 tokens (0.43), and on Gemma 3 270M (0.49), it had no lead (docs/input_map.md),
       and it is poor at finding one planted fact (average precision 0.42, where `gim` has 0.82).
    2. `decompx`, on models that see both ways, and without a target: what the position is made of. On an
       encoder with a trained head (a BERT of chemistry, 24 prompts, drawn tokens) 0.56 [0.52, 0.61], where
       `gim` had 0.40 [0.32, 0.48]; on a sentence encoder all maps did alike (docs/leaderboard.md).
    3. `gim` with feed-forwards by their ratio, absolute: three or four forwards; 0.42 [0.36, 0.48]
       on the same prompts, and 0.51 on Gemma 3. Every model that has logits.
    4. `gim` with plain feed-forwards, where these are not written down.

    Of an encoder-decoder, unless a `part` is asked for, the keys are the source's tokens and then the
    target's (part="joint"), and there is one recipe: `input_gradients`, the gradient's norm. On 30 held-out
    pairs of flan-t5-small 0.58 [0.54, 0.61], where `gim` had 0.51, ALTI+ 0.50 (docs/encoder_decoder.md).

    Args:
        model, prompt: as in `lm.run`.
        queries: the rows to make, as in `lm.run`; every row is a backward pass. The last by default.
        target: what is explained, read at each row's position; None: the log probability of what the model
            itself predicts there (of `decompx`: nothing, it speaks of the position's representation).
        options: as in `lm.run` (`part`, `max_memory`, `prepend_bos`, `attention_mask`, model inputs).
            part="decoder" leaves the source out. `layers`: of `decompx` a map for each, None for the last,
            which the figures are of; the other recipes have one map, which counts as the last layer's.

    Returns:
        A map [1, query, key], 0 or more, in the target's unit (`decompx`: lengths of vectors). `method` and
        `parameters` tell the recipe, `provenance["input_map"]` its figures; `provenance["joint"]` how many
        tokens the source has.

    Raises:
        TypeError, ValueError: as `lm.run`. UnsupportedModelError: none of them can run, with each reason.
    """
    part = options.get("part")
    if part == "all":
        raise ValueError("part: expected 'joint', or 'decoder' without the source, got 'all'")
    if part is None and is_encoder_decoder(model, model_class_of(model)):
        part = "joint"
    options["part"] = part
    asked = predicted(of="log_probability") if target is None else target
    if part == "joint":
        recipes: Iterable[tuple[Method, str]] = [(InputGradients(asked), _JOINT)]
    else:
        recipes = _recipes(model, asked, by_default=target is None)
    reasons: list[str] = []
    for method, figures in recipes:
        if isinstance(method, DecompX) and not _sees_both_ways(model, prompt, options):
            continue
        try:
            last = isinstance(method, DecompX) and options.get("layers") is None
            only = {"layers": [-1]} if last else {}
            mixing_map = run(model, prompt, method, queries=queries, **options | only)
        except UnsupportedModelError as problem:
            reasons.append(str(problem))
            continue
        return mixing_map.replace(
            provenance={**mixing_map.provenance, "input_map": {"recipe": method.name, "figures": figures}},
            notes=(*mixing_map.notes, *(f"input_map: not the first choice: {reason}" for reason in reasons)),
        )
    raise UnsupportedModelError(f"input_map: {'; '.join(dict.fromkeys(reasons))}")


def _recipes(
    model: TransformerLensModel, target: TargetLike, by_default: bool
) -> Iterator[tuple[Method, str]]:
    """The recipes from the best down, and what is known of each; `by_default`: no target was asked for."""
    yield (
        AttributionPatching(target, replacements=_words(model)),
        f"{_MEASURED}: 0.51 [0.46, 0.57]; 0.43 [0.36, 0.50] on those of more than 20 tokens",
    )
    if by_default:
        yield DecompX(), "partial Spearman with measured replacement, rxnfp, 24 prompts: 0.56 [0.52, 0.61]"
    yield Gim(target, readout="absolute", activations="ratio"), f"{_MEASURED}: 0.42 [0.36, 0.48]"
    yield Gim(target, readout="absolute"), "not measured on its own"


def _sees_both_ways(model: TransformerLensModel, prompt: Any, options: Mapping[str, Any]) -> bool:
    """Whether it does; what lies behind the encoder of an encoder-decoder is not seen at all."""
    try:
        mixing_map = run(model, prompt, "attention", queries=[0], **options)
        return not mixing_map.causal and mixing_map.provenance.get("part") != "encoder"
    except UnsupportedModelError:
        return False


def _words(model: TransformerLensModel) -> tuple[str, ...] | None:
    """The stand-ins, where each is one token; else some are drawn."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return None
    sizes = [len(token_ids(tokenizer, word)) for word in _WORDS]
    return _WORDS if set(sizes) == {1} else None
