"""Log one line, as a vLLM plugin, if the series is not in the running vLLM."""

import logging

from . import apply as installer

logger = logging.getLogger("vllm.kv_checksum")


def check() -> None:
    """Log what is wrong, if anything. Change nothing and never raise."""
    try:
        code, text = installer.status(installer.find_package(None))
    except Exception as error:  # a check must not stop a server
        code, text = 2, str(error)
    if code:
        logger.warning("vllm-kv-checksum is installed but %s", text)
