# Two commands from a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test mutants lint results clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py --out demo-output

test: setup
	$(BIN)/pytest -n 2

mutants: setup
	$(BIN)/pip install --quiet coverage
	$(BIN)/python benchmarks/experiments/mutants.py --survivors --processes $$(nproc)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

results: setup
	$(BIN)/python docs/results_page.py

clean:
	rm -rf .venv demo-output
