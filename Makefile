# Everything a fresh machine needs: Python >= 3.11 with its venv module, and make.
#
#   make demo        set up, then run the quickstart
#   make test        set up, then lint, types and the everyday tests
#   make quick       set up, then some tests of everything: a minute once kernels are compiled
#   make test-torch VERSION=2.15.0   the everyday tests on another release of torch, in a virtual environment of its own
#   make pretend-cuda   what can be checked of CUDA without a GPU, on torch 2.11.0 or VERSION=2.14.1 (twenty minutes)
#   make test-long   set up, then the full-size tests and those with a pretended CUDA (tens of minutes)
#   make bench       set up, then the benchmark tables of the README and docs (about three hours)
#   make papers      set up, then the figures of the papers, and how far the solvers are from the optimum
#   make pictures    set up, then the pictures of plans in the README and docs/gallery.md, which need Chromium
#   make docs        set up, then build the site of the documentation in site/, without a warning
#   make mutants     set up, then make small mistakes in FILES="fxremat/...", and list those that no test notices

PYTHON ?= python3
VENV   ?= .venv

BIN   := $(VENV)/bin
READY := $(VENV)/.fxremat-ready

PYTEST := $(BIN)/python -m pytest -q

.PHONY: demo test test-torch pretend-cuda pretended quick lint types kernels test-long test-torchtitan browser pictures docs mutants bench papers clean

demo: $(READY)
	$(BIN)/python examples/01_quickstart.py

# A file runs in one process, whose captures its tests share.
# Types are checked on one core while the kernels are compiled on another: each worker of pytest would compile its own.
test: lint
	$(MAKE) -j 2 types kernels
	$(PYTEST) -n 2 --dist loadfile

# Without lint and types, which CI checks on the release of constraints-dev.txt. That file's other versions are kept to.
# Where pip is configured to hold torch at another release, put `PIP_CONFIG_FILE=/dev/null` before the command.
OTHER := .venv-torch-$(VERSION)

test-torch: $(OTHER)/.fxremat-ready
	$(OTHER)/bin/python -m pytest -q -p no:xdist @tests/kernels.txt
	$(OTHER)/bin/python -m pytest -q -n 2 --dist loadfile $(TESTS)

$(OTHER)/.fxremat-ready: pyproject.toml constraints-dev.txt
	@test -n "$(VERSION)" || { echo "say which release, as in: make test-torch VERSION=2.15.0"; exit 1; }
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	sed "s/^torch==.*/torch==$(VERSION)/" constraints-dev.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet -c $(OTHER)/constraints.txt torch -e ".[dev]"
	$(OTHER)/bin/python -m pip install --quiet -r $(OTHER)/constraints.txt
	touch $@

# torch's CUDA wheel without the libraries of NVIDIA, for which tests/pretended_cuda makes others: docs/pretended-cuda.md.
PRETENDED := .venv-pretended-$(or $(VERSION),2.11.0)

pretend-cuda: $(PRETENDED)/.fxremat-ready
	$(PRETENDED)/bin/python -m tests.pretended_cuda $(ARGUMENTS)

pretended:
	$(MAKE) $(PRETENDED)/.fxremat-ready || \
	  echo "torch's CUDA wheel cannot be installed, or libraries cannot be built for it: tests with them are skipped"

$(PRETENDED)/.fxremat-ready: pyproject.toml constraints-dev.txt constraints-libraries.txt
	$(PYTHON) -m tests.pretended_cuda.install $(PRETENDED) $(or $(VERSION),2.11.0)
	touch $@

quick: $(READY)
	$(PYTEST) -n 2 --dist loadfile @tests/quick.txt

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

kernels: $(READY)
	$(PYTEST) -p no:xdist @tests/kernels.txt

mutants: $(READY)
	$(BIN)/python -m tests.mutants $(FILES)

# torchtitan's tracer and debug model, in a virtual environment of its own: the tracer needs few of its dependencies.
TITAN := .venv-torchtitan

test-torchtitan: $(TITAN)/.fxremat-ready
	$(TITAN)/bin/python -m pytest -q -m long tests/compilers/test_torchtitan.py

$(TITAN)/.fxremat-ready: pyproject.toml constraints-dev.txt constraints-torchtitan.txt
	test -x $(TITAN)/bin/python || $(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/python -m pip install --quiet -c constraints-dev.txt torch -e ".[dev]"
	$(TITAN)/bin/python -m pip install --quiet -r constraints-dev.txt
	$(TITAN)/bin/python -m pip install --quiet --no-deps -r constraints-torchtitan.txt
	touch $@

# Files whose random tests draw a fifth of their examples every day.
WIDE := tests/solvers tests/transfers/test_transfers.py tests/test_views.py tests/passes/test_program.py \
  tests/passes/test_swap.py tests/search/test_refine.py tests/slices/test_body.py \
  tests/slices/test_rules.py tests/test_training.py

test-long: $(READY) browser pretended
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -c constraints-libraries.txt -e ".[dev,libraries,docs]"
	$(PYTEST) -m long
	$(MAKE) test-torchtitan
	HYPOTHESIS_PROFILE=wide $(PYTEST) -n 2 $(WIDE)

# Chromium, for the tests of the page of a plan: Debian's, where the machine has none.
browser:
	command -v chromium || command -v google-chrome || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || \
	  echo "there is no Chromium, and it cannot be installed: tests of the page of a plan are skipped"

pictures: $(READY) browser
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -c constraints-libraries.txt -e ".[libraries]"
	$(BIN)/python -m benchmarks.pictures

docs: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -c constraints-libraries.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -e ".[plot]"
	$(BIN)/python -m benchmarks.alternatives
	$(BIN)/python -m benchmarks.libraries
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.replanning
	$(BIN)/python -m benchmarks.shapes
	$(BIN)/python -m benchmarks.offload
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.slices
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python -m benchmarks.kernel_starts
	$(BIN)/python examples/01_quickstart.py > benchmarks/results/quickstart.txt
	$(BIN)/python -m benchmarks.readme

papers: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -e ".[plot]"
	$(BIN)/python -m benchmarks.papers
	$(BIN)/python -m benchmarks.optimality
	$(BIN)/python -m benchmarks.solvers
	$(BIN)/python -m benchmarks.weights
	$(BIN)/python -m benchmarks.pipeline

$(READY): pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r constraints-dev.txt
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* .venv-pretended-* site .pytest_cache .mypy_cache .ruff_cache .hypothesis
