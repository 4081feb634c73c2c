# memopt's commands. Each sets up what it needs first, and works without a network once that is there.
#
#   make demo       train a small GPT in seven modes, print what each costs and draw it (ARGS="--steps 50")
#   make test       the test suite (ARGS="-k name" goes to pytest)
#   make lint       ruff, clang-format and mypy; `make format` mends what the first two can
#   make bench      the benchmarks on the CPU
#   make bench-gpu  on a machine with a GPU: builds for it, runs all tests and benchmarks, writes to $OUT
#   make clean      remove what was built
#
# The Python: of the active virtual or conda environment, else a python3 that has torch, else .venv, made here.
# TORCH=2.12.1 chooses the PyTorch that is installed where there is none. MEMOPT_CUDA, TORCH_CUDA_ARCH_LIST: see setup.py.

TORCH ?= 2.13.0
ARGS ?=
STARTED := $(shell date +%s)
PYTHON ?= $(shell \
  for environment in "$${VIRTUAL_ENV:-none}" "$${CONDA_PREFIX:-none}"; do \
    if [ -x "$$environment/bin/python" ]; then echo "$$environment/bin/python"; exit; fi; \
  done; \
  if python3 -c 'import torch' 2>/dev/null; then command -v python3; else echo .venv/bin/python; fi)

# $(call need,MODULES): installs the development requirements unless all of these modules are there.
# HEADERS goes on to ask for the CUDA headers of the kernel interpreter.
need = $(PYTHON) -c "import $(1)" 2>/dev/null || $(PYTHON) -m pip install -r requirements-dev.txt
# The same for the models that tests convert. Found, not imported: that takes seconds.
need_models = $(PYTHON) -c "from importlib.util import find_spec; import sys; sys.exit( \
  not all(map(find_spec, ('transformers', 'accelerate', 'lightning'))))" \
  || $(PYTHON) -m pip install -r requirements-dev.txt
HEADERS = from tests.simt.build import cuda_include; cuda_include()
CLANG_FORMAT = $(PYTHON) -c "import clang_format; clang_format.clang_format()"
CXX_FILES = $(shell git ls-files -co --exclude-standard '*.h' '*.cpp' '*.cu' '*.cuh')

.PHONY: demo test lint format bench bench-gpu build torch clean

demo: build
	@$(call need,rich$(comma) matplotlib)
	$(PYTHON) -m memopt demo $(ARGS)

test: build
	@$(call need,pytest$(comma) hypothesis$(comma) numpy$(comma) rich$(comma) matplotlib; $(HEADERS))
	@$(need_models) || echo "Tests on real models are skipped: no transformers, accelerate or lightning here"
	$(PYTHON) -m pytest $(ARGS)

lint: torch
	@$(call need,ruff$(comma) clang_format$(comma) mypy)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run --Werror $(CXX_FILES)
	$(PYTHON) -m mypy

format: torch
	@$(call need,ruff$(comma) clang_format)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(CLANG_FORMAT) -i $(CXX_FILES)

bench: build
	@$(call need,matplotlib)
	$(PYTHON) -m benchmarks.cpu $(ARGS)

bench-gpu: build
	@$(call need,pytest$(comma) hypothesis; $(HEADERS))
	$(PYTHON) -m benchmarks.gpu --started $(STARTED) $(ARGS)

# In place, and incremental where ninja is.
build: torch
	@$(PYTHON) -c "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77" 2>/dev/null \
	  || $(PYTHON) -m pip install -r requirements-dev.txt
	@mkdir -p build; echo "Building memopt in place; a first build takes minutes (log: build/build.log)"
	@$(PYTHON) setup.py build_ext --inplace >build/build.log 2>&1 \
	  || { grep -E '^memopt|error|Error' build/build.log; tail -n 20 build/build.log; exit 1; }
	@grep '^memopt:' build/build.log

torch: $(PYTHON)
	@$(PYTHON) -c "import torch" 2>/dev/null || $(PYTHON) -m pip install torch==$(TORCH)

.venv/bin/python:
	python3 -m venv .venv

clean:
	rm -rf build dist memopt.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis memopt/_C.*.so

comma := ,
