# make demo    set up, score the built-in model, write out/demo.html
# make test    set up, run all tests (tests that need a real model skip unless it is there, see tests/conftest.py);
#              JOBS=0 runs them in one process; make coverage says which lines they reach
# make extras  every optional extra alone in an empty environment
# make lint    ruff, pyright (strict for the public modules), and mypy on a program that uses the package
# make bench   the benchmarks of benchmarks/RESULTS.md
# make docs    the command reference, from --help, and the map of the modules
# make dist    the source distribution and the wheel in dist/, checked; HEADSPAN_URL=https://… makes README's links absolute
# make site    docs, API reference and pages of models as one static folder, out/site

PYTHON ?= python3
# The CPU is enough for everything here; a plain "torch" would bring gigabytes of CUDA packages.
TORCH ?= torch==2.13.0
BIN = .venv/bin
JOBS ?= auto

.PHONY: demo test extras lint bench docs dist site coverage clean

.venv/core.done: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable .
	@touch $@

.venv/dev.done: .venv/core.done
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $@

demo: .venv/core.done
	@mkdir -p out
	$(BIN)/headspan score demo --out out/demo.safetensors --metric all
	$(BIN)/headspan top out/demo.safetensors --pairing OK -k 5
	$(BIN)/headspan report out/demo.safetensors --weights demo --out out/demo.html
	@echo "open out/demo.html in a browser"

test: .venv/dev.done
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

coverage: .venv/dev.done
	$(BIN)/python -m pytest --cov=headspan --cov-report=term:skip-covered -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

extras: .venv/dev.done
	TORCH="$(TORCH)" .ci/extras

lint: .venv/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright --project pyright-public.json
	$(BIN)/mypy --strict tests/consumer/typed_use.py

bench: .venv/dev.done
	$(BIN)/python benchmarks/run.py

docs: .venv/dev.done
	$(BIN)/python docs/make_cli_reference.py
	$(BIN)/python docs/make_module_graph.py
	$(BIN)/python docs/make_models_page.py

dist: .venv/dev.done
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist .
	$(BIN)/twine check --strict dist/*

site: .venv/dev.done
	$(BIN)/python docs/make_site.py out/site

clean:
	rm -rf .venv out dist build .pytest_cache .ruff_cache .hypothesis
