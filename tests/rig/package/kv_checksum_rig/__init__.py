"""Rig-only adjustments: loaded by vLLM and Triton through entry points, part of no product."""
