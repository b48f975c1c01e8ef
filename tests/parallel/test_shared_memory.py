"""Messages through shared memory, with both sides in one process."""

import errno
import os

import pytest
import torch
import torch.distributed as dist

from megacore.parallel import shared_memory
from megacore.parallel.shared_memory import MessageMemory, SharedMemory

pytestmark = pytest.mark.skipif(not MessageMemory.supported(), reason="needs memfd_create and x86")
SOURCE, DESTINATION = 0, 1


def test_messages_of_any_size_and_type_arrive_in_any_order() -> None:
    sender, receiver = MessageMemory(3), MessageMemory(3)
    for size, dtype in ((4, torch.float32), (3000, torch.bfloat16), (300_000, torch.float64)):
        sent = [torch.randn(2, size).to(dtype) for _ in range(3)]
        addresses = [sender.put(DESTINATION, x) for x in sent]
        for number in (2, 0, 1):
            address, received = addresses[number], torch.empty_like(sent[number])
            assert address is not None
            assert address.shape == (shared_memory.ADDRESS,)
            assert receiver.take(SOURCE, address, received)
            assert torch.equal(received, sent[number])


def test_a_slot_is_used_again_only_when_its_message_has_been_taken() -> None:
    sender, receiver = MessageMemory(2), MessageMemory(2)
    first, second = (sender.put(DESTINATION, torch.full((4,), value)) for value in (1.0, 2.0))
    assert first is not None and second is not None  # noqa: PT018
    assert sender.put(DESTINATION, torch.full((4,), 3.0)) is None
    received = torch.empty(4)
    assert receiver.take(SOURCE, first, received)
    assert sender.put(DESTINATION, torch.full((2000,), 3.0)) is None  # the file is still in use
    assert sender.put(DESTINATION, torch.full((4,), 3.0)) is not None
    assert receiver.take(SOURCE, second, received)
    assert received.tolist() == [2.0] * 4


def test_an_address_without_a_slot_announces_another_way() -> None:
    memory, received = MessageMemory(1), torch.zeros(4)
    assert not memory.take(SOURCE, memory.no_address(), received)
    assert received.tolist() == [0.0] * 4


def test_the_memory_has_no_name_and_a_replaced_file_is_closed() -> None:
    sender, receiver, descriptors = MessageMemory(1), MessageMemory(1), []
    for size in (4, 4000):
        address = sender.put(DESTINATION, torch.ones(size))
        assert address is not None
        assert receiver.take(SOURCE, address, torch.empty(size))
        descriptors.append(int(address[1]))
        assert "(deleted)" in os.readlink(f"/proc/self/fd/{descriptors[-1]}")
    del sender
    assert not any(os.path.exists(f"/proc/self/fd/{number}") for number in descriptors)


def test_a_message_can_be_taken_after_the_end_of_the_senders_memory() -> None:
    sender, receiver, received = MessageMemory(1), MessageMemory(1), torch.empty(4)
    address = sender.put(DESTINATION, torch.ones(4))
    assert address is not None
    del sender
    assert receiver.take(SOURCE, address, received)
    assert received.tolist() == [1.0] * 4
    os.close(int(address[1]))


def test_a_file_of_another_process_is_not_mapped() -> None:
    sender = MessageMemory(1)
    address = sender.put(DESTINATION, torch.ones(4))
    assert address is not None
    process, descriptor, secret, length = address[:4].tolist()
    assert shared_memory._map_file(process, descriptor, secret, length) is not None
    assert shared_memory._map_file(process, descriptor, secret + 1, length) is None
    assert shared_memory._map_file(process, descriptor + 1000, secret, length) is None


def _open_files() -> list[str]:
    """Return the anonymous files of shared memory that this process has open."""
    descriptors = "/proc/self/fd"
    links = [os.path.join(descriptors, number) for number in os.listdir(descriptors)]
    return [link for link in links if os.path.exists(link) and "memfd:" in os.readlink(link)]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    """Provide the slots of a rank without peers, whose collectives change nothing."""
    for name in ("broadcast", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *arguments, **options: None)
    return SharedMemory(None, 0, 1)  # type: ignore[arg-type]


def test_slots_are_used_in_turn_and_one_collective_at_a_time(memory: SharedMemory) -> None:
    taken = []
    for value in (1.0, 2.0, 3.0):
        x = torch.full((2, 3), value)
        (slot,) = memory.put(x) or ()
        assert torch.equal(slot, x)
        assert memory.busy
        assert memory.put(x) is None
        memory.done()
        taken.append(slot)
    first, second, third = (slot.data_ptr() for slot in taken)
    assert first == third != second
    assert [slot[0, 0].item() for slot in taken] == [3.0, 2.0, 3.0]
    assert memory.put(torch.empty(0)) is None
    assert not memory.busy


def test_slots_grow_and_leave_no_other_file_open(memory: SharedMemory) -> None:
    before = len(_open_files())
    for size in (1, 1 << 20, (1 << 20) + 1):
        x = torch.arange(size, dtype=torch.float64)
        (slot,) = memory.put(x) or ()
        memory.done()
        assert torch.equal(slot, x)
    del slot
    assert memory.is_possible()
    assert len(_open_files()) == before + 1  # the mapping's own


def test_no_slot_is_used_if_a_file_cannot_be_created(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert memory.put(torch.ones(4)) is None
    assert not memory.busy
    assert not memory.is_possible()
