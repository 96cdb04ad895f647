# SPDX-License-Identifier: Apache-2.0
"""Advantages: from rewards to the credit of each token."""
