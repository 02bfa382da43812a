"""A list of records, fetched on demand or converted to a data frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar

from evalstop_client.errors import LibraryMissing

Cell = str | int | float | bool | object | None


class Row(Protocol):
    """A record that can become a row of a data frame."""

    def to_row(self) -> dict[str, Cell]:
        """Values by column name."""


Item = TypeVar("Item", bound=Row)


class Table(Generic[Item]):
    """Records of the service.

    Each iteration fetches them again, page by page:

        for run in api.runs(verdict="stop"):
            print(run.name, run.decision)
        frame = api.runs(since="30d").to_pandas()
    """

    def __init__(self, fetch: Callable[[], Iterable[Item]]) -> None:
        self._fetch = fetch

    def __repr__(self) -> str:
        return "<Table: read it by `for`, or by to_rows(), to_pandas() or to_polars()>"

    def __iter__(self) -> Iterator[Item]:
        return iter(self._fetch())

    def to_rows(self) -> list[dict[str, Cell]]:
        """All records as rows of plain values."""
        return [item.to_row() for item in self]

    def to_pandas(self) -> Any:
        """All records as a pandas.DataFrame. Raises LibraryMissing."""
        return _import_library("pandas").DataFrame(self.to_rows())

    def to_polars(self) -> Any:
        """All records as a polars.DataFrame. Raises LibraryMissing."""
        return _import_library("polars").DataFrame(self.to_rows())


def _import_library(library: str) -> Any:
    try:
        return import_module(library)
    except ImportError as error:
        raise LibraryMissing(f"`pip install {library}`, or read the records by `for` or `to_rows()`.") from error
