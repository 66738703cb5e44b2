"""Every model of the factory by a label, with the expected result: maps, or an error."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from tests.pictured_models import PICTURED_NAMES, pictured
from tests.tiny_models import (
    BRIDGE_NAMES,
    HOOKED_TRANSFORMER_NAMES,
    WIDE_NAMES,
    Unavailable,
    available,
    bridge,
    hooked_encoder,
    hooked_encoder_decoder,
    hooked_transformer,
    is_encoder_decoder,
    is_pair,
    tokens,
)

ENCODER_DECODERS = ("t5", "t5_gated", "bart", "marian")
PARTS = ("encoder", "decoder", "cross")
# `make test` has these models of the matrix: each class, and each kind of block, norm, position and
# feed-forward once. `make test-all` has all models.
USUAL = (
    "bridge gpt2",
    "bridge llama",
    "bridge gemma3",
    "bridge gpt_neox",
    "bridge bloom",
    "bridge mixtral",
    "bridge bert",
    "bridge mamba",
    "HookedTransformer LN",
    "HookedEncoder",
    *(f"HookedEncoderDecoder {part}" for part in PARTS),
)

# These models raise an error with these words for every method. All other models must have maps.
UNSUPPORTED = {
    "bridge gpt2_unscaled": "known to run GPT-2 with scale_attn_weights=False wrongly",
    "bridge falcon_alibi": "known to run Falcon with alibi wrongly",
    "bridge falcon_new": "known to run Falcon's new decoder architecture wrongly",
    "bridge opt_postln": "cannot run OPT with do_layer_norm_before=False",
    "bridge mamba": "without attention there are no values or patterns",
    "bridge deepseek_v3": r"mixing is not verified|DeepSeek-V3 before TransformerLens 4 wrongly",
}
UNSUPPORTED_BEFORE_4 = {
    "bridge cohere": "Cohere before TransformerLens 4 wrongly",
    **{f"bridge {name} {part}": "cannot run T5" for name in ("t5", "t5_gated") for part in PARTS},
}
UNSUPPORTED_BEFORE_3 = {
    f"HookedEncoderDecoder {part}": "not causal in TransformerLens 2.x" for part in ("decoder", "cross")
}
# These read text, but not pictures.
UNSUPPORTED_PICTURES_BEFORE_4 = {
    "bridge gemma3_pictures": "Gemma 3 with pictures before TransformerLens 4 wrongly",
}
_GATED = r"gated attention is not supported"
_LATENT = r"latent attention|DeepSeek-V3"
_WITHOUT = r"TransformerLens has no attention module in any block"
_HIDDEN = r"hooks that never fired: .*an attention kernel that keeps no pattern"
_NO_HOOKS = r"is wrapped without them"
# The same for the models of the wide sweep.
UNSUPPORTED_WIDE = {
    "bridge afmoe": _GATED,
    "bridge laguna": _GATED,
    "bridge qwen3_5_attention": _GATED,
    "bridge bitnet": r"normalized \(attn_sub_norm\) before the output matrix",
    "bridge gemma4": r"the values are normalized \(v_norm\)",
    "bridge olmo_clipped": r"clipped at 1 \(clip_qkv\)",
    "bridge switch encoder": r"hook_pattern is not the attention weights",
    "bridge switch decoder": r"hook_pattern is not the attention weights",
    "bridge jetmoe": _NO_HOOKS,
    "bridge deepseek_v4": _NO_HOOKS,
    "bridge led encoder": _HIDDEN,
    "bridge led decoder": _HIDDEN,
    "bridge longt5 encoder": _HIDDEN,
    **{f"bridge {name}": _LATENT for name in ("deepseek_v2", "glm4_moe_lite", "glm_moe_dsa", "youtu")},
    **{
        f"bridge {name}": _WITHOUT
        for name in ("falcon_mamba", "mamba2", "rwkv", "nemotron_h", "recurrent_gemma")
    },
    **{
        f"bridge {name}": rf"{_GATED}|a hybrid: of 4 blocks"
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    },
}


def _bridges(names: str) -> frozenset[str]:
    return frozenset(f"bridge {name}" for name in names.split())


# What some methods have no formula for. `tests/test_kinds.py` compares these tables with every model, so a
# model that a method can explain is not left out. Two more kinds are known by the part (`Case.is_a`).
KINDS: dict[str, frozenset[str]] = {
    # The blocks compute more than attention and feed-forward.
    "unverified": _bridges("falcon_h1 granite_moe_hybrid"),
    # Only some blocks have attention.
    "hybrid": _bridges("bamba jamba lfm2 olmo_hybrid"),
    # The feed-forward runs as a whole: a mixture, or an unknown activation.
    "whole feed-forward": _bridges(
        "mixtral gpt_oss apertus ernie4_5_moe flex_olmo glm4_moe granite_moe jamba lfm2_moe llama4 "
        "minimax_m2 modernbert_decoder olmoe qwen2_moe qwen3_moe"
    )
    | {"HookedTransformer mixture"},
    "no feed-forward": frozenset({"HookedTransformer attn_only"}),
    "post-norm": _bridges(
        "bert roberta openai_gpt distilbert electra xlm_roberta camembert data2vec_text albert ernie "
        "rembert hubert wav2vec2"
    )
    | {f"bridge {name} {part}" for name in ("bart", "marian") for part in PARTS[:2]}
    | {"HookedEncoder"},
    # A norm or a multiplier on what a branch adds to the residual stream.
    "changed branch": _bridges("gemma2 gemma3 olmo2 granite exaone4 flex_olmo glm4 olmo3 olmo_hybrid")
    | {"HookedTransformer sandwich"},
    "parallel": _bridges("gpt_neox gptj phi falcon_mqa cohere codegen cohere2")
    | {"HookedTransformer parallel"},
    # The logits are more than a final norm and an unembedding (a soft cap, a dense layer), or of classes.
    "changed logits": _bridges("gemma2 modernbert_decoder nanochat vaultgemma vit deit ast"),
}
# Models that have, together, each way to wire a block and each kind of norm, bias, activation and grouping
# (`tests/test_kinds.py`). A test runs its main parameters on all models and the others on these.
OF_EACH_KIND = _bridges(
    "gpt2 llama gemma gemma3 qwen2 gpt_neox gptj gpt_neo opt bloom mpt falcon_mqa olmo olmo2 granite "
    "gpt_bigcode cohere mixtral gpt_oss bert apertus arcee bamba flex_olmo jamba modernbert_decoder "
    "nanochat olmo_hybrid qwen2_moe"
) | {
    *(f"bridge {name} {part}" for name in ("t5", "t5_gated", "bart") for part in PARTS[:2]),
    "bridge blenderbot decoder",
    *(
        f"HookedTransformer {name}"
        for name in "LN LNPre RMS RMSPre none grouped gated parallel sandwich attn_only mixture".split()
    ),
    "HookedEncoder",
    *(f"HookedEncoderDecoder {part}" for part in PARTS[:2]),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One stack of one model."""

    label: str
    part: str | None = None

    @property
    def exists(self) -> bool:
        """Whether the installed TransformerLens has the model. Nothing is built."""
        from lens_mix._classes.model_classes import transformer_lens_version

        kind, _, rest = self.label.partition(" ")
        return (
            available(bridge, rest.split(" ")[0]) if kind == "bridge" else transformer_lens_version()[0] < 4
        )

    def is_a(self, *kinds: str) -> bool:
        """Whether its blocks are of one of these `KINDS`, have "cross" attention, or lead to "no logits"."""
        by_part = {"cross": "decoder", "no logits": "encoder"}
        return any(
            self.part == by_part[kind] if kind in by_part else self.label in KINDS[kind] for kind in kinds
        )

    def build(self, dtype: torch.dtype = torch.float32) -> Any:
        """Return the model; skip the test if this TransformerLens does not have it."""
        kind, _, rest = self.label.partition(" ")
        name = rest.split(" ")[0]
        factories = {
            "bridge": lambda: (pictured if name in PICTURED_NAMES else bridge)(name, dtype),
            "HookedTransformer": lambda: hooked_transformer(name, dtype),
            "HookedEncoder": lambda: hooked_encoder(dtype),
            "HookedEncoderDecoder": lambda: hooked_encoder_decoder(dtype),
        }
        try:
            return factories[kind]()
        except Unavailable as problem:
            pytest.skip(str(problem))

    @property
    def refusal(self) -> str | None:
        """Return the words of the error on the installed TransformerLens; None if maps are expected."""
        from lens_mix._classes.model_classes import transformer_lens_version

        major = transformer_lens_version()[0]
        tables = [UNSUPPORTED]
        tables += [UNSUPPORTED_WIDE] if major > 3 else []
        tables += [UNSUPPORTED_BEFORE_4] if major < 4 else []
        tables += [UNSUPPORTED_BEFORE_3] if major < 3 else []
        return next((table[self.label] for table in tables if self.label in table), None)

    @property
    def picture_refusal(self) -> str | None:
        """Return the words of the error for a prompt with pictures on the installed TransformerLens."""
        from lens_mix._classes.model_classes import transformer_lens_version

        return UNSUPPORTED_PICTURES_BEFORE_4.get(self.label) if transformer_lens_version()[0] < 4 else None

    @property
    def wrong_logits(self) -> bool:
        """Return whether this release has maps but wrong logits (the decoder of TransformerLens 2)."""
        from lens_mix._classes.model_classes import transformer_lens_version

        return self.label == "HookedEncoderDecoder encoder" and transformer_lens_version()[0] < 3


@functools.cache
def model_of(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """Return `case.build(dtype)`, which is built once, for tests that do not change it."""
    return case.build(dtype)


def cases(*, cross: bool = False, refused: bool = True) -> list[Case]:
    """Return the models of the matrix that the installed TransformerLens has.

    Args:
        cross: Whether cross-attention is included, for which most methods are not defined.
        refused: Whether the models that raise an error for every method are included.
    """
    return [case for case in every_case(cross=cross) if case.exists and (refused or case.refusal is None)]


def causal_cases() -> list[Case]:
    """Return the models here that are causal decoders of one stack, with one norm before each branch."""
    return [
        case
        for case in cases(refused=False)
        if case.part is None and not case.is_a("post-norm")
        if case.label != "HookedTransformer bidirectional"
    ]


def case_of(label: str) -> Case:
    """Return the model of the matrix with this label, whether or not it exists here."""
    return next(case for case in every_case(cross=True) if case.label == label)


def every_case(*, cross: bool = False) -> list[Case]:
    """Return the models of the matrix, on any release."""
    found, parts = [], PARTS if cross else PARTS[:2]
    for name in BRIDGE_NAMES:
        if name in ENCODER_DECODERS:
            found += [Case(f"bridge {name} {part}", part) for part in parts]
        else:
            found.append(Case(f"bridge {name}"))
    found += [Case(f"HookedTransformer {name}") for name in HOOKED_TRANSFORMER_NAMES]
    found.append(Case("HookedEncoder"))
    found += [Case(f"HookedEncoderDecoder {part}", part) for part in parts]
    return found


def is_unusual(parameter: object) -> bool:
    """Return whether a test's parameter is a model of the matrix, or a label, that `make test` leaves out."""
    label = getattr(parameter, "label", parameter)
    is_of_a_model = isinstance(parameter, Case) or (isinstance(label, str) and label in _labels())
    return is_of_a_model and label not in USUAL


def is_repeated(parameter: object) -> bool:
    """Return whether a test's parameter is the name of a Bridge that `make test` needs in no second case."""
    is_of_a_bridge = isinstance(parameter, str) and parameter in (*BRIDGE_NAMES, *WIDE_NAMES)
    return is_of_a_bridge and f"bridge {parameter}" not in USUAL and parameter not in ("t5", "bart")


@functools.cache
def _labels() -> frozenset[str]:
    return frozenset(case.label for case in every_case(cross=True))


def wide_cases() -> list[Case]:
    """Return the models of the wide sweep (`tests/test_wide.py`) that the installed TransformerLens has."""
    pairs = [(name, is_pair(name)) for name in WIDE_NAMES]
    found = [
        Case(f"bridge {name}{f' {stack}' if stack else ''}", stack)
        for name, pair in pairs
        for stack in (PARTS[:2] if pair else (None,))
    ]
    return [case for case in found if case.exists]


def pictured_cases() -> list[Case]:
    """Return the decoders of pictures and text that the installed TransformerLens has.

    `tests/test_picture_decoders.py` compares them with an oracle on a prompt with a picture.
    """
    return [case for case in (Case(f"bridge {name}") for name in PICTURED_NAMES) if case.exists]


def prompt_of(model: Any, seq: int = 7, seed: int = 1) -> Any:
    """Return tokens, or a pair of them for an encoder-decoder."""
    first = tokens(model, 1, seq, seed)
    if not is_encoder_decoder(model):
        return first
    return (first, tokens(model, 1, max(2, seq - 2), seed + 50, of_decoder=True))


def maps_of(method: Any, blocks: Any) -> Any:
    """Return the maps of several blocks, the lowest first, as a run computes them."""
    return [method(block) for block in blocks] if method.reads == "block" else method.of_blocks(blocks)


def zeroed(values: torch.Tensor, key: int) -> torch.Tensor:
    """Return values [batch, key, ...] that are zero at one key."""
    values = values.clone()
    values[:, key] = 0
    return values


def slow(*values: Any) -> Any:
    """Return a parameter for `pytest.mark.parametrize` that runs in `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def build_or_skip(factory: Any, *arguments: Any, **keywords: Any) -> Any:
    """Return the model; skip the test if this TransformerLens does not have the class."""
    try:
        return factory(*arguments, **keywords)
    except Unavailable as problem:
        pytest.skip(str(problem))
