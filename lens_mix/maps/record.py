"""Define `MixingMap`, the record that a method or an aggregation returns."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from jaxtyping import Bool
from torch import Tensor

from lens_mix.arguments import (
    check_choice,
    check_flags,
    check_instance,
    check_items,
    check_layer,
    check_number,
    check_whole_number,
    write_count,
)
from lens_mix.maps import arithmetic, checks, difference
from lens_mix.maps.explained import Explained, as_explained, label_row
from lens_mix.maps.grid import Grid, as_grid
from lens_mix.maps.positions import (
    Dropped,
    as_position,
    shorten,
)

if TYPE_CHECKING:
    import networkx
    import numpy
    import pandas
    import xarray
    from matplotlib.figure import Figure

    from lens_mix.maps.spans import Span, Words
    from lens_mix.tables import Table

# The options of `lens_mix.view.layer_maps` that `show_position` does not have.
_ONLY_LAYER_MAPS = {"layers", "head", "layer", "diagonal", "queries"}


class Source(NamedTuple):
    """One key that a query used.

    Attributes:
        token: The token of the key.
        position: The position of the key.
        score: The score of the key, in the unit that was asked for.
    """

    token: str
    position: int
    score: float


class TopSources(list[Source]):
    """A list of sources that also says what they explain: it prints one line for each of them.

    Attributes:
        explanation: What the row explains, as `MixingMap.explanation` returns it.
        read: Which layer and head the scores are of: "layer 29 of 0 to 29, mean of 9 heads".
    """

    def __init__(self, sources: Iterable[Source], explanation: str = "", read: str = "") -> None:
        super().__init__(sources)
        self.explanation, self.read = explanation, read

    def __repr__(self) -> str:
        """Return what was read, the explanation, and one line per source: score, token and position."""
        lines = [f"{source.score:>9.4g}  {source.token!r} ({source.position})" for source in self]
        head = "; ".join(filter(None, (self.read, self.explanation)))
        return "\n".join([head, *lines] if head else lines)


class HeadScore(NamedTuple):
    """One head and its score of a key.

    Attributes:
        layer: The label of the head's layer.
        head: The number of the head in its layer.
        score: The score of the key, raw, as the method defines it.
        share: The score divided by the sum of magnitudes of the head's row, -1 to 1.
    """

    layer: int
    head: int
    score: float
    share: float


class HeadScores(list[HeadScore]):
    """A list of heads that prints one line for each of them, below what the row explains.

    Attributes:
        explanation: What the row explains, as `MixingMap.explanation` returns it.
    """

    def __init__(self, heads: Iterable[HeadScore], explanation: str = "") -> None:
        super().__init__(heads)
        self.explanation = explanation

    def __repr__(self) -> str:
        """Return the explanation and one line per head: its score, its layer, its number and its share."""
        lines = [
            f"{head.score:>9.4g}  layer {head.layer}, head {head.head} ({head.share:.0%} of its row)"
            for head in self
        ]
        return "\n".join([self.explanation, *lines] if self.explanation else lines)


class _TokensAsKeys(list[str]):
    """The key tokens of a map whose keys are its tokens.

    The class marks them, because the keys of a cross-attention map can be the same text as its tokens.
    """


# A comparison of two tensors is not a single boolean, so maps are compared by identity.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MixingMap:
    """How much each query position used each key position, for one prompt and one method.

    A map can also be made by hand from any stack of maps (a tensor, a numpy array or a nested list):

        >>> lm.MixingMap(scores=A, tokens=["The", " cat"], method="attention", causal=True)

    A map never changes: every method returns a new map. A tensor given as `scores` is detached, and is not
    copied. A layer is named by its label in `layers`, and a row by its position in the prompt. A negative
    number counts from the last layer of the map, or from the end of the prompt.

    Attributes:
        scores: The scores `[layer, query, key]` or `[layer, head, query, key]`, raw, as the method defines
            them.
        tokens: One string per position of the prompt. Tokens that share a character are written as that
            character and a number: `é[1/2]`, `é[2/2]` (`lens_mix.maps.characters`).
        method: The name of the method.
        causal: Whether no query can see a later key.
        mask: The keys that each query could see, as booleans `[query, key]` or `[layer, query, key]`. None:
            all keys, or those up to the query's own position if `causal`.
        key_tokens: One string per key: the tokens, unless the keys are spans or the other sequence of
            cross-attention. None, when a map is made, means the tokens; `keys_are_tokens` is then True.
        parameters: The parameters of the method, by name.
        residual: The residual weight, 0 to 1, that `rollout(residual=None)` uses.
        kind: "layer" if each map describes one block, "input" if it describes all blocks down to the input.
        layers: The labels of the layers. Default: 0, 1, 2, ….
        provenance: The origin of the map, as values that JSON can represent (model name, dtype, engine, …).
            `sink` is True if rows of weights sum to less than 1 because an attention sink that is not a token
            received the rest. `predicts_next` is True if the model predicts the token after each row's
            position, and not the one at it. Without it, that is so in causal maps and those of a decoder.
            `verification_error` is the largest relative error of the verified components.
        notes: Sentences about this map that a reader should know, such as warnings.
        queries: The position among `tokens` of each row of `scores` and `mask`. Each position occurs once, in
            any order. None: all positions in order; a list of all positions in order becomes None.
        residual_shares: The measured share of each row's representation that is its own residual stream,
            `[layer, query]`, 0 to 1, for `rollout(residual="measured")`. None: not measured, or an input map.
        default_query: The position of the row that is used if no row is named (in `top`, in figures,
            in a notebook). A run sets it to the position that the target reads. Without a target it is 0
            in a bidirectional model, the position of [CLS]. None, or a position without a row: the map's last
            row.
        explained: What the model predicts at the position of each row, and the target that the row explains,
            as `lens_mix.maps.explained.Explained`. A run fills it if the method has a target, and for
            every causal model. None: unknown.
        features: The picture or sound that the model read: pixels `[channel, height, width]`, a waveform
            `[sample]` or a spectrogram `[time, band]`. For a model that reads pictures beside tokens, the
            pixels of the only picture. None without one.
        grid: Which keys are patches or frames, and where these are, as a `lens_mix.maps.Grid`. None for
            tokens, and for several pictures: `m.replace(grid=Grid(**m.provenance["pictures"][1]["grid"]))`
            chooses the second one.

    Raises:
        TypeError: If scores, tokens, mask, layers, queries, residual or explained have a wrong type.
        ValueError: If shapes do not fit each other, a score is NaN or infinite, or a key has weight although
            its query could not see it (the error names the entry).
    """

    # The annotation has no shape, because arrays and lists are allowed too; `__post_init__` checks the shape.
    scores: Tensor
    tokens: list[str]
    method: str = "custom"
    causal: bool = False
    mask: Tensor | None = None
    # In a finished map this is always a list; see `_TokensAsKeys`.
    key_tokens: list[str] = None  # type: ignore[assignment]
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    residual: float | None = None
    kind: Literal["layer", "input"] = "layer"
    layers: list[int] | None = None
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    queries: list[int] | None = None
    residual_shares: Tensor | None = None
    default_query: int | None = None
    explained: tuple[Explained, ...] | None = None
    features: Tensor | None = None
    grid: Grid | None = None

    def __post_init__(self) -> None:
        scores = checks.as_scores(self.scores)
        rows, keys = scores.shape[-2:]
        key_tokens, queries = self._read_key_tokens(keys), None
        if self.queries is not None:
            tokens = checks.as_tokens(self.tokens, keys if key_tokens is None else None, "tokens", "key")
            queries = checks.as_queries(self.queries, len(tokens), rows)
        elif key_tokens is None and rows != keys:
            raise ValueError(
                f"scores: expected as many keys as queries, got shape {tuple(scores.shape)}; "
                "give key_tokens= if the keys are not the tokens, or queries= if the map has only some rows"
            )
        else:
            tokens = checks.as_tokens(self.tokens, rows, "tokens", "query")
        default, residual = self.default_query, self.residual
        check_choice("kind", self.kind, ("layer", "input"))
        check_instance("method", self.method, str, "a name")
        check_flags(causal=self.causal)
        # The shares describe rows of single layers, so an input map has none.
        shares = None if self.kind == "input" else self.residual_shares
        notes = [self.notes] if isinstance(self.notes, str) else self.notes
        values = {
            "scores": scores,
            "tokens": tokens,
            "causal": bool(self.causal),
            "mask": checks.as_mask(self.mask, scores),
            "key_tokens": _TokensAsKeys(tokens) if key_tokens is None else key_tokens,
            "parameters": checks.as_record("parameters", self.parameters),
            "residual": None if residual is None else checks.as_residual(residual),
            "layers": checks.as_layers(self.layers, len(scores)),
            "provenance": checks.as_record("provenance", self.provenance),
            "notes": tuple(check_items("notes", notes, "strings", kind=str)),
            "queries": queries,
            "residual_shares": checks.as_shares(shares, scores),
            "default_query": None if default is None else as_position(default, len(tokens), "default_query"),
            "explained": as_explained(self.explained, rows),
            "features": checks.as_features(self.features),
            "grid": as_grid(self.grid, keys),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        checks.require_consistent_causal(self)
        checks.require_finite(self)
        checks.require_no_hidden_weight(self)

    def _read_key_tokens(self, count: int) -> list[str] | None:
        """Return the `count` key tokens that were given; None if the keys are the tokens."""
        given: Any = self.key_tokens
        if isinstance(given, _TokensAsKeys) and len(given) == len(self.tokens):
            if list(given) == list(self.tokens):
                return None
            raise ValueError(
                "key_tokens: expected those of a map with the same tokens, got those of a map with others; "
                "to change the tokens of a map write m.replace(tokens=...), and for other keys write "
                "key_tokens=list(...)"
            )
        return None if given is None else checks.as_tokens(given, count, "key_tokens", "key")

    # ------------------------------------------------------------------ axes and labels

    @property
    def keys_are_tokens(self) -> bool:
        """Return whether the keys are the map's own tokens, and not spans or another sequence."""
        return isinstance(self.key_tokens, _TokensAsKeys)

    @property
    def has_heads(self) -> bool:
        """Return whether `scores` has a head axis."""
        return self.scores.ndim == 4

    @property
    def layer_labels(self) -> list[int]:
        """Return the labels of the layers."""
        return list(self.layers or [])

    @property
    def key_labels(self) -> list[str]:
        """Return one string per key position."""
        return self.key_tokens

    @property
    def query_positions(self) -> list[int]:
        """Return the position of each row among `tokens`."""
        return list(range(len(self.tokens))) if self.queries is None else list(self.queries)

    def positions(self, text: Span, axis: Literal["key", "query"] = "key") -> list[int]:
        """Return the positions of a text, for a hook or anything else that takes numbers.

        A text is whole tokens, one or several. White space and case matter only if the text occurs as it is
        written. Where one position is needed, as in `top(query=...)`, a text is its last token.

            >>> from lens_mix.hooks import zero_values
            >>> m = lm.run(model, "When in Rome, do as the Romans do", "attention")
            >>> hook = zero_values(layer=0, position=m.positions(" Rome"))
            >>> logits = model.run_with_hooks("When in Rome, do as the Romans do", fwd_hooks=[hook])

        The numbers are those of the prompt, unless tokens of the map were dropped or merged.
        `lm.models.find_positions` needs no map.

        Args:
            text: A text of the prompt, a position (negative: from the end), a slice, or several of these.
            axis: "key": a text of `key_labels`. "query": a text of `tokens`, which differ in cross-attention.

        Raises:
            ValueError: If the text is not in the prompt; the error says which token is similar. Also if it
                occurs more than once; the error has the positions, of which one may be given, and more of
                the text around it makes it unique.
        """
        from lens_mix.maps.spans import find_positions

        check_choice("axis", axis, ("key", "query"))
        return find_positions(self.key_labels if axis == "key" else self.tokens, text, "text")

    @property
    def query_labels(self) -> list[str]:
        """Return the token of each row."""
        return [self.tokens[position] for position in self.query_positions]

    @property
    def row_labels(self) -> list[str]:
        """Return one label per row: its token, and in a causal map the predicted next token: `, → which`.

        A map without predictions has the tokens alone.
        """
        if self.explained is None or not self.predicts_next:
            return self.query_labels
        return [label_row(*row) for row in zip(self.query_labels, self.explained, strict=True)]

    @property
    def predicts_next(self) -> bool:
        """Return whether the prediction of a row is the token after it, and not the one at its position."""
        is_decoder = self.causal or self.provenance.get("part") in ("decoder", "cross", "joint")
        return bool(self.provenance.get("predicts_next", is_decoder))

    def explanation(self, query: int | str | None = None) -> str:
        """Return what a row explains as a line of text: `after ' in': ' Italian' 0.66`; "" if it is unknown.

        A target that is not about the prediction is named with its value.

        Args:
            query: A position (negative: from the end of the prompt), or a text of the prompt (`positions`).
                None: the row of `default_query`.

        Raises:
            ValueError: If the query does not exist, or the map does not have its row.
        """
        row = self.row_index(query)
        entry = Explained() if self.explained is None else self.explained[row]
        if entry == Explained():
            return ""
        return f"{'after' if self.predicts_next else 'at'} {self.query_labels[row]!r}: {entry}"

    def visible(self) -> Bool[Tensor, "layer query key"]:
        """Return which keys each query could see."""
        mask = ~checks.later_keys(self) if self.causal and self.mask is None else self.mask
        if mask is None:
            mask = torch.ones(self.scores.shape[-2:], dtype=torch.bool, device=self.scores.device)
        return mask.expand(len(self), *self.scores.shape[-2:])

    @property
    def default_query_position(self) -> int:
        """Return the position of the row that is used if no row is named.

        It is `default_query` if the map has that row, else the map's last position.
        """
        positions, default = self.query_positions, self.default_query
        return max(positions) if default is None or default not in positions else default

    def row_index(self, query: int | str | None, argument: str = "query") -> int:
        """Return the index on the query axis of a position or a text.

        Args:
            query: A position (negative: from the end of the prompt), or a text of the prompt, of which the
                last token is meant. None: the position `default_query_position`.
            argument: The name of the argument, for errors.

        Raises:
            ValueError: If the position does not exist, the text is not found or occurs more than once
                (`positions`), or the map does not have the row.
        """
        from lens_mix.maps.spans import find_query

        query = self.default_query_position if query is None else query
        position = find_query(self.tokens, query, argument)
        if self.queries is None:
            return position
        if position not in self.queries:
            raise ValueError(
                f"{argument}: expected one of the rows that this map has, {shorten(self.queries)}, got "
                f"{query!r} (position {position}); compute it with lm.run(..., queries=[{position}])"
            )
        return self.queries.index(position)

    def require_every_row(self, purpose: str, argument: str = "mixing_map") -> None:
        """Raise a ValueError that names the rows of the map, if it does not have all rows.

        Args:
            purpose: What needs all rows, for the error.
            argument: The name of the argument, for the error.
        """
        if self.queries is not None:
            raise ValueError(
                f"{argument}: expected the rows of all {len(self.tokens)} positions for {purpose}, got only "
                f"those of {shorten(self.queries)}; compute all with lm.run(..., queries=None)"
            )

    def require_no_gaps(self) -> None:
        """Raise a ValueError if the labels of the layers are not consecutive."""
        labels = self.layer_labels
        if any(right != left + 1 for left, right in itertools.pairwise(labels)):
            raise ValueError(
                f"mixing_map: expected layers that follow one another, got layers {labels}; compute those "
                "between with lm.run(..., layers=...). If each layer does follow the one before, number them "
                "anew with .replace(layers=None). In a hybrid model, maps do not chain over blocks without "
                "attention"
            )

    def layer_index(self, layer: int, argument: str = "layer") -> int:
        """Return the index on the layer axis of the layer with this label (negative: from the end).

        Raises:
            TypeError: If `layer` is not a whole number.
            ValueError: If the layer does not exist.
        """
        return check_layer(argument, layer, self.layer_labels)

    def replace(self, **changes: Any) -> MixingMap:
        """Return the map with some fields changed. Keys that are the tokens stay the tokens."""
        unchanged = {"key_tokens": None} if self.keys_are_tokens else {}
        return dataclasses.replace(self, **{**unchanged, **changes})

    def layer(self, layer: int) -> MixingMap:
        """Return the map of one layer, as a `MixingMap` with one layer."""
        return self.select_layers([layer])

    def select_layers(self, layers: Sequence[int]) -> MixingMap:
        """Return the maps of some layers, in the given order."""
        chosen = check_items("layers", layers, "labels of layers", least=1)
        index = [self.layer_index(layer, "layers") for layer in chosen]
        if index == list(range(len(self.scores))):
            return self
        mask = self.mask[index] if self.mask is not None and self.mask.ndim == 3 else self.mask
        labels = [self.layer_labels[layer_index] for layer_index in index]
        shares = None if self.residual_shares is None else self.residual_shares[index]
        return self.replace(scores=self.scores[index], mask=mask, layers=labels, residual_shares=shares)

    def select_queries(self, queries: Span) -> MixingMap:
        """Return the rows of some queries, in the given order. Keys and tokens stay.

        Args:
            queries: A position (negative: from the end of the prompt), a text of the prompt, which is all of
                its tokens, a slice of the prompt's positions, or several of these.

        Raises:
            ValueError: If a position does not exist or occurs twice, there are none, a text is not found, or
                the map does not have a row.
        """
        from lens_mix.maps.spans import find_positions

        positions = find_positions(self.tokens, queries, "queries")
        rows = [self.row_index(position, "queries") for position in positions]
        mask = None if self.mask is None else self.mask[..., rows, :]
        shares = None if self.residual_shares is None else self.residual_shares[:, rows]
        return self.replace(
            scores=self.scores[..., rows, :],
            mask=mask,
            queries=positions,
            residual_shares=shares,
            explained=self._explained_by(rows),
        )

    def _explained_by(self, rows: Sequence[int]) -> tuple[Explained, ...] | None:
        """Return what some rows explain, by their indices."""
        return None if self.explained is None else tuple(self.explained[row] for row in rows)

    def head(self, head: int) -> MixingMap:
        """Return the maps of one head, `[layer, query, key]`.

        Raises:
            ValueError: If the map has no head axis, or no such head.
        """
        self._require_heads("head")
        count = self.scores.shape[1]
        return self.replace(scores=self.scores[:, check_whole_number("head", head, -count, count - 1)])

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.scores)

    def __getitem__(self, layer: int | Sequence[int]) -> MixingMap:
        """Return the map of one layer or of several, by their labels: `m[23]`, `m[[22, 23]]`, `m[-1]`."""
        if isinstance(layer, (slice, tuple, str)):
            raise TypeError(
                f"layer: expected a layer's label or a list of them, got {layer!r}; select rows with "
                ".select_queries, heads with .head, and numbers with .scores[...]"
            )
        return self.select_layers(check_items("layer", layer, "labels of layers", alone=True))

    def __iter__(self) -> Iterator[MixingMap]:
        return (self.layer(label) for label in self.layer_labels)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray:
        """Return `scores` as a numpy array."""
        from lens_mix.maps.exchange import to_numpy

        numbers = to_numpy(self.scores)
        return numbers.astype(dtype or numbers.dtype, copy=bool(copy))

    __sub__ = difference.difference

    # ------------------------------------------------------------------ functional updates

    def normalized(self, negative: Literal["refuse", "clip", "absolute"] = "refuse") -> MixingMap:
        """Return the map with each row divided by its sum, in float32 or float64.

        An all-zero row stays zero, and a note names it.

        Args:
            negative: What to do with scores below 0, which have no share of a sum. "refuse": raise an error.
                "clip": set them to 0. "absolute": take the absolute value of all scores.

        Raises:
            ValueError: If a score is below 0 and `negative` is "refuse".
        """
        shares, empty = arithmetic.normalize_rows(self.scores, negative)
        notes = arithmetic.add_empty_rows_note(self.notes, empty, self.layer_labels, self.query_positions)
        return self.replace(scores=shares, notes=notes)

    def merge_heads(
        self, how: Literal["mean", "max"] = "mean", weights: Tensor | Sequence[float] | None = None
    ) -> MixingMap:
        """Return the map with its heads merged into one; a map without heads is returned unchanged.

        Args:
            how: "mean" or "max" over heads.
            weights: One weight per head, `[head]` or `[layer, head]`, 0 or more and not all 0, for a weighted
                mean.

        Raises:
            ValueError: If `weights` have another shape or are not such numbers, or if there is nothing to
                weight because `how` is "max" or the map has no heads.
        """
        check_choice("how", how, ("mean", "max"))
        if weights is not None and (how == "max" or not self.has_heads):
            case = "how='max'" if self.has_heads else "a map without heads"
            raise ValueError(
                f"weights: expected None except for how='mean' on a map with heads, got weights for {case}"
            )
        if not self.has_heads:
            return self
        provenance = self.provenance if how == "mean" else self._without_sink()
        return self.replace(scores=arithmetic.merge_heads(self.scores, how, weights), provenance=provenance)

    def drop(self, tokens: Dropped, axis: Literal["both", "query", "key"] = "both") -> MixingMap:
        """Return the map without some tokens. The remaining scores do not change.

        Args:
            tokens: A position, a token (dropped wherever it occurs), another text of the prompt as in
                `positions`, several of these, or a function that returns True for each token to drop.
            axis: "both" for a map whose keys are the tokens; "query" or "key" to drop on one axis only.

        Raises:
            TypeError: If `tokens` is none of these.
            ValueError: If a position or token does not exist, no token or no row would remain, or `axis` is
                "both" for a map with other keys than its tokens.
        """
        from lens_mix.maps.spans import kept_positions

        check_choice("axis", axis, ("both", "query", "key"))
        if axis == "both" and not self.keys_are_tokens:
            raise ValueError("axis: expected 'query' or 'key' on a map with other keys, got 'both'")
        positions = kept_positions(self.tokens, () if axis == "key" else tokens)
        keys = kept_positions(self.key_labels, () if axis == "query" else tokens)
        new_position = {position: index for index, position in enumerate(positions)}
        row_positions = self.query_positions
        rows = [row for row, position in enumerate(row_positions) if position in new_position]
        if not rows:
            raise ValueError(
                "tokens: expected at least one row to remain, got all rows of the map dropped, "
                f"{shorten(row_positions)}"
            )
        mask, causal = self.mask, self.causal
        key_tokens: list[str] | None = None
        if axis != "both":
            # `causal` compares positions on both axes, so a mask must replace it if only one axis changes.
            mask = self.visible()[0] if mask is None and causal else mask
            key_tokens, causal = [self.key_labels[key] for key in keys], False
        return self.replace(
            scores=self.scores[..., rows, :][..., keys],
            tokens=[self.tokens[position] for position in positions],
            queries=[new_position[row_positions[row]] for row in rows],
            mask=None if mask is None else mask[..., rows, :][..., keys],
            key_tokens=key_tokens,
            causal=causal,
            provenance=self.provenance if len(keys) == len(self.key_labels) else self._without_sink(),
            residual_shares=None if self.residual_shares is None else self.residual_shares[:, rows],
            default_query=None if self.default_query is None else new_position.get(self.default_query),
            explained=self._explained_by(rows),
            grid=None if self.grid is None else self.grid.moved({key: new for new, key in enumerate(keys)}),
        )

    def drop_bos(self) -> MixingMap:
        """Return the map without position 0 on both axes, whatever its token. Other scores do not change."""
        return self.drop(0)

    def merge_words(
        self, groups: Words = None, keys: str = "sum", queries: str = "mean", key_groups: Words = None
    ) -> MixingMap:
        """Return the map with subword tokens merged into words on both axes, in float32 or float64.

        With the defaults, rows that sum to 1 still do. Apply `rollout` before merging: uniform attention over
        tokens is not uniform over words.

        If the map has only some rows, the result has the words for which all rows are present. With
        queries="first" or "last", the word's first or last row is enough. The word of the position that an
        input map explains is merged from whichever of its rows are present. Notes name that word, and the
        words that are left out although one of their rows is present.

        Args:
            groups: The words as text, or as lists of positions that contain each position once; or a dict of
                named groups, such as {"the subject": "Eiffel Tower"}, beside which tokens stay as they are.
                None: the words are found from the tokens, by the rule of `lens_mix.maps.words.find_words`.
            keys: How to merge columns: "sum", "mean", "max", "min", "first" or "last".
            queries: How to merge rows: one of the same names.
            key_groups: The words of the keys, for a map with other keys. None: its keys are not merged.

        Raises:
            TypeError: If groups are neither text nor lists of positions.
            ValueError: If groups do not fit the tokens, the tokens have no word marks, `keys` or `queries` is
                not such a name, or no word has its rows in the map.
        """
        from lens_mix.maps import spans, words

        reduce_keys = words.find_reduction(keys, "keys")
        reduce_queries = words.find_reduction(queries, "queries")
        query_words, names = spans.resolve_words(self.tokens, groups, "groups")
        key_words = query_words
        key_names: list[str] | None = None
        if not self.keys_are_tokens:
            given = [[key] for key in range(len(self.key_tokens))] if key_groups is None else key_groups
            key_words, key_names = spans.resolve_words(self.key_tokens, given, "key_groups")
        elif key_groups is not None:
            raise ValueError("key_groups: expected None on a map whose keys are its tokens, got groups")
        explained = self.default_query_position if self.kind == "input" else self.default_query
        indices, rows, notes = words.find_word_rows(
            query_words, names, self.query_positions, queries, explained
        )
        in_order = all(max(left) < min(right) for left, right in itertools.pairwise(query_words))
        causal = self.causal and in_order
        mask = self.visible()[0] if self.causal and not causal and self.mask is None else self.mask
        if mask is not None:
            # A word could see another word if any of its tokens could see any token of the other.
            mask = words.merge_axis(words.merge_axis(mask, key_words, -1, torch.any), rows, -2, torch.any)
        default = [index for index, word in enumerate(query_words) if self.default_query in word]
        scores = words.merge_axis(arithmetic.at_least_float32(self.scores), key_words, -1, reduce_keys)
        keeps_sums = keys == "sum" and queries in ("mean", "first", "last")
        provenance = self.provenance if keeps_sums else self._without_sink()
        return self.replace(
            scores=words.merge_axis(scores, rows, -2, reduce_queries),
            tokens=names,
            queries=indices,
            key_tokens=key_names,
            causal=causal,
            mask=mask,
            residual_shares=None,
            provenance={**provenance, "merged_words": {"keys": keys, "queries": queries}},
            default_query=default[0] if default else None,
            notes=(*self.notes, *notes),
            explained=self._explained_by_words(rows, queries),
            grid=self.grid if key_words == [[key] for key in range(len(self.key_labels))] else None,
        )

    def _explained_by_words(self, rows: Sequence[Sequence[int]], how: str) -> tuple[Explained, ...] | None:
        """Return what words explain, by the indices of their rows and the name of the reduction."""
        # The token after a word is predicted at the word's last token.
        last = self._explained_by([max(word, key=self.query_positions.__getitem__) for word in rows])
        if last is None or how != "first":
            return last
        # The first row of a longer word explains a token inside the word, and not the token after it.
        return tuple(entry if len(word) == 1 else Explained() for entry, word in zip(last, rows, strict=True))

    def _without_sink(self) -> dict[str, Any]:
        """Return the provenance without `sink`.

        It is for rows whose sum is below 1 also for another reason than the weight of the sink.
        """
        return {name: value for name, value in self.provenance.items() if name != "sink"}

    # ------------------------------------------------------------------ reading and exporting

    def top(
        self,
        k: int = 5,
        query: int | str | None = None,
        layer: int = -1,
        head: int | None = None,
        unit: Literal["raw", "share"] = "raw",
    ) -> TopSources:
        """Return the `k` keys with the largest scores among those that the query could see, largest first.

        Scores are compared by magnitude, and keep their signs. The list prints the layer and the head that
        were read, what the row explains, and a line per key.

        Args:
            k: The number of keys, 1 or more.
            query: A position (negative: from the end of the prompt), or a text of the prompt (`positions`).
                None: the row of `default_query`.
            layer: The label of the layer (negative: from the end).
            head: The head. None: the mean over heads.
            unit: "raw": scores as the method defines them. "share": divided by the row's sum of magnitudes.

        Raises:
            ValueError: If the query, layer or head does not exist, the map does not have the row, or `k` is
                below 1.
        """
        k = check_whole_number("k", k, 1)
        check_choice("unit", unit, ("raw", "share"))
        index, row = self.layer_index(layer), self.row_index(query)
        scores = (self.merge_heads() if head is None else self.head(head)).scores[index, row]
        scores = arithmetic.normalize_by_magnitude(scores) if unit == "share" else scores
        visible = self.visible()[index, row].nonzero().flatten()
        # A stable sort puts the first of equal keys first.
        best = visible[torch.sort(scores[visible].abs(), descending=True, stable=True).indices[:k]].tolist()
        found = (Source(self.key_labels[key], key, scores[key].item()) for key in best)
        return TopSources(found, self.explanation(query), self._describe_read(index, head))

    def _describe_read(self, index: int, head: int | None) -> str:
        """Return which of its layers, heads and parts a list of the map is of."""
        labels = self.layer_labels
        is_run = labels == list(range(labels[0], labels[-1] + 1))
        several = f"{labels[0]} to {labels[-1]}" if is_run else ", ".join(map(str, labels))
        layer = f"layer {labels[index]}" + (f" of {several}" if len(labels) > 1 else "")
        read = layer if self.kind == "layer" else f"input map, {layer}" if len(labels) > 1 else "input map"
        # Only the maps of an encoder-decoder have more than one part to tell apart.
        if "target_token_ids" in self.provenance and self.provenance.get("part"):
            read = f"{self.provenance['part']}, {read}"
        if not self.has_heads:
            return read
        count = self.scores.shape[1]
        heads = f"head {head}" if head is not None else f"mean of {write_count(count, 'head')}"
        return f"{read}, {heads}"

    def top_heads(
        self,
        query: int | str | None = None,
        key: Span | None = None,
        k: int = 5,
        unit: Literal["raw", "share"] = "raw",
    ) -> HeadScores:
        """Return the `k` heads of all layers with the largest scores of a key, largest first.

        Scores are compared by magnitude, and keep their signs. For some layers, write
        `m.select_layers([...]).top_heads(...)`.

        Args:
            query: A position (negative: from the end of the prompt), or a text of the prompt (`positions`).
                None: the row of `default_query`.
            key: A position, a text of the prompt such as "Eiffel Tower", or several of these, whose scores
                are added up. It must be given.
            k: The number of heads, 1 or more.
            unit: "raw": heads are compared by `score`. "share": by `share`.

        Raises:
            ValueError: If the map has no heads, the query or key does not exist, the query cannot see the
                key, or `k` is below 1.
        """
        from lens_mix.maps.spans import find_positions

        if key is None:
            raise TypeError('key: expected a position or a text of the prompt, as in key=" Paris", got None')
        k, row = check_whole_number("k", k, 1), self.row_index(query)
        check_choice("unit", unit, ("raw", "share"))
        self._require_heads("top_heads")
        keys = find_positions(self.key_labels, key, "key")
        checks.require_visible_keys(self, row, keys, "key")
        rows = self.scores[:, :, row]
        raw, shares = (
            scores[..., keys].sum(-1).flatten().tolist()
            for scores in (arithmetic.at_least_float32(rows), arithmetic.normalize_by_magnitude(rows))
        )
        places = itertools.product(self.layer_labels, range(self.scores.shape[1]))
        heads = [HeadScore(*place, *values) for place, *values in zip(places, raw, shares, strict=True)]
        # Sorting is stable, so the first of equal heads stays the first.
        heads.sort(key=lambda head: -abs(head.score if unit == "raw" else head.share))
        return HeadScores(heads[:k], self.explanation(query))

    def _require_heads(self, argument: str) -> None:
        if not self.has_heads:
            raise ValueError(
                f"{argument}: expected a map with heads, got shape {tuple(self.scores.shape)}; compute it "
                "by a method that has the parameter per_head, as in lm.run(model, prompt, "
                "lm.methods.AttentionWeights(per_head=True))"
            )

    def to_dataframe(self) -> Table:
        """Return the map as a table in long form, with one row per entry.

        The columns are layer, (head,) query, key, query_token, key_token and score. Scores are raw, and NaN
        if the query could not see the key. If the map has predictions, the columns prediction and probability
        repeat those of the row. `attrs` contains the other fields as JSON. The table's `to_csv` and
        `to_excel` write a token that may be misread (`NA`, `01`, `=1+1`) as a JSON string.
        `MixingMap.from_dataframe` decodes it.
        """
        from lens_mix.maps import exchange

        return exchange.to_dataframe(self)

    def to_xarray(self) -> xarray.DataArray:
        """Return the map as a labeled array with dimensions layer, (head,) query, key.

        Tokens are coordinates, and the other fields are in `attrs`. Scores are raw, and NaN if the query
        could not see the key.

        Raises:
            ImportError: If xarray is not installed.
        """
        from lens_mix.maps import exchange

        return exchange.to_xarray(self)

    @classmethod
    def from_dataframe(cls, /, table: pandas.DataFrame, **fields: Any) -> MixingMap:
        """Return the map of a table that `to_dataframe` made, also one that was read from a CSV file.

        The columns contain the tokens, layers, heads and rows; a key without a score (NaN) is hidden. The
        other fields come from the table's `attrs`, which a CSV file does not keep. If all tokens are written
        as `to_csv` writes them, tokens that are JSON strings are decoded.

        Args:
            table: The table, with its rows in any order.
            fields: Fields of the `MixingMap` (`method="attention"`), which replace those of the table.

        Raises:
            TypeError: If a field has a wrong type.
            ValueError: If `table` is not such a table, an entry is missing or occurs twice, a token is not
                text, or a field does not fit.
        """
        from lens_mix.maps import read_back

        return read_back.from_dataframe(cls, table, **fields)

    @classmethod
    def from_xarray(cls, /, array: xarray.DataArray, **fields: Any) -> MixingMap:
        """Return the map of an array that `to_xarray` made.

        Args:
            array: The array.
            fields: Fields of the `MixingMap`, which replace those of the array.

        Raises:
            TypeError: If a field has a wrong type.
            ValueError: If `array` is not such an array, or if a field does not fit.
        """
        from lens_mix.maps import read_back

        return read_back.from_xarray(cls, array, **fields)

    @classmethod
    def from_attentions(
        cls,
        /,
        outputs: Any,
        tokens: Any,
        *,
        key_tokens: Any = None,
        tokenizer: Any = None,
        part: Literal["encoder", "decoder", "cross"] | None = None,
        per_head: bool = False,
        **fields: Any,
    ) -> MixingMap:
        """Return the map of the attention weights that a model of transformers returned.

            >>> hf_model = AutoModelForCausalLM.from_pretrained("gpt2", attn_implementation="eager")
            >>> ids = tokenizer("The cat sat", return_tensors="pt")["input_ids"]
            >>> outputs = hf_model(ids, output_attentions=True)
            >>> m = lm.MixingMap.from_attentions(outputs, ids, tokenizer=tokenizer)

        The map is that of `lm.run(model, ids, "attention")`, without predictions. It is causal if no weight
        is above the diagonal.

        Args:
            outputs: The outputs of one prompt, or their weights themselves: a tensor `[1, head, query, key]`
                for each layer.
            tokens: Token ids `[pos]` or `[1, pos]`, or one string per token. For "decoder" and "cross" these
                are what the decoder read, from its start token on.
            key_tokens: The tokens of the source, for "cross" only.
            tokenizer: The tokenizer that writes ids as strings. None: ids are written as numbers.
            part: The part of an encoder-decoder. None: the encoder.
            per_head: Whether the map has heads; else it is their mean.
            fields: Fields of the `MixingMap`, which replace those of the outputs.

        Raises:
            TypeError: If the tokens have a wrong type, or `key_tokens` is missing.
            ValueError: If the outputs have no weights (the error says how to load the model), are those of
                several prompts or of `generate`, or do not fit the tokens; or if dropout changed them.
        """
        from lens_mix.maps.from_outputs import from_attentions

        options: dict[str, Any] = {"key_tokens": key_tokens, "tokenizer": tokenizer, "part": part}
        return from_attentions(cls, outputs, tokens, per_head=per_head, **options, **fields)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the map to a safetensors file; `MixingMap.load` returns an identical map.

        The tensors are written as tensors, and all other fields as JSON in the metadata. The file is written
        under another name and is moved to `path` when it is complete.

        Args:
            path: The file, which is replaced if it exists.

        Raises:
            TypeError: If `parameters` or `provenance` contain something that JSON cannot represent.
            ValueError: If the fields that are written as JSON are too long.
            OSError: If the file cannot be written.
        """
        from lens_mix.maps import exchange

        exchange.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> MixingMap:
        """Read a map that `save` wrote. Later changes of the file do not change the map.

        Args:
            path: The path of the file.
            device: The device of the map's tensors.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file does not contain a map or was changed after it was written, or if torch
                cannot use the device.
        """
        from lens_mix.maps import exchange

        return exchange.load(cls, path, device)

    def __repr__(self) -> str:
        from lens_mix.maps import exchange

        return exchange.describe(self)

    def to_networkx(
        self, layer: int | None = None, head: int | None = None, threshold: float = 0.0
    ) -> networkx.DiGraph:
        """Return a directed graph with edges key -> query, the direction of the information.

        For one layer, nodes are positions; for a map with other keys they are `("query", i)` and `("key",
        j)`. For all layers, nodes are `(level, position)`: level 0 is the input of the first layer, and level
        l is the output of the l-th layer. Nodes have the attributes `token` and `position`, edges have
        `weight`.

        Args:
            layer: The label of the layer (negative: from the end). None: all layers.
            head: The head. None: the mean over heads.
            threshold: The graph has only edges whose absolute weight is above this number.

        Raises:
            ValueError: If `layer` is None and the layers do not chain: for an input map, a map with
                other keys or with only some rows, or layers with gaps.
        """
        single = self.merge_heads() if head is None else self.head(head)
        threshold = check_number("threshold", threshold, 0)
        from lens_mix.maps import exchange

        if layer is not None:
            return exchange.layer_graph(self, single.scores[self.layer_index(layer)], threshold)
        if self.kind == "input" or not self.keys_are_tokens:
            raise ValueError(
                "layer: expected one layer, because the layers do not chain in an input map or a map with "
                "other keys than its tokens, got None"
            )
        self.require_every_row("the graph of all layers")
        self.require_no_gaps()
        return exchange.stack_graph(self, single.scores, threshold)

    def _repr_html_(self) -> str:
        from lens_mix.view.notebook import describe_html

        return describe_html(self)

    @overload
    def show(self, kind: Literal["page"]) -> Any: ...
    @overload
    # Types are checked in scripts, where None means a figure.
    def show(self, kind: Literal["position", "layers"] | None = None, **options: Any) -> Figure: ...
    def show(self, kind: Literal["page", "position", "layers"] | None = None, **options: Any) -> Any:
        """Show a figure and return it: in a notebook below the cell, in a script in a window.

        A window opens if matplotlib has an interactive backend and the program runs in a terminal. Otherwise
        one line on stderr says how to write the figure to a file or open the page, unless it was written.

        Args:
            kind: "position": what one position used in each layer (`lm.show_position`). "layers": all rows of
                each layer (`lens_mix.view.layer_maps`). "page": return the result of `lm.page(m)`, which a
                notebook shows, `.open()` opens in a browser, and `.save(path)` writes. None: for a map of a
                picture or of sound, one position over the picture or under the waveform
                (`lens_mix.view.show_picture`), unless an option is given that this figure lacks. Else
                "position" for a map with one row, a causal map, or a map that contains what is explained;
                else, or with an option that only layer maps have (`layer=`, `head=`, …), "layers".
            options: The options of the figure, such as `query=`, `scale=`, `ax=`, `figsize=`, `cmap=`,
                `vmax=`, `style=`. `picture=` is the picture to draw on, True for what the model read, or
                False for a figure without it.

        Raises:
            ValueError: If the kind is another one, if there are options for a page, or as in `show_position`
                and `layer_maps`.
            ImportError: If a figure is asked for and matplotlib is not installed.
        """
        from lens_mix.view import figures, page, picture_figure, position_figure, window

        picture = options.pop("picture", None)
        if picture is None and kind is None and self.grid is not None and self.features is not None:
            picture = options.keys() <= inspect.signature(picture_figure.show_picture).parameters.keys()
        if picture is not None and kind == "page":
            return page.page(self, picture=picture)
        if picture is not None and picture is not False:
            if kind is not None:
                raise ValueError(f"kind: expected None beside picture=, got {kind!r}")
            figure = picture_figure.show_picture(self, picture, **options)
            window.show_figure(figure)
            return figure
        if kind is not None:
            check_choice("kind", kind, ("page", "position", "layers"))
        if kind == "page":
            if options:
                named = ", ".join(f"{name}=" for name in options)
                raise ValueError(
                    f"kind: expected 'position' or 'layers' with {named}, which a page lacks, got 'page'"
                )
            return page.page(self)
        if kind is None:
            is_row = self.scores.shape[-2] == 1 or self.causal or self.explained is not None
            kind = "position" if is_row and not _ONLY_LAYER_MAPS & set(options) else "layers"
        draw = position_figure.show_position if kind == "position" else figures.layer_maps
        figure = draw(self, **options)
        if options.get("ax") is None:
            window.show_figure(figure)
        return figure
