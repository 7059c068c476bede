# SPDX-License-Identifier: Apache-2.0
"""Compares accountants: their ε for one setting side by side, with the true δ at each."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from time import perf_counter
from typing import Any

from torch_privacy import privacy
from torch_privacy.privacy.summary import Releases, equal_steps
from torch_privacy.support.validate import Refused, strictly_between

CERTIFIED = "torch_privacy"
MOST_STEPS_OF_PRV = 100_000  # with more steps prv-accountant takes minutes and tens of gigabytes
MOST_EPSILON_OF_GRIDS = 200.0  # half a minute at 137, ten minutes and 4 GB at 5e8


@dataclass(frozen=True)
class Setting:
    """Some releases, and the δ of interest."""

    releases: Releases
    delta: float

    @property
    def equal_steps(self) -> tuple[float, float, int]:
        """Noise multiplier, sampling probability and number of equal Poisson-sampled Gaussian steps."""
        steps = equal_steps(self.releases)
        if steps is None:
            raise NotAsked("prices equal Poisson-sampled Gaussian steps alone")
        return steps


@dataclass(frozen=True)
class Claim:
    """One accountant's ε, to compare with the certified interval."""

    accountant: str
    kind: str
    """The nature of the number: certified, interval, upper bound, approximation or not valid."""

    epsilon: float | None
    """The number to report: the upper end if there is one. None if the accountant gave no answer."""

    low: float | None = None
    """The accountant's own lower end, if it has one."""

    true_delta: privacy.Bracket[float] | None = None
    """Certified bounds on the true δ of the releases at ``epsilon``."""

    seconds: float = 0.0
    note: str = ""
    """The reason if there is no answer."""

    def against(self, certified: "Claim") -> str:
        """Returns "below the truth", "a bound", or "within the interval" where neither can be decided."""
        assert certified.low is not None
        assert certified.epsilon is not None
        if self.epsilon is None:
            return ""
        if self is certified:
            return "the interval"
        if self.epsilon < certified.low:
            return "below the truth"
        return "a bound" if self.epsilon >= certified.epsilon else "within the interval"


class NotAsked(Exception):
    """Raised with the reason why an accountant is left out."""


Answer = tuple[float | None, float]  # the accountant's own lower end, and the number to report


def _certified(setting: Setting) -> Answer:
    return _profile(setting).epsilon(setting.delta)


def _profile(setting: Setting) -> privacy.Profile:
    return privacy.compose(setting.releases)


def _dp_accounting(setting: Setting, accountant: Any) -> Answer:
    accountant.compose(privacy.to_dp_event(setting.releases))
    return None, float(accountant.get_epsilon(setting.delta))


def _dp_accounting_pld(setting: Setting) -> Answer:
    from dp_accounting.pld import PLDAccountant

    _check_grid(setting)
    return _dp_accounting(setting, PLDAccountant())


def _dp_accounting_rdp(setting: Setting) -> Answer:
    from dp_accounting.rdp import RdpAccountant

    return _dp_accounting(setting, RdpAccountant())


def _check_grid(setting: Setting) -> None:
    """Raises if the grid of losses of another library would be too long."""
    if _profile(setting).epsilon_high(setting.delta) > MOST_EPSILON_OF_GRIDS:
        raise NotAsked(f"not asked above an epsilon of {MOST_EPSILON_OF_GRIDS:g}: minutes and gigabytes")


def _prv(setting: Setting) -> Answer:
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    noise, probability, num_steps = setting.equal_steps
    _check_grid(setting)
    if num_steps > MOST_STEPS_OF_PRV:
        raise NotAsked(f"not asked above {MOST_STEPS_OF_PRV:,} steps: minutes and gigabytes")
    accountant = PRVAccountant(
        prvs=[PoissonSubsampledGaussianMechanism(probability, noise)],
        max_self_compositions=[num_steps],
        eps_error=0.05,
        delta_error=setting.delta / 1000,
    )
    low, _, high = accountant.compute_epsilon(setting.delta, [num_steps])
    return float(low), float(high)


# The accountants: name -> (nature of the answer, function). A new accountant is one more line here.
ACCOUNTANTS: dict[str, tuple[str, Callable[[Setting], Answer]]] = {
    CERTIFIED: ("certified", _certified),
    "prv-accountant": ("interval", _prv),
    "dp-accounting PLD": ("upper bound", _dp_accounting_pld),
    "dp-accounting RDP": ("upper bound", _dp_accounting_rdp),
    "RDP": ("upper bound", lambda setting: (None, privacy.rdp(setting.releases, setting.delta))),
    "moments accountant": ("upper bound", lambda setting: (None, privacy.moments_of(setting.releases, setting.delta))),
    "strong composition": (
        "upper bound",
        lambda setting: (None, privacy.strong_composition(*setting.equal_steps, setting.delta)),
    ),
    "strong composition 2016": (
        "not valid",
        lambda setting: (
            None,
            privacy.strong_composition(*setting.equal_steps, setting.delta, amplification=privacy.scaled_epsilon),
        ),
    ),
    "CLT": ("approximation", lambda setting: (None, privacy.clt(setting.releases).epsilon(setting.delta))),
}


def compare(releases: Releases, delta: float) -> list[Claim]:
    """Returns every accountant's claim on some releases, the certified bracket first.

    An accountant that is not installed, fails, or does not know such releases has no epsilon, and a note with the
    reason. Times are of one call each, without imports.

    Example:
        >>> certified, *others = compare([(privacy.SubsampledGaussian(0.7, 0.01), 300)], 1e-5)
        >>> [claim.accountant for claim in others if claim.against(certified) == "below the truth"]
        ['CLT']
    """
    strictly_between("compare", 0, 1, delta=delta, hint="The other accountants do not answer at 0.")
    setting = Setting(releases, delta)
    _certified(setting)  # raises if the setting cannot be priced, and fills caches that all share
    return [_ask(name, *ACCOUNTANTS[name], setting) for name in ACCOUNTANTS]


def _ask(name: str, kind: str, ask: Callable[[Setting], Answer], setting: Setting) -> Claim:
    start = perf_counter()
    try:
        low, high = ask(setting)
    except ImportError:
        return Claim(name, kind, None, note=f"not installed: pip install {name.split()[0]}")
    except (NotAsked, Refused) as reason:
        return Claim(name, kind, None, note=str(reason))
    except Exception as error:  # any error of another library becomes the note of its claim
        return Claim(name, kind, None, note=f"failed: {' '.join(str(error).split()) or type(error).__name__}")
    seconds = perf_counter() - start
    true_delta = _profile(setting).delta(high) if isfinite(high) else None
    return Claim(name, kind, high, low, true_delta, seconds)


def as_json(claims: list[Claim]) -> list[dict[str, Any]]:
    """Returns the claims as plain values; null stands for infinity and for unknown values."""

    def plain(value: float | None) -> float | None:
        return None if value is None or value in (inf, -inf) else float(value)

    return [
        {
            "accountant": claim.accountant,
            "kind": claim.kind,
            "epsilon": plain(claim.epsilon),
            "low": plain(claim.low),
            "verdict": claim.against(claims[0]),
            "true_delta": None if claim.true_delta is None else claim.true_delta._asdict(),
            "seconds": claim.seconds,
            "note": claim.note,
        }
        for claim in claims
    ]
