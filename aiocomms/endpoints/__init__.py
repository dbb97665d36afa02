"""Endpoints. Two processes communicate without ranks after one of them has connected to the other's address."""
