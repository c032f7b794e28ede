"""End to end: real ``vllm serve`` processes and real NIXL."""
