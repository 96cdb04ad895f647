# SPDX-License-Identifier: Apache-2.0
"""Calls of any program that reads rows or adds columns: readers, spaces, blobs."""
