# SPDX-License-Identifier: Apache-2.0
"""Two ranks, with DDP and with FSDP2 by Accelerate, train as one process does."""

import json
import multiprocessing
import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging import PRIVACY, arguments, bert, encoded, tokenizer
from transformers import DataCollatorWithPadding, TrainerCallback

import torch_privacy as tp
from torch_privacy.huggingface import PrivateTrainer

SHARDED = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "fsdp_version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["BertLayer"],
        "state_dict_type": "FULL_STATE_DICT",
    },
}


class LosesPower(TrainerCallback):
    """Fails after this step, which keeps the keys."""

    def __init__(self, step: int):
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            raise OSError("lost power")

    on_step_end = on_step_begin


def trained(
    folder: str, sharded: dict[str, Any] | None = None, fails_at: int | None = None, checkpoint: str | None = None
) -> list[Any]:
    """Returns weights, epsilon, number of ranks, the class of the model, and the files with the key."""
    torch.set_default_dtype(torch.float32)
    args = arguments(folder, max_steps=2, save_strategy="steps", save_steps=1, **sharded or {})
    if sharded:  # Accelerate shards on several GPUs only, but here are processors
        from accelerate import PartialState

        _ = args.device
        PartialState._shared_state["distributed_type"] = "MULTI_GPU"
    trainer = PrivateTrainer(
        bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        args,
        train_dataset=tp.Examples(encoded(), assume_independent="rehearsed elsewhere"),
        data_collator=DataCollatorWithPadding(tokenizer()),
        privacy=PRIVACY | {"test_seed": 1, "run_folder": f"{folder}-run"},
    )
    if fails_at is not None:
        trainer.add_callback(LosesPower(fails_at))
    with nullcontext() if fails_at is None else pytest.raises(OSError, match="lost power"):
        trainer.train(resume_from_checkpoint=checkpoint)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()]
    weights = torch.cat([p.detach().flatten() for p in whole]).tolist()
    key = trainer.training.state_dict().get("noise_key", "on rank 0 only").encode()
    leaking = [str(path) for path in Path(folder).rglob("*") if path.is_file() and key in path.read_bytes()]
    statement = trainer.training.statement()
    kind = type(trainer.model_wrapped).__name__
    return [weights, statement["epsilon"], statement.get("ranks", 1), kind, leaking, trainer.state.global_step]


def on_a_rank(rank: int, port: int) -> None:
    """Trains in a process that ``torchrun`` could have started; rank 0 writes what came out."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "localhost"}
    of_ranks = [trained("ddp"), trained("fsdp", SHARDED, fails_at=2)]
    of_ranks.append(trained("fsdp", SHARDED, checkpoint="fsdp/checkpoint-1"))
    trained("begun", SHARDED, fails_at=0)
    of_ranks.append(trained("begun", SHARDED, checkpoint="begun-run/secret/start"))
    if rank == 0:
        Path("found.json").write_text(json.dumps(of_ranks))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.thorough
def test_ranks_train_as_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch_privacy.runs.report.render.render", lambda folders: "<html></html>")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    # Forked, as a new process takes five seconds to import transformers. torch's ranks are started by the environment.
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=on_a_rank, args=(rank, port), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    found = json.loads(Path("found.json").read_text())
    weights, epsilon, size, *_ = trained("alone")
    assert size == 1
    assert [kind for _, _, _, kind, _, _ in found] == [
        "DistributedDataParallel",
        *["FSDPBertForSequenceClassification"] * 3,
    ]
    for of_ranks in found:
        assert of_ranks[0] == pytest.approx(weights, abs=1e-6)
        assert of_ranks[1:3] == [epsilon, 2]
        assert of_ranks[4:] == [[], 2]
