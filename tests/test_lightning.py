# SPDX-License-Identifier: Apache-2.0
"""Tests that Lightning's Trainer with ``PrivateFit`` trains as the plain loop does, or refuses."""

import logging
import os
import stat
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler
from trainings import data

import torch_privacy as tp
from torch_privacy.runs import checkpoint

lightning = pytest.importorskip("lightning.pytorch")  # an extra, which the tests install
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, WandbLogger  # noqa: E402
from lightning.pytorch.plugins.environments import ClusterEnvironment  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy  # noqa: E402

from torch_privacy.lightning import PrivateFit, stand_ins  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated"),  # Lightning's own call
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*does not have a default .validation_step"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
PRIVACY = {"expected_batch_size": 8, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0, "delta": 1e-3, "test_seed": 5}
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """A classifier; keeps what Lightning calls in which step."""

    def __init__(self, schedule=None, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self._schedule, self.seen = schedule, []

    def forward(self, x):
        return self.net(x)

    def losses(self, batch):
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="none")

    def training_step(self, batch, batch_idx):
        return self.losses(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.losses(batch).mean(), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append((self.trainer.global_step, self.trainer.optimizers[0].param_groups[0]["lr"], outputs))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)
        schedule = {} if self._schedule is None else {"lr_scheduler": self._schedule(optimizer)}
        return {"optimizer": optimizer, **schedule}


def held_out():
    """Returns eight examples that are not in the training data."""
    x, y = data(8).tensors
    return TensorDataset(-x, y)


def trainer_of(*callbacks, **settings):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(accelerator="cpu", callbacks=[*callbacks], **quiet | {"max_epochs": 2} | settings)


def fitted(module, loader=None, *, trainer=None, callbacks=(), ckpt_path=None, val=None, settings=None, **privacy):
    fit = PrivateFit(**PRIVACY | privacy)
    trainer = trainer_of(fit, *callbacks, **settings or {})
    trainer.fit(module, data() if loader is None else loader, val, ckpt_path=ckpt_path)
    return trainer, fit


def plain(num_steps, make=Module, schedule=None, losses=Module.losses, **privacy):
    """Trains by the plain loop."""
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    scheduler = None if schedule is None else schedule(optimizer)
    training = tp.PrivateTraining(
        module, optimizer, data(), num_steps=num_steps, scheduler=scheduler, **PRIVACY | privacy
    )
    for batch in training:
        with training.record():
            of_batch = losses(module, batch)
        training.step(of_batch)
    return module, training


def assert_same(module, other):
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_examples_in_place_of_a_loader_say_what_is_protected():
    module, ids = Module(), [i // 4 for i in range(len(data()))]
    examples = tp.Examples(data(), owners=ids, per_owner=2, owner_name="user")
    trainer, fit = fitted(module, examples, expected_batch_size=5)
    other = tp.PrivateTraining(
        again := Module(),
        again.configure_optimizers()["optimizer"],
        examples,
        epochs=2,
        sampling=tp.Poisson(),
        **PRIVACY | {"expected_batch_size": 5},
    )
    for batch in other:
        other.step(again.losses(batch))
    assert_same(module, again)
    assert trainer.global_step == fit.training.settings.num_steps == other.settings.num_steps
    with pytest.raises(TypeError, match=r"tp.Examples\(dataset, per_owner=...\) in place of the train DataLoader"):
        PrivateFit(expected_batch_size=5, per_owner=2)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"performance": tp.Performance(microbatch_size=3)},
        {"expected_batch_size": 0.7},
        {"clipping": tp.PerLayer(0.5)},
    ],
    ids=["plain", "microbatches", "empty batches", "per layer"],
)
def test_weights_and_ledger_equal_those_of_the_plain_loop(settings):
    module = Module()
    trainer, fit = fitted(module, settings={"max_steps": 9, "max_epochs": -1}, **settings)
    other, training = plain(9, **settings)
    assert_same(module, other)
    assert fit.training.ledger.state_dict() == training.ledger.state_dict()
    assert trainer.global_step == fit.training.step_count == 9
    assert [step for step, _, _ in module.seen] == list(range(1, 10))
    assert fit.training.spent().epsilon == training.spent().epsilon


def by_step(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def test_schedules_advance_once_per_release_also_for_empty_batches():
    module = Module(lambda optimizer: {"scheduler": by_step(optimizer), "interval": "step"})
    _, fit = fitted(module, settings={"max_steps": 9, "max_epochs": -1}, expected_batch_size=0.7)
    assert_same(module, plain(9, schedule=by_step, expected_batch_size=0.7)[0])
    assert [rate for _, rate, _ in module.seen] == [0.5**step for step in range(1, 10)]
    assert [outputs.get("loss") is None for _, _, outputs in module.seen] == [
        not len(fit.training._state.releases.draws.indices(step)) for step in range(9)
    ]


def test_schedules_of_epochs_and_total_steps():
    module = Module(lambda optimizer: {"scheduler": by_step(optimizer), "interval": "epoch"})
    fitted(module, settings={"max_epochs": 2})
    assert [rate for _, rate, _ in module.seen] == [1.0] * 4 + [0.5] * 5 + [0.25]

    class OneCycle(Module):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            assert self.trainer.estimated_stepping_batches == 10
            total = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total + 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    trainer, _ = fitted(OneCycle())
    assert trainer.global_step == 10


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize(
    ("settings", "num_steps"),
    [
        ({"max_epochs": 3}, 15),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6),
        ({"max_epochs": 2, "limit_train_batches": 0.4}, 4),
        ({"fast_dev_run": 2}, 2),
    ],
    ids=["epochs", "steps", "limit", "share", "fast_dev_run"],
)
def test_number_of_steps_is_that_of_the_trainer(settings, num_steps):
    trainer, fit = fitted(Module(), settings=settings)
    assert trainer.global_step == fit.training.step_count == fit.training.settings.num_steps == num_steps


def test_a_trial_run_that_spends_all_of_epsilon_is_warned_of():
    settings = {"fast_dev_run": True}
    with pytest.warns(UserWarning, match="fast_dev_run may spend all of target_epsilon in 1 step"):
        _, fit = fitted(Module(), settings=settings, noise_multiplier=None, target_epsilon=2.0)
    assert fit.training.spent().epsilon.high > 1.9
    fitted(Module(), settings=settings)  # a noise that is given is as large as ever


def test_a_budget_ends_the_training_and_no_step_is_counted_after_it():
    fit = PrivateFit(**PRIVACY)
    trainer = trainer_of(fit, max_epochs=3, min_epochs=3)
    trainer.fit(Module(), tp.Examples(data(), budget=tp.privacy.Budget(2.0, 1e-3)))
    assert 0 < trainer.global_step == fit.training.step_count < 15
    assert fit.training.spent().epsilon.high <= 2.0


class WithAccuracy(Module):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(2, average="micro")


class Logs(WithAccuracy):
    """Logs as users do; a metric gets what the training step returned."""

    def training_step(self, batch, batch_idx):
        losses = self.losses(batch)
        self.log("loss", losses.mean(), on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"size": float(len(losses))}, on_step=True, on_epoch=False)
        return {"loss": losses, "scores": self(batch[0]).detach(), "labels": batch[1]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert batch.batch[1] is outputs["labels"]
        self.accuracy(outputs["scores"], outputs["labels"])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True, batch_size=len(outputs["labels"]))


class KeepsMetric(WithAccuracy):
    def training_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        return self.losses(batch)


def test_logs_have_no_rehearsals(tmp_path):
    class Kept(CSVLogger):
        points = ()

        def log_metrics(self, metrics, step=None):
            self.points = [*self.points, (step, metrics)]

    logger, module = Kept(tmp_path), Logs()
    fitted(module, settings={"logger": logger, "log_every_n_steps": 1, "max_epochs": 1})
    batches, right = [], 0
    other = Module()
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0, momentum=0.9)
    training = tp.PrivateTraining(other, optimizer, data(), num_steps=5, **PRIVACY)
    for batch in training:
        losses, scores = other.losses(batch), other(batch[0])
        training.step(losses)
        if not training.rehearsing:
            batches.append(losses.detach())
            right += int((scores.argmax(1) == batch[1]).sum())
    means = [float(losses.mean()) for losses in batches]
    assert [metrics["loss_step"] for _, metrics in logger.points if "loss_step" in metrics] == pytest.approx(means)
    epoch = next(metrics for _, metrics in logger.points if "loss_epoch" in metrics)
    everything = torch.cat(batches)
    assert epoch["loss_epoch"] == pytest.approx(float(everything.mean()), rel=1e-5)
    assert [metrics["size"] for _, metrics in logger.points if "size" in metrics] == [len(part) for part in batches]
    assert epoch["accuracy"] == pytest.approx(right / len(everything))
    assert [step for step, metrics in logger.points if "not_private/epsilon" in metrics] == [0, 1, 2, 3, 4]
    assert not any("epsilon" in metrics for _, metrics in logger.points)
    assert float(module.seen[0][2]["loss"]) == pytest.approx(means[0])


class LogsWithValidation(Logs):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.log("mean", outputs["loss"].mean())


class Sender(Logger):
    """Stands for a logger that sends what it gets."""

    name, version = "sender", 0

    def __init__(self):
        super().__init__()
        self.points, self.settings = [], {}

    def log_hyperparams(self, params, *args, **kwargs):
        self.settings.update(params)

    def log_metrics(self, metrics, step=None):
        self.points.append(metrics)


class SeesKeys(lightning.Callback):
    """Keeps the keys of a training, as bytes and as text, before they are deleted."""

    def __init__(self, folder):
        self.folder, self.found = folder, set()

    def on_train_batch_end(self, *_):
        for path in self.folder.glob("*.safetensors"):
            texts = [text for name, text in checkpoint.load(path)["training"].items() if name.endswith("_key")]
            self.found |= {form for text in texts for form in (text.encode(), bytes.fromhex(text))}


def logged(*loggers, callbacks=(), **privacy):
    """Trains with loggers, a validation, checkpoints and no seed; returns the trainer."""
    module, val = LogsWithValidation(), DataLoader(held_out(), batch_size=8)
    settings = {"logger": [*loggers], "log_every_n_steps": 1, "max_epochs": 2}
    trainer, _ = fitted(module, val=val, callbacks=callbacks, settings=settings, test_seed=None, **privacy)
    return trainer


def test_loggers_that_send_get_epsilon_and_settings_and_no_exact_number(tmp_path):
    sender, here = Sender(), CSVLogger(tmp_path)
    trainer = logged(sender, here)
    got = {name for point in sender.points for name in point}
    assert got == {"epsilon", "val_loss", "epoch"}
    kept = (Path(here.log_dir) / "metrics.csv").read_text()
    assert {"epsilon", "val_loss", "loss_step", "loss_epoch", "mean", "accuracy"} <= {*kept.splitlines()[0].split(",")}
    assert sender.settings == {
        "privacy/expected_batch_size": 8, "privacy/noise_multiplier": 1.0, "privacy/delta": 1e-3,
        "privacy/num_steps": 10, "privacy/clipping": "Flat(clip_norm=0.5)",
    }  # fmt: skip
    assert sender.points[-1].get("epsilon", 0) <= trainer.callbacks[0].training.spent().epsilon.high
    assert "log_metrics" not in vars(trainer._logger_connector)
    remote = CSVLogger(tmp_path)
    remote._root_dir = remote._save_dir = "s3://bucket"
    assert [stand_ins.sends_away(one) for one in (sender, here, remote)] == [True, False, True]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # by the loggers
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_usual_loggers_send_no_exact_number_and_no_key(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    makes = {
        "wandb": lambda: WandbLogger(save_dir=tmp_path, offline=True),
        "mlflow": lambda: MLFlowLogger(tracking_uri=f"file:{tmp_path}/mlruns"),
    }
    logger = makes[name]()
    keys = SeesKeys(tmp_path / "run" / "secret")
    logged(logger, callbacks=[keys], run_folder=tmp_path / "run")
    if name == "wandb":
        sent, settings = dict(logger.experiment.summary), dict(logger.experiment.config)
        logger.experiment.finish()
    else:
        run = logger.experiment.get_run(logger.run_id)
        sent, settings = run.data.metrics, run.data.params
    assert {"epsilon", "val_loss"} <= sent.keys()
    assert not {"loss_step", "loss_epoch", "loss", "mean", "accuracy", "size"} & sent.keys()
    assert float(settings["privacy/delta"]) == 1e-3
    files = [path for path in tmp_path.rglob("*") if path.is_file() and tmp_path / "run" not in path.parents]
    assert len(keys.found) == 4
    assert not [(path, key) for path in files for key in keys.found if key in path.read_bytes()]


def test_validation_between_steps_changes_nothing():
    module = Module()
    trainer, _ = fitted(module, val=DataLoader(held_out(), batch_size=4), settings={"val_check_interval": 2})
    assert trainer.callback_metrics["val_loss"] > 0
    assert_same(module, plain(10)[0])


def test_parts_of_the_module_may_be_called_and_hooks_of_transfer_are_kept():
    class Parts(Module):
        def losses(self, batch):
            x, y = batch
            return F.cross_entropy(self.net[2](self.net[1](self.net[0](x))), y, reduction="none")

        def on_after_batch_transfer(self, batch, dataloader_idx):
            x, y = batch
            return 2 * x, y

    module = Parts()
    fitted(module)

    def doubled(module, batch):
        return Module.losses(module, (2 * batch[0], batch[1]))

    assert_same(module, plain(10, losses=doubled)[0])


def test_bfloat16_autocast():
    torch.set_default_dtype(torch.float32)  # autocast leaves float64 as it is
    module = Module()
    fitted(module, settings={"precision": "bf16-mixed"})

    def losses(module, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return Module.losses(module, batch)

    assert_same(module, plain(10, losses=losses)[0])
    assert not torch.equal(module.net[0].weight, plain(10)[0].net[0].weight)


def test_early_stopping_by_a_validation_metric_is_a_stop_that_costs_all_steps():
    from lightning.pytorch.callbacks import EarlyStopping

    stop = EarlyStopping("val_loss", stopping_threshold=100.0)
    x, y = data(8).tensors
    _, fit = fitted(Module(), val=DataLoader(TensorDataset(-x, y), batch_size=4), callbacks=[stop])
    assert fit.training.step_count == 5
    assert "after 5 of 10 steps" in str(fit.training.spent())
    fit.training.optimizer.step()  # the guard of the loop is off


# Checkpoints


def saving(folder, **settings):
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **settings)


class Interrupts(lightning.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 7:
            raise OSError("lost power")


@pytest.mark.thorough
@pytest.mark.parametrize("at", [3, 5, 6], ids=["in an epoch", "at its end", "in the second"])
def test_a_run_goes_on_from_a_checkpoint_with_the_same_batches_and_noise(tmp_path, at):
    schedule = lambda optimizer: {"scheduler": by_step(optimizer), "interval": "step"}  # noqa: E731
    checkpoints = tmp_path / "checkpoints"
    with pytest.raises(OSError, match="lost power"):
        fitted(
            Module(schedule),
            callbacks=[saving(checkpoints, every_n_train_steps=1), Interrupts()],
            settings={"enable_checkpointing": True},
            run_folder=tmp_path / "run",
        )
    secret = tmp_path / "run" / "secret" / f"step-{at}.safetensors"
    assert stat.S_IMODE(os.stat(secret).st_mode) == 0o600
    keys = [value for name, value in checkpoint.load(secret)["training"].items() if name.endswith("_key")]
    module = Module(schedule, seed=3)
    trainer, fit = fitted(module, run_folder=tmp_path / "run", ckpt_path=checkpoints / f"step={at}.ckpt")
    assert trainer.global_step == fit.training.step_count == 10
    assert fit.training.num_lost == 0
    assert_same(module, plain(10, schedule=by_step)[0])
    assert len(keys) == 2
    for path in checkpoints.rglob("*"):
        with zipfile.ZipFile(path) as file:
            content = b"".join(file.read(name) for name in file.namelist())
        assert not any(key.encode() in content or bytes.fromhex(key) in content for key in keys)
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert not (tmp_path / "run" / "secret").exists()  # the run is over


@pytest.mark.thorough
def test_a_run_that_was_stopped_before_its_first_checkpoint_goes_on_from_its_start(tmp_path):
    schedule = lambda optimizer: {"scheduler": by_step(optimizer), "interval": "step"}  # noqa: E731
    with pytest.raises(OSError, match="lost power"):
        fitted(Module(schedule), callbacks=[Interrupts()], run_folder=tmp_path / "run")
    with pytest.raises(tp.Refused, match=r"start\.ckpt.*prior_releases="):
        fitted(Module(schedule), run_folder=tmp_path / "run")
    module = Module(schedule, seed=3)
    trainer, fit = fitted(module, run_folder=tmp_path / "run", ckpt_path=tmp_path / "run" / "secret" / "start.ckpt")
    assert trainer.global_step == fit.training.step_count == len(fit.training.ledger) == 10
    assert_same(module, plain(10, schedule=by_step)[0])
    assert not (tmp_path / "run" / "secret").exists()


@pytest.mark.thorough
def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    """Its weights come from releases that this ledger does not have."""
    for name in ("first", "second"):
        callbacks = [saving(tmp_path / name, every_n_train_steps=3), Interrupts()]
        settings = {"enable_checkpointing": True}
        with pytest.raises(OSError, match="lost power"):
            fitted(
                Module(), callbacks=callbacks, settings=settings, run_folder=tmp_path / f"run-{name}", test_seed=None
            )
    with pytest.raises(tp.Refused, match=r"step-3.safetensors' is missing or does not fit it"):
        fitted(
            Module(), run_folder=tmp_path / "run-first", ckpt_path=tmp_path / "second" / "step=3.ckpt", test_seed=None
        )


class FullDisk(lightning.Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if trainer.global_step:
            raise OSError("no space left")


@pytest.mark.thorough
def test_a_run_of_which_the_first_checkpoint_cannot_be_written_goes_on_from_its_start(tmp_path):
    run, callbacks = tmp_path / "run", [saving(tmp_path / "checkpoints", every_n_train_steps=3), FullDisk()]
    with pytest.raises(OSError, match="no space left"):
        fitted(Module(), callbacks=callbacks, settings={"enable_checkpointing": True}, run_folder=run)
    assert not list((tmp_path / "checkpoints").glob("*"))
    module = Module(seed=3)
    _, fit = fitted(module, run_folder=run, ckpt_path=run / "secret" / "start.ckpt")
    assert fit.training.step_count == len(fit.training.ledger) == 10
    assert_same(module, plain(10)[0])


class InterruptsAtTheEnd(lightning.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.global_step == 10:
            raise OSError("lost power")


@pytest.mark.thorough
def test_a_run_that_was_stopped_after_its_last_step_is_ended_when_it_is_resumed(tmp_path):
    """Lightning begins no training from the checkpoint of the last step."""
    run, checkpoints = tmp_path / "run", saving(tmp_path / "checkpoints", every_n_train_steps=5)
    steps = {"max_steps": 10, "max_epochs": -1}
    with pytest.raises(OSError, match="lost power"):
        fitted(
            Module(),
            callbacks=[checkpoints, InterruptsAtTheEnd()],
            settings=steps | {"enable_checkpointing": True},
            run_folder=run,
        )
    assert (run / "secret" / "step-10.safetensors").exists()
    written = (run / "results.json").read_text()
    module = Module(seed=3)
    _, fit = fitted(module, run_folder=run, ckpt_path=tmp_path / "checkpoints" / "step=10.ckpt", settings=steps)
    assert fit.training.step_count == 10
    assert_same(module, plain(10)[0])
    assert (run / "results.json").read_text() == written
    assert not (run / "secret").exists()
    _, fit = fitted(Module(), run_folder=run, ckpt_path=tmp_path / "checkpoints" / "step=10.ckpt", settings=steps)
    assert fit.training is None  # the run is over


class FailsOnce(torch.optim.SGD):
    """Fails in the update of step 3, as an interrupt there does."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls == 4:
            raise OSError("lost power")
        return super().step(closure)


class Failing(Module):
    def configure_optimizers(self):
        return FailsOnce(self.parameters(), lr=1.0)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning looks for a last checkpoint
def test_an_error_in_an_update_leaves_a_checkpoint_to_go_on_from(tmp_path):
    """Weights of step 3 and keys of step 4 do not fit together, so that the keys from before must stay."""
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    with pytest.raises(OSError, match="lost power"):
        fitted(
            Failing(),
            callbacks=[OnExceptionCheckpoint(tmp_path / "checkpoints", filename="error")],
            settings={"enable_checkpointing": True},
            run_folder=tmp_path / "run",
        )
    with pytest.raises(tp.Refused, match=r"step-3.*steps with keys there: 0\)"):
        fitted(Module(), run_folder=tmp_path / "run", ckpt_path=tmp_path / "checkpoints" / "error.ckpt")
    start = tmp_path / "run" / "secret" / "start.ckpt"
    _, fit = fitted(Module(seed=3), run_folder=tmp_path / "run", ckpt_path=start)
    assert fit.training.step_count == 10


@pytest.mark.thorough
def test_run_folder_has_scores_of_validation_and_none_of_training(tmp_path):
    fitted(Logged(), val=DataLoader(held_out(), batch_size=4), run_folder=tmp_path / "run")
    results = (tmp_path / "run" / "results.json").read_text()
    assert "val_loss" in results
    assert "loss_epoch" not in results
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.thorough
def test_checkpoints_without_their_keys_are_refused(tmp_path):
    saved = {"callbacks": [saving(tmp_path, every_n_train_steps=5)], "settings": {"enable_checkpointing": True}}
    fitted(Module(), **saved)
    with pytest.raises(tp.Refused, match="no run_folder= was given"):
        fitted(Module(), ckpt_path=tmp_path / "step=5.ckpt")
    with pytest.raises(tp.Refused, match=r"step-5.safetensors' is missing or does not fit it"):
        fitted(Module(), ckpt_path=tmp_path / "step=5.ckpt", run_folder=tmp_path / "run")
    with pytest.raises(tp.Refused, match="must lie outside of"):
        fitted(Module(), **saved, run_folder=tmp_path / "inside")
    fitted(Module(), run_folder=tmp_path / "inside")  # nothing was released there
    with pytest.raises(tp.Refused, match="holds the ledger of an earlier run"):
        fitted(Module(), run_folder=tmp_path / "inside")


# Refused


class ReturnsMean(Module):
    def training_step(self, batch, batch_idx):
        return self.losses(batch).mean()


class ReturnsNothing(Module):
    def training_step(self, batch, batch_idx):
        return None


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class StepsItself(Module):
    def training_step(self, batch, batch_idx):
        losses = self.losses(batch)
        losses.mean().backward()
        self.optimizers().step()
        return losses


class NoOptimizer(Module):
    def configure_optimizers(self):
        return None


class TwoOptimizers(Module):
    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=1.0) for part in (self.net[0], self.net[2])]


class OwnStep(Module):
    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)


class LogsGradients(Module):
    def on_before_optimizer_step(self, optimizer): ...


class Coupled(Module):
    def losses(self, batch):
        losses = super().losses(batch)
        return losses / losses.sum().detach()


class WithBatchNorm(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Logged(Module):
    def training_step(self, batch, batch_idx):
        losses = self.losses(batch)
        self.log("loss", losses.mean(), on_epoch=True)
        return losses


class Plateau(Logged):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss_epoch"}}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


def callback(name, *arguments, **named):
    from lightning.pytorch import callbacks

    return getattr(callbacks, name)(*arguments, **named)


class LoggedLater(Module):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.last = outputs["loss"].mean()

    def on_train_epoch_end(self):
        self.log("of epoch", self.last)


SAVING = {"enable_checkpointing": True}


def weighted():
    return DataLoader(data(), sampler=WeightedRandomSampler(torch.rand(40), 40))


REFUSED = {
    "scalar": (ReturnsMean, {}, "training_step returned a scalar"),
    "nothing": (ReturnsNothing, {}, "NoneType as its loss"),
    "manual optimization": (Manual, {}, "automatic_optimization is False"),
    "steps itself": (StepsItself, {}, "optimizer.step"),
    "no optimizer": (NoOptimizer, {}, "nothing to train"),
    "own optimizer_step": (OwnStep, {}, "OwnStep defines optimizer_step"),
    "own hook": (LogsGradients, {}, "LogsGradients defines on_before_optimizer_step"),
    "coupled losses": (Coupled, {}, "example"),
    "a metric's state": (
        KeepsMetric,
        {},
        "the forward changed 'accuracy.* A metric, or a list of outputs: update it after the step",
    ),
    "batch norm": (WithBatchNorm, {}, "batch normalization"),
    "gradient clipping": (Module, {"settings": {"gradient_clip_val": 1.0}}, "gradient_clip_val=1.0"),
    "accumulation": (Module, {"settings": {"accumulate_grad_batches": 2}}, "accumulate_grad_batches=2"),
    "overfitting": (Module, {"settings": {"overfit_batches": 1}}, "overfit_batches=1"),
    "reloading": (Module, {"settings": {"reload_dataloaders_every_n_epochs": 1}}, "reload_dataloaders_every_n_epochs"),
    "endless": (Module, {"settings": {"max_epochs": -1}}, "must be known at the start"),
    "learning rate finder": (Module, {"callbacks": [callback("LearningRateFinder")]}, "LearningRateFinder cannot"),
    "weight averaging": (
        Module,
        {"callbacks": [callback("StochasticWeightAveraging", 0.1)]},
        "StochasticWeightAveraging cannot",
    ),
    "pruning": (
        Module,
        {"callbacks": [callback("ModelPruning", "l1_unstructured", amount=0.5)]},
        "ModelPruning cannot",
    ),
    "spikes of the loss": (Module, {"callbacks": [callback("SpikeDetection")]}, "SpikeDetection cannot"),
    "accumulation by a callback": (
        Module,
        {"callbacks": [callback("GradientAccumulationScheduler", {0: 2})]},
        "GradientAccumulationScheduler must be left out",
    ),
    "stop by a private loss": (
        Logged,
        {"callbacks": [callback("EarlyStopping", "loss")]},
        "'loss' is logged in training",
    ),
    "a checkpoint named by a private loss": (
        Logged,
        {"callbacks": [callback("ModelCheckpoint", filename="{step}-{loss_step:.3f}")], "settings": SAVING},
        "'loss_step' .* in the name",
    ),
    "schedule by a private loss": (Plateau, {}, "'loss_epoch' to steer"),
    "stream": (Module, {"loader": DataLoader(Stream())}, "must be map-style"),
    "weighted sampler": (Module, {"loader": weighted()}, "WeightedRandomSampler"),
    "no batches": (Module, {"loader": DataLoader(data(), batch_size=None)}, "batch_size=None"),
    "several loaders": (Module, {"loader": [DataLoader(data())] * 2}, "Give one DataLoader"),
    "worker_init_fn": (Module, {"loader": DataLoader(data(), worker_init_fn=print)}, "worker_init_fn"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:.LightningModule.configure_optimizers. returned .None")
def test_what_is_not_covered_is_refused_before_anything_is_released(case):
    make, arguments, message = REFUSED[case]
    module = make()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(tp.Refused, match=message):
        fitted(module, **arguments)
    assert all(torch.equal(p, q) for p, q in zip(before, module.parameters(), strict=True))


def test_lightning_refuses_several_optimizers_and_two_of_the_callbacks():
    with pytest.raises(RuntimeError, match="Training with multiple optimizers is only supported with manual"):
        fitted(TwoOptimizers())
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `PrivateFit`"):
        trainer_of(PrivateFit(**PRIVACY), PrivateFit(**PRIVACY))


def test_stops_by_scores_on_examples_of_the_training_data_are_refused():
    everyone = data()
    stop = callback("EarlyStopping", "val_loss")
    with pytest.raises(tp.Refused, match="holds examples of the training data"):
        fitted(Module(), Subset(everyone, range(30)), val=DataLoader(Subset(everyone, range(29, 40))), callbacks=[stop])
    fitted(
        Module(),
        Subset(everyone, range(30)),
        val=DataLoader(Subset(everyone, range(30, 40))),
        callbacks=[callback("EarlyStopping", "val_loss")],
        settings={"max_epochs": 1},
    )


@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint"])
def test_choices_by_what_other_hooks_log_in_training_are_refused(kind, tmp_path):
    steering = callback(kind, **{"dirpath": tmp_path} if kind == "ModelCheckpoint" else {}, monitor="of epoch")
    with pytest.raises(tp.Refused, match="'of epoch' is logged in training"):
        fitted(LoggedLater(), callbacks=[steering], settings=SAVING)
    assert not list(tmp_path.iterdir())


def test_run_folder_has_no_number_of_other_hooks_and_no_score_on_training_data(tmp_path):
    everyone = data()
    fitted(LoggedLater(), everyone, val=DataLoader(Subset(everyone, range(9))), run_folder=tmp_path / "run")
    results = (tmp_path / "run" / "results.json").read_text()
    assert "of epoch" not in results
    assert "val_loss" not in results


def test_a_tuner_cannot_train_without_privacy():
    """The learning-rate finder takes all other callbacks away while it trains."""
    from lightning.pytorch.tuner import Tuner

    module, fit = Module(), PrivateFit(**PRIVACY)
    module.lr = 1.0
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(tp.Refused, match="LearningRateFinder cannot be used"):
        Tuner(trainer_of(fit)).lr_find(module, data())
    assert all(torch.equal(p, q) for p, q in zip(before, module.parameters(), strict=True))


def test_a_second_fit_is_refused():
    module = Module()
    trainer, fit = fitted(module)
    before = [p.detach().clone() for p in module.parameters()]
    trainer.fit_loop.max_epochs = 4
    with pytest.raises(tp.Refused, match="fit was called before"):
        trainer.fit(module, data())
    trainer.callbacks.remove(fit)
    with pytest.raises(tp.Refused, match="outside of the private training"):
        trainer.fit(module, data())
    assert all(torch.equal(p, q) for p, q in zip(before, module.parameters(), strict=True))


def test_keywords_are_checked_at_once():
    with pytest.raises(ValueError, match="leave out num_steps="):
        PrivateFit(expected_batch_size=8, num_steps=3)
    with pytest.raises(ValueError, match="noise_multplier= must be a keyword"):
        PrivateFit(expected_batch_size=8, noise_multplier=1.0)
    with pytest.raises(ValueError, match="expected_batch_size= is missing"):
        PrivateFit(clipping=tp.Flat(1.0))


def test_loaders_give_data_collate_fn_and_workers():
    def collate(items):
        return torch.stack([x for x, _ in items]), torch.tensor([int(y) for _, y in items])

    class FromModule(Module):
        def train_dataloader(self):
            return DataLoader(data(), batch_size=3, shuffle=True, collate_fn=collate)

    module, fit = FromModule(), PrivateFit(**PRIVACY)
    trainer_of(fit).fit(module)
    assert_same(module, plain(10)[0])
    assert fit.training._setup.batches._collate is collate


def test_validation_test_and_prediction_are_as_usual():
    fit, module = PrivateFit(**PRIVACY), Module()
    trainer = trainer_of(fit)
    trainer.validate(module, DataLoader(data(), batch_size=8), verbose=False)
    assert fit.training is None


# Ranks


class Pool(ClusterEnvironment):
    """Tells Lightning which of the pool's ranks this is."""

    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 0

    @staticmethod
    def detect():
        return True

    def world_size(self):
        return dist.get_world_size()

    def global_rank(self):
        return dist.get_rank()

    local_rank = global_rank

    def node_rank(self):
        return 0

    def set_world_size(self, size): ...

    def set_global_rank(self, rank): ...


class LogsOnRanks(Logged):
    def training_step(self, batch, batch_idx):
        losses = self.losses(batch)
        self.log("synced", losses.mean(), on_epoch=True, sync_dist=True)
        return losses


def fitted_on_ranks(rank, settings):
    filters = [mark.args[0].removeprefix("ignore:") for mark in pytestmark]
    for message in filters:
        warnings.filterwarnings("ignore", message)
    folder = settings.get("folder")
    saved = {} if folder is None else {"callbacks": [saving(f"{folder}/checkpoints", every_n_train_steps=3)]}
    run = {} if folder is None else {"run_folder": f"{folder}/run"}
    module = LogsOnRanks()
    strategy = DDPStrategy(cluster_environment=Pool())
    trainer, fit = fitted(
        module,
        settings={"strategy": strategy, "devices": 2, "enable_checkpointing": folder is not None},
        val=DataLoader(held_out(), batch_size=4),
        **saved,
        **run,
        **settings["privacy"],
    )
    return (
        trainer.global_step,
        {name: p.detach() for name, p in module.named_parameters()},
        fit.training.ledger.state_dict(),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("privacy", [{}, {"expected_batch_size": 3}], ids=["plain", "stand-ins"])
def test_two_ranks_train_as_one(ranks2, privacy):
    (steps, weights, ledger), (others, same, _) = ranks2.run(fitted_on_ranks, {"privacy": privacy})
    alone, training = plain(steps, **privacy)
    assert steps == others == training.step_count
    for name, p in alone.named_parameters():
        assert torch.equal(weights[name], same[name])
        torch.testing.assert_close(weights[name], p, rtol=1e-6, atol=1e-6)
    assert len(ledger["releases"]) == steps


@pytest.mark.thorough
def test_two_ranks_save_one_secret(ranks2, tmp_path):
    ranks2.run(fitted_on_ranks, {"privacy": {}, "folder": str(tmp_path)})
    assert not (tmp_path / "run" / "secret").exists()  # it is over on both


@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"])
def test_other_strategies_are_refused_by_name(name):
    from lightning.pytorch import strategies

    from torch_privacy.lightning.checks import check_trainer

    trainer, module = trainer_of(), Module()
    strategy = object.__new__(getattr(strategies, name))
    trainer.strategy.__class__ = type(strategy)
    with pytest.raises(tp.Refused, match=f"strategy {name} steps or shards"):
        check_trainer(trainer, module)
