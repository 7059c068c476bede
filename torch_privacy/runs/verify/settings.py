# SPDX-License-Identifier: Apache-2.0
"""Compares the releases of a run with each other's lists, and with the settings beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from math import inf
from typing import Any

from torch_privacy import privacy
from torch_privacy.privacy.compose import relation_of
from torch_privacy.privacy.spent import ALWAYS_PUBLIC, CHOICE_OF_SETTINGS, NEVER_COVERED
from torch_privacy.runs.verify.evidence import Evidence, lacking, total
from torch_privacy.runs.verify.finding import ROUNDED, Finding, agrees, differs, equal, is_same, judged, unchecked
from torch_privacy.support.units import ITEM, ONE_EXAMPLE, USES, owner_in_words

NAMES = {  # of settings -> of the statement
    "noise_multiplier": "noise_multiplier",
    "num_steps": "num_steps_planned",
    "expected_batch_size": "expected_batch_size",
    "num_examples": "num_examples",
    "num_owners": "num_owners",
    "num_canaries": "num_canaries",
    "target_epsilon": "target_epsilon",
    "delta": "delta",
}
OF_COMMAND = ("target_epsilon", "delta")  # those of a command's settings that a training takes as they are
PLAIN = (privacy.SubsampledGaussian, privacy.TruncatedGaussian, privacy.BandedGaussian, privacy.SubsampledGEP)
IN_BINS = (privacy.BallsAndBins, privacy.LaterBatch)


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Yields whether statement, ledger, results and settings speak of the same releases."""
    yield from _releases(evidence)
    yield from _size(evidence.statement)
    yield from _data_budget(evidence)
    yield from _relation(evidence)
    yield from _words(evidence)
    yield from _privacy(evidence)
    if evidence.results is not None:
        yield from _results(evidence)
    if evidence.search is not None:
        for name in ("epsilon", "delta", "noise_multiplier"):
            yield equal(f"results.json: {name}", evidence.search[name], evidence.statement[name], "the statement")
    if evidence.settings is not None:
        yield from _settings(evidence.settings, evidence)


def _releases(evidence: Evidence) -> Iterator[Finding]:
    made, subject = evidence.made, "releases of the ledger"
    if evidence.ledger is None:
        yield unchecked(subject, "there is no ledger that can be read")
    else:
        yield _same_releases(subject, made, evidence.ledger.events, "the ledger")
    if missing := lacking(evidence.priced, made):
        yield differs("all releases are priced", f"{missing.total()} of {total(made)} are not priced")
    if missing := lacking(made, evidence.prior):
        yield differs("prior releases", f"{missing.total()} of them are not among the releases")
    if not evidence.is_search:
        yield from _steps(evidence)


def _same_releases(subject: str, stated: Any, found: Any, source: str) -> Finding:
    less, more = lacking(stated, found), lacking(found, stated)
    parts = [f"lacks {less.total()}"] * bool(less) + [f"has {more.total()} others"] * bool(more)
    wrong = f"{' and '.join(parts)}, compared with {source} ({total(found)} releases)"
    return judged(subject, not parts, f"{total(stated)} releases", wrong)


def _steps(evidence: Evidence) -> Iterator[Finding]:
    """Yields whether there is a release for each step, with the noise and the sampling that are stated."""
    statement, prior = evidence.statement, total(evidence.prior)
    steps, planned = statement.get("num_steps_made"), statement["num_steps_planned"]
    if steps is None:
        yield unchecked("a release for each step", "the number of steps made is not stated")
        return
    subject, others = "a release for each step", total(evidence.made) - prior - steps
    if others < 0:
        yield differs(subject, f"{steps} steps and {prior} prior releases, but {total(evidence.made)} releases")
    else:
        more = f"; {others} more, of steps that were lost or are yet to be repeated" if others else ""
        yield agrees(subject, f"{steps} steps, {prior} prior releases{more}")
    if steps > planned:
        yield differs("steps made", f"{steps}, and {planned} were planned")
    stop = statement.get("stop") or {}
    is_declared = stop.get("independent_of_data") and stop.get("reason")
    if not is_declared and total(evidence.priced) < prior + planned and not _is_spent(evidence):
        detail = f"{total(evidence.priced)} of {prior + planned}, and the stop was not declared"
        yield differs("all planned steps are priced", detail)
    subject = "noise and sampling of each step"
    kinds = [(_fits(event, statement), count) for event, count in _without_prior(evidence)]
    wrong = sum(count for fits, count in kinds if fits is False)
    unknown = sum(count for fits, count in kinds if fits is None)
    if wrong:
        yield differs(subject, f"{wrong} releases have other noise or another sampling probability than is stated")
    elif unknown:
        yield unchecked(
            subject, f"{unknown} releases have no single noise multiplier, or noise or batches have a schedule"
        )
    else:
        yield agrees(subject, f"noise multiplier {statement['noise_multiplier']:.6g}")


def _is_spent(evidence: Evidence) -> bool:
    """True if a further step would exceed the target or the budget of the run, which ends a training at any step."""
    statement = evidence.statement
    if "data_budget" in statement:
        return False  # all steps are reserved
    limits = [(statement["target_epsilon"], statement["delta"])]
    limits += [(budget["epsilon"], budget["delta"])] if (budget := statement.get("budget")) else []
    return any(
        privacy.compose([*evidence.priced, (event, 1)]).epsilon_high(delta) > epsilon * (1 - ROUNDED)
        for epsilon, delta in limits
        if epsilon is not None and delta is not None
        for event, _ in _without_prior(evidence)
        if not isinstance(event, privacy.LaterBatch)
    )


def _without_prior(evidence: Evidence) -> list[tuple[privacy.Event, int]]:
    prior = dict.fromkeys((event for event, _ in evidence.prior), 0)
    for event, count in evidence.prior:
        prior[event] += count
    left = [(event, count - prior.get(event, 0)) for event, count in evidence.made]
    return [(event, count) for event, count in left if count > 0]


def _fits(event: privacy.Event, statement: dict[str, Any]) -> bool | None:
    """True if a release has the stated noise and sampling probability; None if it has no such numbers."""
    rule, stated, q = statement["clipping"]["rule"], statement["noise_multiplier"], statement["sampling_probability"]
    one: Any = event.epoch if isinstance(event, privacy.LaterBatch) else event
    if not isinstance(event, PLAIN + IN_BINS) or statement.keys() & {"noise_schedule", "size_schedule"}:
        return None
    probability = 1 / one.num_bins if isinstance(event, IN_BINS) else one.sampling_probability
    noises = [stated, stated / math.sqrt(2)] if "GEP" in rule else [stated]  # two sums in one release
    return math.isclose(probability, q, rel_tol=1e-6) and any(
        math.isclose(one.noise_multiplier, noise, rel_tol=1e-9) for noise in noises
    )


def _size(statement: dict[str, Any]) -> Iterator[Finding]:
    count = statement.get("num_owners", statement.get("num_examples"))
    assert count is not None  # by the schema
    found = statement["expected_batch_size"] / count
    yield equal("sampling probability", statement["sampling_probability"], found, "batch size over number")
    if statement["delta"] is not None:
        most = f"{statement['delta']:g}, and 1/n is {1 / count:.3g}"
        yield judged("delta is below one over the number of units", statement["delta"] < 1 / count, most)
    if (factors := statement.get("noise_factor")) is not None:
        made = factors["made"]
        needed = math.prod(value for name, value in factors.items() if name != "made")
        shown = f"a factor of {made:.8g}; needed is {needed:.8g}"
        yield judged("noise covers its rounding", made >= needed * (1 - ROUNDED), shown)


def _data_budget(evidence: Evidence) -> Iterator[Finding]:
    """Yields whether the budget of the data can be what is stated of it, given what this run has spent."""
    statement = evidence.statement
    if (stated := statement.get("data_budget")) is None:
        return
    of_run, unit = statement.get("budget") or stated, evidence.made[0][0].unit if evidence.made else None
    spent, drawn = privacy.compose(evidence.priced).epsilon(stated["delta"]), stated["epsilon_drawn"]
    wrong = {
        "it is not the budget of the run": any(stated[name] != of_run[name] for name in ("epsilon", "delta")),
        f"drawn is {drawn:.6g}, and this run alone spent at least {spent.low:.6g}": drawn < spent.low * (1 - ROUNDED),
        "more is drawn than it has": drawn > stated["epsilon"] * (1 + ROUNDED),
        "more runs have not ended than there are": stated.get("num_unsettled", 0) > stated.get("num_runs", inf),
        "it is of another unit": unit is not None and stated.get("unit", unit) != unit,
    }
    found = [reason for reason, is_wrong in wrong.items() if is_wrong]
    shown = f"at most {drawn:.6g} of {stated['epsilon']:g} drawn; this run alone: at most {spent.high:.6g}"
    yield judged("budget of the data", not found, shown, "; ".join(found))


def _relation(evidence: Evidence) -> Iterator[Finding]:
    statement, events = evidence.statement, [event for event, _ in evidence.priced]
    if not events:
        return
    relation = relation_of({event.neighboring_relation for event in events}).value
    yield equal("neighboring relation", statement["neighboring_relation"], relation, "the releases")
    samplers = list(dict.fromkeys(event.sampler for event in events))
    is_known = evidence.is_search or statement["sampler"] in samplers
    wrong = f"stated {statement['sampler']!r}, and the releases have {', '.join(samplers)}"
    yield judged("sampler", is_known, statement["sampler"], wrong)
    owner, unit = statement.get("owner", ONE_EXAMPLE), events[0].unit
    yield equal("what is protected", owner, unit, "the price of the releases")
    subject, text = "unit", statement["unit"]
    if "owner" in statement:
        wanted = [owner_in_words(owner, statement.get("examples_per_owner", 0), use) for use in USES]
        yield equal(subject, text, text if text in wanted else wanted[0], "the number of examples per owner")
    elif text != ITEM:
        yield unchecked(subject, f"{text}: what an example of the data is, only its owner knows")
    else:
        yield agrees(subject, text)


def _words(evidence: Evidence) -> Iterator[Finding]:
    """Yields whether the lists of what is public and not covered have what every statement has."""
    statement = evidence.statement
    size = "num_owners" if "owner" in statement else "num_examples"
    never = [text for text in NEVER_COVERED if text != CHOICE_OF_SETTINGS or not evidence.is_search]
    for name, least in (("treated_as_public", [size, *ALWAYS_PUBLIC]), ("not_covered", never)):
        missing = "; ".join(text for text in least if text not in statement[name])
        subject = f"{name.replace('_', ' ')}, as in every statement"
        yield judged(subject, not missing, f"{len(statement[name])} entries", f"lacks {missing}")


def _privacy(evidence: Evidence) -> Iterator[Finding]:
    """Yields whether a training that says it is private has no sign of the contrary."""
    statement, settings = evidence.statement, evidence.settings or {}
    signs = {
        "it has a warning": "warning" in statement,
        "settings.json has a test seed": settings.get("test_seed") is not None,
        "settings.json says that it is not for release": settings.get("not_for_release") is True,
        "it has canaries": bool(statement.get("num_canaries") or settings.get("num_canaries")),
        "the ledger is that of an audit": evidence.ledger is not None and evidence.ledger.purpose == "audit",
        "the ledger says that its releases are not": evidence.ledger is not None and bool(evidence.ledger.warning),
    }
    if not statement["private"]:
        yield agrees("it says that it is NOT PRIVATE", statement["warning"])
        return
    found = [sign for sign, there in signs.items() if there]
    yield judged("it says that it is private", not found, "no sign of the contrary", "; ".join(found))


def _results(evidence: Evidence) -> Iterator[Finding]:
    results, statement = evidence.results, evidence.statement
    assert results is not None
    from torch_privacy.privacy.summary import releases_from_json

    priced = releases_from_json(results["privacy"])
    is_of_today = "releases_priced" in statement or "attacker" in statement
    if is_of_today or total(priced) == total(evidence.made):
        yield _same_releases("results.json: releases", priced, evidence.priced, "the statement")
    elif missing := lacking(priced, evidence.made):
        yield differs("results.json: releases", f"lacks {missing.total()} of those in the statement")
    count = statement.get("num_owners", statement.get("num_examples"))
    yield equal("results.json: size of the data", results["num_examples"], count, "the statement")
    for name, of_statement in (("num_steps", "num_steps_planned"), ("num_steps_made", "num_steps_made")):
        if name in results and of_statement in statement:
            yield equal(f"results.json: {name}", results[name], statement[of_statement], "the statement")


def _settings(settings: dict[str, Any], evidence: Evidence) -> Iterator[Finding]:
    statement, run = evidence.statement, evidence.statement.get("run") or {}
    names = NAMES if "fixed" in settings else {name: name for name in OF_COMMAND}
    if "data_budget" in statement and "target_epsilon" in names:  # the target was met when the budget was drawn from
        names = {name: of_statement for name, of_statement in names.items() if name != "target_epsilon"}
        yield from _target(settings.get("target_epsilon"), statement["epsilon"])
    for name, of_statement in names.items():
        if settings.get(name) is not None or (name in settings and statement.get(of_statement) is not None):
            yield equal(f"settings.json: {name}", settings[name], statement.get(of_statement), "the statement")
    fixed = settings.get("fixed", {})
    if isinstance(rule := fixed.get("clipping"), str):
        yield from _rule(rule, statement["clipping"])
    others = [name for name in fixed if name in settings and name in NAMES and not is_same(fixed[name], settings[name])]
    if others:
        yield differs("settings.json: fixed settings", f"{', '.join(others)} differ within the file")
    if "fixed" in settings:
        counts = len(fixed.get("prior_releases", [])), total(evidence.prior)
        if counts[1] or "attacker" in statement:  # earlier statements do not list them
            yield equal("settings.json: prior releases", *counts, "the statement")
    if "settings" in run:
        ours = {name: value for name, value in settings.items() if name != "experiment"}
        yield equal("settings.json: those of the statement", ours, run["settings"], "the statement")
        yield equal("settings.json: experiment", settings.get("experiment"), run.get("experiment"), "the statement")


def _rule(text: str, stated: dict[str, Any]) -> Iterator[Finding]:
    """Yields whether the clipping rule is that of the settings, of which they have the text."""
    found = re.fullmatch(r"Flat\(clip_norm=([0-9.e+-]+)\)", text)
    if found is None:  # other rules have several norms, or change theirs
        return
    is_same_rule = stated["rule"] == "Flat" and float(stated.get("clip_norm", "nan")) == float(found[1])
    yield judged("settings.json: clipping", is_same_rule, text, f"{text}, and the statement has {stated}")


def _target(target: float | None, epsilon: dict[str, Any] | None) -> Iterator[Finding]:
    """Yields whether a target is met that the statement does not repeat."""
    if target is not None and epsilon is not None and epsilon["high"] is not None:
        shown = f"{target:g}; spent: at most {epsilon['high']:.6g}"
        yield judged("settings.json: target_epsilon", epsilon["high"] <= target * (1 + 1e-6), shown)
