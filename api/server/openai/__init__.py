"""The HTTP interface: OpenAI's routes and ours beside them."""
