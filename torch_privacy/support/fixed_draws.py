# SPDX-License-Identifier: Apache-2.0
"""Replaces what torch draws by quantiles, as `RunDraws` asks for, and sets up such a run."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .draws import AS_DRAWN, GOLDEN, MOST_CALLS, Drawn, Rule, RunDraws, may_be_time_first
from .own_draws import are_ours
from .plain_draws import fixed_plain_draws
from .random_state import in_eval, torch_generators

Arguments = dict[str, Any]  # of a call of torch, by their names in its schema

_STEPS = [GOLDEN, *(math.sqrt(prime) % 1 for prime in (2, 3, 5, 7, 11, 13, 17))]  # between places, for each dimension


@contextmanager
def drawing(draws: RunDraws, count: int) -> Iterator[Drawn]:
    """Draws random numbers of torch, numpy and Python as ``draws`` asks for, in a run of ``count`` examples."""
    drawn = Drawn(count)
    with ExitStack() as stack:
        if draws.rule is not Rule.AS_DRAWN:
            stack.enter_context(FixedDraws(draws, drawn).in_this_thread())
            stack.enter_context(fixed_plain_draws(draws, drawn))
        yield drawn


def drawing_in(model: nn.Module, draws: RunDraws, count: int) -> AbstractContextManager[Drawn]:
    """Draws random numbers as ``draws`` asks for, and puts the model in eval mode if it asks for that."""
    if draws is AS_DRAWN:
        return nullcontext(Drawn(count))
    return _drawing_in(model, draws, count)


@contextmanager
def _drawing_in(model: nn.Module, draws: RunDraws, count: int) -> Iterator[Drawn]:
    with ExitStack() as stack:
        if draws.in_eval:
            stack.enter_context(in_eval([*model.modules()]))
        yield stack.enter_context(drawing(draws, count))


class FixedDraws(TorchDispatchMode):
    """Replaces the results of torch's random functions; its generators do not advance, unless numbers are as drawn.

    A part that activation checkpointing runs again must get its numbers again. It runs from the generators' states that
    checkpointing has kept. So the number of a draw follows from these states, and until the end of the run torch's CPU
    generator does advance after a draw: by one number, however many were asked for.

    Torch has a stack of modes for each thread. If another thread ends the run, the mode does nothing from then on, and
    leaves the stack when the user's loop goes on in its own thread (``Drawn.on_return``).
    """

    def __init__(self, draws: RunDraws, drawn: Drawn):
        super().__init__()
        self._draws, self._drawn, self._calls, self._total = draws, drawn, 0, 0
        self._next = 0  # number of the next new call
        self._numbers: dict[bytes, int] = {}  # of draws, by the states of all generators before them
        self._origins: dict[bytes, Tensor] = {}  # of the CPU generator: where it would be, by the states that were set
        self._thread: int | None = None  # in which it is on the stack
        self._is_over = False
        drawn.on_end.append(self._put_back)
        drawn.on_restart.append(self._restart)
        drawn.on_return.append(self._leave)

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Replaces what this thread draws inside of the ``with`` block, which any thread may end."""
        self._thread = threading.get_ident()
        self.__enter__()
        try:
            yield
        finally:
            self._put_back()
            self._is_over = True
            self._leave()

    def _leave(self) -> None:
        if self._is_over and self._thread == threading.get_ident():
            self._thread = None
            self.__exit__(None, None, None)

    def _restart(self) -> None:
        self._next = 0
        self._numbers.clear()

    def _put_back(self) -> None:
        """Puts torch's CPU generator where it would be if no draw had moved it on."""
        origin = self._origins.get(_digest(torch.default_generator.get_state()))
        if origin is not None:
            torch.default_generator.set_state(origin)

    def _move_on(self, before: list[tuple[torch.Generator, Tensor]]) -> None:
        """Gives the generators their states before a draw again, and moves that of the CPU on by one number."""
        for generator, state in before:
            generator.set_state(state)
        torch.rand((), device="cpu")
        cpu, state = before[0]
        self._origins[_digest(cpu.get_state())] = self._origins.get(_digest(state), state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_over or are_ours.get() or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        if "dropout_p" in names:  # in fused attention
            return func(*args[: names.index("dropout_p")], **_without_dropout(names, args, kwargs))
        replace = _REPLACEMENTS.get(func.overloadpacket.__name__)
        self._total += 1
        if replace is None or self._total > MOST_CALLS:
            return func(*args, **kwargs)
        given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        given |= dict(zip(names, args, strict=False)) | kwargs
        before = torch_generators()
        result = func(*args, **kwargs)
        self._calls = self._next
        if given.get("generator") is None:
            self._calls = self._numbers.setdefault(_digest(*(state for _, state in before)), self._next)
            if not self._draws.consumes:
                self._move_on(before)
        shape = tuple(result.shape if isinstance(result, Tensor) else result[0].shape)
        self._drawn.note(shape)
        if self._draws.consumes and math.prod(shape) <= self._drawn.count:
            return result
        replaced = replace(self, result, given)
        self._next = max(self._next, self._calls)
        return replaced

    def permutation(self, length: int) -> Tensor:
        """Returns a permutation (length,) that leaves nothing in its place: the successors in one cycle of all."""
        order = torch.from_numpy(np.random.Generator(np.random.PCG64(self._draws.key)).permutation(length))
        return torch.empty_like(order).scatter_(0, order, order.roll(-1))

    def is_true(self, result: Tensor, p: Any) -> Tensor:
        """Returns which entries of a result are true, each with probability p.

        At a level all of many are true if that is likely: else dropout would drop all, and nothing could be seen.
        """
        found = self.quantiles(result, apart=False) < p
        is_mask = self._draws.rule is Rule.AT_LEVEL and result.numel() > self._drawn.count
        return found | torch.as_tensor(p >= 0.5) if is_mask else found

    def quantiles(self, result: Tensor, *, apart: bool = True) -> Tensor:
        """Returns numbers between 0 and 1 for the entries of a result, as floating-point numbers.

        Places in an example are those along all dimensions but the first, and but the second if that one alone is as
        long as the batch. Entries that should be equal differ by what rounding explains, so that sorting them is a
        permutation, too. They are equal unless ``apart``: a mask or a whole number near a threshold must not depend on
        the example's place in the batch.
        """
        dtype = torch.float64 if result.dtype == torch.float64 and result.device.type != "mps" else torch.float32
        draws, shape = self._draws, tuple(result.shape)
        start = draws.start if draws.rule is Rule.AT_LEVEL else draws.start + self._calls * GOLDEN
        self._calls += 1
        spread = self._spread(shape, dtype, result.device, self._dimensions(shape))
        found = 0.001 + 0.998 * ((start + spread) % 1)
        if not apart:
            return found.expand(shape)
        first = self._spread(shape, dtype, result.device, [0])
        later = self._spread(shape, dtype, result.device, range(1, len(shape)))
        slight = 1e-10 if dtype == torch.float64 else 4e-6
        return (found + slight * (first % 1 + later % 1)).expand(shape)

    def _dimensions(self, shape: tuple[int, ...]) -> list[int]:
        """Returns the dimensions along which numbers differ."""
        if self._draws.rule is Rule.AT_LEVEL:
            return [0] if self._draws.by_row and math.prod(shape) == self._drawn.count else []
        if len(shape) == 1:
            return [] if self._draws.by_row or shape[0] == self._drawn.count else [0]
        # As many heads as examples are more usual than as many positions.
        is_time_first = shape[:1] != (self._drawn.count,) and may_be_time_first(shape, self._drawn.count)
        return list(range(2 if is_time_first else 1, len(shape)))

    def _spread(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any, dimensions: Sequence[int]) -> Tensor:
        """Returns a number for each entry that depends on its place along some dimensions; others have length 1."""
        total = torch.zeros([1] * len(shape), dtype=dtype, device=device)
        for d in dimensions:
            if d < len(shape):
                places = torch.arange(shape[d], dtype=torch.float64)
                places = (places.flip(0) if d and self._draws.from_end else places) * _STEPS[min(d, 7)] % 1
                total = total + places.to(device, dtype).view(*[1] * d, -1, *[1] * (len(shape) - d - 1))
        return total


def _digest(*states: Tensor) -> bytes:
    """Returns a short name for the states of generators."""
    return hashlib.blake2b(b"".join(state.numpy().tobytes() for state in states), digest_size=16).digest()


def _without_dropout(names: list[str], args: tuple, kwargs: Arguments) -> Arguments:
    given = dict(zip(names, args, strict=False))
    later = {name: given[name] for name in names[names.index("dropout_p") :] if name in given}
    return later | kwargs | {"dropout_p": 0.0}


def _normal_quantile(u: Tensor) -> Tensor:
    """Returns normal numbers without tails, where the slight differences of ``quantiles`` would become large."""
    return math.sqrt(2) * torch.erfinv(0.96 * (2 * u - 1))


def _by_quantile(
    value: Callable[[Tensor, Arguments], Tensor], *, apart: bool = True
) -> Callable[[FixedDraws, Tensor, Arguments], Tensor]:
    """Returns the replacement for a function with independent entries; ``apart`` if they are no whole numbers."""
    return lambda draws, result, given: result.copy_(value(draws.quantiles(result, apart=apart), given))


def _whole_numbers(u: Tensor, given: Arguments) -> Tensor:
    low = given.get("low", given.get("from", 0)) or 0
    high = given.get("high", given.get("to"))
    return (low + u.double() * ((2**24 if high is None else high) - low)).floor()


def _binomial(u: Tensor, given: Arguments) -> Tensor:
    n, p = given["count"], given["prob"]
    return (n * p + (n * p * (1 - p)).sqrt() * _normal_quantile(u)).round().clamp(min=0).minimum(n)


def _gamma(u: Tensor, shape: Tensor) -> Tensor:
    """Returns quantiles of gamma variables, nearly (Wilson & Hilferty, 1931)."""
    return shape * (1 - 1 / (9 * shape) + _normal_quantile(u) / (3 * shape.sqrt())).clamp(min=0.1) ** 3


def _dropout(draws: FixedDraws, result: tuple[Tensor, Tensor], given: Arguments) -> tuple[Tensor, Tensor]:
    x, p = given["input"], given["p"]
    if given["train"] is False:
        return result
    kept = draws.is_true(x, 1 - p)
    return (x * kept / max(1 - p, 1e-9)).to(x.dtype), kept


def _bernoulli(draws: FixedDraws, result: Tensor, given: Arguments) -> Tensor:
    return result.copy_(draws.is_true(result, given.get("p", given["self"])))


def _chosen(draws: FixedDraws, result: Tensor, given: Arguments) -> Tensor:
    """Returns numbers of categories; with replacement by the distribution function, else by a race between them."""
    weights = given["self"].detach()
    if given["replacement"] or result.shape[-1] == 1:
        sums = weights.double().cumsum(-1)
        chosen = draws.quantiles(result, apart=False).double()
        return result.copy_(torch.searchsorted(sums, chosen * sums[..., -1:]))
    times = -draws.quantiles(weights).log() / weights
    return result.copy_(times.argsort(-1)[..., : result.shape[-1]])


def _dirichlet(draws: FixedDraws, result: Tensor, given: Arguments) -> Tensor:
    parts = _gamma(draws.quantiles(result), given["self"])
    return result.copy_(parts / parts.sum(-1, keepdim=True))


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("rand", "rand_like"), _by_quantile(lambda u, _: u)),
    **dict.fromkeys(("randn", "randn_like"), _by_quantile(lambda u, _: _normal_quantile(u))),
    **dict.fromkeys(("randint", "randint_like", "random_"), _by_quantile(_whole_numbers, apart=False)),
    "uniform_": _by_quantile(lambda u, a: a["from"] + (a["to"] - a["from"]) * u),
    **dict.fromkeys(("normal_", "normal"), _by_quantile(lambda u, a: a["mean"] + a["std"] * _normal_quantile(u))),
    "exponential_": _by_quantile(lambda u, a: -u.log() / a["lambd"]),
    **dict.fromkeys(("bernoulli_", "bernoulli"), _bernoulli),
    "poisson": _by_quantile(
        lambda u, a: (a["self"] + a["self"].sqrt() * _normal_quantile(u)).round().clamp(min=0), apart=False
    ),
    "binomial": _by_quantile(_binomial, apart=False),
    "_standard_gamma": _by_quantile(lambda u, a: _gamma(u, a["self"])),
    "_sample_dirichlet": _dirichlet,
    "multinomial": _chosen,
    "native_dropout": _dropout,
    "randperm": lambda draws, result, _: result.copy_(draws.permutation(len(result))),
}
