# SPDX-License-Identifier: Apache-2.0
"""Immutable, named, verified weight versions: the store, its read-only front, what others call.

Publishing is not done here: a version exists when the ledger says so. Other folders import only
`client`.
"""
