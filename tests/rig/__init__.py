"""The test rig: an environment, tiny models and real vLLM servers on a machine without a GPU."""
