"""MAX's server returns one choice for `n=3`. First: max serve --model-path MODEL --devices cpu --port 8000"""

import json
import sys
from urllib.request import Request, urlopen

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
with urlopen(f"{url}/models") as answer:
    model = json.load(answer)["data"][0]["id"]
asked = {"model": model, "max_tokens": 4, "temperature": 0, "n": 3}
for path, prompt in (
    ("completions", {"prompt": "puvo gora fino kahu"}),
    ("chat/completions", {"messages": [{"role": "user", "content": "puvo gora fino kahu"}]}),
):
    request = Request(f"{url}/{path}", json.dumps(asked | prompt).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        print(f"{path}: status {answer.status}, {len(json.load(answer)['choices'])} choice")  # 200, 1 choice; expected 3
