# SPDX-License-Identifier: Apache-2.0
"""Compares the two ways to protect a user of MovieLens: sampling ratings (ELS) and sampling users (ULS).

    OMP_NUM_THREADS=1 python benchmarks/owners.py [--data FOLDER] [--quick]

Both protect a user with at most G ratings in a step at the same epsilon and delta, see about equally many ratings in a
step, and train the same model, which holds nothing of a user: a mean, and biases of 400 buckets of the movies. ELS
caps the data by ``at_most``. Prints markdown: the root mean squared error, the best of three learning rates. Takes
about two minutes on one core, with --quick twenty seconds.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.data import load_movielens

DELTA, NUM_STEPS, BATCH = 1e-4, 100, 1024
OF_EXAMPLES, OF_USERS = 1.5, 0.5  # clip norms, near the norms of ratings' gradients and of users' means


class Ratings(nn.Module):
    """Predicts stars from the movie alone: a mean, and a bias for each of the movies, in buckets of the catalog."""

    def __init__(self, num_movies: int, buckets: int = 400):
        super().__init__()
        self.size = -(-num_movies // buckets)
        self.mean, self.bias = nn.Linear(1, 1, bias=False), nn.Embedding(buckets, 1)
        nn.init.zeros_(self.mean.weight)
        nn.init.zeros_(self.bias.weight)

    def forward(self, movie: Tensor) -> Tensor:
        ones = torch.ones(len(movie), 1, device=movie.device)
        return (self.mean(ones) + self.bias(movie // self.size))[:, 0]


def trained(
    data: Dataset | tp.Examples, num_movies: int, rate: float, noise: float, clip_norm: float, **settings: object
) -> nn.Module:
    model = Ratings(num_movies)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    training = tp.PrivateTraining(
        model,
        optimizer,
        data,
        num_steps=NUM_STEPS,
        clipping=tp.Flat(clip_norm),
        noise_multiplier=noise,
        test_seed=1,
        **settings,  # type: ignore[arg-type]
    )
    for movie, stars in training:
        training.step((model(movie) - stars).square())
    return model


def error(model: nn.Module, test: TensorDataset) -> float:
    movie, stars = test.tensors
    with torch.no_grad():
        return float((model(movie) - stars).square().mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of all data sets")
    parser.add_argument("--quick", action="store_true", help="one learning rate and one group size")
    chosen = parser.parse_args()
    data = load_movielens(chosen.data)
    stars = torch.tensor(data.classes, dtype=torch.float32)
    parts = {name: part.tensors for name, part in (("train", data.train), ("test", data.test))}
    users, (num_users, num_movies) = parts["train"][0][:, 0].numpy(), data.num_ids
    train, test = (TensorDataset(pairs[:, 1], stars[labels] - 3) for pairs, labels in parts.values())
    rates = (0.3,) if chosen.quick else (0.1, 0.3, 1.0)
    constant = float((test.tensors[1] - train.tensors[1].mean()).square().mean().sqrt())
    print(f"{data.name}: {len(train):,} ratings by {num_users} users; the mean alone has an error of {constant:.3f}")
    print("\n| epsilon | G | noise, ELS | noise, ULS | error, ELS | error, ULS | s |\n|---|---|---|---|---|---|---|")
    for epsilon in (2.0, 8.0):
        for most in (16,) if chosen.quick else (8, 32):
            start = time.perf_counter()
            capped = tp.at_most(train, users, most, seed=0)
            q_examples, drawn = BATCH / len(capped), BATCH * num_users / len(capped)
            of_groups = privacy.calibrate_schedule(
                lambda noise, q=q_examples, most=most: [(privacy.SubsampledGroup(noise, q, most), NUM_STEPS)],
                epsilon,
                DELTA,
            )
            q = drawn / num_users
            of_users = privacy.calibrate(epsilon, DELTA, sampling_probability=q, num_steps=NUM_STEPS)
            examples = min(
                error(trained(capped, num_movies, rate, of_groups, OF_EXAMPLES, expected_batch_size=BATCH), test)
                for rate in rates
            )
            owned = tp.Examples(train, owners=users, per_owner=most, owner_name="user")
            persons = min(
                error(trained(owned, num_movies, rate, of_users, OF_USERS, expected_batch_size=drawn), test)
                for rate in rates
            )
            numbers = f"{of_groups:.2f} | {of_users:.2f} | {examples:.3f} | {persons:.3f}"
            print(f"| {epsilon:g} | {most} | {numbers} | {time.perf_counter() - start:.0f} |", flush=True)


if __name__ == "__main__":
    main()
