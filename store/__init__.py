"""Bytes at rest: chunk KV on disk and in host memory."""
