"""For engines whose tokens are on a GPU: they draft there, from the service's index, mapped into their process."""

from draftd.client.device.session import DeviceSession

__all__ = ["DeviceSession"]
