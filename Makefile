# Each target makes its own virtual environment and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A torch that this Python already has is kept (GPU machines); otherwise the index decides.
SITE := $(shell $(PYTHON) -c 'import importlib.util as u; print("--system-site-packages" if u.find_spec("torch") else "")')

.PHONY: demo test lint soak clean

demo: $(VENV)/.core ## a quickstart run on this machine, then its figures and report
	$(BIN)/python -m llmlab.run +experiment=quickstart resume=never
	$(BIN)/python -m analysis.report

test: lint ## everything that needs no GPU, in under 15 minutes on two cores
	$(BIN)/python -m pytest

soak: $(VENV)/.dev ## the longer tests
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev ## style, types, layering, and README against its data
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m analysis.report --check

$(VENV)/.core: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(SITE) $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing llmlab and its libraries into $(VENV) (torch is large: a minute or two)"
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing the test tools into $(VENV)"
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
