# make demo | test | lint | clean; each sets up .venv when it is missing or older than pyproject.toml.
# CONTRIBUTING.md has the plain commands behind them.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

.PHONY: demo test lint clean

demo: $(READY)
	$(BIN)/python experiments/quickstart.py

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
