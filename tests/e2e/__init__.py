"""Test end to end, with real ``vllm serve`` processes and real NIXL."""
