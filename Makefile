# Everything a fresh machine needs is Python >= 3.11, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install rollout test lint book book-serve notebooks nbval nightly bench clean

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

test: install lint ## run every check: tests, the book from an empty cache, the notebooks
	$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered
	$(MAKE) book
	$(MAKE) nbval

book: install ## execute and build the book, into _build/html; a warning or a dead link fails it
	rm -rf _build
	$(BIN)/jupyter-book build . --toc book/_toc.yml -W --keep-going -n --all
	$(BIN)/python -m pytest -q tests/check_book.py

book-serve: ## show the book that was built at http://127.0.0.1:8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory _build/html 8000

notebooks: $(patsubst %.py,%.ipynb,$(wildcard notebooks/*.py)) ## run the notebooks whose scripts changed, keep outputs

notebooks/%.ipynb: notebooks/%.py | $(INSTALLED)
	$(BIN)/jupytext --to ipynb $<
	TQDM_DISABLE=1 $(BIN)/jupyter-execute --inplace $@

nbval: install ## run the notebooks and compare their outputs with those kept
	TQDM_DISABLE=1 $(BIN)/python -m pytest -o addopts= -o filterwarnings= --nbval --nbval-current-env \
		--nbval-cell-timeout=1200 notebooks/*.ipynb

nightly: install ## the engine's state machine, at length
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest tests/test_engine_states.py

bench: install ## the recipes' tables, overhead, scheduler cost, arrivals over time, replay at another shape, replicas
	$(BIN)/omnibatch bench --recipe qwen_image_flow_grpo
	$(BIN)/omnibatch bench --recipe sd35_flow_grpo
	$(BIN)/python -m omnibatch.bench.overhead
	$(BIN)/python -m omnibatch.bench.scheduler_cost
	$(BIN)/python -m omnibatch.bench.arrivals
	$(BIN)/python -m omnibatch.bench.replay_mismatch
	$(BIN)/python -m omnibatch.bench.scale_out

clean: ## remove what was made
	rm -rf $(VENV) _build rollouts .pytest_cache .hypothesis .mypy_cache .ruff_cache .coverage
