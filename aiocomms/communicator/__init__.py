"""The classes that users hold: communicators, lanes, windows, streams and portals; and the code that opens them."""
