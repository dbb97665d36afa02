"""Ops under way: works, the driver that moves them on, those in flight, their deadlines, the heartbeat."""
