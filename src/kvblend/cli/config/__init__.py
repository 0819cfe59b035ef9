"""Where settings come from: flags, the environment, a file, the names of LMCache, defaults; one precedence."""
