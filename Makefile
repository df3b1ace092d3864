# Two commands do all the set-up: `make quickstart` and `make test`.
# Each builds .venv from nothing when it is not there, and reuses it when it is.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The first Python that is 3.11 or newer and can make virtual environments.
USABLE := -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p $(USABLE) && { echo $$p; break; }; done)

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS  ?= 2

# Threads that wait for work sleep: spinning, they slow training many times over as soon as
# another process wants a core.  OpenMP reads this when torch loads.
export OMP_WAIT_POLICY ?= PASSIVE

# Options of `make quickstart`.
SMOKE  ?= 0
EPOCHS ?=
CACHE  ?= .quickstart

# Options of `make golden`.
ONLY    ?=
AGAINST ?=

# `make peers`: an environment of its own, since the peers pin other versions.
PEERS       ?= .peers
PEERS_STAMP := $(PEERS)/.installed

# One thread per test process: two processes then fill two cores without fighting over them.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST   := $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --timeout 300

.PHONY: help quickstart test test-full golden golden-record peers lint format bench clean

help:
	@echo "make quickstart   train, export and measure a small draft model on this machine"
	@echo "                  SMOKE=1 three training steps; EPOCHS=8 longer; CACHE=dir keep files there"
	@echo "make test         the test suite (a few minutes on two cores)"
	@echo "make test-full    the slow tests too"
	@echo "make golden       tiny runs whose numbers a refactor must not change, replayed to the last"
	@echo "                  bit (AGAINST=rev compares with a commit, on any machine; ONLY=pattern)"
	@echo "make golden-record  records them anew, for a commit that changes numbers on purpose"
	@echo "make peers        SpecForge and speculators as oracles for export, import and losses"
	@echo "                  (PEERS=dir keeps their environment there)"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff rewrite the files"
	@echo "make bench        the benchmarks"
	@echo "make clean        remove .venv, .peers, caches and build files (never CACHE or runs/)"

$(STAMP): setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo "error: needs Python 3.11 or newer with venv; \
	name one with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) $(USABLE) || { echo "error: PYTHON=$(PYTHON): no such command, or not Python 3.11 \
	or newer with venv" >&2; exit 2; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version): about a minute, more on a slow line"
	@$(PYTHON) -m venv $(VENV)
	@start=$$SECONDS; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
		-e '.[dev,quickstart]'; \
	echo "$(VENV) is ready after $$((SECONDS - start)) s"
	@touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/python -u -m specforge_trim.cli.quickstart --cache-dir '$(CACHE)' \
		$(if $(filter-out 0,$(SMOKE)),--smoke) $(if $(EPOCHS),--epochs $(EPOCHS))

test: $(STAMP)
	$(PYTEST) -m "not slow and not gpu"

test-full: $(STAMP)
	$(PYTEST)

golden: $(STAMP)
	$(BIN)/python tests/golden/runs.py replay $(if $(ONLY),--only '$(ONLY)') \
		$(if $(AGAINST),--against '$(AGAINST)')

golden-record: $(STAMP)
	$(BIN)/python tests/golden/runs.py record $(if $(ONLY),--only '$(ONLY)')

$(PEERS_STAMP): tests/peers/requirements.txt constraints.txt
	@$(PYTHON) $(USABLE) || { echo "error: needs Python 3.11 or newer with venv; \
	name one with PYTHON=..." >&2; exit 2; }
	@echo "setting up $(PEERS): some minutes on a slow line"
	@$(PYTHON) -m venv '$(PEERS)'
	@'$(PEERS)'/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@'$(PEERS)'/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
		-r tests/peers/requirements.txt
	@touch '$(PEERS_STAMP)'

peers: $(PEERS_STAMP)
	'$(PEERS)'/bin/python tests/peers/check_peers.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	@ls benchmarks/*.py >/dev/null 2>&1 || { echo "error: no benchmarks yet" >&2; exit 2; }
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

clean:
	rm -rf $(VENV) .peers build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
