# XSAKE on plain venv + pip. `make help` lists the targets.
#
# Every Python version has its own environment: .venv/3.11.7, .venv/3.12.1, …

# The interpreter, 3.11 to 3.13: make test PYTHON=python3.12
PYTHON ?= python3
# Extras in addition to cli and dev, separated by commas: make setup EXTRAS=cuda
EXTRAS ?=
# pytest-xdist: number of worker processes (0: none), and its --dist mode: tests of a file share
# programs and fixtures, so a file stays with one worker
WORKERS ?= 2
DIST ?= loadfile --no-loadscope-reorder
# `make pytest SAMPLE=n` runs one in n of the tests that do not depend on the JAX version
SAMPLE ?= 1
# Extra arguments for pytest: make pytest PYTEST_ARGS="tests/test_readme.py -x"
PYTEST_ARGS ?=
# `make fuzz` and `make test-slow` run N random cases; SEED is the base seed of all of them
N ?= 1000
SEED ?= 0
# Extra arguments for xsake serve: make serve SERVE_ARGS="--port 9000 --runs runs"
SERVE_ARGS ?=
# Project URLs in the wheel's metadata: make wheel URLS="Homepage=https://example.org/xsake"
URLS ?=
# Extra arguments for uv pip compile: make lock LOCK_ARGS=--upgrade
LOCK_ARGS ?=

# Tests and commands start many processes, each of which would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

comma := ,
ASK = import sys; print("%d.%d.%d" % sys.version_info[:3])
VERSION := $(shell $(PYTHON) -c '$(ASK)' 2>/dev/null)
VENV := .venv/$(or $(VERSION),none)
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp$(if $(EXTRAS),-$(subst $(comma),-,$(EXTRAS)))
SUPPORTED = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

# The built pages, and what they are built from.
PAGES := xsake/server/static/index.html
MODULES := web/node_modules/.package-lock.json
PAGES_FROM := $(shell find web -name node_modules -prune -o -name .next -prune -o -name out -prune -o \
    -name tests -prune -o -name openapi.json -prune -o -name '*.d.ts' -prune -o -type f -print 2>/dev/null) \
    $(wildcard xsake/server/schemas.py xsake/server/routes/*.py)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo serve web test test-web lint pytest test-slow format bench bench-check fuzz docs figures wheel lock clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## install into .venv/VERSION what constraints.txt pins; EXTRAS=cuda adds extras

# The pip that comes with Python 3.11 and 3.12 takes longer than newer ones, so it is renewed.
# --no-compile: Python compiles what is imported when it is imported; pip would compile everything,
# which takes as long as all the rest of the set-up.
PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
$(STAMP): pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	@echo "Installing xsake[cli,dev$(if $(EXTRAS),$(comma)$(EXTRAS))] and the packages that it needs into $(VENV)."
	@echo "pip downloads JAX, Flax and others, once; pip itself prints nothing until it is done …"
	@$(PIP_INSTALL) --upgrade 'pip>=25' || echo "pip could not be renewed; the one that is there takes longer."
	@$(PIP_INSTALL) --constraint constraints.txt --editable '.[cli,dev$(if $(EXTRAS),$(comma)$(EXTRAS))]'
	@touch $@
	@echo "Installed. The command is $(BIN)/xsake."

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { \
	    echo "PYTHON=$(PYTHON) is $(or $(VERSION),not a working interpreter); XSAKE needs Python" \
	        "3.11, 3.12 or 3.13: set PYTHON to the path of one" >&2; exit 1; }
	@echo "Making a Python $(VERSION) environment in $(VENV); \`make clean\` removes it."
	@$(PYTHON) -m venv $(VENV)

demo: setup  ## calibrate the shipped model, compare HADS with fixed patterns, train a tiny model
	@$(BIN)/xsake demo

# The pages are built once from web/ by Node, into the package; without Node the API is served alone.
serve: setup  ## serve the dashboard on http://127.0.0.1:8000; builds its pages if Node is there
	@if test -f xsake/server/static/index.html; then :; \
	 elif test -f web/package.json && command -v npm >/dev/null; then \
	    echo "Building the pages once, into xsake/server/static …"; $(MAKE) --no-print-directory web; \
	 else echo "The pages are not built: web/ or Node is missing. Serving the API alone."; fi
	@$(BIN)/xsake serve $(SERVE_ARGS)

web: $(PAGES)  ## build the pages of web/ into xsake/server/static, from the server's OpenAPI; needs Node

# npm installs what package-lock.json pins; nothing is sent from here but requests for packages.
$(MODULES): web/package-lock.json
	@command -v npm >/dev/null || { echo "make web needs Node 20.10 or newer, and npm" >&2; exit 1; }
	cd web && npm ci --no-audit --no-fund && touch node_modules/.package-lock.json

$(PAGES): $(PAGES_FROM) | setup $(MODULES)
	$(BIN)/python -m xsake.server.openapi > web/openapi.json
	cd web && NEXT_TELEMETRY_DISABLED=1 npm run build
	rm -rf $(@D) && cp -R web/out $(@D) && touch $@

test-web: $(PAGES) $(MODULES)  ## the pages in Chromium, with a server and a run; skipped without Chromium
	cd web && PYTHON=$(abspath $(BIN))/python npm test

# Lint runs beside the first tests, on the core that they leave idle; its lines come in between.
test: setup  ## everything that must pass: lint, tests, doctests, README's code
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

lint: setup  ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# NumPy's BLAS would start a thread per core in every worker, more threads than cores.
PYTEST = OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist $(DIST)

# Types are checked while all tests run; they are the same on the second Python, which runs a sample.
UNTYPED = $(if $(filter-out 1,$(SAMPLE)),--jaxtyping-packages=)

# Most tests compile without XLA's optimiser, which would take most of their time. Tests whose claims
# depend on it are marked `optimized` and run with it; they are few and long: any worker takes the next.
pytest: setup  ## the tests without lint; those marked slow are left out
ifeq ($(PYTEST_ARGS),)
	$(PYTEST) -m "not optimized" --sample $(SAMPLE) $(UNTYPED)
	$(PYTEST) --dist load -m optimized --optimizer $(UNTYPED) $$(grep -rl --include='test_*.py' mark.optimized tests)
else
	$(PYTEST) $(PYTEST_ARGS)
endif

test-slow: setup  ## every test with XLA's optimiser, long sweeps too, and N random cases
	$(PYTEST) --optimizer --slow $(PYTEST_ARGS)
	$(BIN)/python -m tests.fuzz --n $(N) --seed $(SEED)

format: setup  ## format the sources and fix what ruff can
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

bench: setup  ## time the CPU suite and write its JSON
	$(BIN)/xsake bench --suite cpu

bench-check: setup  ## fail if a ratio of times or of memory is above its limit
	@$(BIN)/xsake bench --check

fuzz: setup  ## compare N random cases with the oracle; SEED is their base seed
	$(BIN)/python -m tests.fuzz --n $(N) --seed $(SEED)

docs: setup  ## write the API reference from the docstrings into build/api
	$(BIN)/python -m tools.api build/api

figures: setup  ## draw the figures of docs/ from result files and the shipped model
	$(BIN)/python -m tools.figures

wheel: setup  ## build the wheel into dist/; URLS="Homepage=https://…" puts project URLs into it
	XSAKE_PROJECT_URLS="$(URLS)" $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls -1 dist/*.whl

# Uses the package index that pip is configured with, but does not write it to constraints.txt.
lock: $(VENV)/pyvenv.cfg  ## resolve constraints.txt again, for every Python and machine
	@$(PIP_INSTALL) uv
	@index=$$($(BIN)/python -m pip config get global.index-url 2>/dev/null) || index=; \
	 env $${index:+UV_DEFAULT_INDEX="$$index"} $(BIN)/uv pip compile pyproject.toml --quiet \
	    --universal --python-version 3.11 --all-extras --no-emit-index-url \
	    --custom-compile-command 'make lock' --output-file constraints.txt $(LOCK_ARGS)
	@echo "constraints.txt: $$(grep -c == constraints.txt) pins"

clean:  ## remove environments, caches and build products
	rm -rf .venv build dist *.egg-info web/node_modules web/.next web/out xsake/server/static
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
