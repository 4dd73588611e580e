"""What the planner's parts share: the bounds, the slots, one account per tier, the open jobs, the orders to come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsluice.connector.account import PlannedTier, TierAccount
from kvsluice.connector.ledger import Ledger
from kvsluice.connector.orders import LoadOrder, LoadPart, Order, StoreOrder, StorePart
from kvsluice.tiers.slots import SlotTable

__all__ = ["Books", "PlannerSettings", "slot_share"]


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Bounds in time and in count.

    Attributes:
        blocks_per_chunk, num_blocks: the geometry that block ids are checked against.
        chunk_bytes: payload bytes of one rank's part of a chunk.
        slot_bytes: bytes of a slot, header and alignment included.
        num_slots: slots of each rank's pinned region.
        host_slots: how many of them the host tier may hold; 0 without a host tier.
        num_ranks: workers that each order goes to.
        load_timeout_s: deadline of a load that names none.
        lookup_timeout_s: how long a lookup may stay pending before the tier counts as not holding.
        negative_ttl_s: how long "not held" is believed; where nobody could tell, `UNKNOWN_TTL_S` if that is less.
        max_stores_waiting: chunks that may wait for a slot; their blocks are held meanwhile.
    """

    blocks_per_chunk: int
    num_blocks: int
    chunk_bytes: int
    slot_bytes: int
    num_slots: int
    host_slots: int
    num_ranks: int = 1
    load_timeout_s: float = 10.0
    lookup_timeout_s: float = 1.0
    negative_ttl_s: float = 5.0
    max_stores_waiting: int = 1024


def slot_share(num_slots: int, num_io_tiers: int) -> int:
    """Slots that one I/O tier may have at once.

    A dead one keeps at most its share; with n of them one more share is left to everybody else.
    """
    return max(1, num_slots // (num_io_tiers + 1))


class Books:
    """Mutable and shared; nothing in here decides anything. The planner's thread alone."""

    def __init__(self, tiers: Sequence[PlannedTier], settings: PlannerSettings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.clock = clock
        self.slots = SlotTable(settings.num_slots, settings.host_slots)
        self.io = tuple(at for at, tier in enumerate(tiers) if not tier.is_host)
        """Positions of the tiers that do I/O, fastest first."""
        share = slot_share(settings.num_slots, len(self.io))
        self.tiers = [
            TierAccount(
                tier,
                negative_ttl_s=settings.negative_ttl_s,
                slot_share=share,
                chunk_bytes=settings.chunk_bytes,
            )
            for tier in tiers
        ]
        self.host = self.tiers[0] if tiers and tiers[0].is_host else None
        self.ledger = Ledger()
        self.generation = 0
        """Counts resets: what was begun under an earlier one must not be served."""
        self.loads_open: Counter[int] = Counter()
        """By tier, loads that wait for it or are being read, `HOST` for those of slots; decided ones do not count."""
        self.skipped: Counter[str] = Counter()
        """Stores that no tier was asked to take, by reason."""
        self.unused: Counter[str] = Counter()
        """Loads that no tier was asked for, and chunks that no lookup offered, by reason."""
        self._orders: list[Order] = []
        self._stores_out: dict[int, list[StorePart]] = {}
        self._loads_out: dict[int, list[LoadPart]] = {}

    def send_store(self, job_id: int, part: StorePart) -> None:
        self._stores_out.setdefault(job_id, []).append(part)

    def send_load(self, job_id: int, part: LoadPart) -> None:
        self._loads_out.setdefault(job_id, []).append(part)

    def send(self, order: Order) -> None:
        """After all that was sent before."""
        self._flush()
        self._orders.append(order)

    def take_orders(self) -> tuple[Order, ...]:
        """What was sent since the last call, in order; the parts of one job in one order."""
        self._flush()
        orders = tuple(self._orders)
        self._orders.clear()
        return orders

    def _flush(self) -> None:
        now_s = self.clock()
        for job_id, loads in self._loads_out.items():
            job = self.ledger.jobs.get(job_id)
            left_s = job.expires_s - now_s if job is not None else 0.0
            self._orders.append(LoadOrder(job_id, tuple(loads), left_s))
        for job_id, stores in self._stores_out.items():
            self._orders.append(StoreOrder(job_id, tuple(stores)))
        self._loads_out.clear()
        self._stores_out.clear()
