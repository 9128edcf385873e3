# The commands of the README. Each sets up what it needs in .venv; nothing has to be installed before
# but Python 3.10 or newer and a C++ compiler.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
NATIVE := 'csrc/*' 'tests/native/*.cpp' 'tests/native/*.h' 'examples/c/*.c'
SOURCES := $(shell find csrc cmake -type f) CMakeLists.txt setup.py pyproject.toml

.PHONY: demo test test-vllm test-asan fuzz bench lint format clean

demo: $(VENV)/.installed
	$(BIN)/vegas-ops demo $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(ARGS)

test-vllm: $(VENV)-vllm/.installed
	$(VENV)-vllm/bin/pytest tests/test_vllm.py tests/test_vllm_engine.py $(ARGS)

test-asan: $(VENV)/.installed
	PYTHON=$(BIN)/python tools/sanitize.sh $(ARGS)

fuzz: $(VENV)/.installed
	$(BIN)/python tools/fuzz.py $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/vegas-ops bench $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files $(NATIVE))

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files $(NATIVE))

clean:
	rm -rf build $(VENV) $(VENV)-vllm vegas_ops/*.so

$(VENV)/.torch: tools/environment.sh
	@echo "Setting up $(VENV): torch and what it needs (PyPI's for Linux is the CUDA build, gigabytes: minutes)"
	@tools/environment.sh $(VENV) $(PYTHON)
	@touch $@

# CUDACXX: nvcc from PyPI, where tools/environment.sh has just installed one.
$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	@echo "Building and installing vegas_ops: a minute or two, with CUDA kernels for all architectures many"
	@for cuda in $(abspath $(VENV))/lib/python3*/site-packages/nvidia/cu13; do \
	  if [ -z "$$CUDACXX" ] && [ -x "$$cuda/bin/nvcc" ]; then \
	    export CUDACXX="$$cuda/bin/nvcc" LIBRARY_PATH="$$cuda/lib$${LIBRARY_PATH:+:$$LIBRARY_PATH}"; \
	  fi; \
	done; \
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --editable ".[test]"
	@touch $@

$(VENV)-vllm/.installed: tools/vllm_environment.sh $(SOURCES) $(shell find vegas_ops -name '*.py')
	@echo "Setting up $(VENV)-vllm: vLLM for CPUs, and vegas_ops for it: some minutes"
	tools/vllm_environment.sh $(VENV)-vllm $(PYTHON)
	touch $@

# Not as an extra of the package: that would build it once more.
$(VENV)/.lint: $(VENV)/.installed
	$(BIN)/python -m pip --disable-pip-version-check install --quiet ruff mypy clang-format
	touch $@
