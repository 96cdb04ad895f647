# SPDX-License-Identifier: Apache-2.0
"""What a running penstock says about itself: logs, metrics lines, Prometheus samples."""
