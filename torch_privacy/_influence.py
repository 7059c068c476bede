# SPDX-License-Identifier: Apache-2.0
"""Whose data a function's result holds, where no rule says: found by running it again on other examples' data.

Some examples' entries in the arguments take others' place. Where what changes in the result is theirs alone, the
function treats every example by itself; else what it gives holds several examples' data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ._fitting import fresh_generator
from ._rewind import RandomState

# What tells of entries, beside the numbers of examples.
NOBODY, MIXED, UNKNOWN = -1, -2, -3

LARGEST = 2**20  # entries of what is run again
ROUNDS = 2  # exchanges of each half
ROUNDING = 64  # in units of the type's, relative to the largest entry
_NOT_RUN_AGAIN = frozenset(
    {
        *("item", "tolist", "numpy", "size", "dim", "numel", "stride", "backward", "register_hook"),
        *("nonzero", "argwhere", "where"),  # numbers of places, by which entries are moved to and fro
    }
)


class Influence:
    """A call that is to be run again; made before the function runs, for it may change its first argument.

    Args:
        func, args, kwargs: the call.
        in_place: whether it writes into the first argument, which is then its result.
        owners: id of an argument -> whose each of its entries is: an example's or nobody's.
        n: number of examples.
    """

    def __init__(
        self,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        in_place: bool,
        owners: Mapping[int, Tensor],
        n: int,
    ):
        self._func, self._args, self._kwargs, self._in_place = func, args, kwargs, in_place
        self._owners, self._n = owners, n
        self._places = {key: _places(whose, n) for key, whose in owners.items()}
        self._before = args[0].detach().clone() if in_place and isinstance(args[0], Tensor) else None
        self._tensors = {id(t): t for t in tree_leaves((args, kwargs)) if id(t) in owners}
        if self._before is not None and id(args[0]) in owners:
            self._tensors[id(args[0])] = self._before

    def owners(self) -> list[Tensor | None]:
        """Whose the entries of each tensor of the result are: nobody's (-1) where nothing changes.

        They are ``MIXED`` where they hold several examples' data; None of a tensor that has another shape after the
        exchange. An empty list where the function does not run again.
        """
        generator = fresh_generator()
        first = torch.rand(self._n, generator=generator) < 0.5
        first[0], first[-1] = True, False
        state = RandomState()
        try:
            with torch.no_grad():
                plain = self._run({}, state)
                here, there = (
                    [self._run(self._sources(chosen, generator), state) for _ in range(ROUNDS)]
                    for chosen in (first, ~first)
                )
                pairs = zip(plain, zip(*here, strict=True), zip(*there, strict=True), strict=True)
                return [self._whose(out, first, here, there) for out, here, there in pairs]
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return []
        finally:
            state.restore()

    def _whose(self, out: Tensor, first: Tensor, heres: Sequence[Tensor], theres: Sequence[Tensor]) -> Tensor | None:
        """From the result, and what it becomes where the first examples, and where the others, are exchanged."""
        if any(other.shape != out.shape for other in (*heres, *theres)):
            return None
        here, there = (torch.stack([_differs(out, other) for other in others]).any(0) for others in (heres, theres))
        first = first.to(out.device)
        if not (here.any() or there.any()):
            return torch.full((), NOBODY, dtype=torch.int32, device=out.device).expand(out.shape)
        for whose in self._candidates(out):
            somebody_s, is_first = whose >= 0, first[whose.clamp(min=0)]
            if not ((here & ~(somebody_s & is_first)).any() or (there & ~(somebody_s & ~is_first)).any()):
                return whose
        return torch.full((), MIXED, dtype=torch.int32, device=out.device).expand(out.shape)

    def _candidates(self, out: Tensor) -> Iterable[Tensor]:
        """As an argument of the same shape has it, or one of the same length along its rows; or in order."""
        for whose in self._owners.values():
            if whose.shape == out.shape:
                yield whose
        orders = [whose.flatten(1)[:, 0] for whose in self._owners.values() if whose.ndim > 1 and whose.numel()]
        orders += [whose for whose in self._owners.values() if whose.ndim == 1]
        in_order = torch.arange(self._n, device=out.device, dtype=torch.int32)
        for dim, size in enumerate(out.shape):
            for order in (*orders, in_order):
                if size == len(order):
                    yield order.view([-1] + [1] * (out.ndim - dim - 1)).expand(out.shape)

    def _sources(self, chosen: Tensor, generator: torch.Generator) -> dict[int, Tensor]:
        """Id of an argument -> where each entry comes from once the chosen examples' data are some of the others'.

        Where an argument has not as many entries for each, theirs come from anywhere in its `_pool`.
        """
        rest = (~chosen).nonzero().flatten()  # not of the chosen: a sum of these would stay as it is
        others = rest[torch.randint(len(rest), (self._n,), generator=generator)]
        sources = {}
        for key, whose in self._owners.items():
            source, places = torch.arange(whose.numel(), device=whose.device), self._places[key]
            if places is None:
                flat = whose.flatten()
                of_chosen = chosen.to(flat.device)[flat.clamp(min=0)] & (flat >= 0)
                anywhere = torch.randint(len(self._pool(key)), source.shape, generator=generator)
                source[of_chosen] = anywhere.to(flat.device)[of_chosen]
            else:
                source[places[chosen.to(places.device)]] = places[others[chosen].to(places.device)]
            sources[key] = source
        return sources

    def _pool(self, key: int) -> Tensor:
        """The entries of an argument, and then those of all others of its type."""
        own = self._tensors[key]
        others = [t for k, t in self._tensors.items() if k != key and (t.dtype, t.device) == (own.dtype, own.device)]
        return torch.cat([t.flatten() for t in (own, *others)])

    def _run(self, sources: Mapping[int, Tensor], state: RandomState) -> list[Tensor]:
        def replaced(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            now = self._before if self._before is not None and value is self._args[0] else value
            if id(value) in sources:
                return self._pool(id(value))[sources[id(value)]].view(now.shape)
            return now.clone() if now is self._before else now

        state.restore()
        args, kwargs = tree_map(replaced, (self._args, self._kwargs))
        out = self._func(*args, **kwargs)
        return results_of(args[0] if self._in_place else out)


def _places(whose: Tensor, n: int) -> Tensor | None:
    """(n, k): where the entries of each example are; None where they have not as many, or some are nobody's."""
    if whose.numel() % n or bool((whose < 0).any()):
        return None
    even = bool((torch.bincount(whose.flatten(), minlength=n) == whose.numel() // n).all())
    return whose.flatten().argsort(stable=True).view(n, -1) if even else None


def _differs(one: Tensor, other: Tensor) -> Tensor:
    """Entry by entry; beyond the rounding of sums whose order changes from run to run."""
    differs = (one != other) & ~((one != one) & (other != other))
    if not one.is_floating_point() or not one.numel():
        return differs
    largest = one.abs().nan_to_num(0, 0, 0).max()
    return differs & ~((one - other).abs() <= ROUNDING * torch.finfo(one.dtype).eps * largest)


def results_of(out: Any) -> list[Tensor]:
    """The tensors of a function's result, other than sparse and nested ones."""
    tensors = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor)]
    return [t for t in tensors if t.layout is torch.strided]


def can_be_run_again(func: Callable, tensors: Iterable[Tensor]) -> bool:
    """Whether a function of these tensors is one of torch's that gives tensors, of data that no gradient follows."""
    followed = torch.is_grad_enabled()
    return _is_torch_s(func) and not any((followed and t.requires_grad) or t.numel() > LARGEST for t in tensors)


@cache
def _is_torch_s(func: Callable) -> bool:
    name, module = getattr(func, "__name__", "__get__"), getattr(func, "__module__", None) or "torch"
    return not name.startswith("__") and name not in _NOT_RUN_AGAIN and module.startswith("torch")
