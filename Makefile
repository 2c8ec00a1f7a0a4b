# Everything runs on CPU in its own virtual environment, which these targets make.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint tests/constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint types unit docs test-gpu bench clean

$(VENV)/python:
	$(PYTHON) -m venv $(VENV) && touch $@

$(VENV)/demo: $(VENV)/python pyproject.toml tests/constraints.txt
	$(PIP) --editable '.[examples]' && touch $@

$(VENV)/test: $(VENV)/python pyproject.toml tests/constraints.txt
	$(PIP) --editable '.[test]' && touch $@ $(VENV)/demo

$(VENV)/bench: $(VENV)/test
	$(PIP) --editable '.[test,bench]' && touch $@

demo: $(VENV)/demo  ## train the examples on 1 and on 2 processes with the same loop
	$(PY) examples/train.py
	$(PY) -m torch.distributed.run --standalone --nproc-per-node 2 examples/train.py
	$(PY) -m torch.distributed.run --standalone --nproc-per-node 2 examples/gpt.py

test: lint types docs unit  ## lint, types, documentation and all tests

lint: $(VENV)/test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/test
	$(PY) -m mypy

docs: $(VENV)/test
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --config-file docs/mkdocs.yml --site-dir ../build/site

unit: $(VENV)/test
	$(PY) -m pytest

test-gpu: $(VENV)/test  ## the suites that need one CUDA device
	$(PY) -m pytest tests/gpu tests/engines/test_contract.py

bench: $(VENV)/bench  ## writes docs/benchmarks.md and its picture
	$(PY) -m tests.bench

clean:
	rm -rf $(VENV) build runs .mypy_cache .ruff_cache .pytest_cache
