# memopt's commands. Each sets up what it needs first, and works without a network once that is there.
#
#   make demo       train a small GPT in seven modes, print what each costs and draw it (ARGS="--steps 50")
#   make test       the fast tests: three minutes with the build, all subsystems, each family of ops once (ARGS="-k name" goes to pytest)
#   make test-full  all that a test proves: every variant of an op, and the slow ones; 13 to 25 minutes on two cores
#   make test-thorough  all tests: of those that take longest every combination, an hour on two cores
#   make test-versions  builds and runs the fast tests with each PyTorch of VERSIONS, in environments made for it
#   make wheels     wheels into dist/: for each Python here and each PyTorch of VERSIONS, and one without a native library
#   make test-processors  the tests of accuracy as on older processors: of ATen, MKL and memopt alike
#   make test-delays  the tests of what has threads, while threads are late at random: 20 minutes
#   make sanitize   the C++ tests of offloading and of the planner with the sanitizers of threads, addresses and undefined behaviour
#   make lint       ruff, clang-format and mypy; `make format` mends what the first two can
#   make docs       the documentation, into build/site; warnings are errors
#   make bench      the benchmarks on the CPU
#   make bench-gpu  on a machine with a GPU: builds for it, runs all tests and benchmarks, writes to $OUT
#   make build      compile in place what has changed (the others do so first)
#   make clean      remove what was built
#
# The Python: of the active virtual or conda environment, else a python3 that has torch, else .venv, made here.
# TORCH=2.12.1 chooses the PyTorch that is installed where there is none. JOBS=4: how many processes run the tests.
# MEMOPT_CUDA, TORCH_CUDA_ARCH_LIST, MAX_JOBS: see setup.py. What is installed for which purpose: requirements/.

TORCH ?= 2.13.0
VERSIONS ?= torch==2.11.0 torch==2.13.0 torch==2.14.1,torchvision==0.29.1,timm
PROCESSORS ?= MKL_CBWR=COMPATIBLE,ATEN_CPU_CAPABILITY=default,MEMOPT_CPU_CAPABILITY=baseline \
  MKL_CBWR=AVX2,ATEN_CPU_CAPABILITY=avx2,MEMOPT_CPU_CAPABILITY=avx2
JOBS ?= auto
ARGS ?=
STARTED := $(shell date +%s)
# pip would compile every file of PyTorch and of transformers, on one core. Python compiles what is imported: a part of it.
export PIP_NO_COMPILE ?= 1
PYTHON ?= $(shell \
  for environment in "$${VIRTUAL_ENV:-none}" "$${CONDA_PREFIX:-none}"; do \
    if [ -x "$$environment/bin/python" ]; then echo "$$environment/bin/python"; exit; fi; \
  done; \
  if python3 -c 'import torch' 2>/dev/null; then command -v python3; else echo .venv/bin/python; fi)

# $(call need,PURPOSE,MODULES): installs requirements/PURPOSE.txt unless all of these modules are there. They are
# found, not imported: that takes seconds.
need = $(PYTHON) -c "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))" \
  $(2) || $(PYTHON) -m pip install -r requirements/$(1).txt
need_tests = $(call need,test,pytest xdist hypothesis numpy rich matplotlib) && \
  { $(PYTHON) -c "from tests.simt.build import cuda_include; cuda_include()" 2>/dev/null \
    || $(PYTHON) -m pip install -r requirements/test.txt; }
need_models = $(call need,models,transformers accelerate lightning peft trl datasets bitsandbytes) \
  || echo "Tests on real models are skipped: not all of requirements/models.txt is here"
need_docs = $(call need,docs,mkdocs mkdocstrings pygments ruff)
CLANG_FORMAT = $(PYTHON) -c "import clang_format; clang_format.clang_format()"
CXX_FILES = $(shell git ls-files -co --exclude-standard '*.h' '*.cpp' '*.cu' '*.cuh')
# A file's tests stay in one process: they share what its fixtures made.
PYTEST = $(PYTHON) -m pytest -n $(JOBS) --dist loadfile

# Those that compare errors with PyTorch's own.
TESTS_OF_ACCURACY = tests/ops/test_accuracy.py tests/ops/test_kernel_accuracy.py tests/ops/test_gradients.py \
  tests/ops/test_activation.py tests/ops/test_layer_norm.py tests/ops/test_rms_norm.py tests/ops/test_add_norm.py \
  tests/ops/test_gated.py tests/ops/test_linear.py tests/ops/test_mlp.py tests/convert/test_transformers.py

# Those of what has threads, or processes. (The simulated accelerator has one for each stream: its benchmark has not ended after ten minutes.)
TESTS_OF_THREADS = tests/accelerator tests/accumulate tests/checkpoint tests/distributed tests/examples tests/offload \
  tests/recipes --deselect "tests/accelerator/test_accelerator.py::test_inside[test_benchmark.py]"

.PHONY: demo needs test test-full test-thorough test-versions test-processors test-delays wheels sanitize lint format docs bench bench-gpu build torch clean

demo: build
	@$(call need,demo,rich matplotlib numpy)
	$(PYTHON) -m memopt demo $(ARGS)

# What test-full and test-thorough need beside the build.
needs: torch
	@$(need_tests)
	@$(need_models)
	@$(need_docs)

test: build
	@$(need_tests)
	@$(need_models)
	$(PYTEST) -m "not slow" $(ARGS)

test-full: build needs
	$(PYTEST) -m "not thorough" $(ARGS)

test-thorough: build needs
	$(PYTEST) $(ARGS)

test-versions:
	.ci/test-versions $(VERSIONS)

wheels:
	.ci/wheels $(VERSIONS)

test-processors: build
	@$(need_tests)
	@$(need_models)
	for set in $(PROCESSORS); do \
	  env $$(echo $$set | tr , ' ') $(PYTEST) $(TESTS_OF_ACCURACY) $(ARGS) || exit 1; \
	done

test-delays: build
	@$(need_tests)
	@$(need_models)
	$(PYTHON) -m tests.support.delays $(PYTEST) $(TESTS_OF_THREADS) $(ARGS)

sanitize:
	@$(call need,test,pytest)
	$(PYTHON) -m tests.support.cpp_programs thread address

lint: torch
	@$(call need,lint,ruff clang_format mypy rich matplotlib check_jsonschema)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run --Werror $(CXX_FILES)
	$(PYTHON) -m mypy
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: torch
	@$(call need,lint,ruff clang_format)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(CLANG_FORMAT) -i $(CXX_FILES)

docs: torch
	@$(need_docs)
	$(PYTHON) -m mkdocs build

bench: build
	@$(call need,demo,matplotlib)
	$(PYTHON) -m benchmarks.cpu $(ARGS)

bench-gpu: build
	@$(need_tests)
	$(PYTHON) -m benchmarks.gpu --started $(STARTED) $(ARGS)

build: torch
	@$(PYTHON) -c "import setuptools, ninja; assert int(setuptools.__version__.split('.')[0]) >= 77" 2>/dev/null \
	  || $(PYTHON) -m pip install -r requirements/build.txt
	$(PYTHON) setup.py -q build_ext --inplace

torch: $(PYTHON)
	@$(PYTHON) -c "import torch" 2>/dev/null || $(PYTHON) -m pip install torch==$(TORCH)

.venv/bin/python:
	python3 -m venv .venv

clean:
	rm -rf build dist memopt.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis memopt/_C.*.so
