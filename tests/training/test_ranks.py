# SPDX-License-Identifier: Apache-2.0
"""A model that is trained on several ranks gets the weights that one process gives it: only rounding differs."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import Pool
from ranked import CASES, VIEWS, Result, case, difference, go, of_pair, start, trained
from real_models import QUIET
from trainings import RULES

import torch_privacy as tp

pytestmark = [*QUIET, VIEWS]
HARDLY_ANY_NOISE = 1e-6
REAL = ["GPT-2", "Llama", "LoRA on GPT-2"]
SUBSPACES = ["GEP", "BGEP"]
SMALL = [name for name in CASES if name not in (*REAL, *SUBSPACES, "bfloat16")]
TOLERANCE = {"float32": 1e-6}  # of weights of size 1; else 1e-12


@cache
def in_one_process(name: str, optimizer: str, settings: tuple[tuple[str, Any], ...]) -> Result:
    return trained(None, name, None, optimizer, dict(settings))


def assert_as_in_one_process(
    pool: Pool, name: str, how: str, optimizer: str = "sgd", **settings: Any
) -> tuple[Result, list[Result]]:
    """Trains a case on the ranks and in one process, and compares; ``pytest -rP`` prints the differences."""
    expected = in_one_process(name, optimizer, tuple(settings.items()))
    found = pool.run(trained, name, how, optimizer, settings)
    far = max(difference(result.weights, expected.weights) for result in found)
    moved = difference(found[0].weights, {n: torch.zeros_like(w) for n, w in expected.weights.items()})
    print(f"{name}, {how}, {pool.size} ranks, {optimizer}, {settings}: {far:.2g} of weights up to {moved:.2g}")
    assert far <= TOLERANCE.get(name, 1e-12)
    for result in found:
        assert (result.steps, result.rule) == (expected.steps, expected.rule)
    return expected, found


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", SMALL)
def test_sharded_sums_are_those_of_one_process(ranks2, name):
    assert_as_in_one_process(ranks2, name, "layers", noise_multiplier=HARDLY_ANY_NOISE)


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", [name for name in SMALL if name != "columns"])
def test_sums_of_ddp_are_those_of_one_process(ranks2, name):
    assert_as_in_one_process(ranks2, name, "ddp", noise_multiplier=HARDLY_ANY_NOISE)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["first layer", "all but one", "kept after forward"])
@pytest.mark.parametrize("noise", [HARDLY_ANY_NOISE, 1.0])
def test_models_that_are_sharded_in_part_get_the_weights_of_one_process(ranks2, how, noise):
    assert_as_in_one_process(ranks2, "uneven", how, noise_multiplier=noise)


@pytest.mark.thorough
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("how", ["layers", pytest.param("ddp", marks=pytest.mark.thorough)])
def test_transformers_get_the_weights_of_one_process(ranks2, name, how):
    assert_as_in_one_process(ranks2, name, how, noise_multiplier=HARDLY_ANY_NOISE)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("how", ["root", "layers", "ddp"])
@pytest.mark.parametrize("name", ["uneven", "one example a step", "microbatches"])
def test_noise_is_that_of_one_process(ranks2, name, how):
    assert_as_in_one_process(ranks2, name, how, "adam")


FOUR = ["hsdp", *(pytest.param(how, marks=pytest.mark.thorough) for how in ("layers", "ddp"))]


@pytest.mark.thorough
@pytest.mark.parametrize("how", FOUR)
@pytest.mark.parametrize("name", ["uneven", "one example a step", "microbatches", "views", "tied", *REAL])
def test_four_ranks_give_the_weights_of_one_process(ranks4, name, how):
    assert_as_in_one_process(ranks4, name, how, noise_multiplier=HARDLY_ANY_NOISE)


@pytest.mark.thorough
@pytest.mark.parametrize("how", FOUR)
@pytest.mark.parametrize("name", ["uneven", "one example a step"])
def test_four_ranks_make_the_noise_of_one_process(ranks4, name, how):
    assert_as_in_one_process(ranks4, name, how, "adam")


def own(rule: str) -> Any:
    """Returns a clipping rule of `RULES`, with thresholds for the layers of `mlp`."""
    groups = tp.Groups({"": 0.3, "2": 0.2, "4.weight": 0.6})
    return groups if rule == "groups" else RULES[rule][0]


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", ["layers", "ddp"])
def test_each_clipping_rule_clips_as_in_one_process(ranks2, rule, how):
    """An adaptive threshold follows the count of all ranks, and is the same on each."""
    noise = 1.0 if rule == "adaptive" else HARDLY_ANY_NOISE
    assert_as_in_one_process(ranks2, "uneven", how, clipping=own(rule), noise_multiplier=noise)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["adaptive", "per layer"])
def test_clipping_rules_take_microbatches(ranks2, rule):
    noise = 1.0 if rule == "adaptive" else HARDLY_ANY_NOISE
    assert_as_in_one_process(
        ranks2,
        "uneven",
        "layers",
        clipping=own(rule),
        noise_multiplier=noise,
        performance=tp.Performance(microbatch_size=4),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["ddp", "layers"])
def test_estimated_norms_are_those_of_one_process(ranks2, how):
    assert_as_in_one_process(ranks2, "uneven", how, clipping=tp.Sketched(16, clip_norm=0.5), noise_multiplier=0.05)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SUBSPACES)
@pytest.mark.parametrize("how", ["layers", "ddp"])
def test_perturbed_embeddings_are_those_of_one_process(ranks2, name, how):
    assert_as_in_one_process(ranks2, name, how, noise_multiplier=0.05)


@pytest.mark.thorough
def test_weights_in_bfloat16_are_those_of_one_rank(ranks2, launcher):
    """One process without ``fully_shard`` would round at other places, by 1e-3 here."""
    settings = {"noise_multiplier": HARDLY_ANY_NOISE}
    with launcher.pool(1) as one:
        (expected,) = one.run(trained, "bfloat16", "layers", "sgd", settings)
    found = ranks2.run(trained, "bfloat16", "layers", "sgd", settings)
    far = max(difference(result.weights, expected.weights) for result in found)
    in_float32 = difference(in_one_process("float32", "sgd", tuple(settings.items())).weights, expected.weights)
    print(f"bfloat16: {far:.2g} from one rank, {in_float32:.2g} from float32")
    assert far < 1e-5
    assert 1e-5 < in_float32 < 1e-2


@pytest.mark.thorough
def test_an_example_with_a_gradient_that_is_not_finite_is_left_out_on_its_own_rank(ranks2):
    expected, found = assert_as_in_one_process(ranks2, "non-finite examples", "layers")
    counts = [result.non_finite for result in found]
    assert expected.non_finite > 5
    assert set(counts) == {expected.non_finite} or sum(counts) == expected.non_finite


def accounts(rank: int | None, how: str | None, folder: Path) -> dict[str, Any]:
    training = start(case(), how, run_folder=folder / str(rank), delta=1e-3, optimizer="sgd")
    go(training, of_pair)
    statement = training.statement()
    assert ("data" in statement) == (rank in (None, 0))  # the fingerprint is in the folder
    statement.pop("data", None)
    statement.pop("date")
    return {
        "statement": statement,
        "spent": str(training.spent()),
        "state": training.state_dict(),
        "releases": len(training.ledger),
    }


def in_digits(statement):
    """Returns it with six digits of each number: the last ones of a transform depend on where arrays lie in memory."""
    return json.loads(json.dumps(statement), parse_float=lambda text: float(f"{float(text):.6g}"))


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "ddp"])
def test_all_ranks_know_the_price_and_only_the_first_keeps_files_and_keys(ranks2, tmp_path, how):
    alone = accounts(None, None, tmp_path)
    first, second = ranks2.run(accounts, how, tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0", "None"]
    assert (tmp_path / "0" / "ledger.jsonl").read_text().count('"step"') == 5
    for found in first, second:
        assert found["spent"] == alone["spent"]
        assert found["releases"] == alone["releases"]
        assert in_digits(found["statement"]) == in_digits(alone["statement"] | {"ranks": 2})
    assert first["state"]["noise_key"] == alone["state"]["noise_key"]
    assert not any("key" in key for key in second["state"])
