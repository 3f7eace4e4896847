"""As many open files as the server's connections may need: each is one."""

from __future__ import annotations

import logging
import resource

from conflux_jax.config import ServerConfig

LOGGER = logging.getLogger(__name__)
OTHER_FILES = 256  # the model's, the log's, JAX's own


def raise_file_limit(config: ServerConfig) -> None:
    """Shells and service managers start processes with 1,024 files or fewer, though they may ask
    for more. Where even that is too little, says so: connections would be refused, or wait, long
    before `max_streams` calls are in progress."""
    needed = config.max_streams + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < needed:
        LOGGER.warning(
            "max_streams %d may need %d open files, and this process may have %d (ulimit -Hn)",
            config.max_streams,
            needed,
            most,
        )
