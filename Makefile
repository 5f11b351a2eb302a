# make train   install into .venv, then run the main job on this machine
# make test    install what tests need as well, then run them
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DEV_INSTALLED := .venv/.installed-dev
BENCH_INSTALLED := .venv/.installed-bench

# Tests start hundreds of processes: compiled once, and not by each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test campaigns check format bench sanitize kills storm clean

train: $(INSTALLED)
	$(BIN)/planaria train --kill server:2@200

# By file, whose tests share their jobs; those with processes afterwards, when nobody else computes.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

test: $(DEV_INSTALLED)
	$(PYTEST) -m "not campaign" --ignore-glob='*test_cluster*'
	$(PYTEST) -m "not campaign" tests/test_cluster*.py

# Every message a blow, and jobs that are frozen, starved, interrupted and struck again and again:
# longer than a test may be.
campaigns: $(DEV_INSTALLED)
	$(PYTEST) -m campaign

# kill -9 of everything, fifty times; `make campaigns` does it twice.
kills: $(DEV_INSTALLED)
	PLANARIA_KILLS=50 $(BIN)/python -m pytest -s tests/test_cluster_kills.py

# Twenty random faults to any process, in fifty jobs; `make campaigns` does a small one.
storm: $(INSTALLED)
	$(BIN)/python tests/storm.py --jobs 50 --faults 20

check: $(DEV_INSTALLED)
	$(BIN)/clang-format --dry-run --Werror native/*
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(DEV_INSTALLED)
	$(BIN)/clang-format -i native/*
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BENCH_INSTALLED)
	$(BIN)/python -m benchmarks.kernels

# The kernel tests again, in a native module built with AddressSanitizer and UBSan. -S passes over
# the editable install, whose import hook would win over PYTHONPATH; the first line of Python holds
# that the module tested is the one built here.
SANITIZED = LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 \
	PYTHONPATH="build/sanitized:$$($(BIN)/python -c 'import numpy; print(numpy.__path__[0] + "/..")')" \
	$(BIN)/python -S

sanitize: $(DEV_INSTALLED)
	$(BIN)/pip install -q --no-deps --upgrade --target build/sanitized \
	    -C cmake.define.PLANARIA_SANITIZE=ON -C build-dir=build/sanitize .
	$(SANITIZED) -c 'from planaria import _native; assert "build/sanitized" in _native.__file__'
	$(SANITIZED) -m pytest -p no:cacheprovider -m "not torch" \
	    tests/test_kernels.py tests/test_arguments.py tests/test_codes.py \
	    tests/test_optimizers.py tests/test_initialisation.py tests/test_streaming.py \
	    tests/test_saves_kernels.py tests/test_saves_arguments.py tests/test_marks.py \
	    tests/test_parity_kernels.py tests/test_interactions.py \
	    tests/test_lossy.py tests/test_lossy_damage.py tests/test_packing.py \
	    tests/test_tiers.py tests/test_peeking.py

# Native code is built by the install, so a change to it installs again; Python code is used in
# place.
$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
	@echo "installing Planaria and PyTorch into .venv: some minutes and about 1.2 GB" \
	    "(several GB if pip finds PyTorch with CUDA)"
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

# What an extra of pyproject.toml asks for, alone: with the package, pip would build that again.
EXTRA = import sys, tomllib; \
	project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"][sys.argv[1]], sep="\n")
install_extra = $(BIN)/python -c '$(EXTRA)' $(1) | \
	xargs -d '\n' $(BIN)/pip install -q -c constraints.txt

# TorchRec, which tests use where it can be had. Its own list asks for the FBGEMM of GPUs.
TORCHREC := torchrec fbgemm-gpu-cpu tensordict pyvers cloudpickle pyre-extensions typing-inspect
install_torchrec = $(BIN)/pip install -q --no-deps -c constraints.txt $(1)

$(DEV_INSTALLED): $(INSTALLED)
	@echo "installing what tests and checks need into .venv: a minute or two and about 0.4 GB"
	$(call install_extra,dev)
	$(call install_extra,compression)
	-$(call install_torchrec,$(TORCHREC))
	-$(call install_extra,ray)
	touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	$(call install_extra,bench)
	$(call install_extra,compression)
	-$(call install_torchrec,fbgemm-gpu-cpu)
	touch $@

clean:
	rm -rf .venv build
