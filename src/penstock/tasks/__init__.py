# SPDX-License-Identifier: Apache-2.0
"""Task sets that need no download. Each module offers `make_task(ordinal, seed)` and a reward."""
