# make demo     deploy 1P1D on this machine, ask it a question, take it down
# make test     lint, types, and the test suite
# make docs     write the tables that documents take from the code
# make test-repeat   the suite six times: as it is, beside a busy core, in random order
# make gpu-check   whether this project is right and quick on this machine's GPU: some minutes, a verdict for each thing
# make test-slow, make test-gpu, make proto, make clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
REQUIREMENTS := pyproject.toml constraints.txt
# Two processes, whole files, the longest first (tests/support/long_files.py). More processes would starve the tests' Ray
# instances.
SUITE := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test style lint test-repeat test-slow test-gpu gpu-check docs proto clean

demo: $(VENV)/installed
	@PATH="$(abspath $(BIN)):$$PATH" deploy/demo.sh

test: lint
	$(BIN)/python -m pytest $(SUITE)

style: $(VENV)/installed-for-tests
	$(BIN)/ruff format --check
	$(BIN)/ruff check

lint: style
	$(BIN)/mypy

test-repeat: $(VENV)/installed-for-tests
	$(BIN)/python tests/support/repeat.py -- $(SUITE)

test-slow: $(VENV)/installed-for-tests
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout 1800
	$(BIN)/python -m pytest -m "hypothesis and not slow and not gpu" --timeout 1800 --hypothesis-profile slow

# CHECK: options, and words from the names of parts: make gpu-check CHECK="--minutes 5 links"
# `make gpu-check VENV= BIN=/usr/bin` uses an installed Python with torch, triton, numpy, grpcio, pytest, hypothesis.
gpu-check: $(if $(VENV),$(VENV)/installed-for-tests)
	$(BIN)/python3 -m tests.gpu_check $(CHECK)

test-gpu: $(VENV)/installed-for-tests
	$(BIN)/python -m pytest -m gpu --timeout 600

docs: $(VENV)/installed-for-tests
	$(BIN)/python -m docs.generate

proto: $(VENV)/installed-for-tests
	$(BIN)/python -m grpc_tools.protoc -Icore/rpc=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/*.proto

$(VENV)/installed: $(REQUIREMENTS)
	@echo "Setting up $(VENV); the first time takes a few minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-for-tests: $(REQUIREMENTS)
	@echo "Setting up $(VENV) for the tests; the first time takes a few minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable ".[test]"
	@touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
