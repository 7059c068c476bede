# SPDX-License-Identifier: Apache-2.0
"""Compares audits of real trainings with the ideal attack on the same mechanism, and counts false alarms.

    python benchmarks/audit.py                                  # Adult MLP and MNIST CNN at epsilon 1, 4 and 8
    python benchmarks/audit.py --networks adult --runs 20
    python benchmarks/audit.py --false-alarms 200               # honest runs: how many are rejected?
    python benchmarks/audit.py --records 1000                   # mislabelled examples, black and white box

The ideal attack knows everything about the mechanism but the coins and the noise: for each canary it draws, T times,
whether the canary is sampled, adds normal noise, and computes the likelihood ratio. It has the same number of canaries
and of guesses. Measured and ideal bounds are means over runs. Overhead is the time of an audited step, as a multiple of
a private step on the same data.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.data.adult import load_adult
from torch_privacy.data.mnist import load_mnist
from torch_privacy.privacy.audit import Audit, audit_scores
from torch_privacy.sampling.canaries import WithCanaries
from torch_privacy_papers.models.networks import adult_perceptron, mnist_cnn

DELTA = 1e-5
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], int, float]] = {
    # model, data, number of canaries, expected batch size
    "adult": (lambda: adult_perceptron(16), load_adult, 1500, 2048),
    "mnist": (lambda: mnist_cnn(16), load_mnist, 2000, 256),
}


def examples_of(load: Callable[[], Any]) -> TensorDataset:
    """Returns training examples; of images the first 2,000, so that a run takes seconds."""
    train = load().train
    return train if train.tensors[0].ndim == 2 else TensorDataset(*(tensor[:2_000] for tensor in train.tensors))


def mislabelled(load: Callable[[], Any], count: int) -> TensorDataset:
    """Returns test examples with wrong labels, which a model must memorize to fit."""
    inputs, labels = (tensor[:count] for tensor in load().test.tensors)
    classes = int(labels.max()) + 1
    other = torch.randint(1, classes, labels.shape, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (labels + other) % classes)


def trainer(make: Callable[[], nn.Module], batch_size: float, steps: int, **noise: Any) -> Callable[[Dataset], Any]:
    """Returns the user's training, as a function of the data set."""

    def train(dataset: Dataset) -> tp.PrivateTraining:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # delta is that of the paper, not below 1/(10 n)
            training = tp.PrivateTraining(
                model,
                optimizer,
                dataset,
                expected_batch_size=batch_size,
                num_steps=steps,
                clipping=tp.Flat(clip_norm=1.0),
                delta=DELTA,
                **noise,
            )
        for x, y in training:
            training.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
        return training

    return train


def ideal(audit: Audit, rng: np.random.Generator) -> Audit:
    """Returns the audit of an ideal attack on the mechanism of another audit."""
    (event, steps), *others = audit.profile.events
    assert not others
    assert isinstance(event, privacy.SubsampledGaussian)
    q, noise, m = event.sampling_probability, event.noise_multiplier, audit.num_canaries
    coins, scores = rng.random(m) < 0.5, np.zeros(m)
    for _ in range(steps):
        signal = (coins & (rng.random(m) < q)) / noise
        scores += np.logaddexp(np.log1p(-q), np.log(q) + (signal + rng.standard_normal(m)) / noise - 0.5 / noise**2)
    return audit_scores(scores[coins], scores[~coins], audit.profile, delta=audit.delta, num_guesses=audit.plan)


def compare(name: str, epsilon: float, runs: int, steps: int) -> None:
    """Prints measured and ideal bounds of one network at one epsilon."""
    make, load, count, batch_size = NETWORKS[name]
    examples, rng = examples_of(load), np.random.default_rng(0)
    train = trainer(make, batch_size, steps, target_epsilon=epsilon)
    audits = [tp.audit(train, examples, tp.GradientCanaries(count)) for _ in range(runs)]
    ideals = [ideal(audits[0], rng) for _ in range(max(runs, 40))]
    found, best = (np.array([audit.epsilon_low() for audit in group]) for group in (audits, ideals))
    sums = np.array([audit.epsilon_sums() for audit in audits])
    event, _ = audits[0].profile.events[0]
    print(
        f"{name:6} epsilon {audits[0].profile.epsilon(DELTA).high:.3f}  noise {event.noise_multiplier:.3f}  "  # type: ignore[attr-defined]
        f"m {count}  guesses {sum(audits[0].plan or ())}  bound {found.mean():.3f} ± {found.std() / runs**0.5:.3f}  "
        f"ideal {best.mean():.3f} ± {best.std() / len(best) ** 0.5:.3f}  ratio {found.mean() / best.mean():.3f}  "
        f"by sums {sums.mean():.3f} ± {sums.std() / runs**0.5:.3f}  "
        f"rejected {sum(audit.is_rejected for audit in audits)} of {runs}",
        flush=True,
    )


def false_alarms(runs: int) -> None:
    """Prints how many honest runs are rejected, and how many bounds exceed the certified epsilon."""
    make, load, count, batch_size = NETWORKS["adult"]
    examples = examples_of(load)
    train = trainer(make, batch_size, 20, noise_multiplier=0.7)
    rejected = above = above_by_sums = 0
    for _ in range(runs):
        audit = tp.audit(train, examples, tp.GradientCanaries(count))
        rejected += audit.is_rejected
        above += audit.epsilon_low() > audit.profile.epsilon(DELTA).high
        above_by_sums += audit.epsilon_sums() > audit.profile.epsilon(DELTA).high
    print(
        f"honest runs {runs}: claim rejected in {rejected}, bound above the certified epsilon in {above}, by sums in "
        f"{above_by_sums}"
    )


def records(count: int, runs: int, steps: int) -> None:
    """Prints the bounds of mislabelled examples, seen in every release and in the final model, and their overhead."""
    make, load, _, batch_size = NETWORKS["mnist"]
    examples, canaries = examples_of(load), mislabelled(load, count)
    train = trainer(make, batch_size, steps, noise_multiplier=1.0)
    start = time.perf_counter()
    train(WithCanaries(examples, canaries, np.ones(count, bool)))
    plain = time.perf_counter() - start
    for score in ("gradient", "loss"):
        start = time.perf_counter()
        audits = [tp.audit(train, examples, canaries, score=score) for _ in range(runs)]
        seconds = (time.perf_counter() - start) / runs
        low, high = np.mean([audit.epsilon_low() for audit in audits]), audits[0].profile.epsilon(DELTA).high
        areas, ideals = [audit.area_under_curve for audit in audits], [audit.epsilon_ideal() for audit in audits]
        print(
            f"mnist, {count} mislabelled, {score:8}  epsilon {high:.3f}  bound {low:.3f}  ideal {np.mean(ideals):.3f}  "
            f"area under the curve {np.mean(areas):.3f}  time {seconds / plain:.2f} of training",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 4.0, 8.0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--false-alarms", type=int, metavar="RUNS")
    parser.add_argument("--records", type=int, metavar="COUNT")
    options = parser.parse_args()
    if options.false_alarms:
        false_alarms(options.false_alarms)
        return
    if options.records:
        records(options.records, options.runs, options.steps)
        return
    for name in options.networks:
        for epsilon in options.epsilons:
            start = time.perf_counter()
            compare(name, epsilon, options.runs, options.steps)
            print(f"       {(time.perf_counter() - start) / options.runs:.0f} s a run", flush=True)


if __name__ == "__main__":
    main()
