# SPDX-License-Identifier: Apache-2.0
"""A node's side of a transfer: its cache, half-fetched blobs, and the links it may ask."""
