"""Run the clean pass of prompts, verify the model, and check the prompts.

All code that reads blocks, such as the runner and the statistics, uses a session, so that no check can be
forgotten. A session also has the cache of one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix._blocks.block import Block
from lens_mix._blocks.components import UNEMBEDDING
from lens_mix._blocks.provenance import dropped_classifier
from lens_mix._blocks.verification_record import Verification
from lens_mix._care.raw_errors import LibraryErrors
from lens_mix._care.state import reading
from lens_mix._care.users_hooks import describe_spliced, has_user_hooks, name_user_hooks
from lens_mix._classes.known_faults import wrong_logits
from lens_mix._classes.model_classes import (
    ModelClass,
    TransformerLensModel,
    UnsupportedModelError,
    transformer_lens_version,
)
from lens_mix._inputs.batches import Batch, PaddingSide, Prompt, pad
from lens_mix._inputs.prompts import pad_token, read_prompt
from lens_mix._inputs.rows import Positions, Rows, Selection, has_text, read_selection
from lens_mix._inputs.token_strings import token_strings
from lens_mix._model.model import Lens
from lens_mix._passes.backward_rules import BackwardRules, PlainRules
from lens_mix._passes.clean_pass import FUSED_ROLES, CleanPass, clean_pass
from lens_mix._passes.copies import total_memory
from lens_mix._passes.cross import keep_stream_before_cross
from lens_mix._passes.effort import Effort
from lens_mix._passes.masks import AllowedKeys, allowed_keys, padding_leaks
from lens_mix._verification.engines import choose_engine, find_obstacle, needs_unembedding
from lens_mix._verification.kept import verification_of
from lens_mix._verification.prompt_check import UnexpectedBlock, Verifier, find_input_mismatch
from lens_mix.arguments import check_whole_number
from lens_mix.hooks.recording import RESID_PRE
from lens_mix.method import Method
from lens_mix.pass_plan import VERIFICATION, LayerPlan, PassPlan, takes_rows, visits_blocks

if TYPE_CHECKING:
    from lens_mix._passes.autograd_graph import AutogradGraph
    from lens_mix._passes.cached_pass import CachedPass
    from lens_mix._passes.fused_attention import FusedAttention
    from lens_mix.maps.spans import Group

_MOST_LOGITS = 1 << 29  # the bytes of the logits that are computed at once for the predictions
_LEAST_LOGITS = 1 << 24  # a smaller `max_memory` does not bound them, because each chunk costs a pass
_LEAST_FUSED = 256  # with fewer tokens, fused attention takes about as long


class Session:
    """The methods and options of a run on one model.

    Args:
        model: Any TransformerLens model.
        methods: The methods by their labels, at least one.
        part: The part of an encoder-decoder: "encoder", "decoder", "cross" or "joint".
        engine: "auto", "hooks" or "algebra", for all methods or by their labels. "auto" for any other label.
        max_memory: The number of bytes for the temporary tensors of one chunk. None: no bound.
        queries: The positions of the rows to compute, or texts. None: all.
        layers: The layers to compute. None: all layers with attention.
        progress: True: show bars over passes. False: warn before a long computation. None: neither.
        cache: An `ActivationCache` of the only prompt, which is read instead of running the model.

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
        queries: Positions | None = None,
        layers: Selection | None = None,
        progress: bool | None = None,
        cache: Any = None,
    ) -> None:
        self.effort, self.cache = Effort(progress), cache
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
        of_whole_model = [label for label, method in methods.items() if method.reads == "model"]
        if of_whole_model and lens.n_layers - 1 not in self.layers:
            raise ValueError(
                f"layers: expected the last layer, {lens.n_layers - 1}, among them, because the one map of "
                f"{', '.join(of_whole_model)} describes the whole model and has its label, got {self.layers}"
            )
        self.recorded_layers = sorted(set().union(*map(self.layers_of, self.methods.values())))

    def read(self, prompt: Any, **options: Any) -> Prompt:
        """Return a prompt as tokens and inputs; options are those of `read_prompt`."""
        stack = self.lens.stack.name if self.lens.stack.reads_target else None
        with reading(self.lens.model):
            read = read_prompt(self.lens.model, self.lens.model_class, prompt, target_for=stack, **options)
        if has_text(self.queries):
            # A prompt of many that does not contain a text is named by its error here, as it is read alone.
            read_selection(self.queries, len(self.mapped_tokens(read)), "queries", lambda: self.tokens(read))
        return read

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
        # All sounds of a model have the same frames, of which different ones may be padding.
        lengths |= {len(prompt.tokens) for prompt in prompts if prompt.features is None}
        # Pictures and sounds are not padded.
        shapes = {
            None if prompt.features is None else (prompt.features.shape, prompt.grid) for prompt in prompts
        }
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

    def tokens(self, prompt: Prompt) -> list[str]:
        """Return the tokens that the mapped part reads as strings."""
        if prompt.labels and not self.lens.stack.reads_target:
            return list(prompt.labels)
        return prompt.label(token_strings(self.lens.model, self.mapped_tokens(prompt)))

    def key_tokens(self, prompt: Prompt) -> Int[Tensor, " key"]:
        """Return the tokens of the keys."""
        return self.lens.stack.key_tokens(prompt)

    def key_groups(self, method: Method, prompt: Prompt) -> list[Group] | None:
        """Return the name and the positions of each key of a prompt; None if each key is one position."""
        if type(method).key_groups is Method.key_groups:
            return None
        labels = list(prompt.labels or ()) if self.lens.stack.name != "decoder" else []
        strings = labels + token_strings(self.lens.model, self.key_tokens(prompt)[len(labels) :])
        return method.key_groups(prompt.label(strings))

    def mapped_layers(self, method: Method) -> list[int]:
        """Return the layers of a method's map."""
        return [self.lens.n_layers - 1] if method.reads == "model" else self.layers

    def layers_of(self, method: Method) -> list[int]:
        """Return the layers whose blocks a method needs to compute its map, in ascending order."""
        return list(range(max(self.layers) + 1)) if method.is_input_map else sorted(self.layers)

    @contextlib.contextmanager
    def checked_pass(
        self,
        prompts: Sequence[Prompt],
        side: PaddingSide = "right",
        make_visitor: Callable[[CheckedPass], Visitor] | None = None,
    ) -> Iterator[CheckedPass]:
        """Yield the prompts after one clean pass and the verification; afterwards the model is as before.

        Args:
            prompts: The prompts of one batch.
            side: The side on which to pad.
            make_visitor: A function that gets the pass before it starts, and returns what visits each block
                for the methods that are mapped while the pass runs (`PassPlan`). What no other method reads
                is then freed. None: all records are kept.

        Raises:
            UnsupportedModelError: If the model or a method on it failed verification on these prompts.
        """
        # The user may have added or removed modules since the last batch, so the lens is made anew.
        self.lens = lens = Lens(self.lens.model, self.lens.stack.name)
        with LibraryErrors(lens.model), lens.evaluation_mode(), contextlib.ExitStack() as leaving:
            batch = pad(prompts, pad_token(lens.model), side)
            cached = self._read_cache(batch)
            # One prompt is enough for the verification, because the blocks of every batch are compared in its
            # own pass.
            verification, no_algebra, is_new = self._verify(batch), None, False
            while True:
                is_visited = make_visitor is not None
                plan = self.plan(batch, verification, no_algebra, is_visited=is_visited, cached=cached)
                _require_memory(plan, with_maps=is_visited)
                found = None
                try:
                    checked = self._run(plan, make_visitor, leaving)
                    break
                except UnexpectedBlock as problem:
                    found = problem
                # Below, outside of the `except`, another error does not also show this one.
                leaving.close()
                if found.found_for == "fused":
                    verification = dataclasses.replace(verification, fused_failures={"rows": found.reason})
                elif found.reason is None:
                    # The model is causal on text, so its verification remains, except for these prompts.
                    verification = dataclasses.replace(verification, causal=False, sees_later_patches=True)
                elif not is_new:
                    # The verification may be outdated, because the model changed without a trace.
                    verification, is_new = self._verify(batch, again=True), True
                elif cached is not None:
                    raise ValueError(
                        f"cache: {found.reason}, so {cached.likely_change}; run methods that only read "
                        "weights ('attention'), or run without cache= and with the hooks on the model"
                    )
                elif found.found_for == "recorded":
                    # What is read off the clean pass cannot be computed by another engine.
                    self._raise_unsupported(found.reason)
                else:
                    # A hook may act on one position only, for example.
                    no_algebra = found.reason
            yield checked

    def _read_cache(self, batch: Batch) -> CachedPass | None:
        """Return the user's pass on the only prompt, after a check; None if there is none."""
        if self.cache is None:
            return None
        from lens_mix._passes.cached_pass import CachedPass

        cached = CachedPass(self.lens, self.cache)
        cached.check(batch)
        return cached

    def plan_prompts(self, prompts: Sequence[Prompt], side: PaddingSide = "right") -> PassPlan:
        """Return the plan of the clean pass of one batch, with which `checked_pass` begins."""
        lens = self.lens
        with LibraryErrors(lens.model), lens.evaluation_mode():
            batch = pad(prompts, pad_token(lens.model), side)
            return self.plan(batch, self._verify(batch))

    def _verify(self, batch: Batch, *, again: bool = False) -> Verification:
        """Return the verification of the model, which is made on the first prompt if there is none."""
        return verification_of(
            self.lens,
            batch.prompts[0],
            with_unembedding=needs_unembedding(self.methods.values()),
            fused=self._find_fused(batch),
            again=again,
        )

    def plan(
        self,
        batch: Batch,
        verification: Verification,
        no_algebra: str | None = None,
        *,
        is_visited: bool = True,
        cached: CachedPass | None = None,
    ) -> PassPlan:
        """Return the plan of a clean pass.

        Args:
            batch: The prompts.
            verification: The verification of the model.
            no_algebra: Why algebra cannot run on these prompts; None if it can.
            is_visited: Whether methods that read one block map it when it has run. False: all methods run
                after the pass, on its records.
            cached: The user's pass that is read instead of running the model; None for none.

        Raises:
            ValueError: If a method cannot be computed from the cached pass.
        """
        lens, methods = self.lens, self.methods
        engines = self._choose_engines(verification, no_algebra)
        if cached is not None:
            self._require_no_pass(engines)
        has_hooks = has_user_hooks(lens.modules)
        compared = self._choose_compared(engines, has_hooks)
        visiting = [label for label in methods if visits_blocks(methods[label], engines[label])]
        layers = {
            layer: self._plan_layer(
                layer, verification, engines, visiting if is_visited else None, compared, has_hooks, cached
            )
            for layer in self.recorded_layers
        }
        real = batch.real_positions(lens.stack.name)
        tokens = [functools.partial(self.tokens, prompt) for prompt in batch.prompts]
        rows = None if self.queries is None else Rows.of(self.queries, real, tokens)
        rules = self._choose_rules(batch, verification, has_hooks=has_hooks)
        last = self._find_last(rules)
        plan = PassPlan(
            lens=lens,
            batch=batch,
            methods=methods,
            method_layers={label: self.layers_of(method) for label, method in methods.items()},
            verification=verification,
            engines=engines,
            layers=layers,
            rows=rows,
            recorded_rows=rows if self._every_method_takes_rows(engines) else None,
            watched=self._choose_watched(batch, last),
            last=last,
            rules=rules,
            predict_at=None if cached else self._positions_to_predict(real, rows, verification),
            predicted_at_once=self._count_predictions(len(batch)),
            compared=compared,
            has_hooks=has_hooks,
            cached=cached,
        )
        if cached is not None:
            plan.require_from(cached)
        return dataclasses.replace(plan, is_fused=self._is_fused(plan))

    def _find_fused(self, batch: Batch) -> list[str]:
        """Return for what fused attention is worth its verification, for `find_fused_failure`.

        Padding, hidden keys and pictures change masks, which eager attention is verified with.
        """
        stack, length, methods = self.lens.stack, batch.tokens.shape[1], self.methods.values()
        is_bridge = self.lens.model_class is ModelClass.BRIDGE and stack.name == "blocks"
        is_plain = batch.hidden is None and batch.features is None and not batch.has_pictures
        if not is_bridge or length < _LEAST_FUSED or not is_plain or not bool(batch.real.all()):
            return []
        # The verification would keep what hooks on gradients do, or miss those that are added later.
        if any(module._backward_hooks or module._backward_pre_hooks for module in self.lens.modules):
            return []
        with_gradients = any(map(_reads_graph_alone, methods))
        reads_rows = all(
            _reads_graph_alone(method)
            or (method.reads == "block" and method.records <= FUSED_ROLES | {RESID_PRE})
            for method in methods
        )
        if self.cache is not None or not reads_rows:
            return []
        has_windows = any(window < length for window in self.lens.windows)
        return ["rows", *["windows"] * has_windows, *["gradients"] * with_gradients]

    def _is_fused(self, plan: PassPlan) -> bool:
        """Return whether the attention of a plan is fused: nothing acts on patterns or runs blocks again."""
        wanted = self._find_fused(plan.batch)
        failures, anatomies = plan.verification.fused_failures, list(plan.verification.anatomy.values())
        after = [self.methods[label] for label in plan.after_pass]
        records = {role for planned in plan.layers.values() for role in planned.records}
        return (
            bool(wanted)
            and all(name in failures and failures[name] is None for name in wanted)
            and not plan.has_hooks
            # One graph has the rules of all methods that read one, and none of them makes passes of its own.
            and all(_reads_graph_alone(method) and plan.rules is not None for method in after)
            and all(method.clean_rules(anatomies) == plan.rules for method in after)
            and records <= FUSED_ROLES
            and all(type(method).hooks is Method.hooks for method in self.methods.values())
        )

    def _require_no_pass(self, engines: Mapping[str, str]) -> None:
        """Raise a ValueError if a method needs a pass of its own, which a cache does not replace."""
        for label, method in self.methods.items():
            reason = ""
            if method.reads in ("above", "model") or UNEMBEDDING in method.needs:
                reason = "which runs the model itself, for its target"
            elif engines[label] == "hooks":
                reason = "which here has the engine 'hooks' alone, and so runs the blocks again"
            if reason:
                raise ValueError(
                    f"cache: expected methods that read a pass, got {label}, {reason}; run it without cache="
                )

    def _choose_compared(self, engines: Mapping[str, str], has_hooks: bool) -> frozenset[str]:
        """Return what the verification compares in the pass: engines, and names of the methods' `needs`."""
        compared: frozenset[str] = frozenset()
        if "algebra" in engines.values():
            compared = frozenset({"algebra"}).union(*(method.needs for method in self.methods.values()))
        if has_hooks:
            # The engine "recorded" reads pattern and values, so it would miss a user hook that changes z. The
            # other engines do not miss it: replays run this hook, and algebra is compared with block outputs.
            compared |= {"recorded"} & set(engines.values())
        return compared

    def _every_method_takes_rows(self, engines: Mapping[str, str]) -> bool:
        """Return whether no method reads other rows than those that were asked for."""
        return all(
            not method.is_input_map and takes_rows(method, engines[label])
            for label, method in self.methods.items()
        )

    def _find_last(self, rules: BackwardRules | None) -> int:
        """Return the last block that is recorded: the highest that a method reads, or the last of all."""
        reads_end = any(UNEMBEDDING in method.needs for method in self.methods.values())
        return self.lens.n_layers - 1 if reads_end or rules is not None else self.recorded_layers[-1]

    def _choose_watched(self, batch: Batch, last: int) -> tuple[int, ...]:
        """Return the layers whose attended keys are read, of a pass whose last recorded block is `last`."""
        is_padded = not bool(batch.real_positions(self.lens.stack.name).all())
        if not batch.has_pictures and not is_padded:
            return tuple(self.recorded_layers)
        # Padding may get attention weight in any block that runs.
        return tuple(layer for layer in self.lens.stack.attention_layers if layer <= last)

    def _plan_layer(
        self,
        layer: int,
        verification: Verification,
        engines: Mapping[str, str],
        visiting: Collection[str] | None,
        compared: Collection[str],
        has_hooks: bool,
        cached: CachedPass | None,
    ) -> LayerPlan:
        """Return what happens at one block.

        Args:
            layer: The number of the block.
            verification: The verification of the model.
            engines: The engine of each method.
            visiting: The labels of the methods that map blocks while the pass runs. None: all records are
                kept.
            compared: What the verification compares.
            has_hooks: Whether user hooks are on the model.
            cached: The user's pass that is read instead of running the model; None for none.
        """
        anatomy = verification.anatomy[layer]
        methods = {label: each for label, each in self.methods.items() if layer in self.layers_of(each)}
        roles = {role for method in methods.values() for role in method.records - {RESID_PRE}}
        is_verified = has_hooks or "algebra" in compared
        # The verification needs these tensors even if no method does.
        roles |= {"pattern", "value"} if is_verified else set()
        roles |= {"z"} if has_hooks else set()
        if cached is not None:
            # A hook may have changed the block in the cached pass, which a note says if the cache shows it.
            mixing = {role: self.lens.stack.hook_name(role, layer) for role in ("value", "z")}
            shows_mixing = all(cached.find(name) is not None for name in mixing.values())
            roles |= set(mixing) if shows_mixing else set()
        # The verification computes a feed-forward if a method does, or if a hook may act in it. The others
        # would take most of its time, and those without a formula cannot be computed.
        computes_feed_forward = has_hooks or any(
            engines[label] == "algebra" and "feed_forward" in method.needs_for(anatomy)
            for label, method in methods.items()
        )
        outputs: tuple[str, ...] = ()
        if "algebra" in compared and not (
            computes_feed_forward and anatomy.feed_forward is not None and not anatomy.cross
        ):
            outputs = ("feed_forward_out", "cross_out")
        visitors = [label for label in methods if label in (visiting or ())]
        template = self.lens.stack.attention_template
        late = [method for label, method in methods.items() if label not in visitors]
        names = {name for method in late for name, _ in method.hooks(0, {}, attention=template)}
        kept = [role for role in roles if self.lens.stack.hook_name(role, 0) in names]
        return LayerPlan(
            records=tuple(sorted(roles)),
            outputs=outputs,
            visitors=(*([VERIFICATION] if is_verified else []), *visitors),
            kept=tuple(sorted(roles if visiting is None else kept)),
            # In a cached pass, a hook may have acted on any one position.
            is_whole=computes_feed_forward or cached is not None,
        )

    def _run(
        self,
        plan: PassPlan,
        make_visitor: Callable[[CheckedPass], Visitor] | None,
        leaving: contextlib.ExitStack,
    ) -> CheckedPass:
        """Return the clean pass of a plan, whose blocks the verification and the methods have visited.

        Raises:
            UnexpectedBlock: A block is not as the plan expects.
        """
        outputs, store, fused = plan.block_outputs(), dict[str, Tensor](), plan.fused_attention()
        is_whole = {layer: planned.is_whole for layer, planned in plan.layers.items()}
        flags = {"has_hooks": plan.has_hooks, "is_cached": plan.cached is not None}
        verifier = Verifier(plan.verification, plan.compared, is_whole, outputs, **flags)

        def start(clean: CleanPass) -> Callable[[int], None]:
            # The verification comes first, so that no method maps a block that is not as the plan expects.
            visitors: list[Visitor] = [verifier]
            if make_visitor is not None:
                visitors.append(make_visitor(CheckedPass(self, plan, clean, verifier.notes)))
            return functools.partial(_visit, clean, plan, visitors, fused)

        clean = clean_pass(
            plan.lens,
            plan.batch,
            plan.hooks(store),
            store,
            required=plan.required(),
            watched=plan.watched,
            stop_after=plan.last,
            rows=plan.recorded_rows,
            # The graph must be alive until all methods have run, so the caller's context ends it.
            graph=_open_graph(plan, fused, leaving),
            predict_at=plan.predict_at if plan.predicts_at_end else None,
            z_factors=plan.verification.z_factors,
            start=start,
            outputs=outputs,
            cached=plan.cached,
            fused=fused,
        )
        if plan.predict_at is not None and not plan.predicts_at_end:
            from lens_mix._passes.continuation import predict_in_chunks

            clean = predict_in_chunks(clean, plan.predict_at, plan.predicted_at_once)
        if plan.cached is None:
            _require_same_input(clean)
        self._check_entering_patches(clean)
        if clean.seeing_later and plan.verification.causal:
            raise UnexpectedBlock(None)
        return CheckedPass(self, plan, clean, verifier.notes)

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
        raise UnsupportedModelError(reason + hooks * bool(names) + describe_spliced(self.lens.model))

    def _check_entering_patches(self, clean: CleanPass) -> None:
        """Raise an UnsupportedModelError if pictures also enter above the first block, for input maps.

        Some models add features of patches to the residual stream between blocks (deepstack). The maps of
        single blocks do not need to know.
        """
        labels = [label for label, method in self.methods.items() if method.is_input_map]
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
        # Predictions from wrong logits would be shown as the model's own.
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

    def _choose_rules(
        self, batch: Batch, verification: Verification, *, has_hooks: bool
    ) -> BackwardRules | None:
        """Return the rules of the autograd graph that the clean pass keeps, or None if it keeps none.

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
        return max(wanted, key=wanted.count)


def _reads_graph_alone(method: Method) -> bool:
    """Return whether the class of a method itself declares that it reads the autograd graph alone."""
    return bool(vars(type(method)).get("reads_graph_alone", False))


def _require_memory(plan: PassPlan, *, with_maps: bool) -> None:
    """Raise a ValueError if the maps and the recorded pattern of one block cannot fit in memory."""
    needed, total = plan.least_bytes(with_maps=with_maps), total_memory(plan.lens)
    if plan.cached is not None or total is None or needed <= total:
        return
    every, prompts = plan.batch.real_positions(plan.lens.stack.name).shape[1], len(plan.batch)
    if prompts > 1:
        advice = "run fewer prompts at once (batch_size=1)"
    elif plan.rows is None:
        advice = "ask for some rows (queries=[-1])"
    else:
        advice = (
            "run the methods one by one, because some compute all rows; lens_mix.support(model).long_prompts "
            "says whether the model can do without the attention weights of all rows"
        )
    raise ValueError(
        f"prompt: expected maps that fit in {total / 1e9:,.1f} GB of memory, got {prompts} of {every:,} "
        f"positions, whose maps and whose attention weights in one block need at least "
        f"{needed / 1e9:,.1f} GB; {advice}"
    )


def _open_graph(
    plan: PassPlan, fused: FusedAttention | None, leaving: contextlib.ExitStack
) -> AutogradGraph | None:
    """Return the autograd graph that the pass of a plan keeps, until the context ends; None for none."""
    if plan.rules is None:
        return None
    from lens_mix._passes.autograd_graph import AutogradGraph

    anatomies = list(plan.verification.anatomy.values())
    graph = AutogradGraph(plan.lens, anatomies, plan.rules, plan.batch.tokens.shape[1], fused)
    leaving.callback(graph.release)
    return graph


def _visit(
    clean: CleanPass,
    plan: PassPlan,
    visitors: Sequence[Visitor],
    fused: FusedAttention | None,
    layer: int,
) -> None:
    """Let visitors read a block that has run, in their order, and free what nobody reads later."""
    if fused is not None and fused.failure is not None:
        raise UnexpectedBlock(fused.failure, "fused")
    keep_stream_before_cross(clean, plan.verification.anatomy, layer)
    for visitor in visitors:
        visitor.visit(clean, layer)
    plan.free(clean, layer)


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


class Visitor(Protocol):
    """What gets each block of a running pass."""

    def visit(self, clean: CleanPass, layer: int) -> None:
        """Read a block that has run; the call must not run a block."""


@dataclasses.dataclass(frozen=True)
class CheckedPass:
    """The prompts of a batch in a clean pass whose blocks the verification visits first.

    Attributes:
        session: The methods and options of the run.
        plan: The plan of the pass.
        clean: The clean pass.
        hook_notes: Layer -> the sentences about what user hooks change, for the notes.
    """

    session: Session
    plan: PassPlan
    clean: CleanPass
    hook_notes: Mapping[int, Sequence[str]]

    @property
    def verification(self) -> Verification:
        """The verification of the model, as the plan relies on it."""
        return self.plan.verification

    @property
    def engines(self) -> Mapping[str, str]:
        """The engine of each method, by its label."""
        return self.plan.engines

    @property
    def rows(self) -> Rows | None:
        """The rows that were asked for; None: all."""
        return self.plan.rows

    def blocks(self, label: str) -> list[Block]:
        """Return the blocks of a method, with the rows that it must compute."""
        method, engine = self.session.methods[label], self.engines[label]
        layers, blocks = self.session.layers_of(method), []
        rows = self.rows.positions if self.rows is not None and takes_rows(method, engine) else None
        groups = [self.session.key_groups(method, prompt) for prompt in self.clean.batch.prompts]
        positions = None if None in groups else [[key.positions for key in each or ()] for each in groups]
        for layer in layers:
            # The last layer of an input map reads all rows of the layers below.
            queries = None if method.is_input_map and layer != layers[-1] else rows
            memory, effort = self.session.max_memory, self.session.effort
            options = (engine, memory, queries, effort, positions)
            blocks.append(Block(self.clean, layer, self.verification, *options))
        return blocks

    def allowed_keys(self) -> AllowedKeys:
        """Return which keys the recorded rows may see, in every watched layer."""
        return allowed_keys(self.clean, self.verification.causal)

    def token_ids(self, index: int) -> Int[Tensor, " pos"]:
        """Return the tokens of one prompt that the mapped part reads."""
        return self.session.mapped_tokens(self.clean.batch.prompts[index])

    def tokens(self, index: int) -> list[str]:
        """Return the tokens of one prompt that the mapped part reads, as strings."""
        return self.session.tokens(self.clean.batch.prompts[index])

    def key_tokens(self, index: int) -> list[str] | None:
        """Return the tokens of the keys as strings, or None if the keys are the queries' own tokens."""
        stack, keys = self.session.lens.stack, self.session.key_tokens(self.clean.batch.prompts[index])
        keys_are_queries = not stack.is_cross and stack.source is None
        if keys_are_queries:
            return None
        labels = list(self.clean.batch.prompts[index].labels or ())
        # The source's positions come first. Those of sound have no tokens.
        return labels + token_strings(self.session.lens.model, keys[len(labels) :])
