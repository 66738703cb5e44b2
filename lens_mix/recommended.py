"""The input map that the evidence recommends, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError, model_class_of
from lens_mix.lens.prompts import is_encoder_decoder
from lens_mix.lens.rows import Selection
from lens_mix.lens.texts import token_ids
from lens_mix.maps import MixingMap
from lens_mix.measured import sentence
from lens_mix.method import Method
from lens_mix.methods.attribution_patching import AttributionPatching
from lens_mix.methods.decompx import DecompX
from lens_mix.methods.gim import Gim
from lens_mix.methods.input_gradients import InputGradients
from lens_mix.runner import run
from lens_mix.targets import TargetLike, predicted

# The replacements that the evidence was measured with (docs/input_map.md).
_WORDS = (" thing", " green")

# What is known of each recipe: names of facts in `lens_mix/measured.json`. A recipe that is not here was not
# measured on its own.
EVIDENCE = {
    "joint input_gradients": ("flan-t5-joint: input_gradients, norm",),
    "attribution_patching": (
        "smollm2-forms: … for 24: lm.AttributionPatching",
        "smollm2-long: SmolLM2, held out, more than 20 tokens",
    ),
    "decompx": ("rxnfp-importance: decompx",),
    "gim with ratios": ('smollm2-held_out: gim, activations="ratio", readout="absolute"',),
}


def input_map(
    model: TransformerLensModel,
    prompt: Any,
    queries: Selection | None = -1,
    target: TargetLike | None = None,
    **options: Any,
) -> MixingMap:
    """Return which input tokens an output came from: the map with the best evidence that this model allows.

    It is the first of these that can run on the model. The notes have the reasons against those before it.

    1. `attribution_patching`: an estimate of the change of the target if a token were another one. It needs a
       few forward passes, and a causal model on a TransformerBridge that takes positions. On short prompts
       its order agreed best with measured replacement, of the maps that need no forward pass per token. On
       long prompts and on a second model it had no lead, and it is poor at finding a single planted fact.
    2. `decompx`, on models that see both ways and without a target: what the position is made of. It agreed
       best on an encoder with a trained head.
    3. `gim` with the ratio rule for activations and absolute scores, on every model that has logits.
    4. `gim` with the gradients of activations, if the model's feed-forward is not written down.

    For an encoder-decoder, unless a `part` is asked for, the keys are the tokens of the source and then those
    of the target (part="joint"). There is one recipe: the norm of `input_gradients`.

    The evidence: docs/input_map.md, docs/encoder_decoder.md, and docs/leaderboard.md for encoders.

    Args:
        model, prompt: as in `lm.run`.
        queries: the rows to make, as in `lm.run`; every row is a backward pass. The last by default.
        target: what is explained, read at each row's position; None: the log probability of what the model
            itself predicts there (`decompx` explains the position's representation instead).
        options: as in `lm.run` (`part`, `max_memory`, `prepend_bos`, `attention_mask`, model inputs).
            part="decoder" leaves the source out. `layers`: `decompx` has a map for each; None is the last,
            which was measured. The other recipes have one map, which counts as the last layer's.

    Returns:
        A map [1, query, key], 0 or more, in the target's unit (`decompx`: lengths of vectors). `method` and
        `parameters` are the recipe's, `provenance["input_map"]["figures"]` is what was measured of it, and
        `provenance["joint"]` has the number of the source's tokens.

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
        recipes: Iterable[tuple[Method, str]] = [(InputGradients(asked), "joint input_gradients")]
    else:
        recipes = _recipes(model, asked, by_default=target is None)
    reasons: list[str] = []
    for method, name in recipes:
        if isinstance(method, DecompX) and not _sees_both_ways(model, prompt, options):
            continue
        try:
            last = isinstance(method, DecompX) and options.get("layers") is None
            only = {"layers": [-1]} if last else {}
            mixing_map = run(model, prompt, method, queries=queries, **options | only)
        except UnsupportedModelError as problem:
            reasons.append(str(problem))
            continue
        evidence = {"recipe": method.name, "figures": _figures(name)}
        return mixing_map.replace(
            provenance={**mixing_map.provenance, "input_map": evidence},
            notes=(*mixing_map.notes, *(f"input_map: not the first choice: {reason}" for reason in reasons)),
        )
    raise UnsupportedModelError(f"input_map: {'; '.join(dict.fromkeys(reasons))}")


def _figures(name: str) -> str:
    """Return the sentence on what was measured of a recipe."""
    return sentence(*EVIDENCE[name]) if name in EVIDENCE else "not measured on its own"


def _recipes(
    model: TransformerLensModel, target: TargetLike, by_default: bool
) -> Iterator[tuple[Method, str]]:
    """Yield the recipes from the best down, each with its name in `EVIDENCE`.

    `by_default` is whether no target was asked for.
    """
    yield AttributionPatching(target, replacements=_words(model)), "attribution_patching"
    if by_default:
        yield DecompX(), "decompx"
    yield Gim(target, readout="absolute", activations="ratio"), "gim with ratios"
    yield Gim(target, readout="absolute"), "gim"


def _sees_both_ways(model: TransformerLensModel, prompt: Any, options: Mapping[str, Any]) -> bool:
    """Return whether the model sees both ways; False for the encoder of an encoder-decoder."""
    try:
        mixing_map = run(model, prompt, "attention", queries=[0], **options)
        return not mixing_map.causal and mixing_map.provenance.get("part") != "encoder"
    except UnsupportedModelError:
        return False


def _words(model: TransformerLensModel) -> tuple[str, ...] | None:
    """Return the replacements of the evidence if each is one token; None: some are drawn."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return None
    sizes = [len(token_ids(tokenizer, word)) for word in _WORDS]
    return _WORDS if set(sizes) == {1} else None
