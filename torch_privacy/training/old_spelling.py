# SPDX-License-Identifier: Apache-2.0
"""Refuses the keywords that `PrivateTraining` had before its settings were grouped, with the new spelling."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any

from ..mechanisms.estimated_norms.settings import Sketched

MOVED = {  # old keyword -> where it is now
    **dict.fromkeys(
        ("collate_fn", "num_workers", "views", "owners", "per_owner", "owner_name", "assume_independent", "budget"),
        "Examples",
    ),
    **dict.fromkeys(("microbatch_size", "memory_budget"), "Performance"),
    **dict.fromkeys(("jacobian", "perturbation", "not_for_release", "clip_schedule"), "clipping"),
}

NEEDLESS = (
    "not_for_release= is a setting of tp.Sketched(...) alone, where norms are estimated. Leave it out: exact norms "
    "have a price for all noise. A test_seed= marks a run as NOT PRIVATE."
)

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
}


def hint_for(name: str, known: Collection[str]) -> str:
    """Returns what an unknown keyword may have meant, in parentheses; empty if nothing is near."""
    if name in ELSEWHERE:
        return f" (here it is {ELSEWHERE[name]})"
    close = get_close_matches(name, known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def refuse_unknown(function: Callable[..., Any], where: str, clipping: Any, unknown: Mapping[str, Any]) -> None:
    """Raises a ``TypeError`` for keywords that the function does not have; for former ones with the new spelling."""
    others = [name for name in unknown if name not in MOVED]
    if others:
        known = [p.name for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
        raise TypeError(f"{where}() got an unexpected keyword argument {others[0]!r}{hint_for(others[0], known)}")
    if unknown:
        raise TypeError(f"{where}: {moved(unknown, clipping)}")


def moved(old: Mapping[str, Any], clipping: Any = None, place: str = "dataset") -> str:
    """Returns the sentence that says how former keywords are spelled now, ready to copy."""
    if "not_for_release" in old and old.get("jacobian") is None and not isinstance(clipping, Sketched):
        others = {name: value for name, value in old.items() if name != "not_for_release"}
        return f"{moved(others, clipping, place)} {NEEDLESS}" if others else NEEDLESS
    texts = {
        "Examples": f"tp.Examples(dataset, {{}}) in place of {place}",
        "Performance": "performance=tp.Performance({})",
    }
    new = []
    for place, text in texts.items():
        if own := [f"{name}={_written(name, value)}" for name, value in old.items() if MOVED[name] == place]:
            new.append(text.format(", ".join(own)))
    if "clipping" in map(MOVED.get, old):
        new.append(f"clipping={_clipping(old, clipping)}")
    listed, (has, them) = ", ".join(f"{name}=" for name in old), ("has", "it") if len(old) == 1 else ("have", "them")
    return f"{listed} {has} moved. Leave {them} out, and pass {' and '.join(new)}."


def refuse_moved(where: str, given: Mapping[str, Any], place: str) -> None:
    """Raises a ``TypeError`` with the new spelling for former keywords among those given to a bridge."""
    if old := {name: value for name, value in given.items() if name in MOVED}:
        raise TypeError(f"{where}: {moved(old, given.get('clipping'), place)}")


def _clipping(old: Mapping[str, Any], clipping: Any) -> str:
    """Returns the new value of ``clipping``."""
    if (perturbation := old.get("perturbation")) is not None:
        return f"tp.{type(perturbation).__name__}(...)"
    if isinstance(clipping, Sketched) and old.get("not_for_release"):
        clipping = replace(clipping, not_for_release=True)
    rule = _rule(clipping)
    if (sketch := old.get("jacobian")) is not None:
        count = getattr(sketch, "num_projections", 32)
        more = ", not_for_release=True" if old.get("not_for_release") else ""
        rule = f"tp.Sketched({count}, clip_norm={getattr(clipping, 'clip_norm', 1.0)}{more})"
    return rule + (".scheduled(clip_schedule)" if old.get("clip_schedule") is not None else "")


def _rule(clipping: Any) -> str:
    """Returns a rule as it was written, without arguments that have their default."""
    if not is_dataclass(clipping):
        return "tp.Flat(1.0)"
    given = [f for f in fields(clipping) if f.repr and getattr(clipping, f.name) != f.default]
    arguments = ", ".join(f"{f.name}={getattr(clipping, f.name)!r}" for f in given)
    return f"tp.{type(clipping).__name__}({arguments})"


def _written(name: str, value: Any) -> str:
    """Returns a value as it can be copied: numbers and texts as they are, functions by name, others as the keyword."""
    if isinstance(value, (int, float, str, type(None))):
        return repr(value)
    known = getattr(value, "__name__", "")
    return known if known.isidentifier() else name
