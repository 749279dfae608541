"""What the leader of a group was admitted with is taken over: nobody tokenises or compiles it again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.core.structured.constraint import Constraint, ConstraintKind
from router.api.request import GenerateInput
from router.core.events import Submit
from router.service import service as shell
from testkit.fake_worker import DECODE

from ..local_cluster import local_cluster

CONSTRAINT = Constraint(ConstraintKind.REGEX, "a+")
MANY = 64


def test_a_prompt_is_tokenised_and_its_constraint_checked_for_the_leader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """(1) A leader and many siblings are admitted. (2) Another constraint is checked, and another salt has other keys."""

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster((DECODE,), max_queued_requests=2 * MANY) as cluster:
            service, encoded, checked, admitted = cluster.service, list[Any](), list[Any](), list[Submit]()
            encode, admit = service._encoder.encode, service._admission.admit

            async def count(prompt: Any, client: tuple[str, ...], **settings: bool) -> tuple[int, ...]:
                encoded.append(prompt)
                return await encode(prompt, client, **settings)

            async def check(constraint: Constraint) -> None:
                checked.append(constraint)

            async def keep(*args: Any, **kwargs: Any) -> Submit:
                admitted.append(await admit(*args, **kwargs))
                return admitted[-1]

            monkeypatch.setattr(service._encoder, "encode", count)
            monkeypatch.setattr(service._admission, "_check_grammar", check)
            monkeypatch.setattr(shell, "check_workers", lambda spec, registry: None)
            monkeypatch.setattr(service._admission, "_shared_block_size", lambda: 4)
            monkeypatch.setattr(service._admission, "admit", keep)
            text = "a long story. " * 10

            async def ask(leader: str, constraint: Constraint = CONSTRAINT, salt: str = "") -> str:
                sampling = {"seed": len(admitted), "max_tokens": 2}
                options = {"cache_salt": salt}
                made = await service.submit(
                    GenerateInput(text, sampling, constraint=constraint, leader=leader, options=options)
                )
                generations.append(made)
                return made.request_id

            generations: list[Any] = []
            leader = await ask("")
            for _ in range(MANY):
                await ask(leader)
            await ask(leader, Constraint(ConstraintKind.REGEX, "b+"))
            await ask(leader, salt="another")
            assert encoded == [text]
            assert [constraint.text for constraint in checked] == ["a+", "b+"]
            first, *siblings, salted = admitted
            assert first.prefix_keys
            assert all(one.spec.prompt_ids is first.spec.prompt_ids for one in siblings)
            assert {one.prefix_keys for one in siblings} == {first.prefix_keys}
            assert len(salted.prefix_keys) == len(first.prefix_keys)
            assert not set(salted.prefix_keys) & set(first.prefix_keys)
            assert [one.spec.sampling.seed for one in admitted] == list(range(MANY + 3))
            for generation in generations:
                generation.close()
            assert not service._admitted
            await cluster.assert_idle()

    asyncio.run(story())


def test_a_leader_that_is_unknown_leads_nobody() -> None:
    """Its client has taken all of it, for example. The sibling is then a request as any other."""

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            made = await cluster.service.submit(GenerateInput((1, 2, 3), {"max_tokens": 3}, leader="gone"))
            assert len([delta async for delta in made]) >= 1
            assert made.report.output_tokens == 3
            await cluster.assert_idle()

    asyncio.run(story())
