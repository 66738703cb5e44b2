"""Trace what a model wrote back to its sources: `lens_mix.trace`."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._blocks.provenance import of_run
from lens_mix._care.changes import Changes
from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError, model_class_of
from lens_mix._classes.model_names import model_name, strip_path
from lens_mix._inputs.features import Fill
from lens_mix._inputs.prompts import is_causal_model, is_encoder_decoder, read_plain
from lens_mix._inputs.speech import is_speech_model
from lens_mix._model.model import Lens
from lens_mix._verification.kept import read_state
from lens_mix.aggregation.candidates import Aggregation
from lens_mix.arguments import (
    check_choice,
    check_flags,
    check_instance,
    check_number,
    check_slice,
    check_whole_number,
    describe_value,
)
from lens_mix.maps import Maps, MixingMap
from lens_mix.maps.explained import Explained
from lens_mix.method import Method
from lens_mix.methods.attention import AttentionWeights
from lens_mix.methods.gim import Gim
from lens_mix.methods.input_gradients import InputGradients
from lens_mix.plain_text import as_text
from lens_mix.runner import MethodLike, read_methods
from lens_mix.traces.attribution import (
    Explainer,
    describe_written,
    explain_written,
    find_aggregation,
    has_own_target,
    read_written,
    rounding_of,
    run_reading,
)
from lens_mix.traces.chat import find_template_options
from lens_mix.traces.generation import check_options, find_options, write
from lens_mix.traces.paths import normalize, sum_paths
from lens_mix.traces.reading import (
    Reading,
    add_answer,
    read_prompt_alone,
    read_prompt_text,
    takes_template,
)
from lens_mix.traces.sources import (
    UNITS,
    Splitter,
    TextSource,
    Unit,
    name_seconds,
    read_seconds,
    split_sentences,
)
from lens_mix.traces.spans import SourceScores, WrittenSpan, find_span

if TYPE_CHECKING:
    import networkx

    from lens_mix.tables import Table
    from lens_mix.traces.audit import Audit
    from lens_mix.view.page import Page


# The names under which a trace keeps what was lost without a source, by what replaced a stretch of sound.
_LOSSES = {"silence": "losses", "noise": "losses in noise"}
# The stretches of sound are so long, in seconds, unless a length is given: about a syllable.
_STRETCH = 0.2


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """What a model wrote after a prompt, and the sources of each span of it.

        >>> prompt = "Anna lives in Rome. Ben lives in Oslo. Where does Anna live?"
        >>> t = lm.trace(model, prompt, answer=" In Rome.")
        >>> t[" Rome"].top(2)

    Index it with any substring of the written text, with the number of a written token or with a slice of
    them to get a `WrittenSpan`: `t["eight P100 GPUs"].top(5)`. `t[:]` is all that was written.

    Attributes:
        reading: The tokens and the texts of the prompt and of what was written.
        unit: What the sources are: "token", "word", "sentence", "message", "document" or "given".
        log_probabilities: The log probability of each written token, given all tokens before it, in nats.
        explained: For each written token, what the model predicts in its place, and its log probability.
        method_name: The name of the method, and of the aggregation if there is one.
        parameters: The parameters of the method.
        provenance: The origin of the trace: the model, its dtype, versions, the date, and the options and the
            seed of the generation.
        notes: Sentences that a reader should know.
        model: The model; None if the trace was loaded from a file.
        hops: The number of steps through written text that `through` added; -1 for all, None for none.
    """

    reading: Reading
    unit: str
    log_probabilities: Float[Tensor, " written"]
    explained: tuple[Explained, ...]
    method_name: str
    parameters: Mapping[str, Any]
    provenance: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    model: TransformerLensModel | None = None
    hops: int | None = None
    _explainer: Explainer | None = None
    _split: Splitter | None = None
    _groups: Any = None
    # Scores of spans by their ends, scores of all tokens by "steps", sources by their unit, and what a span
    # loses without sources by "losses" and its ends. "state" is that of the model. Traces that `by` returns
    # share it.
    _computed: dict[Any, Any] = dataclasses.field(default_factory=dict)

    # ------------------------------------------------------------------ what was read

    @property
    def tokens(self) -> list[str]:
        """Return the tokens of the prompt and then the written ones."""
        return self.reading.tokens

    @property
    def n_prompt(self) -> int:
        """Return the number of tokens before the written ones."""
        return self.reading.n_prompt

    @property
    def text(self) -> str:
        """Return what was written."""
        return self.text_of(0, self.reading.n_written)

    def text_of(self, start: int, stop: int) -> str:
        """Return the text of written tokens, from token `start` to before `stop`."""
        placed = self.reading.written_text
        if placed is None:
            return "".join(self.tokens[self.n_prompt + start : self.n_prompt + stop])
        return placed.text[placed.offsets[start][0] : placed.offsets[stop - 1][1]]

    def sources(self, unit: str | float | None = None) -> list[TextSource]:
        """Return the sources of a unit. Each position of `tokens` belongs to exactly one of them.

        Args:
            unit: The unit, as in `by`. None: that of the trace.

        Raises:
            ValueError: If the unit is unknown, or needs a text and the prompt was given as tokens.
        """
        unit = self.unit if unit is None else unit
        unit = unit if isinstance(unit, str) else _name_stretch("unit", unit)
        if read_seconds(unit) is None:
            check_choice("unit", unit, UNITS)
        if unit == "given" and self._groups is None and ("sources", unit) not in self._computed:
            raise ValueError("unit: expected one of the others, because lm.trace got no sources= of its own")
        if ("sources", unit) not in self._computed:
            split = self._split or split_sentences()
            self._computed["sources", unit] = self.reading.find_sources(unit, split, self._groups)
        found: list[TextSource] = self._computed["sources", unit]
        return found

    def by(self, unit: Unit | float) -> Trace:
        """Return the trace with sources of another unit. Nothing is computed again.

        Args:
            unit: "token", "word", "sentence", "message" (a chat message), "document" (a document, a question
                or an instruction), or "given" for the sources that `lm.trace` was given. For a sound, the
                length of its stretches in seconds.

        Raises:
            ValueError: As in `sources`.
        """
        name = unit if isinstance(unit, str) else _name_stretch("unit", unit)
        self.sources(name)
        return dataclasses.replace(self, unit=name)

    # ------------------------------------------------------------------ what it came from

    def __getitem__(self, place: str | int | slice) -> WrittenSpan:
        """Return a span of what was written.

        Args:
            place: A text that was written, the number of a written token (negative: from the end), or a slice
                of their numbers.

        Raises:
            TypeError: If it is none of these.
            ValueError: If the text does not occur exactly once, or a number does not exist.
        """
        count = self.reading.n_written
        if isinstance(place, str):
            placed = self.reading.written_text
            if placed is None:
                raise ValueError(
                    "span: expected the numbers of written tokens, because these were given as tokens, got "
                    f"{place!r}"
                )
            return WrittenSpan(self, *find_span(placed.text, placed.offsets, place))
        if isinstance(place, slice):
            numbers = range(count)[check_slice("span", place)]
            if not numbers or numbers.step != 1:
                raise ValueError(f"span: expected neighboring tokens of 0..{count - 1}, got {place}")
            return WrittenSpan(self, numbers[0], numbers[-1] + 1)
        index = (
            check_whole_number("span", place, -count, count - 1, what="a text, a number or a slice") % count
        )
        return WrittenSpan(self, index, index + 1)

    @property
    def spans(self) -> list[WrittenSpan]:
        """Return the sentences that were written; one span for everything if it has no text."""
        if self.reading.prompt_text is None or self.reading.written_text is None:
            return [self[:]]
        found = []
        for source in self.sources("sentence"):
            first, last = source.positions[0] - self.n_prompt, source.positions[-1] - self.n_prompt
            is_whole = last - first + 1 == len(source.positions)
            if first >= 0 and is_whole and source.text.strip():
                found.append(WrittenSpan(self, first, last + 1))
        return found or [self[:]]

    @property
    def computed_spans(self) -> list[WrittenSpan]:
        """Return the spans whose scores were computed, or for which sources were measured, in text order."""
        ends = [key[-2:] for key in self._computed if isinstance(key, tuple) and isinstance(key[-2], int)]
        return [WrittenSpan(self, *each) for each in sorted(set(ends))]

    def losses_of(self, start: int, stop: int, fill: Fill | None = None) -> dict[tuple[int, ...], float]:
        """Return what a written span loses without each source that `verify` measured, in nats.

        The keys are the positions of the sources.
        """
        losses: dict[tuple[int, ...], float] = self._computed.get(
            (_LOSSES[fill or "silence"], start, stop), {}
        )
        return losses

    def keep_loss(
        self, start: int, stop: int, positions: tuple[int, ...], loss: float, fill: Fill | None = None
    ) -> None:
        """Keep what a written span loses without a source, as `losses_of` returns it."""
        self._computed.setdefault((_LOSSES[fill or "silence"], start, stop), {})[positions] = loss

    def scores_of(self, start: int, stop: int) -> Float[Tensor, " key"]:
        """Return the scores of a written span for all tokens; they are computed once."""
        if self.hops is not None:
            rows: Tensor = self._computed["through", self.hops]
            return rows[start:stop].sum(0)
        if (start, stop) not in self._computed:
            self._computed[start, stop] = self._require_explainer().explain_span(start, stop)
        scores: Tensor = self._computed[start, stop]
        return scores

    @property
    def steps(self) -> MixingMap:
        """Return a map with a row for each written token, computed when it is first read.

        The row of a written token is the model's row at the position before it, where the token is predicted:
        the model's row q explains token q + 1. The rows have the positions of the tokens that they explain,
        and the keys are all tokens. A method with a target takes a backward pass for each token.
        """
        reading = self.reading
        own = self.tokens[reading.n_source :]
        positions = list(range(self.n_prompt - reading.n_source, len(own)))
        keys = torch.arange(len(self.tokens), device="cpu")
        return MixingMap(
            scores=self._steps()[None],
            tokens=own,
            key_tokens=self.tokens if reading.n_source else None,  # type: ignore[arg-type]
            queries=positions,
            mask=keys[None]
            < torch.tensor(positions, dtype=torch.long, device="cpu")[:, None] + reading.n_source,
            causal=not reading.n_source,
            method=self.method_name,
            parameters=dict(self.parameters),
            kind="input",
            explained=self.explained,
            provenance={**self.provenance, "predicts_next": False},
            notes=self.notes,
        )

    def maps(self, methods: MethodLike | Sequence[MethodLike], **options: Any) -> MixingMap | Maps:
        """Return the maps of the prompt and of what was written, by the methods of `lm.run`.

        They have the rows that predict the written tokens, and show in which layer a source was read.
        Methods with a target explain the written token of each row, or all written tokens if they have one
        number for all rows. A target of your own stays.

            >>> t.maps(["attention", "value_zeroing"]).show()

        Args:
            methods: The methods, as in `lm.run`.
            options: The other options of `lm.run`. For an encoder-decoder, `part` is "cross" by default.

        Raises:
            TypeError: As in `lm.run`.
            ValueError: As in `lm.run`, or if the trace has no model, or the model is another one now.
            UnsupportedModelError: As in `lm.run`.
        """
        return self.maps_of(0, self.reading.n_written, methods, options)

    def maps_of(
        self, start: int, stop: int, methods: MethodLike | Sequence[MethodLike], options: Mapping[str, Any]
    ) -> MixingMap | Maps:
        """Return the maps of `maps` with the rows that predict the written tokens from `start` to `stop`."""
        read, is_single = read_methods(methods)
        chosen = [explain_written(each, self.reading, start, stop) for each in read.values()]
        rows = [self.reading.row(each) for each in range(start, stop)]
        options = {"queries": rows, "part": "cross" if self.reading.n_source else None, **options}
        found: MixingMap | Maps = run_reading(
            self.require_model(), self.reading, chosen[0] if is_single else chosen, **options
        )
        return found

    @property
    def has_explainer(self) -> bool:
        """Return whether further scores can be computed, and not only those of a file be read."""
        return self._explainer is not None

    @property
    def has_steps(self) -> bool:
        """Return whether the scores of single written tokens were computed, so that `steps` costs nothing."""
        return self._steps_name in self._computed

    @property
    def _steps_name(self) -> Any:
        return "steps" if self.hops is None else ("through", self.hops)

    def _steps(self) -> Float[Tensor, "written key"]:
        if not self.has_steps:
            self._computed[self._steps_name] = self._require_explainer().explain_each()
        rows: Tensor = self._computed[self._steps_name]
        return rows

    def through(self, hops: int | None = None) -> Trace:
        """Return the trace with sources reached through what was written before, down to the prompt.

        A_gp and A_gg are the shares of each written token in the prompt and in the written tokens before it:
        magnitudes of `steps`, with rows that sum to 1. Each written token is replaced by its own sources:

            X = A_gp + A_gg A_gp + A_gg² A_gp + … = (I − A_gg)⁻¹ A_gp

        The scores of the new trace are X, so no written token is a source. With any number of hops its rows
        sum to 1; with fewer, the rest is what only longer paths reach. Signs are lost. This is the
        total influence of CAGE (Walker and Ewetz, 2025, arXiv 2512.15663), with this trace's map as the
        attribution.

        Args:
            hops: The number of written tokens on a path at most; 0 for A_gp alone. None: any number.

        Raises:
            ValueError: If `hops` is below 0.
        """
        number = -1 if hops is None else check_whole_number("hops", hops, 0)
        # No path has more written tokens than there are.
        number = min(number, self.reading.n_written)
        if ("through", number) not in self._computed:
            rows = dataclasses.replace(self, hops=None)._steps()
            self._computed["through", number] = sum_paths(
                rows, self.n_prompt, None if hops is None else number
            )
        return dataclasses.replace(self, hops=number)

    def verify(self, k: int = 5, *, fill: Fill | None = None) -> SourceScores:
        """Return the `k` strongest sources of everything that was written, each measured without it.

        It is `t[:].verify(k)`; see `WrittenSpan.verify`.
        """
        return self[:].verify(k, fill=fill)

    def audit(
        self,
        spans: Sequence[str | int | slice | WrittenSpan] | None = None,
        *,
        keep: Sequence[str] | None = None,
        passes: int | None = None,
    ) -> Audit:
        """Return for each claim what it rests on, by measured removals: an `Audit`.

        A claim is *supported* if there is one source that it needs, *redundant* if several sources contain it
        and each of them is enough, *conflicting* if another source says something else, and *from memory* if
        it loses little without any source. It is *unclear* if the budget is too small, if more than four
        sources would be enough, or if it lies between two verdicts. What is compared is the log probability
        of the claim's decisive tokens: those that lose the most without the sources.

        Sources are removed by deleting their tokens, as in `verify`. What a reader asks stays: questions,
        instructions and messages of the system, or what `keep` says. Each set of sources takes one forward
        pass, for all claims together; the sets are found in the order of the scores, so that their number
        grows with the logarithm of the number of sources.

            >>> t.audit()[0].verdict

        Args:
            spans: The claims, each as in `t[...]`. None: the written sentences.
            keep: Texts of the prompt whose sources are never removed. None: what is asked, as above; in a
                plain text, sentences that end with a question mark or start with "Question:" or "Answer:", an
                unfinished last sentence, and without all of these, the last sentence. With groups of your
                own as sources, all other text stays.
            passes: The largest number of forward passes, 2 or more. None: 24 for each claim.

        Raises:
            ValueError: If no source can be removed, a span or a text of `keep` does not occur, or there is no
                model.
            UnsupportedModelError: If a source cannot be removed, such as a part of a picture.
        """
        from lens_mix.traces.audit import audit_trace

        return audit_trace(self, spans, keep, passes)

    @property
    def computed_audit(self) -> Audit | None:
        """Return the last audit of the trace; None if there is none."""
        return self._computed.get("audit")

    def keep_audit(self, audit: Audit) -> None:
        """Keep an audit of the trace, as `computed_audit` returns it."""
        self._computed["audit"] = audit

    def top(self, k: int = 5, everything: bool = False) -> SourceScores:
        """Return the `k` strongest sources of everything that was written; see `WrittenSpan.top`."""
        return self[:].top(k, everything)

    def context_share(self) -> Table:
        """Return for each written token the share of each kind of text in its scores.

        The rows are the written tokens. The columns are token, probability, and a share 0 to 1 for each kind:
        "document", "question", "instruction", a role of a message, "prompt", "template", and "written" for
        what the model wrote before. A share is a sum of the tokens' magnitudes, so signed scores do not
        cancel as they do within the sources of `top`. The shares of a row sum to 1.
        """
        import pandas as pd

        from lens_mix.tables import Table

        reading = self.reading
        kinds = [kind for kind, _ in reading.label_positions()]
        shares = normalize(self._steps())
        columns: dict[str, Any] = {
            "token": pd.Series(self.tokens[self.n_prompt :], dtype=object),
            "probability": self.log_probabilities.exp().tolist(),
        }
        for kind in dict.fromkeys(kinds):
            places = [place for place, each in enumerate(kinds) if each == kind]
            columns[kind] = shares[:, places].sum(-1).tolist()
        return Table(columns)

    def to_dataframe(self) -> Table:
        """Return a table with one row for each written sentence and each of its sources.

        Other spans for which `verify` has measured losses have their rows too. The columns are span,
        log_probability, source, kind, name, position (of the source's first token), score, share and loss:
        what the span loses without the source, if `verify` measured it.
        """
        from lens_mix.tables import Table

        records = []
        measured = [span for span in self.computed_spans if self.losses_of(span.start, span.stop)]
        ends = {(span.start, span.stop): span for span in (*self.spans, *measured)}
        for _, span in sorted(ends.items()):
            for each in span.top(len(self.tokens), everything=True):
                records.append(
                    {
                        "span": span.text,
                        "log_probability": span.log_probability,
                        "source": each.source.text,
                        "kind": each.source.kind,
                        "name": each.source.name,
                        "position": each.source.positions[0],
                        "score": each.score,
                        "share": each.share,
                        "loss": math.nan if each.loss is None else each.loss,
                    }
                )
        return Table(records)

    def to_networkx(self) -> networkx.DiGraph:
        """Return a directed graph from each source to each written sentence that it led to.

            >>> from lens_mix.graphs import save_graph, to_neuronpedia
            >>> save_graph(t.to_networkx(), "trace.graphml")

        Nodes are `("source", position)` and `("written", position)`, by the position of their first token.
        They have `kind` ("source" or "written"), `level` (0 or 1), `position`, `token` (the text) and, for
        sources, `section` and `name`; for written sentences, `probability`. Edges have `weight` (the score),
        `share`, and `loss` if `verify` measured it. `graph.graph["tokens"]` are the tokens of the trace.
        """
        import networkx as nx

        graph = nx.DiGraph(method=self.method_name, tokens=list(self.tokens))
        for span in self.spans:
            written = ("written", span.positions[0])
            own = {"kind": "written", "level": 1, "layer": 2, "position": span.positions[0]}
            graph.add_node(written, **own, token=span.text, probability=span.probability)
            for each in span.top(len(self.tokens), everything=True):
                place, known = (
                    each.source.positions[0],
                    {"section": each.source.kind, "name": each.source.name},
                )
                own = {"kind": "source", "level": 0, "layer": 1, "position": place}
                graph.add_node(("source", place), **own, token=each.source.text, **known)
                values = {} if each.loss is None else {"loss": each.loss}
                graph.add_edge(("source", place), written, weight=each.score, share=each.share, **values)
        return graph

    # ------------------------------------------------------------------ showing it

    def show(self) -> Page:
        """Return a page on which a click on a written sentence colors its sources in the prompt.

        A notebook shows the page; `.open()` opens it in a browser, and `.save(path)` writes it. It needs no
        network and computes nothing. So the scores of each written sentence are computed here, with a
        backward pass for each if the method has a target. The page also has what was computed before: other
        spans, the scores of single tokens if `steps` was read, what `verify` measured, and the last audit.
        """
        from lens_mix.view.page.trace import trace_page

        return trace_page(self)

    def _repr_html_(self) -> str:
        """Return the sources of everything that was written, as text with colors and without a script."""
        from lens_mix.view.notebook import describe_trace_html

        return describe_trace_html(self)

    # ------------------------------------------------------------------ keeping it

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a safetensors file, with all scores that were computed; `Trace.load` reads it.

        Raises:
            TypeError: If the parameters contain something that JSON cannot represent.
            OSError: If the file cannot be written.
        """
        from lens_mix.traces.saved import save

        save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str], model: TransformerLensModel | None = None) -> Trace:
        """Read a trace that `save` wrote.

        Args:
            path: The file.
            model: The model, to compute further scores. None: only what was computed before can be read.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file does not contain a trace, or the trace is of another model.
        """
        from lens_mix.traces import saved

        trace = Trace(**saved.load(path))
        if model is None:
            return trace
        advice = "give that model, or None to read what was computed"
        saved.require_same_model(model, trace, saved.ON_OTHER_MACHINES, advice)
        trace._computed["state"] = read_state(Lens(model, trace.reading.part))
        return dataclasses.replace(trace, model=model, _explainer=saved.make_explainer(model, trace))

    def require_model(self) -> TransformerLensModel:
        """Return the model, for further passes.

        If its weights or hooks have changed, it is compared with the trace in a forward pass, because further
        scores and losses would be those of another model.

        Raises:
            ValueError: If the trace was loaded without a model, or the model is another one now.
        """
        if self.model is None:
            raise ValueError(
                "trace: expected a trace with its model, got one from a file; give it, as in "
                "lm.Trace.load(path, model)"
            )
        lens = Lens(self.model, self.reading.part)
        state = read_state(lens)
        if state != self._computed["state"]:
            from lens_mix.traces.saved import require_same_model

            advice = "undo the change of its weights or hooks, or trace again"
            require_same_model(self.model, self, rounding_of(lens), advice)
            self._computed["state"] = state
        return self.model

    def _require_explainer(self) -> Explainer:
        if self.model is not None or self._explainer is None:
            self.require_model()
        if self._explainer is None:
            raise ValueError(
                f"trace: expected scores that were computed before the trace was saved, got others, for "
                f"which a file does not describe {self.method_name!r}; compute them again with lm.trace"
            )
        return self._explainer

    def __repr__(self) -> str:
        """Return what was traced, and the strongest sources of everything that was written."""
        seconds = self.reading.seconds
        prompt = f"{self.n_prompt} prompt tokens" if seconds is None else f"{seconds:.2f} s of sound"
        count = f"{prompt}, {self.reading.n_written} written"
        model = self.provenance.get("model", "model")
        sources = sum(source.is_content for source in self.sources())
        return (
            f"Trace({model}: {count}; {self.method_name}; {sources} sources by {self.unit})\n{self.top(3)!r}"
        )


def trace(
    model: TransformerLensModel,
    prompt: Any,
    *,
    answer: Any = None,
    generate: int | None = None,
    sources: Unit | float | Splitter | Mapping[str, Any] | Sequence[Any] | None = None,
    method: MethodLike | None = None,
    aggregation: str | Aggregation | None = None,
    language: str = "en",
    seed: int = 0,
    prepend_bos: bool | None = None,
    max_memory: int | None = None,
    progress: bool | None = False,
    **generation: Any,
) -> Trace:
    """Trace what a model wrote back to the sentences, documents or tokens that it came from.

    The model reads the prompt and the answer in one pass. A written span is explained as one number, its log
    probability after everything before it. The scores of a source are the sums over its tokens.

        >>> documents = lm.Documents({"report": "The models were trained on eight GPUs."}, "On what?")
        >>> t = lm.trace(model, documents, answer=" They were trained on eight GPUs.")
        >>> t["eight GPUs"].top(5)

    Args:
        model: Any causal TransformerLens model, or an encoder-decoder.
        prompt: A string, chat messages, `lm.Documents`, or tokens [pos]; the source of an encoder-decoder; or
            what the processor of a model of pictures and text returned. Each picture is then a source. For
            Whisper it is a waveform [sample], or what its processor returned.
        answer: What was written after the prompt: a string, which begins with its space if it needs one; or
            tokens (of an encoder-decoder: from the start token on).
        generate: The largest number of tokens that the model writes itself. It also stops at the end of its
            context. Either this or `answer`.
        sources: The unit of the sources: "token", "word", "sentence", "message" or "document". Or a function
            that splits a text into pairs (first character, character after the last); or groups of the
            prompt's positions or texts, as in `lm.methods.Occlusion`. For a sound, the length of its
            stretches in seconds. None: "sentence", or 0.2 for a sound.
        method: A method by name or with its parameters. None: the one with the best evidence. For layer
            maps of an encoder-decoder, the cross-attention is read, which sees only what the encoder read.
        aggregation: How to combine the layers of a layer map: a name of `lm.evaluate` ("mean", "rollout", …),
            "max" (the largest of all layers and heads), or a function. None: "mean"; for Whisper without a
            method, "upper half".
        language: The language of the sentences, as an ISO 639-1 code for the package sentencex.
        seed: The seed of the draws of `generate`.
        prepend_bos: As in `lm.run`, for strings.
        max_memory: As in `lm.run`.
        progress: As in `lm.run`: True shows bars, also while the model writes; False warns before a method
            that takes long. The scores of single tokens, and `verify`, show a bar after two seconds in any
            case.
        generation: Options of the model's `generate`: do_sample, temperature, top_k, top_p, …. By default the
            most probable token is written. For chat messages, also what the chat template reads besides them:
            tools, documents (each of which is a source), enable_thinking, ….

    Returns:
        The trace. The scores of everything that was written are computed; those of other spans are computed
        when they are read. A span takes about a forward and a backward pass with the default method.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has a wrong value, or the prompt does not end between two tokens.
        UnsupportedModelError: If the model does not write text, or the method cannot run on it.
    """
    template_options = _take_template_options(model, prompt, generation)
    _check_request(model, answer, generate, generation)
    unit, split, groups = _read_sources(sources, language)
    read = _default_method(model) if method is None else _read_method(method)
    if method is None and aggregation is None and is_speech_model(model):
        # In lower layers, the row before a word reads the sound of the word that it has read.
        aggregation = "upper half"
    chosen = read.explain_next_tokens()
    aggregated = _read_aggregation(aggregation, chosen)
    if max_memory is not None:
        check_whole_number("max_memory", max_memory, 1, what="a number of bytes")
    if progress is not None:
        check_flags(progress=progress)
    options = {"max_memory": max_memory, "progress": progress}
    check_whole_number("seed", seed, 0, 2**64 - 1)
    # An exception of a signal handler is then not taken for an error of the prompt or of the model.
    with Changes([]):
        prompt, answer = read_plain("prompt", prompt), as_text("answer", answer)
        text = read_prompt_text(model, prompt, template_options)
        alone = read_prompt_alone(model, prompt, text, prepend_bos)
        if sources is None and alone.features is not None:
            unit = name_seconds(_STRETCH)
        if callable(sources) and alone.features is not None:
            raise ValueError(
                "sources: expected a number of seconds, 'token' or groups of positions for a sound, got a "
                f"function that splits a text, {describe_value(sources)}"
            )
        notes: list[str] = []
        written = None
        if generate is None:
            reading = add_answer(model, alone, text, answer)
        else:
            count = check_whole_number("generate", generate, 1)
            check_options(model, generation)
            # TransformerLens's own bar shows how many tokens are written.
            shown = {"verbose": progress is True, **generation}
            reading, written, notes = write(model, alone, text, count, seed, shown)
        # It raises the errors of sources= before the method runs.
        found_sources = reading.find_sources(unit, split, groups)
        own = None if chosen.is_input_map else aggregated
        explainer = Explainer(model, reading, chosen, own, options)
        whole, logits = explainer.explain_all()
        if written is None and logits is not None:
            written = describe_written(model, reading.ids[reading.n_prompt :], logits)
        elif written is None:
            written = read_written(model, reading)
        lens = Lens(model, reading.part)
        record = {"generate": generate, "seed": seed, **generation} if generate is not None else {}
        return Trace(
            reading=reading,
            unit=unit,
            log_probabilities=written.log_probabilities,
            explained=written.explained,
            method_name=explainer.name,
            parameters=explainer.parameters,
            provenance={
                **of_run(lens, prepend_bos),
                "model": strip_path(model_name(model)),
                **({"generation": record} if record else {}),
            },
            notes=tuple(dict.fromkeys((*notes, *reading.prompt.notes, *explainer.notes))),
            model=model,
            _explainer=explainer,
            _split=split,
            _groups=groups,
            _computed={
                (0, reading.n_written): whole,
                ("sources", unit): found_sources,
                "state": read_state(lens),
            },
        )


def _take_template_options(
    model: TransformerLensModel, prompt: Any, generation: dict[str, Any]
) -> dict[str, Any]:
    """Take what the chat template reads out of the options, and return it.

    Raises:
        TypeError: If neither the chat template nor the model's `generate` reads one of the options.
    """
    own = find_options(model)
    others = {name: value for name, value in generation.items() if name not in own}
    is_template = takes_template(prompt)
    taken = find_template_options(getattr(model, "tokenizer", None), others) if is_template else {}
    for name, value in others.items():
        if name not in taken:
            template = "an argument of lm.trace, a variable of the chat template," if is_template else ""
            raise TypeError(
                f"{name}: expected {template or 'an argument of lm.trace'} or an option of model.generate "
                f"({own}), got {name}={describe_value(value)}"
            )
        del generation[name]
    return taken


def _check_request(
    model: TransformerLensModel, answer: Any, generate: int | None, generation: Mapping[str, Any]
) -> None:
    """Check that there is one text to explain, and that the model is one that writes text.

    Raises:
        TypeError: If there are options of a generation, but nothing is generated.
        ValueError: If there is neither an answer nor a generation, or both.
        UnsupportedModelError: If the model does not write text, has no weights, or is known to run wrongly.
    """
    if (answer is None) == (generate is None):
        raise ValueError(
            "answer, generate: expected one of the two, got both"
            if answer is not None
            else "answer, generate: expected what was written, or how many tokens to write, got neither"
        )
    if answer is not None and generation:
        raise TypeError(
            f"trace: expected options of generate= only with it, got {sorted(generation)}; options of "
            "lm.run are prepend_bos, max_memory and progress"
        )
    model_class = model_class_of(model)
    if not (is_causal_model(model, model_class) or is_encoder_decoder(model, model_class)):
        raise UnsupportedModelError(
            "trace: expected a causal model or an encoder-decoder, which write text, got an encoder"
        )
    # It raises an error for models without weights, or that TransformerLens is known to run wrongly.
    Lens(model)


def _read_sources(sources: Any, language: str) -> tuple[str, Splitter, Any]:
    """Return the unit, the function that splits text into sentences, and the groups that were given.

    Raises:
        TypeError: If the sources or the language have a wrong type.
        ValueError: If there is no such unit, or the language is not a code.
    """
    check_instance("language", language, str, "the code of a language, such as 'en'")
    # The package splits texts of unknown languages like English ones.
    if re.fullmatch(r"[a-z]{2,3}([-_]\w+)?", language) is None:
        raise ValueError(f"language: expected the code of a language, such as 'en', got {language!r}")
    if sources is None:
        return "sentence", split_sentences(language), None
    if isinstance(sources, numbers.Real) and not isinstance(sources, bool):
        return _name_stretch("sources", sources), split_sentences(language), None
    if isinstance(sources, str):
        if read_seconds(sources) is None:
            check_choice("sources", sources, [unit for unit in UNITS if unit != "given"])
        return sources, split_sentences(language), None
    if callable(sources):
        return "sentence", sources, None
    return "given", split_sentences(language), sources


def _name_stretch(name: str, seconds: Any) -> str:
    """Return the unit of stretches of sound of a length in seconds."""
    return name_seconds(check_number(name, seconds, least=0, above=True))


def _default_method(model: TransformerLensModel) -> Method:
    """Return the method with the best evidence (docs/evidence/traces.md, docs/evidence/speech.md)."""
    if is_speech_model(model):
        return AttentionWeights()
    if is_encoder_decoder(model, model_class_of(model)):
        return InputGradients()
    return Gim(readout="absolute")


def _read_method(method: MethodLike) -> Method:
    """Return a method, whose target will be what was written.

    Raises:
        TypeError: If it is not one method.
        ValueError: If there is no method of this name, or it has a target of its own.
    """
    methods, is_single = read_methods(method)
    if not is_single:
        raise TypeError(f"method: expected one method, got {describe_value(method)}")
    read = next(iter(methods.values()))
    if has_own_target(read):
        raise ValueError(
            f"method: expected {read.name!r} without a target, because a trace explains what was written, "
            f"got {read!r}; to explain another number use lm.run"
        )
    return read


def _read_aggregation(aggregation: str | Aggregation | None, method: Method) -> tuple[str, Aggregation]:
    """Return the name and the function of an aggregation.

    Raises:
        TypeError: If it is neither a name nor a function.
        ValueError: If the name is unknown, or the method makes no layer maps.
    """
    if aggregation is not None and method.is_input_map:
        raise ValueError(
            f"aggregation: expected None, because {method.name!r} makes a map of all layers, got "
            f"{aggregation!r}; it combines the layers of a layer map, such as method='attention'"
        )
    return find_aggregation(aggregation)
