"""Serves a model that was exported over HTTP, with PyTorch alone.

hyperfed export RUN --client 3 --format torch-export --out model.pt2
python examples/serve.py model.pt2 8000
curl localhost:8000 --data '[[0.1, 0.2, ...]]'      # raw examples; the answer is a list of labels
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch

program = torch.export.load(sys.argv[1])
(example,), _ = program.example_inputs  # zeros of the input's type
model = program.module()


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        x = torch.tensor(json.loads(body), dtype=example.dtype)
        with torch.no_grad():
            labels = model(x).argmax(dim=1).tolist()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(labels).encode())


server = HTTPServer(("127.0.0.1", int(sys.argv[2])), Answer)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
