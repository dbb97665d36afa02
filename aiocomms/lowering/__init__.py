"""The routing of ops to transports. Ops that a transport lacks are executed as sends and receives."""
