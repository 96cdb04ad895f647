# SPDX-License-Identifier: Apache-2.0
"""One module per generated page; each has `page()`, the text of the page."""
