# SPDX-License-Identifier: Apache-2.0
"""Weight servers: their sources (store, relay, object storage) and the HTTP server."""
