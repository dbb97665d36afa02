"""The methods of ``Communicator`` by family; each is a signature, a docstring and one line that issues an op."""
