# SPDX-License-Identifier: Apache-2.0
"""Provides `BatchMemoryManager`, at Opacus' place."""

from __future__ import annotations

from typing import Any

from ...support.validate import Refused, whole
from ..run import PrivateLoader


class BatchMemoryManager:
    """Limits the number of examples on the device at once, by ``microbatch_size`` of `Performance`.

    The noise of a step stays the same bit for bit. ``optimizer.step()`` on all but the last part of a batch only adds
    to the sum, and learning-rate schedulers do not advance there.

    Args:
        data_loader: the loader that `PrivacyEngine.make_private` returned.
        max_physical_batch_size: largest number of examples in a part.
        optimizer: the optimizer that was returned with it.

    Raises:
        Refused: loader and optimizer do not belong together.
    """

    def __init__(self, *, data_loader: Any, max_physical_batch_size: int, optimizer: Any):
        whole("BatchMemoryManager", max_physical_batch_size=max_physical_batch_size, at_least=1)
        if not isinstance(data_loader, PrivateLoader) or data_loader.run.private_optimizer is not optimizer:
            raise Refused(
                "BatchMemoryManager: data_loader and optimizer must be those that one call of make_private returned."
            )
        self._loader = PrivateLoader(data_loader.run, data_loader.data_loader, max_physical_batch_size)

    def __enter__(self) -> PrivateLoader:
        return self._loader

    def __exit__(self, *error: object) -> None:
        """Does nothing: the loader of `make_private` has no limit."""
