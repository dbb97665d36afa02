"""Transport ``c10d``: any ``torch.distributed`` process group, gloo by default."""

from aiocomms_c10d.transport import C10dTransport

__all__ = ["C10dTransport"]
