"""The receiving process of `python -m benchmarks kv`."""

from __future__ import annotations

from benchmarks.kv.carried import receive_over_link, receive_over_tcp
from kvtransfer.profile.far_side import FarSide, serve


class MessagesFarSide(FarSide):
    """Receiver that also accepts messages outside of handoffs."""

    def receive_over_link(self, backend: str, prefix: str, num_bytes: int, count: int) -> float:
        return receive_over_link(
            self.servicer.rendezvous, self.guard, backend, prefix, num_bytes=num_bytes, count=count
        )

    def receive_over_tcp(self, port: int, num_bytes: int, count: int, num_buffers: int) -> float:
        return receive_over_tcp(port, num_bytes=num_bytes, count=count, num_buffers=num_buffers)


if __name__ == "__main__":
    serve(MessagesFarSide)
