# The verbs of this repository. CI runs the same ones, and nothing else: see .ci/run.
#
#   make setup          .venv with all that the tests need; does nothing when nothing changed
#   make check          format, lint, types, imports, cycles, forbidden calls, waits, words, public names, spelling, files
#   make test           unit, contract and simulated tests, on a CPU
#   make e2e            the whole system as processes, small configs, and one full demo
#   make e2e-long       the end-to-end tests too slow for CI
#   make sim            the simulator alone, over many seeds            SEEDS=10000
#   make chaos          faults under load: kills, power loss, bit flips, full disks, failed fsyncs
#                       KILLS=1000 IMAGES=300 FLIPS=20000 FILLS=20 SYNC_FAULTS=50 DEMO_KILLS=20 CHAINS=20000 WEIGHTS_FAULTS=1000 SESSIONS=1000
#                       SWAPS=200 ENGINE_KILLS=20 VLLM_SESSIONS=200 TRAINER_KILLS=200 TINKER_REQUESTS=620 TINKER_KILLS=20 ONLINE_S=600 CHURN_S=600 CLIENTS=500 OUTAGE_S=60
#   make chaos-quick    the same campaigns with the counts of CI
#   make attacks        every attack that must fail; `make attacks-quick` leaves out the long ones
#   make mutants        plant each bug of tests/mutants and see its named tests fail
#   make docs           build the documentation into site/
#   make constraints    refresh constraints/*.txt, their hashes and the bill of materials, from fresh environments
#   make audit          known vulnerabilities of the pinned versions, as far as the index answers
#   make bench          the promises about speed, measured             BENCH_ARGS=--quick
#   make release        wheel and source archive of the last commit in dist/, built twice and compared
#   make gpu            what needs GPUs, with a report to send       GPUS=1, GPUS=8 or, on two hosts at once, GPUS=hosts
#   make setup-engine   vLLM for CPUs, a small real model and traces of its training, in ~/.cache/penstock (15 to 50 minutes)
#   make setup-envs     virtual environments of gymnasium, OpenEnv, verifiers, reasoning-gym, trackers and the Tinker SDK, in ~/.cache/penstock/envs (minutes)
#   make setup-axe      axe-core, in ~/.cache/penstock/axe, for the test of the dashboard's accessibility
#   make setup-llama    llama-cpp-python, built from source in ~/.cache/penstock/llama (10 to 60 minutes)

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := check
.PHONY: release gpu setup check check-types check-rules test e2e e2e-long sim mutants bench chaos chaos-quick attacks attacks-quick audit docs setup-engine setup-axe setup-envs setup-llama constraints

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
EXTRAS := train,tokens,postgres,s3,data,plot,tools,rewards,export,ray,tracking,traces,tinker,dev
PIP := $(BIN)/python -m pip install --quiet

# Exactly this torch, and with pip: a range or another client may bring gigabytes of CUDA libraries.
TORCH := $(shell grep '^torch==' constraints/dev.txt)

# Programs the checks and tests call, as program:debian-package. node runs pyright; tmux captures the live panel;
# a PostgreSQL server, which the tests start for themselves, comes with pg_ctlcluster.
# chromium opens the dashboard, sshd stands for another host, zsh completes commands, iptables is in the two-host page.
SYSTEM_TOOLS := node:nodejs tmux:tmux pg_ctlcluster:postgresql bwrap:bubblewrap runsc:runsc chromium:chromium sshd:openssh-server zsh:zsh iptables:iptables

PYTEST_ARGS ?=
SEEDS ?= 300
KILLS ?= 1000
BENCHMARKS ?= dataflow_ingest dataflow_lease dataflow_batch dataflow_vs_transferqueue dataflow_scale dataflow_restart \
  data_algorithms staleness pacing_policies streaming_overlap streaming_steps async_overlap multipolicy_overlap autoscale bubbles trainer_step size swap \
  trainer_dataplane staleness_sweep staleness_price versus_trl \
  eval_cost weights_delta weights_wan weights_fanout gateway_tree gateway_overhead gateway_fairness sandbox doors
BENCH_ARGS ?=
IMAGES ?= 300
FLIPS ?= 20000
FILLS ?= 20
SYNC_FAULTS ?= 50
DEMO_KILLS ?= 20
CHAINS ?= 20000
WEIGHTS_FAULTS ?= 1000
SESSIONS ?= 1000
TRAINER_KILLS ?= 200
TINKER_REQUESTS ?= 620
TINKER_KILLS ?= 20
SWAPS ?= 200
ENGINE_KILLS ?= 20
VLLM_SESSIONS ?= 200
ONLINE_S ?= 600
CHURN_S ?= 600
CLIENTS ?= 500
OUTAGE_S ?= 60
GPUS ?= 1
# Tests on PostgreSQL run wherever a server is installed, so always in CI.
HAS_POSTGRES = $(shell ls -d /usr/lib/postgresql/*/bin/postgres 2>/dev/null)
# Campaigns on a real engine run where one is installed.
HAS_VLLM = $(shell ls "$${PENSTOCK_CACHE:-$$HOME/.cache/penstock}/vllm/bin/vllm" 2>/dev/null)
NEEDS_MORE = slow or gpu or vllm or envs$(if $(HAS_POSTGRES),, or postgres)
# No test reaches for the network, and no tokenizer starts threads before a fork.
PYTEST := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest

setup: $(STAMP)
	@missing=""; \
	for tool in $(SYSTEM_TOOLS); do \
	  command -v "$${tool%%:*}" >/dev/null || missing="$$missing $${tool##*:}"; \
	done; \
	if [[ -z "$$missing" ]]; then exit 0; fi; \
	if [[ "$$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update -qq; \
	  apt-get install -y -qq --no-install-recommends $$missing </dev/null; \
	else \
	  echo "setup: please install with your package manager:$$missing"; \
	fi

$(STAMP): pyproject.toml constraints/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "setup: $(PYTHON) is older than Python 3.11; name another with PYTHON=..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
# All is pinned, so nothing is resolved, and two calls install half of it each; the last one finds what another Python or
# platform needs besides. The floor of setuptools is torch's: a new environment has an older one.
	$(PIP) --no-deps -r <(sed -n 'p;n' constraints/dev.txt) & half=$$!; \
	$(PIP) --no-deps -r <(sed -n 'n;p' constraints/dev.txt) "setuptools>=77.0.3"; wait $$half
	$(PIP) -c constraints/dev.txt -e ".[$(EXTRAS)]"
	touch $@

# Pyright, the longer half, uses one core.
check:
	@$(MAKE) --no-print-directory -j2 --output-sync=target check-types check-rules

check-types:
	NODE_OPTIONS=--max-old-space-size=6144 $(BIN)/pyright

check-rules:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_forbidden.py
	$(BIN)/python scripts/check_waits.py
	$(BIN)/python scripts/check_words.py
	$(BIN)/python scripts/check_public_imports.py
	$(BIN)/python scripts/check_cycles.py
	$(BIN)/python scripts/draw_imports.py --check
	$(BIN)/python scripts/write_schema.py --check
	$(BIN)/python scripts/reference.py --check
	$(BIN)/python scripts/check_files.py
	$(BIN)/python scripts/supply.py --check
	$(BIN)/codespell
	$(BIN)/lint-imports --cache-dir .cache/import-linter

# Tests of one file stay on one worker, so what a file's fixtures build is built once. `logical`: as many workers as nproc.
test:
	$(PYTEST) -n logical --dist loadfile -m "not ($(NEEDS_MORE))" tests/unit tests/contract tests/sim $(PYTEST_ARGS)

# A run waits half of the time, so two share the cores; those marked `alone` share them with nobody.
e2e:
	$(PYTEST) -n 2 --maxschedchunk 1 --timeout 1800 -m "not ($(NEEDS_MORE))" tests/e2e $(PYTEST_ARGS)

e2e-long:
	$(PYTEST) --timeout 1800 -m "slow and not (gpu or vllm or envs or ray or postgres)" tests/e2e $(PYTEST_ARGS)

sim:
	PENSTOCK_SIM_SEEDS=$(SEEDS) $(PYTEST) -n logical --timeout 3600 tests/sim $(PYTEST_ARGS)

chaos:
	PENSTOCK_CHAOS_KILLS=$(DEMO_KILLS) PENSTOCK_SERVICE_KILLS=$(KILLS) PENSTOCK_IMAGES=$(IMAGES) \
	  PENSTOCK_FLIPS=$(FLIPS) PENSTOCK_FILLS=$(FILLS) PENSTOCK_SYNC_FAULTS=$(SYNC_FAULTS) \
	  PENSTOCK_CHAINS=$(CHAINS) PENSTOCK_WEIGHTS_FAULTS=$(WEIGHTS_FAULTS) PENSTOCK_SESSIONS=$(SESSIONS) \
	  PENSTOCK_SWAPS=$(SWAPS) PENSTOCK_ENGINE_KILLS=$(ENGINE_KILLS) PENSTOCK_ONLINE_S=$(ONLINE_S) PENSTOCK_TRAINER_KILLS=$(TRAINER_KILLS) \
	  PENSTOCK_TINKER_REQUESTS=$(TINKER_REQUESTS) PENSTOCK_TINKER_KILLS=$(TINKER_KILLS) \
	  PENSTOCK_CHURN_S=$(CHURN_S) PENSTOCK_CLIENTS=$(CLIENTS) PENSTOCK_OUTAGE_S=$(OUTAGE_S) \
	  PENSTOCK_VLLM_SESSIONS=$(VLLM_SESSIONS) PENSTOCK_VLLM_SCHEMAS=$(VLLM_SESSIONS) \
	  $(PYTEST) -n 2 --dist loadfile $(if $(HAS_VLLM),,-m "not vllm") tests/chaos tests/unit/gateway/test_exactness.py \
	  tests/contract/test_vllm_real.py $(PYTEST_ARGS)

# What CI has time for; see the counts of `make chaos` above. One seed: the kills of this one come early in their runs, so
# that a slow machine does not end a run before its last kill, and fall on what the end-to-end tests do not kill.
chaos-quick:
	PENSTOCK_CHAOS_SEED=31 $(MAKE) chaos KILLS=16 IMAGES=10 FLIPS=200 FILLS=2 SYNC_FAULTS=4 DEMO_KILLS=2 CHAINS=50 WEIGHTS_FAULTS=30 SWAPS=6 ENGINE_KILLS=2 \
	  SESSIONS=60 ONLINE_S=10 TRAINER_KILLS=2 TINKER_REQUESTS=60 TINKER_KILLS=3 CHURN_S=20 CLIENTS=100 OUTAGE_S=6 PYTEST_ARGS="-m 'not vllm' $(PYTEST_ARGS)"

# Every attack that must fail.
attacks:
	$(PYTEST) -n 2 --dist loadfile --timeout 1800 tests/attacks $(PYTEST_ARGS)

# What CI has time for: all of them but the long ones.
attacks-quick:
	$(MAKE) attacks PYTEST_ARGS="-m 'not ($(NEEDS_MORE))' $(PYTEST_ARGS)"

docs:
	$(BIN)/zensical build --clean --strict

mutants:
	$(BIN)/python scripts/mutants.py

# Each prints one line of JSON; docs/benchmarks.md says what they promise. Alone on the machine, or the figures lie.
bench:
	@for name in $(BENCHMARKS); do echo "bench: $$name" >&2; $(BIN)/python -m benchmarks.$$name $(BENCH_ARGS); done

# An environment of its own, so that the auditor is not part of what it audits.
audit:
	@test -x .cache/audit/bin/pip-audit || { $(PYTHON) -m venv .cache/audit; .cache/audit/bin/pip install --quiet pip-audit; }
	.cache/audit/bin/pip-audit --disable-pip --no-deps --requirement constraints/dev.txt

# Some minutes, 5 GB, once. An environment of its own: vLLM and this project want different libraries.
setup-engine:
	@$(PYTHON) scripts/setup_engine.py

# One environment for each library: their pins contradict one another.
setup-envs:
	@$(PYTHON) scripts/setup_envs.py

# Without llama.cpp's code for images, which would take half of the time.
release:
	@$(PYTHON) scripts/release.py

# A package that brings axe-core's script, which is under the MPL and therefore not in this repository.
setup-axe:
	@folder="$${PENSTOCK_CACHE:-$$HOME/.cache/penstock}/axe"; \
	test -f "$$folder/axe_playwright_python/axe.min.js" \
	  || $(PIP) --no-deps --target "$$folder" "axe-playwright-python==0.1.8"

setup-llama:
	@folder="$${PENSTOCK_CACHE:-$$HOME/.cache/penstock}/llama"; \
	if "$$folder/bin/python" -c "import llama_cpp" 2>/dev/null; then exit 0; fi; \
	rm -rf "$$folder"; $(PYTHON) -m venv "$$folder"; \
	CMAKE_ARGS="-DLLAVA_BUILD=OFF" \
	  "$$folder/bin/pip" install --quiet --no-binary llama-cpp-python "llama-cpp-python==0.3.36"

# Fresh environments, then only name==version lines: no index addresses, no files, no build tags such as +cpu.
# torch stays at the version written in dev.txt; change it there by hand. Review the difference before a commit.
constraints:
	@rm -rf .cache/constraints
	@for set in core: train:train,tokens dev:$(EXTRAS); do \
	  name="$${set%%:*}"; extras="$${set#*:}"; env=".cache/constraints/$$name"; \
	  echo "constraints: $$name"; \
	  $(PYTHON) -m venv "$$env"; \
	  if [[ -n "$$extras" ]]; then "$$env/bin/pip" install --quiet "$(TORCH)"; fi; \
	  "$$env/bin/pip" install --quiet -e ".$${extras:+[$$extras]}"; \
	  "$$env/bin/pip" freeze --exclude-editable | sed -E 's/\+[^+]*$$//' \
	    | grep -E '^[A-Za-z0-9._-]+==[^ ]+$$' | LC_ALL=C sort -f >"$$env.txt"; \
	  mv "$$env.txt" "constraints/$$name.txt"; \
	done
	@$(BIN)/python scripts/supply.py
	@rm -rf .cache/constraints

# What needs GPUs; prints a report to send and writes gpu-report.json and gpu-report.txt. See docs/how-to/large-models.md.
GPU_TESTS_1 = tests/gpu/test_one_gpu.py
GPU_TESTS_8 = $(GPU_TESTS_1) tests/gpu/test_eight_gpus.py
GPU_TESTS_hosts = tests/gpu/test_two_hosts.py
gpu:
	$(PYTEST) --timeout 3600 -m gpu $(GPU_TESTS_$(GPUS)) $(PYTEST_ARGS)
