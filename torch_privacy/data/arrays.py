# SPDX-License-Identifier: Apache-2.0
"""Reads arrays, and nothing else, from pickles and MATLAB files."""

import codecs
import io
import pickle
from typing import Any

import numpy as np
import scipy.io

from torch_privacy.data.files import File

RECONSTRUCT: Any = np.empty(0).__reduce__()[
    0
]  # what makes an array when it is unpickled, whatever numpy's version calls it
HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"): RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,  # how Python 3 writes bytes for Python 2
}


class _Arrays(pickle.Unpickler):
    """Unpickles arrays, numbers, texts and containers of them only, since other pickles could run any code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return HARMLESS[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which no array needs") from None


def unpickle(file: File) -> Any:
    """Returns arrays, numbers, texts and containers pickled by Python 2 or 3; keys of dictionaries become texts.

    Raises:
        DataError: If the file is no pickle, is truncated, or asks for anything else than arrays.
    """
    try:
        content = _Arrays(io.BytesIO(file.content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        file.refuse(f"is no pickle of arrays, or is truncated ({str(error).rstrip('.')})")
    if not isinstance(content, dict):
        return content
    return {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}


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
