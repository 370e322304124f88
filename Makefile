# Two commands do everything on a fresh machine: `make run` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -q --retries 8 --timeout 60
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help run test check demo sim sim-pair fuzz asan faults soak oracle oracle-replication bench bench-java bench-gate bench-abuse sbom audit dist golden docs lock clean

help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: $(VENV)/.run ## start a name server and a broker; ARGS="--broker-port 0 ..." adds flags
	$(BIN)/cosmo up $(ARGS)

test: $(VENV)/.dev ## all tests that need nothing but Python
	$(BIN)/python -m pytest tests --ignore tests/oracle -n 2 --dist loadfile -q $(ARGS)

check: $(VENV)/.dev ## formatting, lint, types, and the rules of the house
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/tidy -q

demo: $(VENV)/.dev ## orders stream in, an archive follows, SQL over both: about a minute
	$(BIN)/python -m examples.demo $(ARGS)

sim: $(VENV)/.dev ## replay one simulated life of the store: make sim SEED=42
	$(BIN)/python -m pytest tests/sim -q --sim-seed=$(SEED)

sim-pair: $(VENV)/.dev ## replay one simulated life of a master and its slave: make sim-pair SEED=42
	$(BIN)/python -m pytest tests/sim/test_sim_pair.py -q --pair-seed=$(SEED)

fuzz: $(VENV)/.dev ## every parser, a store, access control and both lanes; TARGET=header SEED=42 repeats, INPUT=file tries one input
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),10) $(BIN)/python -m tests.fuzz $(if $(TARGET),--target $(TARGET)) \
	  $(if $(SEED),--seed $(SEED)) $(if $(INPUT),--input $(INPUT)) $(ARGS)

faults: $(VENV)/.dev ## the long form: 50 kills per mode, 20 power cuts, damaged files (as root)
	CRASH_CYCLES=50 POWER_CUTS=20 $(BIN)/python -m pytest tests/crash tests/faults tests/sim -q \
	  -o timeout=1200 $(ARGS)

oracle: $(VENV)/.dev ## unmodified Java, Go, C++ and Node clients against this node
	$(BIN)/python -m pytest tests/oracle -n 2 --dist loadfile -q $(ARGS)

oracle-replication: $(VENV)/.dev ## the long form: a pair with upstream's, a kill every 30 s, 20 minutes
	REPLICATION_SECONDS=$(or $(REPLICATION_SECONDS),600) REPLICATION_KILL_S=30 $(BIN)/python -m pytest \
	  tests/oracle/test_oracle_replication_kills.py -q -s $(ARGS)

bench-abuse: $(VENV)/.dev ## what a paced neighbour feels beside each abuse, about 5 minutes; ARGS="--only slow-http"
	$(BIN)/python -m bench.abuse $(ARGS)

asan: $(VENV)/.dev ## twins, property tests and fuzz on compiled parts that notice every bad access
	$(BIN)/python -m tools.asan $(ARGS)

soak: $(VENV)/.dev ## everything at once for an hour (SOAK_SECONDS): memory, files, threads, errors, the store
	SOAK_SECONDS=$(or $(SOAK_SECONDS),3600) $(BIN)/python -m bench.soak $(ARGS)

bench: $(VENV)/.dev ## a few minutes: sends and pulls, the Java broker beside them
	$(BIN)/python -m bench.run $(ARGS)

bench-java: $(VENV)/.dev ## every row and its bar beside the Java broker, about 30 minutes
	$(BIN)/python -m bench.java $(ARGS)

bench-gate: $(VENV)/.dev ## instructions per operation against bench/instructions.json
	$(BIN)/python -m bench.instructions $(ARGS)

dist: $(VENV)/.dev ## an sdist and a wheel in dist/, each tried in an empty environment
	$(BIN)/python -m tools.dist

sbom: $(VENV)/.dev ## what the package is made of, with licences, in dist/sbom.json
	$(BIN)/python -m tools.sbom

audit: $(VENV)/.dev ## known vulnerabilities of the pinned dependencies; needs a network
	$(BIN)/python -m tools.audit

golden: $(VENV)/.dev ## record the fixtures of tests/golden from the real Java system again
	$(BIN)/python -m tools.golden $(ARGS)

docs: $(VENV)/.dev ## write the generated documents again
	$(BIN)/python -m cosmodrome.wire.document > docs/protocol.md
	$(BIN)/python -m cosmodrome.env.document > docs/settings.md
	$(BIN)/python -m tools.metric_docs
	$(BIN)/python -m cosmodrome.cli.mqadmin.document > docs/mqadmin.md

lock: ## resolve the dependencies again and pin them by hash
	$(PYTHON) -m venv build/lock && build/lock/bin/python -m pip install -q pip-tools
	build/lock/bin/pip-compile -q --upgrade --no-header --all-build-deps --allow-unsafe --strip-extras \
	  --generate-hashes --no-emit-options -o requirements.lock pyproject.toml
	build/lock/bin/pip-compile -q --upgrade --no-header --all-build-deps --allow-unsafe --strip-extras \
	  --generate-hashes --no-emit-options --extra dev --extra spark -o requirements-dev.lock pyproject.toml

clean: ## remove what the targets made, except the virtual environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src/cosmodrome/speed -name '*.so' -delete

# The compiled core is optional: without a compiler the same package runs on its pure twin.
$(VENV)/.run: requirements.lock pyproject.toml setup.py $(shell find src/cosmodrome/speed -name '*.p[yx][xdi]') | $(VENV)/bin/python
	$(PIP) --require-hashes -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.run
	$(PIP) --require-hashes -r requirements-dev.lock
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; name one with 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
