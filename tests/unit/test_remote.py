"""Remote model components against a local server, through evaluate.py and by themselves."""

import json
from types import SimpleNamespace

import pytest
from PIL import Image

from models import remote as module
from models.remote import RequestFiles, batch_file, read_answers, remote, request_bodies
from prompt_fn import chat
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError, UserError
from stageline.inference.remote import Endpoint, Pace, image_url, messages_of
from tests.helpers.chat_server import ChatServer, images_of, question_of
from tests.helpers.small_run import ROOT, ForkedRun


def prompts(*texts):
    return [Rendered((Piece(text, is_user=True),), for_generation=True) for text in texts]


def ask(server, *texts, concurrency=4, images=None, **options):
    endpoint = Endpoint("tiny", base_url=server.url, **options)
    answers = remote(
        endpoint,
        None,
        images=images or [None] * len(texts),
        prompts=prompts(*texts),
        max_new_tokens=7,
        concurrency=concurrency,
    )
    return [answer for _, answer in sorted(answers, key=lambda item: item[0])]


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch):
    """The package waits half a second and more before it tries again."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)


def test_answers_belong_to_their_prompts_and_requests_overlap():
    import time

    def reply(body, seen):
        time.sleep(0.05)
        return question_of(body).upper()

    texts = [f"text {i}" for i in range(12)]
    with ChatServer(reply) as server:
        answers = ask(server, *texts, concurrency=4)
    assert [answer["text"] for answer in answers] == [text.upper() for text in texts]
    assert 1 < server.most_at_once <= 4
    assert answers[0]["usage"] == {"prompt_tokens": 10, "completion_tokens": 2}
    assert answers[0]["answered_by"] == "tiny-2026"
    body = next(body for body in server.bodies if question_of(body) == "text 3")
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (7, 0.0, 0)


@pytest.mark.parametrize("trouble", [429, 0])
def test_passing_trouble_is_tried_again(trouble):
    def reply(body, seen):
        return (trouble, {"error": {"message": "busy"}}) if seen < 2 else "fine"

    with ChatServer(reply) as server:
        (answer,) = ask(server, "a", max_retries=3)
    assert answer["text"] == "fine"
    assert len(server.bodies) == 3


def test_a_broken_answer_is_a_failure_of_its_request():
    for content in (b"<html>", {"choices": []}):
        with ChatServer(lambda body, seen, content=content: (200, content)) as server:
            (answer,) = ask(server, "a", max_retries=0)
        assert "error" in answer


def test_what_no_request_can_do_better_ends_all():
    with ChatServer(lambda body, seen: (401, {"error": {"message": "no"}})) as server:
        with pytest.raises(UserError, match="'tiny'.*OPENAI_API_KEY"):
            ask(server, *"abcdefgh", concurrency=1)
        assert len(server.bodies) < 8


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    with ChatServer(lambda body, seen: "fine") as server:
        ask(server, "a", api_key_env="MY_KEY")
    assert server.keys == ["Bearer secret"]
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UserError, match="OPENAI_API_KEY is empty"):
        Endpoint("tiny").client()


def test_requests_are_paced_evenly(monkeypatch):
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("stageline.inference.remote.time", clock)
    pace = Pace(120)
    for _ in range(3):
        pace.wait()
    now[0] += 10  # answers took long: nothing is caught up in a burst
    for _ in range(2):
        pace.wait()
    assert slept == pytest.approx([0.0, 0.5, 0.5, 0.0, 0.5])


def test_images_arrive_bit_by_bit(tmp_path):
    noise = Image.effect_noise((20, 10), 80).convert("RGB")
    noise.save(tmp_path / "a.png")
    noise.save(tmp_path / "b.jpg", quality=90)
    prompt = Rendered(
        (Piece("First "), Piece("", is_image=True), Piece(" or "), Piece("", is_image=True))
    )
    opened = [Image.open(tmp_path / name) for name in ("a.png", "b.jpg")]
    (message,) = messages_of(prompt, opened, name="row")
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["text", "image_url", "text", "image_url"]
    png, jpeg = images_of({"messages": [message]})
    assert png.tobytes() == noise.tobytes()
    assert jpeg.convert("RGB").tobytes() == Image.open(tmp_path / "b.jpg").tobytes()
    assert message["content"][3]["image_url"]["url"].startswith("data:image/jpeg;base64,")


def test_pictures_are_sent_upright_and_no_larger_than_asked(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation 6 means rotated by 90 degrees
    Image.new("RGB", (40, 10)).save(tmp_path / "a.jpg", exif=exif)
    url = image_url(Image.open(tmp_path / "a.jpg"), name="row")
    (sent,) = images_of({"messages": [{"content": [_part(url)]}]})
    assert sent.size == (10, 40)
    url = image_url(Image.open(tmp_path / "a.jpg"), name="row", max_side=20)
    (sent,) = images_of({"messages": [{"content": [_part(url)]}]})
    assert sent.size == (5, 20)


def _part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def test_tools_and_calls_are_sent():
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 7}}}
    row = {
        "tools": [tool],
        "messages": [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "seven"},
        ],
    }
    prompt = chat(row, "", for_generation=True)
    _, asked, answered = messages_of(prompt, None, name="row")
    assert asked["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 7}'}
    assert answered == {"role": "tool", "tool_call_id": "1", "content": "seven"}
    both = [prompt, *prompts("a")]
    first, second = request_bodies(Endpoint("tiny"), both, [None, None], max_new_tokens=1)
    assert first["tools"] == [tool] and "tools" not in second


# -- files for offline batches ---------------------------------------------------------------


def write_batch(folder, *texts, answers=None, **options):
    return batch_file(
        Endpoint("tiny", input_price=1.0, output_price=2.0),
        None,
        images=[None] * len(texts),
        prompts=prompts(*texts),
        max_new_tokens=7,
        requests_path=str(folder),
        answers_path=answers,
        **options,
    )


def offline(folder, path):
    """Return the answers of a batch API, in another order."""
    rows = []
    for file in RequestFiles(folder).paths():
        for line in file.read_text().splitlines():
            request = json.loads(line)
            assert (request["method"], request["url"]) == ("POST", "/v1/chat/completions")
            text = question_of(request["body"]).upper()
            body = {
                "model": "tiny",
                "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 3, "completion_tokens": 1},
            }
            response = {"status_code": 200, "body": body}
            rows.append({"custom_id": request["custom_id"], "response": response, "error": None})
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))


def test_a_batch_goes_out_and_comes_back(tmp_path):
    assert write_batch(tmp_path / "out", "a", "b", "c") == [None] * 3
    write_batch(tmp_path / "out", "b", "d")  # b is there already
    assert len(RequestFiles(tmp_path / "out").written) == 4
    offline(tmp_path / "out", tmp_path / "back.jsonl")
    found = write_batch(tmp_path / "out", "d", "a", "new", answers=str(tmp_path / "back.jsonl"))
    assert [answer and answer["text"] for answer in found] == ["D", "A", None]
    assert found[0]["cost"] == pytest.approx((3 * 1 + 1 * 2) / 1e6)
    other = write_batch(tmp_path / "x", "a", answers=str(tmp_path / "back.jsonl"), temperature=1.0)
    assert other == [None]  # another temperature is another question


def test_request_files_are_cut_by_number_and_size(tmp_path, monkeypatch):
    bodies = [{"model": "m", "messages": [{"role": "user", "content": str(i)}]} for i in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(module, "MAX_BYTES", 1)
        RequestFiles(tmp_path / "b").add(bodies)
    assert len(RequestFiles(tmp_path / "b").paths()) == 5
    monkeypatch.setattr(module, "MAX_REQUESTS", 2)
    RequestFiles(tmp_path / "a").add(bodies)
    lengths = [len(p.read_text().splitlines()) for p in RequestFiles(tmp_path / "a").paths()]
    assert lengths == [2, 2, 1]
    torn = RequestFiles(tmp_path / "a").paths()[-1]
    torn.write_bytes(torn.read_bytes()[:-9])
    again = RequestFiles(tmp_path / "a")
    again.add(bodies)
    keys = [json.loads(x)["custom_id"] for p in again.paths() for x in p.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 5


def test_answers_that_are_none(tmp_path):
    with pytest.raises(UserError, match="no answers at"):
        read_answers(tmp_path / "nowhere.jsonl")
    path = tmp_path / "back.jsonl"
    path.write_text('{"custom_id": "x", "response": {"status_code": 200, "body": {}}}\n')
    with pytest.raises(DataError, match="back.jsonl:1: .*KeyError"):
        read_answers(path)
    path.write_text('{"custom_id": "x", "response": {"status_code": 400, "body": {"m": "no"}}}\n')
    assert "no" in read_answers(path)["x"]["error"]


# -- through evaluate.py ---------------------------------------------------------------------


def evaluate(tmp_path, *options):
    words = [
        ROOT / "evaluate.py", "--dataset", "jsonl", "--dataset-path", tmp_path / "rows.jsonl",
        "--prompt", "chat", "--prompt-fn", "chat", "--image-token", "auto", "--metric",
        "exact_match", "--builder", "remote", "--output-dir", tmp_path / "out", *options,
    ]  # fmt: skip
    return ForkedRun(list(map(str, words)), ranks=1).wait()


def make_rows(tmp_path):
    Image.new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / "a.png")
    rows = [{"id": str(i), "question": f"{i}?", "answer": "YES"} for i in range(6)]
    rows[2] |= {"image": "a.png", "question": "see?"}
    rows[3] = {"id": "3", "messages": [{"role": "user", "content": "3?"}], "answer": "YES"}
    rows[3]["messages"].append({"role": "assistant", "content": "YES"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_an_evaluation_goes_on_where_answers_are_missing(tmp_path):
    make_rows(tmp_path)
    prices = ("--builder.input_price", "2", "--builder.output_price", "4")

    def run(server, *options):
        url = ("--builder.name", "tiny", "--builder.base_url", server.url)
        return evaluate(tmp_path, *url, "--model", "remote", *prices, *options)

    def fails(body, seen):
        return (400, {"error": {"message": "not now"}}) if "4?" in question_of(body) else "yes"

    with ChatServer(fails) as server:
        first = run(server, "--dataset.test_size", "1.0")
        assert first.code == 10, first.out + first.err
        assert "1 of 6 samples got no answer, such as 4:" in first.err
        assert "not now" in first.err
        assert len(server.bodies) == 6
        seen = next(body for body in server.bodies if "see?" in question_of(body))
        assert images_of(seen)[0].size == (8, 8)
        assert not (tmp_path / "out" / "report.json").exists()
        server.reply = lambda body, seen: "no"
        second = run(server, "--dataset.test_size", "1.0", "--model.concurrency", "2")
        assert second.code == 0, second.out + second.err
        assert [question_of(body) for body in server.bodies[6:]] == ["4?"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["score"] == pytest.approx(5 / 6)
    usage = {"num_answers": 6, "prompt_tokens": 60, "completion_tokens": 12, "num_priced": 6}
    assert report["usage"] == usage | {"cost": pytest.approx((60 * 2 + 12 * 4) / 1e6)}
    assert "OPENAI" not in (tmp_path / "out" / "predictions.jsonl").read_text()


def test_the_engine_api_is_the_remote_model(tmp_path):
    make_rows(tmp_path)
    words = [
        ROOT / "evaluate.py", "--engine", "api", "--dataset", "jsonl", "--dataset-path",
        tmp_path / "rows.jsonl", "--dataset.test_size", "1.0", "--prompt", "chat", "--prompt-fn",
        "chat", "--image-token", "auto", "--metric", "exact_match", "--output-dir",
        tmp_path / "out", "--builder.name", "tiny",
    ]  # fmt: skip
    with ChatServer(lambda body, seen: "yes") as server:
        url = ("--builder.base_url", server.url)
        done = ForkedRun(list(map(str, [*words, *url])), ranks=1).wait()
        assert done.code == 0, done.out + done.err
    facts = json.loads((tmp_path / "out" / "report.json").read_text())["engine"]
    assert facts["engine"] == "api" and facts["device_map"] == {"": server.url}


def test_an_offline_batch_through_evaluate(tmp_path):
    make_rows(tmp_path)
    options = ("--builder.name", "tiny", "--model", "batch_file", "--dataset.test_size", "1.0")
    folder = tmp_path / "requests"
    first = evaluate(tmp_path, *options, "--model.requests_path", folder)
    assert first.code == 0, first.out + first.err
    assert "6 of 6 samples wait for their answers" in first.out
    offline(folder, tmp_path / "back.jsonl")
    answers = ("--model.answers_path", tmp_path / "back.jsonl")
    second = evaluate(tmp_path, *options, "--model.requests_path", folder, *answers)
    assert second.code == 0, second.out + second.err
    assert json.loads((tmp_path / "out" / "report.json").read_text())["num_samples"] == 6
