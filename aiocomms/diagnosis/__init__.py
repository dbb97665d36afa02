"""Diagnosis of failures and hangs: flight recorder, hang report, debug mode, live view, root cause."""
