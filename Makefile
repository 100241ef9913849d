# On a fresh machine with Python and make:  `make quickstart`  and  `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# One thread per test process: the models are tiny, and two processes of one thread beat one of two.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: install quickstart test test-slow test-long lint format docs bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Maulstick needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch and the rest into $(VENV): some minutes, in which pip prints nothing."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(INSTALLED)

quickstart: $(INSTALLED)
	$(BIN)/maulstick quickstart --output_dir quickstart-output

test: $(INSTALLED)
	$(PYTEST) -m "not slow and not long"

test-slow: $(INSTALLED)
	$(PYTEST) -m "slow and not long"

# Ten minutes of faults planted into the real trainer, with a table of what came of them.
test-long: $(INSTALLED)
	$(PYTEST) -m long

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# docs/sd-scripts.md, from the options themselves.
docs: $(INSTALLED)
	$(BIN)/python -m scripts.sd_scripts_document

bench: $(INSTALLED)
	$(BIN)/python -m bench.train_step
	$(BIN)/python -m bench.block_rates
	$(BIN)/python -m bench.watchers
	$(BIN)/python -m bench.guard
	$(BIN)/python -m bench.tools
	$(BIN)/python -m bench.start_up
	$(BIN)/python -m bench.families

clean:
	rm -rf $(VENV) build dist quickstart-output .pytest_cache .mypy_cache .ruff_cache
