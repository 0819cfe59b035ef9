"""The wire: what others speak to. Imports nothing, so that the client stays light."""
