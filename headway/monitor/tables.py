"""DataFrames of a run: their pictures, in a terminal and in a notebook, cannot be controlled by what a model wrote.

pandas escapes markup and leaves control characters and direction marks; values stay as they are.
"""

from typing import Any

import pandas

from headway.monitor.text import printable


class Frame(pandas.DataFrame):
    """A DataFrame that shows control characters and direction marks as escapes."""

    @property
    def _constructor(self) -> Any:
        return Frame

    @property
    def _constructor_sliced(self) -> Any:
        return Column

    def __repr__(self) -> str:
        return printable(super().__repr__())

    def _repr_html_(self) -> str | None:
        html = super()._repr_html_()  # type: ignore[misc]  # missing in the stubs
        return None if html is None else printable(html)


class Column(pandas.Series):
    """A column of a `Frame`."""

    @property
    def _constructor(self) -> Any:
        return Column

    @property
    def _constructor_expanddim(self) -> Any:
        return Frame

    def __repr__(self) -> str:
        return printable(super().__repr__())
