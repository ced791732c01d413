# `make demo` and `make test` work on a machine that has Python 3.11 and nothing else.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
SITE := .artifacts/site
PARALLEL := -n logical --maxprocesses 8 --dist worksteal
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow check wheel bench clean

demo: $(INSTALLED)  ## train a target, a DSpark drafter, decode, and print the exactness receipt
	$(BIN)/numden train --out runs/demo

test: $(INSTALLED)  ## the test suite, doctests and examples
	$(BIN)/pytest -q $(PARALLEL)

test-slow: $(INSTALLED)  ## what takes minutes
	$(BIN)/pytest -q -m slow

check: $(INSTALLED) wheel  ## lint, format and types; types are checked against the wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

bench: $(INSTALLED)  ## the benchmarks: ratios against hand-written loops
	$(BIN)/python examples/benchmarks/run.py all

wheel: $(INSTALLED)  ## build into .artifacts; never into dist/, which is source here
	rm -rf $(SITE) .artifacts/*.whl .artifacts/*.tar.gz
	$(BIN)/python -m build -q -o .artifacts
	$(BIN)/pip install -q --no-deps --target $(SITE) .artifacts/*.whl

# pip >= 25.1 knows dependency groups; the constraints pin every version, and torch to a CPU build.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[train,hf,check]' --group dev
	touch $@

clean:  ## remove what was built; dist/ is source, do not remove it
	rm -rf .artifacts build *.egg-info $(VENV)
