# Every target does its own set-up, and can be repeated. Another interpreter: make PYTHON=python3.12
# `make test` shares the files of tests out among WORKERS processes, each computing in one thread;
# files come in their order, of which the last, in tests/verify, are short. With WORKERS=0, and in
# `make test-all`, one process works in a thread for every processor.
PYTHON ?= python3
WORKERS ?= 2

# Bytecode is kept, whatever the environment says: tests start many processes, and each would
# compile what it imports again.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all mutants fuzz check setup clean

demo: $(READY)
	$(BIN)/python examples/train_gpt.py --check

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-all: $(READY)
	$(BIN)/python -m pytest

# What is judged already, and which test executes what, is kept in .mutants: stop it at any time.
mutants: $(READY)
	PYTHONPATH=tests:tests/helpers $(BIN)/python -m code_mutants

# Random programs until one fails: make fuzz SECONDS=600, or until Ctrl-C; SEED= is the first seed.
fuzz: $(READY)
	PYTHONPATH=.:tests:tests/helpers $(BIN)/python -m fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

setup: $(READY)

# The stamp is written last: a set-up that was interrupted is done again.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test,dev]"
	touch $@

clean:
	rm -rf $(VENV) .mutants build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
