# Every target does its own set-up: with Python 3.11 or newer and pip, a fresh clone needs nothing else.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
OLDEST := .venv-oldest/.installed
# Registration, saving, states, generation, the command line, a conversion, and every family once in each way.
OLDEST_TESTS := tests/test_imports.py tests/attention tests/generation tests/model/test_saving.py tests/cli \
	tests/surgery/test_generic_adapter.py tests/surgery/test_families.py tests/pipelines/test_convert.py \
	-k "not test_families and not test_convert and not test_imports and not task or exact_attention or trainer or peft \
	or (test_generates_like and (greedy or several_beams)) or whole_way or stays_what or continuing_from or order1 or hook"

.DEFAULT_GOAL := help
.PHONY: help demo demo-full test test-all test-oldest lint format clean install

help:  ## Print this list
	@echo "t2r: turn a pretrained transformer into an RNN"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

demo: $(INSTALLED)  ## Convert a small transformer into an RNN while you watch, in five minutes on any machine
	$(BIN)/python examples/demo.py

demo-full: $(INSTALLED)  ## The same in twenty minutes, with softmax layers kept and with the elu map beside it
	$(BIN)/python examples/demo.py --full

test: $(INSTALLED)  ## Run the tests, without the slow ones (ARGS="-k ops" passes options to pytest)
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-all: $(INSTALLED)  ## Run every test
	$(BIN)/python -m pytest -n 2 -m "slow or not slow" $(ARGS)

test-oldest: $(OLDEST)  ## Run the tests of what touches transformers, with the oldest versions that t2r accepts
	.venv-oldest/bin/python -m pytest -n 2 $(OLDEST_TESTS) $(ARGS)

lint: $(INSTALLED)  ## Check the code, change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## Format the code and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove all that make built, the environment too
	rm -rf .venv .venv-oldest .cache build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

install: $(INSTALLED)  ## Make the environment in .venv (the others do this by themselves)

# The stamp is written last, so an install that was interrupted is not taken for a finished one.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "t2r needs Python 3.11 or newer, and '$(PYTHON)' is not: say which, e.g. make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up .venv (minutes the first time, seconds after that)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# torch is taken from .venv: it is large, and an older one may not be at hand as a CPU build.
$(OLDEST): $(INSTALLED) tests/oldest.py
	@echo "Setting up .venv-oldest over .venv"
	@$(BIN)/python -m venv .venv-oldest
	@$(BIN)/python tests/oldest.py .venv-oldest
	@.venv-oldest/bin/python -m pip install -qq --disable-pip-version-check -r .venv-oldest/oldest.txt
	@touch $@
