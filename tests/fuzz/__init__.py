# SPDX-License-Identifier: Apache-2.0
"""Fuzz everything that clients and peers can send, guided by coverage."""
