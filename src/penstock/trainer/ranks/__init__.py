# SPDX-License-Identifier: Apache-2.0
"""A trainer of several ranks: which rank holds which shard and fetches which rows."""
