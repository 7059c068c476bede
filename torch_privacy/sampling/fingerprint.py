# SPDX-License-Identifier: Apache-2.0
"""Provides a keyed fingerprint of a data set: its owner can show later with which data a model was trained.

Without the key it is a random number. A hash without a key would tell everybody who guesses the data, but for one
example, whether the guess is right: more than any epsilon allows.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import hashlib
import hmac
import secrets
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..support.random_state import SeededRandomNumbers
from ..support.read_file import parse_json, read_bytes
from ..support.validate import Refused, quoted
from .datasets import check_map_style, tensors_and_rows
from .shadow import apart

KEY_BYTES = 32
METHOD = "blake2b with a secret key, 1"
MOST_BYTES = 2**28  # of a data set of tensors of which all rows are read; else, and of other data sets, a sample
MOST_ITEMS = 10_000
MOST_SECONDS, FEWEST_ITEMS = 2.0, 16  # the time after which a sample ends, and the items that it has nevertheless
DEEPEST = 32  # levels of nesting in an item
ITEMS_OF_STATE = 64  # of a data set that does not consist of tensors, for the state of a training
LARGEST_STATEMENT = 2**23  # bytes
LONGEST_KEY_FILE = 1024

Number = int | float | complex
_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, enum.Enum, PurePath, uuid.UUID)


def new_key() -> bytes:
    """Returns a new key from the operating system."""
    return secrets.token_bytes(KEY_BYTES)


def fingerprint(
    dataset: Dataset, key: bytes, num_items: int | None = None, *, num_owners: int | None = None
) -> dict[str, Any]:
    """Returns the fingerprint of a map-style data set, as the entry ``data`` of a privacy statement.

    Of tensors in a ``TensorDataset`` (or a ``Subset`` of one) all rows are read, up to 256 MiB. Of larger and other
    data sets it is a sample that the key determines: up to 10,000 items, fewer if they take more than two seconds. The
    random numbers with which items are drawn (augmentation) are those of the key, too.

    Args:
        dataset: map-style.
        key: 32 secret bytes.
        num_items: size of the sample; None for as many as said above.
        num_owners: number of owners, where they are protected: the number of examples is private then, and left out.

    Returns:
        ``fingerprint`` in hexadecimal, or None with the reason ``not_made_because``; ``method``; ``num_items`` that
        were read, of ``num_examples``; ``key_id``, which distinguishes keys.
    """
    n = len(dataset)  # type: ignore[arg-type]
    found: dict[str, Any] = {"method": METHOD, "num_examples": n, "key_id": _keyed(key, b"id").hexdigest()[:16]}
    if num_owners is not None:
        num_items = min(num_owners, MOST_ITEMS)
        del found["num_examples"]
    try:
        total, count = _hashed(dataset, n, key, num_items)
    except Unhashable as error:
        return found | {"fingerprint": None, "num_items": 0, "not_made_because": str(error)}
    except Exception as error:  # the data set's own; its text may hold data
        reason = f"an item could not be read ({type(error).__name__})"
        return found | {"fingerprint": None, "num_items": 0, "not_made_because": reason}
    return found | {"fingerprint": total.hex(), "num_items": count}


def matches_fingerprint(statement: Mapping[str, Any] | Path | str, dataset: Dataset, key: bytes | Path | str) -> bool:
    """Returns whether a data set is the one that a privacy statement was made for, by its keyed fingerprint.

    Args:
        statement: content of ``privacy.json``, or its path.
        dataset: the data set as it was given to `PrivateTraining`: same items in the same order.
        key: the file ``fingerprint.key`` of the run folder, or the 32 bytes in it.

    Returns:
        True if all items that were read for the statement are the same: ``statement["data"]["num_items"]`` of them,
        chosen by the key. False if the number of items or one of these differs.

    Raises:
        ValueError: the statement has no fingerprint (it says why), the key is that of another run, or a file is
            damaged.
        Refused: the data set is not map-style.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> key, data = bytes(32), TensorDataset(torch.arange(6.0).view(3, 2))
        >>> statement = {"data": fingerprint(data, key)}
        >>> matches_fingerprint(statement, data, key)
        True
        >>> matches_fingerprint(statement, TensorDataset(torch.zeros(3, 2)), key)
        False
    """
    where = "matches_fingerprint"
    check_map_style(dataset)
    stated, key = _stated(where, statement), _key(where, key)
    if stated.get("method") != METHOD:
        raise ValueError(
            f"{where}: the method {stated.get('method')!r:.100} is unknown; this version knows {METHOD!r}."
        )
    if stated.get("fingerprint") is None:
        raise ValueError(f"{where}: no fingerprint was made, because {stated.get('not_made_because')!s:.200}.")
    if stated.get("key_id") != _keyed(key, b"id").hexdigest()[:16]:
        raise ValueError(f"{where}: the key is that of another run. Use fingerprint.key of the same run folder.")
    n = len(dataset)  # type: ignore[arg-type]
    if stated.get("num_examples", n) != n:
        return False
    found = fingerprint(dataset, key, int(stated.get("num_items", 0)))
    if found["fingerprint"] is None:
        raise ValueError(f"{where}: the data set has no fingerprint, because {found['not_made_because']}.")
    return hmac.compare_digest(found["fingerprint"], str(stated["fingerprint"]))


def read_key(path: Path | str) -> bytes:
    """Returns the key in a file; raises a ``ValueError`` if it is damaged."""
    try:
        text = read_bytes(path, LONGEST_KEY_FILE).decode("ascii", "replace").strip()
        key = bytes.fromhex(text)
        if len(key) != KEY_BYTES:
            raise ValueError(f"it has {len(key)} bytes in place of {KEY_BYTES}")
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read ({error}). Restore it from a copy, or delete it.") from None
    return key


STATE_FINGERPRINT = {  # what fingerprint_for_state returns
    "type": "object",
    "required": ["key", "key_id", "method", "num_examples", "num_items", "fingerprint"],
    "properties": {
        "key": {"type": "string", "pattern": f"^[0-9a-f]{{{2 * KEY_BYTES}}}$"},
        "num_examples": {"type": "integer", "minimum": 0},
        "num_items": {"type": "integer", "minimum": 0},
        "fingerprint": {"type": ["string", "null"]},
    },
}


def fingerprint_for_state(dataset: Dataset, secret: bytes) -> dict[str, Any]:
    """Returns the fingerprint of a data set with its key, which depends on a secret: for a state that is secret."""
    key = _keyed(secret, b"state").digest()
    count = None if tensors_and_rows(dataset) else min(ITEMS_OF_STATE, len(dataset))  # type: ignore[arg-type]
    return {"key": key.hex(), **fingerprint(dataset, key, count)}


def check_data_of_state(where: str, found: Mapping[str, Any] | None, dataset: Dataset) -> None:
    """Refuses other data than those of which `fingerprint_for_state` made an entry; None is that of older states."""
    if found is None or found["fingerprint"] is None or found["method"] != METHOD:
        return
    try:
        is_same = matches_fingerprint({"data": found}, dataset, bytes.fromhex(found["key"]))
    except ValueError:  # the items cannot be read, or differ from one time to the next
        return
    if not is_same:
        raise Refused(
            f"{where}: the state belongs to a training on other data of the same size: of {found['num_items']} items "
            "that were compared some differ. Its steps are paid by the examples of those data. Pass the same data set, "
            "in the same order; for other data begin a new training."
        )


class Unhashable(Exception):
    """Raised with the reason why there is no fingerprint."""


def _stated(where: str, statement: Mapping[str, Any] | Path | str) -> Mapping[str, Any]:
    if isinstance(statement, (str, Path)):
        try:
            statement = parse_json(read_bytes(statement, LARGEST_STATEMENT))
        except ValueError as error:
            raise ValueError(f"{where}: {statement}: cannot be read ({error}). Name a privacy.json.") from None
    stated = statement.get("data") if isinstance(statement, Mapping) else None
    if not isinstance(stated, Mapping):
        raise ValueError(f"{where}: the statement has no fingerprint. It is made by a training with a run folder.")
    return stated


def _key(where: str, key: bytes | Path | str) -> bytes:
    if not isinstance(key, bytes):
        return read_key(key)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{where}: a key of {len(key)} bytes was given: must be {KEY_BYTES} bytes, or a file.")
    return key


def _keyed(key: bytes, purpose: bytes, content: bytes = b"") -> Any:
    return hashlib.blake2b(content, key=key, person=purpose, digest_size=32)


def _hashed(dataset: Dataset, n: int, key: bytes, num_items: int | None) -> tuple[bytes, int]:
    """Returns the fingerprint and the number of items that were read."""
    total = _keyed(key, b"data", n.to_bytes(8, "little"))
    tensors, rows = tensors_and_rows(dataset) or (None, None)
    if tensors is not None:
        of_item = [tensor.nbytes // max(len(tensor), 1) for tensor in tensors]
        if num_items in (None, n) and sum(of_item) * n <= MOST_BYTES:
            for tensor in tensors:
                feed(total, tensor if rows is None else tensor[torch.from_numpy(rows).to(tensor.device)])
            return total.digest(), n
        chosen = np.fromiter(_sample(n, key, num_items or MOST_ITEMS), np.int64)
        found = torch.from_numpy(chosen if rows is None else rows[chosen])
        for tensor in tensors:
            feed(total, tensor[found.to(tensor.device)])
        return total.digest(), len(chosen)
    dataset = apart(dataset)  # workers that begin later must not inherit a file that it opened
    count, start = 0, time.monotonic()
    for index in _sample(n, key, num_items or MOST_ITEMS):
        digest = digest_of_item(dataset, index, key)
        if digest != digest_of_item(dataset, index, key):  # each twice: random numbers may leave some as they are
            raise Unhashable("items differ from one time that they are fetched to the next")
        total.update(index.to_bytes(8, "little") + digest)
        count += 1
        if num_items is None and count >= FEWEST_ITEMS and time.monotonic() - start > MOST_SECONDS:
            break
    return total.digest(), count


def _sample(n: int, key: bytes, count: int) -> Iterator[int]:
    """Yields different indices below n in an order that the key determines; fewer are the first ones of more."""
    if n <= MOST_ITEMS:
        yield from sorted(range(n), key=lambda index: _keyed(key, b"order", index.to_bytes(8, "little")).digest())[
            :count
        ]
        return
    seen: set[int] = set()
    draw = 0
    while len(seen) < min(count, n):
        index = int.from_bytes(_keyed(key, b"draw", draw.to_bytes(8, "little")).digest()[:16], "little") % n
        draw += 1
        if index not in seen:
            seen.add(index)
            yield index


def digest_of_item(dataset: Dataset, index: int, key: bytes) -> bytes:
    """Returns the keyed hash of an item, fetched with random numbers of the key."""
    numbers = SeededRandomNumbers(_keyed(key, b"random", index.to_bytes(8, "little")).digest())
    try:
        item = dataset[index]
    finally:
        numbers.close()
    return digest_of(item, key)


def digest_of(value: Any, key: bytes = bytes(KEY_BYTES)) -> bytes:
    """Returns the keyed hash of an item, or of a batch."""
    digest = _keyed(key, b"item")
    feed(digest, value)
    return digest.digest()


def feed(digest: Any, value: Any, depth: int = DEEPEST) -> None:
    """Adds a value, with its type and length, so that different values give different bytes.

    Raises:
        Unhashable: it holds an object of unknown content.
    """
    if depth == 0:
        raise Unhashable(f"an item has more than {DEEPEST} levels")
    if isinstance(value, Tensor):
        _feed_tensor(digest, value)
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        array = np.ascontiguousarray(value)
        digest.update(f"array {array.dtype.str} {value.shape};".encode())
        digest.update(array.reshape(-1).view(np.uint8).data if array.dtype.itemsize and array.size else b"")
    elif value is None or isinstance(value, (Number, *_AS_TEXT)):
        _feed_text(digest, type(value).__name__, repr(value).encode())
    elif isinstance(value, str):
        _feed_text(digest, "str", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        _feed_text(digest, "bytes", bytes(value))
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for name, part in value.items():
            feed(digest, name, depth - 1)
            feed(digest, part, depth - 1)
    elif isinstance(value, (Sequence, np.ndarray)):
        digest.update(f"sequence {len(value)};".encode())
        for part in value:
            feed(digest, part, depth - 1)
    elif isinstance(value, (set, frozenset)):
        parts = []
        for part in value:
            one = hashlib.blake2b(digest_size=32)
            feed(one, part, depth - 1)
            parts.append(one.digest())
        feed(digest, sorted(parts), depth - 1)
    elif is_dataclass(value) and not isinstance(value, type):
        feed(digest, {entry.name: getattr(value, entry.name) for entry in fields(value)}, depth - 1)
    elif hasattr(value, "__array_interface__") or hasattr(value, "__array__"):  # such as a picture of PIL
        array = np.asarray(value)
        if array.dtype == object:
            raise Unhashable(f"an item holds an object of type {type(value).__name__}")
        feed(digest, array, depth - 1)
    elif type(value).__module__ != "builtins" and hasattr(value, "__dict__"):
        _feed_text(digest, "object", type(value).__qualname__.encode())
        feed(digest, vars(value), depth - 1)
    else:
        raise Unhashable(f"an item holds an object of type {type(value).__name__}")


def _feed_text(digest: Any, kind: str, content: bytes) -> None:
    digest.update(f"{kind} {len(content)};".encode())
    digest.update(content)


def _feed_tensor(digest: Any, tensor: Tensor) -> None:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        raise Unhashable(f"an item holds a tensor of layout {quoted([tensor.layout])}")
    digest.update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
    if tensor.numel():
        plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
