"""The methods that users call, by family: each is a signature, a docstring and one line that issues an op."""
