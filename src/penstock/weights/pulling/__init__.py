# SPDX-License-Identifier: Apache-2.0
"""A node's side of a transfer: its cache, partial blobs, and links to weight servers."""
