# SPDX-License-Identifier: Apache-2.0
"""Encoding, HTTP base and credentials. Takes addresses and types, never config objects."""
