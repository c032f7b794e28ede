# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of everything that clients and peers can send."""
