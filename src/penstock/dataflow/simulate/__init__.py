# SPDX-License-Identifier: Apache-2.0
"""What other data rules would have made of a recorded run: the real core, with the record in place
of nodes and trainers."""
