# Every target prepares what it needs: `make run` and `make test` work in a fresh clone.

VENV = .venv
BIN := $(VENV)/bin
PYTHON = $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; done)
PYTEST_ARGS ?=
# Most tests wait for other processes, so more of them run at once than there are cores.
JOBS ?= 6
PARALLEL = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# Of the tests that `make test` leaves out, tests/LAST_RUNS.md says when each ran last.
RECORDED = --record-runs
BENCH_ARGS ?=
PROOF_ARGS ?=
# How long `make faults` sweeps over pairs of faults; the next call continues. `make soak` needs about an hour for all of
# them on two idle cores.
PAIRS_SECONDS ?= 600
SOAK_PAIRS_SECONDS ?= 14400
SOAK_HOURS_SECONDS ?= 3600
# `make end-to-end PEERS=true` leaves out the packages that evaluations exchange files with; their tests are skipped.
PEERS ?= .ci/peers $(BIN)
# Workers and tests start hundreds of interpreters: without bytecode each of them compiles all that it imports.
export PYTHONDONTWRITEBYTECODE =
# Covers every platform and Python, and writes no name of an index. Use an index with all files of each package: with a
# partial mirror, only the files that it has would get hashes (see UV_DEFAULT_INDEX).
LOCK = $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	--extra build -c constraints.txt pyproject.toml
# Tests of the docker sandbox need its engine. Without one they are skipped, as the printed command shows.
ENGINE = $(shell docker info >/dev/null 2>&1 || echo 'not docker')
MARKED = not slow$(if $(ENGINE), and $(ENGINE))
MARKERS ?= not soak and $(MARKED)

# Where `make soak` begins to look; another place each time.
SEED := $(or $(SEED),$(shell date +%s))

RUNTIME := $(VENV)/.runtime-stamp
SETUP := $(VENV)/.setup-stamp
CLAUDE := $(VENV)/.claude-stamp
SITE := $(VENV)-docs/.stamp

.DEFAULT_GOAL := help
.PHONY: help setup run tools peers test test-all test-docker end-to-end coverage claude soak check docs lock wheel vendored screenshots bench proof faults orphans security last-runs clean
.SUFFIXES:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  Variables: VENV=.venv  PYTHON=python3.12  PYTEST_ARGS="-k name -x"  MARKERS="not slow"  SEED=1  BENCH_ARGS=...'

setup: $(SETUP) ## Create .venv with everything that development needs

run: $(RUNTIME) ## Run the demo: 20 agents, real workers, two of them killed
	@$(BIN)/deckhands demo

tools:
	@.ci/tools

peers: $(SETUP)
	@$(PEERS)

test: $(SETUP) tools ## Run the tests, without those of whole programs, the slow ones and the long searches
	$(PARALLEL) --ignore=tests/end_to_end -m '$(MARKERS)' $(PYTEST_ARGS)

end-to-end: $(SETUP) tools peers ## Run the tests of whole programs: the command, the pages, the examples, the packages, the browser
	$(PARALLEL) tests/end_to_end -m '$(MARKERS) and not claude' $(PYTEST_ARGS)

# pyenv has a command for each version, which works for the chosen ones only; the others are where it keeps them.
test-all: ## Run the tests, and try the wheel, with each supported Python that is installed: 3.11, 3.12, 3.13
	@for version in 3.11 3.12 3.13; do \
		found=; \
		for python in python$$version $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version.*/bin/python; do \
			$$python -c '' 2>/dev/null && found=$$python; \
		done; \
		test -n "$$found" || { echo "Python $$version is not installed: skipped"; continue; }; \
		$(MAKE) test wheel VENV=build/venv-$$version PYTHON=$$found || exit 1; \
	done

test-docker: $(SETUP) tools ## Run the tests of containers; on Debian as root, an engine and the images are prepared first
	@.ci/engine
	$(BIN)/python -m pytest tests -m docker $(RECORDED) $(PYTEST_ARGS)

coverage: $(SETUP) tools ## Run the tests, those of whole programs too, and print which part of each package they run
	@rm -rf build/coverage && mkdir -p build/coverage
	@status=0; $(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal -m '$(MARKERS) and not claude' $(PYTEST_ARGS) || \
		status=$$?; $(BIN)/python -m tests.coverage_table; exit $$status

claude: $(CLAUDE) tools ## Run the tests of SDK agents with the Claude Agent SDK (450 MB are installed), 110 kills among them
	$(PARALLEL) tests/end_to_end -m 'claude' --timeout 1800 $(RECORDED) $(PYTEST_ARGS)

soak: $(SETUP) tools ## Run the long searches: simulations, all pairs of faults, property tests (from a seed that is printed), 1,000 fail-overs, 10,000 kills
	@echo 'Seed $(SEED): `make soak SEED=$(SEED)` repeats this run'
	$(PARALLEL) -m '(soak or hypothesis) and $(MARKED)' \
		--timeout 1800 --hypothesis-profile=soak --hypothesis-seed=$(SEED) $(RECORDED) $(PYTEST_ARGS)
	$(BIN)/python -m tests.simulation pairs --seconds $(SOAK_PAIRS_SECONDS)
	$(BIN)/python -m tests.simulation hours --seconds $(SOAK_HOURS_SECONDS) --seed $(SEED)

check: $(SETUP) tools ## Lint (Python and Lua), check the format, check the types, look for unsafe calls
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@command -v luacheck >/dev/null || { echo 'luacheck is missing, which lints the Lua. On Debian: apt-get install lua-check' >&2; exit 1; }
	@luacheck -qq broker
	@$(BIN)/mypy
	@$(BIN)/bandit -q -r -c pyproject.toml broker controller_worker tool_worker deckhands

docs: $(SETUP) $(SITE) ## Write the reference pages of docs/ again, from what they describe, and build the site in build/site
	@$(BIN)/python -m tests.reference_pages
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet
	@echo "build/site/index.html leads to the pages"

lock: $(SETUP) ## Write requirements/ again: the pins of constraints.txt with the hashes of their files
	@mkdir -p requirements
	@$(LOCK) -o requirements/tools.txt
	@$(LOCK) --extra all -o requirements/run.txt
	@$(LOCK) --extra dev -o requirements/dev.txt
	@$(LOCK) --extra all --extra claude -o requirements/claude.txt
	@$(LOCK) --extra all --extra browser --extra ipython -o requirements/pools.txt
	@for name in docs release; do $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate -c constraints.txt -o requirements/$$name.txt requirements/$$name.in; done

wheel: $(SETUP) tools ## Build the wheel, the sdist and their SBOM in dist/, and try the wheel in a clean environment
	@.ci/wheel $(BIN) $(BIN)/python

vendored: $(SETUP) ## Fetch the libraries of the web page again, in the versions of its manifest, and write their hashes (needs npm)
	@$(BIN)/python -m tests.vendored_packages

screenshots: $(SETUP) tools ## Take the pictures of the web page for the docs
	@$(BIN)/python -m tests.screenshots docs/pictures

bench: $(SETUP) tools ## Run the benchmarks
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

proof: $(SETUP) tools ## Measure what docs/proof.md shows and write it; PROOF_ARGS="pairs --seconds 600" runs one section
	@$(BIN)/python -m tests.proof $(PROOF_ARGS)

faults: $(SETUP) tools ## Run every fault test and simulation, the slow ones, 200 fail-overs, 500 kills and pairs of faults too; STORE=cluster: on a cluster of six servers
	$(BIN)/python -m pytest tests/faults tests/simulation -k 'not thousand' -m '$(ENGINE)' $(RECORDED) $(PYTEST_ARGS)
	$(BIN)/python -m tests.simulation pairs --seconds $(PAIRS_SECONDS)

orphans: $(SETUP) tools ## Kill a tool worker 1,000 times and look for what it left running
	$(BIN)/python -m pytest -s tests/faults/test_orphans.py $(RECORDED) $(PYTEST_ARGS)

security: $(SETUP) tools ## Run every security test, the slow ones too
	$(BIN)/python -m pytest tests/security -m '$(ENGINE)' $(RECORDED) $(PYTEST_ARGS)

last-runs: $(SETUP) ## Give new tests that `make test` leaves out a line in tests/LAST_RUNS.md, and remove those of tests that are gone
	@$(BIN)/python -m pytest --collect-only -q -m 'slow or soak or docker or claude' $(RECORDED) | tail -1

clean: ## Remove caches and build products (.venv stays)
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(SETUP): LOCKED := dev
$(RUNTIME): LOCKED := run
$(SETUP) $(RUNTIME): pyproject.toml requirements/run.txt requirements/dev.txt
	@test -n "$(PYTHON)" || { echo 'Deckhands needs Python 3.11, 3.12 or 3.13: install one, or name it by make PYTHON=…' >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV) || { echo 'The venv module is missing. On Debian: apt-get install python3-venv' >&2; exit 1; }
	@echo 'Installing into $(VENV), a minute the first time'
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/$(LOCKED).txt
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(RUNTIME) $@

$(SITE): requirements/docs.txt
	@test -n "$(PYTHON)" || { echo 'The site needs Python 3.11, 3.12 or 3.13' >&2; exit 1; }
	@test -x $(VENV)-docs/bin/pip || $(PYTHON) -m venv $(VENV)-docs
	@$(VENV)-docs/bin/pip install -q --disable-pip-version-check --require-hashes -r requirements/docs.txt
	@touch $@

$(CLAUDE): $(SETUP) requirements/claude.txt
	@echo 'Installing the Claude Agent SDK into $(VENV)'
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/claude.txt
	@touch $@
