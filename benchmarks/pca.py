# SPDX-License-Identifier: Apache-2.0
"""Measures time and quality of private principal components of MNIST, 60,000 x 784.

    python benchmarks/pca.py

Prints the seconds of one fit and of scikit-learn's exact PCA, the smallest of five rounds in turn. Then, for several
noise multipliers, prints how many of 60 components have an eigenvalue above the noise's edge, and the share of the
squared norm of held-out unit rows that lies in their span, compared with exact and random components. Reads MNIST from
$TORCH_PRIVACY_DATA or ../shared/data.
"""

import time
from collections.abc import Callable

import numpy as np
from sklearn.decomposition import PCA
from sklearn.preprocessing import Normalizer

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.data import load_mnist

COMPONENTS, DELTA = 60, 1e-5
NOISE_MULTIPLIERS = 4.0, 7.0, 16.0, 64.0


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def share_kept(components: np.ndarray, unit_rows: np.ndarray) -> float:
    return float(np.square(unit_rows @ components.T).sum() / np.square(unit_rows).sum())


if __name__ == "__main__":
    data = load_mnist()
    train, test = (part.tensors[0].flatten(1).numpy() for part in (data.train, data.test))
    private = tp.PrivatePCA(COMPONENTS, noise_multiplier=7.0)
    contenders = {"private": private, "scikit-learn, exact": PCA(COMPONENTS, svd_solver="covariance_eigh")}
    times = [[seconds(lambda pca=pca: pca.fit(train)) for pca in contenders.values()] for _ in range(5)]
    for name, best in zip(contenders, np.min(times, axis=0), strict=True):
        print(f"{name}: {best:.2f} s")

    unit = Normalizer().fit_transform(test)
    exact = tp.PrivatePCA(COMPONENTS, noise_multiplier=1e-6).fit(train)
    random = np.linalg.qr(np.random.default_rng(0).normal(size=(train.shape[1], COMPONENTS)))[0].T
    print("\n| noise multiplier | epsilon | above the edge | share kept |\n|---|---|---|---|")
    print(f"| none | - | {COMPONENTS} | {100 * share_kept(exact.components_, unit):.1f} % |")
    for noise in NOISE_MULTIPLIERS:
        pca = tp.PrivatePCA(COMPONENTS, noise_multiplier=noise).fit(train)
        epsilon = privacy.compose([(pca.event_, 1)]).epsilon(DELTA).high
        above = int((pca.eigenvalues_[:COMPONENTS] > pca.noise_edge_).sum())
        print(f"| {noise:g} | {epsilon:.3f} | {above} | {100 * share_kept(pca.components_, unit):.1f} % |")
    print(f"| random directions | 0 | - | {100 * share_kept(random, unit):.1f} % |")
