"""The embedding server's pipeline as actors of Ray: each stage on any node, replaced by Ray when it dies."""
