# SPDX-License-Identifier: Apache-2.0
"""Reads arrays, and nothing else, from pickles and MATLAB files."""

import io
import math
import pickle  # pickle: the published format of CIFAR; arrays are built here, and nothing that it names is called
import re
from typing import Any

import numpy as np
import scipy.io

from torch_privacy.data.files import File


class _Array:
    """Stands for an array while a pickle is read: it keeps what the pickle says of it, and checks that."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, in_columns, content = state
        right = isinstance(dtype, _Type) and isinstance(content, bytes) and isinstance(shape, tuple)
        if not right or not all(type(size) is int and size >= 0 for size in shape):
            raise pickle.UnpicklingError("it has an array without a shape, a type or its bytes")
        if len(content) != math.prod(shape) * dtype.size:
            raise pickle.UnpicklingError(f"it has {len(content)} bytes for an array of shape {shape}")
        flat = np.frombuffer(content, dtype.name)
        self.array = flat.reshape(shape[::-1]).T if in_columns else flat.reshape(shape)


class _Type:
    """Stands for the type of an array: integers, floating-point numbers or truth values of 1 to 8 bytes."""

    def __init__(self, name: Any, *_: Any):
        text = name.decode("latin1") if isinstance(name, bytes) else str(name)
        if not re.fullmatch("[|<>=]?[biuf][1248]", text):
            raise pickle.UnpicklingError(f"it has an array of type {text!r}, not of numbers")
        self.name, self.size = text, int(text[-1])

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("latin1") if isinstance(state[1], bytes) else state[1]
        if order not in ("|", "<", ">", "="):
            raise pickle.UnpicklingError(f"it has an array with the byte order {order!r}")
        self.name = order + self.name.lstrip("|<>=")


def _encode(text: Any, *_: Any) -> bytes:
    return text.encode("latin1")


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> _Array:
    """Returns the array of a pickle of protocol 5, which Python 3.14 writes by default."""
    if order not in ("C", "F") or not isinstance(content, (bytes, bytearray)):
        raise pickle.UnpicklingError("it has an array with its numbers neither in rows nor in columns")
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", bytes(content)))
    return array


STAND_INS = {
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy", "ndarray"): None,  # an argument of _reconstruct
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,  # how Python 3 writes bytes for Python 2
}


class _Arrays(pickle._Unpickler):
    """Reads pickles without running any code of theirs: arrays are built here, from their bytes, and checked.

    It is the reader in Python: the one in C reserves memory for any number of objects that a pickle names.
    """

    def find_class(self, module: str, name: str) -> Any:
        try:
            return STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs") from None


def unpickle(file: File) -> Any:
    """Returns arrays, numbers, texts and containers pickled by Python 2 or 3; keys of dictionaries become texts.

    Raises:
        DataError: If the file is no pickle, is truncated, or asks for anything else than arrays.
    """
    try:
        content = _Arrays(io.BytesIO(file.content), encoding="bytes").load()
        if not isinstance(content, dict):
            return content
        return {key.decode("latin1") if isinstance(key, bytes) else key: _built(v) for key, v in content.items()}
    except Exception as error:  # a damaged pickle can raise anything
        file.refuse(f"is no pickle of arrays, or is truncated ({str(error).rstrip('.')})")


def _built(value: Any) -> Any:
    return value.array if isinstance(value, _Array) else value


def read_matlab(file: File, *names: str) -> list[np.ndarray]:
    """Returns the arrays of these names in a MATLAB file of version 5.

    Raises:
        DataError: If the file is none, is truncated, or lacks one of the arrays.
    """
    try:
        table = scipy.io.loadmat(io.BytesIO(file.content), variable_names=list(names))
    except Exception as error:  # a damaged file can raise anything
        file.refuse(f"is no MATLAB file of version 5, or is truncated ({str(error).rstrip('.')})")
    missing = [name for name in names if not isinstance(table.get(name), np.ndarray)]
    file.check(not missing, f"holds no array named {', '.join(missing)}")
    return [table[name] for name in names]
