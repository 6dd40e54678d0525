# Two commands are enough on a fresh clone: `make train` and `make test`.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test slow proofs steady matrix flight cluster gpu wheel check size clean

# ARGS go to howdah: make train ARGS="train.steps=100 folder=runs/short"
train: .venv/ready
	$(BIN)/howdah train recipes/laptop.toml $(ARGS)

# Three processes share out the files: tests that end processes wait much. ARGS go to pytest: make test ARGS="tests/plan -x"
test: .venv/dev
	$(BIN)/pytest -n 3 --dist loadfile $(ARGS)

slow: .venv/dev
	$(BIN)/pytest -m slow

proofs: .venv/dev
	$(BIN)/python bench/steady/proofs.py

steady: .venv/dev
	$(BIN)/python bench/steady/run.py $(ARGS)

matrix: .venv/dev
	$(BIN)/python bench/matrix/run.py

flight: .venv/dev
	$(BIN)/python bench/matrix/run.py --flight

# Hosts in network namespaces; needs root. ARGS go to the proof of the links: --profile, --hosts, --write.
cluster: .venv/dev
	$(BIN)/python bench/cluster/prove.py $(ARGS)
	$(BIN)/pytest -m "slow or not slow" tests/cluster

# At most ten minutes on one card; without a card it says so. ARGS: --parts, --minutes, --wheels, --cpu.
# Takes the Python that has torch: make gpu PYTHON=/path/to/python
gpu:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) bench/gpu/run.py $(ARGS)

# Brings the engine to machines without a C compiler.
wheel: .venv/dev
	$(BIN)/python tools/wheel.py dist

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
