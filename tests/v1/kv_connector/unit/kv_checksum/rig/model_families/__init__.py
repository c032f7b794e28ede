# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Plan the KV caches of model families as vLLM does, and tell what is covered.

`configurations` holds a tiny configuration per family, `make_plans` builds vLLM's own
models from them (on the meta device, with a stand-in for the GPU) and lets vLLM group
and place their caches, `table` makes the table of the design document of that.
"""
