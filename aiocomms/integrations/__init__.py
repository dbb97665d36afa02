"""What meets other frameworks: torch.distributed, Ray, Prometheus, OpenTelemetry, profilers."""
