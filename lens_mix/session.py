"""One way from prompts to blocks: the clean pass, its verification, and the check on these very prompts.

The runner, statistics and whatever else reads blocks comes through here, so that none of them can forget a
check. A session also holds what is kept during one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from jaxtyping import Int
from torch import Tensor

from lens_mix.algebra.large_product import by_onednn
from lens_mix.arguments import whole_number
from lens_mix.hooks import record_all, record_attention
from lens_mix.hooks.record import RESID_PRE
from lens_mix.lens.autograd_graph import AutogradGraph
from lens_mix.lens.batches import Batch, PaddingSide, Prompt, pad
from lens_mix.lens.block import Block
from lens_mix.lens.clean_pass import CleanPass, clean_pass
from lens_mix.lens.cross import names_before_cross, streams_before_cross
from lens_mix.lens.effort import Effort
from lens_mix.lens.masks import AllowedKeys, allowed_keys
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.lens.prompts import pad_token, read_prompt
from lens_mix.lens.raw_errors import LibraryErrors
from lens_mix.lens.rows import Rows, Selection, read_selection
from lens_mix.lens.state import reading
from lens_mix.lens.token_strings import token_strings
from lens_mix.lens.users_hooks import carries_users_hooks, named_users_hooks
from lens_mix.lens.verification.engines import choose_engine, find_obstacle, needs_unembedding
from lens_mix.lens.verification.kept import verification_of
from lens_mix.lens.verification.prompt_check import (
    describe_user_hooks,
    find_input_mismatch,
    find_mismatch,
    find_unmixed,
)
from lens_mix.lens.verification.verify import padding_leaks
from lens_mix.lens.verification_record import UNEMBEDDING, VALUE, Verification
from lens_mix.method import Method


class Session:
    """What is asked of a model, read once.

    Args:
        model: any TransformerLens model.
        methods: by their labels; at least one.
        part: "encoder", "decoder", "cross" or "joint" of an encoder-decoder.
        engine: "auto", "hooks" or "algebra", for all methods or by their labels; "auto" for any other label.
        max_memory: bytes for the temporaries of one step; None: no bound.
        queries: the rows that are asked for; None: all.
        layers: the layers that are asked for; None: all that have attention.
        progress: True: bars over the passes; False: a warning before many of them; None: neither.

    Raises:
        TypeError, ValueError: an option that is none, or that this model can't have.
        UnsupportedModelError: the model, or a method on it, can't be trusted.
    """

    def __init__(
        self,
        model: TransformerLensModel,
        methods: Mapping[str, Method],
        *,
        part: str | None = None,
        engine: str | Mapping[str, str] = "auto",
        max_memory: int | None = None,
        queries: Selection | None = None,
        layers: Selection | None = None,
        progress: bool | None = None,
    ) -> None:
        self.effort = Effort(progress)
        with LibraryErrors(model):
            lens = Lens(model, part)
        if max_memory is not None:
            max_memory = whole_number("max_memory", max_memory, 1, what="a number of bytes")
        for method in methods.values():
            method.check(lens.n_heads, lens.n_layers, lens.stack.attention_layers)
            reason = find_obstacle(lens, method)
            if reason is not None:
                raise UnsupportedModelError(reason)
        self.lens, self.methods = lens, dict(methods)
        self.engine, self.max_memory, self.queries = engine, max_memory, queries
        present = lens.stack.attention_layers
        self.layers = read_selection(layers, lens.n_layers, "layers") or present
        if not set(self.layers) <= set(present):
            raise ValueError(f"layers: expected some of {present}, got {self.layers} ({lens.stack.gaps})")
        whole = [label for label, method in methods.items() if method.scope == "model"]
        if whole and lens.n_layers - 1 not in self.layers:
            raise ValueError(
                f"layers: {', '.join(whole)} gives one map, of the whole model, which counts as the last "
                f"layer's ({lens.n_layers - 1}); expected it among the layers, got {self.layers}"
            )
        self.recorded_layers = sorted(set().union(*map(self.layers_of, self.methods.values())))

    def read(self, prompt: Any, **options: Any) -> Prompt:
        """One prompt as the user gave it (`lens_mix.lens.prompts.read_prompt`)."""
        stack = self.lens.stack.name if self.lens.stack.reads_target else None
        with reading(self.lens.model):
            return read_prompt(self.lens.model, self.lens.model_class, prompt, target_for=stack, **options)

    def batches(self, prompts: list[Prompt], side: PaddingSide = "right") -> list[list[Prompt]]:
        """Return the prompts as one batch, or one by one.

        They run one by one if their lengths differ and the model does not mask padding, or if its rotary
        angles depend on the longest of them. Padding is not masked if the user gives positions either,
        because a mask changes what these mean.
        """
        reach = [self._reach(prompt) for prompt in prompts]
        if self.lens.angles_differ(min(map(min, reach)), max(map(max, reach))):
            return [[prompt] for prompt in prompts]
        lengths = {len(self.mapped_tokens(prompt)) for prompt in prompts}
        lengths |= {len(prompt.tokens) for prompt in prompts}
        alike = len(lengths) == 1 or len(prompts) == 1
        given = any(set(prompt.inputs) - {"token_type_ids"} for prompt in prompts)
        with LibraryErrors(self.lens.model):
            masks = (
                not (alike or given)
                and verification_of(self.lens, prompts[0], padding=side).masks_padding[side]
            )
        if alike or masks:
            return [prompts]
        return [[prompt] for prompt in prompts]

    def _reach(self, prompt: Prompt) -> list[int]:
        """Return the largest position of each side of a prompt, plus one."""
        positions = prompt.inputs.get("position_ids")
        source = len(prompt.tokens) if positions is None else int(positions.max()) + 1
        return [source] if prompt.target is None else [source, len(prompt.target)]

    def mapped_tokens(self, prompt: Prompt) -> Int[Tensor, " pos"]:
        """The tokens that the mapped stack reads."""
        target = prompt.target
        return target if self.lens.stack.reads_target and target is not None else prompt.tokens

    def key_tokens(self, prompt: Prompt) -> Int[Tensor, " key"]:
        """The tokens that the keys stand for."""
        mapped_tokens = self.mapped_tokens(prompt)
        if self.lens.stack.source is not None:
            return torch.cat([prompt.tokens, mapped_tokens])
        return prompt.tokens if self.lens.stack.is_cross else mapped_tokens

    def mapped_layers(self, method: Method) -> list[int]:
        """The layers that a method's map has."""
        return [self.lens.n_layers - 1] if method.scope == "model" else self.layers

    def layers_of(self, method: Method) -> list[int]:
        """The blocks that a method needs for the layers that are asked for, ascending."""
        return list(range(max(self.layers) + 1)) if method.scope != "layer" else sorted(self.layers)

    @contextlib.contextmanager
    def checked_pass(self, prompts: Sequence[Prompt], side: PaddingSide = "right") -> Iterator[CheckedPass]:
        """The prompts after one clean pass, verified and checked; the model is opened once, and left as it was.

        Raises:
            UnsupportedModelError: the model, or a method on it, can't be trusted on these prompts.
        """
        # A lens of its own: modules may have come and gone since the last batch.
        self.lens = lens = Lens(self.lens.model, self.lens.stack.name)
        with LibraryErrors(lens.model), lens.evaluation_mode():
            verification = verification_of(lens, prompts[0], head=needs_unembedding(self.methods.values()))
            engines = self._engines(verification)
            by_algebra = "algebra" in engines.values()
            if by_algebra:
                # What it measures once is measured before anything counts memory or operations as its own.
                by_onednn(torch.empty(0, dtype=torch.float32, device=lens.device))
            batch = pad(prompts, pad_token(lens.model), side)
            real = batch.real_positions(lens.stack.name)
            rows = None if self.queries is None else Rows.of(self.queries, real)
            watched = self.recorded_layers if carries_users_hooks(lens.modules) else []
            clean = self._clean_pass(batch, rows, engines, watched, self._graph(batch, verification))
            entering = streams_before_cross(clean, verification.anatomy)
            clean = dataclasses.replace(clean, z_factors=verification.z_factors, entering=entering)
            different = find_input_mismatch(clean)
            if different is not None:
                raise UnsupportedModelError(different)
            leaks = padding_leaks(clean)
            if leaks:
                raise UnsupportedModelError(
                    f"{lens.where(leaks[0])}: the attention mask was ignored (padding got attention weight); "
                    "run prompts of one length, or one by one"
                )
            if by_algebra:
                clean, verification, engines = self._checked(clean, verification, engines)
            # The engine "recorded" reads pattern and values of this pass, and would miss a hook of the user's
            # that edits z. Replays run with that hook on, and algebra was compared with the blocks' outputs.
            reason = find_unmixed(clean, watched) if "recorded" in engines.values() else None
            if reason is not None:
                self._refuse(reason)
            yield CheckedPass(
                self, clean, verification, engines, rows, describe_user_hooks(clean, verification, watched)
            )

    def _engines(self, verification: Verification, no_algebra: str | None = None) -> dict[str, str]:
        try:
            return {
                label: choose_engine(method, verification, self._engine(label), no_algebra)
                for label, method in self.methods.items()
            }
        except UnsupportedModelError as problem:
            self._refuse(str(problem))

    def _engine(self, label: str) -> str:
        return self.engine if isinstance(self.engine, str) else self.engine.get(label, "auto")

    def _refuse(self, reason: str) -> NoReturn:
        """With the hooks that may be in the way."""
        names = named_users_hooks(self.lens.model)
        hooks = f"; these hooks are on the model: {', '.join(names[:5])}{', ...' * (len(names) > 5)}"
        raise UnsupportedModelError(reason + hooks * bool(names))

    def _checked(
        self, clean: CleanPass, verification: Verification, engines: dict[str, str]
    ) -> tuple[CleanPass, Verification, dict[str, str]]:
        """The pass, the verification and the engines that hold on these prompts.

        If verified parts don't give these prompts' outputs, the verification may be from before a change that leaves
        no trace: a fresh one decides. What that can't explain (a hook on one position, say) is left to hooks.
        """
        layers = self.recorded_layers
        values = any(VALUE in method.needs for method in self.methods.values())
        if (
            find_mismatch(clean, verification, layers, values, self._rebuilt_layers(verification, engines))
            is None
        ):
            return clean, verification, engines
        head = needs_unembedding(self.methods.values())
        verification = verification_of(clean.lens, clean.batch.prompts[0], head=head, again=True)
        clean = dataclasses.replace(clean, z_factors=verification.z_factors)
        whole = self._rebuilt_layers(verification, engines)
        return (
            clean,
            verification,
            self._engines(verification, find_mismatch(clean, verification, layers, values, whole)),
        )

    def _rebuilt_layers(self, verification: Verification, engines: Mapping[str, str]) -> set[int]:
        """The blocks whose feed-forward is to be computed by algebra."""
        return {
            layer
            for label, method in self.methods.items()
            if engines[label] == "algebra"
            for layer in self.layers_of(method)
            if "feed_forward" in method.needs_for(verification.anatomy[layer])
        }

    def _clean_pass(
        self,
        batch: Batch,
        rows: Rows | None,
        engines: Mapping[str, str],
        hooked: Sequence[int],
        graph: AutogradGraph | None,
    ) -> CleanPass:
        """One pass that records what the methods and the check of the prompts need, and no more rows.

        `hooked` are the layers where z is compared, as hooks of the user's may edit it.
        """
        lens, layers = self.lens, self.recorded_layers
        for label, method in self.methods.items():
            if method.scope != "layer" or not method.takes_rows(engines[label]):
                rows = None
        positions = None if rows is None else rows.positions
        store: dict[str, Tensor] = {}
        # The check reads these, whatever the methods record.
        checked = {"pattern", "value"} if "algebra" in engines.values() or hooked else set()
        checked |= {"z"} if hooked else set()
        template = lens.stack.attention_template
        required = names_before_cross(lens, layers)
        fwd_hooks = record_all(store, required)
        for method in self.methods.values():
            for layer in self.layers_of(method):
                pairs = method.hooks(layer, store, queries=positions, attention=template)
                # What enters a block is read from its call, which every class shows.
                fwd_hooks += [pair for pair in pairs if pair[0] != f"{lens.where(layer)}.hook_resid_pre"]
                required += [lens.stack.hook_name(role, layer) for role in method.records - {RESID_PRE}]
            checked -= method.records  # recorded already
        for layer in layers:
            fwd_hooks += record_attention(
                layer, store, sorted(checked), queries=positions, attention=template
            )
        reads_end = any(UNEMBEDDING in method.needs for method in self.methods.values())
        last = lens.n_layers - 1 if reads_end else layers[-1]
        # Padding may leak in any block that runs.
        padded = not bool(batch.real_positions(lens.stack.name).all())
        present = [layer for layer in lens.stack.attention_layers if layer <= last]
        watched = present if padded else layers
        return clean_pass(
            lens,
            batch,
            fwd_hooks,
            store,
            required=required,
            watched=watched,
            stop_after=last,
            rows=rows,
            graph=graph,
        )

    def _graph(self, batch: Batch, verification: Verification) -> AutogradGraph | None:
        """The graph that the clean pass is to leave; of one prompt, as it holds all blocks' activations."""
        anatomies = list(verification.anatomy.values())
        rules = next(filter(None, (method.clean_rules(anatomies) for method in self.methods.values())), None)
        alone = len(batch) == 1 and self.max_memory is None and not self.lens.encoder_decoder
        # In inference mode the target refuses, with the reason.
        if rules is None or not alone or torch.is_inference_mode_enabled():
            return None
        return AutogradGraph(self.lens, anatomies, rules)


@dataclasses.dataclass(frozen=True)
class CheckedPass:
    """Prompts after a clean pass, verified and checked.

    Attributes:
        session: what was asked.
        clean: the clean pass.
        verification: what every block was found to be.
        engines: by the methods' labels.
        rows: the rows that are asked for; None: all.
        hook_notes: the sentences about edits by the user's hooks, by layer, for the record.
    """

    session: Session
    clean: CleanPass
    verification: Verification
    engines: Mapping[str, str]
    rows: Rows | None
    hook_notes: Mapping[int, Sequence[str]]

    def blocks(self, label: str) -> list[Block]:
        """The blocks of a method, with the rows that it is to make."""
        method, engine = self.session.methods[label], self.engines[label]
        layers, blocks = self.session.layers_of(method), []
        rows = self.rows.positions if self.rows is not None and method.takes_rows(engine) else None
        for layer in layers:
            # Below the last layer of an input map all rows are read.
            queries = None if method.scope != "layer" and layer != layers[-1] else rows
            memory, effort = self.session.max_memory, self.session.effort
            block = Block(self.clean, layer, self.verification, engine, memory, queries, effort)
            for index, edit in itertools.product(
                range(len(self.clean.batch)), self.hook_notes.get(layer, ())
            ):
                block.warn(index, edit)
            blocks.append(block)
        return blocks

    def allowed_keys(self) -> AllowedKeys:
        """Which keys the recorded rows may see, in every watched layer."""
        return allowed_keys(self.clean, self.verification.causal)

    def token_ids(self, index: int) -> Int[Tensor, " pos"]:
        """The tokens of one prompt that the mapped stack reads."""
        return self.session.mapped_tokens(self.clean.batch.prompts[index])

    def tokens(self, index: int) -> list[str]:
        """The same as strings."""
        return token_strings(self.session.lens.model, self.token_ids(index))

    def key_tokens(self, index: int) -> list[str] | None:
        """The keys' tokens: the source's, or source and target; None where they are the queries' own."""
        stack, keys = self.session.lens.stack, self.session.key_tokens(self.clean.batch.prompts[index])
        keys_are_queries = not stack.is_cross and stack.source is None
        return None if keys_are_queries else token_strings(self.session.lens.model, keys)
