"""Compute the input map that the evidence recommends for a model, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError, model_class_of
from lens_mix._inputs.prompts import further_inputs, is_causal_model, is_encoder_decoder
from lens_mix._inputs.rows import Positions
from lens_mix._inputs.texts import token_ids
from lens_mix._verification.support import any_prompt
from lens_mix.arguments import check_whole_number
from lens_mix.maps import MixingMap
from lens_mix.maps.spans import find_query
from lens_mix.measured import sentence
from lens_mix.method import Method
from lens_mix.methods.decompx import DecompX
from lens_mix.methods.gim import Gim
from lens_mix.methods.input_gradients import InputGradients
from lens_mix.methods.token_patching import LONGEST_MEASURED, TokenPatching
from lens_mix.runner import run
from lens_mix.session import Session
from lens_mix.targets import TargetLike, TokenLike, as_target, predicted

# The evidence was measured with these replacements (docs/evidence/input_map.md).
_WORDS = (" thing", " green")

# The details of `TokenPatching` about its measured scores.
_MEASURED = ("measured", "measured_passes")

# These are the names of each recipe's facts in `lens_mix/measured.json`. A recipe that is missing here was
# not measured separately.
EVIDENCE = {
    "joint input_gradients": ("flan-t5-joint: input_gradients, norm",),
    "token_patching": (
        "smollm2-forms: … for 24: lm.methods.TokenPatching",
        "smollm2-long: SmolLM2, held out, more than 20 tokens",
    ),
    "token_patching, measured": ('smollm2-exact: lm.input_map(exact="auto")',),
    "decompx": ("rxnfp-importance: decompx",),
    "gim with ratios": ('smollm2-held_out: gim, activations="ratio", readout="absolute"',),
}


def input_map(
    model: TransformerLensModel,
    prompt: Any,
    queries: Positions | Literal["default"] | None = "default",
    target: TargetLike | None = None,
    exact: int | Literal["auto", False] = "auto",
    against: TokenLike | None = None,
    **options: Any,
) -> MixingMap:
    """Return the map from input tokens to an output that has the best evidence on this kind of model.

        >>> lm.input_map(model, "The Eiffel Tower is in the city of").top(3)
        >>> lm.input_map(model, "The Eiffel Tower is in the city of", target="Paris").top(3)
        >>> lm.input_map(model, "The Eiffel Tower is in the city of", target="Paris", against="Rome").top(3)

    It is computed by the first of these recipes that can run on the model. The notes of the map say why the
    earlier ones cannot.

    1. `token_patching` is how the target changes if a token is replaced. In rows of at most 32 tokens
       the strongest scores are measured (`exact`), and all others are estimated. It takes up to fourteen
       forward passes if it measures, and about five otherwise. It needs a causal model on a TransformerBridge
       that takes positions. Without measured scores it was not the best on long prompts and on a second
       model. It is poor at finding a single planted fact.
    2. `decompx` decomposes the representation of a position. It runs on bidirectional models if no target is
       given. It agreed best on one encoder, a BERT of chemical reactions, and poorly on another, which was
       trained on number agreement.
    3. `gim` with the ratio rule for activations and absolute scores runs on every model that has logits.
    4. `gim` with the gradients of activations is used if the formula of the feed-forward is not known.

    For an encoder-decoder the only recipe is the norm of `input_gradients`, unless you choose a `part`. The
    keys are the tokens of the source and then those of the target (part="joint").

    The evidence is in the documentation, on the page on input maps and, for encoder-decoders, on that on
    alignment.

    Args:
        model: As in `lm.run`.
        prompt: As in `lm.run`.
        queries: The positions of the rows to compute, or texts, as in `lm.run`. Each row takes a backward
            pass. "default": the position that the target states, else the last one; in a bidirectional model
            that of the only mask, else 0, the position of [CLS].
        target: What is explained, at the position of each row if it states none: the text of a token
            ("Paris": the log probability of "Paris" or " Paris", as `lm.targets` explains), one of
            `lm.targets`, or a function of the logits. None: the log probability of the model's own
            prediction there. `decompx` explains the representation of the position instead.
        exact: How many scores of each row are measured, by replacing the token in whole passes, instead of
            estimated. This is for `token_patching` only. The strongest ones are measured, and the
            query's own. "auto": as many as the time of a few estimates allows.
            These are all scores of a row of at most 17 tokens, and none of a row of more than 32 tokens,
            which this cost did not improve. False: none. `lm.methods.TokenPatching` (`n_measured`)
            describes how the others are rescaled.
        against: The text of another token, its number or `lm.targets.token(...)`: the difference of the log
            probabilities of the target's token and of this one is explained. None: the target alone.
        options: As in `lm.run` (`part`, `max_memory`, `prepend_bos`, `attention_mask`, model inputs).
            part="decoder" excludes the source. `layers` is for `decompx`, which has a map of each layer. Its
            default is the last layer, which was measured. The other recipes have one map, which is labeled
            as the last layer.

    Returns:
        A map [1, query, key] of scores ≥ 0 in the unit of the target (`decompx`: norms of vectors). They say
        how much a token matters, not in which direction; `lm.methods.Occlusion` has signs. `method`
        and `parameters` are those of the recipe. `provenance["input_map"]["figures"]` is what was measured of
        it, and `provenance["joint"]` has the number of the source's tokens.

    Raises:
        TypeError: As in `lm.run`.
        ValueError: As in `lm.run`.
        UnsupportedModelError: If none of the recipes can run. The message has the reason of each one.
    """
    part = options.get("part")
    if part == "all":
        raise ValueError("part: expected 'joint', or 'decoder' without the source, got 'all'")
    if part is None and is_encoder_decoder(model, model_class_of(model)):
        part = "joint"
    options["part"] = part
    if against is not None:
        target = as_target(predicted() if target is None else target, against)
    if isinstance(queries, str) and queries == "default":
        queries = find_default_row(model, prompt, target, **options)
    n_measured = _read_exact(exact)
    method, name, mixing_map, reasons = _run_first(model, prompt, queries, target, n_measured, options)
    notes = [f"input_map: a better recipe cannot run: {reason}" for reason in reasons]
    evidence: dict[str, Any] = {"recipe": method.name, "figures": _figures(name)}
    if isinstance(method, TokenPatching) and n_measured:
        (measured,), (passes,) = (mixing_map.provenance["details"][key] for key in _MEASURED)
        evidence |= dict(zip(_MEASURED, (measured, passes), strict=True))
        if not any(measured):
            evidence["figures"] = _figures(method.name)
        notes += _describe_measured(mixing_map, measured)
    elif n_measured not in (0, "auto"):
        notes.append(f"input_map: exact={n_measured} has no effect, because {method.name} measures no score")
    return mixing_map.replace(
        provenance={**mixing_map.provenance, "input_map": evidence}, notes=(*mixing_map.notes, *notes)
    )


def _read_exact(exact: Any) -> int | Literal["auto"]:
    """Return the argument `exact` as the `n_measured` of `TokenPatching`."""
    if exact is False or exact == "auto":
        return exact or 0
    if isinstance(exact, bool) or not isinstance(exact, int):
        raise TypeError(f"exact: expected 'auto', a whole number or False, got {exact!r}")
    return check_whole_number("exact", exact, 0)


def _describe_measured(mixing_map: MixingMap, measured: Sequence[Sequence[int]]) -> list[str]:
    """Return notes about the rows that have estimated scores, with the number of measured ones."""
    rows = list(zip(mixing_map.query_positions, measured, strict=True))
    notes = [
        f"input_map: in the row of position {query}, {len(chosen)} of {query + 1} scores are measured by "
        "replacing the token, and the others are estimated and rescaled"
        for query, chosen in rows
        if 0 < len(chosen) <= query
    ]
    if not all(measured):
        notes.append(
            f"input_map: all scores of rows of more than {LONGEST_MEASURED} tokens are estimated; exact=8 "
            "measures the 8 strongest"
        )
    return notes


def recommended_method(model: TransformerLensModel) -> Method:
    """Return the method that `input_map` runs on a model for its default target.

    Raises:
        UnsupportedModelError: If none of the recipes can run.
    """
    part = "joint" if is_encoder_decoder(model, model_class_of(model)) else None
    return _run_first(model, any_prompt(model), -1, None, "auto", {"part": part, "progress": None})[0]


def find_default_row(
    model: TransformerLensModel, prompt: Any, target: TargetLike | None = None, **options: Any
) -> int:
    """Return the position of the row that says most about a prompt.

    It is the one that the target states, else the last one of a decoder, also with an encoder. In a
    bidirectional model it is that of the only mask, else 0, the position of [CLS].

    Args:
        model: As in `lm.run`.
        prompt: As in `lm.run`.
        target: The target, if there is one.
        options: As in `lm.run`.
    """
    model_class = model_class_of(model)
    position = getattr(target, "position", None)
    # The positions of a target are not those of an encoder that a decoder reads.
    position = None if options.get("part") == "encoder" else position
    if isinstance(position, int):
        return position
    if position is None and (is_causal_model(model, model_class) or is_encoder_decoder(model, model_class)):
        return -1
    reading = {name: options.get(name) for name in ("prepend_bos", "attention_mask")}
    taken = further_inputs(model, model_class)
    inputs = {name: value for name, value in options.items() if name in taken}
    part = options.get("part")
    if isinstance(position, str) and part is None and is_encoder_decoder(model, model_class):
        # A target is read at positions of the decoder.
        part = "decoder"
    session = Session(model, {}, part=part)
    read = session.read(prompt, **reading, inputs=inputs)
    if isinstance(position, str):
        return find_query(session.tokens(read), position, "position")
    mask = getattr(getattr(model, "tokenizer", None), "mask_token_id", None)
    places = [] if mask is None else (read.tokens == mask).nonzero()[:, 0].tolist()
    return places[0] if len(places) == 1 else 0


def _run_first(
    model: TransformerLensModel,
    prompt: Any,
    queries: Positions | None,
    target: TargetLike | None,
    n_measured: int | Literal["auto"],
    options: Mapping[str, Any],
) -> tuple[Method, str, MixingMap, list[str]]:
    """Return the first recipe that can run, its name, its map, and why the earlier ones cannot run."""
    reasons: list[str] = []
    for method, name in _list_recipes(model, target, n_measured, options["part"]):
        if isinstance(method, DecompX) and not _is_bidirectional(model, prompt, options):
            continue
        try:
            last = isinstance(method, DecompX) and options.get("layers") is None
            only = {"layers": [-1]} if last else {}
            mixing_map: MixingMap = run(model, prompt, method, queries=queries, **{**options, **only})
            return method, name, mixing_map, reasons
        except UnsupportedModelError as problem:
            reasons.append(str(problem))
    raise UnsupportedModelError(f"input_map: {'; '.join(dict.fromkeys(reasons))}")


def _list_recipes(
    model: TransformerLensModel,
    target: TargetLike | None,
    n_measured: int | Literal["auto"],
    part: str | None,
) -> Iterable[tuple[Method, str]]:
    """Return the recipes for a part of a model, the best one first, each with its name in `EVIDENCE`."""
    asked = predicted(of="log_probability") if target is None else target
    if part == "joint":
        return [(InputGradients(asked), "joint input_gradients")]
    return _recipes(model, asked, n_measured, by_default=target is None)


def _figures(name: str) -> str:
    """Return what was measured of a recipe, as a sentence."""
    return sentence(*EVIDENCE[name]) if name in EVIDENCE else "not measured separately"


def _recipes(
    model: TransformerLensModel, target: TargetLike, n_measured: int | Literal["auto"], by_default: bool
) -> Iterator[tuple[Method, str]]:
    """Yield the recipes, the best one first, each with its name in `EVIDENCE`.

    Args:
        model: The model.
        target: The target.
        n_measured: The number of scores that `TokenPatching` measures.
        by_default: Whether it is the default target, and not one that the user gave.
    """
    patching = TokenPatching(target, replacements=_words(model), n_measured=n_measured)
    names = {0: "token_patching", "auto": "token_patching, measured"}
    yield patching, names.get(n_measured, "token_patching, some measured")
    if by_default:
        yield DecompX(), "decompx"
    yield Gim(target, readout="absolute", activations="ratio"), "gim with ratios"
    yield Gim(target, readout="absolute"), "gim"


def _is_bidirectional(model: TransformerLensModel, prompt: Any, options: Mapping[str, Any]) -> bool:
    """Return whether the model is bidirectional; False for the encoder of an encoder-decoder."""
    try:
        mixing_map = run(model, prompt, "attention", queries=[0], **options)
        # A decoder whose pictures attend in both directions still predicts the next token.
        predicts_next = mixing_map.provenance["predicts_next"]
        return not predicts_next and mixing_map.provenance.get("part") != "encoder"
    except UnsupportedModelError:
        return False


def _words(model: TransformerLensModel) -> tuple[str, ...] | None:
    """Return the replacements of the evidence if each is one token; else None, and replacements are drawn."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return None
    sizes = [len(token_ids(tokenizer, word)) for word in _WORDS]
    return _WORDS if set(sizes) == {1} else None
