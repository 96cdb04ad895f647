# SPDX-License-Identifier: Apache-2.0
"""Continuous batching for in-process models. `hf_decoder` is the only module that imports torch."""
