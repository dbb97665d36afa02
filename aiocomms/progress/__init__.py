"""The works (handles) of pending ops, the driver that advances the ops, the deadlines, and the heartbeat."""
