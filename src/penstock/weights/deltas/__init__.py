# SPDX-License-Identifier: Apache-2.0
"""What changed between two versions: encoded small, applied in place, exact to the bit."""
