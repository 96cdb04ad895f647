# SPDX-License-Identifier: Apache-2.0
"""Where versions are read from: a store, a relay before another front, object storage."""
