# Every target that needs Python creates .venv first. `make` without a target lists the targets.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
INSTALL_INPUTS := pyproject.toml constraints.txt $(wildcard setup.py) scripts/venv.sh \
	$(shell find megacore -name '*.cpp' -o -name '*.h')

CONF ?= gpt2-tiny
FINETUNE_CONF = $(if $(filter file default,$(origin CONF)),mrpc,$(CONF))
ARGS ?=
KILLS ?= 500
SEED ?= 1
OUT ?= workspace/soak.json
BENCH ?=

# `make venv` leaves it to Python to compile modules when they are imported first. Where that is turned off, every
# process would compile them again, which doubles its start.
export PYTHONDONTWRITEBYTECODE :=

JOBS ?= $(shell echo $$(($$(nproc) + 1)))
# Without restarts, since pytest-xdist 3.8 waits forever for the tests of a worker that it replaces.
PYTEST = $(PY) -m pytest --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# ARGS may select only slow tests, or only fast ones: then pytest ends with 5 for the others.
NONE_ALLOWED = $(if $(ARGS),|| [ $$? -eq 5 ])

.PHONY: help venv test test-slow test-all test-long soak faults bench gpu pretrain finetune server deploy stop status lint format types reference docs clean clean-venv

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'
	@echo "CONF=<file in conf/, for finetune in conf/finetune/> and ARGS=<options> go to pretrain and finetune; ARGS also to the tests, bench and gpu. PYTHON= names the interpreter of .venv."

# `make venv TORCH='torch==2.10.*'` installs again if .venv was made with another TORCH.
ifneq ($(TORCH),)
ifneq ($(TORCH),$(shell cat $(VENV)/torch-requirement 2>/dev/null))
$(STAMP): other-torch
endif
endif
.PHONY: other-torch

venv: $(STAMP)  ## Create .venv and install everything into it (TORCH='torch==2.10.*' for an older driver)

$(STAMP): $(INSTALL_INPUTS)
	@scripts/venv.sh

test: $(STAMP)  ## Run the fast tests, 9 to 27 minutes on two cores (ARGS="-k name" for some, JOBS=4)
	$(PYTEST) --numprocesses $(JOBS) -m "not slow and not long" $(ARGS) $(NONE_ALLOWED)

# Three at a time, on any machine: most of these start several processes, and many wait.
test-slow: $(STAMP)  ## Run the other tests: kills, all layouts, several hosts, clusters, databases
	$(PYTEST) --numprocesses 3 -m "slow and not long" $(ARGS) $(NONE_ALLOWED)

# One session starts each worker's Prefect server, and prepares what fast and slow tests share, only once.
test-all: $(STAMP)  ## Run both in one session
	$(PYTEST) --numprocesses 3 -m "not long" $(ARGS)

test-long: $(STAMP)  ## Run the rest before a release: more kills, layouts and launchers, a training and its fine-tuning, compilers
	$(PYTEST) --numprocesses 2 -m long $(ARGS)

soak: $(STAMP)  ## Kill everything KILLS=500 times and damage files (about an hour); SEED=1
	$(PY) -m tests.faults.soak --kills $(KILLS) --seed $(SEED) --out $(OUT) $(ARGS)

faults: $(STAMP)  ## Fail every system call that writes, one at a time (about an hour): ARGS="--stage save --share 0.1"
	$(PY) -m tests.faults.sweep $(ARGS)

bench: $(STAMP)  ## Run the benchmarks and write docs/benchmarks.md: BENCH="step scaling" for some, ARGS=--all for the slow ones too
	$(PY) -m benchmarks $(BENCH) $(ARGS)

# A test that fails, or waits for the GPU, does not keep the benchmark from its time.
gpu: $(STAMP)  ## Run the tests that need a GPU (2 minutes), then the benchmark of one GPU (9 minutes, continued by the same command)
	@status=0; \
	timeout 180 $(PY) -m pytest --numprocesses 4 -k on_a_gpu $$(grep -rl --include='*.py' 'reason="needs a GPU"' tests) || status=$$?; \
	$(PY) -m benchmarks.gpu $(ARGS) || status=$$?; \
	exit $$status

pretrain: $(STAMP)  ## Train a model from text and put it into MLflow: CONF=gpt2-tiny ARGS="-o train.train_iters=400"
	$(PY) -m flows.pretrain --conf $(CONF) $(ARGS)

finetune: $(STAMP)  ## Fine-tune a pretrained model for a task: CONF=bert-tiny of conf/finetune/ ARGS="-o optim.lr=1e-4"
	$(PY) -m flows.finetune --conf $(FINETUNE_CONF) $(ARGS)

server: $(STAMP)  ## Start Prefect (PREFECT_PORT=4200), a worker and MLflow (MLFLOW_PORT=5000), and deploy all
	@$(PY) scripts/servers.py start

deploy: $(STAMP)  ## Create the work pool and deployments on the team's server of PREFECT_API_URL
	@$(PY) scripts/servers.py deploy

stop:  ## Stop what `make server` started
	@if [ -x $(PY) ]; then $(PY) scripts/servers.py stop; else echo "nothing to stop: there is no $(VENV)"; fi

status:  ## Report whether the servers run
	@if [ -x $(PY) ]; then $(PY) scripts/servers.py status; else echo "no servers run: there is no $(VENV)"; exit 1; fi

lint: $(STAMP)  ## Check style and format
	$(PY) -m ruff check
	$(PY) -m ruff format --check

format: $(STAMP)  ## Rewrite the code in the project's format
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

types: $(STAMP)  ## Check types
	$(PY) -m mypy --num-workers 2

reference: $(STAMP)  ## Write docs/reference.md and the editors' schemas in conf/ from megacore/config
	$(PY) scripts/config_reference.py

docs: $(STAMP)  ## Build the documentation into site/
	$(PY) -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:  ## Remove caches and builds (artifacts in workspace/ stay: see `megacore clean`)
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-venv:  ## Remove .venv
	rm -rf $(VENV)
