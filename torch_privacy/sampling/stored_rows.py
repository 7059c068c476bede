# SPDX-License-Identifier: Apache-2.0
"""Reads and exchanges the rows of what a data set stores: tensors, arrays, lists, dictionaries, tables."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class RowKind(NamedTuple):
    """Describes a kind of stored rows."""

    fits: Callable[[Any], bool]
    num_rows: Callable[[Any], int]
    take: Callable[[Any, np.ndarray], Any]  # the thing with these rows, of the same type, as a new object
    put: Callable[[Any, np.ndarray, Any, np.ndarray], None] | None = None  # writes rows of the second into the first
    is_array: bool = False
    columns: Callable[[Any], dict[Any, list]] | None = None  # of a table: the cells of its rows, by column


def kind_of(value: Any) -> RowKind | None:
    """Returns the kind of rows that a value stores; None if it stores none."""
    return next((kind for kind in _KINDS if kind.fits(value)), None)


def num_bytes(value: Any) -> int:
    """Returns about how many bytes the rows take in memory; 8 for each entry of a list, or row of a file."""
    kind = kind_of(value)
    if is_from("pandas", "DataFrame")(value):
        return int(value.memory_usage().sum())
    if kind is None or kind.take is IndexedRows:
        return 0 if kind is None else 8 * kind.num_rows(value)
    size = getattr(value, "nbytes", None)
    return size if isinstance(size, int) else 8 * kind.num_rows(value)


def integers(value: Any) -> np.ndarray | None:
    """Returns the entries (n,) of a list, array or tensor of integers from 0 on; None for others."""
    if isinstance(value, Tensor):
        fits = (
            value.ndim == 1 and not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
        )
        array = value.detach().cpu().numpy() if fits and value.layout is torch.strided else None
    elif isinstance(value, np.ndarray):
        array = value if value.ndim == 1 and value.dtype.kind in "iu" else None
    elif isinstance(value, (list, tuple, range)) and len(value) and isinstance(value[0], (int, np.integer)):
        try:
            array = None if isinstance(value[0], bool) else np.asarray(value)
        except (ValueError, OverflowError):
            return None
        array = array if array is not None and array.ndim == 1 and array.dtype.kind in "iu" else None
    else:
        return None
    return array.astype(np.int64) if array is not None and len(array) and array.min() >= 0 else None


def is_keyed(value: Any) -> bool:
    """True if rows are found by a key: in dictionaries, and in tables of pandas."""
    return isinstance(value, dict) or is_from("pandas", "DataFrame", "Series")(value)


def keys_in(value: Any, keys: Any) -> np.ndarray | None:
    """Returns the position of each of these keys in a dictionary or table; None if one is missing."""
    if not is_keyed(value) or isinstance(keys, (str, bytes, dict)):
        return None
    places = {key: place for place, key in enumerate(value if isinstance(value, dict) else value.index)}
    try:
        found = [places.get(key, -1) for key in (keys.tolist() if hasattr(keys, "tolist") else keys)]
    except TypeError:
        return None
    return np.asarray(found, np.int64) if found and min(found) >= 0 else None


class IndexedRows:
    """Presents the rows of something that can only be read by index, such as a data set in a file, in another order."""

    def __init__(self, stored: Any, rows: np.ndarray):
        self._stored, self._rows = stored, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Any) -> Any:
        first, *others = key if isinstance(key, tuple) else (key,)
        rows = self._rows[first]
        if np.ndim(rows) == 0:
            return self._stored[(int(rows), *others)] if others else self._stored[int(rows)]
        return np.stack([np.asarray(self._stored[(int(row), *others)]) for row in rows.ravel()])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)


def _take_list(value: Any, rows: np.ndarray) -> Any:
    if type(value) is list:
        return [value[row] for row in rows.tolist()]
    if isinstance(value, tuple):
        return type(value)(value[row] for row in rows.tolist())
    taken = copy(value)
    taken[:] = [value[row] for row in rows.tolist()]
    return taken


def _put_rows(new: Any, to: np.ndarray, value: Any, rows: np.ndarray) -> None:
    new[to] = value[rows]


def _put_entries(new: list, to: np.ndarray, value: Any, rows: np.ndarray) -> None:
    for place, row in zip(to.tolist(), rows.tolist(), strict=True):
        new[place] = value[row]


def _put_values(new: dict, to: np.ndarray, value: dict, rows: np.ndarray) -> None:
    keys, entries = [*new], [*value.values()]
    for place, row in zip(to.tolist(), rows.tolist(), strict=True):
        new[keys[place]] = entries[row]


def _take_dict(value: dict, rows: np.ndarray) -> Any:
    entries, taken = [*value.values()], copy(value)
    taken.clear()
    taken.update(zip(value, (entries[row] for row in rows.tolist()), strict=False))
    return taken


def _take_text(value: Any, rows: np.ndarray) -> Any:
    if isinstance(value, str):
        return "".join(value[row] for row in rows.tolist())
    return type(value)(np.frombuffer(value, np.uint8)[rows].tobytes())


def is_from(package: str, *names: str) -> Callable[[Any], bool]:
    """Returns a function that is true for objects of these classes of a package, without importing it."""
    return lambda value: any(
        base.__name__ in names and base.__module__.partition(".")[0] == package for base in type(value).__mro__
    )


def _is_file_rows(value: Any) -> bool:
    """True for objects of an extension that have rows, such as a data set in an HDF5 file."""
    kind = type(value)
    if isinstance(value, (type, Tensor)) or not all(hasattr(kind, name) for name in ("shape", "dtype", "__getitem__")):
        return False
    return isinstance(value.shape, tuple) and len(value.shape) > 0


def _select(value: Any, rows: np.ndarray) -> Any:
    return value.select(rows, keep_in_memory=True, new_fingerprint="exchanged")


def _of_frame(value: Any) -> Any:
    """Returns a data frame; of a single column, too."""
    return value.to_frame() if hasattr(value, "to_frame") else value


def _is_plain_tensor(value: Any) -> bool:
    is_whole = isinstance(value, Tensor) and not hasattr(value, "full_tensor")  # no shard of a distributed one
    return is_whole and value.ndim > 0 and value.layout is torch.strided


def _take_tensor(value: Tensor, rows: np.ndarray) -> Tensor:
    return value.detach().index_select(0, torch.from_numpy(rows).to(value.device))


_KINDS = (
    RowKind(_is_plain_tensor, len, _take_tensor, _put_rows, is_array=True),
    RowKind(lambda v: isinstance(v, np.ndarray) and v.ndim > 0, len, lambda v, rows: v[rows], _put_rows, is_array=True),
    RowKind(lambda v: isinstance(v, list), len, _take_list, _put_entries),
    RowKind(lambda v: isinstance(v, tuple) and not hasattr(v, "_fields"), len, _take_list),
    RowKind(lambda v: isinstance(v, dict), len, _take_dict, _put_values),
    RowKind(lambda v: isinstance(v, (str, bytes, bytearray)), len, _take_text),
    RowKind(is_from("pandas", "Index"), len, lambda v, rows: v.take(rows)),
    RowKind(
        is_from("pandas", "DataFrame", "Series"),
        len,
        lambda v, rows: v.iloc[rows].set_axis(v.index[: len(rows)], axis=0),
        columns=lambda v: {name: column.tolist() for name, column in _of_frame(v).items()},
    ),
    RowKind(
        is_from("pyarrow", "Table", "RecordBatch", "Array", "ChunkedArray"),
        len,
        lambda v, rows: v.take(rows),
        columns=lambda v: v.to_pydict() if hasattr(v, "to_pydict") else {"": v.to_pylist()},
    ),
    RowKind(
        is_from("polars", "DataFrame", "Series"),
        len,
        lambda v, rows: v[rows],
        columns=lambda v: _of_frame(v).to_dict(as_series=False),
    ),
    RowKind(is_from("datasets", "Dataset"), len, _select, columns=lambda v: v.to_dict()),
    RowKind(is_from("scipy", "spmatrix", "sparray"), lambda v: v.shape[0], lambda v, rows: v.tocsr()[rows]),
    RowKind(_is_file_rows, lambda v: v.shape[0], IndexedRows),
)
