# SPDX-License-Identifier: Apache-2.0
"""Trains for many steps with ledger, metrics and checkpoints on disk: memory and time per step must stay flat.

    python benchmarks/soak.py                       # 20,000 steps
    python benchmarks/soak.py --steps 4000

Every tenth of the steps prints a line: resident memory, the median processor time of a step, and the size of the
ledger. What grows by right are the releases themselves, some 100 bytes each in memory.
"""

import argparse
import gc
import os
import statistics
import tempfile
from pathlib import Path
from time import process_time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.metrics import Log

EVERY = 500  # steps between checkpoints


def resident() -> float:
    """Returns the resident memory of this process in MiB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def soak(folder: Path, steps: int, report: int) -> list[tuple[int, float, float, int]]:
    """Returns step, resident MiB, median processor ms of a step, bytes of the ledger, every ``report`` steps."""
    torch.manual_seed(0)
    x = torch.randn(2000, 10)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = RunFolder(folder)
    run.create()
    training = tp.PrivateTraining(
        model, optimizer, TensorDataset(x, (x[:, 0] > 0).long()), expected_batch_size=20, num_steps=steps,
        clipping=tp.Flat(1.0), noise_multiplier=1.0, delta=1e-5, run_folder=folder,
    )  # fmt: skip
    log = Log(steps, steps / EVERY)
    rows, seconds, start = [], [], process_time()
    for inputs, targets in training:
        losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
        made = training.step(losses)
        if not training.rehearsing:
            log.add(losses, (losses < 0.7).float())
        if not made:
            continue
        step = training.step_count
        if log.is_due(step):
            log.end_epoch(step, *map(float, training.spent().epsilon), test_score=0.0)
            run.write_metrics(log.rows)
            tp.save_secret(training, run.checkpoint, model=model)
        seconds.append(process_time() - start)
        if step % report == 0:
            rows.append((step, resident(), 1000 * statistics.median(seconds), run.ledger.stat().st_size))
            seconds.clear()
        start = process_time()
    training.ledger.close()
    run.unlock()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time of many steps.")
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = soak(Path(folder) / "run", steps, steps // 10)
    print(f"{'step':>8}{'resident MiB':>14}{'ms a step':>11}{'ledger KiB':>12}")
    for step, memory, milliseconds, size in rows:
        print(f"{step:8,}{memory:14.1f}{milliseconds:11.2f}{size / 1024:12.0f}")
    (first, before, early, _), (last, after, late, _) = rows[0], rows[-1]
    print(
        f"memory: {1024 * (after - before) / (last - first):+.3f} KiB a step; time: {late / early:.2f} times the first"
    )


if __name__ == "__main__":
    main()
