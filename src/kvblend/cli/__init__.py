"""The command line: the only room that may import all others."""
