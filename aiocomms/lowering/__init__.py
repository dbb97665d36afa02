"""What a transport lacks, done with what it has: schedules of sends and receives, windows over messages, routes."""
