# SPDX-License-Identifier: Apache-2.0
"""Balance report and time account: is the rollout pool too small, too large, or right?"""
