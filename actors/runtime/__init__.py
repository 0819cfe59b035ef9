"""The small actor runtime: bounded mailboxes, actors with owned tasks, supervision, and the one device thread."""
