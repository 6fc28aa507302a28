# `make help` lists the commands. All of them can be run again at any time.
PYTHON ?= python3
BIN := .venv/bin
RUNTIME := .[apps,tables] studies
SOURCES := pyproject.toml studies/pyproject.toml constraints.txt
.DEFAULT_GOAL := help
.PHONY: help setup demo test dev clean

# .venv/.unfinished exists while packages are being installed. If it exists at the start, an installation was
# interrupted and is started again. If pip refuses (for example without a network), it is removed and nothing changes.
ifneq ($(wildcard .venv/.unfinished),)
.PHONY: .venv/.ready
endif

define install
	@if [ -e .venv/.unfinished ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then rm -rf .venv; fi
	@[ -e .venv ] || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@[ -e .venv ] || { mkdir .venv && touch .venv/.unfinished && $(PYTHON) -m venv .venv; }
	@trap 'exit 130' INT TERM; touch .venv/.unfinished; \
		$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(foreach part,$(1),-e '$(part)') || \
		{ code=$$?; [ $$code -gt 128 ] || rm -f .venv/.unfinished; exit $$code; }
	@rm -f .venv/.unfinished
	@touch $@
endef

help: ## Show this list.
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: .venv/.ready ## Make .venv with the pinned dependencies and the `bilevel` command.

.venv/.ready: $(SOURCES)
	@echo "Installing into .venv (torch is large: minutes the first time) ..."
	$(call install,$(RUNTIME))

.venv/.ready-dev: $(SOURCES) | .venv/.ready
	@echo "Installing the development tools into .venv ..."
	$(call install,.[dev])

demo: setup ## Find the wrong labels among scikit-learn's digits and write runs/demo/report.html.
	@$(BIN)/bilevel denoise digits --noise 0.4 --trusted 100 --out runs/demo --resume

test: setup .venv/.ready-dev ## Lint, types and tests (the slow ones: .venv/bin/pytest -m slow).
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

dev: setup .venv/.ready-dev ## Add the development tools to .venv.

clean: ## Remove .venv, caches and build outputs; runs/ is kept.
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests studies docs -name __pycache__ -type d -prune -exec rm -rf {} +
