"""Attention of selected rows behind one protocol."""
