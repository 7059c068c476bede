# SPDX-License-Identifier: Apache-2.0
"""Shows that a change of the code changes no release: weights, ledgers and epsilons of fixed-key runs, bit for bit.

    python benchmarks/same_bits.py --save before.json      # before the change
    python benchmarks/same_bits.py --compare before.json   # after it; exits with 1 where something differs
    python benchmarks/same_bits.py --only 'ranks*'

Covers each clipping rule and mechanism, placements on two ranks, the bridges, the command, and resumed runs. The bits
of a run depend on the machine, on torch and on the number of threads, so both runs must be made on the same machine.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import torch_privacy as tp

Found = dict[str, str]
N, DELTA = 60, 1e-3
RUNS: dict[str, Callable[[], Found]] = {}


def run(name: str) -> Callable[[Callable[[], Found]], Callable[[], Found]]:
    """Registers a run under this name."""

    def register(function: Callable[[], Found]) -> Callable[[], Found]:
        RUNS[name] = function
        return function

    return register


# Models and data ------------------------------------------------------------------------------------------------------


def rows(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.randint(2, (n,), generator=generator))


def words(n: int = N) -> TensorDataset:
    ids = torch.randint(0, 20, (n, 7), generator=torch.Generator().manual_seed(4))
    return TensorDataset(ids, ids.sum(1) % 2)


def images(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(n, 1, 8, 8, generator=generator), torch.randint(2, (n,), generator=generator))


def mlp(*widths: int) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(d, e) for d, e in pairwise(widths or (6, 16, 2))]
    return nn.Sequential(*[m for layer in layers for m in (layer, nn.Tanh(), nn.Dropout(0.2))][:-2])


def convolutions() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 2)
    )


class Recurrent(nn.Module):
    """An LSTM over words; the row of the padding is not trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.lstm = nn.Embedding(20, 8, padding_idx=0), nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(ids))[0].mean(1))


class Tied(nn.Module):
    """A small transformer with the same weights at both ends."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids)) @ self.table.weight.T


def of_tokens(model: nn.Module, ids: Tensor, _: Tensor) -> Tensor:
    logits = model(ids)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


class Noisy(Dataset):
    """Adds random numbers to an item."""

    def __init__(self):
        self.data = rows()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[i]
        return x + 0.1 * torch.randn(6) + 0.1 * random.random(), y


# A training ---------------------------------------------------------------------------------------------------------


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor = tensor.detach()
        found[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def found(weights: Mapping[str, Tensor], training: Any, **more: Any) -> Found:
    """Returns digests of the weights and of the ledger, and epsilon in words."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in weights.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    ledger = "" if training is None else repr(list(training.ledger.events))
    spent = "" if training is None else str(training.spent(DELTA))
    texts = {key: str(value) for key, value in more.items()}
    return {"weights": digest.hexdigest(), "ledger": digest_of(ledger), "epsilon": spent, **texts}


def digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def training_of(model: nn.Module, data: Any = None, optimizer: Any = None, **settings: Any) -> tp.PrivateTraining:
    settings = {"expected_batch_size": 12, "num_steps": 11, "noise_multiplier": 1.0, "delta": DELTA} | settings
    settings = {"clipping": tp.Flat(0.5)} | settings
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    return tp.PrivateTraining(model, optimizer, rows() if data is None else data, test_seed=5, **settings)


def train(training: tp.PrivateTraining, until: int | None = None, losses: Any = cross_entropy) -> tp.PrivateTraining:
    for batch in training:
        training.step(losses(training.model, *batch))
        if until is not None and training.step_count >= until:
            break
    return training


def simple(model: nn.Module, data: Any = None, losses: Any = cross_entropy, **settings: Any) -> Found:
    training = train(training_of(model, data, **settings), losses=losses)
    return found(weights_of(model), training)


# Mechanisms -----------------------------------------------------------------------------------------------------------


def of_views(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model, x, y).view(-1, 2)


def subspace() -> tp.AnchorSubspace:
    return tp.AnchorSubspace(torch.randn(30, 6, generator=torch.Generator().manual_seed(9)), num_basis=6, groups=2)


PLAIN: dict[str, Callable[[], Found]] = {
    "flat, microbatches": lambda: simple(mlp(), performance=tp.Performance(microbatch_size=5)),
    "flat, empty batches": lambda: simple(mlp(), expected_batch_size=1.5, num_steps=20),
    "flat, epochs and a target": lambda: simple(
        mlp(), num_steps=None, epochs=2, noise_multiplier=None, target_epsilon=4
    ),
    "automatic, padded words": lambda: simple(Recurrent(), words(), clipping=tp.Automatic()),
    "per layer": lambda: simple(mlp(6, 8, 8, 2), clipping=tp.PerLayer(0.5)),
    "each layer": lambda: simple(mlp(6, 8, 2), clipping=tp.EachLayer(0.5)),
    "adaptive": lambda: simple(mlp(), clipping=tp.Adaptive(0.5)),
    "micro-batches clipped": lambda: simple(mlp(), clipping=tp.MicroBatches(0.5, 4)),
    "schedules": lambda: simple(
        mlp(),
        noise_schedule=lambda t: 1 + t / 10,
        clipping=tp.Flat(0.5).scheduled(lambda t: 0.9**t),
        performance=tp.Performance(microbatch_size=8),
    ),
    "convolutions, small memory": lambda: simple(
        convolutions(), images(), performance=tp.Performance(memory_budget=1.1)
    ),
    "tied transformer": lambda: simple(Tied(), words(), of_tokens),
    "views of random items": lambda: simple(mlp(), tp.Examples(Noisy(), views=2), of_views),
    "workers": lambda: simple(mlp(), tp.Examples(Noisy(), num_workers=1), num_steps=6),
    "owners": lambda: simple(
        mlp(), tp.Examples(rows(), owners=[i // 3 for i in range(N)], per_owner=2), expected_batch_size=6
    ),
    "projections": lambda: simple(mlp(), clipping=tp.Sketched(16, clip_norm=0.5)),
    "few projections": lambda: simple(mlp(), clipping=tp.Sketched(4, clip_norm=0.5, not_for_release=True)),
    "GEP": lambda: simple(mlp(), clipping=tp.GEP(subspace(), tp.Flat(1.0), tp.Flat(0.5))),
    "B-GEP": lambda: simple(
        mlp(), clipping=tp.BGEP(subspace(), tp.Flat(1.0)), performance=tp.Performance(microbatch_size=5)
    ),
    "assumed independent": lambda: simple(mlp(), tp.Examples(rows(), assume_independent="they are")),
}
RUNS.update(PLAIN)


@run("principal components")
def principal_components() -> Found:
    data = rows()
    pca = tp.PrivatePCA(3, noise_multiplier=4.0, test_seed=2).fit(data.tensors[0])
    model = mlp(3, 8, 2)
    data = TensorDataset(torch.as_tensor(pca.transform(data.tensors[0])), data.tensors[1])
    return simple(model, data, prior_releases=[pca.release_])


# Resuming -------------------------------------------------------------------------------------------------------------


@run("resumed from a state")
def resumed_from_a_state() -> Found:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    first = train(training_of(model, optimizer=optimizer, clipping=tp.Adaptive(0.5)), until=6)
    state = first.state_dict()
    second = training_of(model, optimizer=optimizer, clipping=tp.Adaptive(0.5))
    second.load_state_dict(state)
    return found(weights_of(model), train(second))


@run("resumed from a file")
def resumed_from_a_file() -> Found:
    def make() -> tuple[Any, Any, Any, Any]:
        model = Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 11)
        return model, optimizer, scheduler, training_of(model, words(), optimizer, scheduler=scheduler)

    with tempfile.TemporaryDirectory() as folder:
        model, optimizer, scheduler, training = make()
        train(training, until=5)
        tp.save_secret(training, Path(folder) / "state.json")
        kept = [part.state_dict() for part in (model, optimizer, scheduler)]
        model, optimizer, scheduler, training = make()
        for part, state in zip((model, optimizer, scheduler), kept, strict=True):
            part.load_state_dict(state)
        tp.load_secret(training, Path(folder) / "state.json")
        return found(weights_of(model), train(training))


@run("stopped and begun again")
def stopped_and_begun_again() -> Found:
    model = mlp()
    training, turns = training_of(model, performance=tp.Performance(microbatch_size=7)), 0
    while training.step_count < 11:
        for x, y in training:
            turns += 1
            if turns in (3, 17, 31):
                break
            training.step(cross_entropy(model, x, y))
    return found(weights_of(model), training)


# Audits, run folders, bridges -----------------------------------------------------------------------------------------


@run("canaries")
def canaries() -> Found:
    model = mlp()

    def trainer(data: Any) -> Any:
        return train(training_of(model, data))

    audit = tp.audit(lambda data: trainer(data), rows(), tp.GradientCanaries(16), test_seed=3)
    scores = audit.inside.tolist(), audit.outside.tolist()  # repr(audit) names the address of an object
    return found(weights_of(model), None, audit=digest_of(repr((*scores, *audit.plan))))


@run("run folder")
def run_folder() -> Found:
    with tempfile.TemporaryDirectory() as folder:
        model, path = mlp(), Path(folder) / "run"
        training = train(training_of(model, run_folder=path))
        names = sorted(p.name for p in path.iterdir())
        metrics = (path / "metrics.csv").read_text().splitlines()
        losses = [line.split(",")[:3] for line in metrics if "," in line]
        return found(weights_of(model), training, files=names, metrics=digest_of(repr(losses)))


@run("Hugging Face")
def hugging_face() -> Found:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from torch_privacy.huggingface import PrivateTrainer

    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    ids = words().tensors[0]
    data = [{"input_ids": row, "labels": row} for row in ids]
    privacy = dict(clipping=tp.Flat(1.0), noise_multiplier=1.0, delta=DELTA, expected_batch_size=6, test_seed=5)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=6,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            use_cpu=True,
        )
        trainer = PrivateTrainer(model, arguments, train_dataset=data, privacy=privacy)
        trainer.train()
        return found(weights_of(model), trainer.training)


@run("Lightning")
def lightning() -> Found:
    import lightning.pytorch as pl

    from torch_privacy.lightning import PrivateFit

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return cross_entropy(self.net, *batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    with tempfile.TemporaryDirectory() as folder:
        privacy = dict(expected_batch_size=8, clipping=tp.Flat(0.5), noise_multiplier=1.0, delta=DELTA, test_seed=5)
        module, fit = Module(), PrivateFit(**privacy)
        trainer = pl.Trainer(
            max_epochs=2, callbacks=[fit], logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, accelerator="cpu",
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=8))
        return found(weights_of(module), fit.training)


@run("scikit-learn")
def scikit_learn() -> Found:
    from torch_privacy.sklearn import PrivateClassifier

    x, y = (t.numpy() for t in rows(200).tensors)
    model = PrivateClassifier(epsilon=3.0, delta=DELTA, test_seed=5, epochs=3, batch_size=40)
    model.fit(x, y)
    return found({"probabilities": torch.from_numpy(model.predict_proba(x))}, None, epsilon=str(model.spent_))


@run("Opacus")
def opacus() -> Found:
    from torch.utils.data import DataLoader

    from torch_privacy.opacus import PrivacyEngine

    model = mlp()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows(), batch_size=10)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, test_seed=5
    )
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return found(weights_of(model), engine.training)


# Ranks ----------------------------------------------------------------------------------------------------------------


def on_ranks(place: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> Found:
    """Returns what two processes find; both must find the same."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (place, folder), nprocs=2, start_method="fork")  # type: ignore[attr-defined]
        first, second = (json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second, (first, second)
    return first


def _rank(rank: int, place: Callable[[], tuple[nn.Module, dict[str, Any]]], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, settings = place()
    training = train(training_of(model, **settings))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found(weights_of(model), training)))
    dist.destroy_process_group()


def _replicated() -> tuple[nn.Module, dict[str, Any]]:
    return nn.parallel.DistributedDataParallel(mlp()), {"performance": tp.Performance(microbatch_size=5)}


def _sharded() -> tuple[nn.Module, dict[str, Any]]:
    from torch.distributed.fsdp import fully_shard

    model = mlp(6, 8, 8, 2)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model, {"clipping": tp.PerLayer(0.5)}


def _parallel() -> tuple[nn.Module, dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return parallelize_module(
        model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    ), {}


RUNS |= {
    "ranks, replicated": lambda: on_ranks(_replicated),
    "ranks, sharded": lambda: on_ranks(_sharded),
    "ranks, tensor parallel": lambda: on_ranks(_parallel),
}


# The command ----------------------------------------------------------------------------------------------------------


@run("own table")
def own_table() -> Found:
    from typer.testing import CliRunner

    from torch_privacy.cli import app

    generator = random.Random(3)
    lines = ["age,color,sick"]
    for _ in range(400):
        age, color = generator.randint(20, 80), generator.choice(["red", "blue"])
        lines.append(f"{age},{color},{'yes' if age + generator.gauss(0, 10) > 50 else 'no'}")
    schema = (
        'target = "sick"\ntask = "classification"\n[columns.age]\nkind = "number"\nbounds = [20, 80]\n'
        '[columns.color]\nkind = "category"\ncategories = ["red", "blue"]\n'
        '[columns.sick]\nkind = "category"\ncategories = ["no", "yes"]\n'
    )
    with tempfile.TemporaryDirectory() as folder:
        table, declared, out = Path(folder) / "people.csv", Path(folder) / "schema.toml", Path(folder) / "run"
        table.write_text("\n".join(lines) + "\n")
        declared.write_text(schema)
        options = ["--target", "sick", "--schema", declared, "--run", out, "--epsilon", "3", "--epochs", "2", "--quiet"]
        with patch("secrets.token_bytes", lambda size: b"k" * size):
            result = CliRunner().invoke(app, ["train", str(table), *map(str, options)])
        if result.exit_code:
            raise RuntimeError(result.output) from result.exception
        from safetensors.torch import load_file

        weights = load_file(next(out.glob("*.safetensors")))
        ledger = [json.loads(line).get("event") for line in (out / "ledger.jsonl").read_text().splitlines()]
        return found(weights, None, ledger=digest_of(repr(ledger)))


def results(only: str) -> Iterator[tuple[str, Found]]:
    for name, function in RUNS.items():
        if fnmatch.fnmatch(name, only):
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                result = function()
            print(
                f"{name:<28} {time.perf_counter() - start:5.1f} s  {result['weights'][:12]}  {result['epsilon']}",
                flush=True,
            )
            yield name, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", default="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    all_found = dict(results(arguments.only))
    if arguments.save:
        arguments.save.write_text(json.dumps(all_found, indent=1))
    if arguments.compare:
        before = json.loads(arguments.compare.read_text())
        different = [name for name, result in all_found.items() if before.get(name) != result]
        for name in different:
            print(f"DIFFERENT {name}: {before.get(name)} before, {all_found[name]} now")
        print(f"{len(all_found) - len(different)} of {len(all_found)} runs are equal, bit for bit")
        sys.exit(bool(different))


if __name__ == "__main__":
    main()
