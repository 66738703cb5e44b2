"""Which method can run on which model, with which engine, and the reason where it cannot."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from lens_mix.lens.block import Block
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import UnsupportedModelError, transformer_lens_version
from lens_mix.lens.prompts import Prompt, device_of, read_prompt
from lens_mix.lens.proof import known_faults
from lens_mix.lens.proof.prove import prove, short_batch
from lens_mix.lens.proof.record import ALGEBRA_PARTS, HEAD, HEAD_UNPROVEN, Proof

_proofs: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Proof]]] = weakref.WeakKeyDictionary()


@runtime_checkable
class HasEngines(Protocol):
    """What support needs to know of a method."""

    name: ClassVar[str]
    engines: ClassVar[tuple[str, ...]]


def proof_of(lens: Lens, prompt: Prompt, *, head: bool = False, again: bool = False) -> Proof:
    """The proof of the lens's stack: made on the first call, and again when weights or hooks have changed.

    Args:
        lens: the face of the model.
        prompt: what to prove it on.
        head: whether the head has to be proven too (`needs_head`).
        again: make it anew whatever is kept.
    """
    kept = _proofs.setdefault(lens.model, {}).get(lens.stack.name)
    proof = kept[1] if not again and kept is not None and kept[0] == _state(lens) else None
    if proof is not None and not (head and proof.head_refusal == HEAD_UNPROVEN):
        return proof
    proof = prove(lens, prompt) if proof is None else proof
    if head:
        proof = dataclasses.replace(proof, head_refusal=_head_refusal(lens, prompt, proof))
    # Taken afterwards: the Bridge puts hooks of its own on norms in the first forward pass.
    _proofs[lens.model][lens.stack.name] = (_state(lens), proof)
    return proof


def _head_refusal(lens: Lens, prompt: Prompt, proof: Proof) -> str | None:
    clean = lens.clean_pass(short_batch(lens, prompt)[1], see_keys=False)
    last = lens.n_layers - 1
    try:
        Block(lens, clean, last, proof.anatomy[last], "algebra", None).head()
    except UnsupportedModelError as problem:
        return str(problem)
    return None


def needs_head(methods: Iterable[object]) -> bool:
    """Whether one of the methods takes logits apart, so that the head has to be proven."""
    return any(HEAD in getattr(method, "parts", ()) for method in methods)


def _state(lens: Lens) -> tuple[Any, ...]:
    """Changes whenever weights are edited in place, replaced, moved or cast, or hooks come or go."""
    weights = tuple(
        (p.data_ptr(), None if p.is_inference() else p._version, p.dtype) for p in lens.model.parameters()
    )
    # The keys are numbers that torch gives out once, so a hook that took another's place is seen.
    hooks = tuple((*m._forward_hooks, *m._forward_pre_hooks) for m in lens.model.modules())
    return weights, hooks


def refusal(proof: Proof, engine: str, method: HasEngines | None = None) -> str | None:
    """Why an engine can't run on a proven model; None when it can.

    Args:
        proof: the model's proof.
        engine: which engine.
        method: whose algebra: it may need fewer parts than all (`parts`), and may know blocks that its
            formulas don't speak of (`refuses`).
    """
    if engine != "algebra":
        return proof.hooks_refusal
    parts = getattr(method, "parts", ALGEBRA_PARTS)
    reason = proof.hooks_refusal or proof.failure(parts)
    if reason is None and method is not None and hasattr(method, "refuses"):
        told = ((layer, method.refuses(anatomy)) for layer, anatomy in enumerate(proof.anatomy))
        reason = next((f"block {layer}: {why}" for layer, why in told if why is not None), None)
    return proof.head_refusal if reason is None and HEAD in parts else reason


def logits_refusal(lens: Lens, method: HasEngines) -> str | None:
    """Why a method with a target can't run on a model whose logits are wrong; None when it can."""
    wrong = (
        known_faults.wrong_logits(lens.model_class, transformer_lens_version())
        if hasattr(method, "target")
        else None
    )
    return None if wrong is None else f"{method.name} can't run on this model: {wrong}"


def choose_engine(method: HasEngines, proof: Proof, engine: str, no_algebra: str | None = None) -> str:
    """The engine a method will run with.

    Args:
        method: the method.
        proof: the model's proof.
        engine: "auto" for the first of the method's engines that the proof allows, or one by name.
        no_algebra: why algebra can't run on this prompt, though the proof allows it.

    Raises:
        ValueError: an unknown engine, or one that the method does not have.
        UnsupportedModelError: the proof forbids it.
    """
    if engine not in ("auto", "hooks", "algebra"):
        raise ValueError(f"engine: expected 'auto', 'hooks' or 'algebra', got {engine!r}")
    if engine == "auto" or method.engines == ("recorded",):
        options: tuple[str, ...] = method.engines
    elif engine in method.engines:
        options = (engine,)
    else:
        raise ValueError(f"engine: {method.name} has the engines {list(method.engines)}, got {engine!r}")
    reasons = []
    for option in options:
        reason = refusal(proof, option, method) or (no_algebra if option == "algebra" else None)
        if reason is None:
            return option
        reasons.append(f"{option}: {reason}")
    raise UnsupportedModelError(f"{method.name} can't run on this model: {'; '.join(reasons)}")


@dataclasses.dataclass(frozen=True)
class Support:
    """A table method x model: `ok` with the engine, or the reason why not.

    Attributes:
        model: the model's name.
        rows: one (method, engine, reason) per method; engine None when refused, reason "" when not.
    """

    model: str
    rows: tuple[tuple[str, str | None, str], ...]

    def __iter__(self) -> Iterator[tuple[str, str | None, str]]:
        return iter(self.rows)

    def __getitem__(self, method: str) -> str:
        """Either "ok (engine)" or the reason."""
        for name, engine, reason in self.rows:
            if name == method:
                return reason if engine is None else f"ok ({engine})"
        raise KeyError(f"expected one of {[name for name, _, _ in self.rows]}, got {method!r}")

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with columns method, engine, reason."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=["method", "engine", "reason"])

    def __str__(self) -> str:
        width = max(len(name) for name, _, _ in self.rows)
        lines = [f"{name:<{width}}  {self[name]}" for name, _, _ in self.rows]
        return "\n".join([f"support for {self.model}", *lines])

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class Check:
    """The proof of a model, ready to print.

    Attributes:
        model: the model's name.
        proof: rebuilding error per block and part, and what each block was found to be.
    """

    model: str
    proof: Proof

    @property
    def ok(self) -> bool:
        """Whether every part of every block is proven."""
        return self.proof.algebra_refusal is None

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with columns layer, part, error, tolerance, ok, note."""
        import pandas as pd

        rows = [
            (entry.layer, entry.part, entry.error, entry.tolerance, entry.ok, entry.note)
            for entry in self.proof.parts
        ]
        return pd.DataFrame(rows, columns=["layer", "part", "error", "tolerance", "ok", "note"])

    def __str__(self) -> str:
        parts = list(dict.fromkeys(entry.part for entry in self.proof.parts))
        errors = {(entry.layer, entry.part): entry for entry in self.proof.parts}
        lines = [
            f"proof for {self.model}: largest relative error per block and part "
            f"(accepted: {self.proof.parts[0].tolerance:.0e})",
            "block  " + "  ".join(f"{part:>12}" for part in parts) + "  anatomy",
        ]
        for layer, anatomy in enumerate(self.proof.anatomy):
            cells = [_cell(errors[layer, part].error, errors[layer, part].ok) for part in parts]
            wiring = f"{anatomy.placement}-norm" if anatomy.placement != "none" else "no norm"
            if anatomy.parallel:
                wiring += ", parallel"
            lines.append(
                f"{layer:>5}  " + "  ".join(cells) + f"  {wiring}, feed-forward {anatomy.feed_forward_kind}"
            )
        lines.append("head: proven" if self.proof.head_refusal is None else self.proof.head_refusal)
        lines.append(
            "padding is " + ("masked" if self.proof.masks_padding else "NOT masked: prompts run one by one")
        )
        for name, reason in (("hooks", self.proof.hooks_refusal), ("algebra", self.proof.algebra_refusal)):
            lines.append(f"{name}: " + ("proven" if reason is None else f"refused: {reason}"))
        return "\n".join(lines)

    __repr__ = __str__


def _cell(error: float | None, ok: bool) -> str:
    return f"{'-':>12}" if error is None else f"{error:>11.1e}{' ' if ok else '!'}"


def check(
    model: Any,
    prompt: Any = None,
    *,
    stack: str | None = None,
    prepend_bos: bool | None = None,
    **inputs: Any,
) -> Check:
    """The proof: rebuild every block from its parts on a short piece of `prompt` and print the errors.

    Args:
        model: any TransformerLens model.
        prompt: a string, tokens, or a pair for an encoder-decoder; None for eight tokens of the vocabulary.
        stack: "encoder" or "decoder" of an encoder-decoder.
        prepend_bos: as in TransformerLens.
        inputs: further model inputs by name.

    Raises:
        UnsupportedModelError: the model can't be looked through at all.
    """
    lens = Lens(model, stack)
    if prompt is None:
        prompt = _any_tokens(model)
    read = read_prompt(model, lens.model_class, prompt, prepend_bos=prepend_bos, inputs=inputs)
    return Check(model_name(model), proof_of(lens, read, head=True, again=True))


def support_table(model: Any, methods: Iterable[HasEngines], stack: str | None = None) -> Support:
    """Which of the methods can run on the model (see `lens_mix.support`)."""
    rows: list[tuple[str, str | None, str]] = []
    methods = list(methods)
    try:
        lens = Lens(model, stack)
        read = read_prompt(model, lens.model_class, _any_tokens(model))
        proof = proof_of(lens, read, head=needs_head(methods))
    except (UnsupportedModelError, RuntimeError) as problem:
        return Support(model_name(model), tuple((method.name, None, str(problem)) for method in methods))
    for method in methods:
        wrong = logits_refusal(lens, method)
        if wrong is not None:
            rows.append((method.name, None, wrong))
            continue
        try:
            rows.append((method.name, choose_engine(method, proof, "auto"), ""))
        except UnsupportedModelError as problem:
            rows.append((method.name, None, str(problem)))
    return Support(model_name(model), tuple(rows))


def model_name(model: Any) -> str:
    """What the model calls itself."""
    name = getattr(getattr(model, "cfg", None), "model_name", None)
    config = getattr(getattr(model, "original_model", None), "config", None)
    return str(name or getattr(config, "_name_or_path", None) or type(model).__name__)


def _any_tokens(model: Any) -> torch.Tensor:
    d_vocab = int(model.cfg.d_vocab)
    return (torch.arange(8, device=device_of(model)) * 7 + d_vocab // 2) % d_vocab
