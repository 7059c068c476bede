# SPDX-License-Identifier: Apache-2.0
"""Runs a model without random numbers: in eval mode, and with what is still drawn replaced by its mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..support.replay import in_eval, torch_generators


class RandomNumbers(Enum):
    """The treatment of random numbers in a run."""

    AS_DRAWN = "as drawn"
    EVAL_MODE = "eval mode"
    MEANS = "eval mode, with means in place of random numbers"


@contextmanager
def without_random_numbers(model: nn.Module, random: RandomNumbers) -> Iterator[None]:
    """Puts the model in eval mode and replaces random numbers by their means, as far as ``random`` asks for it."""
    with ExitStack() as stack:
        if random is not RandomNumbers.AS_DRAWN:
            stack.enter_context(in_eval([*model.modules()]))
        if random is RandomNumbers.MEANS:
            stack.enter_context(Means())
        yield


class Means(TorchDispatchMode):
    """Replaces random numbers by their means, and dropout by the identity; torch's generators do not advance."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mean = _MEANS.get(func.overloadpacket.__name__) if torch.Tag.nondeterministic_seeded in func.tags else None
        if mean is None:
            return func(*args, **kwargs)
        before = torch_generators()
        try:
            return mean(func, args, kwargs)
        finally:
            for generator, state in before:
                generator.set_state(state)


def _filled(value: Callable[..., float]) -> Callable:
    """Returns the replacement for a function that fills its first argument."""
    return lambda func, args, kwargs: args[0].fill_(value(*args[1:]))


def _made(value: float) -> Callable:
    """Returns the replacement for a factory, whose tensor is filled with ``value``."""
    return lambda func, args, kwargs: func(*args, **kwargs).fill_(value)


def _bernoulli(func: Any, args: Any, kwargs: Any) -> Tensor:
    p = args[1] if len(args) > 1 else 0.5
    return args[0].copy_(p) if isinstance(p, Tensor) else args[0].fill_(p)


def _normal(func: Any, args: Any, kwargs: Any) -> Tensor:
    return func(*args, **kwargs).copy_(args[0]) if isinstance(args[0], Tensor) else func(*args, **kwargs).fill_(args[0])


def _whole_numbers(func: Any, args: Any, kwargs: Any) -> Tensor:
    bounds = [value for value in args if type(value) is int]
    return func(*args, **kwargs).fill_(sum(bounds[:2]) // 2)


_MEANS: dict[str, Callable] = {
    "bernoulli_": _bernoulli,
    "bernoulli": lambda func, args, kwargs: args[0].clone() if len(args) < 2 else torch.full_like(args[0], args[1]),
    "normal_": _filled(lambda mean=0.0, *_: mean),
    "uniform_": _filled(lambda low=0.0, high=1.0, *_: (low + high) / 2),
    "exponential_": _filled(lambda rate=1.0, *_: 1 / rate),
    "native_dropout": lambda func, args, kwargs: (args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)),
    "multinomial": lambda func, args, kwargs: args[0].topk(args[1] if len(args) > 1 else kwargs["num_samples"]).indices,
    "normal": _normal,
    "poisson": lambda func, args, kwargs: args[0].clone(),
    "randperm": lambda func, args, kwargs: (found := func(*args, **kwargs)).copy_(
        torch.arange(len(found), device=found.device)
    ),
    **dict.fromkeys(("randint", "randint_like", "random_"), _whole_numbers),
    **dict.fromkeys(("randn", "randn_like"), _made(0.0)),
    **dict.fromkeys(("rand", "rand_like"), _made(0.5)),
}
