"""Define `Maps`, the record of several maps of one prompt: by several methods, or of several parts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from lens_mix.arguments import check_choice, check_instance, describe_value
from lens_mix.maps.record import MixingMap

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from lens_mix.tables import Table
    from lens_mix.view.page import Page


class Maps(MutableMapping[str, MixingMap]):
    """Several maps by name, such as those of one prompt by several methods, as `lens_mix.run` returns them.

    It is a mapping, to which further maps can be added: `maps["mean"] = lm.layer_mean(maps["attention"])`.

        >>> maps = lm.run(model, "The Eiffel Tower is in the city of", ["attention", "value_zeroing"])
        >>> maps["value_zeroing"].top(3)
        >>> maps.compare()
        >>> maps.page("page.html")

    Args:
        maps: The maps by name.

    Raises:
        TypeError: If it is not a mapping of `MixingMap`s by strings.
        ValueError: If the mapping is empty.
    """

    def __init__(self, maps: Mapping[str, MixingMap]) -> None:
        expected = "a mapping of MixingMaps by name"
        self._maps: dict[str, MixingMap] = {}
        self.update(check_instance("maps", maps, Mapping, expected))
        if not self._maps:
            raise ValueError(f"maps: expected {expected}, got none")

    def __getitem__(self, name: str) -> MixingMap:
        """Return the map of a name.

        Raises:
            KeyError: If no map has this name. The message lists the names.
        """
        try:
            return self._maps[name]
        except (KeyError, TypeError):
            raise KeyError(f"maps: expected one of {list(self._maps)}, got {describe_value(name)}") from None

    def __setitem__(self, name: str, mixing_map: MixingMap) -> None:
        """Add a map, or replace that of the name.

        Raises:
            TypeError: If the name is not a string, or the map is not a `MixingMap`.
        """
        check_instance("maps", name, str, "names that are strings")
        self._maps[name] = check_instance(f"maps[{name!r}]", mixing_map, MixingMap, "a MixingMap")

    def __delitem__(self, name: str) -> None:
        del self._maps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    def __or__(self, other: Mapping[str, MixingMap]) -> Maps:
        """Return these maps and others; of two maps of one name, the other one."""
        return Maps({**self._maps, **other}) if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Mapping[str, MixingMap]) -> Maps:
        return Maps({**other, **self._maps}) if isinstance(other, Mapping) else NotImplemented

    @overload
    def show(self, kind: Literal["page"], *, picture: Any = None) -> Page: ...
    @overload
    def show(self, kind: Literal["position"] | None = None, **options: Any) -> Figure: ...
    def show(self, kind: Literal["page", "position"] | None = None, **options: Any) -> Any:
        """Show what one position used in each layer by each map, and return the figure or the page.

        Args:
            kind: "position": a figure with the maps side by side (`lm.show_position`), which needs maps over
                the same tokens and layers. "page": the result of `lm.page`, which takes all maps. None:
                "position" for maps that have the same tokens and layers, else "page"; also "page" for maps of
                a picture or of sound, which it shows.
            options: The options of the figure, such as `query=`, `columns=`, `scale=`, `figsize=`; for a page
                `picture=`.

        Raises:
            ValueError: If the kind is another one, if there are options for a page, or as in
                `lm.show_position`.
            ImportError: If a figure is asked for and matplotlib is not installed.
        """
        from lens_mix.view import position_figure, window
        from lens_mix.view.position import have_same_axes

        if kind is not None:
            check_choice("kind", kind, ("page", "position"))
        of_page = {name: options.pop(name) for name in ("picture",) if name in options}
        has_grid = any(each.grid is not None for each in self._maps.values())
        if kind is None:
            is_page = of_page or has_grid or not have_same_axes(self._maps)
            kind = "page" if is_page and not options else "position"
        if (kind == "page" and options) or (kind == "position" and (of_page or (has_grid and options))):
            named = ", ".join(f"{name}=" for name in (*options, *of_page))
            alone = f"maps[{next(iter(self._maps))!r}].show({named}…)"
            raise ValueError(
                f"kind: expected a figure of one map for {named}, got {len(self)} maps that a page shows; "
                f"write {alone}"
            )
        if kind == "page":
            return self.page(**of_page)
        figure = position_figure.show_position(self._maps, **options)
        window.show_figure(figure)
        return figure

    def page(self, path: str | os.PathLike[str] | None = None, **options: Any) -> Page:
        """Return the maps as one self-contained HTML page, and write it to `path` if that is given.

        Args:
            path: The file to write. None: no file is written.
            options: The other arguments of `lm.page`.

        Raises:
            ValueError: As in `lm.page`.
            OSError: If the file cannot be written.
        """
        from lens_mix.view import page

        return page.page(self._maps, path, **options)

    def compare(self, **options: Any) -> pandas.DataFrame:
        """Return how far each two maps agree on the keys of a row, layer by layer.

        A layer map and an input map are not compared.

        Args:
            options: The other arguments of `lm.compare`: `queries`, `k`, `drop_first`.

        Returns:
            The table of `lm.compare`: rank correlation, and the overlap of the top keys.

        Raises:
            ValueError: As in `lm.compare`.
        """
        from lens_mix.evaluation.compare import compare

        return compare(self._maps, **options)

    def table(self, keys: Any, **options: Any) -> Table:
        """Return how much the default row used some keys, by map and layer.

        Args:
            keys: A position, a text of the prompt, several of these in a list of one entry, or a dict of
                these by name, as in `lm.table`.
            options: The other arguments of `lm.table`: `query`, `unit`.

        Raises:
            ValueError: As in `lm.table`.
        """
        from lens_mix.maps.summary import table

        return table(self._maps, keys, **options)

    def to_dataframe(self) -> Table:
        """Return all maps as one table in long form, with one row per entry.

        The column `method` has the names of the maps; the others are those of `MixingMap.to_dataframe`. The
        dict `attrs["maps"]` has the other fields of each map by its name.
        """
        import pandas as pd

        from lens_mix.tables import Table

        tables = {name: each.to_dataframe() for name, each in self._maps.items()}
        attributes = {name: dict(each.attrs) for name, each in tables.items()}
        for each in tables.values():
            # `concat` compares the attributes of all tables, which takes long and keeps none.
            each.attrs = {}
        joined = pd.concat(list(tables.values()), keys=list(tables), names=["method"])
        # A map without heads or predictions has none of their columns.
        joined = Table(joined.reset_index(level="method").reset_index(drop=True))
        joined.attrs = {"maps": attributes}
        return joined

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the maps to one safetensors file; `Maps.load` returns identical maps.

        Args:
            path: The file, which is replaced if it exists.

        Raises:
            TypeError: As in `MixingMap.save`.
            ValueError: As in `MixingMap.save`.
            OSError: If the file cannot be written.
        """
        from lens_mix.maps import exchange

        exchange.save_maps(self._maps, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Maps:
        """Read maps that `save` wrote.

        Args:
            path: The path of the file.
            device: The device of the tensors.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file does not contain maps or was changed after it was written, or if torch
                cannot use the device.
        """
        from lens_mix.maps import exchange

        return cls(exchange.load_maps(MixingMap, path, device))

    def __repr__(self) -> str:
        """Return one line per map."""
        width = max(map(len, self._maps), default=0)
        return "\n".join(
            [f"Maps({len(self)})", *(f"  {name:<{width}}  {each!r}" for name, each in self._maps.items())]
        )

    def _repr_html_(self) -> str:
        """Return the pictures of all maps, the first one open, and the others below their names."""
        from lens_mix.view.notebook import describe_maps_html

        return describe_maps_html(self._maps)
