# Two commands are enough on a fresh clone: `make train` and `make test`.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test slow matrix check size clean

train: .venv/ready
	$(BIN)/howdah train recipes/laptop.toml

test: .venv/dev
	$(BIN)/pytest

slow: .venv/dev
	$(BIN)/pytest -m slow

matrix: .venv/dev
	$(BIN)/python bench/matrix/run.py

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

size:
	@$(PYTHON) bench/size.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

.venv/dev: .venv/ready
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build *.egg-info
