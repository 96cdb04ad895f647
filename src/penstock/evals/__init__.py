# SPDX-License-Identifier: Apache-2.0
"""Results of evaluations, and what may be concluded from them."""
