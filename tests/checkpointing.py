# SPDX-License-Identifier: Apache-2.0
"""Trains under ``torchrun`` with checkpoints, and goes on after a crash, with any number of processes.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 tests/checkpointing.py RUN_FOLDER SECRET_FOLDER

Model, optimizer and average are saved by ``torch.distributed.checkpoint``, each rank its shards. The keys go into a
file of rank 0 alone. The file is written last, and names the checkpoint that belongs to it.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_privacy as tp

Replay = Literal["exact", "skip"] | None


def state_of(training: tp.PrivateTraining, average: tp.MovingAverage) -> dict:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer, "average": average.state_dict()}


def save(training: tp.PrivateTraining, average: tp.MovingAverage, folder: Path, secret: Path) -> None:
    """Saves a checkpoint; every rank calls it after a step."""
    name = f"step{training.step_count}"
    dcp.save(state_of(training, average), checkpoint_id=folder / name)
    tp.save_secret(training, secret)  # last: from now on it names this checkpoint
    if dist.get_rank() == 0:
        for older in set(folder.glob("step*")) - {folder / name}:
            shutil.rmtree(older)


def resume(
    training: tp.PrivateTraining, average: tp.MovingAverage, folder: Path, secret: Path, replay: Replay = None
) -> None:
    """Loads the last complete checkpoint, if there is one; every rank calls it before the loop."""
    step = tp.load_secret(training, secret, replay)
    if step is None:
        return
    state = state_of(training, average)  # says what to load, and where to
    dcp.load(state, checkpoint_id=folder / f"step{step}")
    set_state_dict(
        training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    average.load_state_dict(state["average"])


def main(folder: Path, secret: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(100, 3, generator=generator), torch.randint(2, (100,), generator=generator)
    training = tp.PrivateTraining(
        model,
        optimizer,
        torch.utils.data.TensorDataset(x, y),
        expected_batch_size=10,
        num_steps=8,
        clipping=tp.Adaptive(1.0, count_noise_stddev=4.0),
        noise_multiplier=1.0,
        delta=1e-3,
        run_folder=folder,  # on a disk that every machine sees on which rank 0 may be restarted
    )
    average = tp.MovingAverage(model, optimizer, decay=0.9)
    resume(training, average, folder, secret)
    for x, y in training:
        if training.step(nn.functional.cross_entropy(model(x), y, reduction="none")) and training.step_count % 3 == 0:
            save(training, average, folder, secret)
    if dist.get_rank() == 0:
        print(training.spent())
        secret.unlink(missing_ok=True)  # the run is over
    dist.destroy_process_group()


if __name__ == "__main__":
    os.umask(0o077)
    main(Path(sys.argv[1]), Path(sys.argv[2]) / "training.json")
