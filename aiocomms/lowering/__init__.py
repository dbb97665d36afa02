"""Lowering of ops that a transport lacks: schedules of sends and receives, windows over messages, and routing."""
