"""Works of pending ops, the driver that advances them, their deadlines, and the heartbeat."""
