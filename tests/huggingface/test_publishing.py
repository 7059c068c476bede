# SPDX-License-Identifier: Apache-2.0
"""What may leave the machine: logs of trackers, saved states and model cards; and what a trainer cannot be."""

import json
import math
import re

import pytest
import torch
from hugging import PRIVACY, arguments, bert, encoded, gpt2, tokenizer, trainer_of, without_reports
from torch.utils.data import Subset
from transformers import DataCollatorWithPadding, TrainerCallback, TrainingArguments

import torch_privacy as tp
from torch_privacy.huggingface import PrivateTrainer, misuse
from torch_privacy.huggingface.publishing import card_section

LOGGED = {"logging_strategy": "steps", "logging_steps": 1, "include_num_input_tokens_seen": "all"}


def padding():
    return DataCollatorWithPadding(tokenizer())


def tracker():
    """Returns a callback that looks like an integration of transformers, and the logs that it gets."""

    class Tracker(TrainerCallback):
        logs = None

        def on_log(self, args, state, control, logs=None, **_):
            self.logs = [*(self.logs or []), dict(logs)]

    return type("OwnTracker", (type("Tracker", (Tracker,), {"__module__": "transformers.integrations.own"}),), {})()


def exact_numbers_in(trainer):
    return [x for logs in trainer.state.log_history for name, x in logs.items() if name.endswith("loss_not_private")]


def test_trackers_and_saved_states_get_epsilon_and_no_exact_numbers(tmp_path):
    one = tracker()
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(
        tmp_path / "out", bert(), encoded(), padding(), {"test_seed": None}, callbacks=[one], **LOGGED, **saving
    )
    trainer.train()
    trainer.save_state()
    losses = exact_numbers_in(trainer)
    assert len(losses) == 4  # of 3 steps, and their mean
    assert [set(logs) for logs in one.logs[:3]] == [{"epsilon", "learning_rate", "epoch", "train_runtime"}] * 3
    assert [logs["epsilon"] for logs in one.logs] == [logs["epsilon"] for logs in trainer.state.log_history]
    assert trainer.state.total_flos > 0
    saved = [tmp_path / "out" / name / "trainer_state.json" for name in ("checkpoint-2", ".")]
    for path in saved:
        text = path.read_text()
        assert "epsilon" in text
        assert not any(repr(loss) in text for loss in losses)
        assert "not_private" not in text
        assert (json.loads(text)["total_flos"], json.loads(text)["num_input_tokens_seen"]) == (0, 0)


class Logs(PrivateTrainer):
    """Logs exact numbers as subclasses of Trainer do: in the loss, and together with what the Trainer logs."""

    def losses(self, model, inputs):
        losses = super().losses(model, inputs)
        self.log({"largest": float(losses.detach().max())})
        return losses

    def log(self, logs, start_time=None):
        super().log({**logs, "margin": 0.25} if "loss" in logs or "train_loss" in logs else logs, start_time)


def test_what_a_subclass_logs_in_training_reaches_no_tracker_and_no_file(tmp_path):
    one = tracker()
    trainer = trainer_of(tmp_path / "out", bert(), encoded(), padding(), {}, kind=Logs, callbacks=[one], **LOGGED)
    trainer.train()
    trainer.save_state()
    text = (tmp_path / "out" / "trainer_state.json").read_text()
    assert not {name for logs in one.logs for name in logs} & {"largest", "margin"}
    assert "largest" not in text
    assert "margin" not in text
    assert {"largest_not_private", "margin_not_private"} <= {
        name for logs in trainer.state.log_history for name in logs
    }


def test_scores_on_training_data_reach_no_tracker_and_no_file(tmp_path):
    one, trained, others = tracker(), encoded(), encoded(count=80)[60:]
    trainer = trainer_of(
        tmp_path / "out",
        bert(),
        trained,
        padding(),
        {"test_seed": None, "run_folder": tmp_path / "run"},
        callbacks=[one],
        eval_dataset={"trained": trained, "others": others},
        compute_metrics=lambda prediction: {"mean": float(prediction.predictions.mean())},
        eval_strategy="steps",
        eval_steps=1,
        max_steps=1,
    )
    with without_reports():
        trainer.train()
        scores = trainer.evaluate()
        trainer.save_metrics("eval", scores | trainer.predict(Subset(trained, range(5))).metrics)
    trainer.save_state()
    assert {"eval_trained_mean_not_private", "eval_trained_loss_not_private", "eval_others_mean"} <= scores.keys()
    logged = {name for logs in one.logs for name in logs}
    kept = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.json")}
    assert {"eval_results.json", "trainer_state.json"} <= kept.keys()
    for text in ("".join(logged), *kept.values(), (tmp_path / "run" / "results.json").read_text()):
        assert "others_mean" in text
        assert not re.search("(trained|test)_(mean|loss)", text)


class Shrinking(TrainerCallback):
    """Moves the weights after the second step."""

    def on_step_end(self, args, state, control, model=None, **others):
        if state.global_step == 2:
            with torch.no_grad():
                model.classifier.weight.mul_(0.5)


def test_an_epsilon_that_does_not_hold_is_called_so(tmp_path):
    one = tracker()
    callbacks = [Shrinking(), one]
    trainer = trainer_of(
        tmp_path / "out", bert(), encoded(), padding(), {"test_seed": None}, callbacks=callbacks, **LOGGED
    )
    with pytest.warns(UserWarning, match="say NOT PRIVATE"):  # also where a log has asked before
        trainer.train()
    assert [sorted(name for name in logs if name.endswith("epsilon")) for logs in one.logs] == [
        ["epsilon"], *[["not_private/epsilon"]] * 3
    ]  # fmt: skip
    assert trainer.privacy_statement()["warning"].startswith("NOT PRIVATE")


def test_the_exact_mean_loss_is_returned_under_its_name_alone_and_not_saved(tmp_path):
    trainer = trainer_of(tmp_path / "out", bert(), encoded(), padding(), {"test_seed": None}, **LOGGED)
    output = trainer.train()
    (loss,) = [x for x in exact_numbers_in(trainer) if x == output.metrics["train_loss_not_private"]]
    assert [name for name, x in output.metrics.items() if x == loss] == ["train_loss_not_private"]
    assert math.isnan(output.training_loss)
    assert "total_flos" not in output.metrics
    assert output.metrics["epsilon"] <= PRIVACY.get("target_epsilon", math.inf)
    trainer.save_metrics("train", output.metrics)
    for name in ("train_results.json", "all_results.json"):
        text = (tmp_path / "out" / name).read_text()
        assert "epsilon" in text
        assert "not_private" not in text
        assert repr(loss) not in text


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # by the trackers
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_usual_trackers_send_no_exact_numbers(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    for variable, value in {
        "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_MAINTENANCE_MODE": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    trainer = trainer_of(tmp_path / "out", bert(), encoded(), padding(), **LOGGED | {"report_to": [name]})
    trainer.train()
    if name == "wandb":
        import wandb

        sent = dict(wandb.run.summary)
        wandb.finish()
    else:
        import mlflow

        sent = mlflow.search_runs(search_all_experiments=True, output_format="list")[0].data.metrics
    assert any(key.endswith("epsilon") for key in sent)
    assert not [key for key in sent if "not_private" in key or key.endswith(("flos", "tokens_seen", "loss"))]


def test_gradients_are_not_watched(tmp_path, monkeypatch):
    class WandbCallback(TrainerCallback):
        pass

    monkeypatch.setenv("WANDB_WATCH", "all")
    trainer = trainer_of(tmp_path, bert(), encoded(), padding(), callbacks=[WandbCallback()])
    with pytest.raises(tp.Refused, match="WANDB_WATCH=all would send gradients"):
        trainer.train()
    assert not trainer.training.ledger.releases


@pytest.mark.thorough(but=1)
@pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")  # by PEFT
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "peft"])
def test_model_cards_say_what_the_statement_says(adapters, tmp_path):
    model = gpt2() if adapters else bert()
    data = encoded(labels=not adapters)
    if adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        data = [row | {"labels": row["input_ids"]} for row in encoded(12, labels=False)]
        data = [{name: (row[name] + [0] * 12)[:12] for name in row} for row in data]
    trainer = trainer_of(tmp_path, model, data, None if adapters else padding(), privacy={"test_seed": None}, **LOGGED)
    trainer.train()
    statement = trainer.privacy_statement()
    if adapters:
        trainer.save_model(str(tmp_path / "adapters"))
        assert card_section(statement) in (tmp_path / "adapters" / "README.md").read_text()
    for _ in range(2):  # a second card replaces the section
        trainer.create_model_card(tags="mine")
    card = (tmp_path / "README.md").read_text()
    assert card.count("## Privacy") == 1
    (high,) = re.findall(r"\*\*ε ≤ ([0-9.]+)\*\*", card)
    assert float(high) >= trainer.training.spent().epsilon.high
    assert "differential-privacy" in card
    assert "mine" in card
    assert all(re.sub(r"([_])", r"\\\1", text) in card for text in statement["not_covered"])
    assert not any(f"{loss:.4f}" in card for loss in exact_numbers_in(trainer))


@pytest.mark.thorough
def test_a_card_without_privacy_says_so(tmp_path):
    trainer = trainer_of(tmp_path, bert(), encoded(), padding())  # with a test_seed
    trainer.train()
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "**not private**" in card
    assert "ε ≤" not in card
    assert "- differential-privacy" not in card


MISSPELT = {
    "max_grad_nrom": r"'max_grad_nrom' \(here it is clipping=tp.Flat\(clip_norm=...\)\)",
    "max_grad_norm": r"'max_grad_norm' \(here it is clipping=tp.Flat\(clip_norm=...\)\)",
    "noise_multiplyer": r"'noise_multiplyer' \(did you mean 'noise_multiplier'\?\)",
    "target_delta": r"'target_delta' \(here it is delta=...\)",
}


@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_settings_get_the_right_word(name, tmp_path):
    with pytest.raises(ValueError, match=MISSPELT[name]):
        trainer_of(tmp_path, bert(), encoded(), padding(), privacy={name: 1.0})
    with pytest.raises(TypeError, match=r"got an unexpected keyword.*" + MISSPELT[name]):
        tp.PrivateTraining(None, None, None, expected_batch_size=1, **{name: 1.0})


def test_settings_beside_privacy_are_named(tmp_path):
    with pytest.raises(TypeError, match=r"clipping= belongs into privacy=dict\(clipping=...\)"):
        PrivateTrainer(bert(), arguments(tmp_path), privacy=PRIVACY, clipping=tp.Flat(1.0))
    with pytest.raises(TypeError, match=r"max_grad_norm= is no argument of Trainer \(here it is clipping"):
        PrivateTrainer(bert(), arguments(tmp_path), privacy=PRIVACY, max_grad_norm=1.0)


@pytest.mark.parametrize(("name", "cure"), [("SFTConfig", "-100 on the prompt"), ("DPOConfig", "loss of each pair")])
def test_trl_is_refused_with_the_way_to_the_same_loss(name, cure, tmp_path):
    config = type(name, (TrainingArguments,), {"__module__": f"trl.trainer.{name.lower()}"})
    with pytest.raises(tp.Refused, match=f"{name} of TRL.*{cure}"):
        PrivateTrainer(bert(), config(output_dir=str(tmp_path), report_to=[]), privacy=PRIVACY)
    trainer = type(f"Own{name}", (PrivateTrainer, type("DPOTrainer", (), {"__module__": "trl.trainer"})), {})
    with pytest.raises(tp.Refused, match=r"DPOTrainer of TRL.*loss of each pair"):
        trainer(bert(), arguments(tmp_path), privacy=PRIVACY)


@pytest.mark.thorough
def test_noise_that_swamps_the_signal_is_warned_of(tmp_path, monkeypatch):
    texts = []
    monkeypatch.setattr(misuse.LOG, "warning", lambda text, *_: texts.append(text))

    def trained(noise, steps):
        texts.clear()
        privacy = {"noise_multiplier": noise}
        trainer = trainer_of(tmp_path, bert(), encoded(), padding(), privacy=privacy, max_steps=steps)
        trainer.train()
        return trainer.training, "noise swamps the signal" in " ".join(texts)

    training, warned = trained(1.0, 2)
    size = sum(p.numel() for p in training.model.parameters())
    assert misuse.swamped_by(training) == pytest.approx(math.sqrt(2 * size) / (2 * PRIVACY["expected_batch_size"]))
    assert warned
    assert not trained(0.05, 2)[1]
