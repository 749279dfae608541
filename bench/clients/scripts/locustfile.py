"""Users of locust who stream chats."""

import os

from locust import HttpUser, constant, task  # type: ignore[import-not-found]


class Reader(HttpUser):  # type: ignore[misc]  # locust is not in this environment
    """A user who asks again as soon as the answer has come."""

    wait_time = constant(0)

    @task  # type: ignore[untyped-decorator]
    def chat(self) -> None:
        """Stream one chat to its end."""
        body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            if answer.status_code != 200 or b"[DONE]" not in answer.content:
                answer.failure(f"status {answer.status_code}")
            else:
                answer.success()
