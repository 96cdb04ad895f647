# SPDX-License-Identifier: Apache-2.0
"""Home and partitions in processes of their own, and what they say to each other."""
