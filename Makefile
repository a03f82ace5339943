# All but `clean` need nothing but Python >= 3.11: each sets up .venv on its first run and whenever pyproject.toml
# changes.  CONTRIBUTING.md says what is in `test`, `test-all` and `integrations`.
#
#   PYTHON  interpreter for .venv            (default: the first of the list below that is >= 3.11)
#   TORCH   what to give pip for PyTorch     (default: torch==2.13.0)
#           Linux without a GPU: TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#           fetches 0.2 GB instead of the CUDA build.
#   ARGS    options for `uniep demo`         (make demo ARGS="--steps 400 --ep 4")
#   JOBS    tests at a time                  (default: 2)

PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.13.0
ARGS ?=
JOBS ?= 2

BIN := .venv/bin
READY := .venv/.ready
TRITON36 := .venv/triton36/.ready
HF := .venv/.transformers
TITAN := .venv/.torchtitan
MEGATRON := .venv/.megatron
DOCS := .venv/.docs
FRAMEWORKS := $(HF) $(TITAN) $(MEGATRON)

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m

.PHONY: demo test test-all lint integrations docs pictures clean

demo: $(READY)
	$(BIN)/uniep demo $(ARGS)

test: lint $(FRAMEWORKS)
	$(PYTEST) "not slow and not gpu"

test-all: lint docs $(TRITON36) $(FRAMEWORKS)
	$(PYTEST) "not gpu"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "the site: out/site/index.html"

pictures: $(READY)
	$(BIN)/python benchmarks/plot.py

integrations: $(READY) $(FRAMEWORKS)
	$(PYTEST) "not gpu" tests/integrations

# PyTorch first and alone, so that nothing else chooses its build. The stamp comes last and set-up begins with an
# empty .venv: one that was interrupted, or had another Python, starts again.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version); uniep needs Python >= 3.11: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up .venv with $(PYTHON): one minute, or what it takes to download PyTorch"
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet "triton==3.7.1; sys_platform == 'linux'" "numpy<2.4" -e ".[cli,tune,test]"
	@touch $@

# The kernels must compile well with Triton 3.6, too; the lint alone uses it.
$(TRITON36): $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --target .venv/triton36 "triton==3.6.0; sys_platform == 'linux'"
	@mkdir -p .venv/triton36 && touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet "mkdocs-material>=9.5,<10"
	@touch $@

# Frameworks that uniep runs in. Without one the tests say so; the next `make` tries again. Those of which the tests
# need a part come without what they depend on: 47 packages for torchtitan, and a PyTorch of pip's choice.
$(HF): $(READY)
	@$(BIN)/python -m pip install --quiet --retries 1 "transformers==5.24.0" "accelerate==1.15.0" "peft==0.21.2" && \
		touch $@ || echo "transformers could not be installed: its tests are skipped" >&2

$(TITAN): $(READY)
	@$(BIN)/python -m pip install --quiet --retries 1 --no-deps "torchtitan==0.3.0" "spmd_types==0.2.3" "tyro==1.0.17" \
		"docstring_parser==0.18.0" && touch $@ || echo "torchtitan could not be installed: its tests are skipped" >&2

# The wheel asks for Python 3.12 and Linux on x86-64; the Python files in it run on 3.11 and elsewhere.
$(MEGATRON): $(READY)
	@$(BIN)/python -m pip install --quiet --retries 1 --no-deps --upgrade --only-binary :all: \
		--python-version 3.12 --implementation cp --abi cp312 --platform manylinux_2_28_x86_64 \
		--target "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		"megatron-core==0.19.2" && touch $@ || echo "megatron-core could not be installed: its tests are skipped" >&2

clean:
	rm -rf .venv out
