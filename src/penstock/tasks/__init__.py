# SPDX-License-Identifier: Apache-2.0
"""Task sets without a download. Each module has `make_task(ordinal, seed)` and a reward."""
