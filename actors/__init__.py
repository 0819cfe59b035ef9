"""Time, order and supervision: actors around pure cores."""
