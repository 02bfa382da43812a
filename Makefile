# Everything this repository can do. `make` alone lists it; all it needs is make and Python 3.11 or newer.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PRESET ?= overoptimizes
PYTEST ?= -q
WORKERS ?= 4
MLFLOW_RELEASE ?= 3.11.1

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
HELP := service/evalstop_service/help/index.html
FRAMEWORKS := $(VENV)/.frameworks
COMPILED := $(VENV)/.compiled
RELEASE_BIN := $(VENV)/release/bin
RELEASE := $(VENV)/release/.ready
DISTRIBUTIONS := detectors clients service lab
EDITABLE := $(foreach name,$(DISTRIBUTIONS),-e "./$(name)$(if $(filter lab,$(name)),[benchmarks])")
PIP := $(BIN)/python -m pip --disable-pip-version-check
# What is imported is compiled then, and once: pip would compile for a minute what is mostly never imported, and each of
# the hundreds of processes that the tests start would compile all of ours anew.
INSTALL := .ci/install $(BIN)/python
unexport PYTHONDONTWRITEBYTECODE
export PIP_NO_INPUT := 1

.PHONY: help
help:  ## List what there is to make
	@awk 'BEGIN {FS = ":.*  ## "} /^[a-z-]+:.*  ## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# --- use it

.PHONY: setup
setup: $(READY)  ## Make .venv with the four distributions and the tools; again when their versions change

.PHONY: demo
demo: $(READY)  ## Watch a real RLHF run be stopped at its turn; PRESET=healthy watches one run to its end
	@$(BIN)/evalstop-lab demo --preset $(PRESET)

.PHONY: run
run: $(READY) $(HELP)  ## Start the service on this machine and say what to open; DEMO_DATA=1 fills it with example runs first
	@if [ -n "$(DEMO_DATA)" ]; then $(BIN)/evalstop demo-data; fi
	@EVALSTOP_WEBHOOK_NETWORKS="$${EVALSTOP_WEBHOOK_NETWORKS-127.0.0.0/8,::1/128}" $(BIN)/evalstop up

# --- check it

.PHONY: check
check: $(READY)  ## Run the checks and the quick tests, while you work
	@$(MAKE) --no-print-directory -j 2 lint types imports pytest WORKERS=3 PYTEST="-q -m 'not real and not slow and not nightly and not chaos' --hypothesis-profile=quick"

.PHONY: test
test: $(READY) system-packages  ## Run every check and every test but those of test-nightly and test-chaos
	@$(MAKE) --no-print-directory -j 2 lint types imports pytest  # mypy has a core for itself: the tests often wait

.PHONY: test-nightly
# Each a command, and after a colon its package if that has another name.
test-nightly: NIGHTLY_TOOLS := buildah docker-compose nginx wrk slurmdbd mariadbd:mariadb-server \
  sge_qmaster:gridengine-master sge_execd:gridengine-exec qconf:gridengine-client
test-nightly: $(READY) system-packages  ## Run what make test leaves out, and more examples of each law, before a release
	@$(MAKE) --no-print-directory pytest PYTEST="-q -m '(nightly or hypothesis) and not chaos' --hypothesis-profile=nightly"

.PHONY: test-chaos
test-chaos: $(READY) system-packages  ## Run the trials by faults at full size, such as a thousand stops (10 minutes)
	$(BIN)/pytest $(PYTEST) -m chaos tests

.PHONY: pytest
pytest: $(FRAMEWORKS) $(COMPILED)  ## Run the tests alone; PYTEST="tests/clients -x" chooses, WORKERS=0 keeps them in one process
	$(BIN)/pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(PYTEST)

.PHONY: test-slurm
test-slurm: $(READY) system-packages  ## Run the tests on a real Slurm alone; they are part of make test
	$(BIN)/pytest $(PYTEST) tests/clients/receivers/slurm

.PHONY: test-kubernetes
test-kubernetes: $(READY)  ## Build a real Kubernetes API from Debian's source, once (6 minutes), and run the tests on it
	tests/clients/receivers/kubernetes/real/build.sh "$${XDG_CACHE_HOME:-$$HOME/.cache}/evalstop/kubernetes-1.20"
	TEST_KUBERNETES=real $(BIN)/pytest $(PYTEST) tests/clients/receivers/kubernetes

.PHONY: test-mlflow
test-mlflow: $(READY)  ## Run MLflow's own tests against the service; MLFLOW_TESTS=path is a copy of its repository
	@if [ ! -d "$(MLFLOW_TESTS)/tests/tracking" ]; then
	  echo "MLFLOW_TESTS=path: name a copy of MLflow's repository, as of release $(MLFLOW_RELEASE)" >&2
	  exit 1
	fi
	if [ ! -x $(VENV)/mlflow/bin/pytest ]; then
	  $(BIN)/python -m venv $(VENV)/mlflow
	  $(VENV)/mlflow/bin/python -m pip install -qq mlflow==$(MLFLOW_RELEASE) pytest pytest-asyncio pytest-repeat \
	    pytest-timeout polars psutil
	fi
	MLFLOW_PYTHON=$(abspath $(VENV))/mlflow/bin/python $(BIN)/python -m tests.mlflow_upstream "$(MLFLOW_TESTS)"

.PHONY: lint
lint: $(READY)  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python -m tests.size --over

.PHONY: types
types: $(FRAMEWORKS)  ## Check types
	$(BIN)/mypy

.PHONY: imports
imports: $(READY)  ## Check who may import whom
	@$(BIN)/lint-imports

.PHONY: size
size: $(READY)  ## Count lines and files, a room each; fails where one is larger than its budget
	@$(BIN)/python -m tests.size

.PHONY: format
format: $(READY)  ## Format the code and repair what can be repaired
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: system-packages
system-packages:  ## Install PostgreSQL, pgbouncer, Chromium, Slurm and small tools for the tests where they are missing (Debian, as root)
	@missing=()
	ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null \
	  || [ -n "$${TEST_DATABASE_URL:-}" ] || missing+=(postgresql)
	command -v pgbouncer >/dev/null || [ -x /usr/sbin/pgbouncer ] || missing+=(pgbouncer)
	command -v chromium >/dev/null || missing+=(chromium fonts-dejavu-core)
	command -v curl >/dev/null || missing+=(curl)
	command -v jq >/dev/null || missing+=(jq)
	command -v openssl >/dev/null || missing+=(openssl)
	command -v slurmctld >/dev/null || [ -x /usr/sbin/slurmctld ] \
	  || missing+=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge)
	for tool in $(NIGHTLY_TOOLS); do command -v $${tool%%:*} >/dev/null || missing+=($${tool##*:}); done
	if [ $${#missing[@]} -eq 0 ]; then exit 0; fi
	if [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
	  echo "installing $${missing[*]} with apt-get"
	  apt-get update -qq
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$${missing[@]}" >/dev/null
	elif [ "$${CI:-}" = true ]; then
	  echo "missing: $${missing[*]}; the tests need them here" >&2
	  exit 1
	else
	  echo "missing: $${missing[*]}; the tests that need them will be skipped (on Debian: sudo make system-packages)"
	fi

# --- measure and show it

# Sets TEST_DATABASE_URL for a command: a PostgreSQL as one would set it up for this work, unless the variable names one.
WITH_POSTGRES := $(BIN)/python -m tests.fixtures.postgres_server --set shared_buffers=1GB --set max_wal_size=8GB \
  --set checkpoint_timeout=15min --set max_connections=300 --

.PHONY: bench-ingest
bench-ingest: $(READY)  ## Measure ingestion and its processor time; BENCH="--against FOLDER" compares another checkout
	@$(WITH_POSTGRES) $(BIN)/python -m evalstop_lab.benchmarks.ingest $(BENCH)

.PHONY: bench-pages
bench-pages: $(READY)  ## Measure how long each page takes with 140,000 runs and 10,000 decisions on PostgreSQL
	@$(WITH_POSTGRES) $(BIN)/python -m evalstop_lab.benchmarks.pages $(BENCH)

.PHONY: screenshots
screenshots: $(READY) $(HELP)  ## Draw the pages for the docs from recorded runs, in a real browser
	$(BIN)/python -m tests.screenshots

# --- build it

.PHONY: docs
docs: $(READY)  ## Build the documentation into the service, which shows it at /help; a broken link is an error
	@rm -f $(HELP)
	$(MAKE) --no-print-directory $(HELP)

$(HELP): $(READY) mkdocs.yml $(shell find docs -type f)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build 2>&1 | sed '/^INFO/d'  # --quiet would not count warnings
	find $(@D) -name '*.map' -delete

.PHONY: wheels
wheels: $(READY) $(HELP)  ## Build wheels and sdists of the four distributions into dist/
	@rm -rf dist
	for distribution in $(DISTRIBUTIONS); do
	  $(BIN)/python -m build --no-isolation --outdir dist $$distribution >/dev/null
	done
	ls -1 dist

.PHONY: release
release: $(RELEASE) wheels  ## Build, check and list what a release is: wheels, sdists, SBOMs, checksums; pushes nothing
	@$(RELEASE_BIN)/twine check --strict dist/*
	bare=$$(mktemp -d); trap 'rm -rf $$bare' EXIT
	for distribution in $(DISTRIBUTIONS); do
	  wheel=$$(ls dist/evalstop_*.whl | grep "evalstop_$${distribution/clients/client}-")
	  name=$$(basename $$wheel | cut -d- -f1)
	  echo "$$name in an environment of its own"
	  $(BIN)/python -m venv $$bare/$$name
	  $$bare/$$name/bin/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt \
	    --find-links dist $$wheel
	  $$bare/$$name/bin/python -m pip uninstall -qq --yes pip setuptools
	  (cd $$bare && $$name/bin/python -I -c "import $$name" && for program in $$name/bin/evalstop*; do
	    if [ -x "$$program" ]; then $$program --help >/dev/null; fi
	  done)
	  $(RELEASE_BIN)/cyclonedx-py environment --output-reproducible --pyproject $$distribution/pyproject.toml \
	    -o dist/$$name.cdx.json $$bare/$$name/bin/python
	done
	(cd dist && sha256sum -- * > SHA256SUMS)
	version=$$($(BIN)/python -c "import evalstop_client.version as it; print(it.__version__)")
	cat <<TOLD

	dist/ holds the release $$version. To publish it, from a clean tree on which make test has passed:
	  git tag --sign v$$version && git push origin v$$version
	  $(RELEASE_BIN)/twine upload dist/*.whl dist/*.tar.gz
	  docker buildx build --sbom=true --provenance=true --push -t REGISTRY/evalstop:$$version .
	  docker buildx build --sbom=true --provenance=true --push -t REGISTRY/evalstop-receiver:$$version -f deploy/receiver.Dockerfile .
	Put dist/SHA256SUMS, dist/*.cdx.json and the digests of the images into the notes of the release.
	TOLD

.PHONY: audit-dependencies
audit-dependencies: $(RELEASE)  ## Look up known vulnerabilities of all pinned packages; 2 if the database cannot be reached
	@found=$$(mktemp); trap 'rm -f $$found $$found.log' EXIT
	if $(RELEASE_BIN)/pip-audit -r constraints.txt --no-deps --disable-pip --progress-spinner off -f json -o $$found \
	    2>$$found.log; then
	  echo "no known vulnerability in constraints.txt"
	elif [ -s $$found ]; then
	  $(BIN)/python -m json.tool $$found
	  exit 1
	else
	  tail -n 1 $$found.log >&2
	  echo "nothing was audited: the database of vulnerabilities cannot be reached from here" >&2
	  exit 2
	fi

.PHONY: constraints
constraints:  ## Renew constraints.txt: the newest versions that fit together
	@fresh=$$(mktemp -d); trap 'rm -rf $$fresh' EXIT
	$(call python) -m venv $$fresh
	$$fresh/bin/python -m pip install -qq --upgrade pip
	$$fresh/bin/python -m pip install -qq --group dev --group frameworks --group release $(EDITABLE)
	{ echo "# Every version that is installed, ours apart. Renewed by \`make constraints\`."
	  $$fresh/bin/python -m pip freeze --all --exclude-editable --exclude setuptools | sed "s/+cpu$$//" | LC_ALL=C sort -f
	} > constraints.txt
	git diff --stat -- constraints.txt || true

.PHONY: clean
clean:  ## Remove what was built, cached and installed; the service's data in .evalstop/ stays
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find detectors service clients lab migrations tests -name __pycache__ -prune -exec rm -rf {} +

# One shell for a whole recipe, so that conditions and loops read as they would in a script.
.ONESHELL:

# The newest Python that will do, as a word of a recipe.
python = $$(for python in python3.14 python3.13 python3.12 python3.11 python3; do \
	  if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then echo $$python; exit 0; fi; \
	done; echo "EvalStop needs Python 3.11 to 3.14; neither python3.14 to python3.11 nor python3 is one" >&2; \
	echo false)

$(READY): pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(DISTRIBUTIONS))
	@python=$(call python)
	[ $$python != false ] || exit 1
	if ! $$python -c 'import ensurepip, venv' 2>/dev/null; then  # Debian keeps them in a package of their own
	  package=$$($$python -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
	  if [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
	    echo "installing $$package with apt-get"
	    apt-get update -qq
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$package >/dev/null
	  else
	    echo "$$python cannot make virtual environments; install its package (on Debian: apt install $$package)" >&2
	    exit 1
	  fi
	fi
	if ! $(PIP) --version >/dev/null 2>&1; then  # none yet, or one that was moved or left half made
	  echo "making $(VENV) with $$($$python --version)"
	  $$python -m venv --clear $(VENV)
	fi
	echo "installing EvalStop and its tools into $(VENV)"
	$(INSTALL) --upgrade pip
	$(INSTALL) --group dev
	$(INSTALL) --no-build-isolation $(EDITABLE)
	if [ ! -x $(BIN)/evalstop ]; then  # it was the service's once, and went with that
	  $(INSTALL) --no-build-isolation --no-deps --force-reinstall -e ./clients
	fi
	if ! $(BIN)/python -c 'import ruptures' 2>/dev/null; then .ci/ruptures $(BIN)/python; fi
	for program in evalstop evalstop-lab evalstop-receiver; do $(BIN)/$$program --help >/dev/null; done  # compiles them
	touch $@

$(FRAMEWORKS): $(READY)
	@echo "installing the frameworks that the tests log with"
	$(INSTALL) --group frameworks
	touch $@

$(COMPILED): $(READY)
	@echo "compiling the tests, so that each of their processes need not"
	$(BIN)/pytest --collect-only -qq >/dev/null || true  # the tests report what is wrong
	touch $@

$(RELEASE): $(READY) pyproject.toml constraints.txt
	@$(BIN)/python -m venv --clear $(VENV)/release
	for wanted in "--upgrade pip" "--group release"; do
	  $(RELEASE_BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt $$wanted
	done
	touch $@
