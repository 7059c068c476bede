# SPDX-License-Identifier: Apache-2.0
"""Finds out whether two data sets have an example in common, by the content of their rows."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from ..support.random_state import SeededRandomNumbers
from .datasets import addresses_of, source_of, tensors_and_rows
from .fingerprint import FEWEST_ITEMS, MOST_ITEMS, MOST_SECONDS, Unhashable, feed

MOST_BYTES = 2**28  # of a tensor of which whole rows are read; of larger ones, some entries of each row
FEW_ENTRIES = 512  # of a row
PIECE = 2**16  # rows that are hashed at once
SEED = hashlib.sha256(b"examples").digest()


class Digests(NamedTuple):
    """Digests (m,) of the rows of a data set: of each column, by name or by position."""

    columns: dict[Any, np.ndarray]
    largest: Any  # name of the column with the largest entries


def share_examples(a: Dataset, b: Dataset) -> bool:
    """True if the data sets share an example: by their `Subset`, by their memory, or by content.

    Rows are compared, of tensors and of data sets of Hugging Face all of them, of others up to 10,000 items that are
    fetched in two seconds: all named columns that both have, or the entry of each item that takes most memory (labels
    are equal by chance). If equal examples are frequent within a data set, as in tables of few categories, so they are
    between two; then more than twice as many are needed.
    """
    (source_a, rows_a), (source_b, rows_b) = source_of(a), source_of(b)
    if source_a is source_b:
        return rows_a is None or rows_b is None or bool(np.isin(rows_a, rows_b).any())
    if _share_memory(a, b):
        return True
    coarse = max(_largest(a), _largest(b)) > MOST_BYTES
    found_a, found_b = _digests(a, coarse), _digests(b, coarse)
    if found_a is None or found_b is None:
        return False
    x, y = _comparable(found_a, found_b)
    frequent = max(_share_of_equal(x), _share_of_equal(y))
    return bool(np.isin(x, y).sum() > 2 * frequent * len(x))


def _comparable(a: Digests, b: Digests) -> tuple[np.ndarray, np.ndarray]:
    """Returns one digest for each row: of the named columns that both have, or of the largest entries."""
    common = [name for name in a.columns if name in b.columns and isinstance(name, str)]
    if not common:
        return a.columns[a.largest], b.columns[b.largest]
    factors = np.random.default_rng(1).integers(2**63, size=len(common), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    x, y = (
        sum((found.columns[name] * factor for name, factor in zip(common, factors, strict=True)), np.uint64(0))
        for found in (a, b)
    )
    return np.asarray(x), np.asarray(y)


def _share_of_equal(digests: np.ndarray) -> float:
    """Returns the share of rows that equal another row."""
    _, counts = np.unique(digests, return_counts=True)
    return float(counts[counts > 1].sum() / max(1, len(digests)))


def _share_memory(a: Dataset, b: Dataset) -> bool:
    """True if rows of tensors begin at the same addresses."""
    in_a, in_b = tensors_and_rows(a), tensors_and_rows(b)
    if in_a is None or in_b is None:
        return False
    rows = [np.arange(len(found[0][0])) if found[1] is None else found[1] for found in (in_a, in_b)]
    return any(
        bool(np.isin(addresses_of(x, rows[0]), addresses_of(y, rows[1])).any())
        for x in in_a[0]
        for y in in_b[0]
        if x.numel() and y.numel() and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    )


def _largest(dataset: Dataset) -> int:
    """Returns the bytes of the largest tensor of a data set of tensors; 0 for others."""
    found = tensors_and_rows(dataset)
    return 0 if found is None else max((tensor.nbytes for tensor in found[0]), default=0)


def _digests(dataset: Any, coarse: bool) -> Digests | None:
    """Returns the digests of a data set's rows, or of some entries of each; None if they cannot be read."""
    try:
        if (found := tensors_and_rows(dataset)) is not None:
            tensors, rows = found
            columns = {place: _of_tensor(tensor, rows, coarse) for place, tensor in enumerate(tensors)}
            return Digests(columns, max(columns, key=lambda place: tensors[place][:1].nbytes))
        if hasattr(dataset, "column_names") and hasattr(dataset, "with_format"):
            table = dataset.with_format("arrow")[:]
            parts = {name: table.column(name).to_pylist() for name in table.column_names}
            return _of_parts(parts, coarse)
        return _of_parts(_fetched(dataset), coarse)
    except Exception:  # the data set's own
        return None


def _of_tensor(tensor: Tensor, rows: np.ndarray | None, coarse: bool) -> np.ndarray:
    """Returns a digest (n,) of each row: a random linear function of its words, modulo 2^64."""
    flat = tensor.detach().reshape(len(tensor), -1)
    if coarse and flat.shape[1] > FEW_ENTRIES:
        flat = flat[:, torch.linspace(0, flat.shape[1] - 1, FEW_ENTRIES).long().to(flat.device)]
    chosen = torch.arange(len(flat)) if rows is None else torch.from_numpy(rows)
    pieces = [_hashed(flat[piece.to(flat.device)].cpu()) for piece in chosen.split(PIECE)]
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint64)


def _hashed(rows: Tensor) -> np.ndarray:
    rows = rows.float() if rows.is_floating_point() else rows  # the same in another precision
    raw = rows.resolve_conj().contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()
    words = np.pad(raw, [(0, 0), (0, -raw.shape[1] % 8)]).view(np.uint64)
    return words @ np.random.default_rng(raw.shape[1]).integers(2**64, size=words.shape[1], dtype=np.uint64)


def _fetched(dataset: Any) -> dict[Any, list[Any]]:
    """Returns the parts of the first items, with the same random numbers for each."""
    order, begun = np.random.default_rng(0).permutation(len(dataset))[:MOST_ITEMS], time.monotonic()
    columns: dict[Any, list[Any]] = {}
    for count, index in enumerate(order.tolist()):
        if count >= FEWEST_ITEMS and time.monotonic() - begun > MOST_SECONDS:
            break
        numbers = SeededRandomNumbers(SEED)
        try:
            item = dataset[index]
        finally:
            numbers.close()
        parts = item.items() if isinstance(item, Mapping) else enumerate(tree_leaves(item))
        for name, part in parts:
            columns.setdefault(name, []).append(part)
    return {name: parts for name, parts in columns.items() if len(parts) == len(columns[next(iter(columns))])}


def _of_parts(columns: Mapping[Any, list[Any]], coarse: bool) -> Digests | None:
    found, sizes = {}, {}
    for name, parts in columns.items():
        try:
            found[name] = np.fromiter((_of_part(part, coarse) for part in parts), np.uint64, len(parts))
        except Unhashable:
            continue
        sizes[name] = max((_size(part) for part in parts[:FEWEST_ITEMS]), default=0)
    return Digests(found, max(sizes, key=lambda name: sizes[name])) if found else None


def _of_part(part: Any, coarse: bool) -> int:
    """Returns a digest of a part of an item, equal to that of a row with the same numbers."""
    if isinstance(part, np.ndarray) and part.dtype != object:
        part = torch.from_numpy(np.ascontiguousarray(part))
    if isinstance(part, Tensor):
        return int(_of_tensor(part.reshape(1, -1), None, coarse)[0])
    digest = hashlib.blake2b(digest_size=8)
    feed(digest, part)
    return int.from_bytes(digest.digest(), "little")


def _size(part: Any) -> int:
    return part.nbytes if isinstance(part, (Tensor, np.ndarray)) else len(part) if hasattr(part, "__len__") else 8
