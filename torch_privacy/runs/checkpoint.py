# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints: first an outline, with shapes in place of tensors, then the tensors if the outline is right."""

from __future__ import annotations

import math
import os
import pickle  # pickle: torch's format; its outline is built here, and nothing that it names is called
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch_privacy.support.read_file import opened, shown

LARGEST_DIRECTORY = 2**24  # bytes of the list of entries; torch writes about 100 for a tensor
LARGEST_OUTLINE = 2**22  # bytes of everything but tensors, beside the ledger, which a checkpoint repeats
END_OF_DIRECTORY, END_BYTES = b"PK\x05\x06", 22
BLOCK = 2**20
MOST_DIFFERENCES = 5  # that a message lists
ENTRY = re.compile(
    r"[^/]+/(data\.pkl|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id|data/\d+)"
)
BYTES_OF = {  # of a number, by the name of the storage that holds it
    "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "LongStorage": 8, "IntStorage": 4,
    "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1, "BoolStorage": 1,
}  # fmt: skip
DAMAGE = (
    OSError, EOFError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError,
    AssertionError, MemoryError, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class CheckpointError(ValueError):
    """Raised for a checkpoint that is damaged or is not one of this run; the message is the reason alone."""


@dataclass(frozen=True)
class TensorOutline:
    """The type and shape of a tensor in a file."""

    storage: str  # such as FloatStorage
    shape: tuple[int, ...]

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes a tensor's shape")

    def __str__(self) -> str:
        return f"{self.storage.removesuffix('Storage').lower()} tensor of shape {self.shape}"


class _Dict(dict):
    """Stands for an OrderedDict; its attributes, such as the versions of a state dict, are left out."""

    def __setstate__(self, state: Any) -> None:
        pass


@dataclass(frozen=True)
class _Storage:
    name: str
    numbers: int

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes a storage")


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> TensorOutline:
    """Returns the outline of a tensor that lies within its storage."""
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise pickle.UnpicklingError("it has a tensor without a storage or a shape")
    numbers = offset, *shape, *stride
    if len(shape) != len(stride) or not all(type(number) is int and 0 <= number < 2**48 for number in numbers):
        raise pickle.UnpicklingError("it has a tensor with a wrong shape")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if (0 not in shape and last >= storage.numbers) or math.prod(shape) > max(storage.numbers, 1):
        raise pickle.UnpicklingError(f"it has a tensor of shape {shape} with {storage.numbers} numbers")
    return TensorOutline(storage.name, shape)


class _Outline(pickle._Unpickler):
    """Reads the structure of a checkpoint without running any code of it and without its tensors.

    It is the reader in Python: the one in C reserves memory for any number of objects that a pickle names.
    """

    def __init__(self, file: Any, sizes: Mapping[str, int]):
        super().__init__(file)
        self._sizes = sizes  # of the storages, in bytes, by key

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _Dict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in BYTES_OF:
            return name
        raise pickle.UnpicklingError(f"it asks for {shown(f'{module}.{name}')}, which no checkpoint of a run needs")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, name, key, _, numbers = pid
        if kind != "storage" or name not in BYTES_OF or type(numbers) is not int or numbers < 0:
            raise pickle.UnpicklingError("it has a storage of an unknown kind")
        if self._sizes[key] != numbers * BYTES_OF[name]:
            raise pickle.UnpicklingError(f"it has {self._sizes[key]} bytes for {numbers} numbers")
        return _Storage(name, numbers)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a sound outline; ``load`` reads its tensors, too."""

    outline: dict[str, Any]  # the state with a `TensorOutline` for every tensor
    size: int  # of the tensors' storages, in bytes
    _file: BinaryIO

    def load(self) -> dict[str, Any]:
        """Returns the state with its tensors, on the CPU; raises a `CheckpointError` if it is damaged."""
        import torch

        self._file.seek(0)
        try:
            # pickle: plain values and tensors alone, after the outline was right
            return torch.load(self._file, map_location="cpu", weights_only=True)
        except DAMAGE as error:
            raise CheckpointError(_reason(error)) from None


@contextmanager
def opened_checkpoint(path: Path, ledger: Path) -> Iterator[Checkpoint]:
    """Opens a checkpoint, and reads its outline.

    Guarantees:
        - No code of the file runs. What is read before the outline is known to be sound is as large as the ledger and
          a few MiB.
        - Every byte of the file's content fits its checksum.

    Raises:
        CheckpointError: if the file is none that `torch.save` has made of plain values and tensors.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(opened(path))
            checkpoint = _checked(file, LARGEST_OUTLINE + (ledger.stat().st_size if ledger.is_file() else 0))
        except DAMAGE as error:
            raise CheckpointError(_reason(error)) from None
        yield checkpoint


def _reason(error: BaseException) -> str:
    return f"damaged, or of another version? {' '.join(str(error).split())[:200].rstrip('.') or type(error).__name__}"


def _checked(file: BinaryIO, at_most: int) -> Checkpoint:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - END_BYTES - 2**16))
    end = file.read()
    place = end.rfind(END_OF_DIRECTORY)
    if place < 0 or int.from_bytes(end[place + 12 : place + 16], "little") > LARGEST_DIRECTORY:
        raise ValueError("it is no file of torch.save")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = {entry.filename for entry in entries}
        sound = len(names) == len(entries) and all(
            ENTRY.fullmatch(entry.filename)
            and entry.compress_type == zipfile.ZIP_STORED
            and entry.compress_size == entry.file_size
            for entry in entries
        )
        prefixes = {name.partition("/")[0] for name in names}
        if not sound or len(prefixes) != 1 or sum(entry.file_size for entry in entries) > size:
            raise ValueError("it is packed otherwise than torch.save does")
        (prefix,) = prefixes
        for entry in entries:
            with archive.open(entry) as content:
                while content.read(BLOCK):  # compares the checksum at the end
                    pass
        outline = archive.getinfo(f"{prefix}/data.pkl")
        if outline.file_size > at_most:
            raise ValueError(f"it has {outline.file_size} bytes beside the tensors")
        storages = f"{prefix}/data/"
        sizes = {
            entry.filename.removeprefix(storages): entry.file_size
            for entry in entries
            if entry.filename.startswith(storages)
        }
        with archive.open(outline) as content:
            state = _Outline(content, sizes).load()
    if not isinstance(state, dict):
        raise ValueError("it is no dictionary")
    return Checkpoint(state, sum(sizes.values()), file)


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Returns where a state differs in its structure from the expected one: entries, types, shapes; not in its numbers.

    Numbers must be finite and fit a double; an expected tensor must have the same type and shape.
    """
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return [f"{where} is {_described(found)}, not a dictionary"]
        lacking, unknown = expected.keys() - found.keys(), found.keys() - expected.keys()
        listed = [f"{where} has no {shown(key)}" for key in sorted(lacking, key=repr)]
        listed += [f"{where} has an unknown entry {shown(key)}" for key in sorted(unknown, key=repr)]
        shared = (key for key in expected if key in found)
        return listed + [one for key in shared for one in differences(found[key], expected[key], _below(where, key))]
    if isinstance(expected, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(expected):
            return [f"{where} is {_described(found)}, not a list of {len(expected)}"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [one for number, (have, want) in pairs for one in differences(have, want, f"{where}[{number}]")]
    return [] if _alike(found, expected) else [f"{where} is {_described(found)}, not {_described(expected)}"]


def _alike(found: Any, expected: Any) -> bool:
    if hasattr(expected, "shape"):
        return found == outline_of(expected)
    if isinstance(expected, (int, float)) and not isinstance(expected, bool):
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
        return is_number and abs(found) <= 1e300 and (type(expected) is float or type(found) is int)
    return type(found) is type(expected)


def outline_of(tensor: Any) -> TensorOutline:
    """Returns the outline that a tensor has in a file."""
    import torch

    names = {"bool": "Bool", "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long"}
    names |= {"float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double"}
    kind = str(tensor.dtype).removeprefix("torch.")
    return TensorOutline(f"{names.get(kind, kind)}Storage", tuple(torch.as_tensor(tensor).shape))


def _described(value: Any) -> str:
    if isinstance(value, TensorOutline):
        return f"a {value}"
    return f"a {outline_of(value)}" if hasattr(value, "shape") else shown(value)


def _below(where: str, key: Any) -> str:
    name = key if isinstance(key, str) and re.fullmatch(r"[\w.]{1,80}", key) else shown(key)
    return f"{where}.{name}" if where else str(name)


def listed(found: list[str]) -> str:
    """Returns differences as words, the first five of them."""
    more = f"; and {len(found) - MOST_DIFFERENCES} more" if len(found) > MOST_DIFFERENCES else ""
    return "; ".join(found[:MOST_DIFFERENCES]) + more
