# SPDX-License-Identifier: Apache-2.0
"""Keeps the state of a training in one file of JSON and safetensors: reading it runs no code.

The file is in the safetensors format. Its tensor ``state.json`` has the state as JSON in UTF-8, where
``{"$tensor": "3"}`` stands for the tensor with this name. Its metadata have a digest of the whole file,
computed with zeros in the digest's place.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_privacy.support.read_file import is_text, opened, parse_json
from torch_privacy.support.validate import Refused
from torch_privacy.support.write_file import write_whole

if TYPE_CHECKING:
    from torch import Tensor

WHERE = "checkpoint"
STATE = "state.json"  # name of the tensor that holds the JSON
FORMAT, EMPTY = "torch_privacy checkpoint 1, SHA-256", "0" * 64  # the key of the digest, and what is in its place
MARK = f'"{FORMAT}":"'.encode()  # in the header, before the digest
LARGEST, LONGEST_HEADER = 2**40, 10**8  # bytes
DEEPEST = 20  # levels of nesting
NATIVE = {  # to safetensors; of other types the bytes are stored
    f"torch.{name}"
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
MAPPINGS = {"ordered": OrderedDict, "counter": Counter, "dict": dict}  # by what marks them in the JSON
FORMER = b"PK", b"\x80", b'{"format": 1'  # how files of earlier versions begin: torch.save, and plain JSON
EARLIER = (
    "is of an earlier version, in a format that this one does not read: finish the run with the version of "
    "torch_privacy that wrote it, or begin a new one."
)
ONLY = "only tensors and plain values are saved"


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a state of plain values and tensors; the old file or the new one is there, with mode 0600.

    Values come back as they were: dictionaries with keys of any plain type, tuples, integers of any size, numbers that
    are not finite, and tensors of any type and shape, on the CPU and without gradients. One tensor in two places is
    one tensor again.

    Raises:
        Refused: something else is in the state, such as a function; the message says where.
        OSError: the file cannot be written; it is unchanged.
    """
    content = packed(state)
    write_whole(path, lambda file: file.write(content))


def load(path: Path) -> dict[str, Any]:
    """Returns the state that `save` wrote.

    Raises:
        Refused: the file is damaged, or `save` has not written it. Nothing of it is used: a single bit that differs
            is found.
    """
    try:
        with opened(path) as file:
            if os.fstat(file.fileno()).st_size > LARGEST:
                raise ValueError(f"it has more than {LARGEST} bytes")
            start = file.read(8)
            start += file.read(min(int.from_bytes(start, "little"), LONGEST_HEADER))
            is_ours = MARK in start[8:]  # else its other bytes are not read
            return unpacked(start + file.read() if is_ours else start)
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}). Restore a copy of it.") from None
    except Refused as error:
        raise Refused(f"{path}: {error}") from None
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise Refused(f"{path}: cannot be read ({reason}). Restore a copy of it, or begin a new training.") from None


def packed(state: Mapping[str, Any]) -> bytes:
    """Returns the content of the file."""
    import safetensors.torch
    import torch

    tensors = _Tensors()
    text = json.dumps(tensors.plain(dict(state), ""), allow_nan=False).encode()
    tensors.by_name[STATE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    content = safetensors.torch.save(tensors.by_name, {FORMAT: EMPTY})
    place = content.index(EMPTY.encode())  # in the header, before all tensors
    digest = hashlib.sha256(content).hexdigest().encode()
    return b"".join([content[:place], digest, memoryview(content)[place + len(EMPTY) :]])


def unpacked(content: bytes) -> dict[str, Any]:
    """Returns the state in a file's content; raises a ``ValueError`` with the reason if it is damaged."""
    import safetensors
    import safetensors.torch

    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    place = 8 + header.find(MARK) + len(MARK)
    if MARK not in header:
        if content.startswith(FORMER):
            raise Refused(EARLIER)
        raise ValueError("it is no checkpoint of this version, or damaged")
    whole = hashlib.sha256(content[:place])
    whole.update(EMPTY.encode())
    whole.update(memoryview(content)[place + len(EMPTY) :])
    if whole.hexdigest().encode() != content[place : place + len(EMPTY)]:
        raise ValueError("it is damaged: its digest does not fit its content")
    try:
        tensors = safetensors.torch.load(content)
        found = _of_plain(parse_json(tensors.pop(STATE).numpy().tobytes()), tensors)
    except (safetensors.SafetensorError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"it is no state of a training: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise ValueError("it is no state of a training")
    return found


class _Tensors:
    """Takes tensors out of a state; ``by_name`` has each one once."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self._marks: dict[Any, dict[str, Any]] = {}
        self._memory: set[int] = set()

    def plain(self, value: Any, where: str, depth: int = 0) -> Any:
        """Returns a value as JSON can hold it; ``where`` names it in messages."""
        import torch

        if value is None or type(value) is bool:
            return value
        if type(value) is str:
            if not is_text(value):
                raise Refused(f"{WHERE}: {where} is a text with half a character. Leave it out of the state.")
            return value
        if type(value) is int:
            return value if abs(value) < 2**63 else {"$int": hex(value)}
        if isinstance(value, float):  # float64 of numpy, too
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if depth > DEEPEST:
            raise Refused(
                f"{WHERE}: {where[:200]} has more than {DEEPEST} levels of nesting. Leave it out of the state."
            )
        if type(value) in (list, tuple):
            found = [self.plain(part, f"{where}[{number}]", depth + 1) for number, part in enumerate(value)]
            return found if type(value) is list else {"$tuple": found}
        if type(value) in MAPPINGS.values():
            return self._mapping(value, where, depth + 1)
        raise Refused(f"{WHERE}: {where} is of type {type(value).__name__}; {ONLY}. Leave it out of the state.")

    def _mapping(self, value: Mapping[Any, Any], where: str, depth: int) -> dict[str, Any]:
        if type(value) is dict and all(type(key) is str and is_text(key) and key[:1] != "$" for key in value):
            return {key: self.plain(part, f"{where}.{key}".lstrip("."), depth) for key, part in value.items()}
        (kind,) = (name for name, kind in MAPPINGS.items() if kind is type(value))
        pairs = [
            [self.plain(key, f"a key of {where}", depth), self.plain(part, f"{where}[{key!r:.80}]", depth)]
            for key, part in value.items()
        ]
        metadata = getattr(value, "_metadata", None)  # the versions of modules, in a state dict of torch
        more = {} if metadata is None else {"metadata": self.plain(metadata, f"{where}._metadata", depth)}
        return {f"${kind}": pairs, **more}

    def _tensor(self, value: Tensor, where: str) -> dict[str, Any]:
        import torch

        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if not is_plain or value.layout != torch.strided or value.is_quantized or value.is_meta:
            cure = "Save shards by torch.distributed.checkpoint" if hasattr(value, "full_tensor") else "Leave it out"
            kind = f"{type(value).__name__} of {value.dtype}, {value.layout}, on {value.device}"
            raise Refused(f"{WHERE}: {where} is a {kind}; only dense tensors are saved. {cure}.")
        value = value.detach()
        layout = value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()
        same = value.device, value.data_ptr(), *layout
        if same not in self._marks:
            self._marks[same] = self._taken(value.cpu().resolve_conj().resolve_neg())
        return self._marks[same]

    def _taken(self, value: Tensor) -> dict[str, Any]:
        """Stores a tensor with its dimensions in the order of its memory, and returns what stands for it."""
        import torch

        mark: dict[str, Any] = {"$tensor": str(len(self.by_name))}
        order = sorted(range(value.ndim), key=value.stride, reverse=True)
        if not value.is_contiguous() and value.permute(order).is_contiguous():
            value, mark["order"] = value.permute(order), order
        value = value.contiguous()
        if str(value.dtype) not in NATIVE:
            mark |= {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
            value = value.reshape(-1).view(torch.uint8)
        if (place := value.untyped_storage().data_ptr()) in self._memory:
            value = value.clone()  # safetensors refuses two views of one memory
        self._memory.add(place)
        self.by_name[mark["$tensor"]] = value
        return mark


def _of_plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns the value for which the JSON stands."""
    if isinstance(value, list):
        return [_of_plain(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    kind = next((key for key in value if key.startswith("$")), None)
    if kind is None:
        return {key: _of_plain(part, tensors) for key, part in value.items()}
    content = value[kind]
    if kind == "$tensor":
        return _restored(value, tensors)
    if kind in ("$int", "$float"):
        return int(content, 16) if kind == "$int" else float(content)
    if kind == "$tuple":
        return tuple(_of_plain(part, tensors) for part in content)
    found = MAPPINGS[kind[1:]]()
    for key, part in content:
        found[_of_plain(key, tensors)] = _of_plain(part, tensors)
    if "metadata" in value:
        found._metadata = _of_plain(value["metadata"], tensors)
    return found


def _restored(mark: Mapping[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """Returns a tensor with the type and the order of memory that it had, the same object for one name."""
    import torch

    name = mark["$tensor"]
    restored = f"restored {name}"
    if restored not in tensors:
        value = tensors[name]
        if "dtype" in mark:
            value = value.clone().view(getattr(torch, mark["dtype"])).reshape(mark["shape"])
        if "order" in mark:
            value = value.permute([mark["order"].index(dim) for dim in range(value.ndim)])
        tensors[restored] = value
    return tensors[restored]
