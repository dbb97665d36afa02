"""Diagnosis of failures and hangs: flight recorder, hang report, debug mode, live view, reports to torchrun."""
