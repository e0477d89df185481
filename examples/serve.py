"""Serves a model that was exported over HTTP, with PyTorch alone.

hyperfed export RUN --client 3 --format torch-export --out model.pt2
python examples/serve.py model.pt2 8000
curl localhost:8000 --data '[[0.1, 0.2, ...]]'      # raw examples; the answer is a list of labels

Labels are called as the task calls them; of a regression, and of a network with fewer outputs than
there are classes, the answer has the numbers that come out.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

said = {"hyperfed": ""}
program = torch.export.load(sys.argv[1], extra_files=said)
about = json.loads(said["hyperfed"])
(example,), _ = program.example_inputs  # zeros of the input's type
model = program.module()


def examples(raw: Any) -> torch.Tensor:
    x = torch.tensor(raw)
    if x.shape[1:] != example.shape[1:] or not len(x):
        shape = ", ".join(map(str, ["examples", *example.shape[1:]]))
        raise ValueError(f"examples must have shape ({shape}), came {tuple(x.shape)}")
    taken = x.to(example.dtype)
    if not torch.isfinite(taken).all():
        raise ValueError(f"numbers must be finite as {example.dtype}, came others")
    if not example.is_floating_point() and not torch.equal(taken.double(), x.double()):
        raise ValueError(f"numbers must be whole, as {example.dtype} has them, came others")
    return taken


def answer(output: torch.Tensor) -> list[Any]:
    classes = about["classes"]
    if not classes or output.ndim < 2 or output.shape[-1] < classes:
        return output.tolist()
    labels = output[..., :classes].argmax(dim=-1)  # a network may have outputs beyond them
    return called(labels.tolist()) if about["labels"] else labels.tolist()


def called(number: Any) -> Any:
    several = isinstance(number, list)  # where there is a label for every token, lists of lists
    return [called(each) for each in number] if several else about["labels"][number]


class Answer(BaseHTTPRequestHandler):
    timeout = 10  # seconds: who sends half of a request holds up nobody but itself

    def do_POST(self) -> None:
        try:
            x = examples(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0)))))
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            return self.say(400, {"error": str(error)})
        with torch.no_grad():
            self.say(200, answer(model(x)))

    def say(self, status: int, told: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Answer)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
