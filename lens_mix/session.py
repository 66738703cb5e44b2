"""What the methods of one run make of one batch: a clean pass, proven engines, and a map per prompt."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtyping import Bool
from torch import Tensor
from tqdm.auto import tqdm

from lens_mix.algebra import large_product
from lens_mix.lens import masks, provenance
from lens_mix.lens.block import Block
from lens_mix.lens.model import CleanPass, Lens
from lens_mix.lens.model_classes import NotRebuiltError, UnsupportedModelError
from lens_mix.lens.prompts import Batch, PaddingSide, Prompt, pad, pad_token, token_strings
from lens_mix.lens.proof.prove import holds_here
from lens_mix.lens.proof.record import Proof
from lens_mix.lens.proof.support import choose_engine, needs_head, proof_of
from lens_mix.maps import MixingMap
from lens_mix.methods import Method

# Bytes of tensors that a clean pass records only to spare work.
_WANTED_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked of a run, read once."""

    methods: dict[str, Method]
    single: bool
    engine: str
    max_memory: int | None
    progress: bool
    prepend_bos: bool | None


def run_batch(
    lens: Lens, prompts: list[Prompt], options: Options, side: PaddingSide
) -> list[dict[str, MixingMap]]:
    """The maps of each prompt by their labels, padding cut away.

    Raises:
        UnsupportedModelError: the model or a method on it can't be trusted, with the reason.
    """
    proof = proof_of(lens, prompts[0], head=needs_head(options.methods.values()))
    groups = [
        {label: method.key_groups(_own_length(lens, prompt)) for label, method in options.methods.items()}
        for prompt in prompts
    ]
    roles = sorted(set().union(*(method.needs for method in options.methods.values())))
    names = [lens.stack.hook_name(role, layer) for role in roles for layer in range(lens.n_layers)]
    batch, engines = pad(prompts, pad_token(lens.model), side), _engines(options, proof)
    wanted, checked = _wanted(lens, batch, engines, options), _is_checked_first(engines, options)
    if "algebra" in engines.values():
        large_product.decide(batch.tokens.device)
    clean = lens.clean_pass(batch, names, optional=wanted, to_be_checked=checked)
    _require_masked_padding(lens, clean)
    mapped, engines = _map_proven(lens, clean, proof, engines, options)
    allowed = masks.allowed_keys(lens, clean)
    return [
        _prompt_maps(lens, clean, index, mapped, engines, groups[index], allowed, options)
        for index in range(len(prompts))
    ]


def _wanted(lens: Lens, batch: Batch, engines: dict[str, str], options: Options) -> list[str]:
    """The hook points that spare work, where they are few enough to keep."""
    by_algebra = [method for label, method in options.methods.items() if engines[label] == "algebra"]
    roles = set().union(*(method.wants for method in by_algebra))
    if not roles or options.max_memory is not None:
        return []
    known = lens.model.hook_dict
    names = [lens.stack.hook_name(role, layer) for role in sorted(roles) for layer in range(lens.n_layers)]
    names = [name for name in names if name in known]
    cfg = lens.model.cfg
    width = int(getattr(cfg, "d_mlp", None) or 4 * cfg.d_model)
    size = batch.real_positions(lens.stack.name).numel() * width * lens.dtype.itemsize
    return names if size * len(names) <= _WANTED_BYTES else []


def _engines(options: Options, proof: Proof, no_algebra: str | None = None) -> dict[str, str]:
    return {
        label: choose_engine(method, proof, options.engine, no_algebra)
        for label, method in options.methods.items()
    }


def _map_proven(
    lens: Lens, clean: CleanPass, proof: Proof, engines: dict[str, str], options: Options
) -> tuple[dict[str, _Mapped], dict[str, str]]:
    """The maps and their engines; algebra only where the proven parts give these prompts' own outputs.

    If they don't, the proof may be from before a change that leaves no trace: a fresh one decides. What that
    can't explain either (a hook that acts on one position, say) is left to hooks.
    """
    if not _is_checked_first(engines, options) or holds_here(lens, clean, proof) is None:
        with contextlib.suppress(NotRebuiltError):
            return _map_stack(lens, clean, proof, engines, options), engines
    needs = needs_head(options.methods.values())
    proof = proof_of(lens, clean.batch.prompts[0], head=needs, again=True)
    engines = _engines(options, proof, holds_here(lens, clean, proof))
    try:
        return _map_stack(lens, clean, proof, engines, options), engines
    except NotRebuiltError as problem:
        engines = _engines(options, proof, str(problem))
        return _map_stack(lens, clean, proof, engines, options), engines


def _is_checked_first(engines: dict[str, str], options: Options) -> bool:
    """Whether the proven parts are held against the clean pass before any map is made.

    A method that checks itself does so on the way: too late where others wait for it, or memory is bound.
    """
    alone = options.max_memory is None and all(method.checks_parts for method in options.methods.values())
    return "algebra" in engines.values() and not alone


def _own_length(lens: Lens, prompt: Prompt) -> int:
    target = prompt.target
    return len(target) if lens.stack.name == "decoder" and target is not None else len(prompt.tokens)


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """What one method made of a batch, [batch, layer, (head,) query, key] with padding in, and its blocks."""

    scores: Tensor
    blocks: list[Block]


def _map_stack(
    lens: Lens, clean: CleanPass, proof: Proof, engines: dict[str, str], options: Options
) -> dict[str, _Mapped]:
    mapped = {}
    with tqdm(total=lens.n_layers * len(options.methods), disable=not options.progress, leave=False) as bar:
        for label, method in options.methods.items():
            bar.set_description(label)
            blocks = [
                Block(
                    lens,
                    clean,
                    layer,
                    proof.anatomy[layer],
                    engines[label],
                    options.max_memory,
                    next_anatomy=proof.anatomy[layer + 1] if layer + 1 < lens.n_layers else None,
                )
                for layer in range(lens.n_layers)
            ]
            with lens.undisturbed():
                scores = method.of_stack(_Watched(blocks, bar))
            mapped[label] = _Mapped(scores, blocks)
    return mapped


class _Watched(Sequence[Block]):
    """Blocks that move a progress bar when they are gone through."""

    def __init__(self, blocks: list[Block], bar: Any) -> None:
        self._blocks, self._bar = blocks, bar

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: Any) -> Any:
        return self._blocks[index]

    def __iter__(self) -> Iterator[Block]:
        for block in self._blocks:
            yield block
            self._bar.update()


def _prompt_maps(
    lens: Lens,
    clean: CleanPass,
    index: int,
    mapped: dict[str, _Mapped],
    engines: dict[str, str],
    groups: dict[str, list[list[int]] | None],
    allowed: masks.AllowedKeys,
    options: Options,
) -> dict[str, MixingMap]:
    own = clean.batch.real_positions(lens.stack.name)[index].nonzero()[:, 0]
    prompt = clean.batch.prompts[index]
    read = prompt.target if lens.stack.name == "decoder" and prompt.target is not None else prompt.tokens
    tokens = token_strings(lens.model, read)
    maps = {}
    for label, method in options.methods.items():
        seen = allowed.reaching() if method.kind == "input" else allowed
        causal, mask = seen.of_prompt(index, own)
        scores = mapped[label].scores[index].index_select(-2, own)
        spans = groups[label]
        key_tokens = None
        if spans is None:
            scores = scores.index_select(-1, own)
        else:
            key_tokens = ["".join(tokens[position] for position in span) for span in spans]
        scores = seen.without_rounding(scores, index, own, spans)
        maps[label] = MixingMap(
            scores=scores.clone(),
            tokens=tokens,
            method=method.name,
            causal=causal and spans is None,
            mask=None if spans is not None else mask,
            key_tokens=key_tokens,
            parameters=method.parameters(),
            residual=method.residual,
            kind=method.kind,
            provenance=provenance.provenance(lens, engines[label], options.prepend_bos)
            | provenance.details(mapped[label].blocks, index),
            notes=(
                *provenance.notes(scores),
                *(text for block in mapped[label].blocks for text in block.warnings[index]),
            ),
        )
    return maps


def _require_masked_padding(lens: Lens, clean: CleanPass) -> None:
    """A padded key that got weight would be mixed into real positions: refuse."""
    real: Bool[Tensor, "batch pos"] = clean.batch.real_positions(lens.stack.name)
    if bool(real.all()):
        return
    for layer, seen in clean.seen.items():
        if bool((seen & real[:, :, None] & ~real[:, None, :]).any()):
            raise UnsupportedModelError(
                f"{lens.where(layer)}: the attention mask was ignored (padding got attention weight); "
                "run prompts of one length, or one by one"
            )
