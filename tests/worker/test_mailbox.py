"""Items from a thread to a loop: none lost, none twice, in order, whatever the two are doing."""

import asyncio
import os
import threading

from pdserve.worker.engine_thread import Mailbox

WAIT_S = 60.0


def test_nothing_is_lost_between_a_wake_and_the_next_look():
    """The sender puts while the loop looks: an item that saw the loop awake must be found by that look or wake it again."""
    count, taken = 20_000, list[int]()

    async def main() -> None:
        full = asyncio.Event()

        def take(item: int) -> None:
            taken.append(item)
            if len(taken) == count:
                full.set()

        mailbox = Mailbox[int]()
        sender = threading.Thread(target=lambda: [mailbox.put(i) for i in range(count)])
        mailbox.attach(take)
        sender.start()
        await asyncio.wait_for(full.wait(), WAIT_S)
        sender.join(WAIT_S)
        mailbox.detach()
        mailbox.close()

    asyncio.run(main())
    assert taken == list(range(count))


def test_what_was_put_before_the_loop_came_is_taken_first():
    taken: list[int] = []

    async def main() -> None:
        both = asyncio.Event()
        mailbox = Mailbox[int]()
        mailbox.put(1)
        mailbox.attach(lambda item: (taken.append(item), item == 2 and both.set()))
        mailbox.put(2)
        await both.wait()
        mailbox.detach()
        mailbox.put(3)
        await asyncio.sleep(0.01)
        mailbox.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert taken == [1, 2]


def test_one_item_that_fails_does_not_take_the_others_along():
    taken: list[int] = []
    failures: list[object] = []

    async def main() -> None:
        last = asyncio.Event()

        def take(item: int) -> None:
            if item == 2:
                raise ValueError("planted")
            taken.append(item)
            if item == 3:
                last.set()

        mailbox = Mailbox[int]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
        for item in (1, 2, 3):
            mailbox.put(item)
        mailbox.attach(take)
        await last.wait()
        mailbox.detach()
        mailbox.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert taken == [1, 3]
    assert [str(failure) for failure in failures] == ["planted"]


def test_closing_twice_closes_no_file_of_someone_else():
    mailbox = Mailbox[int]()
    mailbox.close()
    other = os.eventfd(0)
    try:
        mailbox.close()
        mailbox.put(1)
        os.eventfd_write(other, 1)
        assert os.eventfd_read(other) == 1, "still open, and nothing was written to it"
    finally:
        os.close(other)
