"""Install KV-cache checksums into a vLLM that is already there, and remove them."""

KNOWN_VERSIONS = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""vLLM versions that the series is known to fit."""
