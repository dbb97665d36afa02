"""The internals of one communicator: its life, its works, its failures, and the reports about them."""
