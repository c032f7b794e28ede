# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Parts of the run of evenly spaced damage; `fault_spacing.py` runs it."""
