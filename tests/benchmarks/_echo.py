"""A contestant that reports as many seconds as it is asked for steps, after some noise."""

import json
import sys

for line in sys.stdin:
    command, count = line.split()
    if command == "end":
        break
    sys.stdout.write(f"[noise]\n{json.dumps([{'seconds': int(count)}])}\n")
    sys.stdout.flush()
