"""Run real vLLM servers on a machine without a GPU: an environment, tiny models, servers."""
