# SPDX-License-Identifier: Apache-2.0
"""Out of the user's autocast: norms, sums and directions are computed in the types that ops ask for."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def without_autocast(device: str) -> AbstractContextManager:
    """Leaves autocast on devices of this type, if it is on."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def exact(method: Method) -> Method:
    """A method of what has a ``_device``: without gradients, and without autocast."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), without_autocast(self._device.type):
            return method(self, *args, **kwargs)

    return guarded  # pyright: ignore[reportReturnType]
