"""Serve an index with the command line of `deploy/Dockerfile` and API keys as `deploy/compose.yaml`
gives them, ask what its health check asks, and stop it as a container is stopped.

python3 .ci/image.py PATH_OF_RETRIEVAL INDEX
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

HEALTH = "http://127.0.0.1:8001"
program, index = sys.argv[1:]
text = (Path(__file__).parents[1] / "deploy" / "Dockerfile").read_text(encoding="utf-8")
command = json.loads(re.findall(r"^CMD (\[.*\])$", text, re.M)[0])
check = json.loads(re.findall(r"^ +CMD (\[.*\])$", text, re.M)[0])
folder = tempfile.TemporaryDirectory()
keys = Path(folder.name) / "keys"
subprocess.run(
    [program, "keys", "add", "check", "--output", str(keys)], check=True, stdout=subprocess.DEVNULL
)
process = subprocess.Popen(
    [program, "serve", *[index if word == "/index" else word for word in command]],
    env={**os.environ, "RETRIEVAL_KEYS": str(keys)},
)
try:
    for _ in range(300):
        try:
            urlopen(f"{HEALTH}/readyz").close()
            break
        except URLError:
            assert process.poll() is None, "it left before it was ready"
            time.sleep(0.2)
    subprocess.run([sys.executable, *check[1:]], check=True)
    with urlopen(f"{HEALTH}/metrics") as answer:
        figures = answer.read().decode()
    assert "retrieval_index_items " in figures and "retrieval_stage_seconds_bucket" in figures
    process.send_signal(signal.SIGTERM)
    code = process.wait(15)
    assert code == 0, f"it left with exit code {code}"
finally:
    process.kill()
    process.wait()
    folder.cleanup()
print("served, asked and stopped as in the image")
