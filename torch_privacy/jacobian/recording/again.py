# SPDX-License-Identifier: Apache-2.0
"""Backwards in which parts of the forward run again: the same ops with the same numbers, or they are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...ops import COMPOSED
from ...support.own_draws import randint
from ...support.validate import Refused
from .functions import decomposed

SAMPLES = 64  # entries of an input that are compared with those of the forward

_OpKey = tuple[Callable, tuple[int, ...]]


class MadeAgain:
    """Holds what a recorded forward did in parts that run again, to compare and to repeat it in each backward.

    Attributes:
        differences: of the backward that is running, flags () that say whether an input has other entries than before.
        saved_at: where an input of an op is among the tensors that autograd saves for it, as earlier batches showed.
    """

    def __init__(self) -> None:
        self.differences: list[Tensor] = []
        self.saved_at: dict[tuple, int] = {}
        self._inside: set[_OpKey] = set()
        self._parameters: set[int] = set()

    def expect(self, parameters: set[int]) -> None:
        """Takes the ids of the recorded parameters."""
        self._parameters = parameters

    def note_inside(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """Notes that the inner calls of a function were run in its place, in a part that runs again."""
        self._inside.add(self._key(func, args, kwargs))

    def _key(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> _OpKey:
        return func, tuple(id(t) for t in tree_leaves((args, kwargs)) if id(t) in self._parameters)

    def ran_inside(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
        """True if the inner calls of the function ran in its place before."""
        return self._key(func, args, kwargs) in self._inside

    @contextmanager
    def watching(self, device: torch.device) -> Iterator[None]:
        """Runs backwards in the ``with`` block, in which parts of the forward may run again.

        Raises:
            Refused: they drew from torch's random numbers, an input had other entries than in the forward, or they can
                run again only once.
        """
        before, outer = _random_states(device), self.differences
        self.differences = found = []
        try:
            with _SameOps(self) if self._inside else nullcontext():
                yield
        except RuntimeError as error:
            if "selective activation checkpoint" not in str(error):
                raise
            raise Refused(
                "tape: selective activation checkpointing allows one backward, but rows take several. Leave context_fn "
                "out of checkpoint."
            ) from None
        finally:
            self.differences = outer
        drew = any(not torch.equal(a, b) for a, b in zip(before, _random_states(device), strict=True))
        if drew or (found and bool(torch.stack([flag.to(device) for flag in found]).any())):
            what = "drew random numbers" if drew else "gave an op another input than in the forward"
            raise Refused(
                f"tape: a part under activation checkpointing, or another saved-tensor hook, {what} when it ran "
                "again in the backward, so that its rows are not those of the losses. Leave preserve_rng_state=True, "
                "its default, in checkpoint, and let nothing in that part depend on generators or counts of its own."
            )


class _SameOps(TorchFunctionMode):
    """Runs the inner calls of functions in their place where the recorder did, so that the same tensors are saved."""

    def __init__(self, again: MadeAgain):
        super().__init__()
        self._again = again

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.autograd.grad and not self._again.ran_inside(func, args, kwargs):
            return func(*args, **kwargs)
        with self:  # a backward, too, which is where parts run again
            if func in COMPOSED:
                return COMPOSED[func](_add_nothing, *args, **kwargs)
            inside = decomposed(func)
            assert inside is not None
            return inside(*args, **kwargs)


def _add_nothing(y: Tensor, uses: Any) -> None:
    return None


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.random.get_rng_state()]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "get_rng_state"):
            states.append(module.get_rng_state(device))
    return states


@lru_cache(maxsize=256)
def _places(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Returns the indices in each dimension of random places in a tensor."""
    generator = torch.Generator().manual_seed(len(shape))
    places = (randint(max(size, 1), (SAMPLES,), generator=generator) for size in shape)
    return tuple(place.to(device) for place in places)


@torch.no_grad()
def sample(x: Tensor) -> Tensor:
    """Returns some entries of x, always at the same places for tensors of this shape."""
    return x.detach()[_places(x.shape, x.device)] if x.numel() and x.ndim else x.detach().reshape(-1).clone()


@torch.no_grad()
def differ(before: Tensor, now: Tensor) -> Tensor:
    """Returns (), true if samples differ by more than a GPU that adds in another order could make them."""
    if before.shape != now.shape or before.dtype != now.dtype:
        return torch.ones((), dtype=torch.bool, device=now.device)
    tolerance = torch.finfo(now.dtype).eps ** 0.5 if now.is_floating_point() else 0.0
    scale = torch.where(before.isfinite(), before, 0).abs().amax() if before.numel() else 0.0
    same = (before == now) | ((before - now).abs() <= tolerance * scale) | (before.isnan() & now.isnan())
    return ~same.all()
