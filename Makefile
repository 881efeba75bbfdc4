# make demo | test | test-slow | mutation | lint | types | docs | docs-serve | docs-version | dist | audit | clean;
# each sets up .venv when it is missing or older than pyproject.toml. make test-lowest has an environment of its own, new each time.
# CONTRIBUTING.md has the plain commands behind them.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
DEMO := .venv/.demo
LOWEST := .venv-lowest

.PHONY: demo test test-slow test-lowest mutation lint types docs docs-serve docs-version dist audit clean

demo: $(DEMO)
	$(BIN)/python experiments/quickstart.py

# test-slow: notebooks, experiments, documentation, browser, several processes, LeNet-5.
test: export MARKED = not slow
test-slow: export MARKED = slow
# Byte code is kept: without it each process would compile torch and Pyro anew, for seconds.
test test-slow: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "$$MARKED"

# The fraction of sampled faults in the library that `make test` detects; MUTANTS in each package.
MUTANTS ?= 8
mutation: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/_support/mutation.py --sample $(MUTANTS)

# The suite at the lowest versions that pyproject.toml allows; PYTHON must be the lowest one, too.
test-lowest:
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python tests/_support/min_versions.py > $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python -m pip install --quiet --requirement $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python -m pip install --quiet --no-deps --editable .
	$(LOWEST)/bin/python -m pip check
	$(LOWEST)/bin/python -m pytest $(TESTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# How complete the types of the public API are. The rest comes from base classes of Pyro and scikit-learn.
types: $(READY)
	$(PYTHON) -m venv --clear .venv/pyright
	.venv/pyright/bin/python -m pip install --quiet "pyright[nodejs]"
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=. .venv/pyright/bin/pyright --ignoreexternal --verifytypes pyro_bbb \
		> .venv/pyright/report.txt || true
	grep -E "With|score" .venv/pyright/report.txt
	! grep -A 1 "missing type annotation" .venv/pyright/report.txt

# The documentation: into site/, or on a local port while one writes. (MkDocs Material's banner is off.)
docs docs-serve docs-version: export NO_MKDOCS_2_WARNING = 1

docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

docs-serve: $(READY)
	$(BIN)/python -m mkdocs serve

# The site of this version, 0.1 of 0.1.2, as a commit on the branch gh-pages; PUSH=--push publishes it.
docs-version: VERSION = $(shell sed -n 's/^__version__ = "\([0-9]*\.[0-9]*\).*/\1/p' pyro_bbb/_utils/version.py)
docs-version: $(READY)
	PATH="$(BIN):$$PATH" $(BIN)/mike deploy $(PUSH) --update-aliases $(VERSION) latest
	$(BIN)/mike set-default $(PUSH) latest

# What a release uploads: sdist and wheel in dist/, checked.
dist: $(READY)
	rm -rf build dist *.egg-info
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

# Consistent versions, and none with a known vulnerability. Asks PyPI; an answer that lacks is a failure.
audit: $(READY)
	$(BIN)/python -m pip check
	$(PYTHON) -m venv --clear .venv/audit
	.venv/audit/bin/python -m pip install --quiet pip-audit
	$(BIN)/python -m pip freeze --exclude-editable > .venv/audit/requirements.txt
	.venv/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement .venv/audit/requirements.txt

# What the demo needs: the library, and what its experiments import.
$(DEMO): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[cli]"
	touch $@

# What all else needs. A new pip, which knows groups; Python 3.11's own does not.
$(READY): pyproject.toml
	$(PYTHON) -m venv --upgrade-deps .venv
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[all]" --group dev
	touch $(DEMO) $@

clean:
	rm -rf .venv $(LOWEST) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
