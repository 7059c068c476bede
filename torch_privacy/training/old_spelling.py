# SPDX-License-Identifier: Apache-2.0
"""Refuses the keywords that `PrivateTraining` had before its settings were grouped, with the new spelling."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

MOVED = {  # old keyword -> its new spelling
    **dict.fromkeys(
        ("collate_fn", "num_workers", "views", "owners", "per_owner", "owner_name", "assume_independent", "budget"),
        "tp.Examples(dataset, {name}=...) in place of {place}",
    ),
    **dict.fromkeys(("microbatch_size", "memory_budget"), "performance=tp.Performance({name}=...)"),
    "clip_schedule": "clipping=tp.Flat(1.0).scheduled(clip_schedule)",
    "jacobian": "clipping=tp.Sketched(32, clip_norm=1.0)",
    "not_for_release": "a setting of clipping=tp.Sketched(..., not_for_release=True) alone; leave it out otherwise",
    "perturbation": "clipping=tp.GEP(...)",
}

ELSEWHERE = {  # name in another library -> what it is here
    **dict.fromkeys(("max_grad_norm", "l2_norm_clip", "l2_clip_norm", "clip_norm"), "clipping=tp.Flat(clip_norm=...)"),
    **dict.fromkeys(("epsilon", "target_eps", "eps"), "target_epsilon=..."),
    **dict.fromkeys(("target_delta",), "delta=..."),
    **dict.fromkeys(("sigma", "noise", "noise_scale", "stddev"), "noise_multiplier=..."),
    **dict.fromkeys(("batch_size", "lot_size", "logical_batch_size"), "expected_batch_size=..."),
    **dict.fromkeys(("sample_rate", "sampling_rate", "sampling_probability"), "expected_batch_size=q * n"),
    **dict.fromkeys(("steps", "max_steps"), "num_steps=..."),
    **dict.fromkeys(
        ("max_physical_batch_size", "physical_batch_size"), "performance=tp.Performance(microbatch_size=...)"
    ),
    "compile": "left out: compiled steps were slower, and no version has them any more",
}


def hint_for(name: str, known: Collection[str]) -> str:
    """Returns what an unknown keyword may have meant, in parentheses; empty if nothing is near."""
    if close := get_close_matches(name, ELSEWHERE, 1, cutoff=0.8):
        return f" (here it is {ELSEWHERE[close[0]]})"
    close = get_close_matches(name, known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def refuse_unknown(function: Callable[..., Any], where: str, unknown: Mapping[str, Any]) -> None:
    """Raises a ``TypeError`` for keywords that the function does not have; for former ones with the new spelling."""
    others = [name for name in unknown if name not in MOVED]
    if others:
        known = [p.name for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
        raise TypeError(f"{where}() got an unexpected keyword argument {others[0]!r}{hint_for(others[0], known)}")
    refuse_moved(where, unknown)


def refuse_moved(where: str, given: Collection[str], place: str = "dataset") -> None:
    """Raises a ``TypeError`` with the new spelling for former keywords among those given."""
    new = [f"{name}= is now {MOVED[name].format(name=name, place=place)}" for name in given if name in MOVED]
    if new:
        raise TypeError(f"{where}: {'; '.join(new)}.")
