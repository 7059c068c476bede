# SPDX-License-Identifier: Apache-2.0
"""Prices the releases of a run again: by both engines, and by dp-accounting if it is installed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import inf, isfinite
from typing import Any

from torch_privacy import privacy
from torch_privacy.privacy.rounding import short
from torch_privacy.privacy.summary import FALSE_POSITIVE_RATES, Releases, limit_of, moments_or_none, releases_as_json
from torch_privacy.runs.verify.evidence import Evidence
from torch_privacy.runs.verify.finding import (
    Finding,
    agrees,
    bracketed,
    contradiction,
    differs,
    equal,
    gap,
    is_close,
    judged,
    unchecked,
)

ENGINES = ("contour", "lattice")
WITNESS = "dp-accounting"
LOOSENESS = 0.05  # by which dp-accounting's upper bound may lie above the truth; in tests it is 0.01
MOST_EVENTS = 100  # different ones that the other accountant composes


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Yields how the stated prices compare with those computed again."""
    statement, priced = evidence.statement, tuple(evidence.priced)
    profile, delta = privacy.compose(priced), statement["delta"]
    yield from _epsilons(statement, priced, evidence.made)
    if "attacker" in statement:
        yield from _attacker(statement["attacker"], profile)
        yield from _by_another_engine(statement["attacker"], priced)
    else:
        yield unchecked("mu and true positive rates", "not stated; the version that wrote it had none")
    if evidence.results is not None:
        yield from _results(evidence.results["privacy"], profile, statement)
    if delta is not None:
        yield from _limits(statement, profile, delta)


def _epsilons(statement: dict[str, Any], priced: Releases, made: Releases) -> Iterator[Finding]:
    delta = statement["delta"]
    if delta is None:
        yield unchecked("epsilon", "no delta is stated, and so no epsilon")
        return
    at = f"epsilon at delta = {short(delta)}"
    yield bracketed(at, statement["epsilon"], privacy.compose(priced).epsilon(delta))
    for engine in ENGINES:
        subject = f"epsilon by the {engine} engine"
        found = _by_engine(tuple(priced), engine, delta)
        if isinstance(found, str):
            yield unchecked(subject, found)
        else:
            yield _overlap(subject, [(statement["epsilon"], found)])
    yield _by_witness(f"epsilon by {WITNESS}", statement["epsilon"], tuple(priced), delta)
    of_steps = privacy.compose(made).epsilon(delta)
    yield bracketed("epsilon of the steps made", statement.get("epsilon_of_steps_made"), of_steps)


def _overlap(subject: str, pairs: Iterable[tuple[dict[str, Any] | None, privacy.Bracket[float]]]) -> Finding:
    """Compares stated intervals with those of an engine that may bracket less tightly."""
    known = [(stated, found) for stated, found in pairs if stated is not None]
    reasons = [reason for stated, found in known if (reason := contradiction(stated, found))]
    if reasons or not known:
        return differs(subject, reasons[0]) if reasons else unchecked(subject, "not stated")
    gaps = [
        (abs(high - found.high) / found.high if found.high else 0.0, high, found.high)
        for high, found in ((inf if stated["high"] is None else stated["high"], found) for stated, found in known)
    ]
    _, stated_high, found_high = max(gaps, key=lambda one: one[0] if isfinite(one[0]) else 0.0)
    return agrees(subject, f"[{known[0][1].low:.6g}, {known[0][1].high:.6g}]; {gap(stated_high, found_high)}")


@lru_cache(maxsize=64)
def _by_engine(releases: tuple[tuple[privacy.Event, int], ...], engine: str, delta: float) -> Any:
    """Returns the bracket of one engine, or why it has none."""
    try:
        return privacy.compose(releases, engine).epsilon(delta)
    except (ValueError, ArithmeticError, MemoryError):
        return "this engine cannot resolve these releases"


def _by_witness(subject: str, stated: Any, releases: tuple[tuple[privacy.Event, int], ...], delta: float) -> Finding:
    """Compares with the upper bound of dp-accounting, which is nearly tight."""
    found = _witness(releases, delta)
    if isinstance(found, str):
        return unchecked(subject, found)
    if stated is None or stated["high"] is None:
        return unchecked(subject, f"at most {found:.6g}; stated is no finite number")
    difference = gap(stated["high"], found)
    if stated["low"] is not None and stated["low"] > found * (1 + 1e-6) + 1e-6:
        return differs(subject, f"stated at least {stated['low']:.6g}; there it is at most {found:.6g} ({difference})")
    if stated["high"] < found * (1 - LOOSENESS) - 1e-3:
        return differs(subject, f"stated at most {stated['high']:.6g}; there it is {found:.6g} ({difference})")
    return agrees(subject, f"at most {found:.6g}; {difference}")


@lru_cache(maxsize=64)
def _witness(releases: tuple[tuple[privacy.Event, int], ...], delta: float) -> float | str:
    """Returns the epsilon of dp-accounting, or why it has none."""
    if len({event for event, _ in releases}) > MOST_EVENTS:
        return f"it is not asked for more than {MOST_EVENTS} different events"
    try:
        from dp_accounting.pld import PLDAccountant

        return float(PLDAccountant().compose(privacy.to_dp_event(releases)).get_epsilon(delta))
    except ImportError:
        return "it is not installed: pip install dp-accounting"
    except Exception as error:  # any error of another library
        reason = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
        return f"it has no price for them ({reason})"


def _attacker(stated: dict[str, Any], profile: privacy.Profile) -> Iterator[Finding]:
    mu = stated["mu"]
    yield bracketed("mu", mu, profile.mu(mu["errors_at_least"]))
    yield bracketed("regret of mu", mu["regret"], profile.regret(mu["errors_at_least"]), digits=4)
    yield bracketed("largest advantage", stated["advantage"], profile.advantage(), digits=4)
    for rate in stated["true_positive_rates"]:
        alpha = rate["false_positive_rate"]
        subject = f"true positive rate at {100 * alpha:g} %"
        yield bracketed(subject, rate, profile.true_positive_rate(alpha), digits=5)
    rates = {rate["false_positive_rate"] for rate in stated["true_positive_rates"]}
    if missing := [f"{100 * rate:g} %" for rate in FALSE_POSITIVE_RATES if rate not in rates]:
        yield differs("true positive rates", f"those at {', '.join(missing)} are missing")


def _by_another_engine(stated: dict[str, Any], priced: Releases) -> Iterator[Finding]:
    """Compares the whole curve with that of the lattice, or of the contour where the lattice has none."""
    subject, rates = "mu and rates by the {} engine", stated["true_positive_rates"]
    for engine in reversed(ENGINES):
        profile = privacy.compose(priced, engine)
        try:
            mu = profile.mu(stated["mu"]["errors_at_least"])
            again = [profile.true_positive_rate(rate["false_positive_rate"]) for rate in rates]
        except (ValueError, ArithmeticError, MemoryError):
            continue
        yield _overlap(subject.format(engine), [(stated["mu"], mu), *zip(rates, again, strict=True)])
        return
    yield unchecked(subject.format("other"), "it cannot resolve these releases")


def _results(stated: dict[str, Any], profile: privacy.Profile, statement: dict[str, Any]) -> Iterator[Finding]:
    """Yields whether results.json has the numbers of the statement, or those computed again where it has none."""
    delta = stated["delta"]
    yield bracketed("results.json: epsilon", stated["epsilon"], profile.epsilon(delta))
    if statement["delta"] is not None:
        yield equal("results.json: delta", delta, statement["delta"], "the statement")
        yield equal("results.json: epsilon, again", stated["epsilon"], statement["epsilon"], "the statement")
    relation = profile.neighboring_relation.value
    yield equal("results.json: neighboring relation", stated["neighboring_relation"], relation, "the ledger's events")
    if "attacker" in statement and "mu" in stated["attacker"]:
        same = "results.json: mu and rates"
        yield equal(same, stated["attacker"], statement["attacker"], "the statement")
    yield from _others(stated, profile, delta)


def _others(stated: dict[str, Any], profile: privacy.Profile, delta: float) -> Iterator[Finding]:
    """Yields whether results.json has the sampling of the releases, and the epsilons that other accountants find."""
    again = {"sampler": profile.sampler, **releases_as_json(profile.events)}
    for name in ("sampler", "noise_multiplier", "sampling_probability", "num_steps"):
        if name in stated:
            yield equal(f"results.json: {name}, priced", stated[name], again.get(name), "the list of releases")
    limit, moments = limit_of(profile.events), moments_or_none(profile.events, delta)
    known = {
        ("clt", "epsilon"): None if limit is None else limit.epsilon(delta),
        ("clt", "mu"): None if limit is None else limit.mu,
        ("moments_accountant", "epsilon"): moments,
    }
    for (kind, name), found in known.items():
        number, subject = stated.get(kind, {}).get(name), f"results.json: {name} of {kind}"
        if number is not None and found is not None:
            shown = f"{number:.6g}; {gap(number, found)}"
            yield judged(subject, is_close(number, found), shown)


def _limits(statement: dict[str, Any], profile: privacy.Profile, delta: float) -> Iterator[Finding]:
    """Yields whether epsilon stays within the target and the budget."""
    target, budget = statement["target_epsilon"], statement.get("budget")
    limits = [("target", target, delta)] if target is not None else []
    limits += [("budget", budget["epsilon"], budget["delta"])] if budget else []
    for name, most, at in limits:
        low, high = profile.epsilon(at)
        subject, shown = f"{name} of epsilon {most:g} at delta = {at:g}", f"spent: at most {high:.6g}"
        if low > most * (1 + 1e-9):
            yield differs(subject, f"exceeded: at least {low:.6g} was spent")
        elif high > most * (1 + 1e-6):
            yield unchecked(subject, f"certified is at most {high:.6g}, and at least {low:.6g}")
        else:
            yield agrees(subject, shown)
