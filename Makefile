# The two commands to know:  make lab   and   make test
#
# Everything lands in .venv; a step that was done is not done again (stamp files in .venv).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup lab test lint bench pictures clean browser node

VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml hatch_build.py constraints/cpu.txt \
  $(wildcard labextension/*.json labextension/*.mjs $(foreach part,src style schema,labextension/$(part)/*))

# On a machine without an NVIDIA GPU: the pinned CPU stack. With one: whatever the index serves, which brings CUDA.
CONSTRAIN = $$(nvidia-smi -L 2>/dev/null | grep -q GPU || echo "-c constraints/cpu.txt")

# Files of tests run beside each other, a process for each core; on a GPU one after the other, as tests of its memory want it alone.
BESIDE = $$(nvidia-smi -L 2>/dev/null | grep -q GPU || echo "-n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder")

# pip, readable: one line that changes on a terminal, warnings of site-wide pip settings ("Location ... is ignored") left out.
SHOW = awk -v tty="$$(test -t 1 && echo 1 || true)" \
  '/^Collecting/ {n++; if (tty) printf "\r\033[K  %3d  %s", n, $$2; fflush()} \
   /^Installing collected/ {if (tty) printf "\r\033[K"; if (NF > 8) print "  unpacking " (NF - 3) " packages"; fflush()}'
PIP = $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off $(CONSTRAIN) \
  2> >(grep -v 'WARNING: Location .* is ignored' >&2)

help:
	@echo "make lab     set up once, then open JupyterLab on the tour"
	@echo "make test    set up once, then every check and test, as CI runs them"
	@echo "make setup   .venv, the default model, compiled kernels"
	@echo "make lint    ruff, pyright, import rules"
	@echo "make bench   speed on this machine, beside llama.cpp and transformers (minutes)"
	@echo "make pictures  screenshots of every page and state, into docs/img"
	@echo "make clean   remove .venv and build leftovers (models stay in the user's cache)"

setup: $(VENV)/.installed $(VENV)/.warm

lab: setup
	@exec $(BIN)/power-lab lab

test: node $(VENV)/.dev $(VENV)/.warm browser lint
	@$(BIN)/python -m pytest $(BESIDE)

lint: $(VENV)/.dev
	@echo "ruff";     $(BIN)/ruff check -q .
	@echo "pyright";  $(BIN)/pyright --pythonpath $(BIN)/python | tail -n 40
	@echo "imports";  $(BIN)/lint-imports --no-cache >.venv/imports.log || { cat .venv/imports.log; exit 1; }

bench: $(VENV)/.dev $(VENV)/.warm
	@$(BIN)/python bench/cpu.py
	@$(BIN)/python bench/kernels.py
	@$(BIN)/python bench/lifecycle.py

pictures: node $(VENV)/.dev $(VENV)/.warm browser
	@$(BIN)/python -m bench.pictures

clean:
	rm -rf labextension/node_modules labextension/lib labextension/*.tsbuildinfo power_lab/labextension
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .ruff_cache .import_linter_cache test-results
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@for python in python3.11 python3.12 python3.13 python3; do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$("$$python" --version)"; exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo "Power Lab needs Python 3.11, 3.12 or 3.13 with venv. On Debian or Ubuntu: sudo apt-get install python3 python3-venv" >&2; exit 1

$(VENV)/.installed: $(BIN)/python $(INPUTS)
	@echo "Installing Power Lab and what it needs (a few minutes, once)"
	@$(PIP) -e . | $(SHOW) || { echo "pip failed: see above. Then run the same make command again; it goes on from here." >&2; exit 1; }
	@touch $@

# The tests' packages, in one go with the base ones, so a fresh 'make test' installs once.
$(VENV)/.dev: $(BIN)/python $(INPUTS)
	@echo "Installing Power Lab with its test tools (a few minutes, once)"
	@$(PIP) -e '.[dev]' | $(SHOW) || { echo "pip failed: see above. Then run the same make command again; it goes on from here." >&2; exit 1; }
	@touch $(VENV)/.installed $@

$(VENV)/.warm: $(VENV)/.installed
	@$(BIN)/power-lab warm
	@touch $@

# pip builds the JupyterLab extension where Node.js is, once for each state of its sources; without it only that part is left out.
# The tests want it.
node:
	@command -v npm >/dev/null && exit 0; \
	sudo=; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; \
	if command -v apt-get >/dev/null && $$sudo true 2>/dev/null; then \
	  echo "Installing Node.js for the JupyterLab extension"; \
	  $$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -yqq --no-install-recommends nodejs npm >/dev/null && exit 0; \
	fi; \
	echo "The tests of the JupyterLab extension need Node.js 20 or newer with npm. Install it, then run make test again." >&2; exit 1

# The browser tests drive a real page: Debian's Chromium, or any Chrome already there.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	sudo=; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; \
	if command -v apt-get >/dev/null && $$sudo true 2>/dev/null; then \
	  echo "Installing Chromium for the browser tests"; \
	  $$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -yqq --no-install-recommends chromium >/dev/null && exit 0; \
	fi; \
	echo "The browser tests need Chromium. Install it, then run make test again. On Debian: sudo apt-get install chromium" >&2; exit 1
