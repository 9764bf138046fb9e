import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.release import serve
from scripts.release.serving.app import MAX_BODY_BYTES, create_app
from tests.release.conftest import END_OF_DOCUMENT


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def service(exported):
    return serve.load_service(exported, "tiny", max_batch_size=16, max_waiting=150)


@pytest.fixture(scope="module")
def url(service):
    """A running server."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(service), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://localhost:{port}"
    server.should_exit = True
    thread.join(timeout=20)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def completions(url):
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client.completions


@pytest.fixture(scope="module")
def reference(exported):
    """transformers' own greedy continuation: text → tokens."""
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)

    def continue_greedily(prompt, count):
        ids = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**ids, max_new_tokens=count, do_sample=False)
        return output[0, ids["input_ids"].shape[1] :].tolist()

    def logprobs(tokens):
        with torch.no_grad():
            scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return [scores[i, token].item() for i, token in enumerate(tokens[1:])]

    continue_greedily.tokenizer, continue_greedily.logprobs = tokenizer, logprobs
    return continue_greedily


# Megatron's PUT /api


def test_the_curl_of_megatron_works_word_for_word(url):
    port = url.rsplit(":", 1)[1]
    command = (
        f"curl 'http://localhost:{port}/api' -X 'PUT' "
        "-H 'Content-Type: application/json; charset=UTF-8' "
        """-d '{"prompts":["Hello world"], "tokens_to_generate":1}'"""
    )
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    answer = json.loads(result.stdout)
    assert answer["text"][0].startswith("Hello world")
    assert set(answer) == {"text", "tokens", "segments"}


def test_greedy_continuations_are_transformers(client, reference):
    prompts = ["def main", "import torch\n", "港口", "a longer prompt than the others, by far"]
    answer = client.put(
        "/api", json={"prompts": prompts, "tokens_to_generate": 12, "top_k": 1}
    ).json()
    for prompt, text, tokens, segments in zip(
        prompts, answer["text"], answer["tokens"], answer["segments"], strict=True
    ):
        expected = reference(prompt, 12)
        assert tokens == reference.tokenizer.encode(prompt) + expected
        decoded = reference.tokenizer.decode(expected, skip_special_tokens=True)
        assert text.rstrip("�") == (prompt + decoded).rstrip("�")
        assert len(segments) == len(tokens) and "".join(segments) == text


def test_logprobs_are_those_of_all_tokens_but_the_first(client, reference):
    body = {"prompts": ["def main", "x"], "tokens_to_generate": 5, "top_k": 1, "logprobs": True}
    answer = client.put("/api", json=body).json()
    for tokens, logprobs in zip(answer["tokens"], answer["logprobs"], strict=True):
        assert logprobs == pytest.approx(reference.logprobs(tokens), abs=1e-4)


def test_a_prompt_can_be_scored_alone(client, reference):
    body = {"prompts": ["def main(argv)"], "tokens_to_generate": 0, "logprobs": True}
    answer = client.put("/api", json=body).json()
    assert answer["text"] == ["def main(argv)"]
    assert answer["logprobs"][0] == pytest.approx(reference.logprobs(answer["tokens"][0]), abs=1e-4)


def test_a_seed_makes_samples_repeatable(client):
    body = {"prompts": ["a", "a"], "tokens_to_generate": 20, "temperature": 2.0, "random_seed": 5}
    first, second = (client.put("/api", json=body).json()["tokens"] for _ in range(2))
    assert first == second
    assert first[0] != first[1]
    assert client.put("/api", json=body | {"random_seed": 6}).json()["tokens"] != first


def test_an_empty_prompt_begins_a_document(client):
    body = {"prompts": [""], "tokens_to_generate": 3, "add_BOS": True, "top_k": 1}
    assert client.put("/api", json=body).json()["tokens"][0][0] == END_OF_DOCUMENT


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompts is required"),
        ({"prompts": []}, "prompts: "),
        ({"prompts": "Hello"}, "prompts: "),
        ({"prompts": [7]}, "prompts.0: "),
        ({"prompts": ["a"] * 129}, "prompts: "),
        ({"prompts": [""]}, "an empty prompt needs add_BOS=true"),
        ({"prompts": ["a"], "tokens_to_generate": "5"}, "tokens_to_generate: "),
        ({"prompts": ["a"], "tokens_to_generate": -1}, "tokens_to_generate: "),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "needs logprobs=true"),
        ({"prompts": ["a"], "tokens_to_generate": 4000}, "more than the model's context of 128"),
        ({"prompts": ["a"], "temperature": 0}, "temperature: "),
        ({"prompts": ["a"], "top_k": 2000}, "top_k: "),
        ({"prompts": ["a"], "top_k": 5, "top_p": 0.5}, "top_k and top_p"),
        ({"prompts": ["a"], "logprobs": 1}, "logprobs: "),
        ({"prompts": ["a"], "max_len": 5}, "give tokens_to_generate"),
        ({"prompts": ["a"], "beam_width": 2}, "beam search is not supported"),
        ({"prompts": ["a"], "tokens": 2}, "tokens is not an argument"),
        ([1], ""),
    ],
)
def test_bad_requests_are_explained(client, body, message):
    response = client.put("/api", json=body)
    assert response.status_code == 400
    assert isinstance(response.json(), str) and message in response.json()


def test_bodies_that_are_no_json_are_explained(client):
    headers = {"Content-Type": "application/json"}
    response = client.put("/api", content=b'{"prompts": [', headers=headers)
    assert response.status_code == 400 and "not valid JSON" in response.json()
    assert client.put("/api", content=b"prompts=a").status_code == 400
    assert client.put("/api").status_code == 400
    assert client.put("/api", content=b"\xff\xfe", headers=headers).status_code == 400
    assert client.get("/api").status_code == 405
    assert client.get("/nothing").status_code == 404


def test_bodies_that_are_too_large_are_refused(client):
    response = client.put("/api", json={"prompts": ["a" * MAX_BODY_BYTES]})
    assert response.status_code == 413


# OpenAI's API


def test_openais_client_lists_the_model(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]


def test_openais_client_gets_completions(completions, reference):
    answer = completions.create(model="tiny", prompt="def main", max_tokens=8, temperature=0)
    expected = reference("def main", 8)
    decoded = reference.tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.choices[0].text.rstrip("�") == decoded.rstrip("�")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == 8 + answer.usage.prompt_tokens


def test_a_stream_brings_the_same_text_in_pieces(completions):
    arguments = {"model": "tiny", "prompt": ["def main", "import"], "max_tokens": 9, "seed": 3}
    whole = completions.create(**arguments)
    chunks = list(
        completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    )
    assert len(chunks) > 9
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
    assert chunks[-1].usage == whole.usage


def test_tokens_as_prompts_several_choices_and_an_echo(completions, reference):
    tokens = reference.tokenizer.encode("def main")
    answer = completions.create(
        model="tiny", prompt=[tokens, tokens], n=2, max_tokens=4, echo=True, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith("def main") for choice in answer.choices)
    assert answer.usage.prompt_tokens == 2 * len(tokens)


def test_logprobs_of_prompt_and_completion(completions, reference):
    answer = completions.create(
        model="tiny", prompt="def main", max_tokens=3, temperature=0, logprobs=2, echo=True
    )
    logprobs = answer.choices[0].logprobs
    tokens = reference.tokenizer.encode("def main") + reference("def main", 3)
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(reference.logprobs(tokens), abs=1e-4)
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(tokens)
    assert all(len(top) <= 2 for top in logprobs.top_logprobs[1:])


def test_a_stop_string_ends_the_text(completions):
    arguments = {"model": "tiny", "prompt": "def main", "max_tokens": 30, "temperature": 0}
    text = completions.create(**arguments).choices[0].text
    stop = text[len(text) // 2 :][:3]
    assert stop
    choice = completions.create(**arguments, stop=[stop, "never"]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "tiny"}, 400, "prompt is required"),
        ({"model": "gpt-5", "prompt": "a"}, 404, "there is no model 'gpt-5'"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [[4096]]}, 400, "tokens outside 0 … 4095"),
        ({"prompt": "a", "max_tokens": 1000}, 400, "more than the model's context of 128"),
        ({"prompt": "a b " * 400}, 400, "more than the model's context of 128"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature: "),
        ({"prompt": "a", "frequency_penalty": 1}, 400, "frequency_penalty: "),
        ({"prompt": "a", "best_of": 3}, 400, "best_of"),
        ({"prompt": ["a"] * 100, "n": 2}, 400, "more than 128 completions"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix is not an argument"),
    ],
)
def test_openais_errors_have_their_form(client, body, status, message):
    response = client.post("/v1/completions", json=body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


# Batches, limits, stopping


def test_concurrent_requests_share_batches_and_do_not_mix(client, service, reference):
    prompts = [f"def f{number}(" for number in range(12)]

    def request(prompt):
        body = {"prompt": prompt, "max_tokens": 10, "temperature": 0}
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    with ThreadPoolExecutor(12) as threads:
        texts = list(threads.map(request, prompts))
    for prompt, text in zip(prompts, texts, strict=True):
        expected = reference.tokenizer.decode(reference(prompt, 10), skip_special_tokens=True)
        assert text.rstrip("�") == expected.rstrip("�")
    assert service.engine.largest_batch > 1


def test_more_requests_than_may_wait_are_put_off(client):
    body = {"prompts": ["a"] * 100, "tokens_to_generate": 100}
    with ThreadPoolExecutor(8) as threads:
        responses = list(threads.map(lambda _: client.put("/api", json=body), range(8)))
    statuses = {response.status_code for response in responses}
    assert statuses == {200, 503}
    refused = next(response for response in responses if response.status_code == 503)
    assert refused.headers["Retry-After"] == "1" and "waiting" in refused.json()


def test_a_client_that_leaves_does_not_hold_up_others(client):
    body = {"prompt": ["a"] * 16, "max_tokens": 120, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    assert client.get("/health").json() == {"status": "ok"}
    assert client.put("/api", json={"prompts": ["a"], "tokens_to_generate": 1}).status_code == 200


def test_sigterm_lets_a_running_request_finish(exported):
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "scripts/release/serve.py", "--export", exported, "--port", str(port)],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in server.stderr:
            if "running on" in line:
                assert f"http://127.0.0.1:{port}" in line
                break
        body = {"prompt": ["a"] * 3, "max_tokens": 100, "stream": True}
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert server.wait(timeout=30) in (0, -signal.SIGTERM)
    finally:
        server.kill()
        server.stderr.close()


def test_a_folder_that_is_no_export_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no exported model"):
        serve.main(["--export", str(tmp_path)])


# The page, in Debian's browser


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, url):
    page = browser.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(url)
    yield page
    assert not problems
    page.close()


def test_the_page_continues_a_prompt(page, reference):
    assert page.locator("h1").inner_text() == "tiny"
    page.fill("#prompt", "def main")
    page.fill("#max_tokens", "12")
    page.click("#go")
    page.get_by_text("12 tokens in").wait_for()
    expected = reference.tokenizer.decode(reference("def main", 12), skip_special_tokens=True)
    shown = page.locator("#answer").inner_text()
    assert shown.rstrip("�").split() == ("def main" + expected).rstrip("�").split()


def test_the_page_says_what_is_wrong(page):
    page.fill("#max_tokens", "5000")
    page.click("#go")
    page.get_by_text("more than the model's context of 128").wait_for()
    assert page.locator("#status").get_attribute("class") == "error"


def test_the_page_can_stop(page):
    page.fill("#prompt", "a")
    page.fill("#max_tokens", "120")
    page.route("**/v1/completions", lambda route: None)  # an answer that never comes
    page.click("#go")
    page.click("#stop")
    page.get_by_text("stopped").wait_for()
    assert page.locator("#go").is_enabled()
