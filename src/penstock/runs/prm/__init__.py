# SPDX-License-Identifier: Apache-2.0
"""Process rewards of a run: collect its traces, label their steps, score rows while it runs."""
