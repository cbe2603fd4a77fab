# Every task by one name. CI, the pre-commit hooks and people call these and nothing else.
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
ARGS   ?=
EXTRAS := dev,trace,measure
PINS   := .ci/constraints.txt
# Named first and alone: a loose requirement on a machine without torch pulls gigabytes of CUDA.
TORCH  := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' $(PINS))
# Without what it requires, which is Triton: a compiler for GPUs, for which the trace has a stand-in.
ALONE  := $(shell grep -E '^(liger_kernel|torchtitan|spmd_types|tyro|typeguard|docstring_parser)==' $(PINS))
# In a folder apart, for one test: it brings Pillow, with which transformers takes other ways.
APART  := $(shell sed -n 's/^\(matplotlib==[^ ]*\).*/\1/p' $(PINS))
# Environments with older versions, one of each list. TORCH_INDEX=https://download.pytorch.org/whl/cpu has wheels without CUDA.
LISTS  := $(wildcard .ci/older/*.txt)
CACHE  ?= .venv-older
TORCH_INDEX ?=
BIN    := $(VENV)/bin
INSTALL := -m pip install --quiet --quiet --disable-pip-version-check --no-input
PIP    := $(BIN)/python $(INSTALL)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help core setup test whole older lint format types layers docs site bench mutants size tapes scripts check pins clean

help:      ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "memfit needs Python 3.11 or newer; say which: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# The stamps make the second run quick: nothing is installed again until what is asked for changes.
$(VENV)/.core: pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.setup: pyproject.toml $(PINS) | $(BIN)/python
	$(PIP) $(TORCH)
	$(PIP) --constraint $(PINS) --editable '.[$(EXTRAS)]'
	$(PIP) --no-deps $(ALONE)
	$(PIP) --constraint $(PINS) --upgrade --target $(VENV)/pictures $(APART)
	@touch $@ $(VENV)/.core

core: $(VENV)/.core    ## the virtual environment of the command alone, without torch

setup: $(VENV)/.setup  ## the virtual environment of all tasks below, with torch for the CPU

test: setup            ## all tests, and whether they notice 30 changes in a copy of the source; ARGS="-k allocator" narrows to tests
	@noticed=0; $(if $(ARGS),,$(BIN)/python tools/mutants.py --quick --count 30 --jobs $(JOBS) || noticed=$$?;) \
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS) && exit $$noticed

whole: setup           ## what each commit samples, all of it: options, layouts, families, classes, rows, the fuzzer, the load: hours
	MEMFIT_CASES=200000 $(BIN)/python -m pytest -s tests/core/test_fuzz.py $(ARGS)
	MEMFIT_WHOLE=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $$(grep -rl --include='test_*.py' tests.sampling tests) $(ARGS)
	MEMFIT_LOAD=20000 $(BIN)/python -m pytest tests/core/test_load.py $(ARGS)

$(CACHE)/%/.setup: .ci/older/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(INSTALL) $(addprefix --extra-index-url ,$(TORCH_INDEX)) --requirement $<
	@touch $@

OLDER  := $(LISTS:.ci/older/%.txt=$(CACHE)/%)
older: setup $(OLDER:%=%/.setup)  ## traces with torch 2.4, 2.6 and 2.9 beside transformers 4.40, 4.48 and 4.57
	MEMFIT_ENVIRONMENTS=$$(echo $(abspath $(OLDER)) | tr ' ' :) $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal tests/torch/test_older.py $(ARGS)

lint: setup            ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: setup          ## let ruff mend what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: setup           ## mypy --strict
	$(BIN)/mypy

layers: setup          ## imports point down
	$(BIN)/lint-imports --no-logo

docs: setup            ## write the reference and accuracy pages, and what the commands shown in the docs print
	$(BIN)/python tools/accuracy.py
	$(BIN)/python tools/speed.py
	$(BIN)/python tools/stubs.py
	$(BIN)/python tools/picture.py
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/served.py
	$(BIN)/python tools/transcripts.py

site: setup            ## the documentation as a site in build/site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: setup           ## how fast memfit itself is
	@for script in bench/startup.py bench/allocator.py bench/estimate.py bench/trace.py; do $(BIN)/python $$script || exit 1; done

mutants: setup         ## do the tests notice 400 changed places? Half an hour; ARGS="--count 30 --seed 1" for fewer
	$(BIN)/python tools/mutants.py $(if $(ARGS),$(ARGS),--count 400)

size: core             ## lines per folder, and the longest functions
	@$(BIN)/python tools/size.py

BASE ?= main
tapes: setup           ## does any tape of the conformance grid differ from those of the commit BASE?
	$(BIN)/python tools/tapes.py compare $(BASE) $(ARGS)

DIR ?= tests/torch/scripts
scripts: setup         ## trace every script of the folder DIR and list what comes through; ARGS="--gpu t4"
	$(BIN)/python tools/scripts.py $(DIR) $(ARGS)

check: lint types layers test  ## what CI asks for

pins: setup            ## write down the versions that the tests pass with
	@{ sed -n '/^#/p' $(PINS); $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > $(PINS).new && mv $(PINS).new $(PINS)

clean:                 ## remove the virtual environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
