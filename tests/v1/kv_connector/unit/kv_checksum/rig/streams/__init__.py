# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check the order of a worker's reads and writes on streams, without a GPU.

`order` holds the rule (happens-before, by vector clocks), `fake_cuda` a fake of the
part of CUDA's API that orders work, and `steps` a runner that drives the real worker.
"""
