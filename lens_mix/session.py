"""One way from prompts to blocks: the clean pass, its proof, and the check on these very prompts.

The runner, statistics and whatever else reads blocks comes through here, so that none of them can forget a
check. A session also holds what is kept during one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from lens_mix.algebra import large_product
from lens_mix.arguments import whole_number
from lens_mix.hooks import HookPair, record_attention
from lens_mix.lens.block import Block
from lens_mix.lens.clean_pass import CleanPass, clean_pass
from lens_mix.lens.masks import AllowedKeys, allowed_keys
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.lens.prompts import Batch, PaddingSide, Prompt, pad, pad_token, read_prompt, token_strings
from lens_mix.lens.proof.check import refuted_here
from lens_mix.lens.proof.engines import choose_engine, logits_refusal, needs_head
from lens_mix.lens.proof.proofs import proof_of
from lens_mix.lens.proof.prove import padding_leaks
from lens_mix.lens.proof.record import Proof
from lens_mix.lens.rows import Rows, Selection, read_selection
from lens_mix.method import Method


class Session:
    """What is asked of a model, read once.

    Args:
        model: any TransformerLens model.
        methods: by their labels; at least one.
        stack: "encoder" or "decoder" of an encoder-decoder.
        engine: "auto", "hooks" or "algebra".
        max_memory: bytes for the temporaries of one step; None: no bound.
        queries: the rows that are asked for; None: all.
        layers: the layers that are asked for; None: all.

    Raises:
        TypeError, ValueError: an option that is none, or that this model can't have.
        UnsupportedModelError: the model, or a method on it, can't be trusted.
    """

    def __init__(
        self,
        model: TransformerLensModel,
        methods: Mapping[str, Method],
        *,
        stack: str | None = None,
        engine: str = "auto",
        max_memory: int | None = None,
        queries: Selection | None = None,
        layers: Selection | None = None,
    ) -> None:
        lens = Lens(model, stack)
        if max_memory is not None:
            max_memory = whole_number("max_memory", max_memory, 1, what="a number of bytes")
        for method in methods.values():
            method.check(lens.n_heads, lens.n_layers)
            reason = logits_refusal(lens, method)
            if reason is not None:
                raise UnsupportedModelError(reason)
        self.lens, self.methods = lens, dict(methods)
        self.engine, self.max_memory, self.queries = engine, max_memory, queries
        self.layers = read_selection(layers, lens.n_layers, "layers") or list(range(lens.n_layers))
        self.run_cache: dict[Any, Any] = {}

    def read(self, prompt: Any, **options: Any) -> Prompt:
        """One prompt as the user gave it (`lens_mix.lens.prompts.read_prompt`)."""
        return read_prompt(self.lens.model, self.lens.model_class, prompt, **options)

    def batches(self, prompts: list[Prompt]) -> list[list[Prompt]]:
        """The prompts as one batch; one by one where lengths differ and the model does not mask padding."""
        lengths = {len(self.mapped_tokens(prompt)) for prompt in prompts}
        lengths |= {len(prompt.tokens) for prompt in prompts}
        alike = len(lengths) == 1 or len(prompts) == 1
        if alike or proof_of(self.lens, prompts[0], padding=True).masks_padding:
            return [prompts]
        return [[prompt] for prompt in prompts]

    def mapped_tokens(self, prompt: Prompt) -> Int[Tensor, " pos"]:
        """The tokens that the mapped stack reads."""
        target = prompt.target
        return target if self.lens.stack.name == "decoder" and target is not None else prompt.tokens

    def layers_of(self, method: Method) -> list[int]:
        """The blocks that a method needs for the layers that are asked for, ascending."""
        return list(range(max(self.layers) + 1)) if method.kind == "input" else sorted(self.layers)

    @contextlib.contextmanager
    def passed(self, prompts: Sequence[Prompt], side: PaddingSide = "right") -> Iterator[Passed]:
        """The prompts after one clean pass, proven and checked; the model is opened once, and left as it was.

        Raises:
            UnsupportedModelError: the model, or a method on it, can't be trusted on these prompts.
        """
        # A lens of its own: modules may have come and gone since the last batch.
        self.lens = lens = Lens(self.lens.model, self.lens.stack.name)
        with lens.evaluation_mode():
            proof = proof_of(lens, prompts[0], head=needs_head(self.methods.values()))
            engines = self._engines(proof)
            by_algebra = "algebra" in engines.values()
            if by_algebra:
                large_product.decide(lens.device)
            batch = pad(prompts, pad_token(lens.model), side)
            real = batch.real_positions(lens.stack.name)
            rows = None if self.queries is None else Rows.of(self.queries, real)
            clean = self._clean_pass(batch, rows, engines)
            leaks = padding_leaks(clean)
            if leaks:
                raise UnsupportedModelError(
                    f"{lens.where(leaks[0])}: the attention mask was ignored (padding got attention weight); "
                    "run prompts of one length, or one by one"
                )
            if by_algebra:
                proof, engines = self._checked(clean, proof, engines)
            yield Passed(self, clean, proof, engines, rows)

    def _engines(self, proof: Proof, no_algebra: str | None = None) -> dict[str, str]:
        return {
            label: choose_engine(method, proof, self.engine, no_algebra)
            for label, method in self.methods.items()
        }

    def _checked(
        self, clean: CleanPass, proof: Proof, engines: dict[str, str]
    ) -> tuple[Proof, dict[str, str]]:
        """The proof and the engines that hold on these prompts.

        If proven parts don't give these prompts' outputs, the proof may be from before a change that leaves
        no trace: a fresh one decides. What that can't explain either (a hook that acts on one position, say)
        is left to hooks.
        """
        layers = self._recorded_layers()
        if refuted_here(clean, proof, layers) is None:
            return proof, engines
        head = needs_head(self.methods.values())
        proof = proof_of(clean.lens, clean.batch.prompts[0], head=head, again=True)
        return proof, self._engines(proof, refuted_here(clean, proof, layers))

    def _recorded_layers(self) -> list[int]:
        return sorted(set().union(*map(self.layers_of, self.methods.values())))

    def _clean_pass(self, batch: Batch, rows: Rows | None, engines: Mapping[str, str]) -> CleanPass:
        """One pass that records what the methods and the check of the prompts need, and no more rows."""
        lens, layers = self.lens, self._recorded_layers()
        for label, method in self.methods.items():
            if method.kind == "input" or not method.takes_rows(engines[label]):
                rows = None
        positions = None if rows is None else rows.positions
        store: dict[str, Tensor] = {}
        fwd_hooks: list[HookPair] = []
        required: list[str] = []
        # The check reads these, whatever the methods record.
        checked = {"pattern", "value"} if "algebra" in engines.values() else set()
        template = lens.stack.attention_template
        for method in self.methods.values():
            for layer in self.layers_of(method):
                fwd_hooks += method.hooks(layer, store, queries=positions, attention=template)
                required += [lens.stack.hook_name(role, layer) for role in method.records]
            checked -= method.records
        for layer in layers:
            fwd_hooks += record_attention(
                layer, store, sorted(checked), queries=positions, attention=template
            )
        reads_end = any(method.reads_last_residual for method in self.methods.values())
        last = lens.n_layers - 1 if reads_end else layers[-1]
        # Padding may leak in any block that runs.
        padded = not bool(batch.real_positions(lens.stack.name).all())
        watched = range(last + 1) if padded else layers
        return clean_pass(
            lens,
            batch,
            fwd_hooks,
            store,
            required=required,
            watched=watched,
            stop_after=last,
            rows=rows,
            run_cache=self.run_cache,
        )


@dataclasses.dataclass(frozen=True)
class Passed:
    """Prompts after a clean pass, proven and checked.

    Attributes:
        session: what was asked.
        clean: the clean pass.
        proof: what every block was found to be.
        engines: by the methods' labels.
        rows: the rows that are asked for; None: all.
    """

    session: Session
    clean: CleanPass
    proof: Proof
    engines: Mapping[str, str]
    rows: Rows | None

    def blocks(self, label: str) -> list[Block]:
        """The blocks of a method, with the rows that it is to make."""
        method, engine = self.session.methods[label], self.engines[label]
        layers = self.session.layers_of(method)
        makes_rows = self.rows is not None and method.takes_rows(engine)
        cut = set(layers[-1:] if method.kind == "input" else layers) if makes_rows else set()
        return [self._block(layer, engine, layer in cut) for layer in layers]

    def _block(self, layer: int, engine: str, cut: bool) -> Block:
        queries = self.rows.positions if cut and self.rows is not None else None
        anatomies = self.proof.anatomy
        above = anatomies[layer + 1] if layer + 1 < len(anatomies) else None
        return Block(self.clean, layer, anatomies[layer], engine, self.session.max_memory, queries, above)

    def allowed_keys(self) -> AllowedKeys:
        """Which keys the recorded rows may see, in every watched layer."""
        return allowed_keys(self.clean, self.proof.causal)

    def token_ids(self, index: int) -> Int[Tensor, " pos"]:
        """The tokens of one prompt that the mapped stack reads."""
        return self.session.mapped_tokens(self.clean.batch.prompts[index])

    def tokens(self, index: int) -> list[str]:
        """The same as strings."""
        return token_strings(self.session.lens.model, self.token_ids(index))
