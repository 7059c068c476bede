# SPDX-License-Identifier: Apache-2.0
"""Checkpoints hold no key; training goes on from them exactly or is refused; evaluation chooses among them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.trainer
from datasets import Dataset
from hugging import assert_equal, bert, encoded, gpt2, tokenizer, trainer_of, weights, without_reports
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BertForSequenceClassification, DataCollatorWithPadding, EarlyStoppingCallback, TrainerCallback

import torch_privacy as tp
from torch_privacy.huggingface import PrivateTrainer
from torch_privacy.runs import checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning"),  # by PEFT
]
QUICK = {"assume_independent": "other tests rehearse"}


@pytest.fixture(autouse=True)
def float32_without_reports():
    torch.set_default_dtype(torch.float32)
    with without_reports():
        yield


def trainer_in(folder: Path, privacy: Any = None, model: Any = None, **settings: Any) -> PrivateTrainer:
    """Returns a trainer whose keys come from the system, with the run folder beside the checkpoints."""
    privacy = QUICK | {"run_folder": folder / "run", "test_seed": None} | (privacy or {})
    every = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    model = bert() if model is None else model
    return trainer_of(
        folder / "out", model, encoded(), DataCollatorWithPadding(tokenizer()), privacy, **every | settings
    )


class StopsAt(TrainerCallback):
    def __init__(self, step: int):
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self._step


def stop_after(trainer: PrivateTrainer, step: int) -> None:
    """Trains, and fails in the step after this one."""
    answer = trainer.training_step

    def fail(*args: Any) -> Any:
        if trainer.state.global_step == step:
            raise KeyboardInterrupt
        return answer(*args)

    trainer.training_step = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def keys_of(trainer: PrivateTrainer) -> list[bytes]:
    state = trainer.training.state_dict()
    found = [state["noise_key"], state["sampler_key"]]
    return [part for key in found for part in (key.encode(), key.upper().encode(), bytes.fromhex(key))]


@pytest.mark.thorough
def test_training_goes_on_with_the_same_batches_and_noise(tmp_path):
    trainer = trainer_in(tmp_path)
    stop_after(trainer, 3)  # one release after the checkpoint
    resumed = trainer_in(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.training.step_count == resumed.state.global_step == 4
    assert resumed.training.num_lost == 0
    assert len(resumed.training.ledger) == 4
    keys = keys_of(resumed)
    assert keys == keys_of(trainer)
    # the same keys from the start give the same weights
    again = trainer_in(tmp_path / "again")
    key = dict.fromkeys(("noise_key", "sampler_key"))
    state = resumed.training.state_dict()
    key = {name: state[name] for name in key}
    new = again._new_training

    def with_keys(*args: Any) -> tp.PrivateTraining:
        training = new(*args)
        training.load_state_dict(training.state_dict() | key)
        return training

    again._new_training = with_keys  # type: ignore[method-assign]
    again.train()
    assert_equal(weights(resumed.model), weights(again.model))
    assert resumed.training.spent().epsilon == again.training.spent().epsilon


def test_no_key_is_in_the_output_folder_or_uploaded(tmp_path, monkeypatch):
    uploaded: list[Path] = []

    class Hub:
        def create_repo(self, *_: Any, **__: Any) -> Any:
            return type("Repo", (), {"repo_id": "someone/model"})

        def upload_folder(self, folder_path: str, **_: Any) -> Any:
            uploaded.extend(path for path in Path(folder_path).rglob("*") if path.is_file())
            return type(
                "Job", (), {"done": lambda self: True, "is_done": lambda self: True, "result": lambda self: None}
            )()

    monkeypatch.setattr(transformers.trainer, "hf_api", Hub)
    monkeypatch.setattr(PrivateTrainer, "create_model_card", lambda self, **_: None)
    trainer = trainer_in(tmp_path, push_to_hub=True, hub_strategy="all_checkpoints", hub_token="no token")
    trainer.train()
    trainer.push_to_hub()
    written = {path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"checkpoint-2", "checkpoint-4"} <= {path.parent.name for path in uploaded}
    assert {path.name for path in uploaded} >= {"model.safetensors", "optimizer.pt", "privacy.json"}
    for path in written | set(uploaded):
        content = path.read_bytes()
        assert not [key for key in keys_of(trainer) if key in content], path


def test_a_finished_training_leaves_no_key_behind(tmp_path):
    trainer = trainer_in(tmp_path)
    trainer.train()
    keys = keys_of(trainer)
    assert (tmp_path / "run" / "results.json").exists()
    assert not (tmp_path / "run" / "secret").exists()
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        assert not [key for key in keys if key in path.read_bytes()], path
    with pytest.raises(tp.Refused, match="keys are deleted when a run is over"):
        trainer_in(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.thorough
def test_a_training_that_is_stopped_early_keeps_its_keys_and_says_so(tmp_path):
    trainer = trainer_in(tmp_path, save_steps=1)
    trainer.add_callback(StopsAt(2))
    with pytest.warns(UserWarning, match="keeps the keys"):
        trainer.train()
    secrets = sorted((tmp_path / "run" / "secret").iterdir())
    assert [path.name for path in secrets] == ["checkpoint-1.safetensors", "checkpoint-2.safetensors"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in secrets)
    assert all(keys_of(trainer)[0] in path.read_bytes() for path in secrets)
    resumed = trainer_in(tmp_path, save_steps=1)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.training.step_count == len(resumed.training.ledger) == 4
    assert not (tmp_path / "run" / "secret").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_a_training_goes_on_that_was_stopped_before_its_first_checkpoint(tmp_path, strategy):
    trainer = trainer_in(tmp_path, save_steps=4, save_strategy=strategy)
    stop_after(trainer, 2)
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    with pytest.raises(tp.Refused, match=r"prior_releases=privacy\.Ledger\.load"):
        trainer_in(tmp_path).train()
    resumed = trainer_in(tmp_path, save_steps=4, save_strategy=strategy)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.training.step_count == len(resumed.training.ledger) == 4  # the two releases were repeated
    assert keys_of(resumed) == keys_of(trainer)


def test_secrets_of_deleted_checkpoints_are_deleted(tmp_path):
    stop_after(trainer_in(tmp_path, save_steps=1, save_total_limit=2), 3)
    names = sorted(path.stem for path in (tmp_path / "run" / "secret").iterdir())
    assert (
        names
        == sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
        == ["checkpoint-2", "checkpoint-3"]
    )


def remove_optimizer(folder: Path) -> None:
    (folder / "out" / "checkpoint-2" / "optimizer.pt").unlink()


def remove_secret(folder: Path) -> None:
    (folder / "run" / "secret" / "checkpoint-2.safetensors").unlink()


def save_on_two_ranks(folder: Path) -> None:
    path = folder / "run" / "secret" / "checkpoint-2.safetensors"
    state = checkpoint.load(path)
    state["training"]["placement"] = "replicas on 2 processes"
    checkpoint.save(path, state)


CANNOT = {  # name -> (what happens to the files, privacy of the resumed run, message)
    "no run folder": (lambda folder: None, {"run_folder": None}, "no run folder was given"),
    "no optimizer": (remove_optimizer, {}, "it has no optimizer"),
    "no secret": (remove_secret, {}, "does not exist.*here: checkpoint-4"),
    "other run folder": (lambda folder: None, {"run_folder": "other"}, "does not exist.*here: none"),
    "other settings": (lambda folder: None, {"noise_multiplier": 2.0}, "noise_multiplier: 2.0 here"),
    "other ranks": (save_on_two_ranks, {}, "the ledger has 3 later steps.* Go on with as many as before"),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Returns a function that copies the folder of one run of six steps, stopped after five."""
    from shutil import copytree

    folder = tmp_path_factory.mktemp("stopped")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with without_reports():
        stop_after(trainer_in(folder, max_steps=6), 5)
    torch.set_default_dtype(before)
    return lambda to: copytree(folder, to, dirs_exist_ok=True)


@pytest.mark.thorough(but=1)
@pytest.mark.filterwarnings("ignore:PrivateTraining. steps 2 to 4 were released after the state was saved")
@pytest.mark.parametrize("case", CANNOT)
def test_training_that_cannot_go_on_exactly_is_refused(case, tmp_path, monkeypatch, stopped):
    monkeypatch.chdir(tmp_path)
    change, privacy, message = CANNOT[case]
    stopped(tmp_path)
    change(tmp_path)
    trainer = trainer_in(tmp_path, privacy, max_steps=6)
    with pytest.raises(tp.Refused, match=message):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


@pytest.mark.thorough
def test_a_checkpoint_that_another_run_wrote_into_the_same_folder_is_refused(tmp_path, stopped):
    """Its weights come from releases that this ledger does not have."""
    stopped(tmp_path)
    stop_after(trainer_in(tmp_path, {"run_folder": tmp_path / "other"}, max_steps=6), 3)
    with pytest.raises(tp.Refused, match="another run saved it"):
        trainer_in(tmp_path, max_steps=6).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


@pytest.mark.thorough
def test_another_optimizer_is_refused_before_a_step(tmp_path, stopped):
    stopped(tmp_path)
    trainer = trainer_in(tmp_path, max_steps=6, optim="sgd")
    with pytest.raises(tp.Refused, match=r"state of another optimizer, without dampening, momentum.* of SGD"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.thorough
def test_new_training_in_the_folder_of_another_is_refused(tmp_path, stopped):
    stopped(tmp_path)
    with pytest.raises(tp.Refused, match="resume_from_checkpoint=True"):
        trainer_in(tmp_path, max_steps=6).train()
    resumed = trainer_in(tmp_path, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.training.step_count == 6
    assert resumed.training.spent().epsilon.high < 1.5
    with pytest.raises(tp.Refused, match="train\\(\\) was called before"):
        resumed.train()


def test_run_folder_within_the_output_folder_is_refused(tmp_path):
    with pytest.raises(tp.Refused, match="holds the keys of the noise"):
        trainer_in(tmp_path, {"run_folder": tmp_path / "out" / "run"})


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, 1) == prediction.label_ids).mean())}


@pytest.mark.thorough
def test_best_checkpoint_is_loaded_and_the_choice_is_named(tmp_path):
    evaluated = encoded(count=100)[80:]  # none of the training data
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "eval_dataset": evaluated}
    trainer = trainer_in(
        tmp_path,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(2)],
        max_steps=6,
        **settings,
    )
    trainer.train()
    made = trainer.training.step_count
    assert made < 6  # the first scores were the best
    best = BertForSequenceClassification.from_pretrained(trainer.state.best_model_checkpoint)
    assert_equal(weights(trainer.model), weights(best))
    statement = trainer.privacy_statement()
    assert statement["private"]
    assert any("the choice among checkpoints" in what for what in statement["not_covered"])
    assert statement["epsilon"]["high"] == trainer.training.spent().planned.high > trainer.training.spent().epsilon.high
    saved = json.loads((Path(trainer.state.best_model_checkpoint) / "privacy.json").read_text())
    assert saved["num_steps_made"] == trainer.state.best_global_step
    assert len(trainer.predict(evaluated).predictions) == 20
    trainer.evaluate()
    written = json.loads((tmp_path / "run" / "results.json").read_text())
    assert "'accuracy'" in str(written)
    assert "eval_accuracy" not in str(written)
    assert (tmp_path / "run" / "model.safetensors").is_file()
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1)
    assert not trainer.privacy_statement()["private"]  # these weights are no release


def test_choice_by_the_private_data_is_refused(tmp_path):
    trainer = trainer_in(tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2, eval_dataset=[])
    records = Dataset.from_list(trainer.train_dataset)
    for trained, evaluated in ((trainer.train_dataset,) * 2, (records, records.select(range(3)))):
        trainer.train_dataset, trainer.eval_dataset = trained, evaluated
        with pytest.raises(tp.Refused, match="eval_dataset holds examples of train_dataset"):
            trainer.train()
        assert trainer.training is None


@pytest.mark.thorough
def test_adapter_is_saved_and_generates(tmp_path):
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(gpt2(), config)
    data = [{"input_ids": row["input_ids"][:5], "labels": row["input_ids"][:5]} for row in encoded(labels=False)]
    trainer = trainer_of(tmp_path, model, data, privacy=QUICK, max_steps=2)
    base = weights(gpt2())
    trainer.train()
    tokens = torch.tensor([data[0]["input_ids"]])
    generated = trainer.model.generate(input_ids=tokens, max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > tokens.shape[1]
    trainer.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(gpt2(), str(tmp_path / "adapter"))
    torch.testing.assert_close(loaded.eval()(tokens).logits, model.eval()(tokens).logits)
    assert (tmp_path / "adapter" / "privacy.json").is_file()
    assert_equal(weights(model.unload()), base)  # the base is frozen; no prefix is left in its names
    assert [name for name, _ in model.base_model.model.named_parameters()] == [
        name for name, _ in gpt2().named_parameters()
    ]


@pytest.mark.thorough
def test_tied_embeddings_stay_tied(tmp_path):
    model = gpt2()
    data = [{"input_ids": row["input_ids"][:5], "labels": row["input_ids"][:5]} for row in encoded(labels=False)]
    trainer = trainer_of(
        tmp_path, model, data, privacy=QUICK | {"run_folder": tmp_path.parent / "run of tied"}, max_steps=1
    )
    trainer.train()
    assert model.lm_head.weight is model.transformer.wte.weight
    trainer.save_model()
    assert_equal(weights(type(model).from_pretrained(tmp_path)), weights(model))
