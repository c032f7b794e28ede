# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Connectors as authors outside of vLLM's tree write them, right and broken."""
