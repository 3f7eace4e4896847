"""`python -m conflux_jax.convert MODEL OUT`: a model as an Orbax checkpoint with its tokenizer.

MODEL is a Hugging Face directory, a .gguf file or a known name. OUT is then served by
`--model OUT` on any mesh: each device reads its own share of the weights and nothing else.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from conflux_jax.models.loading import find_model, open_source
from conflux_jax.models.loading.huggingface_config import read_json
from conflux_jax.models.loading.orbax import write_checkpoint
from conflux_jax.models.spec import ModelError
from conflux_jax.platform import python_command
from conflux_jax.tokenizer_files import TokenizerParts, read_tokenizer

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
GENERATION = "generation_config.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; returns the exit code. What is wrong is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m conflux_jax.convert", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", help="what is read")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to make")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="what weights are rounded to (default: as MODEL has them; float32 if quantised)",
    )
    parsed = parser.parse_args(arguments)
    try:
        num_bytes = convert(parsed.model, parsed.out, parsed.dtype)
    except (ModelError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"Wrote {num_bytes / 1e9:.2f} GB of weights. To serve them:")
    print(f"{python_command()} -m conflux_jax.serve --model {parsed.out}")
    return 0


def convert(model: str, out: Path, dtype: str | None = None) -> int:
    """Makes the directory `out`, whole or not at all; returns the bytes of its weights.

    Orbax starts JAX, which is held to the CPU: nothing here needs another device. Raises ModelError
    for a model that cannot be read, and where `out` is there already.
    """
    if out.exists():
        raise ModelError(f"{out}: exists already; name a directory that does not")
    source, parts = open_source(model), read_tokenizer(model)

    import jax

    jax.config.update("jax_platforms", "cpu")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as workspace:
        made = Path(workspace) / out.name
        made.mkdir()
        num_bytes = write_checkpoint(source, made, DTYPES.get(dtype or ""))
        _write_text_files(find_model(model), parts, source.spec.eos_token_ids, made)
        made.rename(out)
    return num_bytes


def _write_text_files(
    path: Path, parts: TokenizerParts, eos_token_ids: Sequence[int], directory: Path
) -> None:
    """The tokenizer's files, as they are where MODEL is a directory; of a GGUF file the same in
    Hugging Face's form. EOS ids go to generation_config.json wherever they came from."""
    generation = {}
    if path.is_dir():
        for name in COPIED:
            if (path / name).is_file():
                shutil.copyfile(path / name, directory / name)
        if (path / GENERATION).is_file():
            generation = read_json(path / GENERATION)
    else:
        (directory / "tokenizer.json").write_text(parts.tokenizer.to_str(), encoding="utf-8")
        config = {**parts.special_tokens, "chat_template": parts.chat_template}
        _write_json(directory / "tokenizer_config.json", config)
    _write_json(directory / GENERATION, generation | {"eos_token_id": list(eos_token_ids)})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
