# What a developer runs; `make` alone lists it. Each target works from a bare clone: it does the set-up itself.

PYTHON ?= python3
DEMO_ARGS ?=
MINUTES ?= 10

BIN := .venv/bin
PROTOS := $(wildcard federation/proto/*.proto)
GENERATED := .venv/generated
# pip compiles what it installs on one core, for a third of its time: the set-up does that afterwards, on all.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup data debian demo test faults fuzz lint proto proto-check clean

help: ## Lists these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: .venv/.ready ## Makes .venv with Parley and everything pinned in constraints.txt; does nothing when it is up to date

# -qq leaves pip's errors and drops its warnings. The build's tools are installed first, so that they are pinned as well.
# torch: pip takes the pinned release from where it is configured to look. On Linux x86 the package index serves the
# build for CUDA, some gigabytes that a machine without a GPU does not need but that work there; to spare them, point
# pip's own settings (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL) at torch's CPU builds, which the same pin accepts.
.venv/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "setup: making .venv"; $(PYTHON) -m venv .venv; }
	@echo "setup: installing the build's tools"
	@$(PIP) hatchling editables
	@echo "setup: installing Parley and what it needs (minutes, the first time)"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # some packages bring files of other Python versions
	@touch $@

data: setup ## Puts the heart disease records into the user's cache, once; the only download besides the set-up's
	@$(BIN)/python -c 'import os; from parley.heart import data; print("data:", data.obtain(data.cache_folder(os.environ)))'

debian: setup # Chromium and PostgreSQL, for the tests that need them; without them those are skipped and say why
	@missing=""; \
	command -v chromium >/dev/null || missing="chromium fonts-liberation"; \
	ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || missing="$$missing postgresql"; \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "tests: installing $$missing"; \
	  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $$missing; } \
	    >.venv/apt.log 2>&1 || { tail -n 3 .venv/apt.log; echo "tests: $$missing could not be installed"; }; \
	else echo "tests: Debian's $$missing would let more tests run"; fi

demo: setup ## Five processes, four hospitals, one model; DEMO_ARGS="--keep" leaves it running
	@$(BIN)/parley demo $(DEMO_ARGS)

test: setup data debian ## All tests, with coverage
	@$(BIN)/coverage erase
	@$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term --durations=25

faults: setup data debian ## Kills real processes at every state, on SQLite and PostgreSQL; and other long tests (minutes)
	@$(BIN)/python -m pytest -n 2 -m "kill or long" tests

fuzz: setup ## Fuzzes codec, job file and machines for MINUTES (10 by default) and keeps what it finds in tests/fuzz/corpus
	@$(BIN)/python -m tests.fuzz.run --minutes $(MINUTES)

lint: setup proto-check ## Style, types, import layers, and that generated code is up to date
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

protoc = $(BIN)/python -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	--python_out=$(1) --mypy_out=quiet:$(1) $(PROTOS)

proto: setup ## Generates federation/proto/*_pb2.py and .pyi anew
	@$(call protoc,.)

proto-check: setup # Generates aside and compares
	@rm -rf $(GENERATED) && mkdir $(GENERATED)
	@$(call protoc,$(GENERATED))
	@for new in $$(cd $(GENERATED) && find . -type f); do diff -u "$$new" "$(GENERATED)/$$new" || stale=1; done; \
	test -z "$$stale" || { echo "federation/proto: generated code is out of date; run make proto"; exit 1; }

clean: ## Removes what set-up and checks made; the user's cache stays
	@rm -rf .venv .coverage .coverage.* htmlcov .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
