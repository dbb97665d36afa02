"""Integrations with other frameworks: torch.distributed, Ray, Prometheus, OpenTelemetry, profilers."""
