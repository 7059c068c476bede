# SPDX-License-Identifier: Apache-2.0
"""Knows which data sets can be sampled, and what is behind their subsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ..support.validate import Refused
from .stored_rows import is_from


def check_map_style(dataset: Any, name: str = "dataset") -> None:
    """Refuses data without examples that can be fetched by index: loaders, streams, objects without a length."""
    if isinstance(dataset, DataLoader):
        raise Refused(
            f"{name} is a DataLoader: shuffled batches cost far more than random ones. With noise 1 and 100 batches, "
            "an epoch has an epsilon of at least 4.06 at delta 1e-5, where Poisson samples have 0.72. Pass "
            "loader.dataset; PrivateTraining draws the batches."
        )
    if is_from("pandas", "DataFrame", "Series")(dataset) or is_from("pyarrow", "Table", "RecordBatch")(dataset):
        package = type(dataset).__module__.partition(".")[0]
        raise Refused(
            f"{name} is a {package} {type(dataset).__name__}; its items are columns, not rows. Pass the rows, e.g. "
            "TensorDataset(torch.tensor(frame[features].values), torch.tensor(frame[label].values)), or "
            "table.to_pylist()."
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and _has_length(dataset)):
        raise Refused(
            f"{name} of type {type(dataset).__name__} cannot be sampled: must be map-style, with __getitem__ and "
            "__len__. Load the examples into a list or a TensorDataset first."
        )
    if len(dataset) == 0:
        raise Refused(f"{name} is empty: must hold at least one example.")


def _has_length(dataset: Any) -> bool:
    """True unless there is no length, or it cannot be said, as of a sparse matrix."""
    try:
        return hasattr(dataset, "__len__") and len(dataset) >= 0
    except TypeError:
        return False


def check_taken_once(dataset: Any, where: str) -> None:
    """Refuses data that take a row more than once: in a subset, in parts that overlap, or as an entry of a list."""
    rows = _rows_behind(dataset, {})
    if (rows[1:] > rows[:-1]).all() or (np.diff(np.sort(rows)) > 0).all():
        return
    values, first, counts = np.unique(rows, return_index=True, return_counts=True)
    place = int(np.argmax(counts > 1))
    again = int(np.flatnonzero(rows == values[place])[1])
    raise Refused(
        f"{where}: the data set has {int((counts > 1).sum())} examples more than once (items {int(first[place])} and "
        f"{again} are the same row), so that one example would count as several, and epsilon would not hold. Take each "
        "once, and weight its loss instead; or give the items of an example one owner: tp.Examples(data, owners=...), "
        "with the indices of a Subset as owners."
    )


def _rows_behind(dataset: Any, sources: dict[Any, int]) -> np.ndarray:
    """Returns a number (n,) for each item; items with equal numbers are the same row of the same data set.

    Args:
        dataset: map-style.
        sources: the number of each data set that was met, by its id or its memory.
    """
    if isinstance(dataset, Subset):
        return _rows_behind(dataset.dataset, sources)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_rows_behind(part, sources) for part in dataset.datasets])
    if hasattr(dataset, "_indices") and hasattr(dataset, "column_names"):
        return _rows_of_table(dataset, sources)
    source, rows = dataset, np.arange(len(dataset))
    if type(dataset) is TensorDataset:
        source = dataset.tensors[0]
        if _has_addresses(source):
            start = source.untyped_storage().data_ptr()
            return _start(start, sources) + addresses_of(source, rows) - start
    elif type(dataset) in (list, tuple):
        places: dict[int, int] = {}
        rows = np.array([places.setdefault(id(x), i) if _is_object(x) else i for i, x in enumerate(dataset)])
    return rows + _start(id(source), sources)


def _has_addresses(tensor: torch.Tensor) -> bool:
    """True if each row begins at an address of its own."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and tensor.numel() > 0 and tensor.stride(0) > 0


def addresses_of(tensor: torch.Tensor, rows: np.ndarray) -> np.ndarray:
    """Returns the memory addresses at which these rows begin."""
    return tensor.data_ptr() + rows * (tensor.stride(0) * tensor.itemsize)


def _start(source: Any, sources: dict[Any, int]) -> int:
    """Returns the number of the first row of a source."""
    return sources.setdefault(source, len(sources)) << 40


def _rows_of_table(dataset: Any, sources: dict[Any, int]) -> np.ndarray:
    """Returns the numbers of the rows of a data set of Hugging Face, by where its first column is in memory."""
    found = [np.empty(0, np.int64)]
    for chunk in dataset.data.column(0).chunks:
        addresses = tuple(buffer.address for buffer in chunk.buffers() if buffer is not None and buffer.size)
        begin = getattr(getattr(chunk, "values", None), "offset", 0)  # of lists, in what they have in common
        source = (*addresses, begin) if addresses else len(sources)
        found.append(_start(source, sources) + chunk.offset + np.arange(len(chunk)))
    rows, chosen = np.concatenate(found), dataset._indices  # after select()
    return rows if chosen is None else rows[np.asarray(chosen.column(0)).astype(np.int64)]


def _is_object(item: Any) -> bool:
    """True for what is made anew for each example; equal numbers and texts may be one object by chance."""
    parts = item if isinstance(item, tuple) else (item,)
    return any(isinstance(part, (torch.Tensor, np.ndarray, dict, list)) for part in parts)


class ChosenByOwners(Subset):
    """Examples that were chosen by who owns each of them, which is public."""


def shows_owners(dataset: Any) -> bool:
    """True if it is public who owns each example: some subset in the chain was chosen by that."""
    while isinstance(dataset, Subset) and not isinstance(dataset, ChosenByOwners):
        dataset = dataset.dataset
    return isinstance(dataset, ChosenByOwners)


def behind_subsets(dataset: Dataset) -> Dataset:
    """Returns the data set behind (nested) subsets."""
    while type(dataset) is Subset or type(dataset) is ChosenByOwners:
        dataset = dataset.dataset
    return dataset


def source_of(dataset: Dataset) -> tuple[Dataset, np.ndarray | None]:
    """Returns the data set behind (nested) subsets, and the indices of the chosen examples (None: all).

    This takes time in proportion to their number; `behind_subsets` does not.
    """
    if not (type(dataset) is Subset or type(dataset) is ChosenByOwners):
        return dataset, None
    source, subset = source_of(dataset.dataset)
    indices = np.asarray(dataset.indices, dtype=np.int64)
    return source, indices if subset is None else subset[indices]


def tensors_and_rows(dataset: Dataset) -> tuple[tuple[torch.Tensor, ...], np.ndarray | None] | None:
    """Returns a TensorDataset's tensors and the chosen rows (None: all rows); None for other data sets."""
    source, subset = source_of(dataset)
    return (source.tensors, subset) if type(source) is TensorDataset else None
