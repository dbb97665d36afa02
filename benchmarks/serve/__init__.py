"""Servers under load: ours and its twin, which is the same but for what it communicates by."""
