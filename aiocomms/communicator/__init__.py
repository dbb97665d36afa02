"""The code that opens communicators, lanes, windows, streams and portals, and the classes of these objects."""
