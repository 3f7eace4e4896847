"""The peers' own venv, made once: they are heavy and no part of the project."""

from __future__ import annotations

import subprocess
import sys

from bench.peers.protocol import ROOT

VENV = ROOT / ".venv-peers"
TORCH = ("torch", "transformers", "accelerate", "gguf")
LLAMA_CPP = ("llama-cpp-python",)  # PyPI has sources only: compiled here, for this CPU


def peer_python(requirements: tuple[str, ...]) -> str:
    """The Python of `.venv-peers` with these packages in it; made and installed where missing.

    Raises RuntimeError that names the packages when pip cannot install them.
    """
    python = VENV / "bin" / "python"
    done = VENV / f"installed-{requirements[0]}"
    if not done.exists():
        print(f"Installing {', '.join(requirements)} into {VENV.name} (minutes, once)", flush=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        try:
            if not python.exists():
                subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
            subprocess.run([*pip, *requirements], check=True, stdin=subprocess.DEVNULL)
        except (subprocess.CalledProcessError, OSError) as error:
            raise RuntimeError(
                f"cannot install {', '.join(requirements)} into {VENV.name}: {error}. "
                "--no-peers measures without them"
            ) from error
        done.touch()
    return str(python)
