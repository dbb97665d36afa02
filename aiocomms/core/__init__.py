"""One communicator from the inside: its life, its works, its failures, and what they leave behind."""
