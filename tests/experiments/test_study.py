# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Settings

COMMON = {"expected_batch_size": 10, "learning_rate": 0.1, "clip_norm": 1.0, "epochs": 1}


@pytest.mark.parametrize(
    ("defaults", "chosen"),
    [
        ({"target_epsilon": 3.0}, {"noise_multiplier": 2.0}),
        ({"noise_multiplier": 2.0}, {"target_epsilon": 3.0}),
    ],
)
def test_chosen_noise_replaces_the_default_target_and_vice_versa(defaults, chosen):
    study = Study({}, lambda quick: [], defaults=Settings(**COMMON, **defaults))
    assert study.settings(seed=3, **chosen) == Settings(**COMMON, **chosen, seed=3)
    assert study.settings() == study.defaults


def test_both_kinds_of_noise_are_restored_as_a_run_has_them():
    study = Study({}, lambda quick: [], defaults=Settings(**COMMON, noise_multiplier=2.0))
    settings = study.settings(target_epsilon=3.0)
    assert study.settings(**vars(settings)) == settings
