# make demo: from a fresh machine to the demo. make test: from a fresh machine to green tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Bytecode is written at the first import; most of the 20,000 files that pip would compile are never imported.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# The constraint is in force from the first call on: another torch would pull in gigabytes.
PIP := $(BIN)/python $(INSTALL) -c constraints.txt

OLDEST ?= .venv-oldest
KERNELS ?= .venv-kernels
OLDEST_TESTS := tests/io/test_checkpoint.py tests/lab/data/test_images.py tests/lab/data/test_formats.py tests/lab/data/test_official.py

# Where a machine forbids bytecode files, every process would compile the library, and pytest the tests, again.
export PYTHONDONTWRITEBYTECODE :=

PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4

# What an environment lacks it finds in $(VENV).
lend = $(BIN)/python -c "import sysconfig; print('$(CURDIR)/src', sysconfig.get_path('purelib'), sep='\n')" \
    > $$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/lent.pth

.PHONY: demo test test-slow test-both test-gpu test-kernels test-kill test-oldest coverage mutate docs test-package bench bench-gpu lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/lab.stamp
	$(BIN)/cpnorm demo

test: lint
	$(PYTEST) -m "not slow and not kill"

test-slow: $(VENV)/dev.stamp
	$(PYTEST) -m "slow and not kill"

# What the two before run, with one collection.
test-both: $(VENV)/dev.stamp
	$(PYTEST) -m "not kill"

test-gpu: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n0 -m gpu tests

# The GPU kernels without a GPU: triton's interpreter does what they say on the CPU.
test-kernels: $(VENV)/dev.stamp
	test -x $(KERNELS)/bin/python || $(BIN)/python -m venv $(KERNELS)
	$(KERNELS)/bin/python $(INSTALL) --no-deps triton==3.9.0
	$(call lend,$(KERNELS))
	TRITON_INTERPRET=1 $(KERNELS)/bin/python -m pytest -q -n auto --maxprocesses 4 -p no:cacheprovider tests/gpu tests/deploy/test_fused*.py tests/lab/training/test_kernel_runs.py

test-kill: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n0 -m kill tests/trust

# The oldest versions that pyproject.toml allows, in front of the torch and the tools of the other environment; the newer
# platformdirs there has a plugin for pytest, which the oldest lacks.
test-oldest: $(VENV)/dev.stamp
	test -x $(OLDEST)/bin/python || $(BIN)/python -m venv $(OLDEST)
	$(OLDEST)/bin/python $(INSTALL) --no-deps -r oldest.txt
	$(call lend,$(OLDEST))
	$(OLDEST)/bin/python -m pytest -q -n0 -p no:cacheprovider -p no:platformdirs -W ignore::DeprecationWarning \
	    -m "not slow" -k "not compiled" $(OLDEST_TESTS)
	$(OLDEST)/bin/python -m cpnorm train --help > /dev/null

coverage: $(VENV)/dev.stamp
	$(PYTEST) -m "not slow and not kill" --cov=cpnorm --cov-report=term-missing:skip-covered \
	    --cov-fail-under=95 $(wildcard tests/test_*.py) tests/trust src

mutate: $(VENV)/dev.stamp
	$(PIP) cosmic-ray
	$(BIN)/python tests/trust/mutate.py

# The figures are small computations: threads that wait for each other would make minutes of seconds on a busy machine.
docs: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

# Built, installed with all its dependencies into empty environments, and tried out there.
INTERPRETERS ?= python3.11 python3.12 python3.13
test-package: $(VENV)/dev.stamp
	tests/package.sh $(BIN)/python $(INTERPRETERS)

# A quarter of an hour on two quiet cores. Threads that share a core by accident spoil every timing.
BENCHMARKS := training_step scaling scaling_layers scaling_records plan decompose calibration inference any_network_inference startup
bench: $(VENV)/dev.stamp
	set -e; export OMP_PROC_BIND=true MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296; \
	for name in $(BENCHMARKS); do \
	    echo "== $$name"; $(BIN)/python benchmarks/$$name.py; done
	$(BIN)/python benchmarks/table.py

bench-gpu: $(VENV)/dev.stamp
	set -e; for name in $(filter-out startup scaling_records,$(BENCHMARKS)); do \
	    echo "== $$name"; $(BIN)/python benchmarks/$$name.py --device cuda; done
	$(BIN)/python benchmarks/table.py

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) $(KERNELS) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

$(VENV)/lab.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing cpnorm into $(VENV); the first time takes a few minutes"
	$(PIP) -e ".[lab]"
	touch $@

# After lab.stamp, never beside it: two pips must not write into one environment.
$(VENV)/dev.stamp: $(VENV)/lab.stamp
	$(PIP) -e ".[lab,onnx,tensorboard,ray,frameworks,docs,dev]"
	touch $@
