# SPDX-License-Identifier: Apache-2.0
"""Saves and loads the state of a training, which is checked before use, and goes on where steps do not repeat."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Literal

from torch import Tensor

from ..mechanisms.base import Mechanism
from ..mechanisms.noise import is_made_here
from ..runs.schemas import COUPLED, LOG, TEXT, record
from ..sampling.fingerprint import STATE_FINGERPRINT, check_data_of_state, fingerprint_for_state
from ..support.schema import violation
from ..support.validate import Refused, quoted
from ..support.warning import warn
from .machine import Machine, number_of_threads
from .placement import Whole
from .release import BEGUN, Keys, Releases, is_known, new_keys
from .run_files import RunFiles
from .settings import TrainingSettings, shapes_of
from .state import Setup, State

WHERE = "PrivateTraining.load_state_dict"
UNSEEN = (
    "steps that another process made after it had saved the state of step {}, if there were any: no ledger on disk has "
    "them, so that they are in no epsilon, and where one was made again with other numbers, both have one noise"
)
WARNED = (
    f"{WHERE}: no ledger on disk says which steps were made after this state was saved. If there were some, and this "
    "training makes them otherwise (with another learning rate, on another machine), two releases have one noise, and "
    "epsilon counts one. Keep a ledger on disk (run_folder=) from the start on; or, if there were some, pass "
    'replay="skip", which takes new noise. The statement says so under not_covered.'
)


class Resuming:
    """Saves and loads the secret state of a training.

    Args:
        setup, state: of the training.

    Attributes:
        files: the run folder, if there is one.
        machine: on which the steps after the state that was loaded were made; None before a load.
    """

    files: RunFiles | None = None

    def __init__(self, setup: Setup, state: State):
        self._setup, self._state = setup, state
        self._ranks = setup.placement.ranks
        self._parameters = shapes_of(state.tensors.trained)  # trained when the training began
        self._data: dict[str, Any] | None = None  # fingerprint of the data, once a state was saved
        self.machine: Machine | None = None
        self._repetition = ExitStack()  # while they are repeated

    def new_releases(
        self, keys: Keys | None = None, *, since: int = 0, resumed: bool = False, num_lost: int = 0
    ) -> Releases:
        """Returns the releases from step ``since`` on, under these keys or under new ones of rank 0."""
        setup = self._setup
        return Releases(
            setup.settings,
            setup.plan,
            setup.ledger,
            self._ranks.from_first(keys or new_keys(setup.settings.test_seed, num_lost)),
            since=since,
            resumed=resumed,
            num_lost=num_lost,
            canaries=setup.canaries,
            ranks=self._ranks,
            placement=setup.placement,
            made_here=is_made_here(setup.tensors().trained.values()),
        )

    def copy_ledger(self) -> None:
        """Copies the ledger of rank 0 to the others."""
        state = self._ranks.from_first(self._setup.ledger.state_dict())
        if not self._ranks.is_first:
            self._setup.ledger.load_state_dict(state)

    def state_dict(self, *, is_between_steps: bool) -> dict[str, Any]:
        """Returns what `PrivateTraining.state_dict` describes."""
        if not self._ranks.is_first:
            return {"format": 1, "kept_by": "rank 0"}
        setup, state = self._setup, self._state
        releases, coupled = state.releases, state.rehearsals.coupled
        if self._data is None and is_between_steps:
            self._data = fingerprint_for_state(setup.batches.dataset, releases.noise.key)
        return {
            "format": 1,
            "placement": setup.placement.in_words,
            "machine": Machine.here(state.tensors.trained.values()).state(),
            "num_lost": releases.num_lost,
            "keys_since": releases.since,
            "settings": self._settings(),
            "trained": shapes_of(self._trained(is_between_steps=is_between_steps)),
            "step_count": state.step,
            "num_non_finite": state.num_non_finite,
            "moved_otherwise": state.guard.moved_otherwise(state.step),
            "last_rehearsed": state.rehearsals.last_passed,
            "coupled": None if coupled is None else asdict(coupled),
            "noise_key": releases.noise.key.hex(),
            "sampler_key": releases.draws.sampler.key.hex(),
            "ledger": setup.ledger.state_dict(),
            **({} if self._data is None else {"data": self._data}),
            **({} if self.files is None else {"losses": self.files.losses.read().state_dict()}),
            **({"padded": dict(state.reached.padded)} if state.reached.padded else {}),
            **setup.mechanism.state(),
        }

    def load(self, saved: dict[str, Any], replay: Literal["exact", "skip"] | None) -> None:
        """Does what `PrivateTraining.load_state_dict` describes."""
        if replay not in (None, "exact", "skip"):
            raise ValueError(f'{WHERE}: replay={replay!r} must be "exact" or "skip".')
        setup, state = self._setup, self._state
        saved = self._ranks.from_first(saved)
        known, on_disk = self._ranks.from_first((len(setup.ledger), setup.ledger.path is not None))
        with self._ranks.together("loads a state"):
            check_state(saved, setup.settings, setup.mechanism)
            self._check_settings(saved["settings"], saved["trained"])
            check_data_of_state(WHERE, saved.get("data"), setup.batches.dataset)
            setup.ledger.load_state_dict(saved["ledger"])
        self._data = saved.get("data")
        state.guard.reset(saved["moved_otherwise"])  # before the ledger asks: the model may be loaded already
        self.copy_ledger()
        keys = bytes.fromhex(saved["noise_key"]), bytes.fromhex(saved["sampler_key"])
        num_lost, since = saved["num_lost"], saved["keys_since"]
        state.use(self.new_releases(keys, since=since, resumed=True, num_lost=num_lost), setup.account)
        self.machine = Machine(**saved["machine"])
        state.step, state.num_non_finite = saved["step_count"], saved["num_non_finite"]
        setup.mechanism.load_state(saved)
        state.reached.padded = dict(saved.get("padded", {}))
        if self.files is not None:
            self.files.losses.load(saved.get("losses"))
        state.rehearsals.load(saved)
        state.stop_reason = None  # the ledger may have later steps, and of their stop nothing was declared
        if replay is None:
            replay = "exact" if saved["placement"] == setup.placement.in_words else "skip"
        lacks = known < len(saved["ledger"]["releases"])
        is_unseen = (lacks or not on_disk) and not is_known(keys[0])
        if is_unseen:
            state.unseen = (UNSEEN.format(state.step),)
            if replay == "exact" and self._ranks.is_first:
                warn(WARNED)
        if replay == "skip":
            first = state.step
            self._skip_released()
            if lacks or is_unseen or self._may_lack_start(first):
                state.use(self.new_releases(since=state.step, num_lost=num_lost), setup.account)

    def _trained(self, *, is_between_steps: bool) -> Mapping[str, Tensor]:
        """Returns the parameters that the next step trains; on ranks, where some may be gathered, that the last did."""
        is_known = is_between_steps and isinstance(self._setup.placement, Whole)
        return self._setup.tensors_of().trained if is_known else self._state.tensors.trained

    def _settings(self) -> dict[str, Any]:
        """Returns the settings that the training began with: the loop may have frozen or unfrozen parameters since."""
        return self._setup.for_resuming(self._state.tensors) | {"parameters": self._parameters}

    def _check_settings(self, saved: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
        """Refuses a state of a training with other settings.

        The parameters are those with which that training began, or those which it trained in the end.
        """
        ours = self._settings()
        if ours["parameters"] == trained:
            saved = {**saved, "parameters": trained}
        differing = {key: (value, saved.get(key)) for key, value in ours.items() if saved.get(key) != value}
        if differing:
            listed = ", ".join(
                f"{key}={here!r} (the state has {there!r:.200})" for key, (here, there) in differing.items()
            )
            raise Refused(f"{WHERE}: {listed}. Resume a run with the settings it began with.")

    def _skip_released(self) -> None:
        """Goes on after the last step in the ledger; warns if updates are lost."""
        setup, state = self._setup, self._state
        released = min(len(setup.ledger) - state.releases.number(0), setup.settings.num_steps)
        skipped = released - state.step
        if skipped > 0:
            warn(
                f"PrivateTraining: steps {state.step} to {released - 1} were released after the state was saved. "
                f"They are not repeated: the {skipped} updates are lost and stay paid. Training goes on with step "
                f"{released} of {setup.settings.num_steps}."
            )
            state.step = released

    def _may_lack_start(self, first: int) -> bool:
        """True if the steps skipped from ``first`` on may be those of other keys, so that these lack an epoch's start.

        A run since the state may have taken new keys, and begun an epoch or a group of its own: that price is for its
        batches, and not for those of these keys in the same epoch. If it began with ``first``, as where the ledger was
        lost, it has marked that.
        """
        setup, state = self._setup, self._state
        releases, made = state.releases, setup.ledger.made
        plan, step = releases.plan, state.step

        def may_begin(skipped: int) -> bool:
            number = releases.number(skipped)
            event = made[number].event
            return event != plan.at(skipped) or event == plan.begun_anew(skipped, number).at(skipped)

        goes_on = step < setup.settings.num_steps and plan.begun_anew(step, releases.number(step)) is not plan
        begun = step > first and made[releases.number(first)].fingerprint.endswith(BEGUN)
        return goes_on and (begun or any(map(may_begin, range(first + 1, step))))

    def match_threads(self) -> None:
        """Sets torch's number of threads to the recorded one while steps are repeated, and back afterwards."""
        self._repetition.close()
        if self.machine is not None and self._state.releases.number(self._state.step) < len(self._setup.ledger):
            self._repetition.enter_context(number_of_threads(self.machine.threads))

    def end_loop(self) -> None:
        """Sets torch's number of threads back."""
        self._repetition.close()

    def take_new_keys(self) -> None:
        """Goes on with new keys, as the old ones made other releases of the steps from here on, and counts those, too.

        The batches must be new as well: the price of two releases holds for two independent samples.
        """
        self._repetition.close()
        setup, state = self._setup, self._state
        step, num_steps = state.step, setup.settings.num_steps
        num_lost = len(setup.ledger) - len(setup.settings.prior_releases) - step
        here = Machine.here(state.tensors.trained.values())
        found = "" if self.machine is None else self.machine.differences(here)
        state.use(self.new_releases(since=step, num_lost=num_lost), setup.account)
        allowed = setup.account.steps_allowed
        warn(
            f"PrivateTraining: step {step} did not repeat bit for bit what was released before the training was "
            f"resumed ({found or 'the loop, the data or the machine differ'}). Training goes on from here with new "
            f"keys for noise and batches, and the ledger counts the {num_lost} steps that are made again, too: "
            + (
                f"epsilon will be that of {num_steps + num_lost} steps."
                if allowed == num_steps
                else f"{allowed} of {num_steps} steps are made, so that epsilon stays within its limit."
            )
        )


KEY = {"type": "string", "pattern": "[0-9a-f]{64}"}
COUNT = {"type": "integer", "minimum": 0}
STATE = record(  # what state_dict returns; mechanism and ledger check their own parts further
    {
        "format": {"const": 1},
        "settings": {"type": "object"},
        "trained": {"type": "object"},
        "step_count": COUNT,
        "num_non_finite": COUNT,
        "moved_otherwise": {"type": "string"},
        "last_rehearsed": {"type": "integer", "minimum": -1},
        "coupled": {"oneOf": [COUPLED, {"type": "null"}]},
        "noise_key": KEY,
        "sampler_key": KEY,
        "ledger": {
            "type": "object",
            "required": ["ledger", "events", "releases"],
            "properties": {"releases": {"type": "array", "maxItems": 10**9}},
        },
        "machine": record(
            {**dict.fromkeys(("torch", "processor", "generator"), TEXT), "threads": {"type": "integer", "minimum": 1}}
        ),
        "num_lost": COUNT,
        "keys_since": COUNT,
        "placement": {"type": "string"},
        "losses": LOG,
        "data": STATE_FINGERPRINT,
        "clipping": {"type": "object"},
        "projections": {"type": ["string", "null"]},
        "padded": {"type": "object"},
    },
    optional=("losses", "data", "clipping", "projections", "padded"),
    closed=False,
)


def check_state(state: Any, settings: TrainingSettings, mechanism: Mechanism) -> None:
    """Refuses a state that no training has saved: other entries, types or numbers, or steps that no ledger holds."""
    wrong = violation(STATE, state)
    if not wrong and not _is_plain(state["settings"]):
        wrong = "settings must hold numbers, texts, lists and dictionaries"
    of_another = not wrong and any(state["settings"].get(key) != value for key, value in mechanism.settings().items())
    if not wrong and not of_another and (lacking := mechanism.state().keys() - state.keys()):
        wrong = f"it has no {quoted(sorted(lacking))}"
    if not wrong and state["step_count"] > settings.num_steps:
        wrong = f"step_count is {state['step_count']}: must be at most {settings.num_steps}"
    if not wrong:
        made, needed = len(state["ledger"]["releases"]), state["step_count"] + len(settings.prior_releases)
        wrong = f"the ledger holds {made} releases, and {needed} were made" if made < needed else ""
    if wrong:
        raise Refused(f"{WHERE}: {wrong}. Load a state that state_dict returned.")


def _is_plain(value: Any, depth: int = 6) -> bool:
    """True for numbers, texts and None in lists and dictionaries of a few levels."""
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and _is_plain(part, depth - 1) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_plain(part, depth - 1) for part in value)
    return value is None or type(value) in (int, float, str, bool)
