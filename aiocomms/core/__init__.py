"""The internals of one communicator: its states, its works, its failures, and the reports about failures."""
