"""Ways of choosing which cached rows are computed again."""
