# SPDX-License-Identifier: Apache-2.0
"""Losses: what a trained token costs, and what the sum over tokens is divided by."""
