# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one training step: non-private, ours, and peers, interleaved in one process.

    python benchmarks/step.py            # all models
    python benchmarks/step.py adult mlp  # some

Prints, per model: the median milliseconds of a non-private step, and for every contender the ratio of its median to
that, the ratio of the minima, and its peak memory above the loaded model (each measured in a process of its own).

``ours, no noise`` is recording, norms, clipping and the clipped sum; ``ours`` is all of ``PrivateTraining``: Poisson
sampling, noise, ledger. Batches are fixed in all but the latter.
"""

import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy._layout import Layouts
from torch_privacy._tape import Tape

Step = Callable[[], None]


def adult() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(123, 16), nn.ReLU(), nn.Linear(16, 2))
    return model, (torch.rand(256, 123) < 0.11).float(), torch.randint(2, (256,))


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    hidden = [nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(1000, 10)), torch.rand(256, 784), torch.randint(10, (256,))


def mnist_cnn() -> tuple[nn.Module, Tensor, Tensor]:
    """The two convolutions of the papers' MNIST experiments, 26,010 parameters."""
    features = [nn.Conv2d(1, 16, 8, 2, 3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU()]
    head = [nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)]
    return nn.Sequential(*features, *head), torch.rand(256, 1, 28, 28), torch.randint(10, (256,))


MODELS = {"adult": adult, "mlp": mlp, "mnist_cnn": mnist_cnn}


def non_private(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def ours_without_noise(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parameters, layouts, clipping = dict(model.named_parameters()), Layouts(), tp.Flat(1.0)

    def step() -> None:
        with Tape(parameters, layouts=layouts) as tape:
            losses = F.cross_entropy(model(x), y, reduction="none")
        jacobian = tape.jacobian(losses)
        clipped_sum = jacobian.weighted_sum(clipping.factors(jacobian.squared_norms().sqrt()))
        for name, p in parameters.items():
            p.grad = clipped_sum[name] / len(x)
        optimizer.step()

    return step


def ours(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    copies = 60_000 // len(x)
    data = TensorDataset(x.repeat(copies, *[1] * (x.ndim - 1)), y.repeat(copies))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings = {"expected_batch_size": len(x), "num_steps": 10**6, "noise_multiplier": 1.0}
    training = tp.PrivateTraining(model, optimizer, data, clipping=tp.Flat(1.0), **settings)
    batches = iter(training)

    def step() -> None:
        xb, yb = next(batches)
        training.step(F.cross_entropy(model(xb), yb, reduction="none"))

    return step


def opacus(mode: str) -> Callable[[nn.Module, Tensor, Tensor], Step]:
    def make(model: nn.Module, x: Tensor, y: Tensor) -> Step:
        from opacus import PrivacyEngine

        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(TensorDataset(x, y), batch_size=len(x))
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
        private_model, private_optimizer = made[0], made[1]

        def step() -> None:
            private_optimizer.zero_grad()
            criterion(private_model(x), y).backward()
            private_optimizer.step()

        return step

    return make


def vmap(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    from torch.func import functional_call, grad
    from torch.func import vmap as over

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parameters = dict(model.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    rows = over(grad(loss), in_dims=(None, 0, 0))

    def step() -> None:
        g = rows(parameters, x, y)
        norms = torch.stack([part.flatten(1).square().sum(1) for part in g.values()]).sum(0).sqrt()
        c = (1 / norms).clamp(max=1)
        for name, p in parameters.items():
            p.grad = torch.einsum("n,n...->...", c, g[name]) / len(x)
        optimizer.step()

    return step


CONTENDERS = {
    "non-private": non_private,
    "ours, no noise": ours_without_noise,
    "ours": ours,
    "vmap, no noise": vmap,
    "opacus hooks": opacus("hooks"),
    "opacus ghost": opacus("ghost"),
}


def peak_memory(model: str, contender: str) -> float:
    """MiB above the loaded model during three steps, in this process."""
    torch.manual_seed(0)
    step = CONTENDERS[contender](*MODELS[model]())
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    for _ in range(3):
        step()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def times(model: str, seconds: float) -> dict[str, list[float]]:
    """Seconds per step of every contender, taken in turns until the time is up."""
    steps = {}
    for name, make in CONTENDERS.items():
        torch.manual_seed(0)
        steps[name] = make(*MODELS[model]())
        for _ in range(4):
            steps[name]()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, step in steps.items():
            if len(taken[name]) >= 5 and min(taken[name]) > 20 * min(taken["non-private"]):
                continue  # five rounds tell that this one is far off; it would only cool the caches of the others
            start = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - start)
    return taken


def main(models: list[str]) -> None:
    warnings.simplefilter("ignore")
    context = multiprocessing.get_context("spawn")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    for model in models:
        taken = times(model, seconds=40)
        base = taken["non-private"]
        print(f"\n{model}: non-private step {statistics.median(base) * 1e3:.2f} ms (median of {len(base)})")
        print(f"{'':16} {'ratio of medians':>17} {'of minima':>10} {'peak MiB':>9}")
        for name, values in taken.items():
            with context.Pool(1) as pool:
                memory = pool.apply(peak_memory, (model, name))
            ratio, least = statistics.median(values) / statistics.median(base), min(values) / min(base)
            print(f"{name:16} {ratio:17.2f} {least:10.2f} {memory:9.0f}")


if __name__ == "__main__":
    main(sys.argv[1:] or list(MODELS))
