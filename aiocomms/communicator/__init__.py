"""The classes that users hold: communicators, lanes, windows, streams, portals, and how they are opened."""
