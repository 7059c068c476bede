# SPDX-License-Identifier: Apache-2.0
"""Programs under accelerate, torchrun and Ray Train train as one process does."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_docs import blocks
from torch import nn

import torch_privacy as tp
from torch_privacy.runs import checkpoint

MODULES = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.launch"}
ACCELERATE = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
OPTIONS = {"torchrun": ["--nproc-per-node", "2"], "accelerate": [*ACCELERATE, "--dynamo_backend", "no"]}


def network() -> nn.Module:
    torch.manual_seed(0)
    single = {"dtype": torch.float32}
    return nn.Sequential(nn.Linear(20, 5, **single), nn.Tanh(), nn.Linear(5, 2, **single))


def trained(model: nn.Module, prepare: Any = None) -> list[Any]:
    """Trains by the loop of the README; returns the weights, epsilon and the number of ranks.

    ``prepare`` wraps model, optimizer and the scheduler.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 20, generator=generator, dtype=torch.float32)
    data = torch.utils.data.TensorDataset(x, torch.randint(2, (200,), generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if prepare is not None:
        model, optimizer, scheduler = prepare(model, optimizer, scheduler)
    training = tp.PrivateTraining(
        model,
        optimizer,
        data,
        expected_batch_size=20,
        num_steps=5,
        clipping=tp.Flat(clip_norm=1.0),
        noise_multiplier=1.0,
        delta=1e-5,
        scheduler=scheduler,
        test_seed=3,
    )
    for x, y in training:
        training.step(F.cross_entropy(model(x), y, reduction="none"))
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    numbers = torch.cat([p.detach().flatten() for p in weights]).tolist()
    return [numbers, training.spent().epsilon.high, training.statement().get("ranks", 1)]


def assert_trained_as_alone(found: list[Any]) -> None:
    weights, epsilon, _ = trained(network())
    assert found[0] == pytest.approx(weights, abs=1e-6)
    assert found[1:] == [epsilon, 2]


def launch(launcher: str, program: Path, *arguments: str) -> str:
    """Returns what a program on two ranks prints."""
    paths = os.pathsep.join(filter(None, [*sys.path, str(Path(__file__).parent)]))
    done = subprocess.run(
        [sys.executable, "-m", MODULES[launcher], *OPTIONS[launcher], str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=program.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


OWN = """
import json
import torch
from accelerate import Accelerator
from test_launchers import network, trained
from torch.distributed.fsdp import fully_shard

accelerator = Accelerator(cpu=True)
prepared = trained(network(), accelerator.prepare)
accelerator.print(json.dumps([prepared, trained(fully_shard(network()))]))
accelerator.end_training()
"""


@pytest.mark.thorough
def test_prepared_and_sharded_models_train_under_accelerate_as_alone(tmp_path):
    (tmp_path / "program.py").write_text(OWN)
    for found in json.loads(launch("accelerate", tmp_path / "program.py")):
        assert_trained_as_alone(found)


@pytest.mark.thorough
def test_program_of_the_page_runs_on_two_ranks(tmp_path):
    shown = [block for block in blocks("docs/distributed.md") if block.language == "python"]
    (tmp_path / "program.py").write_text("\n".join(block.text for block in shown))
    printed = launch("torchrun", tmp_path / "program.py")
    assert printed == shown[0].output
    secret = tmp_path / "checkpoints" / "secret.safetensors"
    assert secret.stat().st_mode & 0o777 == 0o600
    key = checkpoint.load(secret)["training"]["noise_key"]
    others = [path for path in tmp_path.rglob("*") if path.is_file() and path != secret]
    assert others
    assert not [path for path in others if key.encode() in path.read_bytes() or bytes.fromhex(key) in path.read_bytes()]


def on_a_worker(settings: dict[str, str]) -> None:
    """Trains as a worker of Ray; rank 0 writes what came out."""
    prepare_model = importlib.import_module("ray.train.torch").prepare_model
    found = trained(prepare_model(network()))
    if torch.distributed.get_rank() == 0:
        Path(settings["out"]).write_text(json.dumps(found))


@pytest.mark.filterwarnings("ignore")  # Ray's own, about itself
def test_model_prepared_by_ray_trains_as_alone(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is no dependency")
    trainer, train = importlib.import_module("ray.train.torch"), importlib.import_module("ray.train")
    for name, value in {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    paths = os.pathsep.join(filter(None, [*sys.path, str(Path(__file__).parent)]))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        trainer.TorchTrainer(
            on_a_worker,
            train_loop_config={"out": str(tmp_path / "out.json")},
            scaling_config=train.ScalingConfig(num_workers=2),
            run_config=train.RunConfig(storage_path=str(tmp_path / "ray")),
        ).fit()
    finally:
        ray.shutdown()
    assert_trained_as_alone(json.loads((tmp_path / "out.json").read_text()))
