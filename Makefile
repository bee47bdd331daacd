# One environment for every target: .venv, with everything pinned in constraints.txt.
PYTHON ?= python3
JOBS ?= 3
SHORT ?=
TRAIN ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-compile -c constraints.txt
INSTALLED := $(VENV)/installed.stamp
DEMO_INSTALLED := $(VENV)/demo.stamp
BUILT := $(VENV)/built.stamp
CORE := $(wildcard minato/_core/*.pyx minato/_core/*.pxd minato/_core/*.h)
COMPILED := $(basename $(notdir $(wildcard minato/_core/_*_c.pyx)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install build test test-slow test-pure test-checked test-oldest test-matrix stress lint format docs demo data bench bench-papers bench-peers gpu sdist wheel constraints clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) build  ## create .venv: pinned packages, minato compiled and editable

# Without extensions: the target 'build' compiles them; pip would start from the beginning each time.
# The demo reads a volume that lies in nilearn's wheel, and imports nothing of nilearn: its dependencies stay out.
define install
	@$(PYTHON) -c 'import sys; sys.exit("constraints.txt is for Python 3.11: set PYTHON" if sys.version_info < (3, 11) else 0)'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) 'pip>=25.1' setuptools Cython numpy
	MINATO_NO_EXTENSIONS=1 $(INSTALL) --no-build-isolation --editable $(1)
	$(INSTALL) --no-deps nilearn
endef

# Bytecode by all cores at once; some packages carry files that are no Python of this version.
$(INSTALLED): setup.py pyproject.toml constraints.txt
	$(call install,'.[all]' --group all-dev)
	@$(PY) -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

$(DEMO_INSTALLED): setup.py pyproject.toml constraints.txt
	$(call install,. --group demo)
	@touch $@

# 'make demo' alone makes do with the packages of the demo, where not all are installed.
ENVIRONMENT := $(INSTALLED)
ifeq ($(MAKECMDGOALS) $(wildcard $(INSTALLED)),demo )
ENVIRONMENT := $(DEMO_INSTALLED)
endif

build: $(BUILT)  ## compile what changed in minato/_core, in place

ifneq ($(strip $(foreach name,$(COMPILED),$(if $(wildcard minato/_core/$(name).*.so),,$(name)))),)
.PHONY: $(BUILT)  # a compiled module is missing, whatever the stamp says
endif
$(BUILT): $(ENVIRONMENT) $(CORE)
	$(PY) setup.py --quiet build_ext --inplace
	@$(PY) -m compileall -qq minato  # as pip does when it installs a wheel
	@touch $@

# A process that has imported large libraries forks slowly, and most tests fork: these are run in a process of their own.
LARGE_IMPORTS := tests/integrations tests/sources tests/caching tests/behaviour/test_latency.py tests/demo \
    tests/bench/test_commands.py tests/bench/test_workloads.py

# Ray changes the process that it runs in: signal handlers, threads.
RAY := tests/ray

# Tests start hundreds of interpreters: each would compile again what it imports, if bytecode were not kept.
test test-slow test-pure: export PYTHONDONTWRITEBYTECODE :=

# Each process takes a contiguous share of the tests, so that most fixtures of a module are made once.
PYTEST := $(PY) -m pytest --numprocesses $(JOBS) --dist worksteal

QUICK := "not slow and not stress"

# The two processes beside the others often wait: for actors, for servers. What they print comes at the end.
define run_tests
	@mkdir -p build; set -x; \
	$(1) $(PY) -m pytest -m $(QUICK) $(RAY) > build/ray.txt 2>&1 & ray=$$!; \
	$(1) $(PY) -m pytest -m $(QUICK) $(LARGE_IMPORTS) > build/large.txt 2>&1 & large=$$!; status=0; \
	$(1) $(PYTEST) -m $(QUICK) $(LARGE_IMPORTS:%=--ignore=%) --ignore=$(RAY) || status=$$?; \
	wait $$ray || { status=$$?; cat build/ray.txt; }; tail -n 1 build/ray.txt; \
	wait $$large || { status=$$?; cat build/large.txt; }; tail -n 1 build/large.txt; exit $$status
endef

test: build  ## run the tests but the slow and the random ones (JOBS=3: most of them in three processes, since many wait)
	$(call run_tests)

test-slow: build  ## the tests that take more than five seconds (SHORT=1: one case of each)
	$(PYTEST) -m "slow and not stress" $(if $(SHORT),--one-case)

test-pure: install  ## the same as test, with the pure-Python core
	$(call run_tests,MINATO_NO_EXTENSIONS=1)

# In a directory of its own: the modules that are in use stay as they are. Without pytest's own "pythonpath", which would
# put those first.
CHECKED := build/checked
SANITIZERS = $(shell gcc -print-file-name=libasan.so) $(shell gcc -print-file-name=libubsan.so)

test-checked: install  ## tests of the core, compiled with bounds checks, AddressSanitizer and UndefinedBehaviorSanitizer
	MINATO_CHECKED=1 $(PY) setup.py --quiet build --build-lib $(CHECKED)/lib --build-temp $(CHECKED)/temp
	PYTHONSAFEPATH=1 PYTHONPATH=$(CHECKED)/lib:. LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 \
	    $(PYTEST) -o pythonpath= -m $(QUICK) tests/core

test-oldest:  ## what depends on versions, with the lowest that are allowed (Python 3.11), compiled and pure
	.ci/versions 3.11 constraints-oldest.txt

test-matrix: test-oldest  ## the same with the newest of all, on Python 3.12 and 3.13
	.ci/versions 3.12
	.ci/versions 3.13

stress: build  ## random kills and long runs (SHORT=1: 4 s a test instead of 300 s)
	$(PYTEST) -m stress -o faulthandler_timeout=1200 --stress-s $(if $(SHORT),4,300)

lint: build  ## ruff, cython-lint, mypy, stubtest
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cython-lint minato
	$(PY) -m mypy
	$(PY) -m mypy.stubtest --mypy-config-file pyproject.toml --ignore-disjoint-bases \
	    --allowlist tests/stubtest-allowlist.txt $(COMPILED:%=minato._core.%)

format: $(INSTALLED)  ## let ruff rewrite the Python files
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

docs: build  ## build docs/_build/html; a warning is an error
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going -b html docs docs/_build/html

demo: build  ## load and augment a real volume with torch's loader and with minato (TRAIN=1: train on it, on the CPU)
	$(PY) -m demo $(if $(TRAIN),--train)

bench: build  ## compare with torch's loader (SHORT=1: smoke run of the first three)
	$(PY) -m bench.everyday $(if $(SHORT),--short)
	$(PY) -m bench.macro $(if $(SHORT),--short)
	$(PY) -m bench.micro $(if $(SHORT),--short)
	$(if $(SHORT),,$(PY) -m bench.ablation --out docs/benchmarks)
	$(if $(SHORT),,$(PY) -m bench.growth)
	$(if $(SHORT),,$(PY) -m bench.streams)

data: $(INSTALLED)  ## fetch real volumes, photographs and recordings into build/data (0.5 GB; pip, apt-get)
	$(PY) -m bench.workloads

bench-papers: build data  ## the papers' experiments on real input (SHORT=1: smoke run)
	$(PY) -m bench.papers $(if $(SHORT),--short,--out docs/benchmarks)

bench-peers: build  ## compare with other projects' loaders, installed in build/peers (9 GB)
	$(PY) -m bench.peers $(if $(SHORT),--short)

# On a machine that has nothing but this checkout and a Python with torch: no network, no .venv. minato needs no
# installation, since every program runs from here; it is compiled in place if there is Cython. The benchmark also runs
# where tests fail; the target fails then.
GPU_OUT ?= build/gpu

gpu:  ## all that needs a GPU, with PYTHON's own torch and packages; pages go to GPU_OUT (SHORT=1: smoke run)
	@$(PYTHON) -c 'import cloudpickle, numpy, psutil, torch; print("torch", torch.__version__, "- GPU:", torch.cuda.is_available())'
	@$(PYTHON) -c 'import Cython, numpy, setuptools' && $(PYTHON) setup.py --quiet build_ext --inplace \
	    || echo "not compiled: these figures are of the pure core"
	@failed=0; \
	$(PYTHON) -m pytest -p no:cacheprovider --confcutdir=tests/delivery -c /dev/null --rootdir=. -W ignore -ra \
	    tests/delivery/test_on_a_gpu.py || failed=1; \
	$(PYTHON) -m bench.gpu $(if $(SHORT),--short) --out $(GPU_OUT) || failed=1; \
	exit $$failed

sdist: $(INSTALLED)  ## source distribution in dist/
	$(PY) -m build --no-isolation --sdist

wheel: sdist  ## wheel in dist/, built from the sdist
	$(PIP) --no-cache-dir wheel --no-build-isolation --no-deps --wheel-dir dist "$$(ls -t dist/minatoloader-*.tar.gz | head -n 1)"

constraints: $(INSTALLED)  ## write constraints.txt from what .venv holds now
	@{ sed -n '/^#/p' constraints.txt; $(PIP) freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//'; } > constraints.new
	@mv constraints.new constraints.txt

clean:  ## remove everything that make creates, .venv included
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f minato/_core/*.so
	find minato tests demo bench -name __pycache__ -type d -prune -exec rm -rf {} +
