# SPDX-License-Identifier: Apache-2.0
"""Ranks die at every place of a step; the training goes on, with as many ranks or with others, and pays every step."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointing import main, resume, save
from gloo_pool import Launcher
from ranked import CASES, OPTIMIZERS, WRAPPERS, mesh_of, whole_weights
from torch.distributed.checkpoint import FileSystemWriter

import torch_privacy as tp
from torch_privacy.runs import checkpoint
from torch_privacy.support.ranks import RankLost, Ranks
from torch_privacy.training import release
from torch_privacy.training.release import Releases
from torch_privacy.training.weights import WeightGuard

STEPS, EVERY = 6, 2  # of a training; between checkpoints
DEATH = 3  # step in which a rank dies, counted from 0
AT_ONCE = 5.0  # seconds until the others must know

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]


# Deaths ------------------------------------------------------------------------------------------------------------


def die(folder: Path, by: str) -> None:
    (folder / "death").write_text(repr(time.time()))
    if by == "exit":
        os._exit(9)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)


def before(owner: Any, name: str, counts: Callable[..., bool] = lambda *_: True) -> Any:
    def plant(end: Callable[[], None], number: int) -> None:
        original, calls = getattr(owner, name), []

        def dying(*arguments: Any, **settings: Any) -> Any:
            calls.extend([None] if counts(*arguments) else [])
            if len(calls) > number:
                end()
            return original(*arguments, **settings)

        setattr(owner, name, dying)

    return plant


def after(owner: Any, name: str, counts: Callable[..., bool] = lambda *_: True) -> Any:
    def plant(end: Callable[[], None], number: int) -> None:
        original, calls = getattr(owner, name), []

        def dying(*arguments: Any, **settings: Any) -> Any:
            found = original(*arguments, **settings)
            calls.extend([None] if counts(*arguments) else [])
            if len(calls) > number:
                end()
            return found

        setattr(owner, name, dying)

    return plant


def is_record(_: Any, place: str, *rest: Any) -> bool:
    return place.startswith("records step")


def recorded(end: Callable[[], None], number: int) -> None:
    """Rank 0 ends when the step is in the file, and before it says so; the others before they hear it."""
    if dist.get_rank() == 0:
        after(Releases, "_record")(end, number)
    else:
        before(Ranks, "first_does", is_record)(end, number)


def unrecorded(end: Callable[[], None], number: int) -> None:
    """Rank 0 ends before it records, when the others have waited for it."""

    def late() -> None:
        time.sleep(0.3)
        end()

    before(Releases, "_record")(late, number)


PLACES = {  # name -> (how to die there, steps in the ledger)
    "before the sums": (before(Releases, "release"), DEATH),
    "before the record": (before(Releases, "_joined"), DEATH),
    "while the others wait for the record": (unrecorded, DEATH),
    "before all know of the record": (recorded, DEATH + 1),
    "after all know of the record": (after(Ranks, "first_does", is_record), DEATH + 1),
    "before the update": (before(WeightGuard, "update"), DEATH + 1),
    "after the update": (after(WeightGuard, "update"), DEATH + 1),
}
IN_CHECKPOINT = {  # at the second one
    "in the shards": before(FileSystemWriter, "write_data"),
    "after the shards": before(FileSystemWriter, "finish"),
    "before the secret": before(tp, "save_secret"),
    "in the secret": before(Path, "replace", lambda _, target: Path(target).name == "secret"),
}


# A life of a training ----------------------------------------------------------------------------------------------


def begun(how: str | None, folder: Path, **settings: Any) -> tp.PrivateTraining:
    """Returns a training with keys from the operating system, as a user has them."""
    model = CASES["uneven"].model()
    if how is not None:
        model = WRAPPERS[how](model, CASES["uneven"], mesh_of(how))
    chosen = {"expected_batch_size": 8, "num_steps": STEPS, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0}
    optimizer = OPTIMIZERS["adam"](model.parameters())
    return tp.PrivateTraining(model, optimizer, CASES["uneven"].data(), run_folder=folder, **chosen | settings)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def watch(training: tp.PrivateTraining, folder: Path, how: str | None) -> None:
    """Writes down every gradient that this rank's optimizer uses: its noise's key, its step, and what it is."""
    ranks = (how, dist.get_world_size(), dist.get_rank())

    def use(*_: Any) -> None:
        if all(p.grad is None or not local(p.grad).any() for p in training.model.parameters()):
            return  # torch looks at the optimizer
        gradients = b"".join(local(p.grad).numpy().tobytes() for p in training.model.parameters())
        digest = hashlib.sha256(gradients).hexdigest()
        key, number = training._state.releases.noise.key.hex(), training._state.releases.number(training.step_count - 1)
        with (folder / f"used-{os.getpid()}").open("a") as file:
            file.write(json.dumps([key, number, ranks, digest]) + "\n")

    training.optimizer.register_step_pre_hook(use)


def life(
    rank: int,
    folder: Path,
    how: str | None,
    fault: tuple[str, int, int, str] | None = None,
    settings: dict[str, Any] | None = None,
    end: int = STEPS,
    replay: Any = None,
) -> Any:
    """Trains from the last checkpoint to the end, or to a rank's death: its place, rank, number of calls, and cause."""
    if fault is not None and fault[1] == rank:
        place, _, number, by = fault
        plant = PLACES[place][0] if place in PLACES else IN_CHECKPOINT[place]
        plant(lambda: die(folder, by), number)
    release._RELEASED.clear()  # a new process has none
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            training = begun(how, folder, **settings or {})
            average = tp.MovingAverage(training.model, training.optimizer, decay=0.5)
            resume(training, average, folder, folder / "secret", replay)
            began = training.step_count
            watch(training, folder, how)
            for batch in training:
                if training.step(CASES["uneven"].losses(training.model, batch)):
                    if training.step_count % EVERY == 0:
                        save(training, average, folder, folder / "secret")
                    if training.step_count == end:
                        break
        except BaseException:
            (folder / f"failed-{rank}").write_text(repr(time.time()))
            raise
    with average.applied():
        averaged = whole_weights(training.model)
    return {
        "began": began,
        "warned": [str(one.message) for one in warned if "PrivateTraining" in str(one.message)],
        "weights": whole_weights(training.model),
        "averaged": averaged,
        "average_steps": average.step_count,
        "steps": training.step_count,
        "num_lost": training.num_lost,
        "ledger": training.ledger.state_dict(),
    }


def ledger_of(folder: Path) -> list[str]:
    """Returns the fingerprints in rank 0's file; every step is in it once."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    releases = [line for line in lines if "fingerprint" in line]
    assert [line["step"] for line in releases] == list(range(len(releases)))
    return [line["fingerprint"] for line in releases]


def assert_paid(folder: Path) -> dict[tuple[str, int], set]:
    """Everything that any rank's optimizer used is in the ledger, and no noise has two sums; returns what was used."""
    used: dict[tuple[str, int], dict[tuple, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in folder.glob("used-*"):
        for key, number, ranks, digest in map(json.loads, file.read_text().splitlines()):
            used[key, number][tuple(ranks)].add(digest)
    length = len(ledger_of(folder))
    for (_, number), by_rank in used.items():
        assert number < length, "an update that is not paid"
        assert len({(how, world) for how, world, _ in by_rank}) == 1, "one noise, rounded in two ways"
        assert all(len(digests) == 1 for digests in by_rank.values()), "one noise, two sums"
    return {place: set(by_rank) for place, by_rank in used.items()}


def assert_died(outcomes: list[Any], folder: Path, rank: int, by: str) -> float:
    """One rank is dead, and the others know it at once; returns the seconds until the last one did."""
    assert outcomes[rank].exit_code == (9 if by == "exit" else -signal.SIGKILL), outcomes[rank]
    death = float((folder / "death").read_text())
    late = []
    for number, outcome in enumerate(outcomes):
        if number != rank:
            assert outcome.kind, f"rank {number} {outcome}"
            late.append(float((folder / f"failed-{number}").read_text()) - death)
            print(f"rank {number}: {outcome.kind} after {late[-1]:.3f} s: {outcome.text[:300]}")
    return max(late)


def killed(launcher: Launcher, folder: Path, how: str, fault: tuple[str, int, int, str], size: int = 2) -> list[Any]:
    with launcher.pool(size) as pool:
        outcomes = pool.outcomes(life, folder, how, fault)
    assert assert_died(outcomes, folder, fault[1], fault[3]) < AT_ONCE
    return outcomes


def lived(launcher: Launcher, folder: Path, how: str | None, size: int, *rest: Any) -> list[Any]:
    with launcher.pool(size) as pool:
        return pool.run(life, folder, how, None, *rest)


def assert_ends(found: list[Any], folder: Path, began: int) -> None:
    """All ranks began at this step, agree, and have made all steps; nothing is unpaid."""
    for result in found:
        assert (result["began"], result["num_lost"], result["steps"]) == (began, 0, STEPS)
        assert result["ledger"] == found[0]["ledger"]
        assert all(torch.equal(result["weights"][name], p) for name, p in found[0]["weights"].items())
    assert len(ledger_of(folder)) == STEPS
    assert_paid(folder)


CAUSES = ["exit", "kill"]
DEATHS = [  # each place once, ranks and placements in turn
    (place, 0 if place.startswith("while") else k % 2, ("ddp", "layers")[k // 2 % 2]) for k, place in enumerate(PLACES)
]


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "rank", "how"), DEATHS)
def test_a_death_costs_no_release_and_the_same_ranks_repeat_bit_for_bit(launcher, tmp_path, place, rank, how):
    """The steps after the checkpoint have the same gradients on every rank, as `assert_paid` compares."""
    outcomes = killed(launcher, tmp_path, how, (place, rank, DEATH, CAUSES[(rank + len(place)) % 2]))
    assert "another rank ended" in outcomes[1 - rank].text
    before = ledger_of(tmp_path)
    assert len(before) == PLACES[place][1]
    assert_paid(tmp_path)
    found = lived(launcher, tmp_path, how, 2)
    assert_ends(found, tmp_path, EVERY)
    assert ledger_of(tmp_path)[: len(before)] == before
    assert [result["warned"] for result in found] == [[], []]
    assert {result["average_steps"] for result in found} == {STEPS}
    assert len(assert_paid(tmp_path)) == STEPS


CHANGES = [
    # ranks and placement before and after the death; None is one process without torch.distributed's wrappers
    pytest.param(2, "layers", 1, "layers", id="2 to 1"),
    pytest.param(2, "layers", 1, None, id="2 to one process"),
    pytest.param(2, "ddp", 2, "layers", id="DDP to FSDP"),
    pytest.param(2, "layers", 2, "ddp", id="FSDP to DDP", marks=pytest.mark.thorough),
    pytest.param(2, "layers", 3, "layers", id="2 to 3"),
    pytest.param(2, "ddp", 4, "hsdp", id="DDP to HSDP", marks=pytest.mark.thorough),
    pytest.param(4, "hsdp", 4, "layers", id="HSDP to FSDP", marks=pytest.mark.thorough),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "how", "new_size", "new_how"), CHANGES)
def test_other_ranks_skip_what_was_released(launcher, tmp_path, size, how, new_size, new_how):
    """Repeating a step with other rounding would release the same noise twice."""
    killed(launcher, tmp_path, how, ("before all know of the record", size - 1, DEATH, "kill"), size)
    before = ledger_of(tmp_path)
    assert len(before) == DEATH + 1
    found = lived(launcher, tmp_path, new_how, new_size)
    assert_ends(found, tmp_path, DEATH + 1)
    assert ledger_of(tmp_path)[: len(before)] == before
    for result in found:
        assert len(result["warned"]) == 1
        assert f"steps {EVERY} to {DEATH} were released after the state was saved" in result["warned"][0]
        assert result["average_steps"] == EVERY + STEPS - (DEATH + 1)


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "how", "new_size", "new_how"), [*CHANGES, pytest.param(1, None, 2, "layers")])
def test_a_training_that_moves_to_other_ranks_has_the_weights_of_one_process(
    launcher, tmp_path, size, how, new_size, new_how
):
    """Model, optimizer and average are sharded anew; batches and noise depend on the keys alone."""
    lived(launcher, tmp_path, how, size, None, EVERY)
    state = checkpoint.load(tmp_path / "secret")["training"]
    found = lived(launcher, tmp_path, new_how, new_size)
    assert_ends(found, tmp_path, EVERY)
    assert found[0]["warned"] == []
    expected = whole_life(tmp_path / "whole", state)
    for result in found:
        for kind in "weights", "averaged":
            far = max(float((result[kind][name] - p).abs().max()) for name, p in expected[kind].items())
            assert far < 1e-12, kind


def whole_life(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Returns what the training of a state becomes in one process, from its first step on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "_RELEASED", {})
        training = begun(None, folder)
        average = tp.MovingAverage(training.model, training.optimizer, decay=0.5)
        empty = state["ledger"] | {"releases": []}
        training.load_state_dict(state | {"step_count": 0, "ledger": empty}, replay="exact")
        for batch in training:
            training.step(CASES["uneven"].losses(training.model, batch))
    return {"weights": whole_weights(training.model), "averaged": whole_weights(average.model)}


@pytest.mark.thorough
def test_other_ranks_that_are_told_to_repeat_take_new_keys(launcher, tmp_path):
    killed(launcher, tmp_path, "layers", ("before all know of the record", 1, DEATH, "kill"))
    before = ledger_of(tmp_path)
    found = lived(launcher, tmp_path, "ddp", 2, None, STEPS, "exact")
    after = ledger_of(tmp_path)
    assert after[: len(before)] == before
    lost = len(before) - EVERY
    assert len(after) == STEPS + lost
    for result in found:
        assert (result["began"], result["num_lost"], result["steps"]) == (EVERY, lost, STEPS)
        assert any("did not repeat bit for bit" in text for text in result["warned"])
        assert result["ledger"] == found[0]["ledger"]
    assert len({key for key, _ in assert_paid(tmp_path)}) == 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("place", "rank", "complete"),
    [
        ("in the shards", 0, EVERY),
        ("in the shards", 1, EVERY),
        ("after the shards", 0, EVERY),
        ("before the secret", 0, EVERY),
        ("before the secret", 1, 2 * EVERY),  # rank 0 goes on, and all shards are there
        ("in the secret", 0, EVERY),
    ],
)
def test_a_death_in_a_checkpoint_leaves_a_complete_one(launcher, tmp_path, place, rank, complete):
    killed(launcher, tmp_path, "layers", (place, rank, 1, CAUSES[rank]))
    before = ledger_of(tmp_path)
    assert len(before) == 2 * EVERY
    assert checkpoint.load(tmp_path / "secret")["training"]["step_count"] == complete
    found = lived(launcher, tmp_path, "layers", 2)
    assert_ends(found, tmp_path, complete)
    assert ledger_of(tmp_path)[: len(before)] == before
    assert len(assert_paid(tmp_path)) == STEPS


@pytest.mark.thorough
def test_keys_are_in_one_file_that_its_owner_alone_can_read(launcher, tmp_path):
    before = os.umask(0)
    try:
        lived(launcher, tmp_path, "layers", 2)
    finally:
        os.umask(before)
    secret = tmp_path / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    state = checkpoint.load(secret)["training"]
    keys = [bytes.fromhex(state[name]) for name in ("noise_key", "sampler_key")]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("used-")]
    assert {path.name for path in files} >= {"secret", "ledger.jsonl", ".metadata", "__0_0.distcp", "__1_0.distcp"}
    for path in files:
        content = path.read_bytes()
        found = [key for key in keys if any(form in content for form in (key, key.hex().encode(), repr(key).encode()))]
        assert bool(found) == (path == secret), path


def with_a_timeout(rank: int, store: str, seconds: float) -> float:
    """Returns how long rank 0 waits for a message of rank 1, which sends none."""
    dist.destroy_process_group()
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timeout)
    ranks, start = Ranks.here(), time.monotonic()
    if rank == 0:
        with pytest.raises(RankLost, match="has not answered in time"):
            ranks.exchange("a place")
        with pytest.raises(RankLost, match="another rank ended"):
            ranks.exchange("another place")
    else:
        time.sleep(2 * seconds)
    return time.monotonic() - start


@pytest.mark.thorough
def test_messages_keep_the_timeout_of_the_process_group(launcher, tmp_path):
    with launcher.pool(2) as pool:
        waited, _ = pool.run(with_a_timeout, str(tmp_path / "store"), 4.0)
    assert 3.9 < waited < 60  # torch's own timeout is half an hour


# Settings that a training learns ------------------------------------------------------------------------------------


def learned(training: tp.PrivateTraining) -> dict[str, Any]:
    """Returns what a state holds beside keys and ledger, as this rank has it."""
    return {
        "rule": repr(training.clipping),
        "mechanism": training._setup.mechanism.state(),
        "num_non_finite": training.num_non_finite,
        "moved_otherwise": training._state.guard.moved_otherwise(training.step_count),
        "step": training.step_count,
        "private": training.statement()["private"],
    }


def with_settings(rank: int, folder: Path, how: str | None, rule: str, pokes: bool) -> dict[str, Any]:
    """Trains two steps or loads what was learned in them; rank 1 writes into a weight of its own, if it ``pokes``."""
    release._RELEASED.clear()
    settings = {"adaptive": {"clipping": tp.Adaptive(0.5, count_noise_stddev=4.0)}, "sketched": SKETCHED}[rule]
    model = CASES["uneven"].model()
    if how is not None:
        model = WRAPPERS[how](model, CASES["uneven"], mesh_of(how))
    data = CASES["non-finite examples" if rule == "adaptive" else "uneven"].data()
    chosen = {"expected_batch_size": 8, "num_steps": 3, "noise_multiplier": 1.0, "delta": 1e-3} | settings
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = tp.PrivateTraining(model, optimizer, data, run_folder=folder, **chosen)
    if tp.load_secret(training, folder / "secret") is not None:
        return learned(training)
    warnings.filterwarnings("default" if pokes else "error", "PrivateTraining: the trained weights were changed")
    for batch in training:
        if training.step(CASES["uneven"].losses(model, batch)):
            if pokes and rank == dist.get_world_size() - 1 and training.step_count == 2:
                local(next(model.parameters())).data[-1] += 1
    tp.save_secret(training, folder / "secret")
    return learned(training)


SKETCHED = {"clipping": tp.Sketched(16, clip_norm=0.5)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rule", "how", "new_size", "new_how"),
    [("adaptive", "layers", 1, None), ("adaptive", "layers", 2, "ddp"), ("sketched", "ddp", 1, None)],
)
def test_other_ranks_take_over_what_was_learned(launcher, tmp_path, rule, how, new_size, new_how):
    with launcher.pool(2) as pool:
        saved = pool.run(with_settings, tmp_path, how, rule, how == "layers")
    assert saved[0]["mechanism"] == saved[1]["mechanism"]
    assert all(saved[0]["mechanism"].values())  # something was learned
    assert saved[0]["rule"] == saved[1]["rule"]
    assert "clip_norm=0.5," not in saved[0]["rule"] or rule == "sketched"  # it has adapted
    assert (saved[0]["num_non_finite"] > 0) == (rule == "adaptive")
    assert [one["private"] for one in saved] == [how != "layers"] * 2
    assert saved[0]["moved_otherwise"] == ("first seen after step 3, on rank 1" if how == "layers" else "")
    with launcher.pool(new_size) as pool:
        found = pool.run(with_settings, tmp_path, new_how, rule, False)
    for one in found:
        assert one == saved[0]


def test_a_secret_that_cannot_be_written_or_read_is_refused_on_all_ranks(ranks2, tmp_path):
    (tmp_path / "damaged").write_text('{"format": ')
    for outcome in ranks2.outcomes(with_bad_files, tmp_path):
        assert not outcome.failed, outcome
        unwritten, damaged, absent = outcome.value
        assert "No such file or directory" in unwritten
        assert "damaged: cannot be read (it is no checkpoint" in damaged
        assert absent is None


def with_bad_files(rank: int, folder: Path) -> list[Any]:
    training = begun("ddp", folder / "run")
    with pytest.raises((OSError, tp.Refused)) as unwritten:
        tp.save_secret(training, folder / "no folder" / "secret")
    with pytest.raises(tp.Refused) as damaged:
        tp.load_secret(training, folder / "damaged")
    return [str(unwritten.value), str(damaged.value), tp.load_secret(training, folder / "absent")]


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 2])
def test_all_others_know_of_a_death_at_once(launcher, tmp_path, rank):
    """Also those that exchange no messages with the dead rank."""
    killed(launcher, tmp_path, "layers", ("before the sums", rank, DEATH, "kill"), 4)


@pytest.mark.thorough
def test_torchrun_starts_the_ranks_again(tmp_path):
    """A rank is killed in the first life, between the record and the update, and another in the second.

    Without the variable new ranks read the addresses of dead ones, as torch's issues 135712 and 167288 say.
    """
    folder, secrets = tmp_path / "run", tmp_path / "secret"
    secrets.mkdir()
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [
        str(torchrun),
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
        "--monitor-interval",
        "0.1",
    ]
    command += [__file__, str(folder), str(secrets)]
    paths = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "epsilon in [" in ended.stdout
    assert sorted(path.name for path in folder.glob("died-*")) == ["died-0", "died-1"]
    assert len(ledger_of(folder)) == 8
    assert not list(secrets.iterdir())


def under_torchrun(folder: Path, secrets: Path) -> None:
    """Runs the example program, in which a rank is killed in each of the first two lives."""
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if attempt < 2 and rank == attempt:

        def end() -> None:
            (folder / f"died-{attempt}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

        before(WeightGuard, "update")(end, 4)
    main(folder, secrets / "training.json")


if __name__ == "__main__":
    under_torchrun(Path(sys.argv[1]), Path(sys.argv[2]))
