# SPDX-License-Identifier: Apache-2.0
"""A rollout node: lease, run the workflow, score, deliver. Imports nothing here, so workers start
fast."""
