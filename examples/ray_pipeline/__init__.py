"""The embedding server's pipeline as Ray actors. Each stage runs on any node, and Ray replaces it when it dies."""
