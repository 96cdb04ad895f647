# SPDX-License-Identifier: Apache-2.0
"""What survives a crash: records in SQL, payload in files, and the way back to memory."""
