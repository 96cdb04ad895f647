# SPDX-License-Identifier: Apache-2.0
"""What each benchmark is compared with: the same bytes through as little code as possible. Nothing
here imports penstock, and no file is longer than 60 lines."""
