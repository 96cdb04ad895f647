# SPDX-License-Identifier: Apache-2.0
"""What people are told: the state of a run, and why each of its decisions fell as it did."""
