# SPDX-License-Identifier: Apache-2.0
"""Durable state: records in SQL, payload in files, and restoring both into memory."""
