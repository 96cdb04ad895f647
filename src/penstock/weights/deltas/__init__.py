# SPDX-License-Identifier: Apache-2.0
"""Deltas between two versions: encoded compactly, applied in place, bit-exact."""
