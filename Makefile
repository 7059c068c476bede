# SPDX-License-Identifier: Apache-2.0
# Each goal makes its own environment in $(VENV) when needed. On Debian: apt install make python3 python3-venv
VENV ?= .venv
PYTHON ?= python3
ARGS ?=
DEVICE ?=
# Tests wait for processes that they start, so that three jobs take a third less time than two on two cores.
JOBS ?= $(if $(DEVICE),$(if $(filter pretend,$(DEVICE)),2,0),3)
BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most never are, and to compile all takes half of the time.
PIP = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# One thread for each process, as the models are tiny; compiled modules are kept, as the tests start many processes.
FAST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# Silences an advertisement of the theme, not a warning about these pages.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help train test thorough compare bench fuzz faults check release-check docs format clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(VENV)/.train  ## train on the Adult data privately, at epsilon 2; ARGS="--epsilon 1" passes options on
	$(BIN)/torch-privacy train adult $(ARGS)

test: $(VENV)/.test  ## run the tests that judge a change, in about three minutes; DEVICE=cuda: those for a GPU; JOBS=4: more at once
	$(FAST) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(if $(DEVICE),--device $(DEVICE) )$(ARGS)

thorough: $(VENV)/.test  ## run what `test` leaves out: more cases of the same tests, processes that are killed, slow brackets
	$(FAST) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --thorough $(ARGS)

compare: $(VENV)/.compare  ## run the programs behind docs/comparison.md: this library beside four others
	$(FAST) $(BIN)/python -m pytest -n 2 --all tests/test_comparison.py $(ARGS)

bench: $(VENV)/.test  ## count launches and waits on a pretended GPU; DEVICE=cuda: time, throughput and memory on this machine's
	cd benchmarks && $(abspath $(BIN))/python card.py --device $(or $(DEVICE),pretend) $(ARGS)

fuzz: $(VENV)/.test  ## search longer for counterexamples, with other random draws every time
	$(BIN)/python -m pytest --all -m hypothesis --hypothesis-profile fuzz $(ARGS)

faults: $(VENV)/.test  ## interrupt, kill, flip bits and fail the disk at every place, not at a few
	TORCH_PRIVACY_ALL_FAULTS=1 $(BIN)/python -m pytest --all tests/faults $(ARGS)

check: $(VENV)/.check  ## lint, formatting, types, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/mkdocs build --strict --quiet

release-check: $(VENV)/.check  ## check the last commit as a user would meet it: clone, build, install, README, links, licenses
	$(BIN)/python .ci/release_check.py --python $(PYTHON) $(ARGS)

docs: $(VENV)/.check  ## serve the documentation while you write it
	$(BIN)/mkdocs serve

format: $(VENV)/.check  ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and what was built; training runs stay
	rm -rf $(VENV) site dist

# One stamp per set of extras; the environment is renewed when a dependency or a pin changes.
$(VENV)/.train: TARGET := .
$(VENV)/.test: TARGET := .[test]
$(VENV)/.compare: TARGET := .[test,comparison]
$(VENV)/.check: TARGET := .[test,docs]
$(VENV)/.check: ALSO := $(VENV)/.test
$(VENV)/.train $(VENV)/.test $(VENV)/.compare $(VENV)/.check: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) must be Python 3.11 or newer. Install one and name it: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) lacks the venv module. On Debian: apt install python3-venv" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation -e '$(TARGET)'
	@touch $@ $(ALSO)
