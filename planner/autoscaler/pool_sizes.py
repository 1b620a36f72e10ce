"""Pool sizes, the load that they are for, the moves from one pair of sizes to another, and the limits on sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from core.spec.schema import AutoscaleSpec


class PoolSizes(NamedTuple):
    """Number of replicas of each pool."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"


class Demand(NamedTuple):
    """Replicas of each pool that a load keeps fully busy, fractions included."""

    prefill: float
    decode: float

    def busy(self, sizes: PoolSizes) -> float:
        """Return the utilization of the busier pool; above 1 means overload."""
        return max(self.prefill / sizes.prefill, self.decode / sizes.decode)

    def done(self, sizes: PoolSizes) -> float:
        """Return the share of the work that pools of these sizes can do, at most 1."""
        return min(1.0, 1 / max(self.busy(sizes), 1e-9))

    def times(self, factor: float) -> Demand:
        return Demand(self.prefill * factor, self.decode * factor)


@dataclass(frozen=True, kw_only=True)
class ScaleMoves:
    """Moves from one pair of sizes to another. Role switches come first, because they are faster than starts."""

    to_prefill: int = 0  # decode replicas that become prefill replicas
    to_decode: int = 0
    start_prefill: int = 0
    start_decode: int = 0
    stop_prefill: int = 0
    stop_decode: int = 0

    @classmethod
    def between(cls, before: PoolSizes, after: PoolSizes, *, has_switch: bool) -> ScaleMoves:
        """Compute the moves. has_switch: replicas of one pool may become replicas of the other."""
        more_p, more_d = after.prefill - before.prefill, after.decode - before.decode
        to_prefill = max(0, min(more_p, -more_d)) if has_switch else 0
        to_decode = max(0, min(-more_p, more_d)) if has_switch else 0
        return cls(
            to_prefill=to_prefill,
            to_decode=to_decode,
            start_prefill=max(0, more_p - to_prefill),
            start_decode=max(0, more_d - to_decode),
            stop_prefill=max(0, -more_p - to_decode),
            stop_decode=max(0, -more_d - to_prefill),
        )

    @property
    def num_switches(self) -> int:
        return self.to_prefill + self.to_decode

    def __str__(self) -> str:
        counts = {
            "decode -> prefill": self.to_prefill,
            "prefill -> decode": self.to_decode,
            "start prefill": self.start_prefill,
            "start decode": self.start_decode,
            "stop prefill": self.stop_prefill,
            "stop decode": self.stop_decode,
        }
        return ", ".join(f"{count} x {move}" for move, count in counts.items() if count) or "nothing"


@dataclass(frozen=True, kw_only=True)
class ScaleLimits:
    """Limits on pool sizes. A device is a GPU, or a rank on a CPU."""

    least: PoolSizes
    most: PoolSizes
    devices: PoolSizes  # devices per replica of each pool
    max_devices: int

    @classmethod
    def of(cls, spec: AutoscaleSpec, *, devices: PoolSizes) -> ScaleLimits:
        most = PoolSizes(spec.prefill.max, spec.decode.max)
        return cls(
            least=PoolSizes(spec.prefill.min, spec.decode.min),
            most=most,
            devices=devices,
            max_devices=spec.max_devices or most.prefill * devices.prefill + most.decode * devices.decode,
        )

    def num_devices(self, sizes: PoolSizes) -> int:
        return sizes.prefill * self.devices.prefill + sizes.decode * self.devices.decode

    def allow(self, sizes: PoolSizes) -> bool:
        return (
            self.least.prefill <= sizes.prefill <= self.most.prefill
            and self.least.decode <= sizes.decode <= self.most.decode
            and self.num_devices(sizes) <= self.max_devices
        )

    def nearest(self, prefill: float, decode: float) -> PoolSizes:
        """Return the allowed sizes nearest to a demand of `prefill` and `decode` replicas, fractions included.

        If the rounded-up demand exceeds the devices, the split with the least busy pools is returned.
        """
        least, most = self.least, self.most
        num_prefill = min(max(-int(-prefill // 1), least.prefill), most.prefill)
        num_decode = min(max(-int(-decode // 1), least.decode), most.decode)
        if self.allow(rounded := PoolSizes(num_prefill, num_decode)):
            return rounded
        return self.least_busy(self.splits(), prefill, decode)

    def evenly(
        self, prefill: float, decode: float, *, num_devices: int, at_least: PoolSizes | None = None
    ) -> PoolSizes:
        """Split num_devices devices so that the busier pool is as little busy as possible.

        at_least: minimum sizes of the split. If no split of the devices reaches them, `at_least` is returned.
        """
        splits = replace(self, max_devices=min(num_devices, self.max_devices)).splits()
        if at_least:
            splits = [s for s in splits if s.prefill >= at_least.prefill and s.decode >= at_least.decode]
        return self.least_busy(splits, prefill, decode) if splits else at_least or self.nearest(prefill, decode)

    @staticmethod
    def least_busy(splits: Sequence[PoolSizes], prefill: float, decode: float) -> PoolSizes:
        """Return the split whose busier pool is least busy; ties are broken by the other pool."""
        return min(splits, key=lambda s: sorted((prefill / max(s.prefill, 1e-9), decode / max(s.decode, 1e-9)))[::-1])

    def splits(self) -> list[PoolSizes]:
        """Return, for each number of prefill replicas, the sizes that use all remaining devices for decoding."""
        found = []
        for num_prefill in range(self.least.prefill, self.most.prefill + 1):
            left = self.max_devices - num_prefill * self.devices.prefill
            sizes = PoolSizes(num_prefill, min(left // self.devices.decode, self.most.decode))
            if self.allow(sizes):
                found.append(sizes)
        return found
