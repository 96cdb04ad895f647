# SPDX-License-Identifier: Apache-2.0
"""What people take away from a run: its trajectories and its models, in other programs' formats."""
