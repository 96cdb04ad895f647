# SPDX-License-Identifier: Apache-2.0
"""Why each decision of a run fell as it did, in sentences, read from its ledger."""
