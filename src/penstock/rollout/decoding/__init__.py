# SPDX-License-Identifier: Apache-2.0
"""Continuous batching for in-process models. Only `hf_decoder` and `hf_patch` import
torch."""
