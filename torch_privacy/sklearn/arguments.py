# SPDX-License-Identifier: Apache-2.0
"""Names what is wrong with an argument that an estimator does not have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar, cast

Class = TypeVar("Class", bound=type)

OF_OTHERS = {  # arguments of scikit-learn's estimators, and why ours do not have them
    "class_weight": (
        "such weights are usually computed from how many examples each class has, which no epsilon covers. For a rare "
        "class compare predict_proba with a threshold of your own"
    ),
    "warm_start": "a further fit would spend more",
    "early_stopping": "when to stop would be decided by scores on private examples, which no epsilon covers",
    "n_jobs": "one fit is one training",
}


def naming_arguments(of: Class) -> Class:
    """Lets the class say of an unknown argument why there is none, or which one may be meant.

    Its signature, which scikit-learn reads, stays.
    """
    init = cast("Callable[..., None]", of.__init__)
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, *given: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                raise TypeError(f"{of.__name__}: {_why_unknown(name, known)}")
        init(self, *given, **named)

    of.__init__ = checked
    return of


def _why_unknown(name: str, known: list[str]) -> str:
    if name in OF_OTHERS:
        return f"there is no {name}=: {OF_OTHERS[name]}. Leave it out."
    close = get_close_matches(name, known, n=1)
    meant = f" Did you mean {close[0]}=?" if close else f" There are {', '.join(known)}."
    return f"unexpected keyword argument {name!r}.{meant}"
