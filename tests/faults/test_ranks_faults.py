# SPDX-License-Identifier: Apache-2.0
"""Ranks that die: every release is in the ledger once, and the training goes on with the same ranks or with others."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import Launcher
from ranked import case, go, of_pair, start, whole_weights
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import torch_privacy as tp
from torch_privacy.privacy import Ledger
from torch_privacy.training.placement import buckets

STEPS, SAVED, DIES = 7, 2, 4  # steps in all, in the checkpoint, and before the one in which a rank dies
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
HOWS = pytest.mark.parametrize("how", ["layers", "ddp"])


def save(training: tp.PrivateTraining, rank: int | None, file: Path) -> None:
    """Writes one checkpoint of all ranks; the state of the training is that of rank 0."""
    state: dict[str, Any] = {
        "model": get_model_state_dict(training.model, options=WHOLE),
        "optimizer": get_optimizer_state_dict(training.model, training.optimizer, options=WHOLE),
        "training": training.state_dict(),
    }
    if not rank:
        training.ledger.sync()
        torch.save(state, file)


def load(training: tp.PrivateTraining, file: Path, replay: Any) -> None:
    state = torch.load(file)
    set_model_state_dict(training.model, state["model"], options=WHOLE)
    set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"], options=WHOLE)
    training.load_state_dict(state["training"], replay)


def begin(rank: int | None, how: str | None, folder: Path) -> tp.PrivateTraining:
    return start(case(), how, num_steps=STEPS, run_folder=folder)


def until_death(rank: int | None, how: str | None, folder: Path, death: str) -> tuple[int, bool]:
    """Trains, saves after two steps, and dies in the fifth; a rank that survives returns its steps, and if it moved."""
    training = begin(rank, how, folder)
    dying = rank == 1
    record = Ledger.record
    moved = False

    def recorded(self: Ledger, *arguments: Any) -> Any:
        answer = record(self, *arguments)
        if rank == 0 and len(self) > DIES:
            os._exit(9)
        return answer

    def ended(optimizer: Any, *_: Any) -> None:
        nonlocal moved
        moved = training.step_count > DIES
        if dying and death == "before its update" and moved:
            os._exit(9)

    training.optimizer.register_step_pre_hook(ended)
    if death == "after the record":
        Ledger.record = recorded
    try:
        for batch in training:
            if dying and death == "before the record" and training.step_count == DIES:
                os._exit(9)
            made = training.step(of_pair(training.model, batch))
            if made and training.step_count == SAVED:
                save(training, rank, folder / "checkpoint.pt")
    except RuntimeError as error:
        if "start all ranks again, and load the last checkpoint" not in str(error):
            raise
    return training.step_count, moved


def go_on(rank: int | None, how: str | None, folder: Path, replay: str | None) -> dict[str, Any]:
    training = begin(rank, how, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(training, folder / "checkpoint.pt", replay)
        begun = training.step_count
        go(training, of_pair)
    return {
        "warnings": [str(warning.message) for warning in caught],
        "begun": begun,
        "weights": whole_weights(training.model),
        "ledger": training.ledger.state_dict(),
        "lost": training.num_lost,
    }


def uninterrupted(rank: int | None, how: str | None, folder: Path) -> dict[str, Any]:
    training = begin(rank, how, folder)
    go(training, of_pair)
    return {"weights": whole_weights(training.model), "ledger": training.ledger.state_dict()}


def lines(folder: Path) -> list[str]:
    return [line for line in (folder / "ledger.jsonl").read_text().splitlines() if '"step"' in line]


DEATHS = {"before the record": (1, DIES), "after the record": (0, DIES + 1), "before its update": (1, DIES + 1)}


@pytest.mark.thorough
@pytest.mark.parametrize("death", DEATHS)
@HOWS
def test_a_rank_that_dies_loses_no_release_and_repeats_none_with_other_sums(launcher, tmp_path, how, death):
    dead, released = DEATHS[death]
    with launcher.pool(2) as pool:
        outcomes = pool.outcomes(until_death, how, tmp_path, death)
    assert outcomes[dead].exit_code == 9
    steps, moved = outcomes[1 - dead].value
    assert steps == (released if dead else DIES)
    assert moved == (death == "before its update")
    before = lines(tmp_path)
    assert len(before) == released
    whole = tmp_path / "whole"
    with launcher.pool(2) as pool:
        found = pool.run(go_on, how, tmp_path, None)
        expected = pool.run(uninterrupted, how, whole)
    assert lines(tmp_path)[:released] == before
    assert lines(tmp_path) == lines(whole)
    for one, other in zip(found, expected, strict=True):
        assert (one["begun"], one["lost"]) == (SAVED, 0)
        assert one["ledger"] == other["ledger"]
        assert all(torch.equal(one["weights"][name], weight) for name, weight in other["weights"].items())


def killed(launcher: Launcher, how: str, folder: Path) -> list[str]:
    """Returns the ledger of a training on two ranks, of which one died after step 4 was recorded, before its update."""
    with launcher.pool(2) as pool:
        pool.outcomes(until_death, how, folder, "before its update")
    return lines(folder)


def assert_skipped(found: list[dict[str, Any]], before: list[str], folder: Path) -> None:
    """Goes on with step 5 of 7: steps 2, 3 and 4 stay paid."""
    assert len(before) == DIES + 1
    assert lines(folder)[: DIES + 1] == before
    assert len(lines(folder)) == STEPS
    for one in found:
        assert (one["begun"], one["lost"]) == (DIES + 1, 0)
        assert len(one["ledger"]["releases"]) == STEPS
        assert [text for text in one["warnings"] if "steps 2 to 4 were released after the state was saved" in text]
        assert all(torch.equal(one["weights"][name], weight) for name, weight in found[0]["weights"].items())


@pytest.mark.thorough
@HOWS
def test_released_steps_are_skipped_if_asked_for(launcher, tmp_path, how):
    before = killed(launcher, how, tmp_path)
    with launcher.pool(2) as pool:
        assert_skipped(pool.run(go_on, how, tmp_path, "skip"), before, tmp_path)


@pytest.mark.thorough
@HOWS
def test_one_process_goes_on_after_two_ranks_and_skips_their_releases(launcher, tmp_path, how):
    before = killed(launcher, how, tmp_path)
    assert_skipped([go_on(None, None, tmp_path, None)], before, tmp_path)


@pytest.mark.thorough
def test_other_placements_go_on_and_skip_the_releases(launcher, tmp_path):
    before = killed(launcher, "layers", tmp_path)
    with launcher.pool(2) as pool:
        assert_skipped(pool.run(go_on, "ddp", tmp_path, None), before, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["hsdp", *(pytest.param(how, marks=pytest.mark.thorough) for how in ("layers", "ddp"))])
def test_four_ranks_go_on_after_two_and_skip_their_releases(launcher, ranks4, tmp_path, how):
    before = killed(launcher, "layers", tmp_path)
    assert_skipped(ranks4.run(go_on, how, tmp_path, None), before, tmp_path)


@pytest.mark.thorough
def test_steps_that_other_ranks_cannot_repeat_are_made_again_with_new_keys_and_paid(launcher, tmp_path):
    before = killed(launcher, "layers", tmp_path)
    with launcher.pool(1) as one:  # this process has made other releases with the same key
        (found,) = one.run(go_on, None, tmp_path, "exact")
    assert (found["begun"], found["lost"]) == (SAVED, DIES + 1 - SAVED)
    assert lines(tmp_path)[: DIES + 1] == before
    assert len(lines(tmp_path)) == STEPS + DIES + 1 - SAVED
    assert "did not repeat bit for bit" in found["warnings"][0]


def out_of_memory(rank: int, how: str) -> int:
    """Fails on rank 1 where the others wait for its sums, and ends as a script does."""
    training = start(case(), how)

    def failing(*_: Any) -> Any:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        try:
            for batch in training:
                if rank == 1 and training.step_count == 2:
                    patch.setattr(buckets, "reduce_scatter", failing)
                training.step(of_pair(training.model, batch))
        except MemoryError:
            os._exit(1)
    return training.step_count


@pytest.mark.thorough
@HOWS
def test_a_rank_that_fails_where_others_wait_for_its_sums_does_not_wait_for_them(launcher, how):
    with launcher.pool(2) as pool:
        first, second = pool.outcomes(out_of_memory, how)
    assert second.exit_code == 1
    assert first.failed
    assert first.exit_code is None
