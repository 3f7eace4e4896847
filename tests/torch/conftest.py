"""Only these tests import torch; `make test-torch` runs them in an environment of their own."""

from __future__ import annotations

import pytest
import torch
import transformers


def pytest_configure(config: pytest.Config) -> None:
    # Warnings are errors in this project's own tests; torch and transformers are not ours to mend.
    config.addinivalue_line("filterwarnings", "default")
    torch.set_num_threads(1)  # more only wait for each other in models this small
    torch.set_grad_enabled(False)
    transformers.utils.logging.disable_progress_bar()
