# Everything here works on a fresh machine with Python 3.11 or 3.12, make and gcc.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint test-gpu bench-engine bench-gpu bench-ablation bench-systems bench-peers load check-models clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: $(STAMP) ## the virtual environment that the others use

$(STAMP): pyproject.toml setup.py client/pyproject.toml constraints.txt $(wildcard lr_backend/torch_engine/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,dev]' -e client
	@touch $@

demo: venv ## a question streamed live, then four modes side by side, through a real Triton
	$(BIN)/python -m demo.run

test: venv ## all tests; starts its own servers on free ports
	$(BIN)/python -m pytest

test-gpu: venv ## what needs a CUDA device, the conformance suite among it
	$(BIN)/python -m pytest -m gpu

lint: venv ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-engine: venv ## what an iteration of the embedded engine costs, beside transformers
	$(BIN)/python -m bench.engine

bench-gpu: venv ## decoding on a CUDA device, beside what its memory allows
	$(BIN)/python -m bench.gpu

bench-ablation: venv ## what depth, width, verifiers and token drafts are each worth (about 17 minutes)
	$(BIN)/python -m bench.ablation

bench-systems: venv ## random models of real shapes with scripted acceptance, against the paper's formulas
	$(BIN)/lookahead bench-systems

bench-peers: venv ## transformers, the target alone and the paper's synchronous procedure beside the four modes
	$(BIN)/python -m bench.peers

load: venv ## each mode under rising load, by NVIDIA's perf_analyzer (downloaded once; about 15 minutes)
	$(BIN)/python -m bench.load

check-models: venv ## the demo models against their figures (500 problems, 2,000 pairs)
	$(BIN)/python -m demo.check

clean: ## remove what the other targets made
	rm -rf $(VENV) out engines/built
