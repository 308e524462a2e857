"""An OpenAI-compatible server over kvref's own engine, which can misbehave in one selected way."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvref.canary import BLANK, BOS, EOS, FIRST_WORD, Canary
from kvref.canary.hybrid import HybridOracle
from kvref.engine import Engine
from kvref_canary.files import vocabulary

MODEL = "tiny-canary"
BLOCK = 16
LATER = 9  # requests of the first contact; misbehavior starts after them


class Fake:
    """canary: the loaded canary. wrong: the name of the misbehavior. asked: the bodies of all requests."""

    def __init__(self, canary, wrong=""):
        self.canary, self.wrong = canary, wrong
        self.engine, self.lock = Engine(canary) if isinstance(canary, Canary) else None, threading.Lock()
        self.asked, self.prompts, self.cut_off = [], [], 0
        self.several = 0  # requests for several answers that are in flight
        self.ended = threading.Event()

    @property
    def judged(self):
        """Whether the requests of the first contact are over."""
        return len(self.prompts) > LATER

    def tokens(self, body):
        """Return the tokens of a request's prompt, begin-of-text first."""
        said = body.get("prompt")
        if "messages" in body:
            said = body["messages"][0]["content"]
        if isinstance(said, list):
            return said
        found = vocabulary.to_tokens(self.canary, said)
        return found if self.wrong == "adds no begin-of-text" else [BOS, *found]

    def say(self, prompt, count):
        with self.lock:
            self.prompts.append(prompt)
            if self.engine is None:
                return self._say_as_hybrid(prompt, count)
            seen = self._as_seen(prompt)
            session = self.engine.open()
            try:
                self.engine.extend(session, seen)
                said = self.engine.generate(session, count)
            finally:
                self.engine.close(session)
            wrong = {"a wrong token": self.judged, "long prompts": len(prompt) in (16, 17, *range(19, 50))}
            if wrong.get(self.wrong):
                said[-1] = FIRST_WORD + (said[-1] - FIRST_WORD + 1) % self.canary.words
            return said

    def _say_as_hybrid(self, prompt, count):
        """Generate as a hybrid canary does. A token that its oracle does not predict is the blank."""
        oracle = HybridOracle(self.canary.architecture)
        said = oracle.extend(prompt)[-1:]
        if self.wrong == "a stale matrix" and self.judged and len(prompt) > 5:
            stale = oracle.upto(len(prompt) - 5).matrix
            oracle.matrix.cells, oracle.matrix.totals = stale.cells, stale.totals
        while len(said) < count:
            said[-1] = BLANK if said[-1] is None else said[-1]
            said += oracle.extend(said[-1:])
        return [BLANK if token is None else token for token in said]

    def _as_seen(self, prompt):
        """Return the tokens that the engine reads in place of the prompt."""
        if self.wrong == "another's tokens" and self.judged and len(self.prompts[-2]) >= len(prompt):
            return self.prompts[-2][: len(prompt)]
        if self.wrong == "prefix cache" and self.judged:
            for before in self.prompts[:-1]:
                pairs = zip(before, prompt, strict=False)
                shared = next((at for at, (old, new) in enumerate(pairs) if old != new), 0) // BLOCK * BLOCK
                if shared and len(prompt) > shared + BLOCK and len(before) > shared + BLOCK:
                    return [*before[: shared + BLOCK], *prompt[shared + BLOCK :]]
        return prompt


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fake/1", ""

    @property
    def fake(self):
        return self.server.fake

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.fake.wrong == "no models":
            return self.answer({"error": {"message": "no such path"}}, 404)
        names = [MODEL, "other"] if self.fake.wrong == "two models" else [MODEL]
        return self.answer({"object": "list", "data": [{"id": name} for name in names]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        several = body.get("n", 1) > 1
        self.fake.several += several
        try:
            self.reply(body)
        finally:
            self.fake.several -= several

    def reply(self, body):
        fake, wrong = self.fake, self.fake.wrong
        fake.asked.append(body)
        later = len(fake.asked) > LATER
        whole = later and not body.get("stream")
        if self.path not in ("/v1/chat/completions", "/v1/completions" if wrong != "chat only" else ""):
            return self.answer({"error": {"message": "no such path"}}, 404)
        if wrong in ("ids not taken", "adds no begin-of-text", "text not answered") and isinstance(body.get("prompt"), list):
            return self.answer({"detail": "prompt: expected a string"}, 422)
        if wrong == "unknown parameters" and "skip_special_tokens" in body:
            return self.answer({"error": {"message": "unknown parameter"}}, 400)
        if wrong == "no n" and body.get("n", 1) > 1:
            return self.answer({"error": {"message": "n: expected 1"}}, 400)
        if wrong == "n when warm" and body.get("n", 1) > 1 and not body["temperature"]:
            return self.answer({"error": {"message": "n: expected 1 at temperature 0"}}, 400)
        if wrong == "short context" and len(fake.tokens(body)) > fake.canary.context // 2:
            return self.answer({"error": {"message": "this model's maximum context length is 40 tokens"}}, 400)
        if wrong == "503" and later:
            return self.answer({"error": {"message": "over\nloaded"}}, 503)
        if wrong == "429" and len(fake.asked) % 3 == 0:
            return self.answer({"error": {"message": "slow down"}}, 429, {"Retry-After": "0.01"})
        if wrong == "429 always" and later:
            return self.answer({"error": {"message": "slow down"}}, 429, {"Retry-After": "0.01"})
        if wrong == "redirect" and later:
            return self.answer({}, 307, {"Location": f"http://{socket.gethostname()}.invalid/v1/completions"})
        if wrong == "dies" and later:
            threading.Thread(target=self.server.shutdown).start()
            self.server.socket.close()
            return self.close_now()
        if wrong == "text not answered":
            return self.close_now()
        if wrong == "slow" and later:
            fake.ended.wait(20)
        if wrong == "not JSON" and whole:
            return self.send(b"<html>Bad gateway</html>", "text/html")
        if wrong == "deep JSON" and whole:
            return self.send(b"[" * 100_000, "application/json")
        if wrong == "huge" and whole:
            return self.send(b'{"choices": [{"text": "' + b"babababa " * 500_000 + b'"}]}', "application/json")
        if wrong == "hostile text" and whole:
            return self.complete(body, ["\x1b[2J\u202e<|im_end|>" * 50])
        if wrong == "an empty list" and whole:
            return self.answer({"choices": []})
        if wrong == "an index without end" and whole:
            return self.send(b'{"choices": [{"index": 1e999, "text": "x"}]}', "application/json")
        if wrong == "a phrase" and whole:
            self.send_response(500, "\x1b[31mred\x1b]0;t\x07")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if wrong == "no choices" and whole:
            return self.answer({"choices": [None], "usage": []})
        prompt = fake.tokens(body)
        count = min(body["max_tokens"], fake.canary.context - (wrong == "stops before the end") - len(prompt))
        if wrong == "stops early" and later:
            count //= 2
        said = fake.say(prompt, count)
        if wrong == "a sampler beside several answers" and fake.several:
            words = fake.canary.words
            said = [FIRST_WORD + (token + at) % words if at % 3 == 1 else token for at, token in enumerate(said)]
        if wrong == "an end token" and later:
            said = [*said[:-1], EOS]
        if wrong == "merges words":
            said = [token + 1 for token in said]
        shown = said if body.get("skip_special_tokens", True) is False else [token for token in said if token != EOS]
        texts = [self.text(shown)] * (1 if wrong == "n ignored" else body.get("n", 1))
        return (self.stream if body.get("stream") else self.complete)(body, texts, len(prompt), said)

    def text(self, said):
        joined = vocabulary.to_text(self.fake.canary, said)
        return {"no spaces": joined.replace(" ", ""), "leading space": f" {joined}"}.get(self.fake.wrong, joined)

    def complete(self, body, texts, prompt_tokens=0, said=()):
        chat = "messages" in body
        end = "length"
        choices = [
            {"index": number, "finish_reason": end} | ({"message": {"content": text}} if chat else {"text": text})
            for number, text in enumerate(texts)
        ]
        counted = prompt_tokens + (self.fake.wrong == "another tokenizer") * 40
        usage = {"prompt_tokens": counted, "completion_tokens": len(said), "prompt_tokens_details": {"cached_tokens": BLOCK}}
        model = "other" if self.fake.wrong == "wrong model" and len(self.fake.asked) > LATER else MODEL
        told = {} if self.fake.wrong == "no usage" else {"usage": usage}
        self.answer({"object": "text_completion", "model": model, "choices": choices[::-1], **told})

    def stream(self, body, texts, prompt_tokens, said):
        """Stream one word per chunk, with lines split at arbitrary places."""
        wrong, later = self.fake.wrong, len(self.fake.asked) > LATER
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        parts = [f"{word} " for word in texts[0].split(" ")]
        try:
            self.wfile.write(b": a comment\r\n\r\n")
            while wrong == "drips" and later and not self.fake.ended.wait(0.05):
                self.wfile.write(b": ping\n\n")
                self.wfile.flush()
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                choice = {"delta": {"content": part}} if "messages" in body else {"text": part}
                line = json.dumps(
                    {
                        "model": MODEL,
                        "choices": [choice | {"index": 0, "finish_reason": "length" if last and wrong != "no reason" else None}],
                    }
                )
                if wrong == "half a line" and later and last:
                    line = line[: len(line) // 2]
                self.wfile.write(b"data: " + line[:20].encode())
                self.wfile.flush()
                self.wfile.write(line[20:].encode() + b"\n\n")
                if wrong == "error in a stream" and later:
                    self.wfile.write(b'data: {"error": {"message": "out of memory"}}\n\n')
                if wrong == "breaks off" and later:
                    break
            while wrong == "endless stream" and later and not self.fake.ended.is_set():
                self.wfile.write(b"data: " + line.encode() + b"\n\n")
            if wrong not in ("no DONE", "half a line", "breaks off"):
                self.wfile.write(b"event: end\ndata: [DONE]\n\n")
        except OSError:
            self.fake.cut_off += 1
        self.close_connection = True

    def answer(self, document, status=200, headers=None):
        self.send(json.dumps(document).encode(), "application/json", status, headers)

    def send(self, data, kind, status=200, headers=None):
        try:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True

    def close_now(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """Ignore errors: a client that closes the connection and a stopping server are expected."""


@contextmanager
def serving(canary, wrong=""):
    """Run the fake server; its address is `url`."""
    fake = Fake(canary, wrong)
    server = Server(("127.0.0.1", 0), Handler)
    server.fake, fake.url = fake, f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
