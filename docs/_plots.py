# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README, f-dp.md and accounting.md into docs/img: ``python docs/_plots.py``, a minute."""

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from torch_privacy import privacy
from torch_privacy.privacy.summary import equal_releases
from torch_privacy.privacy.tradeoff import (
    JL,
    EpsilonDelta,
    Gaussian,
    of_profile,
    subsampled,
    symmetrized,
    tensor,
    true_positive_rate,
)
from torch_privacy.runs.report import figures as plots
from torch_privacy.runs.report import style

IMAGES = Path(__file__).parent / "img"
MNIST = 256 / 60000
TRAINING = privacy.compose([(privacy.SubsampledGaussian(0.7, MNIST), 10547)])  # the third row of Bu et al., Table 1


def attacker() -> plots.Figure:
    """The curve of one training, and what two attackers get."""
    curve = of_profile(TRAINING)["symmetrized"]
    marks = [
        plots.Mark(alpha, float(curve.low(alpha)), f"at {100 * alpha:g} % false alarms\n{caught:.0f} % are recognized")
        for alpha in (0.05, 0.2, 0.4)
        for caught in [100 * true_positive_rate(curve.low, alpha)]
    ]
    return plots.tradeoff_plot(
        {"the best attack on this training": curve}, title="What an attacker can do", marks=marks
    )


def tangents() -> plots.Figure:
    """Each (ε, δ) that holds touches the curve; none of them says it all."""
    curve = Gaussian(1.0)
    pairs = {
        f"({epsilon:g}, {float(curve.delta(epsilon)):.2g})": EpsilonDelta(epsilon, float(curve.delta(epsilon)))
        for epsilon in (0.0, 1.0, 2.0, 4.0)
    }
    return plots.tradeoff_plot({"one release, mu = 1": curve, **pairs}, title="Each (epsilon, delta) is one tangent")


def sampling() -> plots.Figure:
    """Sampling is mixing with blind guessing; both directions; the convex hull of both."""
    one = subsampled(Gaussian(3.0), 0.4)
    curves = {
        "without sampling": Gaussian(3.0),
        "remove, q = 0.4": one,
        "add": one.inverse(),
        "whichever is dearer": symmetrized(one),
    }
    return plots.tradeoff_plot(curves, title="Sampling")


def composition() -> plots.Figure:
    """Two releases, together, exactly; and what remains if each is first reduced to one (ε, δ)."""
    one, delta = Gaussian(0.5), 1e-6
    epsilon = privacy.compose([(privacy.Gaussian(2.0), 1)]).epsilon(delta).high
    curves = {
        "1 release": one,
        "4 releases": tensor(*[one] * 4).low,
        f"4 of ({epsilon:.2f}, {delta:g})": tensor(*[EpsilonDelta(epsilon, delta)] * 4).low,
    }
    return plots.tradeoff_plot(curves, title="Together")


def projections() -> plots.Figure:
    """δ of one step whose norms were estimated from r projections, at the setting of the JL paper's MNIST row."""
    epsilon = np.linspace(0.05, 12, 120)
    curves: dict[str, tuple[plots.Array, plots.Array | privacy.Bracket[plots.Array]]] = {
        f"{r} projection{'s' * (r > 1)}": (epsilon, np.asarray(subsampled(JL(1.3, r), MNIST).delta(epsilon)))
        for r in (1, 4, 16)
    }
    curves["exact norms"] = epsilon, np.asarray(subsampled(Gaussian(1 / 1.3), MNIST).delta(epsilon))
    figure = plots.profile_plot(curves, title="Delta of a single step", marks=[])
    axes = figure.axes[0]
    axes.set(xscale="linear", yscale="log", xlabel="epsilon", ylabel="delta", ylim=(1e-12, 1e-2))
    axes.legend(frameon=False, loc="center right")
    axes.plot([2.4], [1e-5], "o", color=style.FILE_INK)
    claim = "claimed for all\n3516 steps, r = 1"
    line = {"arrowstyle": "-", "color": style.FILE_FAINT}
    axes.annotate(claim, (2.4, 1e-5), (3.4, 6e-9), fontsize=9, arrowprops=line)
    return figure


def underestimates() -> plots.Figure:
    """The true δ at the ε that the CLT claims for δ = 1e-5, over the number of steps."""
    steps = np.unique(np.geomspace(30, 3e5, 40).astype(int))
    curves: dict[str, tuple[plots.Array, plots.Array | privacy.Bracket[plots.Array]]] = {}
    for noise in (0.55, 0.7, 1.1, 2.0):
        limits = [privacy.clt(equal_releases(noise, MNIST, int(count))) for count in steps]
        true = np.array([limit.true_delta(limit.epsilon(1e-5)).low for limit in limits])
        curves[f"noise multiplier {noise:g}"] = steps, true
    figure = plots.profile_plot(curves, title="True delta where the CLT claims 1e-5")
    axes = figure.axes[0]
    axes.axhline(1e-5, color=style.FILE_FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set(xlabel="steps, q = 256/60000", ylabel="true delta", yscale="log")
    axes.autoscale(axis="y")
    return figure


def adult() -> plots.Figure:
    """The course of ``make train``: test accuracy beside that of ordinary training, and the privacy spent."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        command = [sys.executable, "-m", "torch_privacy", "train", "adult", "--run", str(run), "--quiet"]
        subprocess.run(command, check=True)
        with (run / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    private = [row for row in rows if row["training"] == "private"]
    epochs = [float(row["epoch"]) for row in private]
    law = 0.961962, 256 / 29305  # the noise multiplier and the sampling probability that the command prints
    limits = [privacy.clt(equal_releases(*law, int(row["step"]))).epsilon(1e-5) for row in private]
    moments = [privacy.moments_of(equal_releases(*law, int(row["step"])), delta=1e-5) for row in private]
    blue, red, green = style.FILE_COLORS[:3]
    with matplotlib.rc_context(style.FILE_STYLE):
        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for kind, color, dash in (("non-private", style.FILE_FAINT, "--"), ("private", blue, "-")):
            scores = [100 * float(row["test_score"]) for row in rows if row["training"] == kind]
            left.plot(epochs, scores, dash, color=color, label=f"{kind}: {scores[-1]:.1f} %")
        left.set(xlabel="epoch", title="test accuracy on Adult, %")
        right.plot(epochs, moments, ":", color=red, label="moments accountant: looser")
        right.plot(epochs, [float(row["epsilon_high"]) for row in private], color=blue, label="certified, both bounds")
        right.plot(epochs, limits, "--", color=green, label="central limit: too low")
        right.set(xlabel="epoch", title="epsilon spent, at delta = 1e-5", ylim=(0, None))
        for axes in (left, right):
            axes.legend(frameon=False)
    return figure


PICTURES = (adult, attacker, tangents, sampling, composition, projections, underestimates)

if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for draw in PICTURES:
        plots.save(draw(), IMAGES / f"{draw.__name__}.svg")
