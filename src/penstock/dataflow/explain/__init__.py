# SPDX-License-Identifier: Apache-2.0
"""Explains a run's decisions in sentences, from its ledger."""
