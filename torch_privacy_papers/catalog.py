# SPDX-License-Identifier: Apache-2.0
"""Lists every experiment with its paper, its data and its running time, without importing torch."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Paper:
    """The source of the numbers that ours are compared with."""

    authors: str
    title: str
    source: str


ABADI = Paper("Abadi et al. (2016)", "Deep learning with differential privacy", "arXiv:1607.00133")
GDP = Paper(
    "Bu, Dong, Long & Su (2020)", "Deep learning with Gaussian differential privacy", "HDSR 2(3), arXiv:1911.11607"
)
JL = Paper(
    "Bu, Gopi, Kulkarni, Lee, Shen & Tantipongpipat (2021)",
    "Fast and memory efficient differentially private SGD via JL projections",
    "arXiv:2102.03013",
)
GEP = Paper(
    "Yu, Zhang, Chen & Liu (2021)",
    "Do not let privacy overbill utility: gradient embedding perturbation for private learning",
    "arXiv:2102.12677",
)
TRAMER = Paper(
    "Tramèr & Boneh (2021)",
    "Differentially private learning needs better features (or much more data)",
    "arXiv:2011.11660",
)
DE = Paper(
    "De, Berrada, Hayes, Smith & Balle (2022)",
    "Unlocking high-accuracy differentially private image classification through scale",
    "arXiv:2204.13650",
)
LI = Paper(
    "Li, Tramèr, Liang & Hashimoto (2022)",
    "Large language models can be strong differentially private learners",
    "arXiv:2110.05679",
)
YUE = Paper(
    "Yue et al. (2023)",
    "Synthetic text generation with differential privacy: a simple and practical recipe",
    "arXiv:2210.14348",
)

FIVE = Paper("Abadi, Bu, Yu and others (2016 to 2021)", "the four papers above", "their epsilons beside certified ones")


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper that one command reproduces. ``study`` names its `Study`, as module:name."""

    name: str
    paper: Paper
    study: str  # module:name, the module under torch_privacy_papers
    place: str  # table or figure
    shows: str
    seconds: float  # of the full run for one seed on two CPU cores, measured beside other work, or extrapolated
    quick_seconds: float
    data: str = ""  # data sets that must be at hand; "" if none, or only the one that comes with the package
    trains: bool = False


CATALOG = (
    Experiment(
        "accountant-q0.01", ABADI, "abadi2016.accountant:STUDY",
        "Figures 2 and 3", "epsilon over epochs: strong composition, moments, exact; delta at fixed epsilon", 20, 5
    ),
    Experiment(
        "abadi-mnist", ABADI, "abadi2016.mnist:STUDY",
        "Figures 3 and 4", "digits behind private principal components: accuracy at three epsilons, and over both",
        3300, 70, data="MNIST", trains=True,
    ),
    Experiment(
        "abadi-sweep", ABADI, "abadi2016.sweep:STUDY",
        "Figure 5",
        "digits with other components, units, lots, rates, bounds, noise: accuracy at epsilon 2", 22_000, 80, "MNIST",
        trains=True,
    ),
    Experiment(
        "abadi-pca", ABADI, "abadi2016.projections:STUDY",
        "Section 5.2",
        "digits behind other components, random directions, all pixels, two layers: accuracy, time", 2400, 60, "MNIST",
        trains=True,
    ),
    Experiment(
        "abadi-cifar10", ABADI, "abadi2016.cifar10:STUDY",
        "Figure 6", "small photographs behind public convolutions: accuracy at epsilon 2, 4, 8", 30_000, 30,
        "CIFAR-10, CIFAR-100", trains=True,
    ),
    Experiment(
        "gdp-figures", GDP, "bu2020.figures:STUDY",
        "Figures 2, 3, A.1",
        "epsilon against delta and trade-off functions by CLT, moments and exactly; the limit after one epoch", 30, 15,
    ),
    Experiment(
        "gdp-calibration", GDP, "bu2020.calibration:STUDY",
        "Section 4.2", "less noise at equal epsilon: claimed by the CLT, and certified", 5, 5
    ),
    Experiment(
        "gdp-mnist", GDP, "bu2020.mnist:STUDY",
        "Table 1", "digits at six noise levels: accuracy, mu, and epsilon by three accountants",
        12_000, 110, "MNIST", trains=True,
    ),
    Experiment(
        "gdp-figure4", GDP, "bu2020.figure4:STUDY",
        "Figure 4, left", "digits with the noise of two accountants: accuracy, and epochs to 95, 96 and 97 %",
        6000, 110, "MNIST", trains=True,
    ),
    Experiment(
        "gdp-adult", GDP, "bu2020.adult:STUDY",
        "Table 2", "income from census data: accuracy, against other methods", 80, 15, trains=True
    ),
    Experiment(
        "gdp-imdb", GDP, "bu2020.imdb:STUDY",
        "Table 3", "whether a film review is favorable: accuracy, with NoisyAdam", 120, 50,
        "IMDb", trains=True,
    ),
    Experiment(
        "gdp-imdb-lstm", GDP, "bu2020.imdb_lstm:STUDY",
        "Table 3, LSTM", "film reviews by a two-layer LSTM, privately and without privacy", 1800, 120,
        "IMDb", trains=True,
    ),
    Experiment(
        "gdp-movielens", GDP, "bu2020.movielens:STUDY",
        "Table 4", "how a user rates a film: RMSE, with NoisyAdam, against other methods", 220,
        20, "MovieLens", trains=True,
    ),
    Experiment(
        "jl-figures", JL, "bu2021.figures:STUDY",
        "Figures 2 and 3, and Figure 8 of version 1",
        "epsilon over epochs for every number of projections; the distribution of an estimate", 120, 20
    ),
    Experiment(
        "jl-summary", JL, "bu2021.summary:STUDY",
        "Table 1", "privacy, speed, memory and generality of every method", 180, 60
    ),
    Experiment(
        "jl-accuracy", JL, "bu2021.accuracy:STUDY",
        "Figure 4", "digits: accuracy with few projections and with exact norms", 90, 40, "MNIST",
        trains=True,
    ),
    Experiment(
        "jl-mnist", JL, "bu2021.tables:MNIST",
        "Tables 3 and 4, MNIST", "time, memory, largest batch and accuracy by random projections",
        16_000, 40, "MNIST", trains=True,
    ),
    Experiment(
        "jl-cifar10", JL, "bu2021.tables:CIFAR10",
        "tables, CIFAR-10",
        "small photographs by random projections: time, memory, largest batch, accuracy",
        80_000, 90, "CIFAR-10", trains=True,
    ),
    Experiment(
        "jl-imdb", JL, "bu2021.tables:IMDB",
        "tables, IMDb",
        "film reviews by an LSTM, Adam and random projections: time, memory, largest batch, accuracy",
        15_000, 75, "IMDb",
        trains=True,
    ),
    Experiment(
        "jl-imdb-trials", JL, "bu2021.imdb_trials:STUDY",
        "tables, IMDb",
        "what the paper leaves open with exact norms: subwords, which words stay, padding, initial weights; needs the "
        "extra text",
        5_400, 60, "IMDb",
        trains=True,
    ),
    Experiment(
        "jl-large", JL, "bu2021.large:STUDY",
        "tables, large networks",
        "AlexNet, VGG-13 and a network of 17 M parameters by random projections: time and memory",
        4000, 70, "MNIST, CIFAR-10", trains=True,
    ),
    Experiment(
        "gep-mnist", GEP, "yu2021.mnist:STUDY",
        "Table 1, MNIST", "digits with noise on embedding and residual: accuracy at three epsilons",
        20_000, 90, "MNIST, CIFAR-100", trains=True,
    ),
    Experiment(
        "gep-mnist-tuning", GEP, "yu2021.mnist:TUNING",
        "Section 4", "settings for gep-mnist: accuracy on held-out training images",
        1200, 60, "MNIST, CIFAR-100", trains=True,
    ),
    Experiment(
        "gep-cifar10", GEP, "yu2021.cifar10:CIFAR10",
        "Table 1, CIFAR-10", "small photographs and ResNet-20 with noise on both parts; the full run needs a GPU",
        500_000, 120, "CIFAR-10, CIFAR-100", trains=True,
    ),
    Experiment(
        "gep-svhn", GEP, "yu2021.cifar10:SVHN",
        "Table 1, SVHN", "house numbers, which the user must fetch, with noise on both parts; needs a GPU",
        600_000, 120, "SVHN, CIFAR-100", trains=True,
    ),
    Experiment(
        "gep-linear", GEP, "yu2021.linear:STUDY",
        "Appendix A", "one dense layer on features fitted to public images, with noise on both parts",
        11_000, 70, "CIFAR-10, CIFAR-100", trains=True,
    ),
    Experiment(
        "gep-network", GEP, "yu2021.network:STUDY",
        "Table 3", "one dense layer on features of a network that learned from half of the data, epsilon 0.1 to 2",
        500, 130, "CIFAR-10", trains=True,
    ),
    Experiment(
        "gep-network-tuning", GEP, "yu2021.network:TUNING",
        "Table 2", "settings for gep-network: accuracy on held-out training images",
        3500, 90, "CIFAR-10", trains=True,
    ),
    Experiment(
        "gep-pretrained", GEP, "yu2021.pretrained:STUDY",
        "Table 3", "one dense layer on features of a network that learned from ImageNet; needs the extra pretrained",
        1200, 150, "CIFAR-10, CIFAR-100", trains=True,
    ),
    Experiment(
        "gep-pretrained-tuning", GEP, "yu2021.pretrained:TUNING",
        "Table 2", "settings for gep-pretrained: accuracy on held-out training images",
        1600, 150, "CIFAR-10, CIFAR-100", trains=True,
    ),
    Experiment(
        "gep-ablations", GEP, "yu2021.ablations:STUDY",
        "Figure 6, Tables 5 and 6", "digits with other auxiliary images, labels, m, k and t, also by B-GEP",
        10_000, 100, "MNIST, CIFAR-10, CIFAR-100", trains=True,
    ),
    Experiment(
        "gep-benefit", GEP, "yu2021.benefit:STUDY",
        "Figure 6", "whether GEP beats plain clipping when both are tuned, over directions and parameters",
        3600, 60, "CIFAR-10, CIFAR-100", trains=True,
    ),
    Experiment(
        "gep-benefit-tuning", GEP, "yu2021.benefit:TUNING",
        "Section 4", "settings for gep-benefit: accuracy on held-out training images",
        7000, 60, "CIFAR-10, CIFAR-100", trains=True,
    ),
    Experiment(
        "gep-figures", GEP, "yu2021.figures:STUDY",
        "Figures 1, 2, 4, 5, 7", "properties of gradients: stable ranks, projection errors, noise",
        1600, 100, "CIFAR-10, CIFAR-100",
    ),
    Experiment(
        "pate-mnist", GEP, "yu2021.pate:MNIST",
        "Table 1, PATE, MNIST", "digits learned from the noisy votes of teachers", 1000, 20, "MNIST"
    ),
    Experiment(
        "pate-cifar10", GEP, "yu2021.pate:CIFAR10",
        "Table 1, PATE, CIFAR-10", "small photographs learned from the noisy votes of teachers", 1500, 60, "CIFAR-10"
    ),
    Experiment(
        "best-mnist", TRAMER, "best.mnist:SCATTERING",
        "Table 1, MNIST", "digits, or images of your own in MNIST's format: scattering coefficients, averaged weights",
        850, 80, "MNIST", trains=True,
    ),
    Experiment(
        "best-mnist-cnn", TRAMER, "best.mnist:CONVOLUTIONS",
        "Table 1, MNIST", "digits, or images of your own, shifted at random: two convolutions, averaged weights",
        2000, 40, "MNIST", trains=True,
    ),
    Experiment(
        "best-cifar10", TRAMER, "best.cifar10:FIXED",
        "Table 1, CIFAR-10", "small photographs by fixed features, with a dense layer and convolutions",
        11_000, 80, "CIFAR-10, CIFAR-100", trains=True,
    ),
    Experiment(
        "best-cifar10-tuning", TRAMER, "best.tuning:TUNING",
        "Table 1, CIFAR-10", "settings for best-cifar10: accuracy on a task of public photographs alone",
        4000, 90, "CIFAR-100", trains=True,
    ),
    Experiment(
        "best-cifar10-wide", DE, "best.cifar10:WIDE",
        "tables, CIFAR-10", "small photographs by a wide network, in 16 views; needs a GPU",
        200_000, 45, "CIFAR-10", trains=True,
    ),
    Experiment(
        "text-imdb", LI, "text.imdb:STUDY",
        "sentence classification", "film reviews by a public encoder: its features, last layer, adapters, all weights; "
        "needs the extra text", 78_000, 120, "IMDb", trains=True,
    ),
    Experiment(
        "text-imdb-tuning", LI, "text.tuning:TUNING",
        "sentence classification", "settings for text-imdb: accuracy on 5,000 reviews that are declared public",
        600, 60, "IMDb", trains=True,
    ),
    Experiment(
        "text-generator", YUE, "text.generator:STUDY",
        "Table 1", "film reviews written by a private language model: accuracy of a classifier that learns from them, "
        "distance, novelty, an audit by secret numbers; needs the extra text", 6000, 150, "IMDb", trains=True,
    ),
    Experiment(
        "claims", FIVE, "claims:STUDY",
        "every printed epsilon", "what the papers claimed, and what is true: epsilons and deltas, nothing is trained",
        20, 20,
    ),
)  # fmt: skip


def as_json() -> list[dict[str, Any]]:
    """Returns all experiments as plain values."""
    return [asdict(experiment) for experiment in CATALOG]
