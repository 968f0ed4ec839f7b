from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from devtools.comfyui_client import (
    ComfyUIClient,
    HttpError,
    PromptError,
    PromptResult,
    failure_text,
    refusal_text,
)

PROMPT = {"2": {"class_type": "CourierLoadDiffusionModel", "inputs": {}}}
REFUSAL = {
    "error": {"type": "prompt_outputs_failed_validation", "message": "Bad", "details": ""},
    "node_errors": {
        "2": {
            "class_type": "CourierLoadDiffusionModel",
            "errors": [{"message": "Value not in list", "details": "unet_name: 'gone'"}],
        }
    },
}
FAILED = {
    "status_str": "error",
    "messages": [
        ["execution_start", {}],
        [
            "execution_error",
            {
                "node_id": "8",
                "node_type": "KSampler",
                "exception_type": "RuntimeError",
                "exception_message": "no room\n",
                "traceback": ["  File x\n"],
            },
        ],
    ],
}
SUCCEEDED = {
    "status": {
        "status_str": "success",
        "messages": [["execution_cached", {"nodes": ["1", "4"]}]],
    },
    "outputs": {"12": {"images": [{"filename": "a.png", "subfolder": "", "type": "output"}]}},
}


class Answers:
    """A server that answers each path with a status and a body, and keeps what was posted."""

    def __init__(self) -> None:
        self.by_path: dict[str, list[tuple[int, Any]]] = {}
        self.posted: list[Any] = []

    def next(self, path: str) -> tuple[int, Any]:
        answers = self.by_path.get(path, [(404, None)])
        return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def client(answers: Answers) -> Iterator[ComfyUIClient]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            answers.posted.append(json.loads(self.rfile.read(length)))
            self.answer()

        def answer(self) -> None:
            status, body = answers.next(self.path)
            content = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield ComfyUIClient(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
        thread.join()


def test_refused_workflow_names_node_and_reason(client: ComfyUIClient, answers: Answers) -> None:
    answers.by_path["/prompt"] = [(400, REFUSAL)]
    expected = r"node 2 \(CourierLoadDiffusionModel\): Value not in list: unet_name: 'gone'"
    with pytest.raises(PromptError, match=expected) as caught:
        client.queue(PROMPT)
    assert caught.value.detail == REFUSAL


def test_refusal_in_another_shape_is_still_told() -> None:
    assert "no reason given" in refusal_text({}, PROMPT)
    assert "plain words" in refusal_text("plain words", PROMPT)
    assert "only text" in refusal_text({"error": "only text"}, PROMPT)


def test_other_refusals_keep_status_and_body(client: ComfyUIClient, answers: Answers) -> None:
    answers.by_path["/prompt"] = [(403, {"why": "origin"})]
    with pytest.raises(HttpError, match="POST /prompt answered 403") as caught:
        client.queue(PROMPT)
    assert (caught.value.status, caught.value.body) == (403, {"why": "origin"})


def test_too_many_changes_are_asked_again(client: ComfyUIClient, answers: Answers) -> None:
    answers.by_path["/x"] = [(429, {"error": "later"}), (200, {"ok": True})]
    assert client.request("/x", {"a": 1}) == {"ok": True}
    assert answers.posted == [{"a": 1}] * 2
    client.timeout_seconds = 0.5
    answers.by_path["/x"] = [(429, {"error": "later"})]
    with pytest.raises(HttpError, match="answered 429"):
        client.request("/x", {"a": 1})


def test_failed_node_is_named_with_its_error(client: ComfyUIClient, answers: Answers) -> None:
    answers.by_path["/history/p"] = [(200, {}), (200, {"p": {"status": FAILED, "outputs": {}}})]
    expected = r"node 8 \(KSampler\) failed with RuntimeError: no room"
    with pytest.raises(PromptError, match=expected) as caught:
        client.follow("p")
    assert "File x" in str(caught.value)


def test_interrupted_and_unexplained_ends_are_failures() -> None:
    interrupted = {"messages": [["execution_interrupted", {"node_id": "8"}]]}
    assert failure_text(interrupted) == "the workflow was interrupted in node 8"
    assert "status 'error' and no error message" in failure_text({"status_str": "error"})


def test_finished_workflow_gives_outputs(client: ComfyUIClient, answers: Answers) -> None:
    answers.by_path["/prompt"] = [(200, {"prompt_id": "p"})]
    answers.by_path["/history/p"] = [(200, {}), (200, {"p": SUCCEEDED})]
    result = client.run(PROMPT)
    assert answers.posted[0]["prompt"] == PROMPT
    assert [image["filename"] for image in result.images()] == ["a.png"]
    assert result.cached_nodes() == ["1", "4"]


def test_waiting_ends_with_time_or_with_the_caller(client: ComfyUIClient, answers: Answers) -> None:
    answers.by_path["/history/p"] = [(200, {})]
    with pytest.raises(PromptError, match="did not end within 0 s"):
        client.follow("p", timeout_seconds=0)

    def stop() -> None:
        raise PromptError("the process ended")

    with pytest.raises(PromptError, match="the process ended"):
        client.follow("p", on_poll=stop)


def test_nobody_there_is_not_up() -> None:
    assert not ComfyUIClient("http://127.0.0.1:9").is_up()


def test_result_without_pictures_has_none() -> None:
    result = PromptResult("p", {"1": {"text": ["x"]}}, 0.1)
    assert result.images() == []
    assert result.cached_nodes() == []
