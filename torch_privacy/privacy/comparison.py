# SPDX-License-Identifier: Apache-2.0
"""What every accountant says of one setting, side by side, and what each claim is worth."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from time import perf_counter
from typing import Any

from torch_privacy import privacy

CERTIFIED = "torch_privacy"
MOST_STEPS_OF_PRV = 100_000  # beyond, prv-accountant takes minutes and tens of gigabytes


@dataclass(frozen=True)
class Setting:
    """Equal Poisson-sampled Gaussian steps, neighbors that differ by one example added or removed."""

    noise_multiplier: float
    sampling_probability: float
    num_steps: int
    delta: float

    @property
    def numbers(self) -> tuple[float, float, int]:
        """All but delta, as the accountants take them."""
        return self.noise_multiplier, self.sampling_probability, self.num_steps


@dataclass(frozen=True)
class Claim:
    """One accountant's answer, held against the certified bracket."""

    accountant: str
    kind: str
    """What the number is by its nature: certified, a bracket, an upper bound, an approximation, not valid."""

    epsilon: float | None
    """What one would report: an upper end where there is one. None if the accountant did not answer."""

    low: float | None = None
    """The accountant's own lower end, if it has one."""

    true_delta: privacy.Bracket[float] | None = None
    """Certified bounds on the δ that the releases have at ``epsilon``."""

    seconds: float = 0.0
    note: str = ""
    """Why there is no answer."""

    def against(self, certified: "Claim") -> str:
        """Where the claim lies: "below the truth", "a bound", or "within the bracket", which no one can tell apart."""
        assert certified.low is not None
        assert certified.epsilon is not None
        if self.epsilon is None:
            return ""
        if self is certified:
            return "the bracket"
        if self.epsilon < certified.low:
            return "below the truth"
        return "a bound" if self.epsilon >= certified.epsilon else "within the bracket"


class NotAsked(Exception):
    """An accountant is left out, and why."""


Answer = tuple[float | None, float]  # the accountant's own lower end, and what one would report


def _certified(setting: Setting) -> Answer:
    return _profile(setting).epsilon(setting.delta)


def _profile(setting: Setting) -> privacy.Profile:
    step = privacy.SubsampledGaussian(setting.noise_multiplier, setting.sampling_probability)
    return privacy.compose([(step, setting.num_steps)])


def _clt(setting: Setting) -> Answer:
    return None, privacy.clt(*setting.numbers).epsilon(setting.delta)


def _dp_accounting(setting: Setting, accountant: Any) -> Answer:
    step = privacy.SubsampledGaussian(setting.noise_multiplier, setting.sampling_probability)
    accountant.compose(privacy.to_dp_event([(step, setting.num_steps)]))
    return None, float(accountant.get_epsilon(setting.delta))


def _dp_accounting_pld(setting: Setting) -> Answer:
    from dp_accounting.pld import PLDAccountant

    return _dp_accounting(setting, PLDAccountant())


def _dp_accounting_rdp(setting: Setting) -> Answer:
    from dp_accounting.rdp import RdpAccountant

    return _dp_accounting(setting, RdpAccountant())


def _prv(setting: Setting) -> Answer:
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    if setting.num_steps > MOST_STEPS_OF_PRV:
        raise NotAsked(f"not asked above {MOST_STEPS_OF_PRV:,} steps: minutes and gigabytes")
    step = PoissonSubsampledGaussianMechanism(setting.sampling_probability, setting.noise_multiplier)
    accountant = PRVAccountant(
        prvs=[step],
        max_self_compositions=[setting.num_steps],
        eps_error=0.05,
        delta_error=setting.delta / 1000,
    )
    low, _, high = accountant.compute_epsilon(setting.delta, [setting.num_steps])
    return float(low), float(high)


# Who is asked: name -> (nature of the answer, how to ask). One more accountant is one more line here.
ACCOUNTANTS: dict[str, tuple[str, Callable[[Setting], Answer]]] = {
    CERTIFIED: ("certified", _certified),
    "prv-accountant": ("bracket", _prv),
    "dp-accounting PLD": ("upper bound", _dp_accounting_pld),
    "dp-accounting RDP": ("upper bound", _dp_accounting_rdp),
    "RDP": ("upper bound", lambda setting: (None, privacy.rdp(*setting.numbers, setting.delta))),
    "moments accountant": ("upper bound", lambda setting: (None, privacy.moments(*setting.numbers, setting.delta))),
    "strong composition": (
        "upper bound",
        lambda setting: (None, privacy.strong_composition(*setting.numbers, setting.delta)),
    ),
    "strong composition 2016": (
        "not valid",
        lambda setting: (
            None,
            privacy.strong_composition(*setting.numbers, setting.delta, amplification=privacy.scaled_epsilon),
        ),
    ),
    "CLT": ("approximation", _clt),
}


def compare(noise_multiplier: float, sampling_probability: float, num_steps: int, delta: float) -> list[Claim]:
    """What every accountant says, the certified bracket first.

    An accountant that is not installed, or that fails, has no epsilon and a note that says why. Times are of one call
    each, whatever was imported or computed before.

    Example:
        >>> certified, *others = compare(0.7, 256 / 60000, 10547, 1e-5)
        >>> [claim.accountant for claim in others if claim.against(certified) == "below the truth"]
        ['CLT']
    """
    setting = Setting(noise_multiplier, sampling_probability, num_steps, delta)
    _certified(setting)  # raises for a setting that no one can price, and warms up what all share
    return [_ask(name, *ACCOUNTANTS[name], setting) for name in ACCOUNTANTS]


def _ask(name: str, kind: str, ask: Callable[[Setting], Answer], setting: Setting) -> Claim:
    start = perf_counter()
    try:
        low, high = ask(setting)
    except ImportError:
        return Claim(name, kind, None, note=f"not installed: pip install {name.split()[0]}")
    except NotAsked as reason:
        return Claim(name, kind, None, note=str(reason))
    except Exception as error:  # whatever another library raises is its answer
        return Claim(name, kind, None, note=f"failed: {' '.join(str(error).split()) or type(error).__name__}")
    seconds = perf_counter() - start
    true_delta = _profile(setting).delta(high) if isfinite(high) else None
    return Claim(name, kind, high, low, true_delta, seconds)


def as_json(claims: list[Claim]) -> list[dict[str, Any]]:
    """The claims as plain values; null stands for infinity and for what is not known."""

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
