"""`MixingMap`: the record that a method or an aggregation returns."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from jaxtyping import Bool
from torch import Tensor

from lens_mix.arguments import flags, instance, number, one_of, several, whole_number
from lens_mix.maps import arithmetic, checks, difference, exchange, read_back, words
from lens_mix.maps.positions import (
    Dropped,
    Queries,
    as_position,
    as_positions,
    kept_positions,
    query_position,
    shortened,
)

if TYPE_CHECKING:
    import networkx
    import numpy
    from matplotlib.figure import Figure

Groups = Sequence[str] | Sequence[Sequence[int]] | None


class Source(NamedTuple):
    """One key that a query used."""

    token: str
    position: int
    score: float


# No `eq`: two tensors have no single truth value.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MixingMap:
    """How much position *query* used position *key*: one prompt, one method, no padding.

    Makeable by hand from any stack of maps (a tensor, a numpy array or a nested list):

        >>> lm.MixingMap(scores=A, tokens=["The", " cat"], method="attention", causal=True)

    Maps are never changed: every method returns a new one. A tensor given as `scores` is detached and not
    copied. A layer is named by its label in `layers`, a row by its position in the prompt; negative numbers
    count from the last layer that is held and from the end of the prompt.

    Attributes:
        scores: `[layer, query, key]` or `[layer, head, query, key]`, raw, as the method defines them.
        tokens: one string per position of the prompt. Tokens that share a character are written as the text
            that they spell together, and a number: `é[1/2]`, `é[2/2]` (`lens_mix.maps.characters`).
        method: name of the method.
        causal: whether no query can see a later key.
        mask: which keys each query could see, booleans `[query, key]` or `[layer, query, key]`; None: all,
            or those up to its own position when `causal`.
        key_tokens: one string per key position where the key axis is not the tokens (spans, or another
            sequence as in cross-attention), else None.
        parameters: of the method, by name.
        residual: the residual weight, 0 to 1, that rollout uses when asked with None.
        kind: "layer" (each map speaks of one block) or "input" (of the stack down to the input).
        layers: labels of the layers; default 0, 1, 2, ….
        provenance: where the map came from, JSON-able (model name, dtype, engine, …). `sink`: True if rows
            of weights sum to less than 1 because the rest went to an attention sink that is not a token.
        notes: warnings about this map.
        queries: positions of the rows of `scores` and `mask` among `tokens`, each once, in any order;
            None: all positions in order (a list that says so becomes None).
        residual_shares: how much of each row's representation is its own residual stream, measured, `[layer,
            query]`, 0 to 1, for `rollout(residual="measured")`; None: not measured, and on input maps.
        default_query: position of the row that is meant where none is named (`top`, tables of a notebook,
            figures). Of a map that a run made: the position that its target reads, else 0 in a model that
            sees both ways (its [CLS]). None, or a row that is not held: the last that is held.

    Raises:
        TypeError: scores, tokens, mask, layers, queries or residual of a wrong type.
        ValueError: shapes that do not fit each other; NaN or infinity; weight on a key that its query could
            not see (the entry is named).
    """

    # Plain tensors, because arrays and nested lists are taken too; their shapes are checked below.
    scores: Tensor
    tokens: list[str]
    method: str = "custom"
    causal: bool = False
    mask: Tensor | None = None
    key_tokens: list[str] | None = None
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    residual: float | None = None
    kind: Literal["layer", "input"] = "layer"
    layers: list[int] | None = None
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    queries: list[int] | None = None
    residual_shares: Tensor | None = None
    default_query: int | None = None

    def __post_init__(self) -> None:
        scores = checks.as_scores(self.scores)
        rows, keys = scores.shape[-2:]
        key_tokens, queries = self.key_tokens, None
        if key_tokens is not None:
            key_tokens = checks.as_tokens(key_tokens, keys, "key_tokens", "key")
        if self.queries is not None:
            tokens = checks.as_tokens(self.tokens, keys if key_tokens is None else None, "tokens", "key")
            queries = checks.as_queries(self.queries, len(tokens), rows)
        elif key_tokens is None and rows != keys:
            raise ValueError(
                f"scores: expected as many keys as queries, got shape {tuple(scores.shape)}; "
                "give key_tokens= where the key axis is not the tokens, queries= where some rows are held"
            )
        else:
            tokens = checks.as_tokens(self.tokens, rows, "tokens", "query")
        default, residual = self.default_query, self.residual
        one_of("kind", self.kind, ("layer", "input"))
        instance("method", self.method, str, "a name")
        flags(causal=self.causal)
        # An aggregation has used them up: they speak of rows of layers.
        shares = None if self.kind == "input" else self.residual_shares
        notes = [self.notes] if isinstance(self.notes, str) else self.notes
        values = {
            "scores": scores,
            "tokens": tokens,
            "causal": bool(self.causal),
            "mask": checks.as_mask(self.mask, scores),
            "key_tokens": key_tokens,
            "parameters": checks.as_record("parameters", self.parameters),
            "residual": None if residual is None else checks.as_residual(residual),
            "layers": checks.as_layers(self.layers, len(scores)),
            "provenance": checks.as_record("provenance", self.provenance),
            "notes": tuple(several("notes", notes, "strings", kind=str)),
            "queries": queries,
            "residual_shares": checks.as_shares(shares, scores),
            "default_query": None if default is None else as_position(default, len(tokens), "default_query"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        checks.require_causal(self)
        checks.require_finite(self)
        checks.require_no_hidden_weight(self)

    # ------------------------------------------------------------------ what it holds

    @property
    def has_heads(self) -> bool:
        """Whether `scores` has a head axis."""
        return self.scores.ndim == 4

    @property
    def layer_labels(self) -> list[int]:
        """The labels of the layers."""
        return list(self.layers or [])

    @property
    def key_labels(self) -> list[str]:
        """One string per key position."""
        return self.tokens if self.key_tokens is None else self.key_tokens

    @property
    def query_positions(self) -> list[int]:
        """The position of each row among `tokens`."""
        return list(range(len(self.tokens))) if self.queries is None else list(self.queries)

    @property
    def query_labels(self) -> list[str]:
        """One string per row: the tokens of `query_positions`."""
        return [self.tokens[position] for position in self.query_positions]

    def visible(self) -> Bool[Tensor, "layer query key"]:
        """Which keys each query could see."""
        mask = ~checks.later_keys(self) if self.causal and self.mask is None else self.mask
        if mask is None:
            mask = torch.ones(self.scores.shape[-2:], dtype=torch.bool, device=self.scores.device)
        return mask.expand(len(self), *self.scores.shape[-2:])

    @property
    def meant_query(self) -> int:
        """The position of the row that is taken where none is named (see `default_query`)."""
        held, default = self.query_positions, self.default_query
        return max(held) if default is None or default not in held else default

    def row_index(self, query: int | str | None, argument: str = "query") -> int:
        """Place on the query axis of a position (negative: from the end of the prompt), or of a token.

        None: the row that is meant where none is named, `meant_query`.
        No such position, a token that does not occur exactly once, or a row that is not held is a ValueError.
        """
        query = self.meant_query if query is None else query
        position = query_position(self.tokens, query, argument)
        if self.queries is None:
            return position
        if position not in self.queries:
            raise ValueError(
                f"{argument}: expected one of the rows that this map holds, {shortened(self.queries)}, got "
                f"{query!r} (position {position}); ask for it with lm.run(..., queries=[{position}])"
            )
        return self.queries.index(position)

    def require_every_row(self, purpose: str, argument: str = "mixing_map") -> None:
        """Raise a ValueError that names the rows that are held, where these are not all."""
        if self.queries is not None:
            raise ValueError(
                f"{argument}: expected the rows of all {len(self.tokens)} positions for {purpose}, got only "
                f"those of {shortened(self.queries)}; ask for all with lm.run(..., queries=None)"
            )

    def require_no_gaps(self) -> None:
        """Raise a ValueError where layers do not follow one another."""
        labels = self.layer_labels
        if any(right != left + 1 for left, right in itertools.pairwise(labels)):
            raise ValueError(
                f"mixing_map: expected layers that follow one another, got layers {labels}; ask for those "
                "between with lm.run(..., layers=...), or, where these do follow one another, say so with "
                ".replace(layers=None); over blocks without attention (a hybrid) maps do not chain"
            )

    def layer_index(self, layer: int, argument: str = "layer") -> int:
        """Place on the layer axis of the layer with this label (negative: from the end).

        Anything but a whole number is a TypeError, no such layer a ValueError.
        """
        layer, labels = whole_number(argument, layer), self.layer_labels
        if -len(labels) <= layer < 0:
            return len(labels) + layer
        if layer not in labels:
            raise ValueError(f"{argument}: expected one of {labels}, or -{len(labels)} to -1, got {layer}")
        return labels.index(layer)

    def replace(self, **changes: Any) -> MixingMap:
        """The same map with some fields changed."""
        return dataclasses.replace(self, **changes)

    def layer(self, layer: int) -> MixingMap:
        """The map of one layer, as a `MixingMap` with one layer."""
        return self.select_layers([layer])

    def select_layers(self, layers: Sequence[int]) -> MixingMap:
        """The maps of some layers, in the order given."""
        asked = several("layers", layers, "labels of layers", least=1)
        index = [self.layer_index(layer, "layers") for layer in asked]
        if index == list(range(len(self.scores))):
            return self
        mask = self.mask[index] if self.mask is not None and self.mask.ndim == 3 else self.mask
        labels = [self.layer_labels[place] for place in index]
        shares = None if self.residual_shares is None else self.residual_shares[index]
        return self.replace(scores=self.scores[index], mask=mask, layers=labels, residual_shares=shares)

    def select_queries(self, queries: Queries) -> MixingMap:
        """The rows of some queries, in the order given; keys and tokens stay.

        Queries are a position, several, or a slice of the prompt's positions (negative: from the end). No
        such position, none at all, one twice, or a row that is not held is a ValueError.
        """
        positions = as_positions(queries, len(self.tokens))
        rows = [self.row_index(position, "queries") for position in positions]
        mask = None if self.mask is None else self.mask[..., rows, :]
        shares = None if self.residual_shares is None else self.residual_shares[:, rows]
        scores = self.scores[..., rows, :]
        return self.replace(scores=scores, mask=mask, queries=positions, residual_shares=shares)

    def head(self, head: int) -> MixingMap:
        """The maps of one head, `[layer, query, key]`; no head axis or no such head is a ValueError."""
        if not self.has_heads:
            raise ValueError(f"head: expected a map with heads, got shape {tuple(self.scores.shape)}")
        count = self.scores.shape[1]
        return self.replace(scores=self.scores[:, whole_number("head", head, -count, count - 1)])

    def __len__(self) -> int:
        """The number of layers."""
        return len(self.scores)

    def __getitem__(self, layer: int | Sequence[int]) -> MixingMap:
        """The map of one layer or of several, by their labels: `m[23]`, `m[[22, 23]]`, `m[-1]`."""
        if isinstance(layer, (slice, tuple, str)):
            raise TypeError(
                f"layer: expected a layer's label or a list of them, got {layer!r}; rows are cut with "
                ".select_queries, heads with .head, and numbers with .scores[...]"
            )
        return self.select_layers(several("layer", layer, "labels of layers", alone=True))

    def __iter__(self) -> Iterator[MixingMap]:
        return (self.layer(label) for label in self.layer_labels)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray:
        """`scores` as a numpy array."""
        numbers = exchange.to_numpy(self.scores)
        return numbers.astype(dtype or numbers.dtype, copy=bool(copy))

    __sub__ = difference.difference

    # ------------------------------------------------------------------ functional updates

    def normalized(self, negative: Literal["refuse", "clip", "absolute"] = "refuse") -> MixingMap:
        """Rows divided by their sum (float32 or better). An all-zero row stays zeros, and a note says which.

        Rows with negative scores have no shares to speak of: `negative` says whether to refuse them (a
        ValueError), to set such scores to 0, or to take the absolute value of all scores.
        """
        shares, empty = arithmetic.normalise_rows(self.scores, negative)
        notes = arithmetic.with_empty_rows(self.notes, empty, self.layer_labels, self.query_positions)
        return self.replace(scores=shares, notes=notes)

    def merge_heads(
        self, how: Literal["mean", "max"] = "mean", weights: Tensor | Sequence[float] | None = None
    ) -> MixingMap:
        """Heads merged into one map per layer; a map without heads is returned as it is.

        Args:
            how: "mean" or "max" over heads.
            weights: one per head, `[head]` or `[layer, head]`, 0 or more and not all 0, for a weighted mean;
                others are a ValueError.
        """
        one_of("how", how, ("mean", "max"))
        if weights is not None and (how == "max" or not self.has_heads):
            given = "how='max'" if self.has_heads else "a map without heads"
            raise ValueError(f"weights: expected None but for how='mean' on a map with heads, got {given}")
        if not self.has_heads:
            return self
        provenance = self.provenance if how == "mean" else self._without_sink()
        return self.replace(scores=arithmetic.merge_heads(self.scores, how, weights), provenance=provenance)

    def drop(self, tokens: Dropped, axis: Literal["both", "query", "key"] = "both") -> MixingMap:
        """The map without some tokens; not renormalised.

        Args:
            tokens: a position or a token (dropped wherever it occurs), several, or a function token -> bool.
            axis: "both" for maps whose keys are the tokens; "query" or "key" for one axis only.

        Raises:
            ValueError: no such position or token; nothing left, or no row; "both" on a map with key_tokens.
        """
        one_of("axis", axis, ("both", "query", "key"))
        if axis == "both" and self.key_tokens is not None:
            raise ValueError("axis: expected 'query' or 'key' on a map with key_tokens, got 'both'")
        positions = kept_positions(self.tokens, () if axis == "key" else tokens)
        keys = kept_positions(self.key_labels, () if axis == "query" else tokens)
        place_after = {position: place for place, position in enumerate(positions)}
        held = self.query_positions
        rows = [row for row, position in enumerate(held) if position in place_after]
        if not rows:
            raise ValueError(
                f"tokens: expected a row to be left, got all rows that are held, {shortened(held)}, dropped"
            )
        mask, key_tokens, causal = self.mask, None, self.causal
        if axis != "both":
            # The triangle is told by position, so it must be written out before one axis shrinks alone.
            mask = self.visible()[0] if mask is None and causal else mask
            key_tokens, causal = [self.key_labels[key] for key in keys], False
        return self.replace(
            scores=self.scores[..., rows, :][..., keys],
            tokens=[self.tokens[position] for position in positions],
            queries=[place_after[held[row]] for row in rows],
            mask=None if mask is None else mask[..., rows, :][..., keys],
            key_tokens=key_tokens,
            causal=causal,
            provenance=self.provenance if len(keys) == len(self.key_labels) else self._without_sink(),
            residual_shares=None if self.residual_shares is None else self.residual_shares[:, rows],
            default_query=None if self.default_query is None else place_after.get(self.default_query),
        )

    def drop_bos(self) -> MixingMap:
        """The map without position 0, whatever its token, on both axes; not renormalised."""
        return self.drop(0)

    def merge_words(
        self, groups: Groups = None, keys: str = "sum", queries: str = "mean", key_groups: Groups = None
    ) -> MixingMap:
        """Subword pieces merged into words, on both axes (float32 or better).

        With the defaults, rows that sum to 1 still do. Roll out before merging: uniform attention over pieces
        is not uniform over words. A map with only some rows gives the words all of whose rows it has (with
        queries="first" or "last": whose first or last row it has). It also gives the word of the position
        that an input map explains, merged from those rows of the word that it has. Notes name this word, and
        the words that are left out although the map has one of their rows.

        Args:
            groups: the words as text, or as lists of positions that name each position once; None: found from
                the tokens (`lens_mix.maps.words.word_groups` has the rule).
            keys, queries: how columns and rows merge: "sum", "mean", "max", "min", "first", "last".
            key_groups: the same for the keys of a map with key_tokens, which are left alone by default.

        Raises:
            TypeError: groups that are neither.
            ValueError: groups that do not fit the tokens; tokens without word marks; unknown names; no word
                whose rows are held.
        """
        reduce_keys = words.reduction(keys, "keys")
        reduce_queries = words.reduction(queries, "queries")
        query_words, names = words.resolve_groups(self.tokens, groups, "groups")
        key_words, key_names = query_words, None
        if self.key_tokens is not None:
            given = [[key] for key in range(len(self.key_tokens))] if key_groups is None else key_groups
            key_words, key_names = words.resolve_groups(self.key_tokens, given, "key_groups")
        elif key_groups is not None:
            raise ValueError("key_groups: expected None on a map whose keys are its tokens, got groups")
        explained = self.meant_query if self.kind == "input" else self.default_query
        numbers, rows, notes = words.rows_of_words(
            query_words, names, self.query_positions, queries, explained
        )
        in_order = all(max(left) < min(right) for left, right in itertools.pairwise(query_words))
        causal = self.causal and in_order
        mask = self.visible()[0] if self.causal and not causal and self.mask is None else self.mask
        if mask is not None:
            # A word could see another if any of its pieces could see any of the other's.
            mask = words.merge_axis(words.merge_axis(mask, key_words, -1, torch.any), rows, -2, torch.any)
        meant = [number for number, word in enumerate(query_words) if self.default_query in word]
        scores = words.merge_axis(arithmetic.at_least_float32(self.scores), key_words, -1, reduce_keys)
        sums_stay = keys == "sum" and queries in ("mean", "first", "last")
        provenance = self.provenance if sums_stay else self._without_sink()
        return self.replace(
            scores=words.merge_axis(scores, rows, -2, reduce_queries),
            tokens=names,
            queries=numbers,
            key_tokens=key_names,
            causal=causal,
            mask=mask,
            residual_shares=None,
            provenance={**provenance, "merged_words": {"keys": keys, "queries": queries}},
            default_query=meant[0] if meant else None,
            notes=(*self.notes, *notes),
        )

    def _without_sink(self) -> dict[str, Any]:
        """Return the provenance without `sink`, for rows that no longer lack the weight of the sink alone."""
        return {name: value for name, value in self.provenance.items() if name != "sink"}

    # ------------------------------------------------------------------ reading it

    def top(
        self,
        k: int = 5,
        query: int | str | None = None,
        layer: int = -1,
        head: int | None = None,
        unit: Literal["raw", "share"] = "raw",
    ) -> list[Source]:
        """The `k` (1 or more) largest keys among those the query could see, best first.

        Where there are scores below 0, the largest by magnitude; they keep their signs.

        Args:
            query: position (negative: from the end of the prompt), or a token that occurs once; None: the
                row that is meant (`default_query`).
            layer: label (negative: from the end).
            head: one head; None: the mean over heads.
            unit: "raw": as the method defines its scores; "share": divided by the row's sum of magnitudes.

        Raises:
            ValueError: no such query, layer or head; a row that is not held; k below 1.
        """
        k = whole_number("k", k, 1)
        one_of("unit", unit, ("raw", "share"))
        place, row = self.layer_index(layer), self.row_index(query)
        scores = (self.merge_heads() if head is None else self.head(head)).scores[place, row]
        scores = arithmetic.shares(scores) if unit == "share" else scores
        visible = self.visible()[place, row].nonzero().flatten()
        # Stable: of equals the first.
        best = visible[torch.sort(scores[visible].abs(), descending=True, stable=True).indices[:k]].tolist()
        return [Source(self.key_labels[key], key, scores[key].item()) for key in best]

    to_dataframe = exchange.to_dataframe
    to_xarray = exchange.to_xarray
    from_dataframe = classmethod(read_back.from_dataframe)
    from_xarray = classmethod(read_back.from_xarray)
    save = exchange.save
    load = classmethod(exchange.load)
    __repr__ = exchange.describe
    _repr_html_ = exchange.describe_html

    def to_networkx(
        self, layer: int | None = None, head: int | None = None, threshold: float = 0.0
    ) -> networkx.DiGraph:
        """A directed graph whose edges go key -> query, the way the information went.

        With `layer`, nodes are positions (`("query", i)` and `("key", j)` on a map with key_tokens). With
        None, all layers: nodes `(level, position)`, where level 0 is the input of the first layer and level l
        its l-th layer's output. Nodes carry `token` and `position`, edges `weight`.

        Args:
            layer: label (negative: from the end), or None for all: a ValueError on input maps and maps with
                key_tokens, whose layers do not chain, and on a map that holds some rows, or layers with gaps.
            head: one head; None: the mean over heads.
            threshold: only edges whose absolute weight is above this.
        """
        single = self.merge_heads() if head is None else self.head(head)
        threshold = number("threshold", threshold, 0)
        if layer is not None:
            return exchange.layer_graph(self, single.scores[self.layer_index(layer)], threshold)
        if self.kind == "input" or self.key_tokens is not None:
            raise ValueError("layer: expected one layer for a map whose layers do not chain, got None")
        self.require_every_row("the graph of all layers")
        self.require_no_gaps()
        return exchange.stack_graph(self, single.scores, threshold)

    @overload
    def show(self, kind: Literal["page"]) -> Any: ...
    @overload
    # As in a script; nobody checks the types of a notebook's cells.
    def show(self, kind: Literal["figure"] | None = None, **options: Any) -> Figure: ...
    def show(self, kind: Literal["page", "figure"] | None = None, **options: Any) -> Any:
        """The maps to look at: in a notebook a page to click through, elsewhere a matplotlib figure.

        Args:
            kind: "page": what `lm.page(m)` gives; a notebook shows it, `.save(path)` writes it. "figure": of
                `lens_mix.view.layer_maps`. None: the page in a notebook (a kernel of Jupyter, VS Code or
                Colab), else the figure; and the figure everywhere when there are options, which are its own.
            options: of the figure (`layer=`, `head=`, `scale=`, ...): those of `lens_mix.view.layer_maps`.

        Raises:
            ValueError: another kind; options beside "page"; what `layer_maps` refuses.
            ImportError: a figure, and matplotlib is not installed.
        """
        from lens_mix.view import figures, notebook, page

        if kind is not None:
            one_of("kind", kind, ("page", "figure"))
        if kind == "page" and options:
            raise ValueError(
                f"kind: expected 'figure' with {', '.join(options)}=, which a page has not, got 'page'"
            )
        if kind == "page" or (kind is None and not options and notebook.shows_pages()):
            return page.page(self)
        return figures.layer_maps(self, **options)
