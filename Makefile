# Everything a fresh machine needs is Python >= 3.11, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install rollout test lint nightly bench clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 12

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

install: $(INSTALLED) ## make .venv with the tested versions

rollout: install ## run the main job: every mode on both embedded models, tables and pictures
	$(BIN)/omnibatch compare --model tiny-qwen-image --out rollouts/tiny-qwen-image
	$(BIN)/omnibatch compare --model tiny-sd35 --max-sequence-length 32 --out rollouts/tiny-sd35

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: install lint ## run every check
	$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered

nightly: install ## the engine's state machine, at length
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest tests/test_engine_states.py

bench: install ## overhead, scheduler cost, arrivals over time, replay at another shape
	$(BIN)/python -m omnibatch.bench.overhead
	$(BIN)/python -m omnibatch.bench.scheduler_cost
	$(BIN)/python -m omnibatch.bench.arrivals
	$(BIN)/python -m omnibatch.bench.replay_mismatch

clean: ## remove what was made
	rm -rf $(VENV) rollouts .pytest_cache .hypothesis .mypy_cache .ruff_cache .coverage
