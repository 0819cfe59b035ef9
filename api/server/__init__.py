"""The WebSocket and HTTP server."""
