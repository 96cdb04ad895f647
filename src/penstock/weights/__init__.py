# SPDX-License-Identifier: Apache-2.0
"""Immutable, content-addressed, verified weight versions: the store, its read-only server, and
clients.

A version is published only once the ledger records it, not here. Other packages import only
`client`.
"""
