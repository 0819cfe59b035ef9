"""Pure state machines: events in, commands out."""
