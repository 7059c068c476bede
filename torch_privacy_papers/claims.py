# SPDX-License-Identifier: Apache-2.0
"""Compares the epsilons that the papers claim with certified ones: ``torch-privacy reproduce claims``.

Nothing is trained. Every row is a setting that a paper prints: epsilon as the paper's method gives it, epsilon by the
same method without its error where there is such a thing, the certified epsilon, and the certified delta at the claimed
epsilon. docs/claims.md explains the rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

from torch_privacy import privacy
from torch_privacy.experiments.study import Study
from torch_privacy.privacy.engines.curve import bisect
from torch_privacy.privacy.summary import equal_releases
from torch_privacy.runs.rows import EXACT, PRIVACY_COLUMNS, Computation, Context, Numbers, TableColumn
from torch_privacy_papers.abadi2016.accountant import EPOCHS, NOISE
from torch_privacy_papers.abadi2016.accountant import PROBABILITY as ABADI_PROBABILITY
from torch_privacy_papers.bu2020.table1 import DELTA, PROBABILITY, TABLE

CLAIM, VALID, TRUE_DELTA, STATED_DELTA = "claim", "valid", "true_delta", "stated_delta"
COLUMNS = {
    CLAIM: TableColumn("eps, claimed", digits=2),
    VALID: TableColumn("eps, method made valid", digits=2),
    EXACT: PRIVACY_COLUMNS[EXACT],
    STATED_DELTA: TableColumn("delta, claimed", scientific=True),
    TRUE_DELTA: TableColumn("true delta at the claim", scientific=True),
}
NOTES = (
    "eps, claimed: ours is what the paper's method gives, computed anew; the paper's is the printed number.",
    "true delta at the claim: the certified delta at the claimed epsilon (the printed one, or else ours). A claim is a "
    "guarantee only if this is at most the claimed delta.",
    "Strong composition: the paper takes a step on a sample to cost q epsilon; log(1 + q (e^epsilon - 1)) is valid.",
    "Two layers: the authors' code adds the moments of two layers as if each had a sample of its own. They share one; "
    "the valid moments are those of one release with noise sigma / sqrt(2). The components' release is included.",
    "CLT: the central limit theorem's approximation. It is no bound on either side.",
    "JL: norms are estimated from one projection. If the estimate is far too small, the example is hardly clipped.",
    "GEP: the published code adds embedding and residual as two releases on samples of their own. Noise is the least "
    "that its accountant allows at the target; the valid number is by the same moments for one sample. GP and "
    "B-GEP make one release in a step.",
    "IMDb, the authors' norms: they square a repeated word's gradient position by position. The embedding's gradient "
    "of a text of 128 words and 128 paddings has 8 times the norm that they compute, so the noise is up to 8 times too "
    "little. Certified for that text; longer paddings are worse, up to 16 times.",
)


class ClaimedSetting(NamedTuple):
    """A number of equal Poisson-sampled Gaussian steps, and the epsilon that a paper prints for them, if any."""

    noise_multiplier: float
    probability: float
    num_steps: int
    delta: float = DELTA
    printed: float | None = None


def _epochs(noise: float, epochs: float, probability: float = PROBABILITY, **more: Any) -> ClaimedSetting:
    return ClaimedSetting(noise, probability, round(epochs / probability), **more)


CLT_SETTINGS = {
    **{f"CLT, sigma {line.noise_multiplier:g}, {line.epochs} epochs": _epochs(
        line.noise_multiplier, line.epochs, printed=line.clt) for line in TABLE},
    "CLT, sigma 1.3, 20 epochs": _epochs(1.3, 20),
    "CLT, sigma 1.06, 20 epochs": _epochs(1.06, 20, printed=1.34),
    "CLT, sigma 0.7, 70 epochs": _epochs(0.7, 70),
    "CLT, sigma 0.638, 70 epochs": _epochs(0.638, 70, printed=8.68),
    "CLT, one epoch of Figure A.1": ClaimedSetting(1.1, sqrt(60) * PROBABILITY, 234),
    "CLT, Abadi's 100 epochs": _epochs(NOISE, 100, ABADI_PROBABILITY),
    "CLT, Abadi's 400 epochs": _epochs(NOISE, 400, ABADI_PROBABILITY),
    "CLT, Adult": _epochs(0.55, 18, 256 / 29_305),
    "CLT, IMDb": _epochs(0.56, 9, 512 / 25_000),
    "CLT, MovieLens": _epochs(0.6, 20, 1 / 80, delta=1e-6, printed=10.61),
}  # fmt: skip
STRONG_PRINTED = {100: 9.34, 400: 24.22}
LAYERS = ((8.0, 16.0, 14.5, 0.5), (4.0, 7.0, 107.5, 2.0), (2.0, 4.0, 353.1, 8.0))  # sigma, sigma_p, epochs, claim
JL_SETTINGS = {
    "JL(1), MNIST": _epochs(1.3, 15, 256 / 60_000, printed=2.4),
    "JL(1), CIFAR-10": _epochs(0.9, 20, 256 / 50_000, printed=5.55),
    "JL(1), IMDb": _epochs(0.6, 20, 256 / 25_000, printed=21.0),
}
GEP_DATA = {  # examples, delta, epochs by target; batches of 1000
    "MNIST": (60_000, 1e-5, {2: 50, 5: 100, 8: 200}),
    "CIFAR-10": (50_000, 1e-5, {2: 50, 5: 100, 8: 200}),
    "SVHN": (604_388, 1e-6, {2: 5, 5: 10, 8: 20}),
}
CODE_ORDERS = [*(order / 10 for order in range(1, 100)), *range(11, 63)]  # those of the published code, less one
TEXT, PADDING = 256, 128  # words of a text, and paddings among them


def rows(quick: bool) -> Sequence[Computation]:
    """Returns a row for every claim, paper by paper."""
    return [
        *(_row(f"strong composition, {n} epochs", partial(strong, n), STRONG_PRINTED[n]) for n in EPOCHS),
        *(_row(f"two layers, sigma {level[0]:g}", partial(two_layers, *level), level[-1]) for level in LAYERS),
        *(_row(name, partial(by_clt, chosen), chosen.printed) for name, chosen in CLT_SETTINGS.items()),
        _row("IMDb, the authors' norms", padded_text, None),
        *(_row(name, partial(one_projection, chosen), chosen.printed) for name, chosen in JL_SETTINGS.items()),
        *(
            _row(f"{method}, {name}, epsilon {target}", partial(compute, name, target), target)
            for method, compute in (("GEP", gep_code), ("GP and B-GEP", gp_code))
            for name, (_, _, epochs) in GEP_DATA.items()
            for target in epochs
        ),
    ]


def _row(name: str, compute: Any, printed: float | None) -> Computation:
    return Computation(name, compute, {} if printed is None else {CLAIM: printed})


def _numbers(
    releases: Iterable[tuple[privacy.Event, int]],
    delta: float,
    claimed: float | None,
    printed: float | None,
    valid: float | None = None,
) -> Numbers:
    """Returns the numbers of a row."""
    profile = privacy.compose(releases)
    claim = claimed if printed is None else printed
    assert claim is not None
    return {
        CLAIM: claimed,
        VALID: valid,
        EXACT: profile.epsilon(delta),
        STATED_DELTA: delta,
        TRUE_DELTA: profile.delta(claim),
    }


def strong(epochs: int, context: Context) -> Numbers:
    """Returns the numbers of strong composition with the amplification of 2016, and with a valid one."""
    chosen = NOISE, ABADI_PROBABILITY, round(epochs / ABADI_PROBABILITY)
    return _numbers(
        [(privacy.SubsampledGaussian(*chosen[:2]), chosen[2])],
        DELTA,
        privacy.strong_composition(*chosen, DELTA, amplification=privacy.scaled_epsilon),
        STRONG_PRINTED[epochs],
        privacy.strong_composition(*chosen, DELTA),
    )


def two_layers(noise: float, pca_noise: float, epochs: float, printed: float, context: Context) -> Numbers:
    """Returns the numbers of two layers with noise sigma each, behind private components."""
    num_steps = round(epochs / ABADI_PROBABILITY)
    components = privacy.NoisyCovariance(pca_noise), 1
    apart = [components, (privacy.SubsampledGaussian(noise, ABADI_PROBABILITY), 2 * num_steps)]
    together = [components, (privacy.SubsampledGaussian(noise / sqrt(2), ABADI_PROBABILITY), num_steps)]
    claimed, valid = (privacy.moments_of(releases, DELTA) for releases in (apart, together))
    return _numbers(together, DELTA, claimed, printed, valid)


def by_clt(chosen: ClaimedSetting, context: Context) -> Numbers:
    """Returns the numbers of the central limit theorem."""
    limit = privacy.clt(equal_releases(chosen.noise_multiplier, chosen.probability, chosen.num_steps))
    step = privacy.SubsampledGaussian(chosen.noise_multiplier, chosen.probability)
    return _numbers([(step, chosen.num_steps)], chosen.delta, limit.epsilon(chosen.delta), chosen.printed)


def padded_text(context: Context) -> Numbers:
    """Returns the numbers of gdp-imdb for a text, half padding, with its gradient all in the embedding."""
    chosen = CLT_SETTINGS["CLT, IMDb"]
    claimed = privacy.clt(equal_releases(chosen.noise_multiplier, chosen.probability, chosen.num_steps)).epsilon(
        chosen.delta
    )
    step = privacy.SubsampledGaussian(chosen.noise_multiplier / padding_ratio(), chosen.probability)
    return _numbers([(step, chosen.num_steps)], chosen.delta, claimed, None)


def padding_ratio() -> float:
    """Returns the norm of the embedding's gradient of that text over the norm that the authors' code computes.

    With k equal words among n, each with the gradient b / n, the squares are (k² + n - k) b²/n² and n b²/n².
    """
    return sqrt((PADDING**2 + TEXT - PADDING) / TEXT)


def one_projection(chosen: ClaimedSetting, context: Context) -> Numbers:
    """Returns the numbers of norms estimated from one projection."""
    step = privacy.SubsampledJL(chosen.noise_multiplier, 1, chosen.probability)
    return _numbers([(step, chosen.num_steps)], chosen.delta, None, chosen.printed)


def gep_code(data: str, target: int, context: Context) -> Numbers:
    """Returns the numbers of the noise with which the published code reaches its target with GEP."""
    num_examples, delta, epochs = GEP_DATA[data]
    probability, noise = 1000 / num_examples, code_noise(data, target, releases=2)
    num_steps = round(epochs[target] / probability)
    claimed = privacy.moments_of(equal_releases(noise, probability, 2 * num_steps), delta, CODE_ORDERS)
    valid = privacy.moments_of(equal_releases(noise / sqrt(2), probability, num_steps), delta, CODE_ORDERS)
    return _numbers([(privacy.SubsampledGEP(noise, probability), num_steps)], delta, claimed, target, valid)


def gp_code(data: str, target: int, context: Context) -> Numbers:
    """Returns the same for GP and B-GEP, with one release per step."""
    num_examples, delta, epochs = GEP_DATA[data]
    probability, noise = 1000 / num_examples, code_noise(data, target, releases=1)
    num_steps = round(epochs[target] / probability)
    claimed = privacy.moments_of(equal_releases(noise, probability, num_steps), delta, CODE_ORDERS)
    return _numbers([(privacy.SubsampledGaussian(noise, probability), num_steps)], delta, claimed, target)


def code_noise(data: str, target: int, *, releases: int) -> float:
    """Returns the least noise multiplier at which this many releases in each step seem to stay within a target."""
    num_examples, delta, epochs = GEP_DATA[data]
    probability = 1000 / num_examples
    count = releases * round(epochs[target] / probability)

    def seems_enough(noise: float) -> bool:
        return privacy.moments_of(equal_releases(noise, probability, count), delta, CODE_ORDERS) <= target

    return bisect(seems_enough, 0.1, 100.0, 1e-6)[1]


def findings(results: Mapping[str, Any]) -> Iterable[str]:
    """Yields how many claims hold, by the kind of the claim."""
    kinds: dict[str, list[bool]] = {}
    for row in results["rows"]:
        numbers = row["runs"][0]["numbers"]
        holds = numbers[TRUE_DELTA]["high"] <= numbers[STATED_DELTA]
        kinds.setdefault(row["row"].partition(",")[0], []).append(holds)
    counts = (f"{kind}, {sum(held)} of {len(held)}" for kind, held in kinds.items())
    yield f"Claims that hold: {'; '.join(counts)}."


STUDY = Study(COLUMNS, rows, NOTES, findings=findings)
