"""Run the clean pass of prompts, verify the model, and check the prompts.

All code that reads blocks, such as the runner and the statistics, uses a session, so that no check can be
forgotten. A session also has the cache of one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix.arguments import check_whole_number
from lens_mix.hooks import record_all, record_attention
from lens_mix.hooks.record import ATTENTION_ROLES, RESID_PRE
from lens_mix.lens.autograd_graph import AutogradGraph
from lens_mix.lens.batches import Batch, PaddingSide, Prompt, pad
from lens_mix.lens.block import Block
from lens_mix.lens.block_outputs import BlockOutputs
from lens_mix.lens.changed_backward import PlainRules
from lens_mix.lens.clean_pass import CleanPass, clean_pass
from lens_mix.lens.components import UNEMBEDDING
from lens_mix.lens.continuation import predict_in_chunks
from lens_mix.lens.cross import names_before_cross, streams_before_cross
from lens_mix.lens.effort import Effort
from lens_mix.lens.known_faults import wrong_logits
from lens_mix.lens.masks import AllowedKeys, allowed_keys
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import (
    TransformerLensModel,
    UnsupportedModelError,
    transformer_lens_version,
)
from lens_mix.lens.prompts import pad_token, read_prompt
from lens_mix.lens.provenance import dropped_classifier
from lens_mix.lens.raw_errors import LibraryErrors
from lens_mix.lens.rows import Rows, Selection, read_selection
from lens_mix.lens.state import reading
from lens_mix.lens.token_strings import token_strings
from lens_mix.lens.users_hooks import has_user_hooks, name_user_hooks
from lens_mix.lens.verification.engines import choose_engine, find_obstacle, needs_unembedding
from lens_mix.lens.verification.kept import verification_of
from lens_mix.lens.verification.prompt_check import (
    PromptCheck,
    describe_user_hooks,
    find_input_mismatch,
    find_mismatch,
)
from lens_mix.lens.verification.verify import may_share_pass, padding_leaks
from lens_mix.lens.verification_record import Verification
from lens_mix.method import Method, maps_separately

_MOST_LOGITS = 1 << 29  # the bytes of the logits that are computed at once for the predictions
_LEAST_LOGITS = 1 << 24  # a smaller `max_memory` does not bound them, because each chunk costs a pass


class UnexpectedBlock(Exception):
    """A block of a running clean pass is not as expected.

    Only a finished clean pass, which has kept all its records, can show the reason.
    """


class Session:
    """The methods and options of a run on one model.

    Args:
        model: Any TransformerLens model.
        methods: The methods by their labels, at least one.
        part: The part of an encoder-decoder: "encoder", "decoder", "cross" or "joint".
        engine: "auto", "hooks" or "algebra", for all methods or by their labels. "auto" for any other label.
        max_memory: The number of bytes for the temporary tensors of one chunk. None: no bound.
        queries: The positions of the rows to compute. None: all.
        layers: The layers to compute. None: all layers with attention.
        progress: True: show bars over passes. False: warn before many passes. None: neither.

    Raises:
        TypeError: If an option has a wrong type.
        ValueError: If an option has a wrong value, or does not fit the model.
        UnsupportedModelError: If the model or a method on it cannot be used.
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
            max_memory = check_whole_number("max_memory", max_memory, 1, what="a number of bytes")
        for method in methods.values():
            method.check(lens.n_heads, lens.n_layers, lens.stack.attention_layers)
            reason = find_obstacle(lens, method)
            if reason is not None:
                raise UnsupportedModelError(reason)
        self.lens, self.methods = lens, dict(methods)
        self.engine, self.max_memory, self.queries = engine, max_memory, queries
        attention_layers = lens.stack.attention_layers
        self.layers = read_selection(layers, lens.n_layers, "layers") or attention_layers
        if not set(self.layers) <= set(attention_layers):
            raise ValueError(
                f"layers: expected some of {attention_layers}, got {self.layers} ({lens.stack.gaps})"
            )
        of_whole_model = [label for label, method in methods.items() if method.scope == "model"]
        if of_whole_model and lens.n_layers - 1 not in self.layers:
            raise ValueError(
                f"layers: expected the last layer, {lens.n_layers - 1}, among them, because the one map of "
                f"{', '.join(of_whole_model)} describes the whole model and has its label, got {self.layers}"
            )
        self.recorded_layers = sorted(set().union(*map(self.layers_of, self.methods.values())))

    def read(self, prompt: Any, **options: Any) -> Prompt:
        """Return a prompt as tokens and inputs; options are those of `lens_mix.lens.prompts.read_prompt`."""
        stack = self.lens.stack.name if self.lens.stack.reads_target else None
        with reading(self.lens.model):
            return read_prompt(self.lens.model, self.lens.model_class, prompt, target_for=stack, **options)

    def batches(self, prompts: list[Prompt], side: PaddingSide = "right") -> list[list[Prompt]]:
        """Return the prompts as one batch, or as batches of one prompt.

        The prompts run one by one in four cases, unless there is only one:

        - they have pictures,
        - the rotary angles of the model depend on the longest prompt,
        - their lengths differ and the model does not mask padding,
        - their lengths differ and they have inputs such as positions, whose meaning a mask would change.
        """
        ends = [self._find_ends(prompt) for prompt in prompts]
        if self.lens.angles_differ(min(map(min, ends)), max(map(max, ends))):
            return [[prompt] for prompt in prompts]
        lengths = {len(self.mapped_tokens(prompt)) for prompt in prompts}
        lengths |= {len(prompt.tokens) for prompt in prompts}
        # Pictures and sounds are not padded.
        shapes = {None if prompt.features is None else prompt.features.shape for prompt in prompts}
        if len(shapes) > 1 or any(prompt.pictures for prompt in prompts):
            return [[prompt] for prompt in prompts]
        need_no_padding = len(lengths) == 1 or len(prompts) == 1
        if need_no_padding:
            return [prompts]
        has_inputs = any(set(prompt.inputs) - {"token_type_ids"} for prompt in prompts)
        with LibraryErrors(self.lens.model):
            if not has_inputs and verification_of(self.lens, prompts[0], padding=side).masks_padding[side]:
                return [prompts]
        return [[prompt] for prompt in prompts]

    def _find_ends(self, prompt: Prompt) -> list[int]:
        """Return the largest position plus one, of the source and of the target if there is one."""
        positions = prompt.inputs.get("position_ids")
        source = len(prompt.tokens) if positions is None else int(positions.max()) + 1
        return [source] if prompt.target is None else [source, len(prompt.target)]

    def mapped_tokens(self, prompt: Prompt) -> Int[Tensor, " pos"]:
        """Return the tokens that the mapped part reads."""
        return self.lens.stack.mapped_tokens(prompt)

    def key_tokens(self, prompt: Prompt) -> Int[Tensor, " key"]:
        """Return the tokens of the keys."""
        return self.lens.stack.key_tokens(prompt)

    def mapped_layers(self, method: Method) -> list[int]:
        """Return the layers of a method's map."""
        return [self.lens.n_layers - 1] if method.scope == "model" else self.layers

    def layers_of(self, method: Method) -> list[int]:
        """Return the layers whose blocks a method needs to compute its map, in ascending order."""
        return list(range(max(self.layers) + 1)) if method.scope != "layer" else sorted(self.layers)

    @contextlib.contextmanager
    def checked_pass(
        self,
        prompts: Sequence[Prompt],
        side: PaddingSide = "right",
        map_early: Callable[[CheckedPass], Callable[[int], None]] | None = None,
    ) -> Iterator[CheckedPass]:
        """Yield the prompts after one clean pass and the verification; afterwards the model is as before.

        Args:
            prompts: The prompts of one batch.
            side: The side on which to pad.
            map_early: A function that gets the pass before it starts. It returns the function that computes
                one layer's maps of the methods that are mapped early (`CheckedPass.is_mapped_early`). It
                is called when the block has run and agrees with the verification, and the records that no
                other method reads are then freed. None: all records are kept. So they are if user hooks are
                on the model, if the pass builds an autograd graph, and for encoder-decoders.

        Raises:
            UnsupportedModelError: If the model or a method on it failed verification on these prompts.
            UnexpectedBlock: If `map_early` is called, and a block lacks a record or differs from its verified
                components.
        """
        # The user may have added or removed modules since the last batch, so the lens is made anew.
        self.lens = lens = Lens(self.lens.model, self.lens.stack.name)
        with LibraryErrors(lens.model), lens.evaluation_mode(), contextlib.ExitStack() as leaving:
            passes: list[CleanPass] = []
            verification = verification_of(
                lens,
                prompts[0],
                with_unembedding=needs_unembedding(self.methods.values()),
                passes=passes if self._may_share_pass(prompts) else None,
            )
            engines = self._choose_engines(verification)
            uses_algebra = "algebra" in engines.values()
            batch = pad(prompts, pad_token(lens.model), side)
            real = batch.real_positions(lens.stack.name)
            rows = None if self.queries is None else Rows.of(self.queries, real)
            watched = self.recorded_layers if has_user_hooks(lens.modules) else []
            predict_at = self._positions_to_predict(real, rows, verification)
            graph = self._make_graph(batch, verification, has_hooks=bool(watched))
            if graph is not None:
                leaving.callback(graph.release)
            size = self._count_predictions(len(batch))
            fits = predict_at is None or predict_at.shape[1] <= size
            is_verified = bool(passes) and graph is None
            # Whether a prompt with pictures is causal is known only after the pass.
            keeps_all = watched or lens.encoder_decoder or batch.has_pictures or graph is not None
            is_early = map_early is not None and not keeps_all and not is_verified
            outputs = self._record_outputs(verification, engines, is_early=is_early)
            after_block = None
            if map_early is not None and is_early:
                after_block = functools.partial(
                    self._map_early, map_early, verification, engines, rows, outputs
                )
            if is_verified:
                clean = passes[0]
                if predict_at is None:
                    clean = dataclasses.replace(
                        clean, predictions=None, no_predictions=None, predicted_at=None, logits=None
                    )
            else:
                shown = predict_at if fits else None
                clean = self._clean_pass(batch, rows, engines, watched, graph, shown, after_block, outputs)
            if predict_at is not None and not fits:
                clean = predict_in_chunks(clean, predict_at, size)
            entering = streams_before_cross(clean, verification.anatomy)
            clean = dataclasses.replace(clean, z_factors=verification.z_factors, entering=entering)
            _require_same_input(clean)
            self._check_entering_patches(clean)
            if clean.seeing_later:
                verification = _add_patches(clean, verification)
                engines = self._choose_engines(verification)
            # A pass that was verified itself need not be compared with the verification.
            if uses_algebra and after_block is None and not is_verified:
                clean, verification, engines = self._check_prompts(clean, verification, engines, outputs)
            # The engine "recorded" reads pattern and values, so it would miss a user hook that changes z. The
            # other engines do not miss it: replays run this hook, and algebra is compared with block outputs.
            recorded = {"recorded"} & set(engines.values())
            reason = find_mismatch(clean, verification, watched, recorded) if watched else None
            if reason is not None:
                self._raise_unsupported(reason)
            notes = describe_user_hooks(clean, verification, watched)
            yield CheckedPass(self, clean, verification, engines, rows, notes)

    def _may_share_pass(self, prompts: Sequence[Prompt]) -> bool:
        """Return whether a new verification's own pass has all that this run would record in another one."""
        recorded = {"pattern", "value", "z", RESID_PRE}
        reads = all(type(m).hooks is Method.hooks and m.records <= recorded for m in self.methods.values())
        is_whole = len(prompts) == 1 and self.queries is None and self.max_memory is None
        is_whole = is_whole and self.recorded_layers == self.lens.stack.attention_layers
        return reads and is_whole and may_share_pass(self.lens, prompts[0])

    def _map_early(
        self,
        map_early: Callable[[CheckedPass], Callable[[int], None]],
        verification: Verification,
        engines: Mapping[str, str],
        rows: Rows | None,
        outputs: BlockOutputs | None,
        clean: CleanPass,
    ) -> Callable[[int], None]:
        """Return a function that checks and maps a block of a running pass, and then frees its records.

        Args:
            map_early: As in `checked_pass`.
            verification: The verification of the model.
            engines: The engine of each method.
            rows: The rows that were asked for; None: all.
            outputs: The outputs within the blocks, which the pass records; None if it records none.
            clean: The pass, which has not started yet.
        """
        clean = dataclasses.replace(clean, z_factors=verification.z_factors)
        check = None
        if "algebra" in engines.values():
            uses, rebuilt = self._find_checked(), self._find_rebuilt_layers(verification, engines)
            check = PromptCheck(clean, verification, uses, rebuilt, samples=True)
        checked = CheckedPass(self, clean, verification, engines, rows, {})
        map_block = map_early(checked)
        name_of, layers = clean.lens.stack.hook_name, set(self.recorded_layers)

        def after_block(layer: int) -> None:
            if layer not in layers:
                return
            methods = [(label, each) for label, each in self.methods.items() if layer in self.layers_of(each)]
            read = {name_of(role, layer) for _, each in methods for role in each.records - {RESID_PRE}}
            if not read <= clean.recorded.keys():
                raise UnexpectedBlock
            if check is not None and check.find_mismatch(layer, outputs.take(layer) if outputs else {}):
                raise UnexpectedBlock
            map_block(layer)
            late = [each for label, each in methods if not checked.is_mapped_early(label)]
            template = clean.lens.stack.attention_template
            kept = {name for each in late for name, _ in each.hooks(layer, {}, attention=template)}
            for name in {name_of(role, layer) for role in ATTENTION_ROLES} - kept:
                clean.recorded.pop(name, None)

        return after_block

    def _record_outputs(
        self, verification: Verification, engines: Mapping[str, str], *, is_early: bool
    ) -> BlockOutputs | None:
        """Return what records the outputs within blocks that the check reads; None without algebra.

        The check computes a feed-forward if a method does. It need not compute the others, which would take
        most of its time, and it cannot compute those without a formula, or a cross-attention.

        Args:
            verification: The verification of the model.
            engines: The engine of each method.
            is_early: Whether the output of a block is used and freed when the block has run. If not, only
                outputs that the check cannot compute are recorded.
        """
        if "algebra" not in engines.values():
            return None
        computed = self._find_rebuilt_layers(verification, engines)

        def is_read(layer: int) -> bool:
            anatomy = verification.anatomy[layer]
            return anatomy.feed_forward is None or anatomy.cross or (is_early and layer not in computed)

        layers = list(filter(is_read, self.recorded_layers))
        return BlockOutputs(self.lens, layers, ["feed_forward_out", "cross_out"])

    def _choose_engines(self, verification: Verification, no_algebra: str | None = None) -> dict[str, str]:
        """Return the engine of each method by its label. `no_algebra` is a reason not to use "algebra"."""
        try:
            return {
                label: choose_engine(method, verification, self._engine(label), no_algebra)
                for label, method in self.methods.items()
            }
        except UnsupportedModelError as problem:
            self._raise_unsupported(str(problem))

    def _engine(self, label: str) -> str:
        return self.engine if isinstance(self.engine, str) else self.engine.get(label, "auto")

    def _raise_unsupported(self, reason: str) -> NoReturn:
        """Raise an UnsupportedModelError that also names the user hooks, which may be the cause."""
        names = name_user_hooks(self.lens.model)
        hooks = f"; these hooks are on the model: {', '.join(names[:5])}{', ...' * (len(names) > 5)}"
        raise UnsupportedModelError(reason + hooks * bool(names))

    def _check_prompts(
        self,
        clean: CleanPass,
        verification: Verification,
        engines: dict[str, str],
        outputs: BlockOutputs | None,
    ) -> tuple[CleanPass, Verification, dict[str, str]]:
        """Return the pass, the verification and the engines that are valid for these prompts.

        If the verified components do not give the outputs of these prompts, the verification may be outdated,
        because the model changed without a trace. It is then computed again. If the new one does not give the
        outputs either (a hook may act on one position only), the engine "hooks" is used.
        """
        layers, uses = self.recorded_layers, self._find_checked()
        rebuilt = self._find_rebuilt_layers(verification, engines)
        taken = {layer: outputs.take(layer) for layer in layers} if outputs else {}
        if find_mismatch(clean, verification, layers, uses, rebuilt, taken) is None:
            return clean, verification, engines
        splits_logits = needs_unembedding(self.methods.values())
        verification = verification_of(
            clean.lens, clean.batch.prompts[0], with_unembedding=splits_logits, again=True
        )
        verification = _add_patches(clean, verification)
        clean = dataclasses.replace(clean, z_factors=verification.z_factors)
        rebuilt = self._find_rebuilt_layers(verification, engines)
        mismatch = find_mismatch(clean, verification, layers, uses, rebuilt, taken)
        return clean, verification, self._choose_engines(verification, mismatch)

    def _find_checked(self) -> set[str]:
        """Return the engines and needs for which components are checked on the prompts."""
        return {"algebra"}.union(*(method.needs for method in self.methods.values()))

    def _find_rebuilt_layers(self, verification: Verification, engines: Mapping[str, str]) -> set[int]:
        """Return the layers whose feed-forward algebra computes."""
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
        predict_at: Int[Tensor, "batch query"] | None,
        after_block: Callable[[CleanPass], Callable[[int], None]] | None = None,
        outputs: BlockOutputs | None = None,
    ) -> CleanPass:
        """Return the clean pass, which records only the rows that the methods and checks need.

        Args:
            batch: The prompts.
            rows: The rows that were asked for; None: all.
            engines: The engine of each method.
            hooked: The layers where z is compared, because user hooks may change it.
            graph: The autograd graph that the pass is to record, or None.
            predict_at: The positions of the predictions to read, or None.
            after_block: As in `clean_pass`; it checks that the records are complete, and frees some of them.
            outputs: The outputs within the blocks to record; None for none.
        """
        lens, layers = self.lens, self.recorded_layers
        for label, method in self.methods.items():
            if method.scope != "layer" or not method.takes_rows(engines[label]):
                rows = None
        positions = None if rows is None else rows.positions
        store: dict[str, Tensor] = {}
        # The check of the prompts needs these tensors even if no method does.
        checked = {"pattern", "value"} if "algebra" in engines.values() or hooked else set()
        checked |= {"z"} if hooked else set()
        template = lens.stack.attention_template
        required = names_before_cross(lens, layers)
        fwd_hooks = record_all(store, required)
        for method in self.methods.values():
            for layer in self.layers_of(method):
                pairs = method.hooks(layer, store, queries=positions, attention=template)
                # The input of a block is recorded from its call, which works for all model classes.
                fwd_hooks += [pair for pair in pairs if pair[0] != f"{lens.where(layer)}.hook_resid_pre"]
                required += [lens.stack.hook_name(role, layer) for role in method.records - {RESID_PRE}]
            checked -= method.records
        for layer in layers:
            fwd_hooks += record_attention(
                layer, store, sorted(checked), queries=positions, attention=template
            )
        reads_end = any(UNEMBEDDING in method.needs for method in self.methods.values())
        last = lens.n_layers - 1 if reads_end or graph is not None else layers[-1]
        # Padding may get attention weight in any block that runs, so with padding all blocks are watched.
        has_padding = not bool(batch.real_positions(lens.stack.name).all())
        run_layers = [layer for layer in lens.stack.attention_layers if layer <= last]
        watched = run_layers if has_padding or batch.has_pictures else layers
        options: dict[str, Any] = {
            "watched": watched,
            "stop_after": last,
            "predict_at": predict_at,
            "after_block": after_block,
            "outputs": outputs,
            "required": required if after_block is None else (),
            "graph": graph,
        }
        return clean_pass(lens, batch, fwd_hooks, store, rows=rows, **options)

    def _check_entering_patches(self, clean: CleanPass) -> None:
        """Raise an UnsupportedModelError if pictures also enter above the first block, for input maps.

        Some models add features of patches to the residual stream between blocks (deepstack). The maps of
        single blocks do not need to know.
        """
        labels = [label for label, method in self.methods.items() if method.scope != "layer"]
        layer = clean.find_entering_patches() if labels else None
        if layer is not None:
            self._raise_unsupported(
                f"{', '.join(labels)}: expected pictures that enter at the first block, got a model that "
                f"also adds features of their patches before {clean.lens.where(layer)}, which input maps "
                "would leave out"
            )

    def _positions_to_predict(
        self, real: Bool[Tensor, "batch pos"], rows: Rows | None, verification: Verification
    ) -> Int[Tensor, "batch query"] | None:
        """Return the positions of the rows, at which the clean pass reads the predictions, or None.

        A bidirectional model predicts the tokens that it reads, so only its target has a prediction.
        """
        lens = self.lens
        is_causal = verification.causal or lens.stack.reads_target
        is_wrong = wrong_logits(
            lens.model, lens.model_class, transformer_lens_version()
        ) or dropped_classifier(lens)
        if not is_causal or is_wrong:
            return None
        every = torch.arange(real.shape[1], device=real.device).expand(real.shape)
        return every if rows is None else rows.positions

    def _count_predictions(self, prompts: int) -> int:
        """Return how many positions of each prompt may have logits at once."""
        per_position = 4 * prompts * (getattr(self.lens.model.cfg, "d_vocab", 0) or 1)
        most = _MOST_LOGITS if self.max_memory is None else max(self.max_memory, _LEAST_LOGITS)
        return max(1, min(most, _MOST_LOGITS) // per_position)

    def _make_graph(
        self, batch: Batch, verification: Verification, *, has_hooks: bool
    ) -> AutogradGraph | None:
        """Return the autograd graph that the clean pass is to record, or None if it is not needed.

        If the methods have several rules, it has those of the most methods. The graph may keep the
        activations of all blocks in memory, so it is for a single prompt only.
        """
        anatomies = list(verification.anatomy.values())
        # A method that does not read the first block needs only the part of the graph above it.
        methods = [method for method in self.methods.values() if self.layers_of(method)[0] == 0]
        wanted = [rules for method in methods if (rules := method.clean_rules(anatomies)) is not None]
        if has_hooks:
            # User hooks that change tensors in place work in the passes that these methods run instead.
            wanted = [rules for rules in wanted if not isinstance(rules, PlainRules)]
        fits = len(batch) == 1 and self.max_memory is None and not self.lens.encoder_decoder
        # There are no gradients in inference mode, for which the target raises an error with the reason.
        if not wanted or not fits or torch.is_inference_mode_enabled():
            return None
        return AutogradGraph(self.lens, anatomies, max(wanted, key=wanted.count), batch.tokens.shape[1])


def _add_patches(clean: CleanPass, verification: Verification) -> Verification:
    """Return the verification of a model for this pass, in which patches may attend to later patches."""
    if not clean.seeing_later or not verification.causal:
        return verification
    return dataclasses.replace(verification, causal=False, sees_later_patches=True)


def _require_same_input(clean: CleanPass) -> None:
    """Raise an UnsupportedModelError if the model read other inputs than the prompts, or padding."""
    different = find_input_mismatch(clean)
    if different is not None:
        raise UnsupportedModelError(different)
    leaks = padding_leaks(clean)
    if leaks:
        raise UnsupportedModelError(
            f"{clean.lens.where(leaks[0])}: expected no attention weight on padding, got some, because the "
            "model ignores the attention mask; run prompts of one length, or one by one"
        )


@dataclasses.dataclass(frozen=True)
class CheckedPass:
    """The prompts of a batch after a clean pass, the verification and the check of the prompts.

    Attributes:
        session: The methods and options of the run.
        clean: The clean pass.
        verification: The verification of the model.
        engines: The engine of each method, by its label.
        rows: The rows that were asked for; None: all.
        hook_notes: The sentences about what user hooks change, by layer, for the notes.
    """

    session: Session
    clean: CleanPass
    verification: Verification
    engines: Mapping[str, str]
    rows: Rows | None
    hook_notes: Mapping[int, Sequence[str]]

    def blocks(self, label: str) -> list[Block]:
        """Return the blocks of a method, with the rows that it must compute."""
        method, engine = self.session.methods[label], self.engines[label]
        layers, blocks = self.session.layers_of(method), []
        rows = self.rows.positions if self.rows is not None and method.takes_rows(engine) else None
        for layer in layers:
            # The last layer of an input map reads all rows of the layers below.
            queries = None if method.scope != "layer" and layer != layers[-1] else rows
            memory, effort = self.session.max_memory, self.session.effort
            block = Block(self.clean, layer, self.verification, engine, memory, queries, effort)
            for index, note in itertools.product(
                range(len(self.clean.batch)), self.hook_notes.get(layer, ())
            ):
                block.warn(index, note)
            blocks.append(block)
        return blocks

    def is_mapped_early(self, label: str) -> bool:
        """Return whether a method's map of a block may be computed before the later blocks have run."""
        method = self.session.methods[label]
        is_separate = method.scope == "layer" and maps_separately(method)
        return is_separate and method.reads_one_block(self.engines[label])

    def allowed_keys(self) -> AllowedKeys:
        """Return which keys the recorded rows may see, in every watched layer."""
        return allowed_keys(self.clean, self.verification.causal)

    def token_ids(self, index: int) -> Int[Tensor, " pos"]:
        """Return the tokens of one prompt that the mapped part reads."""
        return self.session.mapped_tokens(self.clean.batch.prompts[index])

    def tokens(self, index: int) -> list[str]:
        """Return the tokens of one prompt that the mapped part reads, as strings."""
        prompt = self.clean.batch.prompts[index]
        if prompt.labels:
            return list(prompt.labels)
        return prompt.label(token_strings(self.session.lens.model, self.token_ids(index)))

    def key_tokens(self, index: int) -> list[str] | None:
        """Return the tokens of the keys as strings, or None if the keys are the queries' own tokens."""
        stack, keys = self.session.lens.stack, self.session.key_tokens(self.clean.batch.prompts[index])
        keys_are_queries = not stack.is_cross and stack.source is None
        return None if keys_are_queries else token_strings(self.session.lens.model, keys)
