# SPDX-License-Identifier: Apache-2.0
"""Provides `Spent`, the privacy spent in one line, and the warnings that such a line must include."""

from dataclasses import dataclass, field
from math import inf

from ..support.notebook import html_table
from .bracket import Bracket
from .compose import Profile
from .rounding import round_up, short
from .summary import attacker_as_json, attacker_lines

NOT_PRIVATE = "NOT PRIVATE (test_seed fixes noise and batches, so anyone can take the noise off)"
NOT_FOR_RELEASE = "NOT PRIVATE (made with not_for_release=True, on data that need no protection)"

AUDIT = "AUDIT (trained with canaries to test the guarantee: the model is not for release, the epsilon is spent)"

CHOICE_OF_SETTINGS = "the choice of hyper-parameters by looking at this data"
ALWAYS_PUBLIC = ("model architecture", "hyper-parameters", "number of steps")
NEVER_COVERED = (
    "losses, accuracies and counts computed on the training data and shown or logged without noise",
    CHOICE_OF_SETTINGS,
    "the test data, on which accuracy is measured",
)


@dataclass(frozen=True)
class Spent:
    """Privacy spent so far; prints as one line, and by `in_full` as all that a statement says.

    ``epsilon`` is a certified interval (low, high) at ``delta`` for the steps made; ``epsilon.high`` is the one to
    report. If training stopped early because of its outcomes (early stopping), report ``planned.high`` instead: the
    bracket for all planned steps, which is valid wherever training stops. The other numbers are those of ``profile``:
    of all planned steps, or of the steps made if the stop was declared to be independent of the data. They are computed
    when they are first asked for, which takes a second or so.
    """

    epsilon: Bracket
    delta: float
    text: str
    planned: Bracket
    is_public: bool = False  # true if noise or batches can be known, so that nothing is protected
    profile: Profile | None = field(default=None, compare=False, repr=False)
    unit: str = ""  # what is protected
    treated_as_public: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """Returns a table for a notebook; it computes nothing."""
        rows = [("spent", self.text)]
        if not self.is_public and self.planned != self.epsilon:
            rows.append(
                ("all planned steps", f"epsilon at most {round_up(self.planned.high)} at delta = {short(self.delta)}")
            )
        if self.unit:
            rows.append(("unit of privacy", self.unit))
        rows += [("not covered", text) for text in self.not_covered]
        return html_table("Privacy", rows)

    def __float__(self) -> float:
        """Returns ``epsilon.high``, the certified upper bound for the steps made; infinity for what is not private."""
        return inf if self.is_public else self.epsilon.high

    @property
    def mu(self) -> Bracket[float]:
        """The certified interval of μ: see `Profile.mu`."""
        return self._profile.mu()

    @property
    def regret(self) -> Bracket[float]:
        """The certified interval of the distance to the curve of μ: see `Profile.regret`."""
        return self._profile.regret()

    @property
    def relation(self) -> str:
        """The neighboring relation and the unit, such as "zero out one example"."""
        return self._profile.relation_in_words

    def true_positive_rate(self, false_positive_rate: float) -> Bracket[float]:
        """Returns the largest true positive rate of any test of membership at a false positive rate."""
        return self._profile.true_positive_rate(false_positive_rate)

    def in_full(self) -> str:
        """Returns all that a privacy statement says, one line for each: the attacker, unit, public, not covered."""
        profile = self._profile
        lines = [
            *attacker_lines(attacker_as_json(profile)),
            ("neighboring relation", profile.neighboring_relation.explained(profile.unit)),
            ("unit of privacy", self.unit or f"one {profile.unit}"),
            *(("treated as public", text) for text in self.treated_as_public),
            *(("not covered", text) for text in self.not_covered),
        ]
        return "\n".join([self.text, *(f"{name}: {value}" for name, value in lines)])

    @property
    def _profile(self) -> Profile:
        if self.profile is None:
            raise ValueError("Spent: it was made without a profile, so only epsilon is known. Pass profile=.")
        return self.profile


def spent_at_once(profile: Profile, delta: float, warning: str = "") -> Spent:
    """Returns what releases spend that are not made in steps; a ``warning`` says that they protect nothing."""
    epsilon, text = profile.epsilon(delta), profile.statement(delta)
    text = f"{warning}: {text}" if warning else text
    return Spent(epsilon, delta, text, planned=epsilon, is_public=bool(warning), profile=profile)
