# make demo    install into .venv, then find the viral contigs of examples/
# make test    install with the test tools, then run the tests that guard every change
# make test-slow   the long ones: hostile input, power failures, servers and workers killed, tutorial, wheel
# make test-all    both
# make faults  whether the tests find the faults of tests/seeded_faults
# make check   formatting, lint, security lint, types, layers and the architecture test
# make soak    kills, power failures, failing disks, hostile input: hours (docs/reliability.md)
# make docs    the documentation as a site, in site/, to be read without a network
# make dist    the sdist and the wheel, in dist/
# make release VERSION=x.y.z   checks, dist/ and the tag of a release (docs/development.md); pushes nothing
# make audit   known vulnerabilities of the versions in constraints.txt; asks the Python Package Index
#
# PYTHON=python3.12 make demo    takes another interpreter (3.11 to 3.13) when .venv is made
# PIP_ARGS="..."                 further arguments for pip install
# PYTEST_ARGS="..."              these tests and no others, slow ones among them

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
BIN := .venv/bin
RELIABILITY := kills faults fuzz
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS)

.PHONY: demo test test-slow test-all faults check docs dist release soak audit clean

demo: .venv/installed
	$(BIN)/virnuc predict examples/contigs.fa.gz --out demo

# Threads of torch beside two processes of pytest would wait for each other. tests/production starts servers and
# workers, so it runs by itself.
define run_tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --ignore=tests/production -m $(1)
	$(BIN)/python -m pytest tests/production -m $(1)
endef

test: .venv/installed-dev
	$(if $(PYTEST_ARGS),$(BIN)/python -m pytest $(PYTEST_ARGS),$(call run_tests,"not slow"))

test-slow: .venv/installed-dev
	$(call run_tests,slow)

test-all: test test-slow

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_architecture.py

soak: .venv/installed-dev
	set -e; for program in $(RELIABILITY); do $(BIN)/python -m benchmarks.reliability.$$program; done

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

faults: .venv/installed-dev
	$(BIN)/python -m tests.seeded_faults --jobs 2

dist: .venv/installed-dev
	rm -rf build dist
	$(BIN)/python -m build

release: .venv/installed-dev
	scripts/release.sh $(VERSION)

audit: .venv/installed-dev
	$(INSTALL) pip-audit
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip

clean:
	rm -rf .venv demo site build dist

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "virnuc needs Python 3.11 to 3.13 and '$(PYTHON)' is not one: set PYTHON, as in PYTHON=python3.12 make demo" >&2; exit 2; }
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) --editable .
	@touch $@

.venv/installed-dev: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) --editable '.[dev]'
	@touch $@ .venv/installed

.venv/installed-docs: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) --editable '.[docs]'
	@touch $@
