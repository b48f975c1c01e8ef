"""Messages through shared memory, with both sides in one process."""

import os

import pytest
import torch

from megacore.parallel import shared_memory
from megacore.parallel.shared_memory import MessageMemory

pytestmark = pytest.mark.skipif(not MessageMemory.supported(), reason="needs memfd_create and x86")
SOURCE, DESTINATION = 0, 1


def test_messages_of_any_size_and_type_arrive_in_any_order() -> None:
    sender, receiver = MessageMemory(3), MessageMemory(3)
    for size, dtype in ((4, torch.float32), (3000, torch.bfloat16), (5, torch.float64)):
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


def test_a_file_of_another_process_is_not_mapped() -> None:
    sender = MessageMemory(1)
    address = sender.put(DESTINATION, torch.ones(4))
    assert address is not None
    process, descriptor, secret, length = address[:4].tolist()
    assert shared_memory._map_file(process, descriptor, secret, length) is not None
    assert shared_memory._map_file(process, descriptor, secret + 1, length) is None
    assert shared_memory._map_file(process, descriptor + 1000, secret, length) is None
