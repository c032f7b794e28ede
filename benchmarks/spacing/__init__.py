# SPDX-License-Identifier: Apache-2.0
"""Parts of the run of evenly spaced damage; `fault_spacing.py` runs it."""
