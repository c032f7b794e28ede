"""Adjust vLLM and Triton for the rig alone: they load this through entry points, and no product contains it."""
